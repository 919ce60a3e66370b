"""f16 and bf16, single and packed.  Source: PTX ISA 8.8, 9.7.4.

Computed in float32 (exact enough that the second rounding is innocuous: 24 bits are more than
2 p + 2 for p = 11 and p = 8), except fma, which simkit.numerics rounds once.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpu.ptx.emit import Emitter
from gpu.ptx.isa.floating import BINARY, xor_sign
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Instruction
from gpu.ptx.tma import OOB_NAN
from simkit.numerics import formats, minmax, scalar

Array = np.ndarray
Modifiers = Mapping[str, str]

_KINDS = "f16 f16x2 bf16 bf16x2"


def flush_f16(bits: Array) -> Array:
    """f16 bits with every subnormal number replaced by a zero of its sign (``.ftz``)."""
    return np.where(bits & np.uint16(0x7C00), bits, bits & np.uint16(0x8000))


def clamp_negative(bits: Array) -> Array:
    """f16 or bf16 bits with +0 for whatever has a sign, NaNs apart (``.relu``)."""
    return np.where(bits.view(np.int16) < 0, np.uint16(0), bits)


def pack(low: Array, high: Array) -> Array:
    """Two 16-bit halves as one word."""
    return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


def half_lanes(
    e: Emitter, i: Instruction, kind: str, operands: slice, is_flushed: bool = False
) -> list[list[str]]:
    """The operands of a half-precision instruction as float32 expressions, one list per packed
    element, flushed where ``.ftz`` asks for it.
    """
    number = kind.removesuffix("x2")
    if is_flushed and number != "f16":
        raise e.error(f".ftz does not go with .{kind}")
    decode = e.bind(formats.decode_f16 if number == "f16" else formats.decode_bf16)
    flush = e.bind(flush_f16) if is_flushed else ""
    bits = half_bits(e, i, kind, operands)
    return [[f"{decode}({flush}({b}))" for b in part] for part in bits]


def half_bits(e: Emitter, i: Instruction, kind: str, operands: slice) -> list[list[str]]:
    """The operands' 16-bit patterns as expressions, one list per packed element."""
    if not kind.endswith("x2"):
        return [[e.read(o, "u2") for o in i.operands[operands]]]
    words = [e.read(o, "u4") for o in i.operands[operands]]
    sixteen = e.constant(16, "u4")
    return [
        [f"{w}.astype('u2')" for w in words],
        [f"({w} >> {sixteen}).astype('u2')" for w in words],
    ]


def _write(e: Emitter, i: Instruction, m: Modifiers, encode: str, values: list[str]) -> None:
    """Rounds expressions to half precision after ``.sat`` and before ``.ftz`` and ``.relu``, and
    writes them, packed if there are two.
    """
    if "sat" in m:
        values = [f"{e.bind(scalar.saturate)}({v})" for v in values]
    bits = [f"{encode}({v})" for v in values]
    if "ftz" in m:
        bits = [f"{e.bind(flush_f16)}({b})" for b in bits]
    if "relu" in m:
        bits = [f"{e.bind(clamp_negative)}({b})" for b in bits]
    write_bits(e, i, bits)


def write_bits(e: Emitter, i: Instruction, bits: list[str]) -> None:
    """Writes one 16-bit pattern, or two packed."""
    if len(bits) == 1:
        e.write(i.operands[0], "u2", bits[0])
    else:
        e.write(i.operands[0], "u4", f"{e.bind(pack)}({bits[0]}, {bits[1]})")


def _encoder(e: Emitter, kind: str) -> str:
    return e.bind(formats.encode_f16 if kind.startswith("f16") else formats.encode_bf16)


@ptx("add{.rn}{.ftz}{.sat}.<kind>", "sub{.rn}{.ftz}{.sat}.<kind>", "mul{.rn}{.ftz}{.sat}.<kind>",
     operands=3, kind=_KINDS)  # fmt: skip
def half_arithmetic(e: Emitter, i: Instruction, m: Modifiers) -> None:
    function = e.bind(BINARY[i.opcode])
    lanes = half_lanes(e, i, m["kind"], slice(1, None), "ftz" in m)
    _write(e, i, m, _encoder(e, m["kind"]), [f"{function}({a}, {b})" for a, b in lanes])


def has_oob(bits: Array) -> Array:
    """Which f16 or bf16 bits are the NaN that stands for an element outside a tensor."""
    return bits == np.uint16(OOB_NAN)


def drop_oob(result: Array, *operands: Array) -> Array:
    """``result`` bits with +0 where one of the operands' bits is the out-of-bounds NaN."""
    outside = has_oob(operands[0])
    for bits in operands[1:]:
        outside = outside | has_oob(bits)
    return np.where(outside, np.uint16(0), result)


