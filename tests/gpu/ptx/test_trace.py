"""Traces of the executor: what follows what, under any schedule, in equal steps for equal runs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hopper_kernels import CUDA, PTX_HEADER, executor
from test_hopper_pipeline import gemm

import gpu
from gpu.counters import FAULTS, Report
from gpu.device import Device
from gpu.kernels.build import build_module
from gpu.kernels.flash_attention import flash_attention
from gpu.kernels.flash_decoding import flash_decoding
from gpu.ptx.executor import PtxDevice, PtxModule
from gpu.ptx.parser import parse
from gpu.ptx.schedule import Schedule
from gpu.ptx.syntax import Instruction
from gpu.ptx.tracing.segments import Role, layout_of, role_of
from gpu.run_trace import joined
from gpu.watched import WatchedDevice
from simkit.errors import BudgetError, LaunchError
from traces import chrome
from traces.events import Event, Flow, Trace, Track

SCHEDULES = [Schedule("eager"), Schedule("lazy"), Schedule("random", 1), Schedule("random", 2)]
TILES, CTAS, COLUMNS = 5, 2, 64
GROUPS, WARPS = 2, 4  # consumer warpgroups of a CTA of the GEMM, warps of each


def watch(device: PtxDevice, call: Callable[[Device], Any], **options: Any) -> list[Report]:
    watched = WatchedDevice(device.with_options(replace(device.options, **options)))
    call(watched)
    return watched.reports


@cache
def gemm_report(schedule: Schedule) -> Report:
    """A pipelined GEMM: one warp loads tiles by TMA, two warpgroups multiply them by wgmma."""
    (report,) = watch(
        executor(schedule), lambda device: gemm(device, 3, TILES, CTAS, COLUMNS), trace=True
    )
    return report


def gemm_trace(schedule: Schedule) -> Trace:
    trace = gemm_report(schedule).trace
    assert trace is not None
    return trace


def of_track(trace: Trace, track: Track) -> list[Event]:
    return [event for event in trace.events if event.track == track]


def ending(trace: Trace, track: Track, time: float) -> Event:
    """The event of a track that ends at a time."""
    (found,) = (event for event in of_track(trace, track) if event.stop == time)
    return found


def named(trace: Trace, name: str) -> list[Flow]:
    return [flow for flow in trace.flows if flow.name == name]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_tma_copies_lead_to_waits_and_those_to_wgmma(schedule: Schedule) -> None:
    trace = gemm_trace(schedule)
    products = [event for event in trace.events if event.track.name.startswith("tensor core")]
    assert len(products) == CTAS * GROUPS * TILES
    assert {event.name for event in products} == {f"wgmma.mma_async.m64n{COLUMNS}k16.f32.bf16"}
    assert {event.args["operations"] for event in products} == {4}
    operands = named(trace, "operands")
    # Each warp of a warpgroup waits for itself.
    assert len(operands) == len(products) * WARPS
    for product in products:
        needed = [
            flow for flow in operands
            if (flow.target, flow.target_time) == (product.track, product.start)
        ]  # fmt: skip
        assert {flow.source.process for flow in needed} == {product.track.process}
        for flow in needed:
            wait = ending(trace, flow.source, flow.source_time)
            assert (wait.kind, wait.name.split(".")[:2]) == ("wait", ["mbarrier", "try_wait"])
            # Two halves of A and one tile of B.
            copies = [f for f in named(trace, "copy") if (f.target, f.target_time)
                      == (wait.track, wait.stop)]  # fmt: skip
            assert len(copies) == 3
            for copy in copies:
                source = ending_copy(trace, copy)
                assert source.start < source.stop <= wait.stop <= product.start


def ending_copy(trace: Trace, flow: Flow) -> Event:
    event = ending(trace, flow.source, flow.source_time)
    assert event.track.name.startswith("TMA")
    assert event.name == "cp.async.bulk.tensor.2d"
    return event


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_waits_end_no_earlier_than_what_releases_them(schedule: Schedule) -> None:
    trace = gemm_trace(schedule)
    released = [flow for flow in trace.flows if flow.name in ("copy", "arrive", "result")]
    assert {flow.name for flow in released} == {"copy", "arrive", "result"}
    for flow in released:
        wait = ending(trace, flow.target, flow.target_time)
        assert wait.kind == "wait"
        assert flow.source_time <= wait.stop
    # A tile of a full barrier is complete when its copies have landed, before anybody sees it.
    phases = {event.stop for event in trace.events if event.track.name.startswith("mbarrier")}
    landed: dict[tuple[Track, float], float] = {}
    for flow in named(trace, "copy"):
        key = (flow.target, flow.target_time)
        landed[key] = max(landed.get(key, 0), flow.source_time)
    assert set(landed.values()) <= phases


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_what_copies_complete_nobody_arrived_for(schedule: Schedule) -> None:
    trace = gemm_trace(schedule)
    copied, arrived = (
        {(flow.target, flow.target_time) for flow in named(trace, name)}
        for name in ("copy", "arrive")
    )
    assert not copied & arrived


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_warps_do_one_thing_at_a_time_and_nothing_while_they_wait(schedule: Schedule) -> None:
    trace = gemm_trace(schedule)
    for track in trace.tracks:
        events = of_track(trace, track)
        for before, after in pairwise(events):
            assert before.stop <= after.start, track


def test_copies_are_late_under_a_lazy_schedule_and_at_once_under_an_eager_one() -> None:
    durations = {
        kind: {
            event.duration
            for event in gemm_trace(Schedule(kind)).events
            if event.track.name.startswith(("TMA", "tensor core"))
        }
        for kind in ("eager", "lazy")
    }
    assert durations["eager"] == {1}
    assert min(durations["lazy"]) > 1
    landed = Counter(
        (event.track.process, event.stop)
        for event in gemm_trace(Schedule("lazy")).events
        if event.track.name.startswith("TMA")
    )
    assert len(landed) == landed.total() == CTAS * 3 * TILES


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_equal_runs_give_equal_traces(schedule: Schedule) -> None:
    (again,) = watch(
        executor(schedule), lambda device: gemm(device, 3, TILES, CTAS, COLUMNS), trace=True
    )
    assert again.trace == gemm_trace(schedule)
    others = [gemm_trace(other) for other in SCHEDULES if other != schedule]
    assert again.trace not in others


@pytest.mark.parametrize("schedule", SCHEDULES[:2], ids=str)
def test_chrome_export_loads_back_equal(schedule: Schedule, tmp_path: Path) -> None:
    trace = gemm_trace(schedule)
    assert trace.unit == "steps"
    chrome.save(trace, tmp_path / "trace.json")
    assert chrome.load(tmp_path / "trace.json") == trace


# Bytes


def moved(trace: Trace, kind: str) -> int:
    return sum(int(event.args.get("bytes", 0)) for event in trace.events if event.kind == kind)


def check_bytes(report: Report) -> None:
    """Loads and stores of a trace move what the traffic report says, by direction."""
    assert report.trace is not None
    assert report.traffic is not None
    for kind, direction in (("load", "read"), ("store", "write")):
        wanted = sum(t.requested for t in report.traffic.tensors if t.direction == direction)
        assert moved(report.trace, kind) == wanted


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_bytes_are_those_of_the_traffic_report(schedule: Schedule) -> None:
    report = gemm_report(schedule)
    check_bytes(report)
    assert report.trace is not None
    copied = sum(int(e.args["bytes"]) for e in report.trace.events if e.track.name[:3] == "TMA")
    # Every CTA reads its 128 rows of A and all of B, in bfloat16; all of it by TMA.
    assert copied == CTAS * (128 + COLUMNS) * 64 * TILES * 2 == moved(report.trace, "load")


def inputs(q_len: int, kv_len: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = ((1, q_len, 2, 64), (1, kv_len, 1, 64), (1, kv_len, 1, 64))
    return [rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in shapes]


KERNELS: dict[str, Callable[[Device], Any]] = {
    # Tiles that end early: cp.async of nothing fills with zeros.
    "flash_attention": lambda device: flash_attention(device, *inputs(70, 100), causal=True),
    "flash_decoding": lambda device: flash_decoding(
        device, inputs(1, 150)[0][:, 0], *inputs(1, 150)[1:], 2
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES[:3], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_copies_of_ampere_kernels(kernel: str, schedule: Schedule) -> None:
    for report in watch(executor(schedule), KERNELS[kernel], trace=True):
        check_bytes(report)
        trace = report.trace
        assert trace is not None
        seen: set[object] = set()
        for flow in named(trace, "copy"):
            wait = ending(trace, flow.target, flow.target_time)
            assert wait.name == "cp.async.wait_group"
            assert flow.source.name.startswith("cp.async")
            (copy,) = (e for e in of_track(trace, flow.source)
                       if e.start < flow.source_time <= e.stop)  # fmt: skip
            assert copy.name == "cp.async"
            assert (copy.track, copy.start, flow.target) not in seen
            seen.add((copy.track, copy.start, flow.target))
        if report.kernel == "flash_attention":
            assert named(trace, "copy")
            sources = {str(e.args["source"]).split(":")[0] for e in trace.events if e.kind == "mma"}
            assert sources == {"mma.cuh"}


BULK = (
    CUDA
    + r"""
