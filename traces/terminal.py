"""The trace in a terminal: a row per track, bars by kind, a time axis, a legend, utilisation.

Kinds differ by glyph, so a bar reads without colour and in a file; where the output cannot encode
the glyphs, ASCII signs stand for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from traces.events import KINDS, Kind, Trace, TraceError, Track

_LABEL_CELLS = 24  # of a track's name at most
_UTILISATION_CELLS = 6
_FEWEST_BAR_CELLS = 10
_TICK_CELLS = 10  # between two ticks at least


@dataclass(frozen=True)
class TraceView:
    """A rich renderable of ``trace`` between ``start`` and ``stop`` (cycles; default: all of it).

    ``names``: whether events that are wide enough carry their name.
    """

    trace: Trace
    start: float | None = None
    stop: float | None = None
    names: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        start = self.trace.start if self.start is None else self.start
        stop = self.trace.stop if self.stop is None else self.stop
        if not self.trace.events:
            yield Text(f"{self.trace.name}: no events")
            return
        if not start < stop:
            raise TraceError(f"time range [{start}, {stop}) of {self.trace.name!r} is empty")
        yield from _Drawing(self, start, stop, options).lines()


def show(
    trace: Trace,
    console: Console | None = None,
    *,
    start: float | None = None,
    stop: float | None = None,
    names: bool = True,
) -> None:
    """Prints the trace, or the part of it in [start, stop) cycles."""
    (console or Console()).print(TraceView(trace, start, stop, names))


class _Drawing:
    """One rendering: the time range, laid out for the width that there is."""

    def __init__(self, view: TraceView, start: float, stop: float, options: ConsoleOptions) -> None:
        self.trace, self.names = view.trace, view.names
        self.start, self.stop = start, stop
        self.ascii, self.width = options.ascii_only, options.max_width
        widest = max(len(track.name) for track in self.trace.tracks) + 2
        self.label_cells = min(widest, _LABEL_CELLS, max(4, options.max_width // 3))
        self.bar_cells = max(
            _FEWEST_BAR_CELLS,
            options.max_width - self.label_cells - _UTILISATION_CELLS - 1,
        )
        self.cells_per_cycle = self.bar_cells / (stop - start)

    def lines(self) -> list[Text]:
        span = f"{_number(self.start)} to {_number(self.stop)} cycles"
        lines = [_line(self._plain(f"{self.trace.name}: {span}"), style="bold"), *self._axis()]
        for process, tracks in groupby(self.trace.tracks, key=lambda track: track.process):
            lines.append(_line(self._plain(process), style="bold"))
            lines += [self._row(track) for track in tracks]
        return [*lines, *self._legend()]

    def _row(self, track: Track) -> Text:
        line = _line(self._label(f"  {track.name}"))
        kinds, names = self._bar(track)
        for cell, kind in enumerate(kinds):
            if kind is None:
                line.append(" ")
            elif cell in names:
                line.append(names[cell], style=f"black on {kind.colour}")
            else:
                line.append(self._cell(kind), style=kind.colour)
        used = self.trace.utilisation(track, self.start, self.stop)
        return line.append(f"{used:>{_UTILISATION_CELLS}.0%}")

    def _bar(self, track: Track) -> tuple[list[Kind | None], dict[int, str]]:
        """The kind that fills most of each cell, and the characters of names written over it."""
        filled: list[dict[str, float]] = [{} for _ in range(self.bar_cells)]
        names: dict[int, str] = {}
        for part in self.trace.segments(track):
            left = (max(part.start, self.start) - self.start) * self.cells_per_cycle
            right = (min(part.stop, self.stop) - self.start) * self.cells_per_cycle
            if right <= left:
                continue
            for cell in range(int(left), min(self.bar_cells, int(right) + 1)):
                share = min(right, cell + 1) - max(left, cell)
                kind = part.event.kind
                filled[cell][kind] = filled[cell].get(kind, 0.0) + max(0.0, share)
            # A name leaves a cell of bar on both sides, which also parts it from its neighbours.
            first, room = -int(-left // 1) + 1, int(right) - 1
            text = self._plain(part.event.name)
            fits = first + len(text) <= room and cell_len(text) == len(text)
            if self.names and text and fits and text.isprintable():
                names |= dict(enumerate(text, start=first))
        kinds = [
            KINDS[max(cell, key=lambda kind: cell[kind])] if any(cell.values()) else None
            for cell in filled
        ]
        return kinds, names

    def _axis(self) -> list[Text]:
        """Tick labels and marks at round numbers of cycles."""
        step = _round_step((self.stop - self.start) * _TICK_CELLS / self.bar_cells)
        labels = [" "] * self.bar_cells
        marks = ["-" if self.ascii else "─"] * self.bar_cells
        free = 0
        for number in range(math.ceil(self.start / step), math.ceil(self.stop / step)):
            tick = number * step
            cell = min(self.bar_cells - 1, int((tick - self.start) * self.cells_per_cycle))
            text = _number(tick)
            marks[cell] = "+" if self.ascii else "┬"
            if free <= cell and cell + len(text) <= self.bar_cells:
                labels[cell : cell + len(text)] = text
                free = cell + len(text) + 1
        head = self._label("cycles")
        used = f"{'used':>{_UTILISATION_CELLS}}"
        return [
            _line(head + "".join(labels) + used, style="dim"),
            _line(" " * len(head) + "".join(marks), style="dim"),
        ]

    def _legend(self) -> list[Text]:
        shown = {
            event.kind
            for event in self.trace.events
            if event.start < self.stop and event.stop > self.start
        }
        lines = [_line("")]
        for kind in KINDS.values():
            if kind.name in shown:
                if lines[-1].cell_len + len(kind.name) + 5 > self.width:
                    lines.append(_line(""))
                gap = "  " if lines[-1].plain else ""
                lines[-1].append(gap).append(self._cell(kind) * 2, style=kind.colour)
                lines[-1].append(f" {kind.name}")
        return lines

    def _cell(self, kind: Kind) -> str:
        return kind.sign if self.ascii else kind.glyph

    def _plain(self, text: str) -> str:
        """``text`` with what the output cannot encode replaced."""
        return text.encode("ascii", "replace").decode() if self.ascii else text

    def _label(self, text: str) -> str:
        """``text`` cut or filled up to the label column and the space after it."""
        text = self._plain(text)
        if cell_len(text) > self.label_cells:
            text = set_cell_size(text, self.label_cells - 1) + ("~" if self.ascii else "…")
        return set_cell_size(text, self.label_cells + 1)


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="crop")


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5 × a power of ten that is at least ``least``."""
    power = 10.0 ** int(f"{least:e}".partition("e")[2])
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least)


def _number(value: float) -> str:
    return f"{value:,.10g}"
