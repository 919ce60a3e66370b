"""Scalar float arithmetic of PTX on arrays: every rounding mode, and the modifiers of results.

Operands are float32 arrays of any shape, or Python numbers, and broadcast. ``mode`` is the PTX
rounding modifier: "rn" to nearest even, "rz" toward zero, "rm" down, "rp" up. Results are rounded
once from the exact value for every input, subnormals and overflow included, and every NaN result
is 0x7FFFFFFF. Source: PTX ISA, "Floating Point Instructions".
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.errors import DtypeError
from simkit.numerics.arrays import (
    CANONICAL_NAN,
    Float32Array,
    Float32Like,
    Float64Array,
    as_float32,
)
from simkit.numerics.fma import fma as _fma_to_nearest
from simkit.numerics.formats import encode_bf16, encode_f16

ROUNDING_MODES = ("rn", "rz", "rm", "rp")
"""Rounding modifiers of floating-point results."""

_SIGN = np.uint32(1 << 31)
_MAGNITUDE = np.uint32((1 << 31) - 1)
_LARGEST_SUBNORMAL = np.uint32((1 << 23) - 1)


def add(a: Float32Like, b: Float32Like, mode: str = "rn") -> Float32Array:
    """``a + b``. An exact zero sum of operands that are not both +0 is -0 if ``mode`` is "rm"."""
    a, b = as_float32(a, "a"), as_float32(b, "b")
    with np.errstate(all="ignore"):
        if mode == "rn":
            return _canonical(np.asarray(np.add(a, b)))
        return _sum(np.asarray(a.astype(np.float64)), np.asarray(b.astype(np.float64)), mode)


def subtract(a: Float32Like, b: Float32Like, mode: str = "rn") -> Float32Array:
    """``a - b``. ``x - x`` is -0 if ``mode`` is "rm", otherwise +0."""
    return add(a, np.asarray(np.negative(as_float32(b, "b"))), mode)


def multiply(a: Float32Like, b: Float32Like, mode: str = "rn") -> Float32Array:
    """``a * b``."""
    a, b = as_float32(a, "a"), as_float32(b, "b")
    with np.errstate(all="ignore"):
        if mode == "rn":
            return _canonical(np.asarray(np.multiply(a, b)))
        return round_float64(np.multiply(a, b, dtype=np.float64), mode)


def fma(a: Float32Like, b: Float32Like, c: Float32Like, mode: str = "rn") -> Float32Array:
    """``a * b + c``, rounded once. Zero sums have the sign that `add` gives them."""
    if mode == "rn":
        return _fma_to_nearest(a, b, c)
    a, b, c = as_float32(a, "a"), as_float32(b, "b"), as_float32(c, "c")
    with np.errstate(all="ignore"):
        product = np.asarray(np.multiply(a, b, dtype=np.float64))
        return _sum(product, np.asarray(c.astype(np.float64)), mode)


def divide(a: Float32Like, b: Float32Like, mode: str = "rn") -> Float32Array:
    """``a / b``: ``div.rn`` and its directed variants; ``rcp`` with ``a = 1``.

    float64 has 53 >= 2 * 24 + 2 bits, so that a quotient of float32 that is no float32 and no
    midpoint of two stays on its side of them (Figueroa, "When is double rounding innocuous?",
    SIGNUM Newsletter 1995): the float64 quotient is as good as the exact one.
    """
    a, b = as_float32(a, "a"), as_float32(b, "b")
    with np.errstate(all="ignore"):
        if mode == "rn":
            return _canonical(np.asarray(np.divide(a, b)))
        return round_float64(np.divide(a, b, dtype=np.float64), mode)


def sqrt(a: Float32Like, mode: str = "rn") -> Float32Array:
    """Square root; -0 gives -0 and a negative number NaN. float64 suffices as in `divide`."""
    a = as_float32(a, "a")
    with np.errstate(all="ignore"):
        if mode == "rn":
            return _canonical(np.asarray(np.sqrt(a)))
        return round_float64(np.sqrt(a, dtype=np.float64), mode)


def round_float64(x: Float64Array | np.float64, mode: str) -> Float32Array:
    """float64 ``x`` rounded once to float32; exact for every float64.

    If ``x`` is itself an exact value rounded to odd (`fma_odd`), the result is that exact value
    rounded once. Overflow gives infinity or the largest finite number, as ``mode`` demands.
    """
    with np.errstate(all="ignore"):
        nearest = np.asarray(np.asarray(x).astype(np.float32))
        if mode != "rn":
            redirect(nearest, np.subtract(x, nearest, dtype=np.float64), mode)
        return _canonical(nearest)


def redirect(nearest: NDArray[Any], error: NDArray[Any] | np.generic, mode: str) -> None:
    """Turn values rounded to nearest into values rounded in a directed ``mode``, in place.

    ``nearest`` is float16, float32 or float64; ``error`` has the sign of exact value minus
    ``nearest``, 0 where exact, NaN where nothing is to be done.
    """
    if mode not in ROUNDING_MODES[1:]:
        raise ValueError(f"rounding mode must be one of {', '.join(ROUNDING_MODES)}, got {mode!r}")
    bits: NDArray[Any] = nearest.view(f"i{nearest.itemsize}")
    # Neighbours differ by 1 in their bits, from zero to infinity; the sign bit is apart.
    outward = (bits >> (8 * bits.itemsize - 1)) | 1
    if mode == "rm":
        wrong = np.less(error, 0)
        bits -= outward * wrong
    elif mode == "rp":
        wrong = np.greater(error, 0)
        bits += outward * wrong
    else:
        bits -= np.less(np.multiply(error, outward), 0)


def round_sum_to_odd(x: Float64Array, y: Float64Array) -> Float64Array:
    """``x + y`` in float64, rounded to odd: exact, or the neighbour whose last bit is 1.

    The result can be rounded once more to any format of at most 51 bits as if it were exact
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    with np.errstate(all="ignore"):
        total = np.asarray(np.add(x, y))
        error = _sum_error(x, y, total)
        bits = total.view(np.int64)
        above, below = np.greater(error, 0), np.less(error, 0)  # both false for NaN
        inexact = above | below
        if np.any(inexact):
            outward = np.where(above == np.greater(total, 0), np.int64(1), np.int64(-1))
            bits += np.where(inexact & (bits & 1 == 0), outward, np.int64(0))
    return total


