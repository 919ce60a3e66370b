"""mov, packing and unpacking, addresses of the state spaces, special registers."""

from __future__ import annotations

import numpy as np
import pytest
from lanes import corner_integers, lanewise, run

import gpu
from simkit.errors import PtxError


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_moves(bits: int) -> None:
    a = corner_integers(bits, False)
    kinds = [f"b{bits}", f"u{bits}", f"s{bits}", *([f"f{bits}"] if bits > 16 else [])]
    text = "\n".join(f"mov.{kind} %{kind}, %a;" for kind in kinds)
    got = lanewise(text, {"a": a}, dict.fromkeys(kinds, a.dtype))
    for kind in kinds:
        assert np.array_equal(got[kind], a)


def test_constants() -> None:
    a = np.arange(32, dtype=np.uint32)
    text = """
        mov.b16 %b, -1;
        mov.u32 %c, 0xdeadbeef;
        mov.s32 %d, -2147483648;
        mov.b64 %e, -1;
        mov.u64 %f, 0xfedcba9876543210;
        mov.f32 %g, 0fC1480000;
        mov.b32 %h, 0f3F800000;
        mov.f64 %i, 0dC028000000000000;
        mov.f32 %j, 1.5;
        mov.u32 %k, 017;
        mov.u32 %l, 0b101;
        mov.u32 %m, WARP_SZ;
    """
    results = {
        "b": np.uint16, "c": np.uint32, "d": np.int32, "e": np.uint64, "f": np.uint64,
        "g": np.float32, "h": np.uint32, "i": np.float64, "j": np.float32, "k": np.uint32,
        "l": np.uint32, "m": np.uint32,
    }  # fmt: skip
    got = lanewise(text, {"a": a}, results)
    wanted = {
        "b": 0xFFFF, "c": 0xDEADBEEF, "d": -(2**31), "e": 2**64 - 1, "f": 0xFEDCBA9876543210,
        "g": -12.5, "h": 0x3F800000, "i": -12.0, "j": 1.5, "k": 15, "l": 5, "m": 32,
    }  # fmt: skip
    for name, value in wanted.items():
        assert (got[name] == results[name](value)).all(), name


def test_constant_nan_payloads_survive() -> None:
    a = np.arange(32, dtype=np.uint32)
    text = "mov.f32 %d, 0f7FFFFFFF;\nmov.f32 %e, 0fFFC12345;\nmov.f64 %f, 0d7FF8000000001234;"
    got = lanewise(text, {"a": a}, {"d": np.uint32, "e": np.uint32, "f": np.uint64})
    assert (got["d"] == 0x7FFFFFFF).all()
    assert (got["e"] == 0xFFC12345).all()
    assert (got["f"] == 0x7FF8000000001234).all()


def test_packing() -> None:
    """The first element of a vector is the lowest part of the word."""
    h = corner_integers(16, False)
    i, j, k = h[::-1].copy(), np.roll(h, 3), np.roll(h, 7)
    w = np.resize(corner_integers(32, False), h.shape)
    v = w[::-1].copy()
    text = """
        mov.b32 %d, {%h, %i};
        mov.b64 %e, {%w, %v};
        mov.b64 %f, {%h, %i, %j, %k};
        mov.b32 %g, {%h, -2};
        mov.b64 %x, {%w, 0f3F800000};
        mov.b64 %y, {0, %w};
    """
    sources = {"h": h, "i": i, "j": j, "k": k, "w": w, "v": v}
    got = lanewise(text, sources, dict.fromkeys("dg", np.uint32) | dict.fromkeys("efxy", np.uint64))
    wide = {n: a.astype(np.uint64) for n, a in sources.items()}
    assert np.array_equal(got["d"], wide["h"] | wide["i"] << 16)
    assert np.array_equal(got["e"], wide["w"] | wide["v"] << 32)
    four = wide["h"] | wide["i"] << 16 | wide["j"] << 32 | wide["k"] << 48
    assert np.array_equal(got["f"], four)
    assert np.array_equal(got["g"], wide["h"] | 0xFFFE0000)
    assert np.array_equal(got["x"], wide["w"] | np.uint64(0x3F800000 << 32))
    assert np.array_equal(got["y"], wide["w"] << 32)


def test_packing_float_constants_that_live_in_registers() -> None:
    """A compiler moves a constant to a register first, then packs the register."""
    out = np.zeros(32, np.uint64)
    body = """
        mov.f32 %f1, 0f40490FDB;
        mov.f32 %f2, 0fC0000000;
        mov.b64 %rd1, {%f1, %f2};
        mad.wide.u32 %rd2, %t5, 8, %out;
        st.global.b64 [%rd2], %rd1;
    """
    assert (run(body, {"out": out}).arrays["out"] == 0xC0000000_40490FDB).all()


