"""All that a trace of one launch holds, while it runs and then as a traces.events.Trace.

Time counts steps: one for each instruction that a set of warps has executed, one after the other as
the executor ran them, and one for each asynchronous copy that landed on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gpu.ptx.tracing.segments import Layout, layout_of
from simkit.errors import BudgetError, LaunchError
from traces.events import ArgValue, Event, Flow, Trace, Track

if TYPE_CHECKING:
    from gpu.ptx.launch import Launch
    from gpu.ptx.tracing.recorder import Recorder

WARP = "warp"
_TOGETHER = 4  # warps of a warpgroup

# Tracks of a CTA, in the order in which they are drawn; those of barriers come last.
ASYNCHRONOUS = ("TMA", "bulk copies", "cp.async", "async stores", "tensor core")


@dataclass(slots=True, eq=False)
class Span:
    """Something from step ``start`` to before ``stop``; ``site``: the instruction it comes from."""

    name: str
    kind: str
    start: int
    stop: int
    site: int = 0
    args: dict[str, ArgValue] = field(default_factory=dict)

    @property
    def looks(self) -> tuple[object, ...]:
        """What is the same for warps that do the same."""
        return self.name, self.kind, self.start, self.stop, self.site


@dataclass(frozen=True, slots=True)
class Row:
    """Where spans go: a warp, an asynchronous unit or a barrier of a CTA (its number in the grid,
    x fastest).  Spans of one row may overlap; events of a track must not.
    """

    cta: int
    name: str
    warp: int = -1


End = tuple[Row | Span, int]
"""One end of a flow: a warp's row or the span itself, and when."""


class TraceLog:
    """Spans and flows of the chosen CTAs of a launch."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.now = 0
        self.rows: dict[Row, list[Span]] = {}
        self.flows: list[tuple[str, End, End]] = []
        self.wave: Recorder | None = None
        self._count = 0
        self._layouts: dict[int, Layout] = {}
        total = launch.grid[0] * launch.grid[1] * launch.grid[2]
        asked = launch.options.trace_ctas
        self.ctas = frozenset(range(total) if asked is None else asked).intersection(range(total))
        if not self.ctas:
            raise LaunchError(
                f"trace_ctas={asked} names no CTA of kernel {launch.program.name!r}, whose grid has"
                f" CTAs 0 to {total - 1}"
            )

    def layout(self, block: int) -> Layout:
        """What a block of the program shows as."""
        if block not in self._layouts:
            self._layouts[block] = layout_of(self.launch.program.blocks[block])
        return self._layouts[block]

    def add(self, row: Row, span: Span) -> Span:
        """BudgetError where there are too many."""
        self._count += 1
        limit = self.launch.options.trace_events
        if self._count > limit:
            raise BudgetError(
                f"the trace of kernel {self.launch.program.name!r} has more than {limit:,} events"
                f" (trace_events) at step {self.now:,} of {len(self.ctas):,} CTAs; trace fewer of"
                f" them: Options(trace=True, trace_ctas=range({max(1, len(self.ctas) // 8)}))"
            )
        self.rows.setdefault(row, []).append(span)
        return span

    def flow(self, name: str, source: End, target: End) -> None:
        self.flows.append((name, source, target))

    # The trace

    def result(self) -> Trace:
        """What has been recorded so far."""
        if self.wave is not None:
            self.wave.close()
        events: list[Event] = []
        tracks: dict[Row | int, Track] = {}  # rows of warps, and spans by identity
        order: list[Track] = []
        for cta in sorted({row.cta for row in self.rows}):
            for track, rows, spans in self._tracks(cta):
                order.append(track)
                tracks.update(dict.fromkeys(rows, track))
                tracks.update({id(span): track for span in spans})
                events += (self._event(track, span) for span in spans)
        flows = dict.fromkeys(
            Flow(name, tracks[_key(source)], begin, tracks[_key(target)], end)
            for name, (source, begin), (target, end) in self.flows
        )
        name = f"{self.launch.program.name}, {self.launch.options.schedule}"
        return Trace(name, tuple(events), tuple(order), flows=tuple(flows), unit="steps")

    def _tracks(self, cta: int) -> Iterator[tuple[Track, list[Row], list[Span]]]:
        """The tracks of a CTA, each with the rows of warps that are its own, and its spans."""
        x, y, _ = self.launch.grid
        process = f"cta ({cta % x},{cta // x % y},{cta // (x * y)})"
        own = {row: spans for row, spans in self.rows.items() if row.cta == cta}
        warps = sorted((row for row in own if row.name == WARP), key=lambda row: row.warp)
        for name, members in self._warps(warps):
            yield Track(process, name), members, _together([own[row] for row in members])
        for unit in ASYNCHRONOUS:
            for number, spans in enumerate(_lanes(own.get(Row(cta, unit), [])), start=1):
                yield Track(process, unit if number == 1 else f"{unit} {number}"), [], spans
        named = {row.name for row in own} - {WARP, *ASYNCHRONOUS}
        for name in sorted(named, key=lambda n: (len(n), n)):
            yield Track(process, name), [], own[Row(cta, name)]

    def _warps(self, rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
        """Names of the tracks of warps: a warpgroup where its four always do the same."""
        by_group: dict[int, list[Row]] = {}
        for row in rows:
            by_group.setdefault(row.warp // _TOGETHER, []).append(row)
        for group, members in by_group.items():
            looks = {tuple(span.looks for span in self.rows[row]) for row in members}
            if len(members) == _TOGETHER and len(looks) == 1:
                yield f"warpgroup {group}", members
            else:
                yield from ((f"warp {row.warp}", [row]) for row in members)

    def _event(self, track: Track, span: Span) -> Event:
        args: dict[str, ArgValue] = {}
        if span.site:
            kernel = self.launch.kernel
            position = kernel.position(span.site)
            args["line"] = position.line
            file = kernel.module.syntax.files.get(position.source_file)
            if file is not None and position.source_line:
                args["source"] = f"{Path(file).name}:{position.source_line}"
        duration = span.stop - span.start
        return Event(span.name, span.kind, track, span.start, duration, args | span.args)


def _key(end: Row | Span) -> Row | int:
    return end if isinstance(end, Row) else id(end)


def _together(warps: list[list[Span]]) -> list[Span]:
    """The spans of warps that do the same as those of one, which moves the bytes of all."""
    first = warps[0]
    for number, span in enumerate(first if len(warps) > 1 else ()):
        moved = sum(int(spans[number].args.get("bytes", 0)) for spans in warps)
        if moved:
            span.args["bytes"] = moved
    return first


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans that overlap in time on as many lanes as that takes."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.start, s.stop)):
        free = next((lane for lane in lanes if lane[-1].stop <= span.start), None)
        if free is None:
            lanes.append(free := [])
        free.append(span)
    return lanes
