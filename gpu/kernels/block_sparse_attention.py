"""Host side of block_sparse_attention.cu."""

from __future__ import annotations

from gpu.device import Device
from gpu.kernels.batch_attention import run_batch
from gpu.kernels.result import KernelResult
from simkit.algorithms.batch_problem import BatchProblem
from simkit.algorithms.block_sparse_attention import check_block_rows
from simkit.planning.plan import Plan


def block_sparse_attention(
    device: Device, problem: BatchProblem, plan: Plan, *, source: str | None = None
) -> KernelResult:
    """Attention of block rows of queries to blocks of keys; outputs and errors as `run_batch`."""
    return run_batch(
        device, "block_sparse_attention", problem, plan, table="blocks",
        block_rows=check_block_rows(problem), source=source,
    )  # fmt: skip
