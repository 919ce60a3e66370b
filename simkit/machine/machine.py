"""The machine that models run on: HBM tensors, CTAs that load and store, byte counters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import DTypeLike

from simkit.errors import CapacityError, MemoryAccessError, ShapeError, SimkitError
from simkit.machine.gpus import Gpu, gpu
from simkit.machine.memory import (
    BASE_ALIGNMENT,
    SECTOR_BYTES,
    VECTOR_SIZES,
    WARP_LANES,
    Array,
    Direction,
    Region,
    Tensor,
    TensorTraffic,
    distinct_sectors,
    region_values,
    unbacked,
)

Arithmetic = Literal["reference", "device", "none"]

_FIRST_ADDRESS = 1 << 32  # anywhere that is not null


class Machine:
    """One GPU with empty counters.

    ``gpu``: a row of the device table or its name. ``arithmetic``: what models compute with,
    "reference" (float64), "device" (the kernel's own operations, order and rounding), or "none":
    they only count, whatever the size.
    """

    def __init__(self, gpu: Gpu | str = "h100", arithmetic: Arithmetic = "reference") -> None:
        if arithmetic not in get_args(Arithmetic):
            raise SimkitError(
                f"arithmetic must be one of {get_args(Arithmetic)}, not {arithmetic!r}"
            )
        self.gpu = _lookup(gpu)
        self.arithmetic = arithmetic
        self.sram_peak = 0
        self.ctas = 0
        self._tensors: dict[str, Tensor] = {}
        self._traffic: dict[tuple[str, Direction], TensorTraffic] = {}
        self._next_address = _FIRST_ADDRESS

    @property
    def is_device(self) -> bool:
        """Whether models compute with the kernel's own operations."""
        return self.arithmetic == "device"

    @property
    def computes(self) -> bool:
        """Whether there are values at all; without arithmetic only bytes are counted."""
        return self.arithmetic != "none"

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors in HBM by name, in the order in which they came."""
        return dict(self._tensors)

    @property
    def traffic(self) -> dict[tuple[str, Direction], TensorTraffic]:
        """Bytes moved so far, keyed (tensor name, "read" | "write"); untouched pairs are absent."""
        return dict(self._traffic)

    @property
    def requested_bytes(self) -> int:
        """Bytes that lanes asked for, over all tensors, reads and writes."""
        return sum(row.requested for row in self._traffic.values())

    @property
    def hbm_bytes(self) -> int:
        """Bytes of the sectors that left the SMs, over all tensors, reads and writes."""
        return sum(row.sectors for row in self._traffic.values())

    def compulsory_bytes(self, *names: str) -> int:
        """Bytes if each tensor had moved once in every direction that it moved in: what a cache
        of any size leaves. ``names``: the tensors to add up, by default all. Of a tensor that was
        touched in part, the sectors that moved are taken for different ones.
        """
        return sum(
            min(row.sectors, self._tensors[name].array.nbytes)
            for (name, _), row in self._traffic.items()
            if not names or name in names
        )

    def tensor(self, name: str, array: Array) -> Tensor:
        """Places a C-contiguous array (held, not copied) in HBM at a 256-byte aligned address.

        Raises SimkitError when the name is taken, CapacityError when HBM is full.
        """
        return self._place(name, array, None)

    def allocate(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Tensor:
        """Places a tensor to be written in HBM; errors as for ``tensor``.

        Its bytes are 0xFF, a NaN in every floating-point format, until they are written. In
        reference arithmetic floating-point tensors hold exact values. Without arithmetic nothing
        is written and no memory is taken.
        """
        if not self.computes:
            return self._place(name, unbacked(shape, dtype), None)
        array = np.empty(shape, dtype)
        array.view(np.uint8).fill(0xFF)
        floating = array.dtype.kind not in "iub"
        exact = np.full(shape, np.nan) if self.arithmetic == "reference" and floating else None
        return self._place(name, array, exact)

    def _place(self, name: str, array: Array, exact: Array | None) -> Tensor:
        if name in self._tensors:
            raise SimkitError(f"tensor {name!r} is already in HBM; names are unique per machine")
        tensor = Tensor(name, array, self._next_address, exact)
        used = self._next_address - _FIRST_ADDRESS + array.nbytes
        if used > self.gpu.hbm_bytes:
            raise CapacityError(
                f"tensor {name!r} of {array.nbytes} bytes brings HBM to {used} bytes; "
                f"{self.gpu.name} has {self.gpu.hbm_bytes}"
            )
        # An empty tensor still gets an address of its own.
        self._next_address += -(-max(1, array.nbytes) // BASE_ALIGNMENT) * BASE_ALIGNMENT
        self._tensors[name] = tensor
        return tensor

    @contextmanager
    def cta(self, shared_bytes: int = 0, threads: int = 128, count: int = 1) -> Iterator[Cta]:
        """A CTA with ``shared_bytes`` of shared memory; CapacityError if the GPU refuses it.

        ``count``: how many CTAs of a launch are meant, whose tiles are then loaded and stored
        together: those of all heads, for example.
        """
        limits = (
            ("shared memory in bytes", shared_bytes, 0, self.gpu.smem_per_block_optin),
            ("threads", threads, 1, self.gpu.max_threads_per_block),
        )
        for what, value, low, high in limits:
            if not low <= value <= high:
                raise CapacityError(
                    f"{what} per CTA: {value} is outside {low} to {high} on {self.gpu.name}"
                )
        self.sram_peak = max(self.sram_peak, shared_bytes)
        self.ctas += count
        yield Cta(self, shared_bytes, threads)

    def _count(self, name: str, direction: Direction, requested: int, sectors: int) -> None:
        key = (name, direction)
        before = self._traffic.get(key) or TensorTraffic(name, direction)
        self._traffic[key] = before.plus(requested, sectors)


@dataclass(frozen=True)
class Cta:
    """A running CTA: the only way from HBM to on-chip memory, so that every byte is counted."""

    machine: Machine = field(repr=False)
    shared_bytes: int
    threads: int

    def load(
        self,
        region: Region,
        vector: int = 16,
        *,
        lanes: int = WARP_LANES,
        share: int = 1,
        by_row: bool = False,
        repeat: int = 1,
    ) -> Array:
        """A copy of the region's values, exact ones if it has such; counts read bytes.

        ``vector``: bytes per lane of one access; lanes take consecutive chunks in row-major
        order, ``lanes`` lanes a warp instruction. ``share``: how many neighbouring lanes read each
        chunk (a broadcast). ``by_row``: every row, along the last axis, starts a new warp
        instruction. ``repeat``: how many times the kernel reads the region. Without
        arithmetic the values mean nothing and are not copied.
        """
        self._count(region, "read", repeat, region.traffic(vector, lanes, share, by_row))
        if not self.machine.computes:
            return region.view
        return np.array(region.view if region.exact is None else region.exact, order="C")

    def store(
        self,
        region: Region,
        values: Any,
        vector: int = 16,
        *,
        lanes: int = WARP_LANES,
        by_row: bool = False,
    ) -> None:
        """Writes values of the region's shape and dtype; counts written bytes.

        In reference arithmetic the values may be float64. Without arithmetic they are ignored.
        """
        traffic = region.traffic(vector, lanes, by_row=by_row)
        if not self.machine.computes:
            self._count(region, "write", 1, traffic)
            return
        array = region_values(region, values)
        self._count(region, "write", 1, traffic)
        with np.errstate(over="ignore", invalid="ignore"):
            region.view[...] = array
        if region.exact is not None:
            region.exact[...] = array

    def load_lanes(
        self, tensor: Tensor, index: Array, active: Array | None = None, vector: int | None = None
    ) -> Array:
        """What warp instructions with an address of its own for each lane read; counts them.

        ``index`` int64 [lanes, n]: element of the flat tensor at which each lane of n instructions
        reads ``vector`` bytes (default: one element). ``active`` bool [lanes, n]: lanes that take
        part. Returns [lanes, n] elements, or [lanes, n, elements] for vectors of several; idle
        lanes give zeros, as all do without arithmetic. Errors: `MemoryAccessError` outside the
        tensor or misaligned.
        """
        flat = self._lanes(tensor, "read", index, active, vector)
        values = tensor.values.reshape(-1)
        if not self.machine.computes or not values.size:
            return np.broadcast_to(values.dtype.type(0), flat.shape)
        found = np.asarray(values[flat])
        if active is not None:
            found[~active] = 0
        return found

    def store_lanes(
        self,
        tensor: Tensor,
        index: Array,
        values: Array | None,
        active: Array | None = None,
        vector: int | None = None,
    ) -> None:
        """What warp instructions with an address of its own for each lane write; see `load_lanes`.

        ``values`` [lanes, n] or [lanes, n, elements]; those of idle lanes are ignored, as all are
        without arithmetic.
        """
        flat = self._lanes(tensor, "write", index, active, vector)
        if not self.machine.computes:
            return
        chosen = np.ones(index.shape, bool) if active is None else active
        array = tensor.array.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            array[flat[chosen]] = np.asarray(values)[chosen]
        if tensor.exact is not None:
            tensor.exact.reshape(-1)[flat[chosen]] = np.asarray(values)[chosen]

    def _lanes(
        self,
        tensor: Tensor,
        direction: Direction,
        index: Array,
        active: Array | None,
        vector: int | None,
    ) -> Array:
        """Flat elements [lanes, n] or [lanes, n, elements] of accesses, which are counted."""
        itemsize = tensor.dtype.itemsize
        size = itemsize if vector is None else vector
        elements = size // itemsize
        place = f"tensor {tensor.name!r} of shape {tensor.shape}"
        if size not in VECTOR_SIZES or size % itemsize:
            raise ShapeError(f"{place}: {size} bytes a lane are no vector of {tensor.dtype}")
        taken = index if active is None else np.where(active, index, 0)
        lanes = taken.size if active is None else int(np.count_nonzero(active))
        if lanes:
            used = taken if active is None else taken[active]
            low, high = int(used.min()), int(used.max())
            if low < 0 or high + elements > tensor.array.size:
                wrong = low if low < 0 else high
                raise MemoryAccessError(f"{place}: a lane accesses element {wrong}")
            addresses = tensor.address + taken.astype(np.int64, copy=False) * itemsize
            if elements > 1 and (used % elements).any():
                raise MemoryAccessError(f"{place}: a vector of {size} bytes is misaligned")
            sectors = distinct_sectors(addresses, size, active) * SECTOR_BYTES
            self.machine._count(tensor.name, direction, lanes * size, sectors)
        return taken if elements == 1 else taken[..., None] + np.arange(elements)

    def _count(
        self, region: Region, direction: Direction, repeat: int, traffic: tuple[int, int]
    ) -> None:
        if repeat < 1:
            raise ShapeError(f"tensor {region.tensor.name!r}: repeat must be positive: {repeat}")
        requested, sectors = traffic
        if requested:
            self.machine._count(region.tensor.name, direction, repeat * requested, repeat * sectors)


def _lookup(choice: Gpu | str) -> Gpu:
    return gpu(choice) if isinstance(choice, str) else choice
