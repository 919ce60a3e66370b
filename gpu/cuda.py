"""The GPU as a Device, through CuPy: it runs the very PTX that the executor runs.

Thin on purpose: parsing, argument checks and packing are the executor's own code, so that what can
be tested without a GPU is what a GPU is given.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gpu.arguments import Parameter, pack, parameter_buffer
from gpu.compile import compile_cuda
from gpu.counters import Report
from gpu.ptx.launch import dimensions
from gpu.ptx.parser import parse
from simkit.errors import DeviceUnavailableError, LaunchError, PtxError

# What precedes each value in cuLaunchKernel's ``extra`` list (cuda.h).
_LAUNCH_PARAM_END = 0
_LAUNCH_PARAM_BUFFER_POINTER = 1
_LAUNCH_PARAM_BUFFER_SIZE = 2
_GRID_LIMITS = (2**31 - 1, 65_535, 65_535)
_BLOCK_LIMITS = (1024, 1024, 64)


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
        cupy = self.module.device.cupy
        extents = dimensions("grid", grid, _GRID_LIMITS)
        threads = dimensions("block", block, _BLOCK_LIMITS)
        if dimensions("cluster", cluster, (16, 16, 16)) != (1, 1, 1):
            raise LaunchError("clusters are not supported")
        adopted = [adopt(a) for a in args]
        data = parameter_buffer(self.parameters, pack(self.name, self.parameters, adopted))
        if shared_bytes > 48 * 1024:
            self.raw.max_dynamic_shared_size_bytes = shared_bytes
        buffer = ctypes.create_string_buffer(data, len(data))
        size = ctypes.c_size_t(len(data))
        extra = (ctypes.c_void_p * 5)(
            _LAUNCH_PARAM_BUFFER_POINTER, ctypes.addressof(buffer),
            _LAUNCH_PARAM_BUFFER_SIZE, ctypes.addressof(size), _LAUNCH_PARAM_END,
        )  # fmt: skip
        stream = cupy.cuda.get_current_stream()
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        cupy.cuda.driver.launchKernel(
            self.raw.kernel.ptr,
            *extents,
            *threads,
            shared_bytes,
            stream.ptr,
            0,
            ctypes.addressof(extra),
        )
        stop.record(stream)
        stop.synchronize()
        return Report(
            kernel=self.name,
            device="cuda",
            grid=extents,
            block=threads,
            shared_bytes=shared_bytes,
            seconds=float(cupy.cuda.get_elapsed_time(start, stop)) / 1e3,
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
