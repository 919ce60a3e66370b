"""Slow float32 arithmetic in exact rationals, written apart from simkit, to compare it with."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

CANONICAL_NAN = 0x7FFFFFFF
POSITIVE_INFINITY = 0x7F800000
SIGN = 0x80000000


def f32(values: Any) -> NDArray[np.float32]:
    """A float32 array of nested lists of numbers."""
    return np.array(values, np.float32)


def to_float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def to_bits(value: float) -> int:
    """Bits of a value that float32 represents."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def floor_log2(x: Fraction) -> int:
    """The integer e with 2^e <= x < 2^(e + 1), for x > 0."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def round_nearest_even(x: Fraction, negative_zero: bool = False) -> int:
    """Bits of the float32 nearest to ``x``; ties to even, overflow to infinity."""
    return _round(x, negative_zero, round)  # round() of a Fraction is to nearest even


def round_toward_zero(x: Fraction, fraction_bits: int = 23) -> int:
    """Bits of ``x`` truncated to ``fraction_bits`` and float32's exponents; overflow to infinity.

    What is truncated to zero is +0.
    """
    bits = _round(x, False, math.trunc, fraction_bits)
    return 0 if bits == SIGN else bits


def _round(
    x: Fraction, negative_zero: bool, rounding: Callable[[Fraction], int], fraction_bits: int = 23
) -> int:
    sign = SIGN if x < 0 or (x == 0 and negative_zero) else 0
    if x == 0:
        return sign
    quantum = Fraction(2) ** (max(floor_log2(abs(x)), -126) - fraction_bits)
    magnitude = rounding(abs(x) / quantum) * quantum
    if magnitude >= Fraction(2) ** 128:
        return sign | POSITIVE_INFINITY
    return sign | to_bits(float(magnitude))


def fma(a: float, b: float, c: float) -> int:
    """Bits of a * b + c rounded once."""
    if math.isnan(a) or math.isnan(b) or math.isnan(c):
        return CANONICAL_NAN
    negative_product = math.copysign(1, a) * math.copysign(1, b) < 0
    if math.isinf(a) or math.isinf(b):
        if a == 0 or b == 0 or (math.isinf(c) and (c < 0) != negative_product):
            return CANONICAL_NAN
        return POSITIVE_INFINITY | (SIGN if negative_product else 0)
    if math.isinf(c):
        return to_bits(c)
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    both_negative = negative_product and math.copysign(1, c) < 0
    return round_nearest_even(exact, negative_zero=both_negative and c == 0)


def exponent(x: float, least: int) -> int:
    """Exponent of ``x`` as a format with the least normal exponent ``least`` stores it."""
    return max(floor_log2(abs(Fraction(x))), least)


def dot_step(
    a: list[float],
    b: list[float],
    c: float,
    fraction_bits: int,
    input_least: int,
    output_bits: int,
) -> int:
    """Bits of one tensor-core step: the published model, term by term in rationals."""
    if any(map(math.isnan, [*a, *b, c])):
        return CANONICAL_NAN
    infinities = set()
    for x, y in [*zip(a, b, strict=True), (c, 1.0)]:
        if math.isinf(x) or math.isinf(y):
            if x == 0 or y == 0:
                return CANONICAL_NAN
            infinities.add(math.copysign(1, x) * math.copysign(1, y))
    if infinities:
        if len(infinities) == 2:
            return CANONICAL_NAN
        return POSITIVE_INFINITY | (SIGN if infinities == {-1.0} else 0)
    terms = [
        (exponent(x, input_least) + exponent(y, input_least), Fraction(x) * Fraction(y))
        for x, y in zip(a, b, strict=True)
        if x != 0 and y != 0
    ]
    if c != 0:
        terms.append((exponent(c, -126), Fraction(c)))
    greatest = max([-126, *(e for e, _ in terms)])
    unit = Fraction(2) ** (greatest - fraction_bits)
    return round_toward_zero(sum(math.trunc(v / unit) for _, v in terms) * unit, output_bits)


def dot(
    a: list[float],
    b: list[float],
    c: float,
    terms: int,
    fraction_bits: int,
    input_least: int,
    output_bits: int,
) -> int:
    """Bits of a chain of steps of ``terms`` products."""
    bits = to_bits(c)
    for k in range(0, len(a), terms):
        bits = dot_step(
            a[k : k + terms],
            b[k : k + terms],
            to_float(bits),
            fraction_bits,
            input_least,
            output_bits,
        )
    return bits
