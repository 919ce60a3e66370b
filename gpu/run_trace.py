"""One call of kernels as one Trace, on whichever device: the executor's own, or a GPU's stamps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from gpu.counters import Report
from gpu.device import Device
from gpu.ptx.executor import PtxDevice
from gpu.stamps import RECORDS_PER_WARP, StampedDevice
from gpu.watched import WatchedDevice
from simkit.errors import LaunchError
from traces.events import Event, Flow, Trace, Track


def trace_run(
    device: Device,
    call: Callable[[Device], object],
    *,
    ctas: Collection[int] | None = None,
    stamps: bool = False,
    records: int = RECORDS_PER_WARP,
) -> Trace:
    """What the kernels that ``call`` launches on the device given to it do, and when.

    >>> trace_run(gpu.open("ptx"), lambda device: flash_attention(device, q, k, v))

    On the executor that is every block, wait and copy, in "steps" (gpu.ptx.tracing); with
    ``stamps``, and always on a GPU, the phases that kernels stamp, in "ns" there (gpu.stamps;
    ``records``: room for the stamps of a warp).  ``ctas``: only those, by number (x fastest).  The
    launches follow one another.

    Raises LaunchError if nothing was launched, or nothing that has stamps; BudgetError or
    CapacityError for more events than there is room for.
    """
    watched: WatchedDevice
    is_stamped = stamps or not isinstance(device, PtxDevice)
    if is_stamped:
        watched = StampedDevice(device, records, ctas)
    else:
        assert isinstance(device, PtxDevice)
        options = replace(device.options, trace=True, trace_ctas=ctas)
        watched = WatchedDevice(device.with_options(options))
    call(watched)
    reports = [report for report in watched.reports if report.trace is not None]
    if not reports:
        names = ", ".join(report.kernel for report in watched.reports) or "none"
        raise LaunchError(f"there is nothing to trace: of the kernels launched ({names}) none has"
                          " stamps (gpu/kernels/include/stamps.cuh)")  # fmt: skip
    return joined(reports, is_continuous=is_stamped)


def joined(reports: Sequence[Report], *, is_continuous: bool) -> Trace:
    """The traces of launches as one; with more than one, the kernel's name is part of a process's.

    ``is_continuous``: their times go on from one to the next; else each begins at 0, when the one
    before it ends.
    """
    traces = [report.trace for report in reports if report.trace is not None]
    if len(traces) == 1:
        return traces[0]
    moved: list[Trace] = []
    now = 0.0
    for number, (report, trace) in enumerate(zip(reports, traces, strict=True), start=1):
        moved.append(_moved(trace, f"{number}. {report.kernel}, ", 0 if is_continuous else now))
        now += trace.stop
    launches = [flow for before, after in pairwise(moved) for flow in _launch(before, after)]
    return Trace(
        ", ".join(dict.fromkeys(report.kernel for report in reports)),
        tuple(event for trace in moved for event in trace.events),
        tuple(track for trace in moved for track in trace.tracks),
        flows=(*(flow for trace in moved for flow in trace.flows), *launches),
        unit=traces[0].unit,
    )


def _launch(before: Trace, after: Trace) -> Iterator[Flow]:
    """From the end of a launch to the first event of each track of the next, if that is later."""
    last = max(before.events, key=lambda event: event.stop)
    for track in after.tracks:
        first = min(event.start for event in after.events if event.track == track)
        if first >= last.stop:
            yield Flow("launch", last.track, last.stop, track, first)


def _moved(trace: Trace, prefix: str, by: float) -> Trace:
    def place(track: Track) -> Track:
        return Track(prefix + track.process, track.name)

    def event(one: Event) -> Event:
        return replace(one, track=place(one.track), start=one.start + by)

    def flow(one: Flow) -> Flow:
        return Flow(one.name, place(one.source), one.source_time + by,
                    place(one.target), one.target_time + by)  # fmt: skip

    return replace(
        trace,
        events=tuple(map(event, trace.events)),
        tracks=tuple(map(place, trace.tracks)),
        flows=tuple(map(flow, trace.flows)),
    )
