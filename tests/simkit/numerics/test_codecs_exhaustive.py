"""Every codec on every code, on every 16-bit input and around every rounding boundary.

Against ml_dtypes, and against a codec in fractions that knows a format by its widths alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from simkit.numerics import convert, formats

Float32 = NDArray[np.float32]
Codes = NDArray[Any]


@dataclass(frozen=True)
class Codec:
    """A format, its codec under test, and its type in ml_dtypes.

    ``codes``: of numbers that are finite and not negative, 0 up. ``infinity``: the code of +inf if
    there is one. ``nan``: what a NaN is encoded to. ``shift``: low bits that are no part of a code.
    """

    exponent_bits: int
    fraction_bits: int
    codes: int
    infinity: int | None
    nan: int
    encode: Callable[..., Codes]
    decode: Callable[[Codes], Float32] | None
    dtype: Any
    modes: tuple[str, ...] = ("rn",)
    shift: int = 0
    dtype_of_codes: type = np.uint8

    @property
    def sign(self) -> int:
        return 1 << (self.exponent_bits + self.fraction_bits)


HALF_MODES = ("rn", "rz", "rm", "rp")
CODECS = {
    "e4m3": Codec(4, 3, 0x7F, None, 0x7F, convert.float32_to_e4m3, formats.decode_e4m3,
                  ml_dtypes.float8_e4m3fn),
    "e5m2": Codec(5, 2, 0x7C, None, 0x7F, convert.float32_to_e5m2, convert.e5m2_to_float32,
                  ml_dtypes.float8_e5m2),
    "e2m1": Codec(2, 1, 0x8, None, 0x7, convert.float32_to_e2m1, convert.e2m1_to_float32,
                  ml_dtypes.float4_e2m1fn),
    "e2m3": Codec(2, 3, 0x20, None, 0x1F, convert.float32_to_e2m3, convert.e2m3_to_float32,
                  ml_dtypes.float6_e2m3fn),
    "e3m2": Codec(3, 2, 0x20, None, 0x1F, convert.float32_to_e3m2, convert.e3m2_to_float32,
                  ml_dtypes.float6_e3m2fn),
    "bf16": Codec(8, 7, 0x7F80, 0x7F80, 0x7FFF, convert.float32_to_bf16, formats.decode_bf16,
                  ml_dtypes.bfloat16, HALF_MODES, dtype_of_codes=np.uint16),
    "f16": Codec(5, 10, 0x7C00, 0x7C00, 0x7FFF, convert.float32_to_f16, formats.decode_f16,
                 np.float16, HALF_MODES, dtype_of_codes=np.uint16),
    "tf32": Codec(8, 10, 0x3FC00, 0x3FC00, 0x3FFFF, convert.float32_to_tf32, None, None,
                  ("rna", "rn", "rz"), shift=13, dtype_of_codes=np.uint32),
}  # fmt: skip


def value_of(code: int, codec: Codec) -> Fraction:
    """The number of a code that is finite and not negative, by the format's definition."""
    bias = (1 << (codec.exponent_bits - 1)) - 1
    exponent, fraction = divmod(code, 1 << codec.fraction_bits)
    significand = fraction + (1 << codec.fraction_bits if exponent else 0)
    return Fraction(significand) * Fraction(2) ** (max(exponent, 1) - bias - codec.fraction_bits)


