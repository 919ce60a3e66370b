"""Floating-point comparisons: setp and set.  Source: PTX ISA 8.8, 9.7.6."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpu.ptx.emit import Emitter
from gpu.ptx.isa.half import half_lanes, write_bits
from gpu.ptx.isa.integer import COMBINERS, TRUTHS, combined, write_predicates, write_truth
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Instruction, Pair, Register
from simkit.numerics import scalar

Modifiers = Mapping[str, str]

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
_HALF_RESULTS = "u16 s16 u32 s32 f32 f16 bf16"


def _compared(e: Emitter, i: Instruction, m: Modifiers) -> tuple[str, str]:
    kind = m["type"]
    if kind in ("f16", "bf16"):
        a, b = half_lanes(e, i, kind, slice(1, 3), "ftz" in m)[0]
        return a, b
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
    if "combine" not in m and m["compare"] in _ORDERED and isinstance(i.operands[0], Register):
        e.apply(_ORDERED[m["compare"]], i.operands[0], "b1", *_compared(e, i, m))
        return
    value = _comparison(e, m["compare"], *_compared(e, i, m))
    # The second predicate of a pair is the complement, also when an operand is NaN.
    write_predicates(e, i, m, f"({value})")


@ptx("setp.<compare>{.ftz}.<type>", operands=3, compare=_COMPARE, type="f16x2 bf16x2")
@ptx("setp.<compare>.<combine>{.ftz}.<type>", operands=4, compare=_COMPARE,
     combine=" ".join(COMBINERS), type="f16x2 bf16x2")  # fmt: skip
def set_predicate_packed(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """One predicate for the lower halves, one for the upper halves."""
    d = i.operands[0]
    if not isinstance(d, Pair):
        raise e.error("a packed comparison needs two predicates")
    truths = []
    for a, b in half_lanes(e, i, m["type"], slice(1, 3), "ftz" in m):
        value = f"({_comparison(e, m['compare'], a, b)})"
        if "combine" in m:
            value = f"{e.bind(COMBINERS[m['combine']])}({value}, {e.read(i.operands[3], 'b1')})"
        truths.append(e.fresh(value))
    e.write(d.first, "b1", truths[0])
    e.write(d.second, "b1", truths[1])


@ptx("set.<compare>{.ftz}.<result>.<type>", operands=3, compare=_COMPARE,
     result="u32 s32 f32 f16 bf16", type="f32 f64")  # fmt: skip
@ptx("set.<compare>.<combine>{.ftz}.<result>.<type>", operands=4, compare=_COMPARE,
     combine=" ".join(COMBINERS), result="u32 s32 f32 f16 bf16", type="f32 f64")  # fmt: skip
@ptx("set.<compare>{.ftz}.<result>.<type>", operands=3, compare=_COMPARE,
     result=_HALF_RESULTS, type="f16 bf16")  # fmt: skip
@ptx("set.<compare>.<combine>{.ftz}.<result>.<type>", operands=4, compare=_COMPARE,
     combine=" ".join(COMBINERS), result=_HALF_RESULTS, type="f16 bf16")  # fmt: skip
def set_value(e: Emitter, i: Instruction, m: Modifiers) -> None:
    write_truth(e, i, m, f"({_comparison(e, m['compare'], *_compared(e, i, m))})")


@ptx("set.<compare>{.ftz}.<result>.<type>", operands=3, compare=_COMPARE,
     result="u32 s32 f16x2 bf16x2", type="f16x2 bf16x2")  # fmt: skip
@ptx("set.<compare>.<combine>{.ftz}.<result>.<type>", operands=4, compare=_COMPARE,
     combine=" ".join(COMBINERS), result="u32 s32 f16x2 bf16x2",
     type="f16x2 bf16x2")  # fmt: skip
def set_value_packed(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """Each half becomes 1, or all ones for an integer result."""
    kind = m["result"].removesuffix("x2")
    if kind in ("f16", "bf16") and m["result"] != m["type"]:
        raise e.error(f"a comparison of {m['type']} gives no {m['result']}")
    true, false = e.constant(TRUTHS.get(kind, 0) & 0xFFFF, "u2"), e.constant(0, "u2")
    halves = []
    for a, b in half_lanes(e, i, m["type"], slice(1, 3), "ftz" in m):
        value = combined(e, i, m, f"({_comparison(e, m['compare'], a, b)})")
        halves.append(f"{e.bind(np.where)}({value}, {true}, {false})")
    write_bits(e, i, halves)
