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
denominator alone. Below the normal range of its type P errs by up to half a step, however small it
is: as a part of a sum that is 1 or more, relative to the same maximum.

`attention_bounds` starts from Q and K, `softmax_bounds` from logits that somebody else has bounds
for. A sink is a key with an exact logit and the value 0 that stands before the first tile.
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
from simkit.numerics.merge_state_bounds import BoundedState
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
    ``weight_roundoff``: of P, as it is multiplied, ``weight_step``: half the step of its
    subnormals; ``output_roundoff``: of o, as it is stored.
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
    weight_step: float = 0.0
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
    factor_error = abs(arithmetic.exponent_scale / exact_factor - 1)
    places = _Places.of(arithmetic, _read(visible, arithmetic.query_tile), ranges)
    found = _RoundedSoftmax.of(Logits(score, score_error, visible), factor_error, places)
    return AttentionBounds(
        o=found.output_error(v, v_spread, arithmetic),
        lse=found.lse_error(),
        weights=found.stored_weight_error(arithmetic),
        row_sum=found.row_sum_error(),
    )


@dataclass(frozen=True)
class Logits:
    """What a softmax is taken of, in natural units: exact ``value`` [..., M, N], ``error`` of the
    computed ones, both finite, and which are ``visible``.
    """

    value: Float64Array
    error: Float64Array
    visible: NDArray[np.bool_]


def softmax_bounds(
    logits: Logits,
    v: Float64Array,
    *,
    arithmetic: AttentionArithmetic,
    factor_error: float,
    sink: bool = False,
) -> BoundedState:
    """State of softmax(logits) v, ``v`` [..., N, dv], in float32: o [..., M, dv], lse [..., M].

    All rows go through all tiles of keys. ``arithmetic.exponent_scale`` and what it says of scores
    are not used, but ``factor_error``: of the factor from logits to base-2 exponents, relative.
    ``sink``: the first key is one. Rows that see nothing have o = 0 and lse = -inf. Errors:
    `ShapeError`.
    """
    shape = logits.value.shape
    if {logits.error.shape, logits.visible.shape} != {shape} or v.shape[:-1] != (
        *shape[:-2],
        shape[-1],
    ):
        raise ShapeError(
            f"logits [..., M, N], their errors, what is visible and v [..., N, dv] must agree, got "
            f"{shape}, {logits.error.shape}, {logits.visible.shape}, {v.shape}"
        )
    places = _Places.of_chunk(arithmetic, shape[-1], sink=sink)
    found = _RoundedSoftmax.of(logits, factor_error, places)
    present = logits.visible.any(axis=-1)
    return BoundedState(
        found.softmax.weights @ v,
        np.where(present, found.softmax.lse, -np.inf),
        found.output_error(v, np.zeros_like(v), arithmetic),
        np.where(present, found.lse_error(), 0.0),
    )


def _read(visible: NDArray[np.bool_], query_tile: int) -> NDArray[np.bool_]:
    """Keys that a row goes through: what any row of its tile of queries sees."""
    read = np.zeros_like(visible)
    for start in range(0, len(visible), query_tile):
        own = slice(start, start + query_tile)
        read[own] = visible[own].any(axis=0)
    return read


