"""What reaches other CTAs of a cluster: stores with a barrier, addresses, the cluster's barrier.

Sources: PTX ISA 8.8, 9.7.9.12 (st.async), 9.7.13.8 (red.async), 9.7.9.23-24 (mapa, getctarank),
9.7.13.3 (barrier.cluster).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpu.ptx import spaces
from gpu.ptx.lanes import Array, Mask
from gpu.ptx.tensor_copies import TensorCopyAccess
from gpu.ptx.waiting import ClusterWait
from simkit.errors import LaunchError


class ClusterAccess(TensorCopyAccess):
    """What cluster instructions call."""

    def store_async(
        self,
        to: Array,
        to_offset: int,
        values: tuple[Array, ...],
        barrier: Array,
        barrier_offset: int,
        mask: Mask,
        site: int,
    ) -> None:
        """st.async: to a peer's shared memory, completing its bytes on a barrier there."""
        active = self._active(mask)
        if not active.any():
            return
        cta = self._ctas(active)
        size = values[0].dtype.itemsize
        total = size * len(values)
        target = self._integers(to, active, to_offset)
        objects = self._integers(barrier, active, barrier_offset)
        data = [self.array(v)[active] for v in values]
        flat = self._flat_shared(target, cta, total, site, "st.async")
        places = self._flat_shared(objects, cta, 8, site, "mbarrier")
        self._observe_store(flat, total, places, active, site, is_strong=False)

        landed = self._begin(lambda: (self._warps_of(active), total), site, is_global=False)

        def work() -> None:
            self.grid.shared.scatter(flat, size, data, None)
            if landed is not None:
                landed(np.arange(len(places)), places)
            self._change(places, 0, -total, 0, site)

        self.grid.agents.start(work)

    def _observe_store(
        self, flat: Array, size: int, objects: Array, active: Array, site: int, is_strong: bool
    ) -> None:
        """Tells the hazard detector of an asynchronous store, which is a generic access."""
        hazards = self.grid.hazards
        if hazards is not None:
            warps = self._warps_of(active)
            component, epoch = hazards.barriers.copies(objects, warps, site, is_async=False)
            hazards.agent("shared", flat[:, None], size, None, warps, component, epoch, site,
                          is_write=True, is_async=False, is_strong=is_strong)  # fmt: skip

    def reduce_async(
        self,
        to: Array,
        to_offset: int,
        function: Callable[[Array, Array], Array],
        values: Array,
        barrier: Array,
        barrier_offset: int,
        mask: Mask,
        site: int,
    ) -> None:
        """red.async: combines with a peer's shared memory, completing its bytes on a barrier."""
        active = self._active(mask)
        if not active.any():
            return
        cta = self._ctas(active)
        size = values.dtype.itemsize
        target = self._integers(to, active, to_offset)
        objects = self._integers(barrier, active, barrier_offset)
        data = values[active]
        flat = self._flat_shared(target, cta, size, site, "red.async")
        places = self._flat_shared(objects, cta, 8, site, "mbarrier")
        self._observe_store(flat, size, places, active, site, is_strong=True)

        landed = self._begin(lambda: (self._warps_of(active), size), site, is_global=False)

        def work() -> None:
            self.grid.shared.atomic(flat[None], function, data[None], None, None)
            if landed is not None:
                landed(np.arange(len(places)), places)
            self._change(places, 0, -size, 0, site)

        self.grid.agents.start(work)

    def own_shared(self, offset: int, code: str) -> Array:
        """The address of one's own shared variable, which carries the CTA's rank."""
        rank = self.cta % self.grid.cluster_size
        return ((rank << spaces.SHARED_RANK_SHIFT) + offset).astype(code)[None, :]

    def map_address(self, address: Array, rank: Array, mask: Mask, site: int) -> Array:
        address, rank = self.array(address), self.array(rank)
        beyond = (rank >= self.grid.cluster_size) & self._active(mask)
        if beyond.any():
            raise LaunchError(
                f"{self.grid.place(site)}: mapa to rank {int(rank[beyond][0])} of a cluster of"
                f" {self.grid.cluster_size}"
            )
        kind = address.dtype.type
        keep = ~kind(0xFF << spaces.SHARED_RANK_SHIFT)
        return (address & keep) | rank.astype(kind) << kind(spaces.SHARED_RANK_SHIFT)

    def rank_of(self, address: Array) -> Array:
        kind = address.dtype.type
        return (address >> kind(spaces.SHARED_RANK_SHIFT) & kind(0xFF)).astype(np.uint32)

    def cluster_arrive(self, mask: Mask, site: int) -> None:
        if self.grid.hazards is not None:
            is_relaxed, self.order = self.order == "relaxed", ""
            if not is_relaxed:
                self.grid.hazards.come_to_cluster_barrier(self._some(mask))
        if self.grid.trace is not None:
            self.grid.trace.come_to_cluster_barrier(self._some(mask), site)
        self.grid.clusters.arrive(self.warps, self._active(mask), site)

    def cluster_wait(self, mask: Mask, site: int) -> ClusterWait:
        return self.grid.clusters.wait(self.warps, self._active(mask), site)
