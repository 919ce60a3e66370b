"""Loads, stores and atomics of a set of warps: checked, counted, in whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np

from gpu.ptx import spaces
from gpu.ptx.lanes import Array, Lanes, Mask
from gpu.ptx.memory import WHOLE, Allocation, Bytes
from simkit.errors import LaunchError, MemoryAccessError


class MemoryAccess(Lanes):
    """What loads, stores and atomics of the generated code call."""

    def load(
        self, space: str, base: Array, offset: int, size: int, count: int, mask: Mask, site: int,
        is_own: bool = True,
    ) -> list[Array]:  # fmt: skip
        """``count`` elements of ``size`` bytes per lane; lanes outside the mask get anything.

        ``is_own``: an access of the warps, not of an agent of theirs.
        """
        if mask is not None and not mask.any():
            self.order = ""
            return [np.zeros(self.shape, WHOLE[size])] * count
        if space == "generic":
            return self._by_space(
                base, offset, mask, lambda s, b, m: self.load(s, b, offset, size, count, m, site)
            )
        memory, offsets = self._locate(space, base, offset, size * count, mask, site, "read")
        if is_own and self.grid.trace is not None:
            self._note(space, size * count, mask, site)
        if is_own and self.grid.hazards is not None:
            self._observe(space, offsets, size * count, mask, site, is_write=False)
        return memory.gather(offsets, size, count)

    def _note(self, space: str, size: int, mask: Mask, site: int) -> None:
        """Tells the trace how many bytes an access of the warps themselves moves."""
        if space == "global" and self.grid.trace is not None:
            self.grid.trace.access(self.warps, mask, size, site)

    def _observe(
        self, space: str, offsets: Array, size: int, mask: Mask, site: int, is_write: bool,
        is_atomic: bool = False, holds: Callable[[], Array] | None = None,
    ) -> Callable[[], None] | None:  # fmt: skip
        """Tells the hazard detector of an access; what is left to do once it is done."""
        order, self.order = self.order, ""
        if self.grid.hazards is not None and space in ("shared", "global"):
            if is_atomic:
                order = f"atomic {order}"
            return self.grid.hazards.access(
                space, offsets, size, mask, self.warps, site, is_write, order, holds
            )
        return None

    def store(
        self,
        space: str,
        base: Array,
        offset: int,
        size: int,
        values: Sequence[Array],
        mask: Mask,
        site: int,
        is_own: bool = True,
    ) -> None:
        """Writes one element per value to consecutive places, in the active lanes."""
        if mask is not None and not mask.any():
            self.order = ""
            return
        if space == "generic":

            def store_part(part: str, at: Array, chosen: Mask) -> list[Array]:
                self.store(part, at, offset, size, values, chosen, site)
                return []

            self._by_space(base, offset, mask, store_part)
            return
        total = size * len(values)
        self.grid.effects += 1
        memory, offsets = self._locate(space, base, offset, total, mask, site, "write")
        if is_own and self.grid.trace is not None:
            self._note(space, total, mask, site)
        if not is_own or self.grid.hazards is None or space not in ("shared", "global"):
            memory.scatter(offsets, size, values, mask)
            return

        def holds() -> Array:
            """Whether memory holds what each lane writes."""
            there = memory.gather(offsets, size, len(values))
            return np.logical_and.reduce(
                [old == new.view(old.dtype) for old, new in zip(there, values, strict=True)]
            )

        finish = self._observe(space, offsets, total, mask, site, is_write=True, holds=holds)
        memory.scatter(offsets, size, values, mask)
        if finish is not None:
            finish()

    def atomic(
        self,
        space: str,
        base: Array,
        offset: int,
        function: Callable[[Array, Array], Array],
        values: Array,
        compare: Array | None,
        mask: Mask,
        site: int,
    ) -> Array:
        """Read-modify-write of one element per lane; the old values."""
        if mask is not None and not mask.any():
            self.order = ""
            return np.zeros(self.shape, values.dtype)
        if space == "generic":
            return self._by_space(
                base,
                offset,
                mask,
                lambda s, b, m: [self.atomic(s, b, offset, function, values, compare, m, site)],
            )[0]
        size = values.dtype.itemsize
        self.grid.effects += 1
        memory, offsets = self._locate(space, base, offset, size, mask, site, "write")
        if self.grid.trace is not None:
            self._note(space, size, mask, site)
        if self.grid.hazards is not None:
            self._observe(space, offsets, size, mask, site, is_write=True, is_atomic=True)
        return memory.atomic(offsets, function, values, compare, mask)

    def aligned(
        self, space: str, base: Array, offset: int, size: int, mask: Mask, site: int
    ) -> None:
        """A vector of elements that are accessed one by one is aligned as a whole."""
        addresses = self.array(base).astype(np.int64) + offset
        bad = (addresses & (size - 1)) != 0
        if (bad if mask is None else bad & mask).any():
            self._misaligned(addresses, size, mask, site, space, "write")

    def store_zeros(
        self, space: str, base: Array, offset: int, sizes: Array, mask: Mask, site: int
    ) -> None:
        """st.bulk: zeros over as many bytes of shared memory as each thread says, 8 at a time."""
        active = np.ones(self.shape, bool) if mask is None else mask
        lengths = np.where(active, self.array(sizes).astype(np.int64), 0)
        if (lengths % 8).any() or (lengths < 0).any() or (lengths > 1 << 24).any():
            raise LaunchError(
                f"{self.grid.place(site)}: st.bulk of {int(lengths.max())} bytes; it takes a"
                f" multiple of 8 up to {1 << 24}"
            )
        zeros = np.zeros(self.shape, np.uint64)
        for place in range(0, int(lengths.max(initial=0)), 8):
            self.store(space, base, offset + place, 8, [zeros], lengths > place, site)

    def _by_space(
        self,
        base: Array,
        offset: int,
        mask: Mask,
        access: Callable[[str, Array, Mask], list[Array]],
    ) -> list[Array]:
        """A generic access as one access per state space that its addresses point into."""
        base = base.astype(np.uint64, copy=False)
        addresses = base + np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
        top = addresses >> np.uint64(32)
        result: list[Array] | None = None
        covered = np.zeros(self.shape, bool)
        for space, window in (
            ("shared", spaces.SHARED_WINDOW),
            ("local", spaces.LOCAL_WINDOW),
            ("param", spaces.PARAMETER_WINDOW),
            ("global", None),
        ):
            here = ~covered if window is None else top == np.uint64(window >> 32)
            covered |= here
            chosen = here if mask is None else here & mask
            if not chosen.any():
                continue
            whole = None if mask is None and chosen.all() else chosen
            values = access(space, base if window is None else base - np.uint64(window), whole)
            if result is None:
                result = values
            else:
                result = [
                    np.where(chosen, new, old) for new, old in zip(values, result, strict=True)
                ]
        return result or []

    def _locate(
        self, space: str, base: Array, offset: int, size: int, mask: Mask, site: int, direction: str
    ) -> tuple[Bytes, Array]:
        """The memory of a state space and each lane's byte offset in it, checked and counted."""
        grid = self.grid
        if mask is not None:
            # Idle lanes may hold any address: let them follow an active one.
            place = int(mask.argmax())
            base = np.where(mask, base, base.reshape(-1)[place])
        if space in ("global", "const"):
            offsets = base.astype(np.uint64, copy=False).view(np.int64) - (
                spaces.GLOBAL_BASE - offset
            )
            self._check_global(offsets, size, mask, site, direction, space)
            return grid.memory.bytes, offsets
        offsets = base.astype(np.int64) + offset
        if space == "shared":
            base_of_cta = self.shared_base
            if grid.cluster_size > 1:
                offsets, base_of_cta = self._of_cluster(offsets, site)
            self._check(offsets, size, grid.shared_bytes, mask, site, "shared", direction)
            grid.counters.shared(offsets, size, mask, self.warps_of_a_cta, site)
            return grid.shared, offsets + base_of_cta
        if space == "local":
            self._check(offsets, size, grid.local_bytes, mask, site, "local", direction)
            grid.counters.local(
                size * (offsets.size if mask is None else int(np.count_nonzero(mask)))
            )
            return grid.local, offsets + self._of_all(grid.local_base)
        if space == "param":
            self._check(offsets, size, len(grid.parameters), mask, site, "parameter", direction)
            return grid.parameter_memory, offsets
        raise LaunchError(f"{grid.place(site)}: no access to {space} memory")

    def _of_cluster(self, addresses: Array, site: int) -> tuple[Array, Array]:
        """Offsets in the shared memory of the CTAs that addresses name by rank, and where those
        CTAs' memory starts.
        """
        grid = self.grid
        rank = addresses >> spaces.SHARED_RANK_SHIFT
        if int(rank.max()) >= grid.cluster_size:
            raise MemoryAccessError(
                f"shared address 0x{int(addresses.max()):x} names CTA {int(rank.max())} of a"
                f" cluster of {grid.cluster_size}, {grid.place(site)}"
            )
        starts = grid.cta_in_cluster(self.cta, rank) * grid.shared_stride
        return addresses & spaces.SHARED_OFFSET_MASK, starts

    def _check(
        self,
        offsets: Array,
        size: int,
        limit: int,
        mask: Mask,
        site: int,
        space: str,
        direction: str,
    ) -> None:
        bits = int(np.bitwise_or.reduce(offsets, axis=None))
        if bits < 0 or int(offsets.max()) + size > limit:
            bad = (offsets < 0) | (offsets + size > limit)
            self._access_error(
                bad,
                mask,
                offsets,
                size,
                site,
                space,
                direction,
                f"{space} memory has {limit} bytes",
            )
        if bits & (size - 1):
            self._misaligned(offsets, size, mask, site, space, direction)

    def _check_global(
        self, offsets: Array, size: int, mask: Mask, site: int, direction: str, space: str
    ) -> None:
        memory, counters = self.grid.memory, self.grid.counters
        low, high = int(offsets.min()), int(offsets.max()) + size
        allocation = memory.find(low, high)
        if int(np.bitwise_or.reduce(offsets, axis=None)) & (size - 1):
            self._misaligned(offsets + spaces.GLOBAL_BASE, size, mask, site, space, direction)
        if allocation is not None:
            if space == "global":
                counters.global_access(
                    allocation, offsets, size, mask, direction, self.warps_of_a_cta, site
                )
            return
        owners = memory.owners(offsets, size)
        bad = owners < 0
        if bad.any() and (mask is None or (bad & mask).any()):
            chosen = bad if mask is None else bad & mask
            stray = int(offsets[chosen][0])
            self._access_error(
                chosen,
                None,
                offsets + spaces.GLOBAL_BASE,
                size,
                site,
                space,
                direction,
                memory.nearest(stray),
            )
        if space == "global":
            for owner in np.unique(owners):
                here = owners == owner if mask is None else (owners == owner) & mask
                if here.any():
                    found: Allocation = memory.allocations[int(owner)]
                    counters.global_access(found, offsets, size, here, direction, site=site)

    def _misaligned(
        self, addresses: Array, size: int, mask: Mask, site: int, space: str, direction: str
    ) -> NoReturn:
        bad = (addresses & (size - 1)) != 0
        self._access_error(
            bad, mask, addresses, size, site, space, direction, f"not a multiple of {size}"
        )

    def _access_error(
        self,
        bad: Array,
        mask: Mask,
        addresses: Array,
        size: int,
        site: int,
        space: str,
        direction: str,
        why: str,
    ) -> NoReturn:
        chosen = bad if mask is None else bad & mask
        lane, warp = (int(v[0]) for v in np.nonzero(chosen))
        address = int(addresses[lane, warp]) & 0xFFFFFFFFFFFFFFFF
        raise MemoryAccessError(
            f"{space} {direction} of {size} bytes at 0x{address:x} ({why}) by"
            f" {self.grid.thread_name(lane, int(self.warps[warp]))}, {self.grid.place(site)}"
        )
