"""Checks every instruction's operands against its types, before anything of it is optimised away.

Two passes over each kind of instruction and operands: the ISA's typing rules by a table of
signatures, and the translator itself, whose lines are thrown away.  Source: PTX ISA 8.8, 6.2 (type
information for instructions and operands), 9.4.1 (operand size exceeding instruction-type size),
4.5 (constants).
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from gpu.ptx.blocks import Item
from gpu.ptx.emit import Emitter
from gpu.ptx.program import CONDITION_CODE, Program
from gpu.ptx.syntax import (
    Address,
    Group,
    Immediate,
    Instruction,
    Not,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from gpu.ptx.types import INSTRUCTION_TYPES, SIZES, TYPE_NAMES

# Operand types by opcode.  "t": the instruction's (last) type, "d": its first type, "w": twice as
# wide an integer, "p": a predicate, "-": not checked here; a type's name: that type.  A "+" behind
# it: a wider register will do.
_SIGNATURES: dict[str, str] = {
    **dict.fromkeys(("add", "sub", "and", "or", "xor", "div", "rem", "copysign"), "t t t"),
    **dict.fromkeys(("addc", "subc", "mul24", "bmsk"), "t t t"),
    **dict.fromkeys(("min", "max"), "t t t t"),
    **dict.fromkeys(("fma", "sad", "madc", "mad24"), "t t t t"),
    **dict.fromkeys(("abs", "neg", "not", "cnot", "brev", "rcp", "sqrt", "rsqrt"), "t t"),
    **dict.fromkeys(("sin", "cos", "lg2", "ex2", "tanh"), "t t"),
    **dict.fromkeys(("popc", "clz", "bfind"), "u32 t"),
    **dict.fromkeys(("shl", "shr"), "t t u32"),
    **dict.fromkeys(("dp4a", "dp2a", "prmt"), "b32 b32 b32 b32"),
    "mul": "t t t",
    "mad": "t t t t",
    "szext": "t t u32",
    "shf": "b32 b32 b32 u32",
    "lop3": "b32 b32 b32 b32 -",
    "bfe": "t t u32 u32",
    "bfi": "t t t u32 u32",
    "fns": "b32 b32 b32 s32",
    "selp": "t t t p",
    "slct": "d d d t",
    "set": "d t t p",
    "setp": "- t t p",
    "testp": "p t",
    "mov": "t t",
    "cvt": "d+ t+ t+ t+",
    "ld": "t+ -",
    "ldu": "t+ -",
    "st": "- t+",
    "atom": "t - t t",
    "red": "- t",
    "redux": "t t b32",
    "match": "- t b32",
    "shfl": "- b32 b32 b32 b32",
    "activemask": "b32",
}
_SPECIALS_ALLOWED = frozenset(("mov", "cvt"))
# Where the address of a variable may stand outside of brackets.
_NAMES_ALLOWED = frozenset(("mov", "cvta", "mapa", "getctarank"))
# Operands without a cache policy, which is there if .L2::cache_hint is.
_COUNTS = {"ld": 2, "ldu": 2, "st": 2, "red": 2, "atom": 3}
# Types of values that only registers of bits hold.
_BITS_ALONE = frozenset(("f16x2", "bf16x2", "tf32")) | INSTRUCTION_TYPES
_WIDE_SPECIALS = frozenset(("%clock64", "%globaltimer", "%current_graph_exec", "%gridid"))


def check(program: Program, names: Set[str]) -> None:
    """PtxError for the first instruction whose operands do not fit it.

    ``names``: the variables of the module that the kernel may name.
    """
    known = dict.fromkeys(names, 0)
    own = (program.local_offsets, program.parameter_offsets, (v.name for v in program.shared))
    known.update(dict.fromkeys((name for group in own for name in group), 0))
    emitter = Emitter(program, known, masked=False)
    seen: set[tuple[object, ...]] = set()
    for item in program.decoded:
        instruction = item.instruction
        shapes = tuple(_shape(o, program.registers) for o in instruction.operands)
        key = (instruction.opcode, instruction.modifiers, shapes)
        if key in seen:
            continue
        seen.add(key)
        emitter.instruction = instruction
        emitter.site = instruction.position.line
        problem = next(_mismatches(item, program.registers), "")
        if problem:
            raise emitter.error(problem)
        item.form.translator(emitter, instruction, item.modifiers)
        emitter.forget(item.writes)


def _shape(operand: Operand, registers: dict[str, str]) -> object:
    """What of an operand its instruction can object to."""
    match operand:
        case Register(name):
            return registers.get(name)
        case Not(register):
            return "!", registers.get(register.name)
        case Immediate(value):
            return repr(value)
        case Address(base, _, coordinates):
            return "[]", _shape(base, registers), *(_shape(c, registers) for c in coordinates)
        case Vector(elements) | Group(elements):
            return type(operand), *(_shape(x, registers) for x in elements)
        case Pair(first, second):
            return "|", _shape(first, registers), _shape(second, registers)
        case _:
            return operand


def _mismatches(item: Item, registers: dict[str, str]) -> Iterator[str]:
    """Operands that the ISA's typing rules do not allow, as messages."""
    instruction = item.instruction
    types = [m for m in instruction.modifiers if m in TYPE_NAMES]
    yield from _miscounted(instruction)
    signature = _SIGNATURES.get(instruction.opcode, "")
    if instruction.opcode in ("bar", "barrier"):
        signature = "- u32" if "red" in instruction.modifiers else "u32 u32"
    wanted = signature.split() if types or "t" not in signature else []
    if "pack" in instruction.modifiers:
        wanted = ["b32", "s32", "s32", "b32"]
    if wanted and "wide" in instruction.modifiers:
        wanted = ["w", "t", "t", *["w"] * len(wanted[3:])]
    operands = [o for o in instruction.operands if o != Register(CONDITION_CODE)]
    for place, operand in enumerate(operands):
        if instruction.opcode not in _SPECIALS_ALLOWED and isinstance(operand, Special):
            yield f"special register {operand.name} is read by mov only"
        if instruction.opcode not in _NAMES_ALLOWED and isinstance(operand, Symbol):
            yield f"the address of {operand.name!r} is no operand of {instruction.opcode}"
        if place >= len(wanted) or wanted[place] == "-":
            continue
        code = wanted[place].rstrip("+")
        kind = _kind(code, types)
        if (isinstance(operand, Vector) and instruction.opcode == "mov") or kind == "b128":
            continue  # the parts are narrower than the type
        for element in operand.elements if isinstance(operand, Vector) else (operand,):
            problem = _mismatch(element, kind, wanted[place].endswith("+"), registers)
            if problem:
                is_result = place < item.form.results
                yield problem.replace("instruction needs", "result has") if is_result else problem


