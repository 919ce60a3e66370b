"""f32 and f64 arithmetic, minima, comparisons and the approximate functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import ieee
import numpy as np
import pytest
from ieee import F32, F64, MODES, Value
from lanes import lanewise, pairs

Operation = Callable[..., Value]


def expect(
    operation: Operation, sources: Sequence[np.ndarray], mode: str = "rn", *,
    form: ieee.Format = F32, ftz: bool = False, sat: bool = False,
) -> np.ndarray:  # fmt: skip
    """The bits of an operation on arrays of bits."""
    found = []
    for row in zip(*(s.tolist() for s in sources), strict=True):
        values = [form.value(form.flush(v) if ftz else v) for v in row]
        bits = form.encode(operation(*values), mode)
        bits = form.flush(bits) if ftz else bits
        found.append(form.saturate(bits) if sat else bits)
    return np.array(found, f"u{form.bits // 8}")


def same(got: np.ndarray, wanted: np.ndarray, form: ieee.Format = F32) -> bool:
    """Equal bits, except that arithmetic returns "an unspecified NaN" (PTX ISA, 9.7.3)."""
    kind = f"f{form.bits // 8}"
    nan = np.isnan(wanted.view(kind))
    return bool(np.where(nan, np.isnan(got.view(kind)), got == wanted).all())


def two_operands() -> tuple[np.ndarray, np.ndarray]:
    return pairs(F32.corners(8), F32.corners(8)[::2])


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_f32_binary_rounding(name: str) -> None:
    a, b = two_operands()
    text = "\n".join(f"{name}.{mode}.f32 %{mode}, %a, %b;" for mode in MODES)
    got = lanewise(text, {"a": a, "b": b}, dict.fromkeys(MODES, np.uint32))
    for mode in MODES:
        operation: dict[str, Operation] = {
            "add": lambda x, y, m=mode: ieee.add(x, y, m),
            "sub": lambda x, y, m=mode: ieee.add(x, ieee.negate(y), m),
            "mul": ieee.multiply,
            "div": ieee.divide,
        }
        assert same(got[mode], expect(operation[name], (a, b), mode)), mode


@pytest.mark.parametrize("flags", [".ftz", ".sat", ".ftz.sat"])
def test_f32_flags(flags: str) -> None:
    a, b = pairs(F32.corners(4), F32.corners(4)[::2])
    c = np.resize(F32.corners(4)[::3], a.shape)
    operations: dict[str, tuple[Operation, Sequence[np.ndarray]]] = {
        f"add{flags}": (ieee.add, (a, b)),
        f"mul.rz{flags}": (ieee.multiply, (a, b)),
        f"sub.rn{flags}": (lambda x, y: ieee.add(x, ieee.negate(y)), (a, b)),
        f"fma.rn{flags}": (ieee.fma, (a, b, c)),
        f"fma.rp{flags}": (lambda x, y, z: ieee.fma(x, y, z, "rp"), (a, b, c)),
    }
    text = "\n".join(
        f"{name}.f32 %d{k}, {', '.join(f'%{s}' for s in 'abc'[: len(sources)])};"
        for k, (name, (_, sources)) in enumerate(operations.items())
    )
    results = {f"d{k}": np.uint32 for k in range(len(operations))}
    got = lanewise(text, {"a": a, "b": b, "c": c}, results)
    for k, (name, (operation, sources)) in enumerate(operations.items()):
        mode = next((m for m in MODES if m in name.split(".")), "rn")
        wanted = expect(operation, sources, mode, ftz=".ftz" in flags, sat=".sat" in flags)
        assert same(got[f"d{k}"], wanted), name


def test_f32_fma_rounding() -> None:
    a, b, c = pairs(F32.corners(3)[::2], F32.corners(3)[1::3], F32.corners(3)[::2])
    text = "\n".join(f"fma.{mode}.f32 %{mode}, %a, %b, %c;" for mode in MODES)
    got = lanewise(text, {"a": a, "b": b, "c": c}, dict.fromkeys(MODES, np.uint32))
    for mode in MODES:
        wanted = expect(lambda x, y, z, m=mode: ieee.fma(x, y, z, m), (a, b, c), mode)
        assert same(got[mode], wanted), mode


def test_f32_fma_cancellation() -> None:
    """c close to -a b: what is left are the low bits that a rounded product has lost."""
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(2, 256)).astype(np.float32)
    c = -(a * b)
    c[::3] = np.nextafter(c[::3], np.float32(9), dtype=np.float32)
    a, b, c = (x.view(np.uint32) for x in (a, b, c))
    got = lanewise("mad.rn.f32 %d, %a, %b, %c;", {"a": a, "b": b, "c": c}, {"d": np.uint32})
    assert same(got["d"], expect(ieee.fma, (a, b, c)))


def test_f32_roots_and_reciprocals() -> None:
    a = F32.corners(40)
    one = Value(ieee.Fraction(1), False)
    operations: dict[str, Operation] = {
        "sqrt": ieee.square_root,
        "rcp": lambda x: ieee.divide(one, x),
    }
    for name, operation in operations.items():
        lines = [f"{name}.{mode}.f32 %{mode}, %a;" for mode in MODES]
        lines.append(f"{name}.rn.ftz.f32 %ftz, %a;")
        got = lanewise("\n".join(lines), {"a": a}, dict.fromkeys((*MODES, "ftz"), np.uint32))
        for mode in MODES:
            assert same(got[mode], expect(operation, (a,), mode)), (name, mode)
        assert same(got["ftz"], expect(operation, (a,), ftz=True)), name


def test_f32_signs() -> None:
    a = F32.corners()
    b = np.resize(F32.corners()[::-1], a.shape)
    text = """
        abs.f32 %d, %a;
        neg.f32 %e, %a;
        abs.ftz.f32 %f, %a;
        neg.ftz.f32 %g, %a;
        copysign.f32 %h, %a, %b;
    """
    got = lanewise(text, {"a": a, "b": b}, dict.fromkeys("defgh", np.uint32))
    nan = np.isnan(a.view(np.float32))
    numbers = a[~nan]
    assert np.array_equal(got["d"][~nan], numbers & 0x7FFFFFFF)
    assert np.array_equal(got["e"][~nan], numbers ^ 0x80000000)
    flushed = np.array([F32.flush(int(v)) for v in numbers], np.uint32)
    assert np.array_equal(got["f"][~nan], flushed & 0x7FFFFFFF)
    assert np.array_equal(got["g"][~nan], flushed ^ 0x80000000)
    for name in "defg":
        assert np.isnan(got[name][nan].view(np.float32)).all()
    # copysign d, a, b: the sign of a with the magnitude of b.
    assert np.array_equal(got["h"], (a & 0x80000000) | (b & 0x7FFFFFFF))


def test_f32_minima() -> None:
    a, b = two_operands()
    c = np.resize(F32.corners(8)[::3], a.shape)
    for name, operation in (("min", ieee.minimum), ("max", ieee.maximum)):
        text = f"""
            {name}.f32 %d, %a, %b;
            {name}.ftz.f32 %e, %a, %b;
            {name}.NaN.f32 %f, %a, %b;
            {name}.f32 %g, %a, %b, %c;
            {name}.NaN.f32 %h, %a, %b, %c;
        """
        sources, results = {"a": a, "b": b, "c": c}, dict.fromkeys("defgh", np.uint32)
        got = lanewise(text, sources, results, "sm_100")
        assert np.array_equal(got["d"], expect(operation, (a, b)))
        assert np.array_equal(got["e"], expect(operation, (a, b), ftz=True))

        def strict(*values: Value, join: Operation = operation) -> Value:
            if any(v.is_nan for v in values):
                return ieee.NAN
            return join(values[0], join(*values[1:])) if len(values) == 3 else join(*values)

        assert np.array_equal(got["f"], expect(strict, (a, b)))
        assert np.array_equal(
            got["g"], expect(lambda x, y, z, op=operation: op(x, op(y, z)), (a, b, c))
        )
        assert np.array_equal(got["h"], expect(strict, (a, b, c)))


PROPERTIES: dict[str, Callable[[Value], bool]] = {
    "finite": lambda v: v.magnitude < math.inf,
    "infinite": lambda v: v.magnitude == math.inf,
    "number": lambda v: not v.is_nan,
    "notanumber": lambda v: v.is_nan,
    "normal": lambda v: v.magnitude == 0 or 2.0**-126 <= v.magnitude < math.inf,
    "subnormal": lambda v: 0 < v.magnitude < 2.0**-126,
}


def test_testp() -> None:
    a = F32.corners()
    text = "\n".join(f"testp.{name}.f32 %{name}, %a;" for name in PROPERTIES)
    got = lanewise(text, {"a": a}, dict.fromkeys(PROPERTIES, bool))
    for name, holds in PROPERTIES.items():
        assert got[name].tolist() == [holds(F32.value(v)) for v in a.tolist()], name


ORDERED: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}


def comparison(name: str, x: float, y: float) -> bool:
    """An ordered comparison is false, an unordered one true if an operand is NaN."""
    unordered = x != x or y != y
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    if unordered:
        return name.endswith("u")
    return ORDERED[name.removesuffix("u")](x, y)


COMPARISONS = [*ORDERED, *(f"{name}u" for name in ORDERED), "num", "nan"]


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
def test_comparisons(kind: str) -> None:
    form = {"f32": F32, "f64": F64, "f16": ieee.F16, "bf16": ieee.BF16}[kind]
    a, b = pairs(form.corners(2), form.corners(2)[::2])
    c = np.arange(len(a)) % 3 == 0
    lines, results = [], {}
    for name in COMPARISONS:
        lines.append(f"setp.{name}.{kind} %p{name}|%q{name}, %a, %b;")
        lines.append(f"setp.{name}.and.{kind} %c{name}, %a, %b, %c;")
        lines.append(f"setp.{name}.xor.{kind} %x{name}|%y{name}, %a, %b, !%c;")
        lines.append(f"set.{name}.u32.{kind} %s{name}, %a, %b;")
        lines.append(f"set.{name}.or.f32.{kind} %t{name}, %a, %b, %c;")
        results |= {f"{k}{name}": bool for k in "pqcxy"}
        results |= {f"s{name}": np.uint32, f"t{name}": np.float32}
    got = lanewise("\n".join(lines), {"a": a, "b": b, "c": c}, results)
    x, y = ([float(form.value(v).signed) for v in s.tolist()] for s in (a, b))
    for name in COMPARISONS:
        wanted = np.array([comparison(name, *row) for row in zip(x, y, strict=True)])
        assert np.array_equal(got[f"p{name}"], wanted), name
        assert np.array_equal(got[f"q{name}"], ~wanted), name
        assert np.array_equal(got[f"c{name}"], wanted & c), name
        assert np.array_equal(got[f"x{name}"], wanted ^ ~c), name
        assert np.array_equal(got[f"y{name}"], ~wanted ^ ~c), name
        assert np.array_equal(got[f"s{name}"] == 0xFFFFFFFF, wanted), name
        assert np.array_equal(got[f"t{name}"], (wanted | c).astype(np.float32)), name


def test_comparison_with_ftz() -> None:
    a = np.array([1e-40, -1e-40, 1e-40, 1e-40], np.float32)
    b = np.array([0, 0, -1e-40, 1], np.float32)
    text = "setp.eq.ftz.f32 %p, %a, %b;\nsetp.eq.f32 %q, %a, %b;"
    got = lanewise(text, {"a": a, "b": b}, {"p": bool, "q": bool})
    assert got["p"].tolist() == [True, True, True, False]
    assert got["q"].tolist() == [False] * 4


def test_f64_arithmetic() -> None:
    a, b = pairs(F64.corners(4), F64.corners(4)[::2])
    c = np.resize(F64.corners(4)[::3], a.shape)
    one = Value(ieee.Fraction(1), False)
    operations: dict[str, tuple[Operation, int]] = {
        "add": (ieee.add, 2),
        "add.rn": (ieee.add, 2),
        "sub": (lambda x, y: ieee.add(x, ieee.negate(y)), 2),
        "mul": (ieee.multiply, 2),
        "div.rn": (ieee.divide, 2),
        "min": (ieee.minimum, 2),
        "max": (ieee.maximum, 2),
        "fma.rn": (ieee.fma, 3),
        "sqrt.rn": (ieee.square_root, 1),
        "rcp.rn": (lambda x: ieee.divide(one, x), 1),
        "abs": (lambda x: Value(x.magnitude, False), 1),
        "neg": (ieee.negate, 1),
    }
    text = "\n".join(
        f"{name}.f64 %d{k}, {', '.join(f'%{s}' for s in 'abc'[:count])};"
        for k, (name, (_, count)) in enumerate(operations.items())
    )
    results = {f"d{k}": np.uint64 for k in range(len(operations))}
    got = lanewise(text, {"a": a, "b": b, "c": c}, results)
    for k, (name, (operation, count)) in enumerate(operations.items()):
        wanted = expect(operation, (a, b, c)[:count], form=F64)
        assert same(got[f"d{k}"], wanted, F64), name


def ulps(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """The distance of float32 results from float64 ones in units of the result's last place."""
    place = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    return np.abs(got.astype(np.float64) - exact) / place


