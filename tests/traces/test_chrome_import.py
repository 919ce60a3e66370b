"""Files of other tools: every phase, missing names, overlaps, and what is left out is told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from traces.chrome import from_chrome, to_chrome
from traces.chrome_import import import_chrome
from traces.events import Counter, Event, Flow, TraceError, Track

THREAD = Track("process 1", "thread 2")


def row(phase: str, ts: float = 0, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "name": "x", "pid": 1, "tid": 2, "ts": ts} | fields


def events(*rows: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    """Name, track, start and stop of what is read, in nanoseconds."""
    found = import_chrome(list(rows))
    assert found.notes == ()
    return [(event.name, event.track.name, event.start, event.stop) for event in found.trace.events]


def test_microseconds_become_nanoseconds_from_the_first_event_on() -> None:
    epoch = 1.7e15  # microseconds since 1970, to a quarter of which a float is exact
    trace = import_chrome([row("X", epoch + 1.25, dur=0.5), row("X", epoch, dur=1)]).trace
    assert trace.unit == "ns"
    assert [(event.start, event.duration) for event in trace.events] == [(0, 1000), (1250, 500)]


def test_rounding_of_microseconds_is_no_overlap() -> None:
    # 0.1 + 0.2 is above 0.3 in floating point.
    assert events(row("X", 0, dur=0.1), row("X", 0.1, dur=0.2), row("X", 0.3, dur=0.1)) == [
        ("x", "thread 2", 0, 100),
        ("x", "thread 2", 100, 300),
        ("x", "thread 2", 300, 400),
    ]


def test_begin_and_end_in_any_order_of_the_file() -> None:
    rows = [
        row("E", 9),
        row("B", 0, name="outer", args={"a": 1}),
        row("B", 2, name="inner"),
        row("E", 5, name="inner", args={"b": 2}),
    ]
    assert events(*rows) == [
        ("outer", "thread 2", 0, 9000),
        ("inner", "thread 2", 2000, 5000),
    ]
    outer, inner = from_chrome(rows).events
    assert (outer.args, inner.args) == ({"a": 1}, {"b": 2})


@pytest.mark.parametrize("phase", ["i", "I"])
def test_instants(phase: str) -> None:
    (event,) = from_chrome([row(phase, 3, s="t", cat="barrier")]).events
    assert event == Event("x", "barrier", THREAD, 0, 0, {"scope": "t"})
    everywhere = row(phase, s="g")
    del everywhere["tid"]
    assert from_chrome([everywhere]).tracks == (Track("process 1", "events of the process"),)


@pytest.mark.parametrize(("begin", "step", "end"), ["bne", "STF", "SpF"])
def test_asynchronous_events_nest_by_id_and_overlap_on_further_tracks(
    begin: str, step: str, end: str
) -> None:
    common = {"cat": "net"}
    rows = [
        row(begin, 0, id=1, name="a", **common),
        row(begin, 1, id=2, name="b", **common),
        row(step, 2, id=2, name="got", **common),
        row(end, 3, id=1, name="a", **common),
        row(end, 5, id=2, name="b", **common),
    ]
    assert events(*rows) == [
        ("a", "async net", 0, 3000),
        ("got", "async net", 2000, 2000),
        ("b", "async net #2", 1000, 5000),
    ]
    assert [event.args["id"] for event in from_chrome(rows).events] == [1, 2, 2]


def test_local_ids_are_of_their_process() -> None:
    rows = [
        row("b", 0, id2={"local": "0x1"}),
        row("b", 1, id2={"local": "0x1"}, pid=7),
        row("e", 2, id2={"local": "0x1"}),
        row("e", 4, id2={"local": "0x1"}, pid=7),
    ]
    assert [(start, stop) for _, _, start, stop in events(*rows)] == [(0, 2000), (1000, 4000)]


def test_overlaps_move_to_further_tracks() -> None:
    rows = [row("X", 0, dur=10), row("X", 5, dur=10), row("X", 6, dur=1), row("X", 15, dur=1)]
    assert events(*rows) == [
        ("x", "thread 2", 0, 10000),
        ("x", "thread 2", 6000, 7000),
        ("x", "thread 2", 15000, 16000),
        ("x", "thread 2 #2", 5000, 15000),
    ]


def test_kinds_and_arguments_that_there_are_not() -> None:
    args = {"shape": [1, 2], "none": None, "big": float("inf"), "flag": True}
    (event,) = from_chrome([row("X", dur=1, cat="cuda_runtime", args=args)]).events
    assert event.kind == "compute"
    assert event.args == {
        "cat": "cuda_runtime",
        "shape": "[1, 2]",
        "none": "null",
        "big": "inf",
        "flag": True,
    }


def test_counters_with_series_ids_and_disorder() -> None:
    rows = [
        row("C", 2, name="bytes", args={"read": 4, "written": 1}),
        row("C", 1, name="bytes", args={"read": 3}),
        row("C", 1, name="bytes", args={"value": 9}, id="gpu"),
    ]
    assert from_chrome(rows).counters == (
        Counter("bytes read", "process 1", ((0, 3), (1000, 4))),
        Counter("bytes gpu", "process 1", ((0, 9),)),
        Counter("bytes written", "process 1", ((1000, 1),)),
    )


def test_flows_with_steps_and_ids_used_again() -> None:
    second = Track("process 1", "thread 3")
    rows = [
        row("s", 0, id=1, cat="a"),
        row("t", 1, id=1, cat="a", tid=3),
        row("f", 2, id=1, cat="a"),
        row("s", 5, id=1, cat="a"),
        row("f", 6, id=1, cat="a", tid=3),
        row("s", 0, id=1, cat="b", name="y"),
        row("f", 9, id=1, cat="b", name="y"),
    ]
    assert from_chrome(rows).flows == (
        Flow("x", THREAD, 0, second, 1000),
        Flow("x", second, 1000, THREAD, 2000),
        Flow("x", THREAD, 5000, second, 6000),
        Flow("y", THREAD, 0, THREAD, 9000),
    )


def metadata(what: str, pid: Any, tid: Any = None, **args: Any) -> dict[str, Any]:
    place = {"pid": pid} if tid is None else {"pid": pid, "tid": tid}
    return {"ph": "M", "name": what, **place, "args": args}


def test_names_labels_order_and_pids_of_text() -> None:
    rows = [
        metadata("process_name", "Spans", name="python"),
        metadata("process_name", 7, name="python"),
        metadata("process_name", 8, name="python"),
        metadata("process_labels", 8, labels="GPU 0"),
        metadata("process_sort_index", 7, sort_index=-1),
        metadata("thread_name", 7, 1, name="stream"),
        metadata("thread_name", 7, 2, name="stream"),
        metadata("thread_sort_index", 7, 1, sort_index=5),
        row("X", dur=1, pid="Spans", tid="main"),
        row("X", dur=1, pid=8, tid=0),
    ]
    assert from_chrome(rows).tracks == (
        Track("python", "stream"),
        Track("python", "stream (1)"),
        Track("python (Spans)", "thread main"),
        Track("python (GPU 0)", "thread 0"),
    )


def test_what_is_left_out_is_told() -> None:
    rows = [
        *({"ph": phase, "ts": -5} for phase in "PPNODRc"),
        metadata("clock_sync", 1),
        row("X", 0, dur=4),
        row("E", 0),
        row("B", 1),
        row("s", 0, id=1),
        row("f", 0, id=2),
    ]
    found = import_chrome(rows)
    assert sorted(found.notes) == [
        "B without its end lasts to the end of the trace: 1",
        "E without its begin left out: 1",
        "flow end without its start left out: 1",
        "flow start without its end left out: 1",
        "metadata clock_sync left out: 1",
        "phase D (object deletion) left out: 1",
        "phase N (object creation) left out: 1",
        "phase O (object snapshot) left out: 1",
        "phase P (sample) left out: 2",
        "phase R (mark) left out: 1",
        "phase c (clock synchronisation) left out: 1",
    ]
    assert [(event.start, event.stop) for event in found.trace.events] == [(0, 4000), (1000, 4000)]
    with pytest.warns(UserWarning, match=r"phase P \(sample\) left out: 2"):
        from_chrome(rows)


def test_an_empty_file() -> None:
    assert import_chrome([]).trace.events == ()


_NUMBERS = st.integers(-5, 20) | st.floats() | st.just(10**400)
_ANY = st.none() | st.booleans() | st.text(max_size=2) | _NUMBERS | st.lists(st.integers(0, 1))
_FIELDS = {
    "ph": st.sampled_from("MXBEiICbneSTpFstfPNODRcq"),
    "name": st.sampled_from(["x", "thread_name", "process_name", "process_sort_index"]),
    "cat": st.sampled_from(["load", "other"]),
    "pid": st.integers(0, 1) | st.just("p"),
    "tid": st.integers(0, 1) | st.just("t"),
    "ts": _NUMBERS,
    "dur": _NUMBERS,
    "id": st.integers(0, 1),
    "id2": st.fixed_dictionaries({}, optional={"local": _ANY, "global": _ANY}),
    "args": st.dictionaries(
        st.sampled_from(["name", "value", "time", "sort_index", "labels"]), _ANY, max_size=3
    ),
    "s": st.sampled_from("gpt"),
    "bp": st.just("e"),
}
# Mostly rows as they should be, some with fields that are missing or odd.
_ROWS = st.fixed_dictionaries(_FIELDS) | st.fixed_dictionaries({}, optional=_FIELDS | {"ts": _ANY})
_METADATA = st.just({}) | st.just({"time_unit": "cycles"})


@given(st.lists(_ROWS, max_size=6), _METADATA)
def test_any_rows_are_read_or_refused_by_name(
    rows: list[dict[str, Any]], extra: dict[str, str]
) -> None:
    data = {"traceEvents": rows, "metadata": extra}
    try:
        found = import_chrome(data)
    except TraceError as error:
        event(f"refused: {'a rule' if 'traceEvents[' in str(error) else 'a value'}")
        return
    event("read")
    assert import_chrome(to_chrome(found.trace)).trace == found.trace


def test_what_a_file_has_besides_events_is_told() -> None:
    data = {"traceEvents": [row("X", dur=1)], "displayTimeUnit": "ms", "metadata": {"a": 1},
            "otherData": {"version": "1"}, "stackFrames": {}}  # fmt: skip
    assert import_chrome(data).notes == ("otherData left out: 1", "stackFrames left out: 1")
