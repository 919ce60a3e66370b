"""A CTA alone on its SM: copies in flight beside arithmetic in order, as a trace."""

from __future__ import annotations

from simkit.machine.gpus import Gpu
from traces.events import Event, Trace, Track


class CtaTimeline:
    """Builds the events of one CTA in program order.

    Copies follow one another on a track of their own and start when they are issued; arithmetic,
    on tensor cores or on fp32 lanes, follows one another too. The CTA is busy with arithmetic
    until ``now``; a copy that is issued starts then at the earliest.
    """

    def __init__(self, gpu: Gpu, process: str, start: float = 0.0) -> None:
        self.gpu = gpu
        self.process = process
        self.now = start  # when the CTA reaches what is added next
        self._copies_done = start
        self._loads_done = start
        self._compute_done = start
        self._events: list[Event] = []
        self._copies = Track(process, "copies")
        self._tensor = Track(process, "tensor cores")
        self._lanes = Track(process, "fp32 lanes")
        self._before: CtaTimeline | None = None

    @property
    def bytes_per_cycle(self) -> float:
        """The SM's share of HBM bandwidth."""
        return self.gpu.hbm_bytes_per_s / self.gpu.sm_count / self.gpu.tensor_clock_hz

    def load(self, name: str, count: int) -> None:
        """Issues a copy of ``count`` bytes from HBM; arithmetic goes on meanwhile."""
        start = max(self.now, self._copies_done)
        self._copies_done = start + count / self.bytes_per_cycle
        self._loads_done = self._copies_done
        self._add(f"load {name}", "load", self._copies, start, self._copies_done, bytes=count)

    def store(self, name: str, count: int) -> None:
        """Writes ``count`` bytes to HBM once all arithmetic so far is done."""
        start = max(self.now, self._compute_done, self._copies_done)
        self._copies_done = start + count / self.bytes_per_cycle
        self._add(f"store {name}", "store", self._copies, start, self._copies_done, bytes=count)

    def wait_for_loads(self) -> None:
        """Goes on when arithmetic so far is done and every load that was issued has arrived."""
        self.now = max(self.now, self._compute_done, self._loads_done)

    def wait_for_compute(self) -> None:
        """Goes on when arithmetic so far is done."""
        self.now = max(self.now, self._compute_done)

    def tensor_cores(self, name: str, flop: int) -> None:
        """bf16 products of ``flop`` FLOP on the SM's tensor cores."""
        self._compute(name, "mma", self._tensor, flop / self.gpu.tensor_flop_per_clk, flop=flop)

    def lanes(self, name: str, operations: int, kind: str = "compute") -> None:
        """``operations`` fp32 instructions of one lane each, spread over the SM's lanes."""
        cycles = operations / self.gpu.fp32_lanes
        self._compute(name, kind, self._lanes, cycles, operations=operations)

    def next_kernel(self, process: str) -> CtaTimeline:
        """The timeline of a CTA of the next kernel, which starts when this one has ended."""
        end = max(self.now, self._compute_done, self._copies_done)
        following = CtaTimeline(self.gpu, process, end)
        following._before = self
        return following

    def trace(self, name: str) -> Trace:
        """All events, those of the kernels before included."""
        events: list[Event] = []
        timeline: CtaTimeline | None = self
        while timeline is not None:
            events = [*timeline._events, *events]
            timeline = timeline._before
        return Trace(name, tuple(events))

    def _compute(self, name: str, kind: str, track: Track, cycles: float, **args: int) -> None:
        start = max(self.now, self._compute_done)
        self._compute_done = start + cycles
        self._add(name, kind, track, start, self._compute_done, **args)

    def _add(
        self, name: str, kind: str, track: Track, start: float, stop: float, **args: int
    ) -> None:
        self._events.append(Event(name, kind, track, start, stop - start, args))
