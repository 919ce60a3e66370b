"""fma against exact rational arithmetic, on operands chosen to be rounded twice."""

from __future__ import annotations

import exact_arithmetic as exact
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit.errors import DtypeError, ShapeError
from simkit.numerics.fma import fma

CORNERS = np.array(
    [
        0x00000000,  # +0
        0x00000001,  # least subnormal
        0x00000003,
        0x007FFFFF,  # greatest subnormal
        0x00800000,  # least normal
        0x00800001,
        0x0C000001,  # about 2^-103
        0x1A800001,  # about 2^-74
        0x33800000,  # 2^-24
        0x3F7FFFFF,  # 1 - 2^-24
        0x3F800000,  # 1
        0x3F800001,  # 1 + 2^-23
        0x3FFFFFFF,
        0x4B800001,  # 2^24 + 2
        0x5F800001,
        0x7F000000,  # 2^127
        0x7F7FFFFF,  # greatest
        0x7F800000,  # infinity
        0x7F800001,  # signalling NaN
        0x7FC00000,  # quiet NaN
    ],
    np.uint32,
)
ALL_CORNERS = np.concatenate([CORNERS, CORNERS | np.uint32(exact.SIGN)]).view(np.float32)


def check(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    got = fma(a, b, c).view(np.uint32).ravel()
    triples = zip(a.ravel().tolist(), b.ravel().tolist(), c.ravel().tolist(), strict=True)
    for bits, (x, y, z) in zip(got.tolist(), triples, strict=True):
        want = exact.fma(x, y, z)
        assert bits == want, f"fma({x.hex()}, {y.hex()}, {z.hex()}) = {bits:#x}, not {want:#x}"


def test_every_triple_of_corners() -> None:
    n = len(ALL_CORNERS)
    a, b, c = np.meshgrid(ALL_CORNERS, ALL_CORNERS, ALL_CORNERS[: n // 2], indexing="ij")
    check(a, b, c)
    check(a[::3], b[::3], -c[::3])


def test_random_bits() -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, (3, 3000), dtype=np.uint32)
    check(*bits.view(np.float32))


def test_sums_beside_a_midpoint_are_rounded_once() -> None:
    """c is a float32 value, the product half a unit in its last place and a little more or less.

    Rounding the sum to float64 first gives the very midpoint; the second rounding then goes to
    even whatever the little was.
    """
    rng = np.random.default_rng(2)
    n = 4000
    c_bits = rng.integers(0x30000000, 0x60000000, n, dtype=np.uint32)
    c = c_bits.view(np.float32)
    half_ulp = np.ldexp(np.float32(1), (c_bits >> 23).astype(np.int32) - 127 - 24)
    # (1 + u)(1 - v) * half_ulp with u * v far below the 53rd bit of the sum, or exactly 1.
    a = rng.choice(exact.f32([1, 1 + 2**-23, 1 - 2**-24, 1 + 2**-12]), n)
    b = rng.choice(exact.f32([1, 1 - 2**-23, 1 + 2**-23, 1 - 2**-12]), n) * half_ulp
    signs = rng.choice(exact.f32([1, -1]), n)
    check(a, b * signs, c)


def test_the_case_that_naive_float64_gets_wrong() -> None:
    """A sum one unit of 2^-70 above the midpoint of 1 and 1 + 2^-23 must round up."""
    a = exact.f32([1 + 2**-23])
    b = exact.f32([2**-24 * (1 - 2**-23)])  # product 2^-24 - 2^-70
    c = exact.f32([1 + 2**-23])
    naive = (a.astype(np.float64) * b + c).astype(np.float32)
    assert naive[0] == np.float32(1 + 2**-22)  # to even, upward: wrong
    assert fma(a, b, c)[0] == np.float32(1 + 2**-23)


@pytest.mark.parametrize("sign", [1, -1])
def test_subnormal_results_are_rounded_once(sign: int) -> None:
    """Midpoints of the subnormal range, nudged by products far below the 53rd bit."""
    rng = np.random.default_rng(3)
    n = 3000
    c = rng.integers(0, 0x00900000, n, dtype=np.uint32).view(np.float32)
    a = np.float32(sign) * np.ldexp(np.float32(1), rng.integers(-90, -50, n)).astype(np.float32)
    nudge = rng.choice(exact.f32([1, 1 + 2**-23, 1 - 2**-24]), n)
    b = (nudge * np.float32(2.0**-150) / a.astype(np.float64)).astype(np.float32)
    check(a, b, c)
    tiny = np.float32(2.0**-149)
    check(a, np.float32(2.0**-75) * nudge, np.full(n, tiny))


def test_sums_beside_a_subnormal_midpoint_are_rounded_once() -> None:
    """k + 1/2 units of 2^-149, and less or more by too little for the float64 sum to show it."""
    k = np.arange(2**20, 2**20 + 64, dtype=np.uint32)
    c = k.view(np.float32)
    unit = np.float32(2.0**-75)
    less = ((1 + 2**-23) * unit, (1 - 2**-23) * unit)  # product 2^-150 (1 - 2^-46)
    more = ((1 + 2**-11) * unit, (1 - 2**-11 + 2**-22) * unit)  # product 2^-150 (1 + 2^-33)
    assert fma(less[0], less[1], c).view(np.uint32).tolist() == k.tolist()
    assert fma(more[0], more[1], c).view(np.uint32).tolist() == (k + 1).tolist()
    assert fma(unit, unit, c).view(np.uint32).tolist() == (k + (k & 1)).tolist()
    for a, b in (less, more):
        check(np.full(64, a, np.float32), np.full(64, -b, np.float32), -c)


def test_half_of_the_least_subnormal() -> None:
    """2^-150 is a tie and goes to zero; anything more goes to 2^-149."""
    a = exact.f32([2**-75, 2**-75, -(2**-75), 2**-75 * (1 + 2**-23)])
    b = exact.f32([2**-75, 2**-75 * (1 + 2**-23), 2**-75, 2**-75 * (1 - 2**-24)])
    assert fma(a, b, 0.0).view(np.uint32).tolist() == [0, 1, exact.SIGN, 1]


def test_overflow_threshold() -> None:
    """Half a unit above the greatest float32 overflows; a nudge below that does not."""
    greatest = np.float32(3.4028234663852886e38)
    a = exact.f32([2**100, 2**100 * (1 - 2**-24)])
    b = exact.f32([8, 8])  # half of the last place of 2^127 is 2^103
    assert fma(a, b, greatest).tolist() == [np.inf, greatest]


finite_bits = st.integers(0, 2**32 - 1)


@settings(max_examples=300)
@given(finite_bits, finite_bits, finite_bits)
def test_any_bits(a: int, b: int, c: int) -> None:
    x, y, z = np.array([[a], [b], [c]], np.uint32).view(np.float32)
    check(x, y, z)


def test_broadcasting_and_scalars() -> None:
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    row = exact.f32([1, 10, 100])
    assert fma(a, row, 0.5).tolist() == (a * row + 0.5).tolist()
    assert fma(2.0, 3.0, a).tolist() == (6 + a).tolist()
    assert fma(row[:, None], row, np.float32(1)).tolist() == (np.outer(row, row) + 1).tolist()
    assert fma(2.0, 3.0, 4.0).shape == ()
    assert fma(2.0, 3.0, 4.0) == 10
    assert fma(np.zeros((0, 4), np.float32), 1.0, 1.0).shape == (0, 4)


@pytest.mark.parametrize("size", [100, 16384, 16385, 50001])
def test_large_arrays_are_the_same_as_small_ones(size: int) -> None:
    rng = np.random.default_rng(size)
    # bf16-like significands, so that midpoints are frequent
    a, b = (rng.integers(-128, 128, (2, size)) / 64).astype(np.float32)
    c = rng.standard_normal(size).astype(np.float32)
    whole = fma(a, b, c)
    parts = [fma(a[i : i + 777], b[i : i + 777], c[i : i + 777]) for i in range(0, size, 777)]
    assert whole.tobytes() == np.concatenate(parts).tobytes()


@pytest.mark.parametrize("size", [64, 40000])
@pytest.mark.parametrize("target", [0, 1, 2])
def test_out_may_be_an_operand(size: int, target: int) -> None:
    operands = list(np.random.default_rng(4).standard_normal((3, size)).astype(np.float32))
    a, b, c = operands
    want = fma(a, b, c)
    assert fma(a, b, c, out=operands[target]) is operands[target]
    assert operands[target].tobytes() == want.tobytes()


def test_out_may_be_strided() -> None:
    a = np.random.default_rng(5).standard_normal((40, 6)).astype(np.float32)
    out = np.zeros((40, 12), np.float32)
    fma(a, a, a, out=out[:, ::2])
    assert out[:, ::2].tolist() == fma(a, a, a).tolist()
    assert not out[:, 1::2].any()


def test_wrong_operands_are_named() -> None:
    x = np.ones(3, np.float32)
    with pytest.raises(DtypeError, match=r"b must be float32.*float64"):
        fma(x, np.ones(3), x)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match=r"out must be float32"):
        fma(x, x, x, out=np.ones(3))  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"\(4,\).*\(3,\)"):
        fma(x, x, x, out=np.ones(4, np.float32))
