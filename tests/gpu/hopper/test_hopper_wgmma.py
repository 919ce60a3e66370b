"""wgmma.mma_async: every layout, type and kind of shape, against products of integers and the bits
of the tensor-core model; groups, and what reading too early shows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hopper_kernels import executor
from hopper_wgmma import (
    DTYPES,
    WARPGROUP,
    Instruction,
    from_registers,
    lay_out,
    multiply,
    to_registers,
)

import gpu
from gpu.device import Device
from gpu.ptx.schedule import Schedule
from gpu.ptx.wgmma import Layout, chunk_offsets
from simkit.errors import LaunchError, PtxError
from simkit.numerics.tensor_core import TENSOR_CORES, TensorCore, dot_accumulate, half_precision


def integers(shape: tuple[int, ...], kind: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(DTYPES[kind])


def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(a.astype(np.float64) @ b.astype(np.float64).T)


MODES = ("none", "32B", "64B", "128B")
# N must be a multiple of the atom's width along N.
LAYOUTS = [
    (Instruction(8), "none", "128B"),
    (Instruction(24), "32B", "64B"),
    (Instruction(96), "64B", "32B"),
    (Instruction(176), "128B", "none"),
    *((Instruction(64, trans_b=1), "128B", mode) for mode in MODES),
    *((Instruction(64, a="f16", b="f16", trans_a=1), mode, "none") for mode in MODES),
    (Instruction(128, trans_a=1, trans_b=1), "64B", "128B"),
    (Instruction(256, a="f16", b="f16", trans_b=1), "32B", "128B"),
    (Instruction(24, trans_b=1), "64B", "none"),
    (Instruction(96, trans_b=1), "none", "64B"),
    (Instruction(176, trans_b=1), "32B", "32B"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "left", "right"), LAYOUTS)
def test_layouts(hopper: Device, form: Instruction, left: str, right: str) -> None:
    a, b = integers((64, 64), form.a), integers((form.n, 64), form.b, 1)
    c = np.arange(64 * form.n).reshape(64, form.n) % 100
    assert np.array_equal(multiply(hopper, form, a, b, c, (left, right)), exact(a, b) + c)


TYPES = [
    Instruction(8, "f32", "f16", "f16"),
    Instruction(24, "f16", "f16", "f16"),
    Instruction(96, "f32", "tf32", "tf32"),
    Instruction(176, "f32", "e4m3", "e4m3"),
    Instruction(256, "f32", "e5m2", "e4m3"),
    Instruction(40, "f16", "e4m3", "e5m2"),
    Instruction(64, "f16", "e5m2", "e5m2"),
]


@pytest.mark.parametrize("from_registers", [False, True])
@pytest.mark.parametrize("form", TYPES)
def test_types(hopper: Device, form: Instruction, from_registers: bool) -> None:
    form = replace(form, from_registers=from_registers)
    depth = 4 * form.k
    a, b = integers((64, depth), form.a), integers((form.n, depth), form.b, 1)
    c = np.arange(64 * form.n).reshape(64, form.n) % 50
    assert np.array_equal(multiply(hopper, form, a, b, c), exact(a, b) + c)


@pytest.mark.parametrize("from_registers", [False, True])
def test_signs_and_accumulation(hopper: Device, from_registers: bool) -> None:
    a, b = integers((64, 32), "bf16"), integers((16, 32), "bf16", 1)
    c = np.full((64, 16), np.nan)
    for sign_a in (1, -1):
        for sign_b in (1, -1):
            form = Instruction(16, from_registers=from_registers, sign_a=sign_a, sign_b=sign_b)
            found = multiply(hopper, form, a, b, c, accumulate=False)
            assert np.array_equal(found, exact(a, b) * sign_a * sign_b)


def model(form: Instruction, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The published model of the tensor core, step by step."""
    kind = "e4m3" if form.a == "e5m2" else form.a
    core: TensorCore = TENSOR_CORES["sm_90", kind]
    if form.a == "e5m2":
        core = replace(core, input_min_exponent=-14)
    if form.d == "f16":
        core = half_precision(core)
    total = c.astype(np.float32)
    for start in range(0, a.shape[1], form.k):
        part = slice(start, start + form.k)
        left, right = a[:, part].astype(np.float32), b[:, part].astype(np.float32)
        total = dot_accumulate(left[..., None], right.T[..., None].copy(), total[..., None], core)[
            ..., 0
        ]
    return total


