"""Where the warps of a cluster, or of a warpgroup, meet.  Source: PTX ISA 8.8, 9.7.13.4, 9.7.15."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpu.ptx.waiting import ClusterWait, WarpgroupWait
from simkit.errors import LaunchError

if TYPE_CHECKING:
    from gpu.ptx.grid import Grid

Array = np.ndarray

_NOT_ARRIVED = -1


class ClusterBarriers:
    """The barrier of every resident cluster: threads that have arrived, and how many phases are
    over.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        count = grid.ctas // grid.cluster_size
        self.arrived = np.zeros(count, np.int64)
        self.phase = np.zeros(count, np.int64)
        # The phase a thread has arrived in and not waited for yet.
        self.pending = np.full((32, grid.warps), _NOT_ARRIVED, np.int64)

    def arrive(self, warps: Array, active: Array, site: int) -> None:
        """The active lanes of some warps (32, warps) arrive."""
        pending = self.pending[:, warps]
        if ((pending != _NOT_ARRIVED) & active).any():
            raise LaunchError(
                f"{self.grid.place(site)}: barrier.cluster.arrive again before barrier.cluster.wait"
            )
        self.grid.effects += 1
        clusters = self.grid.cluster_of_warp[warps]
        self.pending[:, warps] = np.where(active, self.phase[clusters], pending)
        np.add.at(self.arrived, clusters, active.sum(axis=0))
        self.release(np.unique(clusters))

    def wait(self, warps: Array, active: Array, site: int) -> ClusterWait:
        """The active lanes wait for the end of the phase that they arrived in."""
        pending = self.pending[:, warps]
        if ((pending == _NOT_ARRIVED) & active).any():
            raise LaunchError(
                f"{self.grid.place(site)}: barrier.cluster.wait without barrier.cluster.arrive"
            )
        self.pending[:, warps] = np.where(active, _NOT_ARRIVED, pending)
        return ClusterWait(np.where(active, pending, _NOT_ARRIVED), site)

    def release(self, clusters: Array) -> None:
        """Ends the phase of clusters whose living threads have all arrived."""
        living = np.array([self.grid.living_in_cluster(int(c)) for c in clusters])
        over = clusters[(self.arrived[clusters] > 0) & (self.arrived[clusters] >= living)]
        if len(over):
            self.arrived[over] = 0
            self.phase[over] += 1
            self.grid.changed = True
            if self.grid.hazards is not None:
                self.grid.hazards.end_cluster_barrier(over)
            if self.grid.trace is not None:
                self.grid.trace.end_cluster_barrier(over)


class Assembly:
    """Where the warps of a warpgroup meet: a phase ends when all that are alive have come."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        per_cta = -(-grid.warps_per_cta // 4)
        warp = np.arange(grid.warps)
        inner = warp % grid.warps_per_cta // 4
        self.group_of_warp = grid.cta_of_warp * per_cta + inner
        self.arrived = np.zeros(grid.ctas * per_cta, np.int64)
        self.phase = np.zeros(grid.ctas * per_cta, np.int64)

    def arrive(self, warps: Array, site: int) -> WarpgroupWait | None:
        """Counts these warps in; None if they are complete by themselves, as they usually are."""
        groups = self.group_of_warp[warps]
        if not self.arrived.any() and len(warps) % 4 == 0:
            fours = groups.reshape(-1, 4)
            if (fours == fours[:, :1]).all() and self.grid.warps_per_cta % 4 == 0:
                return None
        phase = self.phase[groups].copy()
        np.add.at(self.arrived, groups, 1)
        living = np.bincount(
            self.group_of_warp[self.grid.live.any(axis=0)], minlength=len(self.arrived)
        )
        over = np.unique(groups[self.arrived[groups] >= living[groups]])
        if len(over):
            self.arrived[over] = 0
            self.phase[over] += 1
            self.grid.changed = True
        return WarpgroupWait(phase, site)
