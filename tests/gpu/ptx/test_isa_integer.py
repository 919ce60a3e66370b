"""Integer arithmetic, logic, shifts, bit fields and comparisons against Python's integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from lanes import corner_integers, lanewise, pairs

TYPES = ["u16", "s16", "u32", "s32", "u64", "s64"]
Ints = list[int]


def dtype_of(kind: str) -> np.dtype:
    return np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")


def wrapped(values: Ints, dtype: np.dtype) -> np.ndarray:
    """Python integers modulo the type's range."""
    bits = 8 * dtype.itemsize
    low = np.array([v & ((1 << bits) - 1) for v in values], f"u{dtype.itemsize}")
    return low.view(dtype)


def expect(function: Callable[..., int], dtype: np.dtype, *arrays: np.ndarray) -> np.ndarray:
    """``function`` of each tuple of Python integers, wrapped to ``dtype``."""
    return wrapped(
        [function(*row) for row in zip(*(a.tolist() for a in arrays), strict=True)], dtype
    )


def corners(kind: str, random: int = 12) -> np.ndarray:
    return corner_integers(int(kind[1:]), kind[0] == "s", random)


def truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def quotient(a: int, b: int) -> int:
    # Division by zero is left to the machine by the ISA; NVIDIA's give all ones.
    return -1 if b == 0 else truncated(a, b)


def remainder(a: int, b: int) -> int:
    return a if b == 0 else a - truncated(a, b) * b


@pytest.mark.parametrize("kind", TYPES)
def test_two_operands(kind: str) -> None:
    bits, dtype = int(kind[1:]), dtype_of(kind)
    a, b = pairs(corners(kind), corners(kind))
    operations: dict[str, Callable[[int, int], int]] = {
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "mul.lo": lambda x, y: x * y,
        "mul.hi": lambda x, y: (x * y) >> bits,
        "div": quotient,
        "rem": remainder,
        "min": min,
        "max": max,
    }
    text = "\n".join(f"{op}.{kind} %d{k}, %a, %b;" for k, op in enumerate(operations))
    got = lanewise(text, {"a": a, "b": b}, {f"d{k}": dtype for k in range(len(operations))})
    for k, (op, function) in enumerate(operations.items()):
        assert np.array_equal(got[f"d{k}"], expect(function, dtype, a, b)), op


@pytest.mark.parametrize("kind", ["s16", "s32", "s64"])
def test_one_operand(kind: str) -> None:
    a = corners(kind)
    got = lanewise(
        f"abs.{kind} %d, %a;\nneg.{kind} %e, %a;", {"a": a}, {"d": a.dtype, "e": a.dtype}
    )
    assert np.array_equal(got["d"], expect(abs, a.dtype, a))
    assert np.array_equal(got["e"], expect(lambda x: -x, a.dtype, a))


@pytest.mark.parametrize("kind", TYPES)
def test_three_operands(kind: str) -> None:
    bits, dtype = int(kind[1:]), dtype_of(kind)
    a, b, c = pairs(corners(kind, 2), corners(kind, 2), corners(kind, 0)[::5])
    text = (
        f"mad.lo.{kind} %d, %a, %b, %c;\nmad.hi.{kind} %e, %a, %b, %c;\nsad.{kind} %f, %a, %b, %c;"
    )
    got = lanewise(text, {"a": a, "b": b, "c": c}, {"d": dtype, "e": dtype, "f": dtype})
    assert np.array_equal(got["d"], expect(lambda x, y, z: x * y + z, dtype, a, b, c))
    assert np.array_equal(got["e"], expect(lambda x, y, z: (x * y >> bits) + z, dtype, a, b, c))
    assert np.array_equal(got["f"], expect(lambda x, y, z: abs(x - y) + z, dtype, a, b, c))


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_products(kind: str) -> None:
    dtype = dtype_of(kind)
    wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
    a, b = pairs(corners(kind), corners(kind))
    c = corner_integers(8 * wide.itemsize, wide.kind == "i")
    c = np.resize(c, a.shape)
    text = f"""
        mul.wide.{kind} %d, %a, %b;
        mad.wide.{kind} %e, %a, %b, %c;
        mul.wide.{kind} %f, %a, -3;
        mul.wide.{kind} %g, %a, 0xfff0;
    """
    got = lanewise(text, {"a": a, "b": b, "c": c}, dict.fromkeys("defg", wide))
    three = int(np.array(-3).astype(dtype))
    assert np.array_equal(got["d"], expect(lambda x, y: x * y, wide, a, b))
    assert np.array_equal(got["e"], expect(lambda x, y, z: x * y + z, wide, a, b, c))
    assert np.array_equal(got["f"], expect(lambda x: x * three, wide, a))
    constant = int(np.array(0xFFF0).astype(dtype))
    assert np.array_equal(got["g"], expect(lambda x: x * constant, wide, a))


