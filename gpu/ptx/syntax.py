"""The parsed form of PTX text: what a module, a function and an instruction are made of.

Plain data; the parser (parser.py) builds it and the lowering (program.py) reads it.  Source: PTX
ISA 8.8, chapters 4 (syntax), 5 (state spaces, types, variables) and 6 (instruction operands).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Register:
    """A register operand, by its unique name within the function."""

    name: str


@dataclass(frozen=True, slots=True)
class Special:
    """A predefined read-only register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant: ``value`` is a Python int, or a float for the floating forms."""

    value: int | float

    @property
    def is_float(self) -> bool:
        return isinstance(self.value, float)


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable (or a function's or label's name), plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Not:
    """``!p``: a negated predicate operand."""

    register: Register


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b, ...}``; an element is None where the text says ``_``."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """``a|b``: the two destinations of setp, shfl and friends."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Sink:
    """``_``: a destination that is thrown away."""


@dataclass(frozen=True, slots=True)
class Address:
    """``[base + offset]``, or ``[base, {c0, c1}]`` for tensor coordinates."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """``(a, b)``: the parenthesised lists of a call."""

    elements: tuple[Operand, ...]


Operand = Register | Special | Immediate | Symbol | Not | Vector | Pair | Sink | Address | Group


@dataclass(frozen=True, slots=True)
class Position:
    """Where a statement stands: its PTX line, and the CUDA line when ``.loc`` gives one."""

    line: int
    source_file: int = 0
    source_line: int = 0


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: ``@guard opcode.modifiers operands;``."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    position: Position
    text: str
    guard: Register | None = None
    guard_negated: bool = False

    @property
    def full_name(self) -> str:
        return ".".join((self.opcode, *self.modifiers))


@dataclass(frozen=True, slots=True)
class Label:
    name: str
    position: Position


Statement = Instruction | Label


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable in a state space.

    ``element`` is the PTX type without its dot, ``count`` the number of elements (1 for a scalar, 0
    for an array of unknown size such as dynamic shared memory); ``initial`` the bytes it starts
    with, with ``addresses`` the (byte offset, symbol, addend, width) of every address stored in it.
    """

    name: str
    space: str
    element: str
    count: int
    size: int
    align: int
    position: Position
    is_extern: bool = False
    initial: bytes = b""
    addresses: tuple[tuple[int, str, int, int], ...] = ()


@dataclass(slots=True)
class Function:
    """A ``.entry`` or ``.func`` with its body."""

    name: str
    is_entry: bool
    parameters: list[Variable]
    returns: list[Variable]
    position: Position
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    body: list[Statement] = field(default_factory=list)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    performance: dict[str, tuple[int, ...]] = field(default_factory=dict)
    is_defined: bool = False


@dataclass(slots=True)
class Module:
    """A whole PTX file."""

    version: tuple[int, int]
    target: str
    address_size: int
    target_line: int = 0
    variables: list[Variable] = field(default_factory=list)
    functions: dict[str, Function] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
