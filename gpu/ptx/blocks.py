"""Basic blocks and decoded instructions: what the lowering makes and the code generator reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpu.ptx.registry import Form
from gpu.ptx.syntax import (
    Address,
    Group,
    Instruction,
    Not,
    Operand,
    Pair,
    Register,
    Vector,
)

# The block number that stands for the end of the kernel.
EXIT = -1

# What marks an instruction of a whole warp: a modifier, or being one of the old ones without it.
_TOGETHER = frozenset(("sync", "aligned"))
_COLLECTIVE = frozenset(("bar", "barrier", "shfl", "vote", "activemask"))
_WAITS = frozenset(("bar", "barrier", "griddepcontrol", "wgmma"))


@dataclass(frozen=True, slots=True)
class Item:
    """A decoded instruction: its form, its modifiers by name, and the registers it writes and
    reads.
    """

    instruction: Instruction
    form: Form
    modifiers: dict[str, str]
    writes: tuple[str, ...]
    reads: tuple[str, ...]

    @property
    def is_partial(self) -> bool:
        """Whether the old value of the destination survives in some lanes."""
        return self.instruction.guard is not None or self.form.reads_results


@dataclass(slots=True)
class Block:
    """Straight-line code and where control goes after it.

    ``kind``: "jump" (to targets[0]), "branch" (predicate true: targets[0], else targets[1]),
    "switch" (index into targets[:-1], otherwise targets[-1]) or "sync" (the last item may have to
    wait; then targets[0]).
    """

    index: int
    items: list[Item]
    kind: str
    targets: list[int]
    condition: Register | None = None
    negated: bool = False
    live_in: frozenset[str] = frozenset()
    live_out: frozenset[str] = frozenset()

    @property
    def waits_for_others(self) -> bool:
        """Whether the warp waits here for something that is no matter of its single lanes."""
        return self.kind == "sync" and self.items[-1].instruction.opcode in _WAITS

    @property
    def needs_convergence(self) -> bool:
        """Whether an instruction here depends on which lanes of the warp execute it together."""
        return any(
            i.instruction.opcode in _COLLECTIVE or not _TOGETHER.isdisjoint(i.instruction.modifiers)
            for i in self.items
        )


def registers_of(operand: Operand | None) -> Iterator[str]:
    """Names of the registers in an operand."""
    match operand:
        case Register(name):
            yield name
        case Not(register):
            yield register.name
        case Address(base, _, coordinates):
            yield from registers_of(base)
            for inner in coordinates:
                yield from registers_of(inner)
        case Vector(elements) | Group(elements):
            for inner in elements:
                yield from registers_of(inner)
        case Pair(first, second):
            yield from registers_of(first)
            yield from registers_of(second)
