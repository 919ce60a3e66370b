"""Turns a basic block into one Python function of whole-array NumPy calls.

Registers are arrays of shape (32, warps): lane first, so that a shuffle moves rows and a
tensor-core fragment needs no transposition.  A block becomes ``def block(v, m, x)``: ``v`` the
register views it uses, ``m`` the mask of active lanes, ``x`` the frame (frame.py) that reaches
memory, barriers and special registers.  Two versions are made: one for warps with all lanes active,
without any masks, and one for diverged warps.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpu.ptx.blocks import Block, Item, registers_of
from gpu.ptx.program import Program
from gpu.ptx.syntax import (
    Address,
    Immediate,
    Instruction,
    Not,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from gpu.ptx.types import DTYPES, code_size, storage_code
from simkit.errors import PtxError

# A place where values live: ("r", register), ("t", pool index within a storage class) or ("s",
# special register).
Slot = tuple[str, str | int, str]
BlockFunction = Callable[[tuple[np.ndarray, ...], np.ndarray | None, Any], Any]


@dataclass(slots=True)
class Code:
    """The generated function of a block: what it needs as ``v``, and what it leaves in persistent
    registers.
    """

    function: BlockFunction
    views: list[tuple[Slot, str]]
    reads: list[str]
    writes: list[str]
    source: str
    instructions: int


@dataclass(slots=True)
class TemporaryPlan:
    """Which pool slot each block-local register occupies: linear scan, last freed first used (warm
    in cache).
    """

    slots: dict[tuple[int, str], int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


class Emitter:
    """Collects the lines of one block; the translators of isa/ write through it."""

    def __init__(
        self,
        program: Program,
        symbols: Mapping[str, int],
        masked: bool,
        ranked: frozenset[str] = frozenset(),
    ) -> None:
        self.program = program
        # Shared variables whose addresses depend on the CTA's rank in its cluster.
        self.ranked = ranked
        self.symbols = symbols
        self.masked = masked
        self.lines: list[str] = []
        self.views: dict[tuple[Slot, str], str] = {}
        self.namespace: dict[str, Any] = {"copyto": np.copyto}
        self.bound: dict[int, str] = {}
        self.constants: dict[tuple[str, bytes], str] = {}
        self.temporaries: dict[str, Slot] = {}
        # Tensor-core operands decoded so far, by their registers; dropped when one of them is
        # written.
        self.decoded: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = {}
        self._remembered: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = {}
        # Accumulators that nobody but a later mma reads: they never need to be registers.
        self.chained: set[str] = set()
        # What the block writes.
        self.written: set[str] = set()
        # Destinations of ldmatrix that only mma reads, as B: they never are registers either.
        self.fetched: set[str] = set()
        # Where those are: the rows, which matrix of them, and whether it is transposed.
        self.rows: dict[str, tuple[str, int, bool]] = {}
        # Accumulators whose registers are written when something reads them.
        self.unwritten: set[str] = set()
        self.put_off: dict[tuple[str, ...], tuple[str, list[str]]] = {}
        self.counter = 0
        self.mask = "m" if masked else "None"
        self.instruction: Instruction | None = None
        self.site = 0
        self.step = 0  # how many instructions come before, in the block

    # What translators call

    def error(self, message: str) -> PtxError:
        assert self.instruction is not None
        return PtxError(
            f"PTX line {self.instruction.position.line}: {message}\n    {self.instruction.text}"
        )

    def line(self, code: str) -> None:
        self.lines.append(code)

    def fresh(self, expression: str) -> str:
        """A new local variable holding an expression."""
        self.counter += 1
        name = f"n{self.counter}"
        self.lines.append(f"{name} = {expression}")
        return name

    def converged(self, members: str = "None") -> None:
        """A check that the lanes which ``members`` names are here, where any may be missing."""
        if self.mask != "None":
            self.line(f"x.converged({members}, {self.mask}, {self.site})")

    def bind(self, value: Any) -> str:
        """A name for a Python object (a ufunc, a table) in the generated code."""
        key = id(value)
        if key not in self.bound:
            name = f"f{len(self.bound)}"
            self.bound[key] = name
            self.namespace[name] = value
        return self.bound[key]

    def constant(self, value: int | float, code: str) -> str:
        """A zero-dimensional array: NumPy handles those faster than its scalars."""
        dtype = DTYPES[code]
        if code == "b1":
            array = np.array(bool(value))
        elif isinstance(value, float):
            if dtype.kind == "f":
                array = np.array(value, dtype)
            else:
                bits = struct.pack("<f" if dtype.itemsize == 4 else "<d", value)
                if dtype.itemsize not in (4, 8):
                    raise self.error(f"the floating-point constant {value} needs 4 or 8 bytes")
                array = np.frombuffer(bits, dtype)[0].reshape(())
        elif dtype.kind == "f":
            # An integer constant in a floating position stands for its bits.
            raw = (value & ((1 << 8 * dtype.itemsize) - 1)).to_bytes(dtype.itemsize, "little")
            array = np.frombuffer(raw, dtype)[0].reshape(())
        else:
            mask = (1 << 8 * dtype.itemsize) - 1
            array = np.array(value & mask, f"u{dtype.itemsize}").view(dtype)
        array = np.asarray(array)
        key = (code, array.tobytes())
        if key not in self.constants:
            name = f"k{len(self.constants)}"
            self.constants[key] = name
            self.namespace[name] = array
        return self.constants[key]

    def is_steady(self, names: Iterable[str]) -> bool:
        """Whether registers come from other blocks and stay as they are in this one."""
        return all(n in self.program.persistent and n not in self.written for n in names)

    def remember(self, key: tuple[tuple[str, ...], tuple[str, ...]], value: str) -> None:
        """Keeps what an instruction leaves in registers in its decoded form too."""
        self._remembered[key] = value

    def write_later(self, matrix: str, operands: Iterable[Operand]) -> None:
        """Leaves a matrix in accumulator registers once something else than an mma reads them."""
        names = tuple(o.name for o in operands if isinstance(o, Register))
        self.unwritten.update(names)
        # The places are looked up now, while the registers are known to have them.
        self.put_off[names] = (matrix, [self.view(name, "f4") for name in names])

    def write_now(self) -> None:
        """Writes what has been put off."""
        for matrix, targets in self.put_off.values():
            if self.masked:
                values = self.fresh(f"x.accumulators({matrix})")
                lines = [f"copyto({t}, {values}[{k}], where=m)" for k, t in enumerate(targets)]
            else:
                values = self.fresh(f"x.accumulator_parts({matrix})")
                lines = [
                    f"copyto({t}.reshape(8, 4, -1), {values}[{k}])" for k, t in enumerate(targets)
                ]
            self.lines += lines
        self.put_off = {}
        self.unwritten = set()

    def forget(self, written: Iterable[str]) -> None:
        """After an instruction: decoded values of the registers it wrote are out of date."""
        names = set(written)
        if names and self.decoded:
            self.decoded = {k: v for k, v in self.decoded.items() if names.isdisjoint(k[0])}
        self.decoded.update(self._remembered)
        self._remembered = {}

    def register_code(self, name: str) -> str:
        return storage_code(self.program.registers[name])

    def view(self, name: str, code: str) -> str:
        """The local variable of a register seen as another type of the same size."""
        storage = self.register_code(name)
        if (storage == "b1") != (code == "b1") or code_size(storage) != code_size(code):
            raise self.error(
                f"register {name} is {self.program.registers[name]!r}, the instruction needs"
                f" {'a predicate' if code == 'b1' else f'{8 * code_size(code)} bits'}"
            )
        slot = self.temporaries.get(name) or ("r", name, storage)
        return self._argument(slot, code)

    def _argument(self, slot: Slot, code: str) -> str:
        key = (slot, code)
        if key not in self.views:
            self.views[key] = f"a{len(self.views)}"
        return self.views[key]

    def read(self, operand: Operand, code: str) -> str:
        """An expression for a source operand as an array (or constant) of dtype ``code``."""
        match operand:
            case Register(name):
                storage = self.register_code(name)
                if (storage == "b1") != (code == "b1"):
                    raise self.error(f"register {name} is {self.program.registers[name]!r}")
                if code_size(storage) == code_size(code):
                    return self.view(name, code)
                if code_size(storage) > code_size(code) and code[0] != "f":
                    # A narrow operand in a wide register is its low bits.
                    return f"{self.view(name, storage)}.astype('{code}')"
                raise self.error(
                    f"register {name} has {8 * code_size(storage)} bits, the instruction needs"
                    f" {8 * code_size(code)}"
                )
            case Immediate(value):
                return self.constant(value, code)
            case Special(name):
                size = 8 if name in ("%clock64", "%globaltimer") else 4
                special = self._special(name, f"u{size}")
                if code_size(code) == size:
                    return special if code == f"u{size}" else f"{special}.view('{code}')"
                return f"{special}.astype('{code}')"
            case Symbol(name, offset):
                address = self.symbol(name) + offset
                if name in self.ranked:
                    return self.fresh(f"x.own_shared({address}, {code!r})")
                return self.constant(address, code)
            case Not(register):
                if code != "b1":
                    raise self.error(f"!{register.name} is a predicate, not a value")
                return f"~{self.read(register, 'b1')}"
            case _:
                raise self.error(f"operand {operand} is not a value")

    def _special(self, name: str, code: str) -> str:
        if name in (
            "%clock",
            "%clock64",
            "%clock_hi",
            "%globaltimer",
            "%globaltimer_lo",
            "%globaltimer_hi",
        ):
            return self.fresh(f"x.clock({name!r}, {self.step})")
        return self._argument(("s", name, code), code)

    def symbol(self, name: str) -> int:
        if name not in self.symbols:
            raise self.error(f"unknown name {name!r}")
        return self.symbols[name]

    def write(self, operand: Operand, code: str, expression: str) -> None:
        """Assigns an expression of dtype ``code`` to a destination, in the active lanes."""
        target = self.target(operand, code)
        if target is None:
            return
        where = "" if self.mask == "None" else f", where={self.mask}"
        self.lines.append(f"copyto({target}, {expression}{where})")

    def target(self, operand: Operand, code: str) -> str | None:
        """The array to assign to, as wide as the register: narrow results extend into wide
        registers.
        """
        if isinstance(operand, Sink):
            return None
        if not isinstance(operand, Register):
            raise self.error(f"operand {operand} is not a register")
        storage = self.register_code(operand.name)
        if (storage == "b1") != (code == "b1"):
            raise self.error(f"register {operand.name} is {self.program.registers[operand.name]!r}")
        if code_size(storage) == code_size(code):
            return self.view(operand.name, code)
        if code_size(storage) > code_size(code) and code[0] in "ui":
            return self.view(operand.name, f"{code[0]}{code_size(storage)}")
        raise self.error(
            f"register {operand.name} has {8 * code_size(storage)} bits, the result has"
            f" {8 * code_size(code)}"
        )

    def apply(self, function: Any, operand: Operand, code: str, *expressions: str) -> None:
        """``operand = function(*expressions)``, straight into the register when no mask is in the
        way.
        """
        name = function if isinstance(function, str) else self.bind(function)
        arguments = ", ".join(expressions)
        if (
            self.mask == "None"
            and isinstance(operand, Register)
            and code_size(self.register_code(operand.name)) == code_size(code)
        ):
            # NumPy is about to drop the third position of these two.
            out = "out=" if function in (np.minimum, np.maximum) else ""
            self.lines.append(f"{name}({arguments}, {out}{self.target(operand, code)})")
            return
        self.write(operand, code, f"{name}({arguments})")

    def address(self, operand: Operand) -> tuple[str, int]:
        """Array expression of a memory operand's base addresses, and the constant to add to it."""
        if not isinstance(operand, Address):
            raise self.error(f"operand {operand} is not an address")
        match operand.base:
            case Register(name):
                storage = self.register_code(name)
                if storage not in ("u4", "u8"):
                    raise self.error(f"address register {name} has {8 * code_size(storage)} bits")
                return self.view(name, storage), operand.offset
            case Symbol(name, offset):
                base = self.symbol(name) + offset + operand.offset
                if name in self.ranked:
                    return f"x.array(x.own_shared({base}, 'u8'))", 0
            case Immediate(value):
                base = int(value) + operand.offset
        return f"x.constant({base & ((1 << 64) - 1)})", 0

    def elements(self, operand: Operand) -> tuple[Operand, ...]:
        return operand.elements if isinstance(operand, Vector) else (operand,)


