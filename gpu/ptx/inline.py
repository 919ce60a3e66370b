"""Inlines calls: a kernel becomes one flat list of statements, its calls' parameters registers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import replace
from itertools import pairwise

from gpu.ptx.syntax import (
    Address,
    Function,
    Group,
    Immediate,
    Instruction,
    Label,
    Module,
    Not,
    Operand,
    Pair,
    Register,
    Symbol,
    Variable,
    Vector,
)
from gpu.ptx.types import SIZES
from simkit.errors import PtxError

_MAX_INLINED = 200_000
# Functions the driver provides on a GPU; each becomes an instruction of ours.
_BUILTINS = {"vprintf": "$printf", "__assertfail": "$assertfail"}


def located(instruction: Instruction, message: str) -> PtxError:
    """The error at an instruction: its line and its text."""
    line = instruction.position.line
    return PtxError(f"PTX line {line}: {message}\n    {instruction.text}")


class Inliner:
    """Copies callees into the kernel, with fresh names for everything they declare."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.calls = 0
        # Parameters of calls, and for each the (offset, width) of the parts that are accessed.
        self.parameters: dict[str, Variable] = {}
        self.widths: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)

    def run(self, kernel: Function) -> Function:
        flat = Function(kernel.name, True, kernel.parameters, [], kernel.position)
        flat.registers.update(kernel.registers)
        self.copy(kernel, flat, "", {}, None, (kernel.name,))
        self.resolve(flat)
        return flat

    def copy(
        self,
        source: Function,
        flat: Function,
        prefix: str,
        parameters: dict[str, str],
        after: str | None,
        stack: tuple[str, ...],
    ) -> None:
        """Appends ``source``'s body to ``flat``; ``after`` is the label that a return jumps to."""
        if prefix:
            flat.registers.update({prefix + n: t for n, t in source.registers.items()})
        local = {v.name for v in source.variables if v.space in ("local", "param")}
        self.parameters.update({prefix + v.name: v for v in source.variables if v.space == "param"})
        labels = {s.name for s in source.body if isinstance(s, Label)}
        for variable in source.variables:
            if variable.space == "local":
                flat.variables.append(replace(variable, name=prefix + variable.name))
            elif variable.space == "shared" and variable not in flat.variables:
                # One per CTA, however often its function is called.
                flat.variables.append(variable)
        for name, targets in source.tables.items():
            flat.tables[prefix + name] = tuple(prefix + t for t in targets)

        def symbol(name: str) -> str:
            if name in parameters:
                return parameters[name]
            if name in local or name in labels or name in source.tables:
                return prefix + name
            return name

        def rename(operand: Operand) -> Operand:
            match operand:
                case Register(name):
                    return Register(prefix + name)
                case Symbol(name, offset):
                    return Symbol(symbol(name), offset)
                case Address(base, offset, coordinates):
                    renamed = rename(base)
                    assert isinstance(renamed, Register | Symbol | Immediate)
                    return Address(renamed, offset, tuple(map(rename, coordinates)))
                case Vector(elements):
                    return Vector(tuple(map(rename, elements)))
                case Group(elements):
                    return Group(tuple(map(rename, elements)))
                case Pair(first, second):
                    return Pair(rename(first), rename(second))
                case Not(register):
                    return Not(Register(prefix + register.name))
                case _:
                    return operand

        for statement in source.body:
            if isinstance(statement, Label):
                flat.body.append(Label(prefix + statement.name, statement.position))
                continue
            if len(flat.body) > _MAX_INLINED:
                raise PtxError(
                    f"kernel {flat.name!r} has more than {_MAX_INLINED} instructions once its"
                    f" calls are inlined"
                )
            renamed = replace(
                statement,
                operands=tuple(map(rename, statement.operands)),
                guard=None if statement.guard is None else Register(prefix + statement.guard.name),
            )
            if renamed.opcode == "call":
                self.call(renamed, flat, stack)
            elif renamed.opcode == "ret" and after is not None and not renamed.operands:
                flat.body.append(
                    replace(renamed, opcode="bra", modifiers=(), operands=(Symbol(after),))
                )
            else:
                if _is_parameter_access(renamed, self.parameters):
                    self.parameter_access(renamed)
                flat.body.append(renamed)

    def call(self, call: Instruction, flat: Function, stack: tuple[str, ...]) -> None:
        if call.modifiers not in ((), ("uni",)):
            raise located(call, f"there is no {call.full_name}")
        groups = [o for o in call.operands if isinstance(o, Group)]
        names = [o for o in call.operands if isinstance(o, Symbol)]
        has_result = bool(call.operands) and isinstance(call.operands[0], Group)
        if len(names) != 1 or len(groups) + 1 != len(call.operands):
            raise located(call, "indirect calls are not supported")
        results = groups[0].elements if has_result else ()
        arguments = groups[-1].elements if len(groups) > has_result else ()
        callee = self.module.functions.get(names[0].name)
        if callee is None:
            raise located(call, f"call of unknown function {names[0].name!r}")
        if callee.name in stack:
            raise located(call, f"recursive call of {callee.name!r} is not supported")
        if not callee.is_defined:
            if callee.name not in _BUILTINS:
                raise located(call, f"function {callee.name!r} has no body in this module")
            flat.body.append(self.builtin(call, callee.name, arguments, results))
            return
        if len(arguments) != len(callee.parameters) or len(results) != len(callee.returns):
            raise located(call, f"call of {callee.name!r} with {len(arguments)} arguments")
        self.calls += 1
        prefix = f"{callee.name}@{self.calls}:"
        after = f"{prefix}return"
        names_in: dict[str, str] = {}
        for variable, operand in zip(
            (*callee.parameters, *callee.returns), (*arguments, *results), strict=True
        ):
            if not isinstance(operand, Symbol) or operand.name not in self.parameters:
                raise located(call, "call arguments must be .param variables")
            if self.parameters[operand.name].size != variable.size:
                raise located(
                    call,
                    f"{operand.name!r} has {self.parameters[operand.name].size} bytes, parameter"
                    f" {variable.name!r} of {callee.name!r} {variable.size}",
                )
            names_in[variable.name] = operand.name
        skip = f"{prefix}skip"
        if call.guard is not None:
            flat.body.append(
                replace(call, opcode="bra", modifiers=(), operands=(Symbol(skip),),
                        guard_negated=not call.guard_negated)
            )  # fmt: skip
        self.copy(callee, flat, prefix, names_in, after, (*stack, callee.name))
        flat.body.append(Label(after, call.position))
        flat.body.append(Label(skip, call.position))

    def builtin(
        self,
        call: Instruction,
        name: str,
        arguments: tuple[Operand, ...],
        results: tuple[Operand, ...],
    ) -> Instruction:
        """A driver function as one instruction on the registers its parameters became."""
        operands: list[Operand] = []
        for parameter in (*results[:1], *arguments):
            if not isinstance(parameter, Symbol) or parameter.name not in self.parameters:
                raise located(call, "call arguments must be .param variables")
            operands.append(Register(f"{parameter.name}+0"))
            if parameter in results:
                self.widths[parameter.name].add((0, 4))
        return replace(call, opcode=_BUILTINS[name], modifiers=(), operands=tuple(operands))

    def parameter_access(self, access: Instruction) -> None:
        """Notes which bytes of a call's parameter an instruction reads or writes."""
        width, elements = _elements(access)
        name, start = _place(access)
        size = self.parameters[name].size
        if start < 0 or start + width * len(elements) > size:
            raise located(access, f"parameter {name!r} has {size} bytes")
        for lane in range(len(elements)):
            self.widths[name].add((start + lane * width, width))

    def resolve(self, flat: Function) -> None:
        """Turns accesses to calls' parameters into moves between registers, one for each part.

        Where caller and callee cut a parameter into different parts, it becomes local memory.
        """
        mixed = {name for name, parts in self.widths.items() if _overlap(parts)}
        for name in mixed:
            flat.variables.append(replace(self.parameters[name], name=name, space="local"))
        for name in self.widths.keys() - mixed:
            flat.registers.update({f"{name}+{o}": f"b{8 * w}" for o, w in self.widths[name]})
        body: list[Instruction | Label] = []
        for statement in flat.body:
            if isinstance(statement, Label):
                body.append(statement)
            elif _is_parameter_access(statement, self.parameters):
                if _place(statement)[0] in mixed:
                    modifiers = tuple(
                        "local" if m.split("::")[0] == "param" else m for m in statement.modifiers
                    )
                    body.append(replace(statement, modifiers=modifiers))
                else:
                    body += _moves(statement)
            else:
                if statement.opcode in _BUILTINS.values():
                    self.check_builtin(statement, flat)
                body.append(statement)
        flat.body = body

    def check_builtin(self, call: Instruction, flat: Function) -> None:
        for operand in call.operands:
            assert isinstance(operand, Register)
            if operand.name not in flat.registers:
                raise located(call, f"argument {operand.name[:-2]!r} is never set as a whole")


