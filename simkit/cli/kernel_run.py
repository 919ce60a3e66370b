"""Runs a user's kernel on the PTX executor, under one schedule after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gpu as gpu_package
from gpu.compile import compile_cuda
from gpu.counters import Report
from gpu.ptx.executor import PtxKernel, PtxModule
from gpu.ptx.launch import Options
from gpu.ptx.schedule import Schedule
from simkit.cli.argument_values import argument_value, place_arrays
from simkit.cli.launch import LaunchPlan
from simkit.errors import PtxError, SimkitError
from simkit.machine.gpus import gpu as find_gpu

Array = NDArray[Any]

COMPARED_SCHEDULES = (
    Schedule("eager"),
    Schedule("lazy"),
    Schedule("random", 0),
    Schedule("random", 1),
)
_SUFFIXES = (".cu", ".ptx")
_DEFAULT_BLOCK = (128,)


@dataclass(frozen=True, eq=False)
class KernelRun:
    """What one launch left behind: the arrays by name, the report, and the kernel it ran."""

    arrays: dict[str, Array]
    report: Report
    kernel: PtxKernel


@dataclass(frozen=True)
class ScheduleResult:
    """How the results under a schedule compare: ``difference`` is empty where they are the same."""

    schedule: str
    difference: str = ""


def schedule_name(schedule: Schedule) -> str:
    """As it is written on the command line."""
    return f"random({schedule.seed})" if schedule.kind == "random" else schedule.kind


def ptx_text(path: Path, plan: LaunchPlan, gpu_name: str) -> str:
    """The PTX of a .ptx file, or of a .cu file after compilation."""
    if path.suffix not in _SUFFIXES:
        raise SimkitError(f"{path}: the suffix must be one of {', '.join(_SUFFIXES)}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SimkitError(f"{path} is not text: {error}") from error
    if path.suffix == ".ptx":
        if plan.arch or plan.options:
            raise SimkitError(f"{path}: PTX is compiled already; an arch or options change nothing")
        return text
    arch = plan.arch or find_gpu(gpu_name).arch
    # Lines of the source, for whatever is said about a place in the kernel.
    options = (*plan.options, *(() if "-lineinfo" in plan.options else ("-lineinfo",)))
    return compile_cuda(text, options=options, arch=arch, name=str(path))


def run_kernel(ptx: str, plan: LaunchPlan, gpu_name: str, options: Options) -> KernelRun:
    """Loads, fills the arrays and launches, on a device with nothing else in its memory."""
    device = gpu_package.open("ptx", gpu=gpu_name, options=options)
    module = device.load(ptx)
    assert isinstance(module, PtxModule)
    kernel = module.kernel(_entry(module, plan))
    arrays = place_arrays(device, plan.args)
    values = [argument_value(argument, arrays) for argument in plan.args]
    block = plan.block or kernel.program.performance.get("reqntid") or _DEFAULT_BLOCK
    report = kernel.launch(plan.grid, block, values, plan.shared, plan.cluster)
    return KernelRun({name: array.to_numpy() for name, array in arrays.items()}, report, kernel)


def compare_schedules(
    first: KernelRun, ptx: str, plan: LaunchPlan, gpu_name: str, options: Sequence[Options]
) -> list[ScheduleResult]:
    """Runs again under each of ``options`` and compares every array with that of ``first``.

    An error under another schedule is a difference too.
    """
    results = []
    for choice in options:
        name = schedule_name(choice.schedule)
        try:
            other = run_kernel(ptx, plan, gpu_name, choice)
        except SimkitError as error:
            results.append(ScheduleResult(name, f"{type(error).__name__}: {error}"))
            continue
        found = [
            text
            for array in first.arrays
            if (text := _difference(array, first.arrays, other.arrays))
        ]
        results.append(ScheduleResult(name, "; ".join(found)))
    return results


def _difference(name: str, first: dict[str, Array], other: dict[str, Array]) -> str:
    """What differs between two versions of an array, bit for bit; empty if nothing does."""
    bits = np.dtype(f"u{first[name].dtype.itemsize}")
    a, b = (np.ascontiguousarray(side[name]).view(bits) for side in (first, other))
    different = np.argwhere(a != b)
    if not len(different):
        return ""
    place = tuple(int(index) for index in different[0])
    return (
        f"{name} differs in {len(different)} of {a.size} elements, first at {list(place)}: "
        f"{first[name][place]} and {other[name][place]}"
    )


def _entry(module: PtxModule, plan: LaunchPlan) -> str:
    if not module.kernels:
        raise PtxError("the PTX has no entry, so there is nothing to launch")
    if plan.kernel is None and len(module.kernels) > 1:
        raise SimkitError(
            f"the file has {len(module.kernels)} kernels, name one with --kernel: "
            f"{', '.join(module.kernels)}"
        )
    return plan.kernel or module.kernels[0]
