"""What an event waited for: a track's stretches, and the flows that arrive on it, by time."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection
from dataclasses import dataclass

from traces.events import KINDS, Event, Flow, Segment, Trace, Track


@dataclass(frozen=True)
class Dependency:
    """A flow that an event waited for, and the event that it comes from, if one ran then."""

    flow: Flow
    source: Event | None


class Lane:
    """A track's stretches, events without duration among them, and the flows that arrive there."""

    def __init__(self, segments: list[Segment], arrivals: list[Flow]) -> None:
        self.segments = segments
        self.starts = [segment.start for segment in segments]
        self.stops = [segment.stop for segment in segments]
        self._arrivals = sorted(arrivals, key=lambda flow: flow.target_time)
        self._times = [flow.target_time for flow in self._arrivals]

    def arrivals(self, after: float, until: float) -> list[Flow]:
        """The flows that arrive in (after, until]."""
        first, last = bisect_right(self._times, after), bisect_right(self._times, until)
        return self._arrivals[first:last]

    def last_arrival(self, after: float, until: float, used: Collection[int]) -> Flow | None:
        """Of the flows that arrive in (after, until], but for those whose id is in ``used``, the
        one whose source ended last.
        """
        flows = (flow for flow in self.arrivals(after, until) if id(flow) not in used)
        return max(flows, key=lambda flow: flow.source_time, default=None)

    def at(self, time: float) -> int:
        """Index of the stretch that ends at ``time``, else of the last that starts before or then;
        -1 where there is none.
        """
        ends = bisect_left(self.stops, time)
        if ends < len(self.stops) and self.stops[ends] == time:
            return ends
        return bisect_right(self.starts, time) - 1

    def running(self, time: float) -> Event | None:
        """The event that ends at ``time``, else the one that runs then."""
        index = self.at(time)
        return self.segments[index].event if index >= 0 and time <= self.stops[index] else None


def lanes(trace: Trace) -> dict[Track, Lane]:
    """Every track of a trace, ready for questions."""
    arrivals: dict[Track, list[Flow]] = {}
    for flow in trace.flows:
        arrivals.setdefault(flow.target, []).append(flow)
    found = {}
    for track in trace.tracks:
        # Events without duration are no stretch of a track, but may wait and be waited for.
        moments = (Segment(one.start, one.start, one) for one in trace.moments(track))
        segments = sorted(
            [*trace.segments(track), *moments], key=lambda part: (part.start, part.stop)
        )
        found[track] = Lane(segments, arrivals.get(track, []))
    return found


def waited_for(event: Event, by_track: dict[Track, Lane]) -> list[Dependency]:
    """The flows that an event had to wait for, in order of arrival; ``by_track``: of ``lanes``.

    Those that arrive in it, if it is a wait or barrier; otherwise those that arrive at its start,
    or since the event before on its track ended, or, if that was a wait, since that began.
    """
    lane = by_track[event.track]
    if not KINDS[event.kind].busy:
        flows = lane.arrivals(event.start, event.stop)
    else:
        before = bisect_left(lane.starts, event.start) - 1
        since = math.nextafter(event.start, -math.inf)
        if before < 0:
            since = -1.0  # before all time
        else:
            part = lane.segments[before]
            since = min(since, part.stop if KINDS[part.event.kind].busy else part.start)
        flows = lane.arrivals(since, event.start)
    return [Dependency(flow, by_track[flow.source].running(flow.source_time)) for flow in flows]
