"""Error bounds of an attention kernel, put together from the parts in `simkit.numerics.bounds`.

A key's weight is 2^(x - shift) with its score as a base-2 exponent x. Any shift will do that
numerator and denominator share, so what makes a weight wrong, relative to the others, is

- the error of its score, and of the factor from scores to exponents;
- the rounding of the exponent x - m in its own tile, and of m - m' in each rescaling after it: by u
  of their sizes, which telescope to the final maximum minus x;
- an `exp2` in its own tile, in each rescaling and in each merge of splits;
- in each rescaling, that the maximum times the factor was rounded where it was subtracted, but is
  not where it is rescaled from: u |m|.

Every later operation on a sum (a rescaling, an addition, a product's step) is relative to the sum
and thus to each term in it: term j errs once for each operation that it passes. The weights' error
moves the average (`average_error`); the sums' errors and P's rounding act on numerator or
denominator alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simkit.errors import ShapeError
from simkit.numerics.arrays import Float64Array
from simkit.numerics.bounds import (
    EXP2_LOG_ERROR,
    FLUSHED,
    LOG_2,
    MERGE_ROUNDINGS,
    SUBNORMAL_STEP,
    U32,
    U64,
    U_BF16,
    average_error,
    dot_error,
    largest_weights,
    log_sum_error,
    lse_error,
    quotient_error,
    weight_error,
)
from simkit.numerics.tensor_core import TensorCore

_BF16_SUBNORMAL_STEP = 2.0**-133


@dataclass(frozen=True, kw_only=True)
class AttentionArithmetic:
    """What an attention kernel rounds.

    ``key_tile``: keys between two rescalings of the state. ``query_tile``: rows that go through the
    same tiles of keys. ``score_core``: of Q K^T, None for chains of multiply-adds.
    ``exponent_scale``: the float32 factor from a score to a base-2 exponent; ``score_roundoff``:
    None for raw scores; relative, for scores that are scaled and stored before the exponential.
    ``sum_own``, ``sum_later``: relative errors of the row sum that a weight passes in its own tile
    and in each later one; ``output_own``, ``output_later``: the same of the output.
    ``output_floor``: absolute error of a tile's output, where magnitudes are subnormal.
    ``weight_roundoff``: of P, as it is multiplied; ``output_roundoff``: of o, as it is stored.
    """

    key_tile: int
    query_tile: int
    score_core: TensorCore | None
    exponent_scale: float
    sum_own: float
    sum_later: float
    output_own: float
    output_later: float
    output_floor: float = SUBNORMAL_STEP
    score_roundoff: float | None = None
    weight_roundoff: float = 0.0
    output_roundoff: float = U_BF16


@dataclass(frozen=True)
class AttentionBounds:
    """Bounds on absolute errors of one head: ``o`` [M, dv] and ``lse`` [M] as they are stored,
    ``weights`` [M, N] normalised and rounded like P. ``row_sum`` [M] is relative.
    """

    o: Float64Array
    lse: Float64Array
    weights: Float64Array
    row_sum: Float64Array


def attention_bounds(
    q: Float64Array,
    k: Float64Array,
    v: Float64Array,
    *,
    scale: float,
    visible: NDArray[np.bool_],
    arithmetic: AttentionArithmetic,
    splits: Sequence[slice] | None = None,
    k_error: Float64Array | None = None,
    v_error: Float64Array | None = None,
) -> AttentionBounds:
    """Bounds of softmax(scale q k^T) v against exact arithmetic, for ``q`` [M, d], ``k`` [N, d],
    ``v`` [N, dv] and the keys ``visible`` [M, N].

    ``splits``: ranges of keys that have a state of their own and are merged in this order; by
    default there is one. ``k_error``, ``v_error``: absolute errors of the K and V that the kernel
    reads (from an FP8 cache, by `e4m3_error`). Queries that are not finite have bounds as if they
    were zeros: what they give is an exact 0, -inf or NaN. Errors: `ShapeError`.
    """
    ranges = (slice(0, len(k)),) if splits is None else splits
    v_spread = np.zeros_like(v) if v_error is None else v_error
    if visible.shape != (len(q), len(k)) or v_spread.shape != v.shape or len(v) != len(k):
        raise ShapeError(
            f"visible must be [{len(q)}, {len(k)}], v_error like v and v [{len(k)}, dv], "
            f"got {visible.shape}, {v_spread.shape}, {v.shape}"
        )
    q = np.where(np.isfinite(q).all(axis=1, keepdims=True), q, 0.0)
    k, v = (np.where(np.isfinite(x), x, 0.0) for x in (k, v))
    score = scale * (q @ k.T)
    score_error = scale * dot_error(q, k, arithmetic.score_core, b_error=k_error)
    exact_factor = scale / LOG_2
    if arithmetic.score_roundoff is not None:
        score_error += arithmetic.score_roundoff * (np.abs(score) + score_error)
        score_error += _BF16_SUBNORMAL_STEP
        exact_factor = 1 / LOG_2
    softmax = _Softmax.of(score, visible)
    places = _Places.of(arithmetic, visible, ranges)
    rounding = _rounding_log_error(score, score_error, softmax, visible, ranges, places)
    factor_error = abs(arithmetic.exponent_scale / exact_factor - 1)
    # The factor's error counts by a score's distance to the others, or to 0 if its size matters.
    eta = visible * (score_error + rounding + factor_error * softmax.distance)
    lse_eta = visible * (score_error + rounding + factor_error * np.abs(score))
    p = softmax.weights
    # Weights below 2^-126 are flushed; the sum is 1 or more, but for the roundings of its largest.
    steepest = np.exp(np.minimum((visible * rounding).max(axis=1, initial=0.0), 100.0))
    flushed = 2 * FLUSHED * steepest
    sums = (p * places.sum_error).sum(axis=1) + len(k) * (U64 + flushed)
    spread = log_sum_error(p, lse_eta)
    moved = weight_error(p, eta)
    weights = moved + quotient_error(p + moved, flushed[:, None], sums[:, None])
    final = (1 + U32) * (1 + arithmetic.weight_roundoff) - 1
    return AttentionBounds(
        o=_output_error(v, v_spread, p, eta, places, sums, flushed, visible, arithmetic),
        lse=lse_error(spread, sums, softmax.lse, softmax.log_sum),
        weights=weights + final * (p + weights) + _BF16_SUBNORMAL_STEP,
        row_sum=np.exp(spread) * (1 + sums) - 1,
    )


@dataclass(frozen=True)
class _Softmax:
    """Of exact scores, by row: weights [M, N], lse [M] and the logarithm of the sum [M] that the
    maximum is added to. ``distance`` [M, N]: of a score to the maximum, 0 for hidden ones.
    """

    weights: Float64Array
    lse: Float64Array
    log_sum: Float64Array
    distance: Float64Array

    @classmethod
    def of(cls, score: Float64Array, visible: NDArray[np.bool_]) -> _Softmax:
        maximum = np.where(visible, score, -np.inf).max(axis=1, keepdims=True, initial=-np.inf)
        maximum = np.where(np.isneginf(maximum), 0.0, maximum)
        distance = np.where(visible, maximum - score, 0.0)
        unscaled = np.where(visible, np.exp(-distance), 0.0)
        total = unscaled.sum(axis=1)
        total = np.where(total > 0, total, 1.0)
        log_sum = np.log(total)
        return cls(unscaled / total[:, None], maximum[:, 0] + log_sum, log_sum, distance)


@dataclass(frozen=True)
class _Places:
    """Where keys stand and what their weights and terms pass from there on.

    ``tile`` [N]: of a key in its split; ``last`` [M, N]: the last tile of the split that the row
    goes through; ``exponentials``: how many a weight is made of; relative errors that a term of the
    sum and one of the output pass, [M, N].
    """

    tile: NDArray[np.int64]
    last: NDArray[np.int64]
    exponentials: NDArray[np.int64]
    sum_error: Float64Array
    output_error: Float64Array

    @classmethod
    def of(
        cls, arithmetic: AttentionArithmetic, visible: NDArray[np.bool_], splits: Sequence[slice]
    ) -> _Places:
        rows, keys = visible.shape
        starts = range(0, rows, arithmetic.query_tile)
        # What any row of a tile of queries sees, all of them go through.
        read = np.zeros_like(visible)
        for start in starts:
            own = slice(start, start + arithmetic.query_tile)
            read[own] = visible[own].any(axis=0)
        tile, merges = np.zeros(keys, np.int64), np.zeros(keys, np.int64)
        last = np.zeros(visible.shape, np.int64)
        for number, split in enumerate(splits):
            tile[split] = np.arange(split.stop - split.start) // arithmetic.key_tile
            final = np.where(read[:, split], tile[split], 0).max(axis=1, initial=0)
            last[:, split] = np.maximum(final[:, None], tile[split])
            # The first state is taken as it is; state i is merged and passes the merges after it.
            merges[split] = len(splits) - max(number, 1)
        later = last - tile
        merge_error = MERGE_ROUNDINGS * U32 * merges
        # Products of factors 1 + error, their logarithms added up.
        passed = [
            np.expm1(own + later * each + merge_error)
            for own, each in (
                (arithmetic.sum_own, arithmetic.sum_later),
                (arithmetic.output_own, arithmetic.output_later),
            )
        ]
        return cls(tile, last, 1 + later + merges, *passed)


def _rounding_log_error(
    score: Float64Array,
    score_error: Float64Array,
    softmax: _Softmax,
    visible: NDArray[np.bool_],
    splits: Sequence[slice],
    places: _Places,
) -> Float64Array:
    """|ln| of the factor that roundings after the scores put on each weight [M, N]."""
    worst = (visible * score_error).max(axis=1, initial=0.0, keepdims=True)
    drift = np.zeros_like(score)
    rows = np.arange(len(score))[:, None]
    for split in splits:
        tile, last = places.tile[split], places.last[:, split]
        shown = np.where(visible[:, split], score[:, split], -np.inf)
        maxima = [
            shown[:, tile == index].max(axis=1, initial=-np.inf)
            for index in range(int(tile.max(initial=-1)) + 1)
        ]
        if not maxima:
            continue
        running = np.maximum.accumulate(np.stack(maxima, axis=1), axis=1)
        size = np.where(np.isneginf(running), 0.0, np.abs(running) + worst)
        # Rescalings are from the states after tiles "own" to "last - 1".
        before = np.pad(np.cumsum(size, axis=1), ((0, 0), (1, 0)))
        drift[:, split] = before[rows, last] - before[rows, tile]
    rounded = U32 * (softmax.distance + 2 * worst + drift) * (1 + 2.0**-10)
    return rounded + places.exponentials * EXP2_LOG_ERROR


def _output_error(
    v: Float64Array,
    v_error: Float64Array,
    p: Float64Array,
    eta: Float64Array,
    places: _Places,
    sums: Float64Array,
    flushed: Float64Array,
    visible: NDArray[np.bool_],
    arithmetic: AttentionArithmetic,
) -> Float64Array:
    """Error of the stored output [M, dv]: a moved average of rounded terms over a rounded sum."""
    size = np.abs(p @ v)
    moved = average_error(p, eta, v, visible)
    most = largest_weights(p, eta)
    # What the terms' roundings act on: averages of |v|, which are also at most the largest |v|.
    relative = (1 + arithmetic.weight_roundoff) * (1 + places.output_error) - 1 + U64 * len(v)
    magnitude = np.abs(v) + v_error
    worst = (visible * relative).max(axis=1, initial=0.0)[:, None]
    rounded = np.minimum((most * relative) @ magnitude, worst * magnitude.max(axis=0, initial=0.0))
    rounded += np.minimum(most @ v_error, v_error.max(axis=0, initial=0.0))
    rounded += flushed[:, None] * magnitude.sum(axis=0)
    tiles = places.last.max(initial=0) + 1
    rounded += (flushed / FLUSHED)[:, None] * tiles * (arithmetic.output_floor + SUBNORMAL_STEP)
    error = moved + quotient_error(size + moved, rounded, sums[:, None])
    final = (1 + U32) * (1 + arithmetic.output_roundoff) - 1
    stored = error + final * (size + error) + _BF16_SUBNORMAL_STEP
    return np.where(visible.any(axis=1, keepdims=True), stored, 0.0)
