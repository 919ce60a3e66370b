"""Memory as warps see it: tensors at addresses, regions, 32-byte sectors, shared-memory banks.

The counting functions take what a warp instruction is: one address per lane. The model and the
PTX executor count with the same definitions.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike

from simkit.errors import DtypeError, MemoryAccessError, ShapeError

Array = np.ndarray[Any, Any]
Direction = Literal["read", "write"]
Outer = tuple[tuple[int, int], ...]  # (length, byte stride) of each axis outside a contiguous run

WARP_LANES = 32
SECTOR_BYTES = 32
SECTOR_SHIFT = 5
BANKS = 32
BANK_BYTES = 4
BASE_ALIGNMENT = 256  # what cudaMalloc guarantees
VECTOR_SIZES = (1, 2, 4, 8, 16)  # bytes per lane of one load or store (PTX ISA, ld/st, 128 bits)


def distinct_sectors(addresses: Array, size: int, active: Array | None = None) -> int:
    """Number of 32-byte sectors that warp instructions touch, each sector once an instruction.

    ``addresses``: byte addresses, any integer dtype, [lanes, n] for n warp instructions (lane
    first, at most 32 lanes as a rule). ``size``: bytes per lane; a lane counts every sector of
    [address, address + size). ``active``: bool [lanes, n], lanes that take part (default: all);
    an instruction without an active lane counts nothing. Returns the sum over the n instructions.
    Source: Nsight Compute, "sectors" = distinct aligned 32-byte chunks per request.
    """
    first, end = _sector_spans(addresses, size, active)
    if not first.size:
        return 0
    # All lanes have one size, so sorting by start sorts the ends too, and the union of the spans
    # is each span less what the one before it already covers.
    fresh = end[1:] - np.maximum(first[1:], end[:-1])
    return int(fresh.sum()) + int((end[0] - first[0]).sum())


def sector_addresses(addresses: Array, size: int, active: Array | None = None) -> Array:
    """Byte addresses of the sectors that ``distinct_sectors`` counts, int64, for an L2 model.

    Instruction by instruction, ascending within each. Arguments as for ``distinct_sectors``.
    """
    first, end = _sector_spans(addresses, size, active)
    if not first.size:
        return np.empty(0, np.int64)
    start = first.T.astype(np.int64)
    stop = end.T.astype(np.int64)
    start[:, 1:] = np.maximum(start[:, 1:], stop[:, :-1])
    start, count = start.ravel(), (stop - start).ravel()
    # Expand each [start, start + count) to its members: a ramp that restarts at every span.
    ramp = np.arange(int(count.sum()))
    ramp -= np.repeat(np.cumsum(count) - count, count)
    return (np.repeat(start, count) + ramp) << SECTOR_SHIFT


def _sector_spans(addresses: Array, size: int, active: Array | None) -> tuple[Array, Array]:
    """First sector and end sector (exclusive) per lane, [lanes, n], ascending along the lanes."""
    addresses = _active_only(addresses, size, active)
    if not (addresses[1:] >= addresses[:-1]).all():
        addresses = np.sort(addresses, axis=0)
    return addresses >> SECTOR_SHIFT, (addresses + (size + SECTOR_BYTES - 1)) >> SECTOR_SHIFT


def _active_only(addresses: Array, size: int, active: Array | None) -> Array:
    """Addresses with each idle lane at an active lane's address, so that it adds nothing."""
    if addresses.ndim != 2 or size < 1:
        raise ShapeError(
            f"addresses must be [lanes, n] and size at least 1 byte, "
            f"not shape {addresses.shape} and size {size}"
        )
    if active is None:
        return addresses
    if active.shape != addresses.shape:
        raise ShapeError(f"active has shape {active.shape}, addresses have {addresses.shape}")
    if active.all():
        return addresses
    busy = active.any(axis=0)
    if not busy.all():
        addresses, active = addresses[:, busy], active[:, busy]
    # The highest active address: lanes switched off at the end of a warp, the usual case, then
    # leave the addresses sorted.
    lowest = np.iinfo(addresses.dtype).min
    return np.where(active, addresses, np.where(active, addresses, lowest).max(axis=0))


