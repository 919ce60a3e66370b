"""The terminal view, drawn into strings of known width."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from traces.events import KINDS, Event, Trace, TraceError, Track
from traces.terminal import show

TMA, WG1 = Track("CTA 0", "TMA"), Track("CTA 0", "warpgroup 1")
SECOND = Track("CTA 1", "TMA")
EXAMPLE = Trace(
    "example",
    (
        Event("K0", "load", TMA, 0, 500),
        Event("QK", "mma", WG1, 500, 250),
        Event("softmax", "softmax", WG1, 750, 250),
        Event("wait", "wait", SECOND, 0, 1000),
    ),
)


class AsciiFile(io.StringIO):
    """An output whose encoding is ASCII, as a console sees it."""

    encoding = "ascii"  # type: ignore[assignment]


def drawn(
    trace: Trace,
    width: int = 80,
    ascii_only: bool = False,
    colour: bool = False,
    start: float | None = None,
    stop: float | None = None,
    names: bool = True,
) -> str:
    file = AsciiFile() if ascii_only else io.StringIO()
    console = Console(
        file=file,
        width=width,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        legacy_windows=False,
    )
    show(trace, console, start=start, stop=stop, names=names)
    return file.getvalue()


def row(label: str, bar: str, used: str) -> str:
    # 60 cells: 13 of label and a space, 40 of bars at 25 cycles each, 6 of utilisation.
    return f"{label:<14}{bar:<40}{used:>6}"


def test_golden_view_without_colour() -> None:
    assert drawn(EXAMPLE, width=60).splitlines() == [
        "example: 0 to 1,000 cycles",
        row("cycles", "0" + 19 * " " + "500", "used"),
        14 * " " + "┬" + 19 * "─" + "┬" + 19 * "─",
        "CTA 0",
        row("  TMA", "░K0" + 17 * "░", "50%"),
        row("  warpgroup 1", 20 * " " + "█QK███████▚softmax▚▚", "50%"),
        "CTA 1",
        row("  TMA", "·wait" + 35 * "·", "0%"),
        "░░ load  ██ mma  ▚▚ softmax  ·· wait",
    ]


def test_golden_view_in_ascii() -> None:
    lines = drawn(EXAMPLE, width=60, ascii_only=True, names=False).splitlines()
    assert lines[2] == 14 * " " + "+" + 19 * "-" + "+" + 19 * "-"
    assert lines[4:6] == [
        row("  TMA", 20 * ":", "50%"),
        row("  warpgroup 1", 20 * " " + 10 * "#" + 10 * "%", "50%"),
    ]
    assert lines[-1] == ":: load  ## mma  %% softmax  .. wait"


def test_zoom_shows_the_range_alone() -> None:
    lines = drawn(EXAMPLE, width=60, start=600, stop=800).splitlines()
    assert lines[0] == "example: 600 to 800 cycles"
    assert lines[1] == row("cycles", "600       650       700       750", "used")
    assert lines[4] == row("  TMA", "", "0%")
    # QK began before the range: 30 cells of it are left, then 10 of softmax.
    assert lines[5] == row("  warpgroup 1", "█QK" + 27 * "█" + "▚softmax▚▚", "100%")
    assert lines[-1] == "██ mma  ▚▚ softmax  ·· wait"


def test_a_cell_shows_what_fills_most_of_it_and_short_events_do_not_vanish() -> None:
    events = (
        Event("a", "load", TMA, 0, 15),
        Event("b", "mma", TMA, 15, 10),
        Event("c", "store", TMA, 500, 1),
        Event("d", "wait", TMA, 999, 1),
    )
    bar = drawn(Trace("t", events), width=52, names=False).splitlines()[4][6:46]
    assert bar == "░" + 19 * " " + "▓" + 18 * " " + "·"


def test_an_event_that_ends_on_a_cell_edge_stays_out_of_the_next() -> None:
    trace = Trace("t", (Event("a", "load", TMA, 0, 500), Event("b", "mma", TMA, 975, 25)))
    bar = drawn(trace, width=52, names=False).splitlines()[4][6:46]
    assert bar == 20 * "░" + 19 * " " + "█"


def test_long_labels_are_cut_and_foreign_signs_replaced_in_ascii() -> None:
    track = Track("CTA × 2", "a producer warp with a very long name")
    trace = Trace("t", (Event("×", "load", track, 0, 1),))
    assert "  a producer warp with …" in drawn(trace)
    text = drawn(trace, ascii_only=True)
    assert text.isascii()
    assert "CTA ? 2" in text
    assert "  a producer warp with ~" in text


def test_nothing_and_empty_ranges() -> None:
    assert drawn(Trace("idle")) == "idle: no events\n"
    with pytest.raises(TraceError, match=r"\[5, 5\) of 'example' is empty"):
        drawn(EXAMPLE, start=5, stop=5)


def test_the_legend_breaks_at_narrow_widths() -> None:
    events = tuple(Event(kind, kind, TMA, i, 1) for i, kind in enumerate(KINDS))
    lines = drawn(Trace("t", events), width=30).splitlines()[5:]
    assert len(lines) > 1
    assert [word for line in lines for word in line.split()[1::2]] == list(KINDS)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_no_line_is_wider_than_the_terminal(width: int, ascii_only: bool) -> None:
    lines = drawn(EXAMPLE, width, ascii_only).splitlines()
    assert max(map(len, lines)) <= width
    assert sum("  wa" in line for line in lines) == 1


def test_colour_adds_only_escape_codes() -> None:
    coloured = drawn(EXAMPLE, colour=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == drawn(EXAMPLE)
