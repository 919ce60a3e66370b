"""Bulk copies of a set of warps: stretches of bytes between global and shared memory.

Source: PTX ISA 8.8, 9.7.9.25.4 (cp.async.bulk, cp.reduce.async.bulk).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpu.ptx import spaces
from gpu.ptx.asynchrony import AsyncAccess
from gpu.ptx.hazards import clocks
from gpu.ptx.lanes import Array, Mask
from gpu.ptx.memory import Bytes
from simkit.errors import LaunchError, MemoryAccessError

# How memory and new data combine, and the dtype code of their elements; None: data replaces.
Combination = tuple[Callable[[Array, Array], Array], str] | None

_PIECE = 16


class BulkAccess(AsyncAccess):
    """What bulk copies call; tensor copies share most of it."""

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
        combination: Combination,
        source_space: str,
        target_space: str,
        mask: Mask,
        site: int,
    ) -> None:
        """cp.async.bulk to shared memory: of this CTA or a peer, or with ``ctas`` of many;
        cp.reduce.async.bulk with a combination.
        """
        active = self._active(mask)
        if not active.any():
            return
        cta = self._ctas(active)
        target = self._integers(to, active, to_offset)
        objects = self._integers(barrier, active, barrier_offset)
        source = self._integers(origin, active, origin_offset)
        sizes = self._sizes(size, active, site)
        masks = None if ctas is None else self._integers(ctas, active)
        self._check_owner(target, cta, source_space, target_space, site)
        if self.grid.hazards is not None:
            for one in np.unique(sizes):
                rows = sizes == one
                pieces = np.arange(0, int(one), _PIECE)
                if source_space == "global":
                    origin_of = source[rows] - spaces.GLOBAL_BASE
                else:
                    origin_of = self._flat_shared(source[rows], cta[rows], int(one), site, "copy")
                self._observe_loads(
                    "global" if source_space == "global" else "shared",
                    origin_of[:, None] + pieces, None,
                    self._destinations(
                        target[rows], objects[rows], cta[rows],
                        None if masks is None else masks[rows], int(one), site,
                    ),
                    lambda place: place[:, None] + pieces,  # noqa: B023  (called at once)
                    _PIECE, self._warps_of(active)[rows], site, combination is not None,
                )  # fmt: skip

        landed = self._begin(
            lambda: (self._warps_of(active), sizes), site, is_global=source_space == "global"
        )

        def work() -> None:
            for one in np.unique(sizes):
                rows = sizes == one
                pieces = np.arange(0, int(one), _PIECE)
                if source_space == "global":
                    places = source[rows][:, None] - spaces.GLOBAL_BASE + pieces
                    self._check_bulk(places, _PIECE, "read", site, None)
                    data = self.grid.memory.bytes.gather(places, _PIECE, 1)[0]
                else:
                    flat = self._flat_shared(source[rows], cta[rows], int(one), site, "bulk copy")
                    data = self.grid.shared.gather(flat[:, None] + pieces, _PIECE, 1)[0]
                for place, object_, chosen in self._destinations(
                    target[rows], objects[rows], cta[rows], None if masks is None else masks[rows],
                    int(one), site,
                ):  # fmt: skip
                    spots = place[:, None] + pieces
                    self._land(self.grid.shared, spots, _PIECE, data[chosen], combination, None)
                    if landed is not None:
                        landed(np.flatnonzero(rows)[chosen], object_)
                    self._change(object_, 0, -int(one), 0, site)

        self.grid.agents.start(work)

    def _observe_loads(
        self, space: str, sources: Array, valid: Array | None,
        destinations: list[tuple[Array, Array, Array | slice]], spots: Callable[[Array], Array],
        unit: int, warps: Array, site: int, is_strong: bool = False,
    ) -> None:  # fmt: skip
        """Tells the hazard detector of copies to shared memory, one for each row, at their issue:
        ``spots`` gives where the pieces of a destination lie.
        """
        hazards = self.grid.hazards
        assert hazards is not None
        for place, objects, chosen in destinations:
            some = warps[chosen]
            component, epoch = hazards.barriers.copies(objects, some, site)
            inside = None if valid is None else valid[chosen]
            hazards.agent(
                space, sources[chosen], unit, inside, some, component, epoch, site, is_write=False
            )
            hazards.agent(
                "shared", spots(place), unit, None, some, component, epoch, site, is_write=True,
                is_strong=is_strong,
            )  # fmt: skip

    def _sizes(self, size: Array, active: Array, site: int) -> Array:
        sizes = self._integers(size, active)
        wrong = (sizes % _PIECE != 0) | (sizes <= 0)
        if wrong.any():
            raise LaunchError(
                f"{self.grid.place(site)}: a bulk copy of {int(sizes[wrong][0])} bytes; it must be"
                f" a positive multiple of {_PIECE}"
            )
        return sizes

    def _check_owner(
        self, target: Array, cta: Array, source_space: str, target_space: str, site: int
    ) -> None:
        """A copy to .shared::cta stays in the CTA; one out of shared memory goes to another."""
        owner = self.grid.cta_in_cluster(cta, target >> spaces.SHARED_RANK_SHIFT)
        if target_space == "shared::cta" and (owner != cta).any():
            raise LaunchError(
                f"{self.grid.place(site)}: a copy to .shared::cta names the memory of another CTA"
            )
        if source_space != "global" and (owner == cta).any():
            raise LaunchError(
                f"{self.grid.place(site)}: a copy from shared memory to .shared::cluster names the"
                " memory of its own CTA"
            )

    def _destinations(
        self,
        target: Array,
        objects: Array,
        cta: Array,
        masks: Array | None,
        size: int,
        site: int,
    ) -> list[tuple[Array, Array, Array | slice]]:
        """(flat destination, flat barrier object, chosen rows) of a copy, once per multicast rank.

        A multicast copy lands at the same offset in every CTA of the mask, and signals the barrier
        at the same offset there.
        """
        if masks is None:
            place = self._flat_shared(target, cta, size, site, "bulk copy")
            return [(place, self._flat_shared(objects, cta, 8, site, "mbarrier"), slice(None))]
        found: list[tuple[Array, Array, Array | slice]] = []
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
        combination: Combination,
        mask: Mask,
        site: int,
    ) -> None:
        """cp.async.bulk from shared to global memory; cp.reduce.async.bulk with a combination."""
        active = self._active(mask)
        if not active.any():
            return
        cta = self._ctas(active)
        target = self._integers(to, active, to_offset) - spaces.GLOBAL_BASE
        source = self._integers(origin, active, origin_offset)
        sizes = self._sizes(size, active, site)
        threads = self._threads(active)
        for one in np.unique(sizes):
            rows = sizes == one
            pieces = np.arange(0, int(one), _PIECE)
            flat = self._flat_shared(source[rows], cta[rows], int(one), site, "bulk copy")
            self._store_later(
                threads[rows], flat[:, None] + pieces, target[rows][:, None] + pieces, _PIECE,
                combination, None, site,
            )  # fmt: skip

    def _store_later(
        self,
        threads: Array,
        sources: Array,
        places: Array,
        unit: int,
        combination: Combination,
        valid: Array | None,
        site: int,
    ) -> None:
        """Pieces from shared to global memory, a row for each thread, whenever the schedule has it.

        After wait_group.read the data has been read, not necessarily written.
        """
        kept: dict[int, Array] = {}
        if self.grid.hazards is not None:
            owners = threads // 32
            self.grid.hazards.group(
                "shared", sources, unit, valid, owners, clocks.BULK_READS, site, is_write=False
            )
            self.grid.hazards.group(
                "global", places, unit, valid, owners, clocks.BULK_WRITES, site, is_write=True,
                is_strong=combination is not None,
            )  # fmt: skip

        def copies() -> tuple[Array, Array | int]:
            pieces = places.shape[1] if valid is None else valid.sum(axis=1)
            return threads // 32, pieces * unit

        landed = self._begin(copies, site, "store")

        def read(which: Array) -> Array:
            return self.grid.shared.gather(sources[which], unit, 1)[0]

        def write(rows: Array, data: Array) -> None:
            inside = None if valid is None else valid[rows]
            self._check_bulk(places[rows], unit, "write", site, inside)
            self._land(self.grid.memory.bytes, places[rows], unit, data, combination, inside)

        def perform(which: Array | None) -> None:
            rows = np.arange(len(places)) if which is None else np.flatnonzero(which)
            unread = np.array([r for r in rows.tolist() if r not in kept], np.int64)
            for row in rows[~np.isin(rows, unread)].tolist():
                write(np.array([row]), kept.pop(row)[None])
            if len(unread):
                write(unread, read(unread))
            if landed is not None:
                landed(rows, None)

        def fetch(which: Array | None) -> None:
            rows = np.arange(len(places)) if which is None else np.flatnonzero(which)
            kept.update(zip(rows.tolist(), read(rows), strict=True))

        self.grid.bulk_copies.issue(threads, perform, fetch)

    def _threads(self, active: Array) -> Array:
        """Positions of the active threads among all resident ones."""
        warps = np.broadcast_to(self.warps, self.shape)[active]
        lanes = np.broadcast_to(np.arange(32)[:, None], self.shape)[active]
        return warps * 32 + lanes

    def _land(
        self,
        memory: Bytes,
        places: Array,
        unit: int,
        data: Array,
        combination: Combination,
        valid: Array | None,
    ) -> None:
        """Writes pieces, or combines them with what is there."""
        self.grid.effects += 1
        if combination is None:
            memory.scatter(places, unit, [data], valid)
            return
        combine, code = combination
        dtype = np.dtype(code)
        each = unit // dtype.itemsize
        values = np.ascontiguousarray(data).view(dtype).reshape(*places.shape, each)
        for k in range(each):
            spots = places + k * dtype.itemsize
            memory.atomic(spots, combine, np.ascontiguousarray(values[..., k]), None, valid)

    def bulk_commit(self, mask: Mask) -> None:
        self.grid.bulk_copies.commit(self._threads(self._active(mask)))
        if self.grid.hazards is not None:
            for kind in (clocks.BULK_READS, clocks.BULK_WRITES):
                self.grid.hazards.clocks.commit(kind, self._some(mask))

    def bulk_wait(self, allowed: int, only_reads: bool, mask: Mask, site: int) -> None:
        if self.grid.trace is not None:
            self.grid.trace.moment(site)
        self.grid.bulk_copies.wait(self._threads(self._active(mask)), allowed, only_reads)
        if self.grid.hazards is not None:
            for kind in (clocks.BULK_READS, *(() if only_reads else (clocks.BULK_WRITES,))):
                self.grid.hazards.clocks.complete(kind, self._some(mask), max(allowed, 0))
