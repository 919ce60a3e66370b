"""What every simulation obeys, whatever its programs: work, order, bounds and rates.

Each check raises `LawViolation`. What should have happened is found here from the programs alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from properties.law import LawViolation
from simkit.schedules.engine import (
    TICK,
    Agent,
    Agents,
    Arrive,
    Barrier,
    Delay,
    Issue,
    Run,
    Simulation,
    Start,
    Step,
    Wait,
)
from simkit.schedules.history import Service, Span, Stretch

DIVISION = Fraction(1, 2**52)
"""Relative error of an amount over a rate: one rounding of at most 2^-53, and as much to spare."""

MODES = {Run: "run", Issue: "issue", Start: "start"}


def steps_of(build: Agents) -> list[list[Step]]:
    """Every agent's steps: programs do not depend on time."""
    return [list(agent.program) for agent in build()]


def program_of(agents: Sequence[Agent]) -> list[tuple[str, list[tuple[Any, ...]]]]:
    """Every agent's steps, with barriers by what they are and the order in which they appear."""
    barriers: dict[int, tuple[int, int, float]] = {}
    kept = []  # so that no two barriers have one id

    def known(barrier: Barrier | None) -> tuple[int, int, float] | None:
        if barrier is None:
            return None
        kept.append(barrier)
        return barriers.setdefault(id(barrier), (len(barriers), barrier.count, barrier.latency))

    def said(step: Step) -> tuple[Any, ...]:
        if isinstance(step, Run | Issue | Start):
            signal = None if isinstance(step, Run) else known(step.signal)
            return type(step), step.work, signal
        if isinstance(step, Delay):
            return Delay, step.cycles
        phase = step.phase if isinstance(step, Wait) else 0
        return type(step), known(step.barrier), phase

    return [(agent.name, [said(step) for step in agent.program]) for agent in agents]


def check_work(found: Simulation) -> None:
    """Every work is served once, in its agent's order, with its amounts at the resources' rates."""
    given = steps_of(found.build)
    served: dict[int, list[Service]] = defaultdict(list)
    for service in found.services:
        served[service.agent].append(service)
    for agent, steps in enumerate(given):
        wanted = [(step.work, MODES[type(step)]) for step in steps if type(step) in MODES]  # type: ignore[union-attr]
        if [(service.work, service.mode) for service in served[agent]] != wanted:
            raise LawViolation(
                f"{found.agents[agent]} has {len(wanted)} works, {len(served[agent])} were served"
            )
    busy = dict.fromkeys(found.rates, Fraction(0))
    for service in found.services:
        if [span.resource for span in service.spans] != [name for name, _ in service.work.amounts]:
            raise LawViolation(f"{service.work} was served by {service.spans}")
        for span, (name, amount) in zip(service.spans, service.work.amounts, strict=True):
            took = Fraction(span.stop) - Fraction(span.start)
            exact = Fraction(amount) / Fraction(found.rates[name])
            busy[name] += took
            if not exact * (1 - DIVISION) <= took <= exact * (1 + DIVISION) + Fraction(TICK):
                raise LawViolation(
                    f"{amount} of {name} took {float(took)} cycles at a rate of {found.rates[name]}"
                )
    for name, cycles in busy.items():
        if Fraction(found.busy[name]) != cycles:
            raise LawViolation(f"{name} served {float(cycles)} cycles, busy {found.busy[name]}")


def check_resources(found: Simulation, *, in_order_of_arrival: bool = True) -> None:
    """No resource serves two at once or idles before who is next; next is who asks first, unless
    the order is another simulation's.
    """
    free = dict.fromkeys(found.rates, 0.0)
    before = 0.0
    for service in found.services:
        if in_order_of_arrival and service.asked < before:
            raise LawViolation(
                f"{service.work.name!r} is asked for at {service.asked} and served after what was "
                f"at {before}"
            )
        asked = before = service.asked
        for span in service.spans:
            if span.start != max(asked, free[span.resource]):
                raise LawViolation(
                    f"{span.resource} is free at {free[span.resource]} and asked at {asked}, and "
                    f"starts at {span.start}"
                )
            free[span.resource] = span.stop
    for name, busy in found.busy.items():
        if busy > found.makespan:
            raise LawViolation(f"{name} is busy {busy} of {found.makespan} cycles")


