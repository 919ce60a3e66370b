"""Small kernels in pairs: right, and broken (``-DBROKEN``) by one removed or wrong synchronisation.

The lines that a report has to name carry ``// @``.  Those that replay a public bug say which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import gpu
from gpu.compile import compile_cuda
from gpu.counters import Report
from gpu.ptx.executor import PtxDevice

BF16 = np.dtype(ml_dtypes.bfloat16)
Arguments = Callable[[PtxDevice], Sequence[Any]]

PRELUDE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
struct __align__(64) Map { char bytes[128]; };
__device__ __forceinline__ u32 sa(const void* p) { return (u32)__cvta_generic_to_shared(p); }
#define PTX asm volatile
#define CP_ASYNC(to, from) \
  PTX("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(sa(to)), "l"(from) : "memory")
#define CP_COMMIT() PTX("cp.async.commit_group;" ::: "memory")
#define CP_WAIT(n) PTX("cp.async.wait_group %0;" ::"n"(n) : "memory")
#define INIT(b, n) PTX("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(sa(b)), "r"(n) : "memory")
#define INVAL(b) PTX("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(sa(b)) : "memory")
#define FENCE_INIT() PTX("fence.mbarrier_init.release.cluster;" ::: "memory")
#define FENCE_PROXY() PTX("fence.proxy.async;" ::: "memory")
#define ARRIVE(b) PTX("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(sa(b)) : "memory")
#define EXPECT(b, n) \
  PTX("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(sa(b)), "r"(n) : "memory")
#define WAIT(b, p) \
  PTX("{ .reg .pred q; again: mbarrier.try_wait.parity.shared::cta.b64 q, [%0], %1;" \
      " @!q bra again; }" ::"r"(sa(b)), "r"(p) : "memory")
#define BULK_LOAD(to, from, n, b) \
  PTX("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" \
      ::"r"(sa(to)), "l"(from), "r"(n), "r"(sa(b)) : "memory")
#define TMA_LOAD(to, map, x, y, b) \
  PTX("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes" \
      " [%0], [%1, {%2, %3}], [%4];" \
      ::"r"(sa(to)), "l"(map), "r"(x), "r"(y), "r"(sa(b)) : "memory")
#define BULK_STORE(to, from, n) \
  PTX("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" \
      ::"l"(to), "r"(sa(from)), "r"(n) : "memory")
#define BULK_COMMIT() PTX("cp.async.bulk.commit_group;" ::: "memory")
#define BULK_WAIT_READ() PTX("cp.async.bulk.wait_group.read 0;" ::: "memory")
#define BULK_WAIT() PTX("cp.async.bulk.wait_group 0;" ::: "memory")
#define BAR_SYNC(i, n) PTX("bar.sync %0, %1;" ::"n"(i), "n"(n) : "memory")
#define BAR_ARRIVE(i, n) PTX("bar.arrive %0, %1;" ::"n"(i), "n"(n) : "memory")
#define CLUSTER_ARRIVE() PTX("barrier.cluster.arrive.release.aligned;" ::: "memory")
#define CLUSTER_WAIT() PTX("barrier.cluster.wait.acquire.aligned;" ::: "memory")
#define WG_FENCE() PTX("wgmma.fence.sync.aligned;" ::: "memory")
#define WG_COMMIT() PTX("wgmma.commit_group.sync.aligned;" ::: "memory")
#define WG_WAIT(n) PTX("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory")
// d [64, 8] += a [64, 16] b [8, 16]^T: core matrices of 8 rows by 16 bytes, along K 128 apart.
#define WGMMA(d, a, b) \
  PTX("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1," \
      " 0, 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(core(a)), "l"(core(b)))
__device__ __forceinline__ u64 core(const void* p) {
  return (u64)(sa(p) >> 4) | (u64)(128 >> 4) << 16 | (u64)(256 >> 4) << 32;
}
__device__ __forceinline__ u32 peer(const void* p, u32 rank) {
  u32 r;
  PTX("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(sa(p)), "r"(rank));
  return r;
}
__device__ __forceinline__ u32 rank() {
  u32 r;
  PTX("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
"""


def two_arrays(device: PtxDevice) -> Sequence[Any]:
    """``x`` [4096] counting up, and an empty ``y`` [4096], both float32."""
    return device.array(np.arange(4096, dtype=np.float32), "x"), device.empty(4096, np.float32, "y")


@dataclass(frozen=True)
class Pair:
    """A kernel named ``k`` and how it is launched; ``kind`` is what its broken version shows.

    ``run(device, text, is_broken)`` stands for a plain launch; ``is_ptx``: the body is PTX.
    """

    name: str
    kind: str
    body: str
    arguments: Arguments = two_arrays
    grid: int = 1
    block: int = 128
    cluster: int = 1
    shared_bytes: int = 0
    run: Callable[[PtxDevice, str, bool], Sequence[Report]] | None = None
    is_ptx: bool = False

    @property
    def source(self) -> str:
        return self.body if self.is_ptx else PRELUDE + self.body

    def lines(self) -> set[int]:
        """The lines of the source that a report has to name."""
        return {n for n, text in enumerate(self.source.splitlines(), 1) if "// @" in text}

    def reports(self, device: PtxDevice, is_broken: bool) -> Sequence[Report]:
        if self.is_ptx:
            text = chosen_parts(self.source, is_broken)
        else:
            options = ("-lineinfo", *(("-DBROKEN",) if is_broken else ()))
            text = compile_cuda(self.source, options=options, arch="sm_90a", name="zoo.cu")
        if self.run is not None:
            return self.run(device, text, is_broken)
        arguments = self.arguments(device)
        kernel = device.load(text).kernel("k")
        cluster = (self.cluster, 1, 1)
        grid, block = (self.grid,), (self.block,)
        return [kernel.launch(grid, block, arguments, self.shared_bytes, cluster)]


