"""The planner of FlashInfer's persistent BatchAttention: prefill and decode in one launch.

Source: FlashInfer, include/flashinfer/attention/scheduler.cuh, TwoStageHolisticPlan.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from simkit.errors import TableError
from simkit.layouts.tables import Table
from simkit.planning.batch import Batch, ceil_div, check_sizes
from simkit.planning.worklist import WorkList, fill, query_tiles, total_keys

TILES_Q = (128, 16)
"""Packed rows of a tile of requests with more than 16 of them, and of the others."""
MOST_ITEMS = 65536
"""Of either tile, for which the kernel's tables have room."""


def holistic_workers(sm_count: int, head_dim: int) -> int:
    """Persistent CTAs: two for each SM, one for wide heads."""
    return sm_count * (1 if head_dim >= 256 else 2)


def key_limit(mean_keys: int) -> int:
    """Most keys of an item, where a worker's share is ``mean_keys``."""
    return 128 if mean_keys <= 128 else 256 * ceil_div(mean_keys, 256)


def holistic_plan(
    qo_indptr: Table,
    kv_lens: Table,
    *,
    group: int,
    kv_heads: int,
    head_dim: int,
    sm_count: int,
    causal: bool = False,
) -> WorkList:
    """Items of all requests, big tiles before small ones, to the least loaded persistent CTA.

    ``qo_indptr`` [batch + 1], ``kv_lens`` [batch] int32 or int64. Keys are split into pieces of a
    worker's share of all keys, half of it for big tiles if there are K/V heads to go with. Heads of
    an item are K/V heads. Errors: `TableError` for more items than tables hold too, `ShapeError`,
    `DtypeError`.
    """
    check_sizes(kv_heads=kv_heads, head_dim=head_dim, sm_count=sm_count)
    batch = Batch.of(qo_indptr, kv_lens, group=group, causal=causal)
    workers = holistic_workers(sm_count, head_dim)
    is_big = batch.packed_lens > TILES_Q[1]
    tasks = [
        (tile_q, np.flatnonzero(chosen).tolist())
        for tile_q, chosen in zip(TILES_Q, (is_big, ~is_big), strict=True)
    ]
    all_keys = sum(total_keys(batch, tile_q, requests) for tile_q, requests in tasks)
    share = key_limit(ceil_div(all_keys * kv_heads, workers))
    tiles = []
    for tile_q, requests in tasks:
        limit = share // min(kv_heads, 2) if tile_q == TILES_Q[0] else share
        found = query_tiles(batch, tile_q, requests, limit=limit, last_first=False)
        items = sum(tile.chunks for tile in found) * kv_heads
        if items > MOST_ITEMS:
            raise TableError(
                f"{items} work items of {tile_q} rows ({len(found)} query tiles, {kv_heads} K/V "
                f"heads, pieces of {limit} keys) exceed the {MOST_ITEMS} that the tables hold"
            )
        tiles += found
    places = accumulate((tile.partial_rows for tile in tiles), initial=0)
    by_head = (
        [[*tile.pieces(head, place)] for head in range(kv_heads)]
        for tile, place in zip(tiles, places, strict=False)
    )
    # Piece by piece, each of all heads.
    items_in_turn = (
        item for heads in by_head for piece in zip(*heads, strict=True) for item in piece
    )
    return fill(items_in_turn, workers, tiles)