@pytest.mark.parametrize(
    "form",
    [Instruction(24), Instruction(16, a="f16", b="f16"), Instruction(16, "f16", "f16", "f16"),
     Instruction(24, a="tf32", b="tf32"), Instruction(24, a="e4m3", b="e4m3"),
     Instruction(24, a="e5m2", b="e5m2"), Instruction(16, "f16", "e4m3", "e4m3")],
)  # fmt: skip
def test_bits_of_the_tensor_core(hopper: Device, form: Instruction) -> None:
    rng = np.random.default_rng(5)
    spread = np.exp2(rng.integers(-6, 6, (64 + form.n, 1)))
    depth = 4 * form.k
    both = rng.standard_normal((64 + form.n, depth)) * spread
    both *= rng.random(both.shape) < 0.9
    data = both.astype(DTYPES[form.a])
    if form.a == "tf32":
        data = (data.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    a, b = data[:64], data[64:]
    c = rng.standard_normal((64, form.n)).astype(np.float16 if form.d == "f16" else np.float32)
    found, wanted = multiply(hopper, form, a, b, c), model(form, a, b, c)
    assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))
    assert not np.array_equal(found, (exact(a, b) + c).astype(np.float32))


def test_infinities_and_nans(hopper: Device) -> None:
    form = Instruction(8)
    a, b = integers((64, 16), "bf16"), integers((8, 16), "bf16", 1)
    a[3, 2], a[5, 1], b[2, 2] = np.inf, np.nan, 0
    c = np.zeros((64, 8))
    with np.errstate(invalid="ignore"):
        wanted = exact(a, b)
    assert np.array_equal(multiply(hopper, form, a, b, c), wanted, equal_nan=True)


# The ISA's examples of layouts (figures 166 to 170): shape and strides in elements, LBO and SBO in
# bytes.


@pytest.mark.parametrize(
    ("is_k_major", "element", "swizzle", "lbo", "sbo", "shape", "strides"),
    [
        (True, 4, "none", 256, 128, ((8, 2), (4, 2)), ((4, 32), (1, 64))),
        (True, 4, "32B", 16, 256, ((8, 2), (4, 2)), ((8, 64), (1, 4))),
        (False, 2, "none", 256, 128, ((8, 1, 2), (8, 2)), ((1, 8, 64), (8, 128))),
        (False, 2, "32B", 256, 512, ((8, 2, 2), (8, 2)), ((1, 8, 128), (16, 256))),
        (False, 2, "64B", 512, 1024, ((8, 4, 2), (8, 2)), ((1, 8, 256), (32, 512))),
    ],
)  # fmt: skip
def test_examples_of_the_isa(
    is_k_major: bool, element: int, swizzle: str, lbo: int, sbo: int, shape: tuple, strides: tuple
) -> None:
    def offsets(sizes: tuple[int, ...], steps: tuple[int, ...]) -> np.ndarray:
        total = np.zeros(1, np.int64)
        for size, step in zip(sizes, steps, strict=True):
            total = (np.arange(size)[:, None] * step + total).reshape(-1)
        return total

    rows, depth = (offsets(s, d) for s, d in zip(shape, strides, strict=True))
    wanted = (rows[:, None] + depth) * element
    layout = Layout(lbo, sbo, swizzle, is_k_major)
    found = chunk_offsets(layout, len(rows), len(depth), element)
    per_chunk = 16 // element
    if is_k_major:
        assert np.array_equal(found, wanted[:, ::per_chunk])
    else:
        assert np.array_equal(found, wanted[::per_chunk].T)


# Groups

GROUPS = (
    WARPGROUP
    + Instruction(8).function()
    + r"""
// out[i]: accumulator after i + 1 products; two accumulators take turns, one group in flight.
extern "C" __global__ void groups(const uint4* a, const uint4* b, u64 form_a, u64 form_b,
                                  u32* out) {
    extern __shared__ __align__(1024) char memory[];
    for (int i = threadIdx.x; i < BYTES_A / 16; i += 128) ((uint4*)memory)[i] = a[i];
    for (int i = threadIdx.x; i < BYTES_B / 16; i += 128) ((uint4*)(memory + BYTES_A))[i] = b[i];
    fence_async();
    __syncthreads();
    u32 even[4], odd[4];
    fence();
#pragma unroll
    for (int s = 0; s < 4; s++) {
        u64 left = descriptor(memory, form_a, 32 * s);
        u64 right = descriptor(memory + BYTES_A, form_b, 32 * s);
        if (s % 2 == 0) mma(even, left, right, 0); else mma(odd, left, right, 0);
        commit();
        if (s > 0) {
            wait_group<ALLOWED>();
            for (int i = 0; i < 4; i++)
                out[128 * (4 * (s - 1) + i) + threadIdx.x] = s % 2 ? even[i] : odd[i];
            fence();
        }
    }
    wait_group<0>();
    for (int i = 0; i < 4; i++) out[128 * (12 + i) + threadIdx.x] = odd[i];
}
"""
)


