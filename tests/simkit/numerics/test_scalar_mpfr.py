"""Scalar arithmetic of every format, rounding mode and modifier against MPFR.

The quick tier runs always; the full one, many more operands, with ``-m proof``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpfr_reference as mpfr
import numpy as np
import pytest
from mpfr_reference import BFLOAT16, FLOAT16, FLOAT32, Format
from numpy.typing import NDArray

from simkit.numerics import formats, scalar

TIERS = [
    pytest.param(20_000, id="quick"),
    pytest.param(500_000, id="full", marks=pytest.mark.proof),
]

Float32 = NDArray[np.float32]
OPERATIONS: dict[str, tuple[int, Callable[..., Float32]]] = {
    "add": (2, scalar.add),
    "sub": (2, scalar.subtract),
    "mul": (2, scalar.multiply),
    "div": (2, scalar.divide),
    "fma": (3, scalar.fma),
    "sqrt": (1, scalar.sqrt),
    "rcp": (1, lambda x, mode: scalar.divide(1.0, x, mode)),
}


def flushed(x: Float32) -> Float32:
    """Zeros of the same sign for subnormal float32, by comparison and not by bits."""
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def clamped(x: Float32) -> Float32:
    """To [0, 1]; NaN and -0 give +0."""
    with np.errstate(invalid="ignore"):
        inside = np.where(x > 0, np.where(x < 1, x, np.float32(1)), np.float32(0))
    return inside.astype(np.float32)


def assert_same(actual: Float32, expected: Float32, arrays: list[Float32], what: str) -> None:
    """The same bits, with the canonical NaN for every NaN."""
    want = expected.view(np.uint32).copy()
    want[np.isnan(expected)] = 0x7FFFFFFF
    wrong = np.flatnonzero(actual.view(np.uint32) != want)
    assert not len(wrong), (
        f"{what} of {[float(x[wrong[0]]).hex() for x in arrays]} is"
        f" {float(actual[wrong[0]]).hex()}, not {float(expected[wrong[0]]).hex()};"
        f" {len(wrong)} of {len(actual)} differ"
    )


def of_operation(name: str, fmt: Format, number: int, cases: int) -> list[Float32]:
    arrays = mpfr.operands(fmt, cases, number, seed=sum(map(ord, name)))
    if name == "sqrt":
        # Negative numbers give NaN: a few are enough.
        arrays[0] = np.where(np.arange(cases) % 16 > 0, np.abs(arrays[0]), arrays[0])
    return arrays


@pytest.mark.parametrize("cases", TIERS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_float32(name: str, cases: int) -> None:
    """Four rounding modes, each plain, with .ftz, with .sat and with both."""
    number, function = OPERATIONS[name]
    arrays = of_operation(name, FLOAT32, number, cases)
    for ftz in (False, True):
        inputs = [flushed(x) for x in arrays] if ftz else arrays
        columns = mpfr.exact(inputs)
        ready = [scalar.flush(x) for x in arrays] if ftz else arrays
        for mode in scalar.ROUNDING_MODES:
            what = f"{name}.{mode}{'.ftz' if ftz else ''}"
            expected = mpfr.computed(name, mode, FLOAT32, columns)
            actual = function(*ready, mode)
            if ftz:
                expected, actual = flushed(expected), scalar.flush(actual)
            assert_same(actual, expected, arrays, what)
            assert_same(scalar.saturate(actual), clamped(expected), arrays, f"{what}.sat")


HALF: dict[str, tuple[Format, Any, Any, Any]] = {
    "float16": (FLOAT16, formats.encode_f16, scalar.encode_f16_once, formats.decode_f16),
    "bfloat16": (BFLOAT16, formats.encode_bf16, scalar.encode_bf16_once, formats.decode_bf16),
}


@pytest.mark.parametrize("cases", TIERS)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
@pytest.mark.parametrize("kind", HALF)
def test_half_precision(kind: str, name: str, cases: int) -> None:
    """To nearest, the only mode there is, plain and with .sat; as the executor composes them."""
    fmt, encode, encode_once, decode = HALF[kind]
    number, function = OPERATIONS[name]
    arrays = of_operation(name, fmt, number, cases)
    expected = mpfr.computed(name, "rn", fmt, mpfr.exact(arrays))
    if name == "fma":
        wide = scalar.fma_odd(*arrays)
        plain, saturated = encode_once(wide), encode_once(scalar.saturate(wide))
    else:
        narrow = function(*arrays, "rn")
        plain, saturated = encode(narrow), encode(scalar.saturate(narrow))
    assert (plain[np.isnan(expected)] == 0x7FFF).all()
    actual = decode(plain)
    actual[np.isnan(actual)] = np.uint32(0x7FFFFFFF).view(np.float32)
    assert_same(actual, expected, arrays, f"{name}.rn.{kind}")
    assert_same(decode(saturated), clamped(expected), arrays, f"{name}.rn.sat.{kind}")


def test_mpfr_rounds_as_ieee_does() -> None:
    """The reference itself, at numbers that are known by hand."""
    step, least = 2.0**-23, 2.0**-149

    def add(x: float, y: float, mode: str, fmt: Format = FLOAT32) -> float:
        arrays = [np.array([v], np.float32) for v in (x, y)]
        return float(mpfr.computed("add", mode, fmt, mpfr.exact(arrays))[0])

    assert add(1, step / 2, "rn") == 1
    assert add(1 + step, step / 2, "rn") == 1 + 2 * step
    assert add(1, least, "rp") == 1 + step
    assert add(3.4028234663852886e38, 2.0**103, "rn") == np.inf
    assert add(3.4028234663852886e38, 2.0**103, "rz") == 3.4028234663852886e38
    assert np.signbit(add(1, -1, "rm"))
    assert not np.signbit(add(1, -1, "rn"))
    assert add(65504, 16, "rn", FLOAT16) == np.inf
    assert add(65504, 15, "rn", FLOAT16) == 65504
    halves = [np.array([v], np.float32) for v in (least, 0.5)]
    products = {m: mpfr.computed("mul", m, FLOAT32, mpfr.exact(halves))[0] for m in mpfr.ROUNDINGS}
    assert products == {"rn": 0, "rz": 0, "rm": 0, "rp": np.float32(least)}
