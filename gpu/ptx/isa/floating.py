"""Floating-point arithmetic, comparison and the approximate functions.

Source: PTX ISA 8.8, 9.7.3 (f32, f64), 9.7.4 (f16, bf16) and 9.7.6 (comparison).  Arithmetic that is
more than one IEEE operation lives in simkit.numerics, so that model and executor share it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpu.ptx.emit import Emitter
from gpu.ptx.isa.integer import COMBINERS, write_predicates, write_truth
from gpu.ptx.isa.registry import ptx
from gpu.ptx.syntax import Instruction, Pair
from simkit.numerics import formats, minmax, scalar
from simkit.numerics.fma import fma

Array = np.ndarray
Modifiers = Mapping[str, str]

_BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.true_divide}
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
        _finish(e, i, m, f"{e.bind(_BINARY[i.opcode])}({a}, {b})")
    else:
        e.apply(_BINARY[i.opcode], i.operands[0], "f4", a, b)


@ptx("fma.<round>{.ftz}{.sat}.f32", "mad.<round>{.ftz}{.sat}.f32", operands=4, round="rn rz rm rp")
def f32_fma(e: Emitter, i: Instruction, m: Modifiers) -> None:
    a, b, c = _inputs(e, i, m, count=3)
    if m["round"] == "rn" and "ftz" not in m and "sat" not in m:
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
        _finish(e, i, m, f"{e.bind(np.true_divide)}({a}, {b})")


def divide_approximately(a: Array, b: Array) -> Array:
    """div.approx: the quotient, but 0 for divisors from 2**126 up, where the hardware's reciprocal
    underflows.
    """
    quotient = np.true_divide(a, b)
    magnitude = np.abs(b)
    big = (magnitude >= np.float32(2.0**126)) & (magnitude < np.inf) & np.isfinite(a)
    if big.any():
        quotient = np.where(big, np.copysign(np.float32(0), quotient), quotient)
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
_UNARY = {
    "ex2": exp2_rounded, "lg2": log2_rounded, "rcp": reciprocal, "rsqrt": reciprocal_sqrt,
    "sqrt": np.sqrt, "sin": sine, "cos": cosine, "tanh": hyperbolic_tangent,
}  # fmt: skip


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
    value = f"{e.bind(_UNARY[i.opcode])}({_inputs(e, i, m, count=1)[0]})"
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
    e.apply(_BINARY[i.opcode], d, "f8", e.read(a, "f8"), e.read(b, "f8"))


@ptx("min.f64", "max.f64", operands=3)
def f64_minmax(e: Emitter, i: Instruction, m: Modifiers) -> None:
    d, a, b = i.operands
    e.apply(np.fmin if i.opcode == "min" else np.fmax, d, "f8", e.read(a, "f8"), e.read(b, "f8"))


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


# f16 and bf16, single and packed: computed in float32 (exact enough that the second rounding is
# innocuous: 24 bits are more than 2 p + 2 for p = 11 and p = 8), except fma, which simkit.numerics
# rounds once.

_HALF = "f16 f16x2 bf16 bf16x2"


def _decoder(kind: str) -> object:
    return formats.decode_f16 if kind == "f16" else formats.decode_bf16


def _encoder(kind: str) -> object:
    return scalar.encode_f16 if kind == "f16" else formats.encode_bf16


def _half_lanes(e: Emitter, i: Instruction, kind: str, operands: slice) -> list[list[str]]:
    """The operands of a half-precision instruction as float32 expressions, one list per packed
    element.
    """
    packed = kind.endswith("x2")
    decode = e.bind(_decoder(kind.removesuffix("x2")))
    if not packed:
        return [[f"{decode}({e.read(o, 'u2')})" for o in i.operands[operands]]]
    words = [e.read(o, "u4") for o in i.operands[operands]]
    low = [f"{decode}(({w}).astype('u2'))" for w in words]
    high = [f"{decode}(({w} >> {e.constant(16, 'u4')}).astype('u2'))" for w in words]
    return [low, high]


def _half_result(e: Emitter, i: Instruction, kind: str, values: list[str]) -> None:
    """Rounds float32 expressions to half precision and writes them, packed if there are two."""
    encode = e.bind(_encoder(kind.removesuffix("x2")))
    if len(values) == 1:
        e.write(i.operands[0], "u2", f"{encode}({values[0]})")
    else:
        e.write(
            i.operands[0], "u4", f"{e.bind(pack)}({encode}({values[0]}), {encode}({values[1]}))"
        )


def pack(low: Array, high: Array) -> Array:
    """Two 16-bit halves as one word."""
    return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


@ptx("add{.rn}{.ftz}{.sat}.<kind>", "sub{.rn}{.ftz}{.sat}.<kind>", "mul{.rn}{.ftz}{.sat}.<kind>",
     operands=3, kind=_HALF)  # fmt: skip
def half_arithmetic(e: Emitter, i: Instruction, m: Modifiers) -> None:
    function = e.bind(_BINARY[i.opcode])
    values = []
    for a, b in _half_lanes(e, i, m["kind"], slice(1, None)):
        value = _half_flags(e, m, f"{function}({a}, {b})")
        values.append(value)
    _half_result(e, i, m["kind"], values)


def _half_flags(e: Emitter, m: Modifiers, value: str) -> str:
    if "ftz" in m:
        raise e.error(".ftz on half precision is not supported")
    if "sat" in m:
        value = f"{e.bind(scalar.saturate)}({value})"
    if "relu" in m:
        value = f"{e.bind(scalar.relu)}({value})"
    return value


@ptx("fma.rn{.ftz}{.sat}{.relu}.<kind>", operands=4, kind=_HALF)
def half_fma(e: Emitter, i: Instruction, m: Modifiers) -> None:
    kind = m["kind"].removesuffix("x2")
    function = e.bind(scalar.fma_odd)
    encode = e.bind(scalar.encode_f16_once if kind == "f16" else scalar.encode_bf16_once)
    values = []
    for a, b, c in _half_lanes(e, i, m["kind"], slice(1, None)):
        values.append(f"{encode}({_half_flags(e, m, f'{function}({a}, {b}, {c})')})")
    if len(values) == 1:
        e.write(i.operands[0], "u2", values[0])
    else:
        e.write(i.operands[0], "u4", f"{e.bind(pack)}({values[0]}, {values[1]})")


@ptx("min{.ftz}{.NaN}.<kind>", "max{.ftz}{.NaN}.<kind>", operands=3, kind=_HALF)
def half_minmax(e: Emitter, i: Instruction, m: Modifiers) -> None:
    function = e.bind(minmax.fmin_ptx if i.opcode == "min" else minmax.fmax_ptx)
    values = []
    for a, b in _half_lanes(e, i, m["kind"], slice(1, None)):
        value = _half_flags(e, m, f"{function}({a}, {b})")
        if "NaN" in m:
            value = f"{e.bind(scalar.propagate_nan)}({value}, {a}, {b})"
        values.append(value)
    _half_result(e, i, m["kind"], values)


@ptx("abs{.ftz}.<kind>", "neg{.ftz}.<kind>", operands=2, kind=_HALF)
def half_sign(e: Emitter, i: Instruction, m: Modifiers) -> None:
    if "ftz" in m:
        raise e.error(".ftz on half precision is not supported")
    code = "u4" if m["kind"].endswith("x2") else "u2"
    bits = 0x80008000 if code == "u4" else 0x8000
    value = e.read(i.operands[1], code)
    if i.opcode == "neg":
        e.apply(np.bitwise_xor, i.operands[0], code, value, e.constant(bits, code))
    else:
        keep = 0x7FFF7FFF if code == "u4" else 0x7FFF
        e.apply(np.bitwise_and, i.operands[0], code, value, e.constant(keep, code))


@ptx("ex2.approx{.ftz}.<kind>", "tanh.approx.<kind>", operands=2, kind=_HALF)
def half_function(e: Emitter, i: Instruction, m: Modifiers) -> None:
    function = e.bind(_UNARY[i.opcode])
    flush = e.bind(scalar.flush)
    values = []
    for (a,) in _half_lanes(e, i, m["kind"], slice(1, None)):
        # Only bf16 has .ftz here, and its subnormals are float32's.
        value = f"{flush}({function}({flush}({a})))" if "ftz" in m else f"{function}({a})"
        values.append(value)
    _half_result(e, i, m["kind"], values)


# Comparison


_ORDERED = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNORDERED = {f"{name}u": name for name in _ORDERED}
_COMPARE = " ".join([*_ORDERED, *_UNORDERED, "num", "nan"])


def _comparison(e: Emitter, name: str, a: str, b: str) -> str:
    """Ordered comparisons are false, and unordered ones true, when an operand is NaN."""
    nan = e.bind(np.isnan)
    if name == "num":
        return f"~({nan}({a}) | {nan}({b}))"
    if name == "nan":
        return f"{nan}({a}) | {nan}({b})"
    if name == "ne":
        # NumPy's != is PTX's unordered neu; the ordered one is false for NaN.
        return f"{e.bind(np.less)}({a}, {b}) | {e.bind(np.greater)}({a}, {b})"
    if name == "neu":
        return f"{e.bind(np.not_equal)}({a}, {b})"
    if name in _ORDERED:
        return f"{e.bind(_ORDERED[name])}({a}, {b})"
    opposite = {
        "equ": None,
        "ltu": np.greater_equal,
        "leu": np.greater,
        "gtu": np.less_equal,
        "geu": np.less,
    }[name]
    if opposite is None:
        return f"~({e.bind(np.less)}({a}, {b}) | {e.bind(np.greater)}({a}, {b}))"
    return f"~{e.bind(opposite)}({a}, {b})"


_FLOATS = "f32 f64 f16 bf16"


def _compared(e: Emitter, i: Instruction, m: Modifiers) -> tuple[str, str]:
    kind = m["type"]
    if kind in ("f16", "bf16"):
        return tuple(_half_lanes(e, i, kind, slice(1, 3))[0])  # type: ignore[return-value]
    code = "f8" if kind == "f64" else "f4"
    a, b = (e.read(o, code) for o in i.operands[1:3])
    if "ftz" in m:
        flush = e.bind(scalar.flush)
        a, b = f"{flush}({a})", f"{flush}({b})"
    return a, b


@ptx("setp.<compare>{.ftz}.<type>", operands=3, compare=_COMPARE, type=_FLOATS)
@ptx(
    "setp.<compare>.<combine>{.ftz}.<type>",
    operands=4,
    compare=_COMPARE,
    combine="and or xor",
    type=_FLOATS,
)
def set_predicate(e: Emitter, i: Instruction, m: Modifiers) -> None:
    value = _comparison(e, m["compare"], *_compared(e, i, m))
    if isinstance(i.operands[0], Pair):
        # The second predicate is the complement, also when an operand is NaN.
        write_predicates(e, i, m, value)
    else:
        write_predicates(e, i, m, f"({value})")


@ptx("setp.<compare>{.ftz}.<type>", operands=3, compare=_COMPARE, type="f16x2 bf16x2")
def set_predicate_packed(e: Emitter, i: Instruction, m: Modifiers) -> None:
    (a0, b0), (a1, b1) = _half_lanes(e, i, m["type"], slice(1, 3))
    d = i.operands[0]
    if not isinstance(d, Pair):
        raise e.error("a packed comparison needs two predicates")
    low = e.fresh(_comparison(e, m["compare"], a0, b0))
    high = e.fresh(_comparison(e, m["compare"], a1, b1))
    e.write(d.first, "b1", low)
    e.write(d.second, "b1", high)


@ptx("set.<compare>{.ftz}.<result>.<type>", operands=3, compare=_COMPARE, result="u32 s32 f32",
     type=_FLOATS)  # fmt: skip
@ptx("set.<compare>.<combine>{.ftz}.<result>.<type>", operands=4, compare=_COMPARE,
     combine=" ".join(COMBINERS), result="u32 s32 f32", type=_FLOATS)  # fmt: skip
def set_value(e: Emitter, i: Instruction, m: Modifiers) -> None:
    write_truth(e, i, m, f"({_comparison(e, m['compare'], *_compared(e, i, m))})")
