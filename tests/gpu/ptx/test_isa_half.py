"""f16 and bf16 arithmetic, one by one and packed in pairs, against exact rational arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import ieee
import numpy as np
import pytest
from ieee import BF16, F16, Format, Value
from lanes import lanewise, pairs

FORMS = {"f16": F16, "bf16": BF16}
Operation = Callable[..., Value]
OPERATIONS: dict[str, Operation] = {
    "add": ieee.add,
    "sub": lambda x, y: ieee.add(x, ieee.negate(y)),
    "mul": ieee.multiply,
    "min": ieee.minimum,
    "max": ieee.maximum,
}


def expect(form: Format, operation: Operation, *sources: np.ndarray) -> np.ndarray:
    rows = zip(*(s.tolist() for s in sources), strict=True)
    bits = [form.encode(operation(*map(form.value, row))) for row in rows]
    return np.array(bits, np.uint16)


def same(got: np.ndarray, wanted: np.ndarray, form: Format) -> bool:
    """Equal bits, or both NaN: which one an operation makes is for the formats' own tests."""

    def is_nan(bits: np.ndarray) -> np.ndarray:
        return (bits & 0x7FFF) > form.infinity

    return bool(((got == wanted) | (is_nan(got) & is_nan(wanted))).all())


def packed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


@pytest.mark.parametrize("kind", FORMS)
def test_two_operands(kind: str) -> None:
    form = FORMS[kind]
    a, b = pairs(form.corners(10), form.corners(10)[::2])
    text = "\n".join(f"{name}.{kind} %{name}, %a, %b;" for name in OPERATIONS)
    text += f"\nadd.rn.{kind} %rounded, %a, %b;"
    results = dict.fromkeys((*OPERATIONS, "rounded"), np.uint16)
    got = lanewise(text, {"a": a, "b": b}, results)
    for name, operation in OPERATIONS.items():
        assert same(got[name], expect(form, operation, a, b), form), name
    assert np.array_equal(got["rounded"], got["add"])


@pytest.mark.parametrize("kind", FORMS)
def test_packed_pairs(kind: str) -> None:
    form = FORMS[kind]
    a, b = pairs(form.corners(4), form.corners(4)[::2])
    c, d = a[::-1].copy(), np.roll(b, 5)
    text = "\n".join(f"{name}.{kind}x2 %{name}, %a, %b;" for name in OPERATIONS)
    sources = {"a": packed(a, c), "b": packed(b, d)}
    got = lanewise(text, sources, dict.fromkeys(OPERATIONS, np.uint32))
    for name, operation in OPERATIONS.items():
        low, high = got[name].astype(np.uint16), (got[name] >> 16).astype(np.uint16)
        assert same(low, expect(form, operation, a, b), form), name
        assert same(high, expect(form, operation, c, d), form), name


@pytest.mark.parametrize("kind", FORMS)
def test_fma(kind: str) -> None:
    """Rounded once: also where float32 or float64 in between would round twice."""
    form = FORMS[kind]
    a, b, c = pairs(form.corners(3)[::2], form.corners(3)[1::3], form.corners(3)[::3])
    got = lanewise(
        f"fma.rn.{kind} %d, %a, %b, %c;\nfma.rn.relu.{kind} %e, %a, %b, %c;",
        {"a": a, "b": b, "c": c},
        {"d": np.uint16, "e": np.uint16},
    )
    wanted = expect(form, ieee.fma, a, b, c)
    assert same(got["d"], wanted, form)
    negative = ((wanted & 0x8000) != 0) & ((wanted & 0x7FFF) <= form.infinity)
    assert same(got["e"], np.where(negative, 0, wanted).astype(np.uint16), form)


