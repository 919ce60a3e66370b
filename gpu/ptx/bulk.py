"""Bulk and tensor copies of a set of warps, stores with a barrier, and clusters.

Sources: PTX ISA 8.8, 9.7.9.25.4 (bulk copies), 9.7.9.27 (tensor copies), 9.7.13.17-18 (st.async,
red.async), 9.7.9.22-23 (mapa, getctarank).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpu.ptx import spaces, tma
from gpu.ptx.asynchrony import AsyncAccess
from gpu.ptx.lanes import Array, Mask
from gpu.ptx.waiting import ClusterWait
from gpu.tensor_map import TensorMapFields, decode
from simkit.errors import LaunchError, MemoryAccessError, SimkitError

_DESCRIPTOR_BYTES = 128
Combiner = Callable[[Array, Array], Array]


class BulkAccess(AsyncAccess):
    """What bulk, tensor and cluster instructions call."""

    # Bulk copies

    def bulk_load(
        self,
        to: Array,
        to_offset: int,
        origin: Array,
        origin_offset: int,
        size: Array,
        barrier: Array,
        barrier_offset: int,
        ctas: Array | None,
        source_space: str,
        mask: Mask,
        site: int,
    ) -> None:
        """cp.async.bulk to shared memory: of this CTA or a peer, or with ``ctas`` of many."""
        active = self._active(mask)
        if not active.any():
            return
        cta = np.broadcast_to(self.cta, self.shape)[active]
        target = self.array(to)[active].astype(np.int64) + to_offset
        objects = self.array(barrier)[active].astype(np.int64) + barrier_offset
        source = self.array(origin)[active].astype(np.int64) + origin_offset
        sizes = self.array(size)[active].astype(np.int64)
        if (sizes & 15).any() or (sizes <= 0).any():
            raise LaunchError(
                f"{self.grid.place(site)}: a bulk copy of {int(sizes.max())} bytes; it must be a"
                " positive multiple of 16"
            )
        masks = None if ctas is None else self.array(ctas)[active].astype(np.int64)
        grid = self.grid

        def work() -> None:
            for one in np.unique(sizes):
                rows = sizes == one
                pieces = np.arange(0, int(one), 16)
                if source_space == "global":
                    places = source[rows][:, None] - spaces.GLOBAL_BASE + pieces
                    data = self._bulk_read(places, 16, int(one), site)
                else:
                    flat = self._flat_shared(source[rows], cta[rows], int(one), site, "bulk copy")
                    data = grid.shared.gather(flat[:, None] + pieces, 16, 1)[0]
                for place, object_, chosen in self._destinations(
                    target[rows], objects[rows], cta[rows], None if masks is None else masks[rows],
                    int(one), site,
                ):  # fmt: skip
                    grid.shared.scatter(place[:, None] + pieces, 16, [data[chosen]], None)
                    self._change(object_, 0, -int(one), 0, site)

        grid.agents.start(work)

    def _destinations(
        self,
        target: Array,
        objects: Array,
        cta: Array,
        masks: Array | None,
        size: int,
        site: int,
    ) -> list[tuple[Array, Array, Array]]:
        """(flat destination, flat barrier object, chosen rows) of a copy, once per multicast rank.

        A multicast copy lands at the same offset in every CTA of the mask, and signals the barrier
        at the same offset there.
        """
        if masks is None:
            place = self._flat_shared(target, cta, size, site, "bulk copy")
            return [
                (place, self._flat_shared(objects, cta, 8, site, "mbarrier"), np.arange(len(cta)))
            ]
        found = []
        offset_mask = spaces.SHARED_OFFSET_MASK
        for rank in range(self.grid.cluster_size):
            chosen = np.flatnonzero(masks >> rank & 1)
            if len(chosen):
                high = rank << spaces.SHARED_RANK_SHIFT
                place = (target[chosen] & offset_mask) | high
                object_ = (objects[chosen] & offset_mask) | high
                found.append(
                    (
                        self._flat_shared(place, cta[chosen], size, site, "bulk copy"),
                        self._flat_shared(object_, cta[chosen], 8, site, "mbarrier"),
                        chosen,
                    )
                )
        if (masks >> self.grid.cluster_size).any():
            raise LaunchError(
                f"{self.grid.place(site)}: a multicast mask names CTAs outside the cluster of"
                f" {self.grid.cluster_size}"
            )
        return found

    def _bulk_read(self, places: Array, unit: int, total: int, site: int) -> Array:
        """Global data of bulk copies: (copies, pieces) elements of ``unit`` bytes, checked, counted
        as one access each.
        """
        self._check_bulk(places, unit, "read", site, None)
        return self.grid.memory.bytes.gather(places, unit, 1)[0]

    def _check_bulk(
        self, places: Array, unit: int, direction: str, site: int, valid: Array | None
    ) -> None:
        """Bounds and traffic of bulk copies: each row is one copy."""
        memory, counters = self.grid.memory, self.grid.counters
        if valid is not None and not valid.any():
            return
        known = places if valid is None else places[valid]
        low, high = int(known.min()), int(known.max()) + unit
        allocation = memory.find(low, high)
        lanes = places.T
        active = None if valid is None else valid.T
        if (known & (min(unit, 16) - 1)).any():
            address = int(known[(known & (min(unit, 16) - 1)) != 0][0]) + spaces.GLOBAL_BASE
            raise MemoryAccessError(
                f"bulk copy at global address 0x{address:x}: not a multiple of {min(unit, 16)},"
                f" {self.grid.place(site)}"
            )
        if allocation is not None:
            counters.global_access(allocation, lanes, unit, active, direction)
            return
        owners = memory.owners(places, unit)
        bad = owners < 0 if valid is None else (owners < 0) & valid
        if bad.any():
            stray = int(places[bad][0])
            raise MemoryAccessError(
                f"bulk {direction} of global memory at 0x{stray + spaces.GLOBAL_BASE:x}"
                f" ({memory.nearest(stray)}), {self.grid.place(site)}"
            )
        for owner in np.unique(owners if valid is None else owners[valid]):
            here = owners == owner if valid is None else (owners == owner) & valid
            counters.global_access(memory.allocations[int(owner)], lanes, unit, here.T, direction)

    def bulk_store(
        self,
        to: Array,
        to_offset: int,
        origin: Array,
        origin_offset: int,
        size: Array,
        combine: Callable[[Array, Array], Array] | None,
        code: str,
        mask: Mask,
        site: int,
    ) -> None:
        """cp.async.bulk from shared to global memory, or cp.reduce.async.bulk with ``combine``."""
        active = self._active(mask)
        if not active.any():
            return
        cta = np.broadcast_to(self.cta, self.shape)[active]
        target = self.array(to)[active].astype(np.int64) + to_offset
        source = self.array(origin)[active].astype(np.int64) + origin_offset
        sizes = self.array(size)[active].astype(np.int64)
        if (sizes & 15).any() or (sizes <= 0).any():
            raise LaunchError(
                f"{self.grid.place(site)}: a bulk copy of {int(sizes.max())} bytes; it must be a"
                " positive multiple of 16"
            )
        grid = self.grid
        threads = self._threads(active)

        def work(which: Array | None) -> None:
            rows_of = np.arange(len(sizes)) if which is None else np.flatnonzero(which)
            for one in np.unique(sizes[rows_of]):
                rows = rows_of[sizes[rows_of] == one]
                pieces = np.arange(0, int(one), 16)
                flat = self._flat_shared(source[rows], cta[rows], int(one), site, "bulk copy")
                data = grid.shared.gather(flat[:, None] + pieces, 16, 1)[0]
                places = target[rows][:, None] - spaces.GLOBAL_BASE + pieces
                self._check_bulk(places, 16, "write", site, None)
                self._land(places, 16, data, combine, code, None)

        grid.bulk_copies.issue(threads, work)

    def _threads(self, active: Array) -> Array:
        """Positions of the active threads among all resident ones."""
        warps = np.broadcast_to(self.warps, self.shape)[active]
        lanes = np.broadcast_to(np.arange(32)[:, None], self.shape)[active]
        return warps * 32 + lanes

    def _land(
        self,
        places: Array,
        unit: int,
        data: Array,
        combine: Callable[[Array, Array], Array] | None,
        code: str,
        valid: Array | None,
    ) -> None:
        """Writes pieces to global memory, or combines them with what is there."""
        memory = self.grid.memory.bytes
        if combine is None:
            memory.scatter(places, unit, [data], valid)
            return
        dtype = np.dtype(code)
        each = unit // dtype.itemsize
        values = np.ascontiguousarray(data).view(dtype).reshape(*places.shape, each)
        for k in range(each):
            spots = places + k * dtype.itemsize
            memory.atomic(spots, combine, np.ascontiguousarray(values[..., k]), None, valid)

    def bulk_commit(self, mask: Mask) -> None:
        self.grid.bulk_copies.commit(self._active_threads(mask))

    def bulk_wait(self, allowed: int, mask: Mask) -> None:
        self.grid.bulk_copies.wait(self._active_threads(mask), allowed)

    def _active_threads(self, mask: Mask) -> Array:
        return self._threads(self._active(mask))

    # Tensor copies

    def _maps(
        self, base: Array, offset: int, active: Array, site: int
    ) -> list[tuple[TensorMapFields, Array]]:
        """The tensor maps of the active lanes, each with the rows (among those) that use it."""
        addresses = (self.array(base).astype(np.uint64) + np.uint64(offset))[active]
        return [
            (self._map_at(int(address), site), np.flatnonzero(addresses == address))
            for address in np.unique(addresses)
        ]

    def _map_at(self, address: int, site: int) -> TensorMapFields:
        grid = self.grid
        if address >> 32 == spaces.PARAMETER_WINDOW >> 32:
            data, start = grid.parameters, address - spaces.PARAMETER_WINDOW
        elif address >> 32 == 0:
            data, start = grid.parameters, address
        else:
            data, start = grid.memory.bytes.data, address - spaces.GLOBAL_BASE
        raw = data[start : start + _DESCRIPTOR_BYTES].tobytes() if start >= 0 else b""
        if len(raw) < _DESCRIPTOR_BYTES or address & 63:
            raise MemoryAccessError(
                f"tensor map at 0x{address:x}: needs {_DESCRIPTOR_BYTES} bytes at a multiple of 64,"
                f" {grid.place(site)}"
            )
        try:
            return decode(raw)
        except SimkitError as error:
            raise LaunchError(
                f"{grid.place(site)}: no tensor map at 0x{address:x}: {error}"
            ) from error

    def tensor_load(
        self,
        to: Array,
        to_offset: int,
        base: Array,
        offset: int,
        coordinates: tuple[Array, ...],
        barrier: Array,
        barrier_offset: int,
        ctas: Array | None,
        mask: Mask,
        site: int,
    ) -> None:
        """cp.async.bulk.tensor to shared memory, tile mode."""
        active = self._active(mask)
        if not active.any():
            return
        cta = np.broadcast_to(self.cta, self.shape)[active]
        target = self.array(to)[active].astype(np.int64) + to_offset
        objects = self.array(barrier)[active].astype(np.int64) + barrier_offset
        places = np.stack([self.array(c)[active].astype(np.int64) for c in coordinates], axis=1)
        masks = None if ctas is None else self.array(ctas)[active].astype(np.int64)
        maps = self._maps(base, offset, active, site)
        grid = self.grid

        def work() -> None:
            for fields, rows in maps:
                tile = self._tile(fields, places[rows], site)
                spots = tile.global_offsets - spaces.GLOBAL_BASE
                data = self._tile_data(spots, tile.valid, tile.unit, fields, site)
                for place, object_, chosen in self._destinations(
                    target[rows], objects[rows], cta[rows],
                    None if masks is None else masks[rows], tile.shared_bytes, site,
                ):  # fmt: skip
                    self._check_tile_alignment(place, fields, site)
                    flat = place[:, None] + tile.shared_offsets
                    grid.shared.scatter(
                        self._swizzled(flat, fields.swizzle), tile.unit, [data[chosen]], None
                    )
                    self._change(object_, 0, -tile.bytes, 0, site)

        grid.agents.start(work)

    def _swizzled(self, flat: Array, mode: str) -> Array:
        # A CTA's memory starts at a multiple of the pattern, so flat offsets swizzle like
        # addresses.
        return tma.swizzle(flat, mode)

    def _check_tile_alignment(self, place: Array, fields: TensorMapFields, site: int) -> None:
        if (place % 128).any():
            bad = int(place[place % 128 != 0][0]) % self.grid.shared_stride
            raise MemoryAccessError(
                f"tensor copy at shared offset {bad}: not a multiple of 128,"
                f" {self.grid.place(site)}"
            )

    def _tile(self, fields: TensorMapFields, places: Array, site: int) -> tma.TileCopy:
        if places.shape[1] != fields.rank:
            raise LaunchError(
                f"{self.grid.place(site)}: {places.shape[1]} coordinates for a tensor map of rank"
                f" {fields.rank}"
            )
        return tma.tile_copy(fields, places)

    def _tile_data(
        self, spots: Array, valid: Array, unit: int, fields: TensorMapFields, site: int
    ) -> Array:
        inside = None if valid.all() else valid
        self._check_bulk(spots, unit, "read", site, inside)
        if inside is None:
            return self.grid.memory.bytes.gather(spots, unit, 1)[0]
        safe = np.where(valid, spots, 0)
        data = self.grid.memory.bytes.gather(safe, unit, 1)[0]
        return tma.filled(data, valid, fields)

    def tensor_store(
        self,
        base: Array,
        offset: int,
        coordinates: tuple[Array, ...],
        origin: Array,
        origin_offset: int,
        combine: Callable[[str], tuple[Combiner, str] | None] | None,
        mask: Mask,
        site: int,
    ) -> None:
        """cp.async.bulk.tensor from shared memory, or cp.reduce.async.bulk.tensor: ``combine``
        gives the function for the map's type, and the code it wants.
        """
        active = self._active(mask)
        if not active.any():
            return
        cta = np.broadcast_to(self.cta, self.shape)[active]
        source = self.array(origin)[active].astype(np.int64) + origin_offset
        places = np.stack([self.array(c)[active].astype(np.int64) for c in coordinates], axis=1)
        maps = self._maps(base, offset, active, site)
        grid = self.grid

        def work(which: Array | None) -> None:
            for fields, all_rows in maps:
                rows = all_rows if which is None else all_rows[which[all_rows]]
                if not len(rows):
                    continue
                tile = self._tile(fields, places[rows], site)
                flat = self._flat_shared(
                    source[rows], cta[rows], tile.shared_bytes, site, "tensor copy"
                )
                self._check_tile_alignment(flat, fields, site)
                inner = self._swizzled(flat[:, None] + tile.shared_offsets, fields.swizzle)
                data = grid.shared.gather(inner, tile.unit, 1)[0]
                spots = tile.global_offsets - spaces.GLOBAL_BASE
                valid = None if tile.is_whole else tile.valid
                self._check_bulk(spots, tile.unit, "write", site, valid)
                function, code = None, ""
                if combine is not None:
                    found = combine(fields.element.name)
                    if found is None:
                        raise LaunchError(
                            f"{grid.place(site)}: no such reduction of {fields.element.name}"
                        )
                    function, code = found
                self._land(spots, tile.unit, data, function, code, valid)

        grid.bulk_copies.issue(self._threads(active), work)

    # Stores with a barrier

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
        cta = np.broadcast_to(self.cta, self.shape)[active]
        size = values[0].dtype.itemsize
        total = size * len(values)
        target = self.array(to)[active].astype(np.int64) + to_offset
        objects = self.array(barrier)[active].astype(np.int64) + barrier_offset
        data = [self.array(v)[active] for v in values]
        flat = self._flat_shared(target, cta, total, site, "st.async")
        places = self._flat_shared(objects, cta, 8, site, "mbarrier")

        def work() -> None:
            self.grid.shared.scatter(flat, size, data, None)
            self._change(places, 0, -total, 0, site)

        self.grid.agents.start(work)

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
        cta = np.broadcast_to(self.cta, self.shape)[active]
        size = values.dtype.itemsize
        target = self.array(to)[active].astype(np.int64) + to_offset
        objects = self.array(barrier)[active].astype(np.int64) + barrier_offset
        data = values[active]
        flat = self._flat_shared(target, cta, size, site, "red.async")
        places = self._flat_shared(objects, cta, 8, site, "mbarrier")

        def work() -> None:
            self.grid.shared.atomic(flat[None], function, data[None], None, None)
            self._change(places, 0, -size, 0, site)

        self.grid.agents.start(work)

    # Clusters

    def own_shared(self, offset: int, code: str) -> Array:
        """The address of one's own shared variable, which carries the CTA's rank."""
        rank = self.cta % self.grid.cluster_size
        return ((rank << spaces.SHARED_RANK_SHIFT) + offset).astype(code)[None, :]

    def map_address(self, address: Array, rank: Array, site: int) -> Array:
        address, rank = self.array(address), self.array(rank)
        if int(rank.max()) >= self.grid.cluster_size:
            raise LaunchError(
                f"{self.grid.place(site)}: mapa to rank {int(rank.max())} of a cluster of"
                f" {self.grid.cluster_size}"
            )
        kind = address.dtype.type
        keep = ~kind(0xFF << spaces.SHARED_RANK_SHIFT)
        return (address & keep) | rank.astype(kind) << kind(spaces.SHARED_RANK_SHIFT)

    def rank_of(self, address: Array) -> Array:
        kind = address.dtype.type
        return (address >> kind(spaces.SHARED_RANK_SHIFT) & kind(0xFF)).astype(np.uint32)

    def cluster_arrive(self, mask: Mask, site: int) -> None:
        self.grid.clusters.arrive(self.warps, self._active(mask), site)

    def cluster_wait(self, mask: Mask, site: int) -> ClusterWait:
        return self.grid.clusters.wait(self.warps, self._active(mask), site)

    def _active(self, mask: Mask) -> Array:
        """The active lanes; without a mask that is all of them."""
        return np.ones(self.shape, bool) if mask is None else mask
