"""FlashInfer's planners for requests with any number of queries, on one problem."""

from __future__ import annotations

from simkit.planning.holistic import holistic_plan
from simkit.planning.mla import mla_plan
from simkit.planning.outcome import (
    Comparison,
    Outcome,
    Planner,
    PlanProblem,
    compare,
    grid_outcome,
    list_outcome,
    refuse_window,
)
from simkit.planning.plan import Plan
from simkit.planning.prefill import CTAS_PER_SM, prefill_plan
from simkit.planning.sm90 import sm90_plan, sm90_tile_q

LATENT_BYTES = 576 * 2
"""Of a key of MLA: 512 latent values, which are K and V, and 64 of RoPE."""


def prefill_planner(problem: PlanProblem, sm_count: int) -> Comparison:
    """Every planner of `PREFILL_PLANNERS` on the problem."""
    return compare(PREFILL_PLANNERS, problem, sm_count)


def plan_problem(problem: PlanProblem, sm_count: int) -> Plan:
    """`prefill_plan` of the problem."""
    return prefill_plan(
        problem.qo_indptr,
        problem.kv_lens,
        group=problem.group,
        kv_heads=problem.kv_heads,
        head_dim_v=problem.head_dim,
        page_size=problem.page_size,
        sm_count=sm_count,
        window_left=problem.window_left,
        causal=problem.causal,
        fixed_split=problem.fixed_split,
        disable_split=problem.disable_split,
        graph=problem.graph,
    )


def _grid(problem: PlanProblem, sm_count: int) -> Outcome:
    plan = plan_problem(problem, sm_count)
    return grid_outcome("grid", plan, problem, CTAS_PER_SM * sm_count)


def _sm90(problem: PlanProblem, sm_count: int) -> Outcome:
    refuse_window(problem)
    work = sm90_plan(
        problem.qo_indptr,
        problem.kv_lens,
        heads=problem.heads,
        head_dim_v=problem.head_dim,
        sm_count=sm_count,
        causal=problem.causal,
    )
    facts = {"tile_q": sm90_tile_q(problem.head_dim)}
    return list_outcome("sm90", work, "SM", problem.key_bytes, facts)


def _holistic(problem: PlanProblem, sm_count: int) -> Outcome:
    refuse_window(problem)
    work = holistic_plan(
        problem.qo_indptr,
        problem.kv_lens,
        group=problem.group,
        kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        sm_count=sm_count,
        causal=problem.causal,
    )
    return list_outcome("holistic", work, "CTA", problem.key_bytes, {})


def _mla(problem: PlanProblem, sm_count: int) -> Outcome:
    refuse_window(problem)
    plan = mla_plan(
        problem.qo_indptr,
        problem.kv_lens,
        heads=problem.heads,
        sm_count=sm_count,
        causal=problem.causal,
    )
    facts = {
        "tile_q": plan.tile_q,
        "kv_limit": plan.kv_limit,
        "cluster_size": plan.cluster_size,
        "merge_ctas": len(plan.merge_ctas),
    }
    return list_outcome("mla", plan.work, "cluster", LATENT_BYTES, facts)


PREFILL_PLANNERS: dict[str, Planner] = {
    "grid": _grid,
    "sm90": _sm90,
    "holistic": _holistic,
    "mla": _mla,
}
"""grid: `prefill_plan`. mla takes all heads to share one latent K/V."""
