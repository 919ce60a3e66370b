"""Tensor and bulk copies end to end: tiles in any swizzle and rank, edges, reductions, casts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hopper_kernels import CUDA, executor

import gpu
from gpu.device import Device
from gpu.ptx.schedule import Schedule
from simkit.errors import LaunchError, MemoryAccessError

bf16 = ml_dtypes.bfloat16

TILES = (
    CUDA
    + r"""
#if RANK == 1
#define AT "{%2}"
#elif RANK == 2
#define AT "{%2, %3}"
#elif RANK == 3
#define AT "{%2, %3, %4}"
#elif RANK == 4
#define AT "{%2, %3, %4, %5}"
#else
#define AT "{%2, %3, %4, %5, %6}"
#endif
#define STR2(x) #x
#define STR(x) STR2(x)
#define DIM "." STR(RANK) "d"
struct At { int c[5]; };

extern "C" __global__ void load(const __grid_constant__ Map map, At at, uint4* out, int bytes,
                                u32 counted) {
    extern __shared__ __align__(1024) char memory[];
    u64* full = (u64*)(memory + bytes);
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
    if (threadIdx.x == 0) { init(full, 1); fence_init(); }
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.prefetch.tensor" DIM ".L2.global.tile [%1, " AT "];"
            ::"r"(0), "l"(&map), "r"(at.c[0]), "r"(at.c[1]), "r"(at.c[2]), "r"(at.c[3]),
              "r"(at.c[4]) : "memory");
        expect(full, counted);
        asm volatile("cp.async.bulk.tensor" DIM ".shared::cluster.global.tile"
            ".mbarrier::complete_tx::bytes [%0], [%1, " AT "], [%7];"
            ::"r"(sa(memory)), "l"(&map), "r"(at.c[0]), "r"(at.c[1]), "r"(at.c[2]), "r"(at.c[3]),
              "r"(at.c[4]), "r"(sa(full)) : "memory");
    }
    wait(full, 0);
    for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) out[i] = ((uint4*)memory)[i];
}

#ifdef REDUCE
#define STORE "cp.reduce.async.bulk.tensor" DIM ".global.shared::cta." STR(REDUCE) \
    ".tile.bulk_group"
#else
#define STORE "cp.async.bulk.tensor" DIM ".global.shared::cta.tile.bulk_group"
#endif
extern "C" __global__ void store(const __grid_constant__ Map map, At at, const uint4* in,
                                 int bytes) {
    extern __shared__ __align__(1024) char memory[];
    for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) ((uint4*)memory)[i] = in[i];
    fence_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile(STORE " [%1, " AT "], [%0];"
            ::"r"(sa(memory)), "l"(&map), "r"(at.c[0]), "r"(at.c[1]), "r"(at.c[2]), "r"(at.c[3]),
              "r"(at.c[4]) : "memory");
        bulk_commit();
        bulk_wait<0>();
    }
}
"""
)
AT = np.dtype([("c", "<i4", 5)])


def place(*coordinates: int) -> np.void:
    """Coordinates as the kernels take them, from NumPy's order."""
    at = np.zeros((), AT)
    at["c"][: len(coordinates)] = coordinates[::-1]
    return at[()]


