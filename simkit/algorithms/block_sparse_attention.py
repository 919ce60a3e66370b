"""Attention through a block-sparse matrix of queries and keys.

A block row of queries sees the blocks of keys that the matrix has there: the form to which ragged
and paged K and V map, too (simkit.layouts.block_sparse). Kernel: block_sparse_attention.cu.
"""

from __future__ import annotations

import numpy as np

from simkit.algorithms.batch_attention import BatchResult, batch_attention
from simkit.algorithms.batch_problem import BatchProblem
from simkit.errors import ShapeError
from simkit.layouts.block_sparse import BlockRows
from simkit.machine.machine import Machine
from simkit.planning.plan import Plan


def block_sparse_attention(machine: Machine, problem: BatchProblem, plan: Plan) -> BatchResult:
    """softmax(scale * q k^T) v of every block row, as `batch_attention`.

    The requests are block rows: as many queries each, but the last may have fewer. A mask within
    blocks is the variant's custom mask. Errors: `ShapeError` for other requests and other K.
    """
    check_block_rows(problem)
    return batch_attention(machine, problem, plan, units="tensor_cores", table="blocks")


def check_block_rows(problem: BatchProblem) -> int:
    """Queries of a block row. Raises ShapeError unless the requests are block rows."""
    if not isinstance(problem.keys, BlockRows) or problem.order != "NHD":
        raise ShapeError("block_sparse_attention takes K and V in blocks with order NHD")
    lens = problem.queries.lens
    rows = int(lens[0]) if lens.size else 0
    wrong = np.flatnonzero(lens[:-1] != rows)
    if wrong.size:
        raise ShapeError(
            f"block row {wrong[0]} has {lens[wrong[0]]} queries, the first has {rows}: all but "
            f"the last have as many"
        )
    if lens.size and not 1 <= lens[-1] <= rows:
        raise ShapeError(f"the last block row has {lens[-1]} queries; it has 1 to {rows}")
    return rows
