"""Order of execution: correct kernels do not depend on it, kernels with a missing barrier do."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from lanes import device

from gpu.counters import Report
from gpu.ptx.executor import PtxModule
from gpu.ptx.launch import Options
from gpu.ptx.schedule import Schedule, parse_schedule
from simkit.errors import LaunchError

SCHEDULES = [Schedule("eager"), Schedule("lazy"), *(Schedule("random", k) for k in range(8))]

SOURCE = r"""
#ifdef BROKEN
#define SYNC(n) do { if (n != BROKEN) __syncthreads(); } while (0)
#else
#define SYNC(n) __syncthreads()
#endif

extern "C" __global__ void reverse(const float* x, float* out) {
    __shared__ float cell[128];
    int t = threadIdx.x;
    cell[t] = x[128 * blockIdx.x + t];
    SYNC(1);
    out[128 * blockIdx.x + t] = cell[127 - t];
}

extern "C" __global__ void matmul(const float* a, const float* b, float* c, int n) {
    __shared__ float ta[16][16], tb[16][17];
    int tx = threadIdx.x, ty = threadIdx.y, row = blockIdx.y * 16 + ty, col = blockIdx.x * 16 + tx;
    float sum = 0;
    for (int k = 0; k < n; k += 16) {
        ta[ty][tx] = a[row * n + k + tx];
        tb[tx][ty] = b[(k + ty) * n + col];
        SYNC(1);
        for (int m = 0; m < 16; ++m) sum += ta[ty][m] * tb[tx][m];
        SYNC(2);
    }
    c[row * n + col] = sum;
}

extern "C" __global__ void scan(const float* x, float* out) {
    __shared__ float cell[256];
    int t = threadIdx.x;
    cell[t] = x[256 * blockIdx.x + t];
    for (int d = 1; d < 256; d *= 2) {
        SYNC(1);
        float v = t >= d ? cell[t - d] : 0.0f;
        SYNC(2);
        cell[t] += v;
    }
    SYNC(3);
    out[256 * blockIdx.x + t] = cell[t] / cell[255];
}
"""


@cache
def ptx(broken: int) -> str:
    options = (f"-DBROKEN={broken}",) if broken else ()
    return device().compile(SOURCE, options=options, arch="sm_90").ptx


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


N = 48
CASES: dict[str, tuple[list[np.ndarray], list[int], tuple[int, ...], tuple[int, ...]]] = {
    "reverse": ([random(5, 128), np.zeros((5, 128), np.float32)], [], (5,), (128,)),
    "matmul": (
        [random(N, N), random(N, N) + 1, np.zeros((N, N), np.float32)], [N], (3, 3), (16, 16),
    ),
    "scan": ([np.abs(random(3, 256)), np.zeros((3, 256), np.float32)], [], (3,), (256,)),
}  # fmt: skip


def launch(name: str, schedule: Schedule, broken: int = 0) -> tuple[np.ndarray, Report]:
    arrays, numbers, grid, block = CASES[name]
    dev = device().with_options(Options(schedule=schedule, budget=200_000))
    held = [dev.array(a, name=f"array{k}") for k, a in enumerate(arrays)]
    report = PtxModule(dev, ptx(broken)).kernel(name).launch(grid, block, [*held, *numbers])
    return held[-1].to_numpy(), report


@pytest.mark.parametrize("name", CASES)
def test_correct_kernels_give_the_same_bits_and_bytes(name: str) -> None:
    first, report = launch(name, SCHEDULES[0])
    for schedule in SCHEDULES[1:]:
        again, other = launch(name, schedule)
        assert np.array_equal(first.view(np.uint32), again.view(np.uint32)), schedule
        assert other.traffic == report.traffic
        assert other.lane_instructions == report.lane_instructions


def test_correct_kernels_are_correct() -> None:
    x = CASES["reverse"][0][0]
    assert np.array_equal(launch("reverse", SCHEDULES[1])[0], x[:, ::-1])
    a, b = CASES["matmul"][0][:2]
    product = launch("matmul", SCHEDULES[1])[0]
    # 48 products per element, each rounded once: gamma_48 of the sum of magnitudes.
    bound = 48 * 2.0**-24 * (np.abs(a).astype(np.float64) @ np.abs(b))
    assert (np.abs(product - a.astype(np.float64) @ b) <= bound * 1.01).all()


@pytest.mark.parametrize(
    ("name", "broken"), [("reverse", 1), ("matmul", 1), ("matmul", 2), ("scan", 1), ("scan", 2)]
)
def test_a_removed_barrier_shows_under_some_schedule(name: str, broken: int) -> None:
    wanted = launch(name, SCHEDULES[0])[0]
    results = [launch(name, schedule, broken)[0] for schedule in SCHEDULES]
    assert any(not np.array_equal(r, wanted, equal_nan=True) for r in results)


def test_a_schedule_repeats_itself() -> None:
    """The same seed gives the same (wrong) result again."""
    for schedule in SCHEDULES[1:4]:
        one, two = (launch("scan", schedule, broken=1)[0] for _ in range(2))
        assert np.array_equal(one.view(np.uint32), two.view(np.uint32))


def test_schedule_names() -> None:
    assert parse_schedule("eager") == Schedule("eager")
    assert parse_schedule(" lazy ") == Schedule("lazy")
    assert parse_schedule("random(7)") == Schedule("random", 7)
    for text in ("hasty", "lazy(3)", "random(-1)", ""):
        with pytest.raises(LaunchError, match="eager, lazy, random or random"):
            parse_schedule(text)
