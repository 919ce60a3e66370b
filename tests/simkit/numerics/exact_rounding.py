"""Slow rounding of fractions to any float format, and operands that sit on its corners."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Format:
    """A binary float format: significand bits with the leading one, least and largest exponent."""

    precision: int
    min_exponent: int
    max_exponent: int

    @property
    def largest(self) -> Fraction:
        return (2 - Fraction(2) ** (1 - self.precision)) * Fraction(2) ** self.max_exponent


F16 = Format(11, -14, 15)
BF16 = Format(8, -126, 127)
TF32 = Format(11, -126, 127)
F32 = Format(24, -126, 127)
F64 = Format(53, -1022, 1023)


def rounded(exact: Fraction, target: Format, mode: str) -> float:
    """``exact``, not zero, rounded to ``target`` as its definition says; a zero has its sign."""
    sign, size = (-1.0, -exact) if exact < 0 else (1.0, exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, target.min_exponent) - target.precision + 1)
    count, rest = divmod(size, quantum)
    up = {
        "rn": rest * 2 > quantum or (rest * 2 == quantum and count % 2 == 1),
        "rna": rest * 2 >= quantum,
        "rz": False,
        "rm": rest != 0 and sign < 0,
        "rp": rest != 0 and sign > 0,
    }[mode]
    value = (count + up) * quantum
    if value > target.largest:
        outward = mode in ("rn", "rna", "rp" if sign > 0 else "rm")
        return sign * (math.inf if outward else float(target.largest))
    return sign * float(value)


def exact_sqrt(x: Fraction) -> Fraction:
    """A fraction that compares with every float of at most 100 bits as the square root does."""
    bits = 600
    root, scale = math.isqrt((x.numerator << (2 * bits)) // x.denominator), 1 << bits
    approximation = Fraction(root, scale)
    return approximation if approximation**2 == x else approximation + Fraction(1, 4 * scale)


def special_floats(target: Format) -> list[float]:
    """Zeros, ones, the ends of the subnormal and normal ranges, infinities and NaN."""
    step = 2.0 ** (1 - target.precision)
    tiny, top = 2.0**target.min_exponent, float(target.largest)
    positive = [0.0, tiny * step, 3 * tiny * step, tiny - tiny * step, tiny, tiny * (1 + step)]
    positive += [0.5, 1 - step / 2, 1.0, 1 + step, 1.5, 3.0, top / 2, top, math.inf]
    return [*positive, *(-x for x in positive), math.nan]


def pattern_floats(
    rng: np.random.Generator, target: Format, exponents: Sequence[int] | NDArray[np.int64]
) -> NDArray[np.float64]:
    """Numbers of ``target`` with these exponents and simple significands, random signs.

    Significands: a power of two, a power of two plus or minus one place, a few random high bits,
    a few random low bits, all bits random. Values out of range are left out by clipping.
    """
    exponents = np.clip(np.asarray(exponents, np.int64), target.min_exponent, target.max_exponent)
    n, p = exponents.size, target.precision
    top = 1 << (p - 1)
    low, high = rng.integers(0, 8, n), rng.integers(0, 8, n) << (p - 4)
    choices = [
        np.full(n, top),
        top + (1 << rng.integers(0, p - 1, n)),
        2 * top - (1 << rng.integers(0, p - 1, n)),
        top + low,
        np.minimum(top + high + low, 2 * top - 1),
        2 * top - 1 - low,
        top + rng.integers(0, top, n),
        rng.integers(0, top, n),  # subnormal where the exponent is the least one
    ]
    significand = np.choose(rng.integers(0, len(choices), n), choices)
    values = np.ldexp(significand.astype(np.float64), exponents - (p - 1))
    return np.where(rng.random(n) < 0.5, -values, values)
