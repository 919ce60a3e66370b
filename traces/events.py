"""The event model: what happened on which track, when, for how long, and after what."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, bisect_right
from collections import Counter as Count
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby

ArgValue = str | int | float | bool

UNITS = ("cycles", "ns", "steps")
"""What times count. A trace of steps has an order, but no time: an executor's run."""


class TraceError(ValueError):
    """An event, track or trace file that makes no sense; the message says which and why."""


@dataclass(frozen=True)
class Kind:
    """What an event does, and how it looks.

    ``colour``, ``light``: a rich colour for dark and for light terminals. ``glyph``/``sign``: one
    cell of its bar, in Unicode and in ASCII, unique among kinds. ``chrome``: a reserved colour name
    of the Trace Event format. ``busy``: whether the track counts as used meanwhile.
    """

    name: str
    colour: str
    light: str
    glyph: str
    sign: str
    chrome: str
    busy: bool = True


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("load", "bright_blue", "blue", "░", ":", "thread_state_running"),
        Kind("store", "magenta", "magenta", "▓", "=", "thread_state_iowait"),
        Kind("mma", "green", "green4", "█", "#", "good"),
        Kind("compute", "cyan", "dark_cyan", "▒", "+", "rail_response"),
        Kind("softmax", "yellow", "dark_goldenrod", "▚", "%", "rail_animation"),
        Kind("convert", "bright_cyan", "deep_sky_blue4", "▞", "~", "rail_load"),
        Kind("launch", "white", "black", "▄", "^", "startup"),
        Kind("barrier", "red", "red3", "┃", "|", "terrible", busy=False),
        Kind("wait", "bright_black", "grey50", "·", ".", "grey", busy=False),
    )
}


@dataclass(frozen=True)
class Track:
    """One row of a trace: a unit or thread ``name`` of a ``process`` such as a CTA or an SM."""

    process: str
    name: str

    def __str__(self) -> str:
        return f"{self.process}/{self.name}"


