"""What the executor tells a trace of the CTAs of one wave: blocks, waits, copies, barriers.

Moments are steps: what happens at moment m is over at m + 1.  Inside a block a moment is where its
instruction stands; between blocks it is the step that has just been taken.  Flows leave what they
come from at its end, and reach a wait at its end or anything else at its start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from gpu.ptx.special_registers import cta_coordinate
from gpu.ptx.tracing.log import WARP, End, Row, Span, TraceLog
from gpu.ptx.tracing.segments import Layout, Segment

if TYPE_CHECKING:
    from gpu.ptx.grid import Grid

Array = np.ndarray
Place = tuple[str, int, int]
"""A barrier: "barrier" or "mbarrier" with a CTA and a number or offset, or "cluster barrier"."""

_CLUSTER = "cluster barrier"


@dataclass(slots=True)
class Phase:
    """A phase of a barrier: since when somebody has come, who came last, which copies landed."""

    first: int
    number: int
    last: End | None = None
    copies: list[End] = field(default_factory=list)


@dataclass(slots=True)
class CopyGroup:
    """The cp.async of a CTA's group: when they were done for each of its warps."""

    span: Span
    done: dict[int, int] = field(default_factory=dict)


class Recorder:
    """Writes to the log what happens to the traced ones among a wave's warps."""

    def __init__(self, grid: Grid, log: TraceLog) -> None:
        self.grid = grid
        self.log = log
        log.wave = self
        position = np.arange(grid.ctas)
        x, y, z = (cta_coordinate(grid, position, d) for d in range(3))
        numbers = x + grid.launch.grid[0] * (y + grid.launch.grid[1] * z)
        traced = np.isin(numbers, list(log.ctas))
        self.cta: list[int] = np.where(traced, numbers, -1).tolist()  # -1: not traced
        self.row_of_warp: list[Row | None] = [
            None if self.cta[cta] < 0 else Row(self.cta[cta], WARP, warp)
            for cta in range(grid.ctas)
            for warp in range(grid.warps_per_cta)
        ]
        self.is_traced = traced[grid.cta_of_warp]
        # The block at hand.
        self._layout: Layout | None = None
        self._here: list[int] = []
        self._bytes: defaultdict[tuple[int, Segment], int] = defaultdict(int)
        self._moment = max(0, log.now - 1)
        # What has begun and is not over.
        self._waiting: dict[int, Span] = {}
        self._phases: dict[Place, Phase] = {}
        self._over: dict[Place, Phase] = {}
        self._seen: set[tuple[int, int, int]] = set()
        self._copies: dict[tuple[int, int], CopyGroup] = {}
        self._waited: defaultdict[int, int] = defaultdict(int)
        self._products: dict[int, Span] = {}
        self._groups: defaultdict[int, list[Span | None]] = defaultdict(list)
        self._over_groups: defaultdict[int, int] = defaultdict(int)
        self._seen_groups: defaultdict[int, int] = defaultdict(int)
        self._for_products: defaultdict[int, list[End]] = defaultdict(list)

    # Blocks and waits

    def enter(self, block: int, warps: Array, mask: Array | None) -> None:
        """Some warps, those with an active lane, begin a block."""
        here = warps if mask is None else warps[mask.any(axis=0)]
        self._here = here[self.is_traced[here]].tolist()
        self._layout = self.log.layout(block)
        self._moment = self.log.now

    def leave(self, waits: bool) -> None:
        """They have done it; ``waits``: their last instruction has yet to see what it waits for."""
        layout, start = self._layout, self.log.now
        assert layout is not None
        self._layout = None
        self.log.now = start + layout.length
        self._moment = max(0, self.log.now - 1)
        for warp in self._here:
            row = self.row_of_warp[warp]
            assert row is not None
            for segment in layout.segments:
                span = self._add_segment(row, segment, start, self._bytes.pop((warp, segment), 0))
            if waits:
                self._waiting[warp] = span

    def _add_segment(self, row: Row, segment: Segment, start: int, moved: int) -> Span:
        """Adds a stretch of a block to a warp's, or makes the last one longer that it goes on."""
        begin, end = start + segment.first, start + segment.end
        spans = self.log.rows.get(row)
        span = spans[-1] if spans else None
        if (
            span is None
            or (span.stop, span.kind) != (begin, segment.kind)
            or (segment.kind != "compute" and span.site != segment.site)
        ):
            span = self.log.add(row, Span(segment.name, segment.kind, begin, end, segment.site))
        span.stop = end
        if moved:
            span.args["bytes"] = int(span.args.get("bytes", 0)) + moved
        return span

    def moment(self, site: int = 0) -> int:
        """Now; inside a block, at the instruction ``site`` or, without one, the last one told."""
        if self._layout is not None:
            step = self._layout.step_of_site.get(site)
            if step is not None:
                # A function that a block calls twice has its sites in two places.
                self._moment = max(self._moment, self.log.now + step)
        return self._moment

    def _name(self, site: int) -> str:
        assert self._layout is not None
        return self._layout.name_of_site[site]

    def access(self, warps: Array, mask: Array | None, size: int, site: int) -> None:
        """A load, store or atomic of global memory, ``size`` bytes for each active lane."""
        assert self._layout is not None
        segment = self._layout.segment_at(site)
        lanes = np.full(len(warps), 32) if mask is None else mask.sum(axis=0)
        for warp, count in zip(warps.tolist(), lanes.tolist(), strict=True):
            if count and self.is_traced[warp]:
                self._bytes[warp, segment] += count * size

    def end_wait(self, warps: Iterable[int]) -> None:
        """These warps go on."""
        for warp in warps:
            span = self._waiting.pop(warp, None)
            if span is not None:
                span.stop = self._moment + 1

    def close(self) -> None:
        """As far as it came: a block that failed shows whole, who waits has waited until now."""
        if self._layout is not None:
            self.leave(waits=False)
        self.end_wait([*self._waiting])

    # Barriers of CTAs and clusters

    def meet(self, warps: Array, number: int) -> None:
        """All warps of some CTAs come to a barrier at once."""
        for cta in np.unique(self.grid.cta_of_warp[warps]).tolist():
            self._end_phase(("barrier", cta, number))
        self.end_wait(warps.tolist())

    def come_to_barrier(self, ctas: Array, numbers: Array, warps: Array, site: int) -> None:
        moment = self.moment(site)
        for cta, number, warp in zip(ctas.tolist(), numbers.tolist(), warps.tolist(), strict=True):
            self._come(("barrier", cta, number), warp, moment)

    def leave_barrier(self, places: Array, numbers: Array, warps: Array) -> None:
        """Complete barriers (CTA, number) let these warps go on, who wait at ``numbers``."""
        for cta, number in places.tolist():
            self._end_phase(("barrier", cta, number))
        self.end_wait(warps.tolist())
        for number, warp in zip(numbers.tolist(), warps.tolist(), strict=True):
            cta = int(self.grid.cta_of_warp[warp])
            self._release(self._over["barrier", cta, number], warp)

    def come_to_cluster_barrier(self, warps: Array, site: int) -> None:
        moment = self.moment(site)
        for warp in warps.tolist():
            self._come(self._cluster(warp), warp, moment)

    def end_cluster_barrier(self, clusters: Array) -> None:
        for cluster in clusters.tolist():
            self._end_phase((_CLUSTER, cluster, 0))

    def leave_cluster_barrier(self, warps: Array) -> None:
        for warp in warps.tolist():
            phase = self._over.get(self._cluster(warp))
            if phase is not None:
                self._release(phase, warp)

    def _cluster(self, warp: int) -> Place:
        return _CLUSTER, int(self.grid.cluster_of_warp[warp]), 0

    def _phase(self, place: Place) -> Phase:
        """The phase in which a barrier is."""
        if place not in self._phases:
            before = self._over.get(place)
            self._phases[place] = Phase(self._moment, before.number + 1 if before else 0)
        return self._phases[place]

    def _come(self, place: Place, warp: int, moment: int) -> None:
        row = self.row_of_warp[warp]
        self._phase(place).last = None if row is None else (row, moment + 1)

    def _end_phase(self, place: Place) -> None:
        """A barrier's phase is complete: it shows from the first that came on."""
        phase = self._over[place] = self._phase(place)
        del self._phases[place]
        kind, cta, number = place
        if kind != _CLUSTER and self.cta[cta] >= 0:
            span = Span(f"phase {phase.number}", "barrier", phase.first, self._moment + 1)
            self.log.add(Row(self.cta[cta], f"{kind} {number}"), span)

    def _release(self, phase: Phase, warp: int) -> None:
        """A flow from whoever came last to a warp that goes on."""
        row = self.row_of_warp[warp]
        if phase.last is not None and row is not None and phase.last[0] != row:
            self.log.flow("arrive", phase.last, (row, self._moment + 1))

    # mbarriers

    def _object(self, object_: int) -> Place:
        return "mbarrier", *divmod(object_, self.grid.shared_stride)

    def arrive(self, objects: Array, warps: Array, site: int) -> None:
        """Lanes of some warps arrive at mbarriers (flat offsets)."""
        moment = self.moment(site)
        for object_, warp in dict(zip(objects.tolist(), warps.tolist(), strict=True)).items():
            self._come(self._object(object_), warp, moment)

    def complete(self, objects: Array, site: int) -> None:
        """Phases of mbarriers are over."""
        self.moment(site)
        for object_ in objects.tolist():
            self._end_phase(self._object(object_))

    def see_phase(self, objects: Array, warps: Array, site: int) -> None:
        """Lanes find the phases that they wait for complete; the first time tells why."""
        moment = self.moment(site)
        for object_, warp in dict.fromkeys(zip(objects.tolist(), warps.tolist(), strict=True)):
            row, phase = self.row_of_warp[warp], self._over.get(self._object(object_))
            if row is None or phase is None or (object_, warp, phase.number) in self._seen:
                continue
            self._seen.add((object_, warp, phase.number))
            self._release(phase, warp)
            for copy in phase.copies:
                self.log.flow("copy", copy, (row, moment + 1))
            if phase.copies:
                self._for_products[warp].append((row, moment + 1))

    # Asynchronous copies

    def copy(
        self, warps: Array, moved: Array, site: int, kind: str, is_global: bool
    ) -> list[Span | None]:
        """Copies begin, one for each entry of ``warps``; ``moved``: bytes, of global memory or
        between CTAs.
        """
        moment, name = self.moment(site), self._name(site)
        unit = "TMA" if "tensor" in name else "bulk copies" if "bulk" in name else "async stores"
        what = "bytes" if is_global else "shared_bytes"
        spans: list[Span | None] = []
        for warp, count in zip(warps.tolist(), moved.tolist(), strict=True):
            row = self.row_of_warp[warp]
            span = Span(name, kind, moment, moment + 1, site, {what: count})
            spans.append(row and self.log.add(Row(row.cta, unit), span))
        return spans

    def land(
        self, spans: list[Span | None], rows: Iterable[int], site: int,
        objects: Array | None = None,
    ) -> None:  # fmt: skip
        """Some of these copies have been done, and tell mbarriers (flat offsets) so."""
        if self._layout is None and objects is not None:
            self.log.now += 1
            self._moment = self.log.now - 1
        moment = self.moment(site)
        for number, row in enumerate(rows):
            span = spans[row]
            if span is not None:
                span.stop = max(span.stop, moment + 1)
            if objects is not None:
                phase = self._phase(self._object(int(objects[number])))
                phase.last = None
                if span is not None:
                    phase.copies.append((span, moment + 1))

    def copy_group(self, numbers: Array, warps: Array, moved: Array, site: int) -> None:
        """cp.async of some warps, in the groups ``numbers`` of theirs."""
        moment = self.moment(site)
        for warp, number, count in zip(
            warps.tolist(), numbers.tolist(), moved.tolist(), strict=True
        ):
            row = self.row_of_warp[warp]
            if row is None or not count:
                continue
            key = (row.cta, number)
            if key not in self._copies:
                span = Span("cp.async", "load", moment, moment + 1, site, {"bytes": 0})
                self._copies[key] = CopyGroup(self.log.add(Row(row.cta, "cp.async"), span))
            args = self._copies[key].span.args
            args["bytes"] = int(args["bytes"]) + count

    def group_done(self, numbers: Array, warps: Array) -> None:
        """cp.async of such groups have been done."""
        for warp, number in zip(warps.tolist(), numbers.tolist(), strict=True):
            row = self.row_of_warp[warp]
            group = self._copies.get((row.cta, number)) if row is not None else None
            if group is not None:
                group.done[warp] = self._moment + 1
                group.span.stop = max(group.span.stop, self._moment + 1)

    def groups_seen(self, numbers: Array, warps: Array) -> None:
        """Warps have waited for their groups before these."""
        for warp, end in zip(warps.tolist(), numbers.tolist(), strict=True):
            row = self.row_of_warp[warp]
            if row is None:
                continue
            for number in range(self._waited[warp], end):
                group = self._copies.get((row.cta, number))
                if group is not None and warp in group.done:
                    self.log.flow("copy", (group.span, group.done[warp]), (row, self._moment + 1))
            self._waited[warp] = max(self._waited[warp], end)

    # Tensor-core operations of warpgroups

    def multiply(self, leaders: Array, site: int) -> None:
        """wgmma of the warpgroups that begin with these warps."""
        name = self._name(site)
        for leader in leaders.tolist():
            span = self._products.setdefault(leader, Span(name, "mma", 0, 0, site))
            span.args["operations"] = int(span.args.get("operations", 0)) + 1

    def commit_products(self, leaders: Array, site: int) -> None:
        """They are a group; it may be empty."""
        moment = self.moment(site)
        for leader in leaders.tolist():
            span, row = self._products.pop(leader, None), self.row_of_warp[leader]
            if span is not None and row is not None:
                span.start, span.stop = moment, moment + 1
                self.log.add(Row(row.cta, "tensor core"), span)
                for warp in range(leader, leader + 4):
                    for seen in self._for_products.pop(warp, ()):
                        self.log.flow("operands", seen, (span, moment))
            self._groups[leader].append(span if row is not None else None)

    def wait_products(self, allowed: int, warps: Array) -> None:
        """Warps go on: all groups of their warpgroups but the latest ``allowed`` are over."""
        leaders = warps - warps % self.grid.warps_per_cta % 4
        for leader, warp in zip(leaders.tolist(), warps.tolist(), strict=True):
            groups, row = self._groups[leader], self.row_of_warp[warp]
            end = len(groups) - allowed
            for number in range(self._seen_groups[warp], end):
                span = groups[number]
                if span is None or row is None:
                    continue
                if self.grid.warpgroups.delays and number >= self._over_groups[leader]:
                    span.stop = self._moment + 1
                self.log.flow("result", (span, span.stop), (row, self._moment + 1))
            for seen, who in ((self._seen_groups, warp), (self._over_groups, leader)):
                seen[who] = max(seen[who], end)