@ptx("fma.rn{.ftz}.<kind>", "fma.rn{.ftz}.sat.<kind>", "fma.rn{.ftz}.relu.<kind>", operands=4,
     kind=_KINDS)  # fmt: skip
@ptx("fma.rn.oob{.relu}.<kind>", operands=4, kind=_KINDS)
def half_fma(e: Emitter, i: Instruction, m: Modifiers) -> None:
    if "oob" in m:
        _half_fma_in_bounds(e, i, m)
        return
    function = e.bind(scalar.fma_odd)
    is_f16 = m["kind"].startswith("f16")
    encode = e.bind(scalar.encode_f16_once if is_f16 else scalar.encode_bf16_once)
    lanes = half_lanes(e, i, m["kind"], slice(1, None), "ftz" in m)
    _write(e, i, m, encode, [f"{function}({a}, {b}, {c})" for a, b, c in lanes])


def _half_fma_in_bounds(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """``fma.oob``: 0 where an operand is the out-of-bounds NaN; the rest as always."""
    function = e.bind(scalar.fma_odd)
    is_f16 = m["kind"].startswith("f16")
    encode = e.bind(scalar.encode_f16_once if is_f16 else scalar.encode_bf16_once)
    bits = []
    raw = half_bits(e, i, m["kind"], slice(1, None))
    lanes = half_lanes(e, i, m["kind"], slice(1, None))
    for (a, b, c), operands in zip(lanes, raw, strict=True):
        value = f"{encode}({function}({a}, {b}, {c}))"
        if "relu" in m:
            value = f"{e.bind(clamp_negative)}({value})"
        bits.append(f"{e.bind(drop_oob)}({value}, {', '.join(operands)})")
    write_bits(e, i, bits)


@ptx("min{.ftz}{.NaN}.<kind>", "max{.ftz}{.NaN}.<kind>", operands=3, kind=_KINDS)
@ptx("min{.ftz}{.NaN}.xorsign.abs.<kind>", "max{.ftz}{.NaN}.xorsign.abs.<kind>", operands=3,
     kind=_KINDS)  # fmt: skip
def half_minmax(e: Emitter, i: Instruction, m: Modifiers) -> None:
    function = e.bind(minmax.fmin_ptx if i.opcode == "min" else minmax.fmax_ptx)
    values = []
    for a, b in half_lanes(e, i, m["kind"], slice(1, None), "ftz" in m):
        if "xorsign" in m:
            size = e.bind(np.absolute)
            value = f"{function}({size}({a}), {size}({b}))"
            if "NaN" in m:
                value = f"{e.bind(scalar.propagate_nan)}({value}, {a}, {b})"
            values.append(f"{e.bind(xor_sign)}({value}, {a}, {b})")
            continue
        value = f"{function}({a}, {b})"
        if "NaN" in m:
            value = f"{e.bind(scalar.propagate_nan)}({value}, {a}, {b})"
        values.append(value)
    _write(e, i, m, _encoder(e, m["kind"]), values)


@ptx("abs{.ftz}.<kind>", "neg{.ftz}.<kind>", operands=2, kind=_KINDS)
def half_sign(e: Emitter, i: Instruction, m: Modifiers) -> None:
    if "ftz" in m:
        function = e.bind(np.absolute if i.opcode == "abs" else np.negative)
        lanes = half_lanes(e, i, m["kind"], slice(1, None), True)
        _write(e, i, m, _encoder(e, m["kind"]), [f"{function}({a})" for (a,) in lanes])
        return
    # Bit operations, as the hardware does: a NaN keeps its payload.
    code, bits = ("u4", 0x80008000) if m["kind"].endswith("x2") else ("u2", 0x8000)
    value = e.read(i.operands[1], code)
    if i.opcode == "neg":
        e.apply(np.bitwise_xor, i.operands[0], code, value, e.constant(bits, code))
    else:
        e.apply(np.bitwise_and, i.operands[0], code, value, e.constant(~bits, code))


@ptx("ex2.approx.<kind>", "tanh.approx.<kind>", operands=2, kind=_KINDS)
@ptx("ex2.approx.ftz.<kind>", operands=2, kind="bf16 bf16x2")
def half_function(e: Emitter, i: Instruction, m: Modifiers) -> None:
    name = f"{i.opcode}.{m['kind'].removesuffix('x2')}"
    lanes = half_lanes(e, i, m["kind"], slice(1, None))
    values = [f"x.approximate({name!r}, {a})" for (a,) in lanes]
    if "ftz" in m:
        # Subnormal bf16 numbers are those of float32; ex2 makes 1 of a subnormal operand anyway.
        values = [f"{e.bind(scalar.flush)}({v})" for v in values]
    _write(e, i, {}, _encoder(e, m["kind"]), values)