@lru_cache(maxsize=16)
def values_of(name: str) -> NDArray[np.float64]:
    """All finite numbers of a format that are not negative, ascending, as exact float64."""
    codec = CODECS[name]
    exact = [value_of(code, codec) for code in range(codec.codes)]
    rounded = np.array([float(v) for v in exact])
    # int / int is exact in float64 for these: no more than 11 bits, in range.
    sample = range(0, codec.codes, max(1, codec.codes // 5000))
    assert all(Fraction(rounded[k]) == exact[k] for k in sample)
    assert (np.diff(rounded) > 0).all()
    return rounded


def encoded(x: Float32, name: str, mode: str, satfinite: bool) -> Codes:
    """Codes of float32 ``x`` by looking for the numbers on both sides of it."""
    codec, values = CODECS[name], values_of(name)
    with np.errstate(invalid="ignore"):
        size = np.abs(x.astype(np.float64))
    # One more place above the largest number, where a format without end would go on.
    beyond = 2 * values[-1] - values[-2]
    grid = np.append(values, beyond)
    below = np.searchsorted(grid, size, side="right") - 1
    below = np.clip(below, 0, codec.codes - 1)
    low, high = grid[below], grid[below + 1]
    middle = (low + high) / 2  # exact: one more bit
    negative = np.signbit(x)
    up = {
        "rn": (size > middle) | ((size == middle) & (below % 2 == 1)),
        "rna": size >= middle,
        "rz": np.zeros(len(x), bool),
        "rm": negative & (size > low),
        "rp": ~negative & (size > low),
    }[mode]
    codes = below + up
    codes = np.where(np.isinf(x), codec.codes, codes)
    if codec.infinity is None or satfinite:
        codes = np.minimum(codes, codec.codes - 1)
    codes = np.where(negative, codes | codec.sign, codes)
    codes = np.where(np.isnan(x), codec.nan, codes)
    return codes.astype(np.int64)


@lru_cache(maxsize=16)
def boundaries(name: str) -> Float32:
    """float32 around each number of a format and each midpoint: itself, 1 and 2 places beside it.

    Ties, and what is nearly one; beyond the largest number, and below the least.
    """
    values = values_of(name)
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    beyond = 2 * values[-1] - values[-2]
    points = np.append(points, [beyond, (values[-1] + beyond) / 2, 1.5 * beyond, 3.4e38])
    with np.errstate(over="ignore"):
        bits = points.astype(np.float32).view(np.uint32)
    around = np.concatenate([bits + np.uint32(k) for k in (-2 % 2**32, -1 % 2**32, 0, 1, 2)])
    x = around.view(np.float32)
    x = x[np.isfinite(x) & ~np.signbit(x)]
    return np.concatenate([x, -x, np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], np.float32)])


def every_16_bit_input() -> Float32:
    """All bf16 and all f16 numbers, NaNs included."""
    words = np.arange(1 << 16, dtype=np.uint32)
    as_bf16 = (words << np.uint32(16)).view(np.float32)
    as_f16 = words.astype(np.uint16).view(np.float16).astype(np.float32)
    return np.concatenate([as_bf16, as_f16])


def between(name: str, count: int) -> Float32:
    """Random float32, most of them inside the format's range."""
    rng = np.random.default_rng(len(name))
    top = float(np.log2(values_of(name)[-1]))
    low = float(np.log2(values_of(name)[1]))
    x = np.exp2(rng.uniform(max(low - 3, -149), min(top + 1, 127.9), count))
    x = x.astype(np.float32) * rng.choice(np.array([-1, 1], np.float32), count)
    return np.concatenate([x, rng.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)])


TIERS = [
    pytest.param(20_000, id="quick"),
    pytest.param(1_000_000, id="full", marks=pytest.mark.proof),
]


def samples(name: str, count: int) -> Float32:
    """The quick tier takes each 37th of the boundaries of tf32, which are millions."""
    around = boundaries(name)
    if name == "tf32" and count < 1_000_000:
        around = np.concatenate([around[::37], around[-5:]])
    return np.concatenate([every_16_bit_input(), around, between(name, count)])


@pytest.mark.parametrize("name", [n for n, c in CODECS.items() if c.decode])
def test_every_code_decodes(name: str) -> None:
    codec = CODECS[name]
    assert codec.decode is not None
    codes = np.arange(2 * codec.sign).astype(codec.dtype_of_codes)
    actual = codec.decode(codes)
    positive, negative = actual[: codec.sign], actual[codec.sign :]
    number = slice(0, codec.codes)
    np.testing.assert_array_equal(positive[number].astype(np.float64), values_of(name))
    np.testing.assert_array_equal(negative[number].astype(np.float64), -values_of(name))
    assert np.signbit(negative[0])
    special = positive[codec.codes :]
    infinite = special[:1] if name in ("bf16", "f16", "e5m2") else special[:0]
    assert np.isposinf(infinite).all()
    assert np.isnan(special[len(infinite) :]).all()

    as_ml_dtypes = codes.view(codec.dtype).astype(np.float32)
    np.testing.assert_array_equal(actual, as_ml_dtypes)
    signed = ~np.isnan(actual)
    np.testing.assert_array_equal(np.signbit(actual[signed]), np.signbit(as_ml_dtypes[signed]))


