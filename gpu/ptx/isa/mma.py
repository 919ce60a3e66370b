"""mma.sync with accumulators other than f32, and the four small products of m8n8k4.

Source: PTX ISA 8.8, 9.7.14.5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpu.ptx import tiles
from gpu.ptx.emit import Emitter
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Instruction, Operand

Modifiers = Mapping[str, str]

_SHAPES = {
    "f16": "m16n8k8 m16n8k16",
    "e4m3": "m16n8k16 m16n8k32",
    "e5m2": "m16n8k16 m16n8k32",
    "s8": "m8n8k16 m16n8k16 m16n8k32",
    "s4": "m8n8k32 m16n8k32 m16n8k64",
    "b1": "m8n8k128 m16n8k128 m16n8k256",
    "f64": "m8n8k4 m16n8k4 m16n8k8 m16n8k16",
}
_INTEGER_SHAPES = "m8n8k16 m8n8k32 m16n8k16 m16n8k32 m16n8k64"


def fragment(e: Emitter, operand: Operand, count: int, bits: int = 32) -> str:
    """The registers of a fragment as a list of arrays of bits."""
    parts = e.elements(operand)
    if len(parts) != count:
        raise e.error(f"{len(parts)} registers where the shape needs {count}")
    code = f"u{bits // 8}"
    values = ", ".join(f"x.array({e.read(o, code)})" for o in parts)
    return f"[{values}]"


def write_fragment(e: Emitter, operand: Operand, count: int, values: str, bits: int = 32) -> None:
    parts = e.elements(operand)
    if len(parts) != count:
        raise e.error(f"{len(parts)} registers where the shape needs {count}")
    found = e.fresh(values)
    for index, element in enumerate(parts):
        e.write(element, f"u{bits // 8}", f"{found}[{index}]")


def _multiply(e: Emitter, i: Instruction, m: Modifiers, kinds: tuple[str, str, str]) -> list[str]:
    """The decoded matrices a, b and c of a shape; ``kinds``: their element types."""
    a, b, c = kinds
    family = {"u8": "s8", "u4": "s4"}.get(a, a)
    if m["shape"] not in _SHAPES[family].split() or tiles.BITS[a] != tiles.BITS[b]:
        raise e.error(f"mma has no shape {m['shape']} for {a} and {b}")
    rows, k = (int(n) for n in re.findall(r"m(\d+)n8k(\d+)", m["shape"])[0])
    bits, width = tiles.BITS[a], tiles.register_bits(a)
    e.converged()
    left = fragment(e, i.operands[1], rows * k * bits // (32 * width), width)
    right = fragment(e, i.operands[2], 8 * k * bits // (32 * width), width)
    start = fragment(e, i.operands[3], _count_c(rows, c), tiles.register_bits(c))
    return [
        e.fresh(f"{e.bind(tiles.matrix_a)}({left}, {a!r}, {rows})"),
        e.fresh(f"{e.bind(tiles.matrix_b)}({right}, {b!r})"),
        e.fresh(f"{e.bind(tiles.matrix_c)}({start}, {c!r})"),
    ]


def _count_c(rows: int, kind: str) -> int:
    """Registers of an accumulator of ``rows`` x 8."""
    return rows * 8 * tiles.BITS[kind] // (32 * tiles.register_bits(kind))


def _finish(e: Emitter, i: Instruction, m: Modifiers, kind: str, value: str) -> None:
    rows = 16 if m["shape"].startswith("m16") else 8
    result = f"{e.bind(tiles.fragment_c)}({value}, {kind!r})"
    write_fragment(e, i.operands[0], _count_c(rows, kind), result, tiles.register_bits(kind))


@ptx("mma.sync.aligned.<shape>.row.col.f16.f16.f16.f16", operands=4, pure=False,
     shape=_SHAPES["f16"])  # fmt: skip
@ptx("mma.sync.aligned.<shape>.row.col.f16.<a>.<b>.f16", operands=4, pure=False,
     shape=_SHAPES["e4m3"], a="e4m3 e5m2", b="e4m3 e5m2")  # fmt: skip
def half_accumulators(e: Emitter, i: Instruction, m: Modifiers) -> None:
    a, b = m.get("a", "f16"), m.get("b", "f16")
    left, right, start = _multiply(e, i, m, (a, b, "f16"))
    kind = a if a == b else "e5m2"
    if kind != "f16":
        kind += f" {m['shape'].partition('k')[2]}"
    value = f"{e.bind(tiles.product)}(x.grid, {left}, {right}, {start}, {kind!r}, 'f16')"
    _finish(e, i, m, "f16", value)


@ptx("mma.sync.aligned.<shape>.row.col{.satfinite}.s32.<a>.<b>.s32", operands=4, pure=False,
     shape=_INTEGER_SHAPES, a="s8 u8 s4 u4", b="s8 u8 s4 u4")  # fmt: skip
def integers(e: Emitter, i: Instruction, m: Modifiers) -> None:
    matrices = _multiply(e, i, m, (m["a"], m["b"], "s32"))
    value = f"{e.bind(tiles.integer_product)}({', '.join(matrices)}, {'satfinite' in m})"
    _finish(e, i, m, "s32", value)


@ptx("mma.sync.aligned.<shape>.row.col.s32.b1.b1.s32.<operation>.popc", operands=4, pure=False,
     shape=_SHAPES["b1"], operation="xor and")  # fmt: skip
def bits(e: Emitter, i: Instruction, m: Modifiers) -> None:
    matrices = _multiply(e, i, m, ("b1", "b1", "s32"))
    value = f"{e.bind(tiles.bit_product)}({', '.join(matrices)}, {m['operation']!r})"
    _finish(e, i, m, "s32", value)


@ptx("mma.sync.aligned.<shape>.row.col{.<round>}.f64.f64.f64.f64",
     "mma.sync.aligned.<shape>.row.col.f64.f64.f64.f64.<round>", operands=4, pure=False,
     shape=_SHAPES["f64"], round="rn rz rm rp")  # fmt: skip
def doubles(e: Emitter, i: Instruction, m: Modifiers) -> None:
    matrices = _multiply(e, i, m, ("f64", "f64", "f64"))
    value = f"{e.bind(tiles.double_product)}({', '.join(matrices)}, {m.get('round', 'rn')!r})"
    _finish(e, i, m, "f64", value)


@ptx("mma.sync.aligned.m8n8k4.<layout_a>.<layout_b>.<d>.f16.f16.<c>", operands=4, pure=False,
     layout_a="row col", layout_b="row col", d="f16 f32", c="f16 f32")  # fmt: skip
def four_products(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """Four products of 8 x 8 x 4, each by eight lanes."""
    if m["c"] == "f32" and m["d"] == "f16":
        raise e.error("an f32 accumulator gives an f32 result")
    e.converged()
    decode = e.bind(tiles.quarter_matrix)
    left = f"{decode}({fragment(e, i.operands[1], 2)}, 'f16', 'a', {m['layout_a'] == 'row'})"
    right = f"{decode}({fragment(e, i.operands[2], 2)}, 'f16', 'b', {m['layout_b'] == 'row'})"
    counts = {"f16": 4, "f32": 8}
    start = f"{decode}({fragment(e, i.operands[3], counts[m['c']])}, {m['c']!r}, {m['c']!r})"
    value = f"{e.bind(tiles.product)}(x.grid, {left}, {right}, {start}, 'f16', {m['d']!r})"
    result = f"{e.bind(tiles.quarter_fragment)}({value}, {m['d']!r})"
    write_fragment(e, i.operands[0], counts[m["d"]], result)
