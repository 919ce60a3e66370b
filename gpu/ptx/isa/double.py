"""f64 arithmetic: to nearest by NumPy, the other rounding modes by simkit.numerics.double.

Source: PTX ISA 8.8, 9.7.3.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpu.ptx.emit import Emitter
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Instruction
from simkit.numerics import double, scalar

Array = np.ndarray
Modifiers = Mapping[str, str]

_ROUND = "rn rz rm rp"
_NEAREST = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.true_divide,
}  # fmt: skip
_DIRECTED = {
    "add": double.add, "sub": double.subtract, "mul": double.multiply, "div": double.divide,
}  # fmt: skip


@ptx("add{.<round>}.f64", "sub{.<round>}.f64", "mul{.<round>}.f64", operands=3, round=_ROUND)
@ptx("div.<round>.f64", operands=3, round=_ROUND)
def arithmetic(e: Emitter, i: Instruction, m: Modifiers) -> None:
    d, a, b = i.operands
    mode = m.get("round", "rn")
    if mode == "rn":
        e.apply(_NEAREST[i.opcode], d, "f8", e.read(a, "f8"), e.read(b, "f8"))
    else:
        function = e.bind(_DIRECTED[i.opcode])
        e.write(d, "f8", f"{function}({e.read(a, 'f8')}, {e.read(b, 'f8')}, {mode!r})")


@ptx("fma.<round>.f64", "mad.<round>.f64", operands=4, round=_ROUND)
def multiply_add(e: Emitter, i: Instruction, m: Modifiers) -> None:
    a, b, c = (f"x.array({e.read(o, 'f8')})" for o in i.operands[1:])
    if m["round"] == "rn":
        e.write(i.operands[0], "f8", f"{e.bind(scalar.fma_f64)}({a}, {b}, {c})")
    else:
        e.write(i.operands[0], "f8", f"{e.bind(double.fma)}({a}, {b}, {c}, {m['round']!r})")


def minimum(a: Array, b: Array) -> Array:
    """A NaN loses against a number; -0 is less than +0."""
    # Where the operands are equal and yet differ, they are zeros.
    negative = np.where(np.signbit(a), a, b)
    return np.where(a == b, negative, np.fmin(a, b))


def maximum(a: Array, b: Array) -> Array:
    """A NaN loses against a number; +0 is greater than -0."""
    positive = np.where(np.signbit(a), b, a)
    return np.where(a == b, positive, np.fmax(a, b))


@ptx("min.f64", "max.f64", operands=3)
def minmax(e: Emitter, i: Instruction, m: Modifiers) -> None:
    function = e.bind(minimum if i.opcode == "min" else maximum)
    d, a, b = i.operands
    e.write(d, "f8", f"{function}({e.read(a, 'f8')}, {e.read(b, 'f8')})")


@ptx("abs.f64", "neg.f64", operands=2)
def sign(e: Emitter, i: Instruction, m: Modifiers) -> None:
    function = np.absolute if i.opcode == "abs" else np.negative
    e.apply(function, i.operands[0], "f8", e.read(i.operands[1], "f8"))


@ptx("copysign.f64", operands=3)
def copy_sign(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """b with the sign of a."""
    d, a, b = i.operands
    e.write(d, "f8", f"{e.bind(np.copysign)}({e.read(b, 'f8')}, {e.read(a, 'f8')})")


@ptx("testp.<property>.f64", operands=2, property=" ".join(scalar.PROPERTIES))
def has_property(e: Emitter, i: Instruction, m: Modifiers) -> None:
    function = e.bind(scalar.PROPERTIES[m["property"]])
    e.write(i.operands[0], "b1", f"{function}({e.read(i.operands[1], 'f8')})")


@ptx("sqrt.<round>.f64", "rcp.<round>.f64", operands=2, round=_ROUND)
def root_or_reciprocal(e: Emitter, i: Instruction, m: Modifiers) -> None:
    d, a = i.operands[0], e.read(i.operands[1], "f8")
    mode = m["round"]
    if i.opcode == "sqrt" and mode == "rn":
        e.apply(np.sqrt, d, "f8", a)
    elif i.opcode == "sqrt":
        e.write(d, "f8", f"{e.bind(double.sqrt)}({a}, {mode!r})")
    elif mode == "rn":
        e.apply(np.true_divide, d, "f8", e.constant(1.0, "f8"), a)
    else:
        e.write(d, "f8", f"{e.bind(double.divide)}({e.constant(1.0, 'f8')}, {a}, {mode!r})")


_UPPER = np.uint64(0xFFFF_FFFF_0000_0000)
_NAN = np.uint64(0x7FFF_FFFF_0000_0000)
_LEAST_NORMAL = np.float64(2.0**-1022)


def _upper_word(value: Array) -> Array:
    """The upper 32 bits of doubles, the lower ones zero."""
    return (value.view(np.uint64) & _UPPER).view(np.float64)


def flush(a: Array) -> Array:
    """Subnormal numbers as zeros of their sign."""
    return np.where(np.abs(a) < _LEAST_NORMAL, np.copysign(0.0, a), a)


def gross(a: Array, name: str) -> Array:
    """``rcp.approx.ftz.f64`` and ``rsqrt.approx.ftz.f64``: upper word in, upper word out."""
    operand = flush(_upper_word(np.asarray(a)))
    value = np.true_divide(1.0, operand if name == "rcp" else np.sqrt(operand))
    if name == "rsqrt":
        value = np.where(operand == 0, np.copysign(np.inf, operand), value)
    result = flush(_upper_word(np.asarray(value)))
    return np.where(np.isnan(value), _NAN.view(np.float64), result)


def inverse_root(a: Array) -> Array:
    """1 / sqrt(a), which has the sign of a zero operand."""
    value = np.true_divide(1.0, np.sqrt(a))
    return np.where(a == 0, np.copysign(np.inf, a), value)


@ptx("rcp.approx.ftz.f64", "rsqrt.approx.ftz.f64", operands=2)
def approximate(e: Emitter, i: Instruction, m: Modifiers) -> None:
    value = f"{e.bind(gross)}({e.read(i.operands[1], 'f8')}, {i.opcode!r})"
    e.write(i.operands[0], "f8", value)


@ptx("rsqrt.approx.f64", operands=2)
def reciprocal_root(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.write(i.operands[0], "f8", f"{e.bind(inverse_root)}({e.read(i.operands[1], 'f8')})")
