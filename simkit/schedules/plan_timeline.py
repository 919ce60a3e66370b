"""Plans over time: each worker is a track, each item of work an event.

A key of an item takes its bytes over the worker's share of HBM bandwidth; an item costs as many
keys as its planner says. No kernel computes for longer, so this is what balance looks like, not
how long a kernel takes. The unit is the cycle of ``Gpu.tensor_clock_hz``.
"""

from __future__ import annotations

from simkit.errors import ShapeError
from simkit.machine.gpus import Gpu
from simkit.planning import prefill_planner as prefill
from simkit.planning import split_planner as split
from simkit.planning.outcome import Outcome, PlanProblem
from traces.events import Event, Trace, Track

MOST_ITEMS = 20_000
"""Longer plans are refused: nobody reads a million events, and viewers do not open them."""


def prefill_planner(gpu: Gpu, problem: PlanProblem, planner: str = "grid") -> Trace:
    """The schedule of one of `prefill.PREFILL_PLANNERS`. `ShapeError` if it has too many items."""
    return timeline(gpu, prefill.PREFILL_PLANNERS[planner](problem, gpu.sm_count))


def split_planner(gpu: Gpu, problem: PlanProblem, planner: str = "fa2") -> Trace:
    """The schedule of one of `split.SPLIT_PLANNERS`. `ShapeError` if it has too many items."""
    return timeline(gpu, split.SPLIT_PLANNERS[planner](problem, gpu.sm_count))


def key_cycles(gpu: Gpu, outcome: Outcome) -> float:
    """Cycles in which a worker's share of HBM bandwidth brings one key."""
    bytes_per_cycle = gpu.hbm_bytes_per_s / gpu.tensor_clock_hz / outcome.placement.workers
    return outcome.key_bytes / bytes_per_cycle


def timeline(gpu: Gpu, outcome: Outcome) -> Trace:
    """The items of an outcome, one after another on each worker."""
    placement = outcome.placement
    if len(outcome.items) > MOST_ITEMS:
        raise ShapeError(
            f"{outcome.planner} has {len(outcome.items)} items; a timeline shows {MOST_ITEMS}"
        )
    cycles = key_cycles(gpu, outcome)
    tracks = tuple(
        Track(outcome.planner, f"{outcome.worker_name} {number}")
        for number in range(placement.workers)
    )
    rows = zip(
        outcome.items.tolist(), placement.worker.tolist(), placement.starts.tolist(),
        placement.costs.tolist(), strict=True,
    )  # fmt: skip
    events = tuple(
        Event(
            f"r{request} t{tile} h{head}",
            "compute",
            tracks[worker],
            start * cycles,
            cost * cycles,
            {
                "request": request,
                "q_tile": tile,
                "head": head,
                "first_key": first,
                "stop_key": stop,
            },
        )
        for (request, tile, head, first, stop), worker, start, cost in rows
    )
    return Trace(f"{outcome.planner} plan on {gpu.name}", events, tracks)
