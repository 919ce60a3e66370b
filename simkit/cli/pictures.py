"""Draws the schedules that docs/ shows, as SVG: ``python -m simkit.cli.pictures FOLDER``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from simkit.cli.trace_schedule import find_schedule
from traces.svg import svg
from traces.terminal import TraceView, View

WIDTH = 140


@dataclass(frozen=True)
class Picture:
    """``name``: of the file and in the title. ``start``, ``stop``: cycles that are drawn."""

    name: str
    title: str
    algorithm: str
    settings: tuple[str, ...]
    start: float | None = None
    stop: float | None = None
    gpu: str = "h100"


PICTURES = (
    Picture("flash_attention_2", "FlashAttention-2", "flash_attention_2", ("tiles=6",), 5e3, 28e3),
    Picture(
        "ping_pong", "FlashAttention-3, ping-pong", "flash_attention_3", ("tiles=8",), 8e3, 2e4
    ),
    Picture("seesaw", "FlashMLA, seesaw", "mla_decode", ("tiles=8",), gpu="h800"),
    Picture("crossover", "FlashMLA, crossover", "mla_sparse_decode", ("tiles=8",), gpu="h800"),
)


def draw(picture: Picture) -> str:
    """The SVG; the same bytes every time."""
    schedule = find_schedule(picture.algorithm, picture.settings, picture.gpu)
    view = View(start=picture.start, stop=picture.stop, arrows=0, critical=False, theme="light")
    return svg(TraceView(schedule.trace, view), width=WIDTH, theme="light", title=picture.title)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for picture in PICTURES:
        path = folder / f"{picture.name}.svg"
        path.write_text(draw(picture), encoding="utf-8")
        print(f"Written to {path}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
