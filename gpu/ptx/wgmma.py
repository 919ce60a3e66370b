"""Warpgroup tensor-core operations: matrix descriptors, operands in shared memory and registers,
products.

Operations that feed one accumulator are done as one long product.  Source: PTX ISA 8.8, 9.7.15.5.1
(fragments, canonical layouts, descriptor); CUTLASS writes the same layouts down in
include/cute/atom/mma_traits_sm90_gmma.hpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from gpu.ptx import tma
from gpu.ptx.fragments import DECODERS
from simkit.errors import LaunchError
from simkit.numerics.formats import decode_f16, encode_f16
from simkit.numerics.tensor_core import dot_accumulate, prepare

if TYPE_CHECKING:
    from gpu.ptx.grid import Grid

Array = np.ndarray

WARPS = 4
ROWS = 64
_BASE_OFFSET_SHIFT = 49
_CHUNK = 16  # bytes that every layout keeps together
# Elements of A and B that are multiplied together in plain float32: they stay in the cache.
_PIECE = 1 << 19
_PADDING = 16
# Descriptor bits 62-63; rows of the swizzle atom are as wide as the swizzle.
_SWIZZLES = {0: "none", 1: "128B", 2: "64B", 3: "32B"}
_ATOM_BYTES = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
ELEMENT_BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


@dataclass(frozen=True, slots=True)
class Layout:
    """How a descriptor lays out an operand: byte strides, swizzle, and which dimension is
    contiguous.
    """

    leading: int
    stride: int
    swizzle: str
    is_k_major: bool


@dataclass(frozen=True, slots=True)
class Operand:
    """A or B: descriptors in shared memory (one per warpgroup), or registers (A only)."""

    kind: str
    negated: bool
    transposed: bool
    descriptors: Array | None = None
    registers: tuple[str, ...] = ()

    def part(self, chosen: Array) -> Operand:
        """The operand of a choice of the warpgroups."""
        if self.descriptors is None:
            return self
        return replace(self, descriptors=self.descriptors[chosen])

    @property
    def form(self) -> tuple[object, ...]:
        """What two operands must share to be parts of a longer one."""
        return self.kind, self.negated, self.transposed, self.descriptors is None


@dataclass(frozen=True, slots=True)
class Operation:
    """One wgmma.mma_async of some warpgroups.

    ``warps`` (warpgroups, 4); ``accumulate`` per warpgroup (scale-d); ``start``: the accumulator at
    issue (warpgroups, 64, n), or None to take it from the registers or from the operation before.
    """

    warps: Array
    n: int
    a: Operand
    b: Operand
    accumulate: Array
    accumulator: tuple[str, ...]
    is_half: bool
    site: int
    is_saturated: bool = False
    start: Array | None = None

    def of(self, chosen: Array) -> Operation:
        """The operation of a choice of its warpgroups."""
        start = None if self.start is None else self.start[chosen]
        return replace(
            self,
            warps=self.warps[chosen],
            a=self.a.part(chosen),
            b=self.b.part(chosen),
            accumulate=self.accumulate[chosen],
            start=start,
        )

    def continues(self, before: Operation) -> bool:
        """Whether this only adds more products to the sum of the operation before."""
        same = (self.accumulator, self.n, self.is_half, self.a.form, self.b.form)
        others = (before.accumulator, before.n, before.is_half, before.a.form, before.b.form)
        return (
            same == others
            and not self.is_saturated
            and self.start is None
            and bool(self.accumulate.all())
            and np.array_equal(self.warps, before.warps)
        )


def layout_of(descriptor: int, is_k_major: bool) -> Layout:
    """Strides and swizzle of a matrix descriptor."""
    return Layout(
        leading=(descriptor >> 16 & 0x3FFF) << 4,
        stride=(descriptor >> 32 & 0x3FFF) << 4,
        swizzle=_SWIZZLES[descriptor >> 62 & 3],
        is_k_major=is_k_major,
    )


@lru_cache(maxsize=256)
def chunk_offsets(layout: Layout, rows: int, k: int, element: int) -> Array:
    """Byte offsets of an operand's 16-byte chunks from its start, before the swizzle.

    K-major: (rows, chunks along K).  MN-major: (K, chunks along the rows).  ``rows`` is M or N.
    """
    per_chunk = _CHUNK // element
    atom = _ATOM_BYTES[layout.swizzle]
    if layout.is_k_major:
        row = np.arange(rows)[:, None]
        chunk = np.arange(k // per_chunk)[None, :]
        if layout.swizzle == "none":
            # Core matrices of 8 rows by 16 bytes, contiguous; leading: to the next along K.
            return row // 8 * layout.stride + row % 8 * 16 + chunk * layout.leading
        # Atoms of 8 rows as wide as the swizzle; a step along K stays within a row of the atom.
        return row // 8 * layout.stride + row % 8 * atom + chunk * _CHUNK
    step = np.arange(k)[:, None]
    chunk = np.arange(rows // per_chunk)[None, :]
    if layout.swizzle == "none":
        return step // 8 * layout.leading + step % 8 * 16 + chunk * layout.stride
    chunks = atom // _CHUNK
    return (
        step // 8 * layout.stride
        + step % 8 * atom
        + chunk // chunks * layout.leading
        + chunk % chunks * _CHUNK
    )


@lru_cache(maxsize=256)
def chain_pattern(
    descriptors: tuple[int, ...], is_k_major: bool, rows: int, k: int, element: int
) -> Array:
    """Where in shared memory the chunks of operands that follow each other along K lie, in units of
    chunks.
    """
    parts = []
    for descriptor in descriptors:
        layout = layout_of(descriptor, is_k_major)
        linear = ((descriptor & 0x3FFF) << 4) + chunk_offsets(layout, rows, k, element)
        parts.append(tma.swizzle(linear, layout.swizzle))
    return np.concatenate(parts, axis=1 if is_k_major else 0) // _CHUNK


def chain_descriptors(grid: Grid, operands: Sequence[Operand], site: int) -> Array:
    """Descriptors (warpgroups, steps) of a chain's operands."""
    descriptors = np.stack([o.descriptors for o in operands if o.descriptors is not None], axis=1)
    if (descriptors >> _BASE_OFFSET_SHIFT & 7).any():
        raise LaunchError(
            f"{grid.place(site)}: a wgmma descriptor with a base offset; swizzle patterns have to"
            " begin at a multiple of their size"
        )
    return descriptors