def chosen_parts(text: str, is_broken: bool) -> str:
    """What ``#ifdef BROKEN`` leaves of a text, every line at its place."""
    lines, keeps = [], True
    for line in text.splitlines():
        if line.startswith("#"):
            keeps = {"#ifdef BROKEN": is_broken, "#else": not keeps, "#endif": True}[line]
            line = ""
        lines.append(line if keeps else "")
    return "\n".join(lines)


def kernel(body: str, parameters: str = "const float* x, float* y") -> str:
    return f'\nextern "C" __global__ void k({parameters}) {{\n{body}\n}}\n'


# Shared memory and barriers

BARRIERS = [
    Pair(
        "a barrier between write and read",
        "race",
        kernel(
            r"""
  __shared__ float tile[128];
  int t = threadIdx.x;
  tile[t] = x[t];  // @
#ifndef BROKEN
  __syncthreads();
#endif
  y[t] = tile[127 - t];  // @
"""
        ),
    ),
    Pair(
        "a barrier before the tile is overwritten",
        "race",
        kernel(
            r"""
  __shared__ float tile[128];
  int t = threadIdx.x;
  float sum = 0;
#pragma unroll 1
  for (int i = 0; i < 3; ++i) {
    tile[t] = x[128 * i + t];  // @
    __syncthreads();
    sum += tile[127 - t];  // @
#ifndef BROKEN
    __syncthreads();
#endif
  }
  y[t] = sum;
"""
        ),
    ),
    Pair(
        "a warp's barrier is not the CTA's",
        "race",
        kernel(
            r"""
  __shared__ float tile[128];
  int t = threadIdx.x;
  tile[t] = x[t];  // @
#ifdef BROKEN
  __syncwarp();
#else
  __syncthreads();
#endif
  y[t] = tile[t ^ 32];  // @
"""
        ),
    ),
    Pair(
        "a named barrier for the pair of warps that share",
        "race",
        kernel(
            r"""
  __shared__ float tile[128];
  int t = threadIdx.x;
  tile[t] = x[t];  // @
#ifdef BROKEN
  if (t / 32 % 2 == 0) BAR_SYNC(1, 64); else BAR_SYNC(2, 64);
#else
  if (t < 64) BAR_SYNC(1, 64); else BAR_SYNC(2, 64);
#endif
  y[t] = tile[t ^ 32];  // @
"""
        ),
    ),
    Pair(
        "a producer that arrives before it writes",
        "race",
        kernel(
            r"""
  __shared__ float tile[64];
  int t = threadIdx.x;
  if (t < 64) {
#ifdef BROKEN
    BAR_ARRIVE(1, 128);
#endif
    tile[t] = x[t];  // @
#ifndef BROKEN
    BAR_ARRIVE(1, 128);
#endif
  } else {
    BAR_SYNC(1, 128);
    y[t - 64] = tile[t - 64];  // @
  }
"""
        ),
    ),
    Pair(
        "a flag in shared memory needs a fence",
        "race",
        kernel(
            r"""
  __shared__ volatile int flag;
  __shared__ float value;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    value = x[7];  // @
#ifndef BROKEN
    __threadfence_block();
#endif
    flag = 1;
  } else if (threadIdx.x == 32) {
    while (flag == 0) {}
    __threadfence_block();
    y[0] = value;  // @
  }
"""
        ),
    ),
    Pair(
        "neighbouring bytes are no race, shared ones are",
        "race",
        kernel(
            r"""
  __shared__ unsigned char bytes[260];
  int t = threadIdx.x;
#ifdef BROKEN
  int place = t + t / 32;  // a warp's last two bytes meet the next warp's first
  if (t / 32 == 1) place = t - 1;
#else
  int place = t;
#endif
  bytes[place] = t;  // @
  __syncthreads();
  y[t] = bytes[place];
"""
        ),
    ),
    Pair(
        "the running maximum of the other warpgroup",
        "race",
        kernel(
            r"""
  // One warpgroup rescales by a maximum that the other has to have written: a missing named barrier
  // between the two shows only under some interleavings.
  __shared__ float maximum[128];
  int t = threadIdx.x % 128, group = threadIdx.x / 128;
  if (group == 0) {
    maximum[t] = fmaxf(x[t], x[t + 128]);  // @
    BAR_ARRIVE(3, 256);
  } else {
#ifndef BROKEN
    BAR_SYNC(3, 256);
#endif
    y[t] = x[t] - maximum[t];  // @
  }
"""
        ),
        block=256,
    ),
    Pair(
        "a barrier that some lanes go around",
        "illegal_use",
        kernel(
            r"""
  int t = threadIdx.x;
#ifdef BROKEN
  if (t % 32 < 16) {
    BAR_SYNC(0, 128);
  } else {
    __syncthreads();
    y[t] = 1;
  }
#else
  __syncthreads();
#endif
  y[t] = x[t];
"""
        ),
    ),
    Pair(
        "a named barrier for too many threads",
        "deadlock",
        kernel(
            r"""
  int t = threadIdx.x;
  if (t < 64) {
#ifdef BROKEN
    BAR_SYNC(1, 96);
#else
    BAR_SYNC(1, 64);
#endif
    y[t] = x[t];
  }
"""
        ),
    ),
]

# cp.async

