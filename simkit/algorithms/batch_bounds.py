"""Error bounds of batched attention: what its kernels round, and bounds for a problem and a plan.

Each work item leaves a state, by `softmax_bounds`; the states of a query are merged, by
`merge_bounded`, which leaves a lone one as it is. On the way from Q and K to logits

- FP8 K and V are decoded exactly; their scales are a factor of the logits and of the output.
- Rotated vectors are rounded to elements. Which element is known from the exact rotation, but for
  those that lie so close to the middle of two that the float32 operations before decide.
- A transformed logit rounds at each step; tanh passes errors on by its slope, which is 1 or less.

A sink is a key with the value 0. Rows go through all tiles of their item: those of a mask too, in
which they see nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.algorithms.batch_arithmetic import KEY_TILE, WARP_ROWS, WARPS
from simkit.algorithms.batch_attention import Units, check_plan, problem_batch
from simkit.algorithms.batch_problem import BatchProblem
from simkit.algorithms.cascade_attention import Level, check_levels
from simkit.algorithms.elements import BF16, DECODE, ENCODE, F16, TENSOR_CORE_KIND
from simkit.algorithms.variant import Place, exact_rotate, soft_cap_inverse
from simkit.errors import ShapeError
from simkit.numerics.arrays import Float64Array
from simkit.numerics.attention_bounds import AttentionArithmetic, Logits, softmax_bounds
from simkit.numerics.bounds import (
    LOG_2,
    SUBNORMAL_STEP,
    U32,
    U64,
    dot_error,
    product_roundoff,
    rounded_error,
    tanh_error,
)
from simkit.numerics.merge_state_bounds import ROUNDINGS, BoundedState, merge_bounded
from simkit.numerics.tensor_core import tensor_core
from simkit.planning.plan import Plan, item_keys

Array = NDArray[Any]

# Of an accumulator of mma.m16n8k16 four lanes have a row's columns; a warp has 32 lanes.
_LANES_PER_ROW, _BUTTERFLY_ADDS = 4, 5
_SIGNIFICAND_BITS = {BF16: 8, F16: 11}


@dataclass(frozen=True, eq=False)
class BatchBounds:
    """Bounds on absolute errors against `batch_reference`: ``o`` [rows, heads, dv] as it is
    stored, ``lse`` [rows, heads].
    """

    o: Float64Array
    lse: Float64Array


def batch_bounds(problem: BatchProblem, plan: Plan, arch: str, units: Units) -> BatchBounds:
    """Bounds of `batch_attention` on ``units`` of ``arch`` ("sm_90").

    Where the reference is NaN or infinite they are finite and mean nothing; elements of K and V
    that are not finite count as 0, and results that overflow are outside of all bounds. Errors:
    those of `check_plan`; `ShapeError` for a problem that has none (`has_bounds`).
    """
    states = batch_states(problem, plan, arch, units)
    return _merged(states, problem)


def cascade_bounds(levels: Sequence[Level], arch: str) -> BatchBounds:
    """Bounds of `cascade_attention`, on tensor cores, against attention without a cascade.

    Errors: those of `check_levels` and `batch_bounds`.
    """
    check_levels(levels)
    states = [
        state
        for level in levels
        for state in batch_states(level.problem, level.plan, arch, "tensor_cores")
    ]
    return _merged(states, levels[0].problem)


def _merged(states: Sequence[BoundedState], problem: BatchProblem) -> BatchBounds:
    found = merge_bounded(states, dtype=problem.q.dtype)
    return BatchBounds(found.o_error, found.lse_error)


def batch_states(
    problem: BatchProblem, plan: Plan, arch: str, units: Units
) -> tuple[BoundedState, ...]:
    """The states that a launch leaves, in float32, for each chunk of keys: [rows, heads, ...],
    without keys for queries that have fewer chunks. Errors: as `batch_bounds`.
    """
    check_plan(problem, plan, units)
    if not has_bounds(problem):
        assert problem.variant.user is not None
        raise ShapeError(
            f"no bound follows for the variant {problem.variant.user.name!r}: it transforms logits "
            f"or outputs by functions of the user's"
        )
    with np.errstate(all="ignore"):
        states = _item_states(problem, plan, batch_arithmetic(problem, plan.tile_q, arch, units))
    return _by_chunk(_scaled(states, problem.v_scale), plan)


def has_bounds(problem: BatchProblem) -> bool:
    """Whether bounds follow: not from a user's functions of logits or outputs. Masks may be any."""
    user = problem.variant.user
    return user is None or (user.logit is None and user.output is None)