// 3 warps and a half: loads, bulk copies there and back, an atomic.
extern "C" __global__ void bulk(const u32* x, u32* y, u32* sum) {
    __shared__ __align__(16) u32 cell[128];
    __shared__ __align__(8) u64 full;
    if (threadIdx.x == 0) { init(&full, 1); fence_init(); expect(&full, 512);
                            bulk_load(cell, x, 512, &full); }
    __syncthreads();
    wait(&full, 0);
    cell[threadIdx.x] += x[threadIdx.x + 1];
    fence_async();
    __syncthreads();
    if (threadIdx.x == 0) { bulk_store(y, cell, 256); bulk_commit(); bulk_wait<0>(); }
    if (threadIdx.x % 2) atomicAdd(sum, 1u);
}
"""
)


def bulk(device: Device) -> None:
    x, y = device.array(np.arange(128, dtype=np.uint32)), device.empty((64,), np.uint32)
    total = device.array(np.zeros(1, np.uint32))
    kernel = device.compile(BULK, arch="sm_90a").kernel("bulk")
    kernel.launch((3,), (112,), [x, y, total])
    assert total.to_numpy()[0] == 3 * 56


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_bulk_copies_loads_stores_and_atomics(schedule: Schedule) -> None:
    (report,) = watch(executor(schedule), bulk, trace=True)
    check_bytes(report)
    trace = report.trace
    assert trace is not None
    copies = [e for e in trace.events if e.track.name.startswith("bulk copies")]
    if schedule.kind == "lazy":
        waits = {e.stop for e in trace.events if e.name == "cp.async.bulk.wait_group"}
        assert {event.stop for event in copies if event.kind == "store"} == waits
    assert Counter((e.kind, e.args["bytes"]) for e in copies) == {
        ("load", 512): 3,
        ("store", 256): 3,
    }


def test_only_the_first_wait_for_a_phase_is_what_a_copy_leads_to() -> None:
    def twice(device: Device) -> None:
        source = BULK.replace("wait(&full, 0);", "wait(&full, 0); __syncthreads(); wait(&full, 0);")
        x, y = device.array(np.arange(128, dtype=np.uint32)), device.empty((64,), np.uint32)
        kernel = device.compile(source, arch="sm_90a").kernel("bulk")
        kernel.launch((3,), (112,), [x, y, device.array(np.zeros(1, np.uint32))])

    (report,) = watch(executor(Schedule("random", 1)), twice, trace=True)
    assert report.trace is not None
    waits = [e for e in report.trace.events if e.name.startswith("mbarrier.try_wait")]
    flows = named(report.trace, "copy")
    assert len({(flow.target, flow.target_time) for flow in flows}) == len(waits) // 2
    assert {flow.target for flow in flows} == {wait.track for wait in waits}


# Barriers

LATE = r"""
extern "C" __global__ void late(unsigned* out, int n) {
    unsigned x = 1;
    if (threadIdx.x < 32) for (int i = 0; i < n; i++) x = x * 1664525u + 1013904223u;
    __syncthreads();
    out[threadIdx.x] = x;
}
"""


def late(device: Device, n: int, threads: int = 128) -> None:
    out = device.empty((threads,), np.uint32)
    device.compile(LATE, options=("-lineinfo",)).kernel("late").launch((1,), (threads,), [out, n])


@pytest.mark.parametrize("schedule", SCHEDULES[::2], ids=str)
def test_warps_wait_for_the_last_that_comes_to_a_barrier(schedule: Schedule) -> None:
    (report,) = watch(executor(schedule), lambda device: late(device, 50), trace=True)
    trace = report.trace
    assert trace is not None
    (phase,) = of_track(trace, Track("cta (0,0,0)", "barrier 0"))
    waits = [event for event in trace.events if event.kind == "wait"]
    assert [event.name for event in waits] == ["bar.sync"] * 4
    assert [str(event.args["source"]) for event in waits] == ["kernel.cu:5"] * 4
    assert {event.stop for event in waits} == {phase.stop}
    assert min(event.start for event in waits) == phase.start
    arrivals = named(trace, "arrive")
    assert {flow.source for flow in arrivals} == {Track("cta (0,0,0)", "warp 0")}
    assert {flow.target for flow in arrivals} == {
        Track("cta (0,0,0)", f"warp {warp}") for warp in (1, 2, 3)
    }


def test_warps_that_do_the_same_are_a_warpgroup() -> None:
    def tracks(threads: int, n: int) -> list[str]:
        (report,) = watch(executor(), lambda device: late(device, n, threads), trace=True)
        assert report.trace is not None
        check_bytes(report)
        return [track.name for track in report.trace.tracks]

    assert tracks(320, 0) == ["warpgroup 0", "warpgroup 1", "warp 8", "warp 9", "barrier 0"]
    names = [f"warp {warp}" for warp in range(4)]
    assert tracks(256, 9) == [*names, "warpgroup 1", "barrier 0"]


CLUSTER = (
    CUDA
    + r"""
