"""Reads Chrome Trace Event JSON, what simkit writes and what other tools do, into a trace.

Files without ``metadata.time_unit`` are other tools': their microseconds become nanoseconds from
the file's first event on. What a `Trace` has no place for is counted and told, never dropped
silently: `Imported.notes`.
"""

from __future__ import annotations

import json
import math
from collections import Counter as Count
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from traces.chrome_export import MOMENT
from traces.chrome_names import Names, Place
from traces.chrome_rules import IGNORED, OLD_ASYNC, Row, checked_rows, is_number
from traces.events import (
    KINDS,
    UNITS,
    ArgValue,
    Counter,
    Event,
    Flow,
    Trace,
    TraceError,
    rounding_slack,
)

_NS_PER_US = 1000.0
_NS_DIGITS = 3  # after the point: beyond, a microsecond in floating point is noise
_FIELDS = ("traceEvents", "displayTimeUnit", "metadata")  # of a file, that a trace has a place for
_OTHER = "compute"  # the kind of events whose category is no kind


@dataclass(frozen=True)
class Imported:
    """A trace from a file. ``notes``: what was left out or completed, each a short phrase."""

    trace: Trace
    notes: tuple[str, ...]


def import_chrome(data: Any, name: str = "trace") -> Imported:
    """The trace of parsed JSON in either form of the format; ``name`` if the file has none.

    TraceError names the first event that breaks a rule of the format.
    """
    rows = checked_rows(data)
    metadata = data.get("metadata", {}) if isinstance(data, Mapping) else {}
    found = _Import(rows, metadata)
    if isinstance(data, Mapping):
        found.told.update(f"{key} left out" for key in data if key not in _FIELDS)
    return found.result(str(metadata.get("name", name)))


