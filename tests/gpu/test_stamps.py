"""Kernels that stamp the time: what they stamp, on any device, and that they pay nothing unless
asked to.
"""

from __future__ import annotations

import ctypes
import re
import struct
import sys
import types
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_cuda import fake_cupy, fake_driver

import gpu
from gpu.compile import INCLUDE_DIRECTORY, compile_cuda
from gpu.device import Device
from gpu.kernels.build import EXACT_OPTIONS, kernel_source
from gpu.kernels.flash_attention import flash_attention
from gpu.kernels.flash_decoding import flash_decoding
from gpu.kernels.result import KernelResult
from gpu.ptx.launch import Options
from gpu.ptx.schedule import Schedule
from gpu.stamps import PHASES, RECORD, StampedDevice
from simkit.errors import CapacityError, LaunchError
from traces import chrome
from traces.events import Trace

Q_LEN, KV_LEN, HEADS = 100, 150, 2
Q_TILES, KV_TILES = 2, 3


def tensors(q_len: int) -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    shapes = ((1, q_len, HEADS, 64), (1, KV_LEN, 1, 64), (1, KV_LEN, 1, 64))
    return [rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in shapes]


def attention(device: Device) -> KernelResult:
    return flash_attention(device, *tensors(Q_LEN))


def decoding(device: Device) -> KernelResult:
    q, k, v = tensors(1)
    return flash_decoding(device, q[:, 0], k, v, splits=2)


def by_track(trace: Trace) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for event in trace.events:
        found.setdefault(str(event.track), []).append(event)
    return found


def test_phases_of_attention(device: Device) -> None:
    trace = gpu.trace(device, attention, stamps=True)
    assert trace.unit == ("ns" if device.name == "cuda" else "steps")
    ctas = {process.partition(", ")[2] for process in trace.processes}
    assert ctas == {f"cta ({tile},{head},0)" for tile in range(Q_TILES) for head in range(HEADS)}
    assert all(re.fullmatch(r"SM \d+, cta \(\d,\d,0\)", process) for process in trace.processes)
    for events in by_track(trace).values():
        names = [event.name for event in events]
        step = ["wait", "load", "scores", "softmax", "values"]
        assert names == ["load", "wait", *KV_TILES * step, "store"]
        assert all(before.stop <= after.start for before, after in pairwise(events))
        kinds = {(event.name, event.kind) for event in events}
        assert kinds <= {(name.lower(), kind) for name, kind in PHASES.items()}


def test_phases_of_decoding_and_its_merge(device: Device) -> None:
    trace = gpu.trace(device, decoding, stamps=True)
    split, merge = (
        {t: events for t, events in by_track(trace).items() if t.startswith(prefix)}
        for prefix in ("1. flash_decoding_split", "2. flash_decoding_combine")
    )
    step = ["wait", "load", "scores", "softmax", "values"]
    # Three tiles over two splits: two and one.
    counts = Counter(tuple(event.name for event in events) for events in split.values())
    assert set(counts) == {("load", *tiles * step, "store") for tiles in (1, 2)}
    assert {tuple(e.name for e in events) for events in merge.values()} == {("merge", "store")}
    assert max(e.stop for events in split.values() for e in events) <= min(
        event.start for events in merge.values() for event in events
    )
    # The clock goes on from one launch to the next.
    assert trace.start == 0


def test_stamps_of_the_executor_are_apart_and_repeatable() -> None:
    traces = [gpu.trace(gpu.open("ptx"), attention, stamps=True) for _ in range(2)]
    assert traces[0] == traces[1]
    assert all(event.duration > 0 for event in traces[0].events)
    first = [t.name for t in traces[0].tracks if t.process.endswith("cta (0,0,0)")]
    assert first == ["warpgroup 0"]  # whose rows all exist
    lazy = gpu.open("ptx", options=Options(schedule=Schedule("lazy")))
    # Under a lazy schedule warps run one after another.
    warps = [f"warp {warp}" for warp in range(4)]
    names = [track.name for track in gpu.trace(lazy, attention, stamps=True).tracks]
    assert names == Q_TILES * HEADS * warps


