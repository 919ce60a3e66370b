"""The exact tensor-core model beside NumPy's float32 product of the same matrices, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from simkit.numerics import formats
from simkit.numerics.tensor_core import dot_accumulate, tensor_core

# M, N, K: 64 x 256 x 64 read either way.
SHAPES = [(64, 64, 256), (64, 256, 64)]
LIMIT = 60.0
"""Times NumPy's matrix product that the exact model may take."""


def fastest(function: Callable[[], Any], rounds: int) -> float:
    """Seconds of the quickest of some calls."""
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - started)
    return best


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_bf16_product(
    benchmark: Any, m: int, n: int, k: int, arch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """bf16, accumulated in float32 from zero.

    The two are timed in turns and their quickest calls compared, so that whatever else the machine
    does meets both.
    """
    rng = np.random.default_rng(0)
    a, b = (
        formats.round_bf16(rng.standard_normal(shape).astype(np.float32))
        for shape in ((m, k), (k, n))
    )
    c = np.zeros((m, n), np.float32)
    core = tensor_core(arch, "bf16")
    exact, plain = float("inf"), float("inf")
    for _ in range(20):
        plain = min(plain, fastest(lambda: a @ b, 20))
        exact = min(exact, fastest(lambda: dot_accumulate(a, b, c, core), 5))
    benchmark.pedantic(dot_accumulate, (a, b, c, core), rounds=20)
    ratio = exact / plain
    benchmark.extra_info["times_numpy"] = ratio
    with capsys.disabled():
        print(
            f"\n[{m}, {k}] by [{k}, {n}] on {core.name}: exact {exact * 1e6:,.0f} us, NumPy float32"
            f" {plain * 1e6:,.1f} us, {ratio:.0f} times"
        )
    assert ratio <= LIMIT
