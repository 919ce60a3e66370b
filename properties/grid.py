"""Laws of launches on a GPU: CTAs on SMs, what each costs, and the clock that power allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from properties.launch_case import FORWARD, LaunchCase, launch_cases, long_cases
from properties.law import Context, Law, LawViolation, Tier
from properties.prefill_planner import check_graham
from properties.simulation_checks import (
    check_bounds,
    check_dependencies,
    check_faster,
    check_resources,
    check_same,
    check_work,
    program_of,
)
from simkit.errors import SimkitError
from simkit.machine.gpus import gpu as find_gpu
from simkit.schedules import grid, power
from simkit.schedules.engine import TICK, simulate
from simkit.schedules.grid import GridRun, Item
from simkit.schedules.power import Energy
from simkit.schedules.prediction import predict
from simkit.schedules.sm import sm_rates

NAME = "grid"

EXTENSION = 0.002
"""Relative error that extending long items may have; over launches, see ``extension``."""

EVERYTHING = 10**9  # tiles
ROUNDING = 1e-6  # relative; every duration is rounded up to a tick


@dataclass(frozen=True)
class EnergyCase:
    """Work at the clock that power allows, and how much more of it there is in comparison."""

    gpu: str = "h100"
    flop: float = 1e13
    lane_instructions: float = 1e11
    hbm_bytes: float = 1e9
    cycles: float = 1e6
    fp8: bool = False
    more: float = 1.5


def _run(case: LaunchCase) -> GridRun:
    return grid.run_launch(case.device, case.launch())


def check_simulation(context: Context, case: LaunchCase) -> None:
    """Of one SM, what every program obeys; a device with a higher rate is not slower in the same
    order of service.
    """
    run = _run(case)
    example = run.example
    for check in (check_work, check_dependencies, check_bounds):
        check(example)
    check_resources(example, in_order_of_arrival=False)
    check_resources(simulate(example.rates, run.one_sm))
    check_same(example, example.retimed(example.rates))
    active = min(run.gpu.sm_count, run.placement.workers)
    faster = sm_rates(case.faster_device(), run.clock_hz, run.launch.path, active)
    check_faster(example, {name: max(rate, faster[name]) for name, rate in example.rates.items()})


def check_rates(context: Context, case: LaunchCase) -> None:
    """The whole prediction: order of service, clock and launching included."""
    gpu = case.faster_device()
    before = predict(case.device, case.launches()).seconds
    after = predict(gpu, case.launches(gpu)).seconds
    if after > before:
        raise LawViolation(f"{before} s become {after} s where a rate is higher")


def check_sensitivities(context: Context, case: LaunchCase) -> None:
    """At a rate 1.1 times as high a path takes at least its length over 1.1, but that the duration
    of each service had been rounded up, by less than a tick.
    """
    run = _run(case)
    rounding = len(run.example.services) * TICK / run.example.makespan
    most = 1 + 10 * rounding + 2.0**-48
    for name, value in run.sensitivities.items():
        if not 0 <= value <= most:
            raise LawViolation(f"a tenth more of {name} gains {value} of what it could")


def check_placement(context: Context, case: LaunchCase) -> None:
    """Every item once, each CTA one at a time, and no worse than list scheduling may be."""
    run = _run(case)
    placement, items = run.placement, run.launch.items
    if not len(items) == len(placement.worker) == len(placement.starts) == len(placement.costs):
        raise LawViolation(f"{len(items)} items, {len(placement.worker)} are placed")
    most = run.gpu.sm_count * run.occupancy.ctas_per_sm
    if placement.workers > most or not all(placement.worker >= 0) or not all(placement.costs > 0):
        raise LawViolation(f"{placement.workers} CTAs on {most} places, or items without cost")
    if max(placement.worker) >= placement.workers:
        raise LawViolation(f"CTA {max(placement.worker)} of {placement.workers} has an item")
    order = np.lexsort((placement.starts, placement.worker))
    worker, starts = placement.worker[order], placement.starts[order]
    stops = starts + placement.costs[order]
    if (starts[1:][worker[1:] == worker[:-1]] < stops[:-1][worker[1:] == worker[:-1]]).any():
        raise LawViolation("a CTA has two items at once")
    check_graham(run.launch.name, placement, placement.costs, placement.worker)
    # CTAs of a last wave that is not full share their SMs and HBM with fewer.
    full = len(items) // placement.workers * placement.workers or len(items)
    by_item: dict[Item, int] = {}
    for number, (item, cost) in enumerate(zip(items, placement.costs.tolist(), strict=True)):
        usual = by_item.setdefault(item, cost)
        if cost != usual and (number < full or run.launch.persistent):
            raise LawViolation(f"{item} costs {cost}, and {usual} elsewhere")
    if run.cycles < placement.makespan:
        raise LawViolation(f"{placement.makespan} cycles of items in {run.cycles}")


def check_roofline(context: Context, case: LaunchCase) -> None:
    """Of the whole GPU: no resource is over 100 % busy, all products are made, all bytes moved."""
    for launch in case.launches():
        run = grid.run_launch(case.device, launch)
        for name in run.busy:
            if run.utilisation(name) > 1 + 2.0**-50:  # where L2 binds, a quotient of its own time
                raise LawViolation(f"{name} is {run.utilisation(name):.4f} busy")
        work = {name: busy * run.rates[name] * (1 + ROUNDING) for name, busy in run.busy.items()}
        flop = _products(case) if case.schedule in FORWARD else launch.flop
        if max(work["tensor"], 2 * work["fma"]) < flop:  # merging and CUDA cores: fma
            raise LawViolation(f"{launch.name} makes {work['tensor']} of {flop} FLOP")
        if work["hbm"] < launch.hbm_bytes:
            raise LawViolation(f"{launch.name} moves {work['hbm']} of {launch.hbm_bytes} bytes")
        rate = run.gpu.hbm_bytes_per_s * run.gpu.hbm_read_fraction
        if run.seconds * (1 + ROUNDING) < launch.hbm_bytes / rate:
            raise LawViolation(f"{launch.hbm_bytes} bytes in {run.seconds} s are over {rate} B/s")


def _products(case: LaunchCase) -> int:
    """FLOP of Q K^T and P V, pair by pair of what the mask leaves."""
    shape = case.shape
    seen = np.full(shape.q_len, shape.kv_len)
    if shape.causal:
        seen = np.clip(np.arange(shape.q_len) + shape.kv_len - shape.q_len + 1, 0, shape.kv_len)
    return 2 * shape.batch * shape.heads * int(seen.sum()) * (shape.d + shape.d_v)


def check_key(context: Context, case: LaunchCase) -> None:
    """Of the case and of every case that differs from it in one field."""
    for other in _neighbours(case):
        try:
            pairs = list(zip(case.launches(), other.launches(), strict=False))
        except SimkitError:  # the schedule has no such choice
            continue
        for one, two in pairs:
            if (one.name, one.key) != (two.name, two.key) or one.key is None:
                continue
            longest = max(one.kinds[0], key=lambda item: item.length)
            item = Item(min(longest.length, 4), longest.kind)
            if program_of(one.cta("CTA", (item,))) != program_of(two.cta("CTA", (item,))):
                raise LawViolation(f"{one.name} of {case} and {other} differ, but not in their key")


def _neighbours(case: LaunchCase) -> list[LaunchCase]:
    changes: dict[str, Any] = {
        "batch": case.batch + 1,
        "heads": 2 * case.heads,
        "group": 2 * case.group,
        "queries": case.queries // 2 or 2,
        "keys": case.keys + 100,
        "d": 64 if case.d == 128 else 128,
        "d_v": 64 if case.d > 64 else 256,
        "causal": not case.causal,
        "fp8": not case.fp8,
        "tile_q": 128,
        "tile_kv": 96,
        "stages": case.stages + 1,
        "overlap": not case.overlap,
        "ping_pong": not case.ping_pong,
        "specialised": not case.specialised,
    }
    return [replace(case, **{name: value}) for name, value in changes.items()]


def check_permutation(context: Context, case: LaunchCase) -> None:
    """Items of one length in any order; of several, as many cycles of work."""
    run = _run(case)
    launch = run.launch
    order = np.random.default_rng(case.seed).permutation(len(launch.items)).tolist()
    shuffled = replace(launch, items=[launch.items[n] for n in order])
    other = grid.run_launch(case.device, shuffled, run.clock_hz)
    again = grid.run_launch(case.device, launch, run.clock_hz)
    if sorted(other.placement.costs) != sorted(again.placement.costs):
        raise LawViolation("an item costs more in another place")
    if len(set(launch.items)) == 1 and other.cycles != again.cycles:
        raise LawViolation(f"equal items take {again.cycles} cycles, shuffled {other.cycles}")
    check_graham(launch.name, other.placement, other.placement.costs, other.placement.worker)


def check_extension(context: Context, case: LaunchCase) -> None:
    launch, gpu = case.launch(), case.device
    clock = gpu.tensor_clock_hz
    found = grid.run_launch(gpu, launch, clock).cycles
    exact = grid.run_launch(gpu, launch, clock, most_tiles=EVERYTHING).cycles
    if abs(found / exact - 1) > EXTENSION:
        raise LawViolation(
            f"long items extended, the launch takes {found} cycles; simulated, {exact}"
        )


def check_board_power(context: Context, case: LaunchCase) -> None:
    run = _run(case)
    if run.clock_hz > run.gpu.tensor_clock_hz:
        raise LawViolation(f"{run.clock_hz} Hz are over {run.gpu.tensor_clock_hz}")
    if run.power_w is not None and run.power_w > run.gpu.board_w:
        raise LawViolation(f"the board takes {run.power_w} of {run.gpu.board_w} W")


def check_clock(context: Context, case: EnergyCase) -> None:
    """The highest clock within the limit, to the resolution of the search."""
    gpu, energy = find_gpu(case.gpu), _energy(case)
    highest = gpu.tensor_clock_hz
    clock = power.power_limited_clock(gpu, energy, case.cycles)
    if not 0 < clock <= highest:
        raise LawViolation(f"the clock is {clock} of {highest} Hz")
    watts = energy.watts(gpu, clock, case.cycles / clock)
    if watts is None:
        if clock != highest:
            raise LawViolation(f"without energies, the clock is {clock} of {highest} Hz")
        return
    if watts > gpu.board_w:
        raise LawViolation(f"the board takes {watts} of {gpu.board_w} W at {clock} Hz")
    # The search halves the range 60 times, or until no number lies between.
    above = max(clock * (1 + 2.0**-51), clock + highest * 2.0**-59)
    if above < highest and (energy.watts(gpu, above, case.cycles / above) or 0) <= gpu.board_w:
        raise LawViolation(f"the board would stay within its power above {clock} Hz")


def check_more_energy(context: Context, case: EnergyCase) -> None:
    gpu = find_gpu(case.gpu)
    clock = power.power_limited_clock(gpu, _energy(case), case.cycles)
    for name in ("flop", "lane_instructions", "hbm_bytes"):
        more = _energy(replace(case, **{name: getattr(case, name) * case.more}))
        other = power.power_limited_clock(gpu, more, case.cycles)
        if other > clock:
            raise LawViolation(f"with {case.more} times the {name}, {clock} Hz become {other}")


def _energy(case: EnergyCase) -> Energy:
    path = "wgmma fp8" if case.fp8 else "wgmma"
    return Energy(case.flop, case.lane_instructions, case.hbm_bytes, path)  # type: ignore[arg-type]


def energy_cases() -> SearchStrategy[EnergyCase]:
    def amounts(most: float) -> SearchStrategy[float]:
        return st.one_of(st.just(0.0), st.floats(1.0, most))

    return st.builds(
        EnergyCase,
        gpu=st.sampled_from(("a100", "h100", "h800", "h200")),
        flop=amounts(1e16),
        lane_instructions=amounts(1e14),
        hbm_bytes=amounts(1e12),
        cycles=st.floats(1e3, 1e9),
        fp8=st.booleans(),
        more=st.floats(1.0, 100.0),
    )


_LAUNCHES = (
    LaunchCase(),
    LaunchCase(heads=16, queries=2048, keys=2048, causal=True),
    LaunchCase(schedule="flash_attention_2", gpu="a100", heads=8, d=64, causal=True),
    LaunchCase(queries=1, keys=1),
)


def _launch_law(
    name: str,
    statement: str,
    check: Callable[[Context, LaunchCase], None],
    *,
    tier: Tier = "exact",
    examples: int = 25,
    strategy: SearchStrategy[LaunchCase],
    corners: tuple[LaunchCase, ...] = _LAUNCHES,
) -> Law:
    return Law(
        algorithm=NAME,
        name=name,
        tier=tier,
        statement=statement,
        check=check,
        strategy=strategy,
        case_type=LaunchCase,
        corners=corners,
        examples=examples,
        uses_device=False,
    )


def _energy_law(name: str, statement: str, check: Callable[[Context, EnergyCase], None]) -> Law:
    return Law(
        algorithm=NAME,
        name=name,
        tier="exact",
        statement=statement,
        check=check,
        strategy=energy_cases(),
        case_type=EnergyCase,
        corners=(EnergyCase(), EnergyCase(flop=0.0, lane_instructions=0.0, hbm_bytes=0.0)),
        examples=200,
        uses_device=False,
    )


LAWS = [
    _launch_law(
        "simulation",
        "an SM with a shipped schedule obeys the engine's laws; at a device's higher rate, nothing "
        "is later in the same order",
        check_simulation,
        strategy=launch_cases(every=True, most_keys=1500),
    ),
    _launch_law(
        "rates",
        "no rate of the device table makes a prediction slower when it is higher",
        check_rates,
        examples=100,
        strategy=launch_cases(every=True, most_keys=1500),
        corners=(
            *_LAUNCHES,
            # In an order of service of its own, two CTAs fall into another rhythm.
            LaunchCase(
                schedule="flash_attention_2",
                batch=2,
                heads=8,
                queries=1500,
                keys=1500,
                d=64,
                causal=True,
                seed=153,
            ),
        ),
    ),
    _launch_law(
        "sensitivities",
        "a tenth more of a resource gains nothing to a tenth",
        check_sensitivities,
        strategy=launch_cases(every=True, most_keys=1500),
    ),
    _launch_law(
        "placement",
        "every item once, a CTA one at a time; the longest CTA has at most total / CTAs + "
        "(1 - 1 / CTAs) * largest",
        check_placement,
        strategy=launch_cases(),
    ),
    _launch_law(
        "roofline",
        "no resource of the whole GPU is busy for more than the launch takes; all products are "
        "made, and all bytes that must move do",
        check_roofline,
        strategy=launch_cases(every=True),
    ),
    _launch_law(
        "key",
        "launches of the same key have the same programs, so that what one costs the other does",
        check_key,
        strategy=launch_cases(every=True, most_keys=1500),
        corners=(*_LAUNCHES, LaunchCase(schedule="flash_attention", queries=100, keys=100)),
    ),
    _launch_law(
        "permutation",
        "equal items take as long in any order, and an item costs the same at any place",
        check_permutation,
        strategy=launch_cases(),
    ),
    _launch_law(
        "extension",
        f"launches with long items extended are within {EXTENSION:.1%} of all items simulated",
        check_extension,
        tier="statistical",
        examples=6,
        strategy=long_cases(),
        corners=(
            LaunchCase(queries=8000, keys=8000, d=64, causal=True),
            LaunchCase(queries=100, keys=220_000, d=64),
        ),
    ),
    _launch_law(
        "board_power",
        "the board stays within its power at the clock of a launch, which is none above nominal",
        check_board_power,
        strategy=launch_cases(every=True),
    ),
    _energy_law(
        "clock",
        "the clock is the highest, up to nominal, at which the board stays within its power",
        check_clock,
    ),
    _energy_law(
        "more_energy",
        "more work in as many cycles never has a higher clock",
        check_more_energy,
    ),
]
