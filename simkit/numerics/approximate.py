"""Approximate instructions of PTX: which results the ISA allows, and one of them to compute with.

Hardware keeps to an error bound; which number within it comes out is nowhere written. Each function
has its interval of allowed results, its correctly rounded value, and an adversary that picks any
number of the interval. Source: PTX ISA 9.1, sections in `BOUNDS`. Intervals are float32 arrays
(low, high), both ends allowed, NaN where the result is NaN; f16 and bf16 results are float32 values
that the format represents. The correctly rounded value always belongs to the interval.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.numerics.arrays import CANONICAL_NAN, Float32Array, Float64Array
from simkit.numerics.convert import float64_to_bf16, float64_to_f16
from simkit.numerics.formats import decode_bf16, decode_f16
from simkit.numerics.scalar import round_float64

Interval = tuple[Float32Array, Float32Array]

_TWO_PI, _HUNDRED_PI = 2 * np.pi, 100 * np.pi
_LEAST_NORMAL = 2.0**-126


def ex2_interval(x: Float32Array) -> Interval:
    """``ex2.approx.f32``: 2 ulp from the correctly rounded result; exact at 0 and infinity.

    Results below 2^-151 are taken to be 0, those above 2^128 by more than 2 ulp infinity.
    """
    exact = _exp2(x)
    nearest = round_float64(exact, "rn")
    low, high = _stepped(nearest, -2), _stepped(nearest, 2)
    low = np.maximum(low, np.float32(0))
    certain = (exact < 2.0**-151) | (exact > 2.0**128 * (1 + 2.0**-22)) | (x == 0)
    return _settled(nearest, low, high, certain)


def lg2_interval(x: Float32Array) -> Interval:
    """``lg2.approx.f32``: 2^-22, absolute on (0.5, 2), relative elsewhere; exact at 0 and inf."""
    exact = _log2(x)
    is_near_one = (x > 0.5) & (x < 2)
    error = np.where(is_near_one, 2.0**-22, np.abs(exact) * 2.0**-22)
    return _around(exact, error, np.isinf(exact))


def rcp_interval(x: Float32Array) -> Interval:
    """``rcp.approx.f32``: 1 ulp; exact at 0 and infinity."""
    exact = _reciprocal(x)
    return _around(exact, _ulp(exact), (x == 0) | np.isinf(x))


def sqrt_interval(x: Float32Array) -> Interval:
    """``sqrt.approx.f32``: relative 2^-23; exact at 0 and infinity."""
    exact = _sqrt(x)
    return _around(exact, exact * 2.0**-23, (x == 0) | np.isinf(x))


def rsqrt_interval(x: Float32Array) -> Interval:
    """``rsqrt.approx.f32``: relative 2^-22.9; exact at 0 and infinity."""
    exact = _rsqrt(x)
    return _around(exact, exact * 2.0**-22.9, (x == 0) | np.isinf(x))


def sin_interval(x: Float32Array) -> Interval:
    """``sin.approx.f32``: absolute 2^-20.5 up to 2 pi, 2^-14.7 up to 100 pi; exact at 0.

    Beyond, the ISA promises nothing: [-1, 1].
    """
    return _periodic(np.sin(x.astype(np.float64)), x, x == 0)


def cos_interval(x: Float32Array) -> Interval:
    """``cos.approx.f32``: as `sin_interval`."""
    return _periodic(np.cos(x.astype(np.float64)), x, x == 0)


def tanh_interval(x: Float32Array) -> Interval:
    """``tanh.approx.f32``: relative 2^-11; exact at 0, infinity and for subnormal numbers."""
    exact = _tanh(x)
    return _around(exact, np.abs(exact) * 2.0**-11, np.isinf(x) | (np.abs(x) < _LEAST_NORMAL))


def div_approx_interval(a: Float32Array, b: Float32Array) -> Interval:
    """``div.approx.f32``: 2 ulp for |b| from 2^-126 to 2^126; ``a * 0`` above; exact at specials.

    The ISA says nothing of subnormal b, whose reciprocal may overflow: up to infinity.
    """
    nearest, (low, high) = _quotient(a, b), div_full_interval(a, b)
    size = np.abs(b)
    is_large = (size > np.float32(2.0**126)) & (size < np.inf)
    underflowed = np.multiply(a, np.copysign(np.float32(0), b))
    is_tiny = (size < _LEAST_NORMAL) & (b != 0) & (a != 0) & np.isfinite(a)
    positive = nearest > 0
    high = np.where(is_tiny & positive, np.float32(np.inf), high)
    low = np.where(is_tiny & ~positive, np.float32(-np.inf), low)
    return np.where(is_large, underflowed, low), np.where(is_large, underflowed, high)


def div_full_interval(a: Float32Array, b: Float32Array) -> Interval:
    """``div.full.f32``: 2 ulp; exact at 0 and infinity."""
    exact = np.divide(a, b, dtype=np.float64)
    special = (a == 0) | (b == 0) | np.isinf(a) | np.isinf(b)
    return _around(exact, 2 * _ulp(exact), special)


def ex2_f16_interval(x: Float32Array) -> Interval:
    """``ex2.approx.f16``: relative 2^-9.9; exact at 0 and infinity."""
    exact = _exp2(x)
    return _around(exact, exact * 2.0**-9.9, (x == 0) | np.isinf(x), "f16")


def ex2_bf16_interval(x: Float32Array) -> Interval:
    """``ex2.approx.ftz.bf16``: relative 2^-7; 1 for 0 and subnormal numbers, exact at infinity."""
    exact = _exp2(x)
    certain = (np.abs(x) < _LEAST_NORMAL) | np.isinf(x)
    return _around(exact, exact * 2.0**-7, certain, "bf16")


def tanh_f16_interval(x: Float32Array) -> Interval:
    """``tanh.approx.f16``: absolute 2^-10.987; exact at 0 and infinity."""
    return _around(_tanh(x), 2.0**-10.987, (x == 0) | np.isinf(x), "f16")


def tanh_bf16_interval(x: Float32Array) -> Interval:
    """``tanh.approx.bf16``: absolute 2^-8; exact at 0 and infinity."""
    return _around(_tanh(x), 2.0**-8, (x == 0) | np.isinf(x), "bf16")


def _exp2(x: Float32Array) -> Float64Array:
    return np.asarray(np.exp2(x.astype(np.float64)))


def _log2(x: Float32Array) -> Float64Array:
    return np.asarray(np.log2(x.astype(np.float64)))


def _reciprocal(x: Float32Array) -> Float64Array:
    return np.asarray(1.0 / x.astype(np.float64))


def _sqrt(x: Float32Array) -> Float64Array:
    return np.asarray(np.sqrt(x.astype(np.float64)))


def _rsqrt(x: Float32Array) -> Float64Array:
    return np.asarray(1.0 / np.sqrt(x.astype(np.float64)))


def _sin(x: Float32Array) -> Float64Array:
    return np.asarray(np.sin(x.astype(np.float64)))


def _cos(x: Float32Array) -> Float64Array:
    return np.asarray(np.cos(x.astype(np.float64)))


def _tanh(x: Float32Array) -> Float64Array:
    return np.asarray(np.tanh(x.astype(np.float64)))


def _quotient(a: Float32Array, b: Float32Array) -> Float32Array:
    return np.asarray(np.true_divide(a, b))


def _divided(a: Float32Array, b: Float32Array) -> Float32Array:
    """div.approx rounded: for divisors beyond 2^126, whose reciprocal underflows, ``a * 0``."""
    size = np.abs(b)
    is_large = (size > np.float32(2.0**126)) & (size < np.inf)
    quotient = _quotient(a, b)
    if is_large.any():
        underflowed = np.multiply(a, np.copysign(np.float32(0), b))
        quotient = np.where(is_large, underflowed, quotient)
    return quotient


_ROUND: dict[str, Callable[[Float64Array, str], Float32Array]] = {
    "f32": round_float64,
    "f16": lambda x, mode: decode_f16(float64_to_f16(x, mode)),
    "bf16": lambda x, mode: decode_bf16(float64_to_bf16(x, mode)),
}


def _around(
    exact: Float64Array, error: Any, certain: NDArray[np.bool_], number: str = "f32"
) -> Interval:
    """Numbers of a format within ``error`` of ``exact``; the rounded value where ``certain``."""
    rounded = _ROUND[number]
    nearest = rounded(exact, "rn")
    low, high = rounded(exact - error, "rp"), rounded(exact + error, "rm")
    return _settled(nearest, low, high, certain | ~np.isfinite(exact))


def _settled(
    nearest: Float32Array, low: Float32Array, high: Float32Array, certain: NDArray[np.bool_]
) -> Interval:
    certain = certain | np.isnan(nearest)
    low = np.where(certain, nearest, np.minimum(low, nearest))
    high = np.where(certain, nearest, np.maximum(high, nearest))
    return low.astype(np.float32), high.astype(np.float32)


def _periodic(exact: Float64Array, x: Float32Array, certain: NDArray[np.bool_]) -> Interval:
    size = np.abs(x.astype(np.float64))
    error = np.where(size <= _TWO_PI, 2.0**-20.5, 2.0**-14.7)
    low, high = _around(exact, error, certain)
    is_far = (size > _HUNDRED_PI) & np.isfinite(size)
    return (
        np.where(is_far, np.float32(-1), low).astype(np.float32),
        np.where(is_far, np.float32(1), high).astype(np.float32),
    )


def _ulp(exact: Float64Array) -> Float64Array:
    """The distance of float32 numbers at ``exact``; what is not finite gives rubbish."""
    exponent = np.frexp(np.where(np.isfinite(exact), exact, 1.0))[1] - 1
    return np.asarray(np.ldexp(1.0, np.maximum(exponent, -126) - 23))


def _keys(x: NDArray[Any]) -> NDArray[np.int64]:
    """Integers in the order of the float32, f16 or bf16 numbers with these bits."""
    bits = x.astype(np.int64)
    top = 1 << (8 * x.itemsize - 1)
    return np.where(bits & top, -(bits ^ top), bits)


def _stepped(x: Float32Array, count: int) -> Float32Array:
    """``count`` places up or down, at most to infinity; NaN gives rubbish."""
    keys = np.clip(_keys(x.view(np.uint32)) + count, -0x7F800000, 0x7F800000)
    return _float32_of(keys)


def _float32_of(keys: NDArray[np.int64]) -> Float32Array:
    bits = np.where(keys < 0, -keys | (1 << 31), keys)
    return np.asarray(bits.astype(np.uint32).view(np.float32))


@dataclass(frozen=True)
class Bound:
    """An approximate instruction: PTX ISA section, interval of results, rounded result, format."""

    section: str
    interval: Callable[..., Interval]
    rounded: Callable[..., Float32Array]
    number: str = "f32"


def _bound(
    section: str,
    interval: Callable[[Float32Array], Interval],
    exact: Callable[[Float32Array], Float64Array],
    number: str = "f32",
) -> Bound:
    def rounded(x: Float32Array) -> Float32Array:
        return _ROUND[number](exact(x), "rn")

    return Bound(section, interval, rounded, number)


BOUNDS: dict[str, Bound] = {
    "div.approx": Bound("9.7.3.8", div_approx_interval, _divided),
    "div.full": Bound("9.7.3.8", div_full_interval, _quotient),
    "rcp": _bound("9.7.3.13", rcp_interval, _reciprocal),
    "sqrt": _bound("9.7.3.15", sqrt_interval, _sqrt),
    "rsqrt": _bound("9.7.3.16", rsqrt_interval, _rsqrt),
    "sin": _bound("9.7.3.18", sin_interval, _sin),
    "cos": _bound("9.7.3.19", cos_interval, _cos),
    "lg2": _bound("9.7.3.20", lg2_interval, _log2),
    "ex2": _bound("9.7.3.21", ex2_interval, _exp2),
    "tanh": _bound("9.7.3.22", tanh_interval, _tanh),
    "tanh.f16": _bound("9.7.4.9", tanh_f16_interval, _tanh, "f16"),
    "tanh.bf16": _bound("9.7.4.9", tanh_bf16_interval, _tanh, "bf16"),
    "ex2.f16": _bound("9.7.4.10", ex2_f16_interval, _exp2, "f16"),
    "ex2.bf16": _bound("9.7.4.10", ex2_bf16_interval, _exp2, "bf16"),
}
"""Approximate instructions by opcode, with the variant or the format where there are several."""

CHOICES = ("rounded", "adversarial")


def approximation(name: str, choice: str, seed: int = 0) -> Callable[..., Float32Array]:
    """The function of float32 operands for an instruction of `BOUNDS`.

    ``choice`` "rounded": the correctly rounded result (to within the accuracy of float64's
    functions). "adversarial": a number of the interval that depends on the seed, the instruction
    and the operands' bits alone, so that it is a function, as hardware is, and can be repeated;
    one operand of four gets an end of the interval. NaN results are 0x7FFFFFFF.
    Error: ValueError for another choice.
    """
    if choice not in CHOICES:
        raise ValueError(f"approx must be one of {', '.join(CHOICES)}, got {choice!r}")
    bound = BOUNDS[name]

    def rounded(*operands: Float32Array) -> Float32Array:
        with np.errstate(all="ignore"):
            return _canonical(bound.rounded(*operands))

    def adversarial(*operands: Float32Array) -> Float32Array:
        with np.errstate(all="ignore"):
            low, high = bound.interval(*operands)
            number = _hashed(seed, zlib.crc32(name.encode()), *operands)
            return _canonical(_pick(low, high, number, bound.number))

    return rounded if choice == "rounded" else adversarial


def _canonical(x: Float32Array) -> Float32Array:
    x = np.array(x, np.float32)
    np.copyto(x, CANONICAL_NAN, where=np.isnan(x))
    return x


_BITS: dict[str, Callable[[Float32Array], NDArray[Any]]] = {
    "f32": lambda x: np.ascontiguousarray(x).view(np.uint32),
    "f16": lambda x: float64_to_f16(x.astype(np.float64)),
    "bf16": lambda x: float64_to_bf16(x.astype(np.float64)),
}


def _pick(
    low: Float32Array, high: Float32Array, number: NDArray[np.uint64], kind: str
) -> Float32Array:
    """A number from ``low`` to ``high``, the ends each with probability 1/8 at least."""
    first, last = (_keys(_BITS[kind](x)) for x in (low, high))
    count = np.maximum(last - first + 1, 1).astype(np.uint64)
    chosen = first + ((number >> np.uint64(3)) % count).astype(np.int64)
    which = number & np.uint64(7)
    chosen = np.where(which == 0, first, np.where(which == 1, last, chosen))
    if kind == "f32":
        result = _float32_of(chosen)
    else:
        codes = np.where(chosen < 0, -chosen | (1 << 15), chosen).astype(np.uint16)
        result = decode_f16(codes) if kind == "f16" else decode_bf16(codes)
    # Keeps the sign of zeros, and NaNs.
    return np.where((low == high) | np.isnan(low), low, result)


def _hashed(*parts: Any) -> NDArray[np.uint64]:
    """Pseudo-random 64-bit numbers of integers and float32 arrays (SplitMix64's mixing)."""
    state: NDArray[np.uint64] = np.asarray(0x9E3779B97F4A7C15, np.uint64)
    for part in parts:
        if isinstance(part, int):
            value = np.asarray(part % 2**64, np.uint64)
        else:
            value = np.ascontiguousarray(part).view(np.uint32).astype(np.uint64)
        state = (state ^ value) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state