def load_operands(
    grid: Grid, operand: Operand, descriptors: Array, ctas: Array, rows: int, site: int
) -> Array:
    """A chain's operands, all like ``operand``, from shared memory as one: A (warpgroups, rows, all
    K) or B transposed (the same with rows = n), float32.
    """
    element = ELEMENT_BYTES[operand.kind]
    k = 2 * _CHUNK // element
    starts = (ctas * grid.shared_stride // _CHUNK)[:, None, None]
    chunks: Array | None = None
    for row, chosen in _alike(descriptors):
        pattern = chain_pattern(row, not operand.transposed, rows, k, element)
        end = (int(pattern.max()) + 1) * _CHUNK
        if end > grid.shared_bytes:
            raise LaunchError(
                f"{grid.place(site)}: a wgmma descriptor reaches shared offset {end}, the CTA has"
                f" {grid.shared_bytes} bytes"
            )
        grid.counters.shared_bulk(pattern.size * len(chosen))
        found = grid.shared.views[_CHUNK].take(starts[chosen] + pattern)
        if len(chosen) == len(ctas):
            chunks = found
        else:
            if chunks is None:
                chunks = np.empty((len(ctas), *pattern.shape), found.dtype)
            chunks[chosen] = found
    assert chunks is not None
    values = decode(chunks, operand.kind)
    if operand.negated:
        np.negative(values, out=values)
    return values.swapaxes(1, 2) if operand.transposed else values


def _alike(descriptors: Array) -> list[tuple[tuple[int, ...], Array]]:
    """The rows that there are, each with where it stands; most often all CTAs have their operands
    at the same place.
    """
    if (descriptors == descriptors[0]).all():
        return [(tuple(descriptors[0].tolist()), np.arange(len(descriptors)))]
    places: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(descriptors.tolist()):
        places.setdefault(tuple(row), []).append(index)
    return [(row, np.array(indices)) for row, indices in places.items()]


def decode(chunks: Array, kind: str) -> Array:
    """Chunks, or registers, (..., chunks) as float32 elements (..., chunks * per chunk)."""
    element = ELEMENT_BYTES[kind]
    raw = chunks.view(f"u{element}").reshape(*chunks.shape[:-1], -1)
    if kind == "bf16":
        wide = raw.astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    if kind == "f16":
        return decode_f16(raw)
    if kind in ("s8", "u8"):
        return raw.view(np.int8 if kind == "s8" else np.uint8).astype(np.float32)
    if kind == "tf32":
        return (raw & np.uint32(0xFFFFE000)).view(np.float32)
    return BYTE_TABLES[kind][raw]


BYTE_TABLES = {
    kind: np.concatenate(DECODERS[kind](np.arange(256, dtype=np.uint32)[:, None])[:1]).reshape(-1)
    for kind in ("e4m3", "e5m2")
}


def registers_a(grid: Grid, operands: Sequence[Operand], warps: Array) -> Array:
    """A of a chain (warpgroups, 64, all K) from the registers of four warps of 16 rows each."""
    names = [name for operand in operands for name in operand.registers]
    order = _register_order(len(operands))
    words = _read_registers(grid, names, warps).reshape(len(order), -1).take(order, axis=0)
    by_warp = np.ascontiguousarray(words.T).reshape(len(warps), ROWS, -1)
    result = decode(by_warp, operands[0].kind)
    return -result if operands[0].negated else result


@lru_cache(maxsize=64)
def _register_order(steps: int) -> Array:
    """A warp's words in rows of A: which (register, lane) holds each."""
    # register = 4 step + 2 (half of K) + (half of the rows), lane = 4 (row) + (column)
    numbers = np.arange(steps * 128).reshape(steps, 2, 2, 8, 4)
    return np.ascontiguousarray(numbers.transpose(2, 3, 0, 1, 4)).reshape(-1)


@lru_cache(maxsize=64)
def _accumulator_order(n: int) -> Array:
    """A warp's elements in rows of the accumulator: which (register, lane) holds each."""
    # register = 4 (8 columns) + 2 (half of the rows) + (column % 2), lane = 4 (row) + (column / 2)
    numbers = np.arange(16 * n).reshape(n // 8, 2, 2, 8, 4)
    return np.ascontiguousarray(numbers.transpose(1, 3, 0, 4, 2)).reshape(-1)


def _read_registers(grid: Grid, names: Sequence[str], warps: Array) -> Array:
    """Registers (names, 32, all warps) of warpgroups."""
    words = np.empty((len(names), 32, warps.size), np.uint32)
    places = _places(warps)
    for word, name in zip(words, names, strict=True):
        word[...] = grid.read_register(name, places)
    return words


def _places(warps: Array) -> Array | slice:
    """Warps as a slice where they can be one: much faster to read and write."""
    flat = warps.reshape(-1)
    first, last = int(flat[0]), int(flat[-1])
    is_run = last - first + 1 == flat.size and bool((flat[1:] > flat[:-1]).all())
    return slice(first, last + 1) if is_run else flat


def read_accumulator(grid: Grid, operation: Operation) -> Array:
    """The accumulator (warpgroups, 64, n) from its registers."""
    words = _read_registers(grid, operation.accumulator, operation.warps)
    if operation.is_half:
        low, high = words.astype(np.uint16), (words >> np.uint32(16)).astype(np.uint16)
        values = np.stack((low, high), axis=1).view(np.float16).astype(np.float32)
    else:
        values = words.view(np.float32)
    order = _accumulator_order(operation.n)
    rows = values.reshape(len(order), -1).take(order, axis=0)
    return np.ascontiguousarray(rows.T).reshape(-1, ROWS, operation.n)


def write_accumulator(grid: Grid, operation: Operation, matrix: Array) -> None:
    """The inverse of read_accumulator."""
    warps = operation.warps.reshape(-1)
    places = _places(warps)
    order = _accumulator_order(operation.n)
    # Rows a power of two apart would fall on each other in the cache.
    by_warp = np.empty((len(warps), len(order) + _PADDING), np.float32)[:, : len(order)]
    by_warp[...] = matrix.reshape(by_warp.shape)
    rows = np.empty((len(order), len(warps)), np.float32)
    rows[order] = by_warp.T
    if operation.is_half:
        halves = encode_f16(rows).reshape(-1, 2, 32, len(warps)).astype(np.uint32)
        words = halves[:, 0] | halves[:, 1] << np.uint32(16)
    else:
        words = rows.view(np.uint32).reshape(-1, 32, len(warps))
    for word, name in zip(words, operation.accumulator, strict=True):
        grid.write_register(name, places, word)


def poison(grid: Grid, operation: Operation) -> None:
    """Registers that an operation in flight owns hold NaN."""
    warps = operation.warps.reshape(-1)
    for name in operation.accumulator:
        grid.write_register(name, warps, np.full((32, len(warps)), 0xFFFFFFFF, np.uint32))


def product(grid: Grid, operations: Sequence[Operation], start: Array) -> Array:
    """``start`` plus the products of operations that feed one accumulator, in order."""
    first = operations[0]
    ctas = grid.cta_of_warp[first.warps[:, 0]]
    left = [o.a for o in operations]
    is_in_registers = first.a.descriptors is None
    places_a = None if is_in_registers else chain_descriptors(grid, left, first.site)
    places_b = chain_descriptors(grid, [o.b for o in operations], first.site)

    def matrices(part: slice) -> tuple[Array, Array]:
        if places_a is None:
            a = registers_a(grid, left, first.warps[part])
        else:
            a = load_operands(grid, first.a, places_a[part], ctas[part], ROWS, first.site)
        b = load_operands(grid, first.b, places_b[part], ctas[part], first.n, first.site)
        return a, b

    if first.a.kind in ("s8", "u8"):
        # Exact: products have 16 bits, and no sum of them leaves those of float64.
        a, b = (x.astype(np.float64) for x in matrices(slice(None)))
        sums = np.matmul(a, b.swapaxes(1, 2)).astype(np.int64) + start.view(np.int32)
        if first.is_saturated:
            np.clip(sums, -(2**31), 2**31 - 1, out=sums)
        return sums.astype(np.int32).view(np.float32)
    core, core_of_b = (grid.warpgroup_core(x.kind, first.is_half) for x in (first.a, first.b))
    if core is None or core_of_b is None:
        result = np.empty(start.shape, np.float32)
        elements = 2 * _CHUNK // ELEMENT_BYTES[first.a.kind] * len(operations) * (ROWS + first.n)
        count = max(1, _PIECE // elements)
        for begin in range(0, len(ctas), count):
            part = slice(begin, begin + count)
            a, b = matrices(part)
            np.matmul(a, b.swapaxes(1, 2), out=result[part])
        result += start
        return result
    a, b = matrices(slice(None))
    batch_last = dot_accumulate(
        prepare(np.ascontiguousarray(a.transpose(1, 2, 0)), core),
        prepare(np.ascontiguousarray(b.transpose(2, 1, 0)), core_of_b),
        np.ascontiguousarray(start.transpose(1, 2, 0)),
        core,
    )
    return np.ascontiguousarray(batch_last.transpose(2, 0, 1))
