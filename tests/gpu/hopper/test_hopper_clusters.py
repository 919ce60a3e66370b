"""Clusters: who is where, addresses of peers, distributed shared memory, barriers, launches."""

from __future__ import annotations

import numpy as np
import pytest
from hopper_kernels import CUDA, PTX_HEADER, SCHEDULES, executor

from gpu.device import Device
from simkit.errors import LaunchError, MemoryAccessError

REGISTERS = (
    "%clusterid.x", "%clusterid.y", "%clusterid.z", "%nclusterid.x", "%nclusterid.y",
    "%nclusterid.z", "%cluster_ctaid.x", "%cluster_ctaid.y", "%cluster_ctaid.z",
    "%cluster_nctaid.x", "%cluster_nctaid.y", "%cluster_nctaid.z", "%cluster_ctarank",
    "%cluster_nctarank",
)  # fmt: skip

SPECIAL = (
    CUDA
    + "#define LIST "
    + " ".join(f'R("{name.replace("%", "%%")}")' for name in REGISTERS)
    + r"""
extern "C" __global__ void ATTRIBUTE special(u32* out) {
    u32* mine = out + 16 * (blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
    if (threadIdx.x) return;
#define R(name) { u32 v; asm volatile("mov.u32 %0, " name ";" : "=r"(v)); *mine++ = v; }
    LIST
    u32 p;
    asm volatile("{ .reg .pred p; mov.pred p, %%is_explicit_cluster; selp.u32 %0, 1, 0, p; }"
                 : "=r"(p));
    *mine = p;
}
"""
)


def special(
    device: Device, grid: tuple[int, ...], cluster: tuple[int, ...] | None, attribute: str = ""
) -> np.ndarray:
    """The special registers by CTA, indexed z, y, x."""
    x, y, z = (*grid, 1, 1)[:3]
    out = device.array(np.zeros((z, y, x, 16), np.uint32))
    kernel = device.compile(SPECIAL, options=(f"-DATTRIBUTE={attribute}",), arch="sm_90a")
    extra = {} if cluster is None else {"cluster": cluster}
    kernel.kernel("special").launch(grid, (32,), [out], **extra)
    return out.to_numpy()


def wanted(grid: tuple[int, ...], cluster: tuple[int, ...], explicit: int) -> np.ndarray:
    x, y, z = (*grid, 1, 1)[:3]
    cx, cy, cz = (*cluster, 1, 1)[:3]
    result = np.zeros((z, y, x, 16), np.uint32)
    for k, j, i in np.ndindex(z, y, x):
        rank = i % cx + cx * (j % cy + cy * (k % cz))
        result[k, j, i, :15] = [
            i // cx, j // cy, k // cz, x // cx, y // cy, z // cz, i % cx, j % cy, k % cz, cx, cy,
            cz, rank, cx * cy * cz, explicit,
        ]  # fmt: skip
    return result


@pytest.mark.parametrize(
    ("grid", "cluster"),
    [((6,), (2,)), ((4, 6), (2, 3)), ((2, 4, 6), (1, 2, 3)), ((4, 4), (4, 2, 1))],
)
def test_special_registers(hopper: Device, grid: tuple[int, ...], cluster: tuple[int, ...]) -> None:
    assert np.array_equal(special(hopper, grid, cluster), wanted(grid, cluster, 1))


def test_the_kernel_may_say_its_cluster(hopper: Device) -> None:
    attribute = "__cluster_dims__(2,2,1)"
    for cluster in (None, (2, 2, 1)):
        found = special(hopper, (4, 2), cluster, attribute)
        assert np.array_equal(found, wanted((4, 2), (2, 2), 1))


def test_without_clusters_every_cta_is_one(hopper: Device) -> None:
    assert np.array_equal(special(hopper, (3, 2), None), wanted((3, 2), (1,), 0))


