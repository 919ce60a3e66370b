"""The GPU as a Device, through CuPy: it runs the very PTX that the executor runs.

Thin on purpose: parsing, argument checks and packing are the executor's own code, so that what can
be tested without a GPU is what a GPU is given.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gpu import driver
from gpu.arguments import Parameter, pack, parameter_buffer
from gpu.compile import compile_cuda
from gpu.counters import Report
from gpu.device import Call
from gpu.ptx.launch import dimensions
from gpu.ptx.parser import parse
from simkit.errors import DeviceUnavailableError, LaunchError, PtxError


def import_cupy() -> Any:
    """CuPy with a usable GPU.  DeviceUnavailableError says which of the two is missing and what to
    do.
    """
    try:
        import cupy
    except ImportError as error:
        raise DeviceUnavailableError(
            "CuPy is not installed; install simkit[cuda12] or simkit[cuda13],"
            " whichever the driver supports"
        ) from error
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # CuPy raises its own types, which need a driver to import
        raise DeviceUnavailableError(f"no usable NVIDIA driver: {error}") from error
    if count < 1:
        raise DeviceUnavailableError("CuPy is installed, but there is no NVIDIA GPU")
    return cupy


class CudaArray:
    """An array in GPU memory."""

    def __init__(self, cupy: Any, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        # Bytes, because CuPy has no bfloat16; unwritten elements are NaN, as on the executor.
        self.memory = cupy.full(max(size, 1), 0xFF, dtype=cupy.uint8)
        self._size = size

    @property
    def address(self) -> int:
        return int(self.memory.data.ptr)

    def fill(self, values: np.ndarray) -> None:
        self.memory[: self._size].set(np.ascontiguousarray(values).reshape(-1).view(np.uint8))

    def to_numpy(self) -> np.ndarray:
        data: np.ndarray = self.memory.get()
        return data[: self._size].view(self.dtype).reshape(self.shape)


class CudaVariable:
    """A ``__device__`` variable in GPU memory; ``pointer`` is CuPy's."""

    def __init__(self, cupy: Any, pointer: Any, size: int) -> None:
        self.shape: tuple[int, ...] = (size,)
        self._memory = cupy.ndarray(self.shape, dtype=cupy.uint8, memptr=pointer)

    def fill(self, values: np.ndarray) -> None:
        self._memory.set(values)


