"""Kernels that stamp the time as they go (include/stamps.cuh), and what they stamped as a Trace.

On a GPU times are nanoseconds of ``%globaltimer``, which ticks every 32 ns or so, from the first
stamp on.  The executor's clock counts its work: there the same kernels give a Trace of "steps".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gpu.counters import Report
from gpu.device import Call, Device, Module
from gpu.ptx.launch import dimensions
from gpu.watched import WatchedDevice
from simkit.errors import CapacityError, LaunchError
from traces.events import Event, Trace, Track

PHASES = {
    "Load": "load",
    "Wait": "wait",
    "Scores": "mma",
    "Softmax": "softmax",
    "Values": "mma",
    "Store": "store",
    "Merge": "compute",
}
"""Kind of event by phase, in the order of StampPhase."""

RECORD = np.dtype([("time", "<u8"), ("event", "<u4"), ("sm", "<u4")])
RECORDS_PER_WARP = 1024
_VARIABLE = "simkit_stamps"
_UNWRITTEN = 2**64 - 1  # what arrays hold before anybody writes them
_TOGETHER = 4  # warps of a warpgroup

Rows = NDArray[np.void]


class StampedDevice(WatchedDevice):
    """Compiles kernels with stamps; ``Report.trace`` is then what they stamped.

    ``records``: room for so many stamps of each warp; CapacityError where one writes more.
    ``ctas``: which CTAs show, by number (x fastest; None: all).
    """

    def __init__(
        self,
        device: Device,
        records: int = RECORDS_PER_WARP,
        ctas: Collection[int] | None = None,
    ) -> None:
        super().__init__(device, ("-DSIMKIT_STAMPS=1",))
        self.records = records
        self.ctas = ctas
        self._origin: int | None = None

    def run(self, module: Module, call: Call) -> Report:
        """One launch; kernels of a module without stamps run as they are."""
        variable = module.variable(_VARIABLE)
        if variable is None:
            return super().run(module, call)
        grid = dimensions("grid", call.grid)
        warps = -(-math.prod(call.block) // 32)
        shape = (math.prod(grid) * warps, self.records + 1)
        buffer = self.device.empty(shape, RECORD, name=_VARIABLE)
        header = np.zeros(variable.shape, np.uint8)
        values = np.array([buffer.address, self.records + 1], "<u8").view(np.uint8)
        header[: len(values)] = values
        variable.fill(header)
        report = super().run(module, call)
        return replace(report, trace=self._trace(call.kernel.name, grid, buffer.to_numpy(), warps))

    def _trace(
        self, kernel: str, grid: tuple[int, int, int], rows: Rows, warps: int
    ) -> Trace | None:
        """None if nobody stamped anything: the kernel does not open with STAMPS."""
        stamps = [*self._stamps(kernel, grid, rows, warps)]
        if not stamps:
            return None
        if self._origin is None:
            self._origin = min(int(times["time"].min()) for _, _, times in stamps)
        events: list[Event] = []
        by_group: dict[tuple[str, int], list[tuple[int, Rows]]] = {}
        for process, warp, times in stamps:
            by_group.setdefault((process, warp // _TOGETHER), []).append((warp, times))
        for (process, group), members in by_group.items():
            same = all(_same(times, members[0][1]) for _, times in members)
            if len(members) == _TOGETHER and same:
                members = [(-1, members[0][1])]
            for warp, times in members:
                name = f"warpgroup {group}" if warp < 0 else f"warp {warp}"
                events += _events(kernel, Track(process, name), times, self._origin)
        unit = "steps" if self.name == "ptx" else "ns"
        return Trace(f"{kernel}, stamped on {self.name}", tuple(events), unit=unit)

    def _stamps(
        self, kernel: str, grid: tuple[int, int, int], rows: Rows, warps: int
    ) -> Iterator[tuple[str, int, Rows]]:
        """Process, warp and stamps of each warp that has any."""
        x, y, _ = grid
        for number, row in enumerate(rows):
            cta, warp = divmod(number, warps)
            count = int(row["time"][0])
            if count in (0, _UNWRITTEN) or (self.ctas is not None and cta not in self.ctas):
                continue
            place = f"cta ({cta % x},{cta // x % y},{cta // (x * y)})"
            if count > self.records:
                raise CapacityError(
                    f"kernel {kernel!r}: warp {warp} of {place} wrote {count} stamps, the buffer"
                    f" holds {self.records} of each warp; give it room with records={count}"
                )
            times = row[1 : count + 1]
            yield f"SM {times['sm'][0]}, {place}", warp, times


def _same(one: Rows, other: Rows) -> bool:
    return len(one) == len(other) and bool((one == other).all())


def _events(kernel: str, track: Track, stamps: Rows, origin: int) -> Iterator[Event]:
    """The phases between the stamps of a warp; phases may nest.  LaunchError if one has no end."""
    names = list(PHASES)
    begun: list[tuple[int, int]] = []
    for time, event, _ in stamps.tolist():
        phase, is_end = divmod(event, 2)
        if not is_end:
            begun.append((phase, time - origin))
            continue
        if not begun or begun[-1][0] != phase:
            raise LaunchError(
                f"kernel {kernel!r}: phase {names[phase]} ends on {track}, but did not begin last"
            )
        _, start = begun.pop()
        name = names[phase].lower()
        yield Event(name, PHASES[names[phase]], track, start, time - origin - start)
    if begun:
        raise LaunchError(f"kernel {kernel!r}: phase {names[begun[-1][0]]} on {track} has no end")
