"""The instruction table: which PTX instructions the executor knows, by pattern, and what translates
each.

A pattern is written the way the PTX ISA writes syntax: ``fma.<rnd>{.ftz}{.sat}.f32``.  ``<name>``
stands for one of the choices given for that name, braces for what may be left out.  A translator
turns one instruction into lines of NumPy code (emit.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpu.ptx.syntax import Instruction

if TYPE_CHECKING:
    from gpu.ptx.emit import Emitter

Translator = Callable[["Emitter", Instruction, Mapping[str, str]], None]

_SLOT = re.compile(r"(?P<optional>\{\.)?(?:\.)?(?P<text><\w+>|[\w:]+)\}?")


@dataclass(frozen=True, slots=True)
class Slot:
    """One place in a pattern: the modifiers allowed there, and the name the match goes by."""

    name: str
    choices: frozenset[str]
    optional: bool


@dataclass(frozen=True, slots=True)
class Form:
    """One syntactic form of an opcode.

    ``results`` operands come first and are written; ``reads_results`` says that they are read too;
    ``pure`` that the instruction does nothing but write its results, so that it may be dropped when
    nobody reads them; ``ends_block`` that the warp may have to wait there; ``carries`` ("in",
    "out", "in out") that it reads or writes the condition code, an operand that the text leaves
    out; ``is_chained`` that its accumulator may stay in the tensor core for the next instruction.
    """

    opcode: str
    pattern: str
    slots: tuple[Slot, ...]
    translator: Translator
    operand_counts: tuple[int, ...]
    results: int = 1
    reads_results: bool = False
    pure: bool = True
    ends_block: bool = False
    carries: str = ""
    is_chained: bool = False

    def match(self, modifiers: tuple[str, ...]) -> dict[str, str] | None:
        """The modifiers by slot name (absent optional ones left out), or None if they do not
        fit.
        """
        found: dict[str, str] = {}
        index = 0
        for slot in self.slots:
            if index < len(modifiers) and modifiers[index] in slot.choices:
                found[slot.name] = modifiers[index]
                index += 1
            elif not slot.optional:
                return None
        return found if index == len(modifiers) else None

    def match_unordered(self, modifiers: tuple[str, ...]) -> dict[str, str] | None:
        """As ``match``, in whatever order: modifiers of one kind (two types) count in order."""
        found: dict[str, str] = {}
        for modifier in modifiers:
            for slot in self.slots:
                if slot.name not in found and modifier in slot.choices:
                    found[slot.name] = modifier
                    break
            else:
                return None
        complete = all(slot.optional or slot.name in found for slot in self.slots)
        return found if complete else None


@dataclass(slots=True)
class Table:
    """All known forms by opcode."""

    forms: dict[str, list[Form]] = field(default_factory=dict)

    def find(self, instruction: Instruction) -> tuple[Form, dict[str, str]] | None:
        """The form of an instruction and its modifiers by slot.

        The ISA writes modifiers in one order and compilers sometimes in another, which assemblers
        take.
        """
        count = len(instruction.operands)
        forms = self.forms.get(instruction.opcode, ())
        for match in (Form.match, Form.match_unordered):
            for form in forms:
                if count in form.operand_counts:
                    matched = match(form, instruction.modifiers)
                    if matched is not None:
                        return form, matched
        return None


TABLE = Table()


def ptx(
    *patterns: str,
    operands: int | tuple[int, ...],
    results: int = 1,
    reads_results: bool = False,
    pure: bool = True,
    ends_block: bool = False,
    carries: str = "",
    is_chained: bool = False,
    **choices: str,
) -> Callable[[Translator], Translator]:
    """Registers a translator for instruction patterns; ``choices`` gives each ``<name>`` its
    words.
    """

    def register(translator: Translator) -> Translator:
        for pattern in patterns:
            opcode, slots = _parse(pattern, choices)
            counts = (operands,) if isinstance(operands, int) else operands
            TABLE.forms.setdefault(opcode, []).append(
                Form(
                    opcode,
                    pattern,
                    slots,
                    translator,
                    counts,
                    results,
                    reads_results,
                    pure,
                    ends_block,
                    carries,
                    is_chained,
                )
            )
        return translator

    return register


def _parse(pattern: str, choices: Mapping[str, str]) -> tuple[str, tuple[Slot, ...]]:
    opcode = re.match(r"\$?\w+", pattern)
    assert opcode is not None, pattern
    slots = []
    for piece in _SLOT.finditer(pattern, opcode.end()):
        text = piece["text"]
        if text.startswith("<"):
            name = text[1:-1]
            words = frozenset(choices[name].split())
        else:
            name, words = text, frozenset((text,))
        slots.append(Slot(name, words, piece["optional"] is not None))
    return opcode.group(), tuple(slots)
