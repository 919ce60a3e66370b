"""Which operands an instruction takes: the ISA's typing rules, agreed with what ptxas says."""

from __future__ import annotations

import pytest
from lanes import HEADER, device, kernel_text

from simkit.errors import PtxError

DECLARATIONS = """
.reg .u32 %u<9>; .reg .s32 %s<9>; .reg .u64 %ul<9>; .reg .f16 %g<9>; .reg .f16x2 %gg<9>;
.reg .u16 %us<9>; .reg .b8 %q<9>; .reg .b128 %x<9>; .shared .align 16 .b8 pool[64];
"""

ALLOWED = [
    # Bits go with everything of their size, integers with each other.
    "add.u32 %r1, %s1, %u1;", "add.f32 %r1, %f1, %f2;", "and.b32 %f1, %f2, %r3;",
    "add.f16x2 %r1, %gg1, %r2;", "add.f16 %g1, %h1, %h2;", "add.u32 %gg1, %gg2, %r1;",
    "mul.wide.u32 %rd1, %r1, %s1;", "mad.wide.s32 %ul1, %r1, %r2, %rd1;", "shl.b32 %r1, %r2, %u1;",
    "popc.b64 %r1, %rd1;", "selp.f32 %f1, %r2, %f2, %p1;", "selp.b64 %rd1, %ul1, %fd1, %p1;",
    "set.lt.u32.f32 %r1, %f1, %f2;", "slct.f32.s32 %f1, %f2, %f3, %r1;", "mov.b32 %f1, %r1;",
    "mov.f32 %r1, 0f3F800000;", "mov.b32 %r1, 0f3F800000;", "mov.f32 %f1, 1.5;",
    "mov.f64 %fd1, 0f3F800000;", "mov.f32 %f1, 0d3FF0000000000000;", "mov.b64 %rd1, 1.5;",
    "mov.u32 %r1, %tid.x;", "mov.u64 %rd1, %clock64;", "mov.u16 %h1, %tid.x;",
    "cvt.u64.u32 %rd1, %tid.x;", "mov.b64 %rd1, {%r1, %f2};", "mov.b64 {%r1, _}, %rd2;",
    "mov.b32 %r1, {%h1, 5};", "mov.b32 %r1, {%q1, %q2, %q3, %q4};", "mov.u32 %r1, pool;",
    "mov.u64 %rd1, pool+8;",
    # Wider registers: loads, stores and conversions only.
    "ld.global.u8 %r1, [%rd1];", "ld.global.s16 %rd2, [%rd1];", "ld.global.f32 %rd2, [%rd1];",
    "st.global.u8 [%rd1], %r2;", "st.global.u32 [%rd1], %rd2;", "cvt.u32.u16 %r1, %r2;",
    "cvt.u16.u32 %r1, %r2;", "cvt.rn.f16.f32 %r1, %f1;", "cvt.f32.f16 %f1, %r2;",
    "cvt.s32.s8 %r1, %rd2;", "st.global.f32 [%rd1], 5.0;", "st.global.u32 [%rd1], 5;",
    "ld.global.v2.f32 {%f1, %r2}, [%rd1];", "atom.global.add.f32 %r1, [%rd1], %r2;",
    "atom.global.add.u32 _, [%rd1], %r2;", "ld.shared.u32 %r1, [pool+4];",
    "ld.shared.u32 %r1, [%r2];", "shfl.sync.up.b32 %f1, %f2, %r3, %r4, -1;",
    "vote.sync.any.pred %p1, !%p2, -1;", "selp.f32 %f1, %f2, %f3, 1;",
    "setp.eq.and.f32 %p1|%p2, %f1, 0f00000000, !%p3;", "add.u32 %r1, %r2, 0x1ffffffff;",
    "ld.global.b128 %x1, [%rd1];", "mov.b128 %x1, {%rd1, %fd2};",
]  # fmt: skip

