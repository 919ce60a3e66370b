"""Host side of merge_states.cu: attention to several sets of keys, as attention to all of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpu.counters import Report
from gpu.device import Array, Device, Module
from gpu.kernels.build import build_module
from gpu.kernels.checks import BF16, check_tensor
from gpu.kernels.result import KernelResult
from simkit.errors import DtypeError, LaunchError, ShapeError
from simkit.layouts.tables import Table, check_indptr, check_range

THREADS = 128
PAIRS_PER_CTA = 4  # a warp for the states of one head of one row
MAX_CTAS = 2**31 - 1
HEAD_DIM_STEP, MAX_HEAD_DIM = 64, 1024

F32 = np.dtype(np.float32)
ELEMENTS = {F32: "Float32", BF16: "BFloat16", np.dtype(np.float16): "Float16"}
"""Element types of states and outputs by dtype, as the kernels name them."""
INDICES = {np.dtype(np.int32): "int", np.dtype(np.int64): "long long"}


def build(
    device: Device,
    head_dim: int,
    *,
    state: DTypeLike = F32,
    output: DTypeLike = F32,
    source: str | None = None,
) -> Module:
    """All kernels but merge_states_variable, for one head dimension, type of states and type of
    merged outputs.
    """
    return _build(device, head_dim, output, f"-DSTATE={_element('states', state)}", source)


def build_variable(
    device: Device,
    head_dim: int,
    *,
    output: DTypeLike = BF16,
    index: DTypeLike = np.int32,
    source: str | None = None,
) -> Module:
    """merge_states_variable for one head dimension, type of merged outputs and of merge_indptr."""
    return _build(device, head_dim, output, f"-DINDEX={INDICES[np.dtype(index)]}", source)


def _build(
    device: Device, head_dim: int, output: DTypeLike, kind: str, source: str | None
) -> Module:
    if head_dim % HEAD_DIM_STEP or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ShapeError(
            f"head_dim is {head_dim}; it must be a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
        )
    written = f"-DOUTPUT={_element('merged outputs', output)}"
    return build_module(device, "merge_states", (f"-DHEAD_DIM={head_dim}", written, kind), source)


def merge_state(
    device: Device,
    o_a: NDArray[Any],
    lse_a: NDArray[Any],
    o_b: NDArray[Any],
    lse_b: NDArray[Any],
    *,
    dtype: DTypeLike | None = None,
    source: str | None = None,
) -> KernelResult:
    """The merge of two states.

    ``o_a``, ``o_b`` [rows, heads, d], both float32, bfloat16 or float16, d a multiple of 64 up to
    1024; ``lse_a``, ``lse_b`` [rows, heads] float32, natural logarithms, -inf without keys, whose o
    is then not read. ``dtype`` of the merged o, by default that of the states. ``source`` replaces
    the kernels' text. Outputs: ``o``, ``lse`` in the shapes of the states; o = 0 and lse = -inf
    where neither state has keys. Raises ``DtypeError``, ``ShapeError``, ``LaunchError``.
    """
    rows, heads, d = _state_shape("o_a", o_a, "lse_a", lse_a, ("rows", "heads", "head_dim"))
    _state_shape("o_b", o_b, "lse_b", lse_b, o_a.shape)
    if o_b.dtype != o_a.dtype:
        raise DtypeError(f"o_a is {o_a.dtype}, o_b {o_b.dtype}; the kernel takes them alike")
    output = np.dtype(dtype or o_a.dtype)
    module = build(device, d, state=o_a.dtype, output=output, source=source)
    o, lse = _outputs(device, (rows, heads, d), output)
    named = (("o_a", o_a), ("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b))
    inputs = [device.array(array, name=name) for name, array in named]
    report = _launch(module, "merge_state", rows * heads, [*inputs, o, lse, rows * heads])
    return _result(o, lse, report)


def merge_state_in_place(
    device: Device,
    o: NDArray[Any],
    lse: NDArray[Any],
    o_other: NDArray[Any],
    lse_other: NDArray[Any],
    mask: NDArray[np.uint8] | None = None,
    *,
    source: str | None = None,
) -> KernelResult:
    """``o``, ``lse`` with ``o_other``, ``lse_other`` merged into them on the device.

    As ``merge_state``, but that the types of o and o_other may differ. ``mask`` [rows] uint8: rows
    of 0 are not touched. Outputs: ``o``, ``lse`` afterwards; the arrays given stay as they are.
    """
    rows, heads, d = _state_shape("o", o, "lse", lse, ("rows", "heads", "head_dim"))
    _state_shape("o_other", o_other, "lse_other", lse_other, o.shape)
    if mask is not None:
        check_tensor("mask", mask, np.uint8, (rows,))
    module = build(device, d, state=o_other.dtype, output=o.dtype, source=source)
    named = (("o", o), ("lse", lse), ("o_other", o_other), ("lse_other", lse_other))
    states = [device.array(array, name=name) for name, array in named]
    masked = 0 if mask is None else device.array(mask, name="mask")  # a null pointer
    report = _launch(
        module, "merge_state_in_place", rows * heads, [*states, masked, rows * heads, heads]
    )
    return _result(states[0], states[1], report)


def merge_states(
    device: Device,
    partial_o: NDArray[Any],
    partial_lse: NDArray[Any],
    *,
    dtype: DTypeLike | None = None,
    source: str | None = None,
) -> KernelResult:
    """The merge of the same number of states for each row, which may be none.

    ``partial_o`` [rows, states, heads, d], ``partial_lse`` [rows, states, heads] give ``o`` [rows,
    heads, d] and ``lse`` [rows, heads]; all else as ``merge_state``.
    """
    axes = ("rows", "states", "heads", "head_dim")
    rows, states, heads, d = _state_shape("partial_o", partial_o, "partial_lse", partial_lse, axes)
    output = np.dtype(dtype or partial_o.dtype)
    module = build(device, d, state=partial_o.dtype, output=output, source=source)
    o, lse = _outputs(device, (rows, heads, d), output)
    named = (("partial_o", partial_o), ("partial_lse", partial_lse))
    inputs = [device.array(array, name=name) for name, array in named]
    report = _launch(
        module, "merge_states", rows * heads, [*inputs, o, lse, rows * heads, heads, states]
    )
    return _result(o, lse, report)


def merge_states_variable(
    device: Device,
    partial_o: NDArray[Any],
    partial_lse: NDArray[Any],
    merge_indptr: Table,
    *,
    dtype: DTypeLike = BF16,
    v_scale: float = 1.0,
    source: str | None = None,
) -> KernelResult:
    """The merge of any number of states for each row: what split-KV attention ends with.

    ``partial_o`` [partial rows, heads, d], ``partial_lse`` [partial rows, heads], float32. Row r is
    the merge of partial rows ``merge_indptr[r]`` to before ``merge_indptr[r + 1]``, int32 or int64
    [rows + 1], maybe of none. o is multiplied by ``v_scale`` before it is rounded to ``dtype``.
    Outputs: ``o`` [rows, heads, d], ``lse`` [rows, heads]. Raises also ``TableError`` for a
    merge_indptr that decreases or leaves the partial rows.
    """
    axes = ("partial rows", "heads", "head_dim")
    _, heads, d = _state_shape("partial_o", partial_o, "partial_lse", partial_lse, axes)
    check_tensor("partial_o", partial_o, F32, axes)
    rows = check_merge_indptr(merge_indptr, len(partial_o))
    o, lse = _outputs(device, (rows, heads, d), np.dtype(dtype))
    report = launch_merge_states_variable(
        device,
        device.array(partial_o, name="partial_o"),
        device.array(partial_lse, name="partial_lse"),
        device.array(merge_indptr, name="merge_indptr"),
        o,
        lse,
        v_scale=v_scale,
        source=source,
    )
    return _result(o, lse, report)


def launch_merge_states_variable(
    device: Device,
    partial_o: Array,
    partial_lse: Array,
    merge_indptr: Array,
    o: Array,
    lse: Array,
    *,
    v_scale: float = 1.0,
    source: str | None = None,
) -> Report:
    """One launch of merge_states_variable on device arrays, after a kernel that wrote the partial
    states; shapes and types as for ``merge_states_variable``.

    What is in merge_indptr is not looked at here: ``check_merge_indptr`` does that before the table
    goes to the device. Raises ``DtypeError``, ``ShapeError``, ``LaunchError``.
    """
    if merge_indptr.dtype not in INDICES:
        raise DtypeError(f"merge_indptr is {merge_indptr.dtype}; the kernel takes int32 or int64")
    if len(o.shape) != 3 or len(partial_o.shape) != 3:
        raise ShapeError(
            f"o and partial_o have shapes {o.shape} and {partial_o.shape}; "
            "the kernel takes [rows, heads, head_dim]"
        )
    rows, heads, d = o.shape
    partial_rows = partial_o.shape[0]
    expected = (
        ("partial_o", partial_o, F32, (partial_rows, heads, d)),
        ("partial_lse", partial_lse, F32, (partial_rows, heads)),
        ("merge_indptr", merge_indptr, merge_indptr.dtype, (rows + 1,)),
        ("lse", lse, F32, (rows, heads)),
    )
    for name, array, dtype, shape in expected:
        if array.dtype != dtype:
            raise DtypeError(f"{name} is {array.dtype}; the kernel takes {dtype}")
        if array.shape != shape:
            raise ShapeError(f"{name} has shape {array.shape}; the kernel takes {shape}")
    with np.errstate(over="ignore"):
        scale = np.float32(v_scale)
    if not math.isfinite(scale):
        raise LaunchError(f"v_scale is {v_scale}; it must be a finite float32")
    module = build_variable(device, d, output=o.dtype, index=merge_indptr.dtype, source=source)
    pairs = rows * heads
    args = [partial_o, partial_lse, merge_indptr, o, lse, pairs, heads, scale]
    return _launch(module, "merge_states_variable", pairs, args)


def check_merge_indptr(merge_indptr: Table, partial_rows: int) -> int:
    """How many rows the table describes: int32 or int64, it starts at 0, never decreases, and stays
    within the ``partial_rows``. Raises ``TableError``, ``DtypeError``, ``ShapeError``.
    """
    check_indptr("merge_indptr", merge_indptr)
    check_range("merge_indptr", merge_indptr, 0, partial_rows)
    return len(merge_indptr) - 1


def _launch(module: Module, kernel: str, pairs: int, args: list[Any]) -> Report:
    ctas = -(-pairs // PAIRS_PER_CTA)
    if not 1 <= ctas <= MAX_CTAS:
        raise LaunchError(
            f"{kernel} has {pairs} heads of rows to merge, which is {ctas} CTAs; "
            f"a grid has 1 to {MAX_CTAS}"
        )
    return module.kernel(kernel).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), args=args)


def _outputs(device: Device, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Array, Array]:
    _element("merged outputs", dtype)
    return device.empty(shape, dtype, name="o"), device.empty(shape[:-1], F32, name="lse")


def _result(o: Array, lse: Array, report: Report) -> KernelResult:
    return KernelResult({"o": o.to_numpy(), "lse": lse.to_numpy()}, [report])


def _element(what: str, dtype: DTypeLike) -> str:
    wanted = np.dtype(dtype)
    if wanted not in ELEMENTS:
        raise DtypeError(f"{what} are float32, bfloat16 or float16, not {wanted}")
    return ELEMENTS[wanted]


def _state_shape(
    o_name: str,
    o: NDArray[Any],
    lse_name: str,
    lse: NDArray[Any],
    axes: tuple[str | int, ...],
) -> tuple[int, ...]:
    """The shape of o, which has ``axes``, beside an lse of the same without the last."""
    _element(f"states ({o_name})", o.dtype)
    check_tensor(o_name, o, o.dtype, axes)
    check_tensor(lse_name, lse, F32, o.shape[:-1])
    return o.shape
