"""Host side of what the kernels of batch_attention.cuh share: arguments, launch, merge."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from gpu import jit
from gpu.counters import Report
from gpu.device import Array, Device
from gpu.kernels.kv_append import FIRST_FP8_ARCH
from gpu.kernels.merge_states import launch_merge_states_variable
from gpu.kernels.result import KernelResult
from simkit.algorithms.batch_attention import (
    THREADS,
    QueryTable,
    Units,
    launch_tensors,
    shared_bytes,
)
from simkit.algorithms.batch_problem import BatchProblem
from simkit.algorithms.variant import soft_cap_inverse
from simkit.errors import CompileError, LaunchError
from simkit.layouts.block_sparse import BlockRows
from simkit.planning.plan import Plan

MAX_KV_HEADS = 65535  # the grid's second axis

_POINTER = np.uint64
_VARIANT = np.dtype(
    [(name, _POINTER) for name in ("alibi_slopes", "sinks", "mask", "mask_indptr", "rope")]
    + [("variant_values", _POINTER), ("window_left", np.int32)]
    + [("soft_cap", np.float32), ("soft_cap_inverse", np.float32)],
    align=True,
)
"""struct VariantArguments of variant.cuh."""
_POINTERS = (
    "q", "k", "v", "o", "lse", "partial_o", "partial_lse", "qo_indptr", "kv_indptr", "kv_indices",
    "kv_last_len", "requests", "q_tiles", "kv_chunks", "state_rows",
)  # fmt: skip
_INTEGERS = ("heads", "kv_heads", "block_size", "block_rows", "q_rows", "kv_chunk", "is_split")
ARGUMENTS = np.dtype(
    [(name, _POINTER) for name in _POINTERS]
    + [("variant", _VARIANT)]
    + [(name, np.int32) for name in _INTEGERS]
    + [(name, np.float32) for name in ("scale", "factor", "v_scale")],
    align=True,
)
"""struct BatchArguments of batch_attention.cuh."""


def run_batch(
    device: Device,
    kernel: str,
    problem: BatchProblem,
    plan: Plan,
    *,
    units: Units = "tensor_cores",
    table: QueryTable = "ragged",
    block_rows: int = 0,
    source: str | None = None,
) -> KernelResult:
    """Launches ``kernel`` for a plan, and the merge of its partial states if it splits.

    ``source`` replaces the text of the kernel's file. Outputs: ``o`` and ``lse``, and
    ``partial_o`` and ``partial_lse`` of a plan that splits. Raises ``TableError``, ``ShapeError``,
    ``LaunchError``, ``CompileError``.
    """
    rows = (problem.rows, problem.heads)
    outputs = {
        "o": device.empty((*rows, problem.dv), problem.q.dtype, name="o"),
        "lse": device.empty(rows, np.float32, name="lse"),
    }
    splits = plan.is_split and problem.rows > 0
    if splits:
        outputs |= empty_states(device, problem, plan.partial_rows)
    reports = run_plan(
        device, kernel, problem, plan, outputs, units=units, table=table, block_rows=block_rows,
        state_rows=plan.merge_indptr[:-1] if splits else None, source=source,
    )  # fmt: skip
    if splits:
        reports.append(merge(device, outputs, plan.merge_indptr))
    return KernelResult({name: array.to_numpy() for name, array in outputs.items()}, reports)


def empty_states(device: Device, problem: BatchProblem, rows: int) -> dict[str, Array]:
    """partial_o [rows, heads, dv] and partial_lse [rows, heads], float32."""
    shape = (rows, problem.heads)
    return {
        "partial_o": device.empty((*shape, problem.dv), np.float32, name="partial_o"),
        "partial_lse": device.empty(shape, np.float32, name="partial_lse"),
    }


def merge(device: Device, outputs: dict[str, Array], merge_indptr: NDArray[np.int64]) -> Report:
    """The merge of partial_o and partial_lse into o and lse."""
    states = (outputs["partial_o"], outputs["partial_lse"])
    table = device.array(merge_indptr, name="merge_indptr")
    return launch_merge_states_variable(device, *states, table, outputs["o"], outputs["lse"])


def run_plan(
    device: Device,
    kernel: str,
    problem: BatchProblem,
    plan: Plan,
    outputs: Mapping[str, Array],
    *,
    units: Units = "tensor_cores",
    table: QueryTable = "ragged",
    block_rows: int = 0,
    state_rows: NDArray[np.int64] | None = None,
    suffix: str = "",
    source: str | None = None,
) -> list[Report]:
    """One launch (none for an empty grid), which writes o and lse of ``outputs``, or, with
    ``state_rows`` [queries], partial_o and partial_lse from that row on.

    ``suffix``: of the names of the arrays that go to the device.
    """
    configuration = jit.Configuration.of(kernel, problem, plan, units)
    if problem.kv_heads > MAX_KV_HEADS:
        raise LaunchError(f"kv_heads is {problem.kv_heads}; a grid takes {MAX_KV_HEADS} at most")
    arch = int(device.arch.removeprefix("sm_").rstrip("af"))
    if configuration.kv == "e4m3" and arch < FIRST_FP8_ARCH:
        raise CompileError(
            f"{kernel}.cu needs sm_{FIRST_FP8_ARCH} or later for FP8 K and V; the device is "
            f"{device.arch}"
        )
    module = jit.build(device, configuration, user=problem.variant.user, source=source)
    if not plan.grid:
        return []
    index = np.dtype(f"i{configuration.index_bits // 8}")
    arrays = dict(outputs)
    for name, array in launch_tensors(problem, plan, table, state_rows).items():
        is_table = name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_len")
        arrays[name] = device.array(array.astype(index) if is_table else array, name=name + suffix)
    report = module.kernel(kernel).launch(
        grid=(plan.grid, problem.kv_heads, 1),
        block=(THREADS, 1, 1),
        args=[_arguments(problem, plan, arrays, block_rows, state_rows is not None)],
        shared_bytes=shared_bytes(problem, plan.tile_q, units)[0],
    )
    return [report]


def _arguments(
    problem: BatchProblem, plan: Plan, arrays: dict[str, Array], block_rows: int, is_split: bool
) -> np.void:
    """The by-value struct; pointers that the kernel has no use for are null."""
    arguments = np.zeros((), ARGUMENTS)
    for name in _POINTERS:
        if name in arrays:
            arguments[name] = arrays[name].address
    variant = arguments["variant"]
    for name in _VARIANT.names or ():
        if name in arrays:
            variant[name] = arrays[name].address
    own = problem.variant
    # No query stands after the last key: a longer window is no limit, and may exceed an int.
    variant["window_left"] = min(own.window_left, int(problem.kv_lens.max(initial=0)))
    if own.soft_cap > 0:
        variant["soft_cap"] = np.float32(own.soft_cap)
        variant["soft_cap_inverse"] = soft_cap_inverse(own.soft_cap)
    integers = {
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "block_size": problem.keys.block_size if isinstance(problem.keys, BlockRows) else 1,
        "block_rows": block_rows,
        "q_rows": problem.rows,
        "kv_chunk": min(plan.kv_chunk, np.iinfo(np.int32).max),
        "is_split": int(is_split),
    }
    for name, value in integers.items():
        arguments[name] = value
    arguments["scale"] = problem.score_scale
    arguments["factor"] = problem.factor
    arguments["v_scale"] = np.float32(problem.v_scale)
    return np.void(arguments.tobytes())
