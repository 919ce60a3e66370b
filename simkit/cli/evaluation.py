"""What ``simkit run`` finds out about one algorithm: error, traffic, resources, roofline."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

import gpu as gpu_package
from gpu.counters import Report
from gpu.device import Device, Kernel
from simkit.cli.plans import outcome_json
from simkit.cli.resources import KernelResources, launch_resources
from simkit.cli.settings import Values
from simkit.cli.subjects.subject import Array, LaunchShape, Subject, Workload
from simkit.errors import SimkitError
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine
from simkit.machine.roofline import Bound, roofline
from simkit.planning.batch import Batch
from simkit.planning.outcome import Outcome, grid_outcome
from simkit.planning.plan import Plan

MOST_MULTIPLICATIONS = 1 << 26
"""Multiply-adds that device arithmetic emulates in a second or so; beyond it, a smaller case has to
do for the error."""


@dataclass(frozen=True)
class OutputError:
    """How far an output is from float64: the largest error, the same over the largest finite
    magnitude of the reference, and the root of the mean square of errors."""

    tensor: str
    max_abs: float
    max_rel: float
    rmse: float


@dataclass(frozen=True)
class TrafficLine:
    """Bytes of a tensor in a direction; ``measured`` ones are None where no kernel ran."""

    tensor: str
    direction: str
    requested: int
    sectors: int
    measured_requested: int | None = None
    measured_sectors: int | None = None

    @property
    def agrees(self) -> bool:
        """Whether measurement and prediction are equal; True where nothing was measured."""
        measured = (self.measured_requested, self.measured_sectors)
        return measured in ((None, None), (self.requested, self.sectors))


@dataclass(frozen=True)
class Place:
    """A position on the roofline.

    ``hbm_bytes``: each tensor once in every direction it moves, which no cache can avoid;
    ``intensity``: FLOP over those; ``attainable``: FLOP/s that bandwidth and the tensor-core peak
    allow; ``unit_peak``: FLOP/s of the units that the kernels use; ``seconds``: the least time, by
    bandwidth and by those units.
    """

    flops: int
    hbm_bytes: int
    intensity: float
    ridge: float
    bound: Bound
    attainable: float
    unit_peak: float
    seconds: float


@dataclass(frozen=True, eq=False)
class PlanReport:
    """A launch that works off a plan. ``key``: what its kernel is compiled for. ``load``: of the
    GPU, by as many CTAs at a time as it holds.
    """

    key: str
    plan: Plan
    batch: Batch
    load: Outcome


@dataclass(frozen=True)
class Evaluation:
    """Everything that one run shows. ``error_settings``: of the case that the error is from."""

    algorithm: str
    settings: Values
    error_settings: Values
    errors: tuple[OutputError, ...]
    traffic: tuple[TrafficLine, ...]
    dram_bytes: tuple[int, int] | None
    resources: tuple[KernelResources, ...]
    plans: tuple[PlanReport, ...]
    units: str
    place: Place
    kernel_seconds: float | None

    @property
    def agrees(self) -> bool:
        """Whether every measured byte is as predicted."""
        return all(line.agrees for line in self.traffic)

    def as_json(self) -> dict[str, Any]:
        """All of it; of plans the configuration and the items."""
        plans = [{"key": one.key, **outcome_json(one.load)} for one in self.plans]
        return asdict(replace(self, plans=())) | {"plans": plans}


def evaluate(
    subject: Subject, values: Values, gpu: Gpu, device: Device | None, seed: int
) -> Evaluation:
    """Runs the model, and the kernel where there is a ``device``.

    Without one the error is that of device arithmetic, on a smaller case if this one is large.
    """
    sized = subject.workload(gpu, values, None)
    machines = subject.model(functools.partial(Machine, gpu, "none"), sized).machines
    reports: list[Report] = []
    if device is not None:
        error_values, work = values, subject.workload(gpu, values, seed)
        result = subject.kernel(device, work)
        outputs, reports = result.outputs, result.reports
    else:
        error_values = _affordable(subject, values, gpu)
        work = subject.workload(gpu, error_values, seed)
        outputs = dict(subject.model(functools.partial(Machine, gpu, "device"), work).outputs)
    launches = subject.launches(sized)
    resources = _resources(launches, gpu, device)
    return Evaluation(
        algorithm=subject.name,
        settings=values,
        error_settings=error_values,
        errors=_errors(outputs, subject.reference(work)),
        traffic=_traffic(machines, reports),
        dram_bytes=_dram(reports),
        resources=resources,
        plans=_plans(launches, resources, gpu),
        units=subject.units(sized),
        place=_place(subject, sized, gpu, machines),
        kernel_seconds=sum(report.seconds for report in reports) if reports else None,
    )


def _affordable(subject: Subject, values: Values, gpu: Gpu) -> Values:
    """``values``, made smaller until device arithmetic takes a second or so."""
    while subject.multiplications(subject.workload(gpu, values, None)) > MOST_MULTIPLICATIONS:
        smaller = subject.smaller(values)
        if smaller == values:
            break
        values = smaller
    return values


def _errors(
    outputs: Mapping[str, Array], reference: Mapping[str, Array]
) -> tuple[OutputError, ...]:
    return tuple(
        output_error(name, outputs[name], exact)
        for name, exact in reference.items()
        if name in outputs
    )


def output_error(name: str, values: Array, reference: Array) -> OutputError:
    """Errors of ``values`` against ``reference`` (float64); equal infinities are no error."""
    exact = np.asarray(reference, np.float64)
    with np.errstate(invalid="ignore"):
        found = values.astype(np.float64)
        error = np.where(found == exact, 0.0, np.abs(found - exact))
    worst = float(error.max(initial=0.0))
    magnitude = float(
        np.abs(exact, where=np.isfinite(exact), out=np.zeros_like(exact)).max(initial=0)
    )
    rmse = float(np.sqrt(np.mean(error**2))) if error.size else 0.0
    return OutputError(name, worst, worst / magnitude if magnitude else worst, rmse)


def _traffic(machines: tuple[Machine, ...], reports: list[Report]) -> tuple[TrafficLine, ...]:
    predicted: dict[tuple[str, str], tuple[int, int]] = {}
    for machine in machines:
        for (tensor, direction), row in machine.traffic.items():
            predicted[tensor, direction] = (row.requested, row.sectors)
    counted = [report.traffic for report in reports if report.traffic is not None]
    if not counted:
        return tuple(TrafficLine(*key, *sizes) for key, sizes in predicted.items())
    measured: dict[tuple[str, str], tuple[int, int]] = {}
    for row in (row for traffic in counted for row in traffic.tensors):
        before = measured.get((row.tensor, row.direction), (0, 0))
        after = (before[0] + row.requested, before[1] + row.sectors)
        measured[row.tensor, row.direction] = after
    keys = dict.fromkeys([*predicted, *measured])
    nothing = (0, 0)
    return tuple(
        TrafficLine(*key, *predicted.get(key, nothing), *measured.get(key, nothing)) for key in keys
    )


def _dram(reports: list[Report]) -> tuple[int, int] | None:
    """Bytes read from and written to DRAM over all launches, if they were measured."""
    pairs = [
        (report.traffic.dram_read, report.traffic.dram_write)
        for report in reports
        if report.traffic is not None
    ]
    known = [(read, write) for read, write in pairs if read is not None and write is not None]
    if not known:
        return None
    return sum(read for read, _ in known), sum(write for _, write in known)


def _resources(
    launches: tuple[LaunchShape, ...], gpu: Gpu, device: Device | None
) -> tuple[KernelResources, ...]:
    """Of each launch; registers are asked of the built kernel where it can be built."""
    builder = device or gpu_package.open("ptx", gpu=gpu.name)
    return tuple(
        launch_resources(
            gpu, one.kernel, one.ctas, one.threads, one.shared_bytes, _built(builder, one)
        )
        for one in launches
    )


def _built(device: Device, launch: LaunchShape) -> Kernel | None:
    try:
        return launch.build(device).kernel(launch.kernel)
    except SimkitError:
        return None  # no compiler, or a GPU without the instructions: the rest is known anyway


def _plans(
    launches: tuple[LaunchShape, ...], resources: tuple[KernelResources, ...], gpu: Gpu
) -> tuple[PlanReport, ...]:
    found = []
    for launch, room in zip(launches, resources, strict=True):
        if launch.planned is not None:
            planned = launch.planned
            slots = room.occupancy.ctas_per_sm * gpu.sm_count
            load = grid_outcome(planned.name, planned.plan, planned.problem, slots)
            load = replace(load, key_bytes=planned.key_bytes)
            found.append(PlanReport(planned.key, planned.plan, planned.problem.batch, load))
    return tuple(found)


def _place(subject: Subject, work: Workload, gpu: Gpu, machines: tuple[Machine, ...]) -> Place:
    flops = subject.flops(work)
    hbm_bytes = sum(machine.compulsory_bytes() for machine in machines)
    if not flops and not hbm_bytes:
        raise SimkitError(f"{subject.name} has nothing to do: no byte moves")
    found = roofline(gpu, flops, hbm_bytes)
    fma_peak = 2.0 * gpu.fp32_lanes * gpu.sm_count * gpu.sm_clock_hz
    unit_peak = gpu.peak_flops if subject.units(work) == "tensor cores" else fma_peak
    return Place(
        flops=flops,
        hbm_bytes=hbm_bytes,
        intensity=found.intensity,
        ridge=gpu.ridge_point,
        bound=found.bound,
        attainable=found.attainable_flops,
        unit_peak=unit_peak,
        seconds=max(hbm_bytes / gpu.hbm_bytes_per_s, flops / unit_peak),
    )
