"""Laws of the discrete-event engine, on programs of every kind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis.strategies import SearchStrategy

from properties.engine_case import EngineCase, Line, engine_cases
from properties.law import Context, Law, LawViolation
from properties.simulation_checks import (
    check_bounds,
    check_dependencies,
    check_faster,
    check_resources,
    check_same,
    check_work,
)
from simkit.schedules.engine import ScheduleError, Simulation, simulate

NAME = "engine"


def _simulation(case: EngineCase) -> Simulation:
    return simulate(case.rates, case.build())


def check_engine_work(context: Context, case: EngineCase) -> None:
    check_work(_simulation(case))


def check_engine_resources(context: Context, case: EngineCase) -> None:
    check_resources(_simulation(case))


def check_engine_dependencies(context: Context, case: EngineCase) -> None:
    check_dependencies(_simulation(case))


def check_engine_bounds(context: Context, case: EngineCase) -> None:
    check_bounds(_simulation(case))


def check_engine_faster(context: Context, case: EngineCase) -> None:
    check_faster(_simulation(case), case.faster_rates())


def check_engine_same(context: Context, case: EngineCase) -> None:
    found = _simulation(case)
    check_same(found, _simulation(case))
    check_same(found, found.retimed(found.rates))


def check_engine_permutation(context: Context, case: EngineCase) -> None:
    order = np.random.default_rng((case.seed, 5)).permutation(case.ctas)
    found = _simulation(case)
    other = simulate(case.rates, case.build(order.tolist()))
    if (found.makespan, found.busy) != (other.makespan, other.busy):
        raise LawViolation(
            f"{case.ctas} equal CTAs take {found.makespan} cycles, {other.makespan} in the order "
            f"{order.tolist()}"
        )


def check_engine_deadlock(context: Context, case: EngineCase) -> None:
    scripts = case.scripts()
    (agent,) = (n for n, script in enumerate(scripts) if script and _waits_for_ever(case, script))
    wait = scripts[agent][-1]
    try:
        _simulation(case)
    except ScheduleError as error:
        message = str(error)
    else:
        raise LawViolation(f"agent {agent} goes on, though nobody completes what it waits for")
    for cta in range(case.ctas):
        named = f"CTA {cta}/agent {agent} waits for phase {wait.phase} of 'barrier {wait.barrier}'"
        if named not in message:
            raise LawViolation(f"the error does not say that {named}: {message}")


def _waits_for_ever(case: EngineCase, script: list[Line]) -> bool:
    arrivals = sum(
        line.verb != "wait" and line.barrier == script[-1].barrier
        for own in case.scripts()
        for line in own
    )
    needed = (script[-1].phase + 1) * case.counts()[script[-1].barrier]
    return script[-1].verb == "wait" and arrivals < needed


CORNERS = (
    EngineCase(),
    EngineCase(agents=1, steps=0),
    EngineCase(agents=6, steps=120, resources=1, barriers=1, seed=1),
    EngineCase(agents=6, steps=120, resources=6, barriers=4, ctas=2, seed=2),
)


def _law(
    name: str,
    statement: str,
    check: Callable[[Context, EngineCase], None],
    strategy: SearchStrategy[EngineCase],
    corners: tuple[EngineCase, ...] = CORNERS,
) -> Law:
    return Law(
        algorithm=NAME,
        name=name,
        tier="exact",
        statement=statement,
        check=check,
        strategy=strategy,
        case_type=EngineCase,
        corners=corners,
        examples=100,
        uses_device=False,
    )


LAWS = [
    _law(
        "work",
        "every work is served once, in its agent's order, and keeps its resources busy for its "
        "amounts over their rates",
        check_engine_work,
        engine_cases(),
    ),
    _law(
        "resources",
        "a resource serves one work at a time, in the order in which they are asked for, and never "
        "idles before one that waits",
        check_engine_resources,
        engine_cases(),
    ),
    _law(
        "dependencies",
        "nothing starts before its agent's step ahead of it has let it go on, or before the phase "
        "that it waits for is complete",
        check_engine_dependencies,
        engine_cases(),
    ),
    _law(
        "bounds",
        "the makespan is at least every resource's work over its rate, and is the length of a path "
        "of services, latencies and delays without gaps",
        check_engine_bounds,
        engine_cases(),
    ),
    _law(
        "faster",
        "in the same order of service, higher rates make nothing later",
        check_engine_faster,
        engine_cases(),
    ),
    _law(
        "same",
        "a simulation repeats to the last bit, also when it is timed again at its own rates",
        check_engine_same,
        engine_cases(),
    ),
    _law(
        "permutation",
        "equal CTAs take as long in any order",
        check_engine_permutation,
        engine_cases(most_ctas=5),
    ),
    _law(
        "deadlock",
        "a program that cannot end is an error that says who waits for which phase of what",
        check_engine_deadlock,
        engine_cases(stuck=True),
        tuple(EngineCase(stuck=True, seed=seed) for seed in range(3)),
    ),
]
