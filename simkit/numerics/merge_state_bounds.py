"""Error bounds of merging attention states (o, lse) in float32, of the data at hand.

Notation, method and parts are those of `simkit.numerics.bounds`. A state may itself be a result:
its o is off by at most ``o_error`` and its lse by at most e, which bounds of merged merges need.

1. Weights. State i has the exact weight e^lse_i and a computed one relative to the largest computed
   LSE, M. The difference lse_i - M rounds, log2 e is a rounded number and its product rounds:
   relative errors of the exponent, which is at most reach_i = max lse - lse_i + e_i + max e. The
   exponential adds its own. Where reach is 0 the difference is 0 and the weight exactly 1. All in
   all the weight is off by a factor within exp(+-eta_i), eta_i = e_i + roundings.

2. Flushed weights. Exponents below -126 give 0. Those that are surely there have no eta: their
   weights, exact and computed, are below 2^-126 of a total that is at least 1.

3. o is an average of the o_i with these weights (`average_error`'s argument, row by row), plus the
   average of their errors; n - 1 additions make the denominator, n multiply-adds the numerator,
   whose roundings are relative to an average of sizes. No average exceeds its largest value. The
   division rounds, so does the product with a scale, and so does the narrower type.

4. lse is M plus the logarithm of the total: `log_sum_error`, the error of `log2`, that of the
   rounded ln 2, and one rounding of a multiply-add.

A state that is the only one with keys is copied: its errors stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from simkit.numerics.arrays import Float64Array
from simkit.numerics.bounds import (
    EXP2_LOG_ERROR,
    FLUSHED,
    LOG_2,
    SUBNORMAL_STEP,
    U32,
    U64,
    U_BF16,
    largest_weights,
    log2_error,
    log_sum_error,
    quotient_error,
)
from simkit.numerics.exp2 import LN2, LOG2E

ROUNDINGS: dict[np.dtype[Any], tuple[float, float]] = {
    np.dtype(np.float32): (0.0, 0.0),
    np.dtype(ml_dtypes.bfloat16): (U_BF16, 2.0**-134),
    np.dtype(np.float16): (2.0**-11, 2.0**-25),
}
"""Unit roundoff of storing float32 values as a type, and half the step of its subnormals."""

_LN2_ERROR = abs(float(LN2) / LOG_2 - 1.0)
# Of the exponent: two roundings and the constant; and the reference's own in float64.
_EXPONENT_ERROR = (1 + U32) ** 2 * (1 + abs(float(LOG2E) * LOG_2 - 1.0)) - 1 + 4 * U64
_LOWEST = 126 * LOG_2


@dataclass(frozen=True, eq=False)
class BoundedState:
    """Exact values of a state in float64 and bounds on the absolute errors of what stands for it:
    ``o``, ``o_error`` [..., d]; ``lse``, ``lse_error`` [...].
    """

    o: Float64Array
    lse: Float64Array
    o_error: Float64Array
    lse_error: Float64Array

    @classmethod
    def exact(cls, o: NDArray[Any], lse: NDArray[Any]) -> BoundedState:
        """A state that is given, not computed."""
        o, lse = o.astype(np.float64), lse.astype(np.float64)
        return cls(o, lse, np.zeros_like(o), np.zeros_like(lse))


def merge_bounded(
    states: Sequence[BoundedState], *, v_scale: float = 1.0, dtype: DTypeLike = np.float32
) -> BoundedState:
    """The exact merge of ``states``, at least one, all of one shape, and bounds on the errors of
    the kernels' merge in any order; o times ``v_scale``, a float32 number, stored as ``dtype``.

    Where an LSE is NaN or +inf, o and lse are NaN with a bound of 0. Infinite and NaN values of o
    count as 0: their products are not bounded. Results that overflow are outside of all bounds.
    """
    shape = states[0].o.shape
    rows = [
        np.stack([getattr(state, name) for state in states], axis=len(shape) - 1)
        for name in ("lse", "lse_error")
    ]
    lse, own = (x.reshape(-1, len(states)) for x in rows)
    v, v_error = (
        np.stack([getattr(state, name) for state in states], axis=-2).reshape(*lse.shape, shape[-1])
        for name in ("o", "o_error")
    )
    with np.errstate(all="ignore"):
        found = _merge(lse, own, v, v_error, v_scale, dtype)
    return BoundedState(
        found.o.reshape(shape),
        found.lse.reshape(shape[:-1]),
        found.o_error.reshape(shape),
        found.lse_error.reshape(shape[:-1]),
    )


def _merge(
    lse: Float64Array,
    own: Float64Array,
    v: Float64Array,
    v_error: Float64Array,
    v_scale: float,
    dtype: DTypeLike,
) -> BoundedState:
    """Of ``lse`` with errors ``own`` [rows, states], ``v`` with ``v_error`` [rows, states, d]."""
    undefined = np.asarray(np.any(np.isnan(lse) | np.isposinf(lse), axis=1))
    present = ~np.isneginf(lse) & ~undefined[:, None]
    lse, own = np.where(present, lse, 0.0), np.where(present, own, 0.0)
    v, v_error = (np.where(present[..., None] & np.isfinite(v), x, 0.0) for x in (v, v_error))
    count = present.sum(axis=1)
    weights = _Weights.of(lse, own, present)
    p, eta = weights.p, weights.eta

    average = np.einsum("rs,rsd->rd", p, v)
    distance = np.abs(v - average[:, None]) * present[..., None]
    most = largest_weights(p, eta)
    moved = _average(most * -np.expm1(-eta), distance) + _average(most, v_error)
    sizes = np.abs(v) + v_error
    # Sums of exponentials are 1 or more: a step of the numerator is at least that much of it.
    numerator = _compound(count)[:, None] * _average(most, sizes)
    numerator += np.einsum("rs,rsd->rd", weights.flushed, sizes)
    numerator += count[:, None] * (SUBNORMAL_STEP + 2 * U64 * sizes.max(axis=1))
    sums = _compound(count - 1) + weights.flushed.sum(axis=1)
    error = moved + quotient_error(np.abs(average) + moved, numerator, sums[:, None])
    error = _rounded(average, error, U32, SUBNORMAL_STEP)
    is_alone, nothing = (np.asarray(np.equal(count, n)) for n in (1, 0))
    error = np.where(is_alone[:, None], v_error.sum(axis=1), error)
    o, error = average * v_scale, error * abs(v_scale)
    if v_scale != 1.0:
        error = _rounded(o, error, U32, SUBNORMAL_STEP)
    error = _rounded(o, error, *ROUNDINGS[np.dtype(dtype)])

    spread = log_sum_error(p, eta) - np.log1p(-sums)
    log_total = np.abs(weights.log_total) + spread + own.max(axis=1)
    lse_error = spread + LOG_2 * log2_error(log_total / LOG_2) + _LN2_ERROR * log_total
    merged = weights.maximum + weights.log_total
    lse_error = _rounded(merged, lse_error, U32 + 2 * U64, SUBNORMAL_STEP)
    lse_error = np.where(is_alone, own.sum(axis=1), lse_error)

    nan = np.float64(np.nan)
    return BoundedState(
        np.where(undefined[:, None], nan, o),
        np.where(undefined, nan, np.where(nothing, -np.inf, merged)),
        np.where(nothing[:, None], 0.0, error),
        np.where(nothing, 0.0, lse_error),
    )


@dataclass(frozen=True, eq=False)
class _Weights:
    """Points 1 and 2, by row: ``p`` [rows, states] exact, of sum 1; ``eta`` and ``flushed``, the
    most that a flushed weight can be; ``maximum`` and ``log_total`` [rows], which add to the LSE.
    """

    p: Float64Array
    eta: Float64Array
    flushed: Float64Array
    maximum: Float64Array
    log_total: Float64Array

    @classmethod
    def of(cls, lse: Float64Array, own: Float64Array, present: NDArray[np.bool_]) -> _Weights:
        maximum = np.where(present, lse, -np.inf).max(axis=1, keepdims=True)
        maximum = np.where(np.isneginf(maximum), 0.0, maximum)
        distance = np.where(present, maximum - lse, 0.0)
        slack = own + own.max(axis=1, keepdims=True)
        reach = np.where(present, distance + slack, 0.0)
        rounding = _EXPONENT_ERROR * reach + EXP2_LOG_ERROR + SUBNORMAL_STEP
        eta = np.where(reach > 0, own + rounding, 0.0)
        is_flushed = (distance - slack) * (1 - _EXPONENT_ERROR) > _LOWEST
        may_be_flushed = reach * (1 + _EXPONENT_ERROR) >= _LOWEST
        unscaled = np.where(present, np.exp(-distance), 0.0)
        total = unscaled.sum(axis=1, keepdims=True)
        total = np.where(total > 0, total, 1.0)
        return cls(
            p=unscaled / total,
            eta=np.where(is_flushed, 0.0, eta),
            flushed=np.where(may_be_flushed, 2 * FLUSHED, 0.0),
            maximum=maximum[:, 0],
            log_total=np.log(total)[:, 0],
        )


def _average(most: Float64Array, values: Float64Array) -> Float64Array:
    """The most that an average of ``values`` [rows, states, d], none of them negative, can be with
    weights of at most ``most`` [rows, states].
    """
    return np.minimum(np.einsum("rs,rsd->rd", most, values), values.max(axis=1))


def _compound(count: NDArray[np.int64]) -> Float64Array:
    """Relative error of ``count`` roundings, one after another."""
    return np.expm1(np.maximum(count, 0) * np.log1p(U32))


def _rounded(
    value: Float64Array, error: Float64Array, roundoff: float, step: float
) -> Float64Array:
    """The error of a result that is rounded once more."""
    return np.asarray(error + roundoff * (np.abs(value) + error) + step)
