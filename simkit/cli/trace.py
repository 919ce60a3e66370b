"""``simkit trace``: the schedule of an algorithm in the terminal, and for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simkit.catalog import algorithm as find_algorithm
from simkit.cli.options import GpuName, JsonFile, Settings
from simkit.cli.output import console, si_text, write_json
from simkit.cli.planner import PLANNERS, trace_planner
from simkit.cli.settings import parse_settings, settings_text
from simkit.cli.subjects import subject
from simkit.errors import SimkitError
from simkit.machine.gpus import gpu as find_gpu
from traces import chrome
from traces.terminal import show


def trace(
    algorithm: Annotated[str, typer.Argument(metavar="ALGO", help="See simkit list.")],
    settings: Settings = None,
    gpu: GpuName = "h100",
    export: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write it for ui.perfetto.dev.")
    ] = None,
    start: Annotated[float | None, typer.Option(help="First cycle to draw.")] = None,
    stop: Annotated[float | None, typer.Option(help="Cycle to draw up to.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Draw when a CTA loads, computes and stores, by the rates of the device table.

    Of a planner: which worker has which piece of work, and when.
    """
    if algorithm in PLANNERS:
        trace_planner(algorithm, settings or (), gpu, export, start, stop, json_file)
        return
    if find_algorithm(algorithm).trace is None:
        raise SimkitError(f"{algorithm} is a study: it has no kernel, and no schedule to draw")
    chosen = subject(algorithm)
    values = parse_settings(algorithm, chosen.settings, settings or ())
    row = find_gpu(gpu)
    found = chosen.trace(row, chosen.workload(row, values, None))
    out = console()
    out.print(f"{algorithm}, {row.title}: {settings_text(values)}")
    show(found, out, start=start, stop=stop)
    seconds = found.stop / row.tensor_clock_hz
    out.print(
        f"{found.stop:,.0f} cycles are {si_text(seconds, 's')} at "
        f"{row.tensor_clock_hz / 1e9:.4g} GHz, for a CTA alone on its SM, without L2."
    )
    if export is not None:
        chrome.save(found, export)
        out.print(f"Written to {export}; open it at ui.perfetto.dev.")
    tracks = [
        {"process": track.process, "track": track.name, "used": found.utilisation(track)}
        for track in found.tracks
    ]
    summary = {"algorithm": algorithm, "gpu": row.name, "settings": values}
    write_json(json_file, summary | {"cycles": found.stop, "seconds": seconds, "tracks": tracks})
