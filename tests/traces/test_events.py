"""The event model: canonical order, innermost segments, utilisation, clear refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.events import KINDS, Counter, Event, Flow, Trace, TraceError, Track

TMA, WG1 = Track("CTA 0", "TMA"), Track("CTA 0", "warpgroup 1")


def test_kinds_are_distinguishable_without_colour() -> None:
    for attribute in ("colour", "glyph", "sign"):
        assert len({getattr(kind, attribute) for kind in KINDS.values()}) == len(KINDS)
    assert all(len(kind.glyph) == 1 and kind.sign.isascii() for kind in KINDS.values())


def test_traces_have_one_order() -> None:
    other = Track("CTA 1", "TMA")
    events = [
        Event("b", "load", TMA, 10, 5),
        Event("x", "load", other, 0, 1),
        Event("mma", "mma", WG1, 3, 4),
        Event("inner", "load", TMA, 0, 2),
        Event("outer", "load", TMA, 0, 6),
    ]
    trace = Trace("t", tuple(events))
    assert trace.tracks == (TMA, WG1, other)
    assert [event.name for event in trace.events] == ["outer", "inner", "b", "mma", "x"]
    assert trace == Trace("t", tuple(events[:1] + events[3:] + events[1:3]), trace.tracks)
    assert (trace.start, trace.stop) == (0, 15)
    assert trace.processes == ("CTA 0", "CTA 1")


def test_tracks_may_be_empty_and_come_first() -> None:
    trace = Trace("t", (Event("k", "load", TMA, 0, 1),), tracks=(WG1,))
    assert trace.tracks == (WG1, TMA)
    assert trace.segments(WG1) == []
    assert trace.utilisation(WG1) == 0


def test_segments_are_the_innermost_events() -> None:
    tile = Event("tile", "compute", WG1, 0, 100)
    wait = Event("wait", "wait", WG1, 10, 30)
    barrier = Event("bar", "barrier", WG1, 20, 10)
    mma = Event("mma", "mma", WG1, 60, 40)
    trace = Trace("t", (mma, barrier, tile, wait))
    found = [(part.start, part.stop, part.event.name) for part in trace.segments(WG1)]
    assert found == [
        (0, 10, "tile"),
        (10, 20, "wait"),
        (20, 30, "bar"),
        (30, 40, "wait"),
        (40, 60, "tile"),
        (60, 100, "mma"),
    ]
    # Waiting and barriers are not use: 70 of 100 cycles.
    assert trace.utilisation(WG1) == pytest.approx(0.7)
    assert trace.utilisation(WG1, 20, 50) == pytest.approx(10 / 30)
    assert trace.utilisation(WG1, 50, 50) == 0


@st.composite
def nested(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Intervals over 0 to 40 of which any two are apart or one inside the other."""
    found: list[tuple[int, int]] = []
    for start, length in draw(
        st.lists(st.tuples(st.integers(0, 39), st.integers(1, 20)), max_size=12)
    ):
        stop = start + length
        apart_or_inside = all(
            stop <= a or b <= start or (a <= start and stop <= b) or (start <= a and b <= stop)
            for a, b in found
        )
        if apart_or_inside and (start, stop) not in found:
            found.append((start, stop))
    return found


@given(nested())
def test_segments_equal_a_walk_over_all_cycles(intervals: list[tuple[int, int]]) -> None:
    events = tuple(
        Event(f"{start}-{stop}", "mma", WG1, start, stop - start) for start, stop in intervals
    )
    at_cycle: dict[int, str] = {}
    for part in Trace("t", events).segments(WG1):
        for cycle in range(int(part.start), int(part.stop)):
            assert cycle not in at_cycle
            at_cycle[cycle] = part.event.name
    for cycle in range(60):
        around = [(stop - start, f"{start}-{stop}") for start, stop in intervals]
        inside = [
            name
            for (length, name), (start, stop) in sorted(zip(around, intervals, strict=True))
            if start <= cycle < stop
        ]
        assert at_cycle.get(cycle) == (inside[0] if inside else None)


