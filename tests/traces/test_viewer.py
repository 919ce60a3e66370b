"""The interactive viewer, played by Textual's pilot: keys change what is on the screen."""

from __future__ import annotations

import asyncio
import html
import re
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pipelines import pipeline
from textual.events import MouseScrollDown, MouseScrollUp
from textual.pilot import Pilot

from traces.drawing import View
from traces.events import Trace, TraceError
from traces.viewer import open_viewer
from traces.viewer_app import ViewerApp

CELL_WIDTH = 12.2  # of the image of a screen


def screen(app: ViewerApp) -> list[str]:
    """The lines on the screen."""
    image = app.export_screenshot(simplify=True)
    lines: dict[float, list[str]] = {}
    pattern = r'<text[^>]*? x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>'
    for x, y, text in re.findall(pattern, image):
        line = lines.setdefault(float(y), [])
        signs = html.unescape(text).replace("\xa0", " ")
        cell = round(float(x) / CELL_WIDTH)
        line += [" "] * (cell + len(signs) - len(line))
        line[cell : cell + len(signs)] = signs
    return ["".join(line).rstrip() for _, line in sorted(lines.items())]


def play(
    script: Callable[[ViewerApp, Pilot[Any]], Awaitable[None]],
    trace: Trace | None = None,
    view: View | None = None,
) -> None:
    async def run() -> None:
        app = ViewerApp(trace or pipeline(), view or View())
        async with app.run_test(size=(100, 40)) as pilot:
            await pilot.pause()
            await script(app, pilot)

    asyncio.run(run())


def title(app: ViewerApp) -> str:
    return next(line for line in screen(app) if "pipeline: " in line).strip()


def fact(app: ViewerApp, name: str) -> list[str]:
    """The lines of the details with that name."""
    lines = (line.strip() for line in screen(app))
    return [line.removeprefix(name).strip() for line in lines if line.startswith(f"{name}  ")]


def test_keys_pan_and_zoom() -> None:
    async def script(app: ViewerApp, pilot: Pilot[Any]) -> None:
        assert title(app) == "pipeline: 0 to 2,000 cycles"
        for keys, shown in (
            (("plus",), "500 to 1,500"),
            (("right",), "750 to 1,750"),
            (("l",), "1,000 to 2,000"),
            (("left", "h", "h"), "250 to 1,250"),
            (("plus", "minus"), "250 to 1,250"),
            (("0",), "0 to 2,000"),
        ):
            await pilot.press(*keys)
            assert title(app) == f"pipeline: {shown} cycles"

    play(script)


def test_tab_goes_from_event_to_event_with_details() -> None:
    async def script(app: ViewerApp, pilot: Pilot[Any]) -> None:
        assert fact(app, "event") == ["none is selected: tab goes to the first, / searches"]
        await pilot.press("tab")
        assert fact(app, "event") == ["K0 (1 of 13), on the critical path"]
        assert fact(app, "kind") == ["load on producer/TMA"]
        assert fact(app, "time") == ["0 to 180, 180 cycles"]
        assert fact(app, "args") == ["bytes=16384"]
        assert fact(app, "waited for") == []
        await pilot.press("tab")
        assert fact(app, "event") == ["wait K0 (2 of 13), on the critical path"]
        assert fact(app, "waited for") == ["K0 on producer/TMA, 180 → 200 (full 0)"]
        await pilot.press("shift+tab", "shift+tab")
        assert fact(app, "event") == ["O2 (13 of 13), on the critical path"]

    play(script)


