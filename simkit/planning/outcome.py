"""What a planner makes of a problem, in one form for all planners: items, workers, load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from simkit.errors import ShapeError, SimkitError
from simkit.layouts.tables import Int64Array, indptr_of
from simkit.planning.batch import Batch, check_sizes
from simkit.planning.load import Placement, item_cost, list_schedule
from simkit.planning.plan import Plan, item_keys
from simkit.planning.worklist import WorkList

Fact = int | str | bool


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanProblem:
    """Requests, heads and cache for which planners compete.

    ``q_lens``, ``kv_lens`` int64 [batch]; mask as for `Batch`. ``page_size`` 1: keys are
    contiguous. ``fixed_split``, ``disable_split``, ``graph``: as for `prefill_plan`.
    """

    q_lens: Int64Array
    kv_lens: Int64Array
    group: int = 4
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    window_left: int = -1
    causal: bool = False
    fixed_split: int = 0
    disable_split: bool = False
    graph: bool = False

    def __post_init__(self) -> None:
        check_sizes(kv_heads=self.kv_heads, head_dim=self.head_dim, page_size=self.page_size)
        _ = self.batch  # checks the rest

    @property
    def qo_indptr(self) -> Int64Array:
        return indptr_of(self.q_lens)

    @property
    def batch(self) -> Batch:
        return Batch.of(
            self.qo_indptr,
            self.kv_lens,
            group=self.group,
            window_left=self.window_left,
            causal=self.causal,
        )

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.group * self.kv_heads

    @property
    def key_bytes(self) -> int:
        """K and V of a key and head, bfloat16."""
        return 2 * 2 * self.head_dim


@dataclass(frozen=True, eq=False)
class Outcome:
    """Items of a planner on its workers.

    ``worker_name``: what a worker is. ``items`` int64 [items, 5]: request, query tile, head (that
    of the planner), first key and the one after the last. ``placement`` has their workers and
    costs, in keys. ``key_bytes``: of a key. ``facts``: what else the planner decided.
    """

    planner: str
    worker_name: str
    items: Int64Array
    placement: Placement
    key_bytes: int
    facts: Mapping[str, Fact] = field(default_factory=dict)


Planner = Callable[[PlanProblem, int], Outcome]
"""From a problem and the number of SMs."""


@dataclass(frozen=True)
class Comparison:
    """``outcomes`` of the planners that took a problem, and why others refused it, by name."""

    outcomes: tuple[Outcome, ...]
    refused: Mapping[str, str]


def compare(planners: Mapping[str, Planner], problem: PlanProblem, sm_count: int) -> Comparison:
    """Every planner on one problem."""
    outcomes, refused = [], {}
    for name, planner in planners.items():
        try:
            outcomes.append(planner(problem, sm_count))
        except SimkitError as error:
            refused[name] = str(error)
    return Comparison(tuple(outcomes), refused)


def refuse_window(problem: PlanProblem) -> None:
    """ShapeError for a window, for planners that have no use for one."""
    if problem.window_left >= 0:
        raise ShapeError(f"window_left is {problem.window_left}; this planner knows no windows")


def grid_outcome(name: str, plan: Plan, problem: PlanProblem, slots: int) -> Outcome:
    """A plan whose items are CTAs of a grid (items, K/V heads), which ``slots`` CTAs at a time
    work off in the order of launch.
    """
    keys = item_keys(plan, problem.batch)
    of_a_head = np.column_stack([plan.requests, plan.q_tiles, np.zeros(plan.items, np.int64), keys])
    items = np.tile(of_a_head, (problem.kv_heads, 1)).astype(np.int64)
    items[:, 2] = np.repeat(np.arange(problem.kv_heads), plan.items)
    costs = item_cost(plan.tile_q, items[:, 4] - items[:, 3])
    facts = {
        "tile_q": plan.tile_q,
        "kv_chunk": plan.kv_chunk,
        "is_split": plan.is_split,
        "grid": plan.grid,
        "partial_rows": plan.partial_rows,
        "workspace_bytes": plan.workspace_bytes(heads=problem.heads, head_dim_v=problem.head_dim),
    }
    placement = list_schedule(costs, slots)
    return Outcome(name, "CTA slot", items, placement, problem.key_bytes, facts)


def list_outcome(
    name: str, work: WorkList, worker_name: str, key_bytes: int, facts: Mapping[str, Fact]
) -> Outcome:
    """Queues of persistent workers."""
    items = np.column_stack([work.request, work.q_tile, work.head, work.kv_start, work.kv_stop])
    all_facts = {**facts, "partial_rows": work.partial_rows, "head_copies": work.head_copies}
    return Outcome(name, worker_name, items, work.placement, key_bytes, all_facts)
