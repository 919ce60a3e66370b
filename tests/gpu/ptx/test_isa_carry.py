"""Extended-precision arithmetic against Python's integers of any size."""

from __future__ import annotations

import numpy as np
import pytest
from lanes import corner_integers, device, lanewise, pairs, run

BITS = {"u32": 32, "s32": 32, "u64": 64, "s64": 64}


def unsigned(values: np.ndarray) -> list[int]:
    return [int(v) & ((1 << 8 * values.dtype.itemsize) - 1) for v in values]


@pytest.mark.parametrize("kind", BITS)
def test_sums_and_differences_of_two_words(kind: str) -> None:
    bits = BITS[kind]
    dtype = f"u{bits // 8}"
    a, b = pairs(corner_integers(bits, False, 4)[::2], corner_integers(bits, False, 4)[::3])
    c, d = a[::-1].copy(), np.roll(b, 7)
    text = f"""
        add.cc.{kind} %p, %a, %b;
        addc.cc.{kind} %q, %c, %d;
        addc.{kind} %r, %zero, %zero;
        sub.cc.{kind} %s, %a, %b;
        subc.cc.{kind} %t, %c, %d;
        subc.{kind} %u, %zero, %zero;
    """
    sources = {"a": a, "b": b, "c": c, "d": d, "zero": np.zeros_like(a)}
    got = lanewise(text, sources, dict.fromkeys("pqrstu", dtype))
    low, high, carry = (unsigned(got[n]) for n in "pqr")
    first, second, borrow = (unsigned(got[n]) for n in "stu")
    words = zip(*(unsigned(sources[n]) for n in "abcd"), strict=True)
    for k, (w, x, y, z) in enumerate(words):
        total = (y << bits | w) + (z << bits | x)
        assert low[k] | high[k] << bits | carry[k] << 2 * bits == total
        difference = (y << bits | w) - (z << bits | x)
        assert (first[k] | second[k] << bits) == difference % (1 << 2 * bits)
        assert borrow[k] == ((1 << bits) - 1 if difference < 0 else 0)


def test_128_bit_product() -> None:
    """The ISA's example: 64 x 64 bits from 32-bit words, as compilers write it."""
    a, b = pairs(corner_integers(64, False, 4)[::2], corner_integers(64, False, 4)[::3])
    text = """
        mov.b64 {%al, %ah}, %a;
        mov.b64 {%bl, %bh}, %b;
        mul.lo.u32 %r0, %al, %bl;
        mul.hi.u32 %r1, %al, %bl;
        mad.lo.cc.u32 %r1, %al, %bh, %r1;
        madc.hi.u32 %r2, %al, %bh, 0;
        mad.lo.cc.u32 %r1, %ah, %bl, %r1;
        madc.hi.cc.u32 %r2, %ah, %bl, %r2;
        madc.hi.u32 %r3, %ah, %bh, 0;
        mad.lo.cc.u32 %r2, %ah, %bh, %r2;
        addc.u32 %r3, %r3, 0;
        mov.b64 %d, {%r0, %r1};
        mov.b64 %e, {%r2, %r3};
    """
    registers = ".reg .b32 %al, %ah, %bl, %bh, %r<4>;"
    got = lanewise(registers + text.lstrip(), {"a": a, "b": b}, {"d": np.uint64, "e": np.uint64})
    for x, y, low, high in zip(*map(unsigned, (a, b, got["d"], got["e"])), strict=True):
        assert low | high << 64 == x * y


@pytest.mark.parametrize("kind", ["s32", "u64"])
def test_mad_with_carry_in(kind: str) -> None:
    bits = BITS[kind]
    signed = kind[0] == "s"
    a, b, c = pairs(*(corner_integers(bits, signed, 2)[::k] for k in (4, 5, 6)))
    text = f"""
        add.cc.{kind} %x, %ones, %c;
        madc.lo.cc.{kind} %d, %a, %b, %c;
        addc.{kind} %e, %zero, %zero;
        add.cc.{kind} %x, %ones, %c;
        madc.hi.{kind} %f, %a, %b, %c;
    """
    ones = np.full_like(a, -1 if signed else 2**64 - 1)
    sources = {"a": a, "b": b, "c": c, "ones": ones, "zero": np.zeros_like(a)}
    got = lanewise(text, sources, dict.fromkeys("xdef", a.dtype))
    modulus = 1 << bits
    d, e, f = (unsigned(got[n]) for n in "def")
    for k, (x, y, z) in enumerate(zip(a.tolist(), b.tolist(), c.tolist(), strict=True)):
        carry = z % modulus != 0  # of ones + c
        total = x * y % modulus + z % modulus + carry
        assert d[k] | e[k] << bits == total
        assert f[k] == ((x * y >> bits) + z + carry) % modulus


def test_the_carry_survives_what_lies_between() -> None:
    """Across blocks of code, and unlike in the lanes of a diverged warp."""
    body = """
        mov.u32 %r1, 0xffffffff;
        add.cc.u32 %r2, %r1, %t5;
        setp.lt.u32 %p1, %t5, 7;
        @%p1 bra join;
        mul.lo.u32 %r5, %t5, 3;
        xor.b32 %r5, %r5, 1;
        join:
        addc.u32 %r3, %t5, 0;
        mad.wide.u32 %rd1, %t5, 4, %x;
        st.global.u32 [%rd1], %r3;
    """
    got = run(body, {"x": np.zeros(32, np.uint32)}).arrays["x"]
    assert got.tolist() == [t + (t > 0) for t in range(32)]


def test_the_condition_code_after_a_difference() -> None:
    """addc reads it as a carry: 1 where there was no borrow.  NVRTC's own code relies on it."""
    a, b = pairs(corner_integers(32, False, 2), corner_integers(32, False, 2))
    text = "sub.cc.u32 %d, %a, %b;\naddc.u32 %e, %zero, %zero;"
    sources = {"a": a, "b": b, "zero": np.zeros_like(a)}
    got = lanewise(text, sources, {"d": np.uint32, "e": np.uint32})
    assert np.array_equal(got["d"], a - b)
    assert np.array_equal(got["e"], (a >= b).astype(np.uint32))


def test_128_bit_arithmetic_of_the_compiler() -> None:
    """Products, differences, quotients and remainders of __int128, as NVRTC makes them."""
    source = """
        typedef unsigned __int128 wide;
        extern "C" __global__ void k(const wide* a, const wide* b, wide* out) {
            wide x = a[threadIdx.x], y = b[threadIdx.x], *p = out + 4 * threadIdx.x;
            p[0] = x * y; p[1] = x - y; p[2] = x / y; p[3] = x % y;
        }
    """
    generator = np.random.default_rng(0)
    a = generator.integers(0, 1 << 63, (32, 2), np.uint64) * 2 + 1
    b = generator.integers(0, 1 << 63, (32, 2), np.uint64) * 2 + 1
    b[::2, 1] >>= generator.integers(1, 64, 16).astype(np.uint64)
    b[::4, 1] = 0
    dev = device()
    kernel = dev.compile(source, ("--device-int128",), arch="sm_90").kernel("k")
    out = dev.empty((32, 4, 2), np.uint64)
    kernel.launch((1,), (32,), [dev.array(a), dev.array(b), out])

    def numbers(words: np.ndarray) -> list[int]:
        return [int(low) | int(high) << 64 for low, high in words.reshape(-1, 2)]

    rows = zip(numbers(a), numbers(b), strict=True)
    wanted = [v % (1 << 128) for x, y in rows for v in (x * y, x - y, x // y, x % y)]
    assert numbers(out.to_numpy()) == wanted