def test_rounding_errors_of_sums_are_no_overlap() -> None:
    first = Event("a", "load", TMA, 0.1, 0.2)  # stops at 0.30000000000000004
    assert first.stop > 0.3
    trace = Trace("t", (first, Event("b", "load", TMA, 0.3, 1)))
    assert len(trace.segments(TMA)) == 2


@pytest.mark.parametrize(
    ("kind", "start", "duration", "message"),
    [
        ("gemm", 0, 1, "'gemm' is none of load, store"),
        ("load", -1, 1, "start must be finite and not negative, not -1"),
        ("load", 0, -2, "duration must be finite and not negative, not -2"),
        ("load", float("nan"), 1, "not nan"),
        ("load", 0, float("inf"), "not inf"),
        ("load", np.int64(3), 1, "must be an int or a float"),
    ],
)
def test_bad_events(kind: str, start: Any, duration: Any, message: str) -> None:
    with pytest.raises(TraceError, match=f"'K0' on CTA 0/TMA: .*{message}"):
        Event("K0", kind, TMA, start, duration)


@pytest.mark.parametrize("value", [float("nan"), None, [1]])
def test_bad_arguments(value: Any) -> None:
    with pytest.raises(TraceError, match="argument 'bytes'"):
        Event("K0", "load", TMA, 0, 1, {"bytes": value})


def test_bad_traces() -> None:
    overlap = (Event("a", "load", TMA, 0, 10), Event("b", "load", TMA, 5, 10))
    with pytest.raises(TraceError, match=r"CTA 0/TMA: 'a' \[0, 10\) and 'b' \[5, 15\)"):
        Trace("t", overlap)
    with pytest.raises(TraceError, match="CTA 0/warpgroup 1, which is no track"):
        Trace("t", overlap[:1], flows=(Flow("f", TMA, 0, WG1, 1),))
    with pytest.raises(TraceError, match="flow 'f' goes from 2 back to 1"):
        Flow("f", TMA, 2, WG1, 1)
    with pytest.raises(TraceError, match="time 1 comes after 2"):
        Counter("bytes", "CTA 0", ((2, 0), (1, 0)))
    with pytest.raises(TraceError, match="no samples"):
        Counter("bytes", "CTA 0", ())
    with pytest.raises(TraceError, match="nan at 0"):
        Counter("bytes", "CTA 0", ((0, float("nan")),))
    counter = Counter("bytes", "CTA 0", ((0, 1),))
    with pytest.raises(TraceError, match="two counters are named 'bytes'"):
        Trace("t", counters=(counter, counter))
    with pytest.raises(TraceError, match="trace 't': unit 'weeks' is none of cycles, ns, steps"):
        Trace("t", unit="weeks")


def test_units_tell_traces_apart() -> None:
    assert Trace("t").unit == "cycles"
    assert Trace("t", unit="ns") != Trace("t", unit="steps")


def test_segments_and_moments_of_a_range() -> None:
    events = [Event(f"e{n}", "mma", WG1, 10 * n, 5) for n in range(10)]
    mark = Event("mark", "barrier", WG1, 47, 0)
    trace = Trace("t", (*events, mark))
    assert [part.event.name for part in trace.segments(WG1, 25, 40)] == ["e3"]
    assert [part.event.name for part in trace.segments(WG1, 24, 40.5)] == ["e2", "e3", "e4"]
    assert trace.segments(WG1, 40, 20) == []
    assert trace.moments(WG1) == [mark]
    assert trace.moments(TMA) == []


def test_many_counters_are_compared_by_name_in_one_pass() -> None:
    # A comparison of every pair would take minutes.
    counters = tuple(Counter(f"c{n}", "CTA 0", ((0, 1),)) for n in range(50_000))
    assert len(Trace("t", counters=counters).counters) == 50_000