COPIES = [
    Pair(
        "a wait for the copy",
        "race",
        kernel(
            r"""
  __shared__ __align__(16) float tile[512];
  int t = threadIdx.x;
  CP_ASYNC(tile + 4 * t, x + 4 * t);  // @
  CP_COMMIT();
#ifndef BROKEN
  CP_WAIT(0);
#endif
  y[t] = tile[4 * t + 1];  // @
"""
        ),
    ),
    Pair(
        "a wait that leaves one group too many in flight",
        "race",
        kernel(
            r"""
  __shared__ __align__(16) float tile[2][512];
  int t = threadIdx.x;
  CP_ASYNC(tile[0] + 4 * t, x + 4 * t);  // @
  CP_COMMIT();
  CP_ASYNC(tile[1] + 4 * t, x + 512 + 4 * t);
  CP_COMMIT();
#ifdef BROKEN
  CP_WAIT(2);
#else
  CP_WAIT(1);
#endif
  float value = tile[0][4 * t + 1];  // @
  CP_WAIT(0);
  y[t] = value + tile[1][4 * t];
"""
        ),
    ),
    Pair(
        "a wait is for one's own copies only",
        "race",
        kernel(
            r"""
  __shared__ __align__(16) float tile[512];
  int t = threadIdx.x;
  CP_ASYNC(tile + 4 * t, x + 4 * t);  // @
  CP_COMMIT();
  CP_WAIT(0);
#ifndef BROKEN
  __syncthreads();
#endif
  y[t] = tile[511 - 4 * t];  // @
"""
        ),
    ),
    Pair(
        "an arrival that waits for the copies",
        "race",
        kernel(
            r"""
  __shared__ __align__(16) float tile[512];
  __shared__ __align__(8) u64 full;
  int t = threadIdx.x;
  if (t == 0) INIT(&full, 128);
  __syncthreads();
  CP_ASYNC(tile + 4 * t, x + 4 * t);  // @
#ifdef BROKEN
  ARRIVE(&full);
#else
  PTX("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(sa(&full)) : "memory");
#endif
  WAIT(&full, 0);
  y[t] = tile[511 - 4 * t];  // @
"""
        ),
    ),
    Pair(
        "a ring of buffers with one buffer",
        "race",
        kernel(
            r"""
  __shared__ __align__(16) float tile[2][512];
  int t = threadIdx.x;
  float sum = 0;
  CP_ASYNC(tile[0] + 4 * t, x + 4 * t);
  CP_COMMIT();
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    CP_WAIT(0);
    __syncthreads();
#ifdef BROKEN
    int next = 0;
#else
    int next = (i + 1) % 2;
#endif
    if (i < 3) CP_ASYNC(tile[next] + 4 * t, x + 512 * (i + 1) + 4 * t);  // @
    CP_COMMIT();
#ifdef BROKEN
    sum += tile[0][511 - 4 * t];  // @
#else
    sum += tile[i % 2][511 - 4 * t];
#endif
  }
  y[t] = sum;
"""
        ),
    ),
]

# Global memory between CTAs

GLOBAL = [
    Pair(
        "an output element of two CTAs",
        "race",
        kernel(
            r"""
#ifdef BROKEN
  int place = 96 * blockIdx.x + threadIdx.x;
#else
  int place = 128 * blockIdx.x + threadIdx.x;
#endif
  y[place] = x[place] + blockIdx.x;  // @
"""
        ),
        grid=4,
    ),
    Pair(
        "the last CTA adds up: a fence before the ticket",
        "race",
        kernel(
            r"""
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    y[blockIdx.x] = 2 * x[blockIdx.x];  // @
#ifndef BROKEN
    __threadfence();
#endif
    is_last = atomicAdd(tickets, 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (is_last && threadIdx.x < 8) y[100 + threadIdx.x] = y[threadIdx.x];  // @
""",
            "const float* x, float* y, u32* tickets",
        ),
        arguments=lambda d: (*two_arrays(d), d.array(np.zeros(1, np.uint32), "tickets")),
        grid=8,
        block=32,
    ),
    Pair(
        "the last CTA adds up: a fence after the ticket",
        "race",
        kernel(
            r"""
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    y[blockIdx.x] = 2 * x[blockIdx.x];  // @
    __threadfence();
    is_last = atomicAdd(tickets, 1) == gridDim.x - 1;
#ifndef BROKEN
    __threadfence();
#endif
  }
  __syncthreads();
  if (is_last && threadIdx.x < 8) y[100 + threadIdx.x] = y[threadIdx.x];  // @
""",
            "const float* x, float* y, u32* tickets",
        ),
        arguments=lambda d: (*two_arrays(d), d.array(np.zeros(1, np.uint32), "tickets")),
        grid=8,
        block=32,
    ),
    Pair(
        "a barrier of the whole grid",
        "race",
        kernel(
            r"""
  // As cooperative groups have it: one thread of each CTA counts in and waits for all.
  int place = 128 * blockIdx.x + threadIdx.x;
  y[place] = x[place] + 1;  // @
  __syncthreads();
  if (threadIdx.x == 0) {
#ifndef BROKEN
    __threadfence();
#endif
    atomicAdd(count, 1);
    while (*(volatile u32*)count < gridDim.x) {}
    __threadfence();
  }
  __syncthreads();
  float other = y[(place + 128) % 512];  // @
  z[place] = other;
""",
            "const float* x, float* y, u32* count, float* z",
        ),
        arguments=lambda d: (
            *two_arrays(d),
            d.array(np.zeros(1, np.uint32), "count"),
            d.empty(512, np.float32, "z"),
        ),
        grid=4,
    ),
    Pair(
        "a semaphore that hands tiles from CTA to CTA",
        "race",
        kernel(
            r"""
  // Split-K: each CTA adds its part to the tile when the one before has released the semaphore.
  int t = threadIdx.x;
  if (t == 0) {
    u32 turn = blockIdx.x + 1;
    while (turn != blockIdx.x) {
#ifdef BROKEN
      PTX("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(turn) : "l"(semaphore) : "memory");
#else
      PTX("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(turn) : "l"(semaphore) : "memory");
#endif
    }
  }
  __syncthreads();
  y[t] = (blockIdx.x ? y[t] : 0) + x[128 * blockIdx.x + t];  // @
  __syncthreads();
  if (t == 0)
    PTX("st.release.gpu.global.u32 [%0], %1;"
        ::"l"(semaphore), "r"(blockIdx.x + 1) : "memory");
""",
            "const float* x, float* y, u32* semaphore",
        ),
        arguments=lambda d: (*two_arrays(d), d.array(np.zeros(1, np.uint32), "semaphore")),
        grid=4,
    ),
    Pair(
        "a flag that is released",
        "race",
        kernel(
            r"""
  if (threadIdx.x) return;
  if (blockIdx.x == 0) {
    y[0] = x[5];  // @
#ifdef BROKEN
    PTX("st.relaxed.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
#else
    PTX("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
#endif
  } else {
    u32 seen = 0;
    while (seen == 0) PTX("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag));
    y[1] = y[0];  // @
  }
""",
            "const float* x, float* y, u32* flag",
        ),
        arguments=lambda d: (*two_arrays(d), d.array(np.zeros(1, np.uint32), "flag")),
        grid=2,
        block=32,
    ),
    Pair(
        "a release for one's own CTA is not for others",
        "race",
        kernel(
            r"""
  if (threadIdx.x) return;
  if (blockIdx.x == 0) {
    y[0] = x[5];  // @
#ifdef BROKEN
    PTX("st.release.cta.global.u32 [%0], 1;" ::"l"(flag) : "memory");
#else
    PTX("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
#endif
  } else {
    u32 seen = 0;
    while (seen == 0) PTX("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag));
    y[1] = y[0];  // @
  }
""",
            "const float* x, float* y, u32* flag",
        ),
        arguments=lambda d: (*two_arrays(d), d.array(np.zeros(1, np.uint32), "flag")),
        grid=2,
        block=32,
    ),
]