# The ISA's bounds: ulp of the result, or an absolute error.
APPROXIMATE: list[tuple[str, Callable[[np.ndarray], np.ndarray], float, float, str]] = [
    ("ex2.approx.f32", np.exp2, -120, 120, "2 ulp"),
    ("ex2.approx.ftz.f32", np.exp2, -120, 120, "2 ulp"),
    ("lg2.approx.f32", np.log2, 2, 1e30, "1 ulp"),
    ("lg2.approx.f32", np.log2, 0.5, 2, "absolute 2^-22"),
    ("rcp.approx.f32", np.reciprocal, 1e-30, 1e30, "1 ulp"),
    ("rcp.approx.ftz.f32", np.reciprocal, -1e30, -1e-30, "1 ulp"),
    ("sqrt.approx.f32", np.sqrt, 1e-30, 1e30, "relative 2^-23"),
    ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(x), 1e-30, 1e30, "relative 2^-22.9"),
    ("sin.approx.f32", np.sin, -math.pi, math.pi, "absolute 2^-20.5"),
    ("cos.approx.f32", np.cos, -math.pi, math.pi, "absolute 2^-20.5"),
    ("tanh.approx.f32", np.tanh, -10, 10, "relative 2^-11"),
]


@pytest.mark.parametrize("case", APPROXIMATE, ids=lambda c: f"{c[0]} {c[4]}")
def test_approximate_functions(
    case: tuple[str, Callable[[np.ndarray], np.ndarray], float, float, str],
) -> None:
    instruction, function, low, high, bound = case
    generator = np.random.default_rng(1)
    if low > 0 and high / low > 100:
        a = np.exp(generator.uniform(math.log(low), math.log(high), 512)).astype(np.float32)
    else:
        a = generator.uniform(low, high, 512).astype(np.float32)
    got = lanewise(f"{instruction} %d, %a;", {"a": a}, {"d": np.float32})["d"]
    exact = function(a.astype(np.float64))
    kind, size = bound.split()
    if size == "ulp":
        assert (ulps(got, exact) <= float(kind)).all()
    else:
        error = np.abs(got - exact) / (np.abs(exact) if kind == "relative" else 1)
        assert (error <= 2.0 ** float(size.removeprefix("2^"))).all()


