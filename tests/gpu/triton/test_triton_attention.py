"""Flash attention, softmax and layer norm as Triton compiles them, run by the executor."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

# tests/gpu/triton itself can pass for a package of that name, a submodule cannot.
pytest.importorskip("triton.language")

import kernels_in_triton as kernels
from triton_launch import Compiled, compile_ptx, launch

import gpu
from gpu.ptx.launch import Options
from gpu.ptx.schedule import Schedule
from simkit.errors import MemoryAccessError

DTYPES: dict[str, Any] = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
ARCHITECTURES = {80: "a100", 90: "h100"}
LOG2_E = 1.4426950408889634


@cache
def attention_kernel(
    kind: str,
    causal: bool,
    arch: int,
    tiles: tuple[int, int, int] = (64, 64, 64),
    num_warps: int = 4,
) -> Compiled:
    pointers = dict.fromkeys("qkvo", f"*{kind}")
    signature = pointers | {"lse": "*fp32", "n": "i32", "scale_log2": "fp32"}
    constants = {"CAUSAL": causal} | dict(zip("MND", tiles, strict=True))
    return compile_ptx(kernels.flash_attention, signature, constants, arch, num_warps)


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp in base 2, in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    if causal:
        scores[:, ~np.tri(q.shape[1], dtype=bool)] = -np.inf
    greatest = scores.max(axis=2, keepdims=True)
    p = np.exp(scores - greatest)
    total = p.sum(axis=2, keepdims=True)
    return p @ v / total, ((greatest + np.log(total)) * LOG2_E)[..., 0]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", DTYPES)
def test_flash_attention(kind: str, causal: bool, arch: int) -> None:
    check_attention(kind, causal, arch, Options())


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("schedule", [Schedule("lazy"), Schedule("random", 3)], ids=str)
def test_flash_attention_in_any_order(schedule: Schedule, arch: int) -> None:
    check_attention("fp16", True, arch, Options(schedule=schedule))


def check_attention(kind: str, causal: bool, arch: int, options: Options) -> None:
    heads, n, d = 2, 192, 64
    generator = np.random.default_rng(arch + causal)
    q, k, v = (generator.standard_normal((heads, n, d)).astype(DTYPES[kind]) for _ in range(3))
    device = gpu.open("ptx", ARCHITECTURES[arch], options)
    arrays = [device.array(x, name) for name, x in zip("qkv", (q, k, v), strict=True)]
    o = device.empty((heads, n, d), DTYPES[kind], name="o")
    lse = device.empty((heads, n), np.float32, name="lse")
    scale = np.float32(LOG2_E / np.sqrt(d))
    report = launch(
        device, attention_kernel(kind, causal, arch), (n // 64, heads), [*arrays, o, lse, n, scale]
    )
    output, log_sum = attention(q, k, v, causal)
    step = 2.0**-10 if kind == "fp16" else 2.0**-7
    # P is rounded to the input type too; |o| stays below 4.
    np.testing.assert_allclose(o.to_numpy().astype(np.float64), output, atol=3 * step)
    np.testing.assert_allclose(lse.to_numpy(), log_sum, atol=1e-3)
    moved = {(t.tensor, t.direction): t.requested for t in report.traffic.tensors}
    size = heads * n * d * 2
    assert moved[("q", "read")] == size
    assert moved[("o", "write")] == size
    tiles = 6 if causal else 9  # of K and V, by the three programs of a head
    assert moved[("k", "read")] == moved[("v", "read")] == heads * tiles * 64 * d * 2


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("tiles", "num_warps"), [((128, 64, 64), 8), ((64, 32, 128), 4), ((128, 128, 128), 8)]
)
def test_other_tiles(tiles: tuple[int, int, int], num_warps: int, arch: int) -> None:
    """Two warpgroups, head dimension 128, keys in tiles of 32."""
    n, (m, _, d) = 256, tiles
    generator = np.random.default_rng(d)
    q, k, v = (generator.standard_normal((1, n, d)).astype(np.float16) for _ in range(3))
    device = gpu.open("ptx", ARCHITECTURES[arch])
    o, lse = device.empty((1, n, d), np.float16), device.empty((1, n), np.float32)
    arguments = [*map(device.array, (q, k, v)), o, lse, n, np.float32(LOG2_E / np.sqrt(d))]
    launch(device, attention_kernel("fp16", True, arch, tiles, num_warps), (n // m, 1), arguments)
    output, log_sum = attention(q, k, v, True)
    np.testing.assert_allclose(o.to_numpy().astype(np.float64), output, atol=3 * 2.0**-10)
    np.testing.assert_allclose(lse.to_numpy(), log_sum, atol=1e-3)


def test_fp8() -> None:
    """Inputs, P and output are e4m3: three fraction bits."""
    n, d = 128, 64
    e4m3 = np.dtype(ml_dtypes.float8_e4m3fn)
    generator = np.random.default_rng(8)
    q, k, v = (generator.standard_normal((1, n, d)).astype(e4m3) for _ in range(3))
    device = gpu.open("ptx")
    o, lse = device.empty((1, n, d), e4m3), device.empty((1, n), np.float32)
    arguments = [*map(device.array, (q, k, v)), o, lse, n, np.float32(LOG2_E / np.sqrt(d))]
    kernel = attention_kernel("fp8e4nv", False, 90)
    assert "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3" in kernel.ptx
    launch(device, kernel, (n // 64, 1), arguments)
    output, log_sum = attention(q, k, v, False)
    # P is within 2^-4 of itself or, being subnormal, 2^-10; so is the output.
    p_error = 2.0**-4 * attention(q, k, np.abs(v.astype(np.float32)), False)[0] + 2.0**-10 * 128
    np.testing.assert_array_less(np.abs(o.to_numpy().astype(np.float64) - output), 2 * p_error)
    np.testing.assert_allclose(lse.to_numpy(), log_sum, atol=1e-2)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_softmax(arch: int) -> None:
    rows, columns = 5, 333
    x = (3 * np.random.default_rng(1).standard_normal((rows, columns))).astype(np.float32)
    signature = {"x": "*fp32", "y": "*fp32", "columns": "i32"}
    kernel = compile_ptx(kernels.softmax, signature, {"BLOCK": 512}, arch, odd=("columns",))
    device = gpu.open("ptx", ARCHITECTURES[arch])
    y = device.empty((rows, columns), np.float32)
    launch(device, kernel, (rows,), [device.array(x), y, columns])
    p = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(y.to_numpy(), p / p.sum(axis=1, keepdims=True), rtol=1e-5)


def test_a_size_that_is_no_multiple_of_16_although_the_compiler_was_told_so() -> None:
    rows, columns = 2, 333
    signature = {"x": "*fp32", "y": "*fp32", "columns": "i32"}
    kernel = compile_ptx(kernels.softmax, signature, {"BLOCK": 512}, 90)
    device = gpu.open("ptx")
    x, y = (device.empty((rows, columns), np.float32) for _ in range(2))
    with pytest.raises(MemoryAccessError, match=r"not a multiple of 16.*kernels_in_triton.py:"):
        launch(device, kernel, (rows,), [x, y, columns])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_layer_norm(arch: int) -> None:
    rows, columns, eps = 4, 700, 1e-5
    generator = np.random.default_rng(2)
    x = (1 + 2 * generator.standard_normal((rows, columns))).astype(np.float16)
    weight, bias = (generator.standard_normal(columns).astype(np.float32) for _ in range(2))
    signature = {"x": "*fp16", "y": "*fp16", "weight": "*fp32", "bias": "*fp32"}
    signature |= {"columns": "i32", "eps": "fp32"}
    kernel = compile_ptx(kernels.layer_norm, signature, {"BLOCK": 256}, arch, odd=("columns",))
    device = gpu.open("ptx", ARCHITECTURES[arch])
    y = device.empty((rows, columns), np.float16)
    arguments = [device.array(x), y, device.array(weight), device.array(bias), columns, eps]
    launch(device, kernel, (rows,), arguments)
    wide = x.astype(np.float64)
    away = wide - wide.mean(axis=1, keepdims=True)
    normal = away / np.sqrt((away**2).mean(axis=1, keepdims=True) + eps)
    np.testing.assert_allclose(y.to_numpy(), normal * weight + bias, rtol=1e-3, atol=1e-3)
