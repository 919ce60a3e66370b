"""Two traces beside each other: one time axis for both, and a table of what differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

from rich.text import Text

from traces import layout
from traces.critical_path import CriticalPath, critical_path
from traces.drawing import Drawing, View, label_width, line
from traces.events import Trace, TraceError
from traces.layout import number
from traces.theme import Signs

SIDE_BY_SIDE_CELLS = 160
"""From this width on two traces stand side by side."""
_NUMBER_CELLS = 14


@dataclass(frozen=True)
class Difference:
    """A share of each trace's duration, 0 to 1; None where there is no such thing."""

    name: str
    first: float | None
    second: float | None


@dataclass(frozen=True)
class Comparison:
    """What differs between two traces of one unit; TraceError for two units, or without events."""

    first: Trace
    second: Trace

    def __post_init__(self) -> None:
        if self.first.unit != self.second.unit:
            raise TraceError(
                f"{self.first.name!r} is in {self.first.unit} and {self.second.name!r} in "
                f"{self.second.unit}: there is no common time axis"
            )
        for trace in (self.first, self.second):
            if not trace.events:
                raise TraceError(f"{trace.name!r} has no events to compare")

    @property
    def makespans(self) -> tuple[float, float]:
        """From the first event to the last end, of each trace."""
        return self.first.stop - self.first.start, self.second.stop - self.second.start

    @property
    def ratio(self) -> float | None:
        """The second trace's makespan over the first's; None where the first has none."""
        before, after = self.makespans
        return after / before if before else None

    @cached_property
    def tracks(self) -> tuple[Difference, ...]:
        """How busy the tracks of each name are, in the mean over processes."""
        first, second = _use_by_name(self.first), _use_by_name(self.second)
        return _differences(first, second, None)

    @cached_property
    def critical(self) -> tuple[Difference, ...]:
        """What the critical paths consist of, by kind."""
        first, second = _shares(critical_path(self.first)), _shares(critical_path(self.second))
        return _differences(first, second, 0.0)

    def lines(
        self, view: View, signs: Signs, width: int, whole: Comparison | None = None
    ) -> Iterator[Text]:
        """Both traces over a common range, and the table of differences: of ``whole``, where these
        traces are parts of others.
        """
        starts, stops = zip(*((t.start, t.stop) for t in (self.first, self.second)), strict=True)
        start = min(starts) if view.start is None else view.start
        stop = max(stops) if view.stop is None else view.stop
        if view.start is None and view.stop is None:
            stop = layout.seen_end(start, stop)
        view = replace(view, start=start, stop=stop)
        beside = width >= SIDE_BY_SIDE_CELLS
        between = f" {signs.between} "
        column = (width - len(between)) // 2 if beside else width
        label_cells = label_width([self.first, self.second], column)
        left, right = (
            Drawing(trace, view, signs, column, label_cells).lines()
            for trace in (self.first, self.second)
        )
        if beside:
            for one, other in zip_longest(left, right, fillvalue=line("")):
                yield _padded(one, column) + Text(between, "dim") + other
        else:
            yield from [*left, line(""), *right]
        yield line("")
        yield from (whole or self)._table(signs, width)

    def _table(self, signs: Signs, width: int) -> Iterator[Text]:
        label_cells = max(4, min(40, width - 3 * (_NUMBER_CELLS + 1)))

        def row(label: str, *cells: str, style: str = "") -> Text:
            numbers = "".join(f" {cell:>{_NUMBER_CELLS}}" for cell in cells)
            return line(layout.fit(label, label_cells, signs) + numbers, style)

        yield row("", "first", "second", "difference", style="bold")
        before, after = self.makespans
        ratio = "" if self.ratio is None else f"x {self.ratio:.3f}"
        yield row(self.first.unit, _short(before), _short(after), ratio)
        for title, rows in (("used", self.tracks), ("critical path", self.critical)):
            for each in rows:
                yield row(f"{title}: {each.name}", *_cells(each))
        yield line("Shares are of each one's own time.", "dim")


def _use_by_name(trace: Trace) -> dict[str, float]:
    uses: dict[str, list[float]] = {}
    for track in trace.tracks:
        uses.setdefault(track.name, []).append(trace.utilisation(track))
    return {name: sum(each) / len(each) for name, each in uses.items()}


def _shares(path: CriticalPath) -> dict[str, float]:
    return {kind: time / path.length for kind, time in path.by_kind.items() if path.length}


def _differences(
    first: dict[str, float], second: dict[str, float], missing: float | None
) -> tuple[Difference, ...]:
    names = dict.fromkeys([*first, *second])
    return tuple(
        Difference(name, first.get(name, missing), second.get(name, missing)) for name in names
    )


def _cells(difference: Difference) -> tuple[str, str, str]:
    first, second = difference.first, difference.second
    points = ""
    if first is not None and second is not None:
        points = f"{round(100 * (second - first)):+d} points"
    return _share(first), _share(second), points


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _short(value: float) -> str:
    """A time in the cells that a number has."""
    text = number(value)
    return text if len(text) <= _NUMBER_CELLS else f"{value:.6g}"


def _padded(text: Text, cells: int) -> Text:
    copy = text.copy()
    copy.truncate(cells, pad=True)
    return copy