def test_24_bit_products() -> None:
    def low24(x: int, signed: bool) -> int:
        x &= 0xFFFFFF
        return x - (1 << 24) if signed and x >> 23 else x

    for kind, signed in (("u32", False), ("s32", True)):
        a, b = pairs(corners(kind), corners(kind))
        c = np.resize(corners(kind), a.shape)
        got = lanewise(
            f"mul24.lo.{kind} %d, %a, %b;\nmad24.lo.{kind} %e, %a, %b, %c;",
            {"a": a, "b": b, "c": c},
            {"d": a.dtype, "e": a.dtype},
        )
        product = [
            low24(x, signed) * low24(y, signed) for x, y in zip(a.tolist(), b.tolist(), strict=True)
        ]
        assert np.array_equal(got["d"], wrapped(product, a.dtype))
        added = [p + z for p, z in zip(product, c.tolist(), strict=True)]
        assert np.array_equal(got["e"], wrapped(added, a.dtype))


def test_saturating_and_clamped() -> None:
    a, b = pairs(corners("s32"), corners("s32"))
    text = """
        add.sat.s32 %d, %a, %b;
        sub.sat.s32 %e, %a, %b;
        min.relu.s32 %f, %a, %b;
        max.relu.s32 %g, %a, %b;
    """
    got = lanewise(text, {"a": a, "b": b}, dict.fromkeys("defg", np.int32))

    def limited(x: int) -> int:
        return max(-(1 << 31), min((1 << 31) - 1, x))

    i4 = np.dtype(np.int32)
    assert np.array_equal(got["d"], expect(lambda x, y: limited(x + y), i4, a, b))
    assert np.array_equal(got["e"], expect(lambda x, y: limited(x - y), i4, a, b))
    assert np.array_equal(got["f"], expect(lambda x, y: max(0, min(x, y)), i4, a, b))
    assert np.array_equal(got["g"], expect(lambda x, y: max(0, x, y), i4, a, b))


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_logic(bits: int) -> None:
    a, b = pairs(corner_integers(bits, False), corner_integers(bits, False))
    text = f"""
        and.b{bits} %d, %a, %b;
        or.b{bits} %e, %a, %b;
        xor.b{bits} %f, %a, %b;
        not.b{bits} %g, %a;
        cnot.b{bits} %h, %a;
        and.b{bits} %i, %a, -16;
    """
    got = lanewise(text, {"a": a, "b": b}, dict.fromkeys("defghi", a.dtype))
    assert np.array_equal(got["d"], expect(lambda x, y: x & y, a.dtype, a, b))
    assert np.array_equal(got["e"], expect(lambda x, y: x | y, a.dtype, a, b))
    assert np.array_equal(got["f"], expect(lambda x, y: x ^ y, a.dtype, a, b))
    assert np.array_equal(got["g"], expect(lambda x: ~x, a.dtype, a))
    assert np.array_equal(got["h"], expect(lambda x: int(x == 0), a.dtype, a))
    assert np.array_equal(got["i"], expect(lambda x: x & -16, a.dtype, a))


