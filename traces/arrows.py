"""Dependency arrows in a terminal: which are shown, the marks at their ends, and a list of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from string import ascii_letters

from traces.events import Flow, Trace, Track
from traces.layout import Scale, number
from traces.theme import Signs

MOST_ARROWS = len(ascii_letters)


@dataclass(frozen=True)
class Arrow:
    """A flow with the letter that stands at both its ends."""

    letter: str
    flow: Flow


@dataclass(frozen=True)
class Arrows:
    """The arrows that are shown, in order of time, and how many more there are in the range."""

    shown: tuple[Arrow, ...]
    left_out: int


def choose(
    trace: Trace, scale: Scale, tracks: Collection[Track], critical: Collection[Flow], most: int
) -> Arrows:
    """Of the flows between ``tracks`` with an end in the range those on the critical path, then the
    earliest, ``most`` (at most 52) of them; with none to be shown, none is left out.
    """
    if not most:
        return Arrows((), 0)
    shown = set(tracks)
    on_path = {id(flow) for flow in critical}
    found = [
        flow
        for flow in trace.flows
        if flow.source_time <= scale.stop
        and flow.target_time >= scale.start
        and shown.issuperset((flow.source, flow.target))
    ]
    found.sort(key=lambda flow: (id(flow) not in on_path, flow.source_time, flow.target_time))
    chosen = found[: min(most, MOST_ARROWS)]
    chosen.sort(key=lambda flow: (flow.source_time, flow.target_time))
    arrows = tuple(Arrow(*pair) for pair in zip(ascii_letters, chosen, strict=False))
    return Arrows(arrows, len(found) - len(arrows))


def mark_rows(arrows: Arrows, track: Track, scale: Scale, signs: Signs) -> list[dict[int, str]]:
    """Rows of marks under a track, by cell; as many rows as it takes for marks not to collide."""
    rows: list[dict[int, str]] = []
    for cell, text in _marks(arrows, track, scale, signs):
        for row in rows:
            if not row.keys() & set(range(cell - 1, cell + len(text) + 1)):
                break
        else:
            row = {}
            rows.append(row)
        row |= dict(enumerate(text, start=cell))
    return rows


def list_lines(arrows: Arrows, unit: str, signs: Signs) -> list[str]:
    """One line for each arrow: its ends, name and latency; then how many are left out."""
    lines = []
    for arrow in arrows.shown:
        flow = arrow.flow
        target = (
            flow.target.name if flow.source.process == flow.target.process else str(flow.target)
        )
        latency = number(flow.target_time - flow.source_time)
        lines.append(
            signs.plain(
                f"  {arrow.letter}  {flow.source} {number(flow.source_time)} {signs.to} "
                f"{target} {number(flow.target_time)}  {flow.name}  ({latency} {unit})"
            )
        )
    if arrows.left_out:
        more = "arrow" if arrows.left_out == 1 else "arrows"
        lines.append(f"  {arrows.left_out:,} more {more} in this range")
    return lines


def _marks(arrows: Arrows, track: Track, scale: Scale, signs: Signs) -> Iterator[tuple[int, str]]:
    for arrow in arrows.shown:
        flow = arrow.flow
        if flow.source == track and scale.start <= flow.source_time <= scale.stop:
            cell = scale.last_cell(flow.source_time)
            yield _at(cell, signs.leaves + arrow.letter, scale)
        if flow.target == track and scale.start <= flow.target_time <= scale.stop:
            cell = scale.cell(flow.target_time)
            yield _at(cell, signs.arrives + arrow.letter, scale)


def _at(cell: int, text: str, scale: Scale) -> tuple[int, str]:
    return max(0, min(cell, scale.cells - len(text))), text
