"""Who touched which bytes last, in granules as small as the smallest access so far."""

from __future__ import annotations

import numpy as np

Array = np.ndarray

_LARGEST = 16


class Shadow:
    """Events of a stretch of memory: the last write of every granule, and the last read of every
    granule by each of some readers (slots).
    """

    def __init__(self, size: int) -> None:
        self.granule = _LARGEST
        count = -(-size // self.granule)
        self.writes = np.zeros(count, np.int32)
        self.reads = np.zeros((0, count), np.int32)
        self._slots: dict[int, int] = {}

    def slots(self, components: Array) -> Array:
        """Where the reads of components are kept."""
        for component in np.unique(components).tolist():
            if component not in self._slots:
                self._slots[component] = len(self._slots)
        if len(self._slots) > len(self.reads):
            more = np.zeros((len(self._slots) - len(self.reads), len(self.writes)), np.int32)
            self.reads = np.concatenate((self.reads, more))
        return np.array([self._slots[c] for c in components.tolist()])

    def granules(self, offsets: Array, size: int) -> tuple[Array, int]:
        """Granules of accesses of ``size`` bytes [accesses, granules each], and how many each."""
        if size < self.granule:
            self._refine(size)
        each = size // self.granule
        first = offsets // self.granule
        if each == 1:
            return first, 1
        return (first[:, None] + np.arange(each)).reshape(-1), each

    def _refine(self, size: int) -> None:
        times = self.granule // size
        self.writes = np.repeat(self.writes, times)
        self.reads = np.repeat(self.reads, times, axis=1)
        self.granule = size


class ReadLog:
    """Reads of memory that nobody has written yet: intervals of bytes and their events."""

    def __init__(self) -> None:
        self._parts: list[tuple[Array, Array, Array]] = []

    def add(self, offsets: Array, size: int, columns: Array, events: Array) -> None:
        """Reads of ``size`` bytes each; neighbours of one column become one interval."""
        order = np.lexsort((offsets, columns))
        starts, owners = offsets[order], columns[order]
        is_new = np.ones(len(starts), bool)
        is_new[1:] = (owners[1:] != owners[:-1]) | (starts[1:] > starts[:-1] + size)
        first = np.flatnonzero(is_new)
        last = np.append(first[1:], len(starts)) - 1
        self._parts.append((starts[first], starts[last] + size, events[owners[first]]))

    def overlapping(self, offsets: Array, size: int) -> tuple[Array, Array]:
        """Pairs (index of an access, event of a read) that share bytes."""
        if not self._parts:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        if len(self._parts) > 1:
            self._parts = [tuple(np.concatenate(x) for x in zip(*self._parts, strict=True))]  # type: ignore[list-item]
        starts, ends, events = self._parts[0]
        near = np.flatnonzero((starts < offsets.max() + size) & (ends > offsets.min()))
        hits = (starts[near] < offsets[:, None] + size) & (ends[near] > offsets[:, None])
        access, read = np.nonzero(hits)
        return access, events[near[read]]