def run_groups(device: Device, allowed: int) -> tuple[np.ndarray, np.ndarray]:
    a, b = integers((64, 64), "bf16"), integers((8, 64), "bf16", 1)
    left, right = lay_out(a, "128B", True), lay_out(b, "128B", True)
    sizes = len(left.image), len(right.image)
    options = (f"-DALLOWED={allowed}", f"-DBYTES_A={sizes[0]}", f"-DBYTES_B={sizes[1]}")
    out = device.empty((4, 4, 128), np.uint32)
    module = device.compile(GROUPS, options=options, arch="sm_90a")
    images = (device.array(x.image) for x in (left, right))
    module.kernel("groups").launch(
        (1,), (128,), [*images, left.descriptor, right.descriptor, out], shared_bytes=sum(sizes)
    )
    found = np.stack([from_registers(x, False) for x in out.to_numpy()])
    wanted = [exact(a[:, 16 * s : 16 * s + 16], b[:, 16 * s : 16 * s + 16]) for s in range(4)]
    return found, np.stack(wanted)


def test_one_group_may_stay_in_flight(hopper: Device) -> None:
    found, wanted = run_groups(hopper, 1)
    assert np.array_equal(found, wanted)


def test_reading_an_accumulator_too_early_gives_nan() -> None:
    found, _ = run_groups(executor(Schedule("lazy")), 2)
    assert np.isnan(found[:3]).all()
    assert not np.isnan(found[3]).any()


SKEWED = (
    WARPGROUP
    + Instruction(8).function()
    + r"""
// Each warpgroup accumulates another number of products, always one group in flight; its warps part
// between commit and wait.
extern "C" __global__ void skewed(const uint4* a, const uint4* b, u64 form_a, u64 form_b,
                                  u32* out) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ u32 count;
    if (threadIdx.x == 0) count = 0;
    for (int i = threadIdx.x; i < BYTES_A / 16; i += blockDim.x) ((uint4*)memory)[i] = a[i];
    for (int i = threadIdx.x; i < BYTES_B / 16; i += blockDim.x)
        ((uint4*)(memory + BYTES_A))[i] = b[i];
    fence_async();
    __syncthreads();
    int group = threadIdx.x / 128;
    u32 d[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int s = 0; s < 2 + 3 * group; s++) {
        fence();
        mma(d, descriptor(memory, form_a, 32 * (s % 4)),
            descriptor(memory + BYTES_A, form_b, 32 * (s % 4)), 1);
        commit();
        if (threadIdx.x / 32 % 4 == s % 4) atomicAdd(&count, threadIdx.x % 32 == 5);
        wait_group<1>();
    }
    wait_group<0>();
    for (int i = 0; i < 4; i++) out[(4 * group + i) * 128 + threadIdx.x % 128] = d[i];
    __syncthreads();
    if (threadIdx.x == 0) out[3 * 512] = count;
}
"""
)


def test_warpgroups_go_their_own_ways(hopper: Device) -> None:
    a, b = integers((64, 64), "bf16"), integers((8, 64), "bf16", 1)
    left, right = lay_out(a, "128B", True), lay_out(b, "128B", True)
    sizes = len(left.image), len(right.image)
    options = (f"-DBYTES_A={sizes[0]}", f"-DBYTES_B={sizes[1]}")
    out = hopper.empty((3 * 512 + 1,), np.uint32)
    module = hopper.compile(SKEWED, options=options, arch="sm_90a")
    images = (hopper.array(x.image) for x in (left, right))
    module.kernel("skewed").launch(
        (1,), (384,), [*images, left.descriptor, right.descriptor, out], shared_bytes=sum(sizes)
    )
    found = out.to_numpy()
    assert found[-1] == 2 + 5 + 8
    for group in range(3):
        wanted = sum(
            exact(a[:, 16 * (s % 4) :][:, :16], b[:, 16 * (s % 4) :][:, :16])
            for s in range(2 + 3 * group)
        )
        registers = found[512 * group : 512 * group + 512].reshape(4, 128)
        assert np.array_equal(from_registers(registers, False), wanted)


