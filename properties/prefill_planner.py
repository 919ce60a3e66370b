"""Laws of FlashInfer's planners: keys are covered, states have places, work fits, load is even."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from properties.law import Context, Law, LawViolation
from properties.plan_case import PlanCase, plan_cases
from properties.plan_coverage import (
    check_coverage,
    check_list_states,
    check_plan_states,
    list_pieces,
    plan_pieces,
)
from simkit.layouts.tables import Int64Array, indptr_of
from simkit.planning.holistic import TILES_Q, holistic_plan, holistic_workers
from simkit.planning.load import Placement
from simkit.planning.mla import MlaPlan, mla_plan
from simkit.planning.plan import Plan, coverage
from simkit.planning.prefill import CTAS_PER_SM, prefill_plan
from simkit.planning.sm90 import sm90_plan
from simkit.planning.worklist import WorkList

NAME = "prefill_planner"


Requests = tuple[Int64Array, Int64Array]
"""Numbers of queries and of keys, [batch] each."""


def grid_plan(case: PlanCase, requests: Requests | None = None, **changes: object) -> Plan:
    """The grid planner's plan of a case; with other ``requests``, and ``changes`` to arguments."""
    q_lens, kv_lens = requests or (case.q_lens, case.kv_lens)
    arguments: dict[str, object] = {
        "group": case.group,
        "kv_heads": case.kv_heads,
        "head_dim_v": case.d,
        "page_size": case.page,
        "sm_count": case.sm_count,
        "window_left": case.window_left,
        "causal": case.causal,
        # A captured grid has no room for chunks that somebody else chose.
        "fixed_split": 0 if case.graph else case.fixed_split,
        "graph": case.graph,
    }
    arguments |= changes
    return prefill_plan(indptr_of(q_lens), kv_lens, **arguments)  # type: ignore[arg-type]


def grid_keys(case: PlanCase, plan: Plan, requests: Requests | None = None) -> Int64Array:
    """What the items of a plan cover, int64 [items, 2]."""
    q_lens, kv_lens = requests or (case.q_lens, case.kv_lens)
    return coverage(
        plan,
        indptr_of(q_lens),
        kv_lens,
        group=case.group,
        window_left=case.window_left,
        causal=case.causal,
    )


def sm90_work(case: PlanCase) -> WorkList:
    return sm90_plan(
        case.qo_indptr,
        case.kv_lens,
        heads=case.group * case.kv_heads,
        head_dim_v=case.d,
        sm_count=case.sm_count,
        causal=case.causal,
    )


def holistic_work(case: PlanCase) -> WorkList:
    return holistic_plan(
        case.qo_indptr,
        case.kv_lens,
        group=case.group,
        kv_heads=case.kv_heads,
        head_dim=case.d,
        sm_count=case.sm_count,
        causal=case.causal,
    )


def mla_work(case: PlanCase, requests: Requests | None = None) -> MlaPlan:
    q_lens, kv_lens = requests or (case.q_lens, case.kv_lens)
    return mla_plan(
        indptr_of(q_lens),
        kv_lens,
        heads=case.group * case.kv_heads,
        sm_count=case.sm_count,
        causal=case.causal,
    )


