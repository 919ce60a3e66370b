"""Products of small matrices by warp, for every type but the f32 accumulators of mma.sync.

Matrices are (rows, columns, warps).  Floating products are the tensor core's, f64 a chain of fused
multiply-adds in ascending order, integers exact.  Sources: PTX ISA 8.8, 9.7.14.5 (fragments and
accuracy of mma), 9.7.14.4 (wmma).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpu.ptx.fragments import DECODERS
from simkit.numerics import double
from simkit.numerics.formats import decode_f16, encode_f16
from simkit.numerics.tensor_core import dot_accumulate, dot_accumulate_fast, half_precision

if TYPE_CHECKING:
    from gpu.ptx.grid import Grid

Array = np.ndarray

# Bits of one element, and of the register that holds some.
BITS = {
    "f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8,
    "s4": 4, "u4": 4, "b1": 1, "f64": 64,
}  # fmt: skip


def register_bits(kind: str) -> int:
    return 64 if kind == "f64" else 32


def _integers(bits: int, is_signed: bool) -> Callable[[Array], list[Array]]:
    """The fields of a word as int32, the lowest first."""

    def split(word: Array) -> list[Array]:
        parts = []
        for place in range(0, 32, bits):
            up = np.uint32(32 - bits - place)
            if is_signed:
                parts.append((word << up).view(np.int32) >> np.int32(32 - bits))
            else:
                parts.append((word << up >> np.uint32(32 - bits)).view(np.int32))
        return parts

    return split


# Elements of a register of 32 bits (64 for f64), the lowest first.
_SPLIT: dict[str, Callable[[Array], list[Array]]] = {
    **DECODERS,
    "s8": _integers(8, True), "u8": _integers(8, False),
    "s4": _integers(4, True), "u4": _integers(4, False),
    "b1": lambda word: [word],
    "f64": lambda word: [word.view(np.float64)],
    "f32": lambda word: [word.view(np.float32)],
    "s32": lambda word: [word.view(np.int32)],
}  # fmt: skip


def elements(registers: Sequence[Array], kind: str) -> list[Array]:
    """All elements of a fragment, in the order of the ISA's indices."""
    return [element for register in registers for element in _SPLIT[kind](register)]


def registers(values: Sequence[Array], kind: str) -> list[Array]:
    """The inverse of ``elements`` for accumulators."""
    if kind != "f16":
        return [np.ascontiguousarray(v).view(f"u{BITS[kind] // 8}") for v in values]
    halves = [encode_f16(np.ascontiguousarray(v, np.float32)).astype(np.uint32) for v in values]
    return [
        low | high << np.uint32(16) for low, high in zip(halves[::2], halves[1::2], strict=True)
    ]


# Layouts of mma: which element of a matrix each lane holds.


