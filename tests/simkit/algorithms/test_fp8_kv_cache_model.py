"""The FP8 KV cache: codes against ml_dtypes and exact fractions, bytes by record."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from simkit.algorithms.fp8_kv_cache import fp8_kv_dequantize, fp8_kv_quantize
from simkit.algorithms.problem import BF16
from simkit.errors import DtypeError, ShapeError
from simkit.layouts.fp8_record import unpack
from simkit.machine.machine import Machine


@st.composite
def tokens(draw: st.DrawFn) -> NDArray[Any]:
    """Tokens whose tiles differ in magnitude, from vanishing to huge, with some zeros."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(1, 5))
    exponents = rng.integers(-60, 60, (count, 9, 1)) * draw(st.sampled_from((0, 1)))
    values = rng.standard_normal((count, 9, 64)) * 2.0**exponents
    values[rng.random(values.shape) < 0.1] = 0
    return values.reshape(count, 576).astype(BF16)


def _smallest_power_at_least(x: Fraction) -> Fraction:
    power = Fraction(1)
    while power < x:
        power *= 2
    while power / 2 >= x:
        power /= 2
    return power


@settings(max_examples=30)
@given(tokens())
def test_records_are_what_the_definition_says(kv: NDArray[Any]) -> None:
    codes, scales, rope = unpack(fp8_kv_quantize(Machine("h100", "device"), kv).cache)
    nope = kv[:, :512].astype(np.float64).reshape(-1, 4, 128)
    for token, tile in np.ndindex(scales.shape):
        amax = Fraction(float(np.abs(nope[token, tile]).max()))
        # The constant is 1e-4; no power of two lies between it and its float32 value.
        expected = _smallest_power_at_least(max(amax / 448, Fraction(1, 10_000)))
        assert Fraction(float(scales[token, tile])) == expected
    scaled = nope / scales[..., None].astype(np.float64)
    expected_codes = scaled.reshape(-1, 512).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(codes, expected_codes.view(np.uint8))
    assert np.array_equal(rope.view(np.uint16), kv[:, 512:].view(np.uint16))


@settings(max_examples=30)
@given(tokens())
def test_what_comes_back(kv: NDArray[Any]) -> None:
    cache = fp8_kv_quantize(Machine("h100", "device"), kv).cache
    out = fp8_kv_dequantize(Machine("h100", "device"), cache).out
    codes, scales, _ = unpack(cache)
    exact = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    exact *= np.repeat(scales, 128, axis=1).astype(np.float64)
    # Four significant bits and a power of two: bfloat16 has them all.
    assert np.array_equal(out[:, :512].astype(np.float64), exact)
    # Half a step of e4m3: 2^-4 of the value, or of the smallest normal number, 2^-6 of the scale.
    nope = kv[:, :512].astype(np.float64)
    step = np.maximum(np.abs(nope) / 16, np.repeat(scales, 128, axis=1) * 2.0**-10)
    assert np.all(np.abs(exact - nope) <= step)
    assert np.array_equal(out[:, 512:].view(np.uint16), kv[:, 512:].view(np.uint16))


@settings(max_examples=30)
@given(tokens())
def test_a_second_pass_changes_nothing(kv: NDArray[Any]) -> None:
    def round_trip(x: NDArray[Any]) -> NDArray[Any]:
        cache = fp8_kv_quantize(Machine("h100", "device"), x).cache
        return fp8_kv_dequantize(Machine("h100", "device"), cache).out

    once = round_trip(kv)
    assert np.array_equal(round_trip(once).view(np.uint16), once.view(np.uint16))


def test_zeros_have_the_smallest_scale() -> None:
    codes, scales, _ = unpack(fp8_kv_quantize(Machine(), np.zeros((1, 576), BF16)).cache)
    assert not codes.any()
    assert np.all(scales == 2.0**-13)  # the power of two above 1e-4