extern "C" __global__ void pair(u32* out, int n) {
    u32 x = 1;
    if (cta_rank() == 1) for (int i = 0; i < n; i++) x = x * 1664525u + 1013904223u;
    cluster_sync();
    out[blockIdx.x * 32 + threadIdx.x] = x;
}
"""
)


def test_a_phase_ends_with_the_instruction_that_completes_it() -> None:
    source = (
        CUDA
        + r"""
extern "C" __global__ void bytes(u32* out) {
    __shared__ __align__(8) u64 bar;
    if (threadIdx.x == 0) {
        init(&bar, 1);
        expect(&bar, 16);
        asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 16;" ::"r"(sa(&bar)));
    }
    __syncthreads();
    wait(&bar, 0);
    out[threadIdx.x] = 1;
}
"""
    )

    def call(device: Device) -> None:
        kernel = device.compile(source, arch="sm_90a").kernel("bytes")
        kernel.launch((1,), (32,), [device.empty((32,), np.uint32)])

    (report,) = watch(executor(), call, trace=True)
    assert report.trace is not None
    (end,) = (e for e in report.trace.events if e.name.startswith("mbarrier.complete_tx"))
    (phase,) = of_track(report.trace, Track("cta (0,0,0)", "mbarrier 0"))
    assert phase.stop == end.stop


def test_ctas_of_a_cluster_release_each_other() -> None:
    def pair(device: Device) -> None:
        kernel = device.compile(CLUSTER, arch="sm_90a").kernel("pair")
        kernel.launch((2,), (32,), [device.empty((64,), np.uint32), 40], cluster=(2, 1, 1))

    (report,) = watch(executor(), pair, trace=True)
    trace = report.trace
    assert trace is not None
    (flow,) = named(trace, "arrive")
    assert (flow.source.process, flow.target.process) == ("cta (1,0,0)", "cta (0,0,0)")
    assert ending(trace, flow.source, flow.source_time).name == "barrier.cluster.arrive.release"
    assert ending(trace, flow.target, flow.target_time).name == "barrier.cluster.wait.acquire"


def test_a_deadlock_shows_who_waits_to_the_end() -> None:
    source = (
        CUDA
        + r"""