def plan_temporaries(block: Block, program: Program) -> dict[int, dict[str, Slot]]:
    """For each instruction, the pool slots of the block-local registers it touches."""
    last_use: dict[str, int] = {}
    for index, item in enumerate(block.items):
        for name in (*item.reads, *item.writes):
            last_use[name] = index
    if block.condition is not None:
        last_use[block.condition.name] = len(block.items)
    free: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    current: dict[str, Slot] = {}
    plan: dict[int, dict[str, Slot]] = {}

    def release(names: tuple[str, ...], index: int) -> None:
        for name in names:
            slot = current.get(name)
            if slot is not None and last_use[name] == index:
                free[slot[2]].append(int(slot[1]))
                del current[name]

    for index, item in enumerate(block.items):
        here = {r: current[r] for r in item.reads if r in current}
        if len(item.writes) == 1 and not item.is_partial:
            # One result is written after all operands are read, so it may take the place of one
            # that ends here.
            release(item.reads, index)
        for name in item.writes:
            if name in program.persistent or name in current:
                continue
            code = storage_code(program.registers[name])
            pool = free.setdefault(code, [])
            number = pool.pop() if pool else sizes.get(code, 0)
            sizes[code] = max(sizes.get(code, 0), number + 1)
            current[name] = ("t", number, code)
        here.update({r: current[r] for r in item.writes if r in current})
        plan[index] = here
        release(item.reads, index)
        release(item.writes, index)
    if block.condition is not None and block.condition.name in current:
        plan[len(block.items)] = {block.condition.name: current[block.condition.name]}
    return plan


