"""128-bit registers, vector atomics, st.bulk and modifiers in other orders than the ISA's."""

from __future__ import annotations

import numpy as np
import pytest
from lanes import run

from simkit.errors import LaunchError, MemoryAccessError, PtxError


def test_moves_loads_and_stores_of_128_bits() -> None:
    source = np.random.default_rng(1).integers(0, 1 << 63, (32, 2), np.uint64)
    body = """
        .reg .b128 %q<4>;
        mad.wide.u32 %rd1, %t5, 16, %src;
        mad.wide.u32 %rd2, %t5, 16, %dst;
        ld.global.b128 %q1, [%rd1];
        mov.b128 {%rd3, %rd4}, %q1;
        mov.b128 %q2, {%rd4, %rd3};
        setp.lt.u32 %p1, %t5, 9;
        @%p1 mov.b128 %q2, %q1;
        st.global.b128 [%rd2], %q2;
    """
    got = run(body, {"src": source, "dst": np.zeros_like(source)}).arrays["dst"]
    assert np.array_equal(got[:9], source[:9])
    assert np.array_equal(got[9:], source[9:, ::-1])


@pytest.mark.parametrize("space", [".global", ".shared", ""])
def test_exchange_of_128_bits(space: str) -> None:
    """Every lane puts its value into one place and gets its predecessor's."""
    body = f"""
        .shared .align 16 .b8 pool[16];
        .reg .b128 %q<4>; .reg .b64 %place;
        mov.b64 %place, {"pool" if space == ".shared" else "%one"};
        cvt.u64.u32 %rd1, %t5;
        add.u64 %rd2, %rd1, 1000;
        mov.b64 %rd5, 77;
        st{space}.v2.b64 [%place], {{%rd5, %rd5}};
        mov.b128 %q1, {{%rd1, %rd2}};
        atom{space}.exch.b128 %q2, [%place], %q1;
        mov.b128 {{%rd3, %rd4}}, %q2;
        mad.wide.u32 %rd6, %t5, 16, %x;
        st.global.v2.b64 [%rd6], {{%rd3, %rd4}};
    """
    arrays = {"x": np.zeros((32, 2), np.uint64), "one": np.zeros(2, np.uint64)}
    got = run(body, arrays).arrays["x"]
    before = [(77, 77), *((k, k + 1000) for k in range(31))]
    assert [tuple(row) for row in got.tolist()] == before


def test_compare_and_swap_of_128_bits() -> None:
    """Only where both halves agree; NaN-like bits and zeros of either sign are plain bits."""
    memory = np.array([[1, 2], [1, 3], [0xFFF8 << 48, 0x7FF8 << 48], [1 << 63, 0]], np.uint64)
    expected = np.array([[1, 2], [1, 2], [0xFFF8 << 48, 0x7FF8 << 48], [0, 0]], np.uint64)
    body = """
        .reg .b128 %q<4>;
        setp.ge.u32 %p1, %t5, 4;
        @%p1 bra done;
        mad.wide.u32 %rd1, %t5, 16, %memory;
        mad.wide.u32 %rd2, %t5, 16, %expected;
        mad.wide.u32 %rd3, %t5, 16, %old;
        ld.global.b128 %q1, [%rd2];
        mov.b64 %rd4, 55;
        mov.b128 %q2, {%rd4, %rd4};
        atom.relaxed.gpu.global.cas.b128 %q3, [%rd1], %q1, %q2;
        st.global.b128 [%rd3], %q3;
        done:
    """
    arrays = {"memory": memory, "expected": expected, "old": np.zeros_like(memory)}
    got = run(body, arrays).arrays
    assert np.array_equal(got["old"], memory)
    swapped = np.array([[55, 55], memory[1], [55, 55], memory[3]], np.uint64)
    assert np.array_equal(got["memory"], swapped)


