"""Host side of batch_prefill_ragged.cu."""

from __future__ import annotations

from gpu.device import Device
from gpu.kernels.batch_attention import run_batch
from gpu.kernels.result import KernelResult
from simkit.algorithms.batch_problem import BatchProblem
from simkit.errors import ShapeError
from simkit.layouts.ragged import Ragged
from simkit.planning.plan import Plan


def batch_prefill_ragged(
    device: Device, problem: BatchProblem, plan: Plan, *, source: str | None = None
) -> KernelResult:
    """Attention of ragged queries to ragged K and V; outputs and errors as `run_batch`."""
    if not isinstance(problem.keys, Ragged):
        raise ShapeError("batch_prefill_ragged takes ragged K and V, the problem has blocks")
    return run_batch(device, "batch_prefill_ragged", problem, plan, source=source)