def fma_odd(a: Float32Like, b: Float32Like, c: Float32Like) -> Float64Array:
    """``a * b + c`` of float32 operands in float64, rounded to odd.

    For ``fma.rn.f16`` and ``fma.rn.bf16``: hand the result to `encode_f16_once` or
    `encode_bf16_once`. Add and multiply are the cases ``b = 1`` and ``c = -0.0``.
    """
    a, b, c = as_float32(a, "a"), as_float32(b, "b"), as_float32(c, "c")
    with np.errstate(all="ignore"):
        product = np.asarray(np.multiply(a, b, dtype=np.float64))
        return round_sum_to_odd(product, np.asarray(c.astype(np.float64)))


def round_float64_to_odd(x: Float64Array | np.float64) -> Float32Array:
    """float64 ``x`` rounded to odd in float32, so that rounding once more loses nothing."""
    result = round_float64(x, "rz")
    with np.errstate(all="ignore"):
        bits = result.view(np.uint32)
        bits |= np.not_equal(result, x)
    return _canonical(result)


def encode_f16_once(x: Float64Array | np.float64) -> NDArray[np.uint16]:
    """f16 bits of float64 ``x``, to nearest even in one rounding; NaN becomes 0x7FFF."""
    return encode_f16(round_float64_to_odd(x))


def encode_bf16_once(x: Float64Array | np.float64) -> NDArray[np.uint16]:
    """bf16 bits of float64 ``x``, to nearest even in one rounding; NaN becomes 0x7FFF."""
    return encode_bf16(round_float64_to_odd(x))


def fma_f64(a: Any, b: Any, c: Any) -> Float64Array:
    """``a * b + c`` of float64 operands, rounded once to nearest even, for every input.

    Operands broadcast. Error-free transformations do the work where they are exact: ``|a|`` and
    ``|b|`` below 2^990, ``|c|`` below 2^1000, the product from 2^-900 to 2^1000. Other finite
    operands are computed one by one with fractions, slowly. A NaN result is some quiet NaN.
    """
    a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
    with np.errstate(all="ignore"):
        product = np.asarray(np.multiply(a, b))
        result = np.asarray(_fma_error_free(a, b, c, product))
        size = np.abs(product)
        easy = (size >= 2.0**-900) & (size < 2.0**1000) & (np.abs(c) < 2.0**1000)
        easy &= (np.abs(a) < 2.0**990) & (np.abs(b) < 2.0**990)
        if np.all(easy):
            return result
        a, b, c, product = np.broadcast_arrays(a, b, c, product)
        finite = np.isfinite(a) & np.isfinite(b)
        plain = (a == 0) | (b == 0) | ~finite
        np.copyto(result, np.add(product, c), where=plain)
        # A product that overflows is still finite: it must not meet an infinite c.
        settled = ~plain & ~np.isfinite(c)
        np.copyto(result, c, where=settled)
        for index in map(tuple, np.argwhere(~(easy | plain | settled))):
            result[index] = _fma_by_fractions(float(a[index]), float(b[index]), float(c[index]))
    return result


def as_float(x: Any) -> NDArray[Any]:
    """``x`` as a float32 or float64 array; Python numbers become float64."""
    x = np.asarray(x)
    if x.dtype not in (np.float32, np.float64):
        raise DtypeError(f"x must be float32 or float64, got {x.dtype}")
    return x