def _chained_accumulators(block: Block, program: Program) -> set[str]:
    """Registers that an mma writes and only later mma instructions of the block read, as c."""
    written: set[str] = set()
    others: set[str] = set(program.persistent)
    for item in block.items:
        if item.form.is_chained and item.instruction.guard is None:
            written.update(item.writes)
            accumulator = set(registers_of(item.instruction.operands[3]))
            others.update(r for o in item.instruction.operands[1:3] for r in registers_of(o))
            if not accumulator <= written:
                others |= accumulator
        else:
            others.update(item.reads)
            others.update(item.writes)
    if block.condition is not None:
        others.add(block.condition.name)
    return written - others


def _fetched_operands(block: Block, program: Program) -> set[str]:
    """Registers that ldmatrix writes and only mma instructions of the block read, as b."""
    is_transposed: dict[str, bool] = {}
    others: set[str] = set(program.persistent)
    for item in block.items:
        instruction = item.instruction
        if instruction.guard is not None:
            others.update((*item.reads, *item.writes))
        elif instruction.opcode == "ldmatrix" and "m8n8" in instruction.modifiers:
            others.update(item.reads)
            is_transposed.update(dict.fromkeys(item.writes, "trans" in instruction.modifiers))
        elif item.form.is_chained:
            d, a, b, c = instruction.operands
            names = tuple(registers_of(b))
            ways = {is_transposed.get(name) for name in names}
            is_wide = instruction.modifiers[-2] not in ("bf16", "f16")
            if len(ways) > 1 or None in ways or (is_wide and True in ways):
                others.update(names)
            for operand in (d, a, c):
                others.update(registers_of(operand))
        else:
            others.update((*item.reads, *item.writes))
    if block.condition is not None:
        others.add(block.condition.name)
    return is_transposed.keys() - others