def swizzled(rows: np.ndarray, span: int) -> np.ndarray:
    """Rows of bytes as a swizzle with a span of so many bytes leaves them: in row r, 16-byte piece
    c goes to c ^ (r * span / 128 % (span / 16)), one row a span.
    """
    if not span:
        return rows.reshape(-1)
    count, size = rows.shape
    laid = np.zeros((count, span), np.uint8)
    laid[:, :size] = rows
    pieces = laid.reshape(count, span // 16, 16)
    result = np.empty_like(pieces)
    for row in range(count):
        for piece in range(span // 16):
            result[row, piece ^ (row * span // 128 % (span // 16))] = pieces[row, piece]
    return result.reshape(-1)


def tile_of(
    tensor: np.ndarray, box: tuple[int, ...], at: tuple[int, ...], steps: tuple[int, ...]
) -> np.ndarray:
    """The box at a place, zeros outside the tensor, every n-th element only."""
    tile = np.zeros(tuple(-(-b // s) for b, s in zip(box, steps, strict=True)), tensor.dtype)
    for index in np.ndindex(tile.shape):
        where = tuple(a + i * s for a, i, s in zip(at, index, steps, strict=True))
        if all(0 <= w < n for w, n in zip(where, tensor.shape, strict=True)):
            tile[index] = tensor[where]
    return tile


def shared_image(tile: np.ndarray, span: int) -> np.ndarray:
    rows = np.ascontiguousarray(tile).view(np.uint8).reshape(-1, tile.shape[-1] * tile.itemsize)
    return swizzled(rows, span)


SPANS = {"none": 0, "32B": 32, "64B": 64, "128B": 128}
# dtype, tensor, box, place, element strides, swizzle
CASES = [
    (np.float32, (64,), (16,), (20,), (1,), "none"),
    (np.uint8, (70,), (32,), (50,), (1,), "none"),
    (np.int32, (32,), (8,), (-3,), (1,), "32B"),
    (bf16, (40, 64), (16, 16), (8, 16), (1, 1), "32B"),
    (bf16, (40, 64), (16, 32), (30, 40), (1, 1), "64B"),
    (bf16, (40, 64), (24, 64), (-5, 0), (1, 1), "128B"),
    (np.float32, (24, 16), (8, 8), (20, 10), (1, 1), "128B"),
    (np.float16, (9, 10, 32), (2, 5, 32), (3, -2, 0), (1, 1, 1), "64B"),
    (np.uint8, (20, 12, 48), (9, 4, 32), (2, 1, 16), (4, 2, 1), "none"),
    (bf16, (6, 5, 4, 16), (2, 3, 4, 8), (5, 1, 0, 8), (1, 1, 1, 1), "none"),
    (np.float32, (3, 4, 3, 5, 8), (2, 2, 2, 3, 8), (1, 3, 1, 2, 0), (1, 1, 1, 2, 1), "32B"),
    (np.int64, (2, 3, 4, 5, 6), (2, 1, 3, 4, 4), (0, 2, 2, -1, 3), (1, 1, 1, 1, 1), "none"),
]  # fmt: skip


def values(shape: tuple[int, ...], dtype: object) -> np.ndarray:
    rng = np.random.default_rng(7)
    return rng.integers(0, 100, shape).astype(dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{len(c[1])}d-{c[5]}")
def test_tiles_are_loaded_swizzled_with_zeros_outside(hopper: Device, case: tuple) -> None:
    dtype, shape, box, at, steps, swizzle = case
    tensor = values(shape, dtype)
    x = hopper.array(tensor, name="x")
    tensor_map = gpu.TensorMap(x, box, element_strides=steps, swizzle=swizzle)
    wanted = shared_image(tile_of(tensor, box, at, steps), SPANS[swizzle])
    bytes_ = -(-len(wanted) // 16) * 16
    out = hopper.empty((bytes_,), np.uint8)
    module = hopper.compile(TILES, options=(f"-DRANK={len(shape)}",), arch="sm_90a")
    counted = tensor_map.fields.tile_bytes
    module.kernel("load").launch(
        (1,), (64,), [tensor_map, place(*at), out, bytes_, counted], shared_bytes=bytes_ + 16
    )
    found = out.to_numpy()
    row = box[-1] * tensor.itemsize
    if row < SPANS[swizzle]:
        # Nothing is written between short rows.
        known = swizzled(np.ones((len(wanted) // SPANS[swizzle], row), np.uint8), SPANS[swizzle])
        found = np.where(known, found, 0)
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{len(c[1])}d-{c[5]}")
def test_tiles_are_stored_inside_the_tensor_only(hopper: Device, case: tuple) -> None:
    dtype, shape, box, at, steps, swizzle = case
    before = values(shape, dtype)
    x = hopper.array(before, name="x")
    tensor_map = gpu.TensorMap(x, box, element_strides=steps, swizzle=swizzle)
    tile = (values(tensor_map.fields.tile[::-1], dtype).astype(np.int64) + 100).astype(dtype)
    image = shared_image(tile, SPANS[swizzle])
    source = hopper.array(np.resize(image, -(-len(image) // 16) * 16))
    module = hopper.compile(TILES, options=(f"-DRANK={len(shape)}",), arch="sm_90a")
    size = len(source.to_numpy())
    module.kernel("store").launch(
        (1,), (64,), [tensor_map, place(*at), source, size], shared_bytes=size
    )
    wanted = before.copy()
    for index in np.ndindex(tile.shape):
        where = tuple(a + i * s for a, i, s in zip(at, index, steps, strict=True))
        if all(0 <= w < n for w, n in zip(where, shape, strict=True)):
            wanted[where] = tile[index]
    assert np.array_equal(x.to_numpy().view(np.uint8), wanted.view(np.uint8))


REDUCTIONS = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [("add", np.float32), ("add", bf16), ("add", np.float16), ("add", np.uint64),
     ("min", np.int32), ("max", np.uint32), ("max", bf16), ("and", np.uint32), ("xor", np.uint32)],
)  # fmt: skip
def test_tiles_are_reduced_into_the_tensor(hopper: Device, operation: str, dtype: type) -> None:
    """Four CTAs each add their tile; two of them the same one."""
    module = hopper.compile(TILES, options=("-DRANK=2", f"-DREDUCE={operation}"), arch="sm_90a")
    before = values((16, 32), dtype)
    x = hopper.array(before)
    row = 64 // before.itemsize
    tile = values((8, row), dtype)[::-1].copy()
    tensor_map = gpu.TensorMap(x, tile.shape, swizzle="64B")
    image = shared_image(tile, 64)
    wanted = before.copy()
    for at in ((0, 0), (4, 0), (12, 32 - row)):
        source = hopper.array(image)
        module.kernel("store").launch(
            (2,), (32,), [tensor_map, place(*at), source, len(image)], shared_bytes=len(image)
        )
        part = wanted[at[0] : at[0] + 8, at[1] : at[1] + row]
        for _ in range(2):
            part[:] = REDUCTIONS[operation](part, tile[: len(part)]).astype(dtype)
    assert np.array_equal(x.to_numpy(), wanted)


BULK = (
    CUDA
    + r"""
extern "C" __global__ void copy(const char* x, char* y, int bytes) {
    extern __shared__ __align__(128) char memory[];
    u64* full = (u64*)(memory + bytes);
    const char* from = x + (size_t)blockIdx.x * bytes;
    if (threadIdx.x == 0) {
        init(full, 1);
        fence_init();
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                     ::"l"(from), "r"(bytes) : "memory");
        expect(full, bytes);
        bulk_load(memory, from, bytes, full);
    }
    __syncthreads();
    wait(full, 0);
    if (threadIdx.x == 0) {
        bulk_store(y + (size_t)blockIdx.x * bytes, memory, bytes);
        bulk_commit();
        bulk_wait<0>();
    }
}

// Each thread has its own groups: thread t stores t % 4 + 1 pieces, one group each, from one buffer
// that it writes anew each time.
extern "C" __global__ void rewrite(u32* y) {
    __shared__ __align__(128) u32 cell[32][4];
    int t = threadIdx.x;
    for (int i = 0; i <= t % 4; i++) {
        for (int k = 0; k < 4; k++) cell[t][k] = 1000 * t + 10 * i + k;
        fence_async();
        bulk_store(y + (t * 4 + i) * 4, cell[t], 16);
        bulk_commit();
#ifndef BROKEN
        bulk_wait_read<0>();
#endif
    }
    bulk_wait<0>();
}

// Two buffers in turn: the wait allows the younger group to be in flight.
extern "C" __global__ void alternate(u32* y, int n) {
    __shared__ __align__(128) u32 cell[2][4];
    if (threadIdx.x) return;
    for (int i = 0; i < n; i++) {
        if (i >= 2) bulk_wait_read<ALLOWED>();
        for (int k = 0; k < 4; k++) cell[i % 2][k] = 10 * i + k;
        fence_async();
        bulk_store(y + 4 * i, cell[i % 2], 16);
        bulk_commit();
    }
    bulk_wait<0>();
}

// After wait_group.read the source may change, but the data need not have arrived.
extern "C" __global__ void too_early(u32* y, u32* seen) {
    __shared__ __align__(128) u32 cell[4];
    for (int k = 0; k < 4; k++) cell[k] = 7;
    fence_async();
    bulk_store(y, cell, 16);
    bulk_commit();
    READ_WAIT
    seen[0] = *(volatile u32*)y;
}

extern "C" __global__ void reduce(u32* y, const u32* x) {
    __shared__ __align__(128) u32 cell[64];
    for (int i = threadIdx.x; i < 64; i += 32) cell[i] = x[64 * blockIdx.x + i];
    fence_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group." OPERATION
                     " [%0], [%1], 256;"
                     ::"l"(y), "r"(sa(cell)) : "memory");
        bulk_commit();
        bulk_wait<0>();
    }
}
"""
)


def bulk_options(**defines: str) -> tuple[str, ...]:
    known = {"ALLOWED": "1", "READ_WAIT": "bulk_wait<0>();", "OPERATION": '"add.u32"'} | defines
    return tuple(f"-D{k}={v}" for k, v in known.items())


def test_bulk_copies_move_bytes(hopper: Device) -> None:
    data = np.random.default_rng(0).integers(0, 256, 5 * 208, np.uint8)
    x, y = hopper.array(data, name="x"), hopper.empty(data.shape, np.uint8, name="y")
    kernel = hopper.compile(BULK, options=bulk_options(), arch="sm_90a").kernel("copy")
    report = kernel.launch((5,), (64,), [x, y, 208], shared_bytes=208 + 16)
    assert np.array_equal(y.to_numpy(), data)
    if report.traffic is not None:
        moved = {(t.tensor, t.direction): (t.requested, t.sectors) for t in report.traffic.tensors}
        # 208 bytes are 6.5 sectors; the copies begin in the middle of one every other time.
        assert moved == {("x", "read"): (1040, 1120), ("y", "write"): (1040, 1120)}


def test_bulk_groups_belong_to_threads(hopper: Device) -> None:
    y = hopper.array(np.zeros((32, 4, 4), np.uint32))
    hopper.compile(BULK, options=bulk_options(), arch="sm_90a").kernel("rewrite").launch(
        (1,), (32,), [y]
    )
    t, i, k = np.ogrid[:32, :4, :4]
    assert np.array_equal(y.to_numpy(), np.where(i <= t % 4, 1000 * t + 10 * i + k, 0))


def test_a_group_may_stay_in_flight(hopper: Device) -> None:
    y = hopper.array(np.zeros((7, 4), np.uint32))
    hopper.compile(BULK, options=bulk_options(), arch="sm_90a").kernel("alternate").launch(
        (1,), (32,), [y, 7]
    )
    assert np.array_equal(y.to_numpy(), 10 * np.arange(7)[:, None] + np.arange(4))


def test_lazy_shows_a_missing_wait_for_reading() -> None:
    device = executor(Schedule("lazy"))
    y = device.array(np.zeros((32, 4, 4), np.uint32))
    options = (*bulk_options(), "-DBROKEN")
    device.compile(BULK, options=options, arch="sm_90a").kernel("rewrite").launch((1,), (32,), [y])
    t, k = np.ogrid[:32, :4]
    assert np.array_equal(y.to_numpy()[:, 0], 1000 * t + 10 * (t % 4) + k)
    # One group too many allowed in flight.
    y = device.array(np.zeros((7, 4), np.uint32))
    options = bulk_options(ALLOWED="2")
    device.compile(BULK, options=options, arch="sm_90a").kernel("alternate").launch(
        (1,), (32,), [y, 7]
    )
    assert not np.array_equal(y.to_numpy()[:, 0], 10 * np.arange(7))


@pytest.mark.parametrize(
    ("wait", "is_enough"), [("bulk_wait<0>();", True), ("bulk_wait_read<0>();", False)]
)
def test_lazy_shows_data_that_has_only_been_read(wait: str, is_enough: bool) -> None:
    device = executor(Schedule("lazy"))
    y, seen = device.array(np.zeros(4, np.uint32)), device.array(np.zeros(1, np.uint32))
    module = device.compile(BULK, options=bulk_options(READ_WAIT=wait), arch="sm_90a")
    module.kernel("too_early").launch((1,), (1,), [y, seen])
    assert np.array_equal(y.to_numpy(), np.full(4, 7))
    assert seen.to_numpy()[0] == (7 if is_enough else 0)


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [("add.u32", np.uint32), ("add.f32", np.float32), ("add.noftz.bf16", bf16),
     ("add.noftz.f16", np.float16), ("add.u64", np.uint64), ("min.s32", np.int32),
     ("max.u32", np.uint32), ("or.b32", np.uint32),
     ("inc.u32", np.uint32), ("dec.u32", np.uint32)],
)  # fmt: skip
def test_bulk_reductions(hopper: Device, operation: str, dtype: type) -> None:
    count = 256 // np.dtype(dtype).itemsize
    x, before = values((3, count), dtype), values((count,), dtype)[::-1].copy()
    y = hopper.array(before)
    options = bulk_options(OPERATION=f'"{operation}"')
    module = hopper.compile(BULK, options=options, arch="sm_90a")
    module.kernel("reduce").launch((3,), (32,), [y, hopper.array(x)])

    def inc(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        return np.where(old >= new, 0, old + 1).astype(np.uint32)

    def dec(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        return np.where((old == 0) | (old > new), new, old - 1).astype(np.uint32)

    combine = {"inc": inc, "dec": dec, **REDUCTIONS}[operation.split(".")[0]]
    # The CTAs may come in any order.
    orders = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    results = []
    for order in orders:
        total = before.copy()
        for k in order:
            total = combine(total, x[k]).astype(dtype)
        results.append(total.tobytes())
    assert y.to_numpy().tobytes() in results


def test_bulk_additions_of_float32_flush_subnormals(hopper: Device) -> None:
    tiny = np.float32(1e-39)
    x = np.zeros(64, np.float32)
    x[:4] = tiny, tiny, -tiny, 2e-38
    before = np.zeros(64, np.float32)
    before[:5] = 0, 2e-38, -0.0, -1.5e-38, tiny
    y = hopper.array(before)
    module = hopper.compile(BULK, options=bulk_options(OPERATION='"add.f32"'), arch="sm_90a")
    module.kernel("reduce").launch((1,), (32,), [y, hopper.array(x)])
    wanted = np.zeros(64, np.float32)
    wanted[:5] = 0, 2e-38, -0.0, 0, 0
    assert y.to_numpy().tobytes() == wanted.tobytes()


MULTICAST = (
    CUDA
    + r"""
// Every CTA of the cluster loads its part of the tile for those in the mask.
extern "C" __global__ void tensor(const __grid_constant__ Map map, u32* out, u32 mask, u32 bytes) {
    extern __shared__ __align__(1024) char memory[];
    u64* full = (u64*)(memory + SIZE * 1024);
    u32 rank = cta_rank(), part = SIZE * blockIdx.y + rank;
    bool takes = mask >> rank & 1;
    if (threadIdx.x == 0) { init(full, 1); fence_init(); }
    cluster_sync();
    if (threadIdx.x == 0) {
        if (takes) expect(full, SIZE * 1024);
        unsigned short to = (unsigned short)mask;
#ifdef BULK
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            ".multicast::cluster [%0], [%1], 1024, [%2], %3;"
            ::"r"(sa(memory + 1024 * rank)), "l"(((char**)&map)[0] + 1024 * part),
              "r"(sa(full)), "h"(to) : "memory");
#else
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile"
            ".mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
            ::"r"(sa(memory + 1024 * rank)), "l"(&map), "r"(0), "r"((int)(8 * part)),
              "r"(sa(full)), "h"(to) : "memory");
#endif
    }
    if (takes) wait(full, 0);
    u32* mine = out + ((size_t)blockIdx.y * SIZE + rank) * SIZE * 256;
    for (int i = threadIdx.x; i < SIZE * 256; i += blockDim.x)
        mine[i] = takes ? ((u32*)memory)[i] : 0;
    cluster_sync();
}
"""
)


@pytest.mark.parametrize("is_bulk", [False, True])
@pytest.mark.parametrize(("size", "mask"), [(2, 3), (2, 2), (4, 15), (4, 10)])
def test_multicast_lands_in_every_cta_of_the_mask(
    hopper: Device, size: int, mask: int, is_bulk: bool
) -> None:
    data = np.arange(3 * size * 8 * 32, dtype=np.uint32).reshape(3 * size * 8, 32)
    x, out = (
        hopper.array(data, name="x"),
        hopper.empty((3, size, size * 8, 32), np.uint32, name="out"),
    )
    options = (f"-DSIZE={size}", *(["-DBULK"] if is_bulk else []))
    kernel = hopper.compile(MULTICAST, options=options, arch="sm_90a").kernel("tensor")
    what = x.address.to_bytes(8, "little") + bytes(120) if is_bulk else gpu.TensorMap(x, (8, 32))
    report = kernel.launch(
        (size, 3), (64,), [what, out, mask, 0], shared_bytes=size * 1024 + 16, cluster=(size, 1, 1)
    )
    found = out.to_numpy()
    for rank in range(size):
        wanted = data.reshape(3, size * 8, 32) if mask >> rank & 1 else np.zeros((3, size * 8, 32))
        assert np.array_equal(found[:, rank], wanted)
    if report.traffic is not None:
        read = {t.tensor: t.requested for t in report.traffic.tensors if t.direction == "read"}
        assert read == {"x": data.nbytes}


def test_what_copies_may_not_do() -> None:
    device = executor()
    x = device.array(np.zeros((16, 32), np.float32), name="x")
    tensor_map = gpu.TensorMap(x, (8, 32))
    load = device.compile(TILES, options=("-DRANK=2",), arch="sm_90a").kernel("load")
    out = device.empty((2048,), np.uint8)
    flat = gpu.TensorMap(device.array(np.zeros(64, np.float32)), (16,))
    with pytest.raises(LaunchError, match="2 coordinates for a tensor map of rank 1"):
        load.launch((1,), (32,), [flat, place(0, 0), out, 1024, 64], shared_bytes=1040)
    with pytest.raises(
        MemoryAccessError, match=r"(mbarrier|bulk copy) of \d+ bytes at shared address"
    ):
        load.launch((1,), (32,), [tensor_map, place(0, 0), out, 16, 1024], shared_bytes=32)
    copy = device.compile(BULK, options=bulk_options(), arch="sm_90a").kernel("copy")
    for bytes_, words in ((8, "8 bytes; it must be a positive multiple of 16"), (0, "0 bytes")):
        with pytest.raises(LaunchError, match=words):
            copy.launch((1,), (32,), [x, x, bytes_], shared_bytes=64)
    with pytest.raises(MemoryAccessError, match="past the end of 'x'"):
        copy.launch((3,), (32,), [x, x, 1024], shared_bytes=1040)
    multicast = device.compile(MULTICAST, options=("-DSIZE=2",), arch="sm_90a").kernel("tensor")
    out = device.empty((2048,), np.uint32)
    with pytest.raises(LaunchError, match="multicast mask names CTAs outside the cluster of 2"):
        multicast.launch(
            (2, 1), (32,), [tensor_map, out, 5, 0], shared_bytes=2064, cluster=(2, 1, 1)
        )