class CudaKernel:
    """One entry of a module that the driver has loaded."""

    def __init__(self, module: CudaModule, name: str) -> None:
        self.name = name
        self.module = module
        function = module.syntax.functions.get(name)
        if function is None or not function.is_entry:
            raise PtxError(
                f"no kernel named {name!r}; the module has {', '.join(module.kernels) or 'none'}"
            )
        self.parameters = [Parameter.of(v) for v in function.parameters]
        self.raw = module.raw.get_function(name)

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[object],
        shared_bytes: int = 0,
        cluster: Sequence[int] = (1, 1, 1),
    ) -> Report:
        """See gpu.device.Kernel.launch; ``seconds`` is the kernel's time by GPU events."""
        call = Call(self, tuple(grid), tuple(block), args, shared_bytes, tuple(cluster))
        return self.module.device.run([call])[0]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A launch that has been checked: nothing is left but to start it."""

    kernel: CudaKernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    parameters: bytes

    @classmethod
    def of(cls, call: Call) -> _Prepared:
        """LaunchError for wrong dimensions or arguments, or a kernel of another device."""
        kernel = call.kernel
        if not isinstance(kernel, CudaKernel):
            raise LaunchError(f"kernel {kernel.name!r} belongs to another device")
        adopted = [adopt(a) for a in call.args]
        return cls(
            kernel,
            dimensions("grid", call.grid),
            dimensions("block", call.block),
            dimensions("cluster", call.cluster),
            call.shared_bytes,
            parameter_buffer(kernel.parameters, pack(kernel.name, kernel.parameters, adopted)),
        )

    def start(self, stream: int, programmatic: bool) -> None:
        driver.launch(
            self.kernel.raw.kernel.ptr, self.grid, self.block, self.shared_bytes, stream,
            self.parameters, self.cluster, programmatic,
        )  # fmt: skip

    def report(self, seconds: float) -> Report:
        return Report(
            kernel=self.kernel.name,
            device="cuda",
            grid=self.grid,
            block=self.block,
            shared_bytes=self.shared_bytes,
            seconds=seconds,
        )


class CudaModule:
    """PTX loaded by the driver."""

    def __init__(self, device: CudaDevice, ptx: str) -> None:
        self.device = device
        self.ptx = ptx
        self.syntax = parse(ptx)

    @cached_property
    def raw(self) -> Any:
        # RawModule takes PTX as a file only; the driver has read it when the first function is
        # asked for.
        with tempfile.TemporaryDirectory(prefix="simkit-") as folder:
            path = Path(folder) / "module.ptx"
            path.write_text(self.ptx, encoding="utf-8")
            module = self.device.cupy.RawModule(path=str(path))
            for name in self.kernels[:1]:
                module.get_function(name).compile()
        return module

    @property
    def kernels(self) -> list[str]:
        """Names of the entries."""
        return [f.name for f in self.syntax.functions.values() if f.is_entry]

    def variable(self, name: str) -> CudaVariable | None:
        """See gpu.device.Module.variable."""
        found = next((v for v in self.syntax.variables if v.name == name), None)
        if found is None or found.space != "global":
            return None
        return CudaVariable(self.device.cupy, self.raw.get_global(name), found.size)

    def kernel(self, name: str) -> CudaKernel:
        return CudaKernel(self, name)


class CudaDevice:
    """The current GPU.  DeviceUnavailableError without CuPy, a driver or a GPU."""

    def __init__(self) -> None:
        self.cupy = import_cupy()
        self.name = "cuda"
        capability = str(self.cupy.cuda.Device().compute_capability)
        # From sm_90 on, the architecture-specific instructions (wgmma, setmaxnreg) need the "a"
        # target.
        self.arch = f"sm_{capability}" + ("a" if int(capability) >= 90 else "")
        self._count = 0

    @property
    def gpu_name(self) -> str:
        """The product name that the driver gives."""
        properties = self.cupy.cuda.runtime.getDeviceProperties(self.cupy.cuda.Device().id)
        name = properties["name"]
        return name.decode() if isinstance(name, bytes) else str(name)

    def compile(
        self,
        source: str,
        options: Sequence[str] = (),
        arch: str | None = None,
        name: str = "kernel.cu",
    ) -> CudaModule:
        return self.load(compile_cuda(source, options=options, arch=arch or self.arch, name=name))

    def load(self, ptx: str) -> CudaModule:
        return CudaModule(self, ptx)

    def array(self, values: np.ndarray, name: str = "") -> CudaArray:
        values = np.asarray(values)
        array = CudaArray(self.cupy, values.shape, values.dtype, name or self._fresh_name())
        array.fill(values)
        return array

    def empty(self, shape: int | tuple[int, ...], dtype: Any, name: str = "") -> CudaArray:
        extents = (shape,) if isinstance(shape, int) else tuple(shape)
        return CudaArray(self.cupy, extents, np.dtype(dtype), name or self._fresh_name())

    def launch_dependent(self, primary: Call, secondary: Call) -> tuple[Report, Report]:
        """See gpu.device.Device.launch_dependent; ``seconds`` of both is the time of the two."""
        first, second = self.run([primary, secondary])
        return first, second

    def run(self, calls: Sequence[Call]) -> list[Report]:
        """Launches on the current stream, each allowed to start before the one before it has ended;
        waits for all of them.
        """
        prepared = [_Prepared.of(call) for call in calls]
        stream = self.cupy.cuda.get_current_stream()
        start, stop = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        start.record(stream)
        for index, one in enumerate(prepared):
            one.start(stream.ptr, programmatic=index > 0)
        stop.record(stream)
        stop.synchronize()
        seconds = float(self.cupy.cuda.get_elapsed_time(start, stop)) / 1e3
        return [one.report(seconds) for one in prepared]

    def _fresh_name(self) -> str:
        self._count += 1
        return f"array{self._count}"


class _Pointer:
    """A foreign array as a bare device pointer."""

    def __init__(self, address: int, owner: object) -> None:
        self.address = address
        self.owner = owner


def adopt(value: object) -> object:
    """An argument with ``__cuda_array_interface__`` (CuPy, PyTorch, Numba) as a pointer; others
    unchanged.
    """
    interface = getattr(value, "__cuda_array_interface__", None)
    return value if interface is None else _Pointer(int(interface["data"][0]), value)
