"""``simkit run`` and ``simkit trace`` of the planners: plans, how they load the GPU, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simkit.cli.output import busy, console, write_json
from simkit.cli.plans import outcome_json, print_load, print_plan
from simkit.cli.schedule import Schedule, cycles_note
from simkit.cli.settings import (
    Lengths,
    Setting,
    Values,
    by_request,
    parse_settings,
    settings_text,
)
from simkit.errors import SimkitError
from simkit.machine.gpus import Gpu
from simkit.machine.gpus import gpu as find_gpu
from simkit.planning.outcome import Comparison, Planner, PlanProblem
from simkit.planning.prefill_planner import PREFILL_PLANNERS, plan_problem, prefill_planner
from simkit.planning.split_planner import SPLIT_PLANNERS, split_planner
from simkit.schedules import plan_timeline
from traces.events import Trace

_LENGTHS = ("q_len", "kv_len")
_SIZES = (
    Setting("batch", 4, "requests, where lengths are one number"),
    Setting("group", 4, "query heads of a K/V head"),
    Setting("kv_heads", 8, "K/V heads"),
    Setting("d", 128, "head dimension"),
    Setting("page", 16, "keys of a page, 1 if they are contiguous"),
)
_LANES = Setting("lanes", 16, "workers that a trace draws, the most and the least loaded")
_GRAPH = Setting("graph", False, "plan for a CUDA graph", kind="flag")
_PREFILL = (
    *_SIZES,
    Setting("causal", False, "mask keys after the query", kind="flag"),
    Setting("window_left", -1, "keys before a query's own that it sees, -1 for all", least=-1),
    Setting("fixed_split", 0, "keys of a chunk, 0 to search", least=0),
    Setting("disable_split", False, "one chunk for all keys", kind="flag"),
    _GRAPH,
    _LANES,
)


@dataclass(frozen=True)
class PlannerRow:
    """A planner row of the catalogue as ``run`` and ``trace`` see it.

    ``settings``: with the lengths of an example. ``shown``: the planner that ``trace`` draws by
    default.
    """

    name: str
    planners: Mapping[str, Planner]
    compare: Callable[[PlanProblem, int], Comparison]
    trace: Callable[[Gpu, PlanProblem, str], Trace]
    settings: tuple[Setting, ...]
    shown: str


def _settings(
    planners: Mapping[str, Planner], q_len: Lengths, kv_len: Lengths, *own: Setting
) -> tuple[Setting, ...]:
    # The planners check the range of lengths.
    lengths = (
        Setting(name, default, "one number, or some with commas", least=None, kind="lengths")
        for name, default in zip(_LENGTHS, (q_len, kv_len), strict=True)
    )
    names = ("all", *planners)
    word = Setting("planner", "all", ", ".join(names), kind="word", choices=names)
    return (*lengths, word, *own)


_KV_LENS = Lengths((1024, 2048, 4096, 8192))

PLANNERS: dict[str, PlannerRow] = {
    row.name: row
    for row in (
        PlannerRow(
            name="split_planner",
            planners=SPLIT_PLANNERS,
            compare=split_planner,
            trace=plan_timeline.split_planner,
            settings=_settings(SPLIT_PLANNERS, Lengths((1,)), _KV_LENS, *_SIZES, _GRAPH, _LANES),
            shown="fa2",
        ),
        PlannerRow(
            name="prefill_planner",
            planners=PREFILL_PLANNERS,
            compare=prefill_planner,
            trace=plan_timeline.prefill_planner,
            settings=_settings(PREFILL_PLANNERS, Lengths((1, 1, 1, 577)), _KV_LENS, *_PREFILL),
            shown="grid",
        ),
    )
}
"""What ``simkit run`` and ``simkit trace`` take for each planner of the catalogue."""


@dataclass(frozen=True, eq=False)
class _Request:
    """What a command is about: the problem, the planners that are asked for, all settings."""

    problem: PlanProblem
    planners: tuple[str, ...]
    values: Values

    @property
    def settings(self) -> dict[str, Any]:
        """For machines, with lengths as ``--set`` takes them."""
        return {
            name: str(value) if isinstance(value, Lengths) else value
            for name, value in self.values.items()
        }


def run_planner(name: str, settings: Sequence[str], gpu: str, json_file: Path | None) -> None:
    """Prints what each planner makes of a problem, and how evenly that loads the GPU."""
    row, found_gpu = PLANNERS[name], find_gpu(gpu)
    asked = _parse(row, settings)
    with busy(name):
        found = row.compare(asked.problem, found_gpu.sm_count)
    outcomes = [one for one in found.outcomes if one.planner in asked.planners]
    refused = {one: text for one, text in found.refused.items() if one in asked.planners}
    if not outcomes:
        raise SimkitError("; ".join(dict.fromkeys(refused.values())))
    out = console()
    out.print(f"{name}, {found_gpu.title}: {settings_text(asked.values)}")
    print_load(out, found_gpu, outcomes)
    for planner, text in refused.items():
        out.print(f"{planner} refused: {text}.")
    if any(one.planner == "grid" for one in outcomes):
        plan = plan_problem(asked.problem, found_gpu.sm_count)
        print_plan(out, "Plan of the grid planner", plan, asked.problem.batch)
    rows = [outcome_json(one) for one in outcomes]
    summary = {"algorithm": name, "gpu": found_gpu.name, "settings": asked.settings}
    write_json(json_file, summary | {"plans": rows, "refused": refused})


def planner_schedule(name: str, settings: Sequence[str], gpu: str) -> Schedule:
    """One planner's workers; drawn are the most and the least loaded, the export has all."""
    row, found_gpu = PLANNERS[name], find_gpu(gpu)
    asked = _parse(row, settings)
    planner = asked.planners[0] if len(asked.planners) == 1 else row.shown
    trace = row.trace(found_gpu, asked.problem, planner)
    drawn = _extremes(trace, asked.values["lanes"])
    notes = []
    if len(drawn.tracks) < len(trace.tracks):
        notes.append(
            f"{len(drawn.tracks)} of {len(trace.tracks)} workers, the most and the least loaded; "
            f"--set lanes={len(trace.tracks)} draws all."
        )
    condition = " if each worker has its share of HBM and nothing comes from L2"
    notes.append(cycles_note(trace, found_gpu.tensor_clock_hz, condition))
    summary = {"algorithm": name, "planner": planner, "gpu": found_gpu.name}
    return Schedule(
        heading=f"{name}, {planner}, {found_gpu.title}: {settings_text(asked.values)}",
        trace=trace,
        summary=summary | {"settings": asked.settings},
        notes=tuple(notes),
        drawn=drawn,
        clock_hz=found_gpu.tensor_clock_hz,
        most=None,
    )


