"""Matrix products as Triton compiles them: pipelined copies, tensor descriptors, fp8."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

# tests/gpu/triton itself can pass for a package of that name, a submodule cannot.
pytest.importorskip("triton.language")

import kernels_in_triton as kernels
import kernels_of_features as features
import triton.language as tl
from triton_launch import Compiled, Descriptor, compile_ptx, launch

import gpu
from gpu.ptx.launch import Options
from gpu.ptx.schedule import Schedule
from simkit.errors import LaunchError

ARCHITECTURES = {80: "a100", 90: "h100"}
SIZES = {"M": 64, "N": 64, "K": 64}
DTYPES: dict[str, Any] = {
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": np.dtype(np.float32),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
}
# (inputs, architecture) -> what Triton makes of the product
INSTRUCTIONS = {
    ("fp16", 80): "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    ("fp16", 90): "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16",
    ("bf16", 80): "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    ("bf16", 90): "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
    ("fp32", 80): "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
    ("fp32", 90): "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32",
    ("fp8e4nv", 90): "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3",
    ("fp8e5", 90): "wgmma.mma_async.sync.aligned.m64n64k32.f32.e5m2.e5m2",
    # Before sm_89 fp8 operands become f16.
    ("fp8e5", 80): "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
}
SCHEDULES = [Schedule("lazy"), Schedule("random", 5)]


def matmul_kernel(kind: str, arch: int, num_stages: int = 3) -> Compiled:
    signature = {"a": f"*{kind}", "b": f"*{kind}", "c": "*fp32", "m": "i32", "n": "i32", "k": "i32"}
    constants = SIZES if kind.startswith("fp8") else SIZES | {"K": 32}
    return compile_ptx(kernels.matmul, signature, constants, arch, num_stages=num_stages)


def random_matrices(kind: str, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers from -4 to 4: their products and sums are exact in every format."""
    generator = np.random.default_rng(m + n + k)
    return tuple(
        generator.integers(-4, 5, shape).astype(np.float32).astype(DTYPES[kind])
        for shape in ((m, k), (k, n))
    )  # type: ignore[return-value]