extern "C" __global__ void stuck(u32* out) {
    __shared__ __align__(8) u64 bar;
    if (threadIdx.x == 0) init(&bar, 2);
    __syncthreads();
    if (threadIdx.x == 0) arrive(&bar);
    wait(&bar, 0);
    out[threadIdx.x] = 1;
}
"""
    )

    def stuck(device: Device) -> None:
        kernel = device.compile(source, arch="sm_90a").kernel("stuck")
        kernel.launch((1,), (64,), [device.empty((64,), np.uint32)])

    (report,) = watch(executor(), stuck, trace=True, hazards=True)
    trace = report.trace
    assert report.is_broken
    assert trace is not None
    for warp in (0, 1):
        last = of_track(trace, Track("cta (0,0,0)", f"warp {warp}"))[-1]
        assert (last.kind, last.stop) == ("wait", trace.stop)


def test_waves_of_a_launch_follow_one_another() -> None:
    def many(device: Device) -> None:
        kernel = device.compile(LATE).kernel("late")
        kernel.launch((140,), (1024,), [device.empty((1024,), np.uint32), 3])

    # The H100 holds 132 CTAs of 1024 threads at once, the first ones.
    (report,) = watch(executor(), many, trace=True, trace_ctas=(0, 131, 132, 139))
    assert report.trace is not None
    spans = {
        process: [event for event in report.trace.events if event.track.process == process]
        for process in report.trace.processes
    }
    first, last = spans["cta (131,0,0)"], spans["cta (132,0,0)"]
    assert max(event.stop for event in first) <= min(event.start for event in last)
    assert len(spans["cta (0,0,0)"]) == len(first) == len(last) == len(spans["cta (139,0,0)"])


PEERS = (
    CUDA
    + r"""