def batch_arithmetic(
    problem: BatchProblem, tile_q: int, arch: str, units: Units
) -> AttentionArithmetic:
    """What the kernels round until a state is in float32.

    On tensor cores P has the type of Q. A lane adds its share of a tile's weights in order, after
    it has rescaled its sum; at the end four lanes add theirs in two steps, and then the warps that
    share a row. On CUDA cores as `flash_decoding_arithmetic`.
    """
    common: dict[str, Any] = {
        "key_tile": KEY_TILE,
        "query_tile": tile_q,
        "exponent_scale": float(problem.factor),
        "output_roundoff": 0.0,
    }
    if units == "cuda_cores":
        return AttentionArithmetic(
            score_core=None,
            sum_own=(1 + _BUTTERFLY_ADDS + 1) * U32,
            sum_later=2 * U32,
            output_own=KEY_TILE * U32,
            output_later=(1 + KEY_TILE) * U32,
            output_floor=KEY_TILE * SUBNORMAL_STEP,
            **common,
        )
    core = tensor_core(arch, TENSOR_CORE_KIND[problem.q.dtype])
    product, floor = product_roundoff(core, KEY_TILE)
    warps = WARPS * WARP_ROWS // tile_q
    lane_adds = KEY_TILE // (warps * _LANES_PER_ROW)
    roundoff, step = ROUNDINGS[problem.q.dtype]
    return AttentionArithmetic(
        score_core=core,
        sum_own=(lane_adds + 2 + warps - 1) * U32,
        sum_later=(1 + lane_adds) * U32,
        output_own=product,
        output_later=product + U32,
        output_floor=floor,
        weight_roundoff=roundoff,
        # bfloat16 has the exponents of float32: below its range weights are flushed before.
        weight_step=step if problem.q.dtype == F16 else 0.0,
        **common,
    )


def _item_states(
    problem: BatchProblem, plan: Plan, arithmetic: AttentionArithmetic
) -> BoundedState:
    """The states of the items [partial rows, heads, ...], in the plan's order, unscaled."""
    shape = (int(plan.o_indptr[-1]), problem.heads)
    states = BoundedState(
        np.zeros((*shape, problem.dv)), np.full(shape, -np.inf),
        np.zeros((*shape, problem.dv)), np.zeros(shape),
    )  # fmt: skip
    ranges = item_keys(plan, problem_batch(problem))
    for request in np.unique(plan.requests):
        vectors = _Vectors.of(problem, int(request))
        for item in np.flatnonzero(plan.requests == request):
            rows = _Rows.of(problem, plan, int(item), slice(*ranges[item]))
            found = _item_state(problem, arithmetic, vectors, rows)
            for target, part in zip(_parts(states), _parts(found), strict=True):
                target[rows.target, rows.head] = part
    return states


def _parts(state: BoundedState) -> tuple[Float64Array, ...]:
    return state.o, state.lse, state.o_error, state.lse_error


@dataclass(frozen=True, eq=False)
class _Rows:
    """An item's packed rows that exist: ``packed``, ``row`` (the query) and ``target`` (where its
    state goes) [rows], ``head`` [kv_heads, rows]; its ``keys``, and whether they are the first
    chunk.
    """

    request: int
    packed: Array
    row: Array
    head: Array
    target: Array
    keys: slice
    is_first: bool

    @classmethod
    def of(cls, problem: BatchProblem, plan: Plan, item: int, keys: slice) -> _Rows:
        request, chunk = int(plan.requests[item]), int(plan.kv_chunks[item])
        start = int(plan.q_tiles[item]) * plan.tile_q
        stop = min(start + plan.tile_q, int(problem.queries.lens[request]) * problem.group)
        packed = np.arange(start, stop)
        row, in_group = np.divmod(packed, problem.group)
        head = np.arange(problem.kv_heads)[:, None] * problem.group + in_group
        target = plan.o_indptr[request] + row * plan.chunks[request] + chunk
        return cls(request, packed, row, head, target, keys, chunk == 0)

    def place(self, problem: BatchProblem) -> Place:
        """Pairs with the keys: [kv_heads, rows, keys]."""
        return Place(
            request=np.asarray(self.request),
            head=self.head[..., None],
            row=self.row[:, None],
            key=np.arange(self.keys.start, self.keys.stop),
            q_len=problem.queries.lens[self.request],
            kv_len=problem.kv_lens[self.request],
        )


