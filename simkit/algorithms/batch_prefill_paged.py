"""Attention of ragged queries to K and V in pages, as continuous batching has them.

Kernel: batch_prefill_paged.cu.
"""

from __future__ import annotations

from simkit.algorithms.batch_attention import BatchResult, batch_attention
from simkit.algorithms.batch_problem import BatchProblem
from simkit.errors import ShapeError
from simkit.layouts.block_sparse import BlockRows
from simkit.machine.machine import Machine
from simkit.planning.plan import Plan


def batch_prefill_paged(machine: Machine, problem: BatchProblem, plan: Plan) -> BatchResult:
    """softmax(scale * q k^T) v of every request, as `batch_attention`. `ShapeError` for K that is
    ragged.
    """
    if not isinstance(problem.keys, BlockRows):
        raise ShapeError("batch_prefill_paged takes K and V in pages, the problem has ragged ones")
    return batch_attention(machine, problem, plan, units="tensor_cores", table="ragged")
