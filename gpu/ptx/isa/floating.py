"""f32 and f64 arithmetic and the approximate functions.  Source: PTX ISA 8.8, 9.7.3.

Arithmetic that is more than one IEEE operation lives in simkit.numerics, so that model and executor
share it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpu.ptx import arithmetic
from gpu.ptx.emit import Emitter
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Immediate, Instruction
from simkit.numerics import minmax, scalar
from simkit.numerics.fma import fma

Array = np.ndarray
Modifiers = Mapping[str, str]


BINARY = {
    "add": arithmetic.EXACT.add,
    "sub": arithmetic.EXACT.sub,
    "mul": arithmetic.EXACT.mul,
    "div": arithmetic.canonical(np.true_divide),
}
_ROUNDED = {
    "add": scalar.add,
    "sub": scalar.subtract,
    "mul": scalar.multiply,
    "fma": scalar.fma,
    "mad": scalar.fma,
}


def _inputs(e: Emitter, i: Instruction, m: Modifiers, first: int = 1, count: int = 2) -> list[str]:
    """f32 source operands, flushed where ``.ftz`` asks for it."""
    values = [e.read(o, "f4") for o in i.operands[first : first + count]]
    if "ftz" in m:
        values = [f"{e.bind(scalar.flush)}({v})" for v in values]
    return values


def _finish(e: Emitter, i: Instruction, m: Modifiers, value: str) -> None:
    """Writes an f32 result after ``.ftz`` and ``.sat``."""
    if "ftz" in m:
        value = f"{e.bind(scalar.flush)}({value})"
    if "sat" in m:
        value = f"{e.bind(scalar.saturate)}({value})"
    e.write(i.operands[0], "f4", value)


@ptx(
    "add{.<round>}{.ftz}{.sat}.f32",
    "sub{.<round>}{.ftz}{.sat}.f32",
    "mul{.<round>}{.ftz}{.sat}.f32",
    operands=3,
    round="rn rz rm rp",
)
def f32_arithmetic(e: Emitter, i: Instruction, m: Modifiers) -> None:
    a, b = _inputs(e, i, m)
    mode = m.get("round", "rn")
    if mode != "rn":
        _finish(e, i, m, f"{e.bind(_ROUNDED[i.opcode])}({a}, {b}, {mode!r})")
    elif "ftz" in m or "sat" in m:
        _finish(e, i, m, f"{e.bind(BINARY[i.opcode])}({a}, {b})")
    else:
        e.apply(f"x.f32.{i.opcode}", i.operands[0], "f4", a, b)


@ptx("fma.<round>{.ftz}{.sat}.f32", "mad.<round>{.ftz}{.sat}.f32", operands=4, round="rn rz rm rp")
def f32_fma(e: Emitter, i: Instruction, m: Modifiers) -> None:
    a, b, c = _inputs(e, i, m, count=3)
    if m["round"] == "rn" and "ftz" not in m and "sat" not in m:
        if all(isinstance(o, Immediate) for o in i.operands[1:]):
            a = f"x.array({a})"  # the result has the shape of the register
        e.apply("x.f32.fma", i.operands[0], "f4", a, b, c)
    elif m["round"] == "rn":
        _finish(e, i, m, f"{e.bind(fma)}({a}, {b}, {c})")
    else:
        _finish(e, i, m, f"{e.bind(scalar.fma)}({a}, {b}, {c}, {m['round']!r})")


@ptx("div.<round>{.ftz}.f32", operands=3, round="rn rz rm rp")
@ptx("div.<approx>{.ftz}.f32", operands=3, approx="approx full")
def f32_divide(e: Emitter, i: Instruction, m: Modifiers) -> None:
    a, b = _inputs(e, i, m)
    mode = m.get("round", "rn")
    if mode != "rn":
        _finish(e, i, m, f"{e.bind(scalar.divide)}({a}, {b}, {mode!r})")
    elif "approx" in m:
        _finish(e, i, m, f"x.approximate({'div.' + m['approx']!r}, {a}, {b})")
    else:
        _finish(e, i, m, f"{e.bind(BINARY['div'])}({a}, {b})")


@ptx("abs{.ftz}.f32", "neg{.ftz}.f32", operands=2)
def f32_sign(e: Emitter, i: Instruction, m: Modifiers) -> None:
    # Bit operations, as the hardware does: a NaN keeps its payload.
    a = _inputs(e, i, m, count=1)[0]
    if "ftz" in m:
        e.write(
            i.operands[0], "f4", f"{e.bind(np.absolute if i.opcode == 'abs' else np.negative)}({a})"
        )
    elif i.opcode == "abs":
        e.apply(
            np.bitwise_and,
            i.operands[0],
            "u4",
            e.read(i.operands[1], "u4"),
            e.constant(0x7FFFFFFF, "u4"),
        )
    else:
        e.apply(
            np.bitwise_xor,
            i.operands[0],
            "u4",
            e.read(i.operands[1], "u4"),
            e.constant(1 << 31, "u4"),
        )


def xor_sign(value: Array, a: Array, b: Array) -> Array:
    """``value`` with the sign of a times b, NaNs apart (``.xorsign.abs``)."""
    negative = np.signbit(a) != np.signbit(b)
    signed = np.copysign(value, np.where(negative, np.float32(-1), np.float32(1)))
    return np.where(np.isnan(value), value, signed)


@ptx("min{.ftz}{.NaN}.f32", "max{.ftz}{.NaN}.f32", operands=3)
@ptx("min{.ftz}{.NaN}.xorsign.abs.f32", "max{.ftz}{.NaN}.xorsign.abs.f32", operands=3)
@ptx("min{.ftz}{.NaN}{.abs}.f32", "max{.ftz}{.NaN}{.abs}.f32", operands=4)
def f32_minmax(e: Emitter, i: Instruction, m: Modifiers) -> None:
    values = _inputs(e, i, m, count=len(i.operands) - 1)
    if len(values) == 2 and m.keys().isdisjoint(("NaN", "xorsign", "abs")):
        e.apply(f"x.f32.{i.opcode}", i.operands[0], "f4", *values)
        return
    function = e.bind(minmax.fmin_ptx if i.opcode == "min" else minmax.fmax_ptx)
    compared = [f"{e.bind(np.absolute)}({v})" for v in values] if "abs" in m else values
    value = f"{function}({compared[0]}, {compared[1]})"
    if len(values) == 3:
        value = f"{function}({value}, {compared[2]})"
    if "NaN" in m:
        value = f"{e.bind(scalar.propagate_nan)}({value}, {', '.join(values)})"
    if "xorsign" in m:
        value = f"{e.bind(xor_sign)}({value}, {values[0]}, {values[1]})"
    e.write(i.operands[0], "f4", value)


@ptx(
    "ex2.approx{.ftz}.f32",
    "lg2.approx{.ftz}.f32",
    "rcp.approx{.ftz}.f32",
    "rsqrt.approx{.ftz}.f32",
    "sqrt.approx{.ftz}.f32",
    "sin.approx{.ftz}.f32",
    "cos.approx{.ftz}.f32",
    "tanh.approx.f32",
    operands=2,
)
def f32_approximation(e: Emitter, i: Instruction, m: Modifiers) -> None:
    a = _inputs(e, i, m, count=1)[0]
    _finish(e, i, m, f"x.approximate({i.opcode!r}, {a})")


@ptx("rcp.<round>{.ftz}.f32", "sqrt.<round>{.ftz}.f32", operands=2, round="rn rz rm rp")
def f32_function_rounded(e: Emitter, i: Instruction, m: Modifiers) -> None:
    a = _inputs(e, i, m, count=1)[0]
    if i.opcode == "rcp":
        value = f"{e.bind(scalar.divide)}({e.constant(1.0, 'f4')}, {a}, {m['round']!r})"
    else:
        value = f"{e.bind(scalar.sqrt)}({a}, {m['round']!r})"
    _finish(e, i, m, value)


@ptx("copysign.f32", operands=3)
def f32_copysign(e: Emitter, i: Instruction, m: Modifiers) -> None:
    d, a, b = i.operands
    e.write(d, "f4", f"{e.bind(np.copysign)}({e.read(b, 'f4')}, {e.read(a, 'f4')})")


@ptx(
    "testp.<property>.f32",
    operands=2,
    property="finite infinite number notanumber normal subnormal",
)
def f32_property(e: Emitter, i: Instruction, m: Modifiers) -> None:
    function = e.bind(scalar.PROPERTIES[m["property"]])
    e.write(i.operands[0], "b1", f"{function}({e.read(i.operands[1], 'f4')})")