def matrix_a(fragment: Sequence[Array], kind: str, rows: int) -> Array:
    """A (rows, K, warps): registers run over rows 8 apart, then over groups of columns."""
    parts = [_SPLIT[kind](r) for r in fragment]
    per, halves, warps = len(parts[0]), rows // 8, fragment[0].shape[1]
    a = np.empty((halves, 8, len(parts) // halves, 4, per, warps), parts[0][0].dtype)
    for index, part in enumerate(parts):
        for place, element in enumerate(part):
            a[index % halves, :, index // halves, :, place] = element.reshape(8, 4, warps)
    return a.reshape(rows, -1, warps)


def matrix_b(fragment: Sequence[Array], kind: str) -> Array:
    """B (K, 8, warps)."""
    parts = [_SPLIT[kind](r) for r in fragment]
    per, warps = len(parts[0]), fragment[0].shape[1]
    b = np.empty((len(parts), 4, per, 8, warps), parts[0][0].dtype)
    for index, part in enumerate(parts):
        for place, element in enumerate(part):
            b[index, :, place] = element.reshape(8, 4, warps).transpose(1, 0, 2)
    return b.reshape(-1, 8, warps)


def matrix_c(fragment: Sequence[Array], kind: str) -> Array:
    """C (rows, 8, warps): pairs of columns, then rows 8 apart."""
    values = elements(fragment, kind)
    warps = values[0].shape[1]
    c = np.empty((len(values) // 2, 8, 4, 2, warps), values[0].dtype)
    for index, value in enumerate(values):
        c[index // 2, :, :, index % 2] = value.reshape(8, 4, warps)
    return c.reshape(-1, 8, warps)


def fragment_c(d: Array, kind: str) -> list[Array]:
    """The registers of an accumulator: the inverse of matrix_c."""
    parts = d.reshape(d.shape[0] // 8, 8, 4, 2, -1)
    count = 2 * parts.shape[0]
    return registers([parts[k // 2, :, :, k % 2].reshape(32, -1) for k in range(count)], kind)


# Layouts of mma.m8n8k4 of f16: four products of 8 x 8 x 4, each by eight lanes.

_LANE = np.arange(32)
_QUARTER = _LANE % 16 // 4
_UPPER = _LANE // 16 * 4
_PLACE = _LANE % 4


def _quarter_places(part: str, is_row_major: bool, index: int) -> tuple[Array, Array]:
    """Row and column of element ``index`` of every lane."""
    along = np.full(32, index)
    if part == "a":
        return (_PLACE + _UPPER, along) if is_row_major else (along + _UPPER, _PLACE)
    if part == "b":
        return (_PLACE, along + _UPPER) if is_row_major else (along, _PLACE + _UPPER)
    if part == "f16":
        return _PLACE + _UPPER, along
    rows = (_LANE & 1) + (index & 2) + _UPPER
    return rows, (index & 4) + (_LANE & 2) + (index & 1)


def quarter_matrix(
    fragment: Sequence[Array], kind: str, part: str, is_row_major: bool = True
) -> Array:
    """A or B of m8n8k4, or its accumulator (``part``: its type): (8, 4 or 8, 4 warps)."""
    values = elements(fragment, kind)
    warps = values[0].shape[1]
    shape = {"a": (8, 4), "b": (4, 8)}.get(part, (8, 8))
    matrix = np.empty((*shape, 4, warps), np.float32)
    for index, value in enumerate(values):
        matrix[*_quarter_places(part, is_row_major, index), _QUARTER] = value
    return matrix.reshape(*shape, 4 * warps)


def quarter_fragment(d: Array, kind: str) -> list[Array]:
    """The registers of an accumulator of m8n8k4."""
    parts = d.reshape(8, 8, 4, -1)
    values = [parts[*_quarter_places(kind, True, index), _QUARTER] for index in range(8)]
    return registers(values, kind)


# Layouts of wmma, which the ISA leaves open: elements in the order of memory, some to each lane.


def wmma_matrix(fragment: Sequence[Array], kind: str, major: int, minor: int) -> Array:
    """The matrix (major, minor, warps) of a wmma fragment; lanes beyond its end repeat it."""
    values = np.stack(elements(fragment, kind), axis=1)
    return values.reshape(-1, values.shape[2])[: major * minor].reshape(major, minor, -1)


def wmma_fragment(d: Array, kind: str) -> list[Array]:
    """The registers of an accumulator."""
    values = d.reshape(32, -1, d.shape[2])
    return registers([values[:, k] for k in range(values.shape[1])], kind)


# Products


def product(grid: Grid, a: Array, b: Array, c: Array, kind: str, to: str) -> Array:
    """a @ b + c on the tensor core, for floating inputs; ``to``: f32 or f16."""
    a, b, c = (np.ascontiguousarray(x, np.float32) for x in (a, b, c))
    core = grid.tensor_core(kind)
    if core is None:
        result = dot_accumulate_fast(a, b, c)
        return decode_f16(encode_f16(result)) if to == "f16" else result
    return dot_accumulate(a, b, c, half_precision(core) if to == "f16" else core)


def integer_product(a: Array, b: Array, c: Array, is_limited: bool) -> Array:
    """a @ b + c of integers; wraps at 32 bits, or is limited to them (``.satfinite``)."""
    total = c.astype(np.int64)
    for k in range(a.shape[1]):
        total += a[:, k, None] * b[k]
    if is_limited:
        total = np.clip(total, -(2**31), 2**31 - 1)
    return total.astype(np.int32)


def bit_product(a: Array, b: Array, c: Array, operation: str) -> Array:
    """For words of bits: how many bits of a xor b (or a and b) are set, plus c."""
    combine = np.bitwise_xor if operation == "xor" else np.bitwise_and
    total = c.astype(np.int64)
    for k in range(a.shape[1]):
        total += np.bitwise_count(combine(a[:, k, None], b[k]))
    return total.astype(np.int32)


def double_product(a: Array, b: Array, c: Array, mode: str) -> Array:
    """a @ b + c in float64: fused multiply-adds in ascending order of K."""
    result = c
    for k in range(a.shape[1]):
        result = double.fma(a[:, k, None], b[k], result, mode)
    return result