@dataclass(frozen=True)
class _Span:
    """An event on its way: where and when, before its track is known."""

    place: Place
    start: float
    duration: float
    row: Row
    args: Mapping[str, Any]

    @property
    def stop(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class _End:
    """One end of an arrow, or a step on its way."""

    time: float
    phase: str
    place: Place


class _Clock:
    """Times of the file as times of the trace. ``own``: whether simkit wrote the file."""

    def __init__(self, times: Iterator[float], metadata: Row) -> None:
        self.unit = metadata.get("time_unit", "ns")
        self.own = "time_unit" in metadata
        if self.unit not in UNITS:
            raise TraceError(f"metadata: time_unit {self.unit!r} is none of {', '.join(UNITS)}")
        self.origin = 0.0 if self.own else min(times, default=0.0)

    def __call__(self, time: float) -> float:
        if self.own:
            return time
        return round((time - self.origin) * _NS_PER_US, _NS_DIGITS)


class _Import:
    """Collects what rows say, phase by phase, then puts it together."""

    def __init__(self, rows: list[Row], metadata: Row) -> None:
        self.told: Count[str] = Count()
        self.names = Names(row for row in rows if row["ph"] == "M")
        self.told.update(f"metadata {name} left out" for name in self.names.unknown)
        ignored = (row["ph"] for row in rows if row["ph"] in IGNORED)
        self.told.update(f"phase {phase} ({IGNORED[phase]}) left out" for phase in ignored)
        self.rows = [row for row in rows if row["ph"] not in IGNORED and row["ph"] != "M"]
        self.clock = _Clock((row["ts"] for row in self.rows), metadata)
        if not self.clock.own:
            # What ends belongs to what began before, whatever the order in the file.
            self.rows.sort(key=lambda row: row["ts"])
        self.spans: list[_Span] = []
        self.open: dict[Hashable, list[tuple[Place, Row]]] = {}
        self.samples: dict[tuple[Any, str], list[tuple[float, float]]] = {}
        self.arrows: dict[Hashable, list[_End]] = {}
        self.arrow_names: dict[Hashable, str] = {}

    def result(self, name: str) -> Imported:
        for row in self.rows:
            phase: str = row["ph"]
            _READ[OLD_ASYNC.get(phase, phase)](self, row)
        self._close_all()
        ends = [end.place for each in self.arrows.values() for end in each]
        self.names.add([*(span.place for span in self.spans), *ends])
        trace = Trace(
            name=name,
            events=tuple(self._events()),
            tracks=self.names.tracks(),
            counters=tuple(
                Counter(what, self.names.process(pid), tuple(samples))
                for (pid, what), samples in self.samples.items()
            ),
            flows=tuple(self._flows()),
            unit=self.clock.unit,
        )
        return Imported(trace, tuple(f"{what}: {count}" for what, count in self.told.items()))

    def complete(self, row: Row) -> None:
        start = self.clock(row["ts"])
        own = self.clock.own
        duration = row["dur"] if own else self.clock(row["ts"] + row["dur"]) - start
        self._add(_thread(row), start, duration, row)

    def instant(self, row: Row) -> None:
        place = _thread(row) if "tid" in row else Place(row["pid"], None, "events of the process")
        self._add(place, self.clock(row["ts"]), 0, row, {"scope": row["s"]} if "s" in row else {})

    def begin(self, row: Row) -> None:
        self.open.setdefault(_thread(row), []).append((_thread(row), row))

    def end(self, row: Row) -> None:
        self._close(_thread(row), row)

    def begin_async(self, row: Row) -> None:
        self.open.setdefault(_async_key(row), []).append((_async_place(row), row))

    def instant_async(self, row: Row) -> None:
        self._add(_async_place(row), self.clock(row["ts"]), 0, row, {"id": _id(row)})

    def end_async(self, row: Row) -> None:
        self._close(_async_key(row), row)

    def sample(self, row: Row) -> None:
        what = row["name"] if "id" not in row else f"{row['name']} {row['id']}"
        for series, value in row["args"].items():
            name = what if series == "value" else f"{what} {series}"
            self.samples.setdefault((row["pid"], name), []).append((self.clock(row["ts"]), value))

    def arrow(self, row: Row) -> None:
        time = self.clock(row["ts"])
        moment = row.get("args", {}).get(MOMENT)
        if self.clock.own and is_number(moment):
            time = moment
        key = (row.get("cat"), _id(row))
        self.arrow_names.setdefault(key, row["name"])
        self.arrows.setdefault(key, []).append(_End(time, row["ph"], _thread(row)))

    def _close(self, key: Hashable, end: Row) -> None:
        begun = self.open.get(key)
        if not begun:
            self.told[f"{end['ph']} without its begin left out"] += 1
            return
        place, row = begun.pop()
        self._add_pair(place, row, end["ts"], end.get("args", {}))

    def _close_all(self) -> None:
        last = max((row["ts"] + row.get("dur", 0) for row in self.rows), default=0)
        for begun in self.open.values():
            for place, row in begun:
                self.told[f"{row['ph']} without its end lasts to the end of the trace"] += 1
                self._add_pair(place, row, last, {})

    def _add_pair(self, place: Place, row: Row, end: float, args: Mapping[str, Any]) -> None:
        start = self.clock(row["ts"])
        identity = {"id": _id(row)} if place.label else {}
        self._add(place, start, self.clock(end) - start, row, {**identity, **args})

    def _add(
        self,
        place: Place,
        start: float,
        duration: float,
        row: Row,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        args = {**row.get("args", {}), **(more or {})}
        if row.get("cat", _OTHER) not in KINDS:
            args.setdefault("cat", row["cat"])
        self.spans.append(_Span(place, start, duration, row, args))

    def _events(self) -> Iterator[Event]:
        """Events with their tracks: those that overlap in part move to further tracks."""
        by_place: dict[Place, list[_Span]] = {}
        for span in self.spans:
            by_place.setdefault(span.place, []).append(span)
        for place, spans in by_place.items():
            lanes: list[list[float]] = []
            for span in sorted(spans, key=lambda span: (span.start, -span.duration)):
                track = self.names.track(place, _lane_for(span, lanes))
                kind = span.row.get("cat", _OTHER)
                kind = kind if kind in KINDS else _OTHER
                args = {name: _plain(value) for name, value in span.args.items()}
                yield Event(span.row["name"], kind, track, span.start, span.duration, args)

    def _flows(self) -> Iterator[Flow]:
        """Pairs the ends of arrows: each step and end follows the start or step before."""
        for key, ends in self.arrows.items():
            tail: _End | None = None
            loose = False  # whether nothing follows the tail yet
            for end in sorted(ends, key=lambda end: (end.time, "stf".index(end.phase))):
                if end.phase != "s":
                    if tail is None:
                        self.told["flow end without its start left out"] += 1
                        continue
                    loose = False
                    yield Flow(
                        self.arrow_names[key],
                        self.names.track(tail.place),
                        tail.time,
                        self.names.track(end.place),
                        end.time,
                    )
                if end.phase != "f":
                    self.told["flow start without its end left out"] += loose
                    tail, loose = end, True
            self.told["flow start without its end left out"] += loose
        self.told = +self.told  # without what was counted zero times


_READ: dict[str, Callable[[_Import, Row], None]] = {
    "X": _Import.complete,
    "B": _Import.begin,
    "E": _Import.end,
    "i": _Import.instant,
    "I": _Import.instant,
    "b": _Import.begin_async,
    "n": _Import.instant_async,
    "e": _Import.end_async,
    "C": _Import.sample,
    "s": _Import.arrow,
    "t": _Import.arrow,
    "f": _Import.arrow,
}


def _lane_for(span: _Span, lanes: list[list[float]]) -> int:
    """The first lane on which the span, later than all before, lies apart from or inside what is
    there; ``lanes`` has when the open spans of each end.
    """
    stop, slack = span.stop, rounding_slack(span.start)
    begun = span.start + slack
    for number, ends in enumerate(lanes):
        while ends and ends[-1] <= begun:
            ends.pop()
        if not ends or stop <= ends[-1] + slack:
            ends.append(stop)
            return number
    lanes.append([stop])
    return len(lanes) - 1


def _thread(row: Row) -> Place:
    return Place(row["pid"], row.get("tid", 0))


def _async_place(row: Row) -> Place:
    return Place(row["pid"], None, f"async {row.get('cat', row['name'])}")


def _async_key(row: Row) -> Hashable:
    """What belongs together: the scope of an id is its category, and its process if it is local."""
    return _async_place(row), _id(row)


def _id(row: Row) -> Any:
    """The id of an arrow or of asynchronous events; local ones count within their process."""
    if "id" in row:
        return row["id"]
    local, everywhere = row["id2"].get("local"), row["id2"].get("global")
    return str(everywhere) if local is None else f"{row['pid']}:{local}"


def _plain(value: Any) -> ArgValue:
    """An argument's value as events have it; objects and lists become JSON text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str | int | float):
        return value
    return json.dumps(value, ensure_ascii=False)
