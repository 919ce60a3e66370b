"""exp2 and log2: error against float64, exact values, and the definition done by hand."""

from __future__ import annotations

from fractions import Fraction

import exact_arithmetic as exact
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit.numerics.exp2 import EXP2_COEFFICIENTS, LN2, LOG2_COEFFICIENTS, LOG2E, exp2, log2


def ulp_error(got: np.ndarray, want: np.ndarray) -> float:
    """Greatest error of float32 ``got`` in units in the last place of float64 ``want``."""
    ulp = np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)
    return float(np.max(np.abs(got.astype(np.float64) - want) / ulp))


def test_exp2_is_within_one_ulp() -> None:
    rng = np.random.default_rng(1)
    for low, high in ((-126, 127.49), (-1, 1), (-20, 0), (-(2**-10), 2**-10)):
        x = np.concatenate(
            [np.linspace(low, high, 200_001), rng.uniform(low, high, 100_000)]
        ).astype(np.float32)
        assert ulp_error(exp2(x), np.exp2(x.astype(np.float64))) < 0.8


def test_exp2_is_exact_at_integers() -> None:
    n = np.arange(-126, 128)
    assert exp2(n.astype(np.float32)).tolist() == [2.0 ** int(i) for i in n]


def test_exp2_specials() -> None:
    below = np.nextafter(np.float32(-126), np.float32(-127))
    x = exact.f32([-np.inf, -1e30, -1000, below, -126, 0, -0.0, 127.49999])
    assert exp2(x)[:4].view(np.uint32).tolist() == [0, 0, 0, 0]
    assert exp2(x)[4:7].tolist() == [2.0**-126, 1, 1]
    assert np.isfinite(exp2(x)[7])
    nans = np.array([0x7F800001, 0x7FC00000, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert exp2(nans).view(np.uint32).tolist() == [exact.CANONICAL_NAN] * 3


def test_exp2_never_falls_within_a_binade() -> None:
    """The weights of a softmax are ordered as its scores are, between two half-integers."""
    x = np.linspace(-0.5, 0.5, 2**18 + 1)[1:-1].astype(np.float32)
    assert np.all(np.diff(exp2(x)) >= 0)


@settings(max_examples=150)
@given(st.floats(-126, 127.25, width=32))
def test_exp2_is_its_definition(x: float) -> None:
    """The documented operations, one by one, in exact rationals."""
    to_float = exact.to_float
    t = to_float(exact.fma(x, 1.0, 12582912.0))
    n = to_float(exact.fma(t, 1.0, -12582912.0))
    f = to_float(exact.fma(n, -1.0, x))
    p = float(EXP2_COEFFICIENTS[6])
    for coefficient in EXP2_COEFFICIENTS[5::-1].tolist():
        p = to_float(exact.fma(p, f, coefficient))
    scale = to_float(((exact.to_bits(t) + 127) << 23) & 0xFFFFFFFF)
    want = exact.fma(p, scale, -0.0)
    assert exact.to_bits(float(exp2(x))) == want


def test_log2_error() -> None:
    rng = np.random.default_rng(2)
    x = rng.integers(0x00800000, 0x7F800000, 300_000, dtype=np.uint32).view(np.float32)
    near_one = np.linspace(0.5, 2, 300_001).astype(np.float32)
    for sample in (x, near_one[near_one != 1]):
        want = np.log2(sample.astype(np.float64))
        assert ulp_error(log2(sample), want) < 3
        assert np.max(np.abs(log2(sample) - want) / np.maximum(1, np.abs(want))) < 2**-23


def test_log2_is_exact_at_powers_of_two() -> None:
    n = np.arange(-126, 128)
    assert log2(np.ldexp(np.float32(1), n).astype(np.float32)).tolist() == n.tolist()
    assert log2(1.0).view(np.uint32) == 0


@settings(max_examples=150)
@given(st.floats(2.0**-126, 2.0**127, width=32))
def test_log2_is_its_definition(x: float) -> None:
    to_float, rounded = exact.to_float, exact.round_nearest_even
    bits = exact.to_bits(x)
    e = (bits - 0x3F3504F3) >> 23
    m = to_float(bits - (e << 23))
    assert 0.7071 < m < 1.4143
    numerator, denominator = exact.fma(m, 1.0, -1.0), exact.fma(m, 1.0, 1.0)
    s = to_float(rounded(Fraction(to_float(numerator)) / Fraction(to_float(denominator))))
    z = to_float(exact.fma(s, s, -0.0))
    p = float(LOG2_COEFFICIENTS[4])
    for coefficient in LOG2_COEFFICIENTS[3::-1].tolist():
        p = to_float(exact.fma(p, z, coefficient))
    assert exact.to_bits(float(log2(x))) == exact.fma(s, p, float(e))


def test_constants() -> None:
    assert np.float32(np.log(2)) == LN2
    assert np.float32(np.log2(np.e)) == LOG2E
    want = 2 / (np.log(2) * (2 * np.arange(5) + 1))
    assert want.astype(np.float32).tolist() == LOG2_COEFFICIENTS.tolist()
    assert EXP2_COEFFICIENTS[0] == 1
    assert EXP2_COEFFICIENTS.dtype == LOG2_COEFFICIENTS.dtype == np.float32


def test_coefficients_reach_the_stated_error() -> None:
    f = np.linspace(-0.5, 0.5, 20_001)
    p = np.polynomial.polynomial.polyval(f, EXP2_COEFFICIENTS.astype(np.float64))
    assert np.max(np.abs(p / np.exp2(f) - 1)) == pytest.approx(2.992e-9, rel=1e-3)


def test_shapes_are_kept() -> None:
    x = np.zeros((2, 0, 3), np.float32)
    assert exp2(x).shape == log2(x).shape == (2, 0, 3)
    strided = np.arange(1, 13, dtype=np.float32).reshape(3, 4).T[::2]
    assert exp2(strided).tolist() == np.exp2(strided).tolist()
    assert log2(strided).shape == strided.shape