# Memory that holds nothing, or is not there


def pool_of_pages(device: PtxDevice) -> Sequence[Any]:
    """A pool of 4 pages of 32 values, of which the last sequence fills 2 pages and 10 slots."""
    pool = device.empty(128, np.float32, "pool")
    fill = device.compile(
        'extern "C" __global__ void fill(float* p) { if (threadIdx.x < 74) p[threadIdx.x] = 1; }'
    ).kernel("fill")
    fill.launch((1,), (128,), [pool])
    return pool, device.empty(128, np.float32, "y"), 74


def partial_results(device: PtxDevice) -> Sequence[Any]:
    return device.empty(8, np.float32, "partial"), device.empty(8, np.float32, "y"), 5


def freed_array(device: PtxDevice, ptx: str, is_broken: bool) -> Sequence[Report]:
    x, y = two_arrays(device)
    address = np.uint64(x.address)
    if is_broken:
        del x
    return [device.load(ptx).kernel("k").launch((1,), (128,), [address, y])]


def counted_tiles(device: PtxDevice, ptx: str, is_broken: bool) -> Sequence[Report]:
    kernel = device.load(ptx).kernel("k")
    counter = device.array(np.zeros(1, np.uint32), "counter")
    reports = []
    for _ in range(2):
        x, y = device.array(np.ones(1024, np.float32)), device.empty(1024, np.float32, "y")
        reports.append(kernel.launch((3,), (128,), [x, y, counter]))
        if not is_broken:
            counter.fill(np.zeros(1, np.uint32))
    return reports


def dependent_launch(device: PtxDevice, ptx: str, is_broken: bool) -> Sequence[Report]:
    module = device.load(ptx)
    x, y = two_arrays(device)
    data = device.array(np.zeros(128, np.float32), "data")
    first = gpu.Call(module.kernel("first"), (1,), (128,), [x, data])
    second = gpu.Call(module.kernel("second"), (1,), (128,), [data, y])
    return device.launch_dependent(first, second)


