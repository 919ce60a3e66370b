"""ldmatrix, stmatrix and movmatrix lane by lane; mma on integers, where every sum is exact."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from lanes import run

from simkit.errors import LaunchError, PtxError


def matrices(count: int, warps: int = 2) -> np.ndarray:
    """``count`` 8 x 8 matrices per warp with rows in an order of their own."""
    generator = np.random.default_rng(count)
    return generator.integers(0, 1 << 16, (warps, count, 8, 8), np.uint16)


def row_order(count: int) -> np.ndarray:
    """Where each row lies in shared memory, in rows of 16 bytes: shuffled, with gaps."""
    return np.random.default_rng(17).permutation(64)[: 8 * count].astype(np.uint32)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("space", [".shared", ""])
def test_ldmatrix(count: int, trans: str, space: str) -> None:
    """Lane k of the first 8 count lanes gives the address of row k; lane 4 g + t gets the elements
    (g, 2 t) and (g, 2 t + 1) of each matrix, of its transpose with .trans."""
    source, order = matrices(count), row_order(count)
    registers = ", ".join(f"%r{20 + k}" for k in range(count))
    generic = "cvta.shared.u64 %rd4, %rd4;" if not space else ""
    body = f"""
        .shared .align 16 .b8 pool[2048];
        and.b32 %r1, %t5, 31; shr.u32 %r2, %t5, 5;
        mov.u64 %rd1, pool; mad.wide.u32 %rd1, %r2, 1024, %rd1;
        mad.wide.u32 %rd2, %r1, 4, %order;
        mov.u32 %r3, 0;
        setp.lt.u32 %p1, %r1, {8 * count};
        @%p1 ld.global.u32 %r3, [%rd2];
        mad.wide.u32 %rd3, %t5, 16, %src;
        mad.wide.u32 %rd4, %r3, 16, %rd1;
        @%p1 mad.lo.u32 %r4, %r2, {8 * count}, %r1;
        @%p1 mad.wide.u32 %rd3, %r4, 16, %src;
        @%p1 ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%rd3];
        @%p1 st.shared.v4.u32 [%rd4], {{%r10, %r11, %r12, %r13}};
        bar.sync 0;
        {generic}
        ldmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16 {{{registers}}}, [%rd4];
        mad.wide.u32 %rd5, %t5, {4 * count}, %out;
        {" ".join(f"st.global.u32 [%rd5+{4 * k}], %r{20 + k};" for k in range(count))}
    """
    arrays = {"src": source, "order": order, "out": np.zeros((2, 32, count), np.uint32)}
    got = run(body, arrays, block=(64,)).arrays["out"]
    for warp in range(2):
        for lane in range(32):
            g, t = divmod(lane, 4)
            for k in range(count):
                matrix = source[warp, k].T if trans else source[warp, k]
                low, high = int(matrix[g, 2 * t]), int(matrix[g, 2 * t + 1])
                assert int(got[warp, lane, k]) == low | high << 16, (warp, lane, k)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix(count: int, trans: str) -> None:
    generator = np.random.default_rng(count + 10)
    fragments = generator.integers(0, 1 << 32, (2, 32, count), np.uint32)
    order = row_order(count)
    registers = ", ".join(f"%r{20 + k}" for k in range(count))
    body = f"""
        .shared .align 16 .b8 pool[2048];
        and.b32 %r1, %t5, 31; shr.u32 %r2, %t5, 5;
        mov.u64 %rd1, pool; mad.wide.u32 %rd1, %r2, 1024, %rd1;
        rem.u32 %r5, %r1, {8 * count};
        mad.wide.u32 %rd2, %r5, 4, %order;
        ld.global.u32 %r3, [%rd2];
        mad.wide.u32 %rd4, %r3, 16, %rd1;
        mad.wide.u32 %rd3, %t5, {4 * count}, %src;
        {" ".join(f"ld.global.u32 %r{20 + k}, [%rd3+{4 * k}];" for k in range(count))}
        stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%rd4], {{{registers}}};
        bar.sync 0;
        setp.lt.u32 %p1, %r1, {8 * count};
        mad.lo.u32 %r4, %r2, {8 * count}, %r1;
        mad.wide.u32 %rd5, %r4, 16, %out;
        @%p1 ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%rd4];
        @%p1 st.global.v4.u32 [%rd5], {{%r10, %r11, %r12, %r13}};
    """
    arrays = {"src": fragments, "order": order, "out": np.zeros((2, count, 8, 8), np.uint16)}
    got = run(body, arrays, block=(64,)).arrays["out"]
    wanted = np.zeros_like(got)
    for warp, lane, k in np.ndindex(2, 32, count):
        g, t = divmod(lane, 4)
        for half in range(2):
            element = int(fragments[warp, lane, k]) >> 16 * half & 0xFFFF
            row, column = (2 * t + half, g) if trans else (g, 2 * t + half)
            wanted[warp, k, row, column] = element
    assert np.array_equal(got, wanted)


def test_movmatrix() -> None:
    generator = np.random.default_rng(5)
    source = generator.integers(0, 1 << 16, (2, 8, 8), np.uint16)
    body = """
        mad.wide.u32 %rd1, %t5, 4, %src;
        ld.global.u32 %r1, [%rd1];
        movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1;
        mad.wide.u32 %rd2, %t5, 4, %out;
        st.global.u32 [%rd2], %r2;
    """
    got = run(body, {"src": source, "out": np.zeros_like(source)}, block=(64,)).arrays["out"]
    assert np.array_equal(got, source.transpose(0, 2, 1))


# Elements of one 32-bit register, and how integers become their bits.
KINDS = {
    "bf16": (2, lambda x: x.astype(ml_dtypes.bfloat16).view(np.uint16)),
    "f16": (2, lambda x: x.astype(np.float16).view(np.uint16)),
    "tf32": (1, lambda x: x.astype(np.float32).view(np.uint32)),
    "e4m3": (4, lambda x: x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)),
    "e5m2": (4, lambda x: x.astype(ml_dtypes.float8_e5m2).view(np.uint8)),
}
SHAPES = [("bf16", 8), ("bf16", 16), ("f16", 8), ("f16", 16), ("tf32", 4), ("tf32", 8)]
SHAPES += [("e4m3", 32), ("e5m2", 32)]


def words(elements: list[np.ndarray]) -> int:
    """Elements packed into one register, the first one lowest."""
    return int.from_bytes(b"".join(e.tobytes() for e in elements), "little")


def fragment_a(a: np.ndarray, per_register: int, lane: int) -> list[int]:
    """Registers of A (16 x K): rows g and g + 8 alternate, then the next group of columns."""
    g, t = divmod(lane, 4)
    registers = []
    for first in range(0, a.shape[1], 4 * per_register):
        for row in (g, g + 8):
            columns = range(first + t * per_register, first + (t + 1) * per_register)
            registers.append(words([a[row, c] for c in columns]))
    return registers


def fragment_b(b: np.ndarray, per_register: int, lane: int) -> list[int]:
    """Registers of B (K x 8): column g, rows by groups of 4 per_register."""
    g, t = divmod(lane, 4)
    return [
        words([b[r, g] for r in range(first + t * per_register, first + (t + 1) * per_register)])
        for first in range(0, b.shape[0], 4 * per_register)
    ]


@pytest.mark.parametrize(("kind", "k"), SHAPES)
def test_mma(kind: str, k: int) -> None:
    """Small integers: products and sums are exact in every format, in whatever order."""
    per_register, encode = KINDS[kind]
    generator = np.random.default_rng(k)
    warps = 3
    a = generator.integers(-8, 9, (warps, 16, k))
    b = generator.integers(-8, 9, (warps, k, 8))
    c = generator.integers(-1000, 1000, (warps, 16, 8)).astype(np.float32)
    count_a, count_b = k // per_register // 2, k // per_register // 4
    encoded_a, encoded_b = encode(a.astype(np.float32)), encode(b.astype(np.float32))
    lanes_a = np.array(
        [[fragment_a(encoded_a[w], per_register, n) for n in range(32)] for w in range(warps)],
        np.uint32,
    )
    lanes_b = np.array(
        [[fragment_b(encoded_b[w], per_register, n) for n in range(32)] for w in range(warps)],
        np.uint32,
    )
    names_a = [f"%r{10 + n}" for n in range(count_a)]
    names_b = [f"%r{20 + n}" for n in range(count_b)]
    lines = [
        f"mad.wide.u32 %rd1, %t5, {4 * count_a}, %a; mad.wide.u32 %rd2, %t5, {4 * count_b}, %b;"
    ]
    lines += [f"ld.global.u32 {name}, [%rd1+{4 * n}];" for n, name in enumerate(names_a)]
    lines += [f"ld.global.u32 {name}, [%rd2+{4 * n}];" for n, name in enumerate(names_b)]
    lines.append(f"""
        and.b32 %r1, %t5, 31; shr.u32 %r2, %t5, 5; shr.u32 %r3, %r1, 2; and.b32 %r4, %r1, 3;
        mad.lo.u32 %r5, %r2, 16, %r3; mad.lo.u32 %r5, %r5, 4, %r4;
        mad.wide.u32 %rd3, %r5, 8, %c; mad.wide.u32 %rd4, %r5, 8, %d;
        ld.global.v2.f32 {{%f1, %f2}}, [%rd3];
        ld.global.v2.f32 {{%f3, %f4}}, [%rd3+256];
        mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32
            {{%f5, %f6, %f7, %f8}}, {{{", ".join(names_a)}}}, {{{", ".join(names_b)}}},
            {{%f1, %f2, %f3, %f4}};
        st.global.v2.f32 [%rd4], {{%f5, %f6}};
        st.global.v2.f32 [%rd4+256], {{%f7, %f8}};
    """)
    arrays = {"a": lanes_a, "b": lanes_b, "c": c, "d": np.zeros_like(c)}
    got = run("\n".join(lines), arrays, block=(32 * warps,)).arrays["d"]
    wanted = a.astype(np.float64) @ b.astype(np.float64) + c
    assert np.array_equal(got, wanted)


def test_mma_in_place_and_in_a_chain() -> None:
    """D over C, twice: the second product sees the first one's result."""
    a = np.full((16, 16), 2.0, np.float32)
    body = """
        mov.b32 %r1, 0x40004000;
        mov.f32 %f1, 0f3F800000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            {%f1, %f2, %f3, %f4}, {%r1, %r1, %r1, %r1}, {%r1, %r1}, {%f1, %f2, %f3, %f4};
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            {%f1, %f2, %f3, %f4}, {%r1, %r1, %r1, %r1}, {%r1, %r1}, {%f1, %f2, %f3, %f4};
        mov.b32 %r1, 0;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            {%f1, %f2, %f3, %f4}, {%r1, %r1, %r1, %r1}, {%r1, %r1}, {%f1, %f2, %f3, %f4};
        mad.wide.u32 %rd1, %t5, 16, %out;
        st.global.v4.f32 [%rd1], {%f1, %f2, %f3, %f4};
    """
    got = run(body, {"out": np.zeros((32, 4), np.float32)}).arrays["out"]
    assert (got == 1 + 2 * float((a @ a)[0, 0])).all()


