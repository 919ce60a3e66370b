"""The Trace Event file: what viewers need is there, and it reads back to an equal trace."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.chrome import from_chrome, load, save, to_chrome
from traces.events import KINDS, Counter, Event, Flow, Trace, TraceError, Track

TMA, WG1 = Track("CTA 0", "TMA"), Track("CTA 0", "warpgroup 1")
EXAMPLE = Trace(
    "flash_attention",
    events=(
        Event("K0", "load", TMA, 0, 200.5, {"bytes": 8192}),
        Event("wait K0", "wait", WG1, 0, 210),
        Event("QK", "mma", WG1, 210, 128),
    ),
    tracks=(WG1, TMA, Track("CTA 1", "TMA")),
    counters=(Counter("in flight", "CTA 0", ((0, 8192), (200.5, 0))),),
    flows=(Flow("K0", TMA, 200.5, WG1, 210),),
)


def test_golden_file() -> None:
    rows = to_chrome(EXAMPLE)["traceEvents"]
    metadata = [row for row in rows if row["ph"] == "M"]
    assert metadata[0] == {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "CTA 0"}}
    names = [row["args"]["name"] for row in metadata if row["name"] == "thread_name"]
    assert names == ["warpgroup 1", "TMA", "TMA"]
    order = [row["args"]["sort_index"] for row in metadata if row["name"] == "thread_sort_index"]
    assert order == sorted(order)
    assert [row for row in rows if row["ph"] == "X"][-1] == {
        "ph": "X",
        "name": "K0",
        "cat": "load",
        "cname": KINDS["load"].chrome,
        "pid": 1,
        "tid": 2,
        "ts": 0,
        "dur": 200.5,
        "args": {"bytes": 8192},
    }
    assert [row for row in rows if row["ph"] == "C"] == [
        {"ph": "C", "name": "in flight", "pid": 1, "ts": 0, "args": {"value": 8192}},
        {"ph": "C", "name": "in flight", "pid": 1, "ts": 200.5, "args": {"value": 0}},
    ]
    flow = {"name": "K0", "cat": "flow", "id": 1, "pid": 1}
    assert rows[-2:] == [
        flow | {"ph": "s", "tid": 2, "ts": 200.5},
        flow | {"ph": "f", "tid": 1, "ts": 210, "bp": "e"},
    ]


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    save(EXAMPLE, path)
    assert load(path) == EXAMPLE
    data = json.loads(path.read_text())
    assert data["metadata"] == {"name": "flash_attention", "time_unit": "cycles"}
    # The bare-list form has no place for the trace's name.
    assert from_chrome(data["traceEvents"]).events == EXAMPLE.events


times = st.floats(0, 1e9) | st.integers(0, 10**9)
text = st.text(max_size=8)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    tracks = draw(st.lists(st.builds(Track, text, text), min_size=1, max_size=5, unique=True))
    arguments = st.dictionaries(text, text | st.integers() | st.booleans() | times, max_size=3)
    events = []
    for track in tracks:
        ends = sorted(draw(st.lists(st.integers(0, 10**6), max_size=6, unique=True)))
        for start, stop in pairwise(ends):
            kind = draw(st.sampled_from(sorted(KINDS)))
            events.append(Event(draw(text), kind, track, start, stop - start, draw(arguments)))
    counters = [
        Counter(name, process, tuple((time, draw(times)) for time in sorted(moments)))
        for (name, process), moments in draw(
            st.dictionaries(
                st.tuples(text, text), st.lists(times, min_size=1, max_size=4), max_size=3
            )
        ).items()
    ]
    flows = []
    for _ in range(draw(st.integers(0, 3))):
        start, stop = sorted((draw(times), draw(times)))
        source, target = draw(st.sampled_from(tracks)), draw(st.sampled_from(tracks))
        flows.append(Flow(draw(text), source, start, target, stop))
    return Trace(draw(text), tuple(events), tuple(tracks), tuple(counters), tuple(flows))


@given(traces())
def test_any_trace_survives_json(trace: Trace) -> None:
    assert from_chrome(json.loads(json.dumps(to_chrome(trace), allow_nan=False))) == trace


def example_with(row: dict[str, Any]) -> dict[str, Any]:
    data = to_chrome(EXAMPLE)
    return data | {"traceEvents": [*data["traceEvents"], row]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "a list of events or an object"),
        ({"events": []}, "a list of events or an object"),
        ([7], r"traceEvents\[0\]: phase None"),
        ([{"ph": "B", "name": "x"}], r"traceEvents\[0\]: phase 'B' is none of M, X, C, s, f"),
        ([{"ph": "X", "name": "x", "pid": 1}], "'X' without cat, tid, ts, dur"),
        ([{"ph": "M", "name": "x", "pid": 1, "args": 3}], "args must be an object"),
        (
            [{"ph": "X", "name": "x", "cat": "load", "pid": 1, "tid": 7, "ts": 0, "dur": 1}],
            "pid 1 tid 7 unnamed",
        ),
        (
            example_with({"ph": "s", "name": "x", "id": 9, "pid": 1, "tid": 1, "ts": 0}),
            r"flows \[9\] have only one end",
        ),
        (
            example_with({"ph": "C", "name": "x", "pid": 1, "ts": 0, "args": {"a": 1, "b": 2}}),
            r"must have one value, not \['a', 'b'\]",
        ),
        (
            example_with(
                {"ph": "X", "name": "x", "cat": "load", "pid": 1, "tid": 1, "ts": "0", "dur": 1}
            ),
            "start must be an int or a float, not '0'",
        ),
    ],
)
def test_what_is_not_a_trace(data: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        from_chrome(data)


def test_a_file_that_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("{")
    with pytest.raises(TraceError, match=r"trace\.json is not JSON"):
        load(path)
