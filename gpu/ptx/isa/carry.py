"""Extended-precision integer arithmetic: sums and products that hand a carry on.

Source: PTX ISA 8.8, 9.7.2.  The condition code is one predicate register per thread; the lowering
puts it among the operands: behind the destination where it is written, at the end where it is read.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpu.ptx.emit import Emitter
from gpu.ptx.isa.integer import multiply_high
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Instruction
from gpu.ptx.types import CODES, SIZES

Array = np.ndarray
Modifiers = Mapping[str, str]

_TYPES = "u32 s32 u64 s64"


def add_with_carry(a: Array, b: Array, carry: Array) -> tuple[Array, Array]:
    """Unsigned ``a + b + carry`` and whether it overflows."""
    first = a + b
    total = first + carry.astype(a.dtype)
    return total, (first < a) | (total < first)


def subtract_with_borrow(a: Array, b: Array, carry: Array) -> tuple[Array, Array]:
    """Unsigned ``a - b``, less one without ``carry``; and whether that is not below zero.

    The condition code is the carry of ``a + ~b + 1``, the opposite of a borrow.  The ISA only says
    "borrow-out", but code that NVRTC makes (the division of __int128) reads it with addc.
    """
    return add_with_carry(a, ~b, carry)


def _emit(e: Emitter, i: Instruction, m: Modifiers, function: str, a: str, b: str) -> None:
    """Result and carry-out of ``function(a, b, carry-in)``; both before either is written."""
    code = f"u{SIZES[m['type']]}"
    reads = i.opcode.endswith("c")
    # A first sum starts without a carry, a first difference without a borrow.
    none = e.constant(i.opcode == "sub", "b1")
    carry = e.read(i.operands[-1], "b1") if reads else f"x.array({none})"
    result, out = e.fresh("None"), e.fresh("None")
    e.line(f"{result}, {out} = {function}({a}, {b}, {carry})")
    e.write(i.operands[0], code, result)
    if "cc" in m:
        e.write(i.operands[1], "b1", out)


@ptx("add.cc.<type>", "sub.cc.<type>", operands=3, results=2, carries="out", type=_TYPES)
@ptx("addc.cc.<type>", "subc.cc.<type>", operands=3, results=2, carries="in out", type=_TYPES)
@ptx("addc.<type>", "subc.<type>", operands=3, carries="in", type=_TYPES)
def sum_with_carry(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = f"u{SIZES[m['type']]}"
    first = 2 if "cc" in m else 1
    a, b = (f"x.array({e.read(o, code)})" for o in i.operands[first : first + 2])
    function = e.bind(add_with_carry if i.opcode.startswith("add") else subtract_with_borrow)
    _emit(e, i, m, function, a, b)


@ptx("mad.<part>.cc.<type>", operands=4, results=2, carries="out", part="lo hi", type=_TYPES)
@ptx("madc.<part>.cc.<type>", operands=4, results=2, carries="in out", part="lo hi", type=_TYPES)
@ptx("madc.<part>.<type>", operands=4, carries="in", part="lo hi", type=_TYPES)
def product_with_carry(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """Half of a product plus a third number: the carry is that of the sum."""
    code, unsigned = CODES[m["type"]], f"u{SIZES[m['type']]}"
    first = 2 if "cc" in m else 1
    a, b = (f"x.array({e.read(o, code)})" for o in i.operands[first : first + 2])
    c = f"x.array({e.read(i.operands[first + 2], unsigned)})"
    times = e.bind(np.multiply if m["part"] == "lo" else multiply_high)
    _emit(e, i, m, e.bind(add_with_carry), f"{times}({a}, {b}).view('{unsigned}')", c)
