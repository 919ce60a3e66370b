"""Tensor cores of a warp: mma.sync, ldmatrix, stmatrix, movmatrix.  Source: PTX ISA 8.8, 9.7.14."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpu.ptx import fragments
from gpu.ptx.emit import Emitter
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Instruction, Operand, Register

Array = np.ndarray
Modifiers = Mapping[str, str]

# (shape, input type) -> registers of A and B
_REGISTERS = {
    ("m16n8k8", "bf16"): (2, 1), ("m16n8k16", "bf16"): (4, 2),
    ("m16n8k8", "f16"): (2, 1), ("m16n8k16", "f16"): (4, 2),
    ("m16n8k4", "tf32"): (2, 1), ("m16n8k8", "tf32"): (4, 2),
    ("m16n8k16", "e4m3"): (2, 1), ("m16n8k32", "e4m3"): (4, 2),
    ("m16n8k16", "e5m2"): (2, 1), ("m16n8k32", "e5m2"): (4, 2),
}  # fmt: skip


def _names(e: Emitter, operand: Operand, count: int) -> tuple[str, ...]:
    """The registers of a fragment; fewer than ``count`` where some elements are constants."""
    elements = e.elements(operand)
    if len(elements) != count:
        raise e.error(f"{len(elements)} registers where the shape needs {count}")
    return tuple(o.name for o in elements if isinstance(o, Register))


def _matrix(e: Emitter, operand: Operand, count: int, part: str, kind: str = "") -> str:
    """Operand a, b or c decoded; once for as long as none of its registers is written again."""
    names = _names(e, operand, count)
    key = (names, (part, kind))
    if len(names) == count and key in e.decoded:
        return e.decoded[key]
    code = "f4" if part == "c" else "u4"
    words = ", ".join(f"x.array({e.read(o, code)})" for o in e.elements(operand))
    if part == "c":
        if len(set(names)) == 1 and len(names) == count:
            return e.fresh(f"{e.bind(fragments.uniform_c)}({words.split(', ')[0]})")
        return e.fresh(f"{e.bind(fragments.matrix_c)}([{words}])")
    if part == "b" and e.fetched.issuperset(names) and len(names) == count:
        value = _fetched(e, names, kind)
        e.decoded[key] = value
        return value
    function = e.bind(fragments.matrix_a if part == "a" else fragments.matrix_b)
    if e.is_steady(names):
        value = e.fresh(f"x.kept_operand({function}, ({words},), {kind!r}, {(e.site, part)})")
    else:
        value = e.fresh(f"x.operand({function}([{words}], {kind!r}), {kind!r})")
    if len(names) == count:
        e.decoded[key] = value
    return value


def _fetched(e: Emitter, names: tuple[str, ...], kind: str) -> str:
    """Operand b as the rows that ldmatrix left."""
    pieces = "".join(f"({rows}, {index}), " for rows, index, _ in (e.rows[n] for n in names))
    is_transposed = e.rows[names[0]][2]
    return e.fresh(f"x.fetched_operand(({pieces}), {is_transposed}, {kind!r})")


@ptx(
    "mma.sync.aligned.<shape>.row.col.f32.<a>.<b>.f32",
    operands=4,
    pure=False,
    is_chained=True,
    shape="m16n8k4 m16n8k8 m16n8k16 m16n8k32",
    a="bf16 f16 tf32 e4m3 e5m2",
    b="bf16 f16 tf32 e4m3 e5m2",
)
def multiply_accumulate(e: Emitter, i: Instruction, m: Modifiers) -> None:
    counts = _REGISTERS.get((m["shape"], m["a"]))
    counts_b = _REGISTERS.get((m["shape"], m["b"]))
    if (
        counts is None
        or counts_b is None
        or (m["a"] != m["b"] and "e" not in (m["a"][0], m["b"][0]))
    ):
        raise e.error(f"mma has no shape {m['shape']} for {m['a']} and {m['b']}")
    d, a, b, c = i.operands
    e.converged()
    left = _matrix(e, a, counts[0], "a", m["a"])
    right = _matrix(e, b, counts_b[1], "b", m["b"])
    start = _matrix(e, c, 4, "c")
    kind = m["a"] if m["a"] == m["b"] else "e5m2"
    if kind in ("e4m3", "e5m2"):
        kind += f" {m['shape'].partition('k')[2]}"
    matrix = e.fresh(f"x.mma({left}, {right}, {start}, {kind!r})")
    names = _names(e, d, 4)
    if i.guard is None and len(names) == 4:
        e.remember((names, ("c", "")), matrix)
        if e.chained.issuperset(names):
            # The next mma takes the matrix as it is, and nobody else reads the registers.
            return
        e.write_later(matrix, e.elements(d))
        return
    result = e.fresh(f"x.accumulators({matrix})")
    for index, element in enumerate(e.elements(d)):
        e.write(element, "f4", f"{result}[{index}]")


@ptx("ldmatrix.sync.aligned.m8n8.<count>{.trans}{.<space>}.b16", operands=2, pure=False,
     count="x1 x2 x4", space="shared shared::cta")  # fmt: skip
def load_matrix(e: Emitter, i: Instruction, m: Modifiers) -> None:
    target, source = i.operands
    count = int(m["count"][1])
    base, offset = e.address(source)
    elements = e.elements(target)
    if len(elements) != count:
        raise e.error(f"{len(elements)} destinations for {count} matrices")
    e.converged()
    names = [o.name for o in elements if isinstance(o, Register)]
    if len(names) == count and e.fetched.issuperset(names):
        rows = e.fresh(f"x.load_rows({_space(m)!r}, {base}, {offset}, {count}, {e.mask}, {e.site})")
        e.rows.update({n: (rows, index, "trans" in m) for index, n in enumerate(names)})
        return
    values = e.fresh(
        f"x.load_matrix({_space(m)!r}, {base}, {offset}, {count}, {'trans' in m}, {e.mask},"
        f" {e.site})"
    )
    for index, element in enumerate(elements):
        e.write(element, "u4", f"{values}[{index}]")


@ptx("stmatrix.sync.aligned.m8n8.<count>{.trans}{.<space>}.b16", operands=2, results=0, pure=False,
     count="x1 x2 x4", space="shared shared::cta")  # fmt: skip
def store_matrix(e: Emitter, i: Instruction, m: Modifiers) -> None:
    target, source = i.operands
    count = int(m["count"][1])
    base, offset = e.address(target)
    elements = e.elements(source)
    if len(elements) != count:
        raise e.error(f"{len(elements)} sources for {count} matrices")
    e.converged()
    values = ", ".join(f"x.array({e.read(o, 'u4')})" for o in elements)
    e.line(
        f"x.store_matrix({_space(m)!r}, {base}, {offset}, ({values},), {'trans' in m}, {e.mask},"
        f" {e.site})"
    )


def _space(m: Modifiers) -> str:
    return "shared" if "space" in m else "generic"


def transpose(a: Array) -> Array:
    """An 8 x 8 matrix of 16-bit elements in mma layout, transposed across the warp."""
    warps = a.shape[1]
    halves = np.empty((8, 4, 2, warps), np.uint16)
    halves[:, :, 0] = a.astype(np.uint16).reshape(8, 4, warps)
    halves[:, :, 1] = (a >> np.uint32(16)).astype(np.uint16).reshape(8, 4, warps)
    turned = halves.reshape(8, 8, warps).transpose(1, 0, 2).reshape(8, 4, 2, warps)
    return (
        turned[:, :, 0].astype(np.uint32) | turned[:, :, 1].astype(np.uint32) << np.uint32(16)
    ).reshape(32, warps)


@ptx("movmatrix.sync.aligned.m8n8.trans.b16", operands=2, pure=False)
def move_matrix(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.converged()
    e.write(i.operands[0], "u4", f"{e.bind(transpose)}(x.array({e.read(i.operands[1], 'u4')}))")
