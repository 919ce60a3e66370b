"""Finds the schedule that ``simkit trace`` is about: an algorithm's, a planner's, or a file's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gpu as gpu_package
from gpu.run_trace import trace_run
from simkit.catalog import algorithm as find_algorithm
from simkit.cli.launching import NAME as LAUNCHES
from simkit.cli.launching import launches_schedule
from simkit.cli.output import busy, count_text
from simkit.cli.planner import PLANNERS, planner_schedule
from simkit.cli.schedule import Schedule, cycles_note
from simkit.cli.settings import parse_settings, settings_text
from simkit.cli.subjects import SUBJECTS, subject
from simkit.cli.timed import TIMED
from simkit.cli.timed.pictures import timed_schedule
from simkit.errors import SimkitError
from simkit.machine.gpus import gpu as find_gpu
from traces import chrome


@dataclass(frozen=True)
class Place:
    """``--on`` and ``--ctas``: model, cycles, ptx or cuda; CTAs of a run that are recorded."""

    on: str = "model"
    ctas: int = 2


def find_schedule(
    algorithm: str, settings: Sequence[str], gpu: str, at: Place | None = None
) -> Schedule:
    """The schedule of a kernel or planner of the catalogue; SimkitError if it has none there."""
    at = at or Place()
    if at.on == "cycles":
        return timed_schedule(algorithm, settings, gpu)
    if at.on != "model":
        return executed_schedule(algorithm, settings, gpu, at.on, at.ctas)
    if algorithm in PLANNERS:
        return planner_schedule(algorithm, settings, gpu)
    if algorithm == LAUNCHES:
        return launches_schedule(settings)
    if algorithm in TIMED and algorithm not in SUBJECTS:
        return timed_schedule(algorithm, settings, gpu)
    kind = find_algorithm(algorithm)
    if kind.trace is None:
        raise SimkitError(f"{algorithm} is a {kind.kind}: it has no schedule of its own to draw")
    chosen = subject(algorithm)
    values = parse_settings(algorithm, chosen.settings, settings)
    row = find_gpu(gpu)
    trace = chosen.trace(row, chosen.workload(row, values, None))
    condition = f" at {row.tensor_clock_hz / 1e9:.4g} GHz, for a CTA alone on its SM, without L2"
    return Schedule(
        heading=f"{algorithm}, {row.title}: {settings_text(values)}",
        trace=trace,
        summary={"algorithm": algorithm, "gpu": row.name, "settings": values},
        notes=(cycles_note(trace, row.tensor_clock_hz, condition),),
        clock_hz=row.tensor_clock_hz,
    )


def executed_schedule(
    algorithm: str, settings: Sequence[str], gpu: str, on: str, ctas: int
) -> Schedule:
    """What the kernels of an algorithm do when they run on a device, in their first CTAs."""
    if on not in ("ptx", "cuda"):
        raise SimkitError(f"--on {on!r} is none of model, cycles, ptx, cuda")
    if algorithm not in SUBJECTS:
        raise SimkitError(f"{algorithm} has no kernel to run on {on}; {', '.join(SUBJECTS)} have")
    chosen, row = SUBJECTS[algorithm], find_gpu(gpu)
    values = parse_settings(algorithm, chosen.settings, settings)
    device = gpu_package.open(on, gpu=gpu)
    work = chosen.workload(row, values, 0)
    with busy(f"{algorithm} on {on}"):
        trace = trace_run(device, lambda watched: chosen.kernel(watched, work), ctas=range(ctas))
    return Schedule(
        heading=f"{algorithm} on {on}, {row.title}: {settings_text(values)}",
        trace=trace,
        summary={"algorithm": algorithm, "gpu": row.name, "on": on, "settings": values},
        notes=(_STEPS if trace.unit == "steps" else f"Up to {ctas} CTAs by %globaltimer.",),
    )


_STEPS = "Steps have an order and no duration; --export shows it in ui.perfetto.dev."


def read_schedule(path: Path) -> Schedule:
    """The schedule of a Chrome Trace file, of simkit or another tool; TraceError if it is none."""
    found = chrome.read(path)
    trace = found.trace
    count = f"{count_text(len(trace.events), 'event')} on {count_text(len(trace.tracks), 'track')}"
    notes = list(found.notes)
    if trace.counters:
        notes.append(f"not drawn, but exported: {count_text(len(trace.counters), 'counter')}")
    return Schedule(
        heading=f"{path}: {count}",
        trace=trace,
        summary={"file": str(path), "name": trace.name, "notes": found.notes},
        notes=tuple(f"{note}." for note in notes),
    )


def second_schedule(
    text: str | None,
    more: Sequence[str],
    gpu: str | None,
    *,
    algorithm: str | None,
    settings: Sequence[str],
    first_gpu: str,
    at: Place,
) -> Schedule | None:
    """The schedule of ``--versus``, ``--versus-set`` and ``--versus-gpu``; None without any.

    ``text``: "ALGO", "ALGO:name=value,name=value" or a trace file. Without it, the first algorithm
    with its settings, and ``more`` after them. The GPU is the first one's unless another is named;
    ``at`` is the first one's, too.
    """
    if text is None and gpu is None and not more:
        return None
    if text is not None and text.endswith(".json"):
        if more or gpu is not None:
            raise SimkitError(f"{text} is a file: --versus-set and --versus-gpu do not change it")
        return read_schedule(Path(text))
    if text is None:
        if algorithm is None:
            raise SimkitError("--import has no settings to change: name an ALGO for --versus")
        return find_schedule(algorithm, (*settings, *more), gpu or first_gpu, at)
    name, _, given = text.partition(":")
    return find_schedule(name, (*split_settings(given), *more), gpu or first_gpu, at)


def split_settings(text: str) -> list[str]:
    """The settings of "name=value,name=value", where values may have commas of their own."""
    found: list[str] = []
    for part in text.split(",") if text else ():
        if "=" in part or not found:
            found.append(part)
        else:
            found[-1] += f",{part}"
    return found