PEERS = (
    CUDA
    + r"""
__device__ __forceinline__ u32 rank_of(u32 a) {
    u32 r; asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(r) : "r"(a)); return r;
}

extern "C" __global__ void addresses(u32* out) {
    __shared__ u32 cell[4];
    u32 rank = cta_rank(), size = gridDim.x, t = threadIdx.x;
    cell[t % 4] = 100 * rank + t % 4;
    cluster_sync();
    if (t < size) {
        u32 at = peer(sa(cell + 1), t), value, other;
        asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
        u64 generic, rank64; u32 rank32;
        asm volatile("mapa.u64 %0, %1, %2;" : "=l"(generic) : "l"(cell + 2), "r"(t));
        asm volatile("getctarank.u64 %0, %1;" : "=r"(rank32) : "l"(generic));
        asm volatile("ld.u32 %0, [%1];" : "=r"(other) : "l"(generic) : "memory");
        u32* mine = out + 8 * (size * rank + t);
        mine[0] = value; mine[1] = other; mine[2] = rank_of(at); mine[3] = rank32;
        mine[4] = rank_of(sa(cell)); mine[5] = at - sa(cell) == (t - rank << 24) + 4;
        // The pair's peer, as CUTLASS finds it: the lowest bit of the rank.
        asm volatile("ld.shared::cluster.u32 %0, [%1];"
                     : "=r"(mine[6]) : "r"(sa(cell) ^ (1 << 24)) : "memory");
    }
    cluster_sync();
}

// Only the lanes with a valid rank ask for an address.
extern "C" __global__ void guarded(u32* out, u32 n) {
    __shared__ u32 cell;
    u32 at = 0;
    asm volatile("{ .reg .pred p; setp.lt.u32 p, %1, %3; @p mapa.shared::cluster.u32 %0, %2, %1; }"
                 : "+r"(at) : "r"(threadIdx.x), "r"(sa(&cell)), "r"(n));
    out[32 * cta_rank() + threadIdx.x] = at - sa(&cell) + (cta_rank() << 24);
}

extern "C" __global__ void exchange(u32* out, int rounds) {
    __shared__ u32 box[2][64], count;
    u32 rank = cta_rank(), size = gridDim.x, t = threadIdx.x;
    if (t == 0) count = 0;
    cluster_sync();
    u32 value = 1000 * rank + t;
    for (int r = 0; r < rounds; r++) {
        u32 to = peer(sa(&box[r % 2][t]), (rank + 1) % size);
        asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
        asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], 1;"
                     ::"r"(peer(sa(&count), 0)) : "memory");
        u32 old;
        asm volatile("atom.shared::cluster.max.u32 %0, [%1], %2;"
                     : "=r"(old) : "r"(peer(sa(&count), 1)), "r"(t) : "memory");
        asm volatile("barrier.cluster.arrive.release;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
        value = box[r % 2][t] + 1;
    }
    out[64 * rank + t] = value;
    if (t == 0) out[64 * size + rank] = count;
}

// A relaxed arrive, work, and then the wait; lanes arrive in two places.
extern "C" __global__ void relaxed(u32* out) {
    __shared__ u32 cell;
    u32 rank = cta_rank();
    if (threadIdx.x == 0) cell = 7 + rank;
    __syncthreads();
    asm volatile("fence.acq_rel.cluster;" ::: "memory");
    if (threadIdx.x % 2) asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    else asm volatile("barrier.cluster.arrive;" ::: "memory");
    u32 value = rank * 5, got;
    asm volatile("barrier.cluster.wait;" ::: "memory");
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(got) : "r"(peer(sa(&cell), rank ^ 1)));
    out[64 * rank + threadIdx.x] = value + got;
    cluster_sync();
}

// Threads that have exited are not waited for.
extern "C" __global__ void leavers(u32* out) {
    if (cta_rank() == 1 && threadIdx.x >= 40) return;
    cluster_sync();
    out[64 * cta_rank() + threadIdx.x] = 1;
}

extern "C" __global__ void remote_arrive(u32* out) {
    __shared__ __align__(8) u64 bar[2];
    __shared__ u32 cell;
    u32 rank = cta_rank(), size = gridDim.x;
    if (threadIdx.x == 0) { init(bar, 32 * size); init(bar + 1, 1); fence_init(); cell = 0; }
    cluster_sync();
    for (u32 r = 0; r < size; r++) {
        asm volatile("red.shared::cluster.add.u32 [%0], %1;"
                     ::"r"(peer(sa(&cell), r)), "r"(rank + 1) : "memory");
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
                     ::"r"(peer(sa(bar), r)) : "memory");
    }
    wait(bar, 0);
    out[32 * rank + threadIdx.x] = cell;
    // Rank 0 announces bytes to everybody, and everybody completes those of the next one.
    if (rank == 0 && threadIdx.x < size) {
        u64 generic;
        asm volatile("mapa.u64 %0, %1, %2;" : "=l"(generic) : "l"(bar + 1), "r"(threadIdx.x));
        asm volatile("mbarrier.arrive.expect_tx.release.cluster.b64 _, [%0], %1;"
                     ::"l"(generic), "r"(48) : "memory");
    }
    if (threadIdx.x == 0)
        asm volatile("mbarrier.complete_tx.shared::cluster.b64 [%0], 48;"
                     ::"r"(peer(sa(bar + 1), (rank + 1) % size)) : "memory");
    wait(bar + 1, 0);
    cluster_sync();
}
"""
)


