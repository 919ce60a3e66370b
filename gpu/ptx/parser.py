"""Parses PTX text into syntax.Module: a recursive descent over the whole grammar that compilers
emit.

Every statement is either understood or refused with its line; nothing is skipped except debug
sections. Source: PTX ISA 8.8, chapters 4, 5, 6, 10 (special registers) and 11 (directives).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np

from gpu.ptx.lexer import Token, tokenize
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
    Position,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)
from gpu.ptx.types import DECLARABLE, SIZES
from simkit.errors import PtxError

_STATE_SPACES = {".global", ".const", ".shared", ".local", ".param"}
_LINKAGE = {".visible", ".extern", ".weak", ".common"}
# Performance directives between an entry's parameters and its body, with their number of values.
_PERFORMANCE = {
    ".maxnreg", ".maxntid", ".reqntid", ".minnctapersm", ".maxnctapersm",
    ".reqnctapercluster", ".maxclusterrank", ".explicitcluster", ".blocksareclusters", ".noreturn",
}  # fmt: skip
_IGNORED_LINES = {".pragma", ".file"}
# How deep braces may stand in each other: far beyond what anybody writes.
_DEEPEST = 100
# Bytes that a variable may have: PTX ISA 5.1 and CUDA C++ guide, technical specifications; global
# memory is the device's own affair.
_LARGEST = {
    "const": 64 << 10, "local": 512 << 10, "param": 32_764, "shared": 256 << 10, "global": 1 << 40,
}  # fmt: skip


def parse(text: str) -> Module:
    """The module of a PTX text.

    Raises PtxError with the line for anything that the grammar does not allow, truncated text
    included.
    """
    return _Parser(text).module()


class _Parser:
    """Recursive descent over the token list; one instance per text."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.tokens = tokenize(text)
        self.index = 0
        self.result = Module((0, 0), "", 64, lines=self.lines)
        self.location = (0, 0)
        self.unique = count(1)
        self.depth = 0

    # Token access

    @property
    def token(self) -> Token:
        return self.tokens[self.index]

    def error(self, message: str, token: Token | None = None) -> PtxError:
        at = token or self.token
        text = self.lines[at.line - 1].strip() if at.line <= len(self.lines) else ""
        return PtxError(f"PTX line {at.line}: {message}\n    {text}")

    def take(self) -> Token:
        token = self.token
        if token.kind == "end":
            raise self.error("the text ends in the middle of a statement")
        self.index += 1
        return token

    def accept(self, text: str) -> bool:
        if self.token.text == text and self.token.kind not in ("string", "end"):
            self.index += 1
            return True
        return False

    def expect(self, text: str) -> Token:
        if self.token.text != text:
            found = self.token.text if self.token.kind != "end" else "the end of the text"
            raise self.error(f"expected {text!r}, found {found!r}")
        return self.take()

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Inside of braces, which cannot stand in each other without end."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise self.error(f"more than {_DEEPEST} braces in each other")
        yield
        self.depth -= 1

    def word(self, what: str) -> str:
        token = self.take()
        if token.kind != "word":
            raise self.error(f"expected {what}, found {token.text!r}", token)
        return token.text

    def integer(self, what: str) -> int:
        sign = -1 if self.accept("-") else 1
        token = self.take()
        if token.kind != "number":
            raise self.error(f"expected {what}, found {token.text!r}", token)
        return sign * int(token.value)

    # Module level

    def module(self) -> Module:
        self.expect(".version")
        major = self.take()
        if major.kind != "float":
            raise self.error(f"expected a version such as 8.8, found {major.text!r}", major)
        whole, _, fraction = major.text.partition(".")
        self.result.version = (int(whole), int(fraction or 0))
        self.expect(".target")
        self.result.target_line = self.token.line
        self.result.target = self.word("a target architecture")
        while self.accept(","):
            self.word("a target option")
        if self.accept(".address_size"):
            self.result.address_size = self.integer("an address size")
            if self.result.address_size != 64:
                raise self.error("only 64-bit addresses are supported")
        while self.token.kind != "end":
            self.declaration()
        return self.result

    def declaration(self) -> None:
        if self.token.text in _IGNORED_LINES:
            self.file_or_pragma()
            return
        if self.token.text == ".section":
            self.debug_section()
            return
        if self.token.text == ".alias":
            raise self.error(".alias is not supported")
        linkage = set()
        while self.token.text in _LINKAGE:
            linkage.add(self.take().text)
        text = self.token.text
        if text in (".entry", ".func"):
            self.function(is_extern=".extern" in linkage)
        elif text in _STATE_SPACES:
            self.result.variables += self.variables(is_extern=".extern" in linkage)
            self.expect(";")
        else:
            raise self.error(f"expected a declaration, found {text!r}")

    def file_or_pragma(self) -> None:
        if self.take().text == ".file":
            number = self.integer("a file number")
            self.result.files[number] = self.take().text.strip('"')
            while self.accept(","):
                self.integer("a timestamp or a size")
        else:
            self.take()
            while self.accept(","):
                self.take()
            self.expect(";")

    def debug_section(self) -> None:
        """DWARF sections carry nothing that executes."""
        self.take()
        self.take()
        self.expect("{")
        depth = 1
        while depth:
            text = self.take().text
            depth += (text == "{") - (text == "}")

    # Variables

    def variables(self, is_extern: bool = False) -> list[Variable]:
        """``.space [.align N] .type name[dims] [= init], ...`` up to the closing sign, which
        stays.
        """
        space = self.take().text[1:]
        if space == "param":
            self.accept(".entry")
        align = 0
        vector = 1
        element = ""
        while self.token.kind == "directive":
            text = self.take().text
            name = text[1:]
            if text == ".align":
                align = self.integer("an alignment")
                if align <= 0 or align & (align - 1):
                    raise self.error(f"alignment {align} is not a power of two")
            elif text in (".v2", ".v4", ".v8") and not element:
                vector = int(text[2:])
            elif text in (".ptr", ".global", ".shared", ".const", ".local"):
                continue  # what a pointer parameter points to: a hint only
            elif text == ".attribute":
                self.skip_parentheses()
            elif element:
                raise self.error(f"{text} behind the type .{element}")
            elif name in DECLARABLE and name != "pred":
                element = name
            elif name in ("texref", "samplerref", "surfref"):
                raise self.error(f"{text} variables are not supported")
            else:
                raise self.error(f"unknown type {text!r}")
        if not element:
            raise self.error("a variable without a type")
        found = [self.declarator(space, element, vector, align, is_extern)]
        while self.token.text == "," and space != "param":
            self.take()
            found.append(self.declarator(space, element, vector, align, is_extern))
        return found

    def skip_parentheses(self) -> None:
        self.expect("(")
        while self.take().text != ")":
            pass

    def declarator(
        self, space: str, element: str, vector: int, align: int, is_extern: bool
    ) -> Variable:
        at = self.token
        name = self.word("a variable's name")
        number = vector
        is_open = False
        while self.accept("["):
            if self.accept("]"):
                is_open = True
                continue
            extent = self.integer("an array extent")
            if extent < 0:
                raise self.error(f"array extent {extent} is negative", at)
            number *= extent
            self.expect("]")
        width = SIZES[element]
        initial = b""
        addresses: list[tuple[int, str, int, int]] = []
        if self.accept("="):
            values: list[tuple[object, int]] = []
            self.initializer(values)
            initial, addresses = self.encode(values, element)
            if is_open:
                number = len(initial) // width
                is_open = False
        if is_open and not (is_extern and space in ("shared", "global", "const")):
            raise self.error(f"{name!r} has no size", at)
        size = 0 if is_open else number * width
        if size > _LARGEST[space]:
            raise self.error(
                f"{size} bytes of {space} memory, at most {_LARGEST[space]} are possible", at
            )
        if len(initial) > size:
            raise self.error(f"{len(initial)} bytes of initial values for {size} bytes", at)
        return Variable(
            name=name,
            space=space,
            element=element,
            count=0 if is_open else number,
            size=size,
            align=max(align, width * vector),
            position=Position(at.line),
            is_extern=is_extern,
            initial=initial,
            addresses=tuple(addresses),
        )

    def initializer(self, values: list[tuple[object, int]]) -> None:
        """Flattens ``{a, {b, c}}`` into (value, selected byte or -1) pairs."""
        if self.accept("{"):
            with self.nested():
                while not self.accept("}"):
                    self.initializer(values)
                    if not self.accept(","):
                        self.expect("}")
                        break
            return
        token = self.token
        if token.kind == "number" or token.text == "-":
            values.append((self.integer_or_float(), -1))
        elif token.kind == "float":
            values.append((float(self.take().value), -1))
        elif token.kind == "word" and token.text == "generic":
            self.take()
            self.expect("(")
            name = self.word("a variable's name")
            self.expect(")")
            values.append((Symbol(name, self.signed_offset()), -1))
        elif token.kind == "word":
            values.append((self.symbol_with_offset(), -1))
        else:
            raise self.error(f"expected an initial value, found {token.text!r}")

    def integer_or_float(self) -> int | float:
        sign = -1 if self.accept("-") else 1
        token = self.take()
        if token.kind not in ("number", "float"):
            raise self.error(f"expected a number, found {token.text!r}", token)
        return sign * token.value

    def symbol_with_offset(self) -> Symbol:
        name = self.word("a variable's name")
        return Symbol(name, self.signed_offset())

    def signed_offset(self) -> int:
        if self.accept("+"):
            return self.integer("an offset")
        if self.token.text == "-":
            return self.integer("an offset")
        return 0

    def encode(
        self, values: list[tuple[object, int]], element: str
    ) -> tuple[bytes, list[tuple[int, str, int, int]]]:
        width = SIZES[element]
        data = bytearray()
        addresses: list[tuple[int, str, int, int]] = []
        for value, _ in values:
            if isinstance(value, Symbol):
                addresses.append((len(data), value.name, value.offset, width))
                data += bytes(width)
            elif isinstance(value, float):
                if element == "f64":
                    data += struct.pack("<d", value)
                elif element == "f32":
                    data += struct.pack("<f", value)
                elif element == "f16":
                    data += np.float16(value).tobytes()
                else:
                    raise self.error(f"a floating-point initial value for .{element}")
            else:
                assert isinstance(value, int)
                if element in ("f32", "f64"):
                    data += struct.pack("<f" if element == "f32" else "<d", float(value))
                else:
                    data += (value & ((1 << (8 * width)) - 1)).to_bytes(width, "little")
        return bytes(data), addresses

    # Functions

    def function(self, is_extern: bool) -> None:
        start = self.take()
        while self.token.text in (".attribute", ".noreturn"):
            if self.take().text == ".attribute":
                self.skip_parentheses()
        returns = self.parameters() if self.token.text == "(" else []
        name = self.word("a function's name")
        parameters = self.parameters() if self.token.text == "(" else []
        function = Function(name, start.text == ".entry", parameters, returns, Position(start.line))
        while self.token.text in _PERFORMANCE or self.token.text == ".pragma":
            directive = self.take()
            if directive.text == ".pragma":
                self.take()
                self.expect(";")
                continue
            values = []
            if self.token.kind == "number":
                values.append(self.integer("a value"))
                while self.accept(","):
                    values.append(self.integer("a value"))
            function.performance[directive.text[1:]] = tuple(values)
        if self.accept(";") or is_extern:
            self.result.functions.setdefault(name, function)
            return
        known = self.result.functions.get(name)
        if known is not None and known.is_defined:
            raise self.error(f"function {name!r} is defined twice", start)
        self.expect("{")
        scope = _Scope(self, function)
        self.location = (0, 0)
        self.block(scope)
        function.is_defined = True
        self.result.functions[name] = function

    def parameters(self) -> list[Variable]:
        self.expect("(")
        found: list[Variable] = []
        if self.accept(")"):
            return found
        while True:
            if self.token.text == ".reg":
                raise self.error("register parameters of a function are not supported")
            if self.token.text != ".param":
                raise self.error(f"expected .param, found {self.token.text!r}")
            found += self.variables()
            if not self.accept(","):
                break
        self.expect(")")
        return found

    def block(self, scope: _Scope) -> None:
        """Statements up to and with the closing brace."""
        while not self.accept("}"):
            token = self.token
            if token.kind == "end":
                raise self.error(
                    f"the text ends inside function {scope.function.name!r}: a '}}' is missing"
                )
            if token.text == "{":
                self.take()
                with self.nested():
                    self.block(_Scope(self, scope.function, scope))
            elif token.kind == "directive":
                self.directive(scope)
            elif token.kind == "word" and self.tokens[self.index + 1].text == ":":
                self.label(scope)
            else:
                scope.function.body.append(self.instruction(scope))

    def labels_ahead(self) -> list[str]:
        """The labels of the braces that have just been opened, those of inner braces left out."""
        found: list[str] = []
        depth = 0
        for index in range(self.index, len(self.tokens) - 1):
            token = self.tokens[index]
            if token.kind == "{":
                depth += 1
            elif token.kind == "}":
                depth -= 1
                if depth < 0:
                    break
            elif depth == 0 and token.kind == "word" and self.tokens[index + 1].kind == ":":
                if token.text in found:
                    raise self.error(f"label {token.text!r} is defined twice", token)
                found.append(token.text)
        return found

    def label(self, scope: _Scope) -> None:
        token = self.take()
        self.expect(":")
        if self.token.text in (".branchtargets", ".calltargets"):
            self.take()
            names = [self.word("a label")]
            while self.accept(","):
                names.append(self.word("a label"))
            self.expect(";")
            scope.function.tables[token.text] = tuple(names)
        elif self.token.text == ".callprototype":
            raise self.error("indirect calls are not supported")
        else:
            scope.function.body.append(Label(scope.label(token), self.position(token)))

    def position(self, token: Token) -> Position:
        return Position(token.line, *self.location)

    def directive(self, scope: _Scope) -> None:
        text = self.token.text
        if text == ".reg":
            self.take()
            self.register_declaration(scope)
        elif text in _STATE_SPACES:
            for variable in self.variables():
                scope.declare_variable(variable)
            self.expect(";")
        elif text == ".loc":
            self.location_directive()
        elif text in _IGNORED_LINES:
            self.file_or_pragma()
        else:
            raise self.error(f"unknown directive {text!r}")

    def location_directive(self) -> None:
        """``.loc file line column [, function_name label [+ n]] [, inlined_at file line column]``:
        the attributes say where an inlined function stands, which messages do without.
        """
        self.take()
        number = self.integer("a file number")
        line = self.integer("a line")
        self.integer("a column")
        self.location = (number, line)
        while self.accept(","):
            attribute = self.word("function_name or inlined_at")
            if attribute == "function_name":
                self.word("a label")
                self.signed_offset()
            elif attribute == "inlined_at":
                for what in ("a file number", "a line", "a column"):
                    self.integer(what)
            else:
                raise self.error(f"unknown attribute {attribute!r} of .loc")

    def register_declaration(self, scope: _Scope) -> None:
        vector = 1
        if self.token.text in (".v2", ".v4"):
            vector = int(self.take().text[2:])
        type_token = self.take()
        name = type_token.text[1:]
        if type_token.kind != "directive" or name not in DECLARABLE:
            raise self.error(f"unknown register type {type_token.text!r}", type_token)
        while True:
            base = self.word("a register's name")
            names = [base]
            if self.accept("<"):
                number = self.integer("a register count")
                if not 0 <= number <= 1 << 17:
                    raise self.error(f"register count {number} is out of range")
                self.expect(">")
                names = [f"{base}{i}" for i in range(number)]
            for register in names:
                if vector > 1:
                    for suffix in "xyzw"[:vector]:
                        scope.declare_register(f"{register}.{suffix}", name)
                else:
                    scope.declare_register(register, name)
            if not self.accept(","):
                break
        self.expect(";")

    # Instructions

    def instruction(self, scope: _Scope) -> Instruction:
        start = self.token
        guard, negated = None, False
        if self.accept("@"):
            negated = self.accept("!")
            operand = scope.resolve(self.take())
            if not isinstance(operand, Register):
                raise self.error("a guard must be a predicate register", start)
            guard = operand
        token = self.take()
        if token.kind != "word":
            raise self.error(f"expected an instruction, found {token.text!r}", token)
        opcode, *modifiers = token.text.split(".")
        operands: list[Operand] = []
        if not self.accept(";"):
            while True:
                operands.append(self.operand(scope))
                if not self.accept(","):
                    break
            self.expect(";")
        return Instruction(
            opcode=opcode, modifiers=tuple(modifiers), operands=tuple(operands),
            position=self.position(token), text=self.lines[token.line - 1].strip(),
            guard=guard, guard_negated=negated,
        )  # fmt: skip

    def operand(self, scope: _Scope) -> Operand:
        first = self.simple_operand(scope)
        if self.accept("|"):
            return Pair(first, self.simple_operand(scope))
        return first

    def simple_operand(self, scope: _Scope) -> Operand:
        token = self.token
        if token.text == "{":
            return Vector(self.sequence("{", "}", scope))
        if token.text == "(":
            return Group(self.sequence("(", ")", scope))
        if token.text == "[":
            return self.address(scope)
        if token.text == "!":
            self.take()
            register = scope.resolve(self.take())
            if not isinstance(register, Register):
                raise self.error("'!' needs a predicate register", token)
            return Not(register)
        if token.text in ("-", "+") or token.kind in ("number", "float"):
            return self.immediate()
        if token.kind == "word":
            self.take()
            if token.text == "_":
                return Sink()
            operand = scope.resolve(token)
            if isinstance(operand, Symbol):
                return Symbol(operand.name, self.signed_offset())
            return operand
        raise self.error(f"expected an operand, found {token.text!r}")

    def immediate(self) -> Immediate:
        negative = self.accept("-")
        if not negative:
            self.accept("+")
        token = self.take()
        if token.kind not in ("number", "float"):
            raise self.error(f"expected a constant, found {token.text!r}", token)
        value = token.value
        return Immediate(-value if negative else value)

    def sequence(self, opening: str, closing: str, scope: _Scope) -> tuple[Operand, ...]:
        self.expect(opening)
        found: list[Operand] = []
        if self.accept(closing):
            return ()
        with self.nested():
            while True:
                found.append(self.operand(scope))
                if not self.accept(","):
                    break
        self.expect(closing)
        return tuple(found)

    def address(self, scope: _Scope) -> Address:
        self.expect("[")
        token = self.token
        base: Operand
        if token.kind == "number":
            base = Immediate(self.integer("an address"))
        else:
            base = scope.resolve(self.take())
        if not isinstance(base, Register | Symbol | Immediate):
            raise self.error(f"{token.text!r} is not an address", token)
        offset = self.signed_offset()
        coordinates: tuple[Operand, ...] = ()
        if self.accept(","):
            coordinates = self.sequence("{", "}", scope)
        self.expect("]")
        return Address(base, offset, coordinates)


