"""cvt against exact fractions, Python integers and the narrow types of ml_dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exact_rounding import (
    BF16,
    F16,
    F32,
    F64,
    TF32,
    Format,
    pattern_floats,
    rounded,
    special_floats,
)
from numpy.typing import NDArray

from simkit.errors import DtypeError
from simkit.numerics import convert, formats

CASES = 1500
FLOAT_MODES = ("rn", "rz", "rm", "rp")
INTEGRAL_MODES = ("rni", "rzi", "rmi", "rpi")
INTEGERS = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)


def float_samples(seed: int, source: Format, lowest: int, highest: int) -> NDArray[np.float64]:
    """Specials and patterns of ``source`` with exponents in a range."""
    rng = np.random.default_rng(seed)
    patterns = pattern_floats(rng, source, rng.integers(lowest, highest + 1, CASES))
    return np.concatenate([special_floats(source), patterns])


def midpoints(seed: int, target: Format) -> NDArray[np.float32]:
    """float32 numbers at, just above and just below the midpoints of ``target``."""
    rng = np.random.default_rng(seed)
    finer = Format(target.precision + 1, target.min_exponent - 1, target.max_exponent)
    exponents = rng.integers(target.min_exponent - 12, target.max_exponent + 1, CASES)
    middle = pattern_floats(rng, finer, exponents).astype(np.float32)
    beyond = np.float32(math.inf)
    with np.errstate(all="ignore"):
        return np.concatenate([middle, np.nextafter(middle, beyond), np.nextafter(middle, -beyond)])


def integer_samples(seed: int, dtype: type) -> NDArray[Any]:
    """Powers of two and neighbours, midpoints of the floats, and random integers of every size."""
    rng = np.random.default_rng(seed)
    limits = np.iinfo(dtype)
    exact = {0, 1, limits.min, limits.max, limits.max - 1}
    for power in range(limits.bits):
        for below in (0, 8, 11, 24, 25, 53, 54):
            for offset in (-1, 0, 1):
                exact.add((1 << power) + ((1 << power) >> below) + offset)
    exact |= {-x for x in exact}
    random = rng.integers(limits.min, limits.max, 2000, dtype, endpoint=True)
    random >>= rng.integers(0, limits.bits, 2000).astype(dtype)
    chosen = sorted(x for x in exact if limits.min <= x <= limits.max)
    return np.concatenate([np.array(chosen, dtype), random])


def reference(x: NDArray[Any], target: Format, mode: str) -> NDArray[np.float64]:
    """Every element rounded exactly; zeros, infinities and NaN as they are."""
    values = [
        rounded(Fraction(v), target, mode) if math.isfinite(v) and v else v for v in x.tolist()
    ]
    return np.array(values, np.float64)


def bits_of(values: NDArray[np.float64], dtype: Any, nan: int) -> NDArray[Any]:
    """Bits of values that ``dtype`` represents, ``nan`` for NaN."""
    with np.errstate(all="ignore"):
        narrow = values.astype(np.float32).astype(dtype)
    codes = narrow.view(f"u{narrow.itemsize}").copy()
    codes[np.isnan(values)] = nan
    return codes


@pytest.mark.parametrize("mode", INTEGRAL_MODES)
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(("source", "source_type"), [(F32, np.float32), (F64, np.float64)])
def test_float_to_int(source: Format, source_type: type, dtype: type, mode: str) -> None:
    x = float_samples(1, source, -4, 66)
    halves = np.arange(-600, 600) / 4
    edges = [2.0**e + d for e in (7, 8, 15, 16, 31, 32, 63, 64) for d in (-1.5, -1, -0.5, 0, 0.5)]
    x = np.concatenate([x, halves, edges, np.negative(edges)]).astype(source_type)
    limits = np.iinfo(dtype)
    whole: dict[str, Callable[[float], int]] = {
        "rni": round,
        "rzi": math.trunc,
        "rmi": math.floor,
        "rpi": math.ceil,
    }
    nan = 0
    if source is F64 or limits.bits == 64:
        nan = limits.min if limits.min else 1 << (limits.bits - 1)

    def expected(v: float) -> int:
        if math.isnan(v):
            return nan
        if math.isinf(v):
            return limits.max if v > 0 else limits.min
        return min(max(whole[mode](v), limits.min), limits.max)

    actual = convert.float_to_int(x, dtype, mode)
    assert actual.dtype == dtype
    assert actual.tolist() == [expected(v) for v in x.tolist()]


def test_nan_to_int_by_hand() -> None:
    nan32, nan64 = np.float32(math.nan), np.float64(math.nan)
    assert convert.float_to_int(nan32, np.int32, "rzi") == 0
    assert convert.float_to_int(nan32, np.uint64, "rzi") == 0x8000000000000000
    assert convert.float_to_int(nan32, np.int64, "rzi") == -0x8000000000000000
    assert convert.float_to_int(nan64, np.int32, "rzi") == -0x80000000
    assert convert.float_to_int(nan64, np.uint32, "rzi") == 0x80000000


@pytest.mark.parametrize("mode", FLOAT_MODES)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_int_to_float(dtype: type, mode: str) -> None:
    x = integer_samples(2, dtype)
    for target, float_type in ((F16, np.float16), (F32, np.float32), (F64, np.float64)):
        actual = convert.int_to_float(x, float_type, mode)
        assert actual.dtype == float_type
        np.testing.assert_array_equal(actual.astype(np.float64), reference(x, target, mode))
        assert not np.signbit(actual[x == 0]).any()
    expected = bits_of(reference(x, BF16, mode), ml_dtypes.bfloat16, 0)
    np.testing.assert_array_equal(convert.int_to_bf16(x, mode), expected)


def test_int_to_float_rounds_once() -> None:
    # Halfway between two float32 and a little more, which float64 cannot hold.
    x = np.array([(1 << 62) + (1 << 38) + 1], np.int64)
    assert convert.int_to_float(x, np.float32, "rn") == 2.0**62 + 2.0**39
    assert convert.int_to_float(-x, np.float32, "rp") == -(2.0**62)


def test_int_to_int() -> None:
    x = np.array([-129, -1, 0, 127, 128, 255, 256, 70000], np.int32)
    chopped = [127, -1, 0, 127, -128, -1, 0, 112]
    assert convert.int_to_int(x, np.int8).tolist() == chopped
    assert convert.int_to_int(x, np.int8, saturate=True).tolist() == [-128, -1, 0] + [127] * 5
    assert convert.int_to_int(x, np.uint8, saturate=True)[3:].tolist() == [127, 128] + [255] * 3
    assert convert.int_to_int(x[1], np.uint64) == 2**64 - 1
    top = np.array([2**64 - 1], np.uint64)
    assert convert.int_to_int(top, np.int64, saturate=True) == 2**63 - 1
    assert convert.int_to_int(top, np.int32) == -1


@pytest.mark.parametrize("mode", INTEGRAL_MODES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_round_to_integral(dtype: type, mode: str) -> None:
    x = np.array([-2.5, -1.5, -0.5, -0.25, -0.0, 0.0, 0.25, 0.5, 1.5, 2.5, 1e30, np.inf], dtype)
    expected = {
        "rni": [-2, -2, -0.0, -0.0, -0.0, 0, 0, 0, 2, 2],
        "rzi": [-2, -1, -0.0, -0.0, -0.0, 0, 0, 0, 1, 2],
        "rmi": [-3, -2, -1, -1, -0.0, 0, 0, 0, 1, 2],
        "rpi": [-2, -1, -0.0, -0.0, -0.0, 0, 1, 1, 2, 3],
    }[mode]
    actual = convert.round_to_integral(x, mode)
    assert actual.dtype == dtype
    np.testing.assert_array_equal(actual[:-2], expected)
    np.testing.assert_array_equal(np.signbit(actual[:-2]), np.signbit(expected))
    np.testing.assert_array_equal(actual[-2:], x[-2:])


def test_nan_among_the_wide_floats() -> None:
    payload = np.array([0xFF800001], np.uint32).view(np.float32)
    assert convert.round_to_integral(payload, "rni").view(np.uint32) == 0x7FFFFFFF
    assert np.isnan(convert.float32_to_float64(payload))
    assert convert.float64_to_float32(np.array([-math.nan]), "rz").view(np.uint32) == 0x7FFFFFFF
    assert convert.float32_to_float64(np.float32(1e-45)) == 2.0**-149


@pytest.mark.parametrize("mode", FLOAT_MODES)
def test_float64_to_float32(mode: str) -> None:
    x = float_samples(3, F64, -155, 130)
    expected = bits_of(reference(x, F32, mode), np.float32, 0x7FFFFFFF)
    np.testing.assert_array_equal(convert.float64_to_float32(x, mode).view(np.uint32), expected)


HALF = [
    (F16, np.float16, convert.float32_to_f16, convert.float64_to_f16),
    (BF16, ml_dtypes.bfloat16, convert.float32_to_bf16, convert.float64_to_bf16),
]


@pytest.mark.parametrize("mode", FLOAT_MODES)
@pytest.mark.parametrize(("target", "dtype", "from_float32", "from_float64"), HALF)
def test_to_half_precision(
    target: Format, dtype: Any, from_float32: Any, from_float64: Any, mode: str
) -> None:
    x = np.concatenate([np.array(special_floats(F32), np.float32), midpoints(4, target)])
    values = reference(x, target, mode)
    expected = bits_of(values, dtype, 0x7FFF)
    np.testing.assert_array_equal(from_float32(x, mode), expected)

    without_negatives = np.where(expected >= 0x8000, 0, expected)
    np.testing.assert_array_equal(from_float32(x, mode, relu=True), without_negatives)
    largest = float(target.largest)
    finite = bits_of(np.clip(values, -largest, largest), dtype, 0x7FFF)
    np.testing.assert_array_equal(from_float32(x, mode, satfinite=True), finite)
    both = from_float32(x, mode, satfinite=True, relu=True)
    np.testing.assert_array_equal(both, np.where(finite >= 0x8000, 0, finite))

    exact = x.astype(np.float64)
    wide = np.concatenate([exact, exact * (1 + 2.0**-45), exact * (1 - 2.0**-45)])
    expected = bits_of(reference(wide, target, mode), dtype, 0x7FFF)
    np.testing.assert_array_equal(from_float64(wide, mode), expected)


@pytest.mark.parametrize("mode", ["rna", "rn", "rz"])
def test_tf32(mode: str) -> None:
    x = np.concatenate([np.array(special_floats(F32), np.float32), midpoints(5, TF32)])
    values = reference(x, TF32, mode)
    expected = bits_of(values, np.float32, 0x7FFFE000)
    np.testing.assert_array_equal(convert.float32_to_tf32(x, mode), expected)
    assert not np.any(expected & 0x1FFF)
    largest = float(TF32.largest)
    finite = bits_of(np.clip(values, 0, largest), np.float32, 0x7FFFE000)
    np.testing.assert_array_equal(
        convert.float32_to_tf32(x, mode, relu=True, satfinite=True) & 0x7FFFFFFF,
        finite & 0x7FFFFFFF,
    )


NARROW = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 0x7F, 8),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0, 0x7F, 8),
    "e3m2": (ml_dtypes.float6_e3m2fn, 28.0, 0x1F, 6),
    "e2m3": (ml_dtypes.float6_e2m3fn, 7.5, 0x1F, 6),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0, 0x07, 4),
}


@pytest.mark.parametrize("name", NARROW)
def test_narrow_formats_decode_as_ml_dtypes(name: str) -> None:
    dtype, _, _, bits = NARROW[name]
    codes = np.arange(1 << bits, dtype=np.uint8)
    actual = getattr(convert, f"{name}_to_float32")(codes)
    expected = codes.view(dtype).astype(np.float32)
    np.testing.assert_array_equal(actual, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual[number]), np.signbit(expected[number]))


@pytest.mark.parametrize("name", NARROW)
def test_narrow_formats_encode_as_ml_dtypes(name: str) -> None:
    dtype, largest, nan, bits = NARROW[name]
    values = np.arange(1 << (bits - 1), dtype=np.uint8).view(dtype).astype(np.float32)
    values = values[np.isfinite(values)]
    middle = (values[1:] + values[:-1]) / 2
    rng = np.random.default_rng(6)
    patterns = pattern_floats(rng, F32, rng.integers(-24, 20, CASES)).astype(np.float32)
    special = np.array(special_floats(F32), np.float32)
    x = np.concatenate([values, middle, patterns])
    for neighbour in (0.0, math.inf):
        x = np.concatenate([x, np.nextafter(middle, np.float32(neighbour))])
    x = np.concatenate([x, -x, special])
    encode = getattr(convert, f"float32_to_{name}")

    clipped = np.clip(np.where(np.isnan(x), 0, x), -largest, largest).astype(np.float32)
    expected = clipped.astype(dtype).view(np.uint8) & ((1 << bits) - 1)
    expected[np.isnan(x)] = nan
    np.testing.assert_array_equal(encode(x), expected)
    sign = 1 << (bits - 1)
    np.testing.assert_array_equal(encode(x, relu=True), np.where(expected & sign, 0, expected))


def test_narrow_formats_by_hand() -> None:
    one = np.float32(1)
    assert convert.float32_to_e5m2(one) == 0x3C
    assert convert.float32_to_e4m3(one) == 0x38
    assert convert.float32_to_e3m2(one) == 0x0C
    assert convert.float32_to_e2m3(one) == 0x08
    assert convert.float32_to_e2m1(one) == 0x02
    assert convert.float32_to_e5m2(np.float32(-math.inf)) == 0xFB
    assert convert.float32_to_e2m1(np.float32(math.nan)) == 0x07
    # 1.125 + 2^-20 is past the midpoint of e5m2; rounding by way of f16 would lose that.
    assert convert.float32_to_e5m2(np.float32(1.125 + 2.0**-20)) == 0x3D
    assert convert.float32_to_e5m2(np.float32(1.125)) == 0x3C
    nan = convert.e5m2_to_float32(np.array([0x7D, 0xFF], np.uint8))
    assert nan.view(np.uint32).tolist() == [0x7FFFFFFF, 0x7FFFFFFF]


def test_constants_and_shapes() -> None:
    x = np.ones((32, 2), np.float32)
    for name in NARROW:
        codes = getattr(convert, f"float32_to_{name}")(x)
        assert codes.shape == (32, 2)
        assert getattr(convert, f"{name}_to_float32")(codes).tolist() == x.tolist()
        assert getattr(convert, f"float32_to_{name}")(1.0).shape == ()
    assert convert.float32_to_bf16(1.0, "rz", relu=True, satfinite=True).shape == ()
    assert convert.float32_to_f16(x.T, "rp").shape == (2, 32)
    assert convert.float32_to_tf32(1.0) == 0x3F800000
    assert convert.float_to_int(np.float32(math.inf), np.uint8, "rni") == 255
    assert convert.int_to_float(np.int32(-3), np.float32, "rn") == -3.0


def test_refusals() -> None:
    x = np.ones(1, np.float32)
    for function in (convert.float32_to_f16, convert.float64_to_float32, convert.float32_to_bf16):
        with pytest.raises(ValueError, match="rounding mode"):
            function(x, "rni")
    with pytest.raises(ValueError, match="rni, rzi"):
        convert.float_to_int(x, np.int32, "rn")
    with pytest.raises(ValueError, match="rounding mode"):
        convert.int_to_float(np.int64(3), np.float64, "up")
    with pytest.raises(DtypeError, match="float64"):
        convert.float_to_int(x, np.float64, "rni")
    with pytest.raises(DtypeError, match="float16"):
        convert.float_to_int(x.astype(np.float16), np.int32, "rni")
    with pytest.raises(DtypeError, match="float32"):
        convert.int_to_float(x, np.float32, "rn")
    with pytest.raises(DtypeError, match="uint8"):
        convert.int_to_float(np.int32(1), np.uint8, "rn")


def test_agrees_with_the_nearest_even_encoders() -> None:
    x = midpoints(7, BF16)
    np.testing.assert_array_equal(convert.float32_to_bf16(x), formats.encode_bf16(x))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(
            convert.float32_to_bf16(x), x.astype(ml_dtypes.bfloat16).view(np.uint16)
        )
