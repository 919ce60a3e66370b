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

Time is in cycles, of which every duration is a multiple of a ``TICK``, rounded up: sums are then
exact (up to 2^33 cycles), so that what repeats does so exactly, and rounding never says who comes
first.

A simulation can be timed again at other rates with the same order of service
(`Simulation.retimed`): then every start is a maximum of sums, so that a higher rate never makes it
longer. Without a fixed order that is not so for any scheduler that serves what comes first (R. L.
Graham, Bounds on multiprocessing timing anomalies, 1969).

A simulation keeps the order of service, no more: what was served when is found when first asked
for, by running again in that order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, inf
from typing import TypeAlias

from simkit.errors import SimkitError
from simkit.schedules.history import Arrival, History, Mode, Service, Span, Stretch, Waited


class ScheduleError(SimkitError):
    """A program that cannot run: an unknown resource, a wait that nobody ends, a bad amount."""


TICKS = 2.0**20  # of a cycle
TICK = 1 / TICKS

Cause: TypeAlias = tuple[Arrival, Stretch | None]
"""An arrival at a barrier, and what ended when it was made."""


@dataclass(frozen=True, slots=True)
class Work:
    """``amounts``: units by resource, each named once. ``latency``: cycles from the end of service
    to the result.

    ``kind``: one of `traces.events.KINDS`. `ScheduleError` for an amount or latency that is no
    number from 0 on.
    """

    name: str
    kind: str
    amounts: tuple[tuple[str, float], ...]
    latency: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "latency", _duration(self.name, "latency", self.latency))
        seen = set()
        for resource, amount in self.amounts:
            _check_number(self.name, resource, amount)
            seen.add(resource)
        if len(seen) < len(self.amounts):
            raise ScheduleError(f"{self.name!r} names a resource twice: {self.amounts}")


class Barrier:
    """Completes a phase whenever ``count`` arrivals are in, at the time of the last of them.

    Arrivals count in the order in which they are made: that of a copy when it starts. No phase
    completes before the one ahead of it. ``latency``: cycles from the completion to whoever waited
    goes on.
    """

    __slots__ = ("arrived", "cause", "causes", "count", "latency", "name", "phases", "time")

    def __init__(self, name: str, count: int = 1, latency: float = 0.0) -> None:
        if count < 1:
            raise ScheduleError(f"barrier {name!r} wants {count} arrivals; it takes 1 or more")
        self.name, self.count, self.latency = name, count, _duration(name, "latency", latency)
        self.arrived = 0
        self.time = 0.0  # of the last arrival so far
        self.cause: Cause | None = None  # that arrival, in a recorded run
        self.phases: list[float] = []
        self.causes: list[Cause | None] = []


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

    def __post_init__(self) -> None:
        if self.phase < 0:
            raise ScheduleError(f"a wait for phase {self.phase} of {self.barrier.name!r}")


@dataclass(frozen=True, slots=True)
class Delay:
    cycles: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "cycles", _duration("a delay", "cycles", self.cycles))


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


@dataclass(frozen=True)
class Simulation:
    """What happened. ``busy``: cycles by resource. ``makespan``: until the last result.

    ``activations``: agents in the order in which they went on, which fixes the order of service.
    """

    rates: Mapping[str, float]
    agents: tuple[tuple[str, str], ...]
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

    @cached_property
    def history(self) -> History:
        """What was served when and why. Takes another run."""
        simulator = _Simulator(self.rates, self.build, record=True)
        simulator.run(self.activations)
        return simulator.history()

    @property
    def services(self) -> tuple[Service, ...]:
        """In order of service."""
        return self.history.services

    @property
    def waits(self) -> tuple[Waited, ...]:
        """Those that took time."""
        return self.history.waits

    def critical_path(self) -> tuple[Stretch, ...]:
        """From 0 to the makespan: stretches each of which let the next one start."""
        last = self.history.last
        return last.path() if last is not None else ()


def simulate(
    rates: Mapping[str, float], build: Agents, *, activations: Sequence[int] | None = None
) -> Simulation:
    """Runs all agents to their end.

    ``rates``: units a cycle by resource. ``activations``: the order of another simulation of the
    same agents, to be kept. Errors: `ScheduleError` for an unknown resource, a rate that makes no
    sense, agents that wait for ever (who waits for what), and an order of other agents.
    """
    return _Simulator(rates, build, record=False).run(activations)


@dataclass(slots=True)
class _Task:
    """An agent at work: the time that it has reached, and why, in a recorded run."""

    number: int
    agent: Agent
    program: Program
    time: float = 0.0
    why: Stretch | None = None
    parked: Wait | None = None
    has_ended: bool = False