def generate(
    block: Block,
    program: Program,
    symbols: Mapping[str, int],
    masked: bool,
    ranked: frozenset[str] = frozenset(),
) -> Code:
    """Compiles one block.  PtxError (with the line) where operands do not fit an instruction."""
    emitter = Emitter(program, symbols, masked, ranked)
    emitter.written = {name for item in block.items for name in item.writes}
    emitter.chained = _chained_accumulators(block, program)
    emitter.fetched = set() if masked else _fetched_operands(block, program)
    plan = plan_temporaries(block, program)
    for index, item in enumerate(block.items):
        emitter.temporaries = plan[index]
        emitter.step = index
        _emit(emitter, item)
    emitter.instruction = block.items[-1].instruction if block.items else None
    emitter.write_now()
    if block.condition is not None:
        emitter.temporaries = plan.get(len(block.items), {})
        code = "b1" if block.kind == "branch" else "u4"
        value = emitter.view(block.condition.name, code)
        emitter.line(f"return {'~' if block.negated else ''}{value}")
    lines = emitter.lines or ["pass"]
    names = ", ".join(emitter.views.values())
    unpack = f"    {names}, = v\n" if names else ""
    source = "def block(v, m, x):\n" + unpack + "".join(f"    {line}\n" for line in lines)
    namespace = emitter.namespace
    exec(compile(source, f"<{program.name} block {block.index}>", "exec"), namespace)
    persistent = [k[0][1] for k in emitter.views if k[0][0] == "r"]
    written = emitter.written
    # What a masked block writes keeps its old value in inactive lanes, so it must be read too.
    reads = [
        str(r) for r in dict.fromkeys(persistent) if r in block.live_in or (masked and r in written)
    ]
    return Code(
        function=namespace["block"],
        views=list(emitter.views),
        reads=reads,
        writes=[str(r) for r in dict.fromkeys(persistent) if r in written],
        source=source,
        instructions=len(block.items) + (block.kind != "jump"),
    )


