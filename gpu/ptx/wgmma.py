"""Warpgroup tensor-core operations: matrix descriptors, operands in shared memory, and what is in
flight.

An operation is issued, joined to others in a group by commit, and done some time before the wait.
The executor does it at the commit (eager) or at the wait (lazy, random); until then its
accumulators hold NaN under the latter.  Operations that feed one accumulator are done as one long
product.  Source: PTX ISA 8.8, 9.7.15 (asynchronous warpgroup level matrix instructions): 9.7.15.5.1
(operands), 9.7.15.5.1.2.2 (descriptor); canonical layouts as CUTLASS documents them
(include/cute/arch/mma_sm90_desc.hpp).
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
from simkit.numerics.formats import encode_f16
from simkit.numerics.tensor_core import dot_accumulate

if TYPE_CHECKING:
    from gpu.ptx.grid import Grid

Array = np.ndarray

WARPS = 4
ROWS = 64
_CHUNK = 16  # bytes that every layout keeps together
# Descriptor bits 62-63; rows of the swizzle atom are as wide as the swizzle.
_SWIZZLES = {0: "none", 1: "128B", 2: "64B", 3: "32B"}
_ATOM_BYTES = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
ELEMENT_BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}


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
    start: Array | None = None

    def of(self, chosen: Array) -> Operation:
        """The operation of a choice of its warpgroups."""
        a, b = (
            replace(o, descriptors=None if o.descriptors is None else o.descriptors[chosen])
            for o in (self.a, self.b)
        )
        start = None if self.start is None else self.start[chosen]
        return replace(
            self,
            warps=self.warps[chosen],
            a=a,
            b=b,
            accumulate=self.accumulate[chosen],
            start=start,
        )

    def continues(self, before: Operation) -> bool:
        """Whether this only adds more products to the sum of the operation before."""
        same = (self.accumulator, self.n, self.is_half, self.a.kind, self.b.kind)
        others = (before.accumulator, before.n, before.is_half, before.a.kind, before.b.kind)
        return (
            same == others
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


def load_operand(grid: Grid, operand: Operand, ctas: Array, rows: int, k: int, site: int) -> Array:
    """A (as (warpgroups, rows, k)) or B transposed (the same with rows = n) from shared memory,
    float32.
    """
    assert operand.descriptors is not None
    element = ELEMENT_BYTES[operand.kind]
    result = np.empty((len(ctas), rows, k), np.float32)
    forms = operand.descriptors >> 16
    for form in np.unique(forms):
        chosen = np.flatnonzero(forms == form)
        layout = layout_of(int(form) << 16, not operand.transposed)
        offsets = chunk_offsets(layout, rows, k, element)
        start = (operand.descriptors[chosen] & 0x3FFF) << 4
        local = tma.swizzle(start[:, None, None] + offsets, layout.swizzle)
        if local.size and int(local.max()) + _CHUNK > grid.shared_bytes:
            raise LaunchError(
                f"{grid.place(site)}: a wgmma descriptor reaches shared offset"
                f" {int(local.max()) + _CHUNK}, the CTA has {grid.shared_bytes} bytes"
            )
        grid.counters.shared_bulk(local.size)
        flat = local + (ctas[chosen] * grid.shared_stride)[:, None, None]
        chunks = grid.shared.gather(flat, 16, 1)[0]
        values = decode(chunks, operand.kind)
        result[chosen] = values.swapaxes(1, 2) if operand.transposed else values
    if operand.negated:
        np.negative(result, out=result)
    return result


def decode(chunks: Array, kind: str) -> Array:
    """16-byte chunks (..., chunks) as float32 elements (..., chunks * per chunk)."""
    element = ELEMENT_BYTES[kind]
    raw = chunks.view(f"u{element}").reshape(*chunks.shape[:-1], -1)
    if kind == "bf16":
        wide = raw.astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    if kind == "f16":
        return raw.view(np.float16).astype(np.float32)
    if kind == "tf32":
        return (raw & np.uint32(0xFFFFE000)).view(np.float32)
    return BYTE_TABLES[kind][raw]


BYTE_TABLES = {
    kind: np.concatenate(DECODERS[kind](np.arange(256, dtype=np.uint32)[:, None])[:1]).reshape(-1)
    for kind in ("e4m3", "e5m2")
}


def registers_a(grid: Grid, operand: Operand, warps: Array) -> Array:
    """A (warpgroups, 64, k) from the registers of four warps of 16 rows each."""
    words = [grid.read_register(name, warps.reshape(-1)) for name in operand.registers]
    decoded = [DECODERS[operand.kind](w.view(np.uint32)) for w in words]
    per = len(decoded[0])
    groups, halves = len(warps), len(words) // 2
    a = np.empty((groups, WARPS, 2, 8, halves, 4, per), np.float32)
    for index, elements in enumerate(decoded):
        for place, element in enumerate(elements):
            spread = element.reshape(8, 4, groups, WARPS).transpose(2, 3, 0, 1)
            a[:, :, index % 2, :, index // 2, :, place] = spread
    result = a.reshape(groups, ROWS, halves * 4 * per)
    return -result if operand.negated else result


def read_accumulator(grid: Grid, operation: Operation) -> Array:
    """The accumulator (warpgroups, 64, n) from its registers."""
    groups, tiles = len(operation.warps), operation.n // 8
    warps = operation.warps.reshape(-1)
    d = np.empty((groups, WARPS, 2, 8, tiles, 4, 2), np.float32)
    for index, name in enumerate(operation.accumulator):
        word = grid.read_register(name, warps)
        if operation.is_half:
            tile, half = divmod(index, 2)
            for place in range(2):
                bits = (word.view(np.uint32) >> np.uint32(16 * place)).astype(np.uint16)
                value = bits.view(np.float16).astype(np.float32)
                d[:, :, half, :, tile, :, place] = _by_group(value, groups)
        else:
            tile, half, place = index // 4, index // 2 % 2, index % 2
            d[:, :, half, :, tile, :, place] = _by_group(word.view(np.float32), groups)
    return d.reshape(groups, ROWS, operation.n)


def _by_group(value: Array, groups: int) -> Array:
    return value.reshape(8, 4, groups, WARPS).transpose(2, 3, 0, 1)


def write_accumulator(grid: Grid, operation: Operation, matrix: Array) -> None:
    """The inverse of read_accumulator."""
    groups, tiles = len(operation.warps), operation.n // 8
    warps = operation.warps.reshape(-1)
    d = matrix.reshape(groups, WARPS, 2, 8, tiles, 4, 2)

    def lanes(half: int, tile: int, place: int) -> Array:
        return d[:, :, half, :, tile, :, place].transpose(2, 3, 0, 1).reshape(32, -1)

    for index, name in enumerate(operation.accumulator):
        if operation.is_half:
            tile, half = divmod(index, 2)
            low, high = (encode_f16(np.ascontiguousarray(lanes(half, tile, p))) for p in range(2))
            word = low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)
        else:
            word = np.ascontiguousarray(lanes(index // 2 % 2, index // 4, index % 2)).view(
                np.uint32
            )
        grid.write_register(name, warps, word)


def poison(grid: Grid, operation: Operation) -> None:
    """Registers that an operation in flight owns hold NaN."""
    warps = operation.warps.reshape(-1)
    for name in operation.accumulator:
        grid.write_register(name, warps, np.full((32, len(warps)), 0xFFFFFFFF, np.uint32))


def product(grid: Grid, operations: Sequence[Operation], start: Array) -> Array:
    """``start`` plus the products of operations that feed one accumulator, in order."""
    first = operations[0]
    ctas = grid.cta_of_warp[first.warps[:, 0]]
    parts_a, parts_b = [], []
    for operation in operations:
        k = _CHUNK * 2 // ELEMENT_BYTES[operation.a.kind]
        if operation.a.descriptors is None:
            parts_a.append(registers_a(grid, operation.a, operation.warps))
        else:
            parts_a.append(load_operand(grid, operation.a, ctas, ROWS, k, operation.site))
        parts_b.append(load_operand(grid, operation.b, ctas, operation.n, k, operation.site))
    a = parts_a[0] if len(parts_a) == 1 else np.concatenate(parts_a, axis=2)
    b = parts_b[0] if len(parts_b) == 1 else np.concatenate(parts_b, axis=2)
    core = grid.warpgroup_core(first.a.kind, first.is_half)
    if core is None:
        result = np.matmul(a, b.swapaxes(1, 2))
        result += start
        return result
    batch_last = dot_accumulate(
        np.ascontiguousarray(a.transpose(1, 2, 0)),
        np.ascontiguousarray(b.transpose(2, 1, 0)),
        np.ascontiguousarray(start.transpose(1, 2, 0)),
        core,
    )
    return np.ascontiguousarray(batch_last.transpose(2, 0, 1))


class WarpgroupQueue:
    """Operations in flight: issued, then committed to groups, then waited for, per warpgroup."""

    def __init__(self, grid: Grid, delays: bool) -> None:
        self.grid = grid
        self.delays = delays
        self.open: list[Operation] = []
        # (operation, each warpgroup's group number)
        self.groups: list[tuple[Operation, Array]] = []
        self.committed = np.zeros(grid.warps, np.int64)

    def issue(self, operation: Operation) -> None:
        if self.delays:
            if not self._in_flight(operation):
                operation = replace(operation, start=self._start(operation))
            poison(self.grid, operation)
        self.open.append(operation)

    def _in_flight(self, operation: Operation) -> bool:
        warps = set(operation.warps[:, 0].tolist())
        earlier = (*self.open, *(op for op, _ in self.groups))
        return any(
            op.accumulator == operation.accumulator
            and not warps.isdisjoint(op.warps[:, 0].tolist())
            for op in earlier
        )

    def _start(self, operation: Operation) -> Array:
        matrix = read_accumulator(self.grid, operation)
        matrix[~operation.accumulate] = 0
        return matrix

    def commit(self, warps: Array) -> None:
        """The open operations of these warps (whole warpgroups) become a group."""
        mine, self.open = _select(self.open, warps)
        leaders = warps.reshape(-1, WARPS)[:, 0]
        if self.delays:
            self.groups += [(op, self.committed[op.warps[:, 0]].copy()) for op in mine]
        else:
            self._run(mine)
        self.committed[leaders] += 1

    def wait(self, warps: Array, allowed: int) -> None:
        """Does what all but the ``allowed`` latest groups of these warpgroups hold."""
        if not self.groups:
            return
        waiting = np.zeros(self.grid.warps, bool)
        waiting[warps] = True
        due: list[Operation] = []
        kept: list[tuple[Operation, Array]] = []
        for operation, number in self.groups:
            leaders = operation.warps[:, 0]
            now = waiting[leaders] & (number < self.committed[leaders] - allowed)
            if now.all():
                due.append(operation)
            elif now.any():
                due.append(operation.of(now))
                kept.append((operation.of(~now), number[~now]))
            else:
                kept.append((operation, number))
        self.groups = kept
        results = self._run(due)
        self._hand_over(results)

    def _hand_over(self, results: list[tuple[Operation, Array]]) -> None:
        """Accumulators that operations still in flight go on with stay theirs."""
        for done, matrix in results:
            for index, (operation, number) in enumerate(self.groups):
                if operation.accumulator == done.accumulator and np.array_equal(
                    operation.warps, done.warps
                ):
                    start = np.where(operation.accumulate[:, None, None], matrix, 0)
                    self.groups[index] = (replace(operation, start=start), number)
                    poison(self.grid, operation)
                    break

    def _run(self, operations: list[Operation]) -> list[tuple[Operation, Array]]:
        results: list[tuple[Operation, Array]] = []
        index = 0
        while index < len(operations):
            chain = [operations[index]]
            while index + len(chain) < len(operations) and operations[index + len(chain)].continues(
                chain[0]
            ):
                chain.append(operations[index + len(chain)])
            index += len(chain)
            first = chain[0]
            start = self._start(first) if first.start is None else first.start
            matrix = product(self.grid, chain, start)
            write_accumulator(self.grid, first, matrix)
            results.append((first, matrix))
        return results


def _select(operations: list[Operation], warps: Array) -> tuple[list[Operation], list[Operation]]:
    """Operations as those of some warps and those of others."""
    chosen = set(warps.tolist())
    mine: list[Operation] = []
    others: list[Operation] = []
    for operation in operations:
        inside = np.array([w in chosen for w in operation.warps[:, 0].tolist()])
        if inside.any():
            mine.append(operation if inside.all() else operation.of(inside))
        if not inside.all():
            others.append(operation if not inside.any() else operation.of(~inside))
    return mine, others
