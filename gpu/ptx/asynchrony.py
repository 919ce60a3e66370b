"""Asynchronous copies of a set of warps."""

from __future__ import annotations

import numpy as np

from gpu.ptx.access import MemoryAccess
from gpu.ptx.lanes import Array, Mask


class AsyncAccess(MemoryAccess):
    """What cp.async and its groups call."""

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
