"""Warp specialisation: a pipelined GEMM, waits that spin, peek or time out, and real deadlocks."""

from __future__ import annotations

import multiprocessing
import re
import resource
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from hopper_kernels import CUDA, SCHEDULES, executor
from hopper_wgmma import DTYPES, WARPGROUP, Instruction

import gpu
from gpu.device import Device
from gpu.ptx.schedule import Schedule
from simkit.errors import BudgetError, DeadlockError

GEMM = r"""
// out [128 x gridDim.x, COLUMNS] = a [., K] b [COLUMNS, K]^T: warp 0 loads K tile by tile into a
// ring of stages, two warpgroups each multiply 64 rows.
struct Stage { char a[2][8192]; char b[128 * COLUMNS]; };
extern "C" __global__ void __launch_bounds__(384) gemm(
    const __grid_constant__ Map ma, const __grid_constant__ Map mb, float* out, int tiles) {
    extern __shared__ __align__(1024) char memory[];
    Stage* stage = (Stage*)memory;
    u64 *full = (u64*)(stage + STAGES), *empty = full + STAGES;
    int group = threadIdx.x / 128 - 1;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) { init(full + i, 1); init(empty + i, 2); }
        fence_init();
    }
    __syncthreads();
    if (group < 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) {
            for (int t = 0; t < tiles; t++) {
                int s = t % STAGES;
                wait(empty + s, (t / STAGES + 1) % 2);
                expect(full + s, sizeof(Stage));
                for (int h = 0; h < 2; h++)
                    tma_load(stage[s].a[h], &ma, 64 * t, 128 * blockIdx.x + 64 * h, full + s);
                tma_load(stage[s].b, &mb, 64 * t, 0, full + s);
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    u64 form = (u64)(1024 >> 4) << 32 | 1ull << 62;
    u32 d[COLUMNS / 2];
    for (int i = 0; i < COLUMNS / 2; i++) d[i] = 0;
    bool ready = try_wait(full, 0);
    for (int t = 0; t < tiles; t++) {
        int s = t % STAGES;
        if (!ready) wait(full + s, t / STAGES % 2);
        // The warpgroups take turns, by named barriers.
        if (group == 1 || t > 0)
            asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
        fence();
        for (int k = 0; k < 4; k++)
            mma(d, descriptor(stage[s].a[group], form, 32 * k),
                descriptor(stage[s].b, form, 32 * k), 1);
        commit();
        if (group == 0 || t + 1 < tiles)
            asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory");
        if (t > 0) {
            wait_group<1>();
            if (threadIdx.x % 128 == 0) arrive(empty + (t - 1) % STAGES);
        }
        // A peek at the next stage: false is no reason to wait yet.
        ready = t + 1 < tiles && try_wait(full + (t + 1) % STAGES, (t + 1) / STAGES % 2);
    }
    wait_group<0>();
    for (int i = 0; i < COLUMNS / 2; i++)
        out[(128 * blockIdx.x + 64 * group + row_of(i, 4)) * COLUMNS + column_of(i, 4)]
            = __uint_as_float(d[i]);
}
"""


def gemm(
    device: Device, stages: int, tiles: int, ctas: int = 2, n: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((m, 64 * tiles)).astype(DTYPES["bf16"]) for m in (128 * ctas, n))
    x, y, out = device.array(a), device.array(b), device.empty((len(a), n), np.float32)
    maps = [gpu.TensorMap(v, (rows, 64), swizzle="128B") for v, rows in ((x, 64), (y, n))]
    source = WARPGROUP + Instruction(n).function() + GEMM
    options = (f"-DSTAGES={stages}", f"-DCOLUMNS={n}")
    kernel = device.compile(source, options=options, arch="sm_90a").kernel("gemm")
    shared_bytes = stages * (16384 + 128 * n + 16)
    kernel.launch((ctas,), (384,), [*maps, out, tiles], shared_bytes=shared_bytes)
    return out.to_numpy(), a.astype(np.float64) @ b.astype(np.float64).T


