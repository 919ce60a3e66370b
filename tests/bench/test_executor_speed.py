"""Timings of the executor: `make bench` prints them with lane-instructions per second."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpu
from gpu.counters import Report
from gpu.kernels.flash_attention import flash_attention
from gpu.ptx.launch import Options

BF16 = np.dtype(ml_dtypes.bfloat16)
# What users may wait for: one head of flash attention, and a launch of a hundred instructions.
FLASH_SECONDS, TINY_SECONDS = 2.0, 0.005
TINY = """
extern "C" __global__ void tiny(const float* x, float* y, int n) {
  float v = x[threadIdx.x];
#pragma unroll
  for (int i = 0; i < 20; ++i) v = __fmaf_rn(v, 0.5f, __fadd_rn(v, (float)i));
  y[threadIdx.x] = v;
}
"""


def note(benchmark: Any, report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    """Adds the rate of work to the result, and prints it."""
    seconds = benchmark.stats.stats.min
    rate = report.lane_instructions / seconds
    benchmark.extra_info["lane_instructions_per_second"] = rate
    with capsys.disabled():
        print(
            f"\n{benchmark.name}: {report.lane_instructions:,} lane-instructions in"
            f" {seconds * 1e3:.2f} ms, {rate / 1e6:,.0f} M/s"
        )


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_flash_attention_2048(
    benchmark: Any, numerics: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One head, N = 2048, d = 64, bf16, non-causal."""
    device = gpu.open("ptx", options=Options(numerics=numerics))
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2048, 1, 64)).astype(BF16) for _ in range(3))

    def run() -> Report:
        return flash_attention(device, q, k, v).reports[0]

    report = benchmark.pedantic(run, rounds=3, warmup_rounds=1)
    note(benchmark, report, capsys)
    assert benchmark.stats.stats.min <= FLASH_SECONDS


def test_tiny_launch(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One CTA of 128 threads, about 50 instructions, already loaded."""
    device = gpu.open("ptx")
    kernel = device.compile(TINY, arch="sm_90").kernel("tiny")
    x = device.array(np.ones(128, np.float32))
    y = device.empty(128, np.float32)

    def run() -> Report:
        return kernel.launch((1,), (128,), [x, y, 128])

    report = benchmark(run)
    note(benchmark, report, capsys)
    assert benchmark.stats.stats.min <= TINY_SECONDS


def test_elementwise_wide(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The tiny kernel on 256 CTAs: the same instructions on 32,768 lanes."""
    device = gpu.open("ptx")
    kernel = device.compile(TINY, arch="sm_90").kernel("tiny")
    x = device.array(np.ones(128, np.float32))
    y = device.empty(128, np.float32)

    def run() -> Report:
        return kernel.launch((256,), (128,), [x, y, 128])

    report = benchmark(run)
    note(benchmark, report, capsys)
