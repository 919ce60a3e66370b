"""The engine and the grid with one fault each, by the law that notices it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from simkit.planning.load import Placement
from simkit.schedules import engine, grid, launches, power
from simkit.schedules.engine import Simulation
from simkit.schedules.flash_attention_3 import FlashAttention3
from simkit.schedules.history import History, Stretch

Patch = Callable[[pytest.MonkeyPatch], None]

ENGINE, GRID, LAUNCHES = "engine", "grid", "launches"

SIMULATOR = engine._Simulator
SERVE, ARRIVE, END_WAIT = SIMULATOR._serve, SIMULATOR._arrive, SIMULATOR._end_wait


def method(name: str, broken: Callable[..., Any]) -> Patch:
    return lambda patch: patch.setattr(SIMULATOR, name, broken)


def two_at_once(self: Any, task: Any, work: Any, signal: Any, mode: Any) -> Any:
    """Tensor-core products find every resource free."""
    if work.kind == "mma":
        self._free = dict.fromkeys(self._free, 0.0)
    return SERVE(self, task, work, signal, mode)


def idle_after_service(self: Any, task: Any, work: Any, signal: Any, mode: Any) -> Any:
    """A resource rests for a cycle after every work."""
    found = SERVE(self, task, work, signal, mode)
    self._free |= {name: self._free[name] + 1.0 for name, _ in work.amounts}
    return found


def at_half_the_amount(self: Any, task: Any, work: Any, signal: Any, mode: Any) -> Any:
    amounts = tuple((name, amount / 2) for name, amount in work.amounts)
    return SERVE(self, task, replace(work, amounts=amounts), signal, mode)


def at_twice_the_rate(self: Any, task: Any, work: Any, signal: Any, mode: Any) -> Any:
    """Works are served at twice the rates that the simulation reports."""
    rates, self._rates = self._rates, {name: 2 * rate for name, rate in self._rates.items()}
    try:
        return SERVE(self, task, work, signal, mode)
    finally:
        self._rates = rates


def first_arrival(self: Any, barrier: Any, time: float, cause: Any) -> None:
    """A phase completes with its first arrival, as far as time goes."""
    if barrier.arrived:
        time = barrier.time
    ARRIVE(self, barrier, time, cause)


def ignored_barrier(self: Any, task: Any, wait: Any) -> None:
    """Whoever waits goes on at the time at which it came."""


def ignored_when_retimed(patch: pytest.MonkeyPatch) -> None:
    """The order of service is kept, what waits wait for is not."""
    original = Simulation.retimed

    def retimed(self: Simulation, rates: Any) -> Simulation:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SIMULATOR, "_end_wait", ignored_barrier)
            return original(self, rates)

    patch.setattr(Simulation, "retimed", retimed)


def retimed_in_new_order(patch: pytest.MonkeyPatch) -> None:
    """Whoever is earliest at the new rates goes first: Graham's anomalies come back."""
    patch.setattr(Simulation, "retimed", lambda self, rates: engine.simulate(rates, self.build))


def slower_when_retimed(patch: pytest.MonkeyPatch) -> None:
    original = Simulation.retimed

    def retimed(self: Simulation, rates: Any) -> Simulation:
        return original(self, {name: rate * 0.999 for name, rate in rates.items()})

    patch.setattr(Simulation, "retimed", retimed)


def slower_first_cta(self: Any, task: Any, work: Any, signal: Any, mode: Any) -> Any:
    """The first agent of all is slow, unless it is of CTA 0."""
    if task.agent.process != "CTA 0" and task.number == 0:
        work = replace(work, latency=work.latency + 1)
    return SERVE(self, task, work, signal, mode)


def gap_in_path(patch: pytest.MonkeyPatch) -> None:
    """Latencies are missing in the chain of causes."""
    original = engine._Recorder.stretch

    def stretch(self: Any, what: str, *args: Any) -> Stretch | None:
        before: Stretch | None = args[-1]
        return before if what == "latency" else original(self, what, *args)

    patch.setattr(engine._Recorder, "stretch", stretch)


def other_cause(patch: pytest.MonkeyPatch) -> None:
    """Every cause is said to be the first service's."""
    original = engine._Recorder.stretch

    def stretch(self: Any, what: str, task: Any, service: int, *args: Any) -> Stretch | None:
        found: Stretch | None = original(self, what, task, min(service, 0), *args)
        return found

    patch.setattr(engine._Recorder, "stretch", stretch)


