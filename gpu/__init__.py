"""The real thing: CUDA kernels, compiled by NVRTC, run by CuPy on a GPU or by the PTX executor on
any CPU.
"""

from __future__ import annotations

from gpu.counters import Hazard, Report, Traffic
from gpu.device import Array, Call, Device, Kernel, Module
from gpu.ptx.executor import PtxDevice
from gpu.ptx.launch import Options
from gpu.run_trace import trace_run as trace
from gpu.tensor_map import TensorMap
from simkit.errors import DeviceUnavailableError

__all__ = [
    "Array",
    "Call",
    "Device",
    "Hazard",
    "Kernel",
    "Module",
    "Options",
    "Report",
    "TensorMap",
    "Traffic",
    "open",
    "trace",
]


def open(name: str = "auto", gpu: str = "h100", options: Options | None = None) -> Device:
    """The device ``"cuda"``, ``"ptx"``, or ``"auto"``: the GPU if there is a usable one, else the
    executor.

    ``gpu`` names the machine that the executor stands for (simkit gpus); ``options`` are the
    executor's.  Raises DeviceUnavailableError for "cuda" without CuPy, a driver or a GPU, and for
    an unknown name.
    """
    if name == "ptx":
        return PtxDevice(gpu, options)
    if name in ("cuda", "auto"):
        from gpu.cuda import CudaDevice

        try:
            return CudaDevice()
        except DeviceUnavailableError:
            if name == "cuda":
                raise
            return PtxDevice(gpu, options)
    raise DeviceUnavailableError(f"no device {name!r}: it is cuda, ptx or auto")
