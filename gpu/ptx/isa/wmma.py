"""wmma: matrices of a warp loaded, multiplied and stored.  Source: PTX ISA 8.8, 9.7.14.4.

Which lane holds which element is the implementation's own affair, and differs between GPUs.  Here
elements follow each other as they do in memory, which makes loads of whole rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gpu.ptx import tiles
from gpu.ptx.emit import Emitter
from gpu.ptx.isa.mma import fragment, write_fragment
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Instruction

if TYPE_CHECKING:
    from gpu.ptx.frame import Frame

Array = np.ndarray
Modifiers = Mapping[str, str]

_SPACES = "global shared shared::cta"
# The shapes of each multiplicand type.
_SHAPES = {
    **dict.fromkeys(("f16", "bf16", "s8", "u8"), "m16n16k16 m8n32k16 m32n8k16"),
    "tf32": "m16n16k8",
    "f64": "m8n8k4",
}
_ACCUMULATORS = {
    "f16": ("f16", "f32"), "bf16": ("f32",), "tf32": ("f32",), "s8": ("s32",), "u8": ("s32",),
    "f64": ("f64",),
}  # fmt: skip
_ALL_SHAPES = "m16n16k16 m8n32k16 m32n8k16 m16n16k8 m8n8k4"
_LANES = np.arange(32)[:, None]


@dataclass(frozen=True, slots=True)
class Tile:
    """A matrix as it lies in memory: ``major`` rows (or columns) of ``minor`` elements; and as a
    fragment of ``count`` registers, which runs through memory unless it is ``crossed``.
    """

    kind: str
    major: int
    minor: int
    count: int
    is_crossed: bool = False

    @property
    def element_bytes(self) -> int:
        return tiles.BITS[self.kind] // 8

    @property
    def per_lane(self) -> int:
        return self.count * tiles.register_bits(self.kind) // tiles.BITS[self.kind]

    @property
    def lanes(self) -> int:
        """Lanes that hold the matrix once; the others repeat it."""
        return min(32, self.major * self.minor // self.per_lane)

    def places(self) -> tuple[Array, Array]:
        """Major and minor index of each lane's elements: (32, per lane)."""
        linear = (np.arange(32 * self.per_lane) % (self.major * self.minor)).reshape(32, -1)
        if self.is_crossed:
            minor, major = np.divmod(linear, self.major)
            return major, minor
        return np.divmod(linear, self.minor)

    @property
    def run(self) -> int:
        """How many elements of a lane are one access of memory."""
        if self.is_crossed:
            return 1
        longest = min(self.per_lane, self.minor, 16 // self.element_bytes)
        return 1 << longest.bit_length() - 1


def tile(kind: str, part: str, shape: str, layout: str) -> Tile:
    """The tile of matrix a, b or c (d) of a shape."""
    m, n, k = (int(x) for x in re.findall(r"\d+", shape))
    rows, columns = {"a": (m, k), "b": (k, n)}.get(part, (m, n))
    count = rows * columns * tiles.BITS[kind] // (32 * tiles.register_bits(kind))
    if kind == "f16" and part in "ab":
        count = 8
    if part in "ab" or layout == "row":
        major, minor = (rows, columns) if layout == "row" else (columns, rows)
        return Tile(kind, major, minor, count)
    # Accumulators are held by rows, however they lie in memory.
    return Tile(kind, columns, rows, count, is_crossed=True)


def _addresses(x: Frame, where: Tile, base: Array, offset: int, stride: Array) -> list[Array]:
    """The byte address of each run of elements of every lane."""
    major, minor = where.places()
    start = x.array(base).astype(np.uint64) + np.uint64(offset & (2**64 - 1))
    step = x.array(stride).astype(np.uint64)
    size = np.uint64(where.element_bytes)
    return [
        start + (major[:, [k]].astype(np.uint64) * step + minor[:, [k]].astype(np.uint64)) * size
        for k in range(0, where.per_lane, where.run)
    ]


def load(
    x: Frame, where: Tile, space: str, base: Array, offset: int, stride: Array, mask: Array | None,
    site: int,
) -> list[Array]:  # fmt: skip
    """The registers of a tile in memory."""
    size = where.element_bytes * where.run
    unit = min(size, tiles.register_bits(where.kind) // 8)
    reading = mask
    if where.lanes < 32:
        once = np.broadcast_to(where.lanes > _LANES, x.shape)
        reading = once if mask is None else once & mask
    found: list[Array] = []
    for address in _addresses(x, where, base, offset, stride):
        found += x.load(space, address, 0, unit, size // unit, reading, site)
    if where.lanes < 32:
        found = [np.asarray(v)[_LANES[:, 0] % where.lanes] for v in found]
    return _words(found, unit, where)


def _words(values: Sequence[Array], unit: int, where: Tile) -> list[Array]:
    """Pieces of ``unit`` bytes joined to registers, the first one lowest."""
    width = tiles.register_bits(where.kind) // 8
    if unit == width:
        return list(values)
    per, code = width // unit, f"u{width}"
    words = []
    for start in range(0, len(values), per):
        word = values[start].astype(code)
        for k in range(1, per):
            word = word | values[start + k].astype(code) << np.dtype(code).type(8 * unit * k)
        words.append(word)
    return words


def store(
    x: Frame, where: Tile, space: str, base: Array, offset: int, stride: Array,
    values: Sequence[Array], mask: Array | None, site: int,
) -> None:  # fmt: skip
    """Writes the registers of a tile to memory."""
    size = where.element_bytes * where.run
    width = tiles.register_bits(where.kind) // 8
    unit = min(size, width)
    pieces = [
        (v >> v.dtype.type(8 * unit * k)).astype(f"u{unit}")
        for v in values
        for k in range(width // unit)
    ]
    count = size // unit
    for index, address in enumerate(_addresses(x, where, base, offset, stride)):
        run = pieces[index * count : (index + 1) * count]
        x.store(space, address, 0, unit, run, mask, site)


def _stride(e: Emitter, i: Instruction, where: Tile) -> str:
    return e.read(i.operands[2], "u4") if len(i.operands) == 3 else e.constant(where.minor, "u4")


def _checked(e: Emitter, kind: str, part: str, shape: str, layout: str) -> Tile:
    holders = [a for a, c in _ACCUMULATORS.items() if kind in ((a,) if part in "ab" else c)]
    if not any(shape in _SHAPES[a].split() for a in holders):
        raise e.error(f"wmma has no matrix {part} of {kind} in shape {shape}")
    return tile(kind, part, shape, layout)


_TAIL = ("<layout>.<shape>{.<space>}.<kind>", "<shape>.<layout>{.<space>}.<kind>")


@ptx(*(f"wmma.load.<part>.sync.aligned.{tail}" for tail in _TAIL), operands=(2, 3), pure=False,
     part="a b", layout="row col", shape=_ALL_SHAPES, space=_SPACES,
     kind="f16 bf16 tf32 s8 u8 f64")  # fmt: skip
@ptx(*(f"wmma.load.<part>.sync.aligned.{tail}" for tail in _TAIL), operands=(2, 3), pure=False,
     part="c", layout="row col", shape=_ALL_SHAPES, space=_SPACES,
     kind="f16 f32 s32 f64")  # fmt: skip
def load_tile(e: Emitter, i: Instruction, m: Modifiers) -> None:
    where = _checked(e, m["kind"], m["part"], m["shape"], m["layout"])
    base, offset = e.address(i.operands[1])
    space = m.get("space", "generic").split("::")[0]
    e.converged()
    value = (
        f"{e.bind(load)}(x, {e.bind(where)}, {space!r}, {base}, {offset}, {_stride(e, i, where)},"
        f" {e.mask}, {e.site})"
    )
    write_fragment(e, i.operands[0], where.count, value, tiles.register_bits(where.kind))


@ptx(*(f"wmma.store.d.sync.aligned.{tail}" for tail in _TAIL), operands=(2, 3), results=0,
     pure=False, layout="row col", shape=_ALL_SHAPES, space=_SPACES,
     kind="f16 f32 s32 f64")  # fmt: skip
def store_tile(e: Emitter, i: Instruction, m: Modifiers) -> None:
    where = _checked(e, m["kind"], "d", m["shape"], m["layout"])
    base, offset = e.address(i.operands[0])
    space = m.get("space", "generic").split("::")[0]
    values = fragment(e, i.operands[1], where.count, tiles.register_bits(where.kind))
    e.converged()
    e.line(
        f"{e.bind(store)}(x, {e.bind(where)}, {space!r}, {base}, {offset}, {_stride(e, i, where)},"
        f" {values}, {e.mask}, {e.site})"
    )


def _matrix(e: Emitter, i: Instruction, place: int, where: Tile) -> str:
    values = fragment(e, i.operands[place], where.count, tiles.register_bits(where.kind))
    decode = e.bind(tiles.wmma_matrix)
    return f"{decode}({values}, {where.kind!r}, {where.major}, {where.minor})"


_HEAD = "wmma.mma.sync.aligned.<layout_a>.<layout_b>.<shape>"


@ptx(f"{_HEAD}.<d>.<c>", operands=4, pure=False, layout_a="row col", layout_b="row col",
     shape=_SHAPES["f16"], d="f16 f32", c="f16 f32")  # fmt: skip
@ptx(f"{_HEAD}.<d>.<a>.<b>.f32", operands=4, pure=False, layout_a="row col",
     layout_b="row col", shape=_ALL_SHAPES, d="f32", a="bf16 tf32", b="bf16 tf32")  # fmt: skip
@ptx(f"{_HEAD}.<d>.<a>.<b>.s32{{.satfinite}}", operands=4, pure=False, layout_a="row col",
     layout_b="row col", shape=_SHAPES["s8"], d="s32", a="s8 u8", b="s8 u8")  # fmt: skip
@ptx(f"{_HEAD}{{.<round>}}.f64.f64.f64.f64", f"{_HEAD}.f64.f64.f64.f64.<round>", operands=4,
     pure=False, layout_a="row col", layout_b="row col", shape=_SHAPES["f64"],
     round="rn rz rm rp")  # fmt: skip
def multiply(e: Emitter, i: Instruction, m: Modifiers) -> None:
    d = m.get("d", "f64")
    a = m.get("a", "f64" if d == "f64" else "f16")
    b, c = m.get("b", a), m.get("c", d)
    if m["shape"] not in _SHAPES[a].split() or (a != b and d != "s32"):
        raise e.error(f"wmma has no shape {m['shape']} for {a} and {b}")
    e.converged()
    left = _matrix(e, i, 1, tile(a, "a", m["shape"], m["layout_a"]))
    right = _matrix(e, i, 2, tile(b, "b", m["shape"], m["layout_b"]))
    left += ".swapaxes(0, 1)" if m["layout_a"] == "col" else ""
    right += ".swapaxes(0, 1)" if m["layout_b"] == "col" else ""
    start = _matrix(e, i, 3, tile(c, "c", m["shape"], "row"))
    if d == "s32":
        value = f"{e.bind(tiles.integer_product)}({left}, {right}, {start}, {'satfinite' in m})"
    elif d == "f64":
        mode = m.get("round", "rn")
        value = f"{e.bind(tiles.double_product)}({left}, {right}, {start}, {mode!r})"
    else:
        value = f"{e.bind(tiles.product)}(x.grid, {left}, {right}, {start}, {a!r}, {d!r})"
    result = f"{e.bind(tiles.wmma_fragment)}({value}, {d!r})"
    count = tile(d, "d", m["shape"], "row").count
    write_fragment(e, i.operands[0], count, result, tiles.register_bits(d))
