"""Scalar arithmetic against exact fractions in every rounding mode, and the result modifiers."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from exact_rounding import (
    BF16,
    F16,
    F32,
    F64,
    Format,
    exact_sqrt,
    pattern_floats,
    rounded,
    special_floats,
)
from numpy.typing import NDArray

from simkit.errors import DtypeError
from simkit.numerics import scalar

CASES = 4000
NAN_BITS = 0x7FFFFFFF


def assert_same_float32(actual: NDArray[np.float32], expected: list[float]) -> None:
    """The same bits, with 0x7FFFFFFF for every NaN."""
    with np.errstate(all="ignore"):
        bits = np.array(expected, np.float32).view(np.uint32)
    bits[np.isnan(expected)] = NAN_BITS
    np.testing.assert_array_equal(actual.view(np.uint32), bits)


def operands(seed: int, number: int, target: Format = F32) -> tuple[NDArray[np.float64], ...]:
    """Pairs or triples: every special with every other, then related exponents of every size."""
    rng = np.random.default_rng(seed)
    specials = np.array(special_floats(target))
    if number == 3:
        specials = specials[rng.choice(specials.size, 14, replace=False)]
    grid = [x.reshape(-1) for x in np.meshgrid(*[specials] * number)]
    lowest, highest = target.min_exponent, target.max_exponent
    first = rng.integers(lowest, highest + 1, CASES)
    near = first + rng.integers(-target.precision - 3, target.precision + 4, CASES)
    # A product at the ends of the range, an ordinary one, or one near the first operand.
    opposite = rng.choice([lowest - 1, lowest - 20, highest, 0], CASES) - first
    opposite += rng.integers(-3, 4, CASES)
    second = np.where(rng.random(CASES) < 0.5, near, opposite)
    third = first + second + rng.integers(-2 * target.precision - 3, 2 * target.precision, CASES)
    exponents = (first, second, third)[:number]
    patterns = [pattern_floats(rng, target, e) for e in exponents]
    return tuple(np.concatenate(pair) for pair in zip(grid, patterns, strict=True))


def sum_reference(terms: tuple[float, float], exact: Fraction, target: Format, mode: str) -> float:
    """A rounded sum of finite terms; ``terms`` need only have the right signs."""
    if exact:
        return rounded(exact, target, mode)
    signs = {math.copysign(1.0, x) for x in terms}
    if len(signs) == 1:
        return 0.0 * signs.pop()
    return -0.0 if mode == "rm" else 0.0


def add_reference(x: float, y: float, mode: str) -> float:
    if not math.isfinite(x + y):
        return x + y
    return sum_reference((x, y), Fraction(x) + Fraction(y), F32, mode)


def subtract_reference(x: float, y: float, mode: str) -> float:
    return add_reference(x, -y, mode)


def multiply_reference(x: float, y: float, mode: str) -> float:
    if not math.isfinite(x * y) or x * y == 0:  # float64 holds the product exactly
        return x * y
    return rounded(Fraction(x) * Fraction(y), F32, mode)


def divide_reference(x: float, y: float, mode: str) -> float:
    if not (math.isfinite(x) and math.isfinite(y) and x and y):
        with np.errstate(all="ignore"):
            return float(np.float64(x) / np.float64(y))
    return rounded(Fraction(x) / Fraction(y), F32, mode)


def fma_reference(target: Format) -> Callable[[float, float, float, str], float]:
    def reference(x: float, y: float, z: float, mode: str) -> float:
        if not (math.isfinite(x) and math.isfinite(y)):
            return x * y + z
        if not math.isfinite(z):
            return z
        product_sign = math.copysign(1.0, x) * math.copysign(1.0, y)
        return sum_reference(
            (product_sign, z), Fraction(x) * Fraction(y) + Fraction(z), target, mode
        )

    return reference


OPERATIONS = {
    "add": (scalar.add, add_reference, 2),
    "subtract": (scalar.subtract, subtract_reference, 2),
    "multiply": (scalar.multiply, multiply_reference, 2),
    "divide": (scalar.divide, divide_reference, 2),
    "fma": (scalar.fma, fma_reference(F32), 3),
}


@pytest.mark.parametrize("mode", scalar.ROUNDING_MODES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_arithmetic_is_rounded_once(name: str, mode: str) -> None:
    function, reference, number = OPERATIONS[name]
    arguments = operands(1, number)
    actual = function(*(x.astype(np.float32) for x in arguments), mode)
    expected = [reference(*row, mode) for row in zip(*(x.tolist() for x in arguments), strict=True)]
    assert_same_float32(actual, expected)


@pytest.mark.parametrize("mode", scalar.ROUNDING_MODES)
def test_sqrt_is_rounded_once(mode: str) -> None:
    (x,) = operands(2, 1)
    near_squares = pattern_floats(np.random.default_rng(3), F32, np.arange(-60, 60)).astype(
        np.float32
    )
    near_squares *= near_squares
    x = np.concatenate([np.where(np.arange(x.size) % 16, np.abs(x), x), near_squares])

    def reference(value: float) -> float:
        if value == 0 or value == math.inf:
            return value
        return rounded(exact_sqrt(Fraction(value)), F32, mode) if value > 0 else math.nan

    assert_same_float32(scalar.sqrt(x.astype(np.float32), mode), [reference(v) for v in x.tolist()])


@pytest.mark.parametrize("mode", scalar.ROUNDING_MODES)
def test_round_float64(mode: str) -> None:
    rng = np.random.default_rng(4)
    x = pattern_floats(rng, F64, rng.integers(-155, 132, CASES))
    halfway = pattern_floats(rng, Format(25, -150, 127), rng.integers(-150, 128, CASES))
    x = np.concatenate([x, halfway, np.nextafter(halfway, np.inf), np.nextafter(halfway, 0)])
    x = np.concatenate([x, special_floats(F64)])
    expected = [
        rounded(Fraction(v), F32, mode) if math.isfinite(v) and v else v for v in x.tolist()
    ]
    assert_same_float32(scalar.round_float64(x, mode), expected)


def test_directed_rounding_by_hand() -> None:
    one, tiny, top = np.float32(1), np.float32(2.0**-149), np.finfo(np.float32).max
    up, down = np.nextafter(one, np.float32(2)), np.nextafter(one, np.float32(0))
    assert scalar.add(one, tiny, "rp") == up
    assert scalar.add(one, -tiny, "rm") == down
    assert scalar.add(one, -tiny, "rz") == down
    assert scalar.add(one, -tiny, "rp") == one
    assert scalar.multiply(top, np.float32(2), "rz") == top
    assert scalar.multiply(top, np.float32(-2), "rp") == -top
    assert scalar.multiply(top, np.float32(-2), "rm") == -np.inf
    assert scalar.multiply(tiny, tiny, "rp") == tiny
    assert np.signbit(scalar.subtract(one, one, "rm"))
    assert not np.signbit(scalar.subtract(one, one, "rn"))
    assert not np.signbit(scalar.add(0.0, 0.0, "rm"))


@pytest.mark.parametrize("mode", scalar.ROUNDING_MODES)
def test_operands_broadcast_and_are_not_written(mode: str) -> None:
    x = np.linspace(1, 2, 64, dtype=np.float32).reshape(32, 2)
    kept = x.copy()
    for result in (
        scalar.add(x, 1.0, mode),
        scalar.subtract(np.float32(1), x, mode),
        scalar.multiply(x, x[:, :1], mode),
        scalar.divide(1.0, x, mode),
        scalar.fma(x, 3.0, np.float32(0.1), mode),
        scalar.sqrt(x.T, mode).T,
    ):
        assert result.shape == (32, 2)
        assert result.dtype == np.float32
    assert scalar.add(1.0, 2.0, mode).shape == ()
    np.testing.assert_array_equal(x, kept)


def test_unknown_mode_and_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match="rn, rz, rm, rp"):
        scalar.add(1.0, 1.0, "rna")
    with pytest.raises(DtypeError, match="float64"):
        scalar.add(np.zeros(2), 1.0)
    with pytest.raises(DtypeError, match="int32"):
        scalar.saturate(np.zeros(2, np.int32))


def test_fma_f64_is_rounded_once() -> None:
    a, b, c = operands(5, 3, F64)
    reference = fma_reference(F64)
    expected = np.array(
        [reference(*row, "rn") for row in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    )
    actual = scalar.fma_f64(a, b, c)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(actual[~nan].view(np.int64), expected[~nan].view(np.int64))


def test_fma_f64_in_the_ordinary_range() -> None:
    rng = np.random.default_rng(6)
    exponents = rng.integers(-20, 20, CASES)
    a, b = pattern_floats(rng, F64, exponents), pattern_floats(rng, F64, exponents[::-1])
    near_cancellation = -(a * b) * (1 + rng.integers(-2, 3, CASES) * 2.0**-52)
    far = pattern_floats(rng, F64, exponents + exponents[::-1] + rng.integers(-110, 110, CASES))
    for c in (near_cancellation, far):
        expected = [
            sum_reference((x * y, z), Fraction(x) * Fraction(y) + Fraction(z), F64, "rn")
            for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
        ]
        np.testing.assert_array_equal(scalar.fma_f64(a, b, c), expected)


def test_fma_f64_broadcasts() -> None:
    assert scalar.fma_f64(np.ones((4, 3)), 2.0, np.zeros(3)).shape == (4, 3)
    assert scalar.fma_f64(np.ones((4, 1)), 5e-324, np.array([1e308, np.inf])).shape == (4, 2)
    assert scalar.fma_f64(1e308, 10.0, -math.inf) == -math.inf
    assert scalar.fma_f64(1e308, 10.0, -1e308) == math.inf
    # 2^-1074 * 0.75 + 2^-1074 = 1.75 * 2^-1074, to nearest 2^-1073
    assert scalar.fma_f64(5e-324, 0.75, 5e-324) == 1e-323


@pytest.mark.parametrize(("target", "bits"), [(F16, "f16"), (BF16, "bf16")])
def test_half_precision_fma_is_rounded_once(target: Format, bits: str) -> None:
    a, b, c = operands(7, 3, target)
    encode = scalar.encode_f16_once if bits == "f16" else scalar.encode_bf16_once
    actual = encode(scalar.fma_odd(*(x.astype(np.float32) for x in (a, b, c))))
    reference = fma_reference(target)
    expected = np.array(
        [reference(*row, "rn") for row in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    )
    with np.errstate(all="ignore"):
        if bits == "f16":
            codes = expected.astype(np.float16).view(np.uint16)
        else:
            codes = (expected.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    codes[np.isnan(expected)] = 0x7FFF
    np.testing.assert_array_equal(actual, codes)


def test_half_precision_fma_differs_from_two_roundings() -> None:
    # 1 + 2^-10 + 2^-11 - 2^-31 lies just below a midpoint of f16, on which float32 would put it.
    a, b = np.float32((1 + 2.0**-10) * 2.0**-5), np.float32((1 - 2.0**-10) * 2.0**-6)
    c = np.float32(1 + 2.0**-10)
    assert scalar.encode_f16_once(scalar.fma_odd(a, b, c)) == 0x3C01
    assert scalar.encode_f16(scalar.fma(a, b, c)) == 0x3C02
    assert scalar.encode_f16_once(np.float64(1 + 2.0**-11) + 2.0**-50) == 0x3C01
    assert scalar.encode_bf16_once(np.float64(1 + 2.0**-8) + 2.0**-50) == 0x3F81


X = np.array([-np.inf, -2.0, -1e-45, -0.0, 0.0, 1e-40, 2.0**-126, 0.5, 3.0, np.inf], np.float32)


def test_flush() -> None:
    expected = X.tolist()
    expected[2], expected[5] = -0.0, 0.0
    assert_same_float32(scalar.flush(X), expected)
    largest = np.array([0x007FFFFF, 0x807FFFFF, 0x00800000], np.uint32).view(np.float32)
    assert_same_float32(scalar.flush(largest), [0.0, -0.0, 2.0**-126])
    assert scalar.flush(X[:4]) is not X
    assert np.isnan(scalar.flush(math.nan))


def test_saturate() -> None:
    assert_same_float32(scalar.saturate(X), [0, 0, 0, 0, 0, float(X[5]), 2.0**-126, 0.5, 1, 1])
    assert_same_float32(scalar.saturate(np.float32(np.nan)), 0.0)
    wide = scalar.saturate(np.array([np.nan, -0.0, 1 + 2.0**-52]))
    assert wide.dtype == np.float64
    assert wide.tolist() == [0.0, 0.0, 1.0]
    assert not np.signbit(wide).any()


def test_relu() -> None:
    expected = [0, 0, 0, 0, 0, float(X[5]), 2.0**-126, 0.5, 3, math.inf]
    assert_same_float32(scalar.relu(X), expected)
    negative_nan = np.array([0xFFC00001], np.uint32).view(np.float32)
    assert_same_float32(scalar.relu(negative_nan), [math.nan])


def test_propagate_nan() -> None:
    value = np.ones((2, 3), np.float32)
    column = np.array([[0.0], [np.nan]], np.float32)
    result = scalar.propagate_nan(value, column, 1.0)
    assert_same_float32(result, [[1, 1, 1], [math.nan] * 3])
    assert not np.isnan(value).any()
    assert scalar.propagate_nan(1.0, np.zeros(3, np.float32)).shape == (3,)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_properties(dtype: type) -> None:
    tiny = np.finfo(dtype).tiny
    x = np.array([0.0, -0.0, tiny, tiny / 2, -tiny / 4, -1.0, np.inf, -np.inf, np.nan], dtype)
    expected = {
        "finite": "111111000",
        "infinite": "000000110",
        "number": "111111110",
        "notanumber": "000000001",
        "normal": "111001000",
        "subnormal": "000110000",
    }
    assert scalar.PROPERTIES.keys() == expected.keys()
    for name, row in expected.items():
        assert "".join("01"[int(v)] for v in scalar.PROPERTIES[name](x)) == row, name
