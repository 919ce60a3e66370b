"""Tensor maps wherever they lie, matrices by any address, elected lanes, hints, clocks."""

from __future__ import annotations

import numpy as np
import pytest
from hopper_kernels import CUDA, SCHEDULES, executor

import gpu
from gpu.device import Device
from simkit.errors import LaunchError, MemoryAccessError

MAPS = (
    CUDA
    + r"""
struct Parameters { char before[64 * SKIP]; Map map; int x, y; };
__device__ void load(const void* map, int x, int y, u32* out) {
    __shared__ __align__(128) u32 cell[8][8];
    __shared__ __align__(8) u64 full;
    int t = threadIdx.x;
    if (t == 0) {
        init(&full, 1);
        fence_init();
        expect(&full, 256);
        tma_load(cell, map, x, y, &full);
    }
    __syncthreads();
    wait(&full, 0);
    out[t] = cell[t / 8][t % 8];
}
extern "C" __global__ void in_struct(int first, const __grid_constant__ Parameters p, u32* out) {
    load(&p.map, p.x, p.y, out);
}
extern "C" __global__ void in_memory(const Map* map, int x, int y, u32* out) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
    load(map, x, y, out);
}
"""
)


@pytest.mark.parametrize("skip", [0, 1, 2, 5])
def test_a_tensor_map_may_lie_inside_a_struct(hopper: Device, skip: int) -> None:
    data = np.arange(32 * 32, dtype=np.uint32).reshape(32, 32)
    x, out = hopper.array(data), hopper.empty((64,), np.uint32)
    # Before the map there is room for at least one element.
    before = 64 * max(skip, 1)
    kernel = hopper.compile(MAPS, options=(f"-DSKIP={before // 64}",), arch="sm_90a").kernel(
        "in_struct"
    )
    struct = np.zeros(before + 128 + 64, np.uint8)
    struct[before : before + 128] = np.frombuffer(bytes(gpu.TensorMap(x, (8, 8))), np.uint8)
    struct[before + 128 : before + 136] = np.array([12, 9], np.int32).view(np.uint8)
    kernel.launch((1,), (64,), [3, struct.tobytes(), out])
    assert np.array_equal(out.to_numpy().reshape(8, 8), data[9:17, 12:20])


def test_a_tensor_map_may_lie_in_global_memory(hopper: Device) -> None:
    data = np.arange(32 * 32, dtype=np.uint32).reshape(32, 32)
    x, out = hopper.array(data), hopper.empty((64,), np.uint32)
    descriptor = np.frombuffer(bytes(gpu.TensorMap(x, (8, 8))), np.uint8)
    maps = hopper.array(np.concatenate((np.zeros(128, np.uint8), descriptor)))
    kernel = hopper.compile(MAPS, options=("-DSKIP=1",), arch="sm_90a").kernel("in_memory")
    kernel.launch((1,), (64,), [np.uint64(maps.address + 128), 3, 4, out])
    assert np.array_equal(out.to_numpy().reshape(8, 8), data[4:12, 3:11])


def test_what_is_no_tensor_map() -> None:
    device = executor()
    kernel = device.compile(MAPS, options=("-DSKIP=1",), arch="sm_90a").kernel("in_memory")
    maps, out = device.array(np.zeros(256, np.uint8)), device.empty((64,), np.uint32)
    for address, kind, words in (
        (maps.address, LaunchError, "no tensor map at 0x.*nobody has written it"),
        (maps.address + 32, MemoryAccessError, "at a multiple of 64"),
    ):
        with pytest.raises(kind, match=words) as caught:
            kernel.launch((1,), (64,), [np.uint64(address), 0, 0, out])
        assert "PTX line" in str(caught.value)


