"""cvt: between all number formats.

Source: PTX ISA 8.8, 9.7.9.21; the arithmetic is in simkit.numerics.convert.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpu.ptx.emit import Emitter
from gpu.ptx.isa.half import pack
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Instruction
from gpu.ptx.types import CODES
from simkit.numerics import convert, formats, scalar
from simkit.numerics.formats import encode_bf16x2

Array = np.ndarray
Modifiers = Mapping[str, str]

_INTEGERS = "u8 u16 u32 u64 s8 s16 s32 s64"
_FLOATS = "f16 bf16 f32 f64"
_ROUND = "rn rz rm rp"


@ptx("cvt{.sat}.<to>.<source>", operands=2, to=_INTEGERS, source=_INTEGERS)
def integer_to_integer(e: Emitter, i: Instruction, m: Modifiers) -> None:
    source, target = CODES[m["source"]], CODES[m["to"]]
    value = e.read(i.operands[1], source)
    if "sat" in m:
        e.write(
            i.operands[0],
            target,
            f"{e.bind(convert.int_to_int)}(x.array({value}), '{target}', True)",
        )
    else:
        e.write(i.operands[0], target, f"{value}.astype('{target}')")


def _float_source(e: Emitter, i: Instruction, m: Modifiers, kind: str) -> str:
    """A floating operand as float32, or float64 for f64."""
    operand = i.operands[1]
    if kind == "f16":
        return f"{e.bind(formats.decode_f16)}({e.read(operand, 'u2')})"
    if kind == "bf16":
        return f"{e.bind(formats.decode_bf16)}({e.read(operand, 'u2')})"
    value = e.read(operand, CODES[kind])
    return f"{e.bind(scalar.flush)}({value})" if kind == "f32" and "ftz" in m else value


@ptx("cvt.<round>{.ftz}{.sat}.<to>.<source>", operands=2, round="rni rzi rmi rpi", to=_INTEGERS,
     source=_FLOATS)  # fmt: skip
def float_to_integer(e: Emitter, i: Instruction, m: Modifiers) -> None:
    value = _float_source(e, i, m, m["source"])
    code = CODES[m["to"]]
    e.write(
        i.operands[0], code, f"{e.bind(convert.float_to_int)}({value}, '{code}', {m['round']!r})"
    )


@ptx("cvt.<round>{.ftz}{.sat}.<to>.<source>", operands=2, round=_ROUND, to="f32",
     source=_INTEGERS)  # fmt: skip
@ptx("cvt.<round>{.sat}.<to>.<source>", operands=2, round=_ROUND, to="f16 f64", source=_INTEGERS)
@ptx("cvt.<round>.<to>.<source>", operands=2, round=_ROUND, to="bf16", source=_INTEGERS)
def integer_to_float(e: Emitter, i: Instruction, m: Modifiers) -> None:
    value = f"x.array({e.read(i.operands[1], CODES[m['source']])})"
    if m["to"] == "bf16":
        _write_float(e, i, m, f"{e.bind(convert.int_to_bf16)}({value}, {m['round']!r})")
        return
    code = CODES[m["to"]]
    bits = ".view('u2')" if code == "f2" else ""
    _write_float(
        e, i, m, f"{e.bind(convert.int_to_float)}({value}, '{code}', {m['round']!r}){bits}"
    )


def saturate_f16(bits: Array) -> Array:
    """f16 bits of numbers clamped to [0, 1]; NaN and -0 become +0 (``.sat``)."""
    return formats.encode_f16(scalar.saturate(formats.decode_f16(bits)))


def _write_float(e: Emitter, i: Instruction, m: Modifiers, value: str) -> None:
    """Writes a value that is already in the target format (bits for f16 and bf16)."""
    if "sat" in m:
        limit = saturate_f16 if m["to"] == "f16" else scalar.saturate
        value = f"{e.bind(limit)}({value})"
    e.write(i.operands[0], CODES[m["to"]].replace("f2", "u2"), value)


@ptx("cvt{.<round>}{.ftz}{.sat}.f32.f32", operands=2, round="rni rzi rmi rpi")
@ptx("cvt{.<round>}{.sat}.f64.f64", operands=2, round="rni rzi rmi rpi")
@ptx("cvt{.<round>}{.sat}.f16.f16", operands=2, round="rni rzi rmi rpi")
@ptx("cvt{.<round>}.bf16.bf16", operands=2, round="rni rzi rmi rpi")
def round_in_place(e: Emitter, i: Instruction, m: Modifiers) -> None:
    kind = i.modifiers[-1]
    value = _float_source(e, i, m, kind)
    if "round" in m:
        value = f"{e.bind(convert.round_to_integral)}({value}, {m['round']!r})"
    if "sat" in m:
        value = f"{e.bind(scalar.saturate)}({value})"
    if kind in ("f16", "bf16"):
        encode = e.bind(formats.encode_f16 if kind == "f16" else formats.encode_bf16)
        e.write(i.operands[0], "u2", f"{encode}({value})")
    else:
        e.write(i.operands[0], CODES[kind], value)


@ptx("cvt{.ftz}{.sat}.f32.<source>", operands=2, source="f16 bf16")
@ptx("cvt{.sat}.f64.<source>", operands=2, source="f16 bf16")
@ptx("cvt{.ftz}{.sat}.f64.f32", operands=2)
def widen(e: Emitter, i: Instruction, m: Modifiers) -> None:
    kind, target = i.modifiers[-1], i.modifiers[-2]
    value = _float_source(e, i, m, kind)
    if target == "f64":
        value = f"{value}.astype('f8')"
    if "sat" in m:
        value = f"{e.bind(scalar.saturate)}({value})"
    e.write(i.operands[0], CODES[target], value)


@ptx("cvt.<round>{.ftz}{.sat}.f32.f64", operands=2, round="rn rz rm rp")
def f64_to_f32(e: Emitter, i: Instruction, m: Modifiers) -> None:
    value = f"{e.bind(convert.float64_to_float32)}({e.read(i.operands[1], 'f8')}, {m['round']!r})"
    if "ftz" in m:
        value = f"{e.bind(scalar.flush)}({value})"
    if "sat" in m:
        value = f"{e.bind(scalar.saturate)}({value})"
    e.write(i.operands[0], "f4", value)


_TO_HALF = {"f16": convert.float32_to_f16, "bf16": convert.float32_to_bf16}


def _narrow(e: Emitter, m: Modifiers, kind: str, value: str) -> str:
    flags = "".join(f", {flag}=True" for flag in ("relu", "satfinite") if flag in m)
    return f"{e.bind(_TO_HALF[kind])}({value}, {m['round']!r}{flags})"


@ptx("cvt.<round>{.ftz}{.sat}.<to>.f32", operands=2, round=_ROUND, to="f16")
@ptx("cvt.<round>{.ftz}.<to>.f32", operands=2, round=_ROUND, to="bf16")
@ptx("cvt.<round>{.ftz}{.relu}{.satfinite}.<to>.f32", operands=2, round="rn rz", to="f16 bf16")
def f32_to_half(e: Emitter, i: Instruction, m: Modifiers) -> None:
    value = _narrow(e, m, m["to"], _float_source(e, i, m, "f32"))
    _write_float(e, i, m, value)


@ptx("cvt.<round>{.relu}{.satfinite}.<to>.f32", operands=3, round="rn rz", to="f16x2 bf16x2")
def f32_to_half_pair(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """The first source is the upper half."""
    kind = m["to"].removesuffix("x2")
    if (m["to"], m["round"]) == ("bf16x2", "rn") and m.keys().isdisjoint(("relu", "satfinite")):
        values = ", ".join(f"x.array({e.read(o, 'f4')})" for o in i.operands[:0:-1])
        e.write(i.operands[0], "u4", f"{e.bind(encode_bf16x2)}({values})")
        return
    high, low = (_narrow(e, m, kind, e.read(o, "f4")) for o in i.operands[1:])
    e.write(i.operands[0], "u4", f"{e.bind(pack)}({low}, {high})")


@ptx("cvt.<round>{.sat}.<to>.<source>", operands=2, round=_ROUND, to="f16", source="bf16 f64")
@ptx("cvt.<round>.<to>.<source>", operands=2, round=_ROUND, to="bf16", source="f16 bf16 f64")
def half_to_half(e: Emitter, i: Instruction, m: Modifiers) -> None:
    if m["source"] == "f64":
        narrow = e.bind(convert.float64_to_bf16 if m["to"] == "bf16" else convert.float64_to_f16)
        value = f"{narrow}({e.read(i.operands[1], 'f8')}, {m['round']!r})"
    else:
        value = _narrow(e, m, m["to"], _float_source(e, i, m, m["source"]))
    _write_float(e, i, m, value)


@ptx("cvt.rna{.satfinite}.tf32.f32", operands=2)
@ptx("cvt.<round>{.satfinite}{.relu}.tf32.f32", operands=2, round="rn rz")
def f32_to_tf32(e: Emitter, i: Instruction, m: Modifiers) -> None:
    flags = "".join(f", {flag}=True" for flag in ("relu", "satfinite") if flag in m)
    value = e.read(i.operands[1], "f4")
    convert_to = e.bind(convert.float32_to_tf32)
    e.write(i.operands[0], "u4", f"{convert_to}({value}, {i.modifiers[0]!r}{flags})")
