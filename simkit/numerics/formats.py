"""Codecs between float32 and the narrow formats: bf16, f16, e4m3 and ue8m0.

Encoders return bit patterns, decoders take them; both follow the ``cvt`` instruction of the PTX
ISA (section "Data Movement and Conversion Instructions: cvt"), including its NaN results.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simkit.numerics.arrays import Float32Array, Float32Like, as_float32

BF16_NAN = np.uint16(0x7FFF)
# As arrays: NumPy handles those faster than its scalars.
_BF16_SHIFT, _BF16_MASK = np.array(16, np.uint32), np.array(0xFFFF0000, np.uint32)
_ONE, _BELOW_HALF = np.array(1, np.uint32), np.array(0x7FFF, np.uint32)
F16_NAN = np.uint16(0x7FFF)
E4M3_NAN = np.uint8(0x7F)
UE8M0_NAN = np.uint8(0xFF)

E4M3_MAX = np.float32(448.0)
E4M3_MIN_NORMAL = np.float32(2.0**-6)

# Adding 2^14 to |x| < 2^-6 leaves a float32 whose last place is 2^-9, the e4m3 subnormal step:
# the addition itself rounds to nearest even, and the low bits of the sum are the code.
_E4M3_SUBNORMAL_SHIFT = np.float32(2.0**14)


def encode_bf16(x: Float32Like) -> NDArray[np.uint16]:
    """bf16 bits of float32 ``x``, any shape: ``cvt.rn.bf16.f32``.

    Round to nearest even; overflow gives infinity; every NaN becomes 0x7FFF.
    """
    rounded = _rounded_to_bf16(as_float32(x, "x"))
    rounded >>= _BF16_SHIFT
    return np.asarray(rounded.astype(np.uint16))


def encode_bf16x2(low: Float32Like, high: Float32Like) -> NDArray[np.uint32]:
    """bf16 bits of two float32 arrays of one shape, ``high`` above ``low`` in each word:
    ``cvt.rn.bf16x2.f32``. Rounded as in `encode_bf16`.
    """
    words = _rounded_to_bf16(as_float32(low, "low"))
    words >>= _BF16_SHIFT
    upper = _rounded_to_bf16(as_float32(high, "high"))
    upper &= _BF16_MASK
    words |= upper
    return words


def _rounded_to_bf16(x: Float32Array) -> NDArray[np.uint32]:
    """Words whose upper halves are the bf16 bits of ``x``; their lower halves are leftovers."""
    bits = x.view(np.uint32)
    rounded = np.asarray(bits >> _BF16_SHIFT)
    rounded &= _ONE
    rounded += _BELOW_HALF
    rounded += bits  # wraps for some NaNs, which are replaced below
    flat = x.reshape(-1)
    squares = np.vdot(flat, flat)
    if squares != squares:
        np.copyto(rounded, np.uint32(int(BF16_NAN) << 16), where=np.isnan(x))
    return rounded


def decode_bf16(codes: NDArray[np.uint16]) -> Float32Array:
    """float32 value of bf16 bits ``codes`` (uint16, any shape); exact, NaN payloads kept."""
    wide = np.asarray(codes, np.uint16).astype(np.uint32)
    return np.asarray(np.left_shift(wide, np.uint32(16))).view(np.float32)


def round_bf16(x: Float32Like) -> Float32Array:
    """float32 ``x`` rounded to the nearest bf16 value (ties to even), as float32."""
    return decode_bf16(encode_bf16(x))


_F16_IN_FLOAT32 = np.int32(-0x70000001)
_F16_SCALE = np.float32(2.0**112)
_F16_MAGNITUDE = np.uint16(0x7FFF)
_F16_INFINITY = 0x7C00


def encode_f16(x: Float32Like) -> NDArray[np.uint16]:
    """f16 bits of float32 ``x``, any shape: ``cvt.rn.f16.f32``; every NaN becomes 0x7FFF."""
    x = as_float32(x, "x")
    with np.errstate(all="ignore"):
        codes = np.asarray(x.astype(np.float16)).view(np.uint16)
    _replace_nan(codes, x, F16_NAN)
    return codes


def decode_f16(codes: NDArray[np.uint16]) -> Float32Array:
    """float32 value of f16 bits ``codes`` (uint16, any shape); exact."""
    codes = np.asarray(codes, np.uint16)
    # Exponent and fraction where float32 has them, the sign on top; a product with a power of two
    # sets the exponent right, that of subnormal numbers too.  Several times faster than astype.
    bits = codes.view(np.int16).astype(np.int32)
    bits <<= np.int32(13)
    bits &= _F16_IN_FLOAT32
    values = bits.view(np.float32)
    values *= _F16_SCALE
    if (codes & _F16_MAGNITUDE).max(initial=0) >= _F16_INFINITY:
        special = np.abs(values) >= np.float32(65536)
        bits[special] |= np.int32(0x7F800000)
    return values


def encode_e4m3(x: Float32Like) -> NDArray[np.uint8]:
    """e4m3 bits of float32 ``x``, any shape: ``cvt.rn.satfinite.e4m3x2.f32``, one element each.

    Round to nearest even; magnitudes above 448, infinity included, become 448 with the sign of
    ``x``; every NaN becomes 0x7F.
    """
    x = as_float32(x, "x")
    with np.errstate(all="ignore"):
        magnitude = np.asarray(np.minimum(np.abs(x), E4M3_MAX))
        bits = magnitude.view(np.uint32)
        # Normal: drop 20 of the 23 fraction bits, rebias the exponent from 127 to 7.
        normal = (bits + np.uint32(0x7FFFF) + ((bits >> 20) & np.uint32(1))) >> np.uint32(20)
        normal -= np.uint32((127 - 7) << 3)
        shifted = np.asarray(magnitude + _E4M3_SUBNORMAL_SHIFT).view(np.uint32)
        subnormal = shifted - _E4M3_SUBNORMAL_SHIFT.view(np.uint32)
    codes = np.asarray(np.where(magnitude < E4M3_MIN_NORMAL, subnormal, normal).astype(np.uint8))
    codes |= np.asarray(np.signbit(x), np.uint8) << np.uint8(7)
    _replace_nan(codes, x, E4M3_NAN)
    return codes


def decode_e4m3(codes: NDArray[np.uint8]) -> Float32Array:
    """float32 value of e4m3 bits ``codes`` (uint8, any shape); exact; 0x7F and 0xFF are NaN."""
    return np.asarray(_E4M3_VALUES[np.asarray(codes, np.uint8)])


def encode_ue8m0(x: Float32Like, rounding: Literal["up", "zero"]) -> NDArray[np.uint8]:
    """ue8m0 bits (a power of two, exponent bias 127) of the magnitude of float32 ``x``.

    ``rounding`` "up" is ``cvt.rp.satfinite.ue8m0x2.f32``, "zero" is ``cvt.rz.satfinite``. The
    sign is dropped. Magnitudes above 2^127 saturate to 254, those below 2^-127 (zero too) become
    0; every NaN becomes 0xFF. Source: PTX ISA ``cvt`` and the host emulation in ``cuda_fp8.hpp``.
    """
    if rounding not in ("up", "zero"):
        raise ValueError(f"rounding must be 'up' or 'zero', got {rounding!r}")
    x = as_float32(x, "x")
    bits = np.asarray(np.bitwise_and(x.view(np.uint32), np.uint32(0x7FFFFFFF)))
    exponent = bits >> np.uint32(23)
    if rounding == "up":
        # A float32 subnormal is fraction * 2^-149, and 2^-127 is the fraction 2^22: at most
        # that is code 0, more is code 1. A normal number goes up with any fraction bit set.
        threshold = np.where(exponent == 0, np.uint32(1 << 22), np.uint32(0))
        exponent = exponent + ((bits & np.uint32(0x7FFFFF)) > threshold)
    codes = np.asarray(np.minimum(exponent, np.uint32(254)).astype(np.uint8))
    _replace_nan(codes, x, UE8M0_NAN)
    return codes


def decode_ue8m0(codes: NDArray[np.uint8]) -> Float32Array:
    """float32 value 2^(code - 127) of ue8m0 bits ``codes`` (uint8, any shape); 0xFF is NaN."""
    return np.asarray(_UE8M0_VALUES[np.asarray(codes, np.uint8)])


def _replace_nan(
    codes: NDArray[np.uint16] | NDArray[np.uint8], x: Float32Array, nan: np.generic
) -> None:
    np.copyto(codes, nan, where=np.isnan(x))


def _e4m3_values() -> Float32Array:
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, codes & 7
    significand = np.where(exponent == 0, fraction, fraction + 8)
    values = np.ldexp(significand.astype(np.float32), np.maximum(exponent, 1) - 7 - 3)
    values = np.where(codes & 0x80, -values, values)
    values[[0x7F, 0xFF]] = np.nan
    return values.astype(np.float32)


def _ue8m0_values() -> Float32Array:
    values = np.ldexp(np.float32(1), np.arange(256) - 127).astype(np.float32)
    values[0xFF] = np.nan
    return values


_E4M3_VALUES = _e4m3_values()
with np.errstate(over="ignore"):  # 2^128, the place of the NaN
    _UE8M0_VALUES = _ue8m0_values()
