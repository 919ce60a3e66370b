"""Memory of the executor: one flat space of bytes per state space, with bounds, alignment and
whole-array access.

Global memory is one reserved stretch of address space; allocations are 256-byte aligned with a
guard of the same size behind each, so that an access outside every allocation is always noticed.
Shared and local memory are one array over all resident CTAs or lanes.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gpu.ptx.spaces import GLOBAL_BASE
from simkit.errors import CapacityError

Array = np.ndarray

# 16-byte elements are moved as complex128: the widest type that NumPy's take and put copy in one
# go.
WHOLE = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
_ALIGNMENT = 256
# Swizzle patterns repeat every 1024 bytes: with owners that far apart, offsets in the whole memory
# swizzle like offsets in the owner's own.
_BANK_ALIGNMENT = 1024
_POISON = 0xFF  # NaN in every floating format, -1 in every integer one


class Bytes:
    """A flat array of bytes that is read and written by arrays of offsets."""

    def __init__(self, data: Array) -> None:
        self.data = data
        usable = len(data) // 16 * 16
        self.views = {size: data[:usable].view(code) for size, code in WHOLE.items()}

    def gather(self, offsets: Array, size: int, count: int) -> list[Array]:
        """``count`` elements of ``size`` bytes from each offset (aligned to size * count, or
        16).
        """
        total = size * count
        if total == 32:
            half = count // 2
            return self.gather(offsets, size, half) + self.gather(offsets + 16, size, half)
        whole = self.views[total].take(offsets >> _SHIFT[total])
        if count == 1:
            return [whole]
        parts = whole.view(f"u{size}").reshape(*whole.shape, count)
        return [parts[..., k] for k in range(count)]

    def scatter(
        self, offsets: Array, size: int, values: Sequence[Array], mask: Array | None
    ) -> None:
        """Writes one element per value to consecutive places from each offset, in the active
        lanes.
        """
        count = len(values)
        total = size * count
        if total == 32:
            half = count // 2
            self.scatter(offsets, size, values[:half], mask)
            self.scatter(offsets + 16, size, values[half:], mask)
            return
        if count == 1:
            whole = values[0]
            if whole.shape != offsets.shape:
                whole = np.broadcast_to(whole, offsets.shape)
        else:
            parts = np.empty((*offsets.shape, count), f"u{size}")
            for k, value in enumerate(values):
                parts[..., k] = value
            whole = parts.view(WHOLE[total])[..., 0]
        index = offsets >> _SHIFT[total]
        if mask is not None:
            index, whole = index[mask], whole[mask]
        self.views[total][index] = whole

    def atomic(
        self,
        offsets: Array,
        function: Callable[[Array, Array], Array],
        values: Array,
        compare: Array | None,
        mask: Array | None,
    ) -> Array:
        """Read-modify-write, one lane after the other (by warp, then lane) where addresses meet;
        the old values.
        """
        dtype = values.dtype
        old = np.zeros(offsets.shape[::-1], dtype)
        order_of_lanes = (offsets >> _SHIFT[dtype.itemsize]).T
        flat = order_of_lanes.reshape(-1)
        operand = np.ascontiguousarray(values.T).reshape(-1)
        expected = None if compare is None else np.ascontiguousarray(compare.T).reshape(-1)
        results = old.reshape(-1)
        chosen = np.arange(flat.size) if mask is None else np.flatnonzero(mask.T)
        view = self.views[dtype.itemsize].view(dtype)
        order = chosen[np.argsort(flat[chosen], kind="stable")]
        index = flat[order]
        starts = np.flatnonzero(np.concatenate(([True], index[1:] != index[:-1])))
        sizes = np.diff(np.concatenate((starts, [len(index)])))
        if function is np.add and dtype.kind in "ui" and compare is None:
            # Integer sums need no order: running totals give every lane the value it would have
            # seen.
            addend = operand[order]
            totals = np.cumsum(addend, dtype=dtype)
            before = totals - addend
            before -= np.repeat(before[starts], sizes)
            results[order] = np.repeat(view[index[starts]], sizes) + before
            ends = starts + sizes - 1
            view[index[starts]] += before[ends] + addend[ends]
        else:
            rank = np.arange(len(index)) - np.repeat(starts, sizes)
            for turn in range(int(sizes.max(initial=0))):
                lanes = order[rank == turn]
                place = flat[lanes]
                current = view[place]
                new = function(current, operand[lanes])
                if expected is not None:
                    new = np.where(current == expected[lanes], new, current)
                view[place] = new
                results[lanes] = current
        return np.ascontiguousarray(old.T)


_SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}


@dataclass(slots=True)
class Allocation:
    """A named stretch of global memory: offsets [start, end) from GLOBAL_BASE.

    ``written``: which bytes hold something, for hazard detection; None if all do, or nobody kept
    account.
    """

    name: str
    start: int
    end: int
    written: Array | None = None

    @property
    def address(self) -> int:
        return GLOBAL_BASE + self.start


class GlobalMemory:
    """The device's memory.  ``capacity`` bytes of address space are reserved; pages cost memory
    when touched.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # Work that launches on this device have done: what %globaltimer goes on from.
        self.elapsed = 0
        self._map = mmap.mmap(
            -1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        )
        self.bytes = Bytes(np.frombuffer(self._map, np.uint8))
        self.allocations: list[Allocation] = []
        self._starts: list[int] = []
        self._end = _ALIGNMENT
        self._free: dict[int, list[int]] = {}
        # By start: end and name of arrays that were freed and whose place nobody has taken.
        self._freed: dict[int, tuple[int, str]] = {}
        self._last: Allocation | None = None

    def allocate(self, size: int, name: str) -> Allocation:
        """CapacityError when the device's memory is used up."""
        room = -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT
        reusable = self._free.get(room)
        if reusable:
            start = reusable.pop()
        else:
            start = self._end
            if start + room > self.capacity:
                raise CapacityError(
                    f"{name}: {size} bytes do not fit in device memory,"
                    f" {self.capacity - start} of {self.capacity} are left"
                )
            self._end += room
        self._freed.pop(start, None)
        allocation = Allocation(name, start, start + size)
        place = bisect.bisect(self._starts, start)
        self._starts.insert(place, start)
        self.allocations.insert(place, allocation)
        return allocation

    def free(self, allocation: Allocation) -> None:
        place = bisect.bisect_left(self._starts, allocation.start)
        del self._starts[place], self.allocations[place]
        size = allocation.end - allocation.start
        room = -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT
        self._free.setdefault(room, []).append(allocation.start)
        self._freed[allocation.start] = allocation.end, allocation.name
        self._last = None

    def find(self, low: int, high: int) -> Allocation | None:
        """The allocation that holds the offsets [low, high), if one does."""
        last = self._last
        if last is not None and last.start <= low and high <= last.end:
            return last
        place = bisect.bisect_right(self._starts, low) - 1
        if place >= 0:
            found = self.allocations[place]
            if found.start <= low and high <= found.end:
                self._last = found
                return found
        return None

    def owners(self, offsets: Array, size: int) -> Array:
        """For each access, the index of the allocation that holds it, or -1."""
        if not self.allocations:
            return np.full(offsets.shape, -1)
        starts = np.array(self._starts, np.int64)
        ends = np.array([a.end for a in self.allocations], np.int64)
        place = np.searchsorted(starts, offsets, side="right") - 1
        inside = (place >= 0) & (offsets + size <= ends[place])
        return np.where(inside, place, -1)

    def nearest(self, offset: int) -> str:
        """Where a stray offset lies, for an error message."""
        for start, (end, name) in self._freed.items():
            if start <= offset < end:
                return f"byte {offset - start} of {name!r}, which has been freed"
        place = bisect.bisect_right(self._starts, offset) - 1
        if place < 0:
            return "before the first allocation"
        found = self.allocations[place]
        size = found.end - found.start
        return f"{offset - found.end} bytes past the end of {found.name!r} ({size} bytes)"


_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def banked(count: int, size: int) -> tuple[Bytes, int]:
    """Memory for ``count`` owners of ``size`` bytes each, filled with poison, and the distance
    between owners.
    """
    stride = -(-max(size, 1) // _BANK_ALIGNMENT) * _BANK_ALIGNMENT
    return Bytes(np.full(count * stride, _POISON, np.uint8)), stride
