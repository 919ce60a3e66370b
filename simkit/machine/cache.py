"""An L2 cache between the SMs and HBM: what it lets through is the `dram` figure.

Set-associative, least recently used, 128-byte lines of four 32-byte sectors, write-back. Only the
missing sectors of a line are fetched. A written sector needs no fetch: the hardware keeps byte
masks. The real placement hash is not public; here a line goes to set (line mod sets), and the
cache is one, though large GPUs have two partitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from simkit.errors import CapacityError, MemoryAccessError
from simkit.machine.gpus import Gpu
from simkit.machine.memory import SECTOR_BYTES, SECTOR_SHIFT

Array = np.ndarray[Any, Any]

LINE_BYTES = 128
SECTORS_PER_LINE = LINE_BYTES // SECTOR_BYTES
WAYS = 16
_BATCH = 1 << 17  # accesses handled at once: enough to amortise NumPy, small enough for memory

# Number of set bits of a 4-bit sector mask.
_POPCOUNT = np.array([bin(mask).count("1") for mask in range(1 << SECTORS_PER_LINE)], np.int64)


@dataclass(frozen=True)
class _Touches:
    """Visits to lines: each row is one line with all that a stretch of accesses does to it."""

    line: Array
    fetch: Array  # mask of sectors whose first access is a read
    touched: Array  # mask of sectors accessed
    written: Array  # mask of sectors written
    time: Array  # order of the last access

    def take(self, rows: Array) -> _Touches:
        return _Touches(
            self.line[rows],
            self.fetch[rows],
            self.touched[rows],
            self.written[rows],
            self.time[rows],
        )


class L2Cache:
    """The cache and its counters.

    ``capacity``: bytes, a multiple of ways × 128. Accesses are gathered and handled in batches,
    so that many small calls stay cheap; every counter is exact when read.
    """

    def __init__(self, capacity: int, ways: int = WAYS) -> None:
        if ways < 1 or capacity < ways * LINE_BYTES or capacity % (ways * LINE_BYTES):
            raise CapacityError(
                f"L2 capacity {capacity} must be a positive multiple of "
                f"{ways} ways × {LINE_BYTES} bytes"
            )
        self.capacity = capacity
        self.ways = ways
        self.sets = capacity // (ways * LINE_BYTES)
        # Ways fill from 0 up and are never emptied, so `_filled` names the next free one.
        self._lines = np.full((self.sets, ways), -1, np.int64)
        self._stamps = np.zeros((self.sets, ways), np.int64)
        self._valid = np.zeros((self.sets, ways), np.uint8)
        self._dirty = np.zeros((self.sets, ways), np.uint8)
        self._filled = np.zeros(self.sets, np.int64)
        self._clock = 0
        self._pending: list[tuple[Array, bool]] = []
        self._pending_count = 0
        self._sectors = self._fetched = self._written_back = 0

    @classmethod
    def of(cls, gpu: Gpu) -> L2Cache:
        """The L2 of a GPU, empty."""
        return cls(gpu.l2_bytes)

    @property
    def dram_read_bytes(self) -> int:
        """Bytes fetched from DRAM so far: sectors read while absent."""
        self._drain()
        return self._fetched * SECTOR_BYTES

    @property
    def dram_write_bytes(self) -> int:
        """Bytes written to DRAM so far: dirty sectors evicted or flushed."""
        self._drain()
        return self._written_back * SECTOR_BYTES

    @property
    def accessed_bytes(self) -> int:
        """Bytes of all sectors that came from the SMs."""
        self._drain()
        return self._sectors * SECTOR_BYTES

    def access(self, sector_addresses: Array, write: bool) -> None:
        """Reads or writes sectors in the given order.

        ``sector_addresses``: byte addresses, one for each 32-byte sector, any integer dtype and
        shape (taken in row-major order). MemoryAccessError for a negative address.
        """
        if not sector_addresses.size:
            return
        sectors = sector_addresses.astype(np.int64).ravel() >> SECTOR_SHIFT
        if sectors.min() < 0:
            raise MemoryAccessError(f"negative address {sector_addresses.min()} at the L2")
        self._pending.append((sectors, write))
        self._pending_count += sector_addresses.size
        if self._pending_count >= _BATCH:
            self._drain()

    def flush(self) -> None:
        """Writes every dirty sector back; the lines stay, clean."""
        self._drain()
        self._written_back += int(_POPCOUNT[self._dirty].sum())
        self._dirty[:] = 0

    def _drain(self) -> None:
        if not self._pending:
            return
        pending, self._pending, self._pending_count = self._pending, [], 0
        sectors = np.concatenate([some for some, _ in pending])
        write = np.repeat([flag for _, flag in pending], [some.size for some, _ in pending])
        self._sectors += sectors.size
        for start in range(0, sectors.size, _BATCH):
            stop = min(start + _BATCH, sectors.size)
            self._batch(sectors[start:stop], write[start:stop])

    def _batch(self, sectors: Array, write: Array) -> None:
        """Handles one batch: sets that cannot overflow all at once, the others round by round."""
        lines = sectors // SECTORS_PER_LINE
        unique, line_of = np.unique(lines, return_inverse=True)
        sets = unique % self.sets
        fresh = self._ways_of(unique, sets) < 0
        demand = np.bincount(sets[fresh], minlength=self.sets)
        tight = (demand > self.ways - self._filled)[sets]
        loose = _summarise(sectors, write, line_of, unique.size, self._clock)
        self._apply(loose.take(np.flatnonzero(~tight)))
        if tight.any():
            self._rounds(sectors, write, tight[line_of])
        self._clock += sectors.size

    def _rounds(self, sectors: Array, write: Array, chosen: Array) -> None:
        """Exact LRU for the chosen accesses: round r takes each set's r-th visit to a line."""
        time = np.flatnonzero(chosen)
        sectors, write = sectors[time], write[time]
        lines = sectors // SECTORS_PER_LINE
        order = np.argsort(lines % self.sets, kind="stable")
        lines, sectors, write, time = lines[order], sectors[order], write[order], time[order]
        # Neighbouring accesses of a set to one line are one visit: nothing comes in between.
        starts = np.ones(lines.size, bool)
        np.not_equal(lines[1:], lines[:-1], out=starts[1:])
        visit_of = np.cumsum(starts) - 1
        visits = _summarise(sectors, write, visit_of, int(visit_of[-1]) + 1, self._clock, time)
        rank = _rank_in_group(visits.line % self.sets)
        by_rank = np.argsort(rank, kind="stable")
        ends = np.cumsum(np.bincount(rank))
        for start, stop in zip([0, *ends[:-1]], ends, strict=True):
            self._apply(visits.take(by_rank[start:stop]))

    def _apply(self, visits: _Touches) -> None:
        """Applies visits to distinct lines, of which no set evicts more than one."""
        if not visits.line.size:
            return
        sets = visits.line % self.sets
        way = self._ways_of(visits.line, sets)
        miss = np.flatnonzero(way < 0)
        if miss.size:
            way[miss] = self._make_room(visits.line[miss], sets[miss])
        absent = visits.fetch & ~self._valid[sets, way]
        self._fetched += int(_POPCOUNT[absent].sum())
        self._valid[sets, way] |= visits.touched
        self._dirty[sets, way] |= visits.written
        self._stamps[sets, way] = visits.time

    def _make_room(self, lines: Array, sets: Array) -> Array:
        """The way for each new line: a free one, or the least recently used one, written back."""
        order = np.argsort(sets, kind="stable")
        rank = np.empty_like(order)
        rank[order] = _rank_in_group(sets[order])
        way = self._filled[sets] + rank
        full = np.flatnonzero(way >= self.ways)
        if full.size:
            crowded = sets[full]
            way[full] = self._stamps[crowded].argmin(axis=1)
            self._written_back += int(_POPCOUNT[self._dirty[crowded, way[full]]].sum())
        self._filled += np.bincount(sets, minlength=self.sets)
        np.minimum(self._filled, self.ways, out=self._filled)
        self._lines[sets, way] = lines
        self._valid[sets, way] = 0
        self._dirty[sets, way] = 0
        return way

    def _ways_of(self, lines: Array, sets: Array) -> Array:
        """The way that holds each line, -1 where it is absent."""
        hit = self._lines[sets] == lines[:, None]
        return np.where(hit.any(axis=1), hit.argmax(axis=1), -1)


