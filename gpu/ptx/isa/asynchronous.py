"""Asynchronous copies of a thread: cp.async and its groups.  Source: PTX ISA 8.8, 9.7.9.25.3."""

from __future__ import annotations

from collections.abc import Mapping

from gpu.ptx.emit import Emitter
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Immediate, Instruction, Not, Register

Modifiers = Mapping[str, str]

_PREFETCH = "L2::64B L2::128B L2::256B"


@ptx(
    "cp.async.ca.<space>.global{.L2::cache_hint}{.<prefetch>}",
    "cp.async.cg.<space>.global{.L2::cache_hint}{.<prefetch>}",
    operands=(3, 4, 5),
    results=0,
    pure=False,
    prefetch=_PREFETCH,
    space="shared shared::cta",
)
def copy(e: Emitter, i: Instruction, m: Modifiers) -> None:
    target, source, size = i.operands[:3]
    if not isinstance(size, Immediate) or int(size.value) not in (4, 8, 16):
        raise e.error("cp.async copies 4, 8 or 16 bytes")
    if "cg" in i.modifiers and int(size.value) != 16:
        raise e.error("cp.async.cg copies 16 bytes")
    to, to_offset = e.address(target)
    origin, origin_offset = e.address(source)
    rest = i.operands[3 : 4 if "L2::cache_hint" in m and len(i.operands) == 4 else 5]
    if "L2::cache_hint" in m:
        rest = rest[:-1] if len(i.operands) == 5 else ()
    taken = "None"
    if rest:
        operand = rest[0]
        is_predicate = isinstance(operand, Not) or (
            isinstance(operand, Register) and e.register_code(operand.name) == "b1"
        )
        # ``ignore-src`` reads nothing and fills with zeros, as a source size of 0 does.
        taken = (
            f"x.source_size(~({e.read(operand, 'b1')}), {int(size.value)})"
            if is_predicate
            else f"x.array({e.read(operand, 'u4')})"
        )
    e.line(
        f"x.copy_async({to}, {to_offset}, {origin}, {origin_offset}, {int(size.value)},"
        f" {taken}, {e.mask}, {e.site})"
    )


@ptx("cp.async.commit_group", operands=0, results=0, pure=False)
def commit(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.line(f"x.commit_copies({e.mask})")


@ptx("cp.async.wait_group", operands=1, results=0, pure=False)
def wait_group(e: Emitter, i: Instruction, m: Modifiers) -> None:
    pending = i.operands[0]
    if not isinstance(pending, Immediate):
        raise e.error("cp.async.wait_group needs a constant")
    e.line(f"x.wait_copies({int(pending.value)}, {e.mask}, {e.site})")


@ptx("cp.async.wait_all", operands=0, results=0, pure=False)
def wait_all(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.line(f"x.wait_copies(-1, {e.mask}, {e.site})")
