"""Host side of kv_append.cu: what it writes, what it leaves alone, and what it refuses."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpu.kernels.kv_append import E4M3, Build, kv_append, launch
from gpu.ptx.executor import PtxArray, PtxDevice
from simkit.errors import CompileError, DtypeError, LaunchError, ShapeError, TableError
from simkit.layouts.block_sparse import BlockRows
from simkit.layouts.paged import Order, PagedCache
from simkit.layouts.ragged import Ragged

BF16 = np.dtype(ml_dtypes.bfloat16)


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


def random_bits(seed: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """Any codes, NaNs and infinities too."""
    size = np.dtype(dtype).itemsize
    return np.random.default_rng(seed).integers(0, 256**size, shape, f"u{size}").view(dtype)


def cache_of(seed: int, order: Order, heads: int, d: int, dtype: Any) -> PagedCache:
    shape = (5, 4, heads, d) if order == "NHD" else (5, heads, 4, d)
    return PagedCache(random_bits(seed, shape, dtype), order)


def bits(array: Any) -> Any:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


# Pages of four slots. Request 0 has 5 tokens on pages 2 and 0, the last 3 new; request 1 has none;
# request 2 has one new token, on page 3.
INDPTR, INDICES, LAST = i32(0, 2, 2, 3), i32(2, 0, 3, -7), i32(1, -7, 1)
APPEND = i32(0, 3, 3, 4)
PLACES = ((2, 2), (2, 3), (0, 0), (3, 0))  # page and offset of each new token


def rows(table: Any = np.int32) -> BlockRows:
    return BlockRows(
        INDPTR.astype(table), INDICES.astype(table), LAST.astype(table), block_size=4, blocks=5
    )


@pytest.fixture(scope="module")
def device() -> PtxDevice:
    return PtxDevice("h100")


@pytest.mark.parametrize("table", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", [BF16, np.float16])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_bits_are_copied(device: PtxDevice, order: Order, dtype: Any, table: Any) -> None:
    k_cache = cache_of(1, order, 3, 192, dtype)
    v_cache = cache_of(2, order, 3, 128, dtype)
    k_new, v_new = random_bits(3, (4, 3, 192), dtype), random_bits(4, (4, 3, 128), dtype)
    result = kv_append(device, k_new, v_new, APPEND, rows(table), k_cache, v_cache)
    for name, cache, new in (("k_cache", k_cache, k_new), ("v_cache", v_cache, v_new)):
        expected = bits(cache.by_slot).copy()
        for token, place in enumerate(PLACES):
            expected[place] = bits(new)[token]
        found = PagedCache(result.outputs[name], order)
        assert np.array_equal(bits(found.by_slot), expected)
    (report,) = result.reports
    assert report.hazards == []


@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_codes_of_fp8(device: PtxDevice, dtype: Any) -> None:
    k_cache, v_cache = (cache_of(seed, "HND", 2, 64, E4M3) for seed in (1, 2))
    k_new, v_new = random_bits(3, (4, 2, 64), dtype), random_bits(4, (4, 2, 64), dtype)
    result = kv_append(
        device, k_new, v_new, APPEND, rows(), k_cache, v_cache, k_scale=7.0, v_scale=0.25
    )
    for name, cache, new, scale in (
        ("k_cache", k_cache, k_new, 7.0),
        ("v_cache", v_cache, v_new, 0.25),
    ):
        with np.errstate(all="ignore"):
            scaled = new.astype(np.float32) * (np.float32(1) / np.float32(scale))
            codes = bits(np.clip(scaled, -448, 448).astype(E4M3))
        codes = np.where(np.isnan(scaled), np.uint8(0x7F), codes)
        expected = bits(cache.by_slot).copy()
        for token, place in enumerate(PLACES):
            expected[place] = codes[token]
        assert np.array_equal(bits(PagedCache(result.outputs[name], "HND").by_slot), expected)


@pytest.mark.parametrize("cache_dtype", [BF16, E4M3])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_a_cache_beyond_2_to_the_31_values(order: Order, cache_dtype: np.dtype[Any]) -> None:
    # Of a new device, whose memory takes none of ours until it is written.
    device = PtxDevice("h100")
    pages, page_size, heads, d = 40_000, 64, 8, 128
    shape = (pages, page_size, heads, d) if order == "NHD" else (pages, heads, page_size, d)
    k, v = (PtxArray(device.memory, shape, cache_dtype, name) for name in ("k_cache", "v_cache"))
    far = BlockRows(i32(0, 1), i32(pages - 1), i32(page_size), block_size=page_size, blocks=pages)
    new = np.arange(1, 1 + 2 * heads * d).reshape(2, heads, d) % 16 + 1
    choice = Build(d, d, BF16, cache_dtype, order)
    launch(device, choice, new.astype(BF16), -new.astype(BF16), Ragged(i32(0, 2)), far, k, v)
    for array, sign in ((k, 1), (v, -1)):
        cache = np.frombuffer(array._bytes(), cache_dtype).reshape(shape)
        page = cache[-1] if order == "NHD" else cache[-1].swapaxes(0, 1)
        assert np.array_equal(page[-2:].astype(int), sign * new)
        assert not page[:-2].astype(int).any()
        assert not cache[0].astype(int).any()
    assert k.shape == shape
    assert np.prod(shape) > 2**31


def test_nothing_to_append_is_no_launch(device: PtxDevice) -> None:
    cache = cache_of(1, "NHD", 2, 64, BF16)
    new = np.empty((0, 2, 64), BF16)
    result = kv_append(device, new, new, i32(0, 0, 0, 0), rows(), cache, cache)
    assert result.reports == []
    assert np.array_equal(bits(result.outputs["k_cache"]), bits(cache.values))


class NoDevice:
    """Nothing may reach the device."""

    arch = "sm_90a"

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the device was asked for {name}")


K, V = np.zeros((4, 2, 64), BF16), np.zeros((4, 2, 128), BF16)
K_CACHE, V_CACHE = (PagedCache(np.zeros((5, 4, 2, d), BF16)) for d in (64, 128))
# Requests 0 and 2 share page 3, which is full.
SHARED = BlockRows(i32(0, 2, 2, 3), i32(2, 3, 3), i32(4, 1, 4), block_size=4, blocks=5)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"append_indptr": i32(0, 3, 2, 4)}, TableError, r"append_indptr\[2\] = 2 is less than"),
        ({"append_indptr": i32(0, 3, 3, 3)}, TableError, r"append_indptr\[3\] = 3; the last row"),
        ({"append_indptr": i32(0, 2, 2, 4)}, TableError, "request 2 appends 2 tokens, but has 1"),
        ({"append_indptr": i32(0, 4)}, ShapeError, "1 requests append, the tables have 3"),
        ({"append_indptr": np.zeros(4)}, DtypeError, "append_indptr must be an int32 or int64"),
        ({"rows": SHARED}, TableError, "slot 1 of page 3, which holds tokens of requests 0, 2"),
        ({"k_new": K.astype(np.float32)}, DtypeError, "k_new is float32"),
        ({"v_new": V.astype(np.float16)}, DtypeError, "v_new is float16"),
        ({"v_new": V[:3]}, ShapeError, r"v_new has shape \(3, 2, 128\)"),
        ({"k_new": K[:, :1]}, ShapeError, r"k_new has shape \(4, 1, 64\)"),
        (
            {"k_cache": PagedCache(np.zeros((5, 4, 2, 64), np.float16))},
            DtypeError,
            "k_cache is float16; new tokens of bfloat16 go to bfloat16 or float8_e4m3fn",
        ),
        (
            {"v_cache": PagedCache(np.zeros((5, 4, 2, 128), E4M3))},
            DtypeError,
            "v_cache is float8_e4m3fn, k_cache bfloat16",
        ),
        (
            {"v_cache": PagedCache(np.zeros((5, 2, 4, 128), BF16), "HND")},
            ShapeError,
            "v_cache is HND, k_cache is NHD",
        ),
        (
            {"v_cache": PagedCache(np.zeros((5, 8, 2, 128), BF16))},
            ShapeError,
            "rows are of a cache of 5 pages of 4 slots; this one has 5 of 8",
        ),
        ({"k_scale": 0.5}, LaunchError, "k_scale is 0.5; a cache of bfloat16 takes no scale"),
    ],
)
def test_refusals_come_before_the_launch(
    changed: Any, error: type[Exception], message: str
) -> None:
    arguments = {
        "k_new": K,
        "v_new": V,
        "append_indptr": APPEND,
        "rows": rows(),
        "k_cache": K_CACHE,
        "v_cache": V_CACHE,
    }
    with pytest.raises(error, match=message):
        kv_append(NoDevice(), **(arguments | changed))


def test_tables_that_describe_no_pages_are_refused() -> None:
    for indices, last, message in (
        (i32(2, 5, 3), LAST, r"indices\[1\] = 5 is outside 0 to 4"),
        (INDICES, i32(0, 1, 1), r"last_block_len\[0\] = 0 is outside 1 to 4"),
        (INDICES, i32(1, 1, 5), r"last_block_len\[2\] = 5 is outside 1 to 4"),
    ):
        with pytest.raises(TableError, match=message):
            BlockRows(INDPTR, indices, last, block_size=4, blocks=5)


def test_head_dimensions_and_scales_that_are_refused() -> None:
    cache = PagedCache(np.zeros((5, 4, 2, 96), BF16))
    new = np.zeros((4, 2, 96), BF16)
    with pytest.raises(ShapeError, match="k_cache has 96 values a head"):
        kv_append(NoDevice(), new, new, APPEND, rows(), cache, cache)
    fp8 = PagedCache(np.zeros((5, 4, 2, 64), E4M3))
    for scale in (0.0, -1.0, float("nan"), float("inf"), 1e-40, 3e38):
        with pytest.raises(LaunchError, match="v_scale is"):
            kv_append(NoDevice(), K, K, APPEND, rows(), fp8, fp8, v_scale=scale)


def test_fp8_needs_its_conversions() -> None:
    fp8 = PagedCache(np.zeros((5, 4, 2, 64), E4M3))
    with pytest.raises(CompileError, match="needs sm_89"):
        kv_append(PtxDevice("a100"), K, K, APPEND, rows(), fp8, fp8)
