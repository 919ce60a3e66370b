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

    def finish(self, grid: Grid, warps: Array, succeeded: bool) -> None:
        """Leaves the result in the warps' registers, now that they go on."""
        ...

    def describe(self, grid: Grid, warps: Array) -> str:
        """What the first of the warps waits for."""
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
        words = grid.shared.views[8].take(self.objects >> 3)
        passed = mbarrier.parity(words) != self.parity
        return (passed | ~self.active).all(axis=0)

    def of(self, chosen: Array) -> MbarrierWait:
        return replace(
            self,
            objects=self.objects[:, chosen],
            parity=self.parity[:, chosen],
            active=self.active[:, chosen],
        )

    def finish(self, grid: Grid, warps: Array, succeeded: bool) -> None:
        register = grid.registers.get(self.target)
        if register is not None:
            register[:, warps] = np.where(self.active, succeeded, register[:, warps])

    def describe(self, grid: Grid, warps: Array) -> str:
        lane = int(self.active[:, 0].argmax())
        place = int(self.objects[lane, 0])
        word = int(grid.shared.views[8][place >> 3])
        owner, offset = divmod(place, grid.shared_stride)
        return (
            f"mbarrier at shared offset {offset} of {grid.cta_name(owner)}, awaited parity"
            f" {int(self.parity[lane, 0])}: {mbarrier.describe(word)}"
        )


@dataclass(frozen=True, slots=True)
class ClusterWait:
    """barrier.cluster.wait: until the phase that each warp arrived in is over."""

    phase: Array
    site: int

    def ready(self, grid: Grid, warps: Array) -> Array:
        return grid.clusters.phase[grid.cluster_of_warp[warps]] > self.phase

    def of(self, chosen: Array) -> ClusterWait:
        return replace(self, phase=self.phase[chosen])

    def finish(self, grid: Grid, warps: Array, succeeded: bool) -> None:
        """Nothing is left in registers."""

    def describe(self, grid: Grid, warps: Array) -> str:
        cluster = int(grid.cluster_of_warp[warps[0]])
        arrived, living = int(grid.clusters.arrived[cluster]), grid.living_in_cluster(cluster)
        return f"cluster barrier: {32 * arrived} of {32 * living} threads have arrived"


@dataclass(frozen=True, slots=True)
class WarpgroupWait:
    """wgmma.fence: until all four warps of the warpgroup have come."""

    phase: Array
    site: int

    def ready(self, grid: Grid, warps: Array) -> Array:
        return grid.assembly.phase[grid.assembly.group_of_warp[warps]] > self.phase

    def of(self, chosen: Array) -> WarpgroupWait:
        return replace(self, phase=self.phase[chosen])

    def finish(self, grid: Grid, warps: Array, succeeded: bool) -> None:
        """Nothing is left in registers."""

    def describe(self, grid: Grid, warps: Array) -> str:
        return "a warpgroup whose other warps have not come to its wgmma.fence"


@dataclass(frozen=True, slots=True)
class QueueWait:
    """wgmma.wait_group: what is due is done here, once the block's registers are back in place."""

    warps: Array
    allowed: int
    site: int

    def ready(self, grid: Grid, warps: Array) -> Array:
        grid.warpgroups.wait(self.warps, self.allowed)
        return np.ones(len(warps), bool)

    def of(self, chosen: Array) -> QueueWait:
        return self

    def finish(self, grid: Grid, warps: Array, succeeded: bool) -> None:
        """The accumulators have been written."""

    def describe(self, grid: Grid, warps: Array) -> str:
        return "tensor-core operations"


@dataclass(frozen=True, slots=True)
class GridWait:
    """griddepcontrol.wait: until the launch that this one depends on has ended."""

    site: int

    def ready(self, grid: Grid, warps: Array) -> Array:
        return np.full(len(warps), grid.primary is None or grid.primary.has_ended)

    def of(self, chosen: Array) -> GridWait:
        return self

    def finish(self, grid: Grid, warps: Array, succeeded: bool) -> None:
        """Nothing is left in registers."""

    def describe(self, grid: Grid, warps: Array) -> str:
        return "the launch that this one depends on"