REFUSED = [
    ("add.u32 %r1, %f2, %r3;", "register %f2 is 'f32', the operand is 'u32'"),
    ("add.f32 %f1, %u2, %f3;", "register %u2 is 'u32', the operand is 'f32'"),
    ("add.f32 %s1, %f2, %f3;", "register %s1 is 's32', the operand is 'f32'"),
    ("add.f32 %f1, %f2, 1;", "the constant 1 is no value of type 'f32'"),
    ("add.u32 %r1, %r2, 1.5;", "the constant 1.5 is no value of type 'u32'"),
    ("mov.u32 %r1, 0f3F800000;", "the constant 1.0 is no value of type 'u32'"),
    ("mov.f32 %f1, 1;", "the constant 1 is no value of type 'f32'"),
    ("mov.u32 %f1, %r2;", "register %f1 is 'f32', the operand is 'u32'"),
    ("mov.b16 %h1, 0f3F800000;", "1.0"),
    ("add.u16 %r1, %r2, %r3;", "register %r1 has 32 bits, the result has 16"),
    ("add.u16 %h1, %r2, %h3;", "register %r2 has 32 bits, the instruction needs 16"),
    ("add.u64 %rd1, %rd2, %r1;", "register %r1 has 32 bits, the instruction needs 64"),
    ("add.u32 %p1, %r1, %r2;", "register %p1 is 'pred'"),
    ("add.f16 %us1, %h2, %h3;", "register %us1 is 'u16', the operand is 'f16'"),
    ("add.bf16 %g1, %h2, %h3;", "register %g1 is 'f16', the operand is 'bf16'"),
    ("add.f16x2 %f1, %r2, %r3;", "register %f1 is 'f32', the operand is 'f16x2'"),
    ("shl.b32 %r1, %r2, %h3;", "register %h3 has 16 bits, the instruction needs 32"),
    ("shl.b32 %r1, %r2, %rd3;", "register %rd3 has 64 bits, the instruction needs 32"),
    ("mul.wide.u32 %r1, %r2, %r3;", "register %r1 has 32 bits, the result has 64"),
    ("mul.wide.u32 %rd1, %rd2, %r3;", "register %rd2 has 64 bits, the instruction needs 32"),
    ("popc.b32 %rd1, %r2;", "register %rd1 has 64 bits, the result has 32"),
    ("popc.b64 %r1, %r2;", "register %r2 has 32 bits, the instruction needs 64"),
    ("selp.u32 %r1, %r2, %r3, %r1;", "register %r1 is 'b32', the operand is 'pred'"),
    ("selp.u32 %f1, %r2, %r3, %p1;", "register %f1 is 'f32', the operand is 'u32'"),
    ("setp.eq.f32 %p1, %f1, 0;", "the constant 0 is no value of type 'f32'"),
    ("setp.eq.u32 %r1, %r2, %r3;", "%r1"),
    ("mov.u64 %rd1, %tid.x;", "special register %tid.x is no value of type 'u64'"),
    ("mov.u64 %rd1, %r1;", "register %r1 has 32 bits, the instruction needs 64"),
    ("add.u32 %r1, %tid.x, %r2;", "special register %tid.x is read by mov only"),
    ("mov.b32 %r1, {%h1, %h2, %h3};", "b32 does not consist of 3 parts"),
    ("mov.u64 %rd1, {%r1, %r2};", "u64 does not consist of 2 parts"),
    ("mov.b64 %rd1, {%h1, %h2};", "register %h1 does not have the 32 bits of a part"),
    ("mov.b64 {%r1, %h2}, %rd1;", "register %h2 does not have the 32 bits of a part"),
    ("ld.global.u32 %h1, [%rd1];", "register %h1 has 16 bits, the result has 32"),
    ("ld.global.u32 %f1, [%rd1];", "register %f1 is 'f32', the operand is 'u32'"),
    ("ld.global.u32 {%r1, %r2}, [%rd1];", "2 destinations for 1 elements"),
    ("ld.global.u32 %r1, [%rd1], %rd2;", "operands"),
    ("st.global.f32 [%rd1], %fd1;", "register %fd1 has 64 bits, the instruction needs 32"),
    ("st.global.f32 [%rd1], 5;", "the constant 5 is no value of type 'f32'"),
    ("st.global.u32 [%rd1], 5.5;", "the constant 5.5 is no value of type 'u32'"),
    ("cvt.rn.bf16.f32 %r1, %f2;", "register %r1 has 32 bits, the result has 16"),
    ("cvt.rn.f32.f64 %f1, %f2;", "register %f2 has 32 bits, the instruction needs 64"),
    ("cvt.rn.f32.f64 %fd1, %fd2;", "register %fd1 has 64 bits, the result has 32"),
    ("redux.sync.add.u32 %f1, %r2, -1;", "register %f1 is 'f32', the operand is 'u32'"),
    ("atom.global.add.u32 %f1, [%rd1], %r2;", "register %f1 is 'f32', the operand is 'u32'"),
    ("atom.global.add.u32 %rd1, [%rd1], %rd2;", "register %rd1 has 64 bits, the result has 32"),
    ("bar.sync %rd1;", "register %rd1 has 64 bits"),
    ("fma.rn.f32 %f1, %f2, %f3;", "instructions that the executor does not know"),
    ("wgmma.wait_group.sync.aligned %r1;", "needs a constant"),
    ("cp.async.wait_group %r1;", "needs a constant"),
    ("lop3.b32 %r1, %r2, %r3, %r4, %r5;", "lop3 needs a constant table"),
    ("ld.shared.u32 %r1, [%h2];", "address register %h2 has 16 bits"),
    ("ld.shared.u32 %r1, [%p2];", "address register %p2"),
    ("add.u32 %r1, pool, %r2;", "the address of 'pool' is no operand of add"),
    ("add.u32 %r1, [%r2], %r3;", "is not a value"),
    ("add.u32 %r1, {%r2, %r3}, %r3;", "is not a value"),
    ("add.u32 {%r1, %r2}, %r2, %r3;", "is not a register"),
    ("add.u32 %r1|%r2, %r2, %r3;", "is not a register"),
    ("add.u32 (%r1), %r2, %r3;", "is not a register"),
    ("add.u32 %r1, !%p1, %r3;", "is a predicate, not a value"),
    ("and.pred %p1, !%r1, %p2;", "%r1"),
    ("vote.sync.any.pred %p1, !%r2, -1;", "%r2"),
    ("tex.2d.v4.f32.f32 {%f1,%f2,%f3,%f4}, [%rd1, {%f1,%f2}];", "textures are not supported"),
    ("alloca.u64 %rd1, %rd2, 16;", "there is no stack to allocate from"),
    ("vote.ballot.b32 %r1, %p1;", "instructions that the executor does not know"),
    ("shfl.up.b32 %r1, %r2, 1, 31;", "instructions that the executor does not know"),
]  # fmt: skip


