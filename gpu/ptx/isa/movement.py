"""Moves: registers, addresses, packing and unpacking, state-space conversions.

Source: PTX ISA 8.8, 9.7.9.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpu.ptx import spaces
from gpu.ptx.emit import Emitter
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Instruction, Register, Sink, Vector
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
    if isinstance(source, Vector):
        _pack(e, i, source)
    elif isinstance(target, Vector):
        _unpack(e, target, source)
    elif m["type"] == "b128":
        raise e.error("128-bit registers are not supported")
    elif m["type"] == "pred":
        e.write(target, "b1", e.read(source, "b1"))
    else:
        code = f"u{SIZES[m['type']]}"
        e.write(target, code, e.read(source, code))


@ptx("$move.<type>", operands=2, type="b8 u8 s8 b16 u16 s16 f16 bf16")
def narrow_move(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """A call parameter of 1 or 2 bytes: registers may be wider than it."""
    code = f"{'i' if m['type'].startswith('s') else 'u'}{SIZES[m['type']]}"
    e.write(i.operands[0], code, e.read(i.operands[1], code))


def _part_code(e: Emitter, vector: Vector, whole: int) -> str:
    return f"u{whole // len(vector.elements)}"


def _pack(e: Emitter, i: Instruction, source: Vector) -> None:
    """``mov.b32 d, {lo, hi}``: the first element is the lowest."""
    whole = SIZES[i.modifiers[0]]
    part = _part_code(e, source, whole)
    code = f"u{whole}"
    pieces = []
    for place, element in enumerate(source.elements):
        value = f"{e.read(element, part)}.astype('{code}')"
        shift = e.constant(8 * code_size(part) * place, code)
        pieces.append(value if place == 0 else f"({value} << {shift})")
    e.write(i.operands[0], code, " | ".join(pieces))


def _unpack(e: Emitter, target: Vector, source: object) -> None:
    registers = [t for t in target.elements if isinstance(t, Register)]
    if not registers:
        return
    part = e.register_code(registers[0].name)
    code = f"u{code_size(part) * len(target.elements)}"
    value = e.read(source, code)  # type: ignore[arg-type]
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