def _parse(row: PlannerRow, given: Sequence[str]) -> _Request:
    values = parse_settings(row.name, row.settings, given)
    asked = values["planner"]
    planners = tuple(row.planners) if asked == "all" else (asked,)
    return _Request(_problem(values), planners, values)


def _problem(values: Values) -> PlanProblem:
    q_lens, kv_lens = by_request(values, *_LENGTHS)
    return PlanProblem(
        q_lens=q_lens,
        kv_lens=kv_lens,
        group=values["group"],
        kv_heads=values["kv_heads"],
        head_dim=values["d"],
        page_size=values["page"],
        window_left=values.get("window_left", -1),
        causal=values.get("causal", False),
        fixed_split=values.get("fixed_split", 0),
        disable_split=values.get("disable_split", False),
        graph=values["graph"],
    )


def _extremes(trace: Trace, most: int) -> Trace:
    """The trace of the ``most`` workers that are busy longest and shortest, in their order."""
    if len(trace.tracks) <= most:
        return trace
    busy_time = dict.fromkeys(trace.tracks, 0.0)
    for event in trace.events:
        busy_time[event.track] += event.duration
    ranked = sorted(trace.tracks, key=lambda track: -busy_time[track])
    chosen = {*ranked[: -(-most // 2)], *ranked[len(ranked) - most // 2 :]}
    tracks = tuple(track for track in trace.tracks if track in chosen)
    events = tuple(event for event in trace.events if event.track in chosen)
    return replace(trace, tracks=tracks, events=events)