def _summarise(
    sectors: Array,
    write: Array,
    group: Array,
    groups: int,
    clock: int,
    time: Array | None = None,
) -> _Touches:
    """Folds accesses to one _Touches row per group; all accesses of a group are to one line.

    Accesses of a group must stand in the order of time. ``time``: their order (default: position).
    """
    if time is None:
        time = np.arange(sectors.size)
    key = group * SECTORS_PER_LINE + sectors % SECTORS_PER_LINE
    # Assigning in reverse leaves each (group, sector) with its first access.
    first = np.full(groups * SECTORS_PER_LINE, -1, np.int64)
    first[key[::-1]] = np.arange(sectors.size - 1, -1, -1)
    touched = first >= 0
    written = np.zeros(groups * SECTORS_PER_LINE, bool)
    written[key[write]] = True
    fetch = touched & ~write[first]
    last = np.empty(groups, np.int64)
    last[group] = time
    line = np.empty(groups, np.int64)
    line[group] = sectors // SECTORS_PER_LINE
    return _Touches(line, _mask(fetch), _mask(touched), _mask(written), clock + last)


def _mask(per_sector: Array) -> Array:
    """Booleans of four sectors a line, packed to one uint8 per line."""
    return np.packbits(per_sector.reshape(-1, SECTORS_PER_LINE), axis=1, bitorder="little")[:, 0]


def _rank_in_group(sorted_groups: Array) -> Array:
    """Position of each element among the equal neighbours before it."""
    starts = np.ones(sorted_groups.size, bool)
    np.not_equal(sorted_groups[1:], sorted_groups[:-1], out=starts[1:])
    begin = np.flatnonzero(starts)
    return np.arange(sorted_groups.size) - np.repeat(begin, np.diff([*begin, sorted_groups.size]))
