"""Counts what a launch moves: bytes and sectors per allocation, shared-memory wavefronts,
optionally DRAM bytes.
"""

from __future__ import annotations

import numpy as np

from gpu.counters import SharedTraffic, Traffic
from gpu.ptx.memory import Allocation
from simkit.machine.cache import L2Cache
from simkit.machine.memory import (
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
        self._patterns: dict[tuple[int, bytes], tuple[int, int]] = {}

    def global_access(
        self, allocation: Allocation, offsets: Array, size: int, mask: Array | None, direction: str
    ) -> None:
        """One load or store of some warps, all of it inside one allocation."""
        lanes = offsets.size if mask is None else int(np.count_nonzero(mask))
        entry = self.tensors.setdefault((allocation.name, direction), [0, 0])
        entry[0] += lanes * size
        entry[1] += distinct_sectors(offsets, size, mask) * SECTOR_BYTES
        if self.cache is not None:
            self.cache.access(sector_addresses(offsets, size, mask), direction == "write")

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
        entry[1] += count * distinct_sectors(offsets, size) * SECTOR_BYTES
        return True

    def shared(self, offsets: Array, size: int, mask: Array | None) -> None:
        """One shared-memory access of some warps: offsets within their CTAs."""
        if mask is None:
            # Most often all warps access the same pattern somewhere else: count it once.
            relative = offsets - offsets[0]
            first = offsets[0] & 127
            if (relative == relative[:, :1]).all() and (first == first[0]).all():
                key = (size, (relative[:, 0] + first[0]).tobytes())
                known = self._patterns.get(key)
                if known is None:
                    known = self._patterns[key] = _wavefronts(offsets[:, :1], size, None)
                count = offsets.shape[1]
                self._add(count, known[0] * count, known[1] * count)
                return
        actual, ideal = _wavefronts(offsets, size, mask)
        warps = offsets.shape[1] if mask is None else int(mask.any(axis=0).sum())
        self._add(warps, actual, ideal)

    def _add(self, instructions: int, actual: int, ideal: int) -> None:
        self.shared_instructions += instructions
        self.shared_wavefronts += actual
        self.shared_ideal += ideal

    def shared_bulk(self, chunks: int) -> None:
        """Operands that the tensor core reads by itself: whole rows of 128 bytes, no conflicts."""
        rows = -(-chunks * 16 // 128)
        self._add(0, rows, rows)

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
