"""Simplifies blocks before code is generated: constants and copies propagated, dead code dropped,
liveness.

Compilers keep constants in registers (``mov.u32 %r12, 31``) and bit casts as moves; both would cost
an array operation each time.  Nothing here changes what a kernel computes, moves in memory or waits
for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from gpu.ptx.blocks import EXIT, Block, Item, registers_of
from gpu.ptx.syntax import (
    Address,
    Group,
    Immediate,
    Operand,
    Pair,
    Register,
    Symbol,
    Vector,
)
from gpu.ptx.types import SIZES


def simplify(blocks: list[Block], registers: dict[str, str]) -> None:
    """Rewrites the blocks in place and fills live_in and live_out."""
    _propagate_constants(blocks, registers)
    for block in blocks:
        _propagate_copies(block, registers)
    while True:
        _liveness(blocks)
        if not _drop_dead_code(blocks):
            return


def _propagate_constants(blocks: list[Block], registers: dict[str, str]) -> None:
    """A register whose only write is an unguarded move of a constant is that constant
    everywhere.
    """
    writes = Counter(r for b in blocks for i in b.items for r in i.writes)
    constants: dict[str, Operand] = {}
    for block in blocks:
        for item in block.items:
            instruction = item.instruction
            if instruction.opcode != "mov" or instruction.guard is not None:
                continue
            target, source = instruction.operands
            if (
                isinstance(target, Register)
                and writes[target.name] == 1
                and isinstance(source, Immediate | Symbol)
                and registers[target.name] != "pred"
            ):
                constants[target.name] = source
    if not constants:
        return

    def substitute(register: Register) -> Operand:
        return constants.get(register.name, register)

    for block in blocks:
        block.items = [_rewritten(item, substitute) for item in block.items]


def _propagate_copies(block: Block, registers: dict[str, str]) -> None:
    """Within a block, reads of a copy become reads of its source while neither has been written
    again.
    """
    copies: dict[str, str] = {}
    items: list[Item] = []
    for item in block.items:
        if copies and any(r in copies for r in item.reads):
            item = _rewritten(item, lambda r: Register(copies.get(r.name, r.name)))
        for written in item.writes:
            copies.pop(written, None)
            for stale in [c for c, s in copies.items() if s == written]:
                del copies[stale]
        items.append(item)
        copy = _copy_of(item, registers)
        if copy is not None:
            copies[copy[0]] = copy[1]
    block.items = items
    if block.condition is not None and block.condition.name in copies:
        block.condition = Register(copies[block.condition.name])


def _copy_of(item: Item, registers: dict[str, str]) -> tuple[str, str] | None:
    instruction = item.instruction
    if instruction.guard is not None or not item.form.pure:
        return None
    is_move = instruction.opcode == "mov" or (
        # A generic address of global or constant memory is the address itself.
        instruction.opcode == "cvta"
        and instruction.modifiers[-2] in ("global", "const")
        and instruction.modifiers[-1] == "u64"
    )
    if not is_move or len(instruction.operands) != 2:
        return None
    target, source = instruction.operands
    if not isinstance(target, Register) or not isinstance(source, Register):
        return None
    types = registers[target.name], registers[source.name]
    if "pred" in types and types[0] != types[1]:
        return None
    if SIZES.get(types[0]) != SIZES.get(types[1]) or target.name == source.name:
        return None
    return target.name, source.name


def _rewritten(item: Item, substitute: Callable[[Register], Operand]) -> Item:
    """The item with its source registers replaced; destinations that are also read stay."""

    def rewrite(operand: Operand) -> Operand:
        match operand:
            case Register():
                return substitute(operand)
            case Address(Register() as base, offset, coordinates):
                new = substitute(base)
                if isinstance(new, Symbol):
                    new, offset = Symbol(new.name), new.offset + offset
                assert isinstance(new, Register | Symbol | Immediate)
                return Address(new, offset, tuple(map(rewrite, coordinates)))
            case Address(base, offset, coordinates):
                return Address(base, offset, tuple(map(rewrite, coordinates)))
            case Vector(elements):
                return Vector(tuple(map(rewrite, elements)))
            case Group(elements):
                return Group(tuple(map(rewrite, elements)))
            case Pair(first, second):
                return Pair(rewrite(first), rewrite(second))
            case _:
                return operand

    number = item.form.results
    operands = item.instruction.operands
    new = (*operands[:number], *map(rewrite, operands[number:]))
    if new == operands:
        return item
    instruction = replace(item.instruction, operands=new)
    reads = [r for o in new[number:] for r in registers_of(o)]
    if instruction.guard is not None:
        reads.append(instruction.guard.name)
    if item.is_partial:
        reads += item.writes
    return replace(item, instruction=instruction, reads=tuple(dict.fromkeys(reads)))


def _liveness(blocks: list[Block]) -> None:
    """Backward data flow over the blocks."""
    effects = []
    for block in blocks:
        reads: set[str] = set()
        writes: set[str] = set()
        for item in block.items:
            reads.update(r for r in item.reads if r not in writes)
            if not item.is_partial:
                writes.update(item.writes)
        if block.condition is not None and block.condition.name not in writes:
            reads.add(block.condition.name)
        effects.append((reads, writes))
    live_in: list[set[str]] = [set() for _ in blocks]
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            out: set[str] = set()
            for target in block.targets:
                if target != EXIT:
                    out |= live_in[target]
            reads, writes = effects[block.index]
            new = reads | (out - writes)
            if new != live_in[block.index]:
                live_in[block.index] = new
                changed = True
            block.live_out = frozenset(out)
    for block in blocks:
        block.live_in = frozenset(live_in[block.index])


def live_registers(blocks: list[Block], registers: dict[str, str]) -> int:
    """The most 32-bit registers that are alive at one point: an estimate of what ptxas allocates.

    ptxas reorders and rematerialises, and adds what addressing and calling need, so it may end a
    little above or below.  Predicates have registers of their own and do not count.
    """

    def weight(names: Iterable[str]) -> int:
        sizes = (SIZES.get(registers[n], 0) for n in names)
        return sum(-(-size // 4) for size in sizes)

    most = 0
    for block in blocks:
        live = set(block.live_out)
        most = max(most, weight(live))
        for item in reversed(block.items):
            if not item.is_partial:
                live.difference_update(item.writes)
            live.update(item.reads)
            most = max(most, weight(live | set(item.writes)))
    return most


def _drop_dead_code(blocks: list[Block]) -> bool:
    """Drops pure instructions whose results nobody reads; whether there were any."""
    dropped = False
    for block in blocks:
        live = set(block.live_out)
        if block.condition is not None:
            live.add(block.condition.name)
        kept: list[Item] = []
        for item in reversed(block.items):
            if item.form.pure and item.writes and live.isdisjoint(item.writes):
                dropped = True
                continue
            if not item.is_partial:
                live.difference_update(item.writes)
            live.update(item.reads)
            kept.append(item)
        block.items = kept[::-1]
    return dropped
