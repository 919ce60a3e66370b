"""Software exp2 and log2 in float32, defined operation by operation.

The kernels' shared header computes the same operations with the same coefficients, so that model
and kernel agree bit for bit, which the approximate instructions ``ex2`` and ``lg2`` do not allow.
"""

from __future__ import annotations

import numpy as np

from simkit.numerics.arrays import CANONICAL_NAN, Float32Array, Float32Like, as_float32
from simkit.numerics.fma import fma

EXP2_COEFFICIENTS: Float32Array = np.array(
    [
        float.fromhex(text)
        for text in (
            "0x1.000000p+0",
            "0x1.62e430p-1",
            "0x1.ebfbdcp-3",
            "0x1.c6af7cp-5",
            "0x1.3b2de0p-7",
            "0x1.5f082ep-10",
            "0x1.416b5ep-13",
        )
    ],
    np.float32,
)
"""C0 .. C6 of 2^f on [-1/2, 1/2]: minimax in relative error with C0 = 1, each coefficient rounded
to float32 before the next is fitted. Relative error 2.992e-9 = 2^-28.3."""

LOG2_COEFFICIENTS: Float32Array = np.array(
    [
        float.fromhex(text)
        for text in (
            "0x1.715476p+1",
            "0x1.ec709ep-1",
            "0x1.2776c6p-1",
            "0x1.a61762p-2",
            "0x1.484b14p-2",
        )
    ],
    np.float32,
)
"""D0 .. D4 with D_i = 2 / (ln 2 * (2 i + 1)): log2(m) = s * (D0 + D1 s^2 + ...), the series of
artanh at s = (m - 1) / (m + 1). What is left out is below 2^-29 for |s| <= 0.1716."""

LN2: np.float32 = np.float32(float.fromhex("0x1.62e430p-1"))
LOG2E: np.float32 = np.float32(float.fromhex("0x1.715476p+0"))

# Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits of the sum.
_ROUND_SHIFT = np.float32(12582912.0)
_SMALLEST = np.float32(-126.0)
_SQRT_HALF_BITS = np.int32(0x3F3504F3)


def exp2(x: Float32Like) -> Float32Array:
    """2^x in float32 for x < 127.5, any shape; below -126 the result is 0, not subnormal.

    -inf gives 0, NaN gives 0x7FFFFFFF; from 127.5 on the result is unspecified. Error at most
    1 ulp. Operations, all float32 and rounded to nearest even::

        t = x + 12582912; n = t - 12582912; f = x - n
        p = C6; p = fma(p, f, C5); ...; p = fma(p, f, C0)
        scale = int_as_float((float_as_int(t) + 127) << 23)
        result = (x < -126) ? 0 : p * scale
    """
    x = as_float32(x, "x")
    with np.errstate(all="ignore"):
        t = np.asarray(np.add(x, _ROUND_SHIFT))
        f = np.subtract(t, _ROUND_SHIFT)
        f = np.asarray(np.subtract(x, f))
        p = np.full(f.shape, EXP2_COEFFICIENTS[-1])
        for coefficient in _EXP2_STEPS:
            fma(p, f, coefficient, out=p)
        scale = np.asarray(np.add(t.view(np.uint32), np.uint32(127)))
        scale <<= np.uint32(23)
        p *= scale.view(np.float32)
        p[np.less(x, _SMALLEST)] = 0
    np.copyto(p, CANONICAL_NAN, where=np.isnan(x))
    return p


def log2(x: Float32Like) -> Float32Array:
    """Base-2 logarithm in float32 of positive normal ``x``, any shape; else unspecified.

    Exact at powers of two. Operations, all float32 and rounded to nearest even, with e and m
    such that x = m * 2^e and m in [sqrt(1/2), sqrt(2))::

        i = float_as_int(x) - 0x3F3504F3; e = i >> 23; m = int_as_float(float_as_int(x) - (e << 23))
        s = (m - 1) / (m + 1); z = s * s
        p = D4; p = fma(p, z, D3); ...; p = fma(p, z, D0)
        result = fma(s, p, (float) e)
    """
    x = as_float32(x, "x")
    bits = np.asarray(x).view(np.int32)
    with np.errstate(all="ignore"):
        exponent = np.asarray(np.subtract(bits, _SQRT_HALF_BITS))
        exponent >>= np.int32(23)
        m = np.asarray(np.subtract(bits, np.left_shift(exponent, np.int32(23)))).view(np.float32)
        s = np.asarray(np.divide(np.subtract(m, np.float32(1)), np.add(m, np.float32(1))))
        z = np.asarray(np.multiply(s, s))
    p = np.full(s.shape, LOG2_COEFFICIENTS[-1])
    for coefficient in _LOG2_STEPS:
        fma(p, z, coefficient, out=p)
    return fma(s, p, exponent.astype(np.float32))


_EXP2_STEPS = tuple(np.array(c) for c in EXP2_COEFFICIENTS[-2::-1])
_LOG2_STEPS = tuple(np.array(c) for c in LOG2_COEFFICIENTS[-2::-1])
