"""Attention of batches by a plan: plans from settings, what they launch, and how much they do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu import jit
from gpu.device import Device, Module
from gpu.kernels import merge_states as merge_host
from simkit.algorithms.batch_arithmetic import KEY_TILE
from simkit.algorithms.batch_attention import (
    THREADS,
    Units,
    problem_batch,
    shared_bytes,
)
from simkit.algorithms.batch_problem import BatchProblem
from simkit.algorithms.tiles import tile_count
from simkit.cli.settings import Setting, Values
from simkit.cli.subjects.subject import LaunchShape, PlannedLaunch
from simkit.cli.subjects.subject import Units as UnitsName
from simkit.layouts.block_sparse import BlockRows
from simkit.machine.gpus import Gpu
from simkit.planning.batch import Batch, ceil_div
from simkit.planning.outcome import PlanProblem
from simkit.planning.plan import Plan, item_keys
from simkit.planning.prefill import cta_tile_q, longest_packed_len, prefill_plan

SPLIT = Setting("split", 0, "keys of a chunk, 0 to search, -1 for no chunks", least=-1)
GRAPH = Setting("graph", False, "plan for a CUDA graph", kind="flag")
TILE_Q = Setting("tile_q", 0, "rows of a tile, 16 or 64; 0: by the mean of requests", least=0)

_LARGEST_TILE = 64
UNITS: dict[Units, UnitsName] = {"tensor_cores": "tensor cores", "cuda_cores": "fp32 lanes"}


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """A problem, its plan, and what multiplies."""

    problem: BatchProblem
    plan: Plan
    units: Units = "tensor_cores"


def planned(gpu: Gpu, values: Values, problem: BatchProblem, tile_q: int = 0) -> Plan:
    """The grid planner's plan with the settings ``split``, ``graph`` and, unless ``tile_q`` is
    given, ``tile_q``.
    """
    batch, split, graph = problem_batch(problem), values["split"], values.get("graph", False)
    sizes: dict[str, Any] = {"disable_split": True} if split < 0 else {"fixed_split": split}
    return prefill_plan(
        problem.queries.indptr,
        problem.kv_lens,
        group=problem.group,
        kv_heads=problem.kv_heads,
        head_dim_v=problem.dv,
        page_size=page_size(problem),
        sm_count=gpu.sm_count,
        window_left=batch.window_left,
        causal=batch.causal,
        tile_q=tile_q or values["tile_q"] or _tile_q(batch, problem.dv, graph),
        graph=graph,
        **sizes,
    )


def _tile_q(batch: Batch, head_dim_v: int, graph: bool) -> int:
    """FlashInfer's choice, which has tiles of 128 rows, too."""
    rows = longest_packed_len(batch, batch.rows) if graph else batch.mean_packed_len()
    return min(cta_tile_q(rows, head_dim_v), _LARGEST_TILE)


def page_size(problem: BatchProblem) -> int:
    """Keys of a page or block, 1 of ragged K and V."""
    return problem.keys.block_size if isinstance(problem.keys, BlockRows) else 1


def launches(kernel: str, batch: PlannedBatch) -> tuple[LaunchShape, ...]:
    """That of the plan, and that of the merge if it splits."""
    problem, plan = batch.problem, batch.plan
    found = (plan_launch(kernel, batch),) if plan.grid else ()
    return (*found, merge_launch(problem)) if plan.is_split and problem.rows else found


def plan_launch(kernel: str, batch: PlannedBatch, name: str = "") -> LaunchShape:
    """One launch of a plan, called ``name`` beside others, like the kernel by default."""
    problem, plan = batch.problem, batch.plan
    configuration = jit.Configuration.of(kernel, problem, plan, batch.units)
    plan_problem = PlanProblem(
        q_lens=problem.queries.lens,
        kv_lens=problem.kv_lens,
        group=problem.group,
        kv_heads=problem.kv_heads,
        head_dim=problem.dv,
        page_size=page_size(problem),
        window_left=problem.variant.window_left,
        causal=problem.variant.causal,
    )
    key_bytes = (problem.d + problem.dv) * problem.k.dtype.itemsize
    return LaunchShape(
        kernel,
        plan.grid * problem.kv_heads,
        THREADS,
        lambda device: jit.build(device, configuration),
        sum(shared_bytes(problem, plan.tile_q, batch.units)),
        PlannedLaunch(name or kernel, configuration.key, plan, plan_problem, key_bytes),
    )


def merge_launch(problem: BatchProblem) -> LaunchShape:
    """The merge of partial states."""
    d, output = problem.dv, problem.q.dtype

    def build(device: Device) -> Module:
        return merge_host.build_variable(device, d, output=output, index=np.int64)

    ctas = tile_count(problem.rows * problem.heads, merge_host.PAIRS_PER_CTA)
    return LaunchShape("merge_states_variable", ctas, merge_host.THREADS, build)


def multiplications(batch: PlannedBatch) -> int:
    """Multiply-adds of whole tiles, which is what the kernels do."""
    problem, plan = batch.problem, batch.plan
    keys = np.diff(item_keys(plan, problem_batch(problem)))
    tiles = int(ceil_div(keys, KEY_TILE).sum())
    return tiles * KEY_TILE * plan.tile_q * problem.kv_heads * (problem.d + problem.dv)
