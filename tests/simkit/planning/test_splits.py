"""FlashAttention's heuristics: published answers, their edges, tiles and blocks by hand."""

from __future__ import annotations

import numpy as np
import pytest

from simkit.errors import ShapeError, TableError
from simkit.planning.splits import (
    efficiencies,
    eligible,
    fa2_block_n,
    fa2_splits,
    fa3_dynamic_splits,
    fa3_loaded_keys,
    fa3_splits,
    fa3_tile,
    fa4_splits,
    occupancy_units,
    split_blocks,
    visible_blocks,
)


def ceil_div(count: int, size: int) -> int:
    return -(-count // size)


@pytest.mark.parametrize(
    ("batch", "kv_heads", "kv_len", "d", "on_a100", "on_h100", "fa3"),
    [
        (1, 8, 1024, 128, 8, 8, 6),
        (1, 8, 8192, 128, 22, 32, 15),
        (1, 8, 131072, 128, 23, 28, 15),
        (4, 8, 8192, 128, 6, 7, 4),
        (8, 8, 8192, 128, 3, 4, 2),
        (16, 8, 8192, 128, 3, 2, 1),
        (1, 2, 65536, 128, 103, 128, 57),
        (1, 8, 8192, 64, 16, 32, 15),
        (1, 8, 8192, 256, 26, 32, 15),
    ],
)
def test_published_decode_splits(
    batch: int, kv_heads: int, kv_len: int, d: int, on_a100: int, on_h100: int, fa3: int
) -> None:
    units, blocks = batch * kv_heads, ceil_div(kv_len, fa2_block_n(d))
    assert fa2_splits(units, 2 * 108, blocks) == on_a100
    assert fa2_splits(units, 2 * 132, blocks) == on_h100
    assert fa3_splits(units, 132, ceil_div(kv_len, fa3_tile(d)[1])) == fa3


def test_units_of_the_document() -> None:
    """3.4: a batch of 256 with 8 K/V heads has 2048; one sequence has 8, for 6 % of 132 SMs."""
    assert occupancy_units(256, 8) == 2048
    assert occupancy_units(1, 8, rows=4, block_m=64) == 8
    assert round(100 * 8 / 132) == 6
    assert occupancy_units(1, 8, rows=65, block_m=64) == 16


def test_published_efficiencies() -> None:
    """48 tiles on 108 slots: 2 splits keep 0.89 of them busy, 3 splits 0.67."""
    assert np.round(efficiencies(48, 108, 3), 2).tolist() == [
        np.float32(0.44), np.float32(0.89), np.float32(0.67)
    ]  # fmt: skip
    assert efficiencies(48, 108, 3).dtype == np.float32
    assert fa2_splits(48, 108, 100) == 2


def test_full_slots_are_not_split() -> None:
    """0.8 of 110 slots is 88; of 216 it is 172.8."""
    assert fa2_splits(88, 110, 100) == 1
    assert fa2_splits(87, 110, 100) == fa3_splits(87, 110, 100) == 5  # 435 / 440 beats 87 / 110
    assert fa2_splits(173, 216, 100) == fa3_splits(173, 216, 100) == 1
    assert fa2_splits(172, 216, 100) > 1


def test_splits_that_cut_as_one_less() -> None:
    """64 blocks in 11 parts are 10 of 6 and one of 4; in 12 parts they are the same."""
    new = eligible(64, 16)
    assert new[10]
    assert not new[11]
    assert np.flatnonzero(new).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 12, 15]


def test_fa3_splits_heads_that_exceed_the_l2() -> None:
    """From 102,400 keys of 128 + 128 values of 2 bytes on, if read twice by every SM."""
    token, tiles = 2 * 256, 2 * 132
    assert fa3_splits(tiles, 132, 600, m_blocks=tiles, head_bytes=102_400 * token) == 1
    assert fa3_splits(tiles, 132, 600, m_blocks=tiles, head_bytes=102_401 * token) == 2
    assert fa3_splits(tiles, 132, 600, m_blocks=tiles - 1, head_bytes=102_401 * token) == 1
    assert fa3_splits(tiles, 132, 600, m_blocks=tiles, head_bytes=102_401 * token, masked=True) == 1
    # 2^32 bytes and more would be none or few in an int32; the cap holds here, too.
    assert fa3_splits(tiles, 132, 600, m_blocks=tiles, head_bytes=2**32) == 82
    assert fa3_splits(tiles, 132, 600, m_blocks=tiles, head_bytes=2**40, cap=128) == 128


def test_few_blocks_are_not_split() -> None:
    assert [fa3_splits(1, 132, blocks) for blocks in (0, 1, 4, 5)] == [1, 1, 1, 5]
    assert [fa4_splits(1, 132, blocks) for blocks in (0, 1, 4, 5)] == [1, 1, 1, 5]
    assert fa2_splits(1, 264, 0) == 1


def test_fa4_gives_each_tile_its_share_of_the_sms() -> None:
    assert [fa4_splits(units, 132, 1000) for units in (0, 1, 8, 66, 67, 200)] == [
        1, 128, 16, 2, 1, 1
    ]  # fmt: skip


