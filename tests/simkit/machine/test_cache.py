"""The L2 against a dictionary per set that is least-recently-used by construction."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit.errors import CapacityError, MemoryAccessError
from simkit.machine import cache
from simkit.machine.cache import L2Cache
from simkit.machine.gpus import gpu


class DictionaryCache:
    """One access at a time: set -> line -> {sector: dirty}, oldest line first."""

    def __init__(self, sets: int, ways: int) -> None:
        self.ways = ways
        self.sets: list[OrderedDict[int, dict[int, bool]]] = [OrderedDict() for _ in range(sets)]
        self.read = self.written = 0

    def access(self, address: int, write: bool) -> None:
        sector, line = address // 32, address // 128
        held = self.sets[line % len(self.sets)]
        if line not in held:
            if len(held) == self.ways:
                _, oldest = held.popitem(last=False)
                self.written += 32 * sum(oldest.values())
            held[line] = {}
        held.move_to_end(line)
        if write:
            held[line][sector] = True
        elif sector not in held[line]:
            self.read += 32
            held[line][sector] = False

    def flush(self) -> None:
        for held in self.sets:
            for sectors in held.values():
                self.written += 32 * sum(sectors.values())
                sectors.update(dict.fromkeys(sectors, False))


batches = st.lists(
    st.tuples(
        st.lists(st.integers(0, 4000), min_size=0, max_size=60),
        st.booleans(),
        st.sampled_from(("", "look", "flush")),
    ),
    max_size=12,
)


@given(batches, st.sampled_from(((1, 1), (1, 4), (3, 2), (5, 3))), st.sampled_from((8, 1 << 17)))
@settings(max_examples=200)
def test_counters_equal_one_access_at_a_time(
    accesses: list[tuple[list[int], bool, str]], shape: tuple[int, int], batch: int
) -> None:
    sets, ways = shape
    fast, slow = L2Cache(sets * ways * 128, ways), DictionaryCache(sets, ways)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "_BATCH", batch)
        for addresses, write, then in accesses:
            fast.access(np.array(addresses, np.uint64), write)
            for address in addresses:
                slow.access(address, write)
            if then == "flush":
                fast.flush()
                slow.flush()
            if then:
                assert (fast.dram_read_bytes, fast.dram_write_bytes) == (slow.read, slow.written)
        fast.flush()
        slow.flush()
        assert (fast.dram_read_bytes, fast.dram_write_bytes) == (slow.read, slow.written)
        assert fast.accessed_bytes == 32 * sum(len(addresses) for addresses, _, _ in accesses)


def test_what_fits_is_fetched_once() -> None:
    l2 = L2Cache.of(gpu("h100"))
    assert (l2.sets, l2.ways, l2.capacity) == (25_600, 16, 50 * 1024 * 1024)
    tile = np.arange(0, 1 << 20, 32)
    for _ in range(3):
        l2.access(tile, write=False)
    assert (l2.dram_read_bytes, l2.dram_write_bytes) == (1 << 20, 0)
    assert l2.accessed_bytes == 3 << 20


def test_written_sectors_are_not_fetched_and_go_out_once() -> None:
    l2 = L2Cache.of(gpu("h100"))
    tile = np.arange(0, 1 << 16, 32)
    l2.access(tile, write=True)
    l2.access(tile, write=True)
    l2.access(tile, write=False)
    assert (l2.dram_read_bytes, l2.dram_write_bytes) == (0, 0)
    l2.flush()
    l2.flush()
    assert l2.dram_write_bytes == 1 << 16


def test_streaming_more_than_the_capacity_twice_misses_always() -> None:
    l2 = L2Cache(64 * 16 * 128)
    stream = np.arange(0, l2.capacity * 17 // 16, 32)
    l2.access(stream, write=False)
    l2.access(stream, write=False)
    assert l2.dram_read_bytes == 2 * 32 * stream.size


def test_callers_may_reuse_their_buffer() -> None:
    l2 = L2Cache(16 * 128)
    buffer = np.zeros(1, np.int64)
    for address in (0, 32, 64):
        buffer[0] = address
        l2.access(buffer, write=False)
    assert l2.dram_read_bytes == 96


def test_what_the_cache_refuses() -> None:
    with pytest.raises(CapacityError, match="1000"):
        L2Cache(1000)
    with pytest.raises(MemoryAccessError, match="-32"):
        L2Cache(16 * 128).access(np.array([-32]), write=False)
