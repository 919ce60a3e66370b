"""Queues of work for persistent workers, filled by cost, and the merge of rows that are split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from simkit.layouts.tables import Int64Array, indptr_of, ramps
from simkit.planning.batch import Batch, ceil_div
from simkit.planning.load import Placement, in_order, item_cost, list_schedule

WRITES_OUTPUT = -1
"""The ``partial_start`` of an item that is not merged."""


class WorkItem(NamedTuple):
    """Keys ``kv_start`` to ``kv_stop`` of query tile ``q_tile`` of a request, for one ``head``.

    The state of the tile's row r goes to row ``partial_start`` + r * ``chunks``, or is the output
    if ``partial_start`` is `WRITES_OUTPUT`. ``chunks``: items that share the tile and head.
    """

    request: int
    q_tile: int
    head: int
    tile_q: int
    kv_start: int
    kv_stop: int
    partial_start: int = WRITES_OUTPUT
    chunks: int = 1


@dataclass(frozen=True, eq=False)
class WorkList:
    """What each of ``workers`` persistent workers does: items worker_indptr[w] to
    worker_indptr[w + 1], in this order.

    Fields of `WorkItem`, int64 [items]. ``head_copies``: heads that every item stands for, more
    than one if the same list serves all heads. ``merge_indptr`` int64 [rows + 1]: where the partial
    states of each split row start. ``merge_rows`` int64 [rows]: which packed row of the batch that
    is (query * group + head of the group); the same for every head.
    """

    worker_indptr: Int64Array
    request: Int64Array
    q_tile: Int64Array
    head: Int64Array
    tile_q: Int64Array
    kv_start: Int64Array
    kv_stop: Int64Array
    partial_start: Int64Array
    chunks: Int64Array
    merge_indptr: Int64Array
    merge_rows: Int64Array
    head_copies: int = 1

    @property
    def workers(self) -> int:
        return len(self.worker_indptr) - 1

    @property
    def items(self) -> int:
        return len(self.request)

    @property
    def partial_rows(self) -> int:
        """Partial states of a head."""
        return int(self.merge_indptr[-1])

    @property
    def worker(self) -> Int64Array:
        """The worker of each item, int64 [items]."""
        return np.repeat(np.arange(self.workers), np.diff(self.worker_indptr))

    @property
    def placement(self) -> Placement:
        """When each item runs."""
        costs = item_cost(self.tile_q, self.kv_stop - self.kv_start) * self.head_copies
        return in_order(self.worker, costs, self.workers)


@dataclass(frozen=True)
class SplitTile:
    """A query tile of a request: ``rows`` packed rows from ``first_row`` of the batch on, with keys
    0 to ``keys`` in pieces of at most ``limit``.
    """

    request: int
    q_tile: int
    tile_q: int
    rows: int
    first_row: int
    keys: int
    limit: int

    @property
    def chunks(self) -> int:
        return max(ceil_div(self.keys, self.limit), 1)

    @property
    def partial_rows(self) -> int:
        return self.rows * self.chunks if self.chunks > 1 else 0

    def pieces(self, head: int, partial_start: int) -> Iterator[WorkItem]:
        """The items of a head, one without keys if there are none."""
        for chunk in range(self.chunks):
            start = chunk * self.limit
            place = WRITES_OUTPUT if self.chunks == 1 else partial_start + chunk
            stop = min(start + self.limit, self.keys)
            yield WorkItem(
                self.request, self.q_tile, head, self.tile_q, start, stop, place, self.chunks
            )


def query_tiles(
    batch: Batch, tile_q: int, requests: Iterable[int], *, limit: int, last_first: bool
) -> list[SplitTile]:
    """The query tiles of the requests in turn, each request's from the last or the first on."""
    chosen = np.array([*requests], np.int64)
    counts, packed_lens = batch.tiles(tile_q)[chosen], batch.packed_lens
    request, number = np.repeat(chosen, counts), ramps(counts)
    if last_first:
        number = np.repeat(counts, counts) - 1 - number
    rows = np.minimum(tile_q, packed_lens[request] - number * tile_q)
    first_row = indptr_of(packed_lens)[request] + number * tile_q
    keys = batch.tile_keys(request, number, tile_q)[:, 1]
    columns = (column.tolist() for column in (request, number, rows, first_row, keys))
    return [
        SplitTile(own, tile, tile_q, count, first, seen, limit)
        for own, tile, count, first, seen in zip(*columns, strict=True)
    ]


def total_keys(batch: Batch, tile_q: int, requests: Iterable[int]) -> int:
    """Keys of all query tiles of the requests."""
    tiles = query_tiles(batch, tile_q, requests, limit=1, last_first=False)
    return sum(tile.keys for tile in tiles)


def fill(
    items: Iterable[WorkItem],
    workers: int,
    merged: Iterable[SplitTile] = (),
    *,
    head_copies: int = 1,
) -> WorkList:
    """Gives the items in turn to the least loaded worker; ``merged``: all tiles, in the order in
    which their partial states lie.
    """
    table = np.array([*items], np.int64).reshape(-1, len(WorkItem._fields))
    columns = dict(zip(WorkItem._fields, table.T, strict=True))
    costs = item_cost(columns["tile_q"], columns["kv_stop"] - columns["kv_start"])
    worker = list_schedule(costs, workers).worker
    order = np.argsort(worker, kind="stable")
    split = [tile for tile in merged if tile.chunks > 1]
    rows = [np.arange(tile.first_row, tile.first_row + tile.rows) for tile in split]
    counts = [np.full(tile.rows, tile.chunks) for tile in split]
    empty = np.zeros(0, np.int64)
    return WorkList(
        worker_indptr=indptr_of(np.bincount(worker, minlength=workers)),
        request=columns["request"][order],
        q_tile=columns["q_tile"][order],
        head=columns["head"][order],
        tile_q=columns["tile_q"][order],
        kv_start=columns["kv_start"][order],
        kv_stop=columns["kv_stop"][order],
        partial_start=columns["partial_start"][order],
        chunks=columns["chunks"][order],
        merge_indptr=indptr_of(np.concatenate([empty, *counts])),
        merge_rows=np.concatenate([empty, *rows]),
        head_copies=head_copies,
    )
