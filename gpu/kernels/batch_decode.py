"""Host side of batch_decode.cu."""

from __future__ import annotations

from gpu.device import Device
from gpu.kernels.batch_attention import run_batch
from gpu.kernels.result import KernelResult
from simkit.algorithms.batch_attention import Units
from simkit.algorithms.batch_decode import check_decode, decode_units
from simkit.algorithms.batch_problem import BatchProblem
from simkit.planning.plan import Plan


def batch_decode(
    device: Device,
    problem: BatchProblem,
    plan: Plan,
    *,
    units: Units | None = None,
    source: str | None = None,
) -> KernelResult:
    """Attention of one query of each request to K and V in pages; results as of `run_batch`.

    ``units``: by default what `decode_units` says.
    """
    check_decode(problem)
    chosen = decode_units(problem.group) if units is None else units
    return run_batch(
        device, "batch_decode", problem, plan, units=chosen, table="one", source=source
    )