// Every CTA sends the next one of its cluster a word, and waits for its own.
extern "C" __global__ void ring(u32* out) {
    __shared__ u32 cell;
    __shared__ __align__(8) u64 full;
    u32 rank = cta_rank(), next = (rank + 1) % 2;
    if (threadIdx.x == 0) { init(&full, 1); fence_init(); expect(&full, 4); }
    cluster_sync();
    if (threadIdx.x == 0)
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32"
                     " [%0], %1, [%2];" ::"r"(peer(sa(&cell), next)), "r"(rank),
                     "r"(peer(sa(&full), next)) : "memory");
    wait(&full, 0);
    if (threadIdx.x == 0) out[blockIdx.x] = cell;
    cluster_sync();
}
"""
)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_stores_to_a_peer_lead_to_its_wait(schedule: Schedule) -> None:
    def ring(device: Device) -> None:
        out = device.empty((2,), np.uint32)
        kernel = device.compile(PEERS, arch="sm_90a").kernel("ring")
        kernel.launch((2,), (32,), [out], cluster=(2, 1, 1))
        assert out.to_numpy().tolist() == [1, 0]

    (report,) = watch(executor(schedule), ring, trace=True)
    check_bytes(report)
    trace = report.trace
    assert trace is not None
    copies = [event for event in trace.events if event.track.name == "async stores"]
    assert [(e.args["shared_bytes"], "bytes" in e.args) for e in copies] == [(4, False)] * 2
    flows = named(trace, "copy")
    assert {(flow.source.process, flow.target.process) for flow in flows} == {
        ("cta (0,0,0)", "cta (1,0,0)"),
        ("cta (1,0,0)", "cta (0,0,0)"),
    }
    for flow in flows:
        assert ending(trace, flow.source, flow.source_time) in copies
        assert ending(trace, flow.target, flow.target_time).name.startswith("mbarrier.try_wait")


DEPENDENT = r"""
extern "C" __global__ void first(unsigned* x, int n) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    unsigned y = 1;
    for (int i = 0; i < n; i++) y = y * 1664525u + 1013904223u;
    x[threadIdx.x] = y;
}
extern "C" __global__ void second(unsigned* x) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    x[threadIdx.x] += 1;
}
"""


@pytest.mark.parametrize("schedule", SCHEDULES[:2], ids=str)
def test_both_of_dependent_launches_have_a_trace(schedule: Schedule) -> None:
    def both(device: Device) -> None:
        module = device.compile(DEPENDENT, arch="sm_90a")
        x = device.empty((32,), np.uint32)
        device.launch_dependent(
            gpu.Call(module.kernel("first"), (1,), (32,), [x, 5]),
            gpu.Call(module.kernel("second"), (1,), (32,), [x]),
        )

    first, second = watch(executor(schedule), both, trace=True)
    for report in (first, second):
        check_bytes(report)
    assert second.trace is not None
    assert "griddepcontrol.wait" in {event.name for event in second.trace.events}


def test_a_fault_shows_what_came_before_it() -> None:
    source = """
