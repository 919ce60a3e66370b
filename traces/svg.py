"""A view of traces as an SVG image, the same bytes every time, for documents."""

from __future__ import annotations

import io
import re

from rich.console import Console, RenderableType
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME

from traces.events import TraceError

_THEMES = {"dark": SVG_EXPORT_THEME, "light": DEFAULT_TERMINAL_THEME}
_ID = "trace"  # of elements; rich would derive it from the content
_WEB_FONT = re.compile(r"\s*@font-face \{.*?\}\n", re.DOTALL)


def svg(view: RenderableType, *, width: int = 120, theme: str = "dark", title: str = "") -> str:
    """An SVG of a `TraceView`, a `ComparisonView` or anything else that rich renders, ``width``
    cells wide, in the colours of a dark or light terminal. It fetches nothing: the font is whatever
    monospaced one the reader has. TraceError for a theme that there is not.
    """
    if theme not in _THEMES:
        raise TraceError(f"theme {theme!r} is none of {', '.join(_THEMES)}")
    console = Console(
        file=io.StringIO(),
        record=True,
        width=width,
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
        _environ={},
    )
    console.print(view)
    image = console.export_svg(title=title, theme=_THEMES[theme], unique_id=_ID)
    return _WEB_FONT.sub("", image)