MEMORY = [
    Pair(
        "an uninitialised tail of a tile",
        "uninitialised",
        kernel(
            r"""
  __shared__ float tile[128];
  int t = threadIdx.x;
#ifdef BROKEN
  if (t < 100) tile[t] = x[t];
#else
  tile[t] = t < 100 ? x[t] : 0;
#endif
  __syncthreads();
  y[t] = tile[127 - t];  // @
"""
        ),
    ),
    Pair(
        "unused slots of the last page, times a weight of zero",
        "uninitialised",
        kernel(
            r"""
  // The weights of the slots behind the last key are 0, but 0 * NaN is NaN.
  int t = threadIdx.x;
  float weight = t < keys ? 0.5f : 0.0f;
#ifdef BROKEN
  float value = t < 96 ? pool[t] : 0.0f;  // @
#else
  float value = t < keys ? pool[t] : 0.0f;
#endif
  y[t] = weight * value;
""",
            "const float* pool, float* y, int keys",
        ),
        arguments=pool_of_pages,
    ),
    Pair(
        "the partial outputs of empty splits",
        "uninitialised",
        kernel(
            r"""
  // Splits without keys write nothing; their weight is 0, and the combine step must not read them.
  __shared__ float weight[8];
  int t = threadIdx.x;
  if (t < 8) weight[t] = t < splits ? 1.0f / splits : 0.0f;
  if (t < splits) partial[t] = t;
  __syncthreads();
  if (t == 0) {
    float sum = 0;
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
#ifdef BROKEN
      sum += weight[i] * partial[i];  // @
#else
      if (weight[i] > 0) sum += weight[i] * partial[i];
#endif
    }
    y[0] = sum;
  }
""",
            "float* partial, float* y, int splits",
        ),
        arguments=partial_results,
    ),
    Pair(
        "a register that one way leaves unwritten",
        "uninitialised_register",
        r""".version 8.6
.target sm_90
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 y) {
    .reg .b64 %rd<4>; .reg .b32 %r<4>; .reg .pred %p<2>;
    ld.param.u64 %rd1, [y];
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 64;
#ifdef BROKEN
    @!%p1 bra done;
#else
    mov.u32 %r2, 0;
    @!%p1 bra done;
#endif
    add.u32 %r2, %r1, 7;
done:
    mad.wide.u32 %rd2, %r1, 4, %rd1;
    st.global.u32 [%rd2], %r2;  // @
    ret;
}
""",
        is_ptx=True,
    ),
    Pair(
        "an empty sequence",
        "out_of_bounds",
        kernel(
            r"""
  // The last key of a sequence without keys is in front of everything.
  int t = threadIdx.x, last = keys - 1;
#ifdef BROKEN
  y[t] = x[128 * last + t];  // @
#else
  y[t] = last < 0 ? 0 : x[128 * last + t];
#endif
""",
            "const float* x, float* y, int keys",
        ),
        arguments=lambda d: (*two_arrays(d), 0),
    ),
    Pair(
        "an offset that does not fit 32 bits",
        "out_of_bounds",
        kernel(
            r"""
  // Page 70,000 of 32,768 elements: the product wraps around, and lands in front of the array.
#ifdef BROKEN
  int offset = page * 32768;
#else
  long long offset = (long long)page * 32768 % 4096;
#endif
  y[threadIdx.x] = x[offset + threadIdx.x];  // @
""",
            "const float* x, float* y, int page",
        ),
        arguments=lambda d: (*two_arrays(d), 70_000),
    ),
    Pair(
        "one element too far",
        "out_of_bounds",
        kernel(
            r"""
  int i = 128 * blockIdx.x + threadIdx.x;
#ifdef BROKEN
  if (i <= n) y[i] = x[i];  // @
#else
  if (i < n) y[i] = x[i];
#endif
""",
            "const float* x, float* y, int n",
        ),
        arguments=lambda d: (*two_arrays(d), 4096),
        grid=33,
    ),
    Pair(
        "one element behind static shared memory",
        "out_of_bounds",
        kernel(
            r"""
  __shared__ float tile[128];
  int t = threadIdx.x;
#ifdef BROKEN
  tile[t + 1] = x[t];  // @
#else
  tile[t] = x[t];
#endif
  __syncthreads();
  y[t] = tile[127 - t];
"""
        ),
    ),
    Pair(
        "one element behind dynamic shared memory",
        "out_of_bounds",
        kernel(
            r"""
  extern __shared__ float memory[];
  int t = threadIdx.x;
#ifdef BROKEN
  memory[t + 1] = x[t];  // @
#else
  memory[t] = x[t];
#endif
  __syncthreads();
  y[t] = memory[127 - t];
"""
        ),
        shared_bytes=512,
    ),
    Pair(
        "an index behind a local array",
        "out_of_bounds",
        kernel(
            r"""
  int t = threadIdx.x;
  float values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = x[128 * i + t];
#ifdef BROKEN
  y[t] = values[(int)x[t] % 8 + 64];  // @
#else
  y[t] = values[(int)x[t] % 8];
#endif
"""
        ),
    ),
    Pair(
        "a peer that the cluster does not have",
        "out_of_bounds",
        kernel(
            r"""
  __shared__ float tile[32];
  int t = threadIdx.x;
  tile[t] = x[t];
  CLUSTER_ARRIVE();
  CLUSTER_WAIT();
#ifdef BROKEN
  u32 place = peer(tile + t, 1) + (1u << 24);
#else
  u32 place = peer(tile + t, 1);
#endif
  float value;
  PTX("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(place) : "memory");  // @
  y[32 * blockIdx.x + t] = value;
  CLUSTER_ARRIVE();
  CLUSTER_WAIT();
"""
        ),
        grid=2,
        block=32,
        cluster=2,
    ),
    Pair(
        "a vector at an odd place",
        "misaligned",
        kernel(
            r"""
  int t = threadIdx.x;
#ifdef BROKEN
  float4 value = *(const float4*)(x + 4 * t + 1);  // @
#else
  float4 value = *(const float4*)(x + 4 * t);
#endif
  y[t] = value.x + value.w;
"""
        ),
    ),
    Pair(
        "an array that has been freed",
        "out_of_bounds",
        kernel("  y[threadIdx.x] = x[threadIdx.x];  // @"),
        run=freed_array,
    ),
    Pair(
        "a tile counter that nobody set back",
        "never_written",
        kernel(
            r"""
  // A persistent kernel takes tiles from a counter, which the launch before has left at its end.
  __shared__ u32 tile;
#pragma unroll 1
  while (true) {
    __syncthreads();
    if (threadIdx.x == 0) tile = atomicAdd(counter, 1);
    __syncthreads();
    if (tile >= 8) return;
    y[128 * tile + threadIdx.x] = x[128 * tile + threadIdx.x];
  }
""",
            "const float* x, float* y, u32* counter",
        ),
        run=counted_tiles,
    ),
]

# Bulk copies, mbarriers and the async proxy


def maps(device: PtxDevice) -> Sequence[Any]:
    x, y = two_arrays(device)
    boxes = gpu.TensorMap(device.array(np.zeros((64, 64), np.float32), "m"), (8, 32))
    return boxes, x, y


