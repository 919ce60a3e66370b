"""Error bounds of the parts of attention, by running-error analysis of the actual data.

Notation. u = 2^-24 is the unit roundoff of float32: an operation rounded to nearest errs by at
most u times its result. The relative error of a weight is carried as a logarithm: a factor f with
|ln f| <= eta. Logarithms of factors add up exactly, so that no second-order term is dropped.

1. Scores (`dot_error`). A chain of fused multiply-adds errs by u |partial sum| at each step. A
   tensor-core step truncates each inexact term by less than one unit, 2^-F times the power of two
   at the largest magnitude in the step, and truncates the sum to its fraction bits.

2. Averages (`average_error`). With weights p_j f_j instead of p_j, whose sum is 1,

       sum(p f v) / sum(p f) - o = sum(p (f - 1) (v - o)) / sum(p f),   o = sum(p v)

   and |f - 1| <= exp(eta) - 1, so the error is at most sum(p (exp(eta) - 1) |v - o|) divided by
   sum(p exp(-eta)). It is also at most max |v - o|, as both are averages of the same values.

3. LSE (`lse_error`). |ln sum(p f)| <= ln sum(p exp(eta)), on the lower side by Jensen's inequality.
   The logarithm and the three operations around it add their own roundings.

4. Merges (`merge_bounds`). A partial state (m, l, o) is a key with the weight 2^m l and the value
   o / l, to which points 2 and 3 apply. Exponents are differences of maxima: their sizes telescope
   over the merges, to the largest maximum minus m altogether, and so do their roundings.

5. FP8 (`e4m3_error`). Rounding to the nearest errs by half the spacing at the value.

6. Soft caps (`tanh_error`). tanh is a quotient of 1 -+ e, whose error is that of e and absolute.
   What its argument is off by passes on by the derivative, 1 - tanh^2.

Results that overflow are outside of all bounds. `simkit.numerics.attention_bounds` puts the parts
together. Source of the method: Higham, "Accuracy and Stability of Numerical Algorithms", 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.errors import DtypeError, ShapeError
from simkit.numerics.arrays import Float64Array
from simkit.numerics.exp2 import LN2, LOG2E
from simkit.numerics.online_softmax import OnlineSoftmax
from simkit.numerics.tensor_core import TensorCore

U32 = 2.0**-24
"""Unit roundoff of float32: half a unit in the last place of 1."""
U_BF16 = 2.0**-8
"""Unit roundoff of bfloat16."""
U64 = 2.0**-53
"""Unit roundoff of float64: that of the reference which results are compared with."""

EXP2_ERROR = 1.25 * U32
"""Relative error of `exp2`. The last multiply-add rounds 1 + f p with |f| <= 1/2: by u from 1 on,
and by u / 2 below 1, where the result is at least 2^-1/2. The one before rounds p < 1 by u / 2, the
one before that a number below 1/2 by u / 4, the next ones u / 16 and less: times |f|, f^2 and so
on, 0.32 u at |f| = 1/2. Relative to the result the sum is largest at f = -1/2,
(0.5 + 0.32) sqrt(2) u = 1.16 u; the polynomial adds 2^-28.3 = 0.05 u."""
EXP2_LOG_ERROR = -float(np.log1p(-EXP2_ERROR))
"""|ln| of the factor that `exp2` is off by."""

FLUSHED = 2.0**-126
"""Weights below are flushed to zero by `exp2`."""
SUBNORMAL_STEP = 2.0**-149
"""What a float32 result below the normal range may err by in addition."""

LOG_2 = float(np.log(2.0))
_LN2_ERROR = abs(float(LN2) / LOG_2 - 1.0)
LOG2E_ERROR = abs(float(LOG2E) * LOG_2 - 1.0)
"""Relative error of the float32 number that stands for log2(e)."""

# A weight that is off by more may as well be anything: only the bounds that need no weights are
# left. The number stands for "any", finite so that it can be multiplied by zero.
_LARGEST_LOG = 300.0
_ANY = 1e150


def log2_error(value: Float64Array) -> Float64Array:
    """Error of `log2` where its result is ``value``.

    The result is e + log2 m with |log2 m| <= 1/2. log2 m is a product s p: m - 1 is exact, m + 1
    and the division round, p rounds to a number of [2, 4), which is u / 1.44, and its coefficients
    and inner steps are off by less than 0.8 u: 3.5 u |log2 m|. The sum with e rounds once more.
    """
    size = np.abs(value)
    return U32 * (size + 3.5 * np.minimum(size, 0.5))


def rounded_error(value: Any, error: Any, roundoff: float, step: float = SUBNORMAL_STEP) -> Any:
    """Error of a result that is rounded once more: by ``roundoff`` of it, and ``step`` below the
    normal range. ``value``: exact; ``error``: before.
    """
    return error + roundoff * (np.abs(value) + error) + step


def dot_error(
    a: Float64Array,
    b: Float64Array,
    core: TensorCore | None,
    *,
    significand_bits: int = 8,
    a_error: Float64Array | None = None,
    b_error: Float64Array | None = None,
) -> Float64Array:
    """Error of ``a @ b.T`` against exact arithmetic, [..., M, N], on finite ``a`` [..., M, K],
    ``b`` [..., N, K].

    ``core`` None: a chain of float32 multiply-adds; otherwise steps of that tensor core on inputs
    of ``significand_bits`` (8 is bfloat16). ``a_error``, ``b_error``, like ``a`` and ``b``: how far
    the computed ones may be from them. Includes the error of the same product in float64. Errors:
    `ShapeError`, `DtypeError` for a tensor core whose accumulator is not a term of float32.
    """
    a_spread, b_spread = (
        np.zeros_like(x) if error is None else error for x, error in ((a, a_error), (b, b_error))
    )
    if (
        (*a.shape[:-2], a.shape[-1]) != (*b.shape[:-2], b.shape[-1])
        or (a_spread.shape, b_spread.shape) != (a.shape, b.shape)
    ):  # fmt: skip
        raise ShapeError(
            f"a [..., M, K], b [..., N, K] and their errors must agree, got {a.shape}, {b.shape}, "
            f"{a_spread.shape}, {b_spread.shape}"
        )
    if core is not None:
        _check_core(core)
    most = np.abs(a) + a_spread, np.abs(b) + b_spread
    error = _product(most[0], b_spread) + _product(a_spread, np.abs(b))
    error += a.shape[-1] * U64 * _product(*most)
    row_sizes, column_sizes = (_sizes(x, core) for x in most)
    # A few rows at a time: what there is of them stays in the cache.
    count = max(1, _AT_ONCE // max(1, math.prod(b.shape[:-1])))
    for start in range(0, a.shape[-2], count):
        own = slice(start, start + count)
        rows = (..., own, slice(None))
        if core is None:
            error[rows] = _chain_error(a[rows], b, error[rows])
        else:
            error[rows] = _steps_error(
                a[rows], b, row_sizes[..., own], column_sizes, error[rows], core, significand_bits
            )
    return error


_AT_ONCE = 1 << 14


def _product(a: Float64Array, b: Float64Array) -> Float64Array:
    return np.asarray(a @ b.swapaxes(-1, -2))


def _chain_error(a: Float64Array, b: Float64Array, error: Float64Array) -> Float64Array:
    partial = np.zeros_like(error)
    for k in range(a.shape[-1]):
        partial += a[..., :, None, k] * b[..., None, :, k]
        # |computed| <= |exact| + error, and the error of the product is in ``error`` from the start
        error = error + U32 * (np.abs(partial) + error) / (1 - U32) + SUBNORMAL_STEP
    return error


def _sizes(most: Float64Array, core: TensorCore | None) -> Float64Array:
    """Magnitudes [..., K] as terms have them, [K, ...]: a subnormal input of a tensor core has the
    exponent of the smallest normal number.
    """
    least = 0.0 if core is None else 2.0**core.input_min_exponent
    sizes = np.where(most == 0, 0.0, np.maximum(most, least))
    return np.ascontiguousarray(np.moveaxis(sizes, -1, 0))


def _steps_error(
    a: Float64Array,
    b: Float64Array,
    rows: Float64Array,
    columns: Float64Array,
    error: Float64Array,
    core: TensorCore,
    significand_bits: int,
) -> Float64Array:
    """``rows`` [K, ..., M], ``columns`` [K, ..., N]: `_sizes` of a and b."""
    # The last bit of a product is 2 (bits - 1) below its exponent, which is at most 2 below its
    # logarithm: products of this part of the largest magnitude, or more, are not truncated.
    exact_from = 2.0 ** (2 * significand_bits - core.fraction_bits)
    result_roundoff = 2.0**-core.output_bits
    partial = np.zeros_like(error)
    for start in range(0, a.shape[-1], core.terms):
        step = slice(start, start + core.terms)
        products = rows[step][..., :, None] * columns[step][..., None, :]
        largest = np.maximum(np.abs(partial) + error, 2.0**core.min_exponent)
        np.maximum(largest, products.max(axis=0), out=largest)
        # What is truncated: the accumulator, and small products, but those that are 0.
        small = (products < exact_from * largest).view(np.uint8).sum(axis=0, dtype=np.uint8)
        nonzero = (np.moveaxis(np.sign(x[step]), 0, -1) for x in (rows, columns))
        zero = len(products) - _product(*nonzero)
        inexact = 1 + small - zero
        partial += _product(a[..., step], b[..., step])
        error = error + inexact * largest * 2.0**-core.fraction_bits
        error = error + (np.abs(partial) + error) * result_roundoff + SUBNORMAL_STEP
    return error


def _check_core(core: TensorCore) -> None:
    if core.late_terms or core.rounds_to_nearest:
        raise DtypeError(
            f"no bound for {core.name}: it must add the accumulator as a term, in float32"
        )


def product_roundoff(core: TensorCore, keys: int) -> tuple[float, float]:
    """Error of adding ``keys`` products to an accumulator: relative to sum |terms|, and absolute.

    Each step truncates all its terms and the accumulator to the same unit, and then the sum. The
    absolute part is for magnitudes below the least exponent that terms are aligned to. Error: as
    `dot_error`.
    """
    _check_core(core)
    steps = -(-keys // core.terms)
    unit = (core.terms + 1) * 2.0**-core.fraction_bits
    step = unit + (1 + unit) * 2.0**-core.output_bits
    return (1 + step) ** steps - 1, 2 * steps * (unit * 2.0**core.min_exponent + SUBNORMAL_STEP)


def largest_weights(p: Float64Array, eta: Float64Array) -> Float64Array:
    """The most that each normalised weight can be, [..., N], if each is off by exp(+-``eta``).

    ``p`` [..., N]: exact weights, rows of sum 1 (or 0: nothing visible). Rows in which a weight may
    be anything have bounds that exceed all others.
    """
    low, high = np.exp(-np.minimum(eta, _LARGEST_LOG)), np.exp(np.minimum(eta, _LARGEST_LOG))
    least = (p * low).sum(axis=-1, keepdims=True)
    most = p * high / np.where(least > 0, least, 1.0)
    return np.where((eta >= _LARGEST_LOG).any(axis=-1, keepdims=True), _ANY, most)


def weight_error(p: Float64Array, eta: Float64Array) -> Float64Array:
    """Error of normalised weights [..., N], ``p`` and ``eta`` as in `largest_weights`: both ends of
    p f / sum(p f).
    """
    greatest = (p * np.exp(np.minimum(eta, _LARGEST_LOG))).sum(axis=-1, keepdims=True)
    lowest = p * np.exp(-eta) / np.where(greatest > 0, greatest, 1.0)
    return np.minimum(np.maximum(largest_weights(p, eta) - p, p - lowest), 1.0)


def average_error(
    p: Float64Array, eta: Float64Array, v: Float64Array, visible: NDArray[np.bool_]
) -> Float64Array:
    """How far averages of ``v`` [..., N, dv] can move, [..., M, dv], when weights are off by
    exp(+-eta).

    ``p``, ``eta`` [..., M, N] as in `largest_weights`; ``visible`` [..., M, N]: the values of the
    average.
    """
    moved = largest_weights(p, eta) * -np.expm1(-eta)
    average = p @ v
    error = np.zeros_like(average)
    for row in np.ndindex(p.shape[:-1]):
        own = visible[row]
        distance = np.abs(v[row[:-1]][own] - average[row])
        error[row] = np.minimum(moved[row][own] @ distance, distance.max(axis=0, initial=0.0))
    return error


def quotient_error(quotient: Any, numerator: Any, denominator: Any) -> Any:
    """Error of numerator / denominator, where the exact quotient is at most ``quotient``.

    ``numerator``: its absolute error, over the exact denominator; ``denominator``: its relative
    error. Arrays broadcast; infinite where the denominator may be zero.
    """
    usable = denominator < 1
    rest = np.where(usable, 1 - denominator, 1.0)
    return np.where(usable, (numerator + quotient * denominator) / rest, np.inf)


def log_sum_error(p: Float64Array, eta: Float64Array) -> Float64Array:
    """|ln| of the factor by which a sum of weights is off, [...]; ``p``, ``eta`` [..., N]."""
    worst = np.where(p > 0, eta, 0.0).max(axis=-1, initial=0.0)
    capped = np.minimum(eta, _LARGEST_LOG)
    logarithm = np.log1p((p * np.expm1(capped)).sum(axis=-1))
    anything = (eta >= _LARGEST_LOG).any(axis=-1)
    return np.where(anything, eta.max(axis=-1, initial=0.0), np.minimum(logarithm, worst))


def lse_error(
    spread: Float64Array, sums: Float64Array, lse: Float64Array, log_sum: Float64Array
) -> Float64Array:
    """Error of the natural-logarithm LSE, any shape.

    ``spread``: |ln| of the factor of the sum, from `log_sum_error`; ``sums``: its relative error by
    addition; ``lse``: the exact value; ``log_sum``: the part of it that is the logarithm of a sum,
    ``lse`` without the maximum.
    """
    usable = sums < 1
    spread = spread - np.log1p(-np.where(usable, sums, 0.0))
    error = spread + LOG_2 * log2_error((np.abs(log_sum) + spread) / LOG_2)
    # The maximum is added and ln 2 multiplied by, which is itself rounded.
    roundings = (1 + U32) ** 2 * (1 + _LN2_ERROR) - 1
    return np.where(usable, error + roundings * (np.abs(lse) + error), np.inf)


MERGE_ROUNDINGS = 2
"""Roundings of l and o in a merge: the product of one side with its weight, the multiply-add."""


@dataclass(frozen=True)
class MergeBounds:
    """Bounds on absolute errors of a merged state: ``o`` [rows, d], normalised; ``lse`` [rows]."""

    o: Float64Array
    lse: Float64Array


def merge_bounds(states: Sequence[OnlineSoftmax]) -> MergeBounds:
    """Bounds of the float32 merge of ``states``, in any order, against exact arithmetic.

    Point 4 of the module. A state passes at most one merge fewer than there are states. The one
    with the largest maximum has the weight 2^0 in each, exactly; any other passes an exponential
    and the rounding of its exponent. Sides with l = 0 have no part in it.
    """
    merges = max(len(states) - 1, 0)
    m, l, o = (  # noqa: E741
        np.stack([getattr(state, name).astype(np.float64) for state in states], axis=1)
        for name in ("m", "l", "o")
    )
    present = l > 0
    maximum = np.where(present, m, -np.inf).max(axis=1, keepdims=True)
    maximum = np.where(np.isneginf(maximum), 0.0, maximum)
    distance = np.where(present, maximum - np.where(present, m, 0.0), 0.0)
    unscaled = np.where(present, np.exp2(-distance) * l, 0.0)
    total = unscaled.sum(axis=1, keepdims=True)
    p = unscaled / np.where(total > 0, total, 1.0)
    v = np.where(present[..., None], o, 0.0) / np.where(present, l, 1.0)[..., None]

    exponent = LOG_2 * U32 * distance
    eta = np.where(distance > 0, exponent + merges * EXP2_LOG_ERROR, 0.0)
    # Flushed terms are relative to a sum of at least the least l, the one with the weight 1.
    flushed = FLUSHED * np.where(present, l, 0.0) / np.where(total > 0, total, 1.0)
    sums = (1 + U32) ** (MERGE_ROUNDINGS * merges) - 1 + 2 * flushed.sum(axis=1)
    outputs = [
        _merged_output_error(p[row, None], eta[row, None], v[row], present[row, None],
                             sums[row], flushed[row, None], merges)
        for row in range(len(p))
    ]  # fmt: skip
    log_total = np.log(np.where(total > 0, total, 1.0))[:, 0]
    lse = lse_error(log_sum_error(p, eta), sums, maximum[:, 0] * LOG_2 + log_total, log_total)
    return MergeBounds(np.reshape(outputs, states[0].o.shape), lse)


def _merged_output_error(
    p: Float64Array,
    eta: Float64Array,
    v: Float64Array,
    visible: NDArray[np.bool_],
    sums: np.float64,
    flushed: Float64Array,
    merges: int,
) -> Float64Array:
    """Of one row: ``p``, ``eta``, ``visible``, ``flushed`` [1, states], ``v`` [states, d]."""
    moved = average_error(p, eta, v, visible)
    numerator = sums * (largest_weights(p, eta) @ np.abs(v)) + 2 * flushed @ np.abs(v)
    # Sums of exponentials are 1 or more: 2^-149 of un-normalised output is at least that much of it
    numerator = numerator + MERGE_ROUNDINGS * merges * SUBNORMAL_STEP
    size = np.abs(p @ v)
    error = quotient_error(size + moved, numerator, sums) + moved
    return np.asarray(error + U32 * (size + error) + SUBNORMAL_STEP)


def tanh_error(x: Float64Array, x_error: Float64Array) -> Float64Array:
    """Error of the kernels' tanh, any shape: (1 - e) / (1 + e) with e = 2^(-2 log2(e) |x|).

    ``x``: exact arguments, ``x_error``: what the computed ones are off by. An e that is off by a
    factor within exp(+-f) moves the quotient by 2 e (exp(f) - 1) / (1 + e)^2 at most; sum,
    difference and quotient round.
    """
    least, most = np.maximum(np.abs(x) - x_error, 0.0), np.abs(x) + x_error
    # Of the exponent: its factor and its product. Where 1e6 is exceeded e is 0 in any case.
    exponent = (1 + LOG2E_ERROR) * (1 + U32) - 1
    f = 2 * exponent * np.minimum(most, 1e6) + EXP2_LOG_ERROR
    e = np.exp(-2 * least)
    moved = 2 * e * np.expm1(f) / ((1 + e) * (1 + e * np.exp(-f))) + 2 * FLUSHED
    passed = np.minimum(x_error * (1 - np.tanh(least) ** 2), 2.0)
    roundings = (1 + U32) ** 2 / (1 - U32) - 1
    return np.asarray(passed + rounded_error(np.tanh(most), moved, roundings + 4 * U64))


def e4m3_error(x: Float64Array, scale: Float64Array, *, exact_scale: bool = True) -> Float64Array:
    """Error of e4m3(x / scale) * scale stored as bfloat16, for |x| <= 448 scale; any shape.

    Half the spacing of e4m3, which has three fraction bits from 2^-6 on and is 2^-9 apart below.
    ``exact_scale``: the scale is a power of two, so that division and product are exact, and
    bfloat16 holds the result. Otherwise all three round, each a number of at most 17/16 |x|.
    """
    quotient = np.abs(x) / scale
    if exact_scale:
        return _e4m3_half_step(quotient) * scale
    # The quotient may round across the edge of a binade, where the spacing doubles.
    step = _e4m3_half_step(quotient * (1 + 2 * U32)) * scale
    return step + (2 * U32 + U_BF16) * (np.abs(x) + step)


def _e4m3_half_step(x: Float64Array) -> Float64Array:
    exponent = np.frexp(np.maximum(x, 2.0**-6))[1] - 1
    return np.ldexp(2.0**-4, exponent)