def short_makespan(patch: pytest.MonkeyPatch) -> None:
    """The makespan forgets how long resources go on after the agents."""
    original = SIMULATOR.run

    def run(self: Any, activations: Any) -> Simulation:
        found = original(self, activations)
        return replace(found, makespan=max(found.busy.values(), default=0.0) / 2)

    patch.setattr(SIMULATOR, "run", run)


def lost_service(patch: pytest.MonkeyPatch) -> None:
    original = engine._Recorder.history

    def history(self: Any) -> History:
        found: History = original(self)
        return replace(found, services=found.services[:-1])

    patch.setattr(engine._Recorder, "history", history)


def silent_deadlock(patch: pytest.MonkeyPatch) -> None:
    """Who waits for ever is taken to be done."""
    original = SIMULATOR._run_by_time

    def run(self: Any, tasks: Any) -> Any:
        order = original(self, tasks)
        for task in tasks:
            task.parked = None
        return order

    patch.setattr(SIMULATOR, "_run_by_time", run)


def nameless_deadlock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "_deadlock", lambda stuck: "nobody can go on")


def noise(patch: pytest.MonkeyPatch) -> None:
    """Every run has rates of its own."""
    rng = np.random.default_rng(0)
    original = SIMULATOR.__init__

    def init(self: Any, rates: Any, *args: Any, **kwargs: Any) -> None:
        original(self, {n: r * (1 + 0.1 * rng.random()) for n, r in rates.items()}, *args, **kwargs)

    patch.setattr(SIMULATOR, "__init__", init)


def changed_run(change: Callable[[grid.GridRun], grid.GridRun]) -> Patch:
    original = grid.run_launch
    return lambda patch: patch.setattr(
        grid, "run_launch", lambda *args, **kwargs: change(original(*args, **kwargs))
    )


def first_item_lost(run: grid.GridRun) -> grid.GridRun:
    old = run.placement
    new = Placement(old.workers, old.worker[1:], old.starts[1:], old.costs[1:])
    return replace(run, placement=new)


def all_at_once(run: grid.GridRun) -> grid.GridRun:
    """Every CTA starts all its items at 0."""
    old = run.placement
    return replace(
        run, placement=Placement(old.workers, old.worker, np.zeros_like(old.starts), old.costs)
    )


def everything_on_one(costs: Any, workers: int) -> Placement:
    cost = np.asarray(costs, np.int64)
    starts = np.cumsum(cost) - cost
    return Placement(workers, np.zeros(cost.size, np.int64), starts, cost)


def costs_by_place(costs: Any, workers: int) -> Placement:
    """Items cost more the later they come."""
    cost = np.asarray(costs, np.int64)
    return LIST_SCHEDULE(cost + np.arange(cost.size), workers)


LIST_SCHEDULE = grid.list_schedule


def half_the_cycles(run: grid.GridRun) -> grid.GridRun:
    return replace(run, cycles=run.cycles / 2)


def half_of_a_resource(resource: str) -> Callable[[grid.GridRun], grid.GridRun]:
    def change(run: grid.GridRun) -> grid.GridRun:
        return replace(run, busy={**run.busy, resource: run.busy[resource] / 2})

    return change


def one_key(patch: pytest.MonkeyPatch) -> None:
    """All launches of FlashAttention-3 share their simulations."""
    original = FlashAttention3.launches
    patch.setattr(
        FlashAttention3,
        "launches",
        lambda self, gpu, shape: tuple(
            replace(launch, key="all") for launch in original(self, gpu, shape)
        ),
    )


def twice_as_busy(run: grid.GridRun) -> grid.GridRun:
    return replace(run, busy={name: 4 * busy for name, busy in run.busy.items()})


def unsettled(patch: pytest.MonkeyPatch) -> None:
    """Items are extended from their first tiles, in which pipelines fill."""
    patch.setattr(grid, "LONGEST", 1)
    patch.setattr(grid, "SAMPLES", (1, 2))


def at_nominal(run: grid.GridRun) -> grid.GridRun:
    """The clock goes back to nominal."""
    return grid._at_clock(run, run.gpu.tensor_clock_hz)


def over_nominal(run: grid.GridRun) -> grid.GridRun:
    return grid._at_clock(run, run.gpu.tensor_clock_hz * 1.01)


def clock(change: Callable[[Any, Any, float], float]) -> Patch:
    original = power.power_limited_clock
    return lambda patch: patch.setattr(
        power,
        "power_limited_clock",
        lambda gpu, energy, cycles: change(gpu, energy, original(gpu, energy, cycles)),
    )


