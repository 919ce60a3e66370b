"""Where things of a trace go in a terminal: time to cells, ticks, bars, the choice of tracks."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from traces.events import KINDS, Event, Kind, Trace, TraceError, Track, rounding_slack
from traces.theme import Signs

_TICK_CELLS = 10  # between two ticks at least
_MOMENT = 1e-9  # of a cell: what an event without duration takes of it


@dataclass(frozen=True)
class Scale:
    """The time range [start, stop) over a number of cells."""

    start: float
    stop: float
    cells: int

    def position(self, time: float) -> float:
        """Cells from the left edge, negative or too large outside the range."""
        return (time - self.start) / (self.stop - self.start) * self.cells

    def cell(self, time: float) -> int:
        """The cell in which something that starts at ``time`` is drawn."""
        return max(0, min(self.cells - 1, math.floor(self.position(time))))

    def last_cell(self, time: float) -> int:
        """The cell in which something that stops at ``time`` is drawn last."""
        return max(0, min(self.cells - 1, math.ceil(self.position(time)) - 1))

    def ticks(self) -> list[float]:
        """Round times of the range, far enough apart for their labels."""
        step = _round_step((self.stop - self.start) * _TICK_CELLS / self.cells)
        first, last = math.ceil(self.start / step), math.ceil(self.stop / step)
        return [number * step for number in range(first, last)]


@dataclass(frozen=True)
class Bar:
    """A track over a scale. ``kinds``: what fills most of each cell; ``names``: of events that have
    the room, by cell and sign; ``chosen``: the cells of the selected event.
    """

    kinds: list[Kind | None]
    names: dict[int, str]
    chosen: range


@dataclass(frozen=True)
class Selection:
    """The tracks that are shown, in the trace's order, and those that there was no room for."""

    shown: tuple[Track, ...]
    left_out: tuple[Track, ...]


def least_width(time: float) -> float:
    """How long a range near ``time`` must be, so that its moments can be told apart."""
    return 1e6 * rounding_slack(time)


def seen_end(first: float, last: float) -> float:
    """The end of a range that can be drawn: ``last``, or later where events have no duration."""
    if last - first > rounding_slack(first):
        return last
    return first + max(1.0, least_width(first))


def time_range(trace: Trace, start: float | None, stop: float | None) -> tuple[float, float]:
    """The range to draw: as given, and up to the trace's ends where it is not.

    TraceError if there is nothing between the two.
    """
    first = trace.start if start is None else start
    last = trace.stop if stop is None else stop
    if start is None and stop is None:
        last = seen_end(first, last)
    if last - first <= rounding_slack(first):
        raise TraceError(f"time range [{first}, {last}) of {trace.name!r} is empty")
    if not math.isfinite(last - first):
        raise TraceError(f"time range [{first}, {last}) of {trace.name!r} must be finite")
    return first, last


def select(
    trace: Trace,
    text: str | None = None,
    most: int | None = None,
    first: Collection[Track] = (),
) -> Selection:
    """The tracks whose "process/name" has ``text`` in it, ``most`` of them at most.

    Tracks of ``first`` go before others, whatever the order. TraceError if no track has the text,
    or if ``most`` is less than one.
    """
    if most is not None and most < 1:
        raise TraceError(f"at most {most} tracks are to be shown; it must be 1 or more")
    wanted = (text or "").casefold()
    found = [track for track in trace.tracks if wanted in str(track).casefold()]
    if text and not found:
        raise TraceError(f"no track of {trace.name!r} has {text!r} in its name; {_some(trace)}")
    if most is None or len(found) <= most:
        return Selection(tuple(found), ())
    leading = set(first)
    ranked = sorted(found, key=lambda track: track not in leading)
    chosen = set(ranked[:most])
    return Selection(
        tuple(track for track in found if track in chosen),
        tuple(track for track in found if track not in chosen),
    )


def draw_bar(
    trace: Trace,
    track: Track,
    scale: Scale,
    signs: Signs,
    chosen: Event | None = None,
    now: float | None = None,
) -> Bar:
    """Lays out a track's bar, up to ``now`` if that is given."""
    end = scale.stop if now is None else min(scale.stop, now)
    filled: list[dict[str, float]] = [{} for _ in range(scale.cells)]
    names: dict[int, str] = {}
    for part in trace.segments(track, scale.start, end):
        left = scale.position(max(part.start, scale.start))
        right = scale.position(min(part.stop, end))
        if right <= left:
            continue
        kind = part.event.kind
        for cell in range(int(left), min(scale.cells, int(right) + 1)):
            share = min(right, cell + 1) - max(left, cell)
            filled[cell][kind] = filled[cell].get(kind, 0.0) + max(0.0, share)
        # A name leaves a cell of bar on both sides, which also parts it from its neighbours.
        first, room = -int(-left // 1) + 1, int(right) - 1
        if room > first and part.event.name:
            text = signs.plain(part.event.name)
            if first + len(text) <= room and cell_len(text) == len(text):
                names |= dict(enumerate(text, start=first))
    for event in trace.moments(track):
        if scale.start <= event.start < end:
            filled[scale.cell(event.start)].setdefault(event.kind, _MOMENT)
    kinds = [
        KINDS[max(cell, key=lambda kind: cell[kind])] if any(cell.values()) else None
        for cell in filled
    ]
    return Bar(kinds, names, _cells_of(chosen, track, scale))


def fit(text: str, cells: int, signs: Signs) -> str:
    """``text`` cut or filled up to a number of cells."""
    text = signs.plain(text)
    if cell_len(text) > cells:
        text = set_cell_size(text, max(0, cells - 1)) + signs.cut
    return set_cell_size(text, cells)


def number(value: float) -> str:
    """A time as it is printed: to a hundredth, thousands parted."""
    return f"{round(value, 2):,.12g}"


def _cells_of(event: Event | None, track: Track, scale: Scale) -> range:
    if event is None or event.track != track:
        return range(0)
    if event.start >= scale.stop or max(event.stop, event.start + _MOMENT) <= scale.start:
        return range(0)
    first = scale.cell(event.start)
    return range(first, max(first, scale.last_cell(event.stop)) + 1)


def _some(trace: Trace) -> str:
    if not trace.tracks:
        return "it has none"
    names = ", ".join(str(track) for track in trace.tracks[:8])
    return f"it has {names}" + (f" and {len(trace.tracks) - 8} more" * (len(trace.tracks) > 8))


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5 × a power of ten that is at least ``least``."""
    power = 10.0 ** int(f"{least:e}".partition("e")[2])
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least)
