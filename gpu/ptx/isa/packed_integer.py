"""Integers packed in a word: 16-bit pairs, SIMD video instructions, dot products, cvt.pack.

Source: PTX ISA 8.8, 9.7.1.1 (add), 9.7.1.12-13 (min, max), 9.7.1.23-24 (dp4a, dp2a), 9.7.18.2 (SIMD
video), 9.7.9.22 (cvt.pack).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gpu.ptx.emit import Emitter
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Instruction

Array = np.ndarray
Modifiers = Mapping[str, str]


def fields(word: Array, bits: int, is_signed: bool) -> list[Array]:
    """The fields of a word, the lowest first, as int64."""
    parts = []
    for place in range(0, 32, bits):
        part = (word >> np.uint32(place)).astype(np.int64) & ((1 << bits) - 1)
        if is_signed:
            part = part - ((part >> (bits - 1)) << bits)
        parts.append(part)
    return parts


def assemble(parts: Sequence[Array], bits: int) -> Array:
    """The inverse of ``fields``, of the low bits of each part."""
    word = np.zeros_like(parts[0], np.uint32)
    for place, part in enumerate(parts):
        word |= (part & ((1 << bits) - 1)).astype(np.uint32) << np.uint32(bits * place)
    return word


def _average(a: Array, b: Array) -> Array:
    """Half the sum, ties away from minus infinity unless the sum is negative."""
    total = a + b
    return (total + (total >= 0)) >> 1


def _difference(a: Array, b: Array) -> Array:
    return np.abs(a - b)


_OPERATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "avrg": _average,
    "absdiff": _difference,
    "min": np.minimum,
    "max": np.maximum,
}


def pairwise(a: Array, b: Array, name: str, is_signed: bool, is_clamped: bool) -> Array:
    """One operation on each 16-bit half; ``is_clamped``: negative results become 0."""
    results = [
        _OPERATIONS[name](x, y)
        for x, y in zip(fields(a, 16, is_signed), fields(b, 16, is_signed), strict=True)
    ]
    if is_clamped:
        results = [np.maximum(r, 0) for r in results]
    return assemble(results, 16)


@ptx("add.<type>", "min.<type>", "max.<type>", operands=3, type="u16x2 s16x2")
@ptx("min.relu.<type>", "max.relu.<type>", operands=3, type="s16x2")
def pair(e: Emitter, i: Instruction, m: Modifiers) -> None:
    d, a, b = i.operands
    e.write(
        d,
        "u4",
        f"{e.bind(pairwise)}(x.array({e.read(a, 'u4')}), x.array({e.read(b, 'u4')}),"
        f" {i.opcode!r}, {m['type'] == 's16x2'}, {'relu' in m})",
    )


def video(
    a: Array, b: Array, c: Array, name: str, bits: int, signed: tuple[bool, ...], secondary: str
) -> Array:
    """A SIMD video instruction on whole words; ``signed``: result, a, b; ``secondary``: "add"
    sums the results and c, "sat" limits each to its type.
    """
    results = [
        _OPERATIONS[name](x, y)
        for x, y in zip(fields(a, bits, signed[1]), fields(b, bits, signed[2]), strict=True)
    ]
    if secondary == "add":
        return (c.astype(np.int64) + sum(results)).astype(np.uint32)
    if secondary == "sat":
        least = -(1 << (bits - 1)) if signed[0] else 0
        results = [np.clip(r, least, least + (1 << bits) - 1) for r in results]
    return assemble(results, bits)


@ptx(
    *(
        f"v{name}{count}.<d>.<a>.<b>{{.<secondary>}}"
        for name in _OPERATIONS
        for count in (2, 4)
    ),
    operands=4,
    d="u32 s32",
    a="u32 s32",
    b="u32 s32",
    secondary="sat add",
)  # fmt: skip
def simd(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """All fields take part: operand selectors and masks, which no compiler writes, are unknown."""
    name, count = i.opcode[1:-1], int(i.opcode[-1])
    words = ", ".join(f"x.array({e.read(o, 'u4')})" for o in i.operands[1:])
    signed = tuple(m[part] == "s32" for part in "dab")
    e.write(
        i.operands[0],
        "u4",
        f"{e.bind(video)}({words}, {name!r}, {32 // count}, {signed}, {m.get('secondary', '')!r})",
    )


def dot_halves(
    a: Array, b: Array, c: Array, a_signed: bool, b_signed: bool, is_high: bool
) -> Array:
    """Two products of a 16-bit half and a byte, and c, modulo 2**32."""
    bytes_of_b = fields(b, 8, b_signed)[2 * is_high :]
    products = [x * y for x, y in zip(fields(a, 16, a_signed), bytes_of_b, strict=False)]
    return (c.astype(np.int64) + products[0] + products[1]).astype(np.uint32)


@ptx("dp2a.<half>.<a>.<b>", operands=4, half="lo hi", a="u32 s32", b="u32 s32")
def half_dot_product(e: Emitter, i: Instruction, m: Modifiers) -> None:
    words = ", ".join(f"x.array({e.read(o, 'u4')})" for o in i.operands[1:])
    e.write(
        i.operands[0],
        "u4",
        f"{e.bind(dot_halves)}({words}, {m['a'] == 's32'}, {m['b'] == 's32'}, {m['half'] == 'hi'})",
    )


def pack_saturated(a: Array, b: Array, c: Array, bits: int, is_signed: bool) -> Array:
    """a and b limited to the type, a above b, and c above both."""
    least = -(1 << (bits - 1)) if is_signed else 0
    low, high = (np.clip(v.astype(np.int64), least, least + (1 << bits) - 1) for v in (b, a))
    mask = (1 << bits) - 1
    packed = (low & mask) | (high & mask) << bits
    return (packed | c.astype(np.int64) << (2 * bits)).astype(np.uint32)


@ptx("cvt.pack.sat.<to>.s32", operands=3, to="u16 s16")
@ptx("cvt.pack.sat.<to>.s32.b32", operands=4, to="u8 s8 u4 s4 u2 s2")
def convert_and_pack(e: Emitter, i: Instruction, m: Modifiers) -> None:
    d, a, b, *rest = i.operands
    c = e.read(rest[0], "u4") if rest else e.constant(0, "u4")
    e.write(
        d,
        "u4",
        f"{e.bind(pack_saturated)}(x.array({e.read(a, 'i4')}), x.array({e.read(b, 'i4')}),"
        f" x.array({c}), {m['to'][1:]}, {m['to'][0] == 's'})",
    )
