"""The event model: what happened on which track, when and for how long, in cycles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

ArgValue = str | int | float | bool


class TraceError(ValueError):
    """An event, track or trace file that makes no sense; the message says which and why."""


@dataclass(frozen=True)
class Kind:
    """What an event does, and how it looks.

    ``colour``: a rich colour. ``glyph``/``sign``: one cell of its bar, in Unicode and in ASCII,
    unique among kinds. ``chrome``: a reserved colour name of the Trace Event format. ``busy``:
    whether the track counts as used meanwhile.
    """

    name: str
    colour: str
    glyph: str
    sign: str
    chrome: str
    busy: bool = True


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("load", "bright_blue", "░", ":", "thread_state_running"),
        Kind("store", "magenta", "▓", "=", "thread_state_iowait"),
        Kind("mma", "green", "█", "#", "good"),
        Kind("compute", "cyan", "▒", "+", "rail_response"),
        Kind("softmax", "yellow", "▚", "%", "rail_animation"),
        Kind("convert", "bright_cyan", "▞", "~", "rail_load"),
        Kind("launch", "white", "▄", "^", "startup"),
        Kind("barrier", "red", "┃", "|", "terrible", busy=False),
        Kind("wait", "bright_black", "·", ".", "grey", busy=False),
    )
}


@dataclass(frozen=True)
class Track:
    """One row of a trace: a unit or thread ``name`` of a ``process`` such as a CTA or an SM."""

    process: str
    name: str


@dataclass(frozen=True)
class Event:
    """``name`` ran on ``track`` from ``start`` for ``duration`` cycles; ``kind`` is of KINDS."""

    name: str
    kind: str
    track: Track
    start: float
    duration: float
    args: Mapping[str, ArgValue] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        place = f"event {self.name!r} on {self.track.process}/{self.track.name}"
        if self.kind not in KINDS:
            raise TraceError(f"{place}: kind {self.kind!r} is none of {', '.join(KINDS)}")
        _check_time(place, "start", self.start)
        _check_time(place, "duration", self.duration)
        for name, value in self.args.items():
            bad_float = isinstance(value, float) and not math.isfinite(value)
            if bad_float or not isinstance(value, str | int | float):
                raise TraceError(f"{place}: argument {name!r} cannot be {value!r}")

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
        place = f"counter {self.name!r} of {self.process}"
        if not self.samples:
            raise TraceError(f"{place} has no samples")
        before = 0.0
        for time, value in self.samples:
            _check_time(place, "time", time)
            if not math.isfinite(value):
                raise TraceError(f"{place}: value {value} at {time} is not finite")
            if time < before:
                raise TraceError(f"{place}: time {time} comes after {before}")
            before = time


@dataclass(frozen=True)
class Flow:
    """An arrow from a moment on one track to a later one on another: a copy to its wait, …"""

    name: str
    source: Track
    source_time: float
    target: Track
    target_time: float

    def __post_init__(self) -> None:
        place = f"flow {self.name!r}"
        _check_time(place, "source_time", self.source_time)
        _check_time(place, "target_time", self.target_time)
        if self.target_time < self.source_time:
            raise TraceError(
                f"{place} goes from {self.source_time} back to {self.target_time} cycles"
            )


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
    track may nest, but not overlap in part; TraceError otherwise.
    """

    name: str
    events: tuple[Event, ...] = ()
    tracks: tuple[Track, ...] = ()
    counters: tuple[Counter, ...] = ()
    flows: tuple[Flow, ...] = ()

    def __post_init__(self) -> None:
        tracks = _grouped([*self.tracks, *(event.track for event in self.events)])
        order = {track: position for position, track in enumerate(tracks)}
        events = sorted(self.events, key=lambda e: (order[e.track], e.start, -e.duration))
        for flow in self.flows:
            for end in (flow.source, flow.target):
                if end not in order:
                    raise TraceError(
                        f"flow {flow.name!r} names {end.process}/{end.name}, which is no track"
                    )
        counters = [(counter.process, counter.name) for counter in self.counters]
        for process, name in counters:
            if counters.count((process, name)) > 1:
                raise TraceError(f"two counters are named {name!r} in {process}")
        object.__setattr__(self, "tracks", tracks)
        object.__setattr__(self, "events", tuple(events))
        _ = self._segments  # raises where events overlap

    @property
    def processes(self) -> tuple[str, ...]:
        """All processes, those with tracks first."""
        names = [track.process for track in self.tracks]
        return tuple(dict.fromkeys([*names, *(counter.process for counter in self.counters)]))

    @property
    def start(self) -> float:
        """Time of the first event in cycles; 0 without events."""
        return min((event.start for event in self.events), default=0.0)

    @property
    def stop(self) -> float:
        """Time at which the last event ends; 0 without events."""
        return max((event.stop for event in self.events), default=0.0)

    def segments(self, track: Track) -> list[Segment]:
        """The track cut into stretches that do not overlap; idle time is left out."""
        return self._segments.get(track, [])

    @cached_property
    def _segments(self) -> dict[Track, list[Segment]]:
        by_track = groupby(self.events, key=lambda event: event.track)
        return {track: _innermost(events) for track, events in by_track}

    def utilisation(
        self, track: Track, start: float | None = None, stop: float | None = None
    ) -> float:
        """Fraction of [start, stop) in which the innermost event is of a busy kind (0 to 1)."""
        first = self.start if start is None else start
        last = self.stop if stop is None else stop
        if last <= first:
            return 0.0
        used = sum(
            max(0.0, min(part.stop, last) - max(part.start, first))
            for part in self.segments(track)
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
        slack = 1e-9 * max(1.0, abs(event.start))
        while open_events and open_events[-1].stop <= event.start + slack:
            advance(open_events[-1].stop)
        advance(event.start)
        if open_events and event.stop > open_events[-1].stop + slack:
            outer = open_events[-1]
            raise TraceError(
                f"events overlap on {event.track.process}/{event.track.name}: {outer.name!r} "
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


def _check_time(place: str, what: str, value: float) -> None:
    if not isinstance(value, int | float):
        raise TraceError(f"{place}: {what} must be an int or a float, not {value!r}")
    if not 0 <= value < math.inf:
        raise TraceError(f"{place}: {what} must be finite and not negative, not {value} cycles")