class _Scope:
    """The names that a ``{ ... }`` may use; inner names that hide outer ones get a fresh name."""

    def __init__(self, parser: _Parser, function: Function, outer: _Scope | None = None) -> None:
        self.parser = parser
        self.function = function
        self.outer = outer
        self.names: dict[str, Operand] = {}
        # Labels are local to their braces, and may be used before they stand: inline assembly
        # relies on it.
        suffix = "" if outer is None else f"#{next(parser.unique)}"
        self.labels = {name: name + suffix for name in parser.labels_ahead()}

    def declare_register(self, name: str, register_type: str) -> None:
        if name in self.names:
            raise self.parser.error(f"register {name!r} is declared twice")
        unique = (
            name if name not in self.function.registers else f"{name}#{next(self.parser.unique)}"
        )
        self.names[name] = Register(unique)
        self.function.registers[unique] = register_type

    def declare_variable(self, variable: Variable) -> None:
        if variable.name in self.names:
            raise self.parser.error(f"variable {variable.name!r} is declared twice")
        unique = variable.name
        if self.outer is not None or any(v.name == unique for v in self.function.variables):
            # A name of inner braces means nothing outside of them.
            unique = f"{unique}#{next(self.parser.unique)}"
        self.names[variable.name] = Symbol(unique)
        self.function.variables.append(
            Variable(
                **{f: getattr(variable, f) for f in Variable.__slots__ if f != "name"}, name=unique
            )
        )

    def label(self, token: Token) -> str:
        """The unique name of a label defined here."""
        return self.labels[token.text]

    def resolve(self, token: Token) -> Operand:
        """What a word names: a register, a variable, a special register, or a label or function."""
        if token.kind != "word":
            raise self.parser.error(f"expected a name, found {token.text!r}", token)
        name = token.text
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            if name in scope.labels:
                return Symbol(scope.labels[name])
            scope = scope.outer
        if name == "WARP_SZ":
            return Immediate(32)
        if name.startswith("%"):
            if name in SPECIAL_REGISTERS:
                return Special(name)
            raise self.parser.error(f"register {name!r} is not declared", token)
        return Symbol(name)


_VECTORS = (
    "%tid", "%ntid", "%ctaid", "%nctaid", "%clusterid", "%nclusterid", "%cluster_ctaid",
    "%cluster_nctaid",
)  # fmt: skip
_SCALARS = (
    "%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid", "%cluster_ctarank",
    "%cluster_nctarank", "%is_explicit_cluster", "%lanemask_eq", "%lanemask_le", "%lanemask_lt",
    "%lanemask_ge", "%lanemask_gt", "%clock", "%clock_hi", "%clock64", "%globaltimer",
    "%globaltimer_lo", "%globaltimer_hi", "%dynamic_smem_size", "%total_smem_size",
    "%aggr_smem_size", "%reserved_smem_offset_begin", "%reserved_smem_offset_end",
    "%reserved_smem_offset_cap", "%current_graph_exec",
)  # fmt: skip
SPECIAL_REGISTERS = frozenset((*_SCALARS, *(f"{v}.{axis}" for v in _VECTORS for axis in "xyz")))
