"""Asynchronous copies of a set of warps by cp.async, and their mbarriers.

Sources: PTX ISA 8.8, 9.7.9.25.3 (cp.async), 9.7.13.15 (mbarrier).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from gpu.ptx import mbarrier, spaces
from gpu.ptx.access import MemoryAccess
from gpu.ptx.hazards import clocks
from gpu.ptx.lanes import Array, Mask
from gpu.ptx.memory import WHOLE
from gpu.ptx.traffic import TrafficCounter
from gpu.ptx.waiting import MbarrierWait
from simkit.errors import LaunchError, MemoryAccessError

# Told of the rows of some copies that have been done, and of the mbarriers that they signal.
Landed = Callable[[Array, Array | None], None]


class AsyncAccess(MemoryAccess):
    """What cp.async and mbarrier instructions call."""

    def _integers(self, values: Array, active: Array, offset: int = 0) -> Array:
        """``values + offset`` of the active lanes, int64: addresses, sizes, coordinates."""
        return self.array(values)[active].astype(np.int64) + offset

    def _active(self, mask: Mask) -> Array:
        """The active lanes; without a mask that is all of them."""
        return np.ones(self.shape, bool) if mask is None else mask

    def _warps_of(self, active: Array) -> Array:
        """The warp of each active lane."""
        return np.broadcast_to(self.warps, self.shape)[active]

    def _ctas(self, active: Array) -> Array:
        """The CTA of each active lane."""
        return np.broadcast_to(self.cta, self.shape)[active]

    def _begin(
        self, copies: Callable[[], tuple[Array, Array | int]], site: int, kind: str = "load",
        is_global: bool = True,
    ) -> Landed | None:  # fmt: skip
        """Tells the trace, if there is one, of copies that begin: the warp of each and its bytes.
        Of their ends it is told by the result.
        """
        trace = self.grid.trace
        if trace is None:
            return None
        warps, moved = copies()
        spans = trace.copy(warps, np.broadcast_to(moved, warps.shape), site, kind, is_global)
        return lambda rows, objects: trace.land(spans, rows.tolist(), site, objects)

    # cp.async

    def source_size(self, taken: Array, size: int) -> Array:
        return np.where(self.array(taken), np.uint32(size), np.uint32(0))

    def copy_async(
        self,
        to: Array,
        to_offset: int,
        origin: Array,
        origin_offset: int,
        size: int,
        taken: Array | None,
        mask: Mask,
        site: int,
    ) -> None:
        """cp.async: now, or at the wait, as the grid's schedule has it."""
        if mask is not None and not mask.any():
            return
        to, origin = np.array(to), np.array(origin)
        taken = None if taken is None else np.array(taken)
        mask = None if mask is None else np.array(mask)
        if self.grid.hazards is not None:
            self._observe_copy(to, to_offset, origin, origin_offset, size, taken, mask, site)

        def perform(which: Array | None) -> None:
            active = mask
            if which is not None:
                active = np.broadcast_to(which, self.shape) if mask is None else mask & which
            self._copy(to, to_offset, origin, origin_offset, size, taken, active, site)
            if trace is not None:
                chosen = slice(None) if which is None else which
                trace.group_done(groups[chosen], self.warps[chosen])

        trace = self.grid.trace
        if trace is not None:
            groups = self.grid.copies.committed[self.warps]
            counts = np.minimum(self.array(taken), size) if taken is not None else size
            moved = np.where(self._active(mask), counts, 0).sum(axis=0)
            trace.copy_group(groups, self.warps, moved, site)
        self.grid.copies.issue(self.warps, perform)

    def _observe_copy(
        self, to: Array, to_offset: int, origin: Array, origin_offset: int, size: int,
        taken: Array | None, mask: Mask, site: int,
    ) -> None:  # fmt: skip
        """Tells the hazard detector of a cp.async, at its issue; it counts as generic."""
        hazards = self.grid.hazards
        assert hazards is not None
        valid = self._active(mask)
        source = self.array(origin).astype(np.int64) + (origin_offset - spaces.GLOBAL_BASE)
        target = self.array(to).astype(np.int64) + to_offset
        if self.grid.cluster_size > 1:
            target = target & spaces.SHARED_OFFSET_MASK
        target = target + self.shared_base
        for space, offsets, chosen, is_write in (
            ("global", source, valid if taken is None else valid & (taken >= size), False),
            ("shared", target, valid, True),
        ):
            hazards.group(
                space, offsets.T, size, chosen.T, self.warps, clocks.COPIES, site, is_write,
                is_async=False,
            )  # fmt: skip

    def _copy(
        self,
        to: Array,
        to_offset: int,
        origin: Array,
        origin_offset: int,
        size: int,
        taken: Array | None,
        mask: Mask,
        site: int,
    ) -> None:
        reading = mask
        if taken is not None and mask is not None:
            taken = np.where(mask, taken, np.uint32(0))  # whatever idle lanes hold
        if taken is not None and not (taken >= size).all():
            if ((taken != 0) & (taken < size)).any():
                self._copy_partly(to, to_offset, origin, origin_offset, size, taken, mask, site)
                return
            reading = taken >= size if mask is None else (taken >= size) & mask
        elif mask is None and self._copy_alike(to, to_offset, origin, origin_offset, size, site):
            return
        values = self.load("global", origin, origin_offset, size, 1, reading, site, is_own=False)
        if reading is not mask:
            assert reading is not None
            values = [np.where(reading, v, np.zeros((), v.dtype)) for v in values]
        self.store("shared", to, to_offset, size, values, mask, site, is_own=False)

    def _copy_alike(
        self, to: Array, to_offset: int, origin: Array, origin_offset: int, size: int, site: int
    ) -> bool:
        """Every CTA copies the same to the same place, as it is with what all of them read: fetched
        and counted once.  False, and nothing is done, where CTAs differ or something is wrong.
        """
        grid, sharing = self.grid, self.warps_of_a_cta
        if sharing == 1 or grid.cluster_size > 1:
            return False
        target, source = (a.reshape(32, -1, sharing) for a in (to, origin))
        if not (target == target[:, :1]).all() or not (source == source[:, :1]).all():
            return False
        offsets = source[:, 0].astype(np.int64) + (origin_offset - spaces.GLOBAL_BASE)
        bits = int(np.bitwise_or.reduce(offsets, axis=None))
        allocation = grid.memory.find(int(offsets.min()), int(offsets.max()) + size)
        if allocation is None or bits & (size - 1):
            return False
        ctas = target.shape[1]
        if not grid.counters.repeated_access(allocation, offsets, size, ctas, "read"):
            return False
        values = grid.memory.bytes.gather(offsets, size, 1)[0]
        grid.effects += 1
        places = target[:, 0].astype(np.int64) + to_offset
        self._check(places, size, grid.shared_bytes, None, site, "shared", "write")
        grid.counters.shared_alike(places, size, ctas, site)
        everywhere = places[..., None] + self.shared_base[::sharing]
        grid.shared.scatter(everywhere, size, [values[..., None]], None)
        return True

    def _copy_partly(
        self,
        to: Array,
        to_offset: int,
        origin: Array,
        origin_offset: int,
        size: int,
        taken: Array,
        mask: Mask,
        site: int,
    ) -> None:
        """Source sizes that end inside the copy: zeros behind them. Read byte by byte, because the
        allocation may end there, too, but counted as the one access that it is.
        """
        parts = np.zeros((*self.shape, size), np.uint8)
        counters = self.grid.counters
        beyond_first = TrafficCounter()
        try:
            for k in range(size):
                reading = taken > k if mask is None else (taken > k) & mask
                value = self.load(
                    "global", origin, origin_offset + k, 1, 1, reading, site, is_own=False
                )[0]
                parts[..., k] = np.where(reading, value, np.uint8(0))
                # An aligned copy lies in one sector, which the first byte has counted.
                self.grid.counters = beyond_first
        finally:
            self.grid.counters = counters
        for key, (requested, _) in beyond_first.tensors.items():
            counters.tensors[key][0] += requested
        for place, (requested, _) in beyond_first.bytes_by_site.items():
            counters.bytes_by_site[place][0] += requested
        whole = parts.view(WHOLE[size])[..., 0]
        self.store("shared", to, to_offset, size, [whole], mask, site, is_own=False)

    def commit_copies(self, mask: Mask) -> None:
        warps = self._some(mask)
        self.grid.copies.commit(warps)
        if self.grid.hazards is not None:
            self.grid.hazards.clocks.commit(clocks.COPIES, warps)

    def wait_copies(self, allowed: int, mask: Mask, site: int) -> None:
        warps = self._some(mask)
        if self.grid.trace is not None:
            self.grid.trace.moment(site)
        self.grid.copies.wait(warps, allowed)
        if self.grid.trace is not None:
            self.grid.trace.groups_seen(self.grid.copies.committed[warps] - allowed, warps)
        if self.grid.hazards is not None:
            if allowed < 0:
                # Copies that no group holds yet are waited for too.
                self.grid.hazards.clocks.commit(clocks.COPIES, warps)
            self.grid.hazards.clocks.complete(clocks.COPIES, warps, max(allowed, 0))

    def arrive_after_copies(
        self, space: str, base: Array, offset: int, counts: bool, mask: Mask, site: int
    ) -> None:
        """cp.async.mbarrier.arrive: an arrival once the thread's copies so far have landed.

        Without ``.noinc`` (``counts``) the object expects this arrival on top of its own.
        """
        objects, active = self._objects(space, base, offset, mask, site, must_own=True)
        ones = np.ones(len(objects), np.int64)
        if counts:
            self._change(objects, -ones, 0, 0, site)
        warps = self._some(mask)
        landed = self.grid.copies.so_far(warps)
        if self.grid.hazards is not None:
            self.grid.hazards.arrive_after_copies(objects, self._warps_of(active))

        def arrive() -> None:
            landed()
            if self.grid.trace is not None:
                self.grid.trace.arrive(objects, self._warps_of(active), site)
            self._change(objects, ones, 0, 0, site)

        self.grid.agents.start(arrive)

    # mbarrier

    def _objects(
        self, space: str, base: Array, offset: int, mask: Mask, site: int, must_own: bool = False
    ) -> tuple[Array, Array]:
        """Flat offsets in shared memory of the objects of the active lanes, and those lanes.

        ``must_own``: they have to lie in the lane's own CTA.
        """
        active = np.ones(self.shape, bool) if mask is None else mask
        addresses = self.array(base).astype(np.int64) + offset
        if space == "generic":
            addresses = addresses - spaces.SHARED_WINDOW
        chosen = addresses[active]
        cta = self._ctas(active)
        objects = self._flat_shared(chosen, cta, 8, site, "mbarrier")
        if must_own:
            away = objects // self.grid.shared_stride != cta
            if away.any():
                self._barrier_error(
                    int(objects[away][0]), "may only be signalled from another CTA", site
                )
        return objects, active

    def _flat_shared(self, addresses: Array, cta: Array, size: int, site: int, what: str) -> Array:
        """Flat offsets of shared::cluster addresses seen from some CTAs, checked."""
        grid = self.grid
        rank, local = addresses >> spaces.SHARED_RANK_SHIFT, addresses & spaces.SHARED_OFFSET_MASK
        wrong = (local + size > grid.shared_bytes) | (rank < 0) | (rank >= grid.cluster_size)
        if wrong.any():
            self._stray(int(addresses[wrong][0]), f"{what} of {size} bytes", site)
        alignment = min(size & -size, 16)
        if (local & (alignment - 1)).any():
            bad = int(addresses[(local & (alignment - 1)) != 0][0])
            self._stray(bad, f"{what}: not a multiple of {alignment}", site)
        return grid.cta_in_cluster(cta, rank) * grid.shared_stride + local

    def _stray(self, address: int, what: str, site: int) -> NoReturn:
        raise MemoryAccessError(
            f"{what} at shared address 0x{address & 0xFFFFFFFF:x}, a CTA has"
            f" {self.grid.shared_bytes} bytes, {self.grid.place(site)}"
        )

    def _change(
        self,
        objects: Array,
        arrivals: Array | int,
        tx: Array | int,
        drops: Array | int,
        site: int,
        may_complete: bool = True,
    ) -> Array:
        """Applies arrivals and transactions to objects (flat offsets); each one's word before."""
        memory = self.grid.shared.views[8]
        unique, inverse = np.unique(objects, return_inverse=True)
        words = self._words(unique, site)

        def total(values: Array | int) -> Array:
            spread = np.broadcast_to(np.asarray(values, np.int64), objects.shape)
            sums = np.zeros(len(unique), np.int64)
            np.add.at(sums, inverse, spread)
            return sums

        new, flipped = mbarrier.update(
            words,
            total(arrivals),
            total(tx),
            total(drops),
            lambda index, why: self._barrier_error(int(unique[index]), why, site),
        )
        if flipped.any():
            if self.grid.hazards is not None:
                self.grid.hazards.barriers.complete(unique[flipped])
            if self.grid.trace is not None:
                self.grid.trace.complete(unique[flipped], site)
            if not may_complete:
                bad = int(unique[flipped][0])
                self._barrier_error(bad, "completes its phase although .noComplete", site)
            self.grid.changed = True
        memory[unique >> 3] = new
        self.grid.effects += 1
        return words[inverse]

    def _words(self, objects: Array, site: int) -> Array:
        """The contents of objects, which have to be initialised."""
        words: Array = self.grid.shared.views[8][objects >> 3]
        invalid = ~mbarrier.are_valid(words)
        if invalid.any():
            self._barrier_error(int(objects[invalid][0]), "is used", site)
        return words

    def _barrier_error(self, place: int, why: str, site: int) -> NoReturn:
        owner, offset = divmod(place, self.grid.shared_stride)
        word = int(self.grid.shared.views[8][place >> 3])
        raise LaunchError(
            f"{self.grid.place(site)}: mbarrier at shared offset {offset} of"
            f" {self.grid.cta_name(owner)} {why} ({mbarrier.describe(word)})"
        )

    def mbarrier_init(
        self, space: str, base: Array, offset: int, count: Array, mask: Mask, site: int
    ) -> None:
        objects, active = self._objects(space, base, offset, mask, site, must_own=True)
        counts = self._integers(count, active)
        if ((counts < 1) | (counts > mbarrier.COUNT_LIMIT)).any():
            raise LaunchError(
                f"{self.grid.place(site)}: an mbarrier for {int(counts.max())} arrivals; it can be"
                f" for 1 to {mbarrier.COUNT_LIMIT}"
            )
        self.grid.shared.views[8][objects >> 3] = mbarrier.initial(counts)
        self.grid.effects += 1
        if self.grid.hazards is not None:
            self.grid.hazards.initialise(objects, self._warps_of(active), site)

    def mbarrier_invalidate(
        self, space: str, base: Array, offset: int, mask: Mask, site: int
    ) -> None:
        objects, _ = self._objects(space, base, offset, mask, site, must_own=True)
        self._words(objects, site)
        self.grid.shared.views[8][objects >> 3] = np.uint64(mbarrier.INVALID)

    def mbarrier_change(
        self,
        space: str,
        base: Array,
        offset: int,
        arrivals: Array | int,
        expected: Array | int,
        completed: Array | int,
        drops: bool,
        may_complete: bool,
        mask: Mask,
        site: int,
    ) -> Array:
        """arrive, arrive_drop, expect_tx, complete_tx and their combinations; the state before."""
        states = np.zeros(self.shape, np.uint64)
        if mask is not None and not mask.any():
            return states
        objects, active = self._objects(space, base, offset, mask, site)

        def of_active(value: Array | int) -> Array:
            if isinstance(value, int):
                return np.full(len(objects), value, np.int64)
            return self._integers(value, active)

        count = of_active(arrivals)
        for what, values, least in (
            ("arrivals", count, min(1, arrivals) if isinstance(arrivals, int) else 1),
            ("bytes", of_active(expected) + of_active(completed), 0),
        ):
            if ((values < least) | (values > mbarrier.COUNT_LIMIT)).any():
                raise LaunchError(
                    f"{self.grid.place(site)}: {int(values.max())} {what} at an mbarrier; possible"
                    f" are {least} to {mbarrier.COUNT_LIMIT}"
                )
        tx = of_active(expected) - of_active(completed)
        if self.grid.hazards is not None:
            releases, self.order = self.order != "relaxed", ""
            self.grid.hazards.arrive(objects, self._warps_of(active), count, site, releases)
        if self.grid.trace is not None and count.any():
            self.grid.trace.arrive(objects, self._warps_of(active), site)
        before = self._change(objects, count, tx, count if drops else 0, site, may_complete)
        states[active] = mbarrier.sequential(before, objects, count)
        return states

    def mbarrier_test(
        self,
        space: str,
        base: Array,
        offset: int,
        phase: Array,
        is_parity: bool,
        mask: Mask,
        site: int,
    ) -> Array:
        """test_wait: whether the phase is complete, without waiting."""
        passed = np.zeros(self.shape, bool)
        if mask is not None and not mask.any():
            return passed
        objects, active = self._objects(space, base, offset, mask, site, must_own=True)
        words = self._words(objects, site)
        passed[active] = mbarrier.parity(words) != self._awaited(phase, is_parity)[active]
        over = passed[active]
        if self.grid.hazards is not None:
            self.grid.hazards.see_phase(objects[over], self._warps_of(active)[over], site)
        if self.grid.trace is not None:
            self.grid.trace.see_phase(objects[over], self._warps_of(active)[over], site)
        if not over.all():
            self.grid.test_failed()
        return passed

    def mbarrier_wait(
        self,
        space: str,
        base: Array,
        offset: int,
        phase: Array,
        is_parity: bool,
        target: str,
        mask: Mask,
        site: int,
    ) -> MbarrierWait:
        """try_wait: the warp goes on when the phase is complete."""
        objects, active = self._objects(space, base, offset, mask, site, must_own=True)
        self._words(objects, site)
        places = np.zeros(self.shape, np.int64)
        places[active] = objects
        return MbarrierWait(places, self._awaited(phase, is_parity), active, target, site)

    def _awaited(self, phase: Array, is_parity: bool) -> Array:
        value = self.array(phase)
        return value.astype(np.int64) & 1 if is_parity else mbarrier.parity(value)

    def pending_count(self, state: Array) -> Array:
        return mbarrier.unpack(self.array(state))[0].astype(np.uint32)
