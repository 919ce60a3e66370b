"""cvt of narrow floating formats, against the list of all values that each format has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from ieee import BF16, F16, F32
from lanes import lanewise, run

FAMILY = "sm_100a"


@dataclass(frozen=True)
class Narrow:
    """Bits of exponent and fraction, the exponent's bias, codes without a number, NaN's code."""

    exponent: int
    fraction: int
    bias: int
    infinity: int | None
    nans: tuple[int, ...]
    nan: int

    @property
    def sign(self) -> int:
        return 1 << (self.exponent + self.fraction)

    def value(self, code: int) -> Fraction | float:
        """What a code without its sign stands for."""
        if code in self.nans:
            return math.nan
        if code == self.infinity:
            return math.inf
        exponent, fraction = code >> self.fraction, code & ((1 << self.fraction) - 1)
        significand = fraction + ((1 << self.fraction) if exponent else 0)
        return significand * Fraction(2) ** (max(exponent, 1) - self.bias - self.fraction)

    def encode(self, x: float) -> int:
        """The nearest number, ties to the even code, too large ones to the largest."""
        if x != x:
            return self.nan
        finite = [c for c in range(self.sign) if c not in self.nans and c != self.infinity]
        sign = self.sign if math.copysign(1, x) < 0 else 0
        if abs(x) == math.inf:
            return sign | finite[-1]
        size = Fraction(abs(x))
        return sign | min(finite, key=lambda c: (abs(self.value(c) - size), c % 2))


FORMATS = {
    "e4m3": Narrow(4, 3, 7, None, (0x7F,), 0x7F),
    "e5m2": Narrow(5, 2, 15, 0x7C, (0x7D, 0x7E, 0x7F), 0x7F),
    "e2m3": Narrow(2, 3, 1, None, (), 0x1F),
    "e3m2": Narrow(3, 2, 3, None, (), 0x1F),
    "e2m1": Narrow(2, 1, 1, None, (), 0x7),
}


def numbers(form: Narrow) -> np.ndarray:
    """All values, all midpoints, their float32 neighbours, and what is out of range."""
    values = [form.value(c) for c in range(form.sign)]
    finite = [float(v) for v in values if v == v and v != math.inf]
    middles = [(a + b) / 2 for a, b in pairwise(finite)]
    exact = np.array([*finite, *middles, finite[-1] * 1.03, finite[-1] * 1.5, 1e30], np.float32)
    around = [exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(math.inf))]
    found = np.concatenate([*around, np.array([math.inf, math.nan, 1e-40], np.float32)])
    return np.concatenate([found, -found])


def clamped(code: int, x: float, form: Narrow) -> int:
    """.relu: negative numbers become 0; NaN stays."""
    return 0 if x == x and math.copysign(1, x) < 0 else code


@pytest.mark.parametrize("name", FORMATS)
def test_from_f32(name: str) -> None:
    form = FORMATS[name]
    a = numbers(form)
    b = a[::-1].copy()
    spacing = 4 if name == "e2m1" else 8
    dtype = np.uint8 if name == "e2m1" else np.uint16
    target = "sm_90a" if name in ("e4m3", "e5m2") else FAMILY
    text = f"""
        cvt.rn.satfinite.{name}x2.f32 %d, %a, %b;
        cvt.rn.satfinite.relu.{name}x2.f32 %e, %a, %b;
    """
    if name == "e2m1":
        text = f"""
            .reg .b8 %t; .reg .b16 %d16, %e16;
            cvt.rn.satfinite.{name}x2.f32 %t, %a, %b;
            mov.b16 %d, {{%t, 0}};
            cvt.rn.satfinite.relu.{name}x2.f32 %t, %a, %b;
            mov.b16 %e, {{%t, 0}};
        """
        dtype = np.uint16
    got = lanewise(text, {"a": a, "b": b}, {"d": dtype, "e": dtype}, target)
    codes = [form.encode(float(x)) for x in a]
    plain = [codes[k] << spacing | codes[-1 - k] for k in range(len(a))]
    assert got["d"].tolist() == plain
    relu = [clamped(c, float(x), form) for c, x in zip(codes, a, strict=True)]
    assert got["e"].tolist() == [relu[k] << spacing | relu[-1 - k] for k in range(len(a))]


@pytest.mark.parametrize("source", ["f16x2", "bf16x2"])
@pytest.mark.parametrize("name", FORMATS)
def test_from_packed_halves(name: str, source: str) -> None:
    form, half = FORMATS[name], F16 if source == "f16x2" else BF16
    values = [half.value(int(c)) for c in half.corners(60)]
    codes = half.corners(60)
    x = [float(v.signed) for v in values]
    words = codes.astype(np.uint32) | codes[::-1].astype(np.uint32) << 16
    early = name in ("e4m3", "e5m2") and source == "f16x2"
    text = f"cvt.rn.satfinite.{name}x2.{source} %d, %a;"
    if name == "e2m1":
        text = f".reg .b8 %t;\ncvt.rn.satfinite.{name}x2.{source} %t, %a;\nmov.b16 %d, {{%t, 0}};"
    got = lanewise(text, {"a": words}, {"d": np.uint16}, "sm_90a" if early else FAMILY)["d"]
    spacing = 4 if name == "e2m1" else 8
    narrow = [form.encode(math.copysign(v, -1) if s.negative and v == 0 else v)
              for v, s in zip(x, values, strict=True)]  # fmt: skip
    assert got.tolist() == [narrow[k] | narrow[-1 - k] << spacing for k in range(len(x))]


@pytest.mark.parametrize("name", FORMATS)
def test_to_f16_pairs(name: str) -> None:
    form = FORMATS[name]
    count = 2 * form.sign
    codes = np.arange(count, dtype=np.uint16)
    spacing = 4 if name == "e2m1" else 8
    words = (codes | codes[::-1] << spacing).astype(np.uint16)
    text = f"cvt.rn.f16x2.{name}x2 %d, %a;\ncvt.rn.relu.f16x2.{name}x2 %e, %a;"
    if name == "e2m1":
        text = ".reg .b8 %t, %u;\nmov.b16 {%t, %u}, %a;\n" + text.replace("%a", "%t")
    target = "sm_90a" if name in ("e4m3", "e5m2") else FAMILY
    got = lanewise(text, {"a": words}, {"d": np.uint32, "e": np.uint32}, target)

    def wanted(code: int, relu: bool) -> int:
        value = form.value(code % form.sign)
        if value != value:
            return 0x7FFF
        negative = code >= form.sign
        bits = int(np.float16(float(value)).view(np.uint16))
        return (0 if relu else bits | 0x8000) if negative else bits

    for result, relu in (("d", False), ("e", True)):
        halves = [wanted(c, relu) for c in range(count)]
        assert got[result].tolist() == [halves[k] | halves[-1 - k] << 16 for k in range(count)]


def power(x: float, mode: str, satfinite: bool) -> int:
    """ue8m0: the exponent code of |x|, rounded up or down to a power of two."""
    if x != x:
        return 0xFF
    size = abs(x)
    largest = 254 if satfinite else 0xFF
    if size == math.inf:
        return largest
    if size <= 2.0**-127:
        return 0
    mantissa, exponent = math.frexp(size)  # mantissa in [1/2, 1)
    code = exponent - 1 + 127 + (mode == "rp" and mantissa != 0.5)
    return code if code <= 254 else largest


@pytest.mark.parametrize("mode", ["rz", "rp"])
@pytest.mark.parametrize("tail", ["", ".satfinite"])
def test_powers_of_two(mode: str, tail: str) -> None:
    a = F32.corners(40).view(np.float32)
    a = np.concatenate([a, np.array([2.0**-127, 2.0**-126, 3e38, 2.0**127, 1.5], np.float32)])
    b = a[::-1].copy()
    words = (a.view(np.uint32) >> 16) | (b.view(np.uint32) & 0xFFFF0000)
    text = f"cvt.{mode}{tail}.ue8m0x2.f32 %d, %a, %b;\ncvt.{mode}{tail}.ue8m0x2.bf16x2 %e, %w;"
    sources = {"a": a, "b": b, "w": words}
    got = lanewise(text, sources, {"d": np.uint16, "e": np.uint16}, FAMILY)
    codes = [power(float(x), mode, bool(tail)) for x in a]
    assert got["d"].tolist() == [codes[k] << 8 | codes[-1 - k] for k in range(len(a))]
    halves = (a.view(np.uint32) & 0xFFFF0000).view(np.float32)
    codes = [power(float(x), mode, bool(tail)) for x in halves]
    assert got["e"].tolist() == [codes[-1 - k] << 8 | codes[k] for k in range(len(a))]


def test_powers_of_two_as_bf16() -> None:
    codes = np.arange(256, dtype=np.uint16)
    words = codes | codes[::-1] << 8
    got = lanewise("cvt.rn.bf16x2.ue8m0x2 %d, %a;", {"a": words}, {"d": np.uint32}, FAMILY)["d"]
    # 2^(code - 127): a normal bf16 has the code as its exponent; 2^-127 is subnormal.
    bits = [0x0040, *(c << 7 for c in range(1, 255)), 0x7FFF]
    assert got.tolist() == [bits[k] | bits[255 - k] << 16 for k in range(256)]


def test_the_compilers_way_to_four_bits() -> None:
    """cuda_fp4.h packs through 8-bit registers."""
    body = """
        {
        .reg .b8 t1, t2;
        mov.b32 %f1, 0f40000000; mov.b32 %f2, 0fBF000000;
        cvt.rn.satfinite.e2m1x2.f32 t1, %f1, %f2;
        mov.b16 %h1, {t1, 0};
        mov.b16 {t1, t2}, %h1;
        cvt.rn.f16x2.e2m1x2 %r1, t1;
        }
        mad.wide.u32 %rd1, %t5, 4, %x;
        st.global.u32 [%rd1], %r1;
    """
    got = run(body, {"x": np.zeros(32, np.uint32)}, target=FAMILY).arrays["x"]
    halves = got.view(np.float16).reshape(32, 2)
    assert (halves == np.array([-0.5, 2.0], np.float16)).all()
