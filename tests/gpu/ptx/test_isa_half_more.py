"""Packed results of set, magnitudes with a product's sign, and out-of-bounds NaNs of halves."""

from __future__ import annotations

import math

import ieee
import numpy as np
import pytest
from ieee import BF16, F16, F32, Format
from lanes import lanewise, pairs

FORMS = {"f16": F16, "bf16": BF16}


def packed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


def ordered(form: Format, x: int, y: int, name: str) -> bool:
    a, b = (float(form.value(v).signed) for v in (x, y))
    if name == "ltu":
        return not a >= b
    if name == "nan":
        return a != a or b != b
    return {"lt": a < b, "ge": a >= b, "ne": a < b or a > b}[name]


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("name", ["lt", "ge", "ne", "ltu", "nan"])
def test_set(kind: str, name: str) -> None:
    form = FORMS[kind]
    one = form.bias << form.fraction
    a, b = pairs(form.corners(1), form.corners(1)[::2])
    c = np.arange(len(a)) % 3 == 0
    text = f"""
        set.{name}.{kind}.{kind} %d, %a, %b;
        set.{name}.u16.{kind} %e, %a, %b;
        set.{name}.s32.{kind} %f, %a, %b;
        set.{name}.{kind}x2.{kind}x2 %g, %v, %w;
        set.{name}.u32.{kind}x2 %h, %v, %w;
        set.{name}.and.{kind}x2.{kind}x2 %i, %v, %w, !%c;
        set.{name}.or.{kind}.{kind} %j, %a, %b, %c;
    """
    sources = {"a": a, "b": b, "v": packed(a, b), "w": packed(b, a), "c": c}
    results = {**dict.fromkeys("dej", np.uint16), **dict.fromkeys("fghi", np.uint32)}
    got = lanewise(text, sources, results)
    low = np.array([ordered(form, x, y, name) for x, y in zip(a.tolist(), b.tolist(), strict=True)])
    high = np.array(
        [ordered(form, y, x, name) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    )
    assert np.array_equal(got["d"], low * one)
    assert np.array_equal(got["e"], low * 0xFFFF)
    assert np.array_equal(got["f"], low * 0xFFFFFFFF)
    assert np.array_equal(got["g"], packed(low * one, high * one))
    assert np.array_equal(got["h"], packed(low * 0xFFFF, high * 0xFFFF))
    assert np.array_equal(got["i"], packed((low & ~c) * one, (high & ~c) * one))
    assert np.array_equal(got["j"], (low | c) * one)


def test_set_of_other_types_to_halves() -> None:
    a, b = pairs(F32.corners(2), F32.corners(2)[::3])
    i = a.view(np.int32)
    text = """
        set.lt.f16.f32 %d, %a, %b;
        set.lt.bf16.s32 %e, %i, %j;
    """
    sources = {"a": a, "b": b, "i": i, "j": b.view(np.int32)}
    got = lanewise(text, sources, {"d": np.uint16, "e": np.uint16})
    x, y = ([float(F32.value(v).signed) for v in s.tolist()] for s in (a, b))
    assert got["d"].tolist() == [0x3C00 * (u < v) for u, v in zip(x, y, strict=True)]
    assert np.array_equal(got["e"], 0x3F80 * (i < b.view(np.int32)))


@pytest.mark.parametrize("kind", [*FORMS, "f32"])
@pytest.mark.parametrize("name", ["min", "max"])
def test_magnitudes_with_the_sign_of_a_product(kind: str, name: str) -> None:
    form = {**FORMS, "f32": F32}[kind]
    dtype = f"u{form.bits // 8}"
    a, b = pairs(form.corners(3), form.corners(3)[::2])
    text = f"{name}.xorsign.abs.{kind} %d, %a, %b;\n{name}.NaN.xorsign.abs.{kind} %e, %a, %b;"
    got = lanewise(text, {"a": a, "b": b}, {"d": dtype, "e": dtype})
    choose = ieee.minimum if name == "min" else ieee.maximum
    for k, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        sign = (x ^ y) & form.sign
        size = form.encode(choose(form.value(x & ~form.sign), form.value(y & ~form.sign)))
        wanted = size if size == form.nan else size | sign
        assert int(got["d"][k]) == wanted
        either = form.value(x).is_nan or form.value(y).is_nan
        assert int(got["e"][k]) == (form.nan if either else wanted)


def test_three_magnitudes() -> None:
    a, b, c = pairs(*(F32.corners(1)[::k] for k in (4, 5, 6)))
    text = "min.abs.f32 %d, %a, %b, %c;\nmax.NaN.abs.f32 %e, %a, %b, %c;"
    sources = {"a": a, "b": b, "c": c}
    got = lanewise(text, sources, {"d": np.uint32, "e": np.uint32}, "sm_100")
    for k, row in enumerate(zip(a.tolist(), b.tolist(), c.tolist(), strict=True)):
        x, y, z = (F32.value(v & ~F32.sign) for v in row)
        assert int(got["d"][k]) == F32.encode(ieee.minimum(ieee.minimum(x, y), z))
        largest = F32.encode(ieee.maximum(ieee.maximum(x, y), z))
        assert int(got["e"][k]) == (F32.nan if any(v.is_nan for v in (x, y, z)) else largest)


@pytest.mark.parametrize("kind", FORMS)
def test_out_of_bounds_operands(kind: str) -> None:
    """fma.oob gives +0 where an operand is the NaN that tensor copies fill with."""
    form, outside = FORMS[kind], 0x7FF7
    values = np.concatenate([form.corners(1)[::3], np.array([outside], np.uint16)])
    a, b, c = pairs(values, values[::2], values[::3])
    sources = {"a": a, "b": b, "c": c, "x": packed(a, b), "y": packed(b, c), "z": packed(c, a)}
    text = f"""
        fma.rn.oob.{kind} %d, %a, %b, %c;
        fma.rn.{kind} %e, %a, %b, %c;
        fma.rn.oob.relu.{kind} %f, %a, %b, %c;
        fma.rn.oob.{kind}x2 %g, %x, %y, %z;
        fma.rn.{kind}x2 %h, %x, %y, %z;
    """
    results = {**dict.fromkeys("def", np.uint16), **dict.fromkeys("gh", np.uint32)}
    got = lanewise(text, sources, results)
    any_outside = (a == outside) | (b == outside) | (c == outside)
    assert any_outside.any()
    assert np.array_equal(got["d"], np.where(any_outside, 0, got["e"]))
    negative = (got["d"] & 0x8000) != 0
    assert np.array_equal(got["f"], np.where(negative, 0, got["d"]))
    low = np.where(any_outside, 0, got["h"] & 0xFFFF)
    high = np.where(any_outside, 0, got["h"] >> 16)
    assert np.array_equal(got["g"], packed(low, high))


def test_conversions_with_saturation() -> None:
    """.sat limits to [0, 1], also in f16 and f64, and makes 0 of NaN."""
    x = np.array([-1.0, -0.0, 0.0, 0.3, 1.0, 7.0, math.inf, math.nan], np.float64)
    half = x.astype(np.float16).view(np.uint16)
    n = np.arange(-3, 5).astype(np.int32)
    text = """
        cvt.sat.f64.f64 %d, %x;
        cvt.rn.sat.f16.f64 %e, %x;
        cvt.sat.f16.f16 %f, %h;
        cvt.rn.sat.f16.s32 %g, %n;
        cvt.sat.f64.f16 %i, %h;
    """
    results = {"d": np.float64, "e": np.uint16, "f": np.uint16, "g": np.uint16, "i": np.float64}
    got = lanewise(text, {"x": x, "h": half, "n": n}, results)
    wanted = np.array([0, 0, 0, 0.3, 1, 1, 1, 0], np.float64)
    assert np.array_equal(got["d"].view(np.uint64), wanted.view(np.uint64))
    bits = wanted.astype(np.float16).view(np.uint16)
    assert np.array_equal(got["e"], bits)
    assert np.array_equal(got["f"], bits)
    assert np.array_equal(got["g"], np.clip(n, 0, 1).astype(np.float16).view(np.uint16))
    assert np.array_equal(got["i"], wanted.astype(np.float16).astype(np.float64))


def test_bf16_rounded_to_whole_numbers() -> None:
    values = np.array([-2.5, -0.4, 0.5, 1.5, 2.75, 300.0, math.inf], np.float32)
    a = (values.view(np.uint32) >> 16).astype(np.uint16)
    text = "\n".join(f"cvt.{mode}.bf16.bf16 %{mode}, %a;" for mode in ("rni", "rzi", "rmi", "rpi"))
    got = lanewise(text, {"a": a}, dict.fromkeys(("rni", "rzi", "rmi", "rpi"), np.uint16))
    exact = (a.astype(np.uint32) << 16).view(np.float32)
    functions = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    for mode, function in functions.items():
        assert np.array_equal(got[mode], function(exact).view(np.uint32) >> 16), mode
