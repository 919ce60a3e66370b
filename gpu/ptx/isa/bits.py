"""Integer instructions that compilers seldom write: fns, szext, high and saturating products.

Source: PTX ISA 8.8, 9.7.1.4-6 (mad, mul24, mad24), 9.7.1.17 (fns), 9.7.1.21 (szext).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpu.ptx.emit import Emitter
from gpu.ptx.isa.integer import add_saturating, multiply_high
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Instruction
from gpu.ptx.types import CODES

Array = np.ndarray
Modifiers = Mapping[str, str]


def find_nth_set(mask: Array, base: Array, offset: Array) -> Array:
    """Position of the ``offset``-th set bit from ``base`` (downwards if negative), or all ones.

    Offset 0 asks for the bit at ``base`` itself, 1 and -1 for the first one from there on.
    """
    places = np.arange(32).reshape(32, *(1,) * mask.ndim)
    is_set = (mask >> places.astype(np.uint32) & np.uint32(1)).astype(bool)
    start = base.astype(np.int64)
    count = np.abs(offset.astype(np.int64))
    upward = is_set & (places >= start)
    downward = is_set & (places <= start)
    number_up = np.cumsum(upward, axis=0)
    number_down = np.cumsum(downward[::-1], axis=0)[::-1]
    found = np.where(
        offset == 0,
        is_set & (places == start),
        np.where(offset > 0, upward & (number_up == count), downward & (number_down == count)),
    )
    place = found.argmax(axis=0).astype(np.uint32)
    return np.where(found.any(axis=0), place, np.uint32(0xFFFFFFFF))


@ptx("fns.b32", operands=4)
def find_set_bit(e: Emitter, i: Instruction, m: Modifiers) -> None:
    d, mask, base, offset = i.operands
    e.write(
        d,
        "u4",
        f"{e.bind(find_nth_set)}(x.array({e.read(mask, 'u4')}), x.array({e.read(base, 'u4')}),"
        f" x.array({e.read(offset, 'i4')}))",
    )


def extend(a: Array, bits: Array, is_clamped: bool) -> Array:
    """The low ``bits`` bits of a, extended by sign or by zeros as its type has it."""
    width = np.minimum(bits, np.uint32(32)) if is_clamped else bits & np.uint32(31)
    wide = a.astype(np.int64) & ((np.int64(1) << width.astype(np.int64)) - 1)
    if a.dtype.kind == "i":
        sign = wide >> np.maximum(width.astype(np.int64) - 1, 0) & 1
        wide = wide - (sign << width.astype(np.int64))
    return wide.astype(a.dtype)


@ptx("szext.<mode>.<type>", operands=3, mode="clamp wrap", type="u32 s32")
def extend_field(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = CODES[m["type"]]
    d, a, b = i.operands
    e.write(
        d,
        code,
        f"{e.bind(extend)}(x.array({e.read(a, code)}), x.array({e.read(b, 'u4')}),"
        f" {m['mode'] == 'clamp'})",
    )


def multiply_24_high(a: Array, b: Array) -> Array:
    """Bits 16 to 47 of the product of two 24-bit numbers."""
    eight = a.dtype.type(8)
    x, y = (((v << eight) >> eight).astype(np.int64) for v in (a, b))
    return (x * y >> np.int64(16)).astype(a.dtype)


@ptx("mul24.hi.<type>", operands=3, type="u32 s32")
@ptx("mad24.hi.<type>", operands=4, type="u32 s32")
@ptx("mad24.hi.sat.s32", "mad.hi.sat.s32", operands=4)
def multiply_upper(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = CODES[i.modifiers[-1]]
    function = e.bind(multiply_high if i.opcode == "mad" else multiply_24_high)
    a, b = (f"x.array({e.read(o, code)})" for o in i.operands[1:3])
    value = f"{function}({a}, {b})"
    if len(i.operands) == 4:
        c = f"x.array({e.read(i.operands[3], code)})"
        value = f"{e.bind(add_saturating)}({value}, {c})" if "sat" in m else f"({value} + {c})"
    e.write(i.operands[0], code, value)