def flush(x: Float32Like) -> Float32Array:
    """Float32 ``x`` with subnormals replaced by zeros of their sign (``.ftz``); a new array."""
    result = np.array(as_float32(x, "x"))
    bits = result.view(np.uint32)
    # Zero wraps around, so that it is not counted.
    subnormal = np.less(np.subtract(bits & _MAGNITUDE, np.uint32(1)), _LARGEST_SUBNORMAL)
    if np.any(subnormal):
        np.bitwise_and(bits, _SIGN, out=bits, where=subnormal)
    return result


def saturate(x: Any) -> NDArray[Any]:
    """Float32 or float64 ``x`` clamped to [0, 1] (``.sat``); NaN and -0 become +0."""
    x = as_float(x)
    with np.errstate(all="ignore"):
        result = np.asarray(np.fmax(x, x.dtype.type(0)))
        result += x.dtype.type(0)  # -0, which fmax may leave, becomes +0
        np.minimum(result, x.dtype.type(1), out=result)
    return result


def relu(x: Float32Like) -> Float32Array:
    """Float32 ``x`` with +0 for negative numbers and -0 (``.relu``), NaN as 0x7FFFFFFF."""
    with np.errstate(all="ignore"):
        result = np.asarray(np.maximum(as_float32(x, "x"), np.float32(0)))
        result += np.float32(0)
        return _canonical(result)


def propagate_nan(value: Float32Like, *sources: Float32Like) -> Float32Array:
    """``value`` with 0x7FFFFFFF wherever a source is NaN (``min.NaN``, ``max.NaN``)."""
    arrays = [as_float32(source, "source") for source in sources]
    value = as_float32(value, "value")
    shape = np.broadcast_shapes(value.shape, *(x.shape for x in arrays))
    result = np.array(np.broadcast_to(value, shape))
    for x in arrays:
        np.copyto(result, CANONICAL_NAN, where=np.isnan(x))
    return result


def _is_normal(x: Any) -> NDArray[np.bool_]:
    x = as_float(x)
    return np.asarray(np.isfinite(x) & ~_is_subnormal(x))


def _is_subnormal(x: Any) -> NDArray[np.bool_]:
    x = as_float(x)
    return np.asarray((np.abs(x) < np.finfo(x.dtype).tiny) & (x != 0))


PROPERTIES: dict[str, Callable[[Any], NDArray[np.bool_]]] = {
    "finite": lambda x: np.asarray(np.isfinite(x)),
    "infinite": lambda x: np.asarray(np.isinf(x)),
    "number": lambda x: np.asarray(~np.isnan(x)),
    "notanumber": lambda x: np.asarray(np.isnan(x)),
    "normal": _is_normal,
    "subnormal": _is_subnormal,
}
"""The tests of ``testp`` on float32 or float64 arrays. "As a special case, positive and negative
zero are considered normal numbers" (PTX ISA, ``testp``)."""


def _canonical(result: Float32Array) -> Float32Array:
    """``result`` with every NaN replaced by the canonical one, in place."""
    # The sum of squares is NaN just if an element is: the cheapest such test there is.
    squares = np.vdot(result, result)
    if squares != squares:
        np.copyto(result, CANONICAL_NAN, where=np.isnan(result))
    return result


def _sum(x: Float64Array, y: Float64Array, mode: str) -> Float32Array:
    """``x + y`` of float64 arrays rounded once to float32."""
    result = round_float64(round_sum_to_odd(x, y), mode)
    if mode == "rm" and np.count_nonzero(result) != result.size:
        negative = np.signbit(x) | np.signbit(y)
        zero = np.equal(result, 0) & np.equal(np.add(x, y), 0)
        np.copyto(result, np.float32(-0.0), where=zero & negative)
    return result


def _sum_error(x: Float64Array, y: Float64Array, total: Float64Array) -> Float64Array:
    """The exact ``x + y - total`` for ``total`` the rounded sum: Knuth's TwoSum."""
    virtual = total - x
    return np.asarray((x - (total - virtual)) + (y - virtual))


def _fma_error_free(
    a: Float64Array, b: Float64Array, c: Float64Array, product: Float64Array
) -> Float64Array:
    """float64 fma by Boldo and Melquiond's algorithm; ``product`` is the rounded a * b."""
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    # Dekker's product: the exact a * b is product + low.
    low = a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)
    middle = np.asarray(c + low)
    high = np.asarray(product + middle)
    rest = round_sum_to_odd(_sum_error(c, low, middle), _sum_error(product, middle, high))
    return np.asarray(high + rest)


def _split(x: Float64Array) -> tuple[Float64Array, Float64Array]:
    """``x`` as a sum of two numbers of 26 bits (Veltkamp)."""
    scaled = x * (2.0**27 + 1)
    high = scaled - (scaled - x)
    return high, x - high


def _fma_by_fractions(a: float, b: float, c: float) -> float:
    """``a * b + c`` of finite numbers, not both terms zero; int / int rounds correctly."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    try:
        return exact.numerator / exact.denominator
    except OverflowError:
        return np.inf if exact > 0 else -np.inf
