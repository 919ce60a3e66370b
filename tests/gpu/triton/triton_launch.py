"""Compiles Triton kernels to PTX without a GPU, and launches them on a device of ours.

A compiled kernel takes its arguments but the constants in order (a tensor descriptor as the
128-byte map, its shape as 32-bit and its strides as 64-bit integers), then two pointers to scratch
memory.  Its block has ``num_warps`` warps, and all its shared memory is dynamic.  Source: triton,
backends/nvidia/driver.py (CudaLauncher, make_tensordesc_arg).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Like our own PTX: kept between tests, not between test runs.
os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="simkit-test-triton-"))

import numpy as np
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import gpu
from gpu.counters import Report
from gpu.device import Array, Device, Kernel

_SWIZZLES = ("none", "32B", "64B", "128B")


@dataclass(frozen=True, slots=True)
class Compiled:
    """PTX of one kernel and what a launch must know."""

    ptx: str
    name: str
    threads: int
    shared_bytes: int
    scratch_bytes: int
    scratch_align: int
    descriptors: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A host-made tensor descriptor: the block that it moves comes from the kernel."""

    array: Array


def compile_ptx(
    function: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    arch: int,
    num_warps: int = 4,
    num_stages: int = 3,
    odd: Collection[str] = (),
    debug: bool = False,
) -> Compiled:
    """``signature``: types of the arguments that are no constants, e.g. ``*fp16``, ``i32``,
    ``tensordesc<fp16[64, 64]>``.  Pointers and sizes but the ``odd`` ones are taken for multiples
    of 16, as Triton's launcher does where they are.  ``debug`` keeps device assertions.
    """
    types = {n: "constexpr" if n in constants else signature[n] for n in function.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(types.items())
        if kind[0] == "*" or (kind == "i32" and name not in odd)
    }
    source = ASTSource(function, types, dict(constants), aligned)

    def without_assembler(*arguments: Any) -> tuple[str, str] | None:
        if not arguments:
            return "stops at PTX", "stops at PTX"
        arguments[1]["cubin"] = lambda ptx, metadata: b""
        return None

    with knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = without_assembler
        made = triton.compile(
            source,
            target=GPUTarget("cuda", arch, 32),
            options={
                "num_warps": num_warps,
                "num_stages": num_stages,
                "enable_fp_fusion": True,
                "debug": debug,
            },
        )
    m = made.metadata
    return Compiled(
        made.asm["ptx"], m.name, 32 * m.num_warps, m.shared, m.global_scratch_size,
        m.global_scratch_align, tuple(m.tensordesc_meta or ()),
    )  # fmt: skip


def launch(
    device: Device,
    kernel: Compiled,
    grid: tuple[int, ...],
    args: Sequence[object],
    entry: Kernel | None = None,
) -> Report:
    """Runs a kernel; ``args`` as it declares them, constants left out.  ``entry``: the kernel as
    loaded before.
    """
    values: list[object] = []
    descriptions = iter(kernel.descriptors)
    for argument in args:
        if isinstance(argument, Descriptor):
            values += _descriptor(argument.array, next(descriptions))
        else:
            values.append(argument)
    size = max(int(np.prod(grid)) * kernel.scratch_bytes, 1)
    scratch = device.empty(size, np.uint8, name="scratch")
    entry = entry or device.load(kernel.ptx).kernel(kernel.name)
    return entry.launch(
        grid, (kernel.threads,), [*values, scratch, scratch], shared_bytes=kernel.shared_bytes
    )


def _descriptor(array: Array, description: Mapping[str, Any]) -> list[object]:
    """What one descriptor argument becomes."""
    swizzle = _SWIZZLES[description["swizzle"]]
    tensor_map = gpu.TensorMap(array, tuple(description["block_size"]), swizzle=swizzle)
    strides = [int(np.prod(array.shape[axis + 1 :])) for axis in range(len(array.shape))]
    return [tensor_map, *array.shape, *strides]
