"""Host side of batch_prefill_paged.cu."""

from __future__ import annotations

from gpu.device import Device
from gpu.kernels.batch_attention import run_batch
from gpu.kernels.result import KernelResult
from simkit.algorithms.batch_problem import BatchProblem
from simkit.errors import ShapeError
from simkit.layouts.block_sparse import BlockRows
from simkit.planning.plan import Plan


def batch_prefill_paged(
    device: Device, problem: BatchProblem, plan: Plan, *, source: str | None = None
) -> KernelResult:
    """Attention of ragged queries to K and V in pages; outputs and errors as `run_batch`."""
    if not isinstance(problem.keys, BlockRows):
        raise ShapeError("batch_prefill_paged takes K and V in pages, the problem has ragged ones")
    return run_batch(device, "batch_prefill_paged", problem, plan, source=source)