INF, NAN = math.inf, math.nan
# Results the ISA tabulates for special operands: -inf, -subnormal, -0, +0, +subnormal, +inf, NaN.
SPECIAL = np.array([-INF, -1e-40, -0.0, 0.0, 1e-40, INF, NAN], np.float32)
SPECIAL_RESULTS = {
    "ex2.approx.ftz.f32": [0, 1, 1, 1, 1, INF, NAN],
    "lg2.approx.ftz.f32": [NAN, -INF, -INF, -INF, -INF, INF, NAN],
    "rcp.approx.ftz.f32": [-0.0, -INF, -INF, INF, INF, 0.0, NAN],
    "sqrt.approx.ftz.f32": [NAN, -0.0, -0.0, 0.0, 0.0, INF, NAN],
    "rsqrt.approx.ftz.f32": [NAN, -INF, -INF, INF, INF, 0.0, NAN],
    "sin.approx.ftz.f32": [NAN, -0.0, -0.0, 0.0, 0.0, NAN, NAN],
    "cos.approx.ftz.f32": [NAN, 1, 1, 1, 1, NAN, NAN],
}


@pytest.mark.parametrize("instruction", SPECIAL_RESULTS)
def test_approximate_functions_of_special_values(instruction: str) -> None:
    got = lanewise(f"{instruction} %d, %a;", {"a": SPECIAL}, {"d": np.float32})["d"]
    wanted = np.array(SPECIAL_RESULTS[instruction], np.float32)
    assert np.array_equal(got, wanted, equal_nan=True)
    numbers = ~np.isnan(wanted)
    assert np.array_equal(np.signbit(got[numbers]), np.signbit(wanted[numbers]))


