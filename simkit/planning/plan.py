"""What a planner hands to the kernels: work items in launch order, and where partial states go."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simkit.errors import CapacityError, TableError
from simkit.layouts.tables import Int64Array, Table, indptr_of, ramps
from simkit.planning.batch import MOST_LENGTH, Batch

MOST_ENTRIES = 2**27
"""Of a table on the host, which takes 1 GiB then."""
STATE_BYTES = 4
"""Partial outputs and their LSE are float32."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Work items of one launch. Item i is the query tile ``q_tiles[i]`` of request ``requests[i]``
    with the chunk ``kv_chunks[i]`` of its keys; each is a CTA of every K/V head.

    ``requests``, ``q_tiles``, ``kv_chunks``: int32 [items]. A tile is ``tile_q`` packed rows (query
    times group + head of the group). Chunk c covers keys first + c * ``kv_chunk`` to
    first + (c + 1) * ``kv_chunk``, cut at the last key that any row of the tile may see; first is
    the first such key. Every tile of a request has the same number of chunks, at least one, so that
    each row has a state even if it sees no key.

    ``is_split``: items write partial states, which are merged; without it they write the output.
    The partial state of request b, query r and chunk c is row o_indptr[b] + r * chunks[b] + c.
    ``merge_indptr`` int64 [queries + 1]: where the states of each query start, requests in order.
    ``o_indptr`` int64 [batch + 1]: where those of each request start.

    ``grid``: CTAs of a K/V head; at least the items, more where a CUDA graph fixed it. CTAs without
    an item do nothing.
    """

    requests: NDArray[np.int32]
    q_tiles: NDArray[np.int32]
    kv_chunks: NDArray[np.int32]
    tile_q: int
    kv_chunk: int
    is_split: bool
    merge_indptr: Int64Array
    o_indptr: Int64Array
    grid: int

    @property
    def items(self) -> int:
        return len(self.requests)

    @property
    def batch(self) -> int:
        return len(self.o_indptr) - 1

    @cached_property
    def chunks(self) -> Int64Array:
        """Chunks of each request, int64 [batch]; 0 for one without queries."""
        counts = np.zeros(self.batch, np.int64)
        np.maximum.at(counts, self.requests, self.kv_chunks.astype(np.int64) + 1)
        return counts

    @property
    def partial_rows(self) -> int:
        """Partial states of a head."""
        return int(self.o_indptr[-1]) if self.is_split else 0

    def most_partial_rows(self, group: int) -> int:
        """Partial states of a head that no plan with this grid exceeds: what to allocate under a
        CUDA graph.
        """
        return self.grid * self.tile_q // group if self.is_split else 0

    def workspace_elements(self, *, heads: int, head_dim_v: int, rows: int | None = None) -> int:
        """float32 values of the partial outputs and LSEs of all query ``heads``; ``rows``: other
        than those of this plan.
        """
        return (self.partial_rows if rows is None else rows) * heads * (head_dim_v + 1)

    def workspace_bytes(self, *, heads: int, head_dim_v: int, rows: int | None = None) -> int:
        """Bytes of ``workspace_elements``."""
        return STATE_BYTES * self.workspace_elements(heads=heads, head_dim_v=head_dim_v, rows=rows)


def plan_of(
    batch: Batch,
    chunks: Int64Array,
    *,
    tile_q: int,
    kv_chunk: int,
    is_split: bool,
    grid: int | None = None,
) -> Plan:
    """Lays out items by request, query tile and chunk, with ``chunks`` [batch] of each tile.

    ``grid`` None: as many as there are items. Errors: `TableError` for more items than the grid, or
    than an int32 counts.
    """
    counts = batch.tiles(tile_q) * chunks
    items = int(counts.sum())
    for what, number in (("work items", items), ("queries", batch.rows)):
        if number > MOST_ENTRIES:
            raise CapacityError(f"the plan has {number} {what}; tables hold {MOST_ENTRIES} at most")
    limit = MOST_LENGTH if grid is None else grid
    if items > limit:
        raise TableError(
            f"the plan has {items} work items, but the grid has {limit} CTAs for each K/V head "
            f"({int((counts > 0).sum())} requests with queries, chunks of {kv_chunk} keys)"
        )
    requests = np.repeat(np.arange(batch.size), counts)
    within, own_chunks = ramps(counts), chunks[requests]
    return Plan(
        requests=requests.astype(np.int32),
        q_tiles=(within // own_chunks).astype(np.int32),
        kv_chunks=(within % own_chunks).astype(np.int32),
        tile_q=tile_q,
        kv_chunk=kv_chunk,
        is_split=is_split,
        merge_indptr=indptr_of(np.repeat(chunks, batch.q_lens)),
        o_indptr=indptr_of(batch.q_lens * chunks),
        grid=items if grid is None else grid,
    )


def item_keys(plan: Plan, batch: Batch) -> Int64Array:
    """First key of each item and the one after its last, int64 [items, 2]; the same if it has
    none.
    """
    first, stop = batch.tile_keys(plan.requests, plan.q_tiles, plan.tile_q).T
    start = first + plan.kv_chunks.astype(np.int64) * plan.kv_chunk
    start = np.minimum(start, stop)
    return np.stack([start, np.minimum(start + plan.kv_chunk, stop)], axis=-1)


def coverage(
    plan: Plan,
    qo_indptr: Table,
    kv_lens: Table,
    *,
    group: int,
    window_left: int = -1,
    causal: bool = False,
) -> Int64Array:
    """`item_keys` of a plan for these requests; the arguments are those of the planner."""
    batch = Batch.of(qo_indptr, kv_lens, group=group, window_left=window_left, causal=causal)
    return item_keys(plan, batch)
