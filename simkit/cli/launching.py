"""``simkit run launches`` and ``trace launches``: kernels that a CPU launches one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from simkit.cli.output import console, si_text, table, write_json
from simkit.cli.schedule import Schedule
from simkit.cli.settings import Setting, Values, parse_settings, settings_text
from simkit.errors import CapacityError
from simkit.schedules.launch_picture import timeline_trace
from simkit.schedules.launches import Costs, Kernel, Timeline, timeline
from simkit.schedules.prediction import Submission

NAME = "launches"
MOST_KERNELS = 20_000

_SETTINGS = (
    Setting("kernels", 330, "kernels of a step"),
    Setting("kernel_us", 14.5, "microseconds of each", least=0, kind="number"),
    Setting("host_us", Costs().host * 1e6, "of the CPU for a launch", least=0, kind="number"),
    Setting("prologue_us", 0.0, "of a kernel, which needs no result", least=0, kind="number"),
)
_HOW = Setting(
    "submission", "stream", "how they are launched", kind="word", choices=("stream", "graph")
)
_DEPENDENT = Setting("dependent", False, "programmatic dependent launch", kind="flag")

_WAYS: Mapping[str, tuple[Submission, bool]] = {
    "stream": ("stream", False),
    "stream, dependent": ("stream", True),
    "graph": ("graph", False),
    "graph, dependent": ("graph", True),
}


def run_launches(settings: Sequence[str], json_file: Path | None) -> None:
    """Prints how long the kernels take, launched in each way."""
    values = parse_settings(NAME, _SETTINGS, settings)
    found = {name: _timeline(values, *way) for name, way in _WAYS.items()}
    out = console()
    out.print(f"{NAME}: {settings_text(values)}")
    out.print(
        table(
            "Launched in each way",
            ("", "takes", "CPU", "GPU idle", "bound by"),
            [
                (
                    name,
                    si_text(one.seconds, "s"),
                    si_text(one.host_seconds, "s"),
                    f"{one.idle / one.seconds:.1%}",
                    "launching" if one.is_launch_bound else "the GPU",
                )
                for name, one in found.items()
            ],
            numbers=(1, 2, 3),
        )
    )
    out.print("CPU: until all is submitted. GPU idle: between the first call and the last end.")
    out.print(f"simkit trace {NAME} draws it. docs/cycles.md has the costs and their sources.")
    ways = {name: _json(one) for name, one in found.items()}
    write_json(json_file, {"algorithm": NAME, "settings": values, "ways": ways})


def launches_schedule(settings: Sequence[str]) -> Schedule:
    """One way of launching, drawn."""
    values = parse_settings(NAME, (*_SETTINGS, _HOW, _DEPENDENT), settings)
    found = _timeline(values, values["submission"], values["dependent"])
    bound = "launching" if found.is_launch_bound else "the GPU"
    return Schedule(
        heading=f"{NAME}: {settings_text(values)}",
        trace=timeline_trace(found, NAME),
        summary={"algorithm": NAME, "settings": values} | _json(found),
        notes=(
            f"All takes {si_text(found.seconds, 's')}, bound by {bound}; the GPU is idle for "
            f"{found.idle / found.seconds:.1%} of it.",
        ),
    )


def _timeline(values: Values, submission: Submission, dependent: bool) -> Timeline:
    if values["kernels"] > MOST_KERNELS:
        raise CapacityError(f"{values['kernels']} kernels; this command takes {MOST_KERNELS}")
    prologue = values["prologue_us"] * 1e-6
    kernels = [
        Kernel(
            name=f"kernel {number}",
            seconds=values["kernel_us"] * 1e-6,
            dependent=dependent and number > 0,
            prologue=prologue if dependent and number > 0 else 0.0,
        )
        for number in range(values["kernels"])
    ]
    return timeline(kernels, submission=submission, costs=Costs(host=values["host_us"] * 1e-6))


def _json(found: Timeline) -> dict[str, Any]:
    return {
        "seconds": found.seconds,
        "host_seconds": found.host_seconds,
        "idle_seconds": found.idle,
        "is_launch_bound": found.is_launch_bound,
    }