def _place(access: Instruction) -> tuple[str, int]:
    """The parameter that is accessed, and the offset in it."""
    pointer = access.operands[1 if access.opcode == "ld" else 0]
    assert isinstance(pointer, Address)
    assert isinstance(pointer.base, Symbol)
    return pointer.base.name, pointer.base.offset + pointer.offset


def _elements(access: Instruction) -> tuple[int, tuple[Operand, ...]]:
    """Bytes of an element, and the registers that are loaded or stored."""
    width = SIZES.get(access.modifiers[-1])
    if width is None or width > 8:
        raise located(access, f"parameter access of type {access.modifiers[-1]!r} is not supported")
    value = access.operands[0 if access.opcode == "ld" else 1]
    return width, value.elements if isinstance(value, Vector) else (value,)


def _overlap(parts: set[tuple[int, int]]) -> bool:
    """Whether (offset, width) parts share bytes."""
    ordered = sorted(parts)
    return any(start + width > following for (start, width), (following, _) in pairwise(ordered))


def _moves(access: Instruction) -> list[Instruction]:
    """An access to a call's parameter as moves between registers."""
    width, elements = _elements(access)
    name, start = _place(access)
    # A narrow value may live in a wider register: it is extended or cut, which mov would not do.
    if width > 2:
        opcode, modifiers = "mov", (f"b{8 * width}",)
    else:
        opcode, modifiers = "$move", (access.modifiers[-1],)
    moves = []
    for lane, element in enumerate(elements):
        part = Register(f"{name}+{start + lane * width}")
        operands = (element, part) if access.opcode == "ld" else (part, element)
        moves.append(replace(access, opcode=opcode, modifiers=modifiers, operands=operands))
    return moves


