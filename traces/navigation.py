"""Moving about in a trace: a window of time that pans and zooms, events in order, search."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from traces.critical_path import CriticalPath, critical_path
from traces.dependencies import Dependency, Lane, lanes, waited_for
from traces.events import Event, Trace, Track
from traces.layout import least_width, time_range

_DEEPEST = 1e6  # how much of the trace a window shows at least: a millionth


@dataclass(frozen=True)
class Window:
    """The time range [start, stop) out of [first, last), which it never leaves."""

    first: float
    last: float
    start: float
    stop: float

    @classmethod
    def of(cls, trace: Trace, start: float | None = None, stop: float | None = None) -> Window:
        """A window on a trace, by default on all of it; TraceError for an empty range."""
        first, last = time_range(trace, None, None)
        start, stop = time_range(trace, start, stop)
        return cls(min(first, start), max(last, stop), start, stop)

    @property
    def width(self) -> float:
        return self.stop - self.start

    def panned(self, share: float) -> Window:
        """Moved by a share of its width, to the right if it is positive."""
        return self._at(self.start + share * self.width, self.width)

    def zoomed(self, factor: float, centre: float | None = None) -> Window:
        """``factor`` times as wide, while ``centre`` (by default the middle) stays in place."""
        whole = self.last - self.first
        width = min(whole, max(whole / _DEEPEST, least_width(self.last), self.width * factor))
        middle = (self.start + self.stop) / 2 if centre is None else centre
        share = (middle - self.start) / self.width
        return self._at(middle - share * width, width)

    def showing(self, event: Event) -> Window:
        """Itself if it shows where the event begins, else moved so that this is in its middle."""
        if self.start <= event.start < self.stop:
            return self
        return self._at(event.start - self.width / 2, self.width)

    def whole(self) -> Window:
        """On everything."""
        return self._at(self.first, self.last - self.first)

    def _at(self, start: float, width: float) -> Window:
        start = max(self.first, min(start, self.last - width))
        return Window(self.first, self.last, start, min(self.last, start + width))


class Events:
    """All events of a trace in order of time, with what is asked about them."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        order = {track: place for place, track in enumerate(trace.tracks)}
        self.events = sorted(trace.events, key=lambda event: (event.start, order[event.track]))
        self._starts = [event.start for event in self.events]

    def __len__(self) -> int:
        return len(self.events)

    def __getitem__(self, index: int) -> Event:
        return self.events[index]

    @cached_property
    def path(self) -> CriticalPath:
        """The trace's critical path."""
        return critical_path(self.trace)

    @cached_property
    def _lanes(self) -> dict[Track, Lane]:
        return lanes(self.trace)

    def waited_for(self, event: Event) -> list[Dependency]:
        """See `traces.dependencies.waited_for`."""
        return waited_for(event, self._lanes)

    def is_critical(self, event: Event) -> bool:
        """Whether the event is on the critical path."""
        return any(step.event is event for step in self.path.on_track.get(event.track, ()))

    def next(self, index: int | None, step: int, window: Window) -> int | None:
        """The event ``step`` (1 or -1) after one, around the ends; without one, the first or last
        that starts in the window. None where there are no events.
        """
        if not self.events:
            return None
        if index is None:
            near = bisect_left(self._starts, window.start if step > 0 else window.stop)
            return (near if step > 0 else near - 1) % len(self.events)
        return (index + step) % len(self.events)

    def find(self, text: str, index: int | None, step: int) -> int | None:
        """The next event (``step`` 1) or the one before (-1), around the ends, with ``text`` in its
        name, kind, track or arguments, whatever the case; None if there is none.
        """
        wanted, count = text.casefold(), len(self.events)
        here = (-1 if step > 0 else 0) if index is None else index
        for distance in range(1, count + 1):
            place = (here + step * distance) % count
            if wanted in _searched(self.events[place]):
                return place
        return None


def _searched(event: Event) -> str:
    args = " ".join(f"{name}={value}" for name, value in event.args.items())
    return f"{event.name}\n{event.kind}\n{event.track}\n{args}".casefold()
