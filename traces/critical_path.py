"""The critical path: the chain of events that decides when a trace ends.

It is found backwards from the last end. Before an event comes what ended last: the event before it
on its track, or the source of a flow that arrived since; for a wait or barrier also of one that
arrived in it. Such a wait is on the path from the moment at which that source ended, so that its
own part is the latency of being told; any other is on the path as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from math import fsum, inf
from typing import TypeVar

from traces.dependencies import lanes
from traces.events import KINDS, Event, Flow, Trace, Track

IDLE = "idle"
"""Of the path: a track that goes on later than anything that the trace shows would let it."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Step:
    """A stretch of the path: ``event`` on ``track``, or None while nothing of the trace runs."""

    start: float
    stop: float
    track: Track
    event: Event | None

    @property
    def duration(self) -> float:
        return self.stop - self.start

    @property
    def kind(self) -> str:
        """The event's kind, or ``IDLE``."""
        return self.event.kind if self.event else IDLE


@dataclass(frozen=True)
class CriticalPath:
    """Steps in order of time, each from where the one before ended; ``flows``: those it follows.

    All times are in the trace's unit.
    """

    steps: tuple[Step, ...]
    flows: tuple[Flow, ...]

    @property
    def events(self) -> tuple[Event, ...]:
        """The events on the path, in order."""
        return tuple(step.event for step in self.steps if step.event is not None)

    @property
    def length(self) -> float:
        return self.steps[-1].stop - self.steps[0].start if self.steps else 0.0

    @property
    def by_kind(self) -> dict[str, float]:
        """How much of the path is of each kind (or ``IDLE``), most first."""
        return self._sums(lambda step: step.kind)

    @property
    def by_track(self) -> dict[Track, float]:
        """How much of the path lies on each track, most first."""
        return self._sums(lambda step: step.track)

    @cached_property
    def on_track(self) -> dict[Track, tuple[Step, ...]]:
        """The steps of each track that has any."""
        found: dict[Track, list[Step]] = {}
        for step in self.steps:
            found.setdefault(step.track, []).append(step)
        return {track: tuple(steps) for track, steps in found.items()}

    def _sums(self, key: Callable[[Step], Key]) -> dict[Key, float]:
        found: dict[Key, list[float]] = {}
        for step in self.steps:
            found.setdefault(key(step), []).append(step.duration)
        sums = {name: fsum(parts) for name, parts in found.items()}
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def critical_path(trace: Trace) -> CriticalPath:
    """The critical path of a trace; it ends when the trace ends, and is empty without events."""
    return _Walk(trace).path()


class _Walk:
    """Goes back through a trace from its end."""

    def __init__(self, trace: Trace) -> None:
        self.lanes = lanes(trace)
        self.steps: list[Step] = []
        self.flows: list[Flow] = []
        self.used: set[int] = set()  # each flow once, so that flows at one moment make no circle

    def path(self) -> CriticalPath:
        ends = [(lane.stops[-1], track) for track, lane in self.lanes.items() if lane.stops]
        if not ends:
            return CriticalPath((), ())
        until, track = max(ends, key=lambda end: end[0])
        index = len(self.lanes[track].stops) - 1
        while index >= 0:
            track, index, until = self._before(track, index, until)
        return CriticalPath(tuple(reversed(self.steps)), tuple(reversed(self.flows)))

    def _before(self, track: Track, index: int, until: float) -> tuple[Track, int, float]:
        """Adds the stretch up to ``until``; returns the one before, and up to when it counts."""
        lane = self.lanes[track]
        part = lane.segments[index]
        waits = not KINDS[part.event.kind].busy
        own_end = lane.stops[index - 1] if index else -inf
        told = lane.last_arrival(own_end, until if waits else part.start, self.used)
        if told is None or told.source_time <= own_end:
            self._add(part.start, until, track, part.event)
            if index:
                self._add(own_end, part.start, track, None)
            return track, index - 1, own_end
        self._add(max(part.start, told.source_time), until, track, part.event)
        self._add(min(part.start, told.source_time), part.start, track, None)
        return self._follow(told)

    def _follow(self, flow: Flow) -> tuple[Track, int, float]:
        self.used.add(id(flow))
        self.flows.append(flow)
        index = self.lanes[flow.source].at(flow.source_time)
        if index < 0:
            return flow.source, index, flow.source_time
        end = self.lanes[flow.source].stops[index]
        if end < flow.source_time:
            self._add(end, flow.source_time, flow.source, None)
        return flow.source, index, min(end, flow.source_time)

    def _add(self, start: float, stop: float, track: Track, event: Event | None) -> None:
        """Adds a step, or lengthens the last one where the event goes on; no empty idle step."""
        if event is None and start == stop:
            return
        if self.steps:
            after = self.steps[-1]
            if after.event is event is not None:
                self.steps[-1] = Step(start, after.stop, track, event)
                return
        self.steps.append(Step(start, stop, track, event))