RECEIVE = r"""
  __shared__ __align__(128) float tile[2][512];
  __shared__ __align__(8) u64 full[2];
  int t = threadIdx.x;
  if (t == 0) {
    INIT(&full[0], 1);
    INIT(&full[1], 1);
    FENCE_INIT();
  }
  __syncthreads();
"""
ASYNC = [
    Pair(
        "a wait for the bulk copy",
        "race",
        kernel(
            RECEIVE
            + r"""
  if (t == 0) {
    EXPECT(&full[0], 2048);
    BULK_LOAD(tile[0], x, 2048, &full[0]);  // @
  }
#ifndef BROKEN
  WAIT(&full[0], 0);
#endif
  y[t] = tile[0][t];  // @
  WAIT(&full[0], 0);
"""
        ),
    ),
    Pair(
        "the parity of the second phase",
        # Whether the second phase has ended when its wait asks for the first decides which.
        "race or deadlock",
        kernel(
            RECEIVE
            + r"""
  float sum = 0;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    if (t == 0) {
      EXPECT(&full[0], 2048);
      BULK_LOAD(tile[0], x + 512 * i, 2048, &full[0]);  // @
    }
#ifdef BROKEN
    int parity = 0;
#else
    int parity = i;
#endif
    WAIT(&full[0], parity);
    sum += tile[0][t];  // @
    __syncthreads();
  }
  y[t] = sum;
"""
        ),
    ),
    Pair(
        "a tile is overwritten while others read it",
        "race",
        kernel(
            RECEIVE
            + r"""
  float sum = 0;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    if (t == 0) {
      EXPECT(&full[0], 2048);
      BULK_LOAD(tile[0], x + 512 * i, 2048, &full[0]);  // @
    }
    WAIT(&full[0], i);
    sum += tile[0][511 - t];  // @
#ifndef BROKEN
    __syncthreads();
#endif
  }
  y[t] = sum;
"""
        ),
    ),
    Pair(
        "stored results that the bulk copy need not see",
        "missing_proxy_fence",
        kernel(
            r"""
  __shared__ __align__(128) float tile[128];
  int t = threadIdx.x;
  tile[t] = x[t] + 1;  // @
#ifndef BROKEN
  FENCE_PROXY();
#endif
  __syncthreads();
  if (t == 0) {
    BULK_STORE(y, tile, 512);  // @
    BULK_COMMIT();
    BULK_WAIT();
  }
"""
        ),
    ),
    Pair(
        "a fence before the barrier that brings the news",
        "missing_proxy_fence",
        kernel(
            r"""
  // The issuing thread's fence covers what it knows by then, not what it learns at the barrier.
  __shared__ __align__(128) float tile[128];
  int t = threadIdx.x;
  tile[t] = x[t] + 1;  // @
#ifdef BROKEN
  if (t < 32) FENCE_PROXY();
  __syncthreads();
#else
  __syncthreads();
  if (t < 32) FENCE_PROXY();
#endif
  if (t == 0) {
    BULK_STORE(y, tile, 512);  // @
    BULK_COMMIT();
    BULK_WAIT();
  }
"""
        ),
    ),
    Pair(
        "a source that is overwritten before it is read",
        "race",
        kernel(
            r"""
  __shared__ __align__(128) float tile[32];
  int t = threadIdx.x;
  if (t >= 32) return;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    tile[t] = x[32 * i + t];  // @
    FENCE_PROXY();
    __syncwarp();
    if (t == 0) {
      BULK_STORE(y + 32 * i, tile, 128);  // @
      BULK_COMMIT();
#ifndef BROKEN
      BULK_WAIT_READ();
#endif
    }
    __syncwarp();
  }
  if (t == 0) BULK_WAIT();
"""
        ),
    ),
    Pair(
        "an mbarrier that is used before it is known",
        "race",
        kernel(
            r"""
  __shared__ __align__(8) u64 full;
  int t = threadIdx.x;
  if (t == 0) INIT(&full, 128);  // @
#ifndef BROKEN
  __syncthreads();
#else
  if (t >= 32) __nanosleep(100);
#endif
  ARRIVE(&full);  // @
  WAIT(&full, 0);
  y[t] = x[t];
"""
        ),
    ),
    Pair(
        "an mbarrier that starts again while it is used",
        "race",
        kernel(
            r"""
  __shared__ __align__(8) u64 full;
  int t = threadIdx.x;
  if (t == 0) INIT(&full, 128);
  __syncthreads();
  ARRIVE(&full);
  WAIT(&full, 0);  // @
#ifndef BROKEN
  __syncthreads();
#endif
  if (t == 0) INIT(&full, 128);  // @
  __syncthreads();
  y[t] = x[t];
"""
        ),
    ),
    Pair(
        "more arrivals than the phase expects",
        "illegal_use",
        kernel(
            r"""
  __shared__ __align__(8) u64 full;
  int t = threadIdx.x;
#ifdef BROKEN
  if (t == 0) INIT(&full, 100);
#else
  if (t == 0) INIT(&full, 128);
#endif
  __syncthreads();
  ARRIVE(&full);  // @
  WAIT(&full, 0);
  y[t] = x[t];
"""
        ),
    ),
    Pair(
        "an mbarrier that is no more",
        "illegal_use",
        kernel(
            r"""
  __shared__ __align__(8) u64 full;
  int t = threadIdx.x;
  if (t == 0) INIT(&full, 128);
  __syncthreads();
#ifdef BROKEN
  if (t == 0) INVAL(&full);
  __syncthreads();
#endif
  ARRIVE(&full);  // @
  WAIT(&full, 0);
  y[t] = x[t];
"""
        ),
    ),
    Pair(
        "an mbarrier that nobody made",
        "illegal_use",
        kernel(
            r"""
  __shared__ __align__(8) u64 full;
  int t = threadIdx.x;
#ifndef BROKEN
  if (t == 0) INIT(&full, 128);
  __syncthreads();
#endif
  ARRIVE(&full);  // @
  WAIT(&full, 0);
  y[t] = x[t];
"""
        ),
    ),
    Pair(
        "more bytes expected than come",
        "deadlock",
        kernel(
            RECEIVE
            + r"""
  if (t == 0) {
#ifdef BROKEN
    EXPECT(&full[0], 4096);
#else
    EXPECT(&full[0], 2048);
#endif
    BULK_LOAD(tile[0], x, 2048, &full[0]);
  }
  WAIT(&full[0], 0);
  y[t] = tile[0][t];
"""
        ),
    ),
    Pair(
        "a tensor copy over the edge",
        "zero_fill",
        kernel(
            RECEIVE
            + r"""
  if (t == 0) {
    EXPECT(&full[0], 1024);
#ifdef BROKEN
    int row = 60;
#else
    int row = 56;
#endif
    TMA_LOAD(tile[0], &map, 0, row, &full[0]);  // @
  }
  WAIT(&full[0], 0);
  y[t] = tile[0][t];
""",
            "const __grid_constant__ Map map, const float* x, float* y",
        ),
        arguments=maps,
    ),
    Pair(
        "a tensor map that has been changed",
        "missing_proxy_fence",
        kernel(
            RECEIVE
            + r"""
  if (t == 0) {
    PTX("tensormap.replace.tile.global_address.global.b1024.b64 [%0], %1;"
        ::"l"(map), "l"(x) : "memory");  // @
#ifndef BROKEN
    PTX("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");
    PTX("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
#endif
    EXPECT(&full[0], 1024);
    TMA_LOAD(tile[0], map, 0, 0, &full[0]);  // @
  }
  WAIT(&full[0], 0);
  y[t] = tile[0][t];
""",
            "Map* map, const float* x, float* y",
        ),
        arguments=lambda d: (
            d.array(np.frombuffer(bytes(maps(d)[0]), np.uint8).copy(), "map"),
            *two_arrays(d),
        ),
    ),
]