def test_predicate_logic() -> None:
    p, q = pairs(np.array([False, True]), np.array([False, True]))
    text = """
        and.pred %d, %p, %q;
        or.pred %e, %p, %q;
        xor.pred %f, %p, %q;
        not.pred %g, %p;
        mov.pred %h, %q;
    """
    got = lanewise(text, {"p": p, "q": q}, dict.fromkeys("defgh", bool))
    assert got["d"].tolist() == [False, False, False, True]
    assert got["e"].tolist() == [False, True, True, True]
    assert got["f"].tolist() == [False, True, True, False]
    assert got["g"].tolist() == [True, True, False, False]
    assert got["h"].tolist() == [False, True, False, True]


def test_lop3_tables() -> None:
    """Bit (4 a + 2 b + c) of the table is the result for the bits a, b, c: all 256 tables."""
    generator = np.random.default_rng(3)
    a, b, c = generator.integers(0, 1 << 32, (3, 64), np.uint32)
    a[0], b[0], c[0] = 0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA
    for first in range(0, 256, 32):
        tables = range(first, first + 32)
        text = "\n".join(f"lop3.b32 %d{t}, %a, %b, %c, 0x{t:x};" for t in tables)
        got = lanewise(text, {"a": a, "b": b, "c": c}, {f"d{t}": np.uint32 for t in tables})
        for t in tables:
            wanted = np.zeros_like(a)
            for bit in range(32):
                k = 4 * (a >> bit & 1) + 2 * (b >> bit & 1) + (c >> bit & 1)
                wanted |= (np.uint32(t) >> k & 1) << np.uint32(bit)
            assert np.array_equal(got[f"d{t}"], wanted), f"table {t:#x}"
            assert got[f"d{t}"][0] & 0xFF == t


@pytest.mark.parametrize("kind", ["b16", "b32", "b64", "s16", "s32", "s64", "u16", "u32", "u64"])
def test_shifts(kind: str) -> None:
    bits, dtype = int(kind[1:]), dtype_of(kind)
    amounts = np.array([0, 1, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 0x10000, 2**32 - 1])
    a, n = pairs(corner_integers(bits, kind[0] == "s", 6), amounts.astype(np.uint32))
    got = lanewise(f"shr.{kind} %d, %a, %n;", {"a": a, "n": n}, {"d": dtype})
    # Amounts beyond the width count as the width.
    assert np.array_equal(got["d"], expect(lambda x, k: x >> min(k, bits), dtype, a, n))
    if kind[0] == "b":
        got = lanewise(f"shl.{kind} %d, %a, %n;", {"a": a, "n": n}, {"d": dtype})
        assert np.array_equal(got["d"], expect(lambda x, k: x << min(k, bits), dtype, a, n))