@pytest.mark.parametrize(
    ("amax", "scale"),
    [(448.0, 1.0), (450.0, 2.0), (224.0, 0.5), (896.0, 2.0), (7 * 2.0**40, 2.0**34)],
)
def test_scales_at_powers_of_two(amax: float, scale: float) -> None:
    kv = np.zeros((1, 576), BF16)
    kv[0, [0, 130]] = -amax, 1.0
    _, scales, _ = unpack(fp8_kv_quantize(Machine(), kv).cache)
    assert scales.tolist() == [[scale, 2.0**-8, 2.0**-13, 2.0**-13]]


def test_values_that_are_no_numbers() -> None:
    kv = np.ones((1, 576), BF16)
    kv[0, 0], kv[0, 128], kv[0, 129] = np.nan, np.inf, -np.inf
    cache = fp8_kv_quantize(Machine("h100", "device"), kv).cache
    codes, scales, _ = unpack(cache)
    assert codes[0, 0] == 0x7F
    assert scales[0].tolist() == [2.0**-8, np.inf, 2.0**-8, 2.0**-8]
    # Infinity over an infinite scale is no number; what is finite becomes zero.
    assert codes[0, 128:131].tolist() == [0x7F, 0x7F, 0]
    out = fp8_kv_dequantize(Machine("h100", "device"), cache).out
    assert np.isnan(out[0, [0, 128, 129, 130]].astype(np.float32)).all()
    assert out[0, 1] == 1


def test_bytes_of_a_token() -> None:
    quantizer, dequantizer = Machine("h100", "none"), Machine("h100", "none")
    cache = fp8_kv_quantize(quantizer, np.zeros((6, 576), BF16)).cache
    fp8_kv_dequantize(dequantizer, cache)
    # A lane's two 16-byte accesses are 32 bytes apart from its neighbours': every sector twice.
    bf16 = (6 * 1152, 6 * (2 * 32 + 4) * 32)
    # 512 bytes of codes take 16 sectors in even records and 17 in odd ones, which start in the
    # middle of a sector; the scales take one; RoPE takes five in even records and four in odd.
    record_sectors = 3 * (16 + 1 + 5) + 3 * (17 + 1 + 4)
    moved = {key: (row.requested, row.sectors) for key, row in quantizer.traffic.items()}
    assert moved == {("kv", "read"): bf16, ("cache", "write"): (6 * 656, record_sectors * 32)}
    moved = {key: (row.requested, row.sectors) for key, row in dequantizer.traffic.items()}
    # Every lane reads a scale: 128 bytes requested, 16 of them different.
    assert moved == {
        ("cache", "read"): (6 * (512 + 128 + 128), record_sectors * 32),
        ("out", "write"): bf16,
    }
    assert quantizer.ctas == dequantizer.ctas == 2


def test_every_arithmetic_is_the_same() -> None:
    kv = np.random.default_rng(0).standard_normal((9, 576)).astype(BF16)
    for arithmetic in ("reference", "device", "none"):
        machine = Machine("h100", arithmetic)  # type: ignore[arg-type]
        cache = fp8_kv_quantize(machine, kv).cache
        assert machine.requested_bytes == 9 * (1152 + 656)
        if machine.computes:
            assert np.array_equal(cache, fp8_kv_quantize(Machine("h100", "device"), kv).cache)


def test_what_is_refused() -> None:
    with pytest.raises(DtypeError, match="kv must be bfloat16"):
        fp8_kv_quantize(Machine(), np.zeros((1, 576), np.float32))
    with pytest.raises(ShapeError, match=r"\[tokens, 576\]"):
        fp8_kv_quantize(Machine(), np.zeros((1, 512), BF16))
    with pytest.raises(ShapeError, match="at least one"):
        fp8_kv_dequantize(Machine(), np.zeros((0, 656), np.uint8))
    with pytest.raises(ShapeError, match=r"\[tokens, 656\]"):
        fp8_kv_dequantize(Machine(), np.zeros((1, 584), np.uint8))
