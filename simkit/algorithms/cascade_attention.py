"""Cascade attention: K and V that several requests share are read once for all of their queries.

A level is a batch whose requests are groups of neighbouring queries with the keys that they share:
at the first level all queries and the prefix of all, at the last one each request and its own keys.
Every level leaves a state of each query, which are merged. Any number of levels will do, since
merging is associative up to rounding. Source: Ye et al., FlashInfer, arXiv 2501.01005, and its blog
"Cascade Inference" (2024). Kernels: batch_prefill_paged.cu for the levels, merge_states.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from simkit.algorithms.batch_attention import BatchResult, allocate_states, run_plan
from simkit.algorithms.batch_problem import BatchProblem
from simkit.algorithms.merge_states import merge_partial
from simkit.errors import ShapeError
from simkit.layouts.block_sparse import BlockRows
from simkit.layouts.ragged import Ragged
from simkit.layouts.tables import Int64Array, indptr_of
from simkit.machine.machine import Machine
from simkit.planning.plan import Plan


@dataclass(frozen=True, eq=False)
class Level:
    """One level: its requests, whose queries are those of all levels, and a plan for them."""

    problem: BatchProblem
    plan: Plan


@dataclass(frozen=True, eq=False)
class StateRows:
    """Where partial states lie: those of a query side by side, level by level.

    ``rows`` [levels][queries]: first state of each query at each level. ``merge_indptr``
    [queries + 1].
    """

    rows: tuple[Int64Array, ...]
    merge_indptr: Int64Array


def state_rows(levels: Sequence[Level]) -> StateRows:
    """The partial states of all levels in one workspace."""
    counts = [np.diff(level.plan.merge_indptr) for level in levels]
    merge_indptr = indptr_of(np.sum(counts, axis=0))
    before = np.cumsum([np.zeros_like(counts[0]), *counts[:-1]], axis=0)
    return StateRows(tuple(merge_indptr[:-1] + part for part in before), merge_indptr)


def check_levels(levels: Sequence[Level]) -> None:
    """Raises ShapeError unless all levels have the same queries, and variants that cascade.

    Only the last level may be causal: the others' keys come before all of its own. Then no request
    may have more queries than keys there, for the first ones would stand among the keys of the
    levels before, which hide none. What depends on positions (windows, ALiBi, rotary embedding)
    does not cascade, since a level does not know how many keys come before it; a sink belongs to
    the last level alone.
    """
    if not levels:
        raise ShapeError("a cascade has at least one level")
    first = levels[0].problem
    for number, level in enumerate(levels):
        problem, is_last = level.problem, number == len(levels) - 1
        if not isinstance(problem.keys, BlockRows):
            raise ShapeError(f"level {number} has ragged K and V; a cascade takes pages")
        for name in ("rows", "heads", "kv_heads", "d", "dv", "scale", "k_scale", "v_scale"):
            if getattr(problem, name) != getattr(first, name):
                raise ShapeError(
                    f"level {number} has {name} {getattr(problem, name)}, level 0 has "
                    f"{getattr(first, name)}"
                )
        if problem.q.dtype != first.q.dtype or not np.array_equal(
            problem.q.view(np.uint16), first.q.view(np.uint16)
        ):
            raise ShapeError(f"level {number} has other queries than level 0")
        variant = problem.variant
        if variant.causal and not is_last:
            raise ShapeError(f"level {number} is causal; only the last, {len(levels) - 1}, may be")
        if variant.sinks is not None and not is_last:
            raise ShapeError(f"level {number} has sinks; only the last, {len(levels) - 1}, may")
        placed = {
            name: getattr(variant, name) is not None
            for name in ("custom_mask", "alibi_slopes", "rope", "user")
        } | {"window_left": variant.window_left >= 0}
        for name, is_there in placed.items():
            if is_there:
                raise ShapeError(f"level {number} has {name}, which depends on positions")
        if variant.soft_cap != first.variant.soft_cap:
            raise ShapeError(
                f"level {number} has soft_cap {variant.soft_cap}, level 0 has "
                f"{first.variant.soft_cap}"
            )
    last = levels[-1].problem
    if last.variant.causal and len(levels) > 1:
        ahead = np.flatnonzero(last.queries.lens > last.kv_lens)
        if ahead.size:
            request = int(ahead[0])
            raise ShapeError(
                f"request {request} has {last.queries.lens[request]} queries and "
                f"{last.kv_lens[request]} keys at the last level, which is causal: its first "
                f"queries stand among the keys of levels before, which are not masked"
            )


def cascade_attention(machine: Machine, levels: Sequence[Level]) -> BatchResult:
    """Attention of every query to its keys of all levels, merged in their order.

    Leaves o, lse, partial_o, partial_lse, merge_indptr and, with "_0", "_1", ... behind their
    names, the tensors of each level's launch on the machine. Errors: `check_levels`, and those of
    `batch_attention`.
    """
    check_levels(levels)
    first = levels[0].problem
    rows = (first.rows, first.heads)
    o = machine.allocate("o", (*rows, first.dv), first.q.dtype)
    lse = machine.allocate("lse", rows, np.float32)
    places = state_rows(levels)
    partial = allocate_states(machine, first, int(places.merge_indptr[-1]))
    present = np.zeros(partial[1].shape, bool)
    for number, level in enumerate(levels):
        own = run_plan(
            machine, level.problem, level.plan, partial, units="tensor_cores", table="ragged",
            state_rows=places.rows[number], suffix=f"_{number}",
        )  # fmt: skip
        if own is not None:
            present |= own
    if first.rows:
        merge_indptr = machine.tensor("merge_indptr", places.merge_indptr)
        known = None if machine.computes else present
        merge_partial(machine, *partial, merge_indptr, o, lse, present=known)
    return BatchResult(o.values, lse.values, *(tensor.values for tensor in partial))


def flat_problem(levels: Sequence[Level]) -> BatchProblem:
    """The same attention without a cascade: each request of the last level with ragged K and V of
    its own, those of the levels before it first.
    """
    check_levels(levels)
    last = levels[-1].problem
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    lens = np.zeros(last.batch, np.int64)
    for request in range(last.batch):
        own = last.queries.rows(request)
        for level in levels:
            above = _request_of(level.problem, own)
            if above is not None:
                parts.append(level.problem.gathered(above))
                lens[request] += level.problem.kv_lens[above]
    k, v = (
        np.concatenate([part[i] for part in parts])
        if parts
        else np.zeros((0, last.kv_heads, size), last.k.dtype)
        for i, size in ((0, last.d), (1, last.dv))
    )
    return replace(last, k=k, v=v, keys=Ragged.from_lengths(lens), order="NHD")


def _request_of(problem: BatchProblem, rows: slice) -> int | None:
    """The request of a level that has these queries; None for no queries."""
    if rows.start == rows.stop:
        return None
    starts = problem.queries.indptr.astype(np.int64)
    request = int(np.searchsorted(starts, rows.start, side="right")) - 1
    if rows.stop > starts[request + 1]:
        raise ShapeError(
            f"queries {rows.start} to {rows.stop} of a request lie in several requests of a level "
            f"before: one ends at {starts[request + 1]}"
        )
    return request
