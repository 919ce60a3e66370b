"""A tensor core in Python integers, written from the published tables alone, to compare with.

Nothing of simkit is used, not even its table of units. A number is an integer times a power of two;
a step aligns the integers, drops what is below the last bit kept, adds, and drops again.
Sources: Fasi, Higham, Mikaitis, Pranesh, PeerJ CS 7:e330 (2021), for V100, T4 and A100; Khattak and
Mikaitis, arXiv 2512.07004, and Xie et al., arXiv 2511.10909, for these and Ada, H100, B200.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NAN = 0x7FFFFFFF


@dataclass(frozen=True)
class Inputs:
    """An input format: fraction bits and the exponent of its least normal number."""

    fraction_bits: int
    least: int
    width: int


INPUTS = {
    "f16": Inputs(10, -14, 16),
    "bf16": Inputs(7, -126, 16),
    "tf32": Inputs(10, -126, 19),
    "e4m3": Inputs(3, -6, 8),
    "e5m2": Inputs(2, -14, 8),
}


@dataclass(frozen=True)
class Unit:
    """Products of one step, bits kept below the greatest exponent, fraction bits of the result.

    ``late``: products of an instruction that adds its accumulator at the end, in two steps of the
    elements 0, 1 and 2, 3 of each four; 0 where the accumulator is a term of every step.
    """

    products: int
    kept: int
    fraction_bits: int = 23
    late: int = 0


UNITS = {
    ("sm_70", "f16"): Unit(4, 23),
    ("sm_75", "f16"): Unit(8, 24),
    ("sm_80", "f16"): Unit(8, 24),
    ("sm_80", "bf16"): Unit(8, 24),
    ("sm_80", "tf32"): Unit(4, 24),
    ("sm_89", "f16"): Unit(8, 24),
    ("sm_89", "bf16"): Unit(8, 24),
    ("sm_89", "tf32"): Unit(4, 24),
    ("sm_89", "e4m3"): Unit(16, 13, 13),
    ("sm_89", "e5m2"): Unit(16, 13, 13),
    ("sm_90", "f16"): Unit(16, 25),
    ("sm_90", "bf16"): Unit(16, 25),
    ("sm_90", "tf32"): Unit(8, 25),
    ("sm_90", "e4m3"): Unit(32, 13, 13),
    ("sm_90", "e5m2"): Unit(32, 13, 13),
    ("sm_100", "f16"): Unit(16, 25),
    ("sm_100", "bf16"): Unit(16, 25),
    ("sm_100", "tf32"): Unit(8, 25),
    ("sm_100", "e4m3"): Unit(32, 25),
    ("sm_100", "e5m2"): Unit(32, 25),
}
FP8_BY_F16 = Unit(16, 25, late=32)
"""mma.sync with fp8 inputs on sm_90 and sm_100."""


def integers(
    x: NDArray[np.float32], fraction_bits: int, least: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Each row's elements as significands and exponents: x = s * 2^(e - fraction_bits)."""
    finite = np.where(np.isfinite(x), x, 0).astype(np.float64)
    exponents = np.maximum(np.frexp(finite)[1] - 1, least)
    significands = np.ldexp(finite, fraction_bits - exponents)
    assert np.array_equal(significands, np.rint(significands)), "not a number of the format"
    return significands.astype(np.int64).tolist(), exponents.tolist()


def shifted(value: int, shift: int) -> int:
    """``value * 2^shift`` with what is below 1 dropped, toward zero."""
    if shift >= 0:
        return value << shift
    return value >> -shift if value >= 0 else -(-value >> -shift)


def step(terms: list[tuple[int, int, int]], kept: int, fraction_bits: int, to_f16: bool) -> float:
    """A sum of terms (integer, the power of two it counts, the exponent it aligns by)."""
    greatest = max([-126, *(e for v, _, e in terms if v)])
    unit = greatest - kept
    total = sum(shifted(v, p - unit) for v, p, _ in terms if v)
    least, bits, top = (-14, 10, 15) if to_f16 else (-126, fraction_bits, 127)
    size = abs(total)
    if not size:
        return 0.0
    drop = max(size.bit_length() - 1 + unit, least) - bits - unit
    if drop > 0:
        rest = size & ((1 << drop) - 1)
        size >>= drop
        half = 1 << (drop - 1)
        if to_f16 and (rest > half or (rest == half and size & 1)):
            size += 1
        unit += drop
    if size and size.bit_length() - 1 + unit > top:
        return math.copysign(math.inf, total)
    return math.copysign(math.ldexp(size, unit), total) if size else 0.0


def special(a: list[float], b: list[float], c: float) -> float | None:
    """The result where an operand is infinite or NaN; None where all are finite."""
    products = [x * y for x, y in zip(a, b, strict=True) if not math.isfinite(x * y)]
    values = [*products, c]
    if all(map(math.isfinite, values)):
        return None
    if any(map(math.isnan, values)) or {math.inf, -math.inf} <= set(values):
        return math.nan
    return next(v for v in values if math.isinf(v))


def f16(x: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float16(x))


def dot(
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    c: NDArray[np.float32],
    unit: Unit,
    formats: tuple[str, str],
    to_f16: bool = False,
) -> NDArray[np.uint32]:
    """Bits of the rows' dot products: a, b [cases, K] of two input formats, c [cases]."""
    of_a, of_b = INPUTS[formats[0]], INPUTS[formats[1]]
    if unit.late:
        # Widened to f16, where a subnormal number of fp8 may be a normal one.
        of_a = of_b = INPUTS["f16"]
    sa, ea = integers(a, of_a.fraction_bits, of_a.least)
    sb, eb = integers(b, of_b.fraction_bits, of_b.least)
    below = of_a.fraction_bits + of_b.fraction_bits
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values_a, values_b, starts = (x.astype(np.float64).tolist() for x in (a, b, c))
    width = a.shape[1]
    steps = [range(k, min(k + unit.products, width)) for k in range(0, width, unit.products)]
    if unit.late:
        steps = []
        for k in range(0, width, unit.late):
            steps += [[i for i in range(k, k + unit.late) if i % 4 < 2]]
            steps += [[i for i in range(k, k + unit.late) if i % 4 >= 2]]
    results: list[float] = []
    with np.errstate(all="ignore"):
        for row, start in enumerate(starts):
            total = 0.0 if unit.late else start
            for number, chosen in enumerate(steps):
                x, y = ([v[row][k] for k in chosen] for v in (values_a, values_b))
                found = special(x, y, total)
                if found is None:
                    terms = [
                        (sa[row][k] * sb[row][k], e - below, e)
                        for k in chosen
                        for e in (ea[row][k] + eb[row][k],)
                    ]
                    terms.append(_accumulator(total))
                    found = step(terms, unit.kept, unit.fraction_bits, to_f16)
                total = found
                if unit.late and number % 2:
                    start = float(np.float32(total) + np.float32(start))
                    start = f16(start) if to_f16 else start
                    total = start if number + 1 == len(steps) else 0.0
            results.append(total)
        bits = np.array(results, np.float64).astype(np.float32).view(np.uint32)
    bits[np.isnan(results)] = NAN
    return bits


def _accumulator(value: float) -> tuple[int, int, int]:
    """A float32 as a term of a sum."""
    exponent = max(math.frexp(value)[1] - 1, -126)
    return int(math.ldexp(value, 23 - exponent)), exponent - 23, exponent
