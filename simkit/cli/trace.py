"""``simkit trace``: the schedule of an algorithm in the terminal, and for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simkit.cli import trace_output
from simkit.cli.options import GpuName, JsonFile, Settings
from simkit.cli.output import console, write_json
from simkit.cli.schedule import Schedule
from simkit.cli.trace_schedule import Place, find_schedule, read_schedule, second_schedule
from simkit.errors import SimkitError
from traces.terminal import View


def trace(
    algorithm: Annotated[
        str | None, typer.Argument(metavar="ALGO", help="See simkit list.", show_default=False)
    ] = None,
    settings: Settings = None,
    gpu: GpuName = "h100",
    on: Annotated[
        str,
        typer.Option(
            help="model (a CTA's schedule), cycles (the cycle model), ptx (the executor) or cuda."
        ),
    ] = "model",
    ctas: Annotated[
        int, typer.Option(metavar="N", min=1, help="CTAs of a run that are recorded.")
    ] = 2,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write it for ui.perfetto.dev.")
    ] = None,
    import_file: Annotated[
        Path | None,
        typer.Option("--import", metavar="FILE.json", help="Draw a trace file, not an ALGO."),
    ] = None,
    start: Annotated[float | None, typer.Option(help="First time to draw.")] = None,
    stop: Annotated[float | None, typer.Option(help="Time to draw up to.")] = None,
    zoom: Annotated[
        str | None, typer.Option(metavar="A:B", help="Both; either may be left out.")
    ] = None,
    tracks: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only tracks with TEXT in their name.")
    ] = None,
    most: Annotated[
        int | None, typer.Option(metavar="N", help="Tracks to draw at most.", min=1)
    ] = None,
    arrows: Annotated[int, typer.Option(metavar="N", help="Arrows to draw at most.", min=0)] = 12,
    critical: Annotated[bool, typer.Option(help="Mark the critical path.")] = True,
    versus: Annotated[
        str | None,
        typer.Option(metavar="ALGO[:NAME=VALUE,...]", help="Compare with it, or with a FILE.json."),
    ] = None,
    versus_set: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Compare with another setting; repeatable."),
    ] = None,
    versus_gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="Compare with another GPU.")
    ] = None,
    width: Annotated[int | None, typer.Option(metavar="N", help="Cells of a line.", min=40)] = None,
    theme: Annotated[str, typer.Option(help="dark or light, as the terminal is.")] = "dark",
    watch: Annotated[bool, typer.Option("--watch", help="Play it.")] = False,
    speed: Annotated[float, typer.Option(help="Of --watch; 1 takes ten seconds.")] = 1.0,
    interactive: Annotated[
        bool, typer.Option("--interactive", help="Open it in the viewer (extra viewer).")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what is drawn as an image.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Draw when a CTA loads, computes and stores, by the rates of the device table.

    Of a planner: which worker has which piece of work, and when. On cycles: an SM by the
    cycle model. On ptx: what warps, copies and
    tensor cores do in which order, in steps of the executor; on cuda: the phases that the kernel
    stamps, in nanoseconds.

    With --versus or its like: two schedules with one time axis, and what differs.
    """
    at = Place(on, ctas)
    first = _first(algorithm, settings or [], gpu, import_file, at)
    second = second_schedule(
        versus,
        versus_set or (),
        versus_gpu,
        algorithm=algorithm,
        settings=settings or (),
        first_gpu=gpu,
        at=at,
    )
    if second is not None and (watch or interactive):
        raise SimkitError("--watch and --interactive show one schedule, not two")
    if watch and interactive:
        raise SimkitError("--watch and --interactive are two ways to show it: choose one")
    begin, end = trace_output.time_view(start, stop, zoom)
    view = View(
        start=begin,
        stop=end,
        tracks=tracks,
        most=first.most if most is None else most,
        critical=critical,
        arrows=arrows,
        theme=theme,
    )
    out = console()
    if width is not None:
        out.width = width
    if interactive:
        trace_output.interact(out, first, view)
    elif watch:
        trace_output.play(out, first, view, speed)
    elif second is not None:
        trace_output.print_comparison(out, first, second, view)
    else:
        trace_output.print_schedule(out, first, view)
    if export is not None:
        trace_output.export(out, first, export)
    if svg is not None:
        trace_output.write_svg(out, first, second, view, svg)
    compared = {} if second is None else trace_output.comparison_json(first, second)
    write_json(json_file, first.to_json() | compared)


def _first(
    algorithm: str | None,
    settings: list[str],
    gpu: str,
    import_file: Path | None,
    at: Place,
) -> Schedule:
    if import_file is None:
        if algorithm is None:
            raise SimkitError("name an ALGO (see simkit list), or a file with --import")
        return find_schedule(algorithm, settings, gpu, at)
    if at.on != "model":
        raise SimkitError(f"--import {import_file} is a schedule already: no --on")
    if algorithm is not None or settings:
        raise SimkitError(f"--import {import_file} has its own schedule: no ALGO and no --set")
    return read_schedule(import_file)
