"""wmma: load, multiply and store of whole matrices, against exact integer products."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from lanes import Run, run

SHAPES = ["m16n16k16", "m8n32k16", "m32n8k16"]
DTYPES = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "f32": np.float32,
    "s8": np.int8, "u8": np.uint8, "s32": np.int32, "f64": np.float64,
}  # fmt: skip
# Registers of the fragments: (A, B, C) by type of A and of C.
REGISTERS = {
    ("f16", "f32"): (8, 8, 8), ("f16", "f16"): (8, 8, 4), ("tf32", "f32"): (4, 4, 8),
    ("f64", "f64"): (1, 1, 2),
}  # fmt: skip


def sizes(shape: str, a: str, c: str) -> tuple[int, int, int]:
    m, n, k = dimensions(shape)
    if (a, c) in REGISTERS:
        return REGISTERS[a, c]
    per_word = 4 if a in ("s8", "u8") else 2
    return m * k // 32 // per_word, k * n // 32 // per_word, 8


def dimensions(shape: str) -> tuple[int, int, int]:
    m, rest = shape[1:].split("n")
    n, k = rest.split("k")
    return int(m), int(n), int(k)


def stored(x: np.ndarray, layout: str, stride: int) -> np.ndarray:
    """A matrix as it lies in memory, rows (or columns) ``stride`` elements apart."""
    lines = x if layout == "row" else x.T
    memory = np.zeros((lines.shape[0], stride), x.dtype)
    memory[:, : lines.shape[1]] = lines
    return memory


def product(
    shape: str, kinds: tuple[str, str, str], layouts: tuple[str, str, str, str], tail: str = "",
    low: int = -5, high: int = 6, space: str = ".global",
) -> tuple[np.ndarray, np.ndarray, Run]:  # fmt: skip
    """What the device leaves in D, and the exact result; ``layouts``: of A, B, C and D."""
    a_kind, c_kind, d_kind = kinds
    m, n, k = dimensions(shape)
    generator = np.random.default_rng(m + n)
    a, b = generator.integers(low, high, (m, k)), generator.integers(low, high, (k, n))
    c = generator.integers(-100, 100, (m, n))
    stride = 48
    a_mem, b_mem = (
        stored(x.astype(DTYPES[a_kind]), layout, stride)
        for x, layout in zip((a, b), layouts, strict=False)
    )
    c_mem = stored(c.astype(DTYPES[c_kind]), layouts[2], stride)
    d_mem = np.full_like(stored(c.astype(DTYPES[d_kind]), layouts[3], stride), 77)
    count_a, count_b, count_c = sizes(shape, a_kind, c_kind)
    count_d = sizes(shape, a_kind, d_kind)[2]
    wide = a_kind == "f64"
    register = "%q" if wide else "%w"
    counts = {"a": count_a, "b": count_b, "c": count_c, "d": count_d}
    groups = {
        name: "{" + ", ".join(f"{register}{name}{i}" for i in range(count)) + "}"
        for name, count in counts.items()
    }
    types = {
        ("f16", "f32"): f"{d_kind}.{c_kind}", ("f16", "f16"): f"{d_kind}.{c_kind}",
    }.get((a_kind, c_kind), f"{d_kind}.{a_kind}.{a_kind}.{c_kind}{tail}")  # fmt: skip
    declared = " ".join(
        f".reg .b{64 if wide else 32} {register}{name}<{count}>;" for name, count in counts.items()
    )
    body = f"""
        {declared}
        mov.u32 %r1, {stride};
        wmma.load.a.sync.aligned.{layouts[0]}.{shape}{space}.{a_kind} {groups["a"]}, [%a], %r1;
        wmma.load.b.sync.aligned.{layouts[1]}.{shape}{space}.{a_kind} {groups["b"]}, [%b], {stride};
        wmma.load.c.sync.aligned.{layouts[2]}.{shape}{space}.{c_kind} {groups["c"]}, [%c], %r1;
        wmma.mma.sync.aligned.{layouts[0]}.{layouts[1]}.{shape}.{types}
            {groups["d"]}, {groups["a"]}, {groups["b"]}, {groups["c"]};
        wmma.store.d.sync.aligned.{layouts[3]}.{shape}{space}.{d_kind} [%d], {groups["d"]}, %r1;
    """
    result = run(body, {"a": a_mem, "b": b_mem, "c": c_mem, "d": d_mem})
    d = result.arrays["d"]
    width = n if layouts[3] == "row" else m
    assert (d[:, width:] == 77).all()
    d = d[:, :width] if layouts[3] == "row" else d[:, :width].T
    return d.astype(np.float64), (a @ b + c).astype(np.float64), result


LAYOUTS = [
    ("row", "col", "row", "row"), ("col", "row", "col", "col"), ("row", "row", "row", "col"),
    ("col", "col", "col", "row"),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize(
    "kinds", [("f16", "f32", "f32"), ("f16", "f16", "f16"), ("f16", "f16", "f32"),
              ("bf16", "f32", "f32"), ("s8", "s32", "s32")],
)  # fmt: skip
def test_products(
    shape: str, layouts: tuple[str, str, str, str], kinds: tuple[str, str, str]
) -> None:
    got, exact, _ = product(shape, kinds, layouts)
    assert np.array_equal(got, exact)


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_tf32_and_f64(layouts: tuple[str, str, str, str]) -> None:
    for shape, kinds in (("m16n16k8", ("tf32", "f32", "f32")), ("m8n8k4", ("f64", "f64", "f64"))):
        got, exact, _ = product(shape, kinds, layouts, space="")
        assert np.array_equal(got, exact)


def test_unsigned_bytes_and_saturation() -> None:
    got, exact, _ = product("m16n16k16", ("u8", "s32", "s32"), LAYOUTS[0], ".satfinite", 0, 256)
    assert np.array_equal(got, exact)


def test_traffic_is_the_matrices() -> None:
    """Each element is requested once, whatever the fragments repeat."""
    _, _, result = product("m16n16k16", ("f16", "f32", "f32"), LAYOUTS[0])
    requested = {
        (t.tensor, t.direction): t.requested for t in result.report.traffic.tensors
    }  # fmt: skip
    assert requested["a", "read"] == requested["b", "read"] == 16 * 16 * 2
    assert requested["c", "read"] == requested["d", "write"] == 16 * 16 * 4


def test_fragments_scaled_element_by_element() -> None:
    """What programs may do with a fragment: the same to every element."""
    names = ", ".join(f"%f{k}" for k in range(8))
    scaled = "\n".join(f"mul.f32 %f{k}, %f{k}, 0f40400000;" for k in range(8))
    body = f"""
        .shared .align 32 .b8 pool[1024];
        mov.u32 %r9, pool;
        wmma.load.c.sync.aligned.m16n16k16.row.f32 {{{names}}}, [%x];
        {scaled}
        wmma.store.d.sync.aligned.col.m16n16k16.shared.f32 [%r9], {{{names}}};
        bar.sync 0;
        wmma.load.c.sync.aligned.row.m16n16k16.shared.f32 {{{names}}}, [%r9];
        wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [%y], {{{names}}};
    """
    x = np.arange(256, dtype=np.float32).reshape(16, 16)
    got = run(body, {"x": x, "y": np.zeros_like(x)}).arrays["y"]
    assert np.array_equal(got, 3 * x.T)
