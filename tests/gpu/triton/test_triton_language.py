"""Functions, scans, sorting, rearranging, printing and assertions as Triton compiles them."""

from __future__ import annotations

import math

import numpy as np
import pytest

# tests/gpu/triton itself can pass for a package of that name, a submodule cannot.
pytest.importorskip("triton.language")

import kernels_of_features as kernels
from triton_launch import compile_ptx, launch

import gpu
from simkit.errors import TrapError

ARCHITECTURES = {80: "a100", 90: "h100"}
N = 128


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_functions(arch: int) -> None:
    """tl.* and libdevice: within a few units in the last place of float64's."""
    x = np.random.default_rng(1).standard_normal(N).astype(np.float32)
    kernel = compile_ptx(kernels.functions, {"x": "*fp32", "y": "*fp32"}, {"N": N}, arch)
    device = gpu.open("ptx", ARCHITECTURES[arch])
    y = device.empty((4, N), np.float32)
    launch(device, kernel, (1,), [device.array(x), y])
    v, positive = x.astype(np.float64), np.abs(x.astype(np.float64))
    wanted = [
        np.sin(v) + np.cos(v) + np.exp(v) + np.log(positive + 1),
        1 / np.sqrt(positive + 1) + 1 / (1 + np.exp(-v)) + np.floor(v) + np.ceil(v),
        np.vectorize(math.erf)(v) + np.tanh(v) + np.log1p(positive),
        positive**2.5 + np.arctan2(v, v + 1),
    ]
    np.testing.assert_allclose(y.to_numpy(), wanted, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_across_lanes(arch: int) -> None:
    generator = np.random.default_rng(2)
    x = generator.integers(-99, 99, N).astype(np.float32) + np.float32(0.5)
    x[77] = 1000
    i = generator.integers(0, N, N).astype(np.int32)
    signature = {"x": "*fp32", "i": "*i32", "y": "*fp32", "z": "*i32"}
    kernel = compile_ptx(kernels.across_lanes, signature, {"N": N}, arch)
    device = gpu.open("ptx", ARCHITECTURES[arch])
    y, z = device.empty((2, N), np.float32), device.empty((4, N), np.int32)
    launch(device, kernel, (1,), [device.array(x), device.array(i), y, z])
    assert np.array_equal(y.to_numpy(), [np.cumsum(x), np.sort(x)])
    wanted = [
        np.bincount(i, minlength=N),
        np.full(N, 77),
        i // 7 + i % 13 + (i << 3) + i[::-1],
        np.full(N, np.bitwise_xor.reduce(i) + i.min()),
    ]
    assert np.array_equal(z.to_numpy(), wanted)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_rearranged(arch: int) -> None:
    n, m = 32, 64
    generator = np.random.default_rng(3)
    x = generator.standard_normal((n, m)).astype(np.float32)
    i = generator.integers(0, n, (n, m)).astype(np.int32)
    signature = {"x": "*fp32", "i": "*i32"}
    signature |= dict.fromkeys(("gathered", "turned", "halves"), "*fp32")
    kernel = compile_ptx(kernels.rearranged, signature, {"N": n, "M": m}, arch)
    device = gpu.open("ptx", ARCHITECTURES[arch])
    results = [device.empty(shape, np.float32) for shape in ((n, m), (m, n), (n, m // 2))]
    launch(device, kernel, (1,), [device.array(x), device.array(i), *results])
    gathered, turned, halves = (r.to_numpy() for r in results)
    assert np.array_equal(gathered, np.take_along_axis(x, i, 0))
    assert np.array_equal(turned, x.T)
    assert np.array_equal(halves, x[:, ::2] * x[:, 1::2])


def test_printing() -> None:
    kernel = compile_ptx(kernels.printed, {"x": "*fp32"}, {"N": 32}, 90, num_warps=1)
    device = gpu.open("ptx")
    report = launch(device, kernel, (1,), [device.array(np.arange(32, dtype=np.float32))])
    lines = report.output.splitlines()
    assert len(lines) == 32
    assert lines[7] == "pid (0, 0, 0) idx ( 7) x is: 7.000000"


def test_assertions() -> None:
    kernel = compile_ptx(kernels.asserted, {"x": "*fp32"}, {"N": 32}, 90, num_warps=1, debug=True)
    device = gpu.open("ptx")
    launch(device, kernel, (1,), [device.array(np.arange(32, dtype=np.float32))])
    below = device.array(np.full(32, -1, np.float32))
    with pytest.raises(TrapError, match=r"'x is negative' failed at .*kernels_of_features\.py:\d+"):
        launch(device, kernel, (1,), [below])