def wavefronts(addresses: Array, size: int, active: Array | None = None) -> tuple[int, int]:
    """Shared-memory wavefronts of warp instructions: (actual, ideal), summed over instructions.

    ``addresses``: byte addresses [32, n] for n warp instructions, naturally aligned for ``size``
    in (1, 2, 4, 8, 16) bytes per lane; ``active``: bool [32, n] or None for all lanes.

    32 banks of 4 bytes; lanes of one phase that name the same word share it. A phase takes as
    many wavefronts as its busiest bank has distinct words. Up to 4 bytes per lane the warp is one
    phase; 8 bytes take two half-warps, 16 bytes four quarter-warps. ideal is what the same words
    would take if they were spread evenly over the banks. actual - ideal = bank conflicts.
    Source: CUDA C++ Programming Guide, Compute Capabilities, Shared Memory (banks and broadcast of
    5.x and later; half- and quarter-warps of 64-bit and 128-bit accesses from 2.x).
    """
    if size not in VECTOR_SIZES or addresses.ndim != 2 or addresses.shape[0] != WARP_LANES:
        raise ShapeError(
            f"addresses must be [32, n] and size one of {VECTOR_SIZES}, "
            f"not shape {addresses.shape} and size {size}"
        )
    # Aligned lanes move whole units, so banks of 4 bytes act as fewer banks as wide as a unit.
    unit = max(size, BANK_BYTES)
    unit_banks = lanes = BANKS * BANK_BYTES // unit
    units = _by_phase(addresses, lanes).astype(np.int64) // unit
    if active is not None:
        units = _active_only(units, 1, _by_phase(active, lanes))
    phases = units.shape[1]  # each has at most 32 words, which take one wavefront at best
    used = np.bitwise_or.reduce(1 << (units & (unit_banks - 1)), axis=0)
    crowded = np.bitwise_count(used) < lanes
    if not crowded.any():
        return phases, phases
    units = np.sort(units[:, crowded], axis=0)
    fresh = np.ones(units.shape, bool)
    np.not_equal(units[1:], units[:-1], out=fresh[1:])
    slot = (units & (unit_banks - 1)) + unit_banks * np.arange(units.shape[1])
    loads = np.bincount(slot[fresh], minlength=unit_banks * units.shape[1])
    return phases - units.shape[1] + int(loads.reshape(-1, unit_banks).max(axis=1).sum()), phases


