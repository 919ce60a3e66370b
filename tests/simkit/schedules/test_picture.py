"""Traces of simulations and of launches."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given

from properties.engine_case import EngineCase, engine_cases
from simkit.machine.gpus import gpu as find_gpu
from simkit.schedules.engine import (
    Agent,
    Arrive,
    Barrier,
    Issue,
    Program,
    Run,
    ScheduleError,
    Simulation,
    Start,
    Wait,
    Work,
    simulate,
)
from simkit.schedules.flash_attention_2 import FlashAttention2
from simkit.schedules.flash_attention_3 import FlashAttention3
from simkit.schedules.grid import GridRun, run_launch
from simkit.schedules.picture import grid_trace, simulation_trace
from simkit.schedules.shape import AttentionShape
from traces.critical_path import IDLE, critical_path
from traces.events import Track

SHAPE = AttentionShape(batch=1, heads=16, q_len=1024, kv_len=1024, d=128, causal=True)


def launched(kernel: FlashAttention2 | FlashAttention3) -> GridRun:
    gpu = find_gpu("h100")
    return run_launch(gpu, kernel.launches(gpu, SHAPE)[0])


def pipeline() -> list[Agent]:
    """A copy of two boxes, a product that waits for it, and who waits for that."""
    full, done, met = Barrier("full", 2), Barrier("done"), Barrier("met")
    box = Work("K", "load", (("hbm", 10.0), ("smem", 5.0)), 2.0)
    product = Work("QK", "mma", (("tensor", 8.0), ("smem", 1.0)))
    piece = Work("exp", "softmax", (("xu", 4.0),))

    def producer() -> Program:
        yield Start(box, full)
        yield Start(box, full)

    def consumer() -> Program:
        yield Wait(full, 0)
        yield Issue(product)
        yield Issue(product, done)
        yield Wait(done, 0)
        yield Run(piece)
        yield Run(piece)
        yield Arrive(met)

    def last() -> Program:
        yield Wait(met, 0)

    names = ("producer", "warpgroup", "epilogue")
    programs = (producer(), consumer(), last())
    return [Agent("CTA 0", name, steps) for name, steps in zip(names, programs, strict=True)]


def small() -> Simulation:
    rates = {"hbm": 1.0, "smem": 1.0, "tensor": 1.0, "xu": 1.0, "alu": 1.0}
    return simulate(rates, pipeline)


def test_events_of_a_pipeline() -> None:
    trace = simulation_trace(small(), "pipeline")
    rows = [(str(e.track), e.name, e.kind, e.start, e.stop) for e in trace.events]
    # The copies take HBM up to 20, the product's two halves the tensor core 22 to 38.
    assert rows == [
        ("CTA 0/warpgroup", "full", "wait", 0, 22),
        ("CTA 0/warpgroup", "issue QK", "wait", 22, 30),
        ("CTA 0/warpgroup", "done", "wait", 30, 38),
        ("CTA 0/warpgroup", "exp", "softmax", 38, 46),
        ("CTA 0/epilogue", "met", "barrier", 0, 46),
        ("SM/HBM", "K", "load", 0, 20),
        ("SM/shared memory", "K", "load", 0, 10),
        ("SM/shared memory", "QK", "mma", 22, 24),
        ("SM/tensor core", "QK", "mma", 22, 38),
        ("SM/MUFU/XU", "exp", "softmax", 38, 46),
    ]
    assert Track("CTA 0", "producer") in trace.tracks
    assert Track("SM", "ALU") not in trace.tracks  # serves nothing


def test_amounts_are_said() -> None:
    events = {(e.track.name, e.name): e for e in simulation_trace(small(), "pipeline").events}
    assert events["HBM", "K"].args == {"agent": "CTA 0/producer", "bytes": 20}
    assert events["tensor core", "QK"].args == {"agent": "CTA 0/warpgroup", "FLOP": 16}
    assert events["warpgroup", "exp"].args == {"xu": 8, "waited for pipes": 0}


def test_arrows_of_a_pipeline() -> None:
    trace = simulation_trace(small(), "pipeline")
    arrows = {
        (f.name, str(f.source), f.source_time, str(f.target), f.target_time) for f in trace.flows
    }
    warps, tensor = "CTA 0/warpgroup", "SM/tensor core"
    assert arrows >= {
        ("issue", "CTA 0/producer", 0, "SM/HBM", 0),
        ("K", "SM/HBM", 20, warps, 22),
        ("issue", warps, 22, tensor, 22),
        ("QK", tensor, 38, warps, 38),
        ("arrive", warps, 46, "CTA 0/epilogue", 46),
    }
    path = critical_path(trace)
    assert path.length == 46
    assert IDLE not in path.by_kind


@pytest.mark.parametrize("kernel", [FlashAttention3(), FlashAttention2()], ids=repr)
def test_shipped_schedules(kernel: FlashAttention2 | FlashAttention3) -> None:
    example = launched(kernel).example
    trace = simulation_trace(example, "one SM")
    assert trace.stop == example.makespan
    assert {track.name for track in trace.tracks if track.process == "SM"} == {
        "tensor core", "MUFU/XU", "FMA", "ALU", "shuffle", "issue", "shared memory", "L2", "HBM"
    }  # fmt: skip
    path = critical_path(trace)
    assert path.length == example.makespan
    assert path.by_kind.get(IDLE, 0.0) < 0.02 * path.length


@given(engine_cases())
def test_any_simulation_is_a_trace_of_its_work(case: EngineCase) -> None:
    """Resources are at work for as long as they were busy, runs have their amounts."""
    found = simulate(case.rates, case.build())
    trace = simulation_trace(found, "drawn")
    busy: dict[str, float] = defaultdict(float)
    amounts: dict[tuple[str, str], float] = defaultdict(float)
    for event in trace.events:
        if event.track.process == "SM":
            busy[event.track.name] += event.duration
        elif event.kind not in ("wait", "barrier"):
            for name in found.rates:
                amounts[str(event.track), name] += float(event.args.get(name, 0.0))
    assert dict(busy) == {name: cycles for name, cycles in found.busy.items() if name in busy}
    assert {name for name, cycles in found.busy.items() if cycles} <= set(busy)
    for service in found.services:
        if service.mode == "run":
            for name, amount in service.work.amounts:
                amounts["/".join(found.agents[service.agent]), name] -= amount
    # Sums of at most 120 amounts up to 10, in whatever order: each rounds by less than 2^-42.
    assert all(abs(left) <= 120 * 2.0**-42 for left in amounts.values())
    assert trace.stop <= found.makespan


def test_too_many_events_are_an_error() -> None:
    with pytest.raises(ScheduleError, match=r"pipeline has 10 events; a trace has at most 8"):
        simulation_trace(small(), "pipeline", most_events=8)


def test_agents_of_one_name_are_an_error() -> None:
    found = simulate({"hbm": 1.0, "smem": 1.0, "tensor": 1.0, "xu": 1.0}, lambda: 2 * pipeline())
    with pytest.raises(ScheduleError, match="two agents have the same process and name"):
        simulation_trace(found, "twice")


def test_grid_has_every_item_once() -> None:
    run = launched(FlashAttention3())
    trace = grid_trace(run)
    items = sorted(e.args["item"] for e in trace.events if "item" in e.args)  # type: ignore[type-var]
    assert items == list(range(len(run.launch.items)))
    assert len(trace.tracks) == run.placement.workers
    assert trace.processes == ("flash_attention_3",)
    assert trace.stop == run.cycles
    for event in trace.events:
        if "item" in event.args:
            item = run.launch.items[int(event.args["item"])]
            assert event.args["tiles"] == item.length


def test_ctas_of_an_sm_are_beside_each_other() -> None:
    run = launched(FlashAttention2())
    names = [track.name for track in grid_trace(run).tracks]
    assert run.occupancy.ctas_per_sm == 2
    assert names[:4] == ["SM 0, CTA 0", "SM 0, CTA 1", "SM 1, CTA 0", "SM 1, CTA 1"]
    assert len(names) == run.placement.workers


def test_large_grid_is_drawn_in_part_and_says_so() -> None:
    run = launched(FlashAttention3())
    # An SM has one item, and what the first takes longer.
    trace = grid_trace(run, most_events=20)
    assert trace.name == "flash_attention_3 on h100, the first 10 of 132 SMs"
    assert len(trace.events) == 20
    assert {track.name for track in trace.tracks} == {f"SM {n}" for n in range(10)}
    with pytest.raises(ScheduleError, match=r"an SM has 2 events .* at most 1"):
        grid_trace(run, most_events=1)
