"""Lowers one kernel of a parsed module to basic blocks of decoded instructions.

Calls are inlined, so that a kernel is one flat control-flow graph; parameters of calls become
registers.  Blocks are numbered in a weak topological order (every loop contiguous, its exits after
it), which is what lets the scheduler reconverge diverged lanes by always running the lowest block
first.  Registers that live across blocks are told apart from those that a block makes and uses up
itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from gpu.ptx.architectures import Architecture, architecture, lacking
from gpu.ptx.blocks import EXIT, Block, Item, registers_of
from gpu.ptx.inline import Inliner, located, split_wide
from gpu.ptx.optimize import simplify
from gpu.ptx.registry import TABLE, Form
from gpu.ptx.syntax import (
    Instruction,
    Label,
    Module,
    Operand,
    Position,
    Register,
    Symbol,
    Variable,
    Vector,
)
from gpu.ptx.types import SIZES
from simkit.errors import PtxError

# The carry of add.cc and the like: a register that the text does not write out.
CONDITION_CODE = "%cc#"


@dataclass(slots=True)
class Program:
    """A kernel ready for code generation; ``decoded``: its instructions as they were written."""

    name: str
    blocks: list[Block]
    registers: dict[str, str]
    parameters: list[Variable]
    parameter_offsets: dict[str, int]
    parameter_bytes: int
    shared: list[Variable]
    local_offsets: dict[str, int]
    local_bytes: int
    persistent: frozenset[str]
    uses_warpgroups: bool
    decoded: list[Item]
    performance: dict[str, tuple[int, ...]] = field(default_factory=dict)


def lower(module: Module, name: str) -> Program:
    """The program of entry ``name``.

    Raises PtxError with every instruction that the executor does not know, each with its line.
    """
    function = module.functions.get(name)
    if function is None or not function.is_entry or not function.is_defined:
        entries = [f.name for f in module.functions.values() if f.is_entry]
        raise PtxError(f"no kernel named {name!r}; the module has {', '.join(entries) or 'none'}")
    flat = Inliner(module).run(function)
    items = _decode(flat.body, flat.registers, _target(module))
    blocks = _split(items, flat.tables)
    _fold_exits(blocks)
    blocks = _order(blocks)
    simplify(blocks, flat.registers)
    offsets, size = _layout(flat.parameters)
    local, local_bytes = _layout([v for v in flat.variables if v.space == "local"])
    return Program(
        name=name,
        blocks=blocks,
        registers=flat.registers,
        parameters=flat.parameters,
        parameter_offsets=offsets,
        parameter_bytes=size,
        shared=[v for v in flat.variables if v.space == "shared"],
        local_offsets=local,
        local_bytes=-(-local_bytes // 16) * 16,
        # What the tensor core holds on to outlives its block, whoever reads it next.
        persistent=frozenset(r for b in blocks for r in b.live_in) | _held(blocks),
        uses_warpgroups=any(i.instruction.opcode == "wgmma" for b in blocks for i in b.items),
        decoded=[i for i in items if isinstance(i, Item)],
        performance=function.performance,
    )


def _target(module: Module) -> Architecture:
    found = architecture(module.target)
    if found is None:
        raise PtxError(
            f"PTX line {module.target_line}: unknown architecture {module.target!r} in .target"
        )
    return found


def _held(blocks: list[Block]) -> frozenset[str]:
    """Registers of asynchronous tensor-core operations: accumulators and A fragments."""
    return frozenset(
        r
        for block in blocks
        for item in block.items
        if item.form.opcode == "wgmma" and len(item.instruction.operands) > 2
        for operand in item.instruction.operands[:2]
        if isinstance(operand, Vector)
        for r in registers_of(operand)
    )


def _layout(variables: Iterable[Variable]) -> tuple[dict[str, int], int]:
    """Byte offsets of variables laid out one after the other, each at its alignment."""
    offsets: dict[str, int] = {}
    end = 0
    for variable in variables:
        end = -(-end // variable.align) * variable.align
        offsets[variable.name] = end
        end += variable.size
    return offsets, end


# Control flow by opcode: its modifiers, and how many operands it has.
_BRANCHES: dict[str, tuple[tuple[tuple[str, ...], ...], int]] = {
    "bra": (((), ("uni",)), 1),
    "brx": ((("idx",), ("idx", "uni")), 2),
    "ret": (((), ("uni",)), 0),
    "exit": (((),), 0),
}
# What is left out on purpose, and why.
REFUSED = {
    **dict.fromkeys(("tex", "tld4", "txq", "istypep"), "textures are not supported"),
    **dict.fromkeys(("suld", "sust", "sured", "suq"), "surfaces are not supported"),
    **dict.fromkeys(("alloca", "stacksave", "stackrestore"), "there is no stack to allocate from"),
    "multimem": "there is one device only",
    "tcgen05": "tensor memory is not supported",
    "clusterlaunchcontrol": "CTAs are not launched by others",
}


def _decode(
    body: list[Instruction | Label], registers: dict[str, str], target: Architecture
) -> list[Item | Label | Instruction]:
    """Finds each instruction's form; branches stay as they are."""
    decoded: list[Item | Label | Instruction] = []
    unknown: dict[int, str] = {}
    newer: dict[int, str] = {}
    for statement in split_wide(body, registers):
        if isinstance(statement, Label):
            decoded.append(statement)
            continue
        if statement.guard is not None and registers.get(statement.guard.name) != "pred":
            raise located(statement, f"guard {statement.guard.name!r} is not a predicate register")
        if statement.opcode in _BRANCHES:
            forms, count = _BRANCHES[statement.opcode]
            if statement.modifiers not in forms or len(statement.operands) != count:
                raise located(statement, f"there is no such form of {statement.opcode}")
            _check_branch_index(statement, registers)
            decoded.append(statement)
            continue
        found = TABLE.find(statement)
        if found is None:
            why = REFUSED.get(statement.opcode)
            unknown[statement.position.line] = statement.text + (f"  ({why})" if why else "")
            continue
        needed = lacking(statement, target)
        if needed is not None:
            newer[statement.position.line] = f"{statement.text}  (needs {needed})"
        form, slots = found
        if form.carries:
            statement = _with_carry(statement, form, registers)
        results = statement.operands[: form.results]
        sources = statement.operands[form.results :]
        writes = tuple(r for o in results for r in registers_of(o))
        reads = [r for o in sources for r in registers_of(o)]
        if statement.guard is not None:
            reads.append(statement.guard.name)
        if statement.guard is not None or form.reads_results:
            reads += writes
        item = Item(statement, form, slots, writes, tuple(dict.fromkeys(reads)))
        if form.ends_block and statement.guard is not None:
            # A guarded wait is a branch around an unguarded one.
            skip = f"#skip{len(decoded)}"
            decoded.append(
                replace(statement, opcode="bra", modifiers=(), operands=(Symbol(skip),),
                        guard_negated=not statement.guard_negated)
            )  # fmt: skip
            decoded.append(replace(item, instruction=replace(statement, guard=None)))
            decoded.append(Label(skip, statement.position))
        else:
            decoded.append(item)
    if unknown:
        raise PtxError(
            f"{len(unknown)} instructions that the executor does not know:\n{_listing(unknown)}"
        )
    if newer:
        raise PtxError(
            f"{len(newer)} instructions that a text for {target} (.target) may not use:\n"
            f"{_listing(newer)}"
        )
    return decoded