def test_approximate_division() -> None:
    generator = np.random.default_rng(5)
    a = generator.normal(size=512).astype(np.float32)
    b = np.exp2(generator.uniform(-125, 125, 512)).astype(np.float32)
    text = "div.approx.f32 %d, %a, %b;\ndiv.full.f32 %e, %a, %b;"
    got = lanewise(text, {"a": a, "b": b}, {"d": np.float32, "e": np.float32})
    exact = a.astype(np.float64) / b
    normal = np.abs(exact) >= 2.0**-126
    for name in "de":
        assert (ulps(got[name], exact)[normal] <= 2).all()


def test_approximate_division_by_huge_divisors() -> None:
    """For 2^126 < |b| < 2^128 div.approx gives 0, or NaN if a is infinite (PTX ISA, div)."""
    b = np.array([1.5 * 2.0**126, -(2.0**127), 1.9 * 2.0**127] * 3, np.float32)
    a = np.array([1, 3e38, INF, -1, -3e38, -INF, 2, 4, 8], np.float32)
    got = lanewise("div.approx.f32 %d, %a, %b;", {"a": a, "b": b}, {"d": np.float32})["d"]
    infinite = np.isinf(a)
    assert (got[~infinite] == 0).all()
    assert np.isnan(got[infinite]).all()


