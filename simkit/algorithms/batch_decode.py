"""Attention of one query of each request to K and V in pages.

The heads that share a K/V head read it once: they are the rows of a tile, on tensor cores, or on
CUDA cores where there are few. Kernel: batch_decode.cu.
"""

from __future__ import annotations

import numpy as np

from simkit.algorithms.batch_attention import BatchResult, Units, batch_attention
from simkit.algorithms.batch_problem import BatchProblem
from simkit.errors import ShapeError
from simkit.layouts.block_sparse import BlockRows
from simkit.machine.machine import Machine
from simkit.planning.plan import Plan

TENSOR_CORE_ROWS = 16


def decode_tile(group: int, units: Units) -> int:
    """Packed rows of a tile: on CUDA cores those there are, on tensor cores one mma of them."""
    return group if units == "cuda_cores" else TENSOR_CORE_ROWS


def decode_units(group: int) -> Units:
    """What multiplies: CUDA cores without grouping, where 15 rows of 16 would be padding."""
    return "cuda_cores" if group == 1 else "tensor_cores"


def batch_decode(
    machine: Machine, problem: BatchProblem, plan: Plan, units: Units | None = None
) -> BatchResult:
    """softmax(scale * q k^T) v for one query of each request, as `batch_attention`.

    ``units``: by default what `decode_units` says. Errors: `ShapeError` for ragged K, and for
    requests without a query or with several.
    """
    check_decode(problem)
    chosen = decode_units(problem.group) if units is None else units
    return batch_attention(machine, problem, plan, units=chosen, table="one")


def check_decode(problem: BatchProblem) -> None:
    """Raises ShapeError unless each request has one query and its keys in pages."""
    if not isinstance(problem.keys, BlockRows):
        raise ShapeError("batch_decode takes K and V in pages, the problem has ragged ones")
    wrong = np.flatnonzero(problem.queries.lens != 1)
    if wrong.size:
        raise ShapeError(
            f"batch_decode takes one query of each request; request {wrong[0]} has "
            f"{problem.queries.lens[wrong[0]]}"
        )
