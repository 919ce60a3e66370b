"""Registers that tensor cores hold or that nobody has written: found in the program's text.

A wgmma reads and writes registers of its warps on its own time.  Between its issue and the
``wgmma.wait_group`` that covers it nobody else may touch its accumulator or overwrite its A, and
between any other access to them and the next wgmma there has to be a ``wgmma.fence`` (PTX ISA 8.8,
9.7.15.7.1).  Both follow from the ways through the program alone: a hazard on any way is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gpu.counters import Hazard
from gpu.ptx.blocks import EXIT, Block, Item, registers_of
from gpu.ptx.program import CONDITION_CODE
from gpu.ptx.syntax import Immediate, Vector

# Groups of wgmma that are told apart; later ones are as far away.
_MOST_GROUPS = 8


@dataclass
class _State:
    """Where the tensor cores stand before an instruction, on some way to it.

    ``flying``: registers of wgmma that may not be over: groups committed since, the line of the
    wgmma, and whether it is the accumulator.  ``loose``: registers accessed since the last
    wgmma.fence, and where; ``never_fenced``: there may have been none at all.
    """

    flying: dict[str, tuple[int, int, bool]] = field(default_factory=dict)
    loose: dict[str, int] = field(default_factory=dict)
    never_fenced: bool = True

    def copy(self) -> _State:
        return _State(dict(self.flying), dict(self.loose), self.never_fenced)

    def join(self, other: _State) -> bool:
        """Adds another way; whether anything is new."""
        before = dict(self.flying), dict(self.loose), self.never_fenced
        for name, held in other.flying.items():
            mine = self.flying.get(name)
            if mine is None or held[0] < mine[0]:
                self.flying[name] = held
        for name, line in other.loose.items():
            self.loose.setdefault(name, line)
        self.never_fenced |= other.never_fenced
        return before != (self.flying, self.loose, self.never_fenced)


def warpgroup_hazards(blocks: list[Block], place: Callable[[int], str]) -> list[Hazard]:
    """Accumulators touched too early and missing wgmma.fence, each pair of lines once."""
    if not any(_is(item, "mma_async") for block in blocks for item in block.items):
        return []
    found: dict[tuple[str, int, int], Hazard] = {}
    tensor = {name for b in blocks for i in b.items if _is(i, "mma_async") for name in _held(i)}
    moves = [i for b in blocks for i in b.items if _is_move(i)]
    while any(i.writes[0] in tensor and i.reads[0] not in tensor for i in moves):
        tensor |= {i.reads[0] for i in moves if i.writes[0] in tensor}
    entry: dict[int, _State] = {blocks[0].index: _State()}
    waiting = [blocks[0].index]
    by_index = {block.index: block for block in blocks}
    while waiting:
        block = by_index[waiting.pop()]
        state = entry[block.index].copy()
        for item in block.items:
            _step(state, item, tensor, found, place)
        for target in block.targets:
            if target == EXIT:
                continue
            if target not in entry:
                entry[target] = state.copy()
            elif not entry[target].join(state):
                continue
            waiting.append(target)
    return list(found.values())


def _is(item: Item, word: str) -> bool:
    return item.instruction.opcode == "wgmma" and word in item.instruction.modifiers


def _is_move(item: Item) -> bool:
    """A copy of one register, which the assembler makes no instruction of."""
    return (
        item.instruction.opcode == "mov"
        and item.instruction.guard is None
        and len(item.reads) == len(item.writes) == 1
    )


def _held(item: Item) -> dict[str, bool]:
    """Registers of a wgmma, and whether they are its accumulator."""
    accumulator, a = item.instruction.operands[:2]
    held = dict.fromkeys(registers_of(a), False) if isinstance(a, Vector) else {}
    return held | dict.fromkeys(registers_of(accumulator), True)


def _step(
    state: _State,
    item: Item,
    tensor: Iterable[str],
    found: dict[tuple[str, int, int], Hazard],
    place: Callable[[int], str],
) -> None:
    line = item.instruction.position.line

    def report(kind: str, other: int, message: str, advice: str) -> None:
        found.setdefault((kind, line, other), Hazard(kind, message, line, other, advice))

    if _is(item, "mma_async"):
        held = _held(item)
        for name, is_accumulator in held.items():
            flying = state.flying.get(name)
            if flying is not None and flying[2] and not is_accumulator:
                report(
                    "wgmma_register", flying[1],
                    f"wgmma ({place(line)}) takes A from {name}, an accumulator of the wgmma at"
                    f" {place(flying[1])}, which may not be over",
                    "wgmma.wait_group before the second wgmma",
                )  # fmt: skip
        loose = [name for name in held if name in state.loose]
        if state.never_fenced or loose:
            other = state.loose[loose[0]] if loose else 0
            touched = f", of which {loose[0]} was accessed at {place(other)}" if loose else ""
            report(
                "missing_wgmma_fence", other,
                f"wgmma ({place(line)}) uses registers{touched} without a wgmma.fence before",
                "wgmma.fence.sync.aligned between the access and the wgmma",
            )  # fmt: skip
        state.flying |= {name: (0, line, is_acc) for name, is_acc in held.items()}
        return
    if _is(item, "fence"):
        state.loose.clear()
        state.never_fenced = False
        return
    if _is(item, "commit_group"):
        state.flying = {
            name: (min(age + 1, _MOST_GROUPS), site, is_acc)
            for name, (age, site, is_acc) in state.flying.items()
        }
        return
    if _is(item, "wait_group"):
        operand = item.instruction.operands[0]
        allowed = int(operand.value) if isinstance(operand, Immediate) else 0
        # Age 0 is not committed yet, age 1 the latest group.
        state.flying = {
            name: held for name, held in state.flying.items() if held[0] == 0 or held[0] <= allowed
        }
        return
    # Compilers set and copy registers with moves wherever they like; what counts is who made the
    # value that is moved.
    is_move = item.instruction.opcode == "mov"
    for name in item.reads:
        if name in tensor and not is_move:
            state.loose[name] = line
        flying = state.flying.get(name)
        if flying is not None and flying[2]:
            report(
                "wgmma_register", flying[1],
                f"{name} is read ({place(line)}) while the wgmma at {place(flying[1])} may not be"
                " over, whose accumulator it is",
                "wgmma.wait_group before the access",
            )  # fmt: skip
    for name in item.writes:
        if name in tensor and not is_move:
            state.loose[name] = line
        elif is_move:
            origin = state.loose.get(item.reads[0]) if _is_move(item) else None
            if origin is None:
                state.loose.pop(name, None)
            else:
                state.loose[name] = origin
        flying = state.flying.get(name)
        if flying is not None:
            role = "accumulator" if flying[2] else "A"
            report(
                "wgmma_register", flying[1],
                f"{name} is written ({place(line)}) while the wgmma at {place(flying[1])} may not"
                f" be over, whose {role} it holds",
                "wgmma.wait_group before the access",
            )  # fmt: skip


def unwritten_registers(blocks: list[Block], place: Callable[[int], str]) -> list[Hazard]:
    """Registers that are read on some way from the entry without having been written on it.

    A guarded write counts as a write: its guard may be the one of the reads.
    """
    written: dict[int, set[str]] = {blocks[0].index: set()}
    by_index = {block.index: block for block in blocks}
    waiting = [blocks[0].index]
    while waiting:
        block = by_index[waiting.pop()]
        state = written[block.index] | {name for item in block.items for name in item.writes}
        for target in block.targets:
            if target == EXIT:
                continue
            if target not in written:
                written[target] = set(state)
            elif not written[target] <= state:
                written[target] &= state
            else:
                continue
            waiting.append(target)
    found: dict[str, Hazard] = {}
    for index, before in written.items():
        known = set(before)
        for item in by_index[index].items:
            line = item.instruction.position.line
            for name in item.reads:
                # An instruction that reads its own result keeps parts of it, or may not use it at
                # all: an accumulator that scale-d switches off.
                is_own = name in item.writes or name == CONDITION_CODE or "#" in name
                if name not in known and name not in found and not is_own:
                    found[name] = Hazard(
                        "uninitialised_register",
                        f"{name} is read ({place(line)}) and may not have been written before",
                        line,
                        advice="write it on every way to the read",
                    )
            known.update(item.writes)
    return list(found.values())
