"""Laws of attention through a block-sparse matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from hypothesis import strategies as st

from gpu.device import Device
from gpu.kernels import block_sparse_attention as host
from gpu.kernels.result import KernelResult
from properties.batch_case import SM_COUNT, batch_outputs
from properties.compare import Expected
from properties.data import KINDS, attention_inputs
from properties.subject import Array, Subject, kernel_laws
from simkit.algorithms.batch_bounds import batch_bounds
from simkit.algorithms.batch_problem import BatchProblem, batch_reference
from simkit.algorithms.block_sparse_attention import block_sparse_attention
from simkit.algorithms.variant import Variant
from simkit.layouts import custom_mask
from simkit.layouts.block_sparse import BoolArray, split_mask
from simkit.layouts.ragged import Ragged
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine
from simkit.planning.plan import Plan
from simkit.planning.prefill import prefill_plan


@dataclass(frozen=True)
class BlockSparseCase:
    """``rows`` queries and ``columns`` keys in blocks of ``block_rows`` x ``block_columns``, of
    which a part of ``density`` is there; ``elements``: a mask within them, too.
    """

    rows: int = 64
    columns: int = 128
    block_rows: int = 16
    block_columns: int = 16
    density: float = 0.3
    elements: bool = False
    kv_heads: int = 1
    group: int = 1
    d: int = 64
    tile_q: int = 16
    split: int = -1
    data: str = "normal"
    seed: int = 0

    @cached_property
    def mask(self) -> BoolArray:
        """Which queries see which keys, bool [rows, columns]."""
        rng = np.random.default_rng(self.seed)
        blocks = -(-self.rows // self.block_rows), -(-self.columns // self.block_columns)
        mask = np.repeat(rng.random(blocks) < self.density, self.block_rows, axis=0)
        mask = np.repeat(mask, self.block_columns, axis=1)[: self.rows, : self.columns]
        return mask & (rng.random(mask.shape) < 0.7) if self.elements else mask

    @cached_property
    def problem(self) -> BatchProblem:
        blocks, elements = split_mask(self.mask, self.block_rows, self.block_columns)
        # Keys in whole blocks; what fills up the last one is never read.
        slots = blocks.blocks * self.block_columns
        q, k, v = attention_inputs(
            self.data, self.seed, (1, self.rows, self.kv_heads * self.group, self.d),
            (1, self.columns, self.kv_heads, self.d),
        )  # fmt: skip
        fill = np.full((slots - self.columns, self.kv_heads, self.d), np.nan, k.dtype)
        k, v = (np.concatenate((x[0], fill)) for x in (k, v))
        lens = [
            min(self.block_rows, self.rows - first)
            for first in range(0, self.rows, self.block_rows)
        ]
        mask = custom_mask.from_blocks(blocks, elements, self.rows) if self.elements else None
        shape = (blocks.blocks, self.block_columns, self.kv_heads, self.d)
        return BatchProblem(
            q=q[0], k=k.reshape(shape), v=v.reshape(shape),
            queries=Ragged.from_lengths(np.array(lens)), keys=blocks,
            variant=Variant(custom_mask=mask),
        )  # fmt: skip

    @property
    def dense(self) -> BatchProblem:
        """One request with the mask as it is, every key one."""
        problem = self.problem
        k, v = (x.reshape(-1, *x.shape[2:])[: self.columns] for x in (problem.k, problem.v))
        return replace(
            problem, k=k, v=v, queries=Ragged.from_lengths(np.array([self.rows])),
            keys=Ragged.from_lengths(np.array([self.columns])),
            variant=Variant(custom_mask=custom_mask.pack([self.mask])),
        )  # fmt: skip

    @cached_property
    def plan(self) -> Plan:
        problem = self.problem
        sizes = {"fixed_split": self.split} if self.split > 0 else {"disable_split": True}
        return prefill_plan(
            problem.queries.indptr, problem.kv_lens, group=self.group, kv_heads=self.kv_heads,
            head_dim_v=self.d, sm_count=SM_COUNT, tile_q=self.tile_q, **sizes,
        )  # fmt: skip


def _model(machine: Machine, case: BlockSparseCase) -> Mapping[str, Array]:
    return batch_outputs(block_sparse_attention(machine, case.problem, case.plan))


def _kernel(device: Device, case: BlockSparseCase, source: str | None) -> KernelResult:
    return host.block_sparse_attention(device, case.problem, case.plan, source=source)


def _expected(gpu: Gpu, case: BlockSparseCase) -> Mapping[str, Expected]:
    """Against dense attention with the mask, which knows nothing of blocks."""
    o, lse = batch_reference(case.dense)
    bounds = batch_bounds(case.problem, case.plan, gpu.arch, "tensor_cores")
    return {
        "o": Expected(o, bounds.o, "P and O in bfloat16, all else in float32"),
        "lse": Expected(lse, bounds.lse, "rounding of logits, sums and logarithm"),
    }


_SIZES = (1, 3, 16, 40, 64, 100)

SUBJECT = Subject(
    algorithm="block_sparse_attention",
    strategy=st.builds(
        BlockSparseCase,
        rows=st.integers(1, 200),
        columns=st.integers(1, 400),
        block_rows=st.sampled_from(_SIZES),
        block_columns=st.sampled_from(_SIZES),
        density=st.sampled_from((0.0, 0.1, 0.3, 0.7, 1.0)),
        elements=st.booleans(),
        kv_heads=st.integers(1, 2),
        group=st.sampled_from((1, 2, 7)),
        d=st.sampled_from((64, 128)),
        tile_q=st.sampled_from((16, 64)),
        split=st.sampled_from((-1, 64)),
        data=st.sampled_from(KINDS),
        seed=st.integers(0, 2**16 - 1),
    ),
    case_type=BlockSparseCase,
    corners=(
        # A block row and a block that are not whole, and rows without blocks.
        BlockSparseCase(rows=70, columns=150, block_rows=16, block_columns=40, group=7),
        BlockSparseCase(
            rows=70, columns=250, density=0.6, elements=True, kv_heads=2, split=64, tile_q=64
        ),
        BlockSparseCase(density=0.0),
        BlockSparseCase(rows=1, columns=1, block_rows=1, block_columns=1, density=1.0),
        BlockSparseCase(
            rows=40, columns=300, block_rows=64, block_columns=3, density=0.7, kv_heads=2, split=57
        ),
        # Chunks and keys end everywhere in a tile.
        *(BlockSparseCase(rows=9, columns=150, density=1.0, split=keys) for keys in (69, 90, 118)),
        BlockSparseCase(rows=33, columns=300, block_rows=40, density=1.0, data="underflow", seed=2),
    ),
    thorough=BlockSparseCase(rows=40, columns=200, density=0.7, elements=True, split=64),
    model=_model,
    kernel=_kernel,
    expected=_expected,
    has_lse=True,
)

LAWS = [*kernel_laws(SUBJECT, examples=20)]