def check_matmul(kind: str, arch: int, m: int, n: int, k: int, options: Options) -> None:
    a, b = random_matrices(kind, m, n, k)
    device = gpu.open("ptx", ARCHITECTURES[arch], options)
    c = device.empty((m, n), np.float32, name="c")
    arguments = [device.array(a, "a"), device.array(b, "b"), c, m, n, k]
    launch(device, matmul_kernel(kind, arch), (-(-m // 64), -(-n // 64)), arguments)
    assert np.array_equal(c.to_numpy(), a.astype(np.float64) @ b.astype(np.float64))


@pytest.mark.parametrize(("kind", "arch"), INSTRUCTIONS)
def test_matmul(kind: str, arch: int) -> None:
    assert INSTRUCTIONS[(kind, arch)] in matmul_kernel(kind, arch).ptx
    check_matmul(kind, arch, 128, 192, 160, Options())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_matmul_is_pipelined(arch: int) -> None:
    one, three = (matmul_kernel("fp16", arch, num_stages=k) for k in (1, 3))
    assert "cp.async.wait_group" in three.ptx
    assert three.shared_bytes > one.shared_bytes
    assert "cp.async.wait_group" not in one.ptx


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_matmul_of_odd_sizes(arch: int) -> None:
    check_matmul("fp16", arch, 80, 112, 48, Options())


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_matmul_in_any_order(schedule: Schedule, arch: int) -> None:
    check_matmul("fp16", arch, 64, 128, 160, Options(schedule=schedule))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_random_numbers_lie_within_the_error_of_float32_sums(arch: int) -> None:
    m, n, k = 64, 64, 256
    generator = np.random.default_rng(9)
    a, b = (generator.standard_normal(s).astype(np.float16) for s in ((m, k), (k, n)))
    device = gpu.open("ptx", ARCHITECTURES[arch])
    c = device.empty((m, n), np.float32)
    launch(
        device, matmul_kernel("fp16", arch), (1, 1), [device.array(a), device.array(b), c, m, n, k]
    )
    wide_a, wide_b = (x.astype(np.float64) for x in (a, b))
    # Each of the k terms is truncated once, at 2^-23 or better of a partial sum of |products|.
    bound = k * 2.0**-23 * (np.abs(wide_a) @ np.abs(wide_b))
    assert (np.abs(c.to_numpy() - wide_a @ wide_b) <= bound).all()


# Tensor descriptors


def descriptor_kernel(arch: int) -> Compiled:
    signature = dict.fromkeys("abc", "tensordesc<fp16[64, 64]>") | {"k": "i32"}
    return compile_ptx(kernels.matmul_descriptors, signature, SIZES, arch, odd="mnk")


def device_descriptor_kernel(arch: int) -> Compiled:
    signature = dict.fromkeys("abc", "*fp16") | dict.fromkeys("mnk", "i32")
    return compile_ptx(kernels.matmul_device_descriptors, signature, SIZES, arch, odd="mnk")


@pytest.mark.parametrize("schedule", [Schedule(), *SCHEDULES], ids=str)
@pytest.mark.parametrize("is_made_by_host", [True, False])
def test_matmul_by_tensor_copies(is_made_by_host: bool, schedule: Schedule) -> None:
    """Sizes that no tile divides: the TMA fills and clips."""
    m, n, k = 128, 88, 200
    kernel = descriptor_kernel(90) if is_made_by_host else device_descriptor_kernel(90)
    for expected in ("cp.async.bulk.tensor.2d", "wgmma.mma_async", "mbarrier.try_wait"):
        assert expected in kernel.ptx
    assert ("tensormap.replace" in kernel.ptx) != is_made_by_host
    a, b = random_matrices("fp16", m, n, k)
    device = gpu.open("ptx", "h100", Options(schedule=schedule))
    c = device.empty((m, n), np.float16, name="c")
    arrays = [device.array(a, "a"), device.array(np.ascontiguousarray(b.T), "b"), c]
    if is_made_by_host:
        arguments: list[object] = [*map(Descriptor, arrays), k]
    else:
        arguments = [*arrays, m, n, k]
    report = launch(device, kernel, (2, 2), arguments)
    assert np.array_equal(c.to_numpy(), a.astype(np.float64) @ b.astype(np.float64))
    moved = {(t.tensor, t.direction): t.requested for t in report.traffic.tensors}
    # Bytes outside the tensors are not moved.
    assert moved[("a", "read")] == 2 * m * k * 2
    assert moved[("b", "read")] == 2 * n * k * 2
    assert moved[("c", "write")] == m * n * 2


def test_descriptors_become_pointers_before_sm_90() -> None:
    m, n, k = 64, 128, 128
    kernel = device_descriptor_kernel(80)
    assert "cp.async.bulk" not in kernel.ptx
    a, b = random_matrices("fp16", m, n, k)
    device = gpu.open("ptx", "a100")
    c = device.empty((m, n), np.float16)
    arrays = [device.array(a), device.array(np.ascontiguousarray(b.T)), c]
    launch(device, kernel, (1, 2), [*arrays, m, n, k])
    assert np.array_equal(c.to_numpy(), a.astype(np.float64) @ b.astype(np.float64))


def test_a_descriptor_that_the_hardware_refuses() -> None:
    """A row of 100 elements is no multiple of 16 bytes; the kernel cannot know."""
    m, n, k = 64, 64, 100
    a, b = random_matrices("fp16", m, n, k)
    device = gpu.open("ptx")
    c = device.empty((m, n), np.float16)
    arrays = [device.array(a), device.array(np.ascontiguousarray(b.T)), c]
    with pytest.raises(LaunchError, match=r"strides\[0\] is 200 bytes, not a multiple of 16"):
        launch(device, device_descriptor_kernel(90), (1, 1), [*arrays, m, n, k])


@pytest.mark.parametrize("schedule", [Schedule(), *SCHEDULES], ids=str)
def test_persistent_matmul(schedule: Schedule) -> None:
    """Two programs for six tiles: barriers and buffers are used again and again."""
    m, n, k = 128, 192, 192
    signature = dict.fromkeys("abc", "*fp16") | dict.fromkeys("mnk", "i32")
    kernel = compile_ptx(features.persistent_matmul, signature, SIZES | {"PROGRAMS": 2}, 90)
    a, b = random_matrices("fp16", m, n, k)
    device = gpu.open("ptx", "h100", Options(schedule=schedule))
    c = device.empty((m, n), np.float16)
    arrays = [device.array(a), device.array(np.ascontiguousarray(b.T)), c]
    launch(device, kernel, (2,), [*arrays, m, n, k])
    assert np.array_equal(c.to_numpy(), a.astype(np.float64) @ b.astype(np.float64))


def test_addition_by_a_tensor_copy() -> None:
    kernel = compile_ptx(
        features.add_by_descriptor, {"a": "*fp16", "c": "*fp16"}, {"M": 32, "N": 64}, 90
    )
    assert "cp.reduce.async.bulk.tensor" in kernel.ptx
    generator = np.random.default_rng(6)
    a, c = (generator.standard_normal((32, 64)).astype(np.float16) for _ in range(2))
    device = gpu.open("ptx")
    target = device.array(c)
    launch(device, kernel, (3,), [device.array(a), target])
    wanted = c
    for _ in range(3):
        wanted = wanted + a
    assert np.array_equal(target.to_numpy(), wanted)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("kind", "result"), [("i8", "i32"), ("fp64", "fp64"), ("fp16", "fp16")])
def test_other_accumulators(kind: str, result: str, arch: int) -> None:
    """Integers add up in 32 bits, f64 in f64, f16 (where asked for) in f16."""
    dtypes: dict[str, tuple[Any, Any]] = {
        "i8": (np.int8, np.int32), "fp64": (np.float64,) * 2, "fp16": (np.float16,) * 2
    }  # fmt: skip
    dtype, dtype_of_c = dtypes[kind]
    m, n, k = 64, 64, 64
    out = {"i32": tl.int32, "fp64": tl.float64, "fp16": tl.float16}[result]
    signature = {"a": f"*{kind}", "b": f"*{kind}", "c": f"*{result}"}
    kernel = compile_ptx(features.one_dot, signature, SIZES | {"OUT": out}, arch)
    generator = np.random.default_rng(7)
    largest = 128 if kind == "i8" else 5
    a, b = (generator.integers(-largest, largest, s).astype(dtype) for s in ((m, k), (k, n)))
    device = gpu.open("ptx", ARCHITECTURES[arch])
    c = device.empty((m, n), dtype_of_c)
    launch(device, kernel, (1,), [device.array(a), device.array(b), c])
    assert np.array_equal(c.to_numpy(), a.astype(np.float64) @ b.astype(np.float64))