def test_constants_in_float_instructions() -> None:
    a = np.array([0.5, -3.0, 1e10, 0.0], np.float32)
    text = """
        add.f32 %d, %a, 0f3F800000;
        mul.f32 %e, %a, 0fC0000000;
        fma.rn.f32 %f, %a, 2.5, 1.0;
        mov.f32 %g, 0f7FC00000;
    """
    got = lanewise(text, {"a": a}, dict.fromkeys("defg", np.float32))
    assert np.array_equal(got["d"], a + np.float32(1))
    assert np.array_equal(got["e"], a * np.float32(-2))
    assert np.array_equal(got["f"], a * np.float32(2.5) + np.float32(1))
    assert np.isnan(got["g"]).all()


def test_constants_in_f64_instructions() -> None:
    a = np.array([0.5, -3.0, 1e10, 0.0])
    text = (
        "add.f64 %d, %a, 0d3FF0000000000000;\nmul.f64 %e, %a, 0.1;\nfma.rn.f64 %f, %a, 2.0, -1.0;"
    )
    got = lanewise(text, {"a": a}, dict.fromkeys("def", np.float64))
    assert np.array_equal(got["d"], a + 1)
    assert np.array_equal(got["e"], a * 0.1)
    assert np.array_equal(got["f"], a * 2 - 1)
