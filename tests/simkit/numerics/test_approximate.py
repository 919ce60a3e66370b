"""Intervals of the approximate instructions against MPFR, and what the adversary picks of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gmpy2
import mpfr_reference as mpfr
import numpy as np
import pytest
from mpfr_reference import BFLOAT16, FLOAT16, FLOAT32
from numpy.typing import NDArray

from simkit.numerics.approximate import BOUNDS, approximation

CASES = 3_000
PRECISE = gmpy2.context(precision=120)
# What the ISA states, once more: absolute, relative or in places of the result.
ULP, RELATIVE, ABSOLUTE = "ulp", "relative", "absolute"
Limits = Callable[[float, float], tuple[str, float]]
UNARY: dict[str, tuple[Any, Limits]] = {
    # 2 ulp of the correctly rounded result, hence 2.5 of the exact one; just below a power of two
    # the places above it count double.
    "ex2": (PRECISE.exp2, lambda x, y: (ULP, 4.5)),
    "rcp": (lambda x: PRECISE.div(1, x), lambda x, y: (ULP, 1)),
    "sqrt": (PRECISE.sqrt, lambda x, y: (RELATIVE, 2.0**-23)),
    "rsqrt": (PRECISE.rec_sqrt, lambda x, y: (RELATIVE, 2.0**-22.9)),
    "lg2": (PRECISE.log2, lambda x, y: (ABSOLUTE if 0.5 < x < 2 else RELATIVE, 2.0**-22)),
    "tanh": (PRECISE.tanh, lambda x, y: (RELATIVE, 2.0**-11)),
    "sin": (PRECISE.sin, lambda x, y: (ABSOLUTE, 2.0 ** (-20.5 if abs(x) <= 6.2831 else -14.7))),
    "cos": (PRECISE.cos, lambda x, y: (ABSOLUTE, 2.0 ** (-20.5 if abs(x) <= 6.2831 else -14.7))),
    "ex2.f16": (PRECISE.exp2, lambda x, y: (RELATIVE, 2.0**-9.9)),
    "ex2.bf16": (PRECISE.exp2, lambda x, y: (RELATIVE, 2.0**-7)),
    "tanh.f16": (PRECISE.tanh, lambda x, y: (ABSOLUTE, 2.0**-10.987)),
    "tanh.bf16": (PRECISE.tanh, lambda x, y: (ABSOLUTE, 2.0**-8)),
}
FORMATS = {"f32": FLOAT32, "f16": FLOAT16, "bf16": BFLOAT16}
RANGES = {"ex2": (-150, 129), "sin": (-314, 314), "cos": (-314, 314), "tanh": (-12, 12)}


def operands(name: str) -> NDArray[np.float32]:
    """Numbers of every exponent, and of the range in which the function is not constant."""
    fmt = FORMATS[BOUNDS[name].number]
    (x,) = mpfr.operands(fmt, CASES, 1, seed=1)
    low, high = RANGES.get(name.split(".")[0], (0.25, 4))
    inside = np.random.default_rng(2).uniform(low, high, CASES).astype(np.float32)
    if fmt is not FLOAT32:
        cut = np.uint32(0xFFFF0000 if fmt is BFLOAT16 else 0xFFFFE000)
        inside = (inside.view(np.uint32) & cut).view(np.float32)
        inside = inside[np.abs(inside) >= 2.0**-14]
    x = x[np.abs(x) <= 314.15] if name in ("sin", "cos") else x
    return np.concatenate([x, inside])


def place(exact: float, number: str) -> float:
    """The distance of a format's numbers at ``exact``."""
    fmt = FORMATS[number]
    exponent = math.frexp(exact)[1] - 1
    return math.ldexp(1.0, max(exponent, 1 - fmt.bias) - fmt.fraction_bits)


@pytest.mark.parametrize("name", UNARY)
def test_intervals_hold_the_bound_and_the_true_value(name: str) -> None:
    function, limits = UNARY[name]
    bound = BOUNDS[name]
    x = operands(name)
    with np.errstate(all="ignore"):
        low, high = bound.interval(x)
        nearest = bound.rounded(x)
    largest = float(FORMATS[bound.number].values(np.array([0x7F7FFFFF], np.uint32))[0])
    largest = {"f32": largest, "f16": 65504.0, "bf16": 3.3895313892515355e38}[bound.number]
    tested = 0
    for value, lowest, highest, middle in zip(
        x.tolist(), low.tolist(), high.tolist(), nearest.tolist(), strict=True
    ):
        if value == 0:
            continue  # test_exact_results_of_the_tables
        exact = function(gmpy2.mpfr(value)) if not math.isnan(value) else gmpy2.nan()
        if not gmpy2.is_finite(exact):
            assert (lowest == highest == float(exact)) or math.isnan(lowest), value
            continue
        assert lowest <= middle <= highest, value
        if abs(exact) > largest or math.isinf(highest):
            continue
        tested += 1
        kind, size = limits(value, float(exact))
        unit = place(float(exact), bound.number)
        error = {ULP: size * unit, RELATIVE: size * abs(float(exact)), ABSOLUTE: size}[kind]
        # The rounded value is allowed even where the bound is finer than the format.
        error = max(error, unit / 2) * (1 + 2.0**-40)
        assert exact - error <= lowest <= exact + error, f"{name}({value.hex()})"
        assert exact - error <= highest <= exact + error, f"{name}({value.hex()})"
        # The true value lies between neighbours of the ends.
        assert lowest - unit <= exact <= highest + unit, f"{name}({value.hex()})"
    assert tested > CASES