def peers(device: Device, name: str, size: int, arguments: list, threads: int = 64) -> None:
    kernel = device.compile(PEERS, arch="sm_90a").kernel(name)
    kernel.launch((size,), (threads,), arguments, cluster=(size, 1, 1))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_addresses_of_peers(hopper: Device, size: int) -> None:
    out = hopper.array(np.zeros((size, size, 8), np.uint32))
    peers(hopper, "addresses", size, [out])
    rank, t = np.mgrid[:size, :size]
    columns = [100 * t + 1, 100 * t + 2, t, t, rank, rank * 0 + 1, 100 * (rank ^ 1), 0 * t]
    assert np.array_equal(out.to_numpy(), np.stack(columns, axis=-1))


def test_idle_lanes_may_ask_for_anything(hopper: Device) -> None:
    out = hopper.empty((2, 32), np.uint32)
    peers(hopper, "guarded", 2, [out, 2], threads=32)
    assert np.array_equal(out.to_numpy()[:, :2], [[0, 1 << 24]] * 2)


@pytest.mark.parametrize("size", [2, 4])
def test_distributed_shared_memory(hopper: Device, size: int) -> None:
    out = hopper.empty((64 * size + size,), np.uint32)
    peers(hopper, "exchange", size, [out, 5])
    found = out.to_numpy()
    rank, t = np.mgrid[:size, :64]
    assert np.array_equal(found[:-size].reshape(size, 64), 1000 * ((rank - 5) % size) + t + 5)
    assert found[-size] == 5 * 64 * size
    assert found[1 - size] == 63


def test_arrivals_apart_and_relaxed(hopper: Device) -> None:
    out = hopper.empty((2, 64), np.uint32)
    peers(hopper, "relaxed", 2, [out])
    assert np.array_equal(out.to_numpy(), [[8] * 64, [12] * 64])


def test_exited_threads_are_not_waited_for(hopper: Device) -> None:
    out = hopper.array(np.zeros((2, 64), np.uint32))
    peers(hopper, "leavers", 2, [out])
    assert out.to_numpy().sum() == 64 + 40