MATRICES = (
    CUDA
    + r"""
// Moves each warp's 32 x 8 matrix of 16-bit elements through ldmatrix and stmatrix.
extern "C" __global__ void matrices(const uint4* x, uint4* y) {
    __shared__ __align__(128) uint4 from[4][32], to[4][32];
    int w = threadIdx.x / 32, t = threadIdx.x % 32;
    from[w][t] = x[threadIdx.x];
    to[w][t] = make_uint4(0, 0, 0, 0);
    __syncwarp();
    u32 r[4] = {0, 0, 0, 0};
    if (w < WARPS) {
        LOAD
        STORE
    }
    __syncwarp();
    y[threadIdx.x] = to[w][t];
}
// The same with a guard that differs between warps, and addresses that only count where it holds.
extern "C" __global__ void guarded(const uint4* x, uint4* y, u32 stray) {
    __shared__ __align__(128) uint4 cell[4][32], to[4][32];
    int w = threadIdx.x / 32, t = threadIdx.x % 32;
    cell[w][t] = x[threadIdx.x];
    to[w][t] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    u32 a = w % 2 ? sa(&cell[w][t]) : stray, b = w % 2 ? sa(&to[w][t]) : stray;
    asm volatile("{ .reg .pred p; .reg .b32 r<4>; setp.ne.u32 p, %2, 0;"
        " @p ldmatrix.sync.aligned.m8n8.x4.shared.b16 {r0, r1, r2, r3}, [%0];"
        " @p stmatrix.sync.aligned.m8n8.x4.shared.b16 [%1], {r0, r1, r2, r3}; }"
        ::"r"(a), "r"(b), "r"(w % 2) : "memory");
    __syncthreads();
    y[threadIdx.x] = to[w][t];
}
// A row of each cluster's matrix lies in another CTA.
extern "C" __global__ void from_peers(const uint4* x, u32* y) {
    __shared__ __align__(128) uint4 cell[32];
    int t = threadIdx.x;
    cell[t] = x[32 * blockIdx.x + t];
    cluster_sync();
    u32 r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(r) : "r"(sa(&cell[t])) : "memory");
    y[32 * blockIdx.x + t] = r;
    cluster_sync();
}
"""
)


def matrix_options(count: int, load: str, store: str, warps: int) -> tuple[str, ...]:
    registers = ", ".join(f"%{k}" for k in range(count))
    outputs = ", ".join(f'"=r"(r[{k}])' for k in range(count))
    inputs = ", ".join(f'"r"(r[{k}])' for k in range(count))

    def place(kind: str, array: str) -> str:
        pointer = f"&{array}[w][t % {8 * count}]"
        return f'"r"(sa({pointer}))' if "shared" in kind else f'"l"({pointer})'

    return (
        f"-DWARPS={warps}",
        f'-DLOAD=asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{load}.b16 {{{registers}}},'
        f' [%{count}];" : {outputs} : {place(load, "from")} : "memory");',
        f'-DSTORE=asm volatile("stmatrix.sync.aligned.m8n8.x{count}{store}.b16 [%{count}],'
        f' {{{registers}}};" :: {inputs}, {place(store, "to")} : "memory");',
    )


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(
    ("load", "store"),
    [(".shared", ".shared"), ("", ".shared::cta"), (".trans.shared::cta", ""), (".trans", ".trans"),
     (".shared", ".trans.shared")],
)  # fmt: skip
def test_matrices_through_registers(hopper: Device, count: int, load: str, store: str) -> None:
    x = np.arange(4 * 32 * 8, dtype=np.uint16).reshape(4, 32, 8)
    y = hopper.empty(x.shape, np.uint16)
    options = matrix_options(count, load, store, 3)
    kernel = hopper.compile(MATRICES, options=options, arch="sm_90a").kernel("matrices")
    kernel.launch((1,), (128,), [hopper.array(x), y])
    parts = x.reshape(4, 4, 8, 8)
    wanted = np.zeros_like(parts)
    turned = ("trans" in load) != ("trans" in store)
    wanted[:3, :count] = (parts.swapaxes(2, 3) if turned else parts)[:3, :count]
    assert np.array_equal(y.to_numpy().reshape(parts.shape), wanted)


def test_guarded_matrices(hopper: Device) -> None:
    x = np.arange(4 * 32 * 8, dtype=np.uint16).reshape(4, 32, 8)
    y = hopper.empty(x.shape, np.uint16)
    options = matrix_options(1, ".shared", ".shared", 1)
    kernel = hopper.compile(MATRICES, options=options, arch="sm_90a").kernel("guarded")
    kernel.launch((1,), (128,), [hopper.array(x), y, 0xFFFFF0])
    assert np.array_equal(y.to_numpy(), x * np.array([0, 1, 0, 1], np.uint16)[:, None, None])


def test_matrices_in_a_cluster(hopper: Device) -> None:
    x = np.arange(4 * 32 * 8, dtype=np.uint16).reshape(4, 32, 8)
    y = hopper.empty((4, 32), np.uint32)
    options = matrix_options(1, ".shared", ".shared", 1)
    kernel = hopper.compile(MATRICES, options=options, arch="sm_90a").kernel("from_peers")
    kernel.launch((4,), (32,), [hopper.array(x), y], cluster=(2, 1, 1))
    assert np.array_equal(y.to_numpy().view(np.uint16).reshape(4, 8, 8), x[:, :8])


