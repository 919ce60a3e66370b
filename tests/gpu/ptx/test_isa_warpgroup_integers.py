"""wgmma of 8-bit integers.  Source: PTX ISA 8.8, 9.7.15.5 (wgmma.mma_async, integer variant)."""

from __future__ import annotations

import numpy as np
import pytest
from lanes import run

N = 8


def tiled(matrix: np.ndarray) -> np.ndarray:
    """Rows of 32 bytes as core matrices of 8 rows by 16 bytes, those along K first."""
    return np.ascontiguousarray(matrix.reshape(-1, 8, 2, 16).transpose(0, 2, 1, 3))


def product(
    a: np.ndarray, b: np.ndarray, start: int, kinds: str, a_in_registers: bool, accumulates: bool
) -> np.ndarray:
    """a (64, 32) times b (8, 32) transposed, added to ``start``, as wgmma leaves it (64, 8)."""
    descriptor = "or.b64 %rd9, %rd9, 0x0000001000080000;"  # leading 128 bytes, stride 256
    if a_in_registers:
        left = "{%r10, %r11, %r12, %r13}"
        # Rows g and g + 8 of a warp's 16, then the next 16 bytes of K.
        words = a.view(np.uint32).reshape(4, 2, 8, 2, 4).transpose(3, 1, 0, 2, 4).reshape(4, 128)
    else:
        left = "%rd4"
        words = np.zeros((4, 128), np.uint32)
    body = f"""
        .shared .align 128 .b8 memory[2304];
        mad.wide.u32 %rd1, %t5, 16, %a; ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%rd1];
        mov.u64 %rd2, memory; mad.wide.u32 %rd3, %t5, 16, %rd2;
        st.shared.v4.u32 [%rd3], {{%r1, %r2, %r3, %r4}};
        setp.lt.u32 %p1, %t5, 16;
        mad.wide.u32 %rd1, %t5, 16, %b;
        @%p1 ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%rd1];
        @%p1 st.shared.v4.u32 [%rd3+2048], {{%r1, %r2, %r3, %r4}};
        mad.wide.u32 %rd1, %t5, 4, %words;
        ld.global.u32 %r10, [%rd1]; ld.global.u32 %r11, [%rd1+512];
        ld.global.u32 %r12, [%rd1+1024]; ld.global.u32 %r13, [%rd1+1536];
        bar.sync 0;
        shr.u64 %rd9, %rd2, 4; {descriptor} mov.u64 %rd4, %rd9; add.u64 %rd5, %rd9, 128;
        mov.u32 %r20, {start}; mov.u32 %r21, {start}; mov.u32 %r22, {start}; mov.u32 %r23, {start};
        setp.ne.u32 %p2, {int(accumulates)}, 0;
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n8k32{kinds} {{%r20, %r21, %r22, %r23}}, {left}, %rd5, %p2;
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;
        mad.wide.u32 %rd1, %t5, 16, %out; st.global.v4.u32 [%rd1], {{%r20, %r21, %r22, %r23}};
    """
    arrays = {"a": tiled(a), "b": tiled(b), "words": words, "out": np.zeros((128, 4), np.int32)}
    out = run(body, arrays, block=(128,)).arrays["out"]
    # Thread 32 w + 4 g + t has rows 16 w + g and 8 more, columns 2 t and 2 t + 1.
    return out.reshape(4, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4).reshape(64, N)


@pytest.mark.parametrize("a_in_registers", [False, True])
@pytest.mark.parametrize("b_kind", ["s8", "u8"])
@pytest.mark.parametrize("a_kind", ["s8", "u8"])
def test_products_of_bytes(a_kind: str, b_kind: str, a_in_registers: bool) -> None:
    dtypes = {"s8": np.int8, "u8": np.uint8}
    generator = np.random.default_rng(1)
    a, b = (
        generator.integers(0, 256, (rows, 32), np.uint8).view(dtypes[kind])
        for rows, kind in ((64, a_kind), (N, b_kind))
    )
    wanted = a.astype(np.int64) @ b.astype(np.int64).T
    kinds = f".s32.{a_kind}.{b_kind}"
    assert np.array_equal(product(a, b, 5, kinds, a_in_registers, True), wanted + 5)
    assert np.array_equal(product(a, b, 5, kinds, a_in_registers, False), wanted)


@pytest.mark.parametrize("start", [2**31 - 1000, -(2**31) + 1000])
def test_sums_wrap_or_saturate(start: int) -> None:
    generator = np.random.default_rng(2)
    a, b = (generator.integers(-128, 128, (rows, 32)).astype(np.int8) for rows in (64, N))
    exact = a.astype(np.int64) @ b.astype(np.int64).T + start
    beyond = (exact < -(2**31)) | (exact >= 2**31)
    assert beyond.any()
    assert not beyond.all()
    wrapped = product(a, b, start, ".s32.s8.s8", False, True)
    assert np.array_equal(wrapped, exact.astype(np.int32))
    saturated = product(a, b, start, ".satfinite.s32.s8.s8", False, True)
    assert np.array_equal(saturated, np.clip(exact, -(2**31), 2**31 - 1))
