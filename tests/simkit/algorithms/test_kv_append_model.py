"""Appending to a paged cache: places, codes and bytes worked out by hand, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from simkit.algorithms.kv_append import E4M3, AppendProblem, cached_values, kv_append
from simkit.algorithms.problem import BF16
from simkit.errors import DtypeError, ShapeError, TableError
from simkit.layouts.block_sparse import BlockRows
from simkit.layouts.paged import Order, PagedCache
from simkit.machine.machine import Machine
from simkit.machine.memory import unbacked

FP8 = ml_dtypes.float8_e4m3fn


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


# Pages of four slots. Request 0 has 5 tokens on pages 2 and 0, the last 3 new; request 1 has none;
# request 2 has one new token, on page 3.
ROWS = BlockRows(i32(0, 2, 2, 3), i32(2, 0, 3, -1), i32(1, 99, 1), block_size=4, blocks=5)
APPEND = i32(0, 3, 3, 4)
PLACES = ((2, 2), (2, 3), (0, 0), (3, 0))  # page and offset of each new token


def problem(
    order: Order = "NHD", dtype: Any = BF16, heads: int = 2, dk: int = 64, dv: int = 128
) -> AppendProblem:
    def cache(d: int) -> PagedCache:
        shape = (5, 4, heads, d) if order == "NHD" else (5, heads, 4, d)
        return PagedCache(np.full(shape, -1, dtype), order)

    def new(d: int) -> Any:
        values = np.arange(1, 5)[:, None, None] + np.arange(heads)[:, None] / 4
        return np.broadcast_to(values, (4, heads, d)).astype(BF16)

    return AppendProblem(new(dk), new(dv), APPEND, ROWS, cache(dk), cache(dv))


@pytest.mark.parametrize("arithmetic", ["reference", "device"])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_tokens_go_to_their_pages(order: Order, arithmetic: Any) -> None:
    p = problem(order)
    result = kv_append(Machine("h100", arithmetic), p)
    for cache in (result.k_cache, result.v_cache):
        expected = np.full((5, 4, 2), -1.0)
        for token, place in enumerate(PLACES):
            expected[place] = token + 1, token + 1.25
        assert np.array_equal(
            cache.by_slot.astype(float), np.broadcast_to(expected[..., None], cache.by_slot.shape)
        )
    assert (p.k_cache.values == -1).all()  # the caller's cache is as it was
    assert (p.v_cache.values == -1).all()


def test_codes() -> None:
    x = np.array([2, -2, 448, 500, np.inf, np.nan, 0, -0.0, 2.0**-9, 2.0**-10], BF16)
    expected = [0x40, 0xC0, 0x7E, 0x7E, 0x7E, 0x7F, 0x00, 0x80, 0x01, 0x00]
    assert cached_values(x, E4M3, 1.0).view(np.uint8).tolist() == expected
    halved = cached_values(x, E4M3, 2.0).view(np.uint8).tolist()
    assert halved[:4] == [0x38, 0xB8, 0x76, 0x78]
    assert np.array_equal(cached_values(x, BF16, 1.0).view(np.uint16), x.view(np.uint16))
    assert cached_values(np.array([448, 449, 65504], np.float16), E4M3, 1.0).view(
        np.uint8
    ).tolist() == [0x7E, 0x7E, 0x7E]


def test_a_product_with_the_reciprocal_is_no_quotient() -> None:
    # 1.3671875 / 7 lies halfway between two codes and would go to the even one, 0x24; the float32
    # reciprocal of 7 is a little too large, and so is the product.
    x = np.array([1.3671875], BF16)
    codes = (np.array([0x24, 0x25], np.uint8)).view(FP8).astype(float)
    assert Fraction(1.3671875) / 7 * 2 == Fraction(codes[0]) + Fraction(codes[1])
    assert cached_values(x, E4M3, 7.0).view(np.uint8).tolist() == [0x25]


def test_bytes_of_one_token() -> None:
    # One token with one head of 64 and 128 values: 8 and 16 vectors, so that 16 lanes read tables.
    one = BlockRows(i32(0, 1), i32(1), i32(2), block_size=4, blocks=2)
    for dtype, itemsize in ((BF16, 2), (E4M3, 1)):
        caches = [PagedCache(np.zeros((2, 4, 1, d), dtype)) for d in (64, 128)]
        new = [np.zeros((1, 1, d), BF16) for d in (64, 128)]
        machine = Machine("h100", "none")
        kv_append(machine, AppendProblem(*new, i32(0, 1), one, *caches))
        table = (16 * 4, 32)
        assert {key: (t.requested, t.sectors) for key, t in machine.traffic.items()} == {
            ("batch_indices", "read"): table,
            ("positions", "read"): table,
            ("indptr", "read"): table,
            ("indices", "read"): table,
            ("k_new", "read"): (128, 128),
            ("v_new", "read"): (256, 256),
            ("k_cache", "write"): (64 * itemsize, 64 * itemsize),
            ("v_cache", "write"): (128 * itemsize, 128 * itemsize),
        }


def test_a_cache_beyond_2_to_the_31_values_is_counted() -> None:
    pages = 40_000
    shape = (pages, 64, 8, 128)
    rows = BlockRows(i32(0, 1, 2), i32(pages - 1, 0), i32(64, 3), block_size=64, blocks=pages)
    k, v = (PagedCache(unbacked(shape, BF16)) for _ in range(2))
    new = unbacked((5, 8, 128), BF16)
    assert k.values.size > 2**31
    machine = Machine("h100", "none")
    p = AppendProblem(new, new, i32(0, 4, 5), rows, k, v)
    kv_append(machine, p)
    assert p.slots.tolist() == [*range(pages * 64 - 4, pages * 64), 2]
    assert machine.traffic["k_cache", "write"].requested == 5 * 8 * 128 * 2


def test_nothing_to_append() -> None:
    p = replace(
        problem(),
        k_new=np.empty((0, 2, 64), BF16),
        v_new=np.empty((0, 2, 128), BF16),
        append_indptr=i32(0, 0, 0, 0),
    )
    machine = Machine("h100", "device")
    result = kv_append(machine, p)
    assert machine.traffic == {}
    assert np.array_equal(result.k_cache.values, p.k_cache.values)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"append_indptr": i32(0, 3, 2, 4)}, TableError, r"append_indptr\[2\] = 2 is less than"),
        ({"append_indptr": i32(0, 3, 3, 5)}, TableError, r"append_indptr\[3\] = 5; the last row"),
        ({"append_indptr": i32(0, 2, 3, 4)}, TableError, "request 1 appends 1 tokens, but has 0"),
        ({"append_indptr": i32(0, 4)}, ShapeError, "1 requests append, the tables have 3"),
        ({"append_indptr": np.array([0, 3, 3, 4.0])}, DtypeError, "append_indptr must be an int32"),
        ({"v_new": np.zeros((4, 2, 64), BF16)}, ShapeError, r"v_new has shape \[4, 2, 64\]"),
        ({"v_new": np.zeros((4, 2, 128), np.float16)}, DtypeError, "v_new is float16"),
        (
            {"k_cache": PagedCache(np.zeros((5, 4, 2, 64), np.float16))},
            DtypeError,
            "k_cache is float16",
        ),
        (
            {"v_cache": PagedCache(np.zeros((5, 4, 2, 128), FP8))},
            DtypeError,
            "v_cache is float8_e4m3fn; both caches are bfloat16 or float8_e4m3fn",
        ),
        (
            {"v_cache": PagedCache(np.zeros((5, 2, 4, 128), BF16), "HND")},
            ShapeError,
            "k_cache is NHD, v_cache HND",
        ),
        (
            {"k_cache": PagedCache(np.zeros((6, 4, 2, 64), BF16))},
            ShapeError,
            "rows are of a cache of 5 pages of 4 slots",
        ),
        ({"k_scale": 2.0}, ShapeError, "k_scale is 2.0; a cache of bfloat16 holds unscaled"),
    ],
)
def test_what_is_no_problem(changed: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        replace(problem(), **changed)


def test_head_dimensions_and_scales_that_are_refused() -> None:
    with pytest.raises(ShapeError, match="k has 96 values a head"):
        problem(dk=96)
    for scale in (0.0, -1.0, float("nan"), float("inf"), 1e-40, 3e38):
        with pytest.raises(ShapeError, match="v_scale is"):
            replace(problem(dtype=FP8), v_scale=scale)
