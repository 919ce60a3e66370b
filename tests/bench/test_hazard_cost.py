"""What looking for hazards costs: flash attention with and without, time and memory."""

from __future__ import annotations

import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpu
from gpu.kernels.flash_attention import flash_attention

TIMES, MEMORY = 4.0, 3.0
"""How much longer, and how much more memory than the plain run, it may take."""


def flash_run(looks_for_hazards: bool) -> tuple[float, int]:
    """Seconds of the quickest of three runs, and the process's peak memory in KiB."""
    device = gpu.open("ptx", options=gpu.Options(hazards=looks_for_hazards))
    rng = np.random.default_rng(0)
    shape = (1, 1024, 1, 64)
    q, k, v = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for _ in range(3))
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        report = flash_attention(device, q, k, v).reports[0]
        best = min(best, time.perf_counter() - started)
        assert not report.errors
    return best, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_cost(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One head, N = 1024, d = 64, bf16; each way in a process of its own."""
    measured = {}
    for looks in (False, True):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            measured[looks] = pool.submit(flash_run, looks).result()
    benchmark.pedantic(flash_run, (True,), rounds=1)
    (plain, plain_kib), (watched, watched_kib) = measured[False], measured[True]
    times, memory = watched / plain, watched_kib / plain_kib
    benchmark.extra_info |= {"times": times, "memory": memory}
    with capsys.disabled():
        print(
            f"\nhazards of flash attention, N = 1024: {watched * 1e3:.0f} ms, plain"
            f" {plain * 1e3:.0f} ms, {times:.2f} times; memory {watched_kib / 1024:.0f} MiB, plain"
            f" {plain_kib / 1024:.0f} MiB, {memory:.2f} times"
        )
    assert times <= TIMES
    assert memory <= MEMORY
