"""Traces as Chrome Trace Event JSON, the format that Perfetto and chrome://tracing open.

A process is a pid and a track a tid, named and ordered by metadata events; events are complete
events ("X") whose category is the kind; counters are "C" and flows "s" to "f". The format counts
microseconds: one cycle is written as one, so viewers show cycles with the unit µs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from traces.events import KINDS, Counter, Event, Flow, Trace, TraceError, Track

Row = dict[str, Any]
_TIME_UNIT = "cycles"


def to_chrome(trace: Trace) -> dict[str, Any]:
    """The trace as a JSON-ready object; ``from_chrome`` gives an equal trace back."""
    pids = {process: number for number, process in enumerate(trace.processes, start=1)}
    tids = {track: number for number, track in enumerate(trace.tracks, start=1)}
    rows: list[Row] = []
    for process, pid in pids.items():
        rows.append(_metadata("process_name", {"name": process}, pid))
        rows.append(_metadata("process_sort_index", {"sort_index": pid}, pid))
    for track, tid in tids.items():
        pid = pids[track.process]
        rows.append(_metadata("thread_name", {"name": track.name}, pid, tid))
        rows.append(_metadata("thread_sort_index", {"sort_index": tid}, pid, tid))
    rows += [
        {
            "ph": "X",
            "name": event.name,
            "cat": event.kind,
            "cname": KINDS[event.kind].chrome,
            "pid": pids[event.track.process],
            "tid": tids[event.track],
            "ts": event.start,
            "dur": event.duration,
            "args": dict(event.args),
        }
        for event in trace.events
    ]
    for counter in trace.counters:
        rows += [
            {
                "ph": "C",
                "name": counter.name,
                "pid": pids[counter.process],
                "ts": time,
                "args": {"value": value},
            }
            for time, value in counter.samples
        ]
    for number, flow in enumerate(trace.flows, start=1):
        ends = (("s", flow.source, flow.source_time), ("f", flow.target, flow.target_time))
        for phase, track, time in ends:
            row = {
                "ph": phase,
                "name": flow.name,
                "cat": "flow",
                "id": number,
                "pid": pids[track.process],
                "tid": tids[track],
                "ts": time,
            }
            # Binds the arrow's head to the event around it, not to the next one that starts.
            rows.append(row | ({"bp": "e"} if phase == "f" else {}))
    return {
        "traceEvents": rows,
        "displayTimeUnit": "ns",
        "metadata": {"name": trace.name, "time_unit": _TIME_UNIT},
    }


def from_chrome(data: Any) -> Trace:
    """The trace of parsed JSON in either form of the format (object or bare list of events).

    Reads what ``to_chrome`` writes; TraceError names the first event that is something else.
    """
    rows, name = _rows(data)
    names = {
        (row["name"], row.get("pid"), row.get("tid")): row["args"]
        for _, row in _of_phase(rows, "M")
    }
    tracks = {
        (pid, tid): Track(_process(names, pid), str(args.get("name", f"thread {tid}")))
        for (what, pid, tid), args in names.items()
        if what == "thread_name"
    }

    def track_of(number: int, row: Row) -> Track:
        found = tracks.get((row["pid"], row["tid"]))
        if found is None:
            raise TraceError(f"traceEvents[{number}]: pid {row['pid']} tid {row['tid']} unnamed")
        return found

    def sort_index(key: tuple[Any, Any]) -> tuple[float, float]:
        process = names.get(("process_sort_index", key[0], None), {})
        thread = names.get(("thread_sort_index", *key), {})
        return process.get("sort_index", 0), thread.get("sort_index", 0)

    return Trace(
        name=name,
        tracks=tuple(tracks[key] for key in sorted(tracks, key=sort_index)),
        events=tuple(
            Event(
                row["name"],
                row["cat"],
                track_of(number, row),
                row["ts"],
                row["dur"],
                row.get("args", {}),
            )
            for number, row in _of_phase(rows, "X")
        ),
        counters=_counters(rows, names),
        flows=tuple(
            Flow(tail["name"], track_of(i, tail), tail["ts"], track_of(j, head), head["ts"])
            for (i, tail), (j, head) in _arrows(rows)
        ),
    )


def save(trace: Trace, path: str | Path) -> None:
    """Writes the trace to a .json file for ui.perfetto.dev."""
    Path(path).write_text(json.dumps(to_chrome(trace), allow_nan=False), encoding="utf-8")


def load(path: str | Path) -> Trace:
    """Reads a trace that ``save`` wrote; TraceError if the file holds something else."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise TraceError(f"{path} is not JSON: {error}") from error
    return from_chrome(data)


