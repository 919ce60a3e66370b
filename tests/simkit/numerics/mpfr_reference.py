"""IEEE arithmetic by MPFR, and operands after TestFloat's recipe, to compare with.

MPFR rounds an exact result once to any precision and exponent range, subnormal numbers included; it
shares nothing with NumPy. Operands come in TestFloat's two kinds: simple patterns (every exponent,
fractions of few ones or few zeros) and random numbers, weighted towards those that interact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gmpy2
import numpy as np
from numpy.typing import NDArray

ROUNDINGS = {
    "rn": gmpy2.RoundToNearest,
    "rz": gmpy2.RoundToZero,
    "rm": gmpy2.RoundDown,
    "rp": gmpy2.RoundUp,
}


@dataclass(frozen=True)
class Format:
    """A binary format by its widths; numbers are held in float32 whatever the format."""

    name: str
    exponent_bits: int
    fraction_bits: int

    @property
    def width(self) -> int:
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def bias(self) -> int:
        return int((1 << (self.exponent_bits - 1)) - 1)

    def context(self, mode: str) -> Any:
        # MPFR's significands are below 1: its exponents are greater by one.
        return gmpy2.context(
            precision=self.fraction_bits + 1,
            emax=self.bias + 1,
            emin=2 - self.bias - self.fraction_bits,
            subnormalize=True,
            round=ROUNDINGS[mode],
        )

    def values(self, codes: NDArray[np.uint32]) -> NDArray[np.float32]:
        """float32 values of bit patterns, by arithmetic alone."""
        fraction = (codes & np.uint32((1 << self.fraction_bits) - 1)).astype(np.int64)
        field = (codes >> np.uint32(self.fraction_bits)).astype(np.int64)
        field &= (1 << self.exponent_bits) - 1
        negative = (codes >> np.uint32(self.width - 1)).astype(bool)
        significand = fraction + ((field > 0).astype(np.int64) << self.fraction_bits)
        scale = np.maximum(field, 1) - self.bias - self.fraction_bits
        values = np.ldexp(significand.astype(np.float64), scale)
        is_special = field == (1 << self.exponent_bits) - 1
        values = np.where(is_special, np.where(fraction == 0, np.inf, np.nan), values)
        return np.where(negative, -values, values).astype(np.float32)


FLOAT32 = Format("float32", 8, 23)
FLOAT16 = Format("float16", 5, 10)
BFLOAT16 = Format("bfloat16", 8, 7)


def _patterns(rng: np.random.Generator, fmt: Format, field: NDArray[np.int64]) -> NDArray[Any]:
    """Codes with given exponent fields (clipped) and fractions of four kinds."""
    n, p = field.size, fmt.fraction_bits
    everything = (1 << p) - 1
    few = (1 << rng.integers(0, p, n)) | (1 << rng.integers(0, p, n))
    few = np.where(rng.random(n) < 0.3, few & -few, few)
    runs = everything >> rng.integers(0, p, n)
    kinds = [few, everything ^ few, runs, everything ^ runs, rng.integers(0, 1 << p, n), 0 * few]
    fraction = np.choose(rng.integers(0, len(kinds), n), kinds)
    sign = rng.integers(0, 2, n)
    field = np.clip(field, 0, (1 << fmt.exponent_bits) - 1)
    return ((sign << (fmt.width - 1)) | (field << p) | fraction).astype(np.uint32)


def operands(fmt: Format, count: int, number: int, seed: int) -> list[NDArray[np.float32]]:
    """``number`` arrays of ``count`` numbers of ``fmt``, NaNs and infinities among them.

    A fifth each: independent exponents, every one equally often; exponents near each other; a
    product at either end of the range; a third operand near the product; any bits.
    """
    rng = np.random.default_rng(seed)
    top, p = (1 << fmt.exponent_bits) - 1, fmt.fraction_bits
    kind = rng.integers(0, 5, count)
    first = np.arange(count) % (top + 1)
    near = first + rng.integers(-p - 3, p + 4, count)
    end = rng.choice([0, 1, top - 1, fmt.bias], count) + fmt.bias - first
    end += rng.integers(-p - 2, 3, count)
    anywhere = rng.integers(0, top + 1, count)
    second = np.choose(kind, [anywhere, near, end, near, anywhere])
    third = first + second - fmt.bias + rng.integers(-2 * p - 4, 2 * p + 4, count)
    third = np.where(kind == 0, rng.integers(0, top + 1, count), third)
    arrays = []
    for field in (first, second, third)[:number]:
        codes = _patterns(rng, fmt, field)
        raw = rng.integers(0, 1 << fmt.width, count, dtype=np.uint64).astype(np.uint32)
        codes = np.where(kind == 4, raw, codes)
        arrays.append(fmt.values(codes))
    return arrays


def exact(arrays: list[NDArray[np.float32]]) -> list[list[Any]]:
    """Arrays as lists of MPFR numbers of the same values."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        columns = [x.astype(np.float64).tolist() for x in arrays]
    with gmpy2.context(gmpy2.context(precision=53)):
        return [list(map(gmpy2.mpfr, column)) for column in columns]


def computed(name: str, mode: str, fmt: Format, columns: list[list[Any]]) -> NDArray[np.float32]:
    """The operation by MPFR, rounded once to ``fmt``; names as those of PTX."""
    context = fmt.context(mode)
    if name == "rcp":
        name, columns = "div", [[gmpy2.mpfr(1)] * len(columns[0]), *columns]
    results = map(getattr(context, name), *columns)
    return np.fromiter(map(float, results), np.float64).astype(np.float32)
