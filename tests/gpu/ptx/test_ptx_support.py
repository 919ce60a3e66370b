"""docs/ptx-support.md says what the instruction table says."""

from __future__ import annotations

from gpu.ptx.registry import TABLE
from gpu.ptx.support import DOCUMENT, document


def test_the_committed_file_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "run `make docs`"


def test_every_instruction_is_in_it_with_its_source() -> None:
    text = document()
    for opcode, forms in TABLE.forms.items():
        for form in forms:
            if not opcode.startswith("$"):
                assert form.pattern in text
    sections = text.split("\n## ")[1:]
    for section in sections[1:-2]:
        assert "Source: PTX ISA" in section, section.split("\n")[0]


def test_hints_are_told_apart() -> None:
    """What the executor takes and ignores is said to do nothing."""
    text = document()
    for opcode in ("`prefetch`", "`nanosleep`", "`createpolicy`", "`setmaxnreg`"):
        section = text[text.index(opcode) :].split("\n###")[0]
        note = section.split("```")[0]
        assert any(word in note for word in ("nothing", "no trace", "hint")), opcode
