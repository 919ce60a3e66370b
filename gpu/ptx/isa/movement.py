"""Moves: registers, addresses, packing and unpacking, state-space conversions.

Source: PTX ISA 8.8, 9.7.9.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpu.ptx import spaces
from gpu.ptx.emit import Emitter
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Instruction, Operand, Register, Sink, Vector
from gpu.ptx.types import SIZES, code_size

Array = np.ndarray
Modifiers = Mapping[str, str]


@ptx(
    "mov.<type>",
    operands=2,
    type="pred b16 b32 b64 u16 u32 u64 s16 s32 s64 f16 bf16 f32 f64 f16x2 bf16x2 b128",
)
def move(e: Emitter, i: Instruction, m: Modifiers) -> None:
    target, source = i.operands
    if m["type"] == "b128":
        _move_wide(e, target, source)
    elif isinstance(source, Vector):
        _pack(e, i, source)
    elif isinstance(target, Vector):
        _unpack(e, i, target)
    elif m["type"] == "pred":
        e.write(target, "b1", e.read(source, "b1"))
    else:
        code = f"u{SIZES[m['type']]}"
        e.write(target, code, e.read(source, code))


def _move_wide(e: Emitter, target: Operand, source: Operand) -> None:
    """128-bit registers arrive as pairs of 64-bit ones, and so do both sides of a move."""
    pairs = [e.elements(target), e.elements(source)]
    if [len(p) for p in pairs] != [2, 2]:
        raise e.error("mov.b128 takes .b128 registers or pairs of 64-bit ones")
    values = [e.fresh(f"x.array({e.read(o, 'u8')}).copy()") for o in pairs[1]]
    for element, value in zip(pairs[0], values, strict=True):
        e.write(element, "u8", value)


@ptx("$move.<type>", operands=2, type="b8 u8 s8 b16 u16 s16 f16 bf16")
def narrow_move(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """A call parameter of 1 or 2 bytes: registers may be wider than it."""
    code = f"{'i' if m['type'].startswith('s') else 'u'}{SIZES[m['type']]}"
    e.write(i.operands[0], code, e.read(i.operands[1], code))


def _part_code(e: Emitter, i: Instruction, vector: Vector) -> str:
    """The code of the parts that a packed or unpacked value consists of."""
    kind, count = i.modifiers[0], len(vector.elements)
    part = SIZES[kind] // count if count in (2, 4) else 0
    if kind[0] != "b" or not part:
        raise e.error(f"{kind} does not consist of {count} parts")
    for element in vector.elements:
        if isinstance(element, Register) and code_size(e.register_code(element.name)) != part:
            raise e.error(f"register {element.name} does not have the {8 * part} bits of a part")
    return f"u{part}"


def _pack(e: Emitter, i: Instruction, source: Vector) -> None:
    """``mov.b32 d, {lo, hi}``: the first element is the lowest."""
    part, code = _part_code(e, i, source), f"u{SIZES[i.modifiers[0]]}"
    pieces = []
    for place, element in enumerate(source.elements):
        value = f"{e.read(element, part)}.astype('{code}')"
        shift = e.constant(8 * code_size(part) * place, code)
        pieces.append(value if place == 0 else f"({value} << {shift})")
    e.write(i.operands[0], code, " | ".join(pieces))


def _unpack(e: Emitter, i: Instruction, target: Vector) -> None:
    part, code = _part_code(e, i, target), f"u{SIZES[i.modifiers[0]]}"
    value = e.read(i.operands[1], code)
    places = []
    for place, element in enumerate(target.elements):
        if not isinstance(element, Sink):
            shifted = (
                value
                if place == 0
                else f"({value} >> {e.constant(8 * code_size(part) * place, code)})"
            )
            places.append((element, e.fresh(f"{shifted}.astype('{part}')")))
    for element, name in places:
        e.write(element, part, name)


_WINDOWS = {
    "global": 0,
    "const": 0,
    "param": spaces.PARAMETER_WINDOW,
    "local": spaces.LOCAL_WINDOW,
    "shared": spaces.SHARED_WINDOW,
    "shared::cta": spaces.SHARED_WINDOW,
    "shared::cluster": spaces.SHARED_WINDOW,
}


@ptx("cvta.<space>.u64", operands=2, space=" ".join(_WINDOWS))
@ptx("cvta.to.<space>.u64", operands=2, space=" ".join(_WINDOWS))
def convert_address(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """Generic addresses are state-space addresses plus the window of their space."""
    window = e.constant(_WINDOWS[m["space"]], "u8")
    target, source = i.operands
    value = e.read(source, "u8")
    if _WINDOWS[m["space"]] == 0:
        e.write(target, "u8", value)
    else:
        e.apply(np.subtract if "to" in m else np.add, target, "u8", value, window)


@ptx("isspacep.<space>", operands=2, space=" ".join(_WINDOWS))
def is_in_space(e: Emitter, i: Instruction, m: Modifiers) -> None:
    function = e.bind(spaces.is_in_space)
    e.write(i.operands[0], "b1", f"{function}({e.read(i.operands[1], 'u8')}, {m['space']!r})")
