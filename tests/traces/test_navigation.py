"""Windows never leave the trace; events are found in order and by what they say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipelines import MUFU, TENSOR, pipeline

from traces.events import Trace
from traces.navigation import Events, Window

WHOLE = Window.of(pipeline())


def test_pan_and_zoom_by_hand() -> None:
    assert (WHOLE.start, WHOLE.stop) == (0, 2000)
    half = WHOLE.zoomed(0.5)
    assert (half.start, half.stop) == (500, 1500)
    assert (half.panned(0.25).start, half.panned(-0.25).start) == (750, 250)
    assert (half.panned(9).start, half.panned(9).stop) == (1000, 2000)
    assert half.zoomed(0.5, 500).start == 500
    assert half.zoomed(9) == WHOLE == half.whole()


moves = st.lists(
    st.tuples(st.sampled_from(["pan", "zoom"]), st.floats(-3, 3), st.floats(0, 1)), max_size=30
)


@given(moves)
def test_windows_stay_within_and_never_vanish(steps: list[tuple[str, float, float]]) -> None:
    window = WHOLE
    for what, amount, share in steps:
        if what == "pan":
            before = window
            window = window.panned(amount)
            assert window.width == pytest.approx(before.width)
        else:
            centre = window.start + share * window.width
            window = window.zoomed(2**amount, centre)
            assert window.start - 1e-9 <= centre <= window.stop + 1e-9
        assert window.first <= window.start < window.stop <= window.last
        assert Window.of(pipeline(), window.start, window.stop).start == window.start


def test_events_in_order_of_time_around_the_ends() -> None:
    events = Events(pipeline(tiles=1))
    names = [events[place].name for place in range(len(events))]
    assert names == ["K0", "wait K0", "S0", "exp 0", "O0"]
    window = Window.of(pipeline(tiles=1))
    assert events.next(None, 1, window) == 0
    assert events.next(None, -1, window) == 4
    assert events.next(4, 1, window) == 0
    assert events.next(0, -1, window) == 4
    assert events.next(None, 1, window.zoomed(0.5)) == 2 + (window.zoomed(0.5).start > 200)
    assert Events(Trace("t")).next(None, 1, window) is None


def test_search() -> None:
    events = Events(pipeline(tiles=2))

    def found(text: str, index: int | None = None, step: int = 1) -> str | None:
        place = events.find(text, index, step)
        return None if place is None else events[place].name

    assert found("EXP") == "exp 0"
    first = events.find("exp", None, 1)
    assert found("exp", first) == "exp 1"
    assert found("exp", events.find("exp", first, 1)) == "exp 0"
    assert found("exp", None, -1) == "exp 1"
    assert found("bytes=16384") == "K0"
    assert found("barrier") == "wait K0"
    assert found("softmax") == "exp 0"
    assert found("nowhere") is None
    lone = events.find("wait K0", None, 1)
    assert events.find("wait K0", lone, 1) == lone


def test_what_is_critical() -> None:
    events = Events(pipeline(tiles=2))
    critical = {
        events[place].name for place in range(len(events)) if events.is_critical(events[place])
    }
    assert critical == {"K0", "wait K0", "S0", "exp 0", "O0", "S1", "exp 1", "O1"}


def test_a_window_follows_an_event() -> None:
    events = {event.name: event for event in pipeline().events}
    near = WHOLE.zoomed(0.1, 0)
    assert (near.start, near.stop) == (0, 200)
    assert near.showing(events["K0"]) == near
    moved = near.showing(events["exp 1"])
    assert events["exp 1"].track == MUFU
    assert (moved.start, moved.stop) == (950, 1150)
    assert events["O2"].track == TENSOR
    assert near.showing(events["O2"]).stop == 1850
