"""The terminal view, drawn into strings of known width."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipelines import MUFU, TENSOR, TMA, grid, pipeline, traces
from rich.cells import cell_len
from rich.console import Console

from traces.events import KINDS, Event, Flow, Trace, TraceError, Track
from traces.terminal import ComparisonView, TraceView, View, compare, show

COPIES, WG1 = Track("CTA 0", "TMA"), Track("CTA 0", "warpgroup 1")
SECOND = Track("CTA 1", "TMA")
EXAMPLE = Trace(
    "example",
    (
        Event("K0", "load", COPIES, 0, 500),
        Event("QK", "mma", WG1, 500, 250),
        Event("softmax", "softmax", WG1, 750, 250),
        Event("wait", "wait", SECOND, 0, 1000),
    ),
)


class AsciiFile(io.StringIO):
    """An output whose encoding is ASCII, as a console sees it."""

    encoding = "ascii"  # type: ignore[assignment]


def drawn(
    trace: Trace, width: int = 80, ascii_only: bool = False, colour: bool = False, **view: Any
) -> str:
    """The view without critical path and arrows, unless they are asked for."""
    file = AsciiFile() if ascii_only else io.StringIO()
    console = Console(
        file=file,
        width=width,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        legacy_windows=False,
    )
    show(trace, console, View(**{"critical": False, "arrows": 0} | view))
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
        Event("a", "load", COPIES, 0, 15),
        Event("b", "mma", COPIES, 15, 10),
        Event("c", "store", COPIES, 500, 1),
        Event("d", "wait", COPIES, 999, 1),
    )
    bar = drawn(Trace("t", events), width=53, names=False).splitlines()[4][7:47]
    assert bar == "░" + 19 * " " + "▓" + 18 * " " + "·"


def test_an_event_that_ends_on_a_cell_edge_stays_out_of_the_next() -> None:
    trace = Trace("t", (Event("a", "load", COPIES, 0, 500), Event("b", "mma", COPIES, 975, 25)))
    bar = drawn(trace, width=53, names=False).splitlines()[4][7:47]
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
    events = tuple(Event(kind, kind, COPIES, i, 1) for i, kind in enumerate(KINDS))
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


def test_events_without_duration_are_seen_where_nothing_else_is() -> None:
    events = (
        Event("arrive", "barrier", COPIES, 500, 0),
        Event("K0", "load", COPIES, 0, 100),
        Event("hidden", "barrier", COPIES, 50, 0),
        Event("", "load", COPIES, 975, 25),
    )
    bar = drawn(Trace("t", events), width=53, names=False).splitlines()[4][7:47]
    assert bar == "░░░░" + 16 * " " + "┃" + 18 * " " + "░"
    lone = drawn(Trace("t", events[:1])).splitlines()
    assert lone[0] == "t: 500 to 501 cycles"


def test_units() -> None:
    trace = Trace("t", EXAMPLE.events, unit="steps")
    assert drawn(trace).splitlines()[0] == "t: 0 to 1,000 steps"
    assert drawn(trace).splitlines()[1].startswith("steps ")


def lane_rows(text: str, name: str) -> list[str]:
    """The line of a track, and those of its marks, without the label."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"  {name}"))
    rows = [lines[first]]
    for line in lines[first + 1 :]:
        if line[:14].strip():
            break
        rows.append(line)
    return [line[14:] for line in rows]


def test_the_critical_path_is_read_without_colour() -> None:
    # 60 cells: 14 of label, 40 of bars at 35 cycles each.
    text = drawn(pipeline(tiles=2), width=60, critical=True)
    assert lane_rows(text, "TMA")[1].rstrip() == "━━━━━━"  # K0: 180 cycles
    assert "━" not in "".join(lane_rows(text, "MUFU")[1][:12])
    assert "critical path: 1,400 cycles, mma 71%, softmax 14%, load 13%, wait 1%" in " ".join(
        text.split()
    )
    assert "━" not in drawn(pipeline(tiles=2), width=60)
    assert "*" in drawn(pipeline(tiles=2), width=60, critical=True, ascii_only=True)


def test_idle_stretches_of_the_path_are_told_apart() -> None:
    trace = Trace("t", (Event("a", "mma", COPIES, 0, 10), Event("b", "mma", COPIES, 20, 20)))
    marks = drawn(trace, width=53, critical=True).splitlines()[5]
    assert marks[7:47] == 10 * "━" + 10 * "╌" + 20 * "━"