def text(body: str) -> str:
    return kernel_text(DECLARATIONS + body, {}).replace("8.5", "8.8", 1)


@pytest.mark.parametrize("body", ALLOWED)
def test_operands_that_fit(body: str) -> None:
    device().load(text(body)).kernel("k")


@pytest.mark.parametrize(("body", "expected"), REFUSED)
def test_operands_that_do_not_fit(body: str, expected: str) -> None:
    with pytest.raises(PtxError) as caught:
        device().load(text(body)).kernel("k")
    message = str(caught.value)
    assert expected in message
    lines = text(body).split("\n")
    number = next(k for k, line in enumerate(lines, 1) if body in line)
    assert f"line {number}: " in message


def test_what_is_never_used_is_checked_too() -> None:
    """Neither dead code nor constants nor unreachable code hides a wrong operand."""
    for body in (
        "add.u64 %rd1, %rd2, %r1;",
        "mov.u32 %r1, 5;\nadd.u64 %rd1, %rd2, %r1;",
        "bra end;\nadd.u64 %rd1, %rd2, %r1;\nend:",
    ):
        with pytest.raises(PtxError, match="register %r1 has 32 bits, the instruction needs 64"):
            device().load(text(body)).kernel("k")


@pytest.mark.parametrize("kind", ["e4m3x2", "u16x2", "ue8m0x2", "b33"])
def test_types_that_nothing_is_declared_with(kind: str) -> None:
    with pytest.raises(PtxError, match=f"unknown register type '.{kind}'"):
        device().load(text(f".reg .{kind} %z;"))
    with pytest.raises(PtxError, match=f"unknown type '.{kind}'"):
        device().load(f"{HEADER}.global .{kind} z;")