def test_dynamic_splits() -> None:
    """30 blocks in all, 8 heads, 132 SMs: 1.1 * 240 / 132 = 2 blocks for each SM."""
    tiles, blocks = np.ones(4, np.int32), np.array([16, 9, 5, 0], np.int32)
    found = fa3_dynamic_splits(tiles, blocks, heads=8, sm_count=132, cap=128)
    assert found.tolist() == [8, 5, 3, 1]
    capped = fa3_dynamic_splits(tiles, blocks, heads=8, sm_count=132, cap=4)
    assert capped.tolist() == [4, 4, 3, 1]
    assert fa3_dynamic_splits(tiles, blocks, heads=8, sm_count=132, cap=1).tolist() == [1] * 4


def test_dynamic_splits_of_nothing_and_of_too_many() -> None:
    """Where the source divides by zero, and where its kernel has no threads."""
    none = np.zeros(3, np.int64)
    assert fa3_dynamic_splits(none, none, heads=1, sm_count=1, cap=9).tolist() == [1] * 3
    many = np.full(993, 100)
    one = np.ones(993, np.int64)
    assert fa3_dynamic_splits(one, many, heads=1, sm_count=10**6, cap=9).max() == 1
    assert fa3_dynamic_splits(one[1:], many[1:], heads=1, sm_count=10**6, cap=9).min() == 9


@pytest.mark.parametrize(
    ("d", "options", "tile"),
    [
        (64, {}, (192, 192)),
        (64, {"causal": True}, (192, 128)),
        (64, {"d_v": 256}, (128, 96)),
        (64, {"d_v": 512}, (64, 64)),
        (96, {"causal": True}, (192, 144)),
        (96, {"local": True}, (192, 128)),
        (128, {}, (128, 176)),
        (128, {"gather": True}, (128, 128)),
        (192, {}, (128, 112)),
        (192, {"d_v": 128}, (128, 128)),
        (192, {"local": True}, (128, 96)),
        (256, {"causal": True}, (128, 80)),
        (256, {"local": True}, (128, 64)),
    ],
)
def test_fa3_tiles(d: int, options: dict[str, bool | int], tile: tuple[int, int]) -> None:
    assert fa3_tile(d, **options) == tile  # type: ignore[arg-type]


def test_loaded_keys_of_a_window() -> None:
    assert fa3_loaded_keys(1000, 128) == 1000
    assert fa3_loaded_keys(1000, 128, 99, 0) == 228
    assert fa3_loaded_keys(100, 128, 99, 0) == 100


def test_blocks_of_a_causal_tile() -> None:
    """Rows 64 to 127 of 256, with 300 keys: row 127 sees up to key 171; 99 keys to the left."""
    sizes = {"block_m": 64, "block_n": 32, "q_len": 256, "kv_len": 300}
    assert visible_blocks(1, **sizes, window_right=0) == range(6)
    # Row 64 sees from key 108 - 70 = 38 on.
    assert visible_blocks(1, **sizes, window_left=70, window_right=0) == range(1, 6)
    assert visible_blocks(1, **sizes) == range(10)
    # Four heads to a query: rows 64 to 127 are queries 16 to 31.
    assert visible_blocks(1, **sizes, window_right=0, group=4) == range(3)
    # More queries than keys: the first tile sees none.
    few = sizes | {"kv_len": 100}
    assert len(visible_blocks(0, **few, window_right=0)) == 0


def test_both_ways_to_cut_blocks() -> None:
    """5 blocks of a sequence whose longest neighbour has 12, in 4 splits."""
    assert split_blocks(range(5), 4) == [range(2), range(2, 4), range(4, 5), range(5, 5)]
    assert split_blocks(range(5), 4, longest=12) == [
        range(3), range(3, 5), range(5, 5), range(5, 5)
    ]  # fmt: skip
    # A window starts at block 4: FlashAttention-2's first split has nothing to do.
    assert split_blocks(range(4, 12), 3, longest=12) == [range(4, 4), range(4, 8), range(8, 12)]
    assert split_blocks(range(4, 12), 3) == [range(4, 7), range(7, 10), range(10, 12)]


def test_refusals() -> None:
    with pytest.raises(ShapeError, match="units is 0; it must be 1 to"):
        fa2_splits(0, 216, 10)
    with pytest.raises(ShapeError, match="cap is 0; it must be 1 to"):
        fa3_splits(1, 132, 10, cap=0)
    with pytest.raises(ShapeError, match="blocks is -1; it must be 0 to"):
        fa4_splits(1, 132, -1)
    with pytest.raises(ShapeError, match="d is 257; FlashAttention-3 has tiles up to 256"):
        fa3_tile(257)
    with pytest.raises(ShapeError, match="the longest sequence has 4 blocks, but one ends at 5"):
        split_blocks(range(5), 2, longest=4)
    with pytest.raises(TableError, match=r"n_blocks\[1\] = -3 is outside"):
        fa3_dynamic_splits(np.ones(2, int), np.array([1, -3]), heads=1, sm_count=1, cap=1)
    with pytest.raises(ShapeError, match=r"must be \[batch\], got \[2\], \[3\]"):
        fa3_dynamic_splits(np.ones(2, int), np.ones(3, int), heads=1, sm_count=1, cap=1)