def test_arrows_have_letters_at_both_ends_and_in_the_list() -> None:
    text = drawn(pipeline(tiles=1), width=60, arrows=12)
    for leaves, arrives, letter in ((TMA, "barrier", "a"), (TENSOR, "MUFU", "c")):
        assert f"↓{letter}" in "".join(lane_rows(text, leaves.name)[1:])
        assert f"↑{letter}" in "".join(lane_rows(text, arrives)[1:])
    assert "  a  producer/TMA 180 → warpgroup 0/barrier 200  full 0  (20 cycles)"[:60] in text
    plain = drawn(pipeline(tiles=1), width=60, arrows=12, ascii_only=True)
    assert "va" in plain
    assert "^a" in plain
    assert "180 -> warpgroup" in plain


def test_marks_stand_where_the_ends_are() -> None:
    events = (Event("a", "load", COPIES, 0, 10), Event("b", "mma", WG1, 30, 10))
    trace = Trace("t", events, flows=(Flow("f", COPIES, 10, WG1, 30),))
    text = drawn(trace, width=60, arrows=1)
    # 40 cells, one for each cycle: the copy's last is 9, the product's first is 30.
    assert lane_rows(text, "TMA")[1].rstrip() == 9 * " " + "↓a"
    assert lane_rows(text, "warpgroup 1")[1].rstrip() == 30 * " " + "↑a"


def test_more_arrows_than_asked_for_are_counted_critical_ones_first() -> None:
    text = drawn(pipeline(tiles=3), critical=True, arrows=2)
    assert "  6 more arrows in this range" in text
    assert "  a  producer/TMA 180" in text
    early = Flow("not waited for", TMA, 0, MUFU, 1)
    busy = pipeline(tiles=1)
    trace = Trace("t", busy.events, busy.tracks, flows=(early, *busy.flows))
    assert "not waited for" not in drawn(trace, critical=True, arrows=4)
    assert "not waited for" in drawn(trace, critical=False, arrows=4)


def test_arrows_that_collide_take_further_rows() -> None:
    events = (Event("a", "load", COPIES, 0, 10), Event("b", "mma", WG1, 10, 10))
    flows = tuple(Flow(f"f{n}", COPIES, 10, WG1, 10) for n in range(3))
    text = drawn(Trace("t", events, flows=flows), width=60, arrows=12)
    assert [row.strip() for row in lane_rows(text, "TMA")[1:]] == ["↓a", "↓b", "↓c"]


def test_arrows_outside_the_range_are_left_out() -> None:
    text = drawn(pipeline(tiles=1), arrows=12, start=0, stop=190)
    assert "  a  producer/TMA 180" in text
    assert "↓a" in text
    assert "↑a" not in text.replace("↓a ↑a arrow a", "")
    assert " b " not in text


def test_tracks_are_chosen_by_text_and_left_out_tracks_are_told() -> None:
    text = drawn(grid(), tracks="sm 13")
    assert [line for line in text.splitlines() if line.startswith("SM")] == [
        "SM 13",
        "SM 130",
        "SM 131",
    ]
    assert "left out" not in text
    text = drawn(grid(), most=5, critical=True)
    shown = [line for line in text.splitlines() if line.startswith("SM")]
    # The path goes over SM 131, which is why that is among them.
    assert shown == ["SM 0", "SM 1", "SM 2", "SM 3", "SM 131"]
    # 127 SMs with 3 * 90 of 390 cycles each.
    assert "127 tracks are left out, used 69% in the mean; 5 are shown" in text