extern "C" __global__ void stray(unsigned* out) {
    if (threadIdx.x < 32) {
        asm volatile("bar.arrive 1, 64;" ::: "memory");
        out[1 << 20] = 1;
    } else {
        asm volatile("bar.sync 1, 64;" ::: "memory");
    }
}
"""

    def stray(device: Device) -> None:
        kernel = device.compile(source).kernel("stray")
        kernel.launch((1,), (64,), [device.empty((1,), np.uint32)])

    (report,) = watch(executor(), stray, trace=True, hazards=True)
    assert [hazard.kind for hazard in report.errors if hazard.kind in FAULTS] == ["out_of_bounds"]
    assert report.trace is not None
    assert report.trace.events[-1].track.process == "cta (0,0,0)"
    assert {e.name for e in report.trace.events} >= {"bar.arrive", "st.global.u32"}


# Options


def test_nothing_of_tracing_runs_unless_asked_for() -> None:
    def files_run(trace: bool) -> set[str]:
        seen: set[str] = set()

        def profile(frame: FrameType, event: str, argument: object) -> None:
            if event == "call":
                seen.add(frame.f_code.co_filename)

        sys.setprofile(profile)
        try:
            watch(executor(Schedule("lazy")), KERNELS["flash_attention"], trace=trace)
        finally:
            sys.setprofile(None)
        return {Path(file).name for file in seen if "tracing" in Path(file).parts}

    assert files_run(True) == {"log.py", "recorder.py", "segments.py"}
    assert not files_run(False)


def test_tracing_changes_nothing_else() -> None:
    plain, traced = (
        watch(executor(Schedule("random", 3)), bulk, trace=trace, hazards=True)[0]
        for trace in (False, True)
    )
    assert plain.trace is None
    assert replace(traced, trace=None, seconds=plain.seconds) == plain


def test_chosen_ctas_are_traced_as_among_all() -> None:
    whole = watch(executor(), KERNELS["flash_attention"], trace=True)[0].trace
    part = watch(executor(), KERNELS["flash_attention"], trace=True, trace_ctas=(1, 2, 99))[0].trace
    assert whole is not None
    assert part is not None
    # Two tiles of queries, two heads.
    assert whole.processes == ("cta (0,0,0)", "cta (1,0,0)", "cta (0,1,0)", "cta (1,1,0)")
    assert part.processes == ("cta (1,0,0)", "cta (0,1,0)")
    assert part.events == tuple(e for e in whole.events if e.track.process in part.processes)
    assert set(part.flows) == {f for f in whole.flows if f.source.process in part.processes}


def test_too_many_events_say_how_to_trace_fewer() -> None:
    with pytest.raises(BudgetError, match=r"'flash_attention' has more than 300 events.*of 4 CTAs;"
                       r" trace fewer.*trace_ctas=range\(1\)"):  # fmt: skip
        watch(executor(), KERNELS["flash_attention"], trace=True, trace_events=300)
    (report,) = watch(
        executor(), KERNELS["flash_attention"], trace=True, trace_events=300, trace_ctas=range(1)
    )
    assert report.trace is not None
    with pytest.raises(LaunchError, match=r"trace_ctas=\(4,\) names no CTA .* CTAs 0 to 3"):
        watch(executor(), KERNELS["flash_attention"], trace=True, trace_ctas=(4,))


def test_as_many_events_as_there_may_be() -> None:
    def call(device: Device) -> None:
        late(device, 3, threads=96)

    (report,) = watch(executor(), call, trace=True)
    assert report.trace is not None
    count = len(report.trace.events)
    (again,) = watch(executor(), call, trace=True, trace_events=count)
    assert again.trace == report.trace
    with pytest.raises(BudgetError):
        watch(executor(), call, trace=True, trace_events=count - 1)


def test_launches_of_a_call_follow_one_another() -> None:
    trace = gpu.trace(executor(), KERNELS["flash_decoding"])
    split, combine = (
        [event for event in trace.events if event.track.process.startswith(prefix)]
        for prefix in ("1. flash_decoding_split, cta (", "2. flash_decoding_combine, cta (")
    )
    assert len(split) + len(combine) == len(trace.events)
    end = max(event.stop for event in split)
    assert end <= min(event.start for event in combine)
    launched = named(trace, "launch")
    assert {flow.source_time for flow in launched} == {end}
    assert {flow.target for flow in launched} == {event.track for event in combine}


def test_launches_that_overlap_have_no_arrow() -> None:
    plain = watch(executor(), lambda device: late(device, 3), trace=True)
    again = watch(executor(), lambda device: late(device, 3), trace=True)
    trace = joined([*plain, *again], is_continuous=True)
    assert plain[0].trace is not None
    assert trace.stop == plain[0].trace.stop
    assert not named(trace, "launch")


# What shows


@pytest.mark.parametrize(
    ("text", "kind", "is_major"),
    [
        ("ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];", "load", True),
        ("ld.u32 %r1, [%rd1];", "load", True),
        ("ld.shared.u32 %r1, [%r2];", "load", False),
        ("ld.param.u64 %rd1, [p];", "compute", False),
        ("st.global.u32 [%rd1], %r1;", "store", True),
        ("st.shared::cta.u32 [%r2], %r1;", "store", False),
        ("atom.global.add.u32 %r1, [%rd1], %r2;", "store", True),
        ("red.shared.add.u32 [%r1], %r2;", "store", False),
        ("cp.async.cg.shared.global [%r1], [%rd1], 16;", "load", True),
        ("cp.async.commit_group;", "compute", False),
        ("cp.async.wait_group 1;", "wait", True),
        ("cp.async.wait_all;", "wait", True),
        ("cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];", "barrier", True),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 16;", "store", True),
        ("cp.async.bulk.wait_group.read 0;", "wait", True),
        ("mbarrier.init.shared.b64 [%r1], 1;", "compute", False),
        ("mbarrier.arrive.shared.b64 %rd1, [%r1];", "barrier", True),
        ("mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;", "wait", True),
        ("mbarrier.test_wait.parity.shared.b64 %p1, [%r1], 0;", "wait", True),
        ("bar.sync 0;", "wait", True),
        ("bar.arrive 1, 64;", "barrier", True),
        ("barrier.cluster.arrive.aligned;", "barrier", True),
        ("barrier.cluster.wait.aligned;", "wait", True),
        ("wgmma.commit_group.sync.aligned;", "mma", True),
        ("wgmma.wait_group.sync.aligned 0;", "wait", True),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2];", "load", False),
        ("cvt.rn.f32.u32 %f1, %r1;", "convert", False),
        ("ex2.approx.f32 %f1, %f2;", "softmax", False),
        ("add.u32 %r1, %r2, %r3;", "compute", False),
    ],
)
def test_instructions_show_as_what_they_do(text: str, kind: str, is_major: bool) -> None:
    registers = ".reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>;"
    module = parse(f"{PTX_HEADER}.visible .entry k(.param .u64 p)\n{{\n{registers}\n{text}\n}}\n")
    (instruction,) = module.functions["k"].body
    assert isinstance(instruction, Instruction)
    assert role_of(instruction) == Role(kind, is_major)


ADD = "add.u32 %r1, %r1, %r2;"
CONVERT = "cvt.rn.f32.u32 %f1, %r1; cvt.rzi.u32.f32 %r1, %f1;"
LOAD = "ld.volatile.global.u32 %r3, [%rd1];"


@pytest.mark.parametrize(
    ("texts", "stretches"),
    [
        # Few instructions before, between and after loads make their addresses.
        ([*7 * [ADD], LOAD, *7 * [ADD]], [("load", 15)]),
        ([*8 * [ADD], LOAD, *8 * [ADD]], [("compute", 8), ("load", 1), ("compute", 8)]),
        ([LOAD, *16 * [ADD], LOAD], [("load", 18)]),
        ([LOAD, *17 * [ADD], LOAD], [("load", 1), ("compute", 17), ("load", 1)]),
        # Waits stand alone.
        ([ADD, "cp.async.wait_all;", ADD], [("compute", 1), ("wait", 1), ("compute", 1)]),
        # A quarter of a stretch gives it its kind.
        ([*6 * [ADD], CONVERT], [("convert", 8)]),
        ([*7 * [ADD], CONVERT], [("compute", 9)]),
    ],
)
def test_stretches(texts: list[str], stretches: list[tuple[str, int]]) -> None:
    registers = ".reg .b32 %r<9>;\n.reg .b64 %rd<9>;\n.reg .f32 %f<9>;"
    # The last barrier is the block's end.
    body = "\n".join(text.replace("; ", ";\n") for text in (*texts, "bar.sync 0;"))
    text = (
        f"{PTX_HEADER}.visible .entry k()\n{{\n{registers}\nbar.sync 0;\n{body}\n"
        "st.global.u32 [%rd1], %r1;\nret;\n}\n"
    )
    layout = layout_of(executor().load(text).kernel("k").program.blocks[1])
    found = [(segment.kind, segment.end - segment.first) for segment in layout.segments]
    assert found == [*stretches, ("wait", 1)]


@pytest.mark.parametrize("name", KERNELS)
def test_blocks_are_covered_by_stretches_of_a_kind(name: str) -> None:
    module = build_module(executor(), name, ("-DHEAD_DIM=64", "-DGROUP=2"))
    assert isinstance(module, PtxModule)
    kinds = set()
    for kernel in module.kernels:
        for block in module.kernel(kernel).program.blocks:
            layout = layout_of(block)
            edges = [0, *(segment.end for segment in layout.segments)]
            assert [segment.first for segment in layout.segments] == edges[:-1]
            assert edges[-1] == layout.length == len(block.items)
            assert edges == sorted(set(edges))
            kinds |= {segment.kind for segment in layout.segments}
    assert kinds >= {"load", "store", "wait", "compute"}
