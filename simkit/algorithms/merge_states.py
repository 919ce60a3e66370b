"""Merging attention states: attention to several sets of keys, as attention to all of them.

A state is an output ``o``, normalised, with its ``lse``, the natural logarithm of the sum of
exponentials over the keys it has seen. Without keys lse is -inf and o is anything: it is never
read. Split-KV, cascade and ring attention all end in this merge. Kernels: merge_states.cu.
Sources: Ye et al., FlashInfer, arXiv 2501.01005, section 2.2; Juravsky et al., Hydragen,
arXiv 2402.05099.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from simkit.algorithms.elements import BF16, DECODE, ENCODE, F32
from simkit.algorithms.softmax import softmax_output
from simkit.algorithms.tiles import tile_count
from simkit.errors import DtypeError, ShapeError
from simkit.layouts.tables import Table, check_indptr, check_range
from simkit.machine.machine import Cta, Machine
from simkit.machine.memory import WARP_LANES, Tensor
from simkit.numerics.arrays import Float32Array
from simkit.numerics.exp2 import LN2, LOG2E, exp2, log2
from simkit.numerics.fma import fma
from simkit.numerics.minmax import fmax_ptx
from simkit.numerics.scalar import add, multiply, subtract

Array = NDArray[Any]

THREADS = 128
PAIRS_PER_CTA = 4  # a warp merges the states of one head of one row, a pair
HEAD_DIM_STEP, MAX_HEAD_DIM = 64, 1024
"""Head dimensions are multiples of 64, for a lane has pairs of values."""
_ACCESS_BYTES = 16  # the most that a lane moves at once


@dataclass(frozen=True, eq=False)
class State:
    """Attention to some keys: ``o`` [..., d], normalised; ``lse`` [...], natural logarithm, -inf
    without keys.
    """

    o: Array
    lse: Array


def merged(o: Float32Array, lse: Float32Array) -> State:
    """The merge of float32 states ``o`` [..., states, d], ``lse`` [..., states], any number, in
    their order and as the kernels compute it; a kernel may yet round o to a narrower type.

    All operations are float32, and only states that have keys (lse is not -inf) take part::

        M = max(lse); w = exp2((lse - M) * log2 e)
        total = w + ... from 0; sum = fma(w, o, ...) from -0
        o = sum / total; lse = fma(log2(total), ln 2, M)

    The difference is taken before the product, so that the largest weight is exactly 1 and total at
    least 1: a state that is alone comes out bit for bit as it went in, but that an lse of -0
    becomes +0. Without any, o is 0 and lse -inf. An lse of NaN or +inf makes both NaN. A weight may
    be 0 by underflow, which makes an infinite o NaN. Errors: `ShapeError`, `DtypeError`.
    """
    _check_state(o, lse, (F32,))
    rows, d = lse.shape[:-1], o.shape[-1]
    maximum = np.full(rows, -np.inf, np.float32)
    for index in range(lse.shape[-1]):
        maximum = fmax_ptx(maximum, lse[..., index])
    total = np.zeros(rows, np.float32)
    weighted = np.full((*rows, d), -0.0, np.float32)  # what -0 can be added to and stay -0
    for index in range(lse.shape[-1]):
        own = lse[..., index]
        present = ~np.isneginf(own)
        weight = exp2(multiply(subtract(own, maximum), LOG2E))
        total = np.where(present, add(total, weight), total)
        more = fma(weight[..., None], o[..., index, :], weighted)
        weighted = np.where(present[..., None], more, weighted)
    # Without keys the maximum is -inf, and so is what is added to it.
    merged_lse = np.where(total >= 0, fma(log2(total), LN2, maximum), total)
    return State(softmax_output(weighted, total[..., None]), merged_lse)


def merge_reference(o: Array, lse: Array) -> State:
    """The same merge by the formula in float64; states of any floating-point type."""
    present = ~np.isneginf(lse)
    lse = lse.astype(np.float64)
    o = np.where(present[..., None], o.astype(np.float64), 0.0)
    with np.errstate(all="ignore"):
        maximum = lse.max(axis=-1, initial=-np.inf)
        shift = np.where(np.isneginf(maximum), 0.0, maximum)
        weights = np.where(present, np.exp(lse - shift[..., None]), 0.0)
        total = weights.sum(axis=-1)
        p = weights / np.where(total == 0, 1.0, total)[..., None]
        # 0 times an infinite o is NaN, as it should be for states that have keys.
        return State((p[..., None] * o).sum(axis=-2), shift + np.log(total))


_MERGES: dict[str, Callable[[Array, Array], State]] = {
    "reference": merge_reference,
    "device": merged,
}


def merge_state(
    machine: Machine,
    o_a: Array,
    lse_a: Array,
    o_b: Array,
    lse_b: Array,
    *,
    dtype: DTypeLike | None = None,
) -> State:
    """The merge of two states: ``o_a``, ``o_b`` [rows, heads, d], ``lse_a``, ``lse_b`` [rows,
    heads] float32. ``dtype`` of the merged o: by default that of the states.

    Leaves o_a, lse_a, o_b, lse_b, o and lse on the machine. Errors, here and below: `DtypeError`
    for other types than float32, bfloat16 and float16; `ShapeError` for shapes that do not fit
    together, head dimensions without a kernel, and no row or head at all.
    """
    _check_same_shape(("o_a", o_a), ("o_b", o_b))
    if o_a.dtype != o_b.dtype:
        raise DtypeError(f"o_a is {o_a.dtype}, o_b {o_b.dtype}; they must be the same")
    a = _place(machine, ("o_a", "lse_a"), o_a, lse_a)
    b = _place(machine, ("o_b", "lse_b"), o_b, lse_b)
    target = _allocate(machine, o_a.shape, dtype or o_a.dtype)
    launch = _Launch.of(machine, target, a)
    launch.store(target, launch.merge([launch.load(a), launch.load(b)]))
    return target.state()


def merge_state_in_place(
    machine: Machine,
    o: Array,
    lse: Array,
    o_other: Array,
    lse_other: Array,
    mask: NDArray[np.uint8] | None = None,
) -> State:
    """``o``, ``lse`` with ``o_other``, ``lse_other`` merged into them; shapes as in `merge_state`,
    the types of o and o_other may differ.

    ``mask`` [rows] uint8: rows of 0 are neither read nor written. The arrays given stay as they
    are, the result has new ones. Leaves o, lse, o_other, lse_other and mask on the machine.
    """
    _check_state(o, lse)
    _check_same_shape(("o", o), ("o_other", o_other))
    target = _Placed(_place_copy(machine, "o", o), _place_copy(machine, "lse", lse))
    other = _place(machine, ("o_other", "lse_other"), o_other, lse_other)
    launch = _Launch.of(machine, target, other)
    for part in launch.unmasked(target, mask):
        states = [launch.load(state.part(part)) for state in (target, other)]
        launch.store(target.part(part), launch.merge(states))
    return target.state()


def merge_states(
    machine: Machine, partial_o: Array, partial_lse: Array, *, dtype: DTypeLike | None = None
) -> State:
    """The merge of as many states for every row: ``partial_o`` [rows, states, heads, d],
    ``partial_lse`` [rows, states, heads] float32 give o [rows, heads, d] and lse [rows, heads].

    ``dtype`` as in `merge_state`. Leaves partial_o, partial_lse, o and lse on the machine.
    """
    partial = _place(machine, ("partial_o", "partial_lse"), partial_o, partial_lse)
    if partial_o.ndim != 4:
        raise ShapeError(f"partial_o must be [rows, states, heads, d], got {partial_o.shape}")
    rows, _, heads, d = partial_o.shape
    target = _allocate(machine, (rows, heads, d), dtype or partial_o.dtype)
    launch = _Launch.of(machine, target, partial)
    states = launch.load(partial, passes=2)
    by_head = State(states.o.swapaxes(1, 2), states.lse.swapaxes(1, 2))
    launch.store(target, launch.merge_stacked(by_head))
    return target.state()


def merge_states_variable(
    machine: Machine,
    partial_o: Array,
    partial_lse: Array,
    merge_indptr: Table,
    *,
    dtype: DTypeLike = BF16,
    v_scale: float = 1.0,
) -> State:
    """The merge of any number of states for each row, none included: that of split-KV attention.

    ``partial_o`` [partial rows, heads, d], ``partial_lse`` [partial rows, heads], float32. Row r is
    the merge of partial rows ``merge_indptr[r]`` to before ``merge_indptr[r + 1]``, int32 or int64
    [rows + 1]. o is multiplied by ``v_scale`` before it is rounded. Leaves partial_o, partial_lse,
    merge_indptr, o and lse on the machine. Errors: also `TableError` for a merge_indptr that
    decreases or leaves the partial rows.
    """
    _check_state(partial_o, partial_lse, (F32,))
    partial = _place(machine, ("partial_o", "partial_lse"), partial_o, partial_lse)
    check_merge_indptr(merge_indptr, len(partial_o))
    table = machine.tensor("merge_indptr", np.ascontiguousarray(merge_indptr))
    target = _allocate(machine, (len(merge_indptr) - 1, *partial_o.shape[1:]), dtype)
    merge_partial(
        machine, partial.o, partial.lse, table, target.o, target.lse, v_scale=v_scale
    )  # fmt: skip
    return target.state()


def merge_partial(
    machine: Machine,
    partial_o: Tensor,
    partial_lse: Tensor,
    merge_indptr: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    v_scale: float = 1.0,
    present: NDArray[np.bool_] | None = None,
) -> None:
    """Kernel merge_states_variable on tensors that are in HBM, for models that end with it; shapes,
    types and errors as in `merge_states_variable`.

    ``present`` [partial rows, heads]: which partial states have keys. By default partial_lse says
    so, which in a machine without arithmetic has no values unless it is an input.
    """
    indptr = check_merge_indptr(merge_indptr.array, partial_o.shape[0])
    heads = partial_o.shape[1]
    partial, target = _Placed(partial_o, partial_lse), _Placed(o, lse)
    _check_state(partial_o.array, partial_lse.array, (F32,))
    _check_state(o.array, lse.array)
    if o.shape != (len(indptr) - 1, *partial_o.shape[1:]):
        raise ShapeError(f"o must be {(len(indptr) - 1, *partial_o.shape[1:])}, got {o.shape}")
    launch = _Launch.of(machine, target, partial)
    # Both ends of a row's range: every lane of the warps of its heads reads them.
    for ends in (merge_indptr[:-1], merge_indptr[1:]):
        launch.cta.load(ends, merge_indptr.dtype.itemsize, share=WARP_LANES * heads)
    used = slice(0, int(indptr[-1]))
    states = launch.load(
        partial.part(used), passes=2, present=None if present is None else present[used]
    )
    by_row = _by_row(states, indptr) if machine.computes else states
    launch.store(target, launch.merge_stacked(by_row, v_scale))


def check_merge_indptr(merge_indptr: Table, partial_rows: int) -> NDArray[np.int64]:
    """The table as int64 [rows + 1]: it starts at 0, never decreases, stays within the
    ``partial_rows`` and has a row. Errors: `TableError`, `DtypeError`, `ShapeError`.
    """
    values = check_indptr("merge_indptr", merge_indptr)
    if values.size < 2:
        raise ShapeError("merge_indptr must be [rows + 1] for one row at least, got one entry")
    return check_range("merge_indptr", values, 0, partial_rows)


def _by_row(partial: State, indptr: NDArray[np.int64]) -> State:
    """Partial states [partial rows, heads] as [rows, heads, states]: rows that have fewer than
    others get states without keys, which change nothing.
    """
    counts = np.diff(indptr)
    index = np.arange(counts.max())
    missing = index >= counts[:, None]
    # Any place will do for what is missing; there may be none.
    index = np.where(missing, 0, indptr[:-1, None] + index)
    lse = np.where(missing[..., None], partial.lse.dtype.type(-np.inf), partial.lse[index])
    return State(partial.o[index].swapaxes(1, 2), lse.swapaxes(1, 2))


# What is in HBM, and what the warps of a launch move


@dataclass(frozen=True, eq=False)
class _Placed:
    """States in HBM: ``o`` [rows, ..., heads, d], ``lse`` [rows, ..., heads]; some of the rows."""

    o: Tensor
    lse: Tensor
    rows: slice = field(default_factory=lambda: slice(None))

    def part(self, rows: slice) -> _Placed:
        return _Placed(self.o, self.lse, rows)

    def state(self) -> State:
        return State(self.o.values, self.lse.values)


def _place(machine: Machine, names: tuple[str, str], o: Array, lse: Array) -> _Placed:
    _check_state(o, lse)
    return _Placed(
        machine.tensor(names[0], np.ascontiguousarray(o)),
        machine.tensor(names[1], np.ascontiguousarray(lse)),
    )


def _place_copy(machine: Machine, name: str, values: Array) -> Tensor:
    """A tensor with values that is going to be written."""
    if not machine.computes:
        return machine.tensor(name, np.ascontiguousarray(values))
    tensor = machine.allocate(name, values.shape, values.dtype)
    for array in (tensor.array, tensor.exact):
        if array is not None:
            array[...] = values
    return tensor


def _allocate(machine: Machine, shape: tuple[int, ...], dtype: DTypeLike) -> _Placed:
    wanted = np.dtype(dtype)
    if wanted not in ENCODE:
        raise DtypeError(f"o is stored as float32, bfloat16 or float16, not {wanted}")
    return _Placed(
        machine.allocate("o", shape, wanted), machine.allocate("lse", shape[:-1], np.float32)
    )


@dataclass(frozen=True, eq=False)
class _Launch:
    """The warps of a launch, a pair each: they move ``values`` values of o a lane at once, as many
    as fit an access in the wider one of the two types.
    """

    cta: Cta
    values: int

    @classmethod
    def of(cls, machine: Machine, target: _Placed, source: _Placed) -> _Launch:
        pairs, d = math.prod(target.lse.shape), target.o.shape[-1]
        if not pairs:
            raise ShapeError(f"there must be a row and a head, got o {target.o.shape}")
        if d % HEAD_DIM_STEP or not 0 < d <= MAX_HEAD_DIM:
            raise ShapeError(
                f"d is {d}; it must be a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
            )
        widest = max(target.o.dtype.itemsize, source.o.dtype.itemsize)
        with machine.cta(threads=THREADS, count=tile_count(pairs, PAIRS_PER_CTA)) as cta:
            return cls(cta, math.gcd(_ACCESS_BYTES // widest, d // WARP_LANES))

    @property
    def machine(self) -> Machine:
        return self.cta.machine

    def unmasked(self, target: _Placed, mask: NDArray[np.uint8] | None) -> list[slice]:
        """The rows that the mask leaves; every lane of the warps of a row reads it."""
        if mask is None:
            return [slice(None)]
        rows, heads = target.lse.shape
        if mask.dtype != np.uint8 or mask.shape != (rows,):
            raise ShapeError(f"mask must be uint8 [{rows}], got {mask.dtype} {list(mask.shape)}")
        tensor = self.machine.tensor("mask", np.ascontiguousarray(mask))
        self.cta.load(tensor[:], 1, share=WARP_LANES * heads)
        return [slice(row, row + 1) for row in np.flatnonzero(mask)]

    def load(
        self, states: _Placed, *, passes: int = 1, present: NDArray[np.bool_] | None = None
    ) -> State:
        """States as numbers. The LSE is read by every lane of a warp, ``passes`` times; o only of
        states that have keys.
        """
        lse = self.cta.load(states.lse[states.rows], 4, share=WARP_LANES, repeat=passes)
        if present is None:
            present = ~np.isneginf(lse)
        o = self._load_present(states, present)
        return State(DECODE[o.dtype](o) if self.machine.is_device else o, lse)

    def _load_present(self, states: _Placed, present: NDArray[np.bool_]) -> Array:
        vector = self.values * states.o.dtype.itemsize
        region = states.o[states.rows]
        if present.all():
            return self.cta.load(region, vector)
        o = np.zeros_like(region.view if region.exact is None else region.exact)
        first = states.rows.start or 0
        for row, *inner in np.argwhere(present):
            o[(row, *inner)] = self.cta.load(states.o[(first + row, *inner)], vector)
        return o

    def merge(self, states: Sequence[State]) -> State | None:
        """The merge of states that are of the same rows each."""
        if not self.machine.computes:
            return None
        return self.merge_stacked(
            State(
                np.stack([state.o for state in states], axis=-2),
                np.stack([state.lse for state in states], axis=-1),
            )
        )

    def merge_stacked(self, states: State, v_scale: float = 1.0) -> State | None:
        """The merge of states along the last axis of their rows; None without arithmetic."""
        if not self.machine.computes:
            return None
        result = _MERGES[self.machine.arithmetic](states.o, states.lse)
        if self.machine.is_device:
            return State(multiply(result.o, np.float32(v_scale)), result.lse)
        return State(result.o * np.float64(np.float32(v_scale)), result.lse)

    def store(self, target: _Placed, result: State | None) -> None:
        """One lane of a warp writes its LSE."""
        o, lse = (None, None) if result is None else (result.o, result.lse)
        if o is not None and self.machine.is_device:
            o = ENCODE[target.o.dtype](o)
        self.cta.store(target.o[target.rows], o, self.values * target.o.dtype.itemsize)
        self.cta.store(target.lse[target.rows], lse, 4, lanes=1)


def _check_state(o: Array, lse: Array, dtypes: Sequence[np.dtype[Any]] = tuple(ENCODE)) -> None:
    if o.dtype not in dtypes:
        raise DtypeError(f"o must be {' or '.join(map(str, dtypes))}, got {o.dtype}")
    if lse.dtype != F32:
        raise DtypeError(f"lse must be float32, got {lse.dtype}")
    if o.shape[:-1] != lse.shape:
        raise ShapeError(f"lse must be {list(o.shape[:-1])} beside o {o.shape}, got {lse.shape}")


def _check_same_shape(one: tuple[str, Array], other: tuple[str, Array]) -> None:
    (name, a), (other_name, b) = one, other
    if a.ndim != 3 or a.shape != b.shape:
        raise ShapeError(
            f"{name} and {other_name} must be alike [rows, heads, d], got {a.shape}, {b.shape}"
        )