class _Simulator:
    def __init__(self, rates: Mapping[str, float], build: Agents, *, record: bool) -> None:
        for name, rate in rates.items():
            if not rate > 0:
                raise ScheduleError(f"resource {name!r} has rate {rate}; it must be above 0")
        self._rates, self._build = dict(rates), build
        self._free = dict.fromkeys(rates, 0.0)
        self._busy = dict.fromkeys(rates, 0.0)
        self._makespan = 0.0
        self._heap: list[tuple[float, int, _Task]] = []
        self._pushed = 0
        self._parked: dict[int, list[_Task]] = {}
        self._recorder = _Recorder() if record else None

    def history(self) -> History:
        assert self._recorder is not None
        return self._recorder.history()

    def run(self, activations: Sequence[int] | None) -> Simulation:
        agents = self._build()
        tasks = [_Task(number, agent, agent.program) for number, agent in enumerate(agents)]
        if activations is None:
            activations = self._run_by_time(tasks)
        else:
            self._run_in_order(tasks, activations)
        stuck = [task for task in tasks if task.parked is not None]
        if stuck:
            raise ScheduleError(_deadlock(stuck))
        return Simulation(
            rates=self._rates,
            agents=tuple((agent.process, agent.name) for agent in agents),
            busy=self._busy,
            makespan=self._makespan,
            activations=activations,
            build=self._build,
        )

    def _run_by_time(self, tasks: Sequence[_Task]) -> list[int]:
        """Whoever is earliest goes on; of several, who got there first."""
        order = []
        for task in tasks:
            self._push(task, task.time)
        heap, activate = self._heap, self._activate
        while heap:
            task = heapq.heappop(heap)[2]
            order.append(task.number)
            if activate(task):
                self._push(task, task.time)
        return order

    def _run_in_order(self, tasks: Sequence[_Task], activations: Sequence[int]) -> None:
        for number in activations:
            if not 0 <= number < len(tasks) or tasks[number].has_ended:
                raise ScheduleError(f"the order is of other agents: agent {number} does not go on")
            self._activate(tasks[number])
        for task in tasks:
            if task.parked is None and not task.has_ended:
                raise ScheduleError(
                    f"the order is of other agents: {_name(task)} has not come to its end"
                )

    def _push(self, task: _Task, time: float) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (time, self._pushed, task))

    def _activate(self, task: _Task) -> bool:
        """Steps up to and including the first that takes time; whether the agent goes on then."""
        if task.parked is not None:
            if len(task.parked.barrier.phases) <= task.parked.phase:
                raise ScheduleError(_deadlock([task]))
            self._end_wait(task, task.parked)
            task.parked = None
        recorder = self._recorder
        for step in task.program:
            if isinstance(step, Run):
                task.time = self._serve(task, step.work, None, "run")[1]
                if recorder:
                    task.why = recorder.done
                return True
            if isinstance(step, Issue):
                task.time = self._serve(task, step.work, step.signal, "issue")[0]
                if recorder:
                    task.why = recorder.started
                return True
            if isinstance(step, Wait):
                if len(step.barrier.phases) <= step.phase:
                    task.parked = step
                    self._parked.setdefault(id(step.barrier), []).append(task)
                    return False
                self._end_wait(task, step)
                return True
            if isinstance(step, Arrive):
                cause = recorder.arrival(task) if recorder else None
                self._arrive(step.barrier, task.time, cause)
            elif isinstance(step, Start):
                self._serve(task, step.work, step.signal, "start")
            elif isinstance(step, Delay):
                before, task.time = task.time, task.time + step.cycles
                if recorder:
                    task.why = recorder.stretch("delay", task, -1, before, task.time, task.why)
                return True
            else:
                raise ScheduleError(f"{_name(task)} yields {step!r}, which is no step")
        task.has_ended = True
        if task.time > self._makespan:
            self._makespan = task.time
            if recorder:
                recorder.last = task.why
        return False

    def _serve(
        self, task: _Task, work: Work, signal: Barrier | None, mode: Mode
    ) -> tuple[float, float]:
        """Reserves the resources; the start of the first and the time of the result."""
        free, busy, rates, recorder = self._free, self._busy, self._rates, self._recorder
        asked = stop = task.time
        start = -1.0
        spans = []
        for name, amount in work.amounts:
            try:
                begin = free[name]
                cycles = ceil(amount / rates[name] * TICKS) / TICKS
            except (KeyError, OverflowError):
                raise ScheduleError(_no_service(task, work, name, amount, rates)) from None
            if begin < asked:
                begin = asked
            if start < 0:
                start = begin
            end = begin + cycles
            if end > stop:
                stop = end
            free[name] = end
            busy[name] += cycles
            if recorder:
                spans.append(Span(name, begin, end))
        if start < 0:
            start = asked
        done = stop + work.latency
        cause = None
        if recorder:
            cause = recorder.service(task, work, start, stop, tuple(spans), mode)
        if done > self._makespan:
            self._makespan = done
            if recorder:
                recorder.last = recorder.done
        if signal is not None:
            self._arrive(signal, done, cause)
        return start, done

    def _arrive(self, barrier: Barrier, time: float, cause: Cause | None) -> None:
        if time >= barrier.time:
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
                self._push(task, max(task.time, at))
            else:
                later.append(task)
        if later:
            self._parked[id(barrier)] = later

    def _end_wait(self, task: _Task, wait: Wait) -> None:
        stop = wait.barrier.phases[wait.phase] + wait.barrier.latency
        if stop > task.time:
            if self._recorder:
                self._recorder.wait(task, wait, stop)
            task.time = stop