def test_fma_double_rounding() -> None:
    """1.0009765625 x 1.0009765625 + 2^-24 lies just above the middle of two f16 numbers."""
    a = np.array([1 + 2.0**-10, 1.5 + 2.0**-10], np.float16)
    b = np.array([1 + 2.0**-10, 1 + 2.0**-9], np.float16)
    c = np.array([2.0**-24, -(2.0**-24)], np.float16)
    bits = {n: x.view(np.uint16) for n, x in (("a", a), ("b", b), ("c", c))}
    got = lanewise("fma.rn.f16 %d, %a, %b, %c;", bits, {"d": np.uint16})
    assert np.array_equal(got["d"], expect(F16, ieee.fma, *bits.values()))


@pytest.mark.parametrize("kind", FORMS)
def test_packed_fma(kind: str) -> None:
    form = FORMS[kind]
    generator = np.random.default_rng(4)
    one = form.bias << form.fraction
    spread = 3 << form.fraction
    halves = generator.integers(one - spread, one + spread, (3, 2, 512), np.uint16)
    halves |= generator.integers(0, 2, halves.shape, np.uint16) << 15
    words = {n: packed(*pair) for n, pair in zip("abc", halves, strict=True)}
    got = lanewise(f"fma.rn.{kind}x2 %d, %a, %b, %c;", words, {"d": np.uint32})["d"]
    for k, half in enumerate((got.astype(np.uint16), (got >> 16).astype(np.uint16))):
        assert np.array_equal(half, expect(form, ieee.fma, *halves[:, k]))


def test_saturation() -> None:
    a, b = pairs(F16.corners(6), F16.corners(6)[::2])
    text = "add.sat.f16 %d, %a, %b;\nmul.sat.f16 %e, %a, %b;\nfma.rn.sat.f16 %f, %a, %b, %a;"
    got = lanewise(text, {"a": a, "b": b}, dict.fromkeys("def", np.uint16))
    operations: dict[str, Operation] = {
        "d": ieee.add,
        "e": ieee.multiply,
        "f": lambda x, y: ieee.fma(x, y, x),
    }
    for name, operation in operations.items():
        exact = expect(F16, operation, a, b)
        wanted = np.array([F16.saturate(int(v)) for v in exact], np.uint16)
        assert np.array_equal(got[name], wanted), name


def test_f16_flush_to_zero() -> None:
    """.ftz flushes f16 subnormals, of operands and of results, to zeros of their sign."""
    a, b = pairs(F16.corners(6), F16.corners(6)[::2])
    names = ["add", "sub", "mul", "min", "max"]
    text = "\n".join(f"{name}.ftz.f16 %{name}, %a, %b;" for name in names)
    text += "\nfma.rn.ftz.f16 %fma, %a, %b, %b;\nabs.ftz.f16 %abs, %a;\nneg.ftz.f16x2 %neg, %p;"
    sources = {"a": a, "b": b, "p": packed(a, b)}
    results = dict.fromkeys((*names, "fma", "abs"), np.uint16) | {"neg": np.uint32}
    got = lanewise(text, sources, results)
    flushed = [np.array([F16.flush(int(v)) for v in s], np.uint16) for s in (a, b)]
    cases = {name: OPERATIONS[name] for name in names}
    cases["fma"] = lambda x, y: ieee.fma(x, y, y)
    for name, operation in cases.items():
        exact = expect(F16, operation, *flushed)
        wanted = np.array([F16.flush(int(v)) for v in exact], np.uint16)
        assert same(got[name], wanted, F16), name
    assert same(got["abs"], flushed[0] & 0x7FFF, F16)
    assert same(got["neg"].astype(np.uint16), flushed[0] ^ 0x8000, F16)
    assert same((got["neg"] >> 16).astype(np.uint16), flushed[1] ^ 0x8000, F16)