def split_wide(
    body: list[Instruction | Label], registers: dict[str, str]
) -> Iterator[Instruction | Label]:
    """The statements with every 128-bit register as a pair of 64-bit ones, the lower half first.

    ``registers`` gets the halves in place of the whole.
    """
    wide = {name for name, kind in registers.items() if kind == "b128"}
    for name in wide:
        del registers[name]
        registers.update({f"{name}.low": "b64", f"{name}.high": "b64"})

    def halves(operand: Operand) -> Operand:
        if isinstance(operand, Register) and operand.name in wide:
            return Vector((Register(f"{operand.name}.low"), Register(f"{operand.name}.high")))
        return operand

    for statement in body:
        if wide and isinstance(statement, Instruction):
            modifiers = statement.modifiers
            if statement.opcode in ("ld", "st") and "b128" in modifiers:
                modifiers = (*(m for m in modifiers if m != "b128"), "v2", "b64")
            operands = tuple(map(halves, statement.operands))
            yield replace(statement, modifiers=modifiers, operands=operands)
        else:
            yield statement


def _is_parameter_access(access: Instruction, names: Container[str]) -> bool:
    if access.opcode not in ("ld", "st") or len(access.operands) != 2:
        return False
    pointer = access.operands[1 if access.opcode == "ld" else 0]
    return (
        "param" in [m.split("::")[0] for m in access.modifiers]
        and isinstance(pointer, Address)
        and isinstance(pointer.base, Symbol)
        and pointer.base.name in names
    )