@pytest.mark.parametrize("kind", ["b16", "b32", "b64", "s32"])
def test_constant_shifts(kind: str) -> None:
    bits, dtype = int(kind[1:]), dtype_of(kind)
    a = corner_integers(bits, kind[0] == "s")
    amounts = [0, 1, bits // 2, bits - 1, bits, bits + 1, 100]
    text = "\n".join(f"shr.{kind} %d{n}, %a, {n};" for n in amounts)
    got = lanewise(text, {"a": a}, {f"d{n}": dtype for n in amounts})
    for n in amounts:
        assert np.array_equal(got[f"d{n}"], expect(lambda x, n=n: x >> n, dtype, a)), n
    if kind[0] == "b":
        text = "\n".join(f"shl.{kind} %d{n}, %a, {n};" for n in amounts)
        got = lanewise(text, {"a": a}, {f"d{n}": dtype for n in amounts})
        for n in amounts:
            assert np.array_equal(got[f"d{n}"], expect(lambda x, n=n: x << n, dtype, a)), n


def test_funnel_shifts() -> None:
    amounts = np.array([0, 1, 8, 31, 32, 33, 63, 64, 2**31, 2**32 - 1], np.uint32)
    a, b, n = pairs(corners("u32", 3), corners("u32", 3)[::3], amounts)
    text = """
        shf.l.clamp.b32 %d, %a, %b, %n;
        shf.l.wrap.b32 %e, %a, %b, %n;
        shf.r.clamp.b32 %f, %a, %b, %n;
        shf.r.wrap.b32 %g, %a, %b, %n;
    """
    got = lanewise(text, {"a": a, "b": b, "n": n}, dict.fromkeys("defg", np.uint32))
    u4 = np.dtype(np.uint32)

    def left(x: int, y: int, k: int) -> int:
        return ((y << 32 | x) << k) >> 32

    def right(x: int, y: int, k: int) -> int:
        return (y << 32 | x) >> k

    assert np.array_equal(got["d"], expect(lambda x, y, k: left(x, y, min(k, 32)), u4, a, b, n))
    assert np.array_equal(got["e"], expect(lambda x, y, k: left(x, y, k & 31), u4, a, b, n))
    assert np.array_equal(got["f"], expect(lambda x, y, k: right(x, y, min(k, 32)), u4, a, b, n))
    assert np.array_equal(got["g"], expect(lambda x, y, k: right(x, y, k & 31), u4, a, b, n))


@pytest.mark.parametrize("bits", [32, 64])
def test_counting_and_reversing(bits: int) -> None:
    a = corner_integers(bits, False, 40)
    text = f"popc.b{bits} %d, %a;\nclz.b{bits} %e, %a;\nbrev.b{bits} %f, %a;"
    got = lanewise(text, {"a": a}, {"d": np.uint32, "e": np.uint32, "f": a.dtype})
    u4 = np.dtype(np.uint32)
    assert np.array_equal(got["d"], expect(lambda x: x.bit_count(), u4, a))
    assert np.array_equal(got["e"], expect(lambda x: bits - x.bit_length(), u4, a))
    reverse = expect(lambda x: int(f"{x:0{bits}b}"[::-1], 2), a.dtype, a)
    assert np.array_equal(got["f"], reverse)


@pytest.mark.parametrize("kind", ["u32", "u64", "s32", "s64"])
def test_bfind(kind: str) -> None:
    bits = int(kind[1:])
    a = corners(kind, 40)

    def leading(x: int) -> int:
        return (~x if x < 0 else x).bit_length() - 1

    text = f"bfind.{kind} %d, %a;\nbfind.shiftamt.{kind} %e, %a;"
    got = lanewise(text, {"a": a}, {"d": np.uint32, "e": np.uint32})
    u4 = np.dtype(np.uint32)
    assert np.array_equal(got["d"], expect(leading, u4, a))
    amount = expect(lambda x: bits - 1 - leading(x) if leading(x) >= 0 else -1, u4, a)
    assert np.array_equal(got["e"], amount)


POSITIONS = np.array([0, 1, 7, 30, 31, 32, 33, 62, 63, 64, 65, 255, 256 + 3], np.uint32)


@pytest.mark.parametrize("kind", ["u32", "u64", "s32", "s64"])
def test_bfe(kind: str) -> None:
    bits, dtype = int(kind[1:]), dtype_of(kind)
    a, b, c = pairs(corners(kind, 4), POSITIONS, POSITIONS)

    def extract(x: int, position: int, length: int) -> int:
        position, length, top = position & 0xFF, length & 0xFF, bits - 1
        word = x & ((1 << bits) - 1)
        sign = 0
        if kind[0] == "s" and length:
            sign = word >> min(position + length - 1, top) & 1
        result = 0
        for k in range(bits):
            bit = word >> (position + k) & 1 if k < length and position + k <= top else sign
            result |= bit << k
        return result

    got = lanewise(f"bfe.{kind} %d, %a, %b, %c;", {"a": a, "b": b, "c": c}, {"d": dtype})
    assert np.array_equal(got["d"], expect(extract, dtype, a, b, c))


@pytest.mark.parametrize("bits", [32, 64])
def test_bfi(bits: int) -> None:
    values = corner_integers(bits, False, 2)
    a, c, d = pairs(values[::2], POSITIONS, POSITIONS)
    b = np.resize(values[::-1], a.shape)

    def insert(x: int, base: int, position: int, length: int) -> int:
        position, length = position & 0xFF, length & 0xFF
        for k in range(length):
            if position + k < bits:
                base = base & ~(1 << position + k) | (x >> k & 1) << position + k
        return base

    text = f"bfi.b{bits} %f, %a, %b, %c, %d;"
    got = lanewise(text, {"a": a, "b": b, "c": c, "d": d}, {"f": a.dtype})
    assert np.array_equal(got["f"], expect(insert, a.dtype, a, b, c, d))


def test_bmsk() -> None:
    values = np.array([0, 1, 5, 16, 31, 32, 33, 40, 2**32 - 1], np.uint32)
    a, b = pairs(values, values)

    def mask(position: int, length: int, clamp: bool) -> int:
        if clamp:
            position, length = min(position, 32), min(length, 32)
        else:
            position, length = position & 31, length & 31
        return ((1 << length) - 1) << position

    got = lanewise(
        "bmsk.clamp.b32 %d, %a, %b;\nbmsk.wrap.b32 %e, %a, %b;",
        {"a": a, "b": b},
        {"d": np.uint32, "e": np.uint32},
    )
    u4 = np.dtype(np.uint32)
    assert np.array_equal(got["d"], expect(lambda x, y: mask(x, y, True), u4, a, b))
    assert np.array_equal(got["e"], expect(lambda x, y: mask(x, y, False), u4, a, b))


def permuted(a: int, b: int, picks: list[int]) -> int:
    """Byte k of the result is byte ``picks[k] & 7`` of b:a, or its sign if bit 3 is set."""
    source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    data = []
    for pick in picks:
        byte = source[pick & 7]
        data.append((0xFF if byte & 0x80 else 0) if pick & 8 else byte)
    return int.from_bytes(bytes(data), "little")


def test_prmt_any_selector() -> None:
    generator = np.random.default_rng(8)
    a, b = generator.integers(0, 1 << 32, (2, 512), np.uint32)
    selector = generator.integers(0, 1 << 32, 512, np.uint32)
    got = lanewise("prmt.b32 %d, %a, %b, %s;", {"a": a, "b": b, "s": selector}, {"d": np.uint32})

    def generic(x: int, y: int, s: int) -> int:
        return permuted(x, y, [s >> 4 * k & 15 for k in range(4)])

    assert np.array_equal(got["d"], expect(generic, np.dtype(np.uint32), a, b, selector))


def test_prmt_constant_selectors() -> None:
    generator = np.random.default_rng(9)
    a, b = generator.integers(0, 1 << 32, (2, 64), np.uint32)
    selectors = [0x5410, 0x7632, 0x3210, 0x7654, 0x1032, 0x5432, 0x7610, 0x1010, 0x3276, 0x0123]
    selectors += [0x8888, 0xBA98, 0x7531, 0x6420, 0x4321, 0x0054]
    text = "\n".join(f"prmt.b32 %d{s}, %a, %b, 0x{s:x};" for s in selectors)
    got = lanewise(text, {"a": a, "b": b}, {f"d{s}": np.uint32 for s in selectors})
    for s in selectors:
        picks = [s >> 4 * k & 15 for k in range(4)]
        wanted = expect(lambda x, y, p=picks: permuted(x, y, p), np.dtype(np.uint32), a, b)
        assert np.array_equal(got[f"d{s}"], wanted), hex(s)


# For each mode the bytes d.b3 d.b2 d.b1 d.b0 take, by the two low bits of the selector (PTX ISA).
PRMT_MODES = {
    "f4e": ["3210", "4321", "5432", "6543"],
    "b4e": ["5670", "6701", "7012", "0123"],
    "rc8": ["0000", "1111", "2222", "3333"],
    "ecl": ["3210", "3211", "3222", "3333"],
    "ecr": ["0000", "1110", "2210", "3210"],
    "rc16": ["1010", "3232", "1010", "3232"],
}


@pytest.mark.parametrize("mode", PRMT_MODES)
def test_prmt_modes(mode: str) -> None:
    generator = np.random.default_rng(10)
    a, b = generator.integers(0, 1 << 32, (2, 32), np.uint32)
    selector = np.arange(32, dtype=np.uint32)
    text = f"prmt.b32.{mode} %d, %a, %b, %s;"
    got = lanewise(text, {"a": a, "b": b, "s": selector}, {"d": np.uint32})

    def special(x: int, y: int, s: int) -> int:
        return permuted(x, y, [int(c) for c in reversed(PRMT_MODES[mode][s & 3])])

    assert np.array_equal(got["d"], expect(special, np.dtype(np.uint32), a, b, selector))


def test_dot_products() -> None:
    generator = np.random.default_rng(11)
    a, b, c = generator.integers(0, 1 << 32, (3, 128), np.uint32)
    a[0], b[0], c[0] = 0x80808080, 0x80808080, 0x7FFFFFFF

    def dot(x: int, y: int, z: int, x_signed: bool, y_signed: bool) -> int:
        xs = x.to_bytes(4, "little")
        ys = y.to_bytes(4, "little")
        for p, q in zip(xs, ys, strict=True):
            p = p - 256 if x_signed and p > 127 else p
            q = q - 256 if y_signed and q > 127 else q
            z += p * q
        return z

    for x_type in ("u32", "s32"):
        for y_type in ("u32", "s32"):
            text = f"dp4a.{x_type}.{y_type} %d, %a, %b, %c;"
            got = lanewise(text, {"a": a, "b": b, "c": c}, {"d": np.uint32})
            signs = (x_type == "s32", y_type == "s32")
            wanted = expect(lambda x, y, z, s=signs: dot(x, y, z, *s), a.dtype, a, b, c)
            assert np.array_equal(got["d"], wanted)


COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@pytest.mark.parametrize("kind", [*TYPES, "b16", "b32", "b64"])
def test_setp(kind: str) -> None:
    a, b = pairs(corner_integers(int(kind[1:]), kind[0] == "s", 4), np.array([0]))
    a, b = pairs(a, a)
    c = np.arange(len(a)) % 3 == 0
    names = (
        ["eq", "ne"] if kind[0] == "b" else [*COMPARISONS, *(UNSIGNED if kind[0] == "u" else ())]
    )
    combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    lines, results = [], {}
    for name in names:
        lines.append(f"setp.{name}.{kind} %p_{name}|%q_{name}, %a, %b;")
        results |= {f"p_{name}": bool, f"q_{name}": bool}
        for boolean in combine:
            lines.append(
                f"setp.{name}.{boolean}.{kind} %{boolean}_{name}|%n{boolean}_{name}, %a, %b, %c;"
            )
            lines.append(f"setp.{name}.{boolean}.{kind} %i{boolean}_{name}, %a, %b, !%c;")
            results |= {f"{s}{boolean}_{name}": bool for s in ("", "n", "i")}
    got = lanewise("\n".join(lines), {"a": a, "b": b, "c": c}, results)
    for name in names:
        function = COMPARISONS[UNSIGNED.get(name, name)]
        wanted = np.array([function(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)])
        assert np.array_equal(got[f"p_{name}"], wanted)
        assert np.array_equal(got[f"q_{name}"], ~wanted)
        for boolean, join in combine.items():
            assert np.array_equal(got[f"{boolean}_{name}"], join(wanted, c))
            assert np.array_equal(got[f"n{boolean}_{name}"], join(~wanted, c))
            assert np.array_equal(got[f"i{boolean}_{name}"], join(wanted, ~c))


def test_setp_with_a_sink() -> None:
    a = np.arange(32, dtype=np.uint32)
    got = lanewise(
        "setp.lt.u32 _|%q, %a, 7;\nsetp.lt.u32 %p|_, %a, 7;", {"a": a}, {"p": bool, "q": bool}
    )
    assert np.array_equal(got["p"], a < 7)
    assert np.array_equal(got["q"], a >= 7)


@pytest.mark.parametrize("kind", ["u16", "s32", "u64"])
def test_set(kind: str) -> None:
    a, b = pairs(corners(kind, 4), corners(kind, 4))
    c = np.arange(len(a)) % 3 == 0
    text = f"""
        set.lt.u32.{kind} %d, %a, %b;
        set.ge.s32.{kind} %e, %a, %b;
        set.eq.f32.{kind} %f, %a, %b;
        set.lt.and.u32.{kind} %g, %a, %b, %c;
        set.lt.xor.f32.{kind} %h, %a, %b, !%c;
    """
    results = {"d": np.uint32, "e": np.int32, "f": np.float32, "g": np.uint32, "h": np.float32}
    got = lanewise(text, {"a": a, "b": b, "c": c}, results)
    less = np.array([x < y for x, y in zip(a.tolist(), b.tolist(), strict=True)])
    equal = np.array([x == y for x, y in zip(a.tolist(), b.tolist(), strict=True)])
    assert np.array_equal(got["d"], np.where(less, np.uint32(0xFFFFFFFF), np.uint32(0)))
    assert np.array_equal(got["e"], np.where(~less, np.int32(-1), np.int32(0)))
    assert np.array_equal(got["f"], equal.astype(np.float32))
    assert np.array_equal(got["g"], np.where(less & c, np.uint32(0xFFFFFFFF), np.uint32(0)))
    assert np.array_equal(got["h"], (less ^ ~c).astype(np.float32))


@pytest.mark.parametrize("kind", ["b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64"])
def test_selection(kind: str) -> None:
    bits = int(kind[1:])
    a = corner_integers(bits, False, 40)
    b = a[::-1].copy()
    p = np.arange(len(a)) % 2 == 0
    c = np.resize(np.array([0, 1, -1, -(2**31), 2**31 - 1], np.int32), a.shape)
    text = f"""
        selp.{kind} %d, %a, %b, %p;
        selp.{kind} %e, %a, -1, %p;
        slct.{kind}.s32 %f, %a, %b, %c;
    """
    got = lanewise(text, {"a": a, "b": b, "p": p, "c": c}, dict.fromkeys("def", a.dtype))
    assert np.array_equal(got["d"], np.where(p, a, b))
    assert np.array_equal(got["e"], np.where(p, a, a.dtype.type((1 << bits) - 1)))
    assert np.array_equal(got["f"], np.where(c >= 0, a, b))


def test_slct_by_a_float() -> None:
    c = np.array([0.0, -0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 1e-40, -1e-40], np.float32)
    a = np.arange(len(c), dtype=np.uint32)
    b = a + 100
    text = "slct.u32.f32 %d, %a, %b, %c;\nslct.ftz.u32.f32 %e, %a, %b, %c;"
    got = lanewise(text, {"a": a, "b": b, "c": c}, {"d": np.uint32, "e": np.uint32})
    # NaN takes b; -0 counts as zero; .ftz makes a zero of a subnormal.
    first = np.array([1, 1, 1, 0, 0, 1, 0, 1, 0], bool)
    assert np.array_equal(got["d"], np.where(first, a, b))
    first[8] = True
    assert np.array_equal(got["e"], np.where(first, a, b))


def test_narrow_operands_in_wide_registers() -> None:
    """Sources wider than the instruction's type give their low bits (PTX ISA, operand size)."""
    a = corner_integers(64, False)
    got = lanewise(
        "cvt.u32.u16 %d, %a;\ncvt.s32.s8 %e, %a;", {"a": a}, {"d": np.uint32, "e": np.int32}
    )
    assert np.array_equal(got["d"], (a & np.uint64(0xFFFF)).astype(np.uint32))
    assert np.array_equal(got["e"], a.astype(np.uint8).view(np.int8).astype(np.int32))