def _metadata(what: str, args: Row, pid: int, tid: int | None = None) -> Row:
    row = {"ph": "M", "name": what, "pid": pid, "args": args}
    return row if tid is None else row | {"tid": tid}


# Fields that each phase must have.
_FIELDS = {
    "M": ("name", "pid", "args"),
    "X": ("name", "cat", "pid", "tid", "ts", "dur"),
    "C": ("name", "pid", "ts", "args"),
    "s": ("name", "id", "pid", "tid", "ts"),
    "f": ("name", "id", "pid", "tid", "ts"),
}


def _rows(data: Any) -> tuple[list[Row], str]:
    """The checked events and the trace's name."""
    rows, metadata = data, {}
    if isinstance(data, Mapping):
        rows, metadata = data.get("traceEvents"), data.get("metadata", {})
    if not isinstance(rows, list):
        raise TraceError("a trace is a list of events or an object with the list traceEvents")
    for number, row in enumerate(rows):
        phase = row.get("ph") if isinstance(row, Mapping) else None
        if phase not in _FIELDS:
            raise TraceError(
                f"traceEvents[{number}]: phase {phase!r} is none of {', '.join(_FIELDS)}"
            )
        missing = [name for name in _FIELDS[phase] if name not in row]
        if missing:
            raise TraceError(f"traceEvents[{number}]: {phase!r} without {', '.join(missing)}")
        if not isinstance(row.get("args", {}), Mapping):
            raise TraceError(f"traceEvents[{number}]: args must be an object, not {row['args']!r}")
    return rows, str(metadata.get("name", "trace"))


def _of_phase(rows: list[Row], phase: str) -> Iterator[tuple[int, Row]]:
    return ((number, row) for number, row in enumerate(rows) if row["ph"] == phase)


def _process(names: Mapping[tuple[str, Any, Any], Row], pid: Any) -> str:
    return str(names.get(("process_name", pid, None), {}).get("name", f"process {pid}"))


def _counters(rows: list[Row], names: Mapping[tuple[str, Any, Any], Row]) -> tuple[Counter, ...]:
    samples: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number, row in _of_phase(rows, "C"):
        if set(row["args"]) != {"value"}:
            raise TraceError(
                f"traceEvents[{number}]: counter {row['name']!r} must have one value, "
                f"not {sorted(row['args'])}"
            )
        key = (row["name"], _process(names, row["pid"]))
        samples.setdefault(key, []).append((row["ts"], row["args"]["value"]))
    return tuple(Counter(*key, tuple(values)) for key, values in samples.items())


def _arrows(rows: list[Row]) -> Iterator[tuple[tuple[int, Row], tuple[int, Row]]]:
    """Pairs each flow's tail with its head."""
    heads = {row["id"]: (number, row) for number, row in _of_phase(rows, "f")}
    tails = {row["id"]: (number, row) for number, row in _of_phase(rows, "s")}
    if heads.keys() != tails.keys():
        lone = sorted(heads.keys() ^ tails.keys(), key=str)
        raise TraceError(f"flows {lone} have only one end")
    return ((tail, heads[key]) for key, tail in tails.items())
