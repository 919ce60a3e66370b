"""Where appended tokens go: after those that each request has, and never where another token is."""

from __future__ import annotations

import numpy as np

from simkit.errors import ShapeError, TableError
from simkit.layouts.block_sparse import BlockRows
from simkit.layouts.ragged import Ragged
from simkit.layouts.tables import Int64Array, ramps


def append_positions(rows: BlockRows, append: Ragged) -> Int64Array:
    """Position of each appended token in its request, int64 [append.total].

    ``rows`` are those after the append: token i of a request goes to position
    kv_len - appended + i. `TableError` for a request that appends more than it has afterwards,
    `ShapeError` for another number of requests.
    """
    if append.batch != rows.batch:
        raise ShapeError(f"{append.batch} requests append, the tables have {rows.batch}")
    before = rows.kv_lens - append.lens
    if (before < 0).any():
        request = int((before < 0).argmax())
        raise TableError(
            f"request {request} appends {append.lens[request]} tokens, but has "
            f"{rows.kv_lens[request]} afterwards"
        )
    return before[append.requests()] + append.positions()


def append_slots(rows: BlockRows, append: Ragged) -> Int64Array:
    """Slot of each appended token, int64 [append.total].

    Errors as for `append_positions`, and `TableError` for a token whose slot is that of another
    token too, an appended one or one that is there already: a page that requests share is copied
    before one of them writes to it.
    """
    requests = append.requests()
    slots = rows.locate(requests, append_positions(rows, append))
    _check_alone(rows, requests, slots)
    return slots


def _check_alone(rows: BlockRows, requests: Int64Array, slots: Int64Array) -> None:
    """No token but the appended ones (of ``requests``, at ``slots``) lies at their slots."""
    size = rows.block_size
    indices = rows.indices[: rows.starts[-1]].astype(np.int64)
    # Only the pages that are written to matter, which are few beside those of long contexts.
    entries = np.flatnonzero(np.isin(indices, slots // size))
    used = np.full(len(indices), size, np.int64)
    has_blocks = rows.block_counts > 0
    used[rows.starts[1:][has_blocks] - 1] = rows.last_block_len[has_blocks]
    taken = np.repeat(indices[entries] * size, used[entries]) + ramps(used[entries])
    several, counts = np.unique(taken, return_counts=True)
    wrong = np.isin(slots, several[counts > 1])
    if wrong.any():
        token = int(wrong.argmax())
        page, offset = divmod(int(slots[token]), size)
        owner = np.repeat(np.arange(rows.batch), rows.block_counts)[entries]
        holders = np.repeat(owner, used[entries])[taken == slots[token]]
        raise TableError(
            f"appended token {token} of request {requests[token]} goes to slot {offset} of page "
            f"{page}, which holds tokens of requests {', '.join(map(str, holders))}; a page that "
            f"is shared must be copied before it is written to"
        )
