"""The discrete-event engine: small programs with times worked out by hand, and its errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from properties.engine_case import EngineCase
from simkit.schedules.engine import (
    TICK,
    Agent,
    Arrive,
    Barrier,
    Delay,
    Issue,
    Program,
    Run,
    ScheduleError,
    Simulation,
    Start,
    Step,
    Wait,
    Work,
    simulate,
)
from simkit.schedules.history import Span

RATES = {"a": 2.0, "b": 1.0}


def work(name: str = "work", *, latency: float = 0.0, **amounts: float) -> Work:
    return Work(name, "compute", tuple(amounts.items()), latency)


def program(steps: Sequence[Step]) -> Program:
    yield from steps


def run(
    steps_of: Callable[[], Sequence[Sequence[Step]]], rates: dict[str, float] = RATES
) -> Simulation:
    """Agents 0, 1, ... of one process; ``steps_of`` makes barriers anew."""
    return simulate(
        rates,
        lambda: [Agent("CTA", str(n), program(steps)) for n, steps in enumerate(steps_of())],
    )


def times(found: Simulation) -> list[tuple[float, float, float]]:
    """When each work was asked for, started and had its result."""
    return [(service.asked, service.start, service.result) for service in found.services]


def test_run_goes_on_with_the_result() -> None:
    found = run(lambda: [[Run(work(a=10, latency=3)), Run(work(b=4))]])
    assert times(found) == [(0, 0, 8), (8, 8, 12)]
    assert found.makespan == 12
    assert found.busy == {"a": 5, "b": 4}
    assert found.utilisation("a") == 5 / 12
    assert found.work_done("a") == 10


def test_resource_serves_in_order_of_arrival() -> None:
    found = run(
        lambda: [
            [Delay(2), Run(work(b=5))],
            [Delay(1), Run(work(b=5))],
            [Run(work(b=5))],
        ]
    )
    assert [service.agent for service in found.services] == [2, 1, 0]
    assert times(found) == [(0, 0, 5), (1, 5, 10), (2, 10, 15)]


def test_issue_goes_on_when_the_work_starts() -> None:
    def steps() -> list[list[Step]]:
        done = Barrier("done", 3, latency=1)
        one = Issue(work(b=4, latency=2), done)
        return [[one, one, one, Wait(done, 0), Run(work(b=1))]]

    found = run(steps)
    # The third starts at 8 and has its result at 14, of which the agent hears at 15.
    assert times(found) == [(0, 0, 6), (0, 4, 10), (4, 8, 14), (15, 15, 16)]
    assert [(wait.start, wait.stop) for wait in found.waits] == [(8, 15)]


def test_start_goes_on_at_once() -> None:
    found = run(lambda: [[Start(work(b=4)), Start(work(b=4)), Run(work(a=2))]])
    assert times(found) == [(0, 0, 4), (0, 4, 8), (0, 0, 1)]
    assert found.makespan == 8


def test_work_of_several_resources_waits_for_each_on_its_own() -> None:
    found = run(lambda: [[Run(work(a=4, b=10))], [Issue(work(a=2, b=1)), Run(work(a=2))]])
    first, second, third = found.services
    assert first.spans == (Span("a", 0, 2), Span("b", 0, 10))
    assert second.spans == (Span("a", 2, 3), Span("b", 10, 11))
    assert (second.start, second.stop) == (2, 11)  # starts with the first that it names
    assert (third.asked, third.start) == (2, 3)


def test_barrier_completes_with_its_last_arrival() -> None:
    def steps() -> list[list[Step]]:
        met = Barrier("met", 2, latency=10)
        return [[Delay(5), Arrive(met), Wait(met, 0)], [Delay(7), Arrive(met), Wait(met, 0)]]

    found = run(steps)
    assert sorted((wait.start, wait.stop) for wait in found.waits) == [(5, 17), (7, 17)]
    assert {(wait.told.agent, wait.told.service, wait.told.time) for wait in found.waits} == {
        (1, -1, 7)
    }
    assert found.makespan == 17


def test_phases_complete_one_after_another() -> None:
    """A late arrival that was made first keeps the next one's phase back."""

    def steps() -> list[list[Step]]:
        full = Barrier("full")
        return [[Start(work(b=100), full), Arrive(full), Wait(full, 1), Run(work(a=2))]]

    assert times(run(steps)) == [(0, 0, 100), (100, 100, 101)]


def test_wait_for_a_phase_that_is_over_takes_no_time() -> None:
    def steps() -> list[list[Step]]:
        early = Barrier("early")
        return [[Arrive(early)], [Delay(5), Wait(early, 0), Run(work(b=1))]]

    found = run(steps)
    assert times(found) == [(5, 5, 6)]
    assert found.waits == ()


