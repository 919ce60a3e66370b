"""mma of every type but f32 accumulators, lane by lane with the ISA's formulas of fragments."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from ieee import F64, add, multiply
from lanes import run

Place = Callable[[int, int], tuple[int, int]]  # (lane, element) -> (row, column)
BITS = {"f16": 16, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1, "f64": 64}


def place_a(rows: int, per: int) -> Place:
    """Element i of a lane: registers of ``per`` elements run over rows 8 apart, then columns."""

    def place(lane: int, i: int) -> tuple[int, int]:
        register, within = divmod(i, per)
        halves = rows // 8
        column = 4 * per * (register // halves) + lane % 4 * per + within
        return lane // 4 + 8 * (register % halves), column

    return place


def place_b(per: int) -> Place:
    def place(lane: int, i: int) -> tuple[int, int]:
        register, within = divmod(i, per)
        return 4 * per * register + lane % 4 * per + within, lane // 4

    return place


def place_c(lane: int, i: int) -> tuple[int, int]:
    return lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2


def fragments(codes: np.ndarray, place: Place, count: int, bits: int) -> np.ndarray:
    """The words of each lane for a matrix of bit patterns: (32, registers)."""
    width = 64 if bits == 64 else 32
    words = np.zeros((32, count * bits // width), f"u{width // 8}")
    for lane in range(32):
        for i in range(count):
            code = int(codes[place(lane, i)]) & ((1 << bits) - 1)
            words[lane, i * bits // width] |= words.dtype.type(code << i * bits % width)
    return words


def matrix(words: np.ndarray, place: Place, shape: tuple[int, int], bits: int) -> np.ndarray:
    """The inverse of ``fragments``."""
    width = 8 * words.dtype.itemsize
    codes = np.zeros(shape, np.uint64)
    for lane in range(32):
        for i in range(words.shape[1] * width // bits):
            word = int(words[lane, i * bits // width]) >> i * bits % width
            codes[place(lane, i)] = word & ((1 << bits) - 1)
    return codes


def multiply_on_device(
    instruction: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, results: int
) -> np.ndarray:
    """D's words (32, results) for the words of A, B and C."""
    lines, names = [], {}
    wide = a.dtype.itemsize == 8
    register = "%fd" if wide else "%r"
    free = iter(range(10 if not wide else 0, 60))
    for name, words in (("a", a), ("b", b), ("c", c)):
        size = words.dtype.itemsize
        names[name] = [f"{register}{next(free)}" for _ in range(words.shape[1])]
        lines.append(f"mad.wide.u32 %rd1, %t5, {size * words.shape[1]}, %{name};")
        lines += [
            f"ld.global.b{8 * size} {r}, [%rd1+{size * k}];" for k, r in enumerate(names[name])
        ]
    targets = [f"{register}{next(free)}" for _ in range(results)]
    groups = ", ".join("{" + ", ".join(g) + "}" for g in (targets, *names.values()))
    size = a.dtype.itemsize
    lines.append(f"{instruction} {groups};")
    lines.append(f"mad.wide.u32 %rd1, %t5, {size * results}, %d;")
    lines += [f"st.global.b{8 * size} [%rd1+{size * k}], {r};" for k, r in enumerate(targets)]
    d = np.zeros((32, results), a.dtype)
    extra = ".reg .f64 %fd<40>;" if wide else ""
    body = "\n".join(lines)
    if wide:
        body = "{\n" + extra.replace("%fd", "%q") + body.replace("%fd", "%q") + "\n}"
    return run(body, {"a": a, "b": b, "c": c, "d": d}).arrays["d"]


INTEGERS = [
    (shape, kinds)
    for shapes, types in (
        (("m8n8k16", "m16n8k16", "m16n8k32"), (("s8", "s8"), ("u8", "s8"), ("u8", "u8"))),
        (("m8n8k32", "m16n8k32", "m16n8k64"), (("s4", "s4"), ("s4", "u4"))),
    )
    for shape in shapes
    for kinds in types
]


def dimensions(shape: str) -> tuple[int, int]:
    rows, k = shape[1:].split("n8k")
    return int(rows), int(k)