def test_a_pipelined_gemm_has_the_same_bits_under_any_schedule() -> None:
    found, wanted = gemm(executor(), 3, 5)
    assert np.abs(found - wanted).max() < 1e-4
    for schedule in (Schedule("lazy"), *(Schedule("random", k) for k in range(20))):
        again, _ = gemm(executor(schedule), 3, 5)
        assert np.array_equal(again.view(np.uint32), found.view(np.uint32)), schedule


def _full_grid(numerics: str) -> tuple[float, int]:
    """Relative error and peak memory in KiB of a process that fills an H100 with the GEMM."""
    found, wanted = gemm(executor(numerics=numerics), 4, 4, ctas=132, n=256)
    error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    return error, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_a_full_grid_fits_in_memory(numerics: str) -> None:
    """132 CTAs of 384 threads with 128 accumulators each and 192 KiB of shared memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        error, peak = pool.submit(_full_grid, numerics).result()
    assert error < 1e-5
    assert peak < 4 << 20


@pytest.mark.parametrize(("stages", "tiles"), [(1, 3), (2, 1), (2, 7)])
def test_rings_of_any_length(hopper: Device, stages: int, tiles: int) -> None:
    if stages == 1:
        # With one stage the consumer must release it before it can wait for the next tile: the
        # kernel keeps one product in flight, so it would wait for itself.
        if hopper.name == "ptx":
            with pytest.raises(DeadlockError):
                gemm(hopper, stages, tiles)
        return
    found, wanted = gemm(hopper, stages, tiles)
    assert np.abs(found - wanted).max() < 1e-4


WAITS = (
    CUDA
    + r"""
// The first warp makes numbers, the second sums them up; WAIT says how each waits for the other.
extern "C" __global__ void numbers(u32* out, int n) {
    __shared__ u32 cell[2];
    __shared__ __align__(8) u64 full[2], empty[2];
    int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) for (int i = 0; i < 2; i++) { init(full + i, 32); init(empty + i, 32); }
    __syncthreads();
    u32 sum = 0;
    for (int i = 0; i < n; i++) {
        int s = i % 2, phase = i / 2 % 2;
        if (threadIdx.x < 32) {
            WAIT(empty + s, phase ^ 1);
            if (lane == 0) cell[s] = i * i;
            arrive(full + s);
        } else {
            WAIT(full + s, phase);
            sum = sum * 5 + cell[s];
            arrive(empty + s);
        }
    }
    if (threadIdx.x == 32) *out = sum;
}

// The asynchronous copy lands while everybody spins.
extern "C" __global__ void copied(const u32* x, u32* out) {
    __shared__ __align__(16) u32 cell[64];
    __shared__ __align__(8) u64 full;
    if (threadIdx.x == 0) { init(&full, 1); expect(&full, 256); bulk_load(cell, x, 256, &full); }
    __syncthreads();
    WAIT(&full, 0);
    out[threadIdx.x] = cell[threadIdx.x];
}

// One lane waits for what another lane of its warp does elsewhere.
extern "C" __global__ void apart(u32* out) {
    __shared__ __align__(8) u64 bar[2];
    if (threadIdx.x == 0) { init(bar, 1); init(bar + 1, 1); }
    __syncwarp();
    if (threadIdx.x == 3) {
        WAIT(bar, 0);
        out[0] = 1;
        arrive(bar + 1);
    } else if (threadIdx.x == 7) {
        out[1] = 2;
        arrive(bar);
        WAIT(bar + 1, 0);
        out[2] = out[0] + 5;
    }
}

// A warp peeks at a stage that needs a release of its own first.
extern "C" __global__ void peek(u32* out, int n) {
    __shared__ u32 cell;
    __shared__ __align__(8) u64 full, empty;
    if (threadIdx.x == 0) { init(&full, 1); init(&empty, 1); }
    __syncthreads();
    bool lead = threadIdx.x % 32 == 0;
    u32 sum = 0;
    if (threadIdx.x < 32) {
        for (int i = 0; i < n; i++) {
            WAIT(&empty, i % 2 ^ 1);
            if (lead) { cell = i + 1; arrive(&full); }
        }
    } else {
        bool ready = try_wait(&full, 0);
        for (int i = 0; i < n; i++) {
            if (!ready) WAIT(&full, i % 2);
            sum += cell * (i + 1);
            // Never true: the producer needs `empty` before it fills again.
            ready = try_wait(&full, (i + 1) % 2);
            __syncwarp();
            if (lead) arrive(&empty);
        }
        if (lead) *out = sum;
    }
}

