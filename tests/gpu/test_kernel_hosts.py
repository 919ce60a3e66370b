"""Host side of the kernels: what they refuse, and what comes back, against float64 mathematics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gpu.device import Device
from gpu.kernels.build import kernel_source
from gpu.kernels.flash_attention import flash_attention
from gpu.kernels.flash_decoding import flash_decoding
from gpu.kernels.fp8_kv_cache import fp8_kv_dequantize, fp8_kv_quantize
from gpu.kernels.naive_attention import naive_attention
from gpu.kernels.result import KernelResult
from gpu.ptx.executor import PtxDevice
from simkit.errors import CompileError, DtypeError, LaunchError, ShapeError

BF16 = ml_dtypes.bfloat16
Attention = Callable[..., KernelResult]
Floats = NDArray[np.float64]
ROUNDOFF = 2.0**-9  # largest relative error of rounding to bfloat16, which has 8 significant bits


@pytest.fixture(scope="module")
def device() -> Device:
    return PtxDevice("h100")


def normal(*shape: int) -> NDArray[Any]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(BF16)


def reference(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], causal: bool
) -> tuple[Floats, Floats]:
    """Output and natural LSE in float64."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = k.repeat(group, axis=2), v.repeat(group, axis=2)
    q_len, kv_len = q.shape[1], k.shape[1]
    weights = np.exp(np.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5)
    if causal:
        weights *= np.arange(kv_len) <= np.arange(q_len)[:, None] + kv_len - q_len
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total[..., 0])
    return np.einsum("bhij,bjhd->bihd", weights / np.where(total == 0, 1, total), v), lse


def assert_close(result: KernelResult, o: Floats, lse: Floats | None, bound: float) -> None:
    assert np.abs(result.outputs["o"].astype(np.float64) - o).max() <= bound
    if lse is not None:
        actual = result.outputs["lse"]
        has_keys = np.isfinite(lse)
        np.testing.assert_array_equal(actual[~has_keys], -np.inf)
        np.testing.assert_allclose(actual[has_keys], lse[has_keys], rtol=0, atol=1e-5)
    assert [report.hazards for report in result.reports] == [[]] * len(result.reports)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "heads", "kv_heads", "causal"),
    [
        (1, 1, 1, 1, False),
        (65, 130, 2, 1, False),
        (3, 64, 2, 2, True),
        (70, 66, 1, 1, True),  # rows without keys
        (130, 200, 1, 1, True),
        (5, 0, 1, 1, False),
    ],
)
@pytest.mark.parametrize("kernel", [flash_attention, naive_attention])
def test_attention(
    device: Device,
    kernel: Attention,
    d: int,
    q_len: int,
    kv_len: int,
    heads: int,
    kv_heads: int,
    causal: bool,
) -> None:
    q = normal(2, q_len, heads, d)
    k, v = normal(2, kv_len, kv_heads, d), normal(2, kv_len, kv_heads, d)[::-1]
    result = kernel(device, q, k, v, causal=causal)
    o, lse = reference(q, k, v, causal)
    # Relative to the largest |v|, which bounds |o|: rounding P and O costs one roundoff each.
    # Rounding a score s moves its weight and the sum, each by a factor of up to exp(|s| roundoff).
    roundings = 2.0
    if kernel is naive_attention:
        s = result.outputs["s"].astype(np.float64)
        roundings += 2 * np.abs(s[np.isfinite(s)]).max(initial=0)
    largest = np.abs(v.astype(np.float64)).max(initial=0)
    assert_close(
        result, o, lse if "lse" in result.outputs else None, roundings * ROUNDOFF * largest
    )