@dataclass(frozen=True)
class Event:
    """``name`` ran on ``track`` from ``start`` for ``duration``; ``kind`` is of KINDS."""

    name: str
    kind: str
    track: Track
    start: float
    duration: float
    args: Mapping[str, ArgValue] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise TraceError(f"{self}: kind {self.kind!r} is none of {', '.join(KINDS)}")
        _check_times(self, start=self.start, duration=self.duration)
        for name, value in self.args.items():
            bad_float = isinstance(value, float) and not math.isfinite(value)
            if bad_float or not isinstance(value, str | int | float):
                raise TraceError(f"{self}: argument {name!r} cannot be {value!r}")

    def __str__(self) -> str:
        return f"event {self.name!r} on {self.track}"

    @property
    def stop(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Counter:
    """A quantity of a process over time, as (time, value) in order of time: bytes in flight, …"""

    name: str
    process: str
    samples: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.samples:
            raise TraceError(f"{self} has no samples")
        before = 0.0
        for time, value in self.samples:
            _check_times(self, time=time)
            if not math.isfinite(value):
                raise TraceError(f"{self}: value {value} at {time} is not finite")
            if time < before:
                raise TraceError(f"{self}: time {time} comes after {before}")
            before = time

    def __str__(self) -> str:
        return f"counter {self.name!r} of {self.process}"


@dataclass(frozen=True)
class Flow:
    """An arrow from a moment on one track to a later one on another: a copy to its wait, …

    It leaves the event that ends at ``source_time``, or else the one that runs then. It releases
    the event that starts at ``target_time``, or the wait or barrier that it arrives in.
    """

    name: str
    source: Track
    source_time: float
    target: Track
    target_time: float

    def __post_init__(self) -> None:
        _check_times(self, source_time=self.source_time, target_time=self.target_time)
        if self.target_time < self.source_time:
            raise TraceError(f"{self} goes from {self.source_time} back to {self.target_time}")

    def __str__(self) -> str:
        return f"flow {self.name!r}"


@dataclass(frozen=True)
class Segment:
    """A stretch of a track on which ``event`` is the innermost one."""

    start: float
    stop: float
    event: Event


@dataclass(frozen=True)
class Trace:
    """A schedule: tracks in the order in which they are drawn, and what happens on them.

    Built in a canonical order (tracks together by process, events by track and start), so equal
    schedules are equal traces. Tracks that only events name come after those given. Events of one
    track may nest, but not overlap in part; TraceError otherwise. ``unit``: of UNITS, what all its
    times count.
    """

    name: str
    events: tuple[Event, ...] = ()
    tracks: tuple[Track, ...] = ()
    counters: tuple[Counter, ...] = ()
    flows: tuple[Flow, ...] = ()
    unit: str = "cycles"

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            units = ", ".join(UNITS)
            raise TraceError(f"trace {self.name!r}: unit {self.unit!r} is none of {units}")
        tracks = _grouped([*self.tracks, *(event.track for event in self.events)])
        by_track: dict[Track, list[Event]] = {track: [] for track in tracks}
        for event in self.events:
            by_track[event.track].append(event)
        for events in by_track.values():
            events.sort(key=lambda event: (event.start, -event.duration))
        for flow in self.flows:
            for end in (flow.source, flow.target):
                if end not in by_track:
                    raise TraceError(f"{flow} names {end}, which is no track")
        counters = Count((counter.process, counter.name) for counter in self.counters)
        for (process, name), count in counters.items():
            if count > 1:
                raise TraceError(f"two counters are named {name!r} in {process}")
        object.__setattr__(self, "tracks", tracks)
        object.__setattr__(self, "events", tuple(chain.from_iterable(by_track.values())))
        _ = self._segments  # raises where events overlap

    @property
    def processes(self) -> tuple[str, ...]:
        """All processes, those with tracks first."""
        names = [track.process for track in self.tracks]
        return tuple(dict.fromkeys([*names, *(counter.process for counter in self.counters)]))

    @cached_property
    def start(self) -> float:
        """Time of the first event; 0 without events."""
        return min((event.start for event in self.events), default=0.0)

    @cached_property
    def stop(self) -> float:
        """Time at which the last event ends; 0 without events."""
        return max((event.stop for event in self.events), default=0.0)

    def segments(
        self, track: Track, start: float | None = None, stop: float | None = None
    ) -> list[Segment]:
        """The track cut into stretches that do not overlap; idle time is left out.

        With a range, those that overlap [start, stop), whole.
        """
        found = self._segments.get(track, [])
        first = 0 if start is None else bisect_right(found, start, key=lambda part: part.stop)
        last = len(found) if stop is None else bisect_left(found, stop, key=lambda part: part.start)
        return found[first:last]

    def moments(self, track: Track) -> list[Event]:
        """The events without duration of a track, in order; no stretch is theirs."""
        return self._moments.get(track, [])

    @cached_property
    def _segments(self) -> dict[Track, list[Segment]]:
        by_track = groupby(self.events, key=lambda event: event.track)
        return {track: _innermost(events) for track, events in by_track}

    @cached_property
    def _moments(self) -> dict[Track, list[Event]]:
        found: dict[Track, list[Event]] = {}
        for event in self.events:
            if event.duration == 0:
                found.setdefault(event.track, []).append(event)
        return found

    def utilisation(
        self, track: Track, start: float | None = None, stop: float | None = None
    ) -> float:
        """Fraction of [start, stop) in which the innermost event is of a busy kind (0 to 1)."""
        first = self.start if start is None else start
        last = self.stop if stop is None else stop
        if last <= first:
            return 0.0
        used = sum(
            min(part.stop, last) - max(part.start, first)
            for part in self.segments(track, first, last)
            if KINDS[part.event.kind].busy
        )
        return used / (last - first)


def _innermost(events: Iterable[Event]) -> list[Segment]:
    """Cuts nested events, sorted by (start, -duration), into stretches of the innermost one."""
    segments: list[Segment] = []
    open_events: list[Event] = []
    now = 0.0

    def advance(until: float) -> None:
        nonlocal now
        while open_events and open_events[-1].stop <= until:
            inner = open_events.pop()
            if inner.stop > now:
                segments.append(Segment(now, inner.stop, inner))
                now = inner.stop
        if open_events and until > now:
            segments.append(Segment(now, until, open_events[-1]))
        now = max(now, until)

    for event in events:
        # Ends that are sums of floats may pass the next start by a rounding error.
        slack = rounding_slack(event.start)
        while open_events and open_events[-1].stop <= event.start + slack:
            advance(open_events[-1].stop)
        advance(event.start)
        if open_events and event.stop > open_events[-1].stop + slack:
            outer = open_events[-1]
            raise TraceError(
                f"events overlap on {event.track}: {outer.name!r} "
                f"[{outer.start}, {outer.stop}) and {event.name!r} [{event.start}, {event.stop}); "
                "put them on two tracks"
            )
        open_events.append(event)
    while open_events:
        advance(open_events[-1].stop)
    return segments


def _grouped(tracks: Iterable[Track]) -> tuple[Track, ...]:
    """Each track once, those of a process together, both in the order of first appearance."""
    by_process: dict[str, dict[Track, None]] = {}
    for track in tracks:
        by_process.setdefault(track.process, {})[track] = None
    return tuple(track for group in by_process.values() for track in group)


def rounding_slack(time: float) -> float:
    """By how much two times near ``time`` may differ and still be the same moment."""
    return 1e-9 * max(1.0, abs(time))


def _check_times(place: object, **times: float) -> None:
    for what, value in times.items():
        if not isinstance(value, int | float):
            raise TraceError(f"{place}: {what} must be an int or a float, not {value!r}")
        if not 0 <= value <= sys.float_info.max:
            raise TraceError(f"{place}: {what} must be finite and not negative, not {value}")
