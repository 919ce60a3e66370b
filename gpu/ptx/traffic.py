"""Counts what a launch moves: bytes and sectors per allocation, shared-memory wavefronts,
optionally DRAM bytes.
"""

from __future__ import annotations

import numpy as np

from gpu.counters import SharedTraffic, Traffic
from gpu.ptx.memory import Allocation
from simkit.machine.cache import L2Cache
from simkit.machine.memory import (
    BANK_BYTES,
    BANKS,
    SECTOR_BYTES,
    TensorTraffic,
    distinct_sectors,
    sector_addresses,
    wavefronts,
)

Array = np.ndarray


class TrafficCounter:
    """The counters of one launch.

    ``cache``: an L2 to send every sector through, for the dram figure.
    """

    def __init__(self, cache: L2Cache | None = None) -> None:
        self.cache = cache
        self.tensors: dict[tuple[str, str], list[int]] = {}
        self.shared_instructions = 0
        self.shared_wavefronts = 0
        self.shared_ideal = 0
        self.local_bytes = 0
        # By the place in the program: wavefronts and ideal ones; bytes asked for and of sectors.
        self.wavefronts_by_site: dict[int, list[int]] = {}
        self.bytes_by_site: dict[int, list[int]] = {}
        # Of one warp, by size and addresses: programs repeat few patterns many times.
        self._wavefronts: dict[tuple[int, bytes], tuple[int, int]] = {}
        self._distinct_sectors: dict[tuple[int, bytes], int] = {}

    def global_access(
        self, allocation: Allocation, offsets: Array, size: int, mask: Array | None, direction: str,
        sharing: int = 1, site: int = 0,
    ) -> None:  # fmt: skip
        """One load or store of some warps, ``sharing`` of each CTA, all of it inside one
        allocation.
        """
        lanes = offsets.size if mask is None else int(np.count_nonzero(mask))
        entry = self.tensors.setdefault((allocation.name, direction), [0, 0])
        moved = self._sectors(offsets, size, mask, sharing) * SECTOR_BYTES
        entry[0] += lanes * size
        entry[1] += moved
        here = self.bytes_by_site.setdefault(site, [0, 0])
        here[0] += lanes * size
        here[1] += moved
        if self.cache is not None:
            self.cache.access(sector_addresses(offsets, size, mask), direction == "write")

    def _sectors(self, offsets: Array, size: int, mask: Array | None, sharing: int) -> int:
        pattern = None if mask is not None else _pattern(offsets, SECTOR_BYTES, sharing)
        if pattern is None:
            return distinct_sectors(offsets, size, mask)
        key = (size, pattern.tobytes())
        known = self._distinct_sectors.get(key)
        if known is None:
            known = self._distinct_sectors[key] = distinct_sectors(pattern, size)
        return known * (offsets.shape[1] // pattern.shape[1])

    def repeated_access(
        self, allocation: Allocation, offsets: Array, size: int, count: int, direction: str
    ) -> bool:
        """``count`` accesses that are alike but for whole sectors between them.

        False, and nothing is counted, where a model of the L2 needs each address.
        """
        if self.cache is not None:
            return False
        entry = self.tensors.setdefault((allocation.name, direction), [0, 0])
        entry[0] += count * offsets.size * size
        entry[1] += count * self._sectors(offsets, size, None, 1) * SECTOR_BYTES
        return True

    def shared(
        self, offsets: Array, size: int, mask: Array | None, sharing: int = 1, site: int = 0
    ) -> None:
        """One shared-memory access of some warps, ``sharing`` of each CTA: offsets within their
        CTAs.
        """
        pattern = None if mask is not None else _pattern(offsets, BANKS * BANK_BYTES, sharing)
        if pattern is not None:
            self.shared_alike(pattern, size, offsets.shape[1] // pattern.shape[1], site)
            return
        actual, ideal = _wavefronts(offsets, size, mask)
        warps = offsets.shape[1] if mask is None else int(mask.any(axis=0).sum())
        self._add(warps, actual, ideal, site)

    def shared_alike(self, offsets: Array, size: int, count: int, site: int = 0) -> None:
        """``count`` accesses that all have the addresses ``offsets`` [lanes, warps]."""
        key = (size, offsets.tobytes())
        known = self._wavefronts.get(key)
        if known is None:
            known = self._wavefronts[key] = _wavefronts(offsets, size, None)
        self._add(count * offsets.shape[1], known[0] * count, known[1] * count, site)

    def _add(self, instructions: int, actual: int, ideal: int, site: int) -> None:
        here = self.wavefronts_by_site.setdefault(site, [0, 0])
        here[0] += actual
        here[1] += ideal
        self.shared_instructions += instructions
        self.shared_wavefronts += actual
        self.shared_ideal += ideal

    def shared_bulk(self, chunks: int) -> None:
        """Operands that the tensor core reads by itself: whole rows of 128 bytes, no conflicts."""
        rows = -(-chunks * 16 // 128)
        self._add(0, rows, rows, 0)

    def local(self, size: int) -> None:
        self.local_bytes += size

    def result(self) -> Traffic:
        tensors = tuple(
            TensorTraffic(name, direction, *counts)  # type: ignore[arg-type]
            for (name, direction), counts in sorted(self.tensors.items())
        )
        shared = SharedTraffic(self.shared_instructions, self.shared_wavefronts, self.shared_ideal)
        read = write = None
        if self.cache is not None:
            self.cache.flush()
            read, write = self.cache.dram_read_bytes, self.cache.dram_write_bytes
        return Traffic(tensors, shared, self.local_bytes, read, write)


def _pattern(offsets: Array, period: int, sharing: int) -> Array | None:
    """The addresses [lanes, warps] of one CTA or one warp, moved near 0, if those of all others are
    the same (CTAs) or alike but for whole periods (warps).
    """
    start = offsets[0, 0] & -period
    if sharing > 1:
        by_cta = offsets.reshape(len(offsets), -1, sharing)
        if (by_cta == by_cta[:, :1]).all():
            return np.asarray(by_cta[:, 0] - start)
    distance = offsets[0] - offsets[0, 0]
    if not (distance & period - 1).any() and (offsets - distance == offsets[:, :1]).all():
        return np.asarray(offsets[:, :1] - start)
    return None


def _wavefronts(offsets: Array, size: int, mask: Array | None) -> tuple[int, int]:
    if size == 32:
        first, second = (wavefronts(offsets + k, 16, mask) for k in (0, 16))
        return first[0] + second[0], first[1] + second[1]
    lanes = offsets.shape[0]
    if lanes < 32:
        # ldmatrix has addresses from some lanes only; the others take no part.
        offsets = np.concatenate(
            (offsets, np.broadcast_to(offsets[:1], (32 - lanes, offsets.shape[1])))
        )
        mask = np.zeros(offsets.shape, bool)
        mask[:lanes] = True
    return wavefronts(offsets, size, mask)
