"""Stochastic rounding of ``cvt.rs``: the caller brings the random bits.

The random bits are added to the discarded bits of the significand, top bit to top bit, and the
carry decides: away from zero, or toward it. Source: PTX ISA 9.1, 9.7.9.21. Two things are not in
its text. How one half-word of ``rbits`` serves two operands of the four-element forms (the first
reads it from its other end) is as a B200 was reported to do it. Where more bits are discarded than
usual, in results that are subnormal, this takes the random bits to move along.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simkit.numerics.arrays import Float32Array, Float32Like, as_float32
from simkit.numerics.convert import E2M1, E2M3, E3M2, E5M2, Minifloat

Words = NDArray[np.uint32]


@dataclass(frozen=True)
class Target:
    """A format to round to: widths, the codes of its largest number, infinity (None) and NaN."""

    exponent_bits: int
    fraction_bits: int
    random_bits: int
    largest: int
    infinity: int | None
    nan: int

    @property
    def sign(self) -> int:
        return 1 << (self.exponent_bits + self.fraction_bits)


def _narrow(source: Minifloat, largest: int) -> Target:
    return Target(source.exponent_bits, source.fraction_bits, 16, largest, None, source.nan)


TARGETS = {
    "f16": Target(5, 10, 13, 0x7BFF, 0x7C00, 0x7FFF),
    "bf16": Target(8, 7, 16, 0x7F7F, 0x7F80, 0x7FFF),
    "e4m3": Target(4, 3, 16, 0x7E, None, 0x7F),
    "e5m2": _narrow(E5M2, 0x7B),
    "e3m2": _narrow(E3M2, 0x1F),
    "e2m3": _narrow(E2M3, 0x1F),
    "e2m1": _narrow(E2M1, 0x7),
}
"""Formats of ``cvt.rs`` by name; the narrow ones saturate."""


def float32_to_stochastic(
    x: Float32Like, random: Words, kind: str, *, relu: bool = False, satfinite: bool = False
) -> Words:
    """Codes, as uint32, of float32 ``x`` in a format of `TARGETS`, rounded by ``random``.

    ``random``: the low 13 bits count for f16, 16 for all others. NaN becomes the format's NaN, or
    its largest number if it has none; what is too large infinity, or the largest number in the
    narrow formats and with ``satfinite``. ``relu``: 0 for negative numbers, -0 included.
    """
    target = TARGETS[kind]
    x = as_float32(x, "x")
    bits = np.asarray(x).view(np.uint32)
    field = ((bits >> np.uint32(23)) & np.uint32(0xFF)).astype(np.int64)
    significand = (bits & np.uint32(0x7FFFFF)).astype(np.int64)
    significand += (field > 0).astype(np.int64) << 23
    # Exponents above the format's least normal one; what is below loses as many bits more.
    above = np.maximum(field, 1) - 127 - (2 - (1 << (target.exponent_bits - 1)))
    dropped = 23 - target.fraction_bits + np.maximum(-above, 0)
    # With so many nothing can carry.
    dropped = np.minimum(dropped, target.random_bits + 25)
    used = np.asarray(random, np.uint32).astype(np.int64) & ((1 << target.random_bits) - 1)
    kept = (significand + (used << (dropped - target.random_bits))) >> dropped
    codes = kept + (np.maximum(above, 0) << target.fraction_bits)
    if target.infinity is None or satfinite:
        codes = np.minimum(codes, target.largest)
    else:
        codes = np.minimum(codes, target.infinity)
    negative = np.signbit(x)
    codes = np.where(negative, 0 if relu else codes | target.sign, codes)
    return np.where(np.isnan(x), target.nan, codes).astype(np.uint32)


def random_of_pair(rbits: Words) -> tuple[Words, Words]:
    """The random bits of the operands a and b of the forms of two elements."""
    rbits = np.asarray(rbits, np.uint32)
    return rbits >> np.uint32(16), rbits & np.uint32(0xFFFF)


def random_of_four(rbits: Words, kind: str) -> tuple[Words, Words, Words, Words]:
    """The random bits of the operands a, b, e, f of the forms of four elements.

    8- and 6-bit elements: the upper half-word for a and b, the lower one for e and f. e2m1: the
    upper bytes of both half-words for a and b, the lower ones for e and f. The first operand of
    each pair reads its 16 bits in reverse.
    """
    upper, lower = random_of_pair(rbits)
    if kind == "e2m1":
        byte = np.uint32(0xFF)
        upper, lower = (
            (upper & ~byte) | (lower >> np.uint32(8)),
            ((upper & byte) << np.uint32(8)) | (lower & byte),
        )
    return _reversed(upper), upper, _reversed(lower), lower


def _reversed(x: Words) -> Words:
    """16 bits in reverse."""
    result = np.zeros_like(x)
    for k in range(16):
        result |= ((x >> np.uint32(k)) & np.uint32(1)) << np.uint32(15 - k)
    return result


def pack_pair(a: Float32Array, b: Float32Array, rbits: Words, kind: str, **flags: bool) -> Words:
    """``cvt.rs{.relu}{.satfinite}.f16x2.f32`` and ``bf16x2``: a in the upper half."""
    high, low = (
        float32_to_stochastic(x, random, kind, **flags)
        for x, random in zip((a, b), random_of_pair(rbits), strict=True)
    )
    return np.asarray(low | high << np.uint32(16))


def pack_four(
    a: Float32Array,
    b: Float32Array,
    e: Float32Array,
    f: Float32Array,
    rbits: Words,
    kind: str,
    relu: bool = False,
) -> Words:
    """``cvt.rs{.relu}.satfinite.e4m3x4.f32`` and the like: a in the uppermost place.

    Places are 8 bits wide, for e2m1 4.
    """
    width = np.uint32(4 if kind == "e2m1" else 8)
    packed: Words = np.zeros_like(np.asarray(rbits, np.uint32))
    for x, random in zip((a, b, e, f), random_of_four(rbits, kind), strict=True):
        packed = (packed << width) | float32_to_stochastic(x, random, kind, relu=relu)
    return np.asarray(packed)
