"""What a subject of ``run`` and ``trace`` is: one algorithm, from its settings to its launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from numpy.typing import NDArray

from gpu.device import Device, Module
from gpu.kernels.result import KernelResult
from simkit.cli.settings import Setting, Values
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine
from simkit.planning.outcome import PlanProblem
from simkit.planning.plan import Plan
from traces.events import Trace

Array = NDArray[Any]
Units = Literal["tensor cores", "fp32 lanes"]


@dataclass(frozen=True, eq=False)
class PlannedLaunch:
    """The plan that a launch works off, for ``problem``. ``name``: what the launch is called beside
    others. ``key``: what its kernel is compiled for, in words. ``key_bytes``: of K and V of a key
    and head.
    """

    name: str
    key: str
    plan: Plan
    problem: PlanProblem
    key_bytes: int


@dataclass(frozen=True, eq=False)
class LaunchShape:
    """One kernel launch: CTAs, threads of a CTA, and its shared memory in bytes (all of it).

    ``build``: the module that has the kernel.
    """

    kernel: str
    ctas: int
    threads: int
    build: Callable[[Device], Module]
    shared_bytes: int = 0
    planned: PlannedLaunch | None = None


@dataclass(frozen=True, eq=False)
class Workload:
    """A problem with what there is to know of it before it runs.

    ``data``: what the subject's own functions take. ``splits``: of Flash-Decoding.
    """

    data: Any
    splits: int = 1


@dataclass(frozen=True, eq=False)
class ModelRun:
    """Outputs by tensor name, and the machines with the traffic of each part."""

    outputs: Mapping[str, Array]
    machines: tuple[Machine, ...]


Model = Callable[[Callable[[], Machine], Workload], ModelRun]
"""A run on machines that it asks for."""


def on_one_machine(run: Callable[[Machine, Workload], Mapping[str, Array]]) -> Model:
    """The model that gives the outputs of ``run``."""

    def model(new_machine: Callable[[], Machine], work: Workload) -> ModelRun:
        machine = new_machine()
        return ModelRun(run(machine, work), (machine,))

    return model


@dataclass(frozen=True, eq=False)
class Subject:
    """An algorithm as ``run`` and ``trace`` see it.

    ``workload(gpu, values, seed)``: inputs, or with seed None a workload that takes no memory;
    plans are for that GPU. ``multiplications``: how many multiply-adds device arithmetic emulates.
    ``smaller``: settings with about half the work, the same ones when there is no less. ``units``:
    what multiplies. ``beside``: algorithms that solve the same problem, with their settings for it,
    or why one does not.
    """

    name: str
    settings: tuple[Setting, ...]
    workload: Callable[[Gpu, Values, int | None], Workload]
    model: Model
    kernel: Callable[[Device, Workload], KernelResult]
    reference: Callable[[Workload], Mapping[str, Array]]
    flops: Callable[[Workload], int]
    multiplications: Callable[[Workload], int]
    smaller: Callable[[Values], Values]
    launches: Callable[[Workload], tuple[LaunchShape, ...]]
    trace: Callable[[Gpu, Workload], Trace]
    units: Callable[[Workload], Units]
    beside: Callable[[Values], Mapping[str, Values | str]]


def on_tensor_cores(work: Workload) -> Units:
    """`Subject.units` of what multiplies on tensor cores alone."""
    return "tensor cores"


def on_fp32_lanes(work: Workload) -> Units:
    """`Subject.units` of what multiplies on fp32 lanes alone."""
    return "fp32 lanes"


def not_attention(values: Values) -> Mapping[str, Values | str]:
    """`Subject.beside` of what is no attention from Q to O."""
    return {"naive_attention": "there is no attention from Q, K and V to O here"}