def _kind(code: str, types: list[str]) -> str:
    """The type that a letter of a signature stands for."""
    if code == "w":
        return f"{types[-1][0]}{16 * SIZES[types[-1]]}"
    if code in ("t", "d"):
        return types[-1 if code == "t" else 0]
    return "pred" if code == "p" else code


def _miscounted(instruction: Instruction) -> Iterator[str]:
    """A cache policy without the modifier that announces it, or the other way round."""
    expected = _COUNTS.get(instruction.opcode)
    if expected is None or not {"async", "bulk"}.isdisjoint(instruction.modifiers):
        return
    expected += ("L2::cache_hint" in instruction.modifiers) + ("cas" in instruction.modifiers)
    if len(instruction.operands) != expected:
        yield f"{len(instruction.operands)} operands where its modifiers need {expected}"


def _mismatch(operand: Operand, kind: str, widens: bool, registers: dict[str, str]) -> str:
    """Why an operand cannot stand for a value of type ``kind``; empty if it can."""
    match operand:
        case Register(name):
            own = registers[name]
            if _agrees(own, kind, widens):
                return ""
            if own == "pred" or kind == "pred" or SIZES[own] == SIZES[kind]:
                return f"register {name} is {own!r}, the operand is {kind!r}"
            return (
                f"register {name} has {8 * SIZES[own]} bits, the instruction needs"
                f" {8 * SIZES[kind]}"
            )
        case Immediate(value):
            if isinstance(value, float):
                fits = kind in ("f16", "f32", "f64", "b32", "b64")
            else:
                fits = kind not in ("f32", "f64", "f16", "bf16")
            return "" if fits else f"the constant {value} is no value of type {kind!r}"
        case Special(name) if not widens and kind != "pred":
            size = 8 if name in _WIDE_SPECIALS else 4
            if kind[0] == "f" or SIZES[kind] > size:
                return f"special register {name} is no value of type {kind!r}"
            return ""
        case Sink() | Symbol() | Special() | Not() | Address() | Vector() | Group() | Pair():
            return ""  # the translator knows


def _agrees(register: str, kind: str, widens: bool) -> bool:
    """Whether a register of one type may hold a value of another."""
    if "pred" in (register, kind):
        return register == kind
    if SIZES[register] != SIZES[kind]:
        is_wider = SIZES[register] > SIZES[kind]
        narrow_only = kind == "bf16" or (kind in _BITS_ALONE and kind != "f16x2")
        return widens and is_wider and _family(register) != "float" and not narrow_only
    if kind in _BITS_ALONE:
        return _family(register) == "bits"
    families = _family(register), _family(kind)
    return "bits" in families or (families[0] == families[1] and _same_float(register, kind))


def _family(kind: str) -> str:
    if kind[0] in "us" and kind[1:].isdigit():
        return "integer"
    return "float" if kind in ("f16", "bf16", "f32", "f64") else "bits"


def _same_float(register: str, kind: str) -> bool:
    return _family(kind) != "float" or register == kind
