"""The Trace Event file: what viewers need is there, and it reads back to an equal trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from pipelines import traces

from traces.chrome import Imported, from_chrome, load, read, save, to_chrome, validate
from traces.chrome_import import import_chrome
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
        # The copy's slice ends at 200.5, so that moment is outside; QK's starts at 210.
        flow | {"ph": "s", "tid": 2, "ts": 200, "args": {"time": 200.5}},
        flow | {"ph": "f", "tid": 1, "ts": 210, "bp": "e"},
    ]


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    save(EXAMPLE, path)
    assert load(path) == EXAMPLE
    assert read(path) == Imported(EXAMPLE, ())
    data = json.loads(path.read_text())
    assert data["metadata"] == {"name": "flash_attention", "time_unit": "cycles"}
    assert data["displayTimeUnit"] == "ns"


def test_the_bare_list_has_no_place_for_the_unit() -> None:
    """What is left is microseconds, as in any file."""
    trace = from_chrome(to_chrome(EXAMPLE)["traceEvents"])
    assert (trace.name, trace.unit) == ("trace", "ns")
    assert trace.tracks == EXAMPLE.tracks
    assert [event.start for event in trace.events] == [
        1000 * event.start for event in EXAMPLE.events
    ]


def slices_around(rows: list[dict[str, Any]], end: dict[str, Any]) -> list[str]:
    """As viewers bind an arrow: the slices of its thread with ts <= arrow < ts + dur."""
    return [
        row["name"]
        for row in rows
        if row["ph"] == "X"
        and (row["pid"], row["tid"]) == (end["pid"], end["tid"])
        and row["ts"] <= end["ts"] < row["ts"] + row["dur"]
    ]


@pytest.mark.parametrize(
    ("flow", "source", "target"),
    [
        # From the end of a copy to the wait that it ends and the product after it.
        (Flow("full", TMA, 200.5, WG1, 210), ["K0"], ["QK"]),
        (Flow("full", TMA, 200.5, WG1, 205), ["K0"], ["wait K0"]),
        # From the end of the last event into a wait that nothing follows.
        (Flow("empty", WG1, 338, TMA, 400), ["QK"], ["wait V0"]),
        # Both moments are ends: the head stays behind the tail.
        (Flow("empty", WG1, 338, Track("CTA 0", "late"), 338), ["QK"], ["short wait"]),
    ],
)
def test_arrows_bind_to_slices(flow: Flow, source: list[str], target: list[str]) -> None:
    more = (
        Event("wait V0", "wait", TMA, 300, 100),
        Event("short wait", "wait", Track("CTA 0", "late"), 337.25, 0.75),
    )
    trace = Trace("t", (*EXAMPLE.events, *more), flows=(flow,))
    rows = to_chrome(trace)["traceEvents"]
    tail, head = rows[-2:]
    assert slices_around(rows, tail) == source
    assert slices_around(rows, head) == target
    assert tail["ts"] <= head["ts"]
    assert from_chrome(to_chrome(trace)) == trace


@given(traces())
def test_any_trace_survives_json(trace: Trace) -> None:
    data = json.loads(json.dumps(to_chrome(trace), allow_nan=False))
    validate(data)
    assert import_chrome(data) == Imported(trace, ())


def row(phase: str, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "name": "x", "pid": 1, "tid": 1, "ts": 0} | fields


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "a list of events or an object"),
        ({"events": []}, "a list of events or an object"),
        ({"traceEvents": [], "displayTimeUnit": "us"}, 'displayTimeUnit must be "ms" or "ns"'),
        ({"traceEvents": [], "metadata": 3}, "metadata must be an object, not 3"),
        ([7], r"traceEvents\[0\]: an event is an object, not 7"),
        ([row("X", dur=1), row("Q")], r"traceEvents\[1\]: phase 'Q' is none of M, X, B, E"),
        ([row("X", dur=1) | {"ph": ["X"]}], r"traceEvents\[0\]: phase \['X'\] is none of M, X"),
        ([row("X", dur=1) | {"ph": {}}], r"traceEvents\[0\]: phase \{\} is none of M, X"),
        ([{"ph": "X", "name": "x", "pid": 1}], "'X' without tid, ts, dur"),
        ([{"ph": "M", "name": "x", "pid": 1}], "'M' without args"),
        ([row("s")], "'s' without id"),
        ([row("b")], "'b' without id"),
        ([row("M", args=3)], "'M': args must be an object, not 3"),
        ([row("M", name="thread_name", args={})], "thread_name: name must be text, not None"),
        (
            [row("M", name="process_sort_index", args={"sort_index": "1"})],
            "sort_index must be a finite number",
        ),
        ([row("X", ts="0", dur=1)], "ts must be a finite number of microseconds, not '0'"),
        ([row("X", ts=float("inf"), dur=1)], "ts must be a finite number of microseconds, not inf"),
        ([row("X", dur=-1)], "dur must be a number of microseconds, not negative, not -1"),
        ([row("X", dur=1, pid=[1])], r"pid must be a whole number or text, not \[1\]"),
        ([row("X", dur=1, name=7)], "name must be text, not 7"),
        ([row("X", dur=1, cat=None)], "cat must be text, not None"),
        ([row("C", args={})], "args must be an object of one or more finite numbers"),
        ([row("C", args={"a": "b"})], "args must be an object of one or more finite numbers"),
        ([row("f", id=1, bp="x")], "bp must be \"e\", not 'x'"),
        ([row("i", s="q")], 's must be "g", "p" or "t", not'),
        ({"traceEvents": [], "metadata": {"time_unit": "days"}}, "time_unit 'days' is none of"),
    ],
)
def test_what_is_not_a_trace(data: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        import_chrome(data)
    if "time_unit" not in message:
        with pytest.raises(TraceError, match=message):
            validate(data)


@pytest.mark.parametrize("text", ["{", "\ud800", "[" * 100_000])
def test_a_file_that_is_not_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(TraceError, match=r"trace\.json is not JSON"):
        load(path)


@pytest.mark.parametrize(
    "text", ["[{event}]", "\ufeff[{event}]", "[{event}", "[{event},\n", " [\n{event},"]
)
def test_a_list_may_lack_its_end_and_begin_with_a_mark(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text.replace("{event}", json.dumps(row("X", dur=1))), encoding="utf-8")
    assert len(load(path).events) == 1
    told = () if text.endswith("]") else ("the list of events lacks its end",)
    assert read(path).notes == told


@pytest.mark.parametrize("text", ['[{"ph": "X",', '{"traceEvents": [', "[1 2"])
def test_what_lacks_more_than_the_end_of_a_list_is_not_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TraceError, match=r"trace\.json is not JSON: .* \(char \d+\)"):
        load(path)


def test_an_error_of_a_file_names_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("3")
    with pytest.raises(TraceError, match=r"trace\.json: a trace is a list of events or an object"):
        read(path)
