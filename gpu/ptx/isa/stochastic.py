"""cvt.rs: conversions that round by random bits.  Source: PTX ISA 9.1, 9.7.9.21."""

from __future__ import annotations

from collections.abc import Mapping

from gpu.ptx.emit import Emitter
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Instruction
from simkit.numerics import stochastic

Modifiers = Mapping[str, str]


@ptx("cvt.rs{.relu}{.satfinite}.<to>.f32", operands=4, to="f16x2 bf16x2")
def pair(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """The first source is the upper half."""
    d, a, b, rbits = i.operands
    flags = "".join(f", {flag}=True" for flag in ("relu", "satfinite") if flag in m)
    sources = f"{e.read(a, 'f4')}, {e.read(b, 'f4')}, {e.read(rbits, 'u4')}"
    kind = m["to"].removesuffix("x2")
    e.write(d, "u4", f"{e.bind(stochastic.pack_pair)}({sources}, {kind!r}{flags})")


@ptx("cvt.rs{.relu}.satfinite.<to>.f32", operands=3,
     to="e4m3x4 e5m2x4 e2m3x4 e3m2x4 e2m1x4")  # fmt: skip
def four(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """The first source is uppermost."""
    d, values, rbits = i.operands
    elements = e.elements(values)
    if len(elements) != 4:
        raise e.error(f"{len(elements)} values where {m['to']} needs 4")
    sources = ", ".join([*(e.read(v, "f4") for v in elements), e.read(rbits, "u4")])
    kind = m["to"].removesuffix("x4")
    value = f"{e.bind(stochastic.pack_four)}({sources}, {kind!r}, {'relu' in m})"
    if kind == "e2m1":
        e.write(d, "u2", f"{value}.astype('u2')")
    else:
        e.write(d, "u4", value)
