"""The roofline: what a kernel's FLOP and HBM bytes allow it to reach."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from simkit.errors import SimkitError
from simkit.machine.gpus import Gpu, TensorInput

Bound = Literal["memory", "compute"]


@dataclass(frozen=True)
class Roofline:
    """A kernel's place: FLOP per byte, FLOP per second at best, what binds, seconds at least."""

    intensity: float
    attainable_flops: float
    bound: Bound
    seconds: float


def arithmetic_intensity(flops: float, hbm_bytes: float) -> float:
    """FLOP per HBM byte; infinite without traffic. SimkitError for negative input or 0 / 0."""
    if flops < 0 or hbm_bytes < 0 or not (flops or hbm_bytes):
        raise SimkitError(f"no arithmetic intensity for {flops} FLOP and {hbm_bytes} bytes")
    return flops / hbm_bytes if hbm_bytes else math.inf


def attainable_flops(gpu: Gpu, intensity: float, dtype: TensorInput = "bf16") -> float:
    """FLOP per second at best: the tensor-core peak or intensity × HBM bandwidth."""
    return min(gpu.peak_flops_of(dtype), intensity * gpu.hbm_bytes_per_s)


def bound(gpu: Gpu, intensity: float, dtype: TensorInput = "bf16") -> Bound:
    """What binds at this intensity; the ridge point itself counts as compute."""
    return "memory" if intensity * gpu.hbm_bytes_per_s < gpu.peak_flops_of(dtype) else "compute"


def roofline(gpu: Gpu, flops: float, hbm_bytes: float, dtype: TensorInput = "bf16") -> Roofline:
    """The place on ``gpu`` of a kernel that does ``flops`` and moves ``hbm_bytes``."""
    intensity = arithmetic_intensity(flops, hbm_bytes)
    return Roofline(
        intensity=intensity,
        attainable_flops=attainable_flops(gpu, intensity, dtype),
        bound=bound(gpu, intensity, dtype),
        seconds=max(flops / gpu.peak_flops_of(dtype), hbm_bytes / gpu.hbm_bytes_per_s),
    )
