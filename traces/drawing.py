"""The lines of one trace in a terminal: axis, lanes with their marks, arrows, path, legend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from rich.cells import cell_len
from rich.text import Text

from traces import arrows, layout
from traces.critical_path import CriticalPath, critical_path
from traces.events import KINDS, Event, Trace, Track, rounding_slack
from traces.layout import Scale, Selection, number
from traces.theme import Signs
from traces.theme import theme as find_theme

LABEL_CELLS = 24  # of a track's name at most
UTILISATION_CELLS = 6
_FEWEST_BAR_CELLS = 10


@dataclass(frozen=True, kw_only=True)
class View:
    """What is shown of a trace, and how.

    ``start``, ``stop``: the time range, by default all of it. ``tracks``: shows those tracks alone
    whose "process/name" has this text in it. ``most``: tracks to show at most (None: all), those of
    the critical path first. ``names``: whether events that are wide enough carry their name.
    ``critical``: whether the critical path is marked. ``arrows``: dependency arrows to show, at
    most. ``theme``: "dark" or "light", for such terminals. ``chosen``: an event to highlight.
    ``now``: a moment that the view is of: what comes later is not drawn.
    """

    start: float | None = None
    stop: float | None = None
    tracks: str | None = None
    most: int | None = None
    names: bool = True
    critical: bool = True
    arrows: int = 12
    theme: str = "dark"
    chosen: Event | None = None
    now: float | None = None


class Drawing:
    """One trace, laid out for ``width`` cells.

    ``label_cells``: the width of the column of names, so that drawings can share an axis. ``path``:
    the trace's critical path, for those who draw more than once.
    """

    def __init__(
        self,
        trace: Trace,
        view: View,
        signs: Signs,
        width: int,
        label_cells: int | None = None,
        path: CriticalPath | None = None,
    ) -> None:
        self._path = path
        self.trace, self.view, self.signs, self.width = trace, view, signs, width
        self.theme = find_theme(view.theme)
        self.label_cells = label_width([trace], width) if label_cells is None else label_cells
        room = width - self.label_cells - 1 - UTILISATION_CELLS
        start, stop = layout.time_range(trace, view.start, view.stop)
        self.scale = Scale(start, stop, max(_FEWEST_BAR_CELLS, room))
        self.end = stop if view.now is None else min(stop, view.now)  # of what is drawn

    @cached_property
    def path(self) -> CriticalPath:
        """The critical path of the whole trace, empty if it is not to be marked."""
        if not self.view.critical:
            return CriticalPath((), ())
        return critical_path(self.trace) if self._path is None else self._path

    @cached_property
    def selection(self) -> Selection:
        """The tracks that are shown and left out."""
        view = self.view
        return layout.select(self.trace, view.tracks, view.most, self.path.on_track)

    @cached_property
    def arrows(self) -> arrows.Arrows:
        """The arrows that are shown."""
        shown, most = self.selection.shown, self.view.arrows
        return arrows.choose(self.trace, self.scale, shown, self.path.flows, most)

    def lines(self) -> list[Text]:
        """Everything, from the title to the legend."""
        return [
            *self.title(),
            *self.axis(),
            *self.lanes(),
            *self.left_out(),
            *self.arrow_list(),
            *self.path_summary(),
            *self.legend(),
        ]

    def title(self) -> list[Text]:
        """Name and range; a name that is too long gives way."""
        span = f": {number(self.scale.start)} to {number(self.scale.stop)} {self.trace.unit}"
        span += "" if self.view.now is None else f", now {number(self.view.now)}"
        room = max(_FEWEST_BAR_CELLS, self.width - cell_len(span))
        name = self.signs.plain(self.trace.name)
        if cell_len(name) > room:
            name = layout.fit(name, room, self.signs)
        return [line(name + span, "bold")]

    def axis(self) -> list[Text]:
        """Labels and ticks at round times."""
        labels, marks = [" "] * self.scale.cells, [self.signs.line] * self.scale.cells
        free = 0
        for tick in self.scale.ticks():
            cell, text = self.scale.cell(tick), number(tick)
            marks[cell] = self.signs.tick
            if free <= cell and cell + len(text) <= self.scale.cells:
                labels[cell : cell + len(text)] = text
                free = cell + len(text) + 1
        if self.view.now is not None:
            marks[self.scale.cell(self.view.now)] = self.signs.now
        used = f"{'used':>{UTILISATION_CELLS}}"
        return [
            line(self._label(self.trace.unit) + "".join(labels) + used, "dim"),
            line(self._label("") + "".join(marks), "dim"),
        ]

    def lanes(self) -> list[Text]:
        """The tracks by process, each with the marks of path and arrows under it."""
        lines = []
        for process, tracks in groupby(self.selection.shown, key=lambda track: track.process):
            lines.append(line(self.signs.plain(process), "bold"))
            for track in tracks:
                lines += [self._lane(track), *self._marks(track)]
        return lines

    def left_out(self) -> list[Text]:
        """One line that says how many tracks are not shown, and how much those are used."""
        rest = self.selection.left_out
        if not rest:
            return []
        used = sum(self._utilisation(track) for track in rest) / len(rest)
        count = len(self.selection.shown)
        tracks = "1 track is" if len(rest) == 1 else f"{len(rest)} tracks are"
        text = f"{tracks} left out, used {used:.0%} in the mean; {count} are shown"
        return [line(text, "italic")]

    def arrow_list(self) -> list[Text]:
        return [line(text) for text in arrows.list_lines(self.arrows, self.trace.unit, self.signs)]

    def path_summary(self) -> list[Text]:
        """What the critical path of the whole trace consists of."""
        if not self.path.steps:
            return []
        trace, length = self.trace, self.path.length
        # It begins late where nothing says what its first event waited for.
        whole = trace.stop - trace.start
        of = "" if length >= whole - rounding_slack(whole) else f" of {number(whole)}"
        words = [f"critical path: {number(length)}{of} {trace.unit}"]
        length = length or 1.0
        words += [f"{kind} {time / length:.0%}" for kind, time in self.path.by_kind.items()]
        return self._flowing([Text(word) for word in words], ", ")

    def legend(self) -> list[Text]:
        shown = set(self._kinds_in_range())
        entries = [
            Text.assemble((self.signs.bar(kind) * 2, self.theme.colour(kind)), f" {kind.name}")
            for kind in KINDS.values()
            if kind.name in shown
        ]
        if self.path.steps:
            entries.append(
                Text.assemble((self.signs.critical * 2, self.theme.critical), " critical path")
            )
        if self.arrows.shown:
            entries.append(Text(f"{self.signs.leaves}a {self.signs.arrives}a arrow a"))
        return self._flowing(entries, "  ")

    def _lane(self, track: Track) -> Text:
        view = self.view
        bar = layout.draw_bar(self.trace, track, self.scale, self.signs, view.chosen, view.now)
        text = line(self._label(f"  {track.name}"))
        _append(text, (self._bar_cell(bar, cell) for cell in range(self.scale.cells)))
        return text.append(f"{self._utilisation(track):>{UTILISATION_CELLS}.0%}")

    def _bar_cell(self, bar: layout.Bar, cell: int) -> tuple[str, str]:
        """Sign and style of a cell of a bar."""
        kind = bar.kinds[cell]
        if kind is None:
            sign, style = " ", ""
        elif self.view.names and cell in bar.names:
            sign, style = bar.names[cell], f"{self.theme.on_bar} on {self.theme.colour(kind)}"
        else:
            sign, style = self.signs.bar(kind), self.theme.colour(kind)
        return sign, self.theme.chosen if cell in bar.chosen else style

    def _marks(self, track: Track) -> Iterator[Text]:
        """The critical path under a track, with the first arrows over it; then the others."""
        path: dict[int, str] = {}
        for step in self.path.on_track.get(track, ()):
            if step.start < self.end and step.stop > self.scale.start:
                sign = self.signs.critical if step.event else self.signs.idle
                last = self.scale.last_cell(min(step.stop, self.end))
                cells = range(self.scale.cell(step.start), last + 1)
                path |= dict.fromkeys(cells, sign)
        rows = arrows.mark_rows(self.arrows, track, self.scale, self.signs)
        if path and not rows:
            rows = [{}]
        for place, row in enumerate(rows):
            under = path if place == 0 else {}
            text = line(self._label(""))
            _append(
                text,
                (
                    (row[cell], "")
                    if cell in row
                    else (under.get(cell, " "), self.theme.critical if cell in under else "")
                    for cell in range(self.scale.cells)
                ),
            )
            yield text

    def _kinds_in_range(self) -> Iterator[str]:
        for track in self.selection.shown:
            for part in self.trace.segments(track, self.scale.start, self.scale.stop):
                yield part.event.kind
            for event in self.trace.moments(track):
                if self.scale.start <= event.start < self.scale.stop:
                    yield event.kind

    def _utilisation(self, track: Track) -> float:
        return self.trace.utilisation(track, self.scale.start, self.end)

    def _label(self, text: str) -> str:
        return layout.fit(text, self.label_cells, self.signs) + " "

    def _flowing(self, entries: list[Text], gap: str) -> list[Text]:
        """Entries side by side, on as many lines as that takes."""
        lines = [line("")]
        for position, entry in enumerate(entries):
            parted = entry if position == len(entries) - 1 else entry + Text(gap.rstrip())
            if lines[-1].plain and lines[-1].cell_len + len(gap) + parted.cell_len > self.width:
                lines.append(line(""))
            if lines[-1].plain:
                lines[-1].append(gap[len(gap.rstrip()) :])
            lines[-1].append_text(parted)
        return lines


def _append(text: Text, cells: Iterable[tuple[str, str]]) -> None:
    """Appends signs with their styles, runs of one style at once."""
    for style, run in groupby(cells, key=lambda cell: cell[1]):
        text.append("".join(sign for sign, _ in run), style)


def label_width(traces: list[Trace], width: int) -> int:
    """Cells for the names of tracks."""
    widest = max((len(track.name) for trace in traces for track in trace.tracks), default=0) + 2
    units = max(len(trace.unit) for trace in traces)
    return min(max(widest, units), LABEL_CELLS, max(4, width // 3))


def line(text: str, style: str = "") -> Text:
    """A line that is cut where the terminal ends."""
    return Text(text, style=style, no_wrap=True, overflow="crop")
