"""The interactive viewer: keys and wheel move a window of time, a panel shows one event."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Input, Static

from traces.drawing import UTILISATION_CELLS, View, label_width
from traces.events import Event, Trace
from traces.layout import number
from traces.navigation import Events, Window
from traces.terminal import TraceView
from traces.theme import THEMES

_PAN = 0.25  # of the window
_ZOOM = 0.5
_TEXTUAL_THEMES = {"dark": "textual-dark", "light": "textual-light"}


class ViewerApp(App[None]):
    """Lanes above, the selected event below.

    Keys: see ``BINDINGS``; the mouse wheel zooms around the pointer.
    """

    CSS = """
    #lanes { height: 1fr; padding: 0 1; }
    #details { height: auto; max-height: 50%; border-top: solid $accent; padding: 0 1; }
    #search { display: none; }
    #search.open { display: block; }
    """
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = None  # keys are the app's, but for an open search field
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "pan(-1)", "pan", key_display="←/→"),
        Binding("right,l", "pan(1)", "right", show=False),
        Binding("plus,equals_sign", "zoom(-1)", "zoom in", key_display="+"),
        Binding("minus", "zoom(1)", "zoom out", key_display="-"),
        Binding("0", "whole", "all"),
        Binding("tab", "step(1)", "next event", priority=True),
        Binding("shift+tab", "step(-1)", "event before", show=False, priority=True),
        Binding("slash", "search", "search", key_display="/"),
        Binding("n", "find(1)", "next match"),
        Binding("N", "find(-1)", "match before", show=False),
        Binding("up,k", "scroll_lanes(-1)", "scroll up", show=False),
        Binding("down,j", "scroll_lanes(1)", "scroll down", show=False),
        Binding("c", "critical", "critical path"),
        Binding("t", "theme", "theme"),
        Binding("escape", "close", "close search", show=False),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, trace: Trace, view: View) -> None:
        super().__init__()
        self.events = Events(trace)
        self.view = view
        self.window = Window.of(trace, view.start, view.stop)
        self.chosen: int | None = None
        self.sought = ""
        self.message = ""

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="lanes", can_focus=False):
            yield Static(id="trace")
        yield Static(id="details")
        yield Input(placeholder="text of a name, kind, track or argument", id="search")
        yield Footer()

    def on_mount(self) -> None:
        self.theme = _TEXTUAL_THEMES[self.view.theme]
        self.refresh_trace()

    @property
    def event(self) -> Event | None:
        """The selected event."""
        return None if self.chosen is None else self.events[self.chosen]

    def refresh_trace(self) -> None:
        """Draws the window and the details anew."""
        view = replace(self.view, start=self.window.start, stop=self.window.stop, chosen=self.event)
        shown = TraceView(self.events.trace, view, self.events.path if view.critical else None)
        self.query_one("#trace", Static).update(shown)
        self.query_one("#details", Static).update(self._details())

    # What keys do.

    def action_pan(self, direction: int) -> None:
        self._look(self.window.panned(direction * _PAN))

    def action_zoom(self, direction: int) -> None:
        # Around the selected event, if it can be seen: it is what one wants a closer look at.
        event = self.event
        seen = event is not None and self.window.showing(event) == self.window
        self._look(self.window.zoomed(_ZOOM**-direction, event.start if event and seen else None))

    def action_whole(self) -> None:
        self._look(self.window.whole())

    def action_step(self, direction: int) -> None:
        self._choose(self.events.next(self.chosen, direction, self.window))

    def action_search(self) -> None:
        search = self.query_one("#search", Input)
        search.value = ""
        search.add_class("open")
        search.focus()

    def action_close(self) -> None:
        self.query_one("#search", Input).remove_class("open")
        self.set_focus(None)

    def action_find(self, direction: int) -> None:
        if not self.sought:
            self.action_search()
            return
        found = self.events.find(self.sought, self.chosen, direction)
        if found is None:
            self.message = f"no event has {self.sought!r}"
            self.refresh_trace()
        else:
            self._choose(found)

    def action_scroll_lanes(self, direction: int) -> None:
        self.query_one("#lanes", VerticalScroll).scroll_relative(y=direction, animate=False)

    def action_critical(self) -> None:
        self.view = replace(self.view, critical=not self.view.critical)
        self.refresh_trace()

    def action_theme(self) -> None:
        names = list(THEMES)
        name = names[(names.index(self.view.theme) + 1) % len(names)]
        self.view = replace(self.view, theme=name)
        self.theme = _TEXTUAL_THEMES[name]
        self.refresh_trace()

    # What the mouse and the search field do.

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._look(self.window.zoomed(_ZOOM, self._time_at(event.screen_x)))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._look(self.window.zoomed(1 / _ZOOM, self._time_at(event.screen_x)))

    def on_input_submitted(self, submitted: Input.Submitted) -> None:
        self.sought = submitted.value
        self.action_close()
        if self.sought:
            self.action_find(1)

    def _time_at(self, column: float) -> float:
        """The time under a column of the screen, or the nearest in the window."""
        region = self.query_one("#trace", Static).content_region
        labels = label_width([self.events.trace], region.width) + 1
        cells = max(1, region.width - labels - UTILISATION_CELLS)
        share = (column - region.x - labels) / cells
        return self.window.start + max(0.0, min(1.0, share)) * self.window.width

    def _look(self, window: Window) -> None:
        self.window = window
        self.message = ""
        self.refresh_trace()

    def _choose(self, index: int | None) -> None:
        self.chosen = index
        event = self.event
        self._look(self.window if event is None else self.window.showing(event))

    def _details(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        for name, value in self._facts():
            grid.add_row(Text(name, "bold"), Text(value))
        return grid

    def _facts(self) -> Iterator[tuple[str, str]]:
        if self.message:
            yield "search", self.message
        event = self.event
        if event is None or self.chosen is None:
            yield "event", "none is selected: tab goes to the first, / searches"
            return
        unit = self.events.trace.unit
        critical = ", on the critical path" if self.events.is_critical(event) else ""
        yield "event", f"{event.name} ({self.chosen + 1} of {len(self.events)}){critical}"
        yield "kind", f"{event.kind} on {event.track}"
        times = f"{number(event.start)} to {number(event.stop)}"
        yield "time", f"{times}, {number(event.duration)} {unit}"
        if event.args:
            yield "args", "  ".join(f"{name}={value}" for name, value in event.args.items())
        for dependency in self.events.waited_for(event):
            flow = dependency.flow
            source = dependency.source.name if dependency.source else "nothing drawn"
            moment = f"{number(flow.source_time)} → {number(flow.target_time)}"
            yield "waited for", f"{source} on {flow.source}, {moment} ({flow.name})"
