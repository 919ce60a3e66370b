"""What a warp can wait for at the end of a block, besides a CTA's barriers, and whether it may go
on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gpu.ptx import mbarrier

if TYPE_CHECKING:
    from gpu.ptx.grid import Grid

Array = np.ndarray


class Wait(Protocol):
    """A condition of some warps, vectorised over them."""

    site: int

    def ready(self, grid: Grid, warps: Array) -> Array:
        """Which of the warps may go on (bool per warp)."""
        ...

    def of(self, chosen: Array) -> Wait:
        """The condition of a choice of its warps."""
        ...

    def finish(self, grid: Grid, warps: Array) -> None:
        """Leaves the result in the warps' registers, now that they go on."""
        ...

    def describe(self, grid: Grid, warps: Array) -> list[str]:
        """What each of the warps waits for."""
        ...


@dataclass(frozen=True, slots=True)
class MbarrierWait:
    """mbarrier.try_wait: until the phase with a parity is complete.

    ``objects`` are flat byte offsets in shared memory and ``parity`` the awaited parities, (32,
    warps); ``active`` the lanes that wait; ``target`` the predicate register that says whether the
    phase completed.
    """

    objects: Array
    parity: Array
    active: Array
    target: str
    site: int

    def ready(self, grid: Grid, warps: Array) -> Array:
        return (self._passed(grid) | ~self.active).all(axis=0)

    def _passed(self, grid: Grid) -> Array:
        words = grid.shared.views[8].take(self.objects >> 3)
        return mbarrier.parity(words) != self.parity

    def of(self, chosen: Array) -> MbarrierWait:
        return replace(
            self,
            objects=self.objects[:, chosen],
            parity=self.parity[:, chosen],
            active=self.active[:, chosen],
        )

    def finish(self, grid: Grid, warps: Array) -> None:
        """A wait that timed out leaves False in the lanes whose phase is not complete."""
        if grid.hazards is not None or grid.trace is not None:
            over = self.active & self._passed(grid)
            waiting = np.broadcast_to(warps, over.shape)
            if grid.hazards is not None:
                grid.hazards.see_phase(self.objects[over], waiting[over], self.site)
            if grid.trace is not None:
                grid.trace.see_phase(self.objects[over], waiting[over], self.site)
        register = grid.registers.get(self.target)
        if register is not None:
            register[:, warps] = np.where(self.active, self._passed(grid), register[:, warps])

    def describe(self, grid: Grid, warps: Array) -> list[str]:
        return [self._describe(grid, warp) for warp in range(len(warps))]

    def _describe(self, grid: Grid, warp: int) -> str:
        lane = int((self.active[:, warp] & ~self._passed(grid)[:, warp]).argmax())
        place = int(self.objects[lane, warp])
        word = int(grid.shared.views[8][place >> 3])
        owner, offset = divmod(place, grid.shared_stride)
        return (
            f"mbarrier at shared offset {offset} of {grid.cta_name(owner)}, awaited phase parity"
            f" {int(self.parity[lane, warp])}; it is in {mbarrier.describe(word)}"
        )


@dataclass(frozen=True, slots=True)
class ClusterWait:
    """barrier.cluster.wait: until the phase that each thread arrived in is over.

    ``phase`` (32, warps): -1 for lanes that do not wait.
    """

    phase: Array
    site: int

    def ready(self, grid: Grid, warps: Array) -> Array:
        over = grid.clusters.phase[grid.cluster_of_warp[warps]] > self.phase
        return np.asarray(over.all(axis=0))

    def of(self, chosen: Array) -> ClusterWait:
        return replace(self, phase=self.phase[:, chosen])

    def finish(self, grid: Grid, warps: Array) -> None:
        """Nothing is left in registers."""
        if grid.hazards is not None:
            grid.hazards.leave_cluster_barrier(warps)
        if grid.trace is not None:
            grid.trace.leave_cluster_barrier(warps)

    def describe(self, grid: Grid, warps: Array) -> list[str]:
        clusters = grid.cluster_of_warp[warps].tolist()
        return [
            f"cluster barrier: {int(grid.clusters.arrived[c])} of {grid.living_in_cluster(c)}"
            " threads have arrived"
            for c in clusters
        ]


@dataclass(frozen=True, slots=True)
class WarpgroupWait:
    """wgmma.fence: until all four warps of the warpgroup have come."""

    phase: Array
    site: int

    def ready(self, grid: Grid, warps: Array) -> Array:
        return grid.assembly.phase[grid.assembly.group_of_warp[warps]] > self.phase

    def of(self, chosen: Array) -> WarpgroupWait:
        return replace(self, phase=self.phase[chosen])

    def finish(self, grid: Grid, warps: Array) -> None:
        """Nothing is left in registers."""

    def describe(self, grid: Grid, warps: Array) -> list[str]:
        return ["a warpgroup whose other warps have not come to its wgmma.fence"] * len(warps)


@dataclass(frozen=True, slots=True)
class QueueWait:
    """wgmma.wait_group: what is due is done here, once the block's registers are back in place.

    ``leaders``: the first warps of the warpgroups.
    """

    leaders: Array
    allowed: int
    site: int

    def ready(self, grid: Grid, warps: Array) -> Array:
        grid.warpgroups.wait(self.leaders, self.allowed)
        return np.ones(len(warps), bool)

    def of(self, chosen: Array) -> QueueWait:
        return self

    def finish(self, grid: Grid, warps: Array) -> None:
        """The accumulators have been written."""
        if grid.trace is not None:
            grid.trace.wait_products(self.allowed, warps)

    def describe(self, grid: Grid, warps: Array) -> list[str]:
        return ["tensor-core operations"] * len(warps)


@dataclass(frozen=True, slots=True)
class GridWait:
    """griddepcontrol.wait: until the launch that this one depends on has ended."""

    site: int

    def ready(self, grid: Grid, warps: Array) -> Array:
        return np.full(len(warps), grid.primary is None or grid.primary.has_ended)

    def of(self, chosen: Array) -> GridWait:
        return self

    def finish(self, grid: Grid, warps: Array) -> None:
        """Nothing is left in registers."""
        if grid.hazards is not None:
            grid.hazards.see_primary(warps)

    def describe(self, grid: Grid, warps: Array) -> list[str]:
        return ["the launch that this one depends on"] * len(warps)
