"""A set of warps that run together: what the generated code of a block sees of the machine.

A frame binds register views for its warps (directly when they are all warps or evenly spaced, by
copying otherwise) and carries out loads, stores, shuffle checks, barriers and the rest for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from gpu.ptx import formatting, spaces
from gpu.ptx.memory import Allocation, Bytes
from gpu.ptx.types import DTYPES
from simkit.errors import LaunchError, MemoryAccessError, TrapError
from simkit.numerics.tensor_core import Operand, dot_accumulate, dot_accumulate_fast, prepare

if TYPE_CHECKING:
    from gpu.ptx.emit import Code, Slot
    from gpu.ptx.grid import Grid

Array = np.ndarray
Mask = Array | None

_LANE_BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32))[:, None]
_MATRIX_WORDS = np.arange(4, dtype=np.int64)[None, :, None] * 4
# Byte offsets of a lane's two elements in a transposed 8 x 8 matrix of 16-bit elements, beside
# their rows.
_COLUMN_BYTES = np.repeat(np.arange(8, dtype=np.int64) * 2, 4)[:, None]
_PAIR_ROWS = np.tile(np.arange(4) * 2, 8)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A block ended at a barrier: which one (per warp), for how many threads, and what it
    reduces.
    """

    number: int | Array
    threads: int | Array
    site: int
    operation: str = ""
    predicate: Array | None = None
    target: str = ""