def _emit(emitter: Emitter, item: Item) -> None:
    instruction = item.instruction
    emitter.instruction = instruction
    emitter.site = instruction.position.line
    base = "m" if emitter.masked else "None"
    emitter.mask = base
    if emitter.unwritten and not emitter.unwritten.isdisjoint(_touched(emitter, item)):
        emitter.write_now()
    if item.form.ends_block:
        emitter.write_now()
    if instruction.guard is not None:
        guard = emitter.view(instruction.guard.name, "b1")
        if emitter.masked:
            emitter.mask = emitter.fresh(
                f"m > {guard}" if instruction.guard_negated else f"m & {guard}"
            )
        else:
            emitter.mask = emitter.fresh(f"~{guard}") if instruction.guard_negated else guard
    item.form.translator(emitter, instruction, item.modifiers)
    emitter.mask = base
    emitter.forget(item.writes)


def _touched(emitter: Emitter, item: Item) -> set[str]:
    """Registers whose values an instruction needs in place.

    An mma takes c from the mma before; if it also writes its result there, what was put off is
    replaced rather than written.
    """
    if not item.form.is_chained or item.instruction.guard is not None:
        return {*item.reads, *item.writes}
    d, a, b, c = item.instruction.operands
    names = tuple(registers_of(c))
    if (names, ("c", "")) not in emitter.decoded:
        return {*item.reads, *item.writes}
    touched = {*registers_of(a), *registers_of(b)}
    return touched if tuple(registers_of(d)) == names else {*touched, *item.writes}