def launched(change: Callable[[launches.Timeline], launches.Timeline]) -> Patch:
    original = launches.timeline
    return lambda patch: patch.setattr(
        launches, "timeline", lambda *args, **kwargs: change(original(*args, **kwargs))
    )


def before_submission(found: launches.Timeline) -> launches.Timeline:
    spans = [replace(span, start=0.0, stop=span.kernel.seconds) for span in found.spans]
    return replace(found, spans=tuple(spans))


def twice_as_long(found: launches.Timeline) -> launches.Timeline:
    last = found.spans[-1]
    longer = replace(last, stop=last.stop + last.kernel.seconds)
    return replace(found, spans=(*found.spans[:-1], longer))


def free_cpu(found: launches.Timeline) -> launches.Timeline:
    return replace(found, host_seconds=found.seconds + 1e-6)


def at_once(spans: Any, kernel: Any, ready: float) -> float:
    """A kernel starts when it is ready, whatever runs."""
    return ready


def late_if_dependent(patch: pytest.MonkeyPatch) -> None:
    original = launches._run
    patch.setattr(launches, "_run", lambda kernels, at, gap, pdl: original(kernels, at, gap, -pdl))


def own_order(patch: pytest.MonkeyPatch) -> None:
    """Every GPU serves what comes first there, instead of in the reference's order."""
    patch.setattr(grid, "order_of", lambda agents, path, part: None)


BROKEN_SCHEDULES: dict[tuple[str, str], list[Patch]] = {
    (ENGINE, "work"): [
        method("_serve", at_half_the_amount),
        method("_serve", at_twice_the_rate),
        lost_service,
    ],
    (ENGINE, "resources"): [
        method("_serve", two_at_once),
        method("_serve", idle_after_service),
    ],
    (ENGINE, "dependencies"): [
        method("_end_wait", ignored_barrier),
        method("_arrive", first_arrival),
    ],
    (ENGINE, "bounds"): [
        short_makespan,
        method("_serve", two_at_once),
        gap_in_path,
        other_cause,
    ],
    (ENGINE, "faster"): [
        retimed_in_new_order,
        ignored_when_retimed,
        slower_when_retimed,
    ],
    (ENGINE, "same"): [noise, slower_when_retimed, ignored_when_retimed],
    (ENGINE, "permutation"): [method("_serve", slower_first_cta)],
    (ENGINE, "deadlock"): [silent_deadlock, nameless_deadlock],
    (GRID, "simulation"): [
        method("_serve", two_at_once),
        method("_end_wait", ignored_barrier),
        lost_service,
        gap_in_path,
        retimed_in_new_order,
        ignored_when_retimed,
    ],
    (LAUNCHES, "order"): [launched(before_submission), launched(twice_as_long)],
    (LAUNCHES, "capacity"): [lambda patch: patch.setattr(launches, "_when_free", at_once)],
    (LAUNCHES, "bounds"): [launched(free_cpu)],
    (LAUNCHES, "dependent"): [late_if_dependent],
    (GRID, "rates"): [own_order],
    (GRID, "sensitivities"): [slower_when_retimed],
    (GRID, "placement"): [
        changed_run(first_item_lost),
        changed_run(all_at_once),
        lambda patch: patch.setattr(grid, "list_schedule", everything_on_one),
        lambda patch: patch.setattr(grid, "list_schedule", costs_by_place),
        changed_run(half_the_cycles),
    ],
    (GRID, "roofline"): [
        changed_run(half_the_cycles),
        changed_run(twice_as_busy),
        changed_run(half_of_a_resource("hbm")),
        changed_run(half_of_a_resource("tensor")),
    ],
    (GRID, "key"): [one_key],
    (GRID, "permutation"): [
        lambda patch: patch.setattr(grid, "list_schedule", costs_by_place),
    ],
    (GRID, "extension"): [unsettled],
    (GRID, "board_power"): [changed_run(at_nominal), changed_run(over_nominal)],
    (GRID, "clock"): [
        clock(lambda gpu, energy, found: gpu.tensor_clock_hz),
        clock(lambda gpu, energy, found: found * (1 - 1e-9)),
        clock(lambda gpu, energy, found: found * (1 + 1e-9)),
    ],
    (GRID, "more_energy"): [
        clock(lambda gpu, energy, found: found * (1 - 1 / (2 + energy.flop))),
        clock(lambda gpu, energy, found: gpu.tensor_clock_hz if energy.hbm_bytes > 1e9 else found),
    ],
}
"""Faults of the cycle model that each law notices."""
