"""The lanes of a set of warps: their register views, constants, and which of them are active."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpu.ptx.types import DTYPES
from simkit.errors import LaunchError

if TYPE_CHECKING:
    from gpu.ptx.emit import Code, Slot
    from gpu.ptx.grid import Grid

Array = np.ndarray
Mask = Array | None

_LANE_BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32))[:, None]


class Lanes:
    """Warps of a grid by their positions in its register file: views are bound directly when they
    are all warps or evenly spaced, and copied otherwise.
    """

    def __init__(self, grid: Grid, warps: Array) -> None:
        self.grid = grid
        self.warps = warps
        self.n = len(warps)
        self.shape = (32, self.n)
        self.index = _as_slice(warps, grid.warps)
        self.cta = grid.cta_of_warp[warps]
        self.shared_base = self.cta.astype(np.int64) * grid.shared_stride
        self.warps_of_a_cta = _even_share(self.cta)
        self.f32 = grid.launch.f32
        # The ordering of the next access to memory: generated code sets it for strong ones.
        self.order = ""
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
            self._copies = {}

    def copy_of(self, name: str) -> Array | None:
        """The copy of a register that the running block works on, if it works on copies."""
        return self._copies.get(name)

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

    def approximate(self, name: str, *operands: Array) -> Array:
        """The result of an approximate instruction, as the options of the launch choose it."""
        return self.grid.launch.approximation(name)(*operands)

    def clock(self, name: str, step: int) -> Array:
        return self.grid.clock(name, step)

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

    def converged(self, named: Array | None, mask: Array, site: int) -> None:
        """A warp operation needs every living lane that its member mask names."""
        living = self._of_all(self.grid.live)
        if named is not None:
            # Lanes that do not execute the instruction have no say in whom it names.
            by_active = np.where(mask, self.array(named), np.uint32(0))
            living = living & ((np.bitwise_or.reduce(by_active, axis=0) & _LANE_BITS) != 0)
        # A warp without an active lane does not execute the instruction at all.
        missing = living & ~mask & mask.any(axis=0)
        if missing.any():
            lane, warp = (int(v[0]) for v in np.nonzero(missing))
            raise LaunchError(
                f"{self.grid.place(site)}: {self.grid.thread_name(lane, self.warps[warp])} is"
                f" named in the member mask"
                " but does not execute the instruction"
            )

    def _some(self, mask: Mask) -> Array:
        return self.warps if mask is None else self.warps[mask.any(axis=0)]


def _even_share(cta: Array) -> int:
    """How many warps of each CTA there are, if CTAs are in order and have equally many; else 1."""
    if not len(cta):
        return 1
    starts = np.flatnonzero(np.diff(cta, prepend=-1))
    share = len(cta) // len(starts)
    is_even = (starts == np.arange(len(starts)) * share).all() and len(starts) * share == len(cta)
    return share if is_even and (cta[starts][1:] > cta[starts][:-1]).all() else 1


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