def _by_phase(lanes_first: Array, lanes: int) -> Array:
    """[32, n] regrouped to [lanes, phases], a phase being ``lanes`` neighbours of one warp."""
    instructions = lanes_first.shape[1]
    grouped = lanes_first.reshape(WARP_LANES // lanes, lanes, instructions)
    return grouped.transpose(1, 0, 2).reshape(lanes, -1)


@dataclass(frozen=True)
class TensorTraffic:
    """Bytes that one tensor moved in one direction.

    ``requested``: bytes that lanes asked for. ``sectors``: bytes of the distinct 32-byte sectors
    per warp instruction, which is what leaves the SM.
    """

    tensor: str
    direction: Direction
    requested: int = 0
    sectors: int = 0

    def plus(self, requested: int, sectors: int) -> TensorTraffic:
        return TensorTraffic(
            self.tensor, self.direction, self.requested + requested, self.sectors + sectors
        )


@dataclass(frozen=True, eq=False)
class Tensor:
    """An HBM tensor: a C-contiguous array (held, not copied) at a virtual byte address.

    ``exact``: float64 values behind the array, of its shape, or None. Reference arithmetic reads
    and writes these, so that only the array, which says what bytes there are, is rounded.
    """

    name: str
    array: Array
    address: int
    exact: Array | None = None

    def __post_init__(self) -> None:
        if not self.array.flags.c_contiguous:
            raise ShapeError(
                f"tensor {self.name!r} must be C-contiguous; its strides are {self.array.strides} "
                f"for shape {self.array.shape}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    @property
    def values(self) -> Array:
        """The exact values where there are such, else the array."""
        return self.array if self.exact is None else self.exact

    def reshape(self, *shape: int) -> Tensor:
        """The same bytes under the same name in another shape."""
        try:
            array = self.array.reshape(shape)
        except ValueError as error:
            raise ShapeError(
                f"tensor {self.name!r} of shape {self.shape} does not reshape to {shape}"
            ) from error
        exact = None if self.exact is None else self.exact.reshape(shape)
        return Tensor(self.name, array, self.address, exact)

    def __getitem__(self, index: Any) -> Region:
        """The region that basic NumPy indexing names (integers, slices, None, ...), lazily."""
        parts = index if isinstance(index, tuple) else (index,)
        for part in parts:
            basic = part is None or part is Ellipsis or isinstance(part, slice | int | np.integer)
            if not basic or isinstance(part, bool):
                raise ShapeError(
                    f"tensor {self.name!r} takes integers, slices, None and ..., not {part!r}"
                )
        if Ellipsis not in parts:
            parts = (*parts, ...)  # keeps an element a zero-dimensional view, not a copy
        try:
            view = self.array[parts]
        except IndexError as error:
            raise MemoryAccessError(
                f"tensor {self.name!r} of shape {self.shape} has no {index!r}: {error}"
            ) from error
        return Region(self, view, None if self.exact is None else self.exact[parts])


@dataclass(frozen=True, eq=False)
class Region:
    """Part of a tensor: a view of its array, and where the view's bytes lie in memory."""

    tensor: Tensor
    view: Array
    exact: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.view.dtype

    @property
    def nbytes(self) -> int:
        return self.view.nbytes

    @property
    def address(self) -> int:
        """Virtual byte address of the region's first element."""
        return self.tensor.address + _pointer(self.view) - _pointer(self.tensor.array)

    def runs(self) -> tuple[int, Outer]:
        """Bytes of one contiguous run, and the axes (length, byte stride) that repeat it."""
        run, axes = self.view.itemsize, self._axes()
        while axes and axes[-1][1] == run:
            run *= axes.pop()[0]
        return run, tuple(axes)

    def rows(self) -> tuple[int, Outer]:
        """Bytes of one contiguous row (along the last axis), and the axes that repeat it."""
        run, axes = self.view.itemsize, self._axes()
        if self.view.shape[-1:] > (1,) and axes[-1][1] == run:
            run *= axes.pop()[0]
        return run, tuple(axes)

    def _axes(self) -> list[tuple[int, int]]:
        sizes = zip(self.view.shape, self.view.strides, strict=True)
        return [axis for axis in sizes if axis[0] != 1]

    def traffic(
        self,
        vector: int = 16,
        lanes: int = WARP_LANES,
        share: int = 1,
        by_row: bool = False,
    ) -> tuple[int, int]:
        """(requested bytes, sector bytes) of accessing the whole region once.

        Lanes take consecutive ``vector``-byte chunks in row-major order, ``lanes`` lanes a warp
        instruction. ``share``: how many neighbouring lanes take each chunk (all of one address);
        beyond ``lanes`` it goes on in further warps. ``by_row``: each row, along the last axis,
        starts a new warp instruction. Raises ShapeError where chunks do not fit the contiguous
        runs and MemoryAccessError where they are misaligned.
        """
        if not self.view.size:
            return 0, 0
        run, outer = self.rows() if by_row else self.runs()
        address = self.address
        self._check(vector, lanes, share, run, outer)
        requested = self.nbytes * share
        strides = (run, address, lanes * vector, *(stride for _, stride in outer))
        if share == 1 and all(stride % SECTOR_BYTES == 0 for stride in strides):
            # A warp instruction then takes whole sectors, none of which another one takes.
            return requested, requested
        offset = address % SECTOR_BYTES
        count = _count_sectors_by_row if by_row else _count_sectors
        return requested, SECTOR_BYTES * count(offset, run, outer, vector, lanes, share)

    def _check(self, vector: int, lanes: int, share: int, run: int, outer: Outer) -> None:
        place = f"tensor {self.tensor.name!r}, region of shape {self.shape}"
        if vector not in VECTOR_SIZES:
            raise ShapeError(f"{place}: vector must be one of {VECTOR_SIZES}, not {vector}")
        if not 1 <= lanes <= WARP_LANES:
            raise ShapeError(f"{place}: lanes must be 1 to {WARP_LANES}, not {lanes}")
        if share < 1 or (share < lanes and lanes % share):
            raise ShapeError(f"{place}: {lanes} lanes cannot share each chunk {share} ways")
        if run % vector:
            raise ShapeError(
                f"{place}: contiguous runs of {run} bytes do not divide into chunks of {vector}"
            )
        for what, value in (("address", self.address), *(("stride", s) for _, s in outer)):
            if value % vector:
                raise MemoryAccessError(
                    f"{place}: {what} {value} is not aligned to {vector} bytes per lane"
                )


def unbacked(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Read-only zeros of any size: address space, but no memory until it is read.

    For counting the bytes of problems that are larger than this computer.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.zeros(shape, dtype)
    # Read-only private pages are not charged against memory.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    return np.ndarray(shape, dtype, buffer=pages)


def region_values(region: Region, values: Any) -> Array:
    """``values`` as an array that may be stored to ``region``.

    It has the region's shape, and its dtype or, where the tensor has exact values, float64.
    """
    array = np.asarray(values)
    if array.shape != region.shape:
        raise ShapeError(
            f"tensor {region.tensor.name!r}: values of shape {array.shape} do not fit the region "
            f"of shape {region.shape}"
        )
    if array.dtype != region.dtype and (region.exact is None or array.dtype != np.float64):
        raise DtypeError(
            f"tensor {region.tensor.name!r} holds {region.dtype}, the values are {array.dtype}"
        )
    if not region.view.flags.writeable:
        raise MemoryAccessError(f"tensor {region.tensor.name!r} holds a read-only array")
    return array


def _starts(offset: int, outer: Outer) -> Array:
    starts = np.array([offset], np.int64)
    for length, stride in outer:
        starts = (starts[:, None] + stride * np.arange(length)).ravel()
    return starts


@lru_cache(maxsize=4096)
def _count_sectors_by_row(
    offset: int, run: int, outer: Outer, vector: int, lanes: int, share: int
) -> int:
    # No warp has two rows, so that rows at the same position within a sector are alike.
    offsets, rows = np.unique(_starts(offset, outer) % SECTOR_BYTES, return_counts=True)
    return sum(
        int(count) * _count_sectors(int(start), run, (), vector, lanes, share)
        for start, count in zip(offsets, rows, strict=True)
    )


@lru_cache(maxsize=4096)  # tiles repeat: only the position within a sector tells them apart
def _count_sectors(offset: int, run: int, outer: Outer, vector: int, lanes: int, share: int) -> int:
    starts = _starts(offset, outer)
    chunks = (starts[:, None] + np.arange(0, run, vector)).ravel()
    per_chunk, chunks_per_warp = -(-share // lanes), max(1, lanes // share)
    if per_chunk > 1:
        # All lanes of each of these warps have one address, and an aligned chunk has one sector.
        return per_chunk * chunks.size
    warps = -(-chunks.size // chunks_per_warp)
    last = chunks[-1]  # idle lanes repeat the last chunk, which adds no sector
    padded = np.full(warps * chunks_per_warp, last)
    padded[: chunks.size] = chunks
    return distinct_sectors(padded.reshape(warps, chunks_per_warp).T, vector)


def _pointer(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