def test_search_and_the_next_matches() -> None:
    async def script(app: ViewerApp, pilot: Pilot[Any]) -> None:
        await pilot.press("plus", "plus", "plus", "slash", *"exp", "enter")
        assert fact(app, "event") == ["exp 0 (6 of 13), on the critical path"]
        assert title(app) == "pipeline: 325 to 575 cycles"  # moved so that it is seen
        await pilot.press("n")
        assert fact(app, "event") == ["exp 1 (9 of 13), on the critical path"]
        await pilot.press("N")
        assert fact(app, "event") == ["exp 0 (6 of 13), on the critical path"]
        await pilot.press("slash", *"nowhere", "enter")
        assert fact(app, "search") == ["no event has 'nowhere'"]
        await pilot.press("tab")
        assert fact(app, "search") == []

    play(script)


def test_keys_in_the_search_field_are_text_and_escape_closes_it() -> None:
    async def script(app: ViewerApp, pilot: Pilot[Any]) -> None:
        await pilot.press("slash", *"hlq0", "escape")
        assert title(app) == "pipeline: 0 to 2,000 cycles"
        await pilot.press("plus")
        assert title(app) == "pipeline: 500 to 1,500 cycles"
        await pilot.press("n")  # nothing was sought yet: the field opens
        assert app.focused is not None

    play(script)


def test_zoom_is_around_the_selected_event_if_it_is_seen() -> None:
    async def script(app: ViewerApp, pilot: Pilot[Any]) -> None:
        await pilot.press("tab", "plus", "plus")
        assert title(app) == "pipeline: 0 to 500 cycles"

    play(script)


def test_the_wheel_zooms_around_the_pointer() -> None:
    async def script(app: ViewerApp, pilot: Pilot[Any]) -> None:
        trace = app.query_one("#trace")
        # Of 98 cells 14 are label and 6 utilisation: the pointer is on the last of 78 of bars.
        column = trace.content_region.x + 14 + 77

        async def turn(wheel: type[MouseScrollUp] | type[MouseScrollDown]) -> None:
            keys = {"shift": False, "meta": False, "ctrl": False}
            place = {"screen_x": column, "screen_y": 3}
            trace.post_message(wheel(trace, column, 3, 0, 0, 0, **keys, **place))
            await pilot.pause()

        await turn(MouseScrollUp)
        # What is under it, 77/78 of 2000, stays where it is.
        start = 2000 * 77 / 78 / 2
        assert title(app) == f"pipeline: {start:,.2f} to {start + 1000:,.2f} cycles"
        await turn(MouseScrollDown)
        assert title(app) == "pipeline: 0 to 2,000 cycles"

    play(script)


def test_critical_path_and_theme_are_switched() -> None:
    async def script(app: ViewerApp, pilot: Pilot[Any]) -> None:
        assert any("critical path: 2,000 cycles" in line for line in screen(app))
        await pilot.press("c")
        assert not any("critical path: 2,000 cycles" in line for line in screen(app))
        assert app.current_theme.dark
        dark = app.export_screenshot()
        await pilot.press("t")
        assert not app.current_theme.dark
        assert app.export_screenshot() != dark

    play(script)


def test_it_begins_where_it_is_told_and_ends_with_q() -> None:
    async def script(app: ViewerApp, pilot: Pilot[Any]) -> None:
        assert title(app) == "pipeline: 100 to 300 cycles"
        assert not app.current_theme.dark
        await pilot.press("q")
        assert not app.is_running

    play(script, view=View(start=100, stop=300, theme="light"))


def test_without_textual_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textual", None)
    monkeypatch.delitem(sys.modules, "traces.viewer_app")
    with pytest.raises(TraceError, match=r"pip install 'simkit\[viewer\]'"):
        open_viewer(pipeline())


@pytest.mark.parametrize(
    ("trace", "view", "message"),
    [
        (Trace("t"), View(), "'t' has no events to look at"),
        (pipeline(), View(theme="pink"), "theme 'pink' is none of dark, light"),
        (pipeline(), View(tracks="nowhere"), "no track of 'pipeline' has 'nowhere' in its name"),
        (pipeline(), View(start=5, stop=5), "is empty"),
    ],
)
def test_what_cannot_be_opened(trace: Trace, view: View, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        open_viewer(trace, view)