def _listing(places: dict[int, str]) -> str:
    """Texts by line, fifty at most."""
    lines = [f"    line {line}: {text}" for line, text in sorted(places.items())]
    more = [f"    ... and {len(lines) - 50} more"] if len(lines) > 50 else []
    return "\n".join(lines[:50] + more)


def _with_carry(instruction: Instruction, form: Form, registers: dict[str, str]) -> Instruction:
    """The instruction with the condition code among its operands: results, sources."""
    registers[CONDITION_CODE] = "pred"
    code = Register(CONDITION_CODE)
    target, *sources = instruction.operands
    results = (target, code) if "out" in form.carries else (target,)
    carried = (code,) if "in" in form.carries else ()
    return replace(instruction, operands=(*results, *sources, *carried))


def _check_branch_index(branch: Instruction, registers: dict[str, str]) -> None:
    """brx.idx takes a 32-bit register; other branches have none."""
    for operand in branch.operands:
        if isinstance(operand, Register) and SIZES.get(registers.get(operand.name, "")) != 4:
            raise located(branch, f"branch index {operand.name!r} is not a 32-bit register")


def _split(
    items: list[Item | Label | Instruction], tables: dict[str, tuple[str, ...]]
) -> list[Block]:
    """Cuts the list at labels, branches and waits.  Block 0 is where the kernel starts."""
    starts: dict[str, int] = {}
    drafts: list[tuple[list[Item], Instruction | Item | None]] = []
    current: list[Item] = []
    fresh = True

    def close(end: Instruction | Item | None) -> None:
        nonlocal current, fresh
        drafts.append((current, end))
        current, fresh = [], True

    for item in items:
        if isinstance(item, Label):
            if current or not fresh:
                close(None)
            starts[item.name] = len(drafts)
            fresh = False
        elif isinstance(item, Instruction):
            close(item)
        else:
            current.append(item)
            fresh = False
            if item.form.ends_block:
                close(item)
    drafts.append((current, None))

    def target(instruction: Instruction, operand: Operand) -> int:
        if not isinstance(operand, Symbol) or operand.name not in starts:
            raise located(instruction, "branch to an unknown label")
        return starts[operand.name]

    blocks: list[Block] = []
    for index, (body, end) in enumerate(drafts):
        following = index + 1 if index + 1 < len(drafts) else EXIT
        block = Block(index, body, "jump", [following])
        if isinstance(end, Item):
            block.kind = "sync"
        elif end is not None:
            _terminate(block, end, following, target, tables)
        blocks.append(block)
    return blocks


