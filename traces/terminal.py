"""A trace in a terminal: lanes by process, bars by kind, the critical path, arrows, utilisation.

Kinds differ by glyph and marks by sign, so a view reads without colour and in a file; where the
output cannot encode them, ASCII signs stand for them. `View` says what is shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult

from traces.comparison import Comparison
from traces.critical_path import CriticalPath
from traces.drawing import Drawing, View, line
from traces.events import Trace
from traces.theme import signs

__all__ = ["ComparisonView", "TraceView", "View", "compare", "show"]


@dataclass(frozen=True)
class TraceView:
    """A rich renderable of a trace; TraceError as ``show`` when it is rendered.

    ``path``: the trace's critical path, for those who render more than once.
    """

    trace: Trace
    view: View = field(default_factory=View)
    path: CriticalPath | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        drawing_signs = signs(options.ascii_only)
        if not self.trace.events:
            yield line(drawing_signs.plain(f"{self.trace.name}: no events"))
            return
        drawing = Drawing(self.trace, self.view, drawing_signs, options.max_width, path=self.path)
        yield from drawing.lines()


@dataclass(frozen=True)
class ComparisonView:
    """A rich renderable of two traces; TraceError as ``compare`` when it is rendered.

    ``comparison``: what the table of differences is of, where the drawn traces are parts.
    """

    first: Trace
    second: Trace
    view: View = field(default_factory=View)
    comparison: Comparison | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        drawing_signs = signs(options.ascii_only)
        drawn = Comparison(self.first, self.second)
        yield from drawn.lines(self.view, drawing_signs, options.max_width, self.comparison)


def show(trace: Trace, console: Console | None = None, view: View | None = None) -> None:
    """Prints a trace.

    TraceError where the range is empty, no track has the text, or there is no such theme.
    """
    (console or Console()).print(TraceView(trace, view or View()))


def compare(
    first: Trace, second: Trace, console: Console | None = None, view: View | None = None
) -> None:
    """Prints two traces with one time axis, side by side where there are 160 cells, one above the
    other where there are not, and what differs. TraceError as ``show``, and for different units.
    """
    (console or Console()).print(ComparisonView(first, second, view or View()))