class _Recorder:
    """What is kept of a run: services, waits, and why every time is as late as it is."""

    def __init__(self) -> None:
        self.services: list[Service] = []
        self.waits: list[Waited] = []
        self.last: Stretch | None = None  # that ends at the makespan
        # Of the service served last: what let it start, and what ends with its result.
        self.started: Stretch | None = None
        self.done: Stretch | None = None
        self._freed: dict[str, Stretch | None] = {}  # by resource: what ends when it gets free

    def history(self) -> History:
        return History(tuple(self.services), tuple(self.waits), self.last)

    def service(
        self,
        task: _Task,
        work: Work,
        start: float,
        stop: float,
        spans: tuple[Span, ...],
        mode: Mode,
    ) -> Cause:
        number, asked = len(self.services), task.time
        # A work does not wait for a resource that is done by the time it is asked.
        causes = [self._freed[span.resource] if span.start > asked else task.why for span in spans]
        ends = [
            self.stretch(span.resource, task, number, span.start, span.stop, cause)
            for span, cause in zip(spans, causes, strict=True)
        ]
        self._freed.update(zip((span.resource for span in spans), ends, strict=True))
        self.started = causes[0] if spans else task.why
        end = next((end for span, end in zip(spans, ends, strict=True) if span.stop == stop), None)
        result = stop + work.latency
        before = end if stop > asked else task.why
        self.done = self.stretch("latency", task, number, stop, result, before)
        self.services.append(Service(task.number, work, asked, start, stop, spans, mode))
        return Arrival(task.number, number, result), self.done

    def arrival(self, task: _Task) -> Cause:
        return Arrival(task.number, -1, task.time), task.why

    def wait(self, task: _Task, wait: Wait, stop: float) -> None:
        barrier = wait.barrier
        cause = barrier.causes[wait.phase]
        assert cause is not None
        arrival, why = cause
        self.waits.append(Waited(task.number, barrier.name, task.time, stop, arrival))
        task.why = self.stretch("barrier", task, -1, barrier.phases[wait.phase], stop, why)

    def stretch(
        self,
        what: str,
        task: _Task,
        service: int,
        start: float,
        stop: float,
        before: Stretch | None,
    ) -> Stretch | None:
        """The one before where no time passes."""
        if stop == start:
            return before
        return Stretch(what, task.number, service, start, stop, before)


def _name(task: _Task) -> str:
    return f"{task.agent.process}/{task.agent.name}"


def _duration(name: str, what: str, cycles: float) -> float:
    _check_number(name, what, cycles)
    return ceil(cycles * TICKS) / TICKS


def _no_service(
    task: _Task, work: Work, resource: str, amount: float, rates: Mapping[str, float]
) -> str:
    wants = f"{_name(task)}: {work.name!r} wants {amount} of {resource!r}, which"
    if resource in rates:
        return f"{wants} does {rates[resource]} a cycle and is never done"
    return f"{wants} is none of {', '.join(rates)}"


def _check_number(name: str, what: str, value: float) -> None:
    if not 0 <= value < inf:
        raise ScheduleError(f"{name!r} has {what} {value}; it must be a number from 0 on")


def _deadlock(stuck: Sequence[_Task]) -> str:
    waits = []
    for task in stuck:
        assert task.parked is not None
        barrier, phase = task.parked.barrier, task.parked.phase
        waits.append(
            f"{_name(task)} waits for phase {phase} of {barrier.name!r}, which has completed "
            f"{len(barrier.phases)} and has {barrier.arrived} of {barrier.count} arrivals"
        )
    return "nobody can go on: " + "; ".join(waits)
