"""Reductions with atomics as Triton compiles them."""

from __future__ import annotations

import numpy as np
import pytest

# tests/gpu/triton itself can pass for a package of that name, a submodule cannot.
pytest.importorskip("triton.language")

import kernels_in_triton as kernels
from triton_launch import compile_ptx, launch

import gpu

ARCHITECTURES = {80: "a100", 90: "h100"}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sum_maximum_and_histogram(arch: int) -> None:
    count, bins = 3000, 8
    x = (9 * np.random.default_rng(4).random(count)).astype(np.float32)
    signature = {
        "x": "*fp32",
        "total": "*fp32",
        "most": "*fp32",
        "histogram": "*i32",
        "count": "i32",
    }
    kernel = compile_ptx(kernels.sum_atomic, signature, {"BLOCK": 512, "BINS": bins}, arch)
    device = gpu.open("ptx", ARCHITECTURES[arch])
    total, most = (device.array(np.full(1, start, np.float32)) for start in (0, -1))
    histogram = device.array(np.zeros(bins, np.int32))
    launch(device, kernel, (-(-count // 512),), [device.array(x), total, most, histogram, count])
    assert total.to_numpy()[0] == pytest.approx(x.sum(dtype=np.float64), rel=1e-5)
    assert most.to_numpy()[0] == x.max()
    wanted = np.bincount(np.minimum(x.astype(np.int64), bins - 1), minlength=bins)
    assert np.array_equal(histogram.to_numpy(), wanted)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("kind", "dtype"), [("fp16", np.float16), ("fp32", np.float32)])
def test_sum_of_columns(kind: str, dtype: type, arch: int) -> None:
    """Neighbouring elements are added in pairs (fp16) or, on sm_90, in vectors."""
    rows, columns = 12, 256
    x = np.random.default_rng(5).integers(-8, 9, (rows, columns)).astype(dtype)
    signature = {"x": f"*{kind}", "y": f"*{kind}"}
    kernel = compile_ptx(kernels.sum_columns, signature, {"COLUMNS": columns}, arch, num_warps=1)
    device = gpu.open("ptx", ARCHITECTURES[arch])
    y = device.array(np.zeros(columns, dtype))
    launch(device, kernel, (rows,), [device.array(x), y])
    assert np.array_equal(y.to_numpy(), x.astype(np.float64).sum(axis=0))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_lock(arch: int) -> None:
    """Programs take turns by compare-and-swap."""
    kernel = compile_ptx(kernels.count_with_lock, {"lock": "*i32", "counter": "*i32"}, {}, arch)
    device = gpu.open("ptx", ARCHITECTURES[arch])
    lock, counter = (device.array(np.zeros(1, np.int32)) for _ in range(2))
    launch(device, kernel, (7,), [lock, counter])
    assert counter.to_numpy()[0] == 7
    assert lock.to_numpy()[0] == 0
