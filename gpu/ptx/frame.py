"""A set of warps that run together: what the generated code of a block sees of the machine.

Built in layers: lanes (registers), access (memory), asynchrony (copies), matrices (tensor cores),
and here what controls the warps themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpu.ptx import formatting
from gpu.ptx.lanes import Array, Mask
from gpu.ptx.matrices import MatrixAccess
from gpu.ptx.waiting import GridWait
from simkit.errors import TrapError


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


class Frame(MatrixAccess):
    """Warps of a grid, by their positions in its register file."""

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

    def memory_fence(self, scope: str, mask: Mask) -> None:
        """Memory is sequentially consistent here; the hazard detector listens."""
        if self.grid.hazards is not None:
            self.grid.hazards.fence(scope, self._some(mask))

    def proxy_fence(self, mask: Mask) -> None:
        if self.grid.hazards is not None:
            self.grid.hazards.proxy_fence(self._some(mask))

    def mbarrier_fence(self, mask: Mask) -> None:
        if self.grid.hazards is not None:
            self.grid.hazards.barriers.fence(self._some(mask))

    def tensormap_fence(self, base: Array, offset: int, mask: Mask) -> None:
        if self.grid.hazards is not None:
            active = self._active(mask)
            addresses = self._integers(base, active, offset)
            self.grid.hazards.fence_maps(addresses, self._warps_of(active))

    def allow_dependents(self, mask: Mask) -> None:
        self.grid.has_triggered[self.grid.cta_of_warp[self._some(mask)]] = True

    def wait_for_primary(self, site: int) -> GridWait:
        return GridWait(site)

    def trap(self, mask: Mask, site: int) -> None:
        where = np.argwhere(np.ones(self.shape, bool) if mask is None else mask)
        if len(where):
            lane, warp = (int(v) for v in where[0])
            raise TrapError(
                f"trap executed by {self.grid.thread_name(lane, int(self.warps[warp]))},"
                f" {self.grid.place(site)}"
            )

    def printf(self, text: Array, values: Array, mask: Mask, site: int) -> Array:
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
                raw = self.load("generic", address, argument.offset, argument.size, 1, one, site)[0]
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