@pytest.mark.parametrize(
    ("view", "message"),
    [
        ({"tracks": "SM 500"}, "no track of 'grid' has 'SM 500' in its name; it has SM 0/CTA slot"),
        ({"most": 0}, "at most 0 tracks are to be shown; it must be 1 or more"),
        ({"theme": "pink"}, "theme 'pink' is none of dark, light"),
        ({"stop": float("inf")}, "must be finite"),
        ({"start": float("nan")}, "must be finite"),
        ({"start": 9, "stop": 3}, r"time range \[9, 3\) of 'grid' is empty"),
    ],
)
def test_views_that_there_are_not(view: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        drawn(grid(), **view)


def compared(first: Trace, second: Trace, width: int, **view: Any) -> list[str]:
    file = io.StringIO()
    compare(first, second, Console(file=file, width=width, _environ={}), View(**view))
    return file.getvalue().splitlines()


SLOW = pipeline(load=420, product=150, name="slow copies")


def test_two_traces_have_one_axis_side_by_side_and_stacked() -> None:
    beside = compared(pipeline(), SLOW, 160)
    assert beside[0].startswith("pipeline: 0 to 2,000 cycles")
    assert "│ slow copies: 0 to 2,000 cycles" in beside[0]
    left, right = beside[2].split("│")
    assert left.strip() == right.strip()
    stacked = compared(pipeline(), SLOW, 159)
    first, second = (i for i, line in enumerate(stacked) if "0 to 2,000 cycles" in line)
    assert stacked[first + 1 : first + 3] == stacked[second + 1 : second + 3]


def test_differences_by_hand() -> None:
    table = [line.split() for line in compared(pipeline(), SLOW, 80)[-11:-1]]
    assert table[0] == ["first", "second", "difference"]
    # 3 * 420 + 20 cycles of copies, then 150 + 100 + 150 of arithmetic.
    assert table[1] == ["cycles", "2,000", "1,680", "x", "0.840"]
    # 540 of 2000 and 1260 of 1680 cycles; 1500 of 2000 and 900 of 1680.
    assert table[2] == ["used:", "TMA", "27%", "75%", "+48", "points"]
    assert table[4] == ["used:", "tensor", "core", "75%", "54%", "-21", "points"]
    assert table[6] == ["critical", "path:", "mma", "75%", "18%", "-57", "points"]


def test_tracks_of_one_trace_alone_have_no_difference() -> None:
    lines = [line.split() for line in compared(pipeline(), EXAMPLE, 80)]
    assert ["used:", "MUFU", "15%", "-"] in lines
    # Over both CTAs' TMA: 50% and none.
    assert ["used:", "TMA", "27%", "25%", "-2", "points"] in lines


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (Trace("b", EXAMPLE.events, unit="ns"), "'pipeline' is in cycles and 'b' in ns"),
        (Trace("b"), "'b' has no events to compare"),
    ],
)
def test_traces_that_cannot_be_compared(second: Trace, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        compared(pipeline(), second, 80)


@st.composite
def views(draw: st.DrawFn) -> View:
    start = draw(st.none() | st.floats(0, 1e6))
    stop = draw(st.none() | st.floats(1, 1e6).map(lambda span: span + (start or 0)))
    return View(
        # A range may be given on both sides or none: one alone could be beyond the trace.
        start=start if stop is not None else None,
        stop=stop if start is not None else None,
        most=draw(st.none() | st.integers(1, 4)),
        names=draw(st.booleans()),
        critical=draw(st.booleans()),
        arrows=draw(st.integers(0, 60)),
        theme=draw(st.sampled_from(["dark", "light"])),
        now=draw(st.none() | st.floats(0, 1e6)),
    )


@given(
    traces(), traces(), views(), st.integers(20, 200), st.booleans(), st.booleans(), st.booleans()
)
def test_any_view_of_any_trace_fits(
    trace: Trace,
    other: Trace,
    view: View,
    width: int,
    ascii_only: bool,
    colour: bool,
    both: bool,
) -> None:
    file = AsciiFile() if ascii_only else io.StringIO()
    console = Console(file=file, width=width, force_terminal=colour, _environ={})
    if both and trace.events and other.events and trace.unit == other.unit:
        console.print(ComparisonView(trace, other, view))
    else:
        console.print(TraceView(trace, view))
    text = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())
    assert max(map(cell_len, text.split("\n"))) <= width
    assert text.isascii() or not ascii_only
    assert trace.events or both or "no events" in text


def test_the_range_is_told_however_long_the_name_is() -> None:
    trace = Trace("a long name, " * 9, EXAMPLE.events)
    for width in (40, 80):
        title = drawn(trace, width).splitlines()[0]
        assert title.startswith("a long name, ")
        assert title.endswith("…: 0 to 1,000 cycles")
        assert len(title) == width


def test_a_path_that_begins_late_says_of_how_much_it_is() -> None:
    late = Trace("late", (*EXAMPLE.events, Event("store", "store", SECOND, 1000, 250)))
    assert "critical path: 1,250 cycles, wait 80%" in drawn(late, critical=True)
    late = Trace("late", (*EXAMPLE.events, Event("store", "store", TMA, 1000, 250)))
    assert "critical path: 250 of 1,250 cycles, store 100%" in drawn(late, critical=True)