# Clusters

CLUSTERS = [
    Pair(
        "a peer's memory before the peer has written it",
        "race",
        kernel(
            r"""
  __shared__ float tile[32];
  int t = threadIdx.x;
  tile[t] = x[t];  // @
#ifdef BROKEN
  __syncthreads();
#else
  CLUSTER_ARRIVE();
  CLUSTER_WAIT();
#endif
  float value;
  PTX("ld.shared::cluster.f32 %0, [%1];"
      : "=f"(value) : "r"(peer(tile + t, rank() ^ 1)) : "memory");  // @
  y[32 * blockIdx.x + t] = value;
  CLUSTER_ARRIVE();
  CLUSTER_WAIT();
"""
        ),
        grid=2,
        block=32,
        cluster=2,
    ),
    Pair(
        "a peer that exits too early",
        "early_exit",
        kernel(
            r"""
  __shared__ float tile[32];
  int t = threadIdx.x;
  tile[t] = x[t];
  CLUSTER_ARRIVE();
  CLUSTER_WAIT();
  float value = 0;
  if (rank() == 0)
    PTX("ld.shared::cluster.f32 %0, [%1];"
        : "=f"(value) : "r"(peer(tile + t, 1)) : "memory");  // @
  y[32 * blockIdx.x + t] = value;
#ifndef BROKEN
  CLUSTER_ARRIVE();
  CLUSTER_WAIT();
#endif
"""
        ),
        grid=2,
        block=32,
        cluster=2,
    ),
    Pair(
        "a wait for the asynchronous store",
        "race",
        kernel(
            r"""
  __shared__ __align__(16) u32 box[32];
  __shared__ __align__(8) u64 full;
  int t = threadIdx.x;
  if (t == 0) {
    INIT(&full, 1);
    FENCE_INIT();
    EXPECT(&full, 128);
  }
  CLUSTER_ARRIVE();
  CLUSTER_WAIT();
  PTX("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
      ::"r"(peer(box + t, rank() ^ 1)), "r"(t), "r"(peer(&full, rank() ^ 1)) : "memory");  // @
#ifndef BROKEN
  WAIT(&full, 0);
#endif
  y[32 * blockIdx.x + t] = box[t];  // @
  WAIT(&full, 0);
  CLUSTER_ARRIVE();
  CLUSTER_WAIT();
"""
        ),
        grid=2,
        block=32,
        cluster=2,
    ),
    Pair(
        "a relaxed arrival says nothing",
        "race",
        kernel(
            r"""
  __shared__ float tile[32];
  int t = threadIdx.x;
  tile[t] = x[t];  // @
#ifdef BROKEN
  PTX("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#else
  CLUSTER_ARRIVE();
#endif
  CLUSTER_WAIT();
  float value;
  PTX("ld.shared::cluster.f32 %0, [%1];"
      : "=f"(value) : "r"(peer(tile + t, rank() ^ 1)) : "memory");  // @
  y[32 * blockIdx.x + t] = value;
  CLUSTER_ARRIVE();
  CLUSTER_WAIT();
"""
        ),
        grid=2,
        block=32,
        cluster=2,
    ),
]

# Warpgroups


def operands(device: PtxDevice) -> Sequence[Any]:
    """A [4][64, 16] and B [8, 16] in core matrices, bfloat16, and an empty y."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(n).astype(BF16) for n in (4 * 1024, 128))
    return device.array(a, "a"), device.array(b, "b"), device.empty(4096, np.float32, "y")


STAGE = r"""
  __shared__ __align__(128) uint4 a_tile[128], b_tile[16];
  int t = threadIdx.x;
  float d[4] = {};
"""
STORE = r"""
  for (int i = 0; i < 4; ++i) y[4 * t + i] = d[i];
"""
OPERANDS = "const uint4* a, const uint4* b, float* y"
WARPGROUPS = [
    Pair(
        "operands that the tensor core need not see",
        "missing_proxy_fence",
        kernel(
            STAGE
            + r"""
  a_tile[t] = a[t];  // @
  if (t < 16) b_tile[t] = b[t];
