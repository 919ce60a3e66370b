"""Barriers, fences, traps and what waits.

Source: PTX ISA 8.8, 9.7.13 and 9.7.19 (trap, brkpt, nanosleep).
"""

from __future__ import annotations

from collections.abc import Mapping

from gpu.ptx.emit import Emitter
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Immediate, Instruction, Operand, Register

Modifiers = Mapping[str, str]


def _count(e: Emitter, operand: Operand) -> str:
    """A barrier number or thread count: a plain int when it is a constant."""
    if isinstance(operand, Immediate):
        return str(int(operand.value))
    return f"x.uniform({e.read(operand, 'u4')}, m, {e.site})"


@ptx(
    "bar{.cta}.sync",
    "barrier{.cta}.sync{.aligned}",
    operands=(1, 2),
    results=0,
    pure=False,
    ends_block=True,
)
def barrier_wait(e: Emitter, i: Instruction, m: Modifiers) -> None:
    number = _count(e, i.operands[0])
    threads = _count(e, i.operands[1]) if len(i.operands) == 2 else "0"
    aligned = i.opcode == "bar" or "aligned" in m
    e.line(f"return x.barrier({number}, {threads}, {aligned}, {e.site})")


@ptx("bar{.cta}.arrive", "barrier{.cta}.arrive{.aligned}", operands=2, results=0, pure=False)
def barrier_arrive(e: Emitter, i: Instruction, m: Modifiers) -> None:
    number, threads = (_count(e, o) for o in i.operands)
    e.line(f"x.barrier_arrive({number}, {threads}, {e.mask}, {e.site})")


@ptx(
    "bar{.cta}.red.popc.u32",
    "barrier{.cta}.red.popc{.aligned}.u32",
    operands=(3, 4),
    pure=False,
    ends_block=True,
)
@ptx(
    "bar{.cta}.red.<operation>.pred",
    "barrier{.cta}.red.<operation>{.aligned}.pred",
    operands=(3, 4),
    pure=False,
    ends_block=True,
    operation="and or",
)
def barrier_reduce(e: Emitter, i: Instruction, m: Modifiers) -> None:
    number = _count(e, i.operands[1])
    threads = _count(e, i.operands[2]) if len(i.operands) == 4 else "0"
    operation = m.get("operation", "popc")
    predicate = e.read(i.operands[-1], "b1")
    target = i.operands[0]
    if not isinstance(target, Register):
        raise e.error("bar.red needs a destination register")
    # The result exists only when the barrier completes: the scheduler writes it then.
    e.line(
        f"return x.barrier({number}, {threads}, True, {e.site}, {operation!r},"
        f" x.array({predicate}), {target.name!r})"
    )


@ptx("bar.warp.sync", operands=1, results=0, pure=False)
def warp_barrier(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.converged(e.read(i.operands[0], "u4"))


@ptx("membar.<level>", operands=0, results=0, pure=False, level="cta gl sys")
@ptx("fence{.<kind>}.<scope>", operands=0, results=0, pure=False, kind="sc acq_rel acquire release",
     scope="cta cluster gpu sys")  # fmt: skip
def fence(e: Emitter, i: Instruction, m: Modifiers) -> None:
    scope = m.get("scope") or {"gl": "gpu"}.get(m["level"], m["level"])
    e.line(f"x.memory_fence({scope!r}, {e.mask})")


@ptx("trap", "brkpt", operands=0, results=0, pure=False)
def trap(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.line(f"x.trap({e.mask}, {e.site})")


@ptx("nanosleep.u32", operands=1, results=0, pure=False)
@ptx("pmevent", "pmevent.mask", operands=1, results=0, pure=False)
def nothing(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """Time and profiler events leave no trace in registers or memory."""


@ptx("$printf", operands=3, pure=False)
def printf(e: Emitter, i: Instruction, m: Modifiers) -> None:
    result, text, values = i.operands
    e.write(
        result,
        "u4",
        f"x.printf(x.array({e.read(text, 'u8')}), x.array({e.read(values, 'u8')}), {e.mask},"
        f" {e.site})",
    )


@ptx("$assertfail", operands=5, results=0, pure=False)
def assertion(e: Emitter, i: Instruction, m: Modifiers) -> None:
    texts = ", ".join(f"x.array({e.read(o, 'u8')})" for o in (i.operands[0], i.operands[1]))
    e.line(f"x.assertion({texts}, {e.read(i.operands[2], 'u4')}, {e.mask}, {e.site})")
