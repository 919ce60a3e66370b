"""What the Hopper tests share: schedules, devices, and inline PTX as CUDA functions."""

from __future__ import annotations

from functools import cache
from typing import Any

import gpu
from gpu.ptx.executor import PtxDevice
from gpu.ptx.launch import Options
from gpu.ptx.schedule import Schedule

SCHEDULES = [Schedule("eager"), Schedule("lazy"), *(Schedule("random", k) for k in range(3))]


@cache
def _base(name: str) -> PtxDevice:
    opened = gpu.open("ptx", gpu=name)
    assert isinstance(opened, PtxDevice)
    return opened


def executor(schedule: Schedule | None = None, name: str = "h100", **options: Any) -> PtxDevice:
    """The executor with a schedule; all share one memory."""
    return _base(name).with_options(Options(schedule=schedule or Schedule(), **options))


PTX_HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n"

CUDA = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
struct __align__(64) Map { char bytes[128]; };

__device__ __forceinline__ u32 sa(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void init(u64* b, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(sa(b)), "r"(count) : "memory");
}
__device__ __forceinline__ void fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void fence_async() {
    asm volatile("fence.proxy.async;" ::: "memory");
}
__device__ __forceinline__ void arrive(u64* b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(sa(b)) : "memory");
}
__device__ __forceinline__ void expect(u64* b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(sa(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool try_wait(u64* b, u32 parity) {
    u32 done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                 " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(sa(b)), "r"(parity) : "memory");
    return done;
}
__device__ __forceinline__ bool test_wait(u64* b, u32 parity) {
    u32 done;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;"
                 " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(sa(b)), "r"(parity) : "memory");
    return done;
}
__device__ __forceinline__ void wait(u64* b, u32 parity) { while (!try_wait(b, parity)) {} }
__device__ __forceinline__ u32 cta_rank() {
    u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r;
}
__device__ __forceinline__ u32 peer(u32 address, u32 rank) {
    u32 r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
    return r;
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void bulk_load(void* to, const void* from, u32 bytes, u64* b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1], %2, [%3];"
                 ::"r"(sa(to)), "l"(from), "r"(bytes), "r"(sa(b)) : "memory");
}
__device__ __forceinline__ void bulk_store(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(to), "r"(sa(from)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int N> __device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
template <int N> __device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void tma_load(void* to, const void* map, int x, int y, u64* b) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(sa(to)), "l"(map), "r"(x), "r"(y), "r"(sa(b)) : "memory");
}
"""
