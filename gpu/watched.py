"""A device that keeps the reports of what others launch on it, and may change how they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu.counters import Report
from gpu.device import Array, Call, Device, Dimensions, Kernel, Module, Variable


class WatchedDevice:
    """See gpu.device.Device.  ``reports``: of the launches so far, in order; ``options`` are added
    to those of every compilation.
    """

    def __init__(self, device: Device, options: Sequence[str] = ()) -> None:
        self.device = device
        self.name = device.name
        self.arch = device.arch
        self.options = tuple(options)
        self.reports: list[Report] = []

    def run(self, module: Module, call: Call) -> Report:
        """One launch."""
        return call.kernel.launch(call.grid, call.block, call.args, call.shared_bytes, call.cluster)

    def compile(
        self,
        source: str,
        options: Sequence[str] = (),
        arch: str | None = None,
        name: str = "kernel.cu",
    ) -> WatchedModule:
        return WatchedModule(
            self, self.device.compile(source, (*options, *self.options), arch, name)
        )

    def load(self, ptx: str) -> WatchedModule:
        return WatchedModule(self, self.device.load(ptx))

    def array(self, values: np.ndarray, name: str = "") -> Array:
        return self.device.array(values, name)

    def empty(self, shape: int | tuple[int, ...], dtype: Any, name: str = "") -> Array:
        return self.device.empty(shape, dtype, name)

    def launch_dependent(self, primary: Call, secondary: Call) -> tuple[Report, Report]:
        """Watched without being changed."""
        first, second = self.device.launch_dependent(_own(primary), _own(secondary))
        self.reports += (first, second)
        return first, second


class WatchedModule:
    """See gpu.device.Module."""

    def __init__(self, device: WatchedDevice, module: Module) -> None:
        self.device = device
        self.module = module
        self.ptx = module.ptx

    def kernel(self, name: str) -> WatchedKernel:
        return WatchedKernel(self, self.module.kernel(name))

    def variable(self, name: str) -> Variable | None:
        return self.module.variable(name)


class WatchedKernel:
    """See gpu.device.Kernel."""

    def __init__(self, module: WatchedModule, kernel: Kernel) -> None:
        self.module = module
        self.kernel = kernel
        self.name = kernel.name

    def launch(
        self,
        grid: Dimensions,
        block: Dimensions,
        args: Sequence[object],
        shared_bytes: int = 0,
        cluster: Dimensions = (1, 1, 1),
    ) -> Report:
        device = self.module.device
        call = Call(self.kernel, tuple(grid), tuple(block), args, shared_bytes, tuple(cluster))
        report = device.run(self.module.module, call)
        device.reports.append(report)
        return report


def _own(call: Call) -> Call:
    """A call of the device's own kernel."""
    kernel = call.kernel.kernel if isinstance(call.kernel, WatchedKernel) else call.kernel
    return Call(kernel, call.grid, call.block, call.args, call.shared_bytes, call.cluster)