def heap_lists(case: PlanCase) -> dict[str, tuple[WorkList, int, int]]:
    """Every heap planner's list, its heads and the query heads that a row folds."""
    heads = case.group * case.kv_heads
    sm90 = sm90_work(case)
    return {
        "sm90": (sm90, heads // sm90.head_copies, 1),
        "holistic": (holistic_work(case), case.kv_heads, case.group),
        "mla": (mla_work(case).work, 1, heads),
    }


def check_all_coverage(context: Context, case: PlanCase) -> None:
    plan = grid_plan(case)
    pieces = plan_pieces(plan, grid_keys(case, plan))
    check_coverage(case, pieces, heads=1, group=case.group)
    without_window = replace(case, window_left=-1)
    for work, heads, group in heap_lists(without_window).values():
        check_coverage(without_window, list_pieces(work), heads=heads, group=group)


def check_states(context: Context, case: PlanCase) -> None:
    check_plan_states(case, grid_plan(case))
    for work, heads, group in heap_lists(replace(case, window_left=-1)).values():
        check_list_states(case, work, heads=heads, group=group)


def check_grid(context: Context, case: PlanCase) -> None:
    """Plans of one captured graph for other lengths; and without a graph nothing is padded."""
    if not case.graph:
        plan = grid_plan(case)
        if plan.grid != len(plan.requests):
            raise LawViolation(f"the grid is {plan.grid} for {len(plan.requests)} items")
        return
    rng = case.rng()
    captured = int(case.q_lens.sum()) + int(rng.integers(0, 3))
    plans = [grid_plan(case, max_rows=captured)]
    # Other queries, in all at most as many: some, none, all in one request. And other keys.
    cuts = np.sort(rng.integers(0, captured, case.batch, endpoint=True))
    ends = (cuts, np.zeros_like(cuts), np.full_like(cuts, captured))
    for kind, stops in zip(("none", "equal", "one_long"), ends, strict=True):
        other = replace(case, keys=kind, most_keys=int(rng.integers(0, 3000)))
        requests = (np.diff(stops, prepend=0), other.kv_lens)
        plans.append(grid_plan(case, requests, max_rows=captured))
    for plan in plans:
        fixed = (plan.grid, plan.tile_q, plan.is_split)
        if fixed != (plans[0].grid, plans[0].tile_q, plans[0].is_split):
            raise LawViolation(
                f"grid, tile and split are {fixed} for some lengths, "
                f"{(plans[0].grid, plans[0].tile_q, plans[0].is_split)} for others"
            )
        if len(plan.requests) > plan.grid:
            raise LawViolation(f"{len(plan.requests)} items exceed the grid of {plan.grid}")


def check_smallest_chunk(context: Context, case: PlanCase) -> None:
    plan = grid_plan(case, window_left=-1, fixed_split=0)
    tiles = -(-case.q_lens * case.group // plan.tile_q)

    def items(pages: int) -> int:
        chunks = np.maximum(-(-case.kv_lens // (pages * case.page)), 1)
        return int((tiles * chunks).sum())

    check_smallest(
        pages=plan.kv_chunk // case.page,
        least=max(128 // case.page, 1),
        most=max(-(-int(case.kv_lens.max()) // case.page), 1),
        items=items,
        bound=CTAS_PER_SM * case.sm_count // case.kv_heads,
    )


def check_smallest(
    *, pages: int, least: int, most: int, items: Callable[[int], int], bound: int
) -> None:
    """LawViolation unless ``pages`` is the smallest chunk of those allowed whose items fit, or the
    longest request if none fits or is allowed.
    """
    if pages > least and items(pages - 1) <= bound:
        raise LawViolation(f"chunks of {pages - 1} pages make {items(pages - 1)} of {bound} items")
    if pages < least or pages > max(least, most):
        raise LawViolation(f"a chunk of {pages} pages is not within {least} to {most}")
    if pages < most and items(pages) > bound:
        raise LawViolation(f"chunks of {pages} pages make {items(pages)} items; {bound} fit")


def check_load(context: Context, case: PlanCase) -> None:
    for name, (work, _, _) in heap_lists(case).items():
        costs = (2 * work.tile_q + work.kv_stop - work.kv_start) * work.head_copies
        check_graham(name, work.placement, costs, work.worker)


def check_graham(name: str, placement: Placement, costs: Int64Array, worker: Int64Array) -> None:
    """LawViolation unless loads are the sums of the ``costs`` and the longest is within
    total / workers + (1 - 1 / workers) * largest, and not below what no placement is.
    """
    loads = [int(costs[worker == number].sum()) for number in range(placement.workers)]
    if placement.loads.tolist() != loads or placement.makespan != max(loads):
        raise LawViolation(f"{name}: loads are {loads}, reported {placement.loads.tolist()}")
    total, largest, workers = sum(loads), int(costs.max(initial=0)), placement.workers
    if max(loads) * workers > total + (workers - 1) * largest:
        raise LawViolation(
            f"{name}: the longest of {workers} workers has {max(loads)} of {total}, the largest "
            f"item is {largest}"
        )
    if max(loads) < placement.ideal or not 0 <= placement.efficiency <= 1:
        raise LawViolation(
            f"{name}: makespan {max(loads)}, ideal {placement.ideal}, efficiency "
            f"{placement.efficiency}"
        )


def check_workspace(context: Context, case: PlanCase) -> None:
    plan = grid_plan(case)
    if plan.partial_rows > plan.most_partial_rows(case.group):
        raise LawViolation(
            f"grid: {plan.partial_rows} partial rows, {plan.most_partial_rows(case.group)} fit"
        )
    workers, two = holistic_workers(case.sm_count, case.d), min(case.kv_heads, 2)
    holistic = holistic_work(case).partial_rows * case.kv_heads
    if holistic > 2 * workers * TILES_Q[0] * two:
        raise LawViolation(f"holistic: {holistic} partial rows of {workers} workers")
    mla = mla_work(case)
    if mla.work.partial_rows > 2 * mla.work.workers * mla.tile_q:
        raise LawViolation(
            f"mla: {mla.work.partial_rows} partial rows of {mla.work.workers} clusters with "
            f"tiles of {mla.tile_q}"
        )
    if len(mla.merge_ctas) > case.sm_count:
        raise LawViolation(f"mla: {len(mla.merge_ctas)} CTAs merge on {case.sm_count} SMs")
    ranges = mla.merge_ctas
    rows = np.concatenate([np.zeros(0, np.int64), *(np.arange(*pair) for pair in ranges.tolist())])
    if not np.array_equal(rows, np.arange(mla.work.merge_rows.size)):
        raise LawViolation(f"mla: {rows.size} of {mla.work.merge_rows.size} rows are merged")


def check_batch_invariance(context: Context, case: PlanCase) -> None:
    chunk = case.fixed_split or max(case.most_keys // 20, 1)
    ways: tuple[dict[str, object], ...] = (
        {"fixed_split": chunk},
        {"fixed_split": 0, "disable_split": True},
    )
    for way in ways:
        fixed = {"tile_q": 64, "graph": False} | way
        together = grid_plan(case, None, **fixed)
        items = np.column_stack([together.q_tiles, grid_keys(case, together)])
        for request in case.rng().integers(0, case.batch, 3).tolist():
            only = slice(request, request + 1)
            requests = (case.q_lens[only], case.kv_lens[only])
            alone = grid_plan(case, requests, **fixed)
            wanted = np.column_stack([alone.q_tiles, grid_keys(case, alone, requests)])
            found = items[together.requests == request]
            if not np.array_equal(found, wanted):
                raise LawViolation(
                    f"request {request} has {len(found)} items in the batch and {len(wanted)} "
                    f"alone, or other keys in them, with {way}"
                )


def check_permutation(context: Context, case: PlanCase) -> None:
    """Requests in another order, of which each plan makes as much as before."""
    order = case.rng().permutation(case.batch)
    requests = (case.q_lens[order], case.kv_lens[order])
    plan, other = grid_plan(case), grid_plan(case, requests)
    for name in ("tile_q", "kv_chunk", "is_split", "grid"):
        before, after = getattr(plan, name), getattr(other, name)
        if before != after:
            raise LawViolation(f"grid: {name} is {before}, and {after} in another order")
    if plan.chunks[order].tolist() != other.chunks.tolist():
        raise LawViolation("grid: a request has other chunks in another order")
    before, after = (
        (one.kv_limit, one.work.items, one.work.partial_rows, len(one.merge_ctas))
        for one in (mla_work(case), mla_work(case, requests))
    )
    if before != after:
        raise LawViolation(f"mla: limit, items, partial rows and merges {before} become {after}")


CORNERS = (
    # Published sizes: a decode step, prefill, requests without keys, a window, pages of one key.
    PlanCase(batch=4, keys="uniform", most_keys=8192),
    PlanCase(batch=2, queries="equal", most_queries=577, most_keys=2048, group=8, kv_heads=4),
    PlanCase(batch=20, keys="one_long", most_keys=8192, graph=True, sm_count=108),
    PlanCase(batch=4, keys="uniform", most_keys=8192, window_left=127, causal=True),
    PlanCase(batch=3, keys="uniform", most_keys=8736, page=1, kv_heads=2, group=8),
    # A window without a right bound, of which the last query of a long request sees the end.
    PlanCase(
        batch=3, queries="equal", most_queries=600, most_keys=900, window_left=5, group=1, page=1
    ),
    # More queries than keys, heads that straddle tiles, requests without anything.
    PlanCase(batch=5, queries="uniform", most_queries=90, most_keys=40, group=7, causal=True),
    PlanCase(batch=8, queries="often_empty", most_queries=64, keys="often_empty", most_keys=3000),
    PlanCase(batch=3, queries="none", keys="none"),
    PlanCase(batch=2, keys="equal", most_keys=2**31 - 1, fixed_split=2**26),
)


def _law(
    name: str, statement: str, check: Callable[[Context, PlanCase], None], examples: int = 25
) -> Law:
    return Law(
        algorithm=NAME,
        name=name,
        tier="exact",
        statement=statement,
        check=check,
        strategy=plan_cases(),
        case_type=PlanCase,
        corners=CORNERS,
        examples=examples,
        uses_device=False,
    )


LAWS = [
    _law(
        "coverage",
        "each key that a query may see is in one item of its tile, and in no tile that sees it not",
        check_all_coverage,
        examples=50,
    ),
    _law(
        "states",
        "each split row has one place for each of its items, where merge_indptr says",
        check_states,
    ),
    _law(
        "grid",
        "items fit the grid; under a graph, grid, tile and merging do not depend on lengths",
        check_grid,
    ),
    _law(
        "smallest_chunk",
        "the chunk is the smallest number of pages, at least 128 keys, whose items fit",
        check_smallest_chunk,
    ),
    _law(
        "load_bound",
        "the longest queue is at most total / workers + (1 - 1 / workers) * largest item",
        check_load,
    ),
    _law(
        "workspace",
        "partial rows and merging CTAs fit what is allocated from grid, clusters and SMs alone",
        check_workspace,
    ),
    _law(
        "batch_invariance",
        "with a given tile and chunk, what a request gets does not depend on the others",
        check_batch_invariance,
    ),
    _law(
        "permutation",
        "requests in another order get the same chunks",
        check_permutation,
    ),
]
