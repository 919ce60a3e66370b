"""IEEE 754 in exact rational arithmetic: what one correctly rounded operation gives, as bits.

Written for the tests alone, from the standard: nothing here is shared with the code under test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

MODES = ("rn", "rz", "rm", "rp")


@dataclass(frozen=True)
class Format:
    """A binary format: bits of exponent and of fraction, and the NaN that PTX instructions make."""

    exponent: int
    fraction: int
    nan: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.fraction

    @property
    def bias(self) -> int:
        return (1 << self.exponent - 1) - 1

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent) - 1) << self.fraction

    @property
    def sign(self) -> int:
        return 1 << self.bits - 1

    @property
    def least_normal(self) -> int:
        return 1 << self.fraction

    def value(self, bits: int) -> Value:
        """The number that ``bits`` stand for."""
        negative, magnitude = bool(bits & self.sign), bits & (self.sign - 1)
        if magnitude > self.infinity:
            return Value(math.nan, negative)
        if magnitude == self.infinity:
            return Value(math.inf, negative)
        exponent, fraction = magnitude >> self.fraction, magnitude & (self.least_normal - 1)
        significand = fraction | (self.least_normal if exponent else 0)
        scale = max(exponent, 1) - self.bias - self.fraction
        return Value(significand * Fraction(2) ** scale, negative)

    def encode(self, value: Value, mode: str = "rn") -> int:
        """The bits of a value rounded to this format."""
        sign = self.sign if value.negative else 0
        magnitude = value.magnitude
        if magnitude != magnitude:
            return self.nan
        if magnitude == math.inf:
            return sign | self.infinity
        if magnitude == 0:
            return sign
        assert isinstance(magnitude, Fraction)
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        if Fraction(2) ** exponent > magnitude:
            exponent -= 1
        step = Fraction(2) ** (max(exponent, 1 - self.bias) - self.fraction)
        count, rest = divmod(magnitude, step)
        away = {
            "rn": rest * 2 > step or (rest * 2 == step and count % 2 == 1),
            "rna": rest * 2 >= step,
            "rz": False,
            "rm": value.negative and rest > 0,
            "rp": not value.negative and rest > 0,
        }[mode]
        count += away
        # Codes of neighbours differ by one, so the count of steps of a binade is its fraction.
        code = count + ((max(exponent, 1 - self.bias) + self.bias - 1) << self.fraction)
        if code >= self.infinity:
            inward = mode == "rz" or (mode == "rm" and not value.negative)
            inward |= mode == "rp" and value.negative
            code = self.infinity - 1 if inward else self.infinity
        return sign | code

    def flush(self, bits: int) -> int:
        """A subnormal number becomes zero of its sign."""
        return bits & self.sign if bits & (self.sign - 1) < self.least_normal else bits

    def saturate(self, bits: int) -> int:
        """Clamped to [0, 1]; NaN and -0 become +0."""
        value = self.value(bits)
        if value.magnitude != value.magnitude or value.negative:
            return 0
        one = self.bias << self.fraction
        return min(bits, one)

    def corners(self, random: int = 12) -> np.ndarray:
        """Zeros, subnormals, numbers around powers of two, the largest, infinity, NaNs; random."""
        one = self.bias << self.fraction
        codes = [0, 1, 2, self.least_normal - 1, self.least_normal, self.least_normal + 1]
        codes += [one - 1, one, one + 1, one + self.least_normal, one + (self.least_normal >> 1)]
        codes += [self.infinity - 1, self.infinity, self.infinity + 1, self.nan & (self.sign - 1)]
        codes += [
            one + (self.fraction << self.fraction),
            one + self.fraction * self.least_normal - 1,
        ]
        generator = np.random.default_rng(self.bits)
        codes += [int(c) for c in generator.integers(0, self.infinity, random)]
        # Near each other, so that sums cancel.
        codes += [one + int(c) for c in generator.integers(0, 1 << self.fraction + 2, random)]
        return np.array(codes + [c | self.sign for c in codes], f"u{self.bits // 8}")


F16 = Format(5, 10, 0x7FFF)
BF16 = Format(8, 7, 0x7FFF)
F32 = Format(8, 23, 0x7FFFFFFF)
F64 = Format(11, 52, 0x7FF8000000000000)


@dataclass(frozen=True)
class Value:
    """A magnitude (a Fraction, infinity or NaN) and a sign, which zeros have too."""

    magnitude: Fraction | float
    negative: bool

    @property
    def is_nan(self) -> bool:
        return self.magnitude != self.magnitude

    @property
    def signed(self) -> Fraction | float:
        return -self.magnitude if self.negative else self.magnitude


NAN = Value(math.nan, False)


def negate(a: Value) -> Value:
    return Value(a.magnitude, not a.negative)


def add(a: Value, b: Value, mode: str = "rn") -> Value:
    """The exact sum; the mode says which zero ``x - x`` is."""
    if a.is_nan or b.is_nan:
        return NAN
    if math.inf in (a.magnitude, b.magnitude):
        both = a.magnitude == b.magnitude
        if both and a.negative != b.negative:
            return NAN
        return a if a.magnitude == math.inf else b
    total = Fraction(a.signed) + Fraction(b.signed)
    if total == 0:
        return Value(Fraction(0), a.negative if a.negative == b.negative else mode == "rm")
    return Value(abs(total), total < 0)


def multiply(a: Value, b: Value) -> Value:
    sign = a.negative != b.negative
    if a.is_nan or b.is_nan:
        return NAN
    if math.inf in (a.magnitude, b.magnitude):
        return NAN if 0 in (a.magnitude, b.magnitude) else Value(math.inf, sign)
    return Value(Fraction(a.magnitude) * Fraction(b.magnitude), sign)


def fma(a: Value, b: Value, c: Value, mode: str = "rn") -> Value:
    return add(multiply(a, b), c, mode)


def divide(a: Value, b: Value) -> Value:
    sign = a.negative != b.negative
    if a.is_nan or b.is_nan or (a.magnitude == b.magnitude and a.magnitude in (0, math.inf)):
        return NAN
    if a.magnitude == math.inf or b.magnitude == 0:
        return Value(math.inf, sign)
    if b.magnitude == math.inf:
        return Value(Fraction(0), sign)
    return Value(Fraction(a.magnitude) / Fraction(b.magnitude), sign)


def square_root(a: Value) -> Value:
    """A value that rounds as the root does: cut after 1200 bits, with a last bit if cut."""
    if a.is_nan or (a.negative and a.magnitude != 0):
        return NAN
    if a.magnitude in (0, math.inf):
        return a
    scaled = Fraction(a.magnitude) * 4**1200
    whole = scaled.numerator // scaled.denominator
    root = math.isqrt(whole)
    exact = root * root == whole and whole == scaled
    return Value((Fraction(root) + (0 if exact else Fraction(1, 2))) / 2**1200, False)


def minimum(a: Value, b: Value) -> Value:
    """A NaN loses against a number; -0 is less than +0."""
    if a.is_nan or b.is_nan:
        return b if a.is_nan else a
    if a.signed == b.signed:
        return a if a.negative else b
    return a if a.signed < b.signed else b


def maximum(a: Value, b: Value) -> Value:
    if a.is_nan or b.is_nan:
        return b if a.is_nan else a
    return negate(minimum(negate(a), negate(b)))
