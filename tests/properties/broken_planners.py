"""Planners with one fault each, by the law that notices it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import properties.prefill_planner as prefill_laws
import properties.split_planner as split_laws
from simkit.planning import holistic, mla, outcome, split_planner, worklist
from simkit.planning.flashmla import TileSchedule
from simkit.planning.load import Placement
from simkit.planning.plan import Plan
from simkit.planning.worklist import SplitTile, WorkItem, WorkList

Patch = Callable[[pytest.MonkeyPatch], None]

PREFILL, SPLIT = "prefill_planner", "split_planner"


def changed(module: Any, name: str, change: Callable[[Any], Any]) -> Patch:
    """What the planner returns, after ``change``."""
    original = getattr(module, name)
    return lambda patch: patch.setattr(
        module, name, lambda *args, **kwargs: change(original(*args, **kwargs))
    )


def called(module: Any, name: str, **arguments: Any) -> Patch:
    """The planner with other ``arguments`` than it is given."""
    original = getattr(module, name)
    return lambda patch: patch.setattr(
        module, name, lambda *args, **kwargs: original(*args, **(kwargs | arguments))
    )


def without_first(plan: Plan) -> Plan:
    """The first item is lost."""
    cut = {name: getattr(plan, name)[1:] for name in ("requests", "q_tiles", "kv_chunks")}
    return replace(plan, **cut)


def states_by_chunk(plan: Plan) -> Plan:
    """merge_indptr as if every query had the chunks of the first."""
    each = int(plan.merge_indptr[1]) if plan.merge_indptr.size > 1 else 0
    return replace(plan, merge_indptr=np.arange(plan.merge_indptr.size) * each)


def one_grid_less(plan: Plan) -> Plan:
    return replace(plan, grid=plan.grid - 1)


def grid_of_items(plan: Plan) -> Plan:
    """The grid of this batch instead of that of the graph."""
    return replace(plan, grid=len(plan.requests))


def half_chunk(plan: Plan) -> Plan:
    """Half the chunk, with the items of the whole one."""
    return replace(plan, kv_chunk=max(plan.kv_chunk // 2, 1))


def double_chunk(plan: Plan) -> Plan:
    """Twice the chunk, with the items of the smaller one."""
    return replace(plan, kv_chunk=2 * plan.kv_chunk)


def only_keys_of_last(work: WorkList) -> WorkList:
    """The last item of the list ends a key early, or has one too many."""
    stops = work.kv_stop.copy()
    stops[-1:] += np.where(stops[-1:] > work.kv_start[-1:], -1, 1)
    return replace(work, kv_stop=stops)


def states_of_first_row(work: WorkList) -> WorkList:
    """All pieces of a tile write the same states."""
    starts = np.where(work.partial_start < 0, work.partial_start, work.partial_start // 2)
    return replace(work, partial_start=starts)


def in_turn(costs: Any, workers: int) -> Placement:
    """Items in turn to the workers, whatever they cost."""
    cost = np.asarray(costs, np.int64)
    worker = np.arange(cost.size) % workers
    starts = np.array([cost[:n][worker[:n] == worker[n]].sum() for n in range(cost.size)], np.int64)
    return Placement(workers, worker, starts, cost)


def round_robin(module: Any) -> Patch:
    return lambda patch: patch.setattr(module, "list_schedule", in_turn)


def tile_of_mean(patch: pytest.MonkeyPatch) -> None:
    """Under a graph, too, the tile follows the lengths of this batch."""
    original = prefill_laws.prefill_plan

    def plan(qo_indptr: Any, kv_lens: Any, **kwargs: Any) -> Plan:
        mean = int(qo_indptr[-1]) * kwargs["group"] // len(kv_lens)
        return original(qo_indptr, kv_lens, **({"tile_q": 64 if mean > 16 else 16} | kwargs))

    patch.setattr(prefill_laws, "prefill_plan", plan)


def chunk_from_first(patch: pytest.MonkeyPatch) -> None:
    """Chunks of half the first request's keys."""
    original = prefill_laws.prefill_plan

    def plan(qo_indptr: Any, kv_lens: Any, **kwargs: Any) -> Plan:
        fixed = max(int(kv_lens[0]) // 2, 64) if not kwargs["graph"] else 0
        return original(qo_indptr, kv_lens, **(kwargs | {"fixed_split": fixed}))

    patch.setattr(prefill_laws, "prefill_plan", plan)


def small_pieces(mean_keys: int) -> int:
    """Pieces of 64 keys, however many there are."""
    return 64


def one_merge_cta_less(tiles: list[SplitTile], cluster_size: int) -> Any:
    return ORIGINAL_MERGE_CTAS(tiles, cluster_size)[:-1]


ORIGINAL_MERGE_CTAS = mla._merge_ctas


def one_split_more(patch: pytest.MonkeyPatch) -> None:
    for name in ("fa2_splits", "fa3_splits"):
        changed(split_laws, name, lambda splits: splits + 1)(patch)


def fewest_blocks_last(parts: list[range]) -> list[range]:
    """The last split is forgotten."""
    return parts[:-1]


def falling(units: int, slots: int, blocks: int, cap: int = 128) -> int:
    """Fewer splits for more blocks."""
    return max(8 - blocks // 8, 1)


def splits_by_place(splits: Any) -> Any:
    """The longest request's splits go to the first."""
    return np.sort(splits)[::-1]


def parts_in_one(schedule: TileSchedule) -> TileSchedule:
    """The second part begins where the first did."""
    parts = list(schedule.parts)
    if len(parts) > 1:
        first = parts[0]
        parts[1] = replace(
            parts[1], begin_request=first.begin_request, begin_block=first.begin_block
        )
    return replace(schedule, parts=tuple(parts))


def heavier(schedule: TileSchedule) -> TileSchedule:
    return replace(schedule, payload=schedule.payload - 1)


def tile_twice(self: SplitTile, head: int, partial_start: int) -> Any:
    """Each piece has all keys of the tile."""
    for _ in range(self.chunks):
        yield WorkItem(self.request, self.q_tile, head, self.tile_q, 0, self.keys)


BROKEN_PLANNERS: dict[tuple[str, str], list[Patch]] = {
    (PREFILL, "coverage"): [
        called(prefill_laws, "prefill_plan", published=True),
        changed(prefill_laws, "prefill_plan", without_first),
        changed(prefill_laws, "sm90_plan", only_keys_of_last),
        changed(prefill_laws, "holistic_plan", only_keys_of_last),
        lambda patch: patch.setattr(SplitTile, "pieces", tile_twice),
    ],
    (PREFILL, "states"): [
        changed(prefill_laws, "prefill_plan", states_by_chunk),
        changed(prefill_laws, "holistic_plan", states_of_first_row),
    ],
    (PREFILL, "grid"): [
        changed(prefill_laws, "prefill_plan", one_grid_less),
        changed(prefill_laws, "prefill_plan", grid_of_items),
        tile_of_mean,
    ],
    (PREFILL, "smallest_chunk"): [
        changed(prefill_laws, "prefill_plan", double_chunk),
        called(prefill_laws, "prefill_plan", sm_count=200),
        called(prefill_laws, "prefill_plan", sm_count=60),
    ],
    (PREFILL, "load_bound"): [round_robin(worklist)],
    (PREFILL, "workspace"): [
        lambda patch: patch.setattr(mla, "key_limit", small_pieces),
        lambda patch: patch.setattr(holistic, "key_limit", small_pieces),
        lambda patch: patch.setattr(mla, "_merge_ctas", one_merge_cta_less),
        changed(prefill_laws, "prefill_plan", lambda plan: replace(plan, grid=plan.grid // 4)),
    ],
    (PREFILL, "batch_invariance"): [called(prefill_laws, "prefill_plan", fixed_split=0)],
    (PREFILL, "permutation"): [chunk_from_first],
    (SPLIT, "answer_range"): [one_split_more],
    (SPLIT, "fewest_good"): [
        one_split_more,
        lambda patch: patch.setattr(split_laws, "fa2_splits", split_laws.fa3_splits),
    ],
    (SPLIT, "monotone"): [
        lambda patch: patch.setattr(split_laws, "fa3_splits", falling),
        lambda patch: patch.setattr(split_laws, "fa4_splits", falling),
    ],
    (SPLIT, "blocks"): [
        changed(split_laws, "split_blocks", fewest_blocks_last),
        called(split_laws, "visible_blocks", group=1),
        called(split_laws, "visible_blocks", window_left=-1),
    ],
    (SPLIT, "dynamic"): [
        changed(split_laws, "fa3_dynamic_splits", splits_by_place),
        called(split_laws, "fa3_dynamic_splits", cap=200),
        called(split_laws, "fa3_dynamic_splits", heads=1),
    ],
    (SPLIT, "decode_coverage"): [
        changed(split_laws, "decode_plan", without_first),
        changed(split_laws, "decode_plan", half_chunk),
        changed(split_laws, "decode_plan", states_by_chunk),
    ],
    (SPLIT, "decode_grid"): [
        called(split_laws, "decode_plan", max_grid=400),
        changed(split_laws, "decode_plan", grid_of_items),
        changed(split_laws, "decode_plan", one_grid_less),
    ],
    (SPLIT, "decode_chunk"): [
        called(split_laws, "decode_plan", max_grid=400),
        called(split_laws, "decode_plan", max_grid=100),
    ],
    (SPLIT, "flashmla"): [
        changed(split_laws, "tile_schedule", parts_in_one),
        changed(split_laws, "tile_schedule", heavier),
    ],
    (SPLIT, "load_bound"): [
        round_robin(split_planner),
        round_robin(outcome),
    ],
}
"""Faults of planners that each law notices."""