@pytest.mark.parametrize(("shape", "kinds"), INTEGERS)
@pytest.mark.parametrize("tail", ["", ".satfinite"])
def test_integers(shape: str, kinds: tuple[str, str], tail: str) -> None:
    rows, k = dimensions(shape)
    bits = BITS[kinds[0]]
    generator = np.random.default_rng(k)

    def random(kind: str, size: tuple[int, int]) -> np.ndarray:
        least = -(1 << (bits - 1)) if kind[0] == "s" else 0
        return generator.integers(least, least + (1 << bits), size)

    a, b = random(kinds[0], (rows, k)), random(kinds[1], (k, 8))
    c = generator.integers(-1000, 1000, (rows, 8))
    c[0], c[1] = 2**31 - 1, -(2**31)
    per = 32 // bits
    words = (
        fragments(a, place_a(rows, per), rows * k // 32, bits),
        fragments(b, place_b(per), 8 * k // 32, bits),
        fragments(c, place_c, rows // 4, 32),
    )
    name = f"mma.sync.aligned.{shape}.row.col{tail}.s32.{kinds[0]}.{kinds[1]}.s32"
    d = multiply_on_device(name, *words, rows // 4)
    exact = a @ b + c
    if tail:
        exact = np.clip(exact, -(2**31), 2**31 - 1)
    assert np.array_equal(matrix(d, place_c, (rows, 8), 32), exact % (1 << 32))


@pytest.mark.parametrize("shape", ["m8n8k128", "m16n8k128", "m16n8k256"])
@pytest.mark.parametrize("operation", ["xor", "and"])
def test_bits(shape: str, operation: str) -> None:
    rows, k = dimensions(shape)
    generator = np.random.default_rng(k)
    a, b = generator.integers(0, 2, (rows, k)), generator.integers(0, 2, (k, 8))
    c = generator.integers(-1000, 1000, (rows, 8))
    words = (
        fragments(a, place_a(rows, 32), rows * k // 32, 1),
        fragments(b, place_b(32), 8 * k // 32, 1),
        fragments(c, place_c, rows // 4, 32),
    )
    name = f"mma.sync.aligned.{shape}.row.col.s32.b1.b1.s32.{operation}.popc"
    d = multiply_on_device(name, *words, rows // 4)
    both = a[:, :, None] & b if operation == "and" else a[:, :, None] ^ b
    assert np.array_equal(matrix(d, place_c, (rows, 8), 32), (both.sum(1) + c) % (1 << 32))


HALVES = [("m16n8k8", "f16"), ("m16n8k16", "f16")]
HALVES += [(shape, kind) for shape in ("m16n8k16", "m16n8k32") for kind in ("e4m3", "e5m2")]
NARROW = {"f16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@pytest.mark.parametrize(("shape", "kind"), HALVES)
def test_f16_accumulators(shape: str, kind: str) -> None:
    """Integers below 2048 are exact; one more bit shows that results are rounded to f16."""
    rows, k = dimensions(shape)
    generator = np.random.default_rng(k)
    a, b = generator.integers(-4, 5, (rows, k)), generator.integers(-4, 5, (k, 8))
    c = generator.integers(-500, 500, (rows, 8))
    c[0], b[:, 0] = 4096, 0
    a[0, 0], b[0, 0] = 1, 2  # 4098 lies between 4096 and 4100: to the even neighbour
    c[0, 0] = 4096
    a[0, 1:] = 0
    bits = BITS[kind]
    encode = [x.astype(NARROW[kind]).view(f"u{bits // 8}") for x in (a, b)]
    words = (
        fragments(encode[0], place_a(rows, 32 // bits), rows * k // 32, bits),
        fragments(encode[1], place_b(32 // bits), 8 * k // 32, bits),
        fragments(c.astype(np.float16).view(np.uint16), place_c, rows // 4, 16),
    )
    name = f"mma.sync.aligned.{shape}.row.col.f16.{kind}.{kind}.f16"
    d = matrix(multiply_on_device(name, *words, 2), place_c, (rows, 8), 16)
    exact = (a @ b + c).astype(np.float64)
    assert np.array_equal(d.astype(np.uint16).view(np.float16), exact.astype(np.float16))
    assert exact[0, 0] == 4098
    assert exact.astype(np.float16)[0, 0] == 4096


@pytest.mark.parametrize("shape", ["m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"])
@pytest.mark.parametrize("mode", ["", ".rz", ".rp"])
def test_doubles(shape: str, mode: str) -> None:
    """Fused multiply-adds in ascending order of k, each rounded once."""
    rows, k = dimensions(shape)
    generator = np.random.default_rng(k)
    a, b, c = (generator.standard_normal(s) for s in ((rows, k), (k, 8), (rows, 8)))
    words = (
        fragments(a.view(np.uint64), place_a(rows, 1), rows * k // 32, 64),
        fragments(b.view(np.uint64), place_b(1), k // 4, 64),
        fragments(c.view(np.uint64), place_c, rows // 4, 64),
    )
    name = f"mma.sync.aligned.{shape}.row.col{mode}.f64.f64.f64.f64"
    d = matrix(multiply_on_device(name, *words, rows // 4), place_c, (rows, 8), 64)
    for row in range(0, rows, 3):
        for column in range(8):
            value = F64.value(int(c[row, column].view(np.uint64)))
            for step in range(k):
                x, y = (F64.value(int(v.view(np.uint64))) for v in (a[row, step], b[step, column]))
                bits = F64.encode(add(multiply(x, y), value), mode[1:] or "rn")
                value = F64.value(bits)
            assert int(d[row, column]) == bits
    assert isinstance(value.magnitude, Fraction)


def quarter_place(part: str, layout: str) -> Callable[[int, int], tuple[int, int, int]]:
    """(lane, element) -> (product, row, column) of m8n8k4: the ISA's formulas."""

    def place(lane: int, i: int) -> tuple[int, int, int]:
        upper = 4 if lane >= 16 else 0
        product, within = lane % 16 // 4, lane % 4
        if part == "a":
            row, column = (within + upper, i) if layout == "row" else (i % 4 + upper, within)
        elif part == "b":
            row, column = (within, i + upper) if layout == "row" else (i, within + upper)
        elif part == "f16":
            row, column = within + upper, i
        else:
            row = (lane & 1) + (i & 2) + upper
            column = (i & 4) + (lane & 2) + (i & 1)
        return product, row, column

    return place


@pytest.mark.parametrize("layouts", ["row.col", "col.row", "row.row", "col.col"])
@pytest.mark.parametrize(("to", "c"), [("f32", "f32"), ("f16", "f16"), ("f32", "f16")])
def test_four_products_of_m8n8k4(layouts: str, to: str, c: str) -> None:
    generator = np.random.default_rng(8)
    a, b = generator.integers(-9, 10, (4, 8, 4)), generator.integers(-9, 10, (4, 4, 8))
    start = generator.integers(-99, 99, (4, 8, 8))
    layout_a, layout_b = layouts.split(".")

    def spread(values: np.ndarray, part: str, layout: str, count: int, kind: str) -> np.ndarray:
        dtype = np.float16 if kind == "f16" else np.float32
        codes = values.astype(dtype).view(f"u{np.dtype(dtype).itemsize}")
        place = quarter_place(part, layout)
        return fragments(codes, place, count, 8 * codes.dtype.itemsize)  # type: ignore[arg-type]

    words = (
        spread(a, "a", layout_a, 4, "f16"),
        spread(b, "b", layout_b, 4, "f16"),
        spread(start, c, "", 8, c),
    )
    name = f"mma.sync.aligned.m8n8k4.{layouts}.{to}.f16.f16.{c}"
    d = multiply_on_device(name, *words, 4 if to == "f16" else 8)
    bits = 16 if to == "f16" else 32
    codes = matrix(d, quarter_place(to, ""), (4, 8, 8), bits)  # type: ignore[arg-type]
    got = codes.astype(f"u{bits // 8}").view(f"f{bits // 8}")
    assert np.array_equal(got, a @ b + start)
