"""Whether the items of a plan hold what each query row may see: once, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from properties.law import LawViolation
from properties.plan_case import PlanCase
from simkit.layouts.tables import Int64Array, indptr_of
from simkit.planning.plan import Plan
from simkit.planning.worklist import WorkList


@dataclass(frozen=True, eq=False)
class Pieces:
    """Items as the check sees them, int64 [items] each: keys ``start`` to ``stop`` of rows ``tile``
    * ``tile_q`` to (``tile`` + 1) * ``tile_q`` of a request, for ``head``.
    """

    request: Int64Array
    head: Int64Array
    tile: Int64Array
    tile_q: Int64Array
    start: Int64Array
    stop: Int64Array


def plan_pieces(plan: Plan, keys: Int64Array) -> Pieces:
    """Items of a plan with their ``keys`` [items, 2]; all K/V heads are alike."""
    request, tile = plan.requests.astype(np.int64), plan.q_tiles.astype(np.int64)
    alike = np.zeros_like(request)
    return Pieces(request, alike, tile, alike + plan.tile_q, keys[:, 0], keys[:, 1])


def list_pieces(work: WorkList) -> Pieces:
    return Pieces(work.request, work.head, work.q_tile, work.tile_q, work.kv_start, work.kv_stop)


def visible_keys(case: PlanCase, request: int) -> tuple[Int64Array, Int64Array]:
    """First key that each query of a request sees and the one after its last; the same if none."""
    q_len, kv_len = int(case.q_lens[request]), int(case.kv_lens[request])
    last = np.arange(q_len) + kv_len - q_len  # a query's own key
    stops = np.clip(last + 1, 0, kv_len) if case.causal else np.full(q_len, kv_len)
    starts = np.zeros(q_len, np.int64)
    if case.window_left >= 0:
        starts = np.clip(last - case.window_left, 0, stops)
    return starts, stops


def check_coverage(case: PlanCase, pieces: Pieces, *, heads: int, group: int) -> None:
    """LawViolation unless, for every head, the items of each tile part the keys that its rows see.

    The keys that the rows of a tile see are one range, since neighbours' ranges overlap or touch.
    """
    strange = (pieces.request < 0) | (pieces.request >= case.batch)
    if strange.any():
        raise LawViolation(f"an item is of request {pieces.request[strange][0]} of {case.batch}")
    for request in range(case.batch):
        own = np.flatnonzero(pieces.request == request)
        rows = int(case.q_lens[request]) * group
        if not rows:
            if own.size:
                raise LawViolation(f"request {request} has no queries, but {own.size} items")
            continue
        sizes = np.unique(pieces.tile_q[own])
        if sizes.size != 1:
            raise LawViolation(f"request {request} has tiles of {sizes.tolist()} rows; one is due")
        _check_request(case, pieces, request, own, heads, group)


def _check_request(
    case: PlanCase, pieces: Pieces, request: int, own: Int64Array, heads: int, group: int
) -> None:
    starts, stops = visible_keys(case, request)
    tile_q, rows = int(pieces.tile_q[own][0]), starts.size * group
    tiles = -(-rows // tile_q)
    own = own[np.lexsort((pieces.stop[own], pieces.start[own], pieces.tile[own], pieces.head[own]))]
    place = pieces.head[own] * tiles + pieces.tile[own]
    if not np.array_equal(np.unique(place), np.arange(heads * tiles)):
        raise LawViolation(
            f"request {request} has items for {np.unique(place).size} of {heads} heads times "
            f"{tiles} tiles"
        )
    for number in range(tiles):
        first, last = number * tile_q // group, (min((number + 1) * tile_q, rows) - 1) // group
        sees = slice(first, last + 1)
        some = stops[sees] > starts[sees]
        wanted = (0, 0)
        if some.any():
            wanted = (int(starts[sees][some].min()), int(stops[sees][some].max()))
        for head in range(heads):
            low, high = np.searchsorted(place, head * tiles + number + np.arange(2))
            spans = np.stack([pieces.start[own[low:high]], pieces.stop[own[low:high]]], axis=-1)
            _check_spans(spans[spans[:, 1] > spans[:, 0]], wanted, f"{request}, tile {number}")


def _check_spans(spans: Int64Array, wanted: tuple[int, int], place: str) -> None:
    """Non-empty spans, by start, must part the ``wanted`` one."""
    at = wanted[0]
    for start, stop in spans.tolist():
        if start != at:
            what = "in no item" if start > at else "in two items or seen by no row"
            raise LawViolation(f"request {place}: keys {min(at, start)} to {max(at, start)} {what}")
        at = stop
    if at != wanted[1]:
        raise LawViolation(f"request {place}: items end at key {at}, rows see up to {wanted[1]}")


def check_plan_states(case: PlanCase, plan: Plan) -> None:
    """LawViolation unless every query's states lie where merge_indptr says, one for each chunk."""
    if not np.array_equal(plan.o_indptr, indptr_of(case.q_lens * plan.chunks)):
        raise LawViolation("o_indptr does not count queries times chunks")
    # One head of the group stands for all: a query's heads may lie in two tiles.
    first_rows, queries = case.qo_indptr, case.q_lens
    places, owners = [], []
    for request in range(case.batch):
        own = np.flatnonzero(plan.requests == request)
        rows = np.arange(queries[request])
        chunks = int(plan.chunks[request])
        tile = rows * case.group // plan.tile_q
        item, row = np.nonzero(plan.q_tiles[own][:, None] == tile)
        places.append(plan.o_indptr[request] + row * chunks + plan.kv_chunks[own][item])
        owners.append(first_rows[request] + row)
    _check_places(np.concatenate(places), np.concatenate(owners), plan.merge_indptr)


