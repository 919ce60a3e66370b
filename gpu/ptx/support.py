"""Writes docs/ptx-support.md: every instruction form that the executor runs, from its own table.

Run as a module (``python -m gpu.ptx.support``), which is what ``make docs`` does.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from inspect import getdoc
from pathlib import Path

from gpu.ptx import isa
from gpu.ptx.architectures import REQUIREMENTS
from gpu.ptx.program import REFUSED
from gpu.ptx.registry import TABLE, Form, Translator

DOCUMENT = Path(__file__).parents[2] / "docs" / "ptx-support.md"

_HEAD = """\
# PTX on the executor

Every instruction form that the executor runs, from the table that it decodes with (`gpu/ptx/isa/`).
`make docs` writes this file; edit the modules instead.

Notation: `{.x}` may be left out; `<name>` is one of the words listed for it below the form; behind
the form stands how many operands it has. Modifiers may also come in another order, as assemblers
take them. A text with an instruction that is not listed is refused when it is loaded, with the
lines of all such instructions, and so is one whose `.target` lacks an instruction that it uses
(see "Architectures"), whose operands do not fit their types, or that the device does not run.

Cache operators, eviction priorities, prefetch sizes and cache policies are taken and change
nothing.
"""
_CONTROL = """\
## Control flow

PTX ISA 8.8, 9.7.12, and 11 (directives).

- `bra{.uni} label`, `brx.idx{.uni} index, list` with `.branchtargets`, `ret{.uni}`, `exit`.
- `call{.uni}` of a function of the module, which is inlined: no recursion and no calls through
  function pointers (`.callprototype`, `.calltargets`). `vprintf` and `__assertfail` are built in.
- `@p` and `@!p` guard every instruction.
- Labels and registers are local to their braces.
"""
# Longer lists of words are shortened to their ends.
_MOST_WORDS = 24


def document() -> str:
    """The whole text of the file."""
    parts = [_HEAD, _CONTROL, *_sections(), _refused(), _architectures()]
    return "\n".join(parts)


def _sections() -> Iterator[str]:
    """One section for each module of isa/, in the order of their names."""
    by_module: dict[str, list[Form]] = {}
    for forms in TABLE.forms.values():
        for form in forms:
            if not form.opcode.startswith("$"):
                by_module.setdefault(form.translator.__module__, []).append(form)
    for name in sorted(by_module):
        lines = (sys.modules[name].__doc__ or "").strip().split("\n")
        title, *rest = " ".join(lines).split("Source: ", 1)
        yield f"## {title.strip().rstrip('.')}\n"
        if rest:
            yield f"Source: {' '.join(rest)}\n"
        yield from _instructions(by_module[name])


def _instructions(forms: list[Form]) -> Iterator[str]:
    """The forms of a module by opcode, each with its words and what its translator says of it."""
    by_translator: dict[Translator, list[Form]] = {}
    for form in forms:
        by_translator.setdefault(form.translator, []).append(form)
    by_opcodes: dict[str, list[Translator]] = {}
    for translator, group in by_translator.items():
        opcodes = ", ".join(f"`{o}`" for o in dict.fromkeys(f.opcode for f in group))
        by_opcodes.setdefault(opcodes, []).append(translator)
    for opcodes, translators in by_opcodes.items():
        yield f"### {opcodes}\n"
        for translator in translators:
            note = getdoc(translator)
            if note:
                yield " ".join(note.split()) + "\n"
            yield "```"
            for words, alike in _by_words(by_translator[translator]).items():
                for form in alike:
                    counts = " or ".join(map(str, form.operand_counts))
                    yield f"{form.pattern:<72} {counts}".rstrip()
                for line in words:
                    yield f"    {line}"
            yield "```\n"


def _by_words(group: Iterable[Form]) -> dict[tuple[str, ...], list[Form]]:
    """Forms whose placeholders stand for the same words."""
    found: dict[tuple[str, ...], list[Form]] = {}
    for form in group:
        named = {s.name: s.choices for s in form.slots if f"<{s.name}>" in form.pattern}
        lines = tuple(f"{name}: {_words(choices)}" for name, choices in named.items())
        found.setdefault(lines, []).append(form)
    return found


def _words(choices: Iterable[str]) -> str:
    ordered = sorted(choices, key=_natural)
    if len(ordered) > _MOST_WORDS:
        ordered = [*ordered[:3], "...", *ordered[-3:]]
    return " ".join(ordered)


def _natural(word: str) -> list[tuple[int, str]]:
    """Numbers inside words sort by value."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", word)]


def _refused() -> str:
    lines = ["## Refused on purpose\n"]
    by_reason: dict[str, list[str]] = {}
    for opcode, reason in REFUSED.items():
        by_reason.setdefault(reason, []).append(f"`{opcode}`")
    lines += [f"- {', '.join(opcodes)}: {reason}." for reason, opcodes in by_reason.items()]
    return "\n".join(lines) + "\n"


def _architectures() -> str:
    lines = [
        "## Architectures\n",
        'What an instruction needs at least, from the "Target ISA Notes" of the PTX ISA: an',
        'architecture with "a" is that one alone, one with "f" any of those with a letter from',
        "there on. `#n` stands for n operands.\n",
        "| Instruction | with | needs |",
        "|---|---|---|",
    ]
    for opcode, requirements in sorted(REQUIREMENTS.items()):
        for requirement in requirements:
            words = " and ".join(
                " or ".join(f"`{w}`" for w in group.split("|"))
                for group in requirement.text.split()
            )
            shown = "any" if opcode == "*" else f"`{opcode}`"
            lines.append(f"| {shown} | {words} | {requirement.needed} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    assert isa  # importing it fills the table
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