# Products in a row whose accumulators are looked at, changed or exchanged in between: what the
# executor keeps as matrices must be what the registers say. Every element of A and B is 2.0, so
# that a product of depth 16 adds 64 to each element.
PRODUCT = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{d}}}, {{%r1, %r1, %r1, %r1}},"
    " {{%r1, %r1}}, {{{c}}};"
)
STRAIGHT = "%f1, %f2, %f3, %f4"


def product(d: str = STRAIGHT, c: str = STRAIGHT) -> str:
    return PRODUCT.format(d=d, c=c)


BETWEEN: dict[str, tuple[str, list[float]]] = {
    "nothing": ("", [128, 128, 128, 128]),
    "an addition": ("add.f32 %f1, %f1, 0f3F800000;", [129, 128, 128, 128]),
    "a sum elsewhere": (
        "add.f32 %f9, %f1, 0f3F800000; mov.f32 %f2, %f9;",
        [128, 129, 128, 128],
    ),
    "an exchange": (
        "mov.f32 %f2, 0f40A00000; mov.f32 %f9, %f2; mov.f32 %f2, %f3; mov.f32 %f3, %f9;",
        [128, 128, 69, 128],
    ),
    "a guard": ("setp.lt.u32 %p1, %t5, 16; @%p1 mov.f32 %f4, 0f00000000;", []),
    "a store": ("st.global.f32 [%scratch], %f3;", [128, 128, 128, 128]),
    "a shuffle": ("shfl.sync.idx.b32 %f1, %f1, 0, 0x1f, -1;", [128, 128, 128, 128]),
    "another input": ("mov.b32 %r1, 0;", [64, 64, 64, 64]),
    "a guarded product": (
        "setp.eq.u32 %p1, %t5, 99; @%p1 " + product(),
        [128, 128, 128, 128],
    ),
    "a product aside": (product("%f5, %f6, %f7, %f8"), [128, 128, 128, 128]),
    "rotated accumulators": (product("%f2, %f3, %f4, %f1"), [192, 192, 192, 192]),
}


