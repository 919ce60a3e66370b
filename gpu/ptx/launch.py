"""One launch on the executor: arguments checked and packed, code generated once, CTAs run in
waves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from gpu.counters import Hazard, Report
from gpu.ptx import arithmetic
from gpu.ptx.arithmetic import Arithmetic
from gpu.ptx.frame import Frame
from gpu.ptx.grid import Grid, Group, Statistics
from gpu.ptx.hazards.costs import costs, never_written
from gpu.ptx.hazards.detector import Detector
from gpu.ptx.hazards.findings import HazardState
from gpu.ptx.hazards.registers import unwritten_registers, warpgroup_hazards
from gpu.ptx.memory import Bytes, GlobalMemory
from gpu.ptx.program import Program
from gpu.ptx.schedule import Schedule
from gpu.ptx.tracing.log import TraceLog
from gpu.ptx.tracing.recorder import Recorder
from gpu.ptx.traffic import TrafficCounter
from simkit.errors import DeadlockError, LaunchError, MemoryAccessError, TrapError
from simkit.machine.cache import L2Cache
from simkit.machine.gpus import Gpu
from simkit.numerics.approximate import approximation
from simkit.numerics.tensor_core import (
    TensorCore,
    half_precision,
    tensor_core,
    warp_tensor_core,
)

if TYPE_CHECKING:
    from gpu.ptx.emit import Code
    from gpu.ptx.executor import PtxKernel

# Lanes that run together at most, unless the GPU itself would hold more CTAs at once: beyond this,
# arrays outgrow the caches and nothing is gained.
_LANES_AT_ONCE = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the executor runs.

    ``schedule``: order of warps and copies (schedule.py).  ``numerics``: "exact" tensor cores bit
    for bit, "fast" plain float32 for looking around.  ``budget``: array instructions after which a
    kernel is taken for endless.  ``dram``: send every access through a model of the L2 to count
    what reaches memory (slower).  ``approx``: approximate instructions (ex2, rcp, ...) give the
    "rounded" result, or an "adversarial" one, any that the ISA's bound allows, chosen by
    ``approx_seed`` (simkit.numerics.approximate).  ``hazards``: look for races, missing fences and
    uninitialised reads (gpu.ptx.hazards).  ``trace``: ``Report.trace`` says what each warp and copy
    did and in which order, of the CTAs with numbers in ``trace_ctas`` (x fastest; None: all), in at
    most ``trace_events`` events (BudgetError beyond).
    """

    schedule: Schedule = field(default_factory=Schedule)
    numerics: str = "exact"
    budget: int = 5_000_000
    dram: bool = False
    approx: str = "rounded"
    approx_seed: int = 0
    hazards: bool = False
    trace: bool = False
    trace_ctas: Collection[int] | None = None
    trace_events: int = 200_000


