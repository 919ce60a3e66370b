"""The planner of FlashInfer's batch prefill, and decode on tensor cores: query tiles times chunks.

Source: FlashInfer, include/flashinfer/attention/scheduler.cuh, PrefillSplitQOKVIndptr.
"""

from __future__ import annotations

import numpy as np

from simkit.errors import ShapeError, TableError
from simkit.layouts.tables import Int64Array, Table
from simkit.planning.batch import Batch, ceil_div, check_sizes
from simkit.planning.chunks import least_pages, smallest_chunk
from simkit.planning.plan import Plan, plan_of

CTAS_PER_SM = 2
"""What the kernels are built for."""


def prefill_plan(
    qo_indptr: Table,
    kv_lens: Table,
    *,
    group: int,
    kv_heads: int,
    head_dim_v: int,
    page_size: int = 1,
    sm_count: int,
    window_left: int = -1,
    causal: bool = False,
    tile_q: int | None = None,
    fixed_split: int = 0,
    disable_split: bool = False,
    graph: bool = False,
    max_rows: int | None = None,
    published: bool = False,
) -> Plan:
    """Cuts the queries of all requests into tiles, and keys into as many chunks as fill the GPU.

    ``qo_indptr`` [batch + 1], ``kv_lens`` [batch] int32 or int64. The chunk is the smallest number
    of pages (1 key for ragged K/V), at least 128 keys, whose items fit into two CTAs for each SM;
    ``fixed_split`` keys instead, or none with ``disable_split``: then what a request gets does
    not depend on the others, nor do its bits for a given ``tile_q``, which is chosen by the mean
    number of packed rows if it is None.

    ``graph``: for a CUDA graph that was captured with ``max_rows`` queries in all (by default, as
    many as now). Tile, grid and whether states are merged depend on that, the batch, the heads and
    the GPU alone, so that every plan fits the captured launch.

    ``published``: keeps the published bound on the keys that a window leaves to a tile, which is
    too small unless the mask is causal. Errors: `TableError`, `ShapeError`, `DtypeError`.
    """
    check_sizes(kv_heads=kv_heads, head_dim_v=head_dim_v, page_size=page_size, sm_count=sm_count)
    batch = Batch.of(qo_indptr, kv_lens, group=group, window_left=window_left, causal=causal)
    if fixed_split < 0 or (fixed_split and disable_split):
        raise ShapeError(
            f"fixed_split is {fixed_split} keys with disable_split {disable_split}; it is 0 or "
            f"more, and 0 if keys are not split"
        )
    rows = _captured_rows(batch, graph, max_rows)
    if tile_q is None:
        mean = batch.mean_packed_len()
        tile_q = cta_tile_q(longest_packed_len(batch, rows) if graph else mean, head_dim_v)
    check_sizes(tile_q=tile_q)
    tiles = batch.tiles(tile_q)
    most_tiles = max(ceil_div(rows * group, tile_q) + batch.size - 1, 0)
    keys = np.maximum(_most_keys(batch, tile_q, published), 1)
    bound = CTAS_PER_SM * sm_count // kv_heads

    pages = ceil_div(keys, page_size)
    most = int(pages.max(initial=1))
    if disable_split:
        chunk, is_split, grid = most * page_size, False, most_tiles
    elif fixed_split:
        # A captured graph merges or does not, whatever the lengths of its replays.
        is_split = graph or bool((keys > fixed_split)[tiles > 0].any())
        chunk, grid = fixed_split, max(bound, most_tiles)
    else:
        found = smallest_chunk(pages, tiles, least=least_pages(page_size), most=most, bound=bound)
        chunk, is_split, grid = found * page_size, graph or found < most, max(bound, most_tiles)
    return plan_of(
        batch,
        ceil_div(keys, chunk),
        tile_q=tile_q,
        kv_chunk=chunk,
        is_split=is_split,
        grid=grid if graph else None,
    )


def cta_tile_q(packed_len: int, head_dim_v: int) -> int:
    """Packed rows of a query tile for requests of ``packed_len`` rows.

    Source: FlashInfer's FA2DetermineCtaTileQ on GPUs from sm_80.
    """
    if head_dim_v >= 512:
        return 16 if packed_len <= 32 else 32
    if packed_len > 64 and head_dim_v < 256:
        return 128
    return 64 if packed_len > 16 else 16


def longest_packed_len(batch: Batch, rows: int) -> int:
    """Packed rows of a request that has all queries but one for each other request."""
    return max(rows - batch.size + 1, 1) * batch.group


def _captured_rows(batch: Batch, graph: bool, max_rows: int | None) -> int:
    if max_rows is None:
        return batch.rows
    if not graph:
        raise ShapeError(f"max_rows is {max_rows}; only a plan for a CUDA graph has it")
    if batch.rows > max_rows:
        raise TableError(
            f"qo_indptr[{batch.size}] = {batch.rows}; the graph was captured for {max_rows} queries"
        )
    return max_rows


def _most_keys(batch: Batch, tile_q: int, published: bool) -> Int64Array:
    """A bound on the keys that a tile of each request may see."""
    if batch.window_left < 0:
        return batch.kv_lens
    # The window of a tile's first row starts window_left keys before it; the keys end with the
    # tile's last row, less than tile_q rows later, or with those of the request's last row.
    ends_with_tile = batch.causal or published
    rows = np.int64(tile_q) if ends_with_tile else np.maximum(tile_q, batch.q_lens)
    return np.minimum(batch.kv_lens, batch.window_left + rows)
