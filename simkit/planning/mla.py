"""The planner of FlashInfer's MLA decode: the heads of a query are rows, keys are split by cost.

Source: FlashInfer, include/flashinfer/attention/scheduler.cuh, MLAPlan.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from simkit.errors import TableError
from simkit.layouts.tables import Int64Array, Table
from simkit.planning.batch import Batch, ceil_div, check_sizes
from simkit.planning.worklist import SplitTile, WorkList, fill, query_tiles, total_keys

CTA_TILE_Q = 64
MOST_ITEMS = 16384
"""What the kernel's tables hold; the source does not check it."""
LIMITS = ((8, 32), (16, 64), (32, 128), (64, 192))
"""Most keys of an item, for shares up to so many keys; above them, the next multiple of 256."""


@dataclass(frozen=True, eq=False)
class MlaPlan:
    """``work``: of each cluster of ``cluster_size`` CTAs, whose tile has ``tile_q`` packed rows.

    ``kv_limit``: most keys of an item. ``merge_ctas`` int64 [n, 2]: the rows of ``work.merge_rows``
    that each CTA merges, from the first to the one after the last.
    """

    work: WorkList
    cluster_size: int
    tile_q: int
    kv_limit: int
    merge_ctas: Int64Array


def key_limit(mean_keys: int) -> int:
    """Most keys of an item, where a cluster's share is ``mean_keys``."""
    for most, limit in LIMITS:
        if mean_keys <= most:
            return limit
    return 256 * ceil_div(mean_keys, 256)


def mla_plan(
    qo_indptr: Table, kv_lens: Table, *, heads: int, sm_count: int, causal: bool = False
) -> MlaPlan:
    """Requests in turn, of each the last tiles first, to the least loaded cluster.

    ``qo_indptr`` [batch + 1], ``kv_lens`` [batch] int32 or int64; ``heads``: query heads, which
    share one K/V head. At most ``sm_count`` CTAs merge, and at most two tiles of partial rows for
    each cluster are written. Errors: `TableError` for more items than the tables hold too,
    `ShapeError`, `DtypeError`.
    """
    check_sizes(heads=heads, sm_count=sm_count)
    batch = Batch.of(qo_indptr, kv_lens, group=heads, causal=causal)
    cluster_size = 2 if batch.mean_packed_len() > CTA_TILE_Q and sm_count > 1 else 1
    clusters, tile_q = sm_count // cluster_size, CTA_TILE_Q * cluster_size
    requests = range(batch.size)
    limit = key_limit(ceil_div(total_keys(batch, tile_q, requests), clusters))
    tiles = query_tiles(batch, tile_q, requests, limit=limit, last_first=True)
    items = sum(tile.chunks for tile in tiles)
    if items > MOST_ITEMS:
        raise TableError(
            f"{items} work items ({len(tiles)} query tiles of {tile_q} rows, pieces of {limit} "
            f"keys) exceed the {MOST_ITEMS} that the tables hold"
        )
    places = accumulate((tile.partial_rows for tile in tiles), initial=0)
    pieces = (
        item for tile, place in zip(tiles, places, strict=False) for item in tile.pieces(0, place)
    )
    return MlaPlan(
        work=fill(pieces, clusters, tiles),
        cluster_size=cluster_size,
        tile_q=tile_q,
        kv_limit=limit,
        merge_ctas=_merge_ctas(tiles, cluster_size),
    )


def _merge_ctas(tiles: list[SplitTile], cluster_size: int) -> Int64Array:
    """Each split tile's rows in as many parts as its keys are worth of CTAs."""
    ranges = []
    first = 0
    for tile in tiles:
        if tile.chunks == 1:
            continue
        parts = max(tile.keys * cluster_size // tile.limit, 1)
        size = ceil_div(tile.rows, parts)
        ranges += [
            (first + start, first + min(start + size, tile.rows))
            for start in range(0, tile.rows, size)
        ]
        first += tile.rows
    return np.array(ranges, np.int64).reshape(-1, 2)