@dataclass
class Launch:
    """Everything that the CTAs of one launch share."""

    kernel: PtxKernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_shared: int
    parameters: np.ndarray
    memory: GlobalMemory
    gpu: Gpu
    arch: str
    options: Options
    cluster: tuple[int, int, int] = (1, 1, 1)
    is_cluster_launch: bool = False

    def __post_init__(self) -> None:
        self.program: Program = self.kernel.program
        self.threads = self.block[0] * self.block[1] * self.block[2]
        self.shared_bytes: int = self.kernel.static_shared + self.dynamic_shared
        self.parameter_memory: Bytes = Bytes(self.parameters)
        self.counters: TrafficCounter = TrafficCounter(
            L2Cache.of(self.gpu) if self.options.dram else None
        )
        self._cores: dict[str, TensorCore] = {}
        self._approximations: dict[str, Callable[..., np.ndarray]] = {}
        self.cluster_size: int = math.prod(self.cluster)
        self.clusters = tuple(g // c for g, c in zip(self.grid, self.cluster, strict=True))

        is_fast = self.options.numerics == "fast"
        self.f32: Arithmetic = arithmetic.FAST if is_fast else arithmetic.EXACT
        self.statistics = Statistics()
        self.output: list[str] = []
        self.seconds = 0.0
        self.started: int = self.memory.elapsed
        clusters = math.prod(self.clusters)
        self.hazards = HazardState(self.place, clusters) if self.options.hazards else None
        self.trace = TraceLog(self) if self.options.trace else None

    def waves(self) -> Iterator[Grid]:
        """The launch as grids of CTAs that are resident at the same time."""
        total = self.grid[0] * self.grid[1] * self.grid[2]
        together = max(_LANES_AT_ONCE // self.threads, min(self.gpu.sm_count, total), 1)
        together = -(-together // self.cluster_size) * self.cluster_size
        for first in range(0, total, together):
            yield Grid(self, first, min(together, total - first), self.statistics, self.output)

    def run(self) -> Report:
        for wave in self.waves():
            try:
                self.advance(wave)
            except (MemoryAccessError, DeadlockError, TrapError, LaunchError) as error:
                if self.hazards is None:
                    raise
                # Among the hazards it is one of several, which may well have led to it.
                self.hazards.findings.fault(error)
                break
            wave.release()
        return self.report()

    def advance(self, wave: Grid, until_triggered: bool = False) -> None:
        """Runs a wave as far as it goes."""
        started = time.perf_counter()
        # IEEE arithmetic makes infinities and NaNs without asking; integer overflow wraps.
        with np.errstate(all="ignore"):
            wave.run(until_triggered)
        self.seconds += time.perf_counter() - started

    def report(self) -> Report:
        statistics = self.statistics
        self.memory.elapsed = max(self.memory.elapsed, self.started + statistics.operations)
        return Report(
            kernel=self.program.name,
            device="ptx",
            grid=self.grid,
            block=self.block,
            shared_bytes=self.shared_bytes,
            seconds=self.seconds,
            traffic=self.counters.result(),
            hazards=self._hazards(),
            instructions=statistics.instructions,
            lane_instructions=statistics.lane_instructions,
            output="".join(self.output),
            trace=None if self.trace is None else self.trace.result(),
        )

    def detector(self, grid: Grid) -> Detector | None:
        """What looks for hazards in a wave."""
        return None if self.hazards is None else Detector(grid, self.hazards)

    def recorder(self, grid: Grid) -> Recorder | None:
        """What records a wave's trace."""
        return None if self.trace is None else Recorder(grid, self.trace)

    def _hazards(self) -> list[Hazard]:
        if self.hazards is None:
            # Nobody knows what this launch has written.
            for allocation in self.memory.allocations:
                allocation.written = None
            return []
        for allocation in self.memory.allocations:
            if allocation.written is not None and allocation.written.all():
                allocation.written = None
        blocks = self.program.blocks
        found = [
            *self.hazards.findings.found.values(),
            *warpgroup_hazards(blocks, self.place),
            *unwritten_registers(blocks, self.place),
            *never_written(self.memory, self.parameters),
            *costs(self.counters, self.statistics, self.place),
        ]
        return [self._placed(hazard) for hazard in found]

    def _placed(self, hazard: Hazard) -> Hazard:
        """With the lines of the text that was loaded in place of the executor's own."""
        if hazard.place:
            return hazard
        line, other = (
            self.kernel.position(site) if site else None
            for site in (hazard.line, hazard.other_line)
        )
        return replace(
            hazard,
            line=line.line if line else 0,
            place=self.place(hazard.line) if line else "",
            other_line=other.line if other else 0,
            other_place=hazard.other_place or (self.place(hazard.other_line) if other else ""),
        )

    def code(self, block: int, is_masked: bool) -> Code:
        return self.kernel.code(block, is_masked, self.cluster_size > 1)

    def tensor_core(self, kind: str) -> TensorCore | None:
        """The tensor core of mma.sync; None for plain float32.

        ``kind`` is the input type and, for 8-bit types, the products of one instruction, which the
        sums of those depend on: "bf16", "e4m3 32".
        """
        if self.options.numerics == "fast":
            return None
        if kind not in self._cores:
            inputs, _, k = kind.partition(" ")
            self._cores[kind] = warp_tensor_core(self.gpu.arch, inputs, int(k or 16))
        return self._cores[kind]

    def approximation(self, name: str) -> Callable[..., np.ndarray]:
        """What an approximate instruction computes."""
        if name not in self._approximations:
            self._approximations[name] = approximation(
                name, self.options.approx, self.options.approx_seed
            )
        return self._approximations[name]

    def warpgroup_core(self, kind: str, is_half: bool) -> TensorCore | None:
        """The tensor core of wgmma for an input type; None for plain float32."""
        if self.options.numerics == "fast":
            return None
        core = tensor_core(self.gpu.arch, kind)
        return half_precision(core) if is_half else core

    def place(self, site: int) -> str:
        return self.kernel.place(site)

    def first_line(self, frame: Frame, runnable: dict[int, list[Group]]) -> int:
        """A line that stands for where the kernel is: the start of the lowest block that could
        run.
        """
        for block in sorted(runnable):
            items = self.program.blocks[block].items
            if items:
                return items[0].instruction.position.line
        return (
            self.program.blocks[0].items[0].instruction.position.line
            if self.program.blocks[0].items
            else 0
        )


def run_dependent(primary: Launch, secondary: Launch) -> tuple[Report, Report]:
    """Programmatic dependent launch of two launches.

    Running the primary to its end first is a legal order, and what ``eager`` does.  Other schedules
    let the secondary start as early as it may, which shows whatever it reads too early.
    """
    if primary.hazards is not None and secondary.hazards is not None:
        secondary.hazards.follow(primary.hazards)
    first, second = list(primary.waves()), list(secondary.waves())
    if primary.options.schedule.kind == "eager" or len(first) > 1 or len(second) > 1:
        return primary.run(), secondary.run()
    (before,), (after,) = first, second
    after.primary = before
    primary.advance(before, until_triggered=True)
    secondary.advance(after)
    primary.advance(before)
    after.changed = True
    secondary.advance(after)
    return primary.report(), secondary.report()


MOST_CTAS_PER_CLUSTER = 16
"""The non-portable size of sm_90; 8 is what every device of that kind guarantees."""

_MOST = {
    "grid": (2**31 - 1, 65_535, 65_535),
    "block": (1024, 1024, 64),
    "cluster": (MOST_CTAS_PER_CLUSTER,) * 3,
}


def dimensions(name: str, value: Sequence[int]) -> tuple[int, int, int]:
    """A grid, block or cluster (``name``) as three extents; `LaunchError` beyond CUDA's limits."""
    if not 1 <= len(value) <= 3:
        raise LaunchError(f"{name} has {len(value)} dimensions, at most 3 are possible")
    x, y, z = (*map(int, value), *(1,) * (3 - len(value)))
    for axis, extent, limit in zip("xyz", (x, y, z), _MOST[name], strict=True):
        if not 1 <= extent <= limit:
            raise LaunchError(f"{name}.{axis} is {extent}, it must be from 1 to {limit}")
    return x, y, z