@pytest.mark.parametrize(("kind", "width"), [("f32", 2), ("f32", 4), ("f16x2", 4), ("bf16", 8)])
def test_vector_atomics(kind: str, width: int) -> None:
    """Element by element; lanes one after the other."""
    half = kind != "f32"
    size = {"f32": 4, "f16x2": 4, "bf16": 2}[kind]
    total = np.zeros(16, np.uint8)
    register = "%r" if size == 4 else "%h"
    names = [f"{register}{10 + k}" for k in range(width)]
    old = [f"{register}{20 + k}" for k in range(width)]
    one = {"f32": "0x3F800000", "f16x2": "0x3C003C00", "bf16": "0x3F80"}[kind]
    moves = "\n".join(f"mov.b{8 * size} {n}, {one};" for n in names)
    stores = "\n".join(f"st.global.b{8 * size} [%rd1+{size * k}], {n};" for k, n in enumerate(old))
    noftz = ".noftz" if half else ""
    body = f"""
        {moves}
        atom.global.add{noftz}.v{width}.{kind}
            {{{", ".join(old)}}}, [%total], {{{", ".join(names)}}};
        red.global.v{width}.{kind}.add{noftz} [%total], {{{", ".join(names)}}};
        mad.wide.u32 %rd1, %t5, {size * width}, %x;
        {stores}
    """
    arrays = {"total": total, "x": np.zeros(32 * size * width, np.uint8)}
    got = run(body, arrays).arrays

    def numbers(raw: np.ndarray) -> np.ndarray:
        if kind == "bf16":
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return raw.view(np.float32 if kind == "f32" else np.float16)

    elements = size * width // numbers(total).itemsize if kind != "bf16" else width
    assert numbers(got["total"])[:elements].tolist() == [64] * elements
    assert np.array_equal(
        numbers(got["x"]).reshape(32, elements), np.arange(32)[:, None].repeat(elements, 1)
    )


def test_vectors_of_atomics_are_aligned() -> None:
    body = "add.u64 %rd1, %x, 4;\natom.global.add.v2.f32 {%f1, %f2}, [%rd1], {%f3, %f4};"
    with pytest.raises(MemoryAccessError, match="not a multiple of 8"):
        run(body, {"x": np.zeros(8, np.float32)})
    with pytest.raises(PtxError, match="there are no shared atomics of v2 of f32"):
        run("atom.shared.add.v2.f32 {%f1, %f2}, [%x], {%f3, %f4};", {"x": np.zeros(8, np.float32)})


def test_bulk_zeros() -> None:
    body = """
        .shared .align 16 .b8 pool[256];
        mad.lo.u32 %r1, %t5, 8, 0; mov.u32 %r2, pool; add.u32 %r1, %r1, %r2;
        mov.b64 %rd1, -1;
        st.shared.b64 [%r1], %rd1;
        bar.sync 0;
        setp.eq.u32 %p1, %t5, 3;
        @%p1 st.bulk.weak.shared::cta [%r2+16], 40, 0;
        bar.sync 0;
        ld.shared.b64 %rd2, [%r1];
        mad.wide.u32 %rd3, %t5, 8, %x;
        st.global.b64 [%rd3], %rd2;
    """
    got = run(body, {"x": np.zeros(32, np.uint64)}, target="sm_100").arrays["x"]
    assert [k for k in range(32) if got[k] == 0] == [2, 3, 4, 5, 6]
    with pytest.raises(LaunchError, match=r"st.bulk of 12 bytes; it takes a multiple of 8"):
        run(body.replace(" 40,", " 12,"), {"x": np.zeros(32, np.uint64)}, target="sm_100")
    with pytest.raises(PtxError, match="bulk writes zeros only"):
        run(body.replace("40, 0", "40, 1"), {"x": np.zeros(32, np.uint64)}, target="sm_100")


def test_modifiers_in_other_orders() -> None:
    """Assemblers do not mind the order; two types keep theirs."""
    body = """
        ld.u32.global %r1, [%x];
        cvt.f32.rn.s32 %f1, %t5;
        add.f32.rn %f1, %f1, 0f3F000000;
        cvt.s32.rmi.f32 %r2, %f1;
        atom.global.cta.add.relaxed.u32 %r3, [%x], 1;
        mad.wide.u32 %rd1, %t5, 4, %y;
        st.u32.global.weak [%rd1], %r2;
    """
    got = run(body, {"x": np.zeros(1, np.uint32), "y": np.zeros(32, np.uint32)}).arrays
    assert got["x"].tolist() == [32]
    assert got["y"].tolist() == list(range(32))


def test_two_types_do_not_change_places() -> None:
    with pytest.raises(PtxError, match="instructions that the executor does not know"):
        run("cvt.f32.s32 %f1, %r1;", {"x": np.zeros(1)})
