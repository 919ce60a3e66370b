"""How the view looks: colours for dark and light terminals, signs with and without Unicode."""

from __future__ import annotations

from dataclasses import dataclass

from traces.events import Kind, TraceError


@dataclass(frozen=True)
class Theme:
    """Colours as rich names them. ``on_bar``: of a name written over a bar; ``critical``: of the
    marks of the critical path; ``chosen``: of the selected event, seen without colour, too.
    """

    name: str
    on_bar: str
    critical: str
    chosen: str = "bold reverse"

    def colour(self, kind: Kind) -> str:
        """The colour of a kind's bars."""
        return kind.light if self.name == "light" else kind.colour


THEMES = {
    theme.name: theme
    for theme in (
        Theme("dark", on_bar="black", critical="bold bright_red"),
        Theme("light", on_bar="bright_white", critical="bold red3"),
    )
}


def theme(name: str) -> Theme:
    """The theme of that name; TraceError that lists the names otherwise."""
    if name not in THEMES:
        raise TraceError(f"theme {name!r} is none of {', '.join(THEMES)}")
    return THEMES[name]


@dataclass(frozen=True)
class Signs:
    """What is drawn besides bars, one cell each but for ``to``.

    ``leaves``/``arrives``: the ends of an arrow; ``idle``: the critical path where nothing runs.
    ``between``: parts two traces; ``now``: the moment that is shown.
    """

    unicode: bool
    line: str
    tick: str
    cut: str
    critical: str
    idle: str
    leaves: str
    arrives: str
    to: str
    between: str
    now: str

    def bar(self, kind: Kind) -> str:
        """One cell of a kind's bar."""
        return kind.glyph if self.unicode else kind.sign

    def plain(self, text: str) -> str:
        """``text`` with what the output cannot show replaced."""
        text = "".join(sign if sign.isprintable() else "?" for sign in text)
        return text if self.unicode else text.encode("ascii", "replace").decode()


UNICODE = Signs(True, "─", "┬", "…", "━", "╌", "↓", "↑", "→", "│", "▼")
ASCII = Signs(False, "-", "+", "~", "*", "-", "v", "^", "->", "|", "V")


def signs(ascii_only: bool) -> Signs:
    """The signs for an output that has ASCII alone, or Unicode."""
    return ASCII if ascii_only else UNICODE