// Peeks a few times and then does something else; the other warp needs that several times.
extern "C" __global__ void patient(u32* out) {
    __shared__ __align__(8) u64 never, go;
    if (threadIdx.x == 0) { init(&never, 1); init(&go, 1); }
    __syncthreads();
    if (threadIdx.x < 32) {
        for (int i = 0; i < 6; i++) {
            for (int k = 0; k < 5; k++) if (try_wait(&never, 0)) out[1] = 9;
            asm volatile("bar.arrive 1, 64;" ::: "memory");
            asm volatile("bar.sync 2, 64;" ::: "memory");
        }
    } else {
        for (int i = 0; i < 6; i++) {
            asm volatile("bar.sync 1, 64;" ::: "memory");
            if (threadIdx.x == 32) out[0] = i + 1;
            asm volatile("bar.arrive 2, 64;" ::: "memory");
        }
    }
}

// One warp gives up waiting now and then and counts; another spins on the counter, which it only
// raises while it waits.
extern "C" __global__ void spins(volatile u32* out) {
    __shared__ __align__(8) u64 bar;
    if (threadIdx.x == 0) init(&bar, 1);
    __syncthreads();
    if (threadIdx.x < 32) {
        while (!try_wait(&bar, 0)) if (threadIdx.x == 0) out[0] = out[0] + 1;
    } else {
        while (out[0] < 3) {}
        if (threadIdx.x == 32) arrive(&bar);
    }
}
"""
)
SPIN = {
    "try": "wait(b, p)",
    "test": "while (!test_wait(b, p)) {}",
    "sleep": 'while (!test_wait(b, p)) asm volatile("nanosleep.u32 20;")',
}


def waits(device: Device, how: str, kernel: str) -> gpu.device.Kernel:
    options = (f"-DWAIT(b,p)={SPIN[how]}",)
    return device.compile(WAITS, options=options, arch="sm_90a").kernel(kernel)


@pytest.mark.parametrize("how", SPIN)
def test_waits_make_progress(hopper: Device, how: str) -> None:
    out = hopper.empty((1,), np.uint32)
    waits(hopper, how, "numbers").launch((1,), (64,), [out, 9])
    total = 0
    for i in range(9):
        total = (total * 5 + i * i) % 2**32
    assert out.to_numpy()[0] == total
    x, out = hopper.array(np.arange(64, dtype=np.uint32)), hopper.empty((64,), np.uint32)
    waits(hopper, how, "copied").launch((3,), (64,), [x, out])
    assert np.array_equal(out.to_numpy(), np.arange(64))


@pytest.mark.parametrize("how", SPIN)
def test_lanes_of_a_warp_wait_for_each_other(hopper: Device, how: str) -> None:
    out = hopper.empty((3,), np.uint32)
    waits(hopper, how, "apart").launch((1,), (32,), [out])
    assert out.to_numpy().tolist() == [1, 2, 6]


@pytest.mark.parametrize("how", SPIN)
def test_a_peek_may_fail(hopper: Device, how: str) -> None:
    out = hopper.empty((1,), np.uint32)
    waits(hopper, how, "peek").launch((1,), (64,), [out, 7])
    assert out.to_numpy()[0] == sum(i * i for i in range(1, 8))
    out = hopper.array(np.zeros(2, np.uint32))
    waits(hopper, how, "patient").launch((1,), (64,), [out])
    assert out.to_numpy().tolist() == [6, 0]
    out = hopper.array(np.zeros(1, np.uint32))
    waits(hopper, how, "spins").launch((1,), (64,), [out])
    assert out.to_numpy()[0] >= 3


def test_waiting_costs_nothing() -> None:
    """The consumer waits while the producer works for long: the budget is the producer's."""
    source = (
        CUDA
        + r"""
extern "C" __global__ void slow(u32* out, int n) {
    __shared__ __align__(8) u64 bar;
    if (threadIdx.x == 0) init(&bar, 1);
    __syncthreads();
    u32 x = 1;
    if (threadIdx.x < 32) {
#pragma unroll 1
        for (int i = 0; i < n; i++) x = x * 1664525u + 1013904223u;
        out[threadIdx.x] = x;
        if (threadIdx.x == 0) arrive(&bar);
    } else wait(&bar, 0);
}
"""
    )
    counts = []
    for threads in (32, 256):
        for n in (100, 1000):
            device = executor(Schedule("lazy"))
            kernel = device.compile(source, arch="sm_90a").kernel("slow")
            report = kernel.launch((1,), (threads,), [device.empty((32,), np.uint32), n])
            counts.append(report.instructions)
    assert counts[1] - counts[0] == counts[3] - counts[2]


