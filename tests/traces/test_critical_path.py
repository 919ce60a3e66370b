"""The critical path: by hand, on schedules that follow from their dependencies, on any trace."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from pipelines import BARRIER, MUFU, TENSOR, TMA, pipeline, traces

from traces.critical_path import IDLE, critical_path
from traces.dependencies import lanes, waited_for
from traces.events import KINDS, Event, Flow, Trace, Track


def told(trace: Trace) -> list[tuple[str, float, float]]:
    path = critical_path(trace)
    return [(step.event.name if step.event else IDLE, step.start, step.stop) for step in path.steps]


def test_a_pipeline_by_hand() -> None:
    path = critical_path(pipeline(tiles=2))
    # The first copy, 20 cycles until that is known, then everything in turn: the second copy
    # arrived long ago.
    assert told(pipeline(tiles=2)) == [
        ("K0", 0, 180),
        ("wait K0", 180, 200),
        ("S0", 200, 450),
        ("exp 0", 450, 550),
        ("O0", 550, 800),
        ("S1", 800, 1050),
        ("exp 1", 1050, 1150),
        ("O1", 1150, 1400),
    ]
    assert path.length == 1400
    assert path.by_kind == {"mma": 1000, "softmax": 200, "load": 180, "wait": 20}
    assert path.by_track == {TENSOR: 1000, MUFU: 200, TMA: 180, BARRIER: 20}
    assert [flow.name for flow in path.flows] == ["full 0", "go 0", "S0", "P0", "S1", "P1"]


def test_slow_copies_take_the_path() -> None:
    path = critical_path(pipeline(tiles=3, load=700, product=100))
    # 300 cycles of arithmetic fit under the next copy.
    assert path.by_kind == {"load": 2100, "mma": 200, "softmax": 100, "wait": 20}


def test_a_wait_that_was_over_before_it_began_is_waited_in_full() -> None:
    a, b = Track("p", "a"), Track("p", "b")
    events = (
        Event("copy", "load", a, 0, 10),
        Event("work", "mma", b, 0, 20),
        Event("wait", "wait", b, 20, 5),
        Event("more", "mma", b, 25, 5),
    )
    trace = Trace("t", events, flows=(Flow("early", a, 10, b, 25),))
    assert told(trace) == [("work", 0, 20), ("wait", 20, 25), ("more", 25, 30)]


def test_a_wait_that_begins_when_its_copy_ends_or_later() -> None:
    a, b = Track("p", "a"), Track("p", "b")
    for late in (0, 3):
        events = (
            Event("copy", "load", a, 0, 10),
            Event("wait", "wait", b, 10 + late, 2),
            Event("more", "mma", b, 12 + late, 5),
        )
        flows = (Flow("f", a, 10, b, 12 + late),)
        idle = [(IDLE, 10, 13)] if late else []
        assert told(Trace("t", events, flows=flows)) == [
            ("copy", 0, 10),
            *idle,
            ("wait", 10 + late, 12 + late),
            ("more", 12 + late, 17 + late),
        ]


def test_the_last_of_several_arrivals_releases_a_barrier() -> None:
    a, b, c = (Track("p", name) for name in "abc")
    events = (
        Event("early", "mma", a, 0, 10),
        Event("late", "mma", b, 5, 25),
        Event("barrier", "barrier", c, 0, 32),
        Event("next", "mma", c, 32, 8),
    )
    flows = (Flow("a", a, 10, c, 32), Flow("b", b, 30, c, 31))
    assert told(Trace("t", events, flows=flows)) == [
        ("late", 5, 30),
        ("barrier", 30, 32),
        ("next", 32, 40),
    ]


def test_gaps_that_nothing_explains_are_idle() -> None:
    a = Track("p", "a")
    trace = Trace("t", (Event("x", "mma", a, 3, 4), Event("y", "mma", a, 9, 1)))
    assert told(trace) == [("x", 3, 7), (IDLE, 7, 9), ("y", 9, 10)]
    assert critical_path(trace).by_kind == {"mma": 5, IDLE: 2}


def test_a_flow_without_a_wait_leaves_its_latency_idle() -> None:
    a, b = Track("p", "a"), Track("p", "b")
    events = (Event("x", "load", a, 0, 5), Event("y", "mma", b, 8, 2))
    assert told(Trace("t", events, flows=(Flow("f", a, 5, b, 8),))) == [
        ("x", 0, 5),
        (IDLE, 5, 8),
        ("y", 8, 10),
    ]


def test_events_within_events() -> None:
    a, b = Track("p", "a"), Track("p", "b")
    events = (
        Event("tile", "compute", a, 0, 100),
        Event("wait", "wait", a, 20, 30),
        Event("copy", "load", b, 10, 35),
    )
    trace = Trace("t", events, flows=(Flow("f", b, 45, a, 50),))
    assert told(trace) == [("copy", 10, 45), ("wait", 45, 50), ("tile", 50, 100)]


def test_a_path_may_leave_an_event_before_its_end() -> None:
    a, b = Track("p", "a"), Track("p", "b")
    events = (Event("producer", "compute", a, 0, 50), Event("y", "mma", b, 30, 40))
    assert told(Trace("t", events, flows=(Flow("f", a, 30, b, 30),))) == [
        ("producer", 0, 30),
        ("y", 30, 70),
    ]


def test_moments_that_wait_for_each_other_end() -> None:
    a, b = Track("p", "a"), Track("p", "b")
    events = (Event("x", "barrier", a, 5, 0), Event("y", "barrier", b, 5, 0))
    flows = (Flow("there", a, 5, b, 5), Flow("back", b, 5, a, 5))
    path = critical_path(Trace("t", events, flows=flows))
    assert path.length == 0
    assert path.events[-1].stop == 5


def test_nothing() -> None:
    path = critical_path(Trace("t"))
    assert (path.steps, path.length, path.by_kind) == ((), 0.0, {})


@st.composite
def schedules(draw: st.DrawFn) -> Trace:
    """Tasks that start as soon as what they depend on allows, with an arrow for each dependency; a
    task may show its waiting as an event.
    """
    tracks = [Track("p", name) for name in "abcd"]
    free = dict.fromkeys(tracks, 0)
    tasks: list[Event] = []
    events: list[Event] = []
    flows: list[Flow] = []
    for number in range(draw(st.integers(1, 14))):
        track = draw(st.sampled_from(tracks))
        needs = draw(st.lists(st.sampled_from(tasks), max_size=3)) if tasks else []
        start = max([free[track], *(task.stop for task in needs)])
        if start > free[track] and draw(st.booleans()):
            events.append(Event(f"wait {number}", "wait", track, free[track], start - free[track]))
        task = Event(f"task {number}", "mma", track, start, draw(st.integers(1, 9)))
        flows += [Flow("need", need.track, need.stop, track, start) for need in needs]
        tasks.append(task)
        events.append(task)
        free[track] = int(task.stop)
    return Trace("t", tuple(events), flows=tuple(flows))


@given(schedules())
def test_where_all_is_explained_the_path_is_work_from_start_to_end(trace: Trace) -> None:
    path = critical_path(trace)
    event(f"flows on the path: {len(path.flows)}")
    assert path.length == trace.stop
    assert {step.kind for step in path.steps if step.duration} == {"mma"}


@given(traces() | schedules())
def test_of_any_trace(trace: Trace) -> None:
    path = critical_path(trace)
    if not trace.events:
        assert path.steps == ()
        return
    assert path.steps[-1].stop == trace.stop
    assert 0 <= path.length <= trace.stop
    for before, after in pairwise(path.steps):
        assert before.stop == after.start
        if before.track != after.track:
            assert any(
                (flow.source, flow.target) == (before.track, after.track)
                and flow.source_time == before.stop
                for flow in path.flows
            )
    for step in path.steps:
        assert step.start <= step.stop
        if step.event is not None:
            assert step.event.track == step.track
            assert step.event.start <= step.start <= step.stop <= step.event.stop
    for sums in (path.by_kind, path.by_track):
        assert sum(sums.values()) == pytest.approx(path.length)


@given(traces())
def test_what_an_event_waited_for_arrived_by_then(trace: Trace) -> None:
    by_track = lanes(trace)
    for one in trace.events:
        for dependency in waited_for(one, by_track):
            assert dependency.flow.target == one.track
            until = one.start if KINDS[one.kind].busy else one.stop
            assert dependency.flow.target_time <= until
            source = dependency.source
            if source is not None:
                assert source.track == dependency.flow.source
                assert source.start <= dependency.flow.source_time <= source.stop


def test_what_events_waited_for_by_hand() -> None:
    trace = pipeline(tiles=2)
    by_name = {one.name: one for one in trace.events}
    by_track = lanes(trace)

    def found(name: str) -> list[tuple[str, str | None]]:
        dependencies = waited_for(by_name[name], by_track)
        return [(one.flow.name, one.source.name if one.source else None) for one in dependencies]

    assert found("K0") == []
    assert found("wait K0") == [("full 0", "K0")]
    assert found("S0") == [("go 0", "wait K0")]
    assert found("exp 0") == [("S0", "S0")]
    assert found("O1") == [("P1", "exp 1")]


def test_two_hundred_thousand_events() -> None:
    """Fast enough for a viewer: a walk that looked at all events in each step would never end."""
    tracks = [Track(f"SM {sm}", "unit") for sm in range(100)]
    events = [
        Event("e", "mma", track, 10.0 * place, 9.5) for track in tracks for place in range(2000)
    ]
    flows = [
        Flow(
            "f",
            tracks[place % 100],
            10.0 * place + 9.5,
            tracks[(place + 1) % 100],
            10.0 * place + 10,
        )
        for place in range(1999)
    ]
    path = critical_path(Trace("big", tuple(events), flows=tuple(flows)))
    assert len(path.events) == 2000
    assert path.length == 10 * 1999 + 9.5
