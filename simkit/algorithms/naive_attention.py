"""Attention as the formula reads, in three kernels: S = Q K^T, P = softmax(S), O = P V.

S and P pass through HBM in between: the traffic that the other algorithms are measured against.
Kernels: naive_attention.cu.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.algorithms.fma_chain import fma_chain
from simkit.algorithms.heads import (
    Array,
    fill_tile,
    heads_first,
    stack_mask,
    stack_queries,
    to_bf16,
    to_float32,
    unstack_outputs,
)
from simkit.algorithms.problem import BF16, AttentionProblem
from simkit.algorithms.softmax import (
    butterfly_sum,
    row_maximum,
    softmax_shift,
    softmax_weight,
)
from simkit.algorithms.tiles import tile_count, tiles
from simkit.machine.machine import Machine
from simkit.machine.memory import WARP_LANES, Tensor
from simkit.numerics.exp2 import LOG2E
from simkit.numerics.minmax import fmax_ptx
from simkit.numerics.scalar import add, divide, multiply

THREADS = 256
TILE = 32  # query rows, and keys
ROWS_PER_CTA = 8  # of the softmax kernel: one for each warp


@dataclass(frozen=True, eq=False)
class NaiveAttentionResult:
    """``o`` [batch, q_len, heads, d]; ``s`` (scaled and masked scores) and ``p`` [batch, heads,
    q_len, kv_len]. bfloat16 in device arithmetic, float64 in reference arithmetic.
    """

    o: Array
    s: Array
    p: Array


def scratch_bytes(problem: AttentionProblem) -> int:
    """HBM for one matrix of scores of every head; S and P take as much each."""
    pairs = problem.q_len * problem.kv_len
    return problem.batch * problem.heads * pairs * BF16.itemsize


def scores_shared_bytes(d: int) -> int:
    """Shared memory of a CTA of the first kernel: Q and K in float32, S in bfloat16."""
    return 2 * TILE * d * 4 + TILE * TILE * BF16.itemsize


def output_shared_bytes(d: int) -> int:
    """Shared memory of a CTA of the last kernel: P (padded) and V in float32, O in bfloat16."""
    return TILE * (TILE + 1) * 4 + TILE * d * 4 + TILE * d * BF16.itemsize


def naive_attention(machine: Machine, problem: AttentionProblem) -> NaiveAttentionResult:
    """softmax(scale * q k^T) v; leaves the tensors q, k, v, s, p and o on the machine.

    A causal mask saves nothing: all three kernels go over the whole matrix. Without keys only the
    last kernel runs. Errors: `ShapeError`.
    """
    if machine.is_device:
        problem.check_device_head_dim()
    q, k, v = problem.place_inputs(machine)
    shape = (problem.batch, problem.heads, problem.q_len, problem.kv_len)
    s = machine.allocate("s", shape, BF16)
    p = machine.allocate("p", shape, BF16)
    o = machine.allocate("o", problem.q.shape, BF16)
    if problem.kv_len:
        _scores(machine, problem, q, k, s)
        _softmax(machine, problem, s, p)
    _output(machine, problem, p, v, o)
    return NaiveAttentionResult(o.values, s.values, p.values)


def _scores(machine: Machine, problem: AttentionProblem, q: Tensor, k: Tensor, s: Tensor) -> None:
    """Kernel naive_scores, a CTA for each tile of S; those of one tile of keys go together."""
    scores = _ARITHMETIC[machine.arithmetic].scores
    row_tiles, heads = tile_count(problem.q_len, TILE), problem.batch * problem.heads
    for keys in tiles(problem.kv_len, TILE):
        with machine.cta(scores_shared_bytes(problem.d), THREADS, row_tiles * heads) as cta:
            q_tiles = cta.load(q[:], problem.vector)
            k_tile = cta.load(k[:, keys], problem.vector, repeat=row_tiles * problem.group)
            mask = problem.mask(slice(0, problem.q_len), keys)
            # A warp writes one row of the tile.
            s_tiles = scores(problem, q_tiles, k_tile, mask)
            cta.store(s[..., keys], s_tiles, vector=2, by_row=True)


def _softmax(machine: Machine, problem: AttentionProblem, s: Tensor, p: Tensor) -> None:
    """Kernel naive_softmax: a warp takes a row and reads it for maximum, sum and result."""
    rows = problem.batch * problem.heads * problem.q_len
    with machine.cta(threads=THREADS, count=tile_count(rows, ROWS_PER_CTA)) as cta:
        scores = cta.load(s[:], vector=2, by_row=True, repeat=3)
        cta.store(p[:], _ARITHMETIC[machine.arithmetic].softmax(scores), vector=2, by_row=True)


def _output(machine: Machine, problem: AttentionProblem, p: Tensor, v: Tensor, o: Tensor) -> None:
    """Kernel naive_output: a CTA for each tile of rows walks over the keys; all go together."""
    arithmetic = _ARITHMETIC[machine.arithmetic]
    row_tiles, heads = tile_count(problem.q_len, TILE), problem.batch * problem.heads
    with machine.cta(output_shared_bytes(problem.d), THREADS, row_tiles * heads) as cta:
        total = arithmetic.start(problem)
        for keys in tiles(problem.kv_len, TILE):
            p_tiles = cta.load(p[..., keys], vector=2, by_row=True)
            v_tile = cta.load(v[:, keys], problem.vector, repeat=row_tiles * problem.group)
            total = arithmetic.add_product(total, p_tiles, v_tile)
        cta.store(o[:], arithmetic.finish(total, problem), problem.vector)


@dataclass(frozen=True)
class _Arithmetic:
    """What the three kernels compute; None in, None out where there is no arithmetic.

    S and P are [batch, heads, q_len, keys], the running output [batch, kv_heads, group * q_len, d].
    """

    scores: Callable[[AttentionProblem, Array, Array, NDArray[np.bool_]], Any]
    softmax: Callable[[Array], Any]
    start: Callable[[AttentionProblem], Any]
    add_product: Callable[[Any, Array, Array], Any]
    finish: Callable[[Any, AttentionProblem], Any]


def _reference_scores(
    problem: AttentionProblem, q: Array, k: Array, mask: NDArray[np.bool_]
) -> Array:
    queries = stack_queries(q.astype(np.float64), problem.kv_heads)
    s = queries @ heads_first(k.astype(np.float64)).swapaxes(2, 3) * problem.scale
    s = np.where(stack_mask(mask, problem.group), s, -np.inf)
    return s.reshape(problem.batch, problem.heads, *mask.shape)


def _reference_softmax(s: Array) -> Array:
    m = s.max(axis=-1, keepdims=True)
    weights = np.exp(s - np.where(np.isneginf(m), 0, m))
    return weights / np.where(np.isneginf(m), 1, weights.sum(axis=-1, keepdims=True))


def _reference_product(total: Array, p: Array, v: Array) -> Array:
    stacked = p.reshape(*total.shape[:-1], p.shape[-1])
    return np.asarray(total + stacked @ heads_first(v.astype(np.float64)))


def _device_scores(problem: AttentionProblem, q: Array, k: Array, mask: NDArray[np.bool_]) -> Array:
    queries = stack_queries(to_float32(q), problem.kv_heads)
    keys = heads_first(to_float32(k)).swapaxes(2, 3)
    zero = np.zeros((*queries.shape[:-1], keys.shape[-1]), np.float32)
    s = multiply(fma_chain(queries, keys, zero), problem.scale_float32)
    s = np.where(stack_mask(mask, problem.group), s, np.float32(-np.inf))
    return to_bf16(s).reshape(problem.batch, problem.heads, *mask.shape)


def _device_softmax(s: Array) -> Array:
    scores = to_float32(s)
    m = fmax_ptx(np.float32(-np.inf), row_maximum(scores))
    scaled_shift = multiply(softmax_shift(m), LOG2E)
    weights = softmax_weight(scores, LOG2E, scaled_shift[..., None])
    divisor = np.where(np.isneginf(m), np.float32(1), _sum_by_lane(weights))
    return to_bf16(divide(weights, divisor[..., None]))


def _sum_by_lane(weights: Array) -> Array:
    """Sums along the last axis: a lane adds every 32nd element in order, then the lanes add up."""
    size = weights.shape[-1]
    filled = fill_tile(weights, -1, tile_count(size, WARP_LANES) * WARP_LANES)
    by_lane = filled.reshape(*weights.shape[:-1], -1, WARP_LANES)
    total = np.zeros((*weights.shape[:-1], WARP_LANES), np.float32)
    for i in range(by_lane.shape[-2]):
        total = add(total, by_lane[..., i, :])
    return butterfly_sum(total)


def _device_product(total: Array, p: Array, v: Array) -> Array:
    stacked = to_float32(p).reshape(*total.shape[:-1], p.shape[-1])
    return fma_chain(stacked, heads_first(to_float32(v)), total)


def _empty_output(dtype: type) -> Callable[[AttentionProblem], Array]:
    def start(problem: AttentionProblem) -> Array:
        rows = problem.group * problem.q_len
        return np.zeros((problem.batch, problem.kv_heads, rows, problem.d), dtype)

    return start


_ARITHMETIC = {
    "reference": _Arithmetic(
        scores=_reference_scores,
        softmax=_reference_softmax,
        start=_empty_output(np.float64),
        add_product=_reference_product,
        finish=lambda total, problem: unstack_outputs(total, problem.q_len),
    ),
    "device": _Arithmetic(
        scores=_device_scores,
        softmax=_device_softmax,
        start=_empty_output(np.float32),
        add_product=_device_product,
        finish=lambda total, problem: unstack_outputs(to_bf16(total), problem.q_len),
    ),
    "none": _Arithmetic(
        scores=lambda problem, q, k, mask: None,
        softmax=lambda s: None,
        start=lambda problem: None,
        add_product=lambda total, p, v: None,
        finish=lambda total, problem: None,
    ),
}
