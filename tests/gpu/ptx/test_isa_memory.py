"""Loads and stores of every width and space, atomics, locks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from lanes import corner_integers, run

from gpu.ptx.launch import Options

LANE = np.arange(32)
QUICK = Options(budget=200_000)


@pytest.mark.parametrize(
    "kind", ["u8", "s8", "b8", "u16", "s16", "u32", "s32", "f32", "b32", "u64", "f64"]
)
def test_load_and_store_of_each_type(kind: str) -> None:
    size = int(kind[1:]) // 8
    source = corner_integers(8 * size, False)[:32]
    register = {1: "h1", 2: "h1", 4: "r1", 8: "rd1"}[size]
    body = f"""
        mad.wide.u32 %rd2, %t5, {size}, %src;
        mad.wide.u32 %rd3, %t5, {size}, %dst;
        ld.global.{kind} %{register}, [%rd2];
        st.global.{kind} [%rd3], %{register};
    """
    got = run(body, {"src": source, "dst": np.zeros_like(source)}, block=(len(source),)).arrays
    assert np.array_equal(got["dst"], source)


@pytest.mark.parametrize("kind", ["s8", "u8", "s16", "u16", "s32", "u32"])
def test_loads_extend_into_wide_registers(kind: str) -> None:
    """Signed types by their sign, others with zeros (PTX ISA, ld)."""
    dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")
    source = corner_integers(8 * dtype.itemsize, dtype.kind == "i")[:32]
    count = len(source)
    body = f"""
        mad.wide.u32 %rd2, %t5, {dtype.itemsize}, %src;
        mad.wide.u32 %rd3, %t5, 8, %dst;
        ld.global.{kind} %rd1, [%rd2];
        st.global.b64 [%rd3], %rd1;
    """
    got = run(body, {"src": source, "dst": np.zeros(count, np.int64)}, block=(count,)).arrays
    assert np.array_equal(got["dst"], source.astype(np.int64))


def test_stores_take_the_low_bits_of_wide_registers() -> None:
    source = corner_integers(64, False)[:32]
    count = len(source)
    body = """
        mad.wide.u32 %rd2, %t5, 8, %src;
        ld.global.b64 %rd1, [%rd2];
        cvt.u64.u32 %rd5, %t5;
        add.u64 %rd3, %dst, %rd5;
        st.global.u8 [%rd3], %rd1;
        mad.wide.u32 %rd4, %t5, 2, %half;
        st.global.u16 [%rd4], %rd1;
    """
    arrays = {"src": source, "dst": np.zeros(count, np.uint8), "half": np.zeros(count, np.uint16)}
    got = run(body, arrays, block=(count,)).arrays
    assert np.array_equal(got["dst"], source.astype(np.uint8))
    assert np.array_equal(got["half"], source.astype(np.uint16))


VECTORS = [("v2", 1), ("v4", 1), ("v2", 2), ("v4", 2), ("v2", 4), ("v4", 4), ("v2", 8)]
SPACES = ["global", "shared", "local", "generic"]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(("vector", "size"), [("", 1), ("", 2), ("", 4), ("", 8), *VECTORS])
def test_vectors_in_each_space(vector: str, size: int, space: str) -> None:
    """Through memory of the space and back, elements reversed on the way out."""
    count = int(vector[1:] or 1)
    total = size * count
    prefix = {1: "h", 2: "h", 4: "r", 8: "rd"}[size]
    names = [f"%{prefix}{10 + k}" for k in range(count)]
    kind = f"{'.' + vector if vector else ''}.b{8 * size}"

    def operand(items: list[str]) -> str:
        return f"{{{', '.join(items)}}}" if vector else items[0]

    place = {
        "global": "mad.wide.u32 %rd3, %t5, 16, %scratch;",
        "shared": "mov.u64 %rd3, pool; mad.wide.u32 %rd3, %t5, 16, %rd3;",
        "local": "mov.u64 %rd3, stack;",
        "generic": "mov.u64 %rd3, pool; cvta.shared.u64 %rd3, %rd3;"
        " mad.wide.u32 %rd3, %t5, 16, %rd3;",
    }[space]
    suffix = "" if space == "generic" else f".{space}"
    body = f"""
        .shared .align 16 .b8 pool[1024];
        .local .align 16 .b8 stack[16];
        mad.wide.u32 %rd1, %t5, {total}, %src;
        mad.wide.u32 %rd2, %t5, {total}, %dst;
        {place}
        ld.global{kind} {operand(names)}, [%rd1];
        st{suffix}{kind} [%rd3], {operand(names)};
        ld{suffix}{kind} {operand(names)}, [%rd3+0];
        st.global{kind} [%rd2], {operand(names[::-1])};
    """
    generator = np.random.default_rng(total)
    source = generator.integers(0, 1 << 8, (64, count, size), np.uint8)
    arrays = {"src": source, "dst": np.zeros_like(source), "scratch": np.zeros(1024, np.uint8)}
    got = run(body, arrays, block=(64,)).arrays["dst"]
    assert np.array_equal(got, source[:, ::-1])


def test_256_bit_vectors() -> None:
    source = np.arange(32 * 8, dtype=np.uint32).reshape(32, 8)
    names = ", ".join(f"%r{k}" for k in range(8))
    body = f"""
        mad.wide.u32 %rd1, %t5, 32, %src;
        mad.wide.u32 %rd2, %t5, 32, %dst;
        ld.global.v8.b32 {{{names}}}, [%rd1];
        st.global.v8.b32 [%rd2], {{{names}}};
    """
    arrays = {"src": source, "dst": np.zeros_like(source)}
    got = run(body, arrays, target="sm_100").arrays["dst"]
    assert np.array_equal(got, source)


def test_offsets_and_negative_offsets() -> None:
    source = np.arange(64, dtype=np.uint32)
    body = """
        mad.wide.u32 %rd1, %t5, 4, %src;
        mad.wide.u32 %rd2, %t5, 4, %dst;
        add.u64 %rd1, %rd1, 128;
        ld.global.u32 %r1, [%rd1+-64];
        ld.global.u32 %r2, [%rd1-128];
        sub.u32 %r3, %r1, %r2;
        st.global.u32 [%rd2], %r3;
    """
    got = run(body, {"src": source, "dst": np.zeros(32, np.uint32)}).arrays["dst"]
    assert (got == 16).all()


def test_cache_hints_change_nothing() -> None:
    source = np.arange(128, dtype=np.uint32)
    loads = [
        "ld.global.nc.u32", "ld.global.ca.u32", "ld.global.cg.u32", "ld.volatile.global.u32",
        "ld.relaxed.gpu.global.u32", "ld.acquire.sys.global.u32", "ld.weak.global.u32",
        "ld.global.nc.L1::no_allocate.L2::128B.u32", "ld.global.L1::evict_last.u32",
        "ld.acquire.cta.global.u32", "ldu.global.u32",
    ]  # fmt: skip
    lines = ["mad.wide.u32 %rd1, %t5, 4, %src;", "mov.u32 %r2, 0;"]
    for load in loads:
        lines += [f"{load} %r1, [%rd1];", "add.u32 %r2, %r2, %r1;"]
    stores = ["st.global.wb.u32", "st.volatile.global.u32", "st.release.gpu.global.u32"]
    stores += ["st.relaxed.sys.global.u32", "st.global.cs.u32", "st.weak.global.u32"]
    lines.append("mad.wide.u32 %rd2, %t5, 4, %dst;")
    lines += [f"{store} [%rd2+{512 * k}], %r2;" for k, store in enumerate(stores)]
    dst = np.zeros((len(stores), 128), np.uint32)
    got = run("\n".join(lines), {"src": source, "dst": dst}, block=(128,)).arrays["dst"]
    assert (got == source * len(loads)).all()


def test_generic_accesses_to_several_spaces_at_once() -> None:
    """Lanes of one instruction point into global, shared and local memory."""
    source = np.arange(32, dtype=np.uint32) + 100
    body = """
        .shared .align 4 .b32 pool[32];
        .local .align 4 .b32 own[1];
        mad.wide.u32 %rd1, %t5, 4, %src;
        mov.u64 %rd2, pool; cvta.shared.u64 %rd2, %rd2; mad.wide.u32 %rd2, %t5, 4, %rd2;
        mov.u64 %rd3, own; cvta.local.u64 %rd3, %rd3;
        add.u32 %r1, %t5, 200; st.shared.u32 [pool], %r1; mov.u64 %rd5, pool;
        mad.wide.u32 %rd6, %t5, 4, %rd5; st.shared.u32 [%rd6], %r1;
        add.u32 %r2, %t5, 300; st.local.u32 [own], %r2;
        rem.u32 %r3, %t5, 3;
        setp.eq.u32 %p1, %r3, 0; setp.eq.u32 %p2, %r3, 1;
        selp.b64 %rd4, %rd1, %rd2, %p1; selp.b64 %rd4, %rd3, %rd4, %p2;
        ld.u32 %r4, [%rd4];
        add.u32 %r5, %r4, 1000;
        st.u32 [%rd4], %r5;
        ld.shared.u32 %r6, [%rd6];
        ld.local.u32 %r7, [own];
        mad.wide.u32 %rd7, %t5, 12, %dst;
        st.global.u32 [%rd7], %r4; st.global.u32 [%rd7+4], %r6; st.global.u32 [%rd7+8], %r7;
    """
    got = run(body, {"src": source, "dst": np.zeros((32, 3), np.uint32)}).arrays
    lane, kind = LANE, LANE % 3
    loaded = np.select([kind == 0, kind == 1], [lane + 100, lane + 300], lane + 200)
    assert np.array_equal(got["dst"][:, 0], loaded)
    assert np.array_equal(got["src"], np.where(kind == 0, lane + 1100, lane + 100))
    assert np.array_equal(got["dst"][:, 1], np.where(kind == 2, lane + 1200, lane + 200))
    assert np.array_equal(got["dst"][:, 2], np.where(kind == 1, lane + 1300, lane + 300))


def test_parameters_by_register_address_and_by_vector() -> None:
    """A by-value struct: its fields through constant and computed addresses."""
    fields = np.zeros(
        (),
        [("a", np.uint32), ("b", np.int16), ("c", np.int8), ("d", np.float64), ("e", np.uint32, 4)],
    )
    fields["a"], fields["b"], fields["c"], fields["d"] = 7, -2, -3, 2.5
    fields["e"] = [10, 20, 30, 40]
    module = ""
    from lanes import HEADER, device

    aligned = np.dtype({
        "names": ["a", "b", "c", "d", "e"],
        "formats": [np.uint32, np.int16, np.int8, np.float64, (np.uint32, 4)],
        "offsets": [0, 4, 6, 8, 16], "itemsize": 32,
    })  # fmt: skip
    packed = np.zeros((), aligned)
    for name in aligned.names or ():
        packed[name] = fields[name]
    text = (
        HEADER
        + module
        + """
    .visible .entry k(.param .align 16 .b8 s[32], .param .u64 out) {
        .reg .b32 %r<16>; .reg .b64 %rd<8>; .reg .f64 %d; .reg .b16 %h<4>;
        ld.param.u64 %rd1, [out];
        ld.param.u32 %r1, [s];
        ld.param.s16 %r2, [s+4];
        ld.param.s8 %r3, [s+6];
        ld.param.f64 %d, [s+8];
        cvt.rni.s32.f64 %r4, %d;
        ld.param.v4.u32 {%r5, %r6, %r7, %r8}, [s+16];
        mov.u32 %r9, %tid.x;
        mov.u64 %rd2, s;
        mad.wide.u32 %rd3, %r9, 4, %rd2;
        ld.param.u32 %r10, [%rd3+16];
        st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4};
        st.global.v4.u32 [%rd1+16], {%r5, %r6, %r7, %r8};
        mad.wide.u32 %rd4, %r9, 4, %rd1;
        st.global.u32 [%rd4+32], %r10;
        ret;
    }"""
    )
    out = device().array(np.zeros(12, np.int32))
    device().load(text).kernel("k").launch((1,), (4,), [packed[()], out])
    assert out.to_numpy().tolist() == [7, -2, -3, 2, 10, 20, 30, 40, 10, 20, 30, 40]


def sequential(
    function: Callable[[int, int], int], start: int, values: list[int], bits: int, signed: bool
) -> tuple[list[int], int]:
    """What each lane gets and what remains if lanes take turns in order."""
    old, current = [], start
    for value in values:
        old.append(current)
        current = function(current, value) & ((1 << bits) - 1)
        if signed and current >> (bits - 1):
            current -= 1 << bits
    return old, current


ATOMICS: dict[str, Callable[[int, int], int]] = {
    "add": lambda o, v: o + v,
    "and": lambda o, v: o & v,
    "or": lambda o, v: o | v,
    "xor": lambda o, v: o ^ v,
    "min": min,
    "max": max,
    "exch": lambda _, v: v,
    "inc": lambda o, v: 0 if o >= v else o + 1,
    "dec": lambda o, v: v if o == 0 or o > v else o - 1,
}
ATOMIC_TYPES = {
    "add": ["u32", "s32", "u64"],
    "and": ["b32", "b64"],
    "or": ["b32", "b64"],
    "xor": ["b32", "b64"],
    "min": ["u32", "s32", "u64", "s64"],
    "max": ["u32", "s32", "u64", "s64"],
    "exch": ["b32", "b64"],
    "inc": ["u32"],
    "dec": ["u32"],
}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(("name", "kind"), [(n, k) for n, ks in ATOMIC_TYPES.items() for k in ks])
def test_contended_atomics(name: str, kind: str, space: str) -> None:
    """A warp at one address and at four: old values and the final one, in lane order."""
    size, signed = int(kind[1:]) // 8, kind[0] == "s"
    dtype = np.dtype(f"{'i' if signed else 'u'}{size}")
    values = np.resize(corner_integers(8 * size, signed, 4)[::3], 32)
    if name in ("inc", "dec"):
        values = (LANE % 5 + 2).astype(np.uint32)
    starts = np.array([5, 0, 3, 1, 9], dtype)
    register = "r" if size == 4 else "rd"
    fill = "" if space == "global" else f"""
        setp.lt.u32 %p1, %t5, 5;
        mad.wide.u32 %rd10, %t5, {size}, %cells;
        @%p1 ld.global.b{8 * size} %{register}9, [%rd10];
        mov.u64 %rd11, pool; mad.wide.u32 %rd12, %t5, {size}, %rd11;
        @%p1 st.shared.b{8 * size} [%rd12], %{register}9;
        bar.sync 0;
    """  # fmt: skip
    body = f"""
        .shared .align 8 .b8 pool[64];
        {fill}
        mad.wide.u32 %rd1, %t5, {size}, %src;
        ld.global.b{8 * size} %{register}1, [%rd1];
        and.b32 %r20, %t5, 3; add.u32 %r20, %r20, 1;
        mov.u64 %rd2, {"%cells" if space == "global" else "pool"};
        mad.wide.u32 %rd3, %r20, {size}, %rd2;
        atom.{space}.{name}.{kind} %{register}2, [%rd2], %{register}1;
        atom.{space}.{name}.{kind} %{register}3, [%rd3], %{register}1;
        mad.wide.u32 %rd4, %t5, {2 * size}, %old;
        st.global.b{8 * size} [%rd4], %{register}2;
        st.global.b{8 * size} [%rd4+{size}], %{register}3;
        {"" if space == "global" else "bar.sync 0;"}
        {"" if space == "global" else f"@%p1 ld.shared.b{8 * size} %{register}9, [%rd12];"}
        {"" if space == "global" else f"@%p1 st.global.b{8 * size} [%rd10], %{register}9;"}
    """
    arrays = {"src": values.astype(dtype), "cells": starts, "old": np.zeros((32, 2), dtype)}
    got = run(body, arrays).arrays
    numbers = values.astype(dtype).tolist()
    old, last = sequential(ATOMICS[name], int(starts[0]), numbers, 8 * size, signed)
    assert got["old"][:, 0].tolist() == old
    assert int(got["cells"][0]) == last
    for cell in range(4):
        part = numbers[cell::4]
        old, last = sequential(ATOMICS[name], int(starts[cell + 1]), part, 8 * size, signed)
        assert got["old"][cell::4, 1].tolist() == old
        assert int(got["cells"][cell + 1]) == last


def test_float_atomics_add_in_lane_order() -> None:
    generator = np.random.default_rng(1)
    values = generator.normal(size=32).astype(np.float32)
    body = """
        mad.wide.u32 %rd1, %t5, 4, %src;
        ld.global.f32 %f1, [%rd1];
        atom.global.add.f32 %f2, [%sum], %f1;
        cvt.f64.f32 %fd1, %f1;
        red.global.add.f64 [%wide], %fd1;
    """
    arrays = {"src": values, "sum": np.zeros(1, np.float32), "wide": np.zeros(1)}
    got = run(body, arrays).arrays
    total = np.float32(0)
    for value in values:
        total = np.float32(total + value)
    assert got["sum"][0] == total
    assert got["wide"][0] == np.cumsum(values.astype(np.float64))[-1]


def test_reductions_without_a_result_under_a_guard() -> None:
    body = """
        setp.lt.u32 %p1, %t5, 20;
        @%p1 red.global.add.u32 [%sum], %t5;
        @!%p1 red.global.max.s32 [%sum+4], %t5;
        red.relaxed.gpu.global.or.b32 [%sum+8], %t5;
        red.shared.add.u32 [pool], 1;
        bar.sync 0;
        ld.shared.u32 %r1, [pool];
        st.global.u32 [%sum+12], %r1;
    """
    body = ".shared .align 4 .b32 pool[1]; st.shared.u32 [pool], 0; bar.sync 0;" + body
    got = run(body, {"sum": np.zeros(4, np.int32)}, block=(96,)).arrays["sum"]
    assert got.tolist() == [sum(range(20)), 95, 127, 96]


@pytest.mark.parametrize("bits", [32, 64])
def test_compare_and_swap(bits: int) -> None:
    """Lane k swaps k for k + 1: each lane finds what the one before it left."""
    register = "r" if bits == 32 else "rd"
    widen = "mov.u32 %r1, %t5;" if bits == 32 else "cvt.u64.u32 %rd1, %t5;"
    body = f"""
        {widen}
        add.u{bits} %{register}2, %{register}1, 1;
        atom.global.cas.b{bits} %{register}3, [%cell], %{register}1, %{register}2;
        mad.wide.u32 %rd9, %t5, {bits // 8}, %old;
        st.global.b{bits} [%rd9], %{register}3;
    """
    dtype = np.dtype(f"u{bits // 8}")
    got = run(body, {"cell": np.zeros(1, dtype), "old": np.zeros(32, dtype)}).arrays
    assert got["cell"][0] == 32
    assert got["old"].tolist() == list(range(32))


def test_cas_that_fails_leaves_the_cell() -> None:
    body = "atom.global.cas.b32 %r1, [%cell], 7, 9;\nst.global.u32 [%cell+4], %r1;"
    assert run(body, {"cell": np.array([5, 0], np.uint32)}).arrays["cell"].tolist() == [5, 5]


def test_compare_and_swap_loop_for_a_float_maximum() -> None:
    """The usual loop around cas: every lane of many blocks gets its turn."""
    generator = np.random.default_rng(7)
    values = generator.normal(size=8 * 64).astype(np.float32)
    body = """
        mov.u32 %r9, %ctaid.x; mad.lo.u32 %r9, %r9, 64, %t5;
        mad.wide.u32 %rd1, %r9, 4, %src;
        ld.global.f32 %f1, [%rd1];
        ld.global.u32 %r1, [%cell];
        again:
        mov.b32 %f2, %r1;
        max.f32 %f3, %f1, %f2;
        mov.b32 %r2, %f3;
        atom.global.cas.b32 %r3, [%cell], %r1, %r2;
        setp.ne.u32 %p1, %r3, %r1;
        mov.u32 %r1, %r3;
        @%p1 bra again;
        atom.global.add.u32 %r4, [%cell+4], 1;
    """
    cell = np.array([np.float32(-100).view(np.uint32), 0], np.uint32)
    got = run(body, {"src": values, "cell": cell}, grid=(8,), block=(64,)).arrays["cell"]
    assert got[0] == values.max().view(np.uint32)
    assert got[1] == len(values)


LOCK = """
    spin:
    atom.global.cas.b32 %r1, [%lock], 0, 1;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra spin;
    ld.volatile.global.u32 %r2, [%lock+4];
    add.u32 %r2, %r2, 1;
    st.volatile.global.u32 [%lock+4], %r2;
    membar.gl;
    atom.global.exch.b32 %r3, [%lock], 0;
"""


def test_spin_lock_between_blocks() -> None:
    """One thread of each block; the others wait at the barrier."""
    body = f"""
        setp.ne.u32 %p2, %t5, 0;
        @%p2 bra done;
        {LOCK}
        done:
        bar.sync 0;
    """
    got = run(
        body, {"lock": np.zeros(2, np.uint32)}, grid=(40,), block=(64,), options=QUICK
    ).arrays["lock"]
    assert got.tolist() == [0, 40]


def test_spin_lock_between_lanes_of_a_warp() -> None:
    """The lane that has the lock must get to release it while the others spin."""
    got = run(LOCK, {"lock": np.zeros(2, np.uint32)}, grid=(2,), block=(32,), options=QUICK).arrays[
        "lock"
    ]
    assert got.tolist() == [0, 64]


def test_local_memory_is_each_threads_own() -> None:
    """An array with computed indices: written in one order, read in another."""
    body = """
        .local .align 4 .b8 stack[64];
        mov.u64 %rd1, stack;
        mov.u32 %r1, 0;
        fill:
        mad.wide.u32 %rd2, %r1, 4, %rd1;
        mad.lo.u32 %r2, %t5, 100, %r1;
        st.local.u32 [%rd2], %r2;
        add.u32 %r1, %r1, 1;
        setp.lt.u32 %p1, %r1, 16;
        @%p1 bra fill;
        and.b32 %r3, %t5, 15;
        mad.wide.u32 %rd3, %r3, 4, %rd1;
        ld.local.u32 %r4, [%rd3];
        mad.wide.u32 %rd4, %t5, 4, %out;
        st.global.u32 [%rd4], %r4;
    """
    got = run(body, {"out": np.zeros(96, np.uint32)}, block=(96,)).arrays["out"]
    thread = np.arange(96)
    assert np.array_equal(got, thread * 100 + thread % 16)


def test_shared_memory_is_each_blocks_own() -> None:
    body = """
        .shared .align 4 .b32 cell[64];
        mov.u32 %r1, %ctaid.x;
        mov.u64 %rd1, cell; mad.wide.u32 %rd2, %t5, 4, %rd1;
        mad.lo.u32 %r2, %r1, 1000, %t5;
        st.shared.u32 [%rd2], %r2;
        bar.sync 0;
        sub.u32 %r3, 63, %t5; mad.wide.u32 %rd3, %r3, 4, %rd1;
        ld.shared.u32 %r4, [%rd3];
        mad.lo.u32 %r5, %r1, 64, %t5; mad.wide.u32 %rd4, %r5, 4, %out;
        st.global.u32 [%rd4], %r4;
    """
    got = run(body, {"out": np.zeros((5, 64), np.uint32)}, grid=(5,), block=(64,)).arrays["out"]
    assert np.array_equal(got, np.arange(5)[:, None] * 1000 + 63 - np.arange(64))


def test_unwritten_memory_shows() -> None:
    """Shared and local memory that nobody wrote hold NaN in every format."""
    body = """
        .shared .align 4 .b32 cell[1];
        .local .align 4 .b32 own[1];
        ld.shared.f32 %f1, [cell];
        ld.local.f32 %f2, [own];
        st.global.f32 [%out], %f1;
        st.global.f32 [%out+4], %f2;
    """
    assert np.isnan(run(body, {"out": np.zeros(2, np.float32)}, block=(1,)).arrays["out"]).all()
