"""The planner of FlashInfer's decode on CUDA cores: one query for each request, pages in chunks.

Source: FlashInfer, include/flashinfer/attention/scheduler.cuh, DecodePlan.
"""

from __future__ import annotations

import numpy as np

from simkit.layouts.tables import Table
from simkit.planning.batch import Batch, ceil_div, check_sizes
from simkit.planning.chunks import least_pages, smallest_chunk
from simkit.planning.plan import Plan, plan_of


def decode_plan(
    kv_lens: Table,
    *,
    group: int,
    kv_heads: int,
    page_size: int,
    max_grid: int,
    graph: bool = False,
    published: bool = False,
) -> Plan:
    """Splits keys only where the requests do not fill ``max_grid`` CTAs (SMs times CTAs of an SM).

    ``kv_lens`` [batch] int32 or int64, keys of each request. Its one query is a tile of ``group``
    packed rows. The chunk is the smallest number of pages, at least 128 keys, with which the
    chunks of all requests and K/V heads fit into the grid. ``graph``: the grid and whether
    states are merged depend on the batch alone, not on lengths.

    ``published``: counts requests without keys as the published search does, not at all, although
    each gets an item; the grid may then be too small. Errors: `TableError`, `ShapeError`,
    `DtypeError`.
    """
    check_sizes(group=group, kv_heads=kv_heads, page_size=page_size, max_grid=max_grid)
    batch = Batch.of(np.arange(np.size(kv_lens) + 1), kv_lens, group=group)
    pages = ceil_div(batch.kv_lens, page_size)
    has_room = batch.size * kv_heads < max_grid
    most = max(int(pages.max(initial=0)), 1)
    chunk = most
    if has_room:
        counted = pages if published else np.maximum(pages, 1)
        bound = max_grid // kv_heads
        chunk = smallest_chunk(counted, 1, least=least_pages(page_size), most=most, bound=bound)
    chunks = ceil_div(np.maximum(pages, 1), chunk)
    grid = None
    if graph:
        grid = max_grid // kv_heads if has_room else batch.size
    return plan_of(
        batch,
        chunks,
        tile_q=group,
        kv_chunk=chunk * page_size,
        is_split=has_room and (graph or bool((chunks > 1).any())),
        grid=grid,
    )
