"""How FlashAttention, FlashInfer and FlashMLA split the keys of a decode step, on one problem."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from simkit.errors import ShapeError
from simkit.layouts.tables import Int64Array
from simkit.planning import flashmla
from simkit.planning.batch import ceil_div
from simkit.planning.decode import decode_plan
from simkit.planning.load import in_order, item_cost, list_schedule
from simkit.planning.outcome import (
    Comparison,
    Fact,
    Outcome,
    Planner,
    PlanProblem,
    compare,
    grid_outcome,
    refuse_window,
)
from simkit.planning.prefill_planner import LATENT_BYTES
from simkit.planning.splits import (
    FA2_BLOCK_M,
    FA2_CTAS_PER_SM,
    fa2_block_n,
    fa2_splits,
    fa3_dynamic_splits,
    fa3_splits,
    fa3_tile,
    fa4_splits,
    occupancy_units,
    split_blocks,
)

DECODE_CTAS_PER_SM = 2
"""Of FlashInfer's decode on CUDA cores; in truth what its registers and shared memory admit."""


def split_planner(problem: PlanProblem, sm_count: int) -> Comparison:
    """Every planner of `SPLIT_PLANNERS` on the problem, which has one query for each request."""
    return compare(SPLIT_PLANNERS, problem, sm_count)


def _fa2(problem: PlanProblem, sm_count: int) -> Outcome:
    """One number of splits, cut from the longest sequence."""
    block_n, slots = fa2_block_n(problem.head_dim), FA2_CTAS_PER_SM * sm_count
    blocks = ceil_div(_decode_keys(problem), block_n)
    units = _units(problem, FA2_BLOCK_M)
    longest = int(blocks.max(initial=0))
    splits = fa2_splits(units, slots, longest) if units else 1
    cuts = [split_blocks(range(count), splits, longest=longest) for count in blocks.tolist()]
    order = range(len(cuts))
    facts = {"splits": splits, "block_n": block_n, "units": units}
    return _cut(problem, "fa2", order, cuts, block_n, slots, facts)


def _fa3(problem: PlanProblem, sm_count: int) -> Outcome:
    """Splits for each request if lengths differ, with the longest first."""
    keys = _decode_keys(problem)
    block_m, block_n = fa3_tile(problem.head_dim, gather=problem.page_size > 1)
    blocks, m_blocks = ceil_div(keys, block_n), ceil_div(problem.group, block_m)
    longest = int(blocks.max(initial=0))
    differ = bool((keys != keys.max(initial=0)).any())
    # Until the device knows the lengths, one request stands for all.
    units = problem.kv_heads * m_blocks * (1 if differ else max(keys.size, 1))
    head_bytes = int(keys.max(initial=0)) * problem.key_bytes
    most = fa3_splits(units, sm_count, longest, m_blocks=m_blocks, head_bytes=head_bytes)
    counts = np.full(keys.size, most)
    if differ:
        tiles = np.full(keys.size, m_blocks)
        counts = fa3_dynamic_splits(
            tiles, blocks, heads=problem.kv_heads, sm_count=sm_count, cap=most
        )
    cuts = [
        split_blocks(range(count), own)
        for count, own in zip(blocks.tolist(), counts.tolist(), strict=True)
    ]
    order = np.argsort(-blocks, kind="stable").tolist()
    facts = {"splits": most, "block_n": block_n, "units": units, "is_dynamic": differ}
    return _cut(problem, "fa3", order, cuts, block_n, sm_count, facts)


def _fa4(problem: PlanProblem, sm_count: int) -> Outcome:
    """As many splits as SMs are left to a tile, with FlashAttention-3's tile."""
    block_m, block_n = fa3_tile(problem.head_dim)
    blocks = ceil_div(_decode_keys(problem), block_n)
    units = _units(problem, block_m)
    splits = fa4_splits(units, sm_count, int(blocks.max(initial=0)))
    cuts = [split_blocks(range(count), splits) for count in blocks.tolist()]
    facts = {"splits": splits, "block_n": block_n, "units": units}
    return _cut(problem, "fa4", range(len(cuts)), cuts, block_n, sm_count, facts)


def _decode(problem: PlanProblem, sm_count: int) -> Outcome:
    plan = decode_plan(
        _decode_keys(problem),
        group=problem.group,
        kv_heads=problem.kv_heads,
        page_size=problem.page_size,
        max_grid=DECODE_CTAS_PER_SM * sm_count,
        graph=problem.graph,
    )
    return grid_outcome("decode", plan, problem, DECODE_CTAS_PER_SM * sm_count)


def _flashmla(problem: PlanProblem, sm_count: int) -> Outcome:
    """Heads share one latent K/V; a part is a CTA for each 64 of them, which all do the same."""
    keys = _decode_keys(problem)
    parts = flashmla.dense_parts(sm_count, kv_heads=1, rows=problem.heads)
    schedule = flashmla.tile_schedule(keys, parts)
    found = [*flashmla.pieces(schedule, keys)]
    starts, stops = (
        np.array([getattr(piece, name) for piece in found], np.int64) for name in ("start", "stop")
    )
    request = np.array([piece.request for piece in found], np.int64)
    zero = np.zeros(len(found), np.int64)
    last_keys = np.minimum(stops * flashmla.BLOCK, keys[request])
    items = np.column_stack([request, zero, zero, starts * flashmla.BLOCK, last_keys])
    costs = (stops - starts + flashmla.OVERHEAD) * flashmla.BLOCK
    placement = in_order(np.array([piece.part for piece in found], np.int64), costs, parts)
    facts = {
        "payload_blocks": schedule.payload,
        "splits": int(schedule.num_splits[-1]),
        "parts": parts,
    }
    return Outcome("flashmla", "part", items, placement, LATENT_BYTES, facts)


SPLIT_PLANNERS: dict[str, Planner] = {
    "fa2": _fa2,
    "fa3": _fa3,
    "fa4": _fa4,
    "decode": _decode,
    "flashmla": _flashmla,
}
"""fa2, fa3, fa4: FlashAttention of that version. decode: `decode_plan`. flashmla: dense MLA."""


def _decode_keys(problem: PlanProblem) -> Int64Array:
    """Keys of each request of a decode step without a window."""
    refuse_window(problem)
    wrong = problem.q_lens != 1
    if wrong.any():
        at = int(wrong.argmax())
        raise ShapeError(
            f"q_lens[{at}] is {problem.q_lens[at]}; a decode step has one query for each request"
        )
    return problem.kv_lens


def _units(problem: PlanProblem, block_m: int) -> int:
    """Tiles of all requests, the group packed into rows."""
    batch = len(problem.kv_lens)
    return occupancy_units(batch, problem.kv_heads, rows=problem.group, block_m=block_m)


def _cut(
    problem: PlanProblem,
    name: str,
    order: Iterable[int],
    cuts: list[list[range]],
    block_n: int,
    slots: int,
    facts: Mapping[str, Fact],
) -> Outcome:
    """CTAs by request, K/V head and split; a CTA for every split, empty ones, too."""
    rows = [
        (request, 0, head, part.start * block_n, min(part.stop * block_n, keys))
        for request in order
        for keys in (int(problem.kv_lens[request]),)
        for head in range(problem.kv_heads)
        for part in cuts[request]
    ]
    items = np.array(rows, np.int64).reshape(-1, 5)
    items[:, 3] = np.minimum(items[:, 3], items[:, 4])
    costs = item_cost(problem.group, items[:, 4] - items[:, 3])
    return Outcome(name, "CTA slot", items, list_schedule(costs, slots), problem.key_bytes, facts)
