"""The ``cvt`` instruction of PTX on arrays: one function for each pair of kinds of numbers.

Arrays have any shape. Narrow formats are bit patterns; f16 and bf16 sources are widened first
(`formats.decode_f16`, `formats.decode_bf16`), which is exact. ``mode`` is the PTX rounding
modifier; a conversion rounds once. Source: PTX ISA, "Data Movement and Conversion Instructions:
cvt", including its NaN and saturation rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from simkit.errors import DtypeError
from simkit.numerics.arrays import (
    CANONICAL_NAN,
    Float32Array,
    Float32Like,
    Float64Array,
    as_float32,
)
from simkit.numerics.formats import (
    BF16_NAN,
    E4M3_NAN,
    F16_NAN,
    decode_e4m3,
    encode_bf16,
    encode_e4m3,
    encode_f16,
)
from simkit.numerics.scalar import (
    as_float,
    redirect,
    round_float64,
    round_float64_to_odd,
    round_sum_to_odd,
)

_INTEGRAL: dict[str, Callable[[Any], Any]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}

E4M3_LARGEST = np.uint8(0x7E)
BF16_LARGEST = np.uint16(0x7F7F)
F16_LARGEST = np.uint16(0x7BFF)
TF32_LARGEST = np.uint32(0x7F7FE000)
TF32_NAN = np.uint32(0x7FFFE000)

_F32_SIGN = np.uint32(1 << 31)


def float_to_int(x: NDArray[Any], dtype: DTypeLike, mode: str) -> NDArray[Any]:
    """Float32 or float64 ``x`` as integers ``dtype`` (int8 .. uint64), clamped to their range.

    ``mode``: "rni" nearest even, "rzi" toward zero, "rmi" down, "rpi" up. NaN gives 0 if ``x`` is
    float32 (also a widened f16) and ``dtype`` has at most 32 bits, otherwise the top bit alone.
    """
    x, dtype = as_float(x), np.dtype(dtype)
    if dtype.kind not in "iu":
        raise DtypeError(f"float_to_int gives integers, not {dtype}")
    limits = np.iinfo(dtype)
    above = x.dtype.type(2.0 ** (limits.bits - (dtype.kind == "i")))  # the first one too large
    with np.errstate(all="ignore"):
        whole = np.asarray(_integral(mode)(x))
        np.maximum(whole, x.dtype.type(limits.min), out=whole)
        fits = np.less(whole, above)  # false for NaN
        if np.all(fits):
            return np.asarray(whole.astype(dtype))
        result = np.asarray(np.where(fits, whole, x.dtype.type(0)).astype(dtype))
    np.copyto(result, dtype.type(limits.max), where=np.greater_equal(whole, above))
    if x.dtype == np.float64 or limits.bits == 64:
        top_bit = dtype.type(limits.min or (limits.max >> 1) + 1)
        np.copyto(result, top_bit, where=np.isnan(x))
    return result


def int_to_float(x: NDArray[Any], dtype: DTypeLike, mode: str) -> NDArray[Any]:
    """Integers ``x`` (int8 .. uint64) as float16, float32 or float64 ``dtype``, rounded once.

    ``mode`` is "rn", "rz", "rm" or "rp". For bf16: `int_to_bf16`.
    """
    x, dtype = _as_int(x), np.dtype(dtype)
    if dtype == np.float64:
        high, low = _exact_halves(x)
        nearest = np.asarray(np.add(high, low))
        if mode != "rn":
            # |high| >= 2^32 > low or high is 0: the fast two-sum gives the exact error.
            redirect(nearest, low - (nearest - high), mode)
        return nearest
    odd = _int_to_float64_odd(x)
    if dtype == np.float32:
        return round_float64(odd, mode)
    if dtype == np.float16:
        return float64_to_f16(odd, mode).view(np.float16)
    raise DtypeError(f"int_to_float gives float16, float32 or float64, not {dtype}")


def int_to_bf16(x: NDArray[Any], mode: str) -> NDArray[np.uint16]:
    """bf16 bits of integers ``x`` (int8 .. uint64), rounded once."""
    return float64_to_bf16(_int_to_float64_odd(_as_int(x)), mode)


def int_to_int(x: NDArray[Any], dtype: DTypeLike, saturate: bool = False) -> NDArray[Any]:
    """Integers ``x`` as integers ``dtype``: extended or chopped, or clamped with ``saturate``."""
    x, dtype = _as_int(x), np.dtype(dtype)
    if saturate:
        source, target = np.iinfo(x.dtype), np.iinfo(dtype)
        x = np.clip(x, max(source.min, target.min), min(source.max, target.max))
    return np.asarray(x.astype(dtype))


def round_to_integral(x: NDArray[Any], mode: str) -> NDArray[Any]:
    """Float32 or float64 ``x`` rounded to whole numbers of its type (``cvt.rni.f32.f32``).

    ``mode`` as in `float_to_int`. A zero result keeps the sign of ``x``; a float32 NaN becomes
    0x7FFFFFFF.
    """
    x = as_float(x)
    with np.errstate(all="ignore"):
        result = np.asarray(_integral(mode)(x))
    if x.dtype == np.float32:
        np.copyto(result, CANONICAL_NAN, where=np.isnan(x))
    return result


def float32_to_float64(x: Float32Like) -> Float64Array:
    """float32 ``x`` as float64, exact; the payload of a NaN is kept and made quiet."""
    with np.errstate(all="ignore"):
        return np.asarray(as_float32(x, "x").astype(np.float64))


def float64_to_float32(x: Float64Array, mode: str) -> Float32Array:
    """float64 ``x`` as float32, ``mode`` "rn", "rz", "rm" or "rp"; NaN becomes 0x7FFFFFFF."""
    return round_float64(x, mode)


def float32_to_bf16(
    x: Float32Like, mode: str = "rn", *, relu: bool = False, satfinite: bool = False
) -> NDArray[np.uint16]:
    """bf16 bits of float32 ``x``; ``mode`` "rn", "rz", "rm" or "rp"; NaN becomes 0x7FFF.

    ``relu``: 0 for negative numbers, -0 included. ``satfinite``: the largest finite number in
    place of infinity, whether ``x`` was infinite or the rounding made it so.
    """
    x = as_float32(x, "x")
    if mode == "rn":
        codes = encode_bf16(x)
    else:
        codes = np.asarray((_drop_bits(x, 16, mode) >> np.uint32(16)).astype(np.uint16))
        np.copyto(codes, BF16_NAN, where=np.isnan(x))
    return _limited(codes, BF16_LARGEST, BF16_NAN, relu, satfinite)


def float32_to_f16(
    x: Float32Like, mode: str = "rn", *, relu: bool = False, satfinite: bool = False
) -> NDArray[np.uint16]:
    """f16 bits of float32 ``x``; arguments and NaN as in `float32_to_bf16`."""
    x = as_float32(x, "x")
    if mode == "rn":
        codes = encode_f16(x)
    else:
        with np.errstate(all="ignore"):
            nearest = np.asarray(x.astype(np.float16))
            redirect(nearest, np.subtract(x, nearest), mode)
        codes = nearest.view(np.uint16)
        np.copyto(codes, F16_NAN, where=np.isnan(x))
    return _limited(codes, F16_LARGEST, F16_NAN, relu, satfinite)


def float64_to_bf16(x: Float64Array, mode: str = "rn") -> NDArray[np.uint16]:
    """bf16 bits of float64 ``x``, rounded once; ``mode`` and NaN as in `float32_to_bf16`."""
    return float32_to_bf16(round_float64_to_odd(x), mode)


def float64_to_f16(x: Float64Array, mode: str = "rn") -> NDArray[np.uint16]:
    """f16 bits of float64 ``x``, rounded once; ``mode`` and NaN as in `float32_to_bf16`."""
    return float32_to_f16(round_float64_to_odd(x), mode)


def float32_to_tf32(
    x: Float32Like, mode: str = "rna", *, relu: bool = False, satfinite: bool = False
) -> NDArray[np.uint32]:
    """float32 bits of ``x`` rounded to tf32, the low 13 bits zero; NaN becomes 0x7FFFE000.

    ``mode`` "rna" (ties away from zero), "rn" or "rz"; the rest as in `float32_to_bf16`.
    """
    x = as_float32(x, "x")
    bits = _drop_bits(x, 13, mode)
    np.copyto(bits, TF32_NAN, where=np.isnan(x))
    return _limited(bits, TF32_LARGEST, TF32_NAN, relu, satfinite)


@dataclass(frozen=True)
class Minifloat:
    """A float format of up to 8 bits: sign, exponent, fraction; its largest number; its NaN.

    ``nan`` is the code that encoding gives for NaN: in the formats without a NaN the largest
    number. ``special_from``: codes (without sign) from here on are infinity, then NaNs.
    """

    exponent_bits: int
    fraction_bits: int
    largest: float
    nan: int
    special_from: int | None = None

    @property
    def bias(self) -> int:
        return int((1 << (self.exponent_bits - 1)) - 1)

    @property
    def sign(self) -> int:
        """The code of -0: the sign bit alone."""
        return int(1 << (self.exponent_bits + self.fraction_bits))


E5M2 = Minifloat(5, 2, 57344.0, 0x7F, special_from=0x7C)
E3M2 = Minifloat(3, 2, 28.0, 0x1F)
E2M3 = Minifloat(2, 3, 7.5, 0x1F)
E2M1 = Minifloat(2, 1, 6.0, 0x7)


def float32_to_e4m3(x: Float32Like, *, relu: bool = False) -> NDArray[np.uint8]:
    """e4m3 bits of float32 ``x``: ``cvt.rn.satfinite.e4m3x2.f32``, one element each.

    To nearest even; beyond 448 the result is 448 with the sign of ``x``; NaN becomes 0x7F.
    ``relu``: 0 for negative numbers, -0 included. Sources f16 and bf16 are widened first.
    """
    return _limited(encode_e4m3(x), E4M3_LARGEST, E4M3_NAN, relu)


def float32_to_e5m2(x: Float32Like, *, relu: bool = False) -> NDArray[np.uint8]:
    """e5m2 bits of float32 ``x`` as `float32_to_e4m3`; largest 57344, NaN becomes 0x7F."""
    return _encode(x, E5M2, relu)


def float32_to_e3m2(x: Float32Like, *, relu: bool = False) -> NDArray[np.uint8]:
    """e3m2 bits (low 6 of uint8) as `float32_to_e4m3`; largest 28, which NaN becomes too."""
    return _encode(x, E3M2, relu)


def float32_to_e2m3(x: Float32Like, *, relu: bool = False) -> NDArray[np.uint8]:
    """e2m3 bits (low 6 of uint8) as `float32_to_e4m3`; largest 7.5, which NaN becomes too."""
    return _encode(x, E2M3, relu)


def float32_to_e2m1(x: Float32Like, *, relu: bool = False) -> NDArray[np.uint8]:
    """e2m1 bits (low 4 of uint8) as `float32_to_e4m3`; largest 6, which NaN becomes too."""
    return _encode(x, E2M1, relu)


def e4m3_to_float32(codes: NDArray[np.uint8]) -> Float32Array:
    """float32 value of e4m3 bits ``codes``, exact; 0x7F and 0xFF are NaN."""
    return decode_e4m3(codes)


def e5m2_to_float32(codes: NDArray[np.uint8]) -> Float32Array:
    """float32 value of e5m2 bits ``codes``, exact; 0x7C is infinity, from 0x7D on NaN."""
    return _decode(codes, E5M2)


def e3m2_to_float32(codes: NDArray[np.uint8]) -> Float32Array:
    """float32 value of the low 6 bits of uint8 ``codes`` in e3m2, exact."""
    return _decode(codes, E3M2)


def e2m3_to_float32(codes: NDArray[np.uint8]) -> Float32Array:
    """float32 value of the low 6 bits of uint8 ``codes`` in e2m3, exact."""
    return _decode(codes, E2M3)


def e2m1_to_float32(codes: NDArray[np.uint8]) -> Float32Array:
    """float32 value of the low 4 bits of uint8 ``codes`` in e2m1, exact."""
    return _decode(codes, E2M1)


def _as_int(x: Any) -> NDArray[Any]:
    x = np.asarray(x)
    if x.dtype.kind not in "iu":
        raise DtypeError(f"x must be of an integer type, got {x.dtype}")
    return x


def _integral(mode: str) -> Callable[[Any], Any]:
    if mode not in _INTEGRAL:
        raise ValueError(f"rounding mode must be one of {', '.join(_INTEGRAL)}, got {mode!r}")
    return _INTEGRAL[mode]


def _exact_halves(x: NDArray[Any]) -> tuple[Float64Array, Float64Array]:
    """Integers as a sum of two float64, the first a multiple of 2^32, the second below 2^32."""
    wide = x.astype(np.uint64 if x.dtype.kind == "u" else np.int64)
    high = (wide >> wide.dtype.type(32)).astype(np.float64) * 2.0**32
    low = (wide & wide.dtype.type(0xFFFFFFFF)).astype(np.float64)
    return np.asarray(high), np.asarray(low)


def _int_to_float64_odd(x: NDArray[Any]) -> Float64Array:
    if x.dtype.itemsize < 8:
        return np.asarray(x.astype(np.float64))
    return round_sum_to_odd(*_exact_halves(x))


def _increment(mode: str, bits: int) -> tuple[int, int]:
    """What to add to positive and to negative magnitudes before ``bits`` low bits are cleared."""
    everything = (1 << bits) - 1
    increments = {
        "rz": (0, 0),
        "rm": (0, everything),
        "rp": (everything, 0),
        "rna": (1 << (bits - 1), 1 << (bits - 1)),
        # One less than half; the last bit that stays adds the one at ties.
        "rn": ((1 << (bits - 1)) - 1, (1 << (bits - 1)) - 1),
    }
    if mode not in increments:
        raise ValueError(f"rounding mode must be one of {', '.join(increments)}, got {mode!r}")
    return increments[mode]


def _drop_bits(x: Float32Array, count: int, mode: str) -> NDArray[np.uint32]:
    """Bits of float32 ``x`` rounded so that the low ``count`` are 0; a NaN gives rubbish."""
    bits = x.view(np.uint32)
    positive, negative = _increment(mode, count)
    if positive == negative:
        rounded = np.asarray(bits + np.uint32(positive))
    else:
        rounded = bits + np.where(bits & _F32_SIGN, np.uint32(negative), np.uint32(positive))
    if mode == "rn":
        rounded += (bits >> np.uint32(count)) & np.uint32(1)
    rounded &= np.uint32((1 << 32) - (1 << count))
    return np.asarray(rounded)


def _limited(
    codes: NDArray[Any], largest: np.generic, nan: np.generic, relu: bool, satfinite: bool = False
) -> NDArray[Any]:
    """``codes`` (sign in the top bit, NaN is ``nan``) after ``.satfinite``, ``.relu``; in place."""
    sign = codes.dtype.type(1 << (8 * codes.itemsize - 1))
    if satfinite:
        infinite = ((codes & ~sign) > largest) & (codes != nan)
        np.copyto(codes, (codes & sign) | largest, where=infinite)
    if relu:
        np.copyto(codes, codes.dtype.type(0), where=codes & sign != 0)
    return codes


def _encode(x: Float32Like, target: Minifloat, relu: bool) -> NDArray[np.uint8]:
    """Codes of ``target`` as `encode_e4m3` makes them: the same two ways to round."""
    x = as_float32(x, "x")
    dropped = 23 - target.fraction_bits
    smallest_normal = np.float32(2.0 ** (1 - target.bias))
    # The last place of this number is the subnormal step: adding it rounds to that step.
    shift = np.float32(2.0 ** (1 - target.bias + dropped))
    with np.errstate(all="ignore"):
        magnitude = np.asarray(np.minimum(np.abs(x), np.float32(target.largest)))
        normal = _drop_bits(magnitude, dropped, "rn") >> np.uint32(dropped)
        normal -= np.uint32((127 - target.bias) << target.fraction_bits)
        subnormal = np.asarray(magnitude + shift).view(np.uint32) - shift.view(np.uint32)
    codes = np.where(magnitude < smallest_normal, subnormal, normal).astype(np.uint8)
    negative = np.signbit(x)
    if relu:
        np.copyto(codes, np.uint8(0), where=negative)
    else:
        codes |= negative * np.uint8(target.sign)
    np.copyto(codes, np.uint8(target.nan), where=np.isnan(x))
    return np.asarray(codes)


def _decode(codes: NDArray[np.uint8], source: Minifloat) -> Float32Array:
    values = _VALUES[source]
    return np.asarray(values[np.asarray(codes, np.uint8) & np.uint8(values.size - 1)])


def _values(source: Minifloat) -> Float32Array:
    """The values of all codes of ``source``."""
    codes = np.arange(source.sign)
    exponent = codes >> source.fraction_bits
    significand = codes & ((1 << source.fraction_bits) - 1)
    significand = significand + ((exponent > 0) << source.fraction_bits)
    scale = np.maximum(exponent, 1) - source.bias - source.fraction_bits
    values = np.ldexp(significand.astype(np.float32), scale)
    values = np.concatenate([values, -values]).astype(np.float32)
    if source.special_from is not None:
        code = np.arange(values.size) % source.sign
        values[code == source.special_from] *= np.inf
        values[code > source.special_from] = CANONICAL_NAN
    return values


_VALUES = {source: _values(source) for source in (E5M2, E3M2, E2M3, E2M1)}
