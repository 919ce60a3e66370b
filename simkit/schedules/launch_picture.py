"""Launches over time as a trace: the CPU's calls above the kernels of each stream."""

from __future__ import annotations

from itertools import pairwise

from simkit.schedules.launches import Span, Timeline
from traces.events import Event, Flow, Trace, Track

_CPU = Track("host", "CPU")


def timeline_trace(timeline: Timeline, name: str) -> Trace:
    """Times in nanoseconds. Arrows lead from each call to its kernel."""
    calls = [0.0, *sorted({span.submitted for span in timeline.spans})]
    events = [
        Event(_call(timeline, stop), "launch", _CPU, _ns(start), _ns(stop) - _ns(start))
        for start, stop in pairwise(calls)
    ]
    flows = []
    for span in _without_overlap(timeline):
        track = Track("GPU", f"stream {span.kernel.stream}")
        start, stop = _ns(span.start), _ns(span.stop)
        events.append(Event(span.kernel.name, "compute", track, start, stop - start))
        flows.append(Flow("launch", _CPU, _ns(span.submitted), track, start))
    return Trace(name, tuple(events), flows=tuple(flows), unit="ns")


def _call(timeline: Timeline, submitted: float) -> str:
    names = [span.kernel.name for span in timeline.spans if span.submitted == submitted]
    return names[0] if len(names) == 1 else f"graph of {len(names)}"


def _without_overlap(timeline: Timeline) -> list[Span]:
    """A dependent kernel's prologue runs beside the kernel before it, and is not drawn."""
    last: dict[int, float] = {}
    found = []
    for span in timeline.spans:
        start = max(span.start, last.get(span.kernel.stream, 0.0))
        last[span.kernel.stream] = span.stop
        found.append(Span(span.kernel, span.submitted, start, span.stop))
    return found


def _ns(seconds: float) -> float:
    return round(seconds * 1e9, 3)