#ifndef BROKEN
  FENCE_PROXY();
#endif
  __syncthreads();
  WG_FENCE();
  WGMMA(d, a_tile, b_tile);  // @
  WG_COMMIT();
  WG_WAIT(0);
"""
            + STORE,
            OPERANDS,
        ),
        arguments=operands,
    ),
    Pair(
        "an operand that is overwritten across the loop's back edge",
        "race",
        kernel(
            STAGE
            + r"""
  // tile-ai/tilelang issue 2613: the next turn writes the tile that the last turn's wgmma reads.
  if (t < 16) b_tile[t] = b[t];
#pragma unroll 1
  for (int i = 0; i < 3; ++i) {
    a_tile[t] = a[128 * i + t];  // @
    FENCE_PROXY();
    __syncthreads();
    WG_FENCE();
    WGMMA(d, a_tile, b_tile);  // @
    WG_COMMIT();
#ifndef BROKEN
    WG_WAIT(0);
    __syncthreads();
#endif
  }
  WG_WAIT(0);
"""
            + STORE,
            OPERANDS,
        ),
        arguments=operands,
    ),
    Pair(
        "an operand that only its own warp has waited for",
        "race",
        kernel(
            STAGE
            + r"""
  if (t < 16) b_tile[t] = b[t];
#pragma unroll 1
  for (int i = 0; i < 3; ++i) {
    a_tile[t] = a[128 * i + t];  // @
    FENCE_PROXY();
#ifndef BROKEN
    __syncthreads();
#else
    __syncwarp();
#endif
    WG_FENCE();
    WGMMA(d, a_tile, b_tile);  // @
    WG_COMMIT();
    WG_WAIT(0);
    __syncthreads();
  }
"""
            + STORE,
            OPERANDS,
        ),
        arguments=operands,
    ),
    Pair(
        "an accumulator that is read before the wait",
        "wgmma_register",
        kernel(
            STAGE
            + r"""
  a_tile[t] = a[t];
  if (t < 16) b_tile[t] = b[t];
  FENCE_PROXY();
  __syncthreads();
  WG_FENCE();
  WGMMA(d, a_tile, b_tile);  // @
  WG_COMMIT();
#ifdef BROKEN
  y[4 * t] = d[0];  // @
#endif
  WG_WAIT(0);
"""
            + STORE,
            OPERANDS,
        ),
        arguments=operands,
    ),
    Pair(
        "an accumulator that is set without a fence",
        "missing_wgmma_fence",
        kernel(
            STAGE
            + r"""
  a_tile[t] = a[t];
  if (t < 16) b_tile[t] = b[t];
  FENCE_PROXY();
  __syncthreads();
  for (int i = 0; i < 4; ++i) d[i] = (float)b[i].x;  // @
#ifndef BROKEN
  WG_FENCE();
#endif
  WGMMA(d, a_tile, b_tile);  // @
  WG_COMMIT();
  WG_WAIT(0);
"""
            + STORE,
            OPERANDS,
        ),
        arguments=operands,
    ),
]


DEPENDENT = [
    Pair(
        "metadata read above the wait for the primary",
        "race",
        r"""
// FlashMLA's kernels read the tile scheduler's metadata, which the launch before writes.
extern "C" __global__ void first(const float* x, float* data) {
  PTX("griddepcontrol.launch_dependents;" ::: "memory");
  data[threadIdx.x] = x[threadIdx.x] + 1;  // @
}
extern "C" __global__ void second(const float* data, float* y) {
#ifdef BROKEN
  float value = *(volatile const float*)(data + threadIdx.x);  // @
  PTX("griddepcontrol.wait;" ::: "memory");
#else
  PTX("griddepcontrol.wait;" ::: "memory");
  float value = *(volatile const float*)(data + threadIdx.x);
#endif
  y[threadIdx.x] = value;
}
""",
        run=dependent_launch,
    ),
]

# What is only slow

COSTS = [
    Pair(
        "a column of a tile as wide as the banks",
        "bank_conflicts",
        kernel(
            r"""
#ifdef BROKEN
  __shared__ float tile[32][32];
#else
  __shared__ float tile[32][33];
#endif
  int t = threadIdx.x;
  for (int i = 0; i < 8; ++i) tile[4 * i + t / 32][t % 32] = x[128 * i + t];
  __syncthreads();
  y[t] = tile[t % 32][t / 32];  // @
"""
        ),
    ),
    Pair(
        "a column of global memory",
        "uncoalesced",
        kernel(
            r"""
  int t = threadIdx.x;
#ifdef BROKEN
  y[t] = x[32 * t];  // @
#else
  y[t] = x[t];
#endif
"""
        ),
    ),
    Pair(
        "an array that is indexed by data",
        "spills",
        kernel(
            r"""
  int t = threadIdx.x;
  float values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = x[128 * i + t];
#ifdef BROKEN
  y[t] = values[(int)x[t] % 8];
#else
  y[t] = values[0] + values[7];
#endif
"""
        ),
    ),
    Pair(
        "lanes that take turns",
        "divergence",
        kernel(
            r"""
  int t = threadIdx.x;
  float value = x[t];
#ifdef BROKEN
  int turns = t % 2 ? 40 : 0;
#else
  int turns = 40;
#endif
#pragma unroll 1
  for (int i = 0; i < turns; ++i) value = value * 0.5f + x[i];
  y[t] = value;
"""
        ),
    ),
]

ZOO = [
    *BARRIERS, *COPIES, *GLOBAL, *MEMORY, *ASYNC, *CLUSTERS, *WARPGROUPS, *DEPENDENT, *COSTS,
]  # fmt: skip