@pytest.mark.parametrize("kind", FORMS)
def test_signs_and_nan_minima(kind: str) -> None:
    form = FORMS[kind]
    a, b = pairs(form.corners(2), form.corners(2)[::2])
    text = f"""
        abs.{kind} %d, %a;
        neg.{kind} %e, %a;
        min.NaN.{kind} %f, %a, %b;
        max.NaN.{kind} %g, %a, %b;
        abs.{kind}x2 %h, %p;
        neg.{kind}x2 %i, %p;
    """
    results = dict.fromkeys("defg", np.uint16) | dict.fromkeys("hi", np.uint32)
    got = lanewise(text, {"a": a, "b": b, "p": packed(a, b)}, results)
    assert same(got["d"], a & 0x7FFF, form)
    assert same(got["e"], a ^ 0x8000, form)

    def strict(operation: Operation) -> Operation:
        return lambda x, y: ieee.NAN if x.is_nan or y.is_nan else operation(x, y)

    # "If either input is NaN, the result is canonical NaN": 0x7FFF.
    assert np.array_equal(got["f"], expect(form, strict(ieee.minimum), a, b))
    assert np.array_equal(got["g"], expect(form, strict(ieee.maximum), a, b))
    assert np.array_equal(got["h"], packed(a & 0x7FFF, b & 0x7FFF))
    assert np.array_equal(got["i"], packed(a ^ 0x8000, b ^ 0x8000))


@pytest.mark.parametrize("kind", FORMS)
def test_packed_comparisons(kind: str) -> None:
    form = FORMS[kind]
    a, b = pairs(form.corners(1), form.corners(1)[::2])
    c = np.arange(len(a)) % 2 == 0
    text = f"""
        setp.lt.{kind}x2 %p|%q, %a, %b;
        setp.neu.{kind}x2 %r|%s, %a, %b;
        setp.lt.and.{kind}x2 %t|%u, %a, %b, %c;
    """
    sources = {"a": packed(a, b), "b": packed(b, a), "c": c}
    got = lanewise(text, sources, dict.fromkeys("pqrstu", bool))
    x, y = ([float(form.value(v).signed) for v in s.tolist()] for s in (a, b))
    assert got["p"].tolist() == [u < v for u, v in zip(x, y, strict=True)]
    assert got["q"].tolist() == [v < u for u, v in zip(x, y, strict=True)]
    unequal = [u != v for u, v in zip(x, y, strict=True)]
    assert got["r"].tolist() == unequal == got["s"].tolist()
    assert np.array_equal(got["t"], got["p"] & c)
    assert np.array_equal(got["u"], got["q"] & c)


@pytest.mark.parametrize("kind", ["f16", "bf16", "f16x2", "bf16x2"])
def test_approximate_functions(kind: str) -> None:
    """ex2: 2^-9.9 (f16) or 2^-7 (bf16) relative; tanh: 2^-10.987 or 2^-8 absolute (PTX ISA)."""
    form = FORMS[kind.removesuffix("x2")]
    generator = np.random.default_rng(2)
    values = generator.uniform(-8, 8, 256)
    codes = [form.encode(Value(abs(ieee.Fraction(v)), v < 0)) for v in values]
    half = np.array(codes, np.uint16)
    x = np.array([float(form.value(int(c)).signed) for c in half])
    is_pair = kind.endswith("x2")
    flag = ".ftz" if form is BF16 else ""
    text = f"ex2.approx{flag}.{kind} %d, %a;\ntanh.approx.{kind} %e, %a;"
    source = packed(half, half[::-1]) if is_pair else half
    got = lanewise(text, {"a": source}, dict.fromkeys("de", source.dtype))

    def numbers(bits: np.ndarray) -> np.ndarray:
        return np.array([float(form.value(int(c)).signed) for c in bits.astype(np.uint16)])

    bound = 2.0**-7 if form is BF16 else 2.0**-9.9
    assert (np.abs(numbers(got["d"]) - np.exp2(x)) <= bound * np.exp2(x)).all()
    bound = 2.0**-8 if form is BF16 else 2.0**-10.987
    assert (np.abs(numbers(got["e"]) - np.tanh(x)) <= bound).all()
    if is_pair:
        high = numbers(got["d"] >> 16)
        assert (np.abs(high - np.exp2(x[::-1])) <= 2.0**-7 * np.exp2(x[::-1])).all()
