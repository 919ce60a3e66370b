"""Paged caches: numbers of vectors worked out by hand, tables, what is refused, 2^31 and beyond."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from simkit.errors import DtypeError, ShapeError, TableError
from simkit.layouts.block_sparse import BlockRows, from_lengths
from simkit.layouts.paged import (
    PagedCache,
    from_block_table,
    garbage,
    join_kv,
    random_rows,
    scatter_random,
    split_kv,
    to_block_table,
)
from simkit.layouts.ragged import Ragged
from simkit.machine.memory import unbacked

BF16 = np.dtype(ml_dtypes.bfloat16)


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


def test_vectors_of_a_small_cache() -> None:
    # Three pages of two slots with two heads of one value each.
    nhd = PagedCache(np.arange(12, dtype=np.int32).reshape(3, 2, 2, 1), "NHD")
    hnd = PagedCache(np.arange(12, dtype=np.int32).reshape(3, 2, 2, 1), "HND")
    assert (nhd.pages, nhd.page_size, nhd.heads, nhd.d) == (3, 2, 2, 1)
    slots = np.array([5, 2])
    assert nhd.row_numbers(slots[:, None], np.arange(2)).tolist() == [[10, 11], [4, 5]]
    assert hnd.row_numbers(slots[:, None], np.arange(2)).tolist() == [[9, 11], [4, 6]]
    rows = BlockRows(i32(0, 2), i32(2, 1), i32(1), block_size=2, blocks=3)
    assert nhd.gather(rows, 0)[..., 0].tolist() == [[8, 9], [10, 11], [4, 5]]
    assert hnd.gather(rows, 0)[..., 0].tolist() == [[8, 10], [9, 11], [4, 6]]
    assert nhd.to_order("HND").values[..., 0].tolist() == [
        [[0, 2], [1, 3]],
        [[4, 6], [5, 7]],
        [[8, 10], [9, 11]],
    ]


def test_scatter_writes_its_slots_alone() -> None:
    for order in ("NHD", "HND"):
        cache = PagedCache(np.zeros((2, 2, 2, 1), np.float32), order)
        cache.scatter(np.array([3]), np.array([[[5.0], [6.0]]], np.float32))
        expected = np.zeros((2, 2, 2, 1))
        expected[1, 1] = [[5], [6]]
        assert np.array_equal(cache.by_slot, expected)
    with pytest.raises(TableError, match=r"slots\[0\] = 4 is outside 0 to 3"):
        cache.scatter(np.array([4]), np.zeros((1, 2, 1), np.float32))
    with pytest.raises(DtypeError, match="the cache holds float32, the vectors float64"):
        cache.scatter(np.array([3]), np.zeros((1, 2, 1)))
    with pytest.raises(ShapeError, match=r"1 slots take \[1, 2, 1\]"):
        cache.scatter(np.array([3]), np.zeros((1, 1, 1), np.float32))


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_numbers_beyond_2_to_the_31(order: Any) -> None:
    pages, heads, d = 170_000, 8, 128
    shape = (pages, 16, heads, d) if order == "NHD" else (pages, heads, 16, d)
    cache = PagedCache(unbacked(shape, BF16), order)
    assert cache.values.size > 2**31
    rows = BlockRows(i32(0, 1), i32(pages - 1), i32(16), block_size=16, blocks=pages)
    numbers = cache.row_numbers(rows.slots(0)[:, None], np.arange(heads))
    assert numbers.dtype == np.int64
    assert numbers.min() == (pages - 1) * 16 * heads
    assert numbers.max() == pages * 16 * heads - 1
    assert numbers.max() * d > 2**31
    assert cache.gather(rows, 0).shape == (16, heads, d)


def test_rows_of_another_cache_are_refused() -> None:
    cache = PagedCache(np.zeros((3, 2, 2, 1)), "HND")
    with pytest.raises(ShapeError, match="rows are of a cache of 4 pages of 2 slots"):
        cache.gather(from_lengths(np.array([3]), 2, blocks=4), 0)
    with pytest.raises(ShapeError, match="4 axes"):
        PagedCache(np.zeros((3, 2, 2)))
    with pytest.raises(ShapeError, match="order must be one of NHD, HND, not 'DHN'"):
        PagedCache(np.zeros((3, 2, 2, 1)), "DHN")  # type: ignore[arg-type]


def test_k_and_v_of_one_tensor() -> None:
    both = np.arange(2 * 2 * 3 * 1 * 2).reshape(2, 2, 3, 1, 2)
    k, v = split_kv(both, "NHD")
    assert k.values.ravel().tolist() == [0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17]
    assert v.values.ravel().tolist() == [6, 7, 8, 9, 10, 11, 18, 19, 20, 21, 22, 23]
    assert np.array_equal(join_kv(k, v), both)
    with pytest.raises(ShapeError, match=r"\[pages, 2, \.\.\.\]"):
        split_kv(both[:, :1], "NHD")
    with pytest.raises(ShapeError, match="one tensor takes them alike"):
        join_kv(k, PagedCache(v.values, "HND"))


def test_block_tables() -> None:
    # The fill values of FlashMLA's tests, which no kernel may follow.
    table = i32(4, 1, 2_147_480_000, 0, -1, -1, 7, 7, 7).reshape(3, 3)
    rows = from_block_table(table, i32(7, 0, 9), block_size=4, blocks=8)
    assert rows.indptr.tolist() == [0, 2, 2, 5]
    assert rows.indices.tolist() == [4, 1, 7, 7, 7]
    assert rows.kv_lens.tolist() == [7, 0, 9]
    back, kv_lens = to_block_table(rows, fill=-9)
    assert back.tolist() == [[4, 1, -9], [-9, -9, -9], [7, 7, 7]]
    assert kv_lens.tolist() == [7, 0, 9]
    assert back.dtype == kv_lens.dtype == np.int32
    assert to_block_table(rows, max_blocks=5)[0].shape == (3, 5)


def test_block_tables_refuse() -> None:
    table = i32(4, 1, 8, 0).reshape(2, 2)
    with pytest.raises(TableError, match=r"block_table\[1, 0\] = 8 is outside 0 to 7"):
        from_block_table(table, i32(7, 3), block_size=4, blocks=8)
    with pytest.raises(TableError, match=r"kv_lens\[1\] = 9 is outside 0 to 8"):
        from_block_table(table, i32(7, 9), block_size=4, blocks=9)
    with pytest.raises(ShapeError, match=r"kv_lens must have shape \[2\]"):
        from_block_table(table, i32(7), block_size=4, blocks=9)
    with pytest.raises(TableError, match="request 0 has 2 blocks; the table has room for 1"):
        to_block_table(from_lengths(i32(7, 3), 4), max_blocks=1)


def test_shared_pages_are_found_by_content() -> None:
    ragged = Ragged(i32(0, 5, 10))
    # Both begin with the same four tokens; the fifth ones are alone on their pages.
    content = np.array([1, 2, 3, 4, 5, 1, 2, 3, 4, 6])
    rows = random_rows(np.random.default_rng(0), ragged, page_size=2, content=content)
    assert rows.indices[:2].tolist() == rows.indices[3:5].tolist()
    assert len(set(rows.indices[: rows.indptr[-1]].tolist())) == 4
    assert rows.kv_lens.tolist() == [5, 5]


@pytest.mark.parametrize("dtype", [BF16, np.float16, ml_dtypes.float8_e4m3fn, np.uint8])
def test_garbage_is_nothing_finite(dtype: Any) -> None:
    found = garbage(np.random.default_rng(0), (300,), dtype)
    if np.dtype(dtype) == np.uint8:
        found = found.view(ml_dtypes.float8_e4m3fn)
    assert not np.isfinite(found.astype(np.float32)).any()
    assert len(np.unique(found.view(f"u{found.dtype.itemsize}"))) > 1


def test_a_random_cache_has_garbage_in_every_other_slot() -> None:
    ragged = Ragged(i32(0, 5, 5, 12))
    k = np.arange(12 * 2 * 8, dtype=np.float32).reshape(12, 2, 8)
    paged = scatter_random(np.random.default_rng(3), ragged, k, k[..., :4], page_size=4)
    unused = ~paged.rows.used_slots().reshape(-1, 4)
    for cache in (paged.k, paged.v):
        assert not np.isfinite(cache.by_slot[unused]).any()
        assert np.isfinite(cache.by_slot[~unused]).all()
    # The request without tokens has no last page to speak of.
    assert not 1 <= paged.rows.last_block_len[1] <= 4
    assert paged.rows.indices[: paged.rows.indptr[-1]].tolist() != [0, 1, 2, 3]