def test_durations_are_whole_ticks_rounded_up() -> None:
    found = run(lambda: [[Run(work(a=1))] * 3000], {"a": 3.0})
    each = found.services[0].stop
    assert each / TICK == int(each / TICK) == -(-(2**20) // 3)
    assert found.makespan == 3000 * each  # sums are exact


def test_no_agents_and_no_steps_take_no_time() -> None:
    for steps in ([], [[]], [[Run(work())], []]):
        found = run(lambda steps=steps: steps)  # type: ignore[misc]
        assert found.makespan == 0
        assert found.critical_path() == ()
        assert found.utilisation("a") == 0


def test_critical_path_tells_who_waited_for_whom() -> None:
    def steps() -> list[list[Step]]:
        full = Barrier("full", latency=3)
        copies = [Start(work("copy", b=10, latency=4), full)]
        return [[*copies, *copies], [Wait(full, 1), Run(work("product", a=8)), Delay(2)]]

    path = run(steps).critical_path()
    assert [(part.what, part.agent, part.start, part.stop) for part in path] == [
        ("b", 0, 0, 10),
        ("b", 0, 10, 20),
        ("latency", 0, 20, 24),
        ("barrier", 1, 24, 27),
        ("a", 1, 27, 31),
        ("delay", 1, 31, 33),
    ]


def anomaly() -> list[list[Step]]:
    """The one with the long end asks for b at 9, the other one when a is done with it."""
    return [
        [Delay(9), Run(work("first", b=5)), Delay(100)],
        [Run(work("second", a=20)), Run(work("second", b=50))],
    ]


def test_grahams_anomaly_a_faster_resource_takes_longer() -> None:
    """Whoever comes first is served first: with a twice as fast, b serves the wrong one first."""
    slow = run(anomaly, {"a": 2.0, "b": 1.0})
    fast = run(anomaly, {"a": 4.0, "b": 1.0})
    assert slow.makespan == 9 + 5 + 100
    assert fast.makespan == 5 + 50 + 5 + 100


def test_with_the_order_kept_there_is_no_anomaly() -> None:
    slow = run(anomaly, {"a": 2.0, "b": 1.0})
    kept = slow.retimed({"a": 4.0, "b": 1.0})
    assert kept.makespan == 114
    assert times(kept) == [(0, 0, 5), (9, 9, 14), (5, 14, 64)]


BAD_PROGRAMS: dict[str, tuple[Callable[[], object], str]] = {
    "resource": (lambda: run(lambda: [[Run(work(c=1))]]), "CTA/0: 'work' wants 1 of 'c', .* a, b"),
    "negative amount": (lambda: work(a=-1), "'work' has a -1; it must be a number from 0 on"),
    "not a number": (lambda: work(a=float("nan")), "nan"),
    "infinite latency": (lambda: work(latency=float("inf")), "latency inf"),
    "named twice": (
        lambda: Work("work", "mma", (("a", 1), ("a", 2))),
        "names a resource twice",
    ),
    "count": (lambda: Barrier("full", 0), "barrier 'full' wants 0 arrivals"),
    "barrier latency": (lambda: Barrier("full", 1, -1.0), "'full' has latency -1"),
    "delay": (lambda: Delay(-3), "cycles -3"),
    "phase": (lambda: Wait(Barrier("full"), -1), "phase -1 of 'full'"),
    "rate": (lambda: run(list, {"a": 0.0}), "resource 'a' has rate 0"),
    "rate that is none": (lambda: run(list, {"a": float("nan")}), "rate nan"),
    "never done": (
        lambda: run(lambda: [[Run(work(a=1e300))]], {"a": 1e-300}),
        "does 1e-300 a cycle and is never done",
    ),
    "no step": (lambda: run(lambda: [[None]]), "CTA/0 yields None"),  # type: ignore[list-item]
}


@pytest.mark.parametrize("name", BAD_PROGRAMS)
def test_bad_program_is_one_error(name: str) -> None:
    attempt, message = BAD_PROGRAMS[name]
    with pytest.raises(ScheduleError, match=message):
        attempt()


def test_deadlock_says_who_waits_for_what() -> None:
    def steps() -> list[list[Step]]:
        full, empty = Barrier("full", 2), Barrier("empty")
        return [[Wait(empty, 0), Arrive(full)], [Arrive(full), Wait(full, 0), Arrive(empty)]]

    with pytest.raises(ScheduleError) as error:
        run(steps)
    assert str(error.value) == (
        "nobody can go on: "
        "CTA/0 waits for phase 0 of 'empty', which has completed 0 and has 0 of 1 arrivals; "
        "CTA/1 waits for phase 0 of 'full', which has completed 0 and has 1 of 2 arrivals"
    )


def test_order_of_other_agents_is_an_error() -> None:
    def build(steps: Sequence[Step]) -> list[Agent]:
        return [Agent("CTA", "0", program(steps))]

    one = Run(work(a=1))
    order = simulate(RATES, lambda: build([one, one])).activations
    for steps, message in (
        ([one], "agent 0 does not go on"),
        ([one] * 3, "CTA/0 has not come to its end"),
        ([Wait(Barrier("full"), 0)], "CTA/0 waits for phase 0 of 'full'"),
    ):
        with pytest.raises(ScheduleError, match=message):
            simulate(RATES, lambda steps=steps: build(steps), activations=order)  # type: ignore[misc]
    with pytest.raises(ScheduleError, match="agent 7 does not go on"):
        simulate(RATES, lambda: build([one]), activations=[7])


def test_agents_that_ran_already_cannot_be_timed_again() -> None:
    agents = [Agent("CTA", "0", program([Run(work(a=1))]))]
    found = simulate(RATES, lambda: agents)
    with pytest.raises(ScheduleError, match="order is of other agents"):
        found.retimed(RATES)


def test_drawn_programs_are_hard() -> None:
    """Most have waits released by works and by agents, held-back issues and crowded resources."""
    seen = dict.fromkeys(("by a work", "by an agent", "held back", "behind another"), 0)
    for seed in range(50):
        case = EngineCase(agents=4, steps=60, resources=3, ctas=2, seed=seed)
        found = simulate(case.rates, case.build())
        seen["by a work"] += any(wait.told.service >= 0 for wait in found.waits)
        seen["by an agent"] += any(wait.told.service < 0 for wait in found.waits)
        late = [service for service in found.services if service.start > service.asked]
        seen["held back"] += any(service.mode == "issue" for service in late)
        seen["behind another"] += any(
            span.start > service.start for service in late for span in service.spans
        )
    assert min(seen.values()) >= 25, seen
