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

Array = np.ndarray
Modifiers = Mapping[str, str]

_INTEGERS = "u8 u16 u32 u64 s8 s16 s32 s64"
_FLOATS = "f16 bf16 f32 f64"


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


@ptx(
    "cvt.<round>{.sat}.<to>.<source>",
    operands=2,
    round="rn rz rm rp",
    to="f32 f64",
    source=_INTEGERS,
)
@ptx(
    "cvt.<round>{.sat}.<to>.<source>",
    operands=2,
    round="rn rz rm rp",
    to="f16 bf16",
    source=_INTEGERS,
)
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


def _write_float(e: Emitter, i: Instruction, m: Modifiers, value: str) -> None:
    """Writes a value that is already in the target format (bits for f16 and bf16)."""
    if "sat" in m:
        if m["to"] not in ("f32", "f64"):
            raise e.error(f".sat to {m['to']} is not supported")
        value = f"{e.bind(scalar.saturate)}({value})"
    e.write(i.operands[0], CODES[m["to"]].replace("f2", "u2"), value)


@ptx("cvt{.<round>}{.ftz}{.sat}.f32.f32", operands=2, round="rni rzi rmi rpi")
@ptx("cvt{.<round>}.f64.f64", operands=2, round="rni rzi rmi rpi")
@ptx("cvt{.<round>}.f16.f16", operands=2, round="rni rzi rmi rpi")
def round_in_place(e: Emitter, i: Instruction, m: Modifiers) -> None:
    kind = i.modifiers[-1]
    value = _float_source(e, i, m, kind)
    if "round" in m:
        value = f"{e.bind(convert.round_to_integral)}({value}, {m['round']!r})"
    if "sat" in m:
        value = f"{e.bind(scalar.saturate)}({value})"
    if kind == "f16":
        e.write(i.operands[0], "u2", f"{e.bind(scalar.encode_f16)}({value})")
    else:
        e.write(i.operands[0], CODES[kind], value)


@ptx("cvt{.ftz}{.sat}.f32.<source>", operands=2, source="f16 bf16")
@ptx("cvt.f64.<source>", operands=2, source="f16 bf16 f32")
@ptx("cvt{.ftz}.f64.f32", operands=2)
def widen(e: Emitter, i: Instruction, m: Modifiers) -> None:
    kind, target = i.modifiers[-1], i.modifiers[-2]
    value = _float_source(e, i, m, kind)
    if target == "f64":
        e.write(i.operands[0], "f8", f"{value}.astype('f8')")
        return
    if "sat" in m:
        value = f"{e.bind(scalar.saturate)}({value})"
    e.write(i.operands[0], "f4", value)


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


@ptx(
    "cvt.<round>{.ftz}{.relu}{.satfinite}.<to>.f32", operands=2, round="rn rz rm rp", to="f16 bf16"
)
@ptx("cvt.<round>{.relu}{.satfinite}{.ftz}.<to>.f32", operands=2, round="rn rz", to="f16 bf16")
def f32_to_half(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.write(i.operands[0], "u2", _narrow(e, m, m["to"], _float_source(e, i, m, "f32")))


@ptx("cvt.<round>{.relu}{.satfinite}.<to>.f32", operands=3, round="rn rz", to="f16x2 bf16x2")
def f32_to_half_pair(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """The first source is the upper half."""
    kind = m["to"].removesuffix("x2")
    high, low = (_narrow(e, m, kind, e.read(o, "f4")) for o in i.operands[1:])
    e.write(i.operands[0], "u4", f"{e.bind(pack)}({low}, {high})")


@ptx("cvt.<round>.<to>.<source>", operands=2, round="rn rz", to="f16 bf16", source="f16 bf16 f64")
def half_to_half(e: Emitter, i: Instruction, m: Modifiers) -> None:
    if m["source"] == "f64":
        narrow = e.bind(convert.float64_to_bf16 if m["to"] == "bf16" else convert.float64_to_f16)
        e.write(i.operands[0], "u2", f"{narrow}({e.read(i.operands[1], 'f8')}, {m['round']!r})")
        return
    e.write(i.operands[0], "u2", _narrow(e, m, m["to"], _float_source(e, i, m, m["source"])))


@ptx("cvt.<round>{.satfinite}{.relu}.tf32.f32", operands=2, round="rna rn rz")
def f32_to_tf32(e: Emitter, i: Instruction, m: Modifiers) -> None:
    value = e.read(i.operands[1], "f4")
    if "relu" in m:
        value = f"{e.bind(scalar.relu)}({value})"
    e.write(i.operands[0], "u4", f"{e.bind(convert.float32_to_tf32)}({value}, {m['round']!r})")


_ENCODE_BYTE = {"e4m3x2": convert.float32_to_e4m3, "e5m2x2": convert.float32_to_e5m2}
_DECODE_BYTE = {"e4m3x2": convert.e4m3_to_float32, "e5m2x2": convert.e5m2_to_float32}


def pack_bytes(low: Array, high: Array) -> Array:
    """Two bytes as one 16-bit word."""
    return low.astype(np.uint16) | high.astype(np.uint16) << np.uint16(8)


@ptx("cvt.rn.satfinite{.relu}.<to>.f32", operands=3, to="e4m3x2 e5m2x2")
def f32_to_byte_pair(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """The first source is the upper byte."""
    encode = e.bind(_ENCODE_BYTE[m["to"]])
    values = [e.read(o, "f4") for o in i.operands[1:]]
    if "relu" in m:
        values = [f"{e.bind(scalar.relu)}({v})" for v in values]
    high, low = (f"{encode}({v})" for v in values)
    e.write(i.operands[0], "u2", f"{e.bind(pack_bytes)}({low}, {high})")


@ptx("cvt.rn.satfinite{.relu}.<to>.f16x2", operands=2, to="e4m3x2 e5m2x2")
def half_pair_to_byte_pair(e: Emitter, i: Instruction, m: Modifiers) -> None:
    encode, decode = e.bind(_ENCODE_BYTE[m["to"]]), e.bind(formats.decode_f16)
    word = e.read(i.operands[1], "u4")
    values = [
        f"{decode}({word}.astype('u2'))",
        f"{decode}(({word} >> {e.constant(16, 'u4')}).astype('u2'))",
    ]
    if "relu" in m:
        values = [f"{e.bind(scalar.relu)}({v})" for v in values]
    e.write(
        i.operands[0], "u2", f"{e.bind(pack_bytes)}({encode}({values[0]}), {encode}({values[1]}))"
    )


@ptx("cvt.rn{.relu}.f16x2.<source>", operands=2, source="e4m3x2 e5m2x2")
def byte_pair_to_half_pair(e: Emitter, i: Instruction, m: Modifiers) -> None:
    decode, encode = e.bind(_DECODE_BYTE[m["source"]]), e.bind(scalar.encode_f16)
    word = e.read(i.operands[1], "u2")
    values = [
        f"{decode}({word}.astype('u1'))",
        f"{decode}(({word} >> {e.constant(8, 'u2')}).astype('u1'))",
    ]
    if "relu" in m:
        values = [f"{e.bind(scalar.relu)}({v})" for v in values]
    e.write(i.operands[0], "u4", f"{e.bind(pack)}({encode}({values[0]}), {encode}({values[1]}))")