def _terminate(block: Block, end: Instruction, following: int, target, tables) -> None:  # type: ignore[no-untyped-def]
    """Sets kind and targets of a block from the branch that ends it."""
    if end.opcode in ("ret", "exit"):
        destination = EXIT
    elif end.opcode == "brx":
        if (
            len(end.operands) != 2
            or not isinstance(end.operands[0], Register)
            or end.guard is not None
        ):
            raise located(end, "brx.idx needs an index register and a target list, and no guard")
        name = getattr(end.operands[1], "name", "")
        if name not in tables:
            raise located(end, f"unknown target list {name!r}")
        block.kind = "switch"
        block.condition = end.operands[0]
        block.targets = [target(end, Symbol(t)) for t in tables[name]]
        return
    else:
        if len(end.operands) != 1:
            raise located(end, "bra needs one label")
        destination = target(end, end.operands[0])
    if end.guard is None:
        block.targets = [destination]
    else:
        block.kind = "branch"
        block.condition = end.guard
        block.negated = end.guard_negated
        block.targets = [destination, following]


def _fold_exits(blocks: list[Block]) -> None:
    """Branches to where nothing but the end is left end the thread themselves.

    Lanes that return early are gone then before the others of their warp come to a barrier.  Warps
    that wait need a block to go on at, even if nothing is left there.
    """
    while True:
        exits = {b.index for b in blocks if not b.items and b.targets == [EXIT]}
        folded = [
            b.targets if b.kind == "sync" else [EXIT if t in exits else t for t in b.targets]
            for b in blocks
        ]
        if folded == [b.targets for b in blocks]:
            return
        for block, targets in zip(blocks, folded, strict=True):
            block.targets = targets


def _order(blocks: list[Block]) -> list[Block]:
    """Renumbers reachable blocks in a weak topological order, the entry first.

    Bourdoncle's idea: order the strongly connected components topologically; within a component,
    drop the edges back to its head and order the rest the same way.  Each loop then is contiguous,
    and what follows it comes after it.
    """
    successors = {b.index: [t for t in dict.fromkeys(b.targets) if t != EXIT] for b in blocks}

    def arrange(nodes: set[int], entry: int) -> list[int]:
        result: list[int] = []
        for component in _components(nodes, entry, successors):
            if len(component) == 1:
                result += component
                continue
            inside = set(component)
            head = component[0]
            saved = {n: successors[n] for n in inside}
            for node in inside:
                successors[node] = [t for t in successors[node] if t != head]
            result += arrange(inside, head)
            successors.update(saved)
        return result

    order = arrange(set(successors), 0)
    number = {old: new for new, old in enumerate(order)}
    number[EXIT] = EXIT
    arranged = [blocks[old] for old in order]
    for new, block in enumerate(arranged):
        block.index = new
        block.targets = [number[t] for t in block.targets]
    return arranged


def _components(nodes: set[int], entry: int, successors: dict[int, list[int]]) -> list[list[int]]:
    """Strongly connected components reachable from ``entry``, topologically sorted; each starts
    with the node that was reached first (Tarjan, without recursion).
    """
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[list[int]] = []
    work: list[tuple[int, Iterator[int]]] = []

    def visit(node: int) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        on_stack.add(node)
        # Taken branches first: what is visited first is placed last, so fall-through code follows
        # directly.
        work.append((node, iter([s for s in successors[node] if s in nodes])))

    visit(entry)
    while work:
        node, rest = work[-1]
        for nxt in rest:
            if nxt not in order:
                visit(nxt)
                break
            if nxt in on_stack:
                low[node] = min(low[node], order[nxt])
        else:
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[node])
            if low[node] == order[node]:
                component = []
                while True:
                    member = stack.pop()
                    on_stack.discard(member)
                    component.append(member)
                    if member == node:
                        break
                found.append(component[::-1])
    return found[::-1]


def source_place(module: Module, position: Position) -> str:
    """``"PTX line 12"``, with the CUDA file and line when the PTX carries them."""
    place = f"PTX line {position.line}"
    if position.source_line and position.source_file in module.files:
        place += f" ({module.files[position.source_file]}:{position.source_line})"
    return place