@pytest.mark.parametrize("name", ["div.approx", "div.full"])
def test_division(name: str) -> None:
    a, b = mpfr.operands(FLOAT32, CASES, 2, seed=3)
    with np.errstate(all="ignore"):
        low, high = BOUNDS[name].interval(a, b)
    size = np.abs(b)
    sensible = np.isfinite(a) & np.isfinite(b) & (size >= 2.0**-126) & (a != 0)
    if name == "div.approx":
        is_large = (size > 2.0**126) & np.isfinite(b)
        assert (low[is_large & np.isfinite(a)] == 0).all()
        assert np.isnan(low[is_large & np.isinf(a)]).all()
        assert (np.signbit(low) == (np.signbit(a) != np.signbit(b)))[is_large & sensible].all()
        sensible &= size <= 2.0**126
    for k in np.flatnonzero(sensible):
        exact = PRECISE.div(gmpy2.mpfr(float(a[k])), gmpy2.mpfr(float(b[k])))
        if abs(exact) > 3.4e38 or np.isinf(high[k]) or np.isinf(low[k]):
            continue
        error = 2 * place(float(exact), "f32") if exact else 2.0**-148
        assert exact - error <= float(low[k]) <= float(high[k]) <= exact + error


def test_exact_results_of_the_tables() -> None:
    """The tables of special operands in the ISA, instruction by instruction."""
    inf, nan = math.inf, math.nan
    x = np.array([-inf, -0.0, 0.0, inf, nan], np.float32)
    tables = {
        "rcp": [-0.0, -inf, inf, 0.0, nan],
        "sqrt": [nan, -0.0, 0.0, inf, nan],
        "rsqrt": [nan, -inf, inf, 0.0, nan],
        "sin": [nan, -0.0, 0.0, nan, nan],
        "cos": [nan, 1, 1, nan, nan],
        "lg2": [nan, -inf, -inf, inf, nan],
        "ex2": [0.0, 1, 1, inf, nan],
        "tanh": [-1, -0.0, 0.0, 1, nan],
        "ex2.f16": [0.0, 1, 1, inf, nan],
        "ex2.bf16": [0.0, 1, 1, inf, nan],
        "tanh.f16": [-1, -0.0, 0.0, 1, nan],
        "tanh.bf16": [-1, -0.0, 0.0, 1, nan],
    }
    for name, row in tables.items():
        for choice in ("rounded", "adversarial"):
            found = approximation(name, choice, 7)(x)
            np.testing.assert_array_equal(found, np.array(row, np.float32), err_msg=name)
            signs = np.signbit(found) == np.signbit(np.array(row, np.float32))
            assert signs[~np.isnan(row)].all(), name
            assert (found.view(np.uint32)[np.isnan(row)] == 0x7FFFFFFF).all()
    for name in ("rsqrt", "sqrt", "lg2"):
        assert np.isnan(approximation(name, "adversarial")(np.float32([-1, -3e-40]))).all()


@pytest.mark.parametrize("name", BOUNDS)
def test_adversary_stays_inside_and_uses_it_all(name: str) -> None:
    number = BOUNDS[name].number
    arity = 2 if name.startswith("div") else 1
    arrays = mpfr.operands(FORMATS[number], CASES, arity, seed=4)
    with np.errstate(all="ignore"):
        low, high = BOUNDS[name].interval(*arrays)
    seeds = [approximation(name, "adversarial", seed)(*arrays) for seed in range(12)]
    wide = (low < high) & np.isfinite(low) & np.isfinite(high)
    for found in seeds:
        number_ = ~np.isnan(low)
        assert (found[number_] >= low[number_]).all()
        assert (found[number_] <= high[number_]).all()
        assert np.isnan(found[~number_]).all()
        encoded = found if number == "f32" else None
        if encoded is None:
            cut = np.uint32(0xFFFF if number == "bf16" else 0x1FFF)
            normal = np.abs(found) >= 2.0**-14
            assert not np.any(found.view(np.uint32)[normal & ~np.isnan(found)] & cut)
    everything = np.array(seeds)
    if wide.sum() > 50:
        assert (everything.min(axis=0) == low)[wide].mean() > 0.7
        assert (everything.max(axis=0) == high)[wide].mean() > 0.7
    again = approximation(name, "adversarial", 3)(*arrays)
    assert again.tobytes() == seeds[3].tobytes()
    if wide.any():
        assert seeds[0].tobytes() != seeds[1].tobytes()


def test_adversary_is_a_function_of_the_operand() -> None:
    """As hardware is: order and company do not matter."""
    x = np.random.default_rng(5).standard_normal(500).astype(np.float32)
    function = approximation("ex2", "adversarial", 11)
    whole = function(x)
    assert function(x[::-1])[::-1].tobytes() == whole.tobytes()
    assert function(x.reshape(50, 10)).ravel().tobytes() == whole.tobytes()
    assert np.array([function(v) for v in x[:20]]).ravel().tobytes() == whole[:20].tobytes()


def test_choice_is_checked() -> None:
    with pytest.raises(ValueError, match=r"rounded, adversarial.*'lucky'"):
        approximation("ex2", "lucky")