def check_dependencies(found: Simulation) -> None:
    """No service starts before its agent's step ahead of it and what that waited for."""
    programs = steps_of(found.build)  # they keep their barriers, so that no two have one id
    pairs = [_with_services(steps, found, agent) for agent, steps in enumerate(programs)]
    arrivals = _arrivals(pairs)
    for agent, steps in enumerate(pairs):
        reached = 0.0
        for step, service in steps:
            if service is not None:
                if not reached <= service.asked <= service.start:
                    raise LawViolation(
                        f"{found.agents[agent]} reaches {service.work.name!r} at {reached}, which "
                        f"is asked for at {service.asked} and starts at {service.start}"
                    )
                reached = service.goes_on
            elif isinstance(step, Delay):
                reached += step.cycles
            elif isinstance(step, Wait):
                reached = max(reached, _completed(step, arrivals[id(step.barrier)]))
        if reached > found.makespan:
            raise LawViolation(
                f"{found.agents[agent]} ends at {reached}, the makespan is {found.makespan}"
            )


def _with_services(
    steps: Sequence[Step], found: Simulation, agent: int
) -> list[tuple[Step, Service | None]]:
    own = (service for service in found.services if service.agent == agent)
    return [(step, next(own) if type(step) in MODES else None) for step in steps]


def _arrivals(
    programs: Sequence[Sequence[tuple[Step, Service | None]]],
) -> dict[int, list[float]]:
    """Times of each barrier's arrivals, sorted; an agent's own not before its work ahead."""
    found: dict[int, list[float]] = defaultdict(list)
    for steps in programs:
        reached = 0.0
        for step, service in steps:
            if service is not None:
                reached = service.goes_on
                if isinstance(step, Issue | Start) and step.signal is not None:
                    found[id(step.signal)].append(service.result)
            elif isinstance(step, Arrive):
                found[id(step.barrier)].append(reached)
    return {name: sorted(times) for name, times in found.items()}


def _completed(wait: Wait, arrivals: Sequence[float]) -> float:
    """Not before as many arrivals as the phases up to this one take."""
    needed = (wait.phase + 1) * wait.barrier.count
    if len(arrivals) < needed:
        raise LawViolation(f"a wait for phase {wait.phase} of {wait.barrier.name!r} ended too soon")
    return arrivals[needed - 1] + wait.barrier.latency


def check_bounds(found: Simulation) -> None:
    """The makespan is not below the roofline, and is the length of the critical path."""
    given: dict[str, Fraction] = defaultdict(Fraction)
    for steps in steps_of(found.build):
        for step in steps:
            if isinstance(step, Run | Issue | Start):
                for name, amount in step.work.amounts:
                    given[name] += Fraction(amount)
    for name, total in given.items():
        roofline = total / Fraction(found.rates[name])
        if Fraction(found.makespan) < roofline * (1 - DIVISION):
            raise LawViolation(
                f"{float(total)} of {name} take {float(roofline)} cycles, the makespan is "
                f"{found.makespan}"
            )
    path = found.critical_path()
    ends = [0.0, *(stretch.stop for stretch in path)]
    starts = [*(stretch.start for stretch in path), found.makespan]
    if ends != starts:
        gap = next(pair for pair in zip(ends, starts, strict=True) if pair[0] != pair[1])
        raise LawViolation(f"the critical path goes from {gap[0]} to {gap[1]} of {found.makespan}")
    for stretch in path:
        _check_stretch(found, stretch)


def _check_stretch(found: Simulation, stretch: Stretch) -> None:
    """It is the time of what it says."""
    if stretch.service >= 0:
        service = found.services[stretch.service]
        spans = [*service.spans, Span("latency", service.stop, service.result)]
        is_real = Span(stretch.what, stretch.start, stretch.stop) in spans
    elif stretch.what == "barrier":
        is_real = (stretch.agent, stretch.stop) in [(w.agent, w.stop) for w in found.waits]
    else:
        is_real = stretch.what == "delay"
    if not is_real or stretch.stop <= stretch.start:
        raise LawViolation(f"nothing of the simulation is {stretch}")


def check_same(found: Simulation, other: Simulation) -> None:
    """Both did the same at the same times, to the last bit."""
    for what in ("makespan", "busy", "services", "waits"):
        if getattr(found, what) != getattr(other, what):
            raise LawViolation(f"{what} differ at the same rates in the same order")


def check_faster(found: Simulation, rates: Mapping[str, float]) -> None:
    """With the order of service kept and no rate lower, nothing is later."""
    faster = found.retimed(rates)
    if faster.makespan > found.makespan:
        raise LawViolation(
            f"at rates {dict(rates)} instead of {dict(found.rates)} the makespan is "
            f"{faster.makespan} instead of {found.makespan}"
        )
    for before, after in zip(found.services, faster.services, strict=True):
        if after.asked > before.asked or after.start > before.start or after.stop > before.stop:
            raise LawViolation(f"{before} becomes {after} at higher rates")
    check_same(found, faster.retimed(found.rates))