def test_unpacking() -> None:
    a = corner_integers(64, False)
    w = np.resize(corner_integers(32, False), a.shape)
    text = """
        mov.b64 {%d, %e}, %a;
        mov.b64 {%f, %g, %h, %i}, %a;
        mov.b32 {%j, %k}, %w;
        mov.b64 {_, %l}, %a;
    """
    results = dict.fromkeys("del", np.uint32) | dict.fromkeys("fghijk", np.uint16)
    got = lanewise(text, {"a": a, "w": w}, results)
    assert np.array_equal(got["d"], a.astype(np.uint32))
    assert np.array_equal(got["e"], (a >> 32).astype(np.uint32))
    for place, name in enumerate("fghi"):
        assert np.array_equal(got[name], (a >> np.uint64(16 * place)).astype(np.uint16))
    assert np.array_equal(got["j"], w.astype(np.uint16))
    assert np.array_equal(got["k"], (w >> 16).astype(np.uint16))
    assert np.array_equal(got["l"], got["e"])


def test_unpacking_over_its_own_source() -> None:
    a = corner_integers(32, False)
    text = ".reg .b16 %x; .reg .b16 %y; mov.b32 {%x, %y}, %a;\nmov.b32 %d, {%y, %x};"
    got = lanewise(text.replace("; ", ";\n"), {"a": a}, {"d": np.uint32})
    assert np.array_equal(got["d"], a >> 16 | a << 16)


def test_swap_through_a_third_register() -> None:
    """Copies are propagated: the swap must survive that."""
    a, b = np.arange(64, dtype=np.uint32), np.arange(64, dtype=np.uint32) + 1000
    body = """
        mad.wide.u32 %rd1, %t5, 4, %a;
        mad.wide.u32 %rd2, %t5, 4, %b;
        ld.global.u32 %r1, [%rd1];
        ld.global.u32 %r2, [%rd2];
        mov.u32 %r3, %r1;
        mov.u32 %r1, %r2;
        mov.u32 %r2, %r3;
        st.global.u32 [%rd1], %r1;
        st.global.u32 [%rd2], %r2;
    """
    got = run(body, {"a": a, "b": b}, block=(64,)).arrays
    assert np.array_equal(got["a"], b)
    assert np.array_equal(got["b"], a)


def test_guarded_move_of_a_constant_is_not_a_constant() -> None:
    out = np.zeros(32, np.uint32)
    body = """
        mov.u32 %r1, %t5;
        setp.lt.u32 %p1, %t5, 10;
        @%p1 mov.u32 %r1, 77;
        mad.wide.u32 %rd1, %t5, 4, %out;
        st.global.u32 [%rd1], %r1;
    """
    lane = np.arange(32)
    assert np.array_equal(run(body, {"out": out}).arrays["out"], np.where(lane < 10, 77, lane))


def test_constant_read_before_it_is_written_in_a_loop() -> None:
    """The register's only write is a constant, but the first round reads it unwritten: then 0."""
    out = np.zeros(32, np.uint32)
    body = """
        mov.u32 %r2, 0;
        mov.u32 %r3, 0;
        loop:
        add.u32 %r2, %r2, %r1;
        add.u32 %r1, %t5, 1;
        add.u32 %r3, %r3, 1;
        setp.lt.u32 %p1, %r3, 4;
        @%p1 bra loop;
        mad.wide.u32 %rd1, %t5, 4, %out;
        st.global.u32 [%rd1], %r2;
    """
    assert np.array_equal(run(body, {"out": out}).arrays["out"], 3 * (np.arange(32) + 1))


def test_state_space_addresses() -> None:
    """cvta to a space and back is the identity; isspacep tells the spaces apart."""
    out = np.zeros((32, 6), np.uint32)
    body = """
        .shared .align 4 .b32 s[32];
        .local .align 4 .b32 l[2];
        mov.u64 %rd1, s;
        cvta.shared.u64 %rd2, %rd1;
        mov.u64 %rd3, l;
        cvta.local.u64 %rd4, %rd3;
        cvta.global.u64 %rd5, %out;
        isspacep.shared %p1, %rd2;
        isspacep.local %p2, %rd4;
        isspacep.global %p3, %rd5;
        isspacep.global %p4, %rd2;
        isspacep.shared %p5, %rd5;
        cvta.to.shared.u64 %rd6, %rd2;
        setp.eq.u64 %p6, %rd6, %rd1;
        selp.u32 %r1, 1, 0, %p1;
        selp.u32 %r2, 1, 0, %p2;
        selp.u32 %r3, 1, 0, %p3;
        selp.u32 %r4, 1, 0, %p4;
        selp.u32 %r5, 1, 0, %p5;
        selp.u32 %r6, 1, 0, %p6;
        mad.wide.u32 %rd7, %t5, 24, %out;
        st.global.v2.u32 [%rd7], {%r1, %r2};
        st.global.v2.u32 [%rd7+8], {%r3, %r4};
        st.global.v2.u32 [%rd7+16], {%r5, %r6};
    """
    got = run(body, {"out": out}).arrays["out"]
    assert (got == [1, 1, 1, 0, 0, 1]).all()