def check_list_states(case: PlanCase, work: WorkList, *, heads: int, group: int) -> None:
    """LawViolation unless split rows' states lie where merge_indptr says, and others have none."""
    first_rows = indptr_of(case.q_lens * group)
    merged = np.full(int(first_rows[-1]), -1)  # where a packed row of the batch stands in the merge
    merged[work.merge_rows] = np.arange(work.merge_rows.size)
    if np.unique(work.merge_rows).size != work.merge_rows.size:
        raise LawViolation("a row is merged twice")
    packed = case.q_lens * group
    for head in range(heads):
        places, owners = [], []
        for item in np.flatnonzero(work.head == head).tolist():
            request, tile_q = int(work.request[item]), int(work.tile_q[item])
            first = int(work.q_tile[item]) * tile_q
            rows = np.arange(min(tile_q, int(packed[request]) - first))
            owner = merged[first_rows[request] + first + rows]
            start, chunks = int(work.partial_start[item]), int(work.chunks[item])
            if (start < 0) != (chunks == 1) or ((owner < 0) != (start < 0)).any():
                raise LawViolation(
                    f"request {request}, tile {work.q_tile[item]}: {chunks} items, first state at "
                    f"{start}, {int((owner >= 0).sum())} of {rows.size} rows are merged"
                )
            if start >= 0:
                places.append(start + rows * chunks)
                owners.append(owner)
        empty = np.zeros(0, np.int64)
        _check_places(
            np.concatenate([empty, *places]), np.concatenate([empty, *owners]), work.merge_indptr
        )


def _check_places(places: Int64Array, owners: Int64Array, merge_indptr: Int64Array) -> None:
    """Each place once, each within the range of its owner."""
    if not np.array_equal(np.sort(places), np.arange(merge_indptr[-1])):
        raise LawViolation(
            f"{places.size} partial states have {np.unique(places).size} places; merge_indptr "
            f"ends at {merge_indptr[-1]}"
        )
    wrong = np.searchsorted(merge_indptr, places, side="right") - 1 != owners
    if wrong.any():
        at = int(wrong.argmax())
        raise LawViolation(
            f"the state at {places[at]} is of row {owners[at]}, whose states are "
            f"{merge_indptr[owners[at]]} to {merge_indptr[owners[at] + 1]}"
        )