def test_stamps_load_back_from_chrome(device: Device, tmp_path: Any) -> None:
    trace = gpu.trace(device, decoding, stamps=True)
    chrome.save(trace, tmp_path / "trace.json")
    assert chrome.load(tmp_path / "trace.json") == trace


@pytest.mark.parametrize("call", [attention, decoding])
def test_results_are_the_same_with_stamps(
    device: Device, call: Callable[[Device], KernelResult]
) -> None:
    plain, stamped = call(device), call(StampedDevice(device))
    for name, array in plain.outputs.items():
        assert array.tobytes() == stamped.outputs[name].tobytes(), name
    assert [report.trace is None for report in plain.reports] == len(plain.reports) * [True]
    assert [report.trace is None for report in stamped.reports] == len(plain.reports) * [False]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("flash_attention", ("-DHEAD_DIM=64",)),
        ("flash_attention", ("-DHEAD_DIM=128",)),
        ("flash_decoding", ("-DHEAD_DIM=64", "-DGROUP=1")),
        ("flash_decoding", ("-DHEAD_DIM=128", "-DGROUP=3")),
    ],
)
def test_kernels_that_are_not_asked_to_stamp_are_as_without_stamps(
    name: str, options: tuple[str, ...]
) -> None:
    source = kernel_source(name)
    bare, count = re.subn(
        r'^ *(STAMP\w*(\(\w+\))?;|#include "stamps.cuh")$', "", source, flags=re.MULTILINE
    )
    assert count > 10
    assert "STAMP" not in bare

    def compiled(text: str, *more: str) -> str:
        return compile_cuda(text, options=(*EXACT_OPTIONS, *options, *more), name="kernel.cu")

    assert compiled(source) == compiled(bare)
    assert "globaltimer" in compiled(source, "-DSIMKIT_STAMPS=1")


def test_phases_have_the_numbers_of_the_header() -> None:
    header = (INCLUDE_DIRECTORY / "stamps.cuh").read_text(encoding="utf-8")
    (names,) = re.findall(r"enum StampPhase : unsigned \{ (.*) \};", header)
    assert names.split(", ") == [f"k{name}" for name in PHASES]


def test_too_many_stamps_say_how_many(device: Device) -> None:
    # Two phases before the loop, five for each tile, one behind.
    count = 2 * (2 + 5 * KV_TILES + 1)
    message = (
        rf"'flash_attention': warp 0 of cta \(0,0,0\) wrote {count} stamps, the buffer holds"
        rf" {count - 1} .*records={count}"
    )
    with pytest.raises(CapacityError, match=message):
        gpu.trace(device, attention, stamps=True, records=count - 1)
    enough = gpu.trace(device, attention, stamps=True, records=count)
    assert len(enough.events) >= Q_TILES * HEADS * count // 2


def test_chosen_ctas(device: Device) -> None:
    trace = gpu.trace(device, attention, stamps=True, ctas=(1, 2))
    assert {process.partition(", ")[2] for process in trace.processes} == {
        "cta (1,0,0)",
        "cta (0,1,0)",
    }


KERNEL = r"""
#include "stamps.cuh"
extern "C" __global__ void stamped(unsigned* out) {
    STAMPS;
    if (threadIdx.x / 32 == 1) return;
    BODY
    out[threadIdx.x] = threadIdx.x;
}
extern "C" __global__ void silent(unsigned* out) { out[threadIdx.x] = threadIdx.x; }
"""


def run(device: Device, body: str, kernel: str = "stamped") -> Trace:
    def call(watched: Device) -> None:
        module = watched.compile(KERNEL, options=(f"-DBODY={body}",))
        module.kernel(kernel).launch((1,), (96,), [watched.empty((96,), np.uint32)])

    return gpu.trace(device, call, stamps=True)


