"""Cutting ranges into tiles."""

from __future__ import annotations

from collections.abc import Iterator


def tiles(stop: int, size: int, start: int = 0) -> Iterator[slice]:
    """Slices of ``size`` from ``start`` to ``stop``; the last one may be shorter."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def tile_count(length: int, size: int) -> int:
    """How many tiles of ``size`` cover ``length``."""
    return -(-length // size)