class Frame:
    """Warps of a grid, by their positions in its register file."""

    def __init__(self, grid: Grid, warps: Array) -> None:
        self.grid = grid
        self.warps = warps
        self.n = len(warps)
        self.shape = (32, self.n)
        self.index = _as_slice(warps, grid.warps)
        self.cta = grid.cta_of_warp[warps]
        self.shared_base = self.cta.astype(np.int64) * grid.shared_stride
        self._bound: dict[int, tuple[Array, ...]] = {}
        self._copies: dict[str, Array] = {}

    # Registers

    def bind(self, code: Code) -> tuple[Array, ...]:
        """The views a block asks for.

        Evenly spaced warps are views for good; others are copies for one run.
        """
        bound = self._bound.get(id(code))
        if bound is not None:
            return bound
        if self.index is None:
            reads = set(code.reads)
            registers = self.grid.registers
            self._copies = {
                name: registers[name].take(self.warps, 1)
                if name in reads
                else np.empty(self.shape, registers[name].dtype)
                for name in {*code.reads, *code.writes}
            }
        views = tuple(self._view(slot, wanted) for slot, wanted in code.views)
        if self.index is not None:
            self._bound[id(code)] = views
        return views

    def release(self, code: Code) -> None:
        """Writes copied registers back."""
        if self.index is None:
            for name in code.writes:
                self.grid.registers[name][:, self.warps] = self._copies[name]

    def _view(self, slot: Slot, wanted: str) -> Array:
        kind, key, storage = slot
        if kind == "t":
            array = self.grid.temporary(storage, int(key))[: 32 * self.n].reshape(self.shape)
        elif kind == "s":
            array = self._of_all(self.grid.special(str(key), storage))
        elif self.index is None:
            array = self._copies[str(key)]
        else:
            array = self.grid.registers[str(key)][:, self.index]
        return array if wanted == storage else array.view(DTYPES[wanted])

    def _of_all(self, array: Array) -> Array:
        return array.take(self.warps, 1) if self.index is None else array[:, self.index]

    # Values

    def array(self, value: Array) -> Array:
        """A constant as an array over the lanes; arrays as they are."""
        return value if value.shape == self.shape else np.broadcast_to(value, self.shape)

    def constant(self, value: int) -> Array:
        return np.broadcast_to(np.uint64(value), self.shape)

    def uniform(self, value: Array, mask: Mask, site: int) -> Array:
        """A value that all active lanes of a warp must agree on: one per warp."""
        value = self.array(value)
        if mask is None:
            first = value[0]
            same = (value == first).all()
        else:
            first = np.take_along_axis(value, mask.argmax(axis=0)[None], 0)[0]
            same = ((value == first) | ~mask).all()
        if not same:
            raise LaunchError(
                f"{self.grid.place(site)}: lanes of one warp give different values where one"
                f" is needed"
            )
        return first.astype(np.int64)

    def clock(self, name: str) -> Array:
        return self.grid.clock(name)

    def parameter(self, offset: int, size: int) -> Array:
        return self.grid.parameters[offset : offset + size].view(f"u{size}")[0].reshape(())

    # Convergence

    def members(self, named: Array, mask: Mask) -> Array:
        """Which lanes take part in a warp operation: those named and active."""
        inside = (self.array(named) & _LANE_BITS) != 0
        return inside if mask is None else inside & mask

    def active_mask(self, mask: Mask) -> Array:
        if mask is None:
            return np.full((1, self.n), 0xFFFFFFFF, np.uint32)
        return (mask * _LANE_BITS).sum(axis=0, keepdims=True, dtype=np.uint32)

    def converged(self, named: Array | None, mask: Mask, site: int) -> None:
        """A warp operation needs every living lane that its member mask names."""
        if mask is None:
            return
        living = self._of_all(self.grid.live)
        if named is not None:
            living = living & ((self.array(named) & _LANE_BITS) != 0)
        # A warp without an active lane does not execute the instruction at all.
        missing = living & ~mask & mask.any(axis=0)
        if missing.any():
            lane, warp = (int(v[0]) for v in np.nonzero(missing))
            raise LaunchError(
                f"{self.grid.place(site)}: {self.grid.thread_name(lane, self.warps[warp])} is"
                f" named in the member mask"
                " but does not execute the instruction"
            )

    # Memory

    def load(
        self, space: str, base: Array, offset: int, size: int, count: int, mask: Mask, site: int
    ) -> list[Array]:
        """``count`` elements of ``size`` bytes per lane; lanes outside the mask get anything."""
        if mask is not None and not mask.any():
            return [np.zeros(self.shape, f"u{size}")] * count
        if space == "generic":
            return self._by_space(
                base, offset, mask, lambda s, b, m: self.load(s, b, offset, size, count, m, site)
            )
        memory, offsets = self._locate(space, base, offset, size * count, mask, site, "read")
        return memory.gather(offsets, size, count)

    def store(
        self,
        space: str,
        base: Array,
        offset: int,
        size: int,
        values: Sequence[Array],
        mask: Mask,
        site: int,
    ) -> None:
        """Writes one element per value to consecutive places, in the active lanes."""
        if mask is not None and not mask.any():
            return
        if space == "generic":

            def store_part(part: str, at: Array, chosen: Mask) -> list[Array]:
                self.store(part, at, offset, size, values, chosen, site)
                return []

            self._by_space(base, offset, mask, store_part)
            return
        total = size * len(values)
        memory, offsets = self._locate(space, base, offset, total, mask, site, "write")
        memory.scatter(offsets, size, values, mask)

    def atomic(
        self,
        space: str,
        base: Array,
        offset: int,
        function: Callable[[Array, Array], Array],
        values: Array,
        compare: Array | None,
        mask: Mask,
        site: int,
    ) -> Array:
        """Read-modify-write of one element per lane; the old values."""
        if mask is not None and not mask.any():
            return np.zeros(self.shape, values.dtype)
        if space == "generic":
            return self._by_space(
                base,
                offset,
                mask,
                lambda s, b, m: [self.atomic(s, b, offset, function, values, compare, m, site)],
            )[0]
        size = values.dtype.itemsize
        memory, offsets = self._locate(space, base, offset, size, mask, site, "write")
        return memory.atomic(offsets, function, values, compare, mask)

    def _by_space(
        self,
        base: Array,
        offset: int,
        mask: Mask,
        access: Callable[[str, Array, Mask], list[Array]],
    ) -> list[Array]:
        """A generic access as one access per state space that its addresses point into."""
        base = base.astype(np.uint64, copy=False)
        addresses = base + np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
        top = addresses >> np.uint64(32)
        result: list[Array] | None = None
        covered = np.zeros(self.shape, bool)
        for space, window in (
            ("shared", spaces.SHARED_WINDOW),
            ("local", spaces.LOCAL_WINDOW),
            ("param", spaces.PARAMETER_WINDOW),
            ("global", None),
        ):
            here = ~covered if window is None else top == np.uint64(window >> 32)
            covered |= here
            chosen = here if mask is None else here & mask
            if not chosen.any():
                continue
            whole = None if mask is None and chosen.all() else chosen
            values = access(space, base if window is None else base - np.uint64(window), whole)
            if result is None:
                result = values
            else:
                result = [
                    np.where(chosen, new, old) for new, old in zip(values, result, strict=True)
                ]
        return result or []

    def _locate(
        self, space: str, base: Array, offset: int, size: int, mask: Mask, site: int, direction: str
    ) -> tuple[Bytes, Array]:
        """The memory of a state space and each lane's byte offset in it, checked and counted."""
        grid = self.grid
        if mask is not None:
            # Idle lanes may hold any address: let them follow an active one.
            place = int(mask.argmax())
            base = np.where(mask, base, base.reshape(-1)[place])
        if space in ("global", "const"):
            offsets = base.astype(np.uint64, copy=False).view(np.int64) - (
                spaces.GLOBAL_BASE - offset
            )
            self._check_global(offsets, size, mask, site, direction, space)
            return grid.memory.bytes, offsets
        offsets = base.astype(np.int64) + offset
        if space == "shared":
            self._check(offsets, size, grid.shared_bytes, mask, site, "shared", direction)
            grid.counters.shared(offsets, size, mask)
            return grid.shared, offsets + self.shared_base
        if space == "local":
            self._check(offsets, size, grid.local_bytes, mask, site, "local", direction)
            grid.counters.local(
                size * (offsets.size if mask is None else int(np.count_nonzero(mask)))
            )
            return grid.local, offsets + self._of_all(grid.local_base)
        if space == "param":
            self._check(offsets, size, len(grid.parameters), mask, site, "parameter", direction)
            return grid.parameter_memory, offsets
        raise LaunchError(f"{grid.place(site)}: no access to {space} memory")

    def _check(
        self,
        offsets: Array,
        size: int,
        limit: int,
        mask: Mask,
        site: int,
        space: str,
        direction: str,
    ) -> None:
        bits = int(np.bitwise_or.reduce(offsets, axis=None))
        if bits < 0 or int(offsets.max()) + size > limit:
            bad = (offsets < 0) | (offsets + size > limit)
            self._access_error(
                bad,
                mask,
                offsets,
                size,
                site,
                space,
                direction,
                f"{space} memory has {limit} bytes",
            )
        if bits & (min(size, 16) - 1):
            self._misaligned(offsets, size, mask, site, space, direction)

    def _check_global(
        self, offsets: Array, size: int, mask: Mask, site: int, direction: str, space: str
    ) -> None:
        memory, counters = self.grid.memory, self.grid.counters
        low, high = int(offsets.min()), int(offsets.max()) + size
        allocation = memory.find(low, high)
        if int(np.bitwise_or.reduce(offsets, axis=None)) & (min(size, 16) - 1):
            self._misaligned(offsets + spaces.GLOBAL_BASE, size, mask, site, space, direction)
        if allocation is not None:
            if space == "global":
                counters.global_access(allocation, offsets, size, mask, direction)
            return
        owners = memory.owners(offsets, size)
        bad = owners < 0
        if bad.any() and (mask is None or (bad & mask).any()):
            chosen = bad if mask is None else bad & mask
            stray = int(offsets[chosen][0])
            self._access_error(
                chosen,
                None,
                offsets + spaces.GLOBAL_BASE,
                size,
                site,
                space,
                direction,
                memory.nearest(stray),
            )
        if space == "global":
            for owner in np.unique(owners):
                here = owners == owner if mask is None else (owners == owner) & mask
                if here.any():
                    found: Allocation = memory.allocations[int(owner)]
                    counters.global_access(found, offsets, size, here, direction)

    def _misaligned(
        self, addresses: Array, size: int, mask: Mask, site: int, space: str, direction: str
    ) -> NoReturn:
        bad = (addresses & (min(size, 16) - 1)) != 0
        self._access_error(
            bad, mask, addresses, size, site, space, direction, f"not a multiple of {min(size, 16)}"
        )

    def _access_error(
        self,
        bad: Array,
        mask: Mask,
        addresses: Array,
        size: int,
        site: int,
        space: str,
        direction: str,
        why: str,
    ) -> NoReturn:
        chosen = bad if mask is None else bad & mask
        lane, warp = (int(v[0]) for v in np.nonzero(chosen))
        address = int(addresses[lane, warp]) & 0xFFFFFFFFFFFFFFFF
        raise MemoryAccessError(
            f"{space} {direction} of {size} bytes at 0x{address:x} ({why}) by"
            f" {self.grid.thread_name(lane, int(self.warps[warp]))}, {self.grid.place(site)}"
        )

    # Asynchronous copies

    def source_size(self, taken: Array, size: int) -> Array:
        return np.where(self.array(taken), np.uint32(size), np.uint32(0))

    def copy_async(
        self,
        to: Array,
        to_offset: int,
        origin: Array,
        origin_offset: int,
        size: int,
        taken: Array | None,
        mask: Mask,
        site: int,
    ) -> None:
        """cp.async: now, or at the wait, as the grid's schedule has it."""
        if mask is not None and not mask.any():
            return
        to, origin = np.array(to), np.array(origin)
        taken = None if taken is None else np.array(taken)
        mask = None if mask is None else np.array(mask)

        def perform(which: Array | None) -> None:
            active = (
                mask
                if which is None
                else (np.broadcast_to(which, self.shape) if mask is None else mask & which)
            )
            self._copy(to, to_offset, origin, origin_offset, size, taken, active, site)

        if self.grid.schedule.delays_copies:
            self.grid.copies.issue(self.warps, perform)
        else:
            perform(None)

    def _copy(
        self,
        to: Array,
        to_offset: int,
        origin: Array,
        origin_offset: int,
        size: int,
        taken: Array | None,
        mask: Mask,
        site: int,
    ) -> None:
        count = max(size // 4, 1)
        reading = mask
        if taken is not None and not (taken >= size).all():
            if ((taken != 0) & (taken < size)).any():
                self._copy_partly(to, to_offset, origin, origin_offset, size, taken, mask, site)
                return
            reading = taken >= size if mask is None else (taken >= size) & mask
        values = self.load("global", origin, origin_offset, 4, count, reading, site)
        if reading is not mask:
            values = [np.where(reading, v, np.uint32(0)) for v in values]  # type: ignore[arg-type]
        self.store("shared", to, to_offset, 4, values, mask, site)

    def _copy_partly(
        self, to: Array, to_offset: int, origin: Array, origin_offset: int, size: int, taken: Array,
        mask: Mask, site: int,
    ) -> None:  # fmt: skip
        """Source sizes that end inside the copy: byte by byte, zeros behind them."""
        for k in range(size):
            reading = taken > k if mask is None else (taken > k) & mask
            value = self.load("global", origin, origin_offset + k, 1, 1, reading, site)[0]
            self.store(
                "shared", to, to_offset + k, 1, [np.where(reading, value, np.uint8(0))], mask, site
            )

    def commit_copies(self, mask: Mask) -> None:
        if self.grid.schedule.delays_copies:
            self.grid.copies.commit(self._some(mask))

    def wait_copies(self, allowed: int, mask: Mask) -> None:
        if self.grid.schedule.delays_copies:
            self.grid.copies.wait(self._some(mask), allowed)

    def _some(self, mask: Mask) -> Array:
        return self.warps if mask is None else self.warps[mask.any(axis=0)]

    # Matrices

    def load_matrix(
        self, space: str, base: Array, offset: int, count: int, is_transposed: bool, site: int
    ) -> list[Array]:
        """ldmatrix: ``count`` 8 x 8 matrices of 16-bit elements whose row addresses come from 8
        lanes each.
        """
        memory, rows = self._matrix_rows(space, base, offset, count, site, "read")
        values = []
        for k in range(count):
            addresses = rows[8 * k : 8 * k + 8]
            if is_transposed:
                low = memory.views[2].take((addresses[_PAIR_ROWS] + _COLUMN_BYTES) >> 1)
                high = memory.views[2].take((addresses[_PAIR_ROWS + 1] + _COLUMN_BYTES) >> 1)
                values.append(low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16))
            else:
                words = (addresses[:, None, :] + _MATRIX_WORDS) >> 2
                values.append(memory.views[4].take(words).reshape(self.shape))
        return values

    def store_matrix(
        self,
        space: str,
        base: Array,
        offset: int,
        values: Sequence[Array],
        is_transposed: bool,
        site: int,
    ) -> None:
        """stmatrix: the inverse of ldmatrix."""
        memory, rows = self._matrix_rows(space, base, offset, len(values), site, "write")
        for k, value in enumerate(values):
            addresses = rows[8 * k : 8 * k + 8]
            if is_transposed:
                memory.views[2][(addresses[_PAIR_ROWS] + _COLUMN_BYTES) >> 1] = value.astype(
                    np.uint16
                )
                high = (value >> np.uint32(16)).astype(np.uint16)
                memory.views[2][(addresses[_PAIR_ROWS + 1] + _COLUMN_BYTES) >> 1] = high
            else:
                words = (addresses[:, None, :] + _MATRIX_WORDS) >> 2
                memory.views[4][words] = value.reshape(8, 4, self.n)

    def _matrix_rows(
        self, space: str, base: Array, offset: int, count: int, site: int, direction: str
    ) -> tuple[Bytes, Array]:
        used = 8 * count
        offsets = self.array(base)[:used].astype(np.int64) + offset
        if space == "generic":
            offsets = offsets - spaces.SHARED_WINDOW
        self._check(offsets, 16, self.grid.shared_bytes, None, site, "shared", direction)
        self.grid.counters.shared(offsets, 16, None)
        return self.grid.shared, offsets + self.shared_base

    def operand(self, matrix: Array, kind: str) -> Operand | Array:
        """A decoded A or B with what the exact tensor core needs of it again and again."""
        core = self.grid.tensor_core(kind)
        return matrix if core is None else prepare(matrix, core)

    def mma(self, a: Any, b: Any, c: Array, kind: str) -> Array:
        """a (16, K, warps) @ b (K, 8, warps) + c, exactly as the tensor core or in plain
        float32.
        """
        core = self.grid.tensor_core(kind)
        return dot_accumulate_fast(a, b, c) if core is None else dot_accumulate(a, b, c, core)

    # Control

    def barrier(
        self, number: int | Array, threads: int | Array, is_aligned: bool, site: int,
        operation: str = "", predicate: Array | None = None, target: str = "",
    ) -> Arrival:  # fmt: skip
        return Arrival(number, threads, site, operation, predicate, target)

    def barrier_arrive(
        self, number: int | Array, threads: int | Array, mask: Mask, site: int
    ) -> None:
        warps = self._some(mask)
        chosen = slice(None) if mask is None else mask.any(axis=0)
        numbers = np.broadcast_to(number, (self.n,))[chosen]
        counts = np.broadcast_to(threads, (self.n,))[chosen]
        self.grid.barriers.arrive(warps, numbers, counts, site)

    def trap(self, mask: Mask, site: int) -> None:
        where = np.argwhere(np.ones(self.shape, bool) if mask is None else mask)
        if len(where):
            lane, warp = (int(v) for v in where[0])
            raise TrapError(
                f"trap executed by {self.grid.thread_name(lane, int(self.warps[warp]))},"
                f" {self.grid.place(site)}"
            )

    def printf(self, text: Array, values: Array, mask: Mask) -> Array:
        """vprintf: formats each active lane's values; the number of values, as CUDA returns it."""
        active = np.ones(self.shape, bool) if mask is None else mask
        counts = np.zeros(self.shape, np.uint32)
        for warp, lane in np.argwhere(active.T):
            template = self.grid.string(int(text[lane, warp]))
            arguments = formatting.arguments(template)
            address = np.full(self.shape, values[lane, warp], np.uint64)
            one = np.zeros(self.shape, bool)
            one[lane, warp] = True
            found = []
            for argument in arguments:
                raw = self.load("generic", address, argument.offset, argument.size, 1, one, 0)[0]
                found.append(int(raw[lane, warp]))
            self.grid.output.append(formatting.render(template, arguments, found, self.grid.string))
            counts[lane, warp] = len(arguments)
        return counts

    def assertion(self, message: Array, file: Array, line: Array, mask: Mask, site: int) -> None:
        where = np.argwhere(np.ones(self.shape, bool) if mask is None else mask)
        if len(where):
            lane, warp = (int(v) for v in where[0])
            raise TrapError(
                f"assertion {self.grid.string(int(message[lane, warp]))!r} failed at"
                f" {self.grid.string(int(file[lane, warp]))}:{int(self.array(line)[lane, warp])},"
                f" {self.grid.thread_name(lane, int(self.warps[warp]))}"
            )


def _as_slice(warps: Array, total: int) -> slice | None:
    """The warps as an evenly spaced slice, or None."""
    if len(warps) == total:
        return slice(None)
    if len(warps) == 1:
        return slice(int(warps[0]), int(warps[0]) + 1)
    step = int(warps[1] - warps[0])
    if (np.diff(warps) == step).all():
        return slice(int(warps[0]), int(warps[-1]) + 1, step)
    return None
