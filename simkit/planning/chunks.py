"""The search for a chunk of keys: as small as the grid admits, so that as many CTAs work as fit."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from simkit.layouts.tables import Int64Array
from simkit.planning.batch import ceil_div

LEAST_CHUNK = 128
"""Keys below which a chunk is not worth a CTA of its own."""


def least_pages(page_size: int) -> int:
    """Pages of the smallest chunk."""
    return max(LEAST_CHUNK // page_size, 1)


def smallest_chunk(
    lengths: Int64Array, tiles: Int64Array | int, *, least: int, most: int, bound: int
) -> int:
    """The smallest c in ``least`` to ``most`` with sum(tiles * ceil(lengths / c)) <= ``bound``.

    ``most`` if there is none, ``least`` if that is not below ``most``. The sum never grows with c.
    """

    def admits(chunk: int) -> bool:
        return int(np.sum(tiles * ceil_div(lengths, chunk))) <= bound

    sizes = range(least, most)
    return least + bisect_left(sizes, True, key=admits) if sizes else least
