"""Attention through a block-sparse matrix, drawn at random."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpu.kernels import block_sparse_attention as host
from simkit.algorithms.batch_problem import BatchProblem, batch_flops
from simkit.algorithms.block_sparse_attention import block_sparse_attention
from simkit.algorithms.variant import Variant
from simkit.cli.settings import Setting, Values
from simkit.cli.subjects.batch import outputs, reference
from simkit.cli.subjects.dense import LEAST_LENGTH
from simkit.cli.subjects.planned import (
    SPLIT,
    TILE_Q,
    UNITS,
    PlannedBatch,
    launches,
    multiplications,
    planned,
)
from simkit.cli.subjects.requests import HEADS, V_DIM, Draw
from simkit.cli.subjects.subject import Array, Subject, Workload, on_one_machine
from simkit.layouts import custom_mask
from simkit.layouts.block_sparse import split_mask
from simkit.layouts.ragged import Ragged
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine
from simkit.schedules import batch_timeline

_ELEMENT_DENSITY = 0.7  # within blocks that have a mask


def _workload(gpu: Gpu, values: Values, seed: int | None) -> Workload:
    problem = _problem(values, seed)
    return Workload(PlannedBatch(problem, planned(gpu, values, problem)))


def _problem(values: Values, seed: int | None) -> BatchProblem:
    """The matrix is always the same for the same settings."""
    queries, keys = values["queries"], values["keys"]
    block_rows, block_columns = values["block_rows"], values["block_columns"]
    rng = np.random.default_rng(0)
    blocks = -(-queries // block_rows), -(-keys // block_columns)
    mask = np.repeat(rng.random(blocks) * 100 < values["density"], block_rows, axis=0)
    mask = np.repeat(mask, block_columns, axis=1)[:queries, :keys]
    if values["elements"]:
        mask = mask & (rng.random(mask.shape) < _ELEMENT_DENSITY)
    rows, elements = split_mask(mask, block_rows, block_columns)
    draw, shape = Draw(seed), (rows.blocks, block_columns, values["kv_heads"])
    lens = np.minimum(block_rows, queries - np.arange(0, queries, block_rows))
    custom = custom_mask.from_blocks(rows, elements, queries) if values["elements"] else None
    return BatchProblem(
        q=draw((queries, values["heads"], values["d"])),
        k=draw((*shape, values["d"]), 1),
        v=draw((*shape, values["dv"]), 2),
        queries=Ragged.from_lengths(lens),
        keys=rows,
        variant=Variant(custom_mask=custom),
    )


def _model(machine: Machine, work: Workload) -> Mapping[str, Array]:
    return outputs(block_sparse_attention(machine, work.data.problem, work.data.plan))


def _smaller(values: Values) -> Values:
    """Half the longer side, then one K/V head with its group."""
    longest = max(("queries", "keys"), key=lambda name: values[name])
    if values[longest] > LEAST_LENGTH:
        return {**values, longest: max(values[longest] // 2, LEAST_LENGTH)}
    return {**values, "heads": values["heads"] // values["kv_heads"], "kv_heads": 1}


def _beside(values: Values) -> Mapping[str, Values | str]:
    return {"naive_attention": "it knows no mask of blocks"}


_SETTINGS = (
    Setting("n", None, "queries and keys", sets=("queries", "keys")),
    Setting("queries", 256, "rows of the matrix"),
    Setting("keys", 1024, "columns of the matrix"),
    Setting("block_rows", 16, "queries of a block"),
    Setting("block_columns", 16, "keys of a block"),
    Setting("density", 25.0, "blocks that are there, per cent", least=0, kind="number"),
    Setting("elements", False, "a mask within blocks", kind="flag"),
    *HEADS,
    V_DIM,
    SPLIT,
    TILE_Q,
)

BLOCK_SPARSE_SUBJECTS = (
    Subject(
        name="block_sparse_attention",
        settings=_SETTINGS,
        workload=_workload,
        model=on_one_machine(_model),
        kernel=lambda device, work: host.block_sparse_attention(
            device, work.data.problem, work.data.plan
        ),
        reference=reference,
        flops=lambda work: batch_flops(work.data.problem),
        multiplications=lambda work: multiplications(work.data),
        smaller=_smaller,
        launches=lambda work: launches("block_sparse_attention", work.data),
        trace=lambda gpu, work: batch_timeline.block_sparse_attention(
            gpu, work.data.problem, work.data.plan
        ),
        units=lambda work: UNITS[work.data.units],
        beside=_beside,
    ),
)
