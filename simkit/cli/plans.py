"""Plans in the commands' output: request by request, and how they load the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from simkit.cli.output import bytes_text, si_text, table
from simkit.machine.gpus import Gpu
from simkit.planning.batch import Batch
from simkit.planning.outcome import Outcome
from simkit.planning.plan import Plan
from simkit.schedules.plan_timeline import key_cycles

_MOST_ROWS = 32  # requests in a table


def print_load(out: Console, gpu: Gpu, outcomes: Sequence[Outcome]) -> None:
    """What each planner or launch decided, and how evenly that loads its workers."""
    columns = [_load(gpu, one) | _facts(one) for one in outcomes]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, "") for column in columns)) for name in names]
    heads = ("", *(one.planner for one in outcomes))
    out.print(table("Load", heads, rows, numbers=range(1, len(heads))))
    out.print(
        "Costs are keys: what an item loads, and 2 for each row of its tile. Longest: of the last "
        "worker to end; ideal: no placement of these items ends sooner. Least time: if each worker "
        "has its share of HBM bandwidth and nothing comes from L2."
    )


def _load(gpu: Gpu, outcome: Outcome) -> dict[str, str]:
    placement = outcome.placement
    return {
        "items": f"{len(outcome.items):,}",
        "workers": f"{placement.workers:,}",
        "each is a": outcome.worker_name,
        "cost": f"{placement.total:,}",
        "longest": f"{placement.makespan:,}",
        "ideal": f"{placement.ideal:,.0f}",
        "busy": f"{placement.efficiency:.1%}",
        "least time": si_text(_seconds(gpu, outcome), "s"),
    }


def _facts(outcome: Outcome) -> dict[str, str]:
    return {name.replace("_", " "): _text(name, value) for name, value in outcome.facts.items()}


def print_plan(out: Console, title: str, plan: Plan, batch: Batch) -> None:
    """The plan request by request: items of each K/V head, and where partial states start."""
    tiles = batch.tiles(plan.tile_q)
    rows = [
        (
            request,
            f"{batch.q_lens[request]:,}",
            f"{batch.kv_lens[request]:,}",
            f"{tiles[request]:,}",
            f"{plan.chunks[request]:,}",
            f"{tiles[request] * plan.chunks[request]:,}",
            f"{plan.o_indptr[request]:,}",
        )
        for request in range(min(batch.size, _MOST_ROWS))
    ]
    columns = ("request", "queries", "keys", "tiles", "chunks", "items", "o_indptr")
    out.print(table(title, columns, rows, numbers=range(7)))
    if batch.size > _MOST_ROWS:
        out.print(f"and {batch.size - _MOST_ROWS:,} more requests; --json has all.")


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """Everything there is of an outcome, items by column."""
    placement = outcome.placement
    names = ("request", "q_tile", "head", "first_key", "stop_key")
    columns = dict(zip(names, outcome.items.T, strict=True))
    columns |= {"worker": placement.worker, "start": placement.starts, "cost": placement.costs}
    return {
        "planner": outcome.planner,
        "worker": outcome.worker_name,
        "facts": dict(outcome.facts),
        "load": {
            "workers": placement.workers,
            "loads": placement.loads,
            "total": placement.total,
            "makespan": placement.makespan,
            "ideal": placement.ideal,
            "efficiency": placement.efficiency,
        },
        "items": columns,
    }


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if name.endswith("_bytes") and isinstance(value, int):
        return bytes_text(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _seconds(gpu: Gpu, outcome: Outcome) -> float:
    return outcome.placement.makespan * key_cycles(gpu, outcome) / gpu.tensor_clock_hz