SMALL = (
    CUDA
    + r"""
extern "C" __global__ void elect(u32* out) {
    u32 t = threadIdx.x, leader, is;
    u32 members = t < 8 ? 0xFFu : 0xFFFFFF00u;
    if (t < 8)
        asm volatile("{ .reg .pred p; elect.sync %0|p, %2; selp.u32 %1, 1, 0, p; }"
                     : "=r"(leader), "=r"(is) : "r"(members));
    else
        asm volatile("{ .reg .pred p; elect.sync %0|p, %2; selp.u32 %1, 1, 0, p; }"
                     : "=r"(leader), "=r"(is) : "r"(members));
    out[2 * t] = leader;
    out[2 * t + 1] = is;
    u32 alone = 0;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; @p mov.u32 %0, 9; }" : "+r"(alone));
    if (alone) out[64] = t;
}

extern "C" __global__ void hints(u32* out, const u32* x) {
    u64 policy, other, converted, begin, end, global, g;
    u32 low, high, c;
    asm volatile("createpolicy.fractional.L2::evict_last.L2::evict_unchanged.b64 %0, 0.5;"
                 : "=l"(policy));
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(other));
    asm volatile("createpolicy.range.global.L2::evict_last.L2::evict_unchanged.b64"
                 " %0, [%1], 64, 128;"
                 : "=l"(converted) : "l"(x));
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(begin) :: "memory");
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(global) :: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("nanosleep.u32 100;");
    u32 value;
    asm volatile("ld.global.L2::cache_hint.u32 %0, [%1], %2;"
                 : "=r"(value) : "l"(x + threadIdx.x), "l"(policy) : "memory");
    asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;"
                 ::"l"(out + threadIdx.x), "r"(value), "l"(other) : "memory");
    asm volatile("prefetch.global.L2 [%0];" ::"l"(x));
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(end) :: "memory");
    asm volatile("mov.u32 %0, %%clock;" : "=r"(c) :: "memory");
    asm volatile("mov.u32 %0, %%clock_hi;" : "=r"(high) :: "memory");
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(g) :: "memory");
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(low) :: "memory");
    out[32 + threadIdx.x] = end > begin && g >= global && low + 1 > 0 && high + 1 > 0;
    for (int i = 0; i < 4; i++) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    }
    asm volatile("fence.proxy.async.global; fence.proxy.async.shared::cta; fence.proxy.alias;"
                 "fence.acq_rel.cluster; fence.proxy.async.shared::cluster;" ::: "memory");
}
"""
)


def test_elected_lanes(hopper: Device) -> None:
    out = hopper.empty((65,), np.uint32)
    hopper.compile(SMALL, arch="sm_90a").kernel("elect").launch((1,), (32,), [out])
    found = out.to_numpy()
    leader, is_leader = found[:64].reshape(32, 2).T
    # Which lane it is, is not defined: the same one for all, a member, and itself the only leader.
    for lanes in (range(8), range(8, 32)):
        (chosen,) = set(leader[list(lanes)].tolist())
        assert chosen in lanes
        assert [t for t in lanes if is_leader[t]] == [chosen]
    assert found[64] < 32


def test_hints_clocks_and_fences_change_nothing(hopper: Device) -> None:
    x, out = np.arange(64, dtype=np.uint32) + 3, hopper.empty((64,), np.uint32)
    hopper.compile(SMALL, arch="sm_90a").kernel("hints").launch((1,), (32,), [out, hopper.array(x)])
    assert np.array_equal(out.to_numpy(), [*x[:32], *[1] * 32])


EARLY = r"""
extern "C" __global__ void early(unsigned* out, int n) {
    __shared__ unsigned cell;
    if (threadIdx.x == 0) cell = 5;
    if ((int)threadIdx.x >= n) return;
    __syncthreads();
    out[threadIdx.x] = cell;
}
extern "C" __global__ void busy(unsigned* out, int n) {
    __shared__ unsigned cell;
    if (threadIdx.x == 0) cell = 5;
    if ((int)threadIdx.x >= n) {
        for (int i = 0; i < (int)threadIdx.x; i++) out[threadIdx.x] += i % 2;
        return;
    }
    __syncthreads();
    out[threadIdx.x] = cell;
}
"""


def test_lanes_that_return_early_are_missed_by_no_barrier() -> None:
    for schedule in SCHEDULES:
        device = executor(schedule)
        out = device.array(np.zeros(64, np.uint32))
        device.compile(EARLY, arch="sm_90a").kernel("early").launch((1,), (64,), [out, 40])
        assert out.to_numpy().sum() == 5 * 40
        device.compile(EARLY, arch="sm_90a").kernel("busy").launch((1,), (64,), [out, 40])
        assert out.to_numpy().sum() == 5 * 40 + sum(t // 2 for t in range(40, 64))