@pytest.mark.parametrize("count", TIERS)
@pytest.mark.parametrize("name", CODECS)
def test_encodes_as_its_definition(name: str, count: int) -> None:
    """Every rounding mode, with .relu, and with .satfinite where that is a choice."""
    codec, x = CODECS[name], samples(name, count)
    choices = (False, True) if codec.infinity is not None else (False,)
    for mode in codec.modes:
        for satfinite in choices:
            arguments: dict[str, Any] = {"satfinite": True} if satfinite else {}
            if len(codec.modes) > 1:
                arguments["mode"] = mode
            expected = encoded(x, name, mode, satfinite)
            actual = codec.encode(x, **arguments)
            assert not np.any(actual & ((1 << codec.shift) - 1))
            np.testing.assert_array_equal(actual >> codec.shift, expected, err_msg=mode)
            without = np.where(expected & codec.sign, 0, expected)
            without[np.isnan(x)] = codec.nan
            relu = codec.encode(x, relu=True, **arguments) >> codec.shift
            np.testing.assert_array_equal(relu, without, err_msg=f"{mode}.relu")


@pytest.mark.parametrize("count", TIERS)
@pytest.mark.parametrize("name", [n for n, c in CODECS.items() if c.dtype])
def test_encodes_as_ml_dtypes(name: str, count: int) -> None:
    codec, x = CODECS[name], samples(name, count)
    x = x[~np.isnan(x)]
    largest = np.float32(values_of(name)[-1])
    # What saturates here overflows there.
    source = x if codec.infinity is not None else np.clip(x, -largest, largest)
    with np.errstate(all="ignore"):
        expected = source.astype(codec.dtype).view(codec.dtype_of_codes)
    expected = expected & codec.dtype_of_codes(2 * codec.sign - 1)
    np.testing.assert_array_equal(codec.encode(x), expected)


def test_every_power_of_two_code() -> None:
    """ue8m0: codes are exponents; a NaN at 0xFF."""
    codes = np.arange(256, dtype=np.uint8)
    actual = formats.decode_ue8m0(codes)
    assert [Fraction(float(v)) for v in actual[:255]] == [
        Fraction(2) ** (k - 127) for k in range(255)
    ]
    assert np.isnan(actual[255])
    np.testing.assert_array_equal(actual, codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    for rounding in ("up", "zero"):
        np.testing.assert_array_equal(formats.encode_ue8m0(actual, rounding), codes)


@pytest.mark.parametrize("count", TIERS)
@pytest.mark.parametrize("rounding", ["up", "zero"])
def test_powers_of_two_encode_as_defined(rounding: Any, count: int) -> None:
    """ue8m0: the least power not below |x|, or the greatest not above it; saturating."""
    powers = np.ldexp(1.0, np.arange(-127, 128))
    assert all(Fraction(p) == Fraction(2) ** (k - 127) for k, p in enumerate(powers))
    rng = np.random.default_rng(1)
    near = powers.astype(np.float32).view(np.uint32)
    near = np.concatenate([near + np.uint32(k % 2**32) for k in (-2, -1, 0, 1, 2)])
    raw = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    x = np.concatenate([near, raw, near | np.uint32(1 << 31)]).view(np.float32)
    x = np.concatenate([x, every_16_bit_input()])
    with np.errstate(invalid="ignore"):
        size = np.abs(x.astype(np.float64))
    if rounding == "up":
        expected = np.searchsorted(powers, size, side="left")
    else:
        expected = np.searchsorted(powers, size, side="right") - 1
    expected = np.where(np.isnan(x), 255, np.clip(expected, 0, 254))
    np.testing.assert_array_equal(formats.encode_ue8m0(x, rounding), expected)
