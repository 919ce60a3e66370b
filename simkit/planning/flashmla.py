"""FlashMLA's tile scheduler: blocks of keys dealt to parts of the GPU, each up to the same load.

Source: FlashMLA, get_decoding_sched_meta kernel, revisions of 2026 (empty requests count a block).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from simkit.errors import ShapeError
from simkit.layouts.tables import Int64Array, Table, check_range
from simkit.planning.batch import MOST_LENGTH, ceil_div, check_sizes

BLOCK = 64
"""Keys, or top-k entries, of a block."""
OVERHEAD = 5
"""Blocks that starting on another request is worth."""
OVERHEAD_SMALL_TOPK = 3
"""The same in the SM100 kernel for 128 heads and a small top-k."""


@dataclass(frozen=True)
class Part:
    """Requests ``begin_request`` to ``end_request``, both included: the first from
    ``begin_block`` on, the last up to ``end_block``, not included.

    ``begin_split``: which split of its first request the part has. ``is_first_split``,
    ``is_last_split``: whether other parts have some of that request. A part whose
    ``begin_request`` is the batch size has no work.
    """

    begin_request: int
    end_request: int
    begin_block: int
    end_block: int
    begin_split: int
    is_first_split: bool
    is_last_split: bool


@dataclass(frozen=True, eq=False)
class TileSchedule:
    """``num_splits`` int64 [batch + 1]: where the splits of each request start among all of them.

    ``payload``: the most blocks of a part, each request's overhead included.
    """

    parts: tuple[Part, ...]
    num_splits: Int64Array
    payload: int


class MlaPiece(NamedTuple):
    """Blocks ``start`` to ``stop`` of a request. ``slot``: where its partial state goes if the
    request ``is_split``; otherwise the piece writes the output.
    """

    part: int
    request: int
    start: int
    stop: int
    slot: int
    is_split: bool


def dense_parts(sm_count: int, *, kv_heads: int, rows: int) -> int:
    """Parts of the dense kernel; ``rows``: queries of a request times heads of a group."""
    check_sizes(sm_count=sm_count, kv_heads=kv_heads, rows=rows)
    return max(sm_count // kv_heads // ceil_div(rows, 64), 1)


_CTAS: dict[str, Callable[[int, int], int]] = {
    "sm90": lambda q_len, heads: q_len * (heads // 64),
    "sm100_head64": lambda q_len, heads: q_len,
    "sm100_head128_small_topk": lambda q_len, heads: q_len * 2,
}


def sparse_parts(kernel: str, sm_count: int, *, q_len: int, heads: int) -> int:
    """Parts of a sparse ``kernel``: "sm90", "sm100_head64" or "sm100_head128_small_topk".

    ``heads``: a multiple of 64. `ShapeError` for anything else.
    """
    check_sizes(sm_count=sm_count, q_len=q_len)
    if kernel not in _CTAS or heads < 64 or heads % 64:
        raise ShapeError(
            f"kernel {kernel!r} with {heads} heads; there are {', '.join(_CTAS)}, heads in steps "
            f"of 64"
        )
    return max(sm_count // _CTAS[kernel](q_len, heads), 1)


def sparse_lengths(
    batch: int,
    topk: int,
    *,
    topk_lengths: Table | None = None,
    extra_topk: int = 0,
    extra_lengths: Table | None = None,
) -> Int64Array:
    """Entries that the sparse kernels walk for each request, int64 [batch].

    ``topk_lengths``, ``extra_lengths`` [batch]: how many of ``topk`` and of ``extra_topk`` there
    are, by default all. The first list has at least one entry, and ends a block if there is a
    second.
    """
    check_sizes(0, batch=batch, topk=topk, extra_topk=extra_topk)

    def lengths(name: str, given: Table | None, most: int) -> Int64Array:
        if given is None:
            return np.full(batch, most, np.int64)
        checked = check_range(name, given, 0, most)
        if checked.shape != (batch,):
            raise ShapeError(f"{name} must be [{batch}], got {list(checked.shape)}")
        return checked

    first = np.maximum(lengths("topk_lengths", topk_lengths, topk), 1)
    if not extra_topk:
        return first
    return ceil_div(first, BLOCK) * BLOCK + lengths("extra_lengths", extra_lengths, extra_topk)


def tile_schedule(lengths: Table, parts: int, *, overhead: int = OVERHEAD) -> TileSchedule:
    """Deals the blocks of the requests in order to ``parts``, each up to an equal payload.

    ``lengths`` [batch] int32 or int64: keys of each request. A request that does not fit into what
    is left of a part goes on in the next, unless not even one block would fit beside the overhead.
    At most batch + parts - 1 splits arise. Errors: `TableError`, `DtypeError`, `ShapeError`.
    """
    check_sizes(parts=parts)
    check_sizes(0, overhead=overhead)
    keys = check_range("lengths", lengths, 0, MOST_LENGTH)
    if keys.ndim != 1:
        raise ShapeError(f"lengths must be [batch], got {list(keys.shape)}")
    blocks = _counted_blocks(keys).tolist()
    payload = ceil_div(sum(blocks) + overhead * len(blocks), parts) + overhead
    request, block, split = 0, 0, 0
    splits = []  # of each request that is done
    found = []
    for _ in range(parts):
        begin = (request, block, split)
        left = payload
        while request < len(blocks):
            rest = blocks[request] - block
            if left >= rest + overhead:
                splits.append(split + 1)
                left -= rest + overhead
                request, block, split = request + 1, 0, 0
                continue
            if left > overhead:
                block, split = block + left - overhead, split + 1
            break
        found.append(_part(begin, request, block, keys, blocks))
    return TileSchedule(tuple(found), np.cumsum([0, *splits], dtype=np.int64), payload)


def pieces(schedule: TileSchedule, lengths: Table) -> Iterator[MlaPiece]:
    """What the kernels make of the schedule, part by part; a piece of an empty request is empty."""
    keys = np.asarray(lengths, np.int64)
    real_blocks = ceil_div(keys, BLOCK).tolist()
    for number, part in enumerate(schedule.parts):
        for request in range(part.begin_request, part.end_request + 1):
            is_first, is_last = request == part.begin_request, request == part.end_request
            split = part.begin_split if is_first else 0
            yield MlaPiece(
                part=number,
                request=request,
                start=part.begin_block if is_first else 0,
                stop=part.end_block if is_last else real_blocks[request],
                slot=int(schedule.num_splits[request]) + split,
                is_split=(is_first and part.is_first_split) or (is_last and part.is_last_split),
            )


def _counted_blocks(keys: Int64Array) -> Int64Array:
    """Blocks in the budget of each request: one for an empty request, too."""
    return np.maximum(ceil_div(keys, BLOCK), 1)


def _part(
    begin: tuple[int, int, int], request: int, block: int, keys: Int64Array, blocks: list[int]
) -> Part:
    """The part that began at (request, block, split) and went up to ``block`` of ``request``."""
    begin_request, begin_block, begin_split = begin
    end_request, end_block = request, block
    if not block:  # it ends with a whole request
        end_request = request - 1
        end_block = blocks[end_request] if end_request >= 0 and keys[end_request] else 0
    ends_inside = end_request >= 0 and keys[end_request] > 0 and end_block != blocks[end_request]
    is_first, is_last = begin_block != 0, bool(ends_inside)
    if begin_request == end_request:
        is_first = is_last = is_first or is_last
    return Part(begin_request, end_request, begin_block, end_block, begin_split, is_first, is_last)
