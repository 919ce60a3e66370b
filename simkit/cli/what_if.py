"""``simkit run`` of a schedule: how long it takes, what bounds it, what would change that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from simkit.cli.output import busy, bytes_text, console, si_text, table, write_json
from simkit.cli.settings import Values, parse_settings, settings_text
from simkit.cli.timed import timed
from simkit.cli.timed.timed import CLOCK, clock_of
from simkit.machine.gpus import Gpu
from simkit.machine.gpus import gpu as find_gpu
from simkit.schedules.grid import GridRun
from simkit.schedules.prediction import Prediction, predict


def run_schedule(algorithm: str, settings: Sequence[str], gpu: str, json_file: Path | None) -> None:
    """Predicts the launches of a schedule and prints what holds them back."""
    chosen, row = timed(algorithm), find_gpu(gpu)
    values = parse_settings(algorithm, (*chosen.settings, CLOCK), settings)
    with busy(f"{algorithm} on {row.name}"):
        found = predict(row, chosen.launches(row, values), clock_hz=clock_of(values))
    out = console()
    out.print(f"{algorithm}, predicted for {row.title}: {settings_text(values)}")
    _print(out, found)
    if row.capability >= (10, 0) and any(run.launch.path != "mma.sync" for run in found.runs):
        out.print(
            f"{row.name} has no wgmma: this is the schedule at its rates, not a kernel of it."
        )
    out.print(f"simkit tune {algorithm} ranks alternatives; simkit trace {algorithm} draws it.")
    described = {"algorithm": algorithm, "gpu": row.name, "settings": values}
    write_json(json_file, described | prediction_json(found))


def predict_values(algorithm: str, gpu: Gpu, values: Values) -> Prediction:
    """The prediction for settings of the problem, with the kernel's own choices."""
    chosen = timed(algorithm)
    own = {setting.name: setting.default for setting in chosen.choices}
    return predict(gpu, chosen.launches(gpu, {**own, **values}))


def prediction_json(found: Prediction) -> dict[str, Any]:
    """A prediction for machines."""
    return {
        "seconds": found.seconds,
        "flops": found.flops,
        "hbm_bytes_per_s": found.hbm_bytes_per_s,
        "bound": found.bound,
        "launches": [_launch_json(run) for run in found.runs],
    }


def _launch_json(run: GridRun) -> dict[str, Any]:
    return {
        "name": run.launch.name,
        "seconds": run.seconds,
        "cycles": run.cycles,
        "clock_hz": run.clock_hz,
        "power_w": run.power_w,
        "bound": run.bound,
        "ctas_per_sm": run.occupancy.ctas_per_sm,
        "limiters": run.occupancy.limiters,
        "items": len(run.launch.items),
        "balance": run.placement.efficiency,
        "utilisation": {name: run.utilisation(name) for name in run.busy},
        "sensitivity": run.sensitivities,
    }


def _print(out: Console, found: Prediction) -> None:
    out.print(
        table(
            "Prediction",
            ("", *(run.launch.name for run in found.runs)),
            [(name, *(text(run) for run in found.runs)) for name, text in _LINES],
            numbers=range(1, len(found.runs) + 1),
        )
    )
    total = f"{si_text(found.seconds, 's')} with {si_text(sum(found.gaps), 's')} of launching"
    rates = [si_text(found.flops, "FLOP/s")] if found.flop else []
    rates.append(si_text(found.hbm_bytes_per_s, "B/s"))
    out.print(f"In all {total}: {', '.join(rates)}. Bound by {found.bound}.")
    run = found.longest
    rows = [
        (name, f"{run.utilisation(name):.1%}", f"{run.sensitivities.get(name, 0.0):.1%}")
        for name in sorted(run.busy, key=run.utilisation, reverse=True)
        if run.busy[name]
    ]
    title = f"Resources, {run.launch.name}"
    out.print(table(title, ("resource", "used", "sensitivity"), rows, numbers=(1, 2)))
    out.print(
        "used: of all SMs over the whole time. sensitivity: how much of a higher rate becomes time."
    )


_LINES = (
    ("time", lambda run: si_text(run.seconds, "s")),
    ("cycles", lambda run: f"{run.cycles:,.0f}"),
    ("clock", lambda run: si_text(run.clock_hz, "Hz")),
    ("board power", lambda run: "not modelled" if run.power_w is None else f"{run.power_w:.0f} W"),
    ("CTAs per SM", lambda run: str(run.occupancy.ctas_per_sm)),
    ("limited by", lambda run: ", ".join(run.occupancy.limiters)),
    ("shared memory", lambda run: bytes_text(run.launch.shared_bytes)),
    ("items", lambda run: f"{len(run.launch.items):,}"),
    ("balance", lambda run: f"{run.placement.efficiency:.1%}"),
    ("bound by", lambda run: run.bound),
)
