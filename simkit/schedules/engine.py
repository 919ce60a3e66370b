"""A discrete-event simulator: agents run programs on resources that serve in order of arrival.

An agent (a warpgroup, a producer warp, a copy engine) is a generator that yields what it does next:

- ``Run(work)``: takes the resources and goes on when the work and its latency are over.
- ``Issue(work, signal)``: goes on when the work starts; ``signal`` is told when it has ended. So
  does a warp that issues tensor-core products: a full pipe holds it back, the result comes later.
- ``Start(work, signal)``: goes on at once, as after a bulk copy.
- ``Arrive(barrier)``, ``Wait(barrier, phase)``, ``Delay(cycles)``.

A resource does ``rate`` units a cycle and serves one work at a time, in order of arrival. A work
that needs several waits for each on its own and has ended when the last has served it; it starts
when the first that it names does. Nothing overtakes.

Time is in cycles. A simulation can be timed again at other rates with the same order of service
(`Simulation.retimed`): then every start is a maximum of sums, so that a higher rate never makes it
longer. Without a fixed order that is not so for any scheduler that serves what comes first (R. L.
Graham, Bounds on multiprocessing timing anomalies, 1969).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from simkit.errors import SimkitError


class ScheduleError(SimkitError):
    """A program that cannot run: an unknown resource, a wait that nobody ends, a bad amount."""


@dataclass(frozen=True, slots=True)
class Work:
    """``amounts``: units by resource. ``latency``: cycles from the end of service to the result.

    ``kind``: one of `traces.events.KINDS`.
    """

    name: str
    kind: str
    amounts: tuple[tuple[str, float], ...]
    latency: float = 0.0


class Barrier:
    """Completes a phase whenever ``count`` arrivals are in, at the time of the last of them.

    ``latency``: cycles from the completion to whoever waited goes on.
    """

    __slots__ = ("arrived", "cause", "causes", "count", "latency", "name", "phases", "time")

    def __init__(self, name: str, count: int = 1, latency: float = 0.0) -> None:
        if count < 1:
            raise ScheduleError(f"barrier {name!r} wants {count} arrivals; it takes 1 or more")
        self.name, self.count, self.latency = name, count, latency
        self.arrived = 0
        self.time = 0.0  # of the last arrival of this phase
        self.cause = -1
        self.phases: list[float] = []
        self.causes: list[int] = []


@dataclass(frozen=True, slots=True)
class Run:
    work: Work


@dataclass(frozen=True, slots=True)
class Issue:
    work: Work
    signal: Barrier | None = None


@dataclass(frozen=True, slots=True)
class Start:
    work: Work
    signal: Barrier | None = None


@dataclass(frozen=True, slots=True)
class Arrive:
    barrier: Barrier


@dataclass(frozen=True, slots=True)
class Wait:
    """For the end of phase ``phase`` (0 is the first)."""

    barrier: Barrier
    phase: int


@dataclass(frozen=True, slots=True)
class Delay:
    cycles: float


Step: TypeAlias = Run | Issue | Start | Arrive | Wait | Delay
Program: TypeAlias = Generator[Step, None, None]


@dataclass(frozen=True, slots=True)
class Agent:
    """``process``: what it belongs to in traces, such as a CTA."""

    process: str
    name: str
    program: Program


Agents: TypeAlias = Callable[[], Sequence[Agent]]
"""Builds agents that have not run yet, with barriers of their own."""


@dataclass(frozen=True, slots=True)
class Service:
    """One work as it was served. ``asked``: when its agent wanted it. ``cause``: the service whose
    end let it start (-1: none did). ``blocking``: whether the agent went on at the end only.
    """

    agent: int
    work: Work
    asked: float
    start: float
    stop: float
    cause: int
    blocking: bool


@dataclass(frozen=True, slots=True)
class Waited:
    """A wait for ``barrier`` that took from ``start`` to ``stop``. ``cause``: the service whose end
    completed the phase (-1: an agent that arrived before it did any work).
    """

    agent: int
    barrier: str
    start: float
    stop: float
    cause: int


@dataclass(frozen=True)
class Simulation:
    """What happened. ``busy``: cycles by resource. ``makespan``: until the last result."""

    rates: Mapping[str, float]
    agents: tuple[tuple[str, str], ...]
    services: tuple[Service, ...]
    waits: tuple[Waited, ...]
    busy: Mapping[str, float]
    makespan: float
    activations: Sequence[int] = field(repr=False)
    build: Agents = field(repr=False)

    def utilisation(self, resource: str) -> float:
        """Of the whole makespan, 0 to 1."""
        return self.busy[resource] / self.makespan if self.makespan else 0.0

    def work_done(self, resource: str) -> float:
        """Units."""
        return self.busy[resource] * self.rates[resource]

    def retimed(self, rates: Mapping[str, float]) -> Simulation:
        """The same works in the same order of service at other rates."""
        return simulate(rates, self.build, activations=self.activations)

    def critical_path(self) -> tuple[Service, ...]:
        """Services each of which let the next one start, up to the last to end."""
        if not self.services:
            return ()
        at = max(range(len(self.services)), key=lambda i: _end(self.services[i]))
        path = []
        while at >= 0:
            path.append(self.services[at])
            at = self.services[at].cause
        return tuple(reversed(path))


def simulate(
    rates: Mapping[str, float],
    build: Agents,
    *,
    activations: Sequence[int] | None = None,
    record: bool = True,
) -> Simulation:
    """Runs all agents to their end.

    ``rates``: units a cycle by resource. ``activations``: the order of another simulation of the
    same agents, to be kept. ``record``: whether services and waits are kept; without them a run
    takes half the time. Errors: `ScheduleError` for an unknown resource, an amount or rate that
    makes no sense, and agents that wait for ever (who waits for what).
    """
    return _Simulator(rates, build, record).run(activations)


@dataclass(slots=True)
class _Task:
    """An agent at work: the time that it has reached, and the service that made it so late."""

    number: int
    agent: Agent
    time: float = 0.0
    cause: int = -1
    parked: Wait | None = None


class _Simulator:
    def __init__(self, rates: Mapping[str, float], build: Agents, record: bool) -> None:
        for name, rate in rates.items():
            if not rate > 0:
                raise ScheduleError(f"resource {name!r} has rate {rate}; it must be above 0")
        self._rates, self._build, self._record = rates, build, record
        self._free = dict.fromkeys(rates, 0.0)
        self._last = dict.fromkeys(rates, -1)  # service that a resource did last
        self._busy = dict.fromkeys(rates, 0.0)
        self._services: list[Service] = []
        self._waits: list[Waited] = []
        self._count = 0
        self._makespan = 0.0
        self._heap: list[tuple[float, int, _Task]] = []
        self._pushed = 0
        self._parked: dict[int, list[_Task]] = {}

    def run(self, activations: Sequence[int] | None) -> Simulation:
        tasks = [_Task(number, agent) for number, agent in enumerate(self._build())]
        order: list[int] = []
        if activations is None:
            for task in tasks:
                self._push(task)
            while self._heap:
                task = heapq.heappop(self._heap)[2]
                order.append(task.number)
                self._activate(task)
        else:
            order = list(activations)
            for number in order:
                self._activate(tasks[number])
        stuck = [task for task in tasks if task.parked is not None]
        if stuck:
            raise ScheduleError(_deadlock(stuck))
        return Simulation(
            rates=dict(self._rates),
            agents=tuple((task.agent.process, task.agent.name) for task in tasks),
            services=tuple(self._services),
            waits=tuple(self._waits),
            busy=self._busy,
            makespan=self._makespan,
            activations=order,
            build=self._build,
        )

    def _push(self, task: _Task) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (task.time, self._pushed, task))

    def _activate(self, task: _Task) -> None:
        """Steps up to and including the first that takes time."""
        if task.parked is not None:
            self._end_wait(task, task.parked)
            task.parked = None
        for step in task.agent.program:
            kind = type(step)
            if kind is Run:
                stop = self._serve(task, step.work, None, blocking=True)  # type: ignore[union-attr]
                task.time = stop + step.work.latency  # type: ignore[union-attr]
                task.cause = self._count - 1
            elif kind is Issue:
                before = self._count
                self._serve(task, step.work, step.signal, blocking=False)  # type: ignore[union-attr]
                if self._started > task.time:
                    task.cause = self._blocker
                task.time = self._started
                assert self._count == before + 1
            elif kind is Start:
                self._serve(task, step.work, step.signal, blocking=False)  # type: ignore[union-attr]
                continue
            elif kind is Arrive:
                self._arrive(step.barrier, task.time, task.cause)  # type: ignore[union-attr]
                continue
            elif kind is Wait:
                barrier = step.barrier  # type: ignore[union-attr]
                if len(barrier.phases) <= step.phase:  # type: ignore[union-attr]
                    task.parked = step  # type: ignore[assignment]
                    self._parked.setdefault(id(barrier), []).append(task)
                    return
                self._end_wait(task, step)  # type: ignore[arg-type]
            else:
                task.time += step.cycles  # type: ignore[union-attr]
            self._push(task)
            return
        self._makespan = max(self._makespan, task.time)

    def _serve(self, task: _Task, work: Work, signal: Barrier | None, *, blocking: bool) -> float:
        """Reserves the resources; the end of service."""
        free, rates, last, asked = self._free, self._rates, self._last, task.time
        start = stop = asked
        cause = task.cause
        try:
            first = True
            for name, amount in work.amounts:
                begin = free[name]
                if begin > asked:
                    if first:
                        start, cause = begin, last[name]
                else:
                    begin = asked
                cycles = amount / rates[name]
                end = begin + cycles
                if end > stop:
                    if not first and begin > asked:
                        cause = last[name]
                    stop = end
                free[name] = end
                self._busy[name] += cycles
                last[name] = self._count
                first = False
        except KeyError as error:
            raise ScheduleError(
                f"{task.agent.name}: {work.name!r} wants {error.args[0]!r}, which is none of "
                f"{', '.join(rates)}"
            ) from None
        if not stop >= start:
            raise ScheduleError(f"{task.agent.name}: {work.name!r} has amounts {work.amounts}")
        if self._record:
            self._services.append(Service(task.number, work, asked, start, stop, cause, blocking))
        self._started, self._blocker = start, cause
        self._count += 1
        done = stop + work.latency
        if done > self._makespan:
            self._makespan = done
        if signal is not None:
            self._arrive(signal, done, self._count - 1)
        return stop

    def _arrive(self, barrier: Barrier, time: float, cause: int) -> None:
        if barrier.arrived == 0 or time > barrier.time:
            barrier.time, barrier.cause = time, cause
        barrier.arrived += 1
        if barrier.arrived < barrier.count:
            return
        barrier.phases.append(barrier.time)
        barrier.causes.append(barrier.cause)
        barrier.arrived = 0
        waiting = self._parked.pop(id(barrier), None)
        if waiting is None:
            return
        later = []
        for task in waiting:
            assert task.parked is not None
            if len(barrier.phases) > task.parked.phase:
                at = barrier.phases[task.parked.phase] + barrier.latency
                self._pushed += 1
                heapq.heappush(self._heap, (max(task.time, at), self._pushed, task))
            else:
                later.append(task)
        if later:
            self._parked[id(barrier)] = later

    def _end_wait(self, task: _Task, wait: Wait) -> None:
        barrier = wait.barrier
        stop = barrier.phases[wait.phase] + barrier.latency
        if stop > task.time:
            cause = barrier.causes[wait.phase]
            if self._record:
                self._waits.append(Waited(task.number, barrier.name, task.time, stop, cause))
            task.time, task.cause = stop, cause

    _started: float
    _blocker: int


def _end(service: Service) -> float:
    return service.stop + service.work.latency


def _deadlock(stuck: Sequence[_Task]) -> str:
    waits = []
    for task in stuck:
        assert task.parked is not None
        barrier, phase = task.parked.barrier, task.parked.phase
        waits.append(
            f"{task.agent.process}/{task.agent.name} waits for phase {phase} of {barrier.name!r}, "
            f"which has completed {len(barrier.phases)} and has {barrier.arrived} of "
            f"{barrier.count} arrivals"
        )
    return "nobody can go on: " + "; ".join(waits)
