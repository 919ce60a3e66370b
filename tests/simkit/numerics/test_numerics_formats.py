"""Codecs against ml_dtypes over every code, and against the PTX rules where ml_dtypes differs."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal

import exact_arithmetic as exact
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from simkit.errors import DtypeError
from simkit.numerics import formats

ALL_BYTES = np.arange(256, dtype=np.uint8)
ALL_WORDS = np.arange(65536, dtype=np.uint16)
NANS = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32)


def neighbourhood(values: np.ndarray) -> np.ndarray:
    """float32 ``values``, the midpoints of adjacent ones, and the float32 beside each of them."""
    finite = np.unique(values[np.isfinite(values)].astype(np.float64))
    points = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2]).astype(np.float32)
    around = [np.nextafter(points, np.float32(to)) for to in (-np.inf, np.inf)]
    return np.concatenate([points, *around])


def random_float32(n: int, seed: int) -> np.ndarray:
    bits = np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint32)
    x = bits.view(np.float32)
    return x[~np.isnan(x)]


def same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    return x.dtype == y.dtype and x.tobytes() == y.tobytes()


def test_bf16_decodes_every_code() -> None:
    want = ALL_WORDS.view(ml_dtypes.bfloat16).astype(np.float32)
    got = formats.decode_bf16(ALL_WORDS)
    nan = np.isnan(want)
    assert same_bits(got[~nan], want[~nan])
    assert np.isnan(got[nan]).all()


def test_bf16_round_trips_every_code() -> None:
    values = formats.decode_bf16(ALL_WORDS)
    want = np.where(np.isnan(values), formats.BF16_NAN, ALL_WORDS)
    assert same_bits(formats.encode_bf16(values), want)


def test_bf16_rounds_like_ml_dtypes() -> None:
    bits = ALL_WORDS.astype(np.uint32) << 16
    low_halves = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)  # around the midpoint
    x = np.concatenate([(bits | low).view(np.float32) for low in low_halves])
    x = np.concatenate([x[~np.isnan(x)], random_float32(20000, 1)])
    with np.errstate(over="ignore"):
        want = x.astype(ml_dtypes.bfloat16)
    assert same_bits(formats.encode_bf16(x), want.view(np.uint16))
    assert same_bits(formats.round_bf16(x), want.astype(np.float32))


def test_f16_is_numpys() -> None:
    values = formats.decode_f16(ALL_WORDS)
    assert same_bits(formats.encode_f16(values)[~np.isnan(values)], ALL_WORDS[~np.isnan(values)])
    assert formats.encode_f16(exact.f32([65519, 65520, 2**-25, 2**-24])).tolist() == [
        0x7BFF,
        0x7C00,
        0,
        1,
    ]


def test_e4m3_decodes_every_code() -> None:
    want = ALL_BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    got = formats.decode_e4m3(ALL_BYTES)
    nan = np.isnan(want)
    assert nan.nonzero()[0].tolist() == [0x7F, 0xFF]
    assert same_bits(got[~nan], want[~nan])
    assert np.isnan(got[nan]).all()


def test_e4m3_rounds_like_ml_dtypes_up_to_its_maximum() -> None:
    x = neighbourhood(formats.decode_e4m3(ALL_BYTES))
    x = np.concatenate([x, random_float32(20000, 2)])
    x = x[np.abs(x) <= 448]
    want = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert same_bits(formats.encode_e4m3(x), want)


def test_e4m3_saturates() -> None:
    x = exact.f32([448, 464, 465, 1e30, np.inf])
    assert formats.encode_e4m3(x).tolist() == [0x7E] * 5
    assert formats.encode_e4m3(-x).tolist() == [0xFE] * 5


def test_e4m3_keeps_the_sign_of_zero() -> None:
    x = exact.f32([0.0, -0.0, 2**-11, -(2**-11), 2**-10, 2**-10 * 1.01])
    assert formats.encode_e4m3(x).tolist() == [0, 0x80, 0, 0x80, 0, 1]


def test_ue8m0_decodes_every_code() -> None:
    want = ALL_BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    got = formats.decode_ue8m0(ALL_BYTES)
    assert same_bits(got[:255], want[:255])
    assert np.isnan(got[255])


@pytest.mark.parametrize("rounding", ["up", "zero"])
def test_ue8m0_rounds_by_definition(rounding: Literal["up", "zero"]) -> None:
    """The least code whose value is at least |x|, or the greatest whose value is at most |x|."""
    x = np.concatenate([neighbourhood(formats.decode_ue8m0(ALL_BYTES)), random_float32(1000, 3)])
    x = np.concatenate([x, exact.f32([0, -0.0, 2**-149, 3e38]), -x[:200]])
    x = x[np.isfinite(x)]
    powers = [Fraction(2) ** e for e in range(-127, 128)]
    for value, code in zip(x.tolist(), formats.encode_ue8m0(x, rounding).tolist(), strict=True):
        magnitude = abs(Fraction(value))
        if rounding == "up":
            want = next((i for i, p in enumerate(powers) if p >= magnitude), 254)
        else:
            want = max((i for i, p in enumerate(powers) if p <= magnitude), default=0)
        assert code == want, f"{value.hex()} became {code}, not {want}"


def test_ue8m0_specials() -> None:
    for rounding in ("up", "zero"):
        codes = formats.encode_ue8m0(exact.f32([np.inf, -np.inf, np.nan]), rounding)
        assert codes.tolist() == [254, 254, 255]
    with pytest.raises(ValueError, match="nearest"):
        formats.encode_ue8m0(1.0, "nearest")  # type: ignore[arg-type]


def test_every_nan_becomes_the_canonical_one() -> None:
    x = NANS.view(np.float32)
    assert formats.encode_bf16(x).tolist() == [0x7FFF] * 5
    assert formats.encode_f16(x).tolist() == [0x7FFF] * 5
    assert formats.encode_e4m3(x).tolist() == [0x7F] * 5
    assert formats.encode_ue8m0(x, "up").tolist() == [0xFF] * 5


def test_shapes_are_kept() -> None:
    x = np.ones((2, 3, 4), np.float32)[:, ::2]
    codecs: list[tuple[Callable[..., NDArray[Any]], Callable[..., NDArray[Any]]]] = [
        (formats.encode_bf16, formats.decode_bf16),
        (formats.encode_f16, formats.decode_f16),
        (formats.encode_e4m3, formats.decode_e4m3),
        (lambda y: formats.encode_ue8m0(y, "up"), formats.decode_ue8m0),
    ]
    for encode, decode in codecs:
        assert decode(encode(x)).shape == x.shape
        assert decode(encode(np.float32(2))) == 2


def test_only_float32_is_encoded() -> None:
    with pytest.raises(DtypeError, match="float64"):
        formats.encode_bf16(np.ones(3))  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="str"):
        formats.encode_e4m3("1.0")  # type: ignore[arg-type]