@pytest.mark.parametrize(
    ("d", "kv_len", "heads", "kv_heads", "splits"),
    [
        (64, 1, 1, 1, 1),
        (64, 300, 5, 1, 4),
        (128, 200, 6, 2, 3),
        (64, 130, 2, 2, 3),
        (64, 0, 1, 1, 1),
    ],
)
def test_decoding(
    device: Device, d: int, kv_len: int, heads: int, kv_heads: int, splits: int
) -> None:
    q, k, v = normal(2, heads, d), normal(2, kv_len, kv_heads, d), normal(kv_len, 2, kv_heads, d)
    v = v.swapaxes(0, 1)
    result = flash_decoding(device, q, k, v, splits)
    o, lse = reference(q[:, None], k, v, causal=False)
    # Only O is rounded to bfloat16.
    largest = np.abs(v.astype(np.float64)).max(initial=0)
    assert_close(result, o[:, 0], lse[..., 0], ROUNDOFF * largest)
    # Splits that no tile is left for say so and write no output.
    tiles = -(-kv_len // 64)
    used = -(-tiles // max(1, -(-tiles // splits)))
    np.testing.assert_array_equal(result.outputs["l_partial"][used:], 0)
    np.testing.assert_array_equal(result.outputs["m_partial"][used:], -np.inf)
    assert (result.outputs["l_partial"][:used] > 0).all()


def test_fp8_round_trip(device: Device) -> None:
    # Powers of two from 2^-6 to 448 * 2^n have e4m3 codes, so they come back as they are.
    kv = np.exp2(np.random.default_rng(0).integers(-6, 9, (5, 576))).astype(BF16)
    kv[:, ::128] = 448
    kv[1, 128:256] = 0
    kv[2, :512] *= BF16(2**-4)
    cache = fp8_kv_quantize(device, kv).outputs["cache"]
    scales = cache[:, 512:528].copy().view(np.float32)
    np.testing.assert_array_equal(scales[[0, 2]], [[1] * 4, [2**-4] * 4])
    assert scales[1, 1] == 2**-13  # the least power of two from 1e-4 on
    np.testing.assert_array_equal(fp8_kv_dequantize(device, cache).outputs["out"], kv)


ATTENTION_REFUSALS = [
    ({"q": np.zeros((1, 4, 2, 64), np.float32)}, DtypeError, "q is float32"),
    ({"q": np.zeros((4, 2, 64), BF16)}, ShapeError, r"q has shape \(4, 2, 64\)"),
    ({"k": np.zeros((2, 4, 2, 64), BF16)}, ShapeError, r"k has shape \(2, 4, 2, 64\)"),
    ({"v": np.zeros((1, 5, 2, 64), BF16)}, ShapeError, r"v has shape \(1, 5, 2, 64\)"),
    (dict.fromkeys("qkv", np.zeros((1, 4, 2, 96), BF16)), ShapeError, r"96.*\(64, 128\)"),
    (dict.fromkeys("kv", np.zeros((1, 4, 3, 64), BF16)), ShapeError, "2 heads.*multiple of the 3"),
    ({"q": np.zeros((1, 0, 2, 64), BF16)}, ShapeError, "only kv_len may be 0"),
    ({"scale": 0.0}, LaunchError, r"scale is 0\.0"),
    ({"scale": -1.0}, LaunchError, r"scale is -1\.0"),
    ({"scale": float("nan")}, LaunchError, "scale is nan"),
    ({"scale": 3e38}, LaunchError, r"scale is 3e\+38"),
]


@pytest.mark.parametrize("kernel", [flash_attention, naive_attention])
@pytest.mark.parametrize(("changed", "error", "message"), ATTENTION_REFUSALS)
def test_attention_refuses(
    device: Device, kernel: Attention, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = dict.fromkeys("qkv", np.zeros((1, 4, 2, 64), BF16)) | changed
    with pytest.raises(error, match=message):
        kernel(device, **arguments)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "kv_len", "splits", "message"),
    [
        (17, 1, 64, 1, "17 each.*at most 16"),
        (1, 1, 65, 0, "splits is 0.*1 to 2"),
        (1, 1, 65, 3, "splits is 3.*kv_len 65.*64 keys.*1 to 2"),
        (1, 1, 0, 2, "splits is 2.*1 to 1"),
    ],
)
def test_decoding_refuses(
    device: Device, heads: int, kv_heads: int, kv_len: int, splits: int, message: str
) -> None:
    q, k = np.zeros((1, heads, 64), BF16), np.zeros((1, kv_len, kv_heads, 64), BF16)
    with pytest.raises(ShapeError, match=message):
        flash_decoding(device, q, k, k, splits)


def test_fp8_refuses(device: Device) -> None:
    with pytest.raises(ShapeError, match=r"\(3, 512\).*576"):
        fp8_kv_quantize(device, np.zeros((3, 512), BF16))
    with pytest.raises(DtypeError, match=r"cache is int8.*uint8"):
        fp8_kv_dequantize(device, np.zeros((3, 656), np.int8))
    with pytest.raises(ShapeError, match="at least one token"):
        fp8_kv_quantize(device, np.zeros((0, 576), BF16))
    with pytest.raises(CompileError, match=r"sm_89 or later.*sm_80"):
        fp8_kv_quantize(PtxDevice("a100"), np.zeros((1, 576), BF16))


def test_a_source_can_stand_in_for_the_kernel(device: Device) -> None:
    q = normal(1, 4, 1, 64)
    changed = kernel_source("flash_attention").replace("rescale(output, alpha);", "")
    assert changed != kernel_source("flash_attention")
    k = np.concatenate([q[:, :1].repeat(64, axis=1), 8 * q[:, :1].repeat(64, axis=1)], axis=1)
    v = normal(1, 128, 1, 64)
    exact = flash_attention(device, q, k, v).outputs["o"]
    wrong = flash_attention(device, q, k, v, source=changed).outputs["o"]
    assert (exact != wrong).any()
    with pytest.raises(CompileError, match=r"flash_attention\.cu\(1\)"):
        flash_attention(device, q, k, v, source="oops")