def test_special_registers() -> None:
    names = [
        "%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y",
        "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid", "%warpid",
        "%lanemask_eq", "%lanemask_lt", "%lanemask_le", "%lanemask_gt", "%lanemask_ge",
    ]  # fmt: skip
    grid, block = (3, 2, 2), (5, 4, 3)
    threads, blocks = 60, 12
    out = np.zeros((blocks, threads, len(names)), np.uint32)
    lines = [
        "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z;",
        "mad.lo.u32 %r4, %r3, 2, %r2; mad.lo.u32 %r4, %r4, 3, %r1;",
        f"mad.lo.u32 %r5, %r4, {threads}, %t5; mad.wide.u32 %rd1, %r5, {4 * len(names)}, %out;",
    ]
    for k, name in enumerate(names):
        lines += [f"mov.u32 %r6, {name};", f"st.global.u32 [%rd1+{4 * k}], %r6;"]
    got = run("\n".join(lines), {"out": out}, grid=grid, block=block).arrays["out"]
    for z, y, x in np.ndindex(2, 2, 3):
        for tz, ty, tx in np.ndindex(3, 4, 5):
            thread = (tz * 4 + ty) * 5 + tx
            lane = thread % 32
            wanted = [tx, ty, tz, *block, x, y, z, *grid, lane, thread // 32]
            equal, below = 1 << lane, (1 << lane) - 1
            wanted += [equal, below, below | equal, 0xFFFFFFFF ^ below ^ equal, 0xFFFFFFFF ^ below]
            assert got[(z * 2 + y) * 3 + x, thread].tolist() == wanted


def test_clocks_do_not_run_backwards() -> None:
    out = np.zeros((32, 2), np.uint64)
    body = """
        mov.u64 %rd1, %clock64;
        add.u32 %r1, %t5, 1;
        mov.u64 %rd2, %clock64;
        mad.wide.u32 %rd3, %t5, 16, %out;
        st.global.v2.u64 [%rd3], {%rd1, %rd2};
    """
    got = run(body, {"out": out}).arrays["out"]
    assert (got[:, 0] <= got[:, 1]).all()


def test_dynamic_shared_memory_size() -> None:
    out = np.zeros(1, np.uint32)
    body = "mov.u32 %r1, %dynamic_smem_size;\nst.global.u32 [%out], %r1;"
    assert run(body, {"out": out}, shared_bytes=4096).arrays["out"][0] == 4096


def test_global_variables_and_constants() -> None:
    module = """
        .global .align 4 .u32 table[4] = {1, 2, 3, 0xffffffff};
        .const .align 8 .f64 pi = 0d400921FB54442D18;
        .global .align 8 .u64 pointer = table;
        .global .align 1 .b8 text[6] = {104, 101, 108, 108, 111};
        .global .align 4 .s16 pair[2] = {-1, 32767};
        .global .align 4 .f32 half = 0f3F000000;
    """
    out = np.zeros(8, np.uint64)
    body = """
        ld.global.u64 %rd1, [pointer];
        ld.global.u32 %r1, [%rd1+4];
        ld.global.u32 %r2, [table+12];
        ld.const.f64 %fd1, [pi];
        ld.global.s16 %r3, [pair];
        ld.global.u8 %r4, [text+4];
        ld.global.f32 %f1, [half];
        mov.b32 %r5, %f1;
        cvt.u64.u32 %rd2, %r1;
        cvt.u64.u32 %rd3, %r2;
        mov.b64 %rd4, %fd1;
        cvt.s64.s32 %rd5, %r3;
        cvt.u64.u32 %rd6, %r4;
        cvt.u64.u32 %rd7, %r5;
        st.global.v2.u64 [%out], {%rd2, %rd3};
        st.global.v2.u64 [%out+16], {%rd4, %rd5};
        st.global.v2.u64 [%out+32], {%rd6, %rd7};
    """
    got = run(body, {"out": out}, block=(1,), module=module).arrays["out"]
    wanted = [2, 0xFFFFFFFF, 0x400921FB54442D18, 2**64 - 1, ord("o"), 0x3F000000]
    assert got[:6].tolist() == wanted


def test_unknown_special_register_is_an_error() -> None:
    with pytest.raises(PtxError, match="line 11: register '%nonsense' is not declared"):
        run("mov.u32 %r1, %nonsense;", {"out": np.zeros(1)})


def test_the_package_opens_the_executor() -> None:
    assert gpu.open("ptx").name == "ptx"
