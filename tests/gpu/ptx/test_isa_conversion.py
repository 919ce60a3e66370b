"""cvt between all pairs of types against exact rational arithmetic and ml_dtypes."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from ieee import BF16, F16, F32, F64, MODES, Format, Value
from lanes import corner_integers, lanewise, pairs

INTEGERS = [f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64)]
FORMS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
INTEGRAL = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def dtype_of(kind: str) -> np.dtype:
    return np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")


def limits(kind: str) -> tuple[int, int]:
    info = np.iinfo(dtype_of(kind))
    return int(info.min), int(info.max)


def corners(kind: str) -> np.ndarray:
    if kind in FORMS:
        return FORMS[kind].corners(20)
    return corner_integers(int(kind[1:]), kind[0] == "s")


def wrapped(values: list[int], kind: str) -> np.ndarray:
    dtype = dtype_of(kind)
    bits = 8 * dtype.itemsize
    return np.array([v & ((1 << bits) - 1) for v in values], f"u{dtype.itemsize}").view(dtype)


@pytest.mark.parametrize("source", INTEGERS)
def test_integer_to_integer(source: str) -> None:
    a = corners(source)
    text = "\n".join(
        f"cvt.{to}.{source} %{to}, %a;\ncvt.sat.{to}.{source} %t{to}, %a;" for to in INTEGERS
    )
    results = {f"{s}{to}": dtype_of(to) for to in INTEGERS for s in ("", "t")}
    got = lanewise(text, {"a": a}, results)
    for to in INTEGERS:
        low, high = limits(to)
        assert np.array_equal(got[to], wrapped(a.tolist(), to)), to
        clamped = [min(max(v, low), high) for v in a.tolist()]
        assert np.array_equal(got[f"t{to}"], wrapped(clamped, to)), to


@pytest.mark.parametrize("to", ["s8", "u8", "s16", "u16", "s32", "u32"])
def test_results_extend_into_wide_registers(to: str) -> None:
    """A result narrower than its register is extended by its own sign (PTX ISA, cvt)."""
    a = corner_integers(64, True)
    got = lanewise(f"cvt.{to}.s64 %d, %a;", {"a": a}, {"d": np.int64})
    assert np.array_equal(got["d"], a.astype(dtype_of(to)).astype(np.int64))


def near_integers(form: Format, bits: int) -> np.ndarray:
    """Numbers around halves and around the limits of integers of that many bits."""
    values = [0.5, 1.5, 2.5, 0.25, 0.75, 3.0, 100.5, 127.5, 128.5, 255.5]
    values += [2.0**bits, 2.0 ** (bits - 1), 2.0**bits - 1, 2.0 ** (bits - 1) - 1, 1.5 * 2.0**bits]
    codes = []
    for v in values:
        code = form.encode(Value(Fraction(v), False))
        codes += [code - 1, code, code + 1]
    positive = np.array(codes, f"u{form.bits // 8}")
    return np.concatenate((positive, positive | positive.dtype.type(form.sign)))


def to_integer(value: Value, to: str, mode: str, wide: bool) -> int:
    """Rounded, then clamped; NaN is 0, or 1 in the top bit if either side has 64 bits."""
    low, high = limits(to)
    if value.is_nan:
        return (high >> 1) + 1 if wide and low == 0 else low if wide else 0
    if value.magnitude == math.inf:
        return low if value.negative else high
    return min(max(INTEGRAL[mode](Fraction(value.signed)), low), high)


@pytest.mark.parametrize("source", FORMS)
@pytest.mark.parametrize("to", INTEGERS)
def test_float_to_integer(source: str, to: str) -> None:
    form = FORMS[source]
    a = np.concatenate((form.corners(20), near_integers(form, int(to[1:]))))
    text = "\n".join(f"cvt.{mode}.{to}.{source} %{mode}, %a;" for mode in INTEGRAL)
    got = lanewise(text, {"a": a}, dict.fromkeys(INTEGRAL, dtype_of(to)))
    wide = source == "f64" or to[1:] == "64"
    for mode in INTEGRAL:
        wanted = [to_integer(form.value(v), to, mode, wide) for v in a.tolist()]
        assert got[mode].tolist() == wanted, mode


def test_float_to_integer_with_ftz() -> None:
    a = np.array([1e-40, -1e-40, 1e-38, -1e-38], np.float32)
    text = "cvt.rpi.ftz.s32.f32 %d, %a;\ncvt.rpi.s32.f32 %e, %a;\ncvt.rmi.ftz.s32.f32 %f, %a;"
    got = lanewise(text, {"a": a}, dict.fromkeys("def", np.int32))
    assert got["d"].tolist() == [0, 0, 0, 0]
    assert got["e"].tolist() == [1, 0, 1, 0]
    assert got["f"].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("to", FORMS)
def test_integer_to_float(source: str, to: str) -> None:
    form = FORMS[to]
    a = corners(source)
    modes = MODES if to in ("f32", "f64", "f16") else ("rn", "rz")
    text = "\n".join(f"cvt.{mode}.{to}.{source} %{mode}, %a;" for mode in modes)
    got = lanewise(text, {"a": a}, dict.fromkeys(modes, f"u{form.bits // 8}"))
    for mode in modes:
        wanted = [form.encode(Value(Fraction(abs(v)), v < 0), mode) for v in a.tolist()]
        assert got[mode].tolist() == wanted, mode


def test_integer_to_float_saturated() -> None:
    a = np.array([-5, -1, 0, 1, 2, 100], np.int32)
    got = lanewise("cvt.rn.sat.f32.s32 %d, %a;", {"a": a}, {"d": np.float32})
    assert got["d"].tolist() == [0, 0, 0, 1, 1, 1]


def same(got: np.ndarray, wanted: list[int], form: Format) -> bool:
    """Equal bits, but a NaN of f64 or of a widened number may have any payload."""
    array = np.array(wanted, got.dtype)
    is_nan = (array & got.dtype.type(form.sign - 1)) > form.infinity
    got_nan = (got & got.dtype.type(form.sign - 1)) > form.infinity
    return bool(np.where(is_nan, got_nan, got == array).all())


NARROWING = [("f64", "f32"), ("f64", "f16"), ("f32", "f16"), ("f32", "bf16"), ("f64", "bf16")]
NARROWING += [("f16", "bf16"), ("bf16", "f16")]


@pytest.mark.parametrize(("source", "to"), NARROWING)
def test_float_to_narrower_float(source: str, to: str) -> None:
    wide, narrow = FORMS[source], FORMS[to]
    a = wide.corners(40)
    # Halves between neighbours of the narrow format, and what lies just beside them.
    halves = []
    for code in narrow.corners(20).tolist():
        value = narrow.value(code)
        nxt = narrow.value(code + 1 if (code + 1) & (narrow.sign - 1) else code)
        if value.is_nan or nxt.is_nan or math.inf in (value.magnitude, nxt.magnitude):
            continue
        middle = (Fraction(value.magnitude) + Fraction(nxt.magnitude)) / 2
        bits = wide.encode(Value(middle, value.negative))
        halves += [max(bits - 1, 0), bits, bits + 1]
    a = np.concatenate((a, np.array(halves, a.dtype)))
    modes = MODES if to == "f32" else ("rn", "rz")
    text = "\n".join(f"cvt.{mode}.{to}.{source} %{mode}, %a;" for mode in modes)
    got = lanewise(text, {"a": a}, dict.fromkeys(modes, f"u{narrow.bits // 8}"))
    for mode in modes:
        wanted = [narrow.encode(wide.value(v), mode) for v in a.tolist()]
        # A NaN becomes the canonical one.
        assert got[mode].tolist() == wanted, mode


WIDENING = [("f16", "f32"), ("bf16", "f32"), ("f16", "f64"), ("bf16", "f64"), ("f32", "f64")]


@pytest.mark.parametrize(("source", "to"), WIDENING)
def test_float_to_wider_float(source: str, to: str) -> None:
    narrow, wide = FORMS[source], FORMS[to]
    a = narrow.corners(60)
    got = lanewise(f"cvt.{to}.{source} %d, %a;", {"a": a}, {"d": f"u{wide.bits // 8}"})
    assert same(got["d"], [wide.encode(narrow.value(v)) for v in a.tolist()], wide)


@pytest.mark.parametrize("kind", ["f16", "f32", "f64"])
def test_rounding_to_integers_in_place(kind: str) -> None:
    form = FORMS[kind]
    a = np.concatenate((form.corners(20), near_integers(form, 8)))
    text = "\n".join(f"cvt.{mode}.{kind}.{kind} %{mode}, %a;" for mode in INTEGRAL)
    got = lanewise(text, {"a": a}, dict.fromkeys(INTEGRAL, a.dtype))
    for mode, function in INTEGRAL.items():
        wanted = []
        for code in a.tolist():
            value = form.value(code)
            if not value.is_nan and value.magnitude != math.inf:
                # A zero keeps the sign of what it came from.
                value = Value(Fraction(abs(function(Fraction(value.signed)))), value.negative)
            wanted.append(form.encode(value))
        assert same(got[mode], wanted, form), mode


def test_f32_flags() -> None:
    a = F32.corners(20)
    text = """
        cvt.ftz.f32.f32 %d, %a;
        cvt.sat.f32.f32 %e, %a;
        cvt.rni.ftz.f32.f32 %f, %a;
        cvt.ftz.f64.f32 %g, %a;
    """
    got = lanewise(text, {"a": a}, dict.fromkeys("def", np.uint32) | {"g": np.uint64})
    flushed = [F32.flush(v) for v in a.tolist()]
    assert same(got["d"], flushed, F32)
    assert got["e"].tolist() == [F32.saturate(v) for v in a.tolist()]
    assert same(got["g"], [F64.encode(F32.value(v)) for v in flushed], F64)


def test_f64_to_f32_flags() -> None:
    a = F64.corners(20)
    text = "cvt.rn.ftz.f32.f64 %d, %a;\ncvt.rn.sat.f32.f64 %e, %a;"
    got = lanewise(text, {"a": a}, dict.fromkeys("de", np.uint32))
    rounded = [F32.encode(F64.value(v)) for v in a.tolist()]
    assert got["d"].tolist() == [F32.flush(v) for v in rounded]
    assert got["e"].tolist() == [F32.saturate(v) for v in rounded]


@pytest.mark.parametrize("to", ["f16", "bf16"])
def test_half_with_relu_and_satfinite(to: str) -> None:
    form = FORMS[to]
    a = F32.corners(20)
    text = f"cvt.rn.relu.{to}.f32 %d, %a;"
    names = "d"
    if to == "bf16":
        text += f"\ncvt.rn.satfinite.{to}.f32 %e, %a;\ncvt.rz.relu.satfinite.{to}.f32 %f, %a;"
        names = "def"
    got = lanewise(text, {"a": a}, dict.fromkeys(names, np.uint16))

    def limited(code: int, mode: str, relu: bool, satfinite: bool) -> int:
        bits = form.encode(F32.value(code), mode)
        if satfinite and bits & 0x7FFF == form.infinity:
            bits -= 1
        return 0 if relu and bits & 0x8000 else bits

    assert got["d"].tolist() == [limited(v, "rn", True, False) for v in a.tolist()]
    if to == "bf16":
        assert got["e"].tolist() == [limited(v, "rn", False, True) for v in a.tolist()]
        assert got["f"].tolist() == [limited(v, "rz", True, True) for v in a.tolist()]


@pytest.mark.parametrize(("to", "mode"), [*product(["f16", "bf16"], ["rn", "rz"])])
def test_pairs_of_halves(to: str, mode: str) -> None:
    form = FORMS[to]
    a, b = pairs(F32.corners(4), F32.corners(4)[::3])
    text = f"cvt.{mode}.{to}x2.f32 %d, %a, %b;\ncvt.{mode}.relu.{to}x2.f32 %e, %a, %b;"
    got = lanewise(text, {"a": a, "b": b}, dict.fromkeys("de", np.uint32))
    high, low = ([form.encode(F32.value(v), mode) for v in s.tolist()] for s in (a, b))
    assert got["d"].tolist() == [h << 16 | lo for h, lo in zip(high, low, strict=True)]

    def relu(bits: int) -> int:
        return 0 if bits & 0x8000 else bits

    wanted = [relu(h) << 16 | relu(lo) for h, lo in zip(high, low, strict=True)]
    assert got["e"].tolist() == wanted


def test_tf32() -> None:
    """tf32 is f32 with 10 bits of fraction: the other 13 bits are zero."""
    a = F32.corners(60)
    modes = {"rna": "rna", "rn": "rn", "rz": "rz"}
    text = "\n".join(f"cvt.{mode}.tf32.f32 %{mode}, %a;" for mode in modes)
    got = lanewise(text, {"a": a}, dict.fromkeys(modes, np.uint32))
    short = Format(8, 10, 0x3FFFF)
    for mode in modes:
        for code, bits in zip(a.tolist(), got[mode].tolist(), strict=True):
            value = F32.value(code)
            if value.is_nan:
                assert F32.value(bits).is_nan
            else:
                assert bits == short.encode(value, mode) << 13, hex(code)


BYTES = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}


def byte_codes(values: np.ndarray, kind: str) -> np.ndarray:
    """To nearest even, finite beyond the largest number, NaN 0x7F: cvt.rn.satfinite."""
    dtype, largest = BYTES[kind]
    numbers = np.where(np.isnan(values), np.float32(0), values)
    codes = np.clip(numbers, -largest, largest).astype(dtype).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(0x7F), codes)


@pytest.mark.parametrize("kind", BYTES)
def test_bytes_from_f32(kind: str) -> None:
    generator = np.random.default_rng(6)
    scale = np.exp2(generator.integers(-20, 20, 1024)).astype(np.float32)
    values = (generator.normal(size=1024) * scale).astype(np.float32)
    special = F32.corners(0).view(np.float32)
    with np.errstate(invalid="ignore"):  # NaNs among all codes
        every = np.arange(256, dtype=np.uint8).view(BYTES[kind][0]).astype(np.float32)
    middles = (every[:120] + every[1:121]) / 2
    beyond = np.array([464, 448.1, 61440, 60000, 1e9], np.float32)
    a = np.concatenate((values, special, every, middles, -middles, beyond, -beyond))
    b = a[::-1].copy()
    text = (
        f"cvt.rn.satfinite.{kind}x2.f32 %d, %a, %b;\ncvt.rn.satfinite.relu.{kind}x2.f32 %e, %a, %b;"
    )
    got = lanewise(text, {"a": a, "b": b}, dict.fromkeys("de", np.uint16))
    high, low = byte_codes(a, kind).astype(np.uint16), byte_codes(b, kind)
    assert np.array_equal(got["d"], high << 8 | low)
    high, low = (np.where(c & 0x80, 0, c).astype(np.uint16) for c in (high, low))
    assert np.array_equal(got["e"], high << 8 | low)


@pytest.mark.parametrize("kind", BYTES)
def test_bytes_and_pairs_of_halves(kind: str) -> None:
    low, high = pairs(np.arange(256, dtype=np.uint8), np.arange(0, 256, 37, dtype=np.uint8))
    a = low.astype(np.uint16) | high.astype(np.uint16) << 8
    text = f"cvt.rn.f16x2.{kind}x2 %d, %a;\ncvt.rn.relu.f16x2.{kind}x2 %r, %a;"
    got = lanewise(text, {"a": a}, {"d": np.uint32, "r": np.uint32})
    for shift, codes in ((0, low), (16, high)):
        values = codes.view(BYTES[kind][0]).astype(np.float16)
        half = (got["d"] >> shift).astype(np.uint16).view(np.float16)
        assert np.array_equal(half, values, equal_nan=True)
        positive = (got["r"] >> shift).astype(np.uint16).view(np.float16)
        assert np.array_equal(positive, np.where(values < 0, 0, values), equal_nan=True)
    back = lanewise(f"cvt.rn.satfinite.{kind}x2.f16x2 %d, %a;", {"a": got["d"]}, {"d": np.uint16})
    for shift, codes in ((0, low), (8, high)):
        wanted = byte_codes(codes.view(BYTES[kind][0]).astype(np.float32), kind)
        assert np.array_equal((back["d"] >> shift).astype(np.uint8), wanted)
