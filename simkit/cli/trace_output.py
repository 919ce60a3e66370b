"""What ``simkit trace`` does with schedules: prints, compares, plays, opens and writes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from simkit.cli.output import si_text
from simkit.cli.schedule import Schedule
from simkit.errors import SimkitError
from traces import chrome
from traces.comparison import Comparison
from traces.svg import svg
from traces.terminal import ComparisonView, TraceView, View
from traces.viewer import open_viewer
from traces.watch import watch


def time_view(
    start: float | None, stop: float | None, zoom: str | None
) -> tuple[float | None, float | None]:
    """The range of ``--start`` and ``--stop``, or of ``--zoom A:B``; either side may be missing."""
    if zoom is None:
        return start, stop
    if start is not None or stop is not None:
        raise SimkitError("--zoom A:B stands for --start A --stop B: give one or the other")
    first, colon, last = zoom.partition(":")
    try:
        if not colon:
            raise ValueError
        return (float(first) if first else None), (float(last) if last else None)
    except ValueError:
        raise SimkitError(f"--zoom {zoom}: it is A:B, two times with a colon between") from None


def print_schedule(out: Console, schedule: Schedule, view: View) -> None:
    """One schedule in the terminal, with its heading and notes."""
    out.print(schedule.heading)
    out.print(TraceView(schedule.shown, view))
    for note in schedule.notes:
        out.print(note)


def print_comparison(out: Console, first: Schedule, second: Schedule, view: View) -> None:
    """Two schedules with one time axis, then what is said about each."""
    comparison = Comparison(first.trace, second.trace)
    for name, schedule in (("first", first), ("second", second)):
        out.print(f"{name}: {schedule.heading}")
    out.print(ComparisonView(first.shown, second.shown, view, comparison))
    for name, schedule in (("first", first), ("second", second)):
        for note in schedule.notes:
            out.print(f"{name}: {note}")
    before, after = first.seconds, second.seconds
    if before and after is not None:
        times = f"{si_text(before, 's')} and {si_text(after, 's')}"
        out.print(f"In time: {times}, x {after / before:.3f}.")


def comparison_json(first: Schedule, second: Schedule) -> dict[str, Any]:
    """What differs, for machines."""
    comparison = Comparison(first.trace, second.trace)
    before, after = first.seconds, second.seconds
    return {
        "versus": second.to_json(),
        "ratio": comparison.ratio,
        "seconds_ratio": after / before if before and after is not None else None,
        "used": comparison.tracks,
        "critical": comparison.critical,
    }


def play(out: Console, schedule: Schedule, view: View, speed: float) -> None:
    """``--watch``."""
    out.print(schedule.heading)
    watch(schedule.shown, out, view, speed=speed)


def interact(out: Console, schedule: Schedule, view: View) -> None:
    """``--interactive``; SimkitError where there is no terminal."""
    if not out.is_terminal:
        raise SimkitError("--interactive needs a terminal; this output is a file or a pipe")
    open_viewer(schedule.trace, replace(view, most=None))


def export(out: Console, schedule: Schedule, path: Path) -> None:
    """``--export``: all of the schedule, whatever is drawn."""
    chrome.save(schedule.trace, path)
    out.print(f"Written to {path}; open it at ui.perfetto.dev.")


def write_svg(
    out: Console, first: Schedule, second: Schedule | None, view: View, path: Path
) -> None:
    """``--svg``: what the terminal shows, as an image of the same width."""
    shown: RenderableType = TraceView(first.shown, view)
    if second is not None:
        comparison = Comparison(first.trace, second.trace)
        shown = ComparisonView(first.shown, second.shown, view, comparison)
    image = svg(shown, width=out.width, theme=view.theme, title=first.trace.name)
    path.write_text(image, encoding="utf-8")
    out.print(f"Written to {path}.")
