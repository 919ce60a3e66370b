"""f32 and f64 arithmetic and the approximate functions.  Source: PTX ISA 8.8, 9.7.3.

Arithmetic that is more than one IEEE operation lives in simkit.numerics, so that model and executor
share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gpu.ptx.emit import Emitter
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Immediate, Instruction
from simkit.numerics import minmax, scalar
from simkit.numerics.arrays import CANONICAL_NAN
from simkit.numerics.fma import fma

Array = np.ndarray
Modifiers = Mapping[str, str]


def _canonical(function: Callable[..., Any]) -> Callable[..., Array]:
    """A float32 operation whose NaNs are the GPU's: 0x7FFFFFFF, whatever the CPU makes."""

    def operation(*operands: Array) -> Array:
        result = np.asarray(function(*operands))
        # The minimum is NaN if anything is: one pass, which as a rule finds nothing to do.
        smallest = result.min()
        if smallest != smallest:
            np.copyto(result, CANONICAL_NAN, where=np.isnan(result))
        return result

    return operation


BINARY = {
    "add": _canonical(np.add),
    "sub": _canonical(np.subtract),
    "mul": _canonical(np.multiply),
    "div": _canonical(np.true_divide),
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
        e.apply(BINARY[i.opcode], i.operands[0], "f4", a, b)


@ptx("fma.<round>{.ftz}{.sat}.f32", "mad.<round>{.ftz}{.sat}.f32", operands=4, round="rn rz rm rp")
def f32_fma(e: Emitter, i: Instruction, m: Modifiers) -> None:
    a, b, c = _inputs(e, i, m, count=3)
    if m["round"] == "rn" and "ftz" not in m and "sat" not in m:
        if all(isinstance(o, Immediate) for o in i.operands[1:]):
            a = f"x.array({a})"  # the result has the shape of the register
        e.apply(fma, i.operands[0], "f4", a, b, c)
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
    elif m.get("approx") == "approx":
        _finish(e, i, m, f"{e.bind(divide_approximately)}({a}, {b})")
    else:
        _finish(e, i, m, f"{e.bind(BINARY['div'])}({a}, {b})")


def divide_approximately(a: Array, b: Array) -> Array:
    """div.approx: the quotient, but for divisors beyond 2**126, where the hardware's reciprocal
    underflows, ``a * 0``: 0, and NaN for an infinite ``a``.
    """
    quotient: Array = np.true_divide(a, b)
    magnitude = np.abs(b)
    big = (magnitude > np.float32(2.0**126)) & (magnitude < np.inf)
    if big.any():
        underflowed = np.copysign(np.float32(0), b)
        quotient = np.where(big, np.multiply(a, underflowed), quotient)
    return quotient


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


@ptx("min{.ftz}{.NaN}{.xorsign}.f32", "max{.ftz}{.NaN}{.xorsign}.f32", operands=(3, 4))
def f32_minmax(e: Emitter, i: Instruction, m: Modifiers) -> None:
    if "xorsign" in m:
        raise e.error(".xorsign is not supported")
    values = _inputs(e, i, m, count=len(i.operands) - 1)
    function = e.bind(minmax.fmin_ptx if i.opcode == "min" else minmax.fmax_ptx)
    value = f"{function}({values[0]}, {values[1]})"
    if len(values) == 3:
        value = f"{function}({value}, {values[2]})"
    if "NaN" in m:
        value = f"{e.bind(scalar.propagate_nan)}({value}, {', '.join(values)})"
    e.write(i.operands[0], "f4", value)


def exp2_rounded(a: Array) -> Array:
    return np.exp2(a.astype(np.float64)).astype(np.float32)


def log2_rounded(a: Array) -> Array:
    return np.log2(a.astype(np.float64)).astype(np.float32)


def reciprocal(a: Array) -> Array:
    return np.true_divide(np.float32(1), a)


def reciprocal_sqrt(a: Array) -> Array:
    return (1.0 / np.sqrt(a.astype(np.float64))).astype(np.float32)


def sine(a: Array) -> Array:
    return np.sin(a.astype(np.float64)).astype(np.float32)


def cosine(a: Array) -> Array:
    return np.cos(a.astype(np.float64)).astype(np.float32)


def hyperbolic_tangent(a: Array) -> Array:
    return np.tanh(a.astype(np.float64)).astype(np.float32)


# Approximate instructions give the correctly rounded value, which is inside every bound the ISA
# states.
UNARY = {
    "ex2": _canonical(exp2_rounded),
    "lg2": _canonical(log2_rounded),
    "rcp": _canonical(reciprocal),
    "rsqrt": _canonical(reciprocal_sqrt),
    "sqrt": _canonical(np.sqrt),
    "sin": _canonical(sine),
    "cos": _canonical(cosine),
    "tanh": _canonical(hyperbolic_tangent),
}


@ptx(
    "ex2.approx{.ftz}.f32",
    "lg2.approx{.ftz}.f32",
    "rcp.approx{.ftz}.f32",
    "rsqrt.approx{.ftz}.f32",
    "sqrt.approx{.ftz}.f32",
    "sin.approx{.ftz}.f32",
    "cos.approx{.ftz}.f32",
    "tanh.approx.f32",
    "rcp.rn{.ftz}.f32",
    "sqrt.rn{.ftz}.f32",
    operands=2,
)
def f32_function(e: Emitter, i: Instruction, m: Modifiers) -> None:
    value = f"{e.bind(UNARY[i.opcode])}({_inputs(e, i, m, count=1)[0]})"
    _finish(e, i, m, value)


@ptx("rcp.<round>{.ftz}.f32", "sqrt.<round>{.ftz}.f32", operands=2, round="rz rm rp")
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


# f64: NumPy's own operations, which round to nearest.


@ptx("add{.rn}.f64", "sub{.rn}.f64", "mul{.rn}.f64", "div.rn.f64", operands=3)
def f64_arithmetic(e: Emitter, i: Instruction, m: Modifiers) -> None:
    d, a, b = i.operands
    e.apply(BINARY[i.opcode], d, "f8", e.read(a, "f8"), e.read(b, "f8"))


def f64_minimum(a: Array, b: Array) -> Array:
    """A NaN loses against a number; -0 is less than +0."""
    # Where the operands are equal and yet differ, they are zeros.
    negative = np.where(np.signbit(a), a, b)
    return np.where(a == b, negative, np.fmin(a, b))


def f64_maximum(a: Array, b: Array) -> Array:
    """A NaN loses against a number; +0 is greater than -0."""
    positive = np.where(np.signbit(a), b, a)
    return np.where(a == b, positive, np.fmax(a, b))


@ptx("min.f64", "max.f64", operands=3)
def f64_minmax(e: Emitter, i: Instruction, m: Modifiers) -> None:
    function = e.bind(f64_minimum if i.opcode == "min" else f64_maximum)
    d, a, b = i.operands
    e.write(d, "f8", f"{function}({e.read(a, 'f8')}, {e.read(b, 'f8')})")


@ptx("abs.f64", "neg.f64", "sqrt.rn.f64", operands=2)
def f64_unary(e: Emitter, i: Instruction, m: Modifiers) -> None:
    function = {"abs": np.absolute, "neg": np.negative, "sqrt": np.sqrt}[i.opcode]
    e.apply(function, i.operands[0], "f8", e.read(i.operands[1], "f8"))


@ptx("rcp.rn.f64", operands=2)
def f64_reciprocal(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.apply(np.true_divide, i.operands[0], "f8", e.constant(1.0, "f8"), e.read(i.operands[1], "f8"))


@ptx("fma.rn.f64", operands=4)
def f64_fma(e: Emitter, i: Instruction, m: Modifiers) -> None:
    a, b, c = (f"x.array({e.read(o, 'f8')})" for o in i.operands[1:])
    e.write(i.operands[0], "f8", f"{e.bind(scalar.fma_f64)}({a}, {b}, {c})")
