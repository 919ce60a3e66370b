"""What the snapshots show, and how they are written: ``python tests/traces/snapshot_cases.py``.

Run it after a change that is meant to be seen, and read the difference before it is committed.
Plain snapshots are .txt; those with colours are .ansi, which ``cat`` shows.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

from pipelines import grid, pipeline
from rich.console import Console, RenderableType

from traces.terminal import ComparisonView, TraceView, View

FOLDER = Path(__file__).parent / "snapshots"


class AsciiFile(io.StringIO):
    """An output whose encoding is ASCII, as a console sees it."""

    encoding = "ascii"  # type: ignore[assignment]


@dataclass(frozen=True)
class Case:
    """A view in a terminal of some ``width``; ``colour``: with escape codes, ``no_color``: as
    under NO_COLOR, which leaves bold and dim.
    """

    shown: RenderableType
    width: int = 80
    ascii_only: bool = False
    colour: bool = False
    no_color: bool = False

    def text(self) -> str:
        """What the terminal gets."""
        file = AsciiFile() if self.ascii_only else io.StringIO()
        console = Console(
            file=file,
            width=self.width,
            force_terminal=self.colour,
            color_system="256" if self.colour else None,
            no_color=self.no_color,
            legacy_windows=False,
            _environ={},
        )
        console.print(self.shown)
        return file.getvalue()

    @property
    def suffix(self) -> str:
        return ".ansi" if self.colour else ".txt"


PIPELINE = TraceView(pipeline())
SLOW_COPIES = ComparisonView(pipeline(), pipeline(load=420, product=150, name="slow copies"))

CASES: dict[str, Case] = {
    "pipeline_80": Case(PIPELINE),
    "pipeline_200": Case(PIPELINE, width=200),
    "pipeline_ascii_80": Case(PIPELINE, ascii_only=True),
    "pipeline_ascii_200": Case(PIPELINE, width=200, ascii_only=True),
    "pipeline_dark_80": Case(PIPELINE, colour=True),
    "pipeline_light_80": Case(TraceView(pipeline(), View(theme="light")), colour=True),
    "pipeline_no_colour_80": Case(PIPELINE, colour=True, no_color=True),
    "pipeline_zoomed_80": Case(TraceView(pipeline(), View(start=150, stop=650))),
    "pipeline_chosen_80": Case(
        TraceView(pipeline(), View(chosen=pipeline().events[4])), colour=True
    ),
    "pipeline_now_80": Case(TraceView(pipeline(), View(now=600, arrows=0))),
    "pipeline_plain_80": Case(TraceView(pipeline(), View(critical=False, arrows=0))),
    "grid_80": Case(TraceView(grid(), View(most=8))),
    "grid_selected_80": Case(TraceView(grid(), View(tracks="SM 13"))),
    "comparison_80": Case(SLOW_COPIES),
    "comparison_200": Case(SLOW_COPIES, width=200),
    "comparison_ascii_200": Case(SLOW_COPIES, width=200, ascii_only=True),
}


def path(name: str) -> Path:
    """The file of a snapshot."""
    return FOLDER / f"{name}{CASES[name].suffix}"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, case in CASES.items():
        path(name).write_text(case.text(), encoding="utf-8")
