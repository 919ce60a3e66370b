"""A trace as Chrome Trace Event JSON, with arrows that viewers attach to the right slices.

A process is a pid and a track a tid, named and ordered by metadata events; events are complete
events ("X") whose category is the kind; counters are "C" and flows "s" to "f". The format counts
microseconds: one unit of the trace is written as one, so viewers show cycles with the unit µs;
``metadata.time_unit`` says what it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from traces.events import KINDS, Counter, Event, Flow, Segment, Trace, Track

MOMENT = "time"
"""Argument of an arrow's end whose ``ts`` was moved into its slice: when it really is."""


def to_chrome(trace: Trace) -> dict[str, Any]:
    """The trace as a JSON-ready object; ``traces.chrome.from_chrome`` gives an equal trace back."""
    return {
        "traceEvents": list(_Export(trace).rows()),
        "displayTimeUnit": "ns",
        "metadata": {"name": trace.name, "time_unit": trace.unit},
    }


class _Export:
    """Numbers processes and tracks, and writes everything about them."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.pids = {process: number for number, process in enumerate(trace.processes, start=1)}
        self.tids = {track: number for number, track in enumerate(trace.tracks, start=1)}

    def rows(self) -> Iterator[dict[str, Any]]:
        for process, pid in self.pids.items():
            yield _metadata("process_name", {"name": process}, pid=pid)
            yield _metadata("process_sort_index", {"sort_index": pid}, pid=pid)
        for track, tid in self.tids.items():
            yield _metadata("thread_name", {"name": track.name}, **self._place(track))
            yield _metadata("thread_sort_index", {"sort_index": tid}, **self._place(track))
        for event in self.trace.events:
            yield self._event(event)
        for counter in self.trace.counters:
            yield from self._samples(counter)
        for number, flow in enumerate(self.trace.flows, start=1):
            yield from self._arrow(number, flow)

    def _place(self, track: Track) -> dict[str, int]:
        return {"pid": self.pids[track.process], "tid": self.tids[track]}

    def _event(self, event: Event) -> dict[str, Any]:
        return {
            "ph": "X",
            "name": event.name,
            "cat": event.kind,
            "cname": KINDS[event.kind].chrome,
            **self._place(event.track),
            "ts": event.start,
            "dur": event.duration,
            "args": dict(event.args),
        }

    def _samples(self, counter: Counter) -> Iterator[dict[str, Any]]:
        row = {"ph": "C", "name": counter.name, "pid": self.pids[counter.process]}
        for time, value in counter.samples:
            yield row | {"ts": time, "args": {"value": value}}

    def _arrow(self, number: int, flow: Flow) -> Iterator[dict[str, Any]]:
        row = {"name": flow.name, "cat": "flow", "id": number}
        tail = self._inside(flow.source, flow.source_time, starts=False)
        head = max(tail, self._inside(flow.target, flow.target_time, starts=True))
        yield {"ph": "s", **row, **self._place(flow.source), **_moved(flow.source_time, tail)}
        # Binds the arrow's head to the slice around it, not to the next one that starts.
        end = {"ph": "f", **row, "bp": "e", **self._place(flow.target)}
        yield end | _moved(flow.target_time, head)

    def _inside(self, track: Track, time: float, *, starts: bool) -> float:
        """A moment at ``time`` that lies in the slice which ends then, if one does: viewers bind an
        arrow to a slice [start, stop), so that its own end is outside. With ``starts`` the slice
        that starts or goes on then comes first.
        """
        just_before, just_after = math.nextafter(time, -math.inf), math.nextafter(time, math.inf)
        around = self.trace.segments(track, just_before, just_after)
        if starts and any(part.start <= time < part.stop for part in around):
            return time
        ending: list[Segment] = [part for part in around if part.stop == time]
        return _late(ending[0]) if ending else time


def _late(part: Segment) -> float:
    """Shortly before the end of a stretch: half a unit, or in its middle if it is short."""
    return max(part.stop - 0.5, part.start + (part.stop - part.start) / 2)


def _moved(time: float, shown: float) -> dict[str, Any]:
    return {"ts": time} if shown == time else {"ts": shown, "args": {MOMENT: time}}


def _metadata(what: str, args: dict[str, Any], **place: int) -> dict[str, Any]:
    return {"ph": "M", "name": what, **place, "args": args}
