"""Attention of ragged queries to ragged K and V: requests of any lengths, without padding.

Kernel: batch_prefill_ragged.cu.
"""

from __future__ import annotations

from simkit.algorithms.batch_attention import BatchResult, batch_attention
from simkit.algorithms.batch_problem import BatchProblem
from simkit.errors import ShapeError
from simkit.layouts.ragged import Ragged
from simkit.machine.machine import Machine
from simkit.planning.plan import Plan


def batch_prefill_ragged(machine: Machine, problem: BatchProblem, plan: Plan) -> BatchResult:
    """softmax(scale * q k^T) v of every request, as `batch_attention`. `ShapeError` for paged K."""
    if not isinstance(problem.keys, Ragged):
        raise ShapeError("batch_prefill_ragged takes ragged K and V, the problem has blocks")
    return batch_attention(machine, problem, plan, units="tensor_cores", table="ragged")