DEADLOCKS = (
    CUDA
    + r"""
extern "C" __global__ void stuck(u32* out) {
    __shared__ __align__(8) u64 bar[2];
    if (threadIdx.x == 0) { init(bar, 3); init(bar + 1, 1); }
    __syncthreads();
    int w = threadIdx.x / 32;
    if (w == 0) {
        if (threadIdx.x == 0) { arrive(bar); expect(bar + 1, 64); }
        LOOP(bar, 0);
    } else if (w == 1) {
        LOOP(bar + 1, 0);
    } else {
        asm volatile("bar.sync 3, 128;" ::: "memory");
    }
    out[threadIdx.x] = 1;
}

extern "C" __global__ void cluster(u32* out) {
    if (cta_rank() == 0) {
        if (threadIdx.x < 32) cluster_sync();
        else __syncthreads();
    }
    else cluster_sync();
}
"""
)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_deadlocks_say_who_waits_for_what(schedule: Schedule) -> None:
    module = executor(schedule).compile(DEADLOCKS, options=("-DLOOP=wait",), arch="sm_90a")
    with pytest.raises(DeadlockError) as caught:
        module.kernel("stuck").launch((1,), (96,), [module.device.empty((97,), np.uint32)])
    text = str(caught.value)
    waits = re.findall(r"block \(0, 0, 0\): warp (\d) waits at PTX line (\d+): (.*)", text)
    assert {warp: what for warp, _, what in waits} == {
        "0": "mbarrier at shared offset 0 of block (0, 0, 0), awaited phase parity 0; it is in"
        " phase parity 0, 2 of 3 arrivals and 0 bytes missing",
        "1": "mbarrier at shared offset 8 of block (0, 0, 0), awaited phase parity 0; it is in"
        " phase parity 0, 0 of 1 arrivals and 64 bytes missing",
    }
    lines = module.ptx.split("\n")
    assert all("mbarrier.try_wait" in lines[int(line) - 1] for _, line, _ in waits)
    assert re.search(r"warps 2 wait at barrier 3, PTX line \d+: 32 of 128 threads", text)


def test_waits_that_do_something_end_with_the_budget() -> None:
    """What a waiting warp stores could be what another one waits for."""
    loop = "-DLOOP(b,p)=while (!try_wait(b, p)) out[96] = 0"
    device = executor(budget=20_000)
    kernel = device.compile(DEADLOCKS, options=(loop,), arch="sm_90a").kernel("stuck")
    with pytest.raises(BudgetError, match="budget of 20000"):
        kernel.launch((1,), (96,), [device.empty((97,), np.uint32)])


def test_deadlocks_of_a_cluster() -> None:
    device = executor()
    kernel = device.compile(DEADLOCKS, options=("-DLOOP=wait",), arch="sm_90a").kernel("cluster")
    with pytest.raises(DeadlockError) as caught:
        kernel.launch((2,), (64,), [device.empty((1,), np.uint32)], cluster=(2, 1, 1))
    text = str(caught.value)
    assert "block (1, 0, 0): warp 1 waits at PTX line" in text
    assert "cluster barrier: 96 of 128 threads have arrived" in text
    assert "warps 1 wait at barrier 0" in text
