"""Source lines in PTX: .loc with what LLVM writes of inlined functions.

Source: PTX ISA 8.8, 11.5.
"""

from __future__ import annotations

from gpu.ptx.parser import parse
from gpu.ptx.syntax import Instruction

TEXT = """
.version 8.5
.target sm_90a
.address_size 64
.visible .entry k() {
.reg .f32 %f<4>;
.loc 1 32 36
.loc 2 216 16, function_name $L__info_string0, inlined_at 1 32 36 // standard.py:216:16
max.f32 %f1, %f2, %f3;
.loc 2 217 16, function_name $L__info_string0+4, inlined_at 1 33 36
ret;
}
.file 1 "a.py"
.file 2 "standard.py"
"""


def test_an_instruction_follows_the_attributes_of_an_inlined_function() -> None:
    body = [s for s in parse(TEXT).functions["k"].body if isinstance(s, Instruction)]
    assert [s.opcode for s in body] == ["max", "ret"]
    assert [(s.position.source_file, s.position.source_line) for s in body] == [(2, 216), (2, 217)]
