"""Tensor copies of a set of warps: tiles of tensors that tensor maps describe.

Source: PTX ISA 8.8, 9.7.9.27 (cp.async.bulk.tensor, cp.reduce.async.bulk.tensor).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpu.ptx import spaces, tma
from gpu.ptx.bulk import BulkAccess, Combination
from gpu.ptx.lanes import Array, Mask
from gpu.tensor_map import DESCRIPTOR_BYTES, TensorMapFields, usable
from simkit.errors import LaunchError, MemoryAccessError, SimkitError
from simkit.machine.memory import SECTOR_BYTES

# Where a tile may begin in shared memory.
_TILE_ALIGNMENT = 128
# Every swizzle mode repeats itself after so many bytes.
_SWIZZLE_PERIOD = 1024
# Tiles that are moved together: what is on its way stays in the cache.
_TILES_AT_ONCE = 16


class TensorCopyAccess(BulkAccess):
    """What tensor copies call."""

    def tensor_load(
        self,
        to: Array,
        to_offset: int,
        base: Array,
        offset: int,
        coordinates: tuple[Array, ...],
        barrier: Array,
        barrier_offset: int,
        ctas: Array | None,
        target_space: str,
        mask: Mask,
        site: int,
    ) -> None:
        """cp.async.bulk.tensor to shared memory, tile mode."""
        active = self._active(mask)
        if not active.any():
            return
        cta = self._ctas(active)
        target = self._integers(to, active, to_offset)
        objects = self._integers(barrier, active, barrier_offset)
        masks = None if ctas is None else self._integers(ctas, active)
        tiles = self._tiles(base, offset, coordinates, active, site)
        self._check_owner(target, cta, "global", target_space, site)
        if self.grid.hazards is not None:
            for fields, tile, rows in tiles:
                starts = tile.starts - spaces.GLOBAL_BASE
                if not tile.is_whole and not tile.valid.all():
                    self.grid.hazards.note_fill(fields.oob_fill, site)
                self._observe_loads(
                    "global", starts[:, None] + tile.steps, None if tile.is_whole else tile.valid,
                    self._destinations(
                        target[rows], objects[rows], cta[rows],
                        None if masks is None else masks[rows], tile.shared_bytes, site,
                    ),
                    lambda place: self._tile_places(place, fields, tile, site),  # noqa: B023
                    tile.unit, self._warps_of(active)[rows], site,
                )  # fmt: skip

        def copies() -> tuple[Array, Array | int]:
            moved = np.zeros(len(target), np.int64)
            for _, tile, rows in tiles:
                pieces = tile.steps.size if tile.is_whole else tile.valid.sum(axis=1)
                moved[rows] = pieces * tile.unit
            return self._warps_of(active), moved

        landed = self._begin(copies, site)

        def work() -> None:
            for fields, tile, rows in tiles:
                read = self._reader(fields, tile, site)
                for place, object_, chosen in self._destinations(
                    target[rows], objects[rows], cta[rows],
                    None if masks is None else masks[rows], tile.shared_bytes, site,
                ):  # fmt: skip
                    spots = self._tile_places(place, fields, tile, site)
                    numbers = np.arange(len(rows))[chosen]
                    for start in range(0, len(numbers), _TILES_AT_ONCE):
                        part = slice(start, start + _TILES_AT_ONCE)
                        self.grid.shared.scatter(
                            spots[part], tile.unit, [read(numbers[part])], None
                        )
                    if landed is not None:
                        landed(rows[chosen], object_)
                    self._change(object_, 0, -tile.bytes, 0, site)

        self.grid.agents.start(work)

    def tensor_store(
        self,
        base: Array,
        offset: int,
        coordinates: tuple[Array, ...],
        origin: Array,
        origin_offset: int,
        combine: Callable[[str], Combination] | None,
        mask: Mask,
        site: int,
    ) -> None:
        """cp.async.bulk.tensor from shared memory, or cp.reduce.async.bulk.tensor: ``combine``
        gives the combination for the map's type.
        """
        active = self._active(mask)
        if not active.any():
            return
        cta = self._ctas(active)
        source = self._integers(origin, active, origin_offset)
        threads = self._threads(active)
        for fields, tile, rows in self._tiles(base, offset, coordinates, active, site):
            combination = None if combine is None else combine(fields.element.name)
            if combine is not None and combination is None:
                raise LaunchError(
                    f"{self.grid.place(site)}: no such reduction of {fields.element.name}"
                )
            flat = self._flat_shared(
                source[rows], cta[rows], tile.shared_bytes, site, "tensor copy"
            )
            self._store_later(
                threads[rows],
                self._tile_places(flat, fields, tile, site),
                tile.global_offsets - spaces.GLOBAL_BASE,
                tile.unit,
                combination,
                None if tile.is_whole else tile.valid,
                site,
            )

    def _tiles(
        self, base: Array, offset: int, coordinates: tuple[Array, ...], active: Array, site: int
    ) -> list[tuple[TensorMapFields, tma.TileCopy, Array]]:
        """The tiles of the active lanes by tensor map, each with the rows (among those) it is
        for.
        """
        places = np.stack([self._integers(c, active) for c in coordinates], axis=1)
        step = np.uint64(offset & 0xFFFF_FFFF_FFFF_FFFF)
        addresses = (self.array(base).astype(np.uint64) + step)[active]
        tiles = []
        for address in np.unique(addresses):
            fields = self._map_at(int(address), site)
            rows = np.flatnonzero(addresses == address)
            if self.grid.hazards is not None and int(address) >= spaces.GLOBAL_BASE:
                warps = np.unique(self._warps_of(active)[rows])
                self.grid.hazards.use_map(int(address), warps, site)
            if places.shape[1] != fields.rank:
                raise LaunchError(
                    f"{self.grid.place(site)}: {places.shape[1]} coordinates for a tensor map of"
                    f" rank {fields.rank}"
                )
            tiles.append((fields, tma.tile_copy(fields, places[rows]), rows))
        return tiles

    def _map_at(self, address: int, site: int) -> TensorMapFields:
        grid = self.grid
        if address >> 32 == spaces.PARAMETER_WINDOW >> 32:
            data, start = grid.parameters, address - spaces.PARAMETER_WINDOW
        elif address >> 32 == 0:
            data, start = grid.parameters, address
        else:
            data, start = grid.memory.bytes.data, address - spaces.GLOBAL_BASE
        raw = data[start : start + DESCRIPTOR_BYTES].tobytes() if start >= 0 else b""
        if len(raw) < DESCRIPTOR_BYTES or address & 63:
            raise MemoryAccessError(
                f"tensor map at 0x{address:x}: needs {DESCRIPTOR_BYTES} bytes at a multiple of 64,"
                f" {grid.place(site)}"
            )
        try:
            return usable(raw)
        except SimkitError as error:
            raise LaunchError(
                f"{grid.place(site)}: no tensor map at 0x{address:x}: {error}"
            ) from error

    def _tile_places(
        self, starts: Array, fields: TensorMapFields, tile: tma.TileCopy, site: int
    ) -> Array:
        """Where the pieces of tiles lie in shared memory; ``starts`` are flat offsets."""
        wrong = starts % _TILE_ALIGNMENT != 0
        if wrong.any():
            raise MemoryAccessError(
                f"tensor copy at shared offset {int(starts[wrong][0]) % self.grid.shared_stride}:"
                f" not a multiple of {_TILE_ALIGNMENT}, {self.grid.place(site)}"
            )
        # A CTA's memory starts at a multiple of the pattern, so flat offsets swizzle like
        # addresses.
        if not (starts % _SWIZZLE_PERIOD).any():
            return starts[:, None] + tma.swizzle(tile.shared_offsets, fields.swizzle)
        return tma.swizzle(starts[:, None] + tile.shared_offsets, fields.swizzle)

    def _reader(
        self, fields: TensorMapFields, tile: tma.TileCopy, site: int
    ) -> Callable[[Array], Array]:
        """The pieces of a choice of the tiles, all of which are checked and counted here."""
        memory, unit = self.grid.memory.bytes, tile.unit
        starts = tile.starts - spaces.GLOBAL_BASE
        if not tile.is_whole:
            spots = starts[:, None] + tile.steps
            self._check_bulk(spots, unit, "read", site, tile.valid)
            data = memory.gather(np.where(tile.valid, spots, 0), unit, 1)[0]
            return tma.filled(data, tile.valid, fields).__getitem__
        if not self._count_whole(starts, tile):
            self._check_bulk(starts[:, None] + tile.steps, unit, "read", site, None)
        first, steps = starts // unit, tile.steps // unit
        return lambda chosen: memory.views[unit].take(first[chosen, None] + steps)

    def _count_whole(self, starts: Array, tile: tma.TileCopy) -> bool:
        """Counts the usual read: tiles in one allocation, all alike within their sectors."""
        first, away = tile.steps + int(starts[0]), starts - starts[0]
        if ((first % tile.unit) != 0).any() or ((away % SECTOR_BYTES) != 0).any():
            return False
        low = int(first.min()) + int(away.min())
        high = int(first.max()) + int(away.max()) + tile.unit
        allocation = self.grid.memory.find(low, high)
        return allocation is not None and self.grid.counters.repeated_access(
            allocation, first[:, None], tile.unit, len(starts), "read"
        )