def test_phases_nest_and_warps_may_leave_early(device: Device) -> None:
    trace = run(device, "STAMP_BEGIN(Load); STAMP_BEGIN(Wait); STAMP_END(Wait); STAMP_END(Load);")
    assert [track.name for track in trace.tracks] == ["warp 0", "warp 2"]
    for outer, inner in (events for events in by_track(trace).values()):
        assert (outer.name, inner.name) == ("load", "wait")
        assert outer.start <= inner.start <= inner.stop <= outer.stop


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("STAMP_END(Load);", "phase Load ends on .*warp 0, but did not begin last"),
        ("STAMP_BEGIN(Load); STAMP_BEGIN(Wait); STAMP_END(Load);", "Load ends .* begin last"),
        ("STAMP_BEGIN(Load);", "phase Load on .*warp 0 has no end"),
    ],
)
def test_phases_that_do_not_match(device: Device, body: str, message: str) -> None:
    with pytest.raises(LaunchError, match=f"'stamped': .*{message}"):
        run(device, body)


def test_kernels_without_stamps_are_an_error(device: Device) -> None:
    with pytest.raises(LaunchError, match=r"nothing to trace: .*\(silent\) none has stamps"):
        run(device, "", "silent")
    with pytest.raises(LaunchError, match=r"nothing to trace: .*\(none\)"):
        gpu.trace(device, lambda _: None, stamps=True)


def test_the_host_side_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the driver replaced by one whose launches stamp as the kernel would."""
    cupy, header = fake_cupy(), bytearray()

    class Launches(list[dict[str, Any]]):
        def append(self, launch: dict[str, Any]) -> None:
            super().append(launch)
            rows, row_records = struct.unpack("<QI4x", header)
            begin = 1_700_000_000_000_000_000 + 64 * len(self)
            # The second warp of the second CTA: how many, then a phase of 32 ns on SM 7.
            records = np.array([(2, 0, 0), (begin, 0, 7), (begin + 32, 1, 7)], RECORD)
            place = rows + 3 * row_records * RECORD.itemsize
            ctypes.memmove(place, records.tobytes(), records.nbytes)
            # The first warp of the first CTA: the same, later.
            records["time"][1:] += 20
            ctypes.memmove(rows, records.tobytes(), records.nbytes)

    def get_global(module: object, name: str) -> Any:
        assert name == "simkit_stamps"
        return types.SimpleNamespace(set=lambda values: header.__init__(values.tobytes()))  # type: ignore[misc]

    cupy.RawModule.get_global = get_global  # type: ignore[attr-defined]
    cupy.ndarray = lambda shape, dtype, memptr: memptr  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    launches = Launches()
    fake_driver(monkeypatch, launches)

    def twice(device: Device) -> None:
        kernel = device.compile(KERNEL, options=("-DBODY=",)).kernel("stamped")
        for _ in range(2):
            kernel.launch((1, 2), (64,), [device.empty((64,), np.uint32)])

    trace = gpu.trace(gpu.open("cuda"), twice)
    assert len(launches) == 2
    assert trace.unit == "ns"
    assert [(str(e.track), e.name, e.kind, e.start, e.duration) for e in trace.events] == [
        ("1. stamped, SM 7, cta (0,0,0)/warp 0", "load", "load", 20, 32),
        ("1. stamped, SM 7, cta (0,1,0)/warp 1", "load", "load", 0, 32),
        ("2. stamped, SM 7, cta (0,0,0)/warp 0", "load", "load", 84, 32),
        ("2. stamped, SM 7, cta (0,1,0)/warp 1", "load", "load", 64, 32),
    ]


CLOCK = r"""
extern "C" __global__ void clock(unsigned long long* out) {
    unsigned long long a, b;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(a)::"memory");
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(b)::"memory");
    out[0] = a;
    out[1] = b;
}
"""


def test_the_executors_timer_moves_within_a_block_and_between_launches() -> None:
    device = gpu.open("ptx")
    kernel = device.compile(CLOCK).kernel("clock")
    times: list[int] = []
    for _ in range(2):
        out = device.empty((2,), np.uint64)
        kernel.launch((1,), (1,), [out])
        times += out.to_numpy().tolist()
    assert times == sorted(set(times))
