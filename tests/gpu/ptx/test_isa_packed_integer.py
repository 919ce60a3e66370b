"""16-bit pairs, SIMD video instructions, dot products and cvt.pack, field by field in Python."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from lanes import lanewise


def words(count: int = 256) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(11)
    a, b, c = generator.integers(0, 1 << 32, (3, count), np.uint32)
    corners = np.array([0, 0xFFFFFFFF, 0x80008000, 0x7FFF7FFF, 0x80808080, 0x7F7F7F7F, 0x00FF8001])
    a[:49], b[:49] = np.repeat(corners, 7), np.tile(corners, 7)
    return a, b, c


def split(word: int, bits: int, signed: bool) -> list[int]:
    parts = [word >> place & ((1 << bits) - 1) for place in range(0, 32, bits)]
    return [p - (1 << bits) if signed and p >> (bits - 1) else p for p in parts]


def join(parts: list[int], bits: int) -> int:
    return sum((p & ((1 << bits) - 1)) << bits * k for k, p in enumerate(parts))


def average(x: int, y: int) -> int:
    return (x + y + 1) >> 1 if x + y >= 0 else (x + y) >> 1


OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "avrg": average,
    "absdiff": lambda x, y: abs(x - y),
    "min": min,
    "max": max,
}


@pytest.mark.parametrize("kind", ["u16x2", "s16x2"])
def test_pairs(kind: str) -> None:
    a, b, _ = words()
    names = ["add", "min", "max"]
    text = "\n".join(f"{name}.{kind} %{name}, %a, %b;" for name in names)
    if kind == "s16x2":
        text += "\nmin.relu.s16x2 %lower, %a, %b;\nmax.relu.s16x2 %upper, %a, %b;"
        names += ["lower", "upper"]
    got = lanewise(text, {"a": a, "b": b}, dict.fromkeys(names, np.uint32))
    for name in names:
        plain = {"lower": "min", "upper": "max"}.get(name, name)
        for k in range(len(a)):
            parts = [split(int(w[k]), 16, kind == "s16x2") for w in (a, b)]
            results = [OPERATIONS[plain](x, y) for x, y in zip(*parts, strict=True)]
            if plain != name:
                results = [max(r, 0) for r in results]
            assert int(got[name][k]) == join(results, 16), (name, hex(a[k]), hex(b[k]))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("count", [2, 4])
def test_simd_video(name: str, count: int) -> None:
    a, b, c = words(64)
    bits = 32 // count
    forms = [("u32", "u32", "u32"), ("s32", "s32", "s32"), ("s32", "u32", "s32")]
    lines, results = [], {}
    for index, kinds in enumerate(forms):
        for tail in ("", ".sat", ".add"):
            result = f"r{index}{tail[1:]}"
            lines.append(f"v{name}{count}.{'.'.join(kinds)}{tail} %{result}, %a, %b, %c;")
            results[result] = (kinds, tail)
    got = lanewise("\n".join(lines), {"a": a, "b": b, "c": c}, dict.fromkeys(results, np.uint32))
    for result, (kinds, tail) in results.items():
        to, left, right = (kind == "s32" for kind in kinds)
        for k in range(len(a)):
            parts = split(int(a[k]), bits, left), split(int(b[k]), bits, right)
            values = [OPERATIONS[name](x, y) for x, y in zip(*parts, strict=True)]
            least = -(1 << (bits - 1)) if to else 0
            if tail == ".add":
                wanted = (int(c[k]) + sum(values)) % (1 << 32)
            else:
                if tail:
                    values = [min(max(v, least), least + (1 << bits) - 1) for v in values]
                wanted = join(values, bits)
            assert int(got[result][k]) == wanted, (name, count, kinds, tail)


def test_dp2a() -> None:
    a, b, c = words()
    forms = [(h, x, y) for h in ("lo", "hi") for x in ("u32", "s32") for y in ("u32", "s32")]
    names = {f"{h}{x}{y}": (h, x, y) for h, x, y in forms}
    text = "\n".join(f"dp2a.{h}.{x}.{y} %{n}, %a, %b, %c;" for n, (h, x, y) in names.items())
    got = lanewise(text, {"a": a, "b": b, "c": c}, dict.fromkeys(names, np.uint32))
    for n, (half, x, y) in names.items():
        for k in range(len(a)):
            halves = split(int(a[k]), 16, x == "s32")
            four = split(int(b[k]), 8, y == "s32")
            two = four[:2] if half == "lo" else four[2:]
            total = int(c[k]) + halves[0] * two[0] + halves[1] * two[1]
            assert int(got[n][k]) == total % (1 << 32)


def test_cvt_pack() -> None:
    a, b, c = words()
    a[::3] >>= 20
    b[::2] >>= 24
    kinds = ["u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"]
    text = "\n".join(
        f"cvt.pack.sat.{kind}.s32{'' if kind[1:] == '16' else '.b32'} %{kind}, %a, %b"
        f"{'' if kind[1:] == '16' else ', %c'};"
        for kind in kinds
    )
    got = lanewise(text, {"a": a, "b": b, "c": c}, dict.fromkeys(kinds, np.uint32))
    for kind in kinds:
        bits = int(kind[1:])
        least = -(1 << (bits - 1)) if kind[0] == "s" else 0
        for k in range(len(a)):
            high, low = (
                min(max(split(int(w[k]), 32, True)[0], least), least + (1 << bits) - 1)
                for w in (a, b)
            )
            packed = join([low, high], bits)
            wanted = packed if bits == 16 else (packed | int(c[k]) << 2 * bits) % (1 << 32)
            assert int(got[kind][k]) == wanted, kind
