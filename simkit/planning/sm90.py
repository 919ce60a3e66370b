"""The planner of FlashInfer's FlashAttention-3 prefill: whole query tiles to the least loaded SM.

Source: FlashInfer, include/flashinfer/attention/scheduler.cuh, PrefillSM90Plan.
"""

from __future__ import annotations

import numpy as np

from simkit.layouts.tables import Table
from simkit.planning.batch import Batch, ceil_div, check_sizes
from simkit.planning.worklist import WorkItem, WorkList, fill, query_tiles

MOST_ITEMS_OF_A_HEAD = 4096
"""Above it, one list serves all heads, and the grid has a row of SMs for each head."""


def sm90_tile_q(head_dim_v: int) -> int:
    """Queries of a tile; heads of a group are not packed."""
    return 192 if head_dim_v == 64 else 128


def sm90_plan(
    qo_indptr: Table,
    kv_lens: Table,
    *,
    heads: int,
    head_dim_v: int,
    sm_count: int,
    causal: bool = False,
) -> WorkList:
    """Requests with the most keys first, of each the last query tiles first, keys never split.

    ``qo_indptr`` [batch + 1], ``kv_lens`` [batch] int32 or int64; ``heads``: query heads. Requests
    with equally many keys keep their order, which is unspecified in the source. Errors:
    `TableError`, `ShapeError`, `DtypeError`.
    """
    check_sizes(heads=heads, head_dim_v=head_dim_v, sm_count=sm_count)
    batch = Batch.of(qo_indptr, kv_lens, causal=causal)
    tile_q = sm90_tile_q(head_dim_v)
    by_keys = np.argsort(-batch.kv_lens, kind="stable").tolist()
    # Without a limit on keys, each tile is one item.
    unlimited = int(batch.kv_lens.max(initial=1))
    tiles = query_tiles(batch, tile_q, by_keys, limit=max(unlimited, 1), last_first=True)
    is_shared = ceil_div(batch.rows, tile_q) + batch.size - 1 > MOST_ITEMS_OF_A_HEAD
    items = (
        WorkItem(tile.request, tile.q_tile, head, tile_q, 0, tile.keys)
        for head in range(1 if is_shared else heads)
        for tile in tiles
    )
    return fill(items, sm_count, head_copies=heads if is_shared else 1)
