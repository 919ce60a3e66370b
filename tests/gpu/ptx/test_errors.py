"""What is wrong is said: one readable message with the PTX line, before or while a kernel runs."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from lanes import HEADER, device, kernel_text, run

import gpu
from gpu.ptx.launch import Options
from gpu.ptx.schedule import Schedule
from simkit.errors import (
    BudgetError,
    CapacityError,
    DeadlockError,
    DeviceUnavailableError,
    DtypeError,
    LaunchError,
    MemoryAccessError,
    PtxError,
    ShapeError,
    SimkitError,
)

WORD = {"x": np.zeros(64, np.uint32)}


def message(kind: type[SimkitError], body: str, **keywords) -> str:  # type: ignore[no-untyped-def]
    """The message of the error that a kernel ends with."""
    with pytest.raises(kind) as caught:
        run(body, keywords.pop("arguments", WORD), **keywords)
    return str(caught.value)


def line_of(body: str, text: str, arguments: dict | None = None) -> str:
    """``"PTX line N"`` for the first line with ``text`` in the kernel of a body."""
    lines = kernel_text(body, arguments or WORD).split("\n")
    return f"PTX line {next(k for k, line in enumerate(lines, 1) if text in line)}"


def refused(ptx: str, kernel: str = "k") -> str:
    with pytest.raises(PtxError) as caught:
        device().load(ptx).kernel(kernel)
    return str(caught.value)


# At load


def test_every_truncation_of_a_text_is_refused() -> None:
    text = kernel_text("add.u32 %r1, %t5, 1;\nst.global.u32 [%x], %r1;", WORD)
    for end in range(len(text.rstrip())):
        # What is whole without its end is a module without kernels.
        with pytest.raises(PtxError, match=r"PTX line|no kernel named 'k'"):
            device().load(text[:end]).kernel("k")


def test_truncated_function() -> None:
    text = kernel_text("add.u32 %r1, %t5, 1;", WORD)
    assert "the text ends inside function 'k'" in refused(text[: text.rindex("}")])


def test_misspelt_instructions_are_all_listed() -> None:
    body = "addd.u32 %r1, %t5, 1;\nadd.u33 %r1, %t5, 1;\nadd.u32 %r1, %t5;\nfrobnicate %r1;"
    text = refused(kernel_text(body, WORD))
    for part in ("addd.u32", "add.u33", "add.u32 %r1, %t5;", "frobnicate"):
        assert f"{line_of(body, part).removeprefix('PTX ')}: " in text
        assert part in text
    assert "4 instructions" in text


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("add.u32 %r1, %nope, 1;", "register '%nope' is not declared"),
        ("add.u32 nope, %t5, 1;", "nope"),
        ("add.u64 %rd1, %rd2, %r1;", "register %r1 has 32 bits, the instruction needs 64"),
        ("add.u32 %h1, %r1, %r2;", "register %h1 has 16 bits, the result has 32"),
        ("add.u32 %p1, %r1, %r2;", "register %p1 is 'pred'"),
        ("setp.eq.u32 %r1, %r2, %r3;", "register %r1 is 'pred'|register %r1 is 'b32'"),
        ("@%r1 add.u32 %r1, %r1, 1;", "guard '%r1' is not a predicate register"),
        ("add.u32 1, %r1, %r2;", "is not a register"),
        ("bra nowhere;", "branch to an unknown label"),
        ("ld.global.u32 %r1, %rd1;", "is not an address"),
        ("ld.global.u32 %r1, [%h1];", "address register %h1 has 16 bits"),
        ("ld.global.u32 %r1, [nothing];", "unknown name 'nothing'"),
        ("ld.global.v2.u32 {%r1, %r2, %r3}, [%x];", "3 destinations for 2 elements"),
        ("st.global.v4.u32 [%x], {%r1, %r2};", "2 sources for 4 elements"),
        ("ld.global.u32 %r1, [%x] add.u32 %r1, %r1, 1;", "expected ';'"),
        ("lop3.b32 %r1, %r2, %r3, %r4, %t0;", "lop3 needs a constant table"),
        ("cp.async.cg.shared.global [%rd1], [%x], 8;", "cp.async.cg copies 16 bytes"),
        ("cp.async.ca.shared.global [%rd1], [%x], 12;", "cp.async copies 4, 8 or 16 bytes"),
        ("call nothing;", "call of unknown function 'nothing'"),
        ("ld.param.u64 %rd1, [p_x+4];", "the kernel has 8 bytes of parameters"),
        ("ld.param.u32 %r1, [p_x-4];", "the kernel has 8 bytes of parameters"),
        ("again: add.u32 %r1, %r1, 1; again: bra again;", "label 'again' is defined twice"),
        (".reg .b33 %q;", "unknown register type '.b33'"),
        (".reg .b32 %q; .reg .b32 %q;", "register '%q' is declared twice"),
        (".align 4;", "unknown directive '.align'"),
        ("add.u32 %r1, %r1, 0q12;", "malformed number|unexpected"),
        ("add.u32 %r1 %r2, %r3;", "expected ';'"),
        ("add.u32 %r1, %r2, ;", "expected an operand"),
        ("add.u32 %r1, %r2, `;", "unexpected character '`'"),
        ("mma.sync.aligned.m16n8k8.row.col.f32.e4m3.e4m3.f32 "
         "{%f1,%f2,%f3,%f4}, {%r1,%r2}, {%r3}, {%f1,%f2,%f3,%f4};", "m16n8k8"),
    ],
)  # fmt: skip
def test_malformed_statements(body: str, expected: str) -> None:
    used = "st.global.b64 [%x], %rd1; st.global.b16 [%x], %h1; @%p1 st.global.b32 [%x], %r1;"
    text = refused(kernel_text(f"{body}\n{used}", WORD))
    assert any(part in text for part in expected.split("|")), text
    assert line_of(body, body[:12]).removeprefix("PTX ") in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected '.version'"),
        (".version eight", "expected a version"),
        (".version 8.5\n.target sm_90\n.address_size 32\n", "only 64-bit addresses"),
        (HEADER + "garbage", "expected a declaration, found 'garbage'"),
        (HEADER + ".global .u32 a[-1];", "array extent -1 is negative"),
        (HEADER + ".global .align 3 .u32 a;", "alignment 3 is not a power of two"),
        (HEADER + ".global .u32 a[1] = {1, 2};", "8 bytes of initial values for 4 bytes"),
        (HEADER + ".global .u64 a = b;", "unknown name 'b' in an initial value"),
        (HEADER + ".extern .global .u32 a;", "'a' is defined in another module"),
        (HEADER + ".global .texref t;", "texref"),
        (HEADER + ".visible .entry k() { ret; }\n.visible .entry k() { ret; }", "defined twice"),
        (HEADER + ".visible .entry k(.param .u32 ) { ret; }", "a variable's name"),
        (HEADER + "/* never closed", "PTX line 4"),
    ],
)
def test_malformed_modules(text: str, expected: str) -> None:
    with pytest.raises(PtxError) as caught:
        device().load(text)
    assert expected in str(caught.value)
    assert "PTX line" in str(caught.value)


def test_unknown_kernel_lists_the_known_ones() -> None:
    text = HEADER + ".visible .entry one() { ret; }\n.visible .entry two() { ret; }"
    assert refused(text, "three") == "no kernel named 'three'; the module has one, two"


# Memory


def test_global_access_beyond_an_array() -> None:
    body = "mad.wide.u32 %rd1, %t5, 4, %x;\nld.global.u32 %r1, [%rd1+192];"
    text = message(MemoryAccessError, body)
    assert "global read of 4 bytes" in text
    assert "0 bytes past the end of 'x' (256 bytes)" in text
    assert "thread (16, 0, 0) of block (0, 0, 0)" in text
    assert line_of(body, "ld.global") in text
    store = message(MemoryAccessError, body.replace("ld.global.u32 %r1, [%rd1+192]",
                                                    "st.global.u32 [%rd1+192], %r1"))  # fmt: skip
    assert "global write of 4 bytes" in store


def test_the_address_in_the_message_is_the_address() -> None:
    dev = gpu.open("ptx")
    x = dev.array(np.zeros(8, np.uint32), name="victim")
    kernel = dev.load(kernel_text("ld.global.u32 %r1, [%x+1024];", WORD)).kernel("k")
    with pytest.raises(MemoryAccessError, match=f"0x{x.address + 1024:x} .*victim"):
        kernel.launch((1,), (1,), [x])


@pytest.mark.parametrize("pointer", [0, 16, 2**64 - 16, 1 << 62])
def test_wild_pointers(pointer: int) -> None:
    body = "ld.global.u32 %r1, [%q];\nst.global.u32 [%x], %r1;"
    arguments = {**WORD, "q": np.uint64(pointer)}
    text = message(MemoryAccessError, body, arguments=arguments)
    assert f"at 0x{pointer:x}" in text
    generic = message(MemoryAccessError, body.replace("ld.global", "ld"), arguments=arguments)
    assert f"at 0x{pointer:x}" in generic


def test_freed_memory() -> None:
    dev = device()
    x = dev.array(np.zeros(1024, np.uint32), name="freed")
    address = x.address
    kernel = dev.load(kernel_text("ld.global.u32 %r1, [%q];", {"q": np.uint64(0)})).kernel("k")
    kernel.launch((1,), (1,), [address])
    del x
    with pytest.raises(MemoryAccessError, match=f"0x{address:x}"):
        kernel.launch((1,), (1,), [address])


def test_shared_access_beyond_the_block() -> None:
    body = """
        .shared .align 4 .b8 pool[100];
        mov.u64 %rd1, pool;
        mad.wide.u32 %rd2, %t5, 4, %rd1;
        st.shared.u32 [%rd2], %r1;
    """
    text = message(MemoryAccessError, body)
    assert "shared write of 4 bytes at 0x64 (shared memory has 100 bytes)" in text
    assert "thread (25, 0, 0) of block (0, 0, 0)" in text
    assert line_of(body, "st.shared") in text
    below = message(MemoryAccessError, body.replace("[%rd2]", "[%rd2-4]"))
    assert "thread (0, 0, 0)" in below


def test_local_access_beyond_the_frame() -> None:
    body = """
        .local .align 16 .b8 own[32];
        mov.u64 %rd1, own;
        mad.wide.u32 %rd2, %t5, 4, %rd1;
        ld.local.u32 %r1, [%rd2];
    """
    text = message(MemoryAccessError, body)
    assert "local read of 4 bytes at 0x20 (local memory has 32 bytes)" in text
    assert "thread (8, 0, 0)" in text


def test_thread_and_block_of_an_access_error() -> None:
    body = """
        mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y;
        setp.eq.u32 %p1, %r1, 2; setp.eq.u32 %p2, %r2, 1; setp.eq.u32 %p3, %t5, 41;
        and.pred %p1, %p1, %p2; and.pred %p1, %p1, %p3;
        @%p1 ld.global.u32 %r3, [%x+4096];
    """
    text = message(MemoryAccessError, body, grid=(4, 2), block=(8, 4, 2))
    assert "thread (1, 1, 1) of block (2, 1, 0)" in text


@pytest.mark.parametrize(
    ("body", "size"),
    [
        ("ld.global.u32 %r1, [%x+2];", 4),
        ("ld.global.u64 %rd1, [%x+4];", 8),
        ("ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%x+8];", 16),
        ("ld.global.v2.u16 {%h1, %h2}, [%x+2];", 4),
        ("st.global.u16 [%x+1], %h1;", 2),
        ("ld.u32 %r1, [%x+2];", 4),
        ("atom.global.add.u32 %r1, [%x+2], 1;", 4),
        ("st.shared.u32 [pool+2], %r1;", 4),
        ("st.shared.v2.u32 [pool+4], {%r1, %r2};", 8),
        ("ld.local.u64 %rd1, [own+4];", 8),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [pool+8];", 16),
        ("cp.async.ca.shared.global [pool+4], [%x], 8; cp.async.wait_all;", 8),
        ("cp.async.cg.shared.global [pool], [%x+8], 16; cp.async.wait_all;", 16),
    ],
)
def test_misaligned_accesses(body: str, size: int) -> None:
    declarations = ".shared .align 16 .b8 pool[64]; .local .align 16 .b8 own[16];\n"
    text = message(MemoryAccessError, declarations + body)
    assert f"(not a multiple of {size})" in text
    assert line_of(declarations + body, body.split(";")[0]) in text


# Arguments and launch


def kernel(parameters: str, body: str = "ret;"):  # type: ignore[no-untyped-def]
    return device().load(f"{HEADER}.visible .entry k({parameters}) {{ {body} }}").kernel("k")


@pytest.mark.parametrize(
    ("parameters", "arguments", "expected"),
    [
        (".param .u32 a, .param .f32 b", [1], "takes 2 arguments, got 1"),
        (".param .u32 a", [1, 2], "takes 1 arguments, got 2"),
        (".param .u32 a", [1.5], "argument 0 (a: u32, 4 bytes): got a float"),
        (".param .u32 a", [np.float32(1)], "got float32, the parameter is an integer"),
        (".param .f32 a", [np.int32(1)], "got int32, the parameter is floating point"),
        (".param .u32 a", [np.uint64(1)], "got uint64 of 8 bytes"),
        (".param .u32 a", [1 << 32], "4294967296 does not fit in 32 bits"),
        (".param .u8 a", [-129], "-129 does not fit in 8 bits"),
        (".param .u64 a", [np.zeros(4)], "got a NumPy array; put it on the device"),
        (".param .u64 a", ["text"], "got str"),
        (".param .align 8 .b8 s[24]", [b"12"], "got 2 bytes"),
        (".param .align 8 .b8 s[24]", [3], "got an int for a struct"),
        (".param .u64 a", [None], "got NoneType"),
    ],
)
def test_wrong_arguments(parameters: str, arguments: list, expected: str) -> None:
    with pytest.raises(LaunchError) as caught:
        kernel(parameters).launch((1,), (1,), arguments)
    assert expected in str(caught.value)
    assert "kernel 'k'" in str(caught.value)


def test_array_for_a_number() -> None:
    with pytest.raises(LaunchError, match="the parameter is not a pointer"):
        kernel(".param .u32 a").launch((1,), (1,), [device().array(np.zeros(1))])


def test_arguments_that_fit() -> None:
    body = "ret;"
    kernel(".param .f32 a, .param .f64 b, .param .u8 c", body).launch((1,), (1,), [1, 2.5, 255])
    kernel(".param .s32 a, .param .u32 b", body).launch((1,), (1,), [-1, 2**32 - 1])
    kernel(".param .align 4 .b8 s[8]", body).launch((1,), (1,), [struct.pack("<if", 1, 2.0)])


@pytest.mark.parametrize(
    ("grid", "block", "expected"),
    [
        ((1,), (1025,), "block.x is 1025, it must be from 1 to 1024"),
        ((1,), (64, 32), "a block of 2048 threads"),
        ((1,), (1, 1, 65), "block.z is 65"),
        ((0,), (1,), "grid.x is 0"),
        ((1, 70000), (1,), "grid.y is 70000"),
        ((1, 1, 1, 1), (1,), "grid has 4 dimensions"),
        ((), (1,), "grid has 0 dimensions"),
        ((1,), (0,), "block.x is 0"),
    ],
)
def test_impossible_launches(grid: tuple, block: tuple, expected: str) -> None:
    with pytest.raises(LaunchError) as caught:
        kernel("").launch(grid, block, [])
    assert expected in str(caught.value)


def test_thread_limits_of_the_kernel_itself() -> None:
    text = HEADER + ".visible .entry k() .maxntid 128, 1, 1 { ret; }"
    device().load(text).kernel("k").launch((1,), (128,), [])
    with pytest.raises(LaunchError, match="compiled for at most 128"):
        device().load(text).kernel("k").launch((1,), (129,), [])
    text = text.replace(".maxntid 128", ".reqntid 64")
    with pytest.raises(LaunchError, match="requires blocks of"):
        device().load(text).kernel("k").launch((1,), (32,), [])


def test_too_much_shared_memory() -> None:
    with pytest.raises(CapacityError) as caught:
        kernel("", ".shared .align 4 .b8 s[1000]; st.shared.u8 [s], 1; ret;").launch(
            (1,), (1,), [], shared_bytes=227 * 1024
        )
    text = str(caught.value)
    assert str(227 * 1024 + 1000) in text  # what it needs
    assert str(227 * 1024) in text  # what there is
    with pytest.raises(CapacityError):
        kernel("").launch((1,), (1,), [], shared_bytes=-1)


def test_device_errors() -> None:
    with pytest.raises(DeviceUnavailableError, match="no device 'cpu'"):
        gpu.open("cpu")
    with pytest.raises(SimkitError, match="h100"):
        gpu.open("ptx", gpu="gtx9000")
    with pytest.raises(CapacityError, match="do not fit in device memory"):
        device().empty(1 << 40, np.uint8)
    x = device().array(np.zeros(4, np.float32))
    with pytest.raises(ShapeError):
        x.fill(np.zeros(5, np.float32))
    with pytest.raises(DtypeError):
        x.fill(np.zeros(4))


# While running

SCHEDULES = [Schedule("eager"), Schedule("lazy"), Schedule("random", 5)]


def quick(schedule: Schedule) -> Options:
    return Options(schedule=schedule, budget=20_000)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_deadlock_names_the_warps_and_the_barrier(schedule: Schedule) -> None:
    """Warps 0 and 1 wait at barrier 3 for 128 threads; warps 2 and 3 wait at barrier 0."""
    body = """
        setp.ge.u32 %p1, %t5, 64;
        @%p1 bra other;
        bar.sync 3, 128;
        bra.uni join;
        other:
        bar.sync 0;
        join:
    """
    text = message(DeadlockError, body, grid=(1,), block=(128,), options=quick(schedule))
    assert "kernel 'k' is deadlocked" in text
    assert "block (0, 0, 0): warps 0, 1 wait at barrier 3" in text
    assert "warps 2, 3 wait at barrier 0" in text
    assert "64 of 128 threads have arrived" in text
    assert line_of(body, "bar.sync 3") in text
    assert line_of(body, "bar.sync 0") in text


def test_a_barrier_that_a_warp_leaves_out_by_exiting_is_no_deadlock() -> None:
    body = "setp.ge.u32 %p1, %t5, 64; @%p1 ret; bar.sync 0; st.global.u32 [%x], %t5;"
    run(body, WORD, block=(128,))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_endless_loop(schedule: Schedule) -> None:
    body = "again: add.u32 %r1, %r1, 1;\nbra again;"
    text = message(BudgetError, body, options=quick(schedule))
    assert "kernel 'k' used up its budget of 20000" in text
    assert "PTX line" in text


def test_endless_loop_of_one_lane() -> None:
    body = "again: setp.eq.u32 %p1, %t5, 7;\n@%p1 bra again;\nst.global.u32 [%x], %t5;"
    assert "budget" in message(BudgetError, body, options=quick(Schedule()))


def test_waiting_for_a_flag_that_nobody_sets() -> None:
    body = "again: ld.volatile.global.u32 %r1, [%x];\nsetp.eq.u32 %p1, %r1, 0;\n@%p1 bra again;"
    assert "budget" in message(BudgetError, body, options=quick(Schedule("lazy")))


def test_divergent_barrier() -> None:
    body = """
        setp.ge.u32 %p1, %t5, 10;
        @%p1 bra other;
        bar.sync 0;
        bra.uni join;
        other:
        bar.sync 0;
        join:
    """
    text = message(LaunchError, body)
    assert "barrier reached by 10 of 32 lanes of warp 0 of block (0, 0, 0)" in text
    assert line_of(body, "bar.sync") in text


def test_impossible_barriers() -> None:
    body = "bar.sync 16;"
    assert "barrier 16 does not exist" in message(LaunchError, body)
    body = "bar.sync 1, 40;"
    assert "barrier for 40 threads, not a multiple of 32" in message(LaunchError, body)
    body = "and.b32 %r1, %t5, 1;\nbar.sync %r1;"
    text = message(LaunchError, body)
    assert "different values where one is needed" in text
    assert line_of(body, "bar.sync") in text


def test_branch_index_outside_the_list() -> None:
    body = """
        targets: .branchtargets one, two;
        mov.u32 %r1, 5;
        brx.idx %r1, targets;
        one: st.global.u32 [%x], 1;
        two: st.global.u32 [%x], 2;
    """
    assert "branch index 5 is outside a list of 2" in message(LaunchError, body)


def test_source_lines_in_messages() -> None:
    source = (
        'extern "C" __global__ void k(int* x) {\n    int i = threadIdx.x;\n\n    x[i] = i;\n}\n'
    )
    module = device().compile(source, options=("-lineinfo",), arch="sm_90", name="mine.cu")
    with pytest.raises(MemoryAccessError, match=r"PTX line \d+ \(.*mine\.cu:4\)"):
        module.kernel("k").launch((1,), (32,), [device().array(np.zeros(8, np.int32))])