def test_accumulators_that_nobody_reads_are_no_trouble(hopper: Device) -> None:
    """Only some registers of an accumulator are used."""
    source = GROUPS.replace("for (int i = 0; i < 4; i++)", "for (int i = 0; i < 1; i++)")
    a, b = integers((64, 64), "bf16"), integers((8, 64), "bf16", 1)
    left, right = lay_out(a, "128B", True), lay_out(b, "128B", True)
    sizes = len(left.image), len(right.image)
    options = ("-DALLOWED=1", f"-DBYTES_A={sizes[0]}", f"-DBYTES_B={sizes[1]}")
    out = hopper.array(np.zeros((4, 4, 128), np.uint32))
    images = (hopper.array(x.image) for x in (left, right))
    hopper.compile(source, options=options, arch="sm_90a").kernel("groups").launch(
        (1,), (128,), [*images, left.descriptor, right.descriptor, out], shared_bytes=sum(sizes)
    )
    wanted = to_registers(exact(a[:, 48:], b[:, 48:]), False)[0]
    assert np.array_equal(out.to_numpy()[3, 0], wanted)


def test_what_wgmma_may_not_do() -> None:
    device = executor()
    form = Instruction(8)
    a, b = integers((64, 64), "bf16"), integers((8, 64), "bf16")
    left, right = lay_out(a, "128B", True), lay_out(b, "128B", True)
    options = ("-DALLOWED=1", f"-DBYTES_A={len(left.image)}", f"-DBYTES_B={len(right.image)}")
    kernel = device.compile(GROUPS, options=options, arch="sm_90a").kernel("groups")
    images = [device.array(x.image) for x in (left, right)]
    out = device.empty((4, 4, 128), np.uint32)
    room = len(left.image) + len(right.image)

    def refused(words: str, threads: int = 128, form_a: int = 0) -> None:
        arguments = [*images, left.descriptor | form_a, right.descriptor, out]
        with pytest.raises(LaunchError, match=words):
            kernel.launch((1,), (threads,), arguments, shared_bytes=room)

    refused("PTX line .*: a wgmma descriptor reaches shared offset", form_a=0x3FFF << 32)
    refused("PTX line .*: a wgmma descriptor with a base offset", form_a=1 << 49)
    refused("a warpgroup instruction is executed by some of its four warps only", threads=96)
    for kinds in ("f32.bf16.f16", "f16.bf16.bf16", "f32.f16.e4m3"):
        text = form.function().replace("f32.bf16.bf16", kinds)
        source = GROUPS.replace(form.function(), text)
        with pytest.raises(PtxError, match="wgmma"):
            device.compile(source, options=options, arch="sm_90a").kernel("groups").launch(
                (1,), (128,), [*images, 0, 0, out], shared_bytes=room
            )


# Operands as the TMA leaves them

TMA_PRODUCT = (
    WARPGROUP
    + Instruction(64, trans_a=1, trans_b=1).function()
    + r"""
// a [K, 64], b [K, 64], both MN-major, one box of 64 x 64 each.
extern "C" __global__ void product(const __grid_constant__ Map ma, const __grid_constant__ Map mb,
                                   u32* out) {
    extern __shared__ __align__(1024) char memory[];
    u64* full = (u64*)(memory + 16384);
    if (threadIdx.x == 0) { init(full, 1); fence_init(); }
    __syncthreads();
    if (threadIdx.x == 0) {
        expect(full, 16384);
        tma_load(memory, &ma, 0, 0, full);
        tma_load(memory + 8192, &mb, 0, 0, full);
    }
    wait(full, 0);
    u32 d[32];
    // 8 steps of K are 1024 bytes apart; there is no second atom along M or N.
    u64 form = (u64)(1024 >> 4) << 32 | 1ull << 62;
    fence();
    for (int s = 0; s < 4; s++)
        mma(d, descriptor(memory, form, 2048 * s), descriptor(memory + 8192, form, 2048 * s),
            s > 0);
    commit();
    wait_group<0>();
    for (int i = 0; i < 32; i++) out[128 * i + threadIdx.x] = d[i];
}
"""
)


def test_tiles_that_the_tma_swizzled_are_operands(hopper: Device) -> None:
    a, b = integers((64, 64), "bf16"), integers((64, 64), "bf16", 1)
    out = hopper.empty((32, 128), np.uint32)
    arrays = [hopper.array(x) for x in (a, b)]
    maps = [gpu.TensorMap(x, (64, 64), swizzle="128B") for x in arrays]
    hopper.compile(TMA_PRODUCT, arch="sm_90a").kernel("product").launch(
        (1,), (128,), [*maps, out], shared_bytes=16384 + 16
    )
    assert np.array_equal(from_registers(out.to_numpy(), False), exact(a.T, b.T))
