"""Launches over time: a CPU submits kernels, a GPU runs them in streams or as a graph.

A kernel starts when it has been submitted, its stream's kernel before it and those that it waits
for have ended, the gap between kernels has passed, and its part of the GPU is free. If the CPU
submits more slowly than the GPU works, the GPU waits: the sequence is launch-bound.

Source: 3.4 Attention kernel, launch overhead and CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simkit.errors import ShapeError
from simkit.schedules.parameters import (
    GRAPH_GAP,
    GRAPH_LAUNCH,
    HOST_LAUNCH,
    LAUNCH_GAP,
    PDL_GAIN,
)
from simkit.schedules.prediction import Prediction, Submission


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """``seconds`` of work. ``stream``: runs after the kernels submitted before it to the same.
    ``after``: numbers of kernels of other streams that it waits for (events). ``share``: part of
    the GPU that it takes, above 0 to 1. ``dependent``: programmatic dependent launch, after the
    kernel before it in its stream; ``prologue``: seconds of it that need nothing of that one.
    """

    name: str
    seconds: float
    stream: int = 0
    after: tuple[int, ...] = ()
    share: float = 1.0
    dependent: bool = False
    prologue: float = 0.0

    def __post_init__(self) -> None:
        if not self.seconds >= self.prologue >= 0:
            raise ShapeError(
                f"{self.name} takes {self.seconds} s with a prologue of {self.prologue} s; "
                f"0 <= prologue <= seconds"
            )
        if not 0 < self.share <= 1:
            raise ShapeError(f"{self.name} takes {self.share} of the GPU; above 0, to 1")
        if self.prologue and not self.dependent:
            raise ShapeError(f"{self.name} has a prologue, which takes a dependent launch")


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds. ``host``: of the CPU for a launch. ``gap``: between kernels of a stream. ``pdl``:
    of it that a dependent launch saves. ``graph``: of the CPU for a whole graph. ``graph_gap``:
    between kernels of a graph.
    """

    host: float = HOST_LAUNCH.value
    gap: float = LAUNCH_GAP.value
    pdl: float = PDL_GAIN.value
    graph: float = GRAPH_LAUNCH.value
    graph_gap: float = GRAPH_GAP.value


@dataclass(frozen=True)
class Span:
    """When a kernel was submitted, started and ended, in seconds from the first call."""

    kernel: Kernel
    submitted: float
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """``host_seconds``: until the CPU has submitted everything. ``unhindered``: seconds if
    submitting took no time.
    """

    spans: tuple[Span, ...]
    host_seconds: float
    unhindered: float

    @property
    def seconds(self) -> float:
        """From the first call to the end of the last kernel."""
        return max(span.stop for span in self.spans)

    @property
    def busy(self) -> float:
        """Seconds in which some kernel runs."""
        total, reached = 0.0, 0.0
        for span in sorted(self.spans, key=lambda span: span.start):
            total += max(0.0, span.stop - max(span.start, reached))
            reached = max(reached, span.stop)
        return total

    @property
    def idle(self) -> float:
        """Seconds in which none does."""
        return self.seconds - self.busy

    @property
    def is_launch_bound(self) -> bool:
        """Whether the CPU takes longer to submit than the GPU would take without waiting for it."""
        return self.host_seconds > self.unhindered


def timeline(
    kernels: Sequence[Kernel], *, submission: Submission = "stream", costs: Costs = Costs()
) -> Timeline:
    """Submits ``kernels`` in their order. `ShapeError` for none, and for one that waits for a
    kernel that is not submitted before it.
    """
    if not kernels:
        raise ShapeError("there is no kernel to launch")
    for number, kernel in enumerate(kernels):
        if any(not 0 <= other < number for other in kernel.after):
            raise ShapeError(f"kernel {number} ({kernel.name}) waits for {kernel.after}")
    if submission == "graph":
        submitted, gap = [costs.graph] * len(kernels), costs.graph_gap
    else:
        submitted, gap = [costs.host * (number + 1) for number in range(len(kernels))], costs.gap
    spans = _run(kernels, submitted, gap, costs.pdl)
    free = _run(kernels, [0.0] * len(kernels), gap, costs.pdl)
    return Timeline(tuple(spans), submitted[-1], max(span.stop for span in free))


def kernels_of(prediction: Prediction) -> tuple[Kernel, ...]:
    """The launches of a prediction, one after another in a stream."""
    return tuple(
        Kernel(name=run.launch.name, seconds=run.seconds, dependent=run.launch.dependent)
        for run in prediction.runs
    )


def _run(
    kernels: Sequence[Kernel], submitted: Sequence[float], gap: float, pdl: float
) -> list[Span]:
    spans: list[Span] = []
    last: dict[int, Span] = {}  # of each stream
    for kernel, at in zip(kernels, submitted, strict=True):
        ready = max([at, *(spans[other].stop + gap for other in kernel.after)])
        before = last.get(kernel.stream)
        if before is not None:
            early = pdl + kernel.prologue if kernel.dependent else 0.0
            # Not before its predecessor has started, however long its prologue.
            ready = max(ready, before.start, before.stop + gap - early)
        # A dependent launch's prologue runs on what its predecessor leaves free.
        others = [span for span in spans if not (kernel.dependent and span is before)]
        start = _when_free(others, kernel, ready)
        span = Span(kernel, at, start, start + kernel.seconds)
        spans.append(span)
        last[kernel.stream] = span
    return spans


def _when_free(spans: Sequence[Span], kernel: Kernel, ready: float) -> float:
    """The first time from ``ready`` on at which the kernels submitted before leave it its share."""
    limit = 1 - kernel.share + 1e-9
    for start in sorted({ready, *(span.stop for span in spans if span.stop > ready)}):
        stop = start + kernel.seconds
        beside = [span for span in spans if span.start < stop and span.stop > start]
        # What runs together peaks where one of them starts.
        times = [start, *(span.start for span in beside if span.start > start)]
        if all(_used(beside, time) <= limit for time in times):
            return start
    raise AssertionError("after the last kernel has ended, all of the GPU is free")


def _used(spans: Sequence[Span], time: float) -> float:
    return sum(span.kernel.share for span in spans if span.start <= time < span.stop)
