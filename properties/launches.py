"""Laws of launches over time: what a CPU submits and a GPU runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from properties.law import Context, Law, LawViolation
from simkit.schedules import launches
from simkit.schedules.launches import Costs, Kernel, Timeline

NAME = "launches"


@dataclass(frozen=True)
class LaunchesCase:
    """Kernels of so many nanoseconds each, in ``streams`` in turn, each of which takes ``share`` of
    the GPU; every ``dependent``-th is launched dependently, with that part of it a prologue.
    """

    nanoseconds: tuple[int, ...] = (2000, 14500, 900)
    streams: int = 1
    share: float = 1.0
    dependent: int = 0
    prologue: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "nanoseconds", tuple(self.nanoseconds))  # JSON has lists

    def kernels(self, *, dependent: bool = True) -> list[Kernel]:
        found = []
        for number, length in enumerate(self.nanoseconds):
            early = dependent and self.dependent > 0 and number % self.dependent == 0 and number > 0
            found.append(
                Kernel(
                    name=f"kernel {number}",
                    seconds=length * 1e-9,
                    stream=number % self.streams,
                    share=self.share,
                    dependent=early,
                    prologue=length * 1e-9 * self.prologue if early else 0.0,
                )
            )
        return found


def _both(case: LaunchesCase) -> list[Timeline]:
    return [launches.timeline(case.kernels(), submission=how) for how in ("stream", "graph")]


def check_order(context: Context, case: LaunchesCase) -> None:
    """Nothing starts before it is submitted, or before what its stream has ahead of it."""
    for found in _both(case):
        last: dict[int, float] = {}
        for span in found.spans:
            early = span.kernel.prologue + Costs().pdl if span.kernel.dependent else 0.0
            if span.start < span.submitted:
                raise LawViolation(f"{span.kernel.name} starts before it is submitted")
            if span.start < last.get(span.kernel.stream, 0.0) - early - 1e-15:
                raise LawViolation(f"{span.kernel.name} starts before what is ahead of it ends")
            if abs(span.stop - span.start - span.kernel.seconds) > 1e-15:
                raise LawViolation(f"{span.kernel.name} takes {span.stop - span.start} s")
            last[span.kernel.stream] = span.stop


def check_capacity(context: Context, case: LaunchesCase) -> None:
    """At no time do kernels take more than the GPU, but for the prologues of dependent ones."""
    for found in _both(replace(case, dependent=0)):
        for span in found.spans:
            beside = [other for other in found.spans if other.start <= span.start < other.stop]
            used = sum(other.kernel.share for other in beside)
            if used > 1 + 1e-6:
                raise LawViolation(f"{len(beside)} kernels take {used} of the GPU at a time")


def check_bounds(context: Context, case: LaunchesCase) -> None:
    """All takes at least what the CPU takes and what the longest stream does."""
    for found in _both(case):
        streams: dict[int, float] = {}
        for span in found.spans:
            work = span.kernel.seconds - span.kernel.prologue
            streams[span.kernel.stream] = streams.get(span.kernel.stream, 0.0) + work
        least = max(found.host_seconds, *streams.values())
        if found.seconds < least * (1 - 1e-12):
            raise LawViolation(f"{found.seconds} s for work of {least} s")
        if not -1e-15 <= found.idle <= found.seconds:
            raise LawViolation(f"the GPU is idle for {found.idle} of {found.seconds} s")


def check_dependent(context: Context, case: LaunchesCase) -> None:
    """In one stream, programmatic dependent launch makes nothing later."""
    one = replace(case, streams=1)
    for how in ("stream", "graph"):
        plain = launches.timeline(one.kernels(dependent=False), submission=how)
        early = launches.timeline(one.kernels(), submission=how)
        if early.seconds > plain.seconds + 1e-15:
            raise LawViolation(f"{how}: {plain.seconds} s become {early.seconds} s")


def launches_cases() -> SearchStrategy[LaunchesCase]:
    return st.builds(
        LaunchesCase,
        nanoseconds=st.lists(st.integers(0, 50_000), min_size=1, max_size=12).map(tuple),
        streams=st.integers(1, 3),
        share=st.sampled_from((0.25, 0.5, 1.0)),
        dependent=st.integers(0, 3),
        prologue=st.sampled_from((0.0, 0.3, 1.0)),
    )


_CORNERS = (
    LaunchesCase(),
    LaunchesCase(nanoseconds=(0,)),
    LaunchesCase(nanoseconds=(9000,) * 6, streams=3, share=0.5),
    LaunchesCase(nanoseconds=(9000,) * 6, dependent=1, prologue=0.3),
)


def _law(name: str, statement: str, check: object) -> Law:
    return Law(
        algorithm=NAME,
        name=name,
        tier="exact",
        statement=statement,
        check=check,  # type: ignore[arg-type]
        strategy=launches_cases(),
        case_type=LaunchesCase,
        corners=_CORNERS,
        examples=100,
        uses_device=False,
    )


LAWS = [
    _law(
        "order", "nothing starts before it is submitted and its stream has come to it", check_order
    ),
    _law("capacity", "kernels that run together fit on the GPU", check_capacity),
    _law("bounds", "no less time than the CPU and each stream take", check_bounds),
    _law("dependent", "a dependent launch makes nothing later", check_dependent),
]
