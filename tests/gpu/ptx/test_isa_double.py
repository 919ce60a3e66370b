"""f64 in every rounding mode against exact rational arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable

import ieee
import numpy as np
import pytest
from ieee import F64, MODES, Value
from lanes import lanewise, pairs

Operation = Callable[..., Value]


def expect(operation: Operation, mode: str, *sources: np.ndarray) -> np.ndarray:
    rows = zip(*(s.tolist() for s in sources), strict=True)
    return np.array([F64.encode(operation(*map(F64.value, r)), mode) for r in rows], np.uint64)


def same(got: np.ndarray, wanted: np.ndarray) -> bool:
    """Equal bits, or both NaN."""
    nan = [(bits & np.uint64(F64.sign - 1)) > np.uint64(F64.infinity) for bits in (got, wanted)]
    return bool(((got == wanted) | (nan[0] & nan[1])).all())


def operands() -> tuple[np.ndarray, np.ndarray]:
    return pairs(F64.corners(4)[::2], F64.corners(4)[::3])


@pytest.mark.parametrize("mode", MODES)
def test_two_operands(mode: str) -> None:
    a, b = operands()
    text = "\n".join(f"{n}.{mode}.f64 %{n}, %a, %b;" for n in ("add", "sub", "mul", "div"))
    got = lanewise(text, {"a": a, "b": b}, dict.fromkeys(("add", "sub", "mul", "div"), np.uint64))
    assert same(got["add"], expect(lambda x, y: ieee.add(x, y, mode), mode, a, b))
    assert same(got["sub"], expect(lambda x, y: ieee.add(x, ieee.negate(y), mode), mode, a, b))
    assert same(got["mul"], expect(ieee.multiply, mode, a, b))
    assert same(got["div"], expect(ieee.divide, mode, a, b))


@pytest.mark.parametrize("mode", MODES)
def test_fma(mode: str) -> None:
    a, b, c = pairs(F64.corners(2)[::4], F64.corners(2)[1::4], F64.corners(2)[2::4])
    got = lanewise(f"fma.{mode}.f64 %d, %a, %b, %c;", {"a": a, "b": b, "c": c}, {"d": np.uint64})
    assert same(got["d"], expect(lambda x, y, z: ieee.fma(x, y, z, mode), mode, a, b, c))


@pytest.mark.parametrize("mode", MODES)
def test_roots_and_reciprocals(mode: str) -> None:
    a = F64.corners()
    text = f"sqrt.{mode}.f64 %d, %a;\nrcp.{mode}.f64 %e, %a;"
    got = lanewise(text, {"a": a}, {"d": np.uint64, "e": np.uint64})
    one = F64.value(F64.bias << F64.fraction)
    assert same(got["d"], expect(ieee.square_root, mode, a))
    assert same(got["e"], expect(lambda x: ieee.divide(one, x), mode, a))


def test_minima_signs_and_properties() -> None:
    a, b = operands()
    text = """
        min.f64 %d, %a, %b;
        max.f64 %e, %a, %b;
        copysign.f64 %f, %a, %b;
        testp.finite.f64 %p, %a;
        testp.infinite.f64 %q, %a;
        testp.number.f64 %r, %a;
        testp.notanumber.f64 %s, %a;
        testp.normal.f64 %t, %a;
        testp.subnormal.f64 %u, %a;
    """
    results = dict.fromkeys("def", np.uint64) | dict.fromkeys("pqrstu", bool)
    got = lanewise(text, {"a": a, "b": b}, results)
    assert same(got["d"], expect(ieee.minimum, "rn", a, b))
    assert same(got["e"], expect(ieee.maximum, "rn", a, b))
    sign = np.uint64(F64.sign)
    assert np.array_equal(got["f"], (b & ~sign) | (a & sign))
    values = [F64.value(v).magnitude for v in a.tolist()]
    least = 2.0**-1022
    assert got["p"].tolist() == [v < math.inf for v in values]
    assert got["q"].tolist() == [v == math.inf for v in values]
    assert got["r"].tolist() == [v == v for v in values]
    assert got["s"].tolist() == [v != v for v in values]
    assert got["t"].tolist() == [v == 0 or least <= v < math.inf for v in values]
    assert got["u"].tolist() == [0 < v < least for v in values]


def test_gross_approximations() -> None:
    """The upper word of the operand gives the upper word of the result (PTX ISA, tables)."""
    special = np.array(
        [-math.inf, -5e-324, -0.0, 0.0, 5e-324, math.inf, math.nan], np.float64
    )  # fmt: skip
    generator = np.random.default_rng(1)
    values = np.concatenate([special, generator.uniform(0.5, 2, 200) * 2.0 ** np.arange(-100, 100)])
    text = "rcp.approx.ftz.f64 %d, %a;\nrsqrt.approx.ftz.f64 %e, %a;\nrsqrt.approx.f64 %f, %a;"
    got = lanewise(text, {"a": values}, dict.fromkeys("def", np.float64))
    for name in "de":
        assert (got[name].view(np.uint64) & np.uint64(0xFFFFFFFF) == 0).all()
        assert got[name][6:7].view(np.uint64)[0] == 0x7FFFFFFF00000000
    inf = math.inf
    assert got["d"][:6].tolist() == [0, -inf, -inf, inf, inf, 0]
    assert np.signbit(got["d"][[0, 5]]).tolist() == [True, False]
    assert np.isnan(got["e"][0])
    assert got["e"][1:6].tolist() == [-inf, -inf, inf, inf, 0]
    x = values[7:]
    assert (np.abs(got["d"][7:] * x - 1) < 2.0**-18).all()
    assert (np.abs(got["e"][7:] * np.sqrt(x) - 1) < 2.0**-18).all()
    assert (np.abs(got["f"][7:] * np.sqrt(x) - 1) < 2.0**-50).all()
    assert got["f"][2:4].tolist() == [-inf, inf]