@dataclass(frozen=True)
class _Softmax:
    """Of exact logits, by row: weights [..., M, N], lse [..., M] and the logarithm of the sum
    [..., M] that the maximum is added to. ``distance`` [..., M, N]: of a logit to the maximum, 0
    for hidden ones.
    """

    weights: Float64Array
    lse: Float64Array
    log_sum: Float64Array
    distance: Float64Array

    @classmethod
    def of(cls, logits: Logits) -> _Softmax:
        value, visible = logits.value, logits.visible
        maximum = np.where(visible, value, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
        maximum = np.where(np.isneginf(maximum), 0.0, maximum)
        distance = np.where(visible, maximum - value, 0.0)
        unscaled = np.where(visible, np.exp(-distance), 0.0)
        total = unscaled.sum(axis=-1)
        total = np.where(total > 0, total, 1.0)
        log_sum = np.log(total)
        return cls(unscaled / total[..., None], maximum[..., 0] + log_sum, log_sum, distance)


@dataclass(frozen=True)
class _Places:
    """Where keys stand and what their weights and terms pass from there on.

    ``splits``: of keys; ``tile`` [N]: of a key in its split; ``last`` [M, N]: the last tile of the
    split that the row goes through; ``exponentials``: how many a weight is made of; relative errors
    that a term of the sum and one of the output pass. [1, N] where rows are alike.
    """

    splits: Sequence[slice]
    tile: NDArray[np.int64]
    last: NDArray[np.int64]
    exponentials: NDArray[np.int64]
    sum_error: Float64Array
    output_error: Float64Array

    @classmethod
    def of(
        cls, arithmetic: AttentionArithmetic, read: NDArray[np.bool_], splits: Sequence[slice]
    ) -> _Places:
        """Of rows that go through the keys ``read`` [M, N], in splits that are merged."""
        keys = read.shape[1]
        tile, merges = np.zeros(keys, np.int64), np.zeros(keys, np.int64)
        last = np.zeros(read.shape, np.int64)
        for number, split in enumerate(splits):
            tile[split] = np.arange(split.stop - split.start) // arithmetic.key_tile
            final = np.where(read[:, split], tile[split], 0).max(axis=1, initial=0)
            last[:, split] = np.maximum(final[:, None], tile[split])
            # The first state is taken as it is; state i is merged and passes the merges after it.
            merges[split] = len(splits) - max(number, 1)
        return cls._passing(arithmetic, splits, tile, last, 1 + merges, merges)

    @classmethod
    def of_chunk(cls, arithmetic: AttentionArithmetic, keys: int, *, sink: bool) -> _Places:
        """Of rows that go through all keys; a sink is a tile of its own, without an exponential."""
        tile = (np.arange(keys) - sink) // arithmetic.key_tile + sink
        last = np.full((1, keys), tile.max(initial=0))
        own = np.ones(keys, np.int64)
        own[: int(sink)] = 0
        return cls._passing(arithmetic, (slice(0, keys),), tile, last, own, 0 * own)

    @classmethod
    def _passing(
        cls,
        arithmetic: AttentionArithmetic,
        splits: Sequence[slice],
        tile: NDArray[np.int64],
        last: NDArray[np.int64],
        own_exponentials: NDArray[np.int64],
        merges: NDArray[np.int64],
    ) -> _Places:
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
        return cls(splits, tile, last, own_exponentials + later, *passed)


@dataclass(frozen=True)
class _RoundedSoftmax:
    """A softmax whose weights are off by factors within exp(+-``eta``), relative to each other, and
    exp(+-``lse_eta``), relative to the computed maximum; [..., M, N].

    By row: ``steepest``, the most that roundings make of a weight of 1; ``flushed``, the most that
    a weight flushed to zero can be; ``sums``, the relative error of adding up.
    """

    softmax: _Softmax
    visible: NDArray[np.bool_]
    places: _Places
    eta: Float64Array
    lse_eta: Float64Array
    steepest: Float64Array
    flushed: Float64Array
    sums: Float64Array

    @classmethod
    def of(cls, logits: Logits, factor_error: float, places: _Places) -> _RoundedSoftmax:
        softmax, visible = _Softmax.of(logits), logits.visible
        rounding = _rounding_log_error(logits, softmax, places)
        # The factor's error counts by a logit's distance to the others, or to 0 if its size
        # matters.
        eta = visible * (logits.error + rounding + factor_error * softmax.distance)
        lse_eta = visible * (logits.error + rounding + factor_error * np.abs(logits.value))
        # Weights below 2^-126 are flushed; the sum is 1 or more, but for the roundings of its
        # largest.
        steepest = np.exp(np.minimum((visible * rounding).max(axis=-1, initial=0.0), 100.0))
        flushed = 2 * FLUSHED * steepest
        p, keys = softmax.weights, visible.shape[-1]
        sums = (p * places.sum_error).sum(axis=-1) + keys * (U64 + flushed)
        return cls(softmax, visible, places, eta, lse_eta, steepest, flushed, sums)

    @property
    def _spread(self) -> Float64Array:
        return log_sum_error(self.softmax.weights, self.lse_eta)

    def lse_error(self) -> Float64Array:
        return lse_error(self._spread, self.sums, self.softmax.lse, self.softmax.log_sum)

    def row_sum_error(self) -> Float64Array:
        """Relative."""
        return np.asarray(np.exp(self._spread) * (1 + self.sums) - 1)

    def stored_weight_error(self, arithmetic: AttentionArithmetic) -> Float64Array:
        """Of P [..., M, N], normalised and rounded."""
        p = self.softmax.weights
        moved = weight_error(p, self.eta)
        error = moved + quotient_error(p + moved, self.flushed[..., None], self.sums[..., None])
        final = (1 + U32) * (1 + arithmetic.weight_roundoff) - 1
        return np.asarray(error + final * (p + error) + _BF16_SUBNORMAL_STEP)

    def output_error(
        self, v: Float64Array, v_error: Float64Array, arithmetic: AttentionArithmetic
    ) -> Float64Array:
        """Of the stored output [..., M, dv]: a moved average of rounded terms, over a sum."""
        p, visible = self.softmax.weights, self.visible
        size = np.abs(p @ v)
        moved = average_error(p, self.eta, v, visible)
        most = largest_weights(p, self.eta)
        # What the terms' roundings act on: averages of |v|, which are also at most the largest |v|.
        relative = (1 + arithmetic.weight_roundoff) * (1 + self.places.output_error) - 1
        relative = relative + U64 * v.shape[-2]
        magnitude = np.abs(v) + v_error
        greatest = magnitude.max(axis=-2, keepdims=True, initial=0.0)
        worst = (visible * relative).max(axis=-1, initial=0.0)[..., None]
        rounded = np.minimum((most * relative) @ magnitude, worst * greatest)
        rounded += np.minimum(most @ v_error, v_error.max(axis=-2, keepdims=True, initial=0.0))
        if arithmetic.weight_step:
            # Over the sum, of which the largest weight, 1 but for roundings, is a known part.
            part = np.minimum(most.max(axis=-1, initial=0.0), 1.0)
            step = arithmetic.weight_step * self.steepest**2 * part
            rounded += np.minimum(most, step[..., None]) @ magnitude
        rounded += self.flushed[..., None] * magnitude.sum(axis=-2, keepdims=True)
        tiles = self.places.last.max(initial=0) + 1
        floor = 2 * self.steepest[..., None] * (arithmetic.output_floor + SUBNORMAL_STEP)
        rounded += tiles * floor
        error = moved + quotient_error(size + moved, rounded, self.sums[..., None])
        final = (1 + U32) * (1 + arithmetic.output_roundoff) - 1
        stored = error + final * (size + error) + _BF16_SUBNORMAL_STEP
        return np.where(visible.any(axis=-1, keepdims=True), stored, 0.0)


def _rounding_log_error(logits: Logits, softmax: _Softmax, places: _Places) -> Float64Array:
    """|ln| of the factor that roundings after the logits put on each weight [..., M, N]."""
    value, visible = logits.value, logits.visible
    worst = (visible * logits.error).max(axis=-1, initial=0.0, keepdims=True)
    drift = np.zeros_like(value)
    for split in places.splits:
        tile = places.tile[split]
        if not tile.size:
            continue
        shown = np.where(visible[..., split], value[..., split], -np.inf)
        first_keys = np.flatnonzero(np.diff(tile, prepend=-1))
        maxima = np.maximum.reduceat(shown, first_keys, axis=-1)
        running = np.maximum.accumulate(maxima, axis=-1)
        size = np.where(np.isneginf(running), 0.0, np.abs(running) + worst)
        # Rescalings are from the states after tiles "own" to "last - 1".
        before = np.concatenate((np.zeros_like(worst), np.cumsum(size, axis=-1)), axis=-1)
        last = np.broadcast_to(places.last[:, split], shown.shape)
        drift[..., split] = np.take_along_axis(before, last, axis=-1) - before[..., tile]
    rounded = U32 * (softmax.distance + 2 * worst + drift) * (1 + 2.0**-10)
    return rounded + places.exponentials * EXP2_LOG_ERROR