@dataclass(frozen=True, eq=False)
class _Operand:
    """Q or K of a request [kv_heads, vectors, d]: ``exact``, as the reference has it; ``value``,
    what is multiplied, 0 where it is not finite, off by up to ``error``, None where it is exact.
    """

    exact: Float64Array
    value: Float64Array
    error: Float64Array | None = None

    @classmethod
    def of(cls, x: Array, angles: Array | None, element: np.dtype[Any]) -> _Operand:
        exact = x.astype(np.float64)
        if angles is None:
            return cls(exact, _finite(exact))
        least, value, most = _rotations(exact, angles.astype(np.float64), element)
        error = np.maximum(most - value, value - least)
        return cls(exact_rotate(exact, angles.astype(np.float64)), _finite(value), _finite(error))

    def part(self, vectors: Any) -> _Operand:
        own = (slice(None), vectors)
        return _Operand(
            self.exact[own], self.value[own], None if self.error is None else self.error[own]
        )


def _finite(x: Float64Array) -> Float64Array:
    return np.where(np.isfinite(x), x, 0.0)


def _rotations(
    x: Float64Array, angles: Float64Array, element: np.dtype[Any]
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """The least elements that rotated vectors may become, those of the exact rotation, the most.

    Rounding keeps the order, so that elements of the ends of an interval are the ends of elements.
    The interval is that of a product that rounds and a multiply-add.
    """
    exact = exact_rotate(x, angles)
    half = x.shape[-1] // 2
    sines = np.concatenate((angles[..., half:],) * 2, axis=-1)
    product = np.abs(np.roll(x, half, axis=-1) * sines)
    error = rounded_error(product, 4 * U64 * (product + np.abs(exact)), U32)
    error = rounded_error(exact, error, U32)

    def stored(y: Float64Array) -> Float64Array:
        return DECODE[element](ENCODE[element](y.astype(np.float32))).astype(np.float64)

    return stored(exact - error), stored(exact), stored(exact + error)


@dataclass(frozen=True, eq=False)
class _Vectors:
    """Of a request: ``q`` [kv_heads, packed rows, d], ``k`` [kv_heads, keys, d] and the finite
    ``v`` [kv_heads, keys, dv].
    """

    q: _Operand
    k: _Operand
    v: Float64Array

    @classmethod
    def of(cls, problem: BatchProblem, request: int) -> _Vectors:
        k, v = (x.swapaxes(0, 1) for x in problem.gathered(request))
        q = problem.q[problem.queries.rows(request)]
        q_angles = k_angles = None
        if problem.variant.rope is not None:
            position = np.maximum(np.arange(len(q)) + k.shape[1] - len(q), 0)
            # Of packed rows.
            q_angles = problem.variant.rope[np.repeat(position, problem.group)]
            k_angles = problem.variant.rope[: k.shape[1]]
        packed = q.reshape(len(q), problem.kv_heads, problem.group, problem.d).swapaxes(0, 1)
        element = problem.q.dtype
        return cls(
            _Operand.of(packed.reshape(problem.kv_heads, -1, problem.d), q_angles, element),
            _Operand.of(k, k_angles, element),
            _finite(v.astype(np.float64)),
        )


def _item_state(
    problem: BatchProblem, arithmetic: AttentionArithmetic, vectors: _Vectors, rows: _Rows
) -> BoundedState:
    """The state of an item: [kv_heads, rows, ...]."""
    at = rows.place(problem)
    q, k = vectors.q.part(rows.packed), vectors.k.part(rows.keys)
    scores, error = _scores(q, k, arithmetic, _SIGNIFICAND_BITS[problem.q.dtype])
    scale = problem.scale * problem.k_scale
    value = problem.variant.exact_logits(scores, at, scale)
    error = _logit_error(problem, scores, error, value)
    visible = np.broadcast_to(problem.variant.visible(at), value.shape)
    v = vectors.v[:, rows.keys]
    sinks = problem.variant.sinks if rows.is_first else None
    if sinks is not None:
        # A key before the others, which adds nothing to the output.
        column = sinks.astype(np.float64)[rows.head][..., None]
        value = np.concatenate((column, value), axis=-1)
        error = np.concatenate((np.zeros_like(column), error), axis=-1)
        visible = np.concatenate((np.ones(column.shape, np.bool_), visible), axis=-1)
        v = np.concatenate((np.zeros_like(v, shape=(len(v), 1, v.shape[-1])), v), axis=1)
    # Rows with a NaN or +inf are NaN, exactly, and -inf is as good as hidden.
    defined = (~visible | (value < np.inf)).all(axis=-1, keepdims=True)
    visible = visible & np.isfinite(value) & defined
    exact_factor = (1.0 if problem.variant.transforms_logits else scale) / LOG_2
    return softmax_bounds(
        Logits(_finite(value), np.where(visible, error, 0.0), visible),
        v,
        arithmetic=arithmetic,
        factor_error=abs(arithmetic.exponent_scale / exact_factor - 1),
        sink=sinks is not None,
    )


def _scores(
    q: _Operand, k: _Operand, arithmetic: AttentionArithmetic, significand_bits: int
) -> tuple[Float64Array, Float64Array]:
    """q . k as the reference has it, and its error, 0 where it is not finite."""
    scores = q.exact @ k.exact.swapaxes(-1, -2)
    error = dot_error(
        q.value, k.value, arithmetic.score_core, significand_bits=significand_bits,
        a_error=q.error, b_error=k.error,
    )  # fmt: skip
    if q.error is not None:
        sizes = np.abs(q.exact) @ np.abs(k.exact).swapaxes(-1, -2)
        error = error + np.abs(q.value @ k.value.swapaxes(-1, -2) - scores)
        error += (q.exact.shape[-1] + 4) * U64 * sizes
    return scores, np.where(np.isfinite(scores), error, 0.0)


# In place of infinite scores, of which a soft cap is as good as certain.
_HUGE = 1e30


def _logit_error(
    problem: BatchProblem, scores: Float64Array, error: Float64Array, logits: Float64Array
) -> Float64Array:
    """Error of `Variant.logits` against the exact ``logits``, in natural units, of scores that are
    off by up to ``error``. Raw scores keep theirs: their factor is that of the exponent.
    """
    variant, scale = problem.variant, problem.scale * problem.k_scale
    error = scale * error
    if not variant.transforms_logits:
        return error
    value = scale * np.nan_to_num(scores, nan=0.0, posinf=_HUGE, neginf=-_HUGE)
    error = rounded_error(value, error, _product_roundoff(problem.score_scale, scale))
    if variant.soft_cap > 0:
        cap = variant.soft_cap
        inverse = _product_roundoff(soft_cap_inverse(cap), 1 / cap)
        value, error = value / cap, rounded_error(value / cap, error / cap, inverse)
        value, error = cap * np.tanh(value), cap * tanh_error(value, error)
        error = rounded_error(value, error, _product_roundoff(np.float32(cap), cap))
    if variant.alibi_slopes is not None:
        error = rounded_error(_finite(logits), error, U32)
    return error


def _product_roundoff(factor: np.float32, exact: float) -> float:
    """Relative error of a product with a factor that is itself rounded."""
    return (1 + abs(float(factor) / exact - 1)) * (1 + U32) - 1 + 2 * U64


def _scaled(states: BoundedState, v_scale: float) -> BoundedState:
    """Outputs times ``v_scale``: a product by 1 or 0 is exact."""
    o, error = states.o * v_scale, states.o_error * abs(v_scale)
    if v_scale not in (0.0, 1.0):
        error = rounded_error(o, error, _product_roundoff(np.float32(v_scale), v_scale))
    return BoundedState(o, states.lse, error, states.lse_error)


def _by_chunk(states: BoundedState, plan: Plan) -> tuple[BoundedState, ...]:
    counts = np.diff(plan.merge_indptr)
    found = []
    for chunk in range(int(counts.max(initial=1))):
        missing = chunk >= counts
        index = np.where(missing, 0, plan.merge_indptr[:-1] + chunk)
        o, lse, o_error, lse_error = (part[index] for part in _parts(states))
        lse = np.where(missing[:, None], -np.inf, lse)
        found.append(BoundedState(o, lse, o_error, lse_error))
    return tuple(found)
