"""What a simulation did: services, waits, and the stretches of time that made it so long."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from simkit.schedules.engine import Work


Mode: TypeAlias = Literal["run", "issue", "start"]
"""When the agent goes on: with the result, when the service starts, at once."""


class Span(NamedTuple):
    """A resource at work for one service."""

    resource: str
    start: float
    stop: float


class Service(NamedTuple):
    """One work as it was served, in ``spans`` by resource. ``asked``: when its agent wanted it.

    ``start``: of the first span. ``stop``: of the last to end; the result comes ``work.latency``
    later. ``mode``: of what step.
    """

    agent: int
    work: Work
    asked: float
    start: float
    stop: float
    spans: tuple[Span, ...]
    mode: Mode

    @property
    def result(self) -> float:
        """When the result is there."""
        return self.stop + self.work.latency

    @property
    def goes_on(self) -> float:
        """When its agent goes on."""
        return {"run": self.result, "issue": self.start, "start": self.asked}[self.mode]


class Arrival(NamedTuple):
    """Who told a barrier: an agent by itself, or the end of its ``service`` (-1: none)."""

    agent: int
    service: int
    time: float


class Waited(NamedTuple):
    """A wait for ``barrier`` that took from ``start`` to ``stop``; ``told``: the last arrival."""

    agent: int
    barrier: str
    start: float
    stop: float
    told: Arrival


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Time that passed for one reason, and the stretch ``before`` it, which ends when it starts.

    ``what``: a resource at work, or "latency", "barrier" or "delay". ``agent``: whose.
    ``service``: index of the service that it belongs to (-1: none).
    """

    what: str
    agent: int
    service: int
    start: float
    stop: float
    before: Stretch | None = field(repr=False)

    def path(self) -> tuple[Stretch, ...]:
        """The stretches that led to this one, it being the last."""
        found: list[Stretch] = []
        at: Stretch | None = self
        while at is not None:
            found.append(at)
            at = at.before
        return tuple(reversed(found))


@dataclass(frozen=True)
class History:
    """Services in order of service, waits that took time, and the stretch that ended last (None if
    no time passed).
    """

    services: tuple[Service, ...]
    waits: tuple[Waited, ...]
    last: Stretch | None