@pytest.mark.parametrize("size", [2, 8])
def test_arrivals_at_barriers_of_peers(hopper: Device, size: int) -> None:
    out = hopper.empty((size, 32), np.uint32)
    peers(hopper, "remote_arrive", size, [out], threads=32)
    assert (out.to_numpy() == 32 * size * (size + 1) // 2).all()


ASYNC = (
    CUDA
    + r"""
extern "C" __global__ void store(u32* out) {
    __shared__ __align__(16) u32 box[4][32][4];
    __shared__ __align__(8) u64 full;
    u32 rank = cta_rank(), t = threadIdx.x;
    if (t == 0) { init(&full, 1); fence_init(); expect(&full, 32 * (4 + 8 + 16 + 8)); }
    cluster_sync();
    u32 b = peer(sa(&full), rank ^ 1), v = 1000 * rank + 4 * t;
    u32 to0 = peer(sa(box[0][t]), rank ^ 1), to1 = peer(sa(box[1][t]), rank ^ 1);
    u32 to2 = peer(sa(box[2][t]), rank ^ 1), to3 = peer(sa(box[3][t]), rank ^ 1);
#define ST "st.async.shared::cluster.mbarrier::complete_tx::bytes"
    asm volatile(ST ".u32 [%0], %1, [%2];" ::"r"(to0), "r"(v), "r"(b) : "memory");
    asm volatile(ST ".v2.s32 [%0], {%1, %2}, [%3];"
        ::"r"(to1), "r"(v), "r"(v + 1), "r"(b) : "memory");
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0],"
        " {%1, %2, %3, %4}, [%5];" ::"r"(to2), "f"(__uint_as_float(v)), "f"(__uint_as_float(v + 1)),
        "f"(__uint_as_float(v + 2)), "f"(__uint_as_float(v + 3)), "r"(b) : "memory");
    asm volatile(ST ".b64 [%0], %1, [%2];"
        ::"r"(to3), "l"((u64)(v + 1) << 32 | v), "r"(b) : "memory");
    wait(&full, 0);
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 4; k++) out[((rank * 4 + i) * 32 + t) * 4 + k] = box[i][t][k];
    cluster_sync();
}

extern "C" __global__ void wide(u64* out) {
    __shared__ __align__(32) u64 box[32][4];
    __shared__ __align__(8) u64 full;
    u32 rank = cta_rank(), t = threadIdx.x;
    if (t == 0) { init(&full, 1); fence_init(); expect(&full, 32 * 16); }
    cluster_sync();
    u64 v = 1000 * rank + 4 * t;
    asm volatile(ST ".v2.u64 [%0], {%1, %2}, [%3];" ::"r"(peer(sa(box[t]), rank ^ 1)),
        "l"(v), "l"(v + 1), "r"(peer(sa(&full), rank ^ 1)) : "memory");
    wait(&full, 0);
    for (int k = 0; k < 2; k++) out[(rank * 32 + t) * 2 + k] = box[t][k];
    cluster_sync();
}

extern "C" __global__ void reduce(u32* out) {
    __shared__ __align__(16) u32 box[8];
    __shared__ __align__(8) u64 sum;
    __shared__ __align__(8) u64 full;
    u32 rank = cta_rank(), t = threadIdx.x;
    u32 start[8] = {5, 100, 100, 0xFFFFFFFFu, 0, 3, 0, 7};
    if (t < 8) box[t] = start[t];
    if (t == 0) { sum = 1ull << 40; init(&full, 1); fence_init(); expect(&full, 64 * (8 * 4 + 8)); }
    cluster_sync();
    for (u32 to = 0; to < 2; to++) {
        u32 b = peer(sa(&full), to);
        int s = (int)t - 16;
#define R(i, op, v) asm volatile("red.async.relaxed.cluster.shared::cluster" \
        ".mbarrier::complete_tx::bytes." op " [%0], %1, [%2];" \
        ::"r"(peer(sa(box + i), to)), "r"(v), "r"(b) : "memory")
        R(0, "add.u32", t); R(1, "min.s32", s); R(2, "max.u32", 64 * rank + t);
        R(3, "and.b32", ~(1u << t)); R(4, "or.b32", t); R(5, "xor.b32", 1u << t);
        R(6, "inc.u32", 9u); R(7, "dec.u32", 9u);
        asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes"
            ".add.u64 [%0], %1, [%2];"
            ::"r"(peer(sa(&sum), to)), "l"((u64)1 << 33), "r"(b) : "memory");
    }
    wait(&full, 0);
    if (t < 8) out[rank * 10 + t] = box[t];
    if (t == 0) { out[rank * 10 + 8] = (u32)sum; out[rank * 10 + 9] = (u32)(sum >> 32); }
    cluster_sync();
}

// Bulk copies from shared memory to the next CTA, then a reduction there.
extern "C" __global__ void bulk(u32* out) {
    __shared__ __align__(128) u32 source[64], box[64], total[64];
    __shared__ __align__(8) u64 full;
    u32 rank = cta_rank(), size = gridDim.x, t = threadIdx.x;
    source[t] = 100 * rank + t;
    total[t] = 5;
    if (t == 0) { init(&full, 1); fence_init(); expect(&full, 256 + 256 * (size - 1)); }
    fence_async();
    cluster_sync();
    u32 next = (rank + 1) % size;
    if (t == 0)
        asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
            " [%0], [%1], 256, [%2];" ::"r"(peer(sa(box), next)), "r"(sa(source)),
            "r"(peer(sa(&full), next)) : "memory");
    if (t < size && t != rank)
        asm volatile("cp.reduce.async.bulk.shared::cluster.shared::cta"
            ".mbarrier::complete_tx::bytes.add.u32 [%0], [%1], 256, [%2];"
            ::"r"(peer(sa(total), t)), "r"(sa(source)), "r"(peer(sa(&full), t)) : "memory");
    wait(&full, 0);
    out[128 * rank + t] = box[t];
    out[128 * rank + 64 + t] = total[t];
    cluster_sync();
}
"""
)


def launch_pair(device: Device, name: str, out: object, threads: int = 32, size: int = 2) -> None:
    kernel = device.compile(ASYNC, arch="sm_90a").kernel(name)
    kernel.launch((size,), (threads,), [out], cluster=(size, 1, 1))


def test_asynchronous_stores(hopper: Device) -> None:
    out = hopper.empty((2, 4, 32, 4), np.uint32)
    launch_pair(hopper, "store", out)
    found = out.to_numpy()
    rank, t = np.mgrid[:2, :32]
    first = 1000 * (rank ^ 1) + 4 * t
    for form, count in enumerate((1, 2, 4, 2)):
        for k in range(count):
            assert np.array_equal(found[:, form, :, k], first + k)
    out = hopper.empty((2, 32, 2), np.uint64)
    launch_pair(hopper, "wide", out)
    assert np.array_equal(out.to_numpy(), np.stack((first, first + 1), axis=-1))


def test_asynchronous_reductions(hopper: Device) -> None:
    out = hopper.empty((2, 10), np.uint32)
    launch_pair(hopper, "reduce", out)
    inc, dec = 0, 7
    for _ in range(64):
        inc = 0 if inc >= 9 else inc + 1
        dec = 9 if dec == 0 or dec > 9 else dec - 1
    total = (1 << 40) + 64 * (1 << 33)
    row = [
        5 + 2 * sum(range(32)), 2**32 - 16, 100, 0, 31, 3, inc, dec, total % 2**32, total >> 32,
    ]  # fmt: skip
    assert out.to_numpy().tolist() == [row, row]


@pytest.mark.parametrize("size", [2, 4])
def test_bulk_copies_between_ctas(hopper: Device, size: int) -> None:
    out = hopper.empty((size, 2, 64), np.uint32)
    launch_pair(hopper, "bulk", out, 64, size)
    rank, t = np.mgrid[:size, :64]
    assert np.array_equal(out.to_numpy()[:, 0], 100 * ((rank - 1) % size) + t)
    others = sum(range(size)) - rank
    assert np.array_equal(out.to_numpy()[:, 1], 5 + 100 * others + (size - 1) * t)


def test_what_clusters_cannot_do() -> None:
    device = executor()
    kernel = device.compile(PEERS, arch="sm_90a").kernel("addresses")
    out = device.empty((1024,), np.uint32)
    for grid, cluster, words in (
        ((5,), (2, 1, 1), "grid.x is 5, not a multiple of cluster.x 2"),
        ((2, 3), (1, 2, 1), "grid.y is 3, not a multiple of cluster.y 2"),
        ((32,), (32, 1, 1), "32"),
        ((32, 2), (16, 2, 1), "a cluster of 32 CTAs, at most 16 are possible"),
    ):
        with pytest.raises(LaunchError, match=words):
            kernel.launch(grid, (32,), [out], cluster=cluster)
    compiled = device.compile(
        SPECIAL, options=("-DATTRIBUTE=__cluster_dims__(2,1,1)",), arch="sm_90a"
    ).kernel("special")
    with pytest.raises(LaunchError, match="requires clusters of"):
        compiled.launch((4,), (32,), [out], cluster=(4, 1, 1))
    with pytest.raises(LaunchError, match=r"grid\.x is 3, not a multiple"):
        compiled.launch((3,), (32,), [out])


def test_ampere_has_no_clusters() -> None:
    source = 'extern "C" __global__ void k() {}'
    kernel = executor(name="a100").compile(source, arch="sm_80").kernel("k")
    with pytest.raises(LaunchError, match="a100 has no clusters; they need sm_90"):
        kernel.launch((2,), (32,), [], cluster=(2, 1, 1))


BAD = {
    "mapa.shared::cluster.u32 %a, %a, 2; st.shared::cluster.b32 [%a], 0;": (
        LaunchError, "mapa to rank 2 of a cluster of 2",
    ),
    "add.u32 %a, %a, 0x3000000; ld.shared::cluster.u32 %b, [%a];": (
        MemoryAccessError, "of a cluster of 2",
    ),
    "add.u32 %a, %a, 0x5000000; mbarrier.arrive.shared::cluster.b64 _, [%a];": (
        MemoryAccessError, "mbarrier of 8 bytes at shared address 0x5000000",
    ),
    "mapa.shared::cluster.u32 %a, %a, %peer; mbarrier.init.shared.b64 [%a], 1;": (
        LaunchError, "may only be signalled from another CTA",
    ),
    "mapa.shared::cluster.u32 %a, %a, %peer; mbarrier.test_wait.parity.shared.b64 %p, [%a], 0;": (
        LaunchError, "may only be signalled from another CTA",
    ),
    "mapa.shared::cluster.u32 %a, %a, %peer; mbarrier.try_wait.parity.shared.b64 %p, [%a], 0;": (
        LaunchError, "may only be signalled from another CTA",
    ),
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    " [%a], [%a], 16, [%a];": (
        LaunchError, "names the memory of its own CTA",
    ),
    "mapa.shared::cluster.u32 %b, %a, %peer;"
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%b], [%x], 16, [%a];": (
        LaunchError, "a copy to .shared::cta names the memory of another CTA",
    ),
    "barrier.cluster.arrive; barrier.cluster.arrive;": (LaunchError, "arrive again before"),
    "barrier.cluster.wait;": (LaunchError, "wait without barrier.cluster.arrive"),
}  # fmt: skip


@pytest.mark.parametrize("body", BAD)
def test_bad_addresses_and_barriers(body: str) -> None:
    kind, words = BAD[body]
    text = (
        PTX_HEADER
        + """
.visible .entry k(.param .u64 x) {
    .reg .b32 %a, %b, %peer, %rank; .reg .pred %p; .reg .b64 %x;
    .shared .align 16 .b64 bar[2];
    ld.param.u64 %x, [x];
    mov.u32 %rank, %cluster_ctarank;
    xor.b32 %peer, %rank, 1;
    mov.u32 %a, bar;
    """
        + body
        + "\n    ret; }"
    )
    for schedule in SCHEDULES[:3]:
        device = executor(schedule)
        kernel = device.load(text).kernel("k")
        with pytest.raises(kind, match=words) as caught:
            kernel.launch((2,), (1,), [device.empty((4,), np.uint32)], cluster=(2, 1, 1))
        assert "PTX line" in str(caught.value)