@pytest.mark.parametrize("what", BETWEEN)
@pytest.mark.parametrize("loop", [False, True])
def test_chained_products(what: str, loop: bool) -> None:
    between, wanted = BETWEEN[what]
    start = " ".join(f"mov.f32 %f{k}, 0f00000000;" for k in range(1, 10))
    middle = f"{product()}\n{between}\n{product()}"
    if loop:
        middle = f"mov.u32 %r9, 0; again: {middle} add.u32 %r9, %r9, 1; setp.lt.u32 %p9, %r9, 1;"
        middle += " @%p9 bra again;"
    body = f"""
        mov.b32 %r1, 0x40004000;
        {start}
        {middle}
        mad.wide.u32 %rd1, %t5, 16, %out;
        st.global.v4.f32 [%rd1], {{{STRAIGHT}}};
    """
    arrays = {"out": np.zeros((64, 4), np.float32), "scratch": np.zeros(1, np.float32)}
    got = run(body, arrays, block=(64,)).arrays["out"]
    if what == "a guard":
        # Lanes 0-15 start the second product's last element from zero.
        assert (got[:16] == [128, 128, 128, 64]).all()
        assert (got[16:] == 128).all()
    else:
        assert (got == wanted).all(), got[0]


def test_products_in_a_diverged_warp_are_refused() -> None:
    body = "setp.lt.u32 %p1, %t5, 5; @%p1 bra skip; mov.b32 %r1, 0;" + product()
    body += "skip: st.global.f32 [%out], 0f00000000;"
    with pytest.raises(LaunchError, match="does not execute the instruction"):
        run(body, {"out": np.zeros(1)})


def test_products_of_some_warps() -> None:
    """Warps 0 and 2 multiply, the others do not."""
    body = f"""
        mov.b32 %r1, 0x40004000;
        {" ".join(f"mov.f32 %f{k}, 0f3F800000;" for k in range(1, 5))}
        and.b32 %r2, %t5, 32; setp.ne.u32 %p1, %r2, 0;
        @%p1 bra skip;
        {product()}
        skip:
        mad.wide.u32 %rd1, %t5, 16, %out;
        st.global.v4.f32 [%rd1], {{{STRAIGHT}}};
    """
    got = run(body, {"out": np.zeros((4, 32, 4), np.float32)}, block=(128,)).arrays["out"]
    assert (got[::2] == 65).all()
    assert (got[1::2] == 1).all()


@pytest.mark.parametrize("bad", ["%p1", "%rd1", "%h1"])
def test_accumulators_of_the_wrong_width(bad: str) -> None:
    for body in (product(d=f"%f1, {bad}, %f3, %f4"), product(c=f"%f1, {bad}, %f3, %f4")):
        with pytest.raises(PtxError, match=f"register {bad}"):
            run(f"mov.b32 %r1, 0;\n{body}", {"out": np.zeros(1)})
