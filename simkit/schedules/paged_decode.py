"""Batch decoding on a paged KV cache as FlashInfer does it: a plan, a CTA per item, a merge.

On tensor cores an item is `KeyLoop` with 16 rows: its warps divide the keys. On CUDA cores threads
compute dot products: those of a head of the group by the heads' own threads, each of which reads K
and V from shared memory. Either way the page table is read one tile ahead of the copies.

Source: FlashInfer, include/flashinfer/attention/{decode,prefill,scheduler}.cuh (2026-08-22).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from simkit.errors import ShapeError
from simkit.machine.gpus import Gpu
from simkit.machine.occupancy import occupancy
from simkit.planning.batch import Batch
from simkit.planning.decode import decode_plan
from simkit.planning.plan import Plan, item_keys
from simkit.planning.prefill import CTAS_PER_SM, prefill_plan
from simkit.schedules.engine import Agent, Arrive, Barrier, Program, Run, Start, Step, Wait
from simkit.schedules.grid import Item, Launch
from simkit.schedules.key_loop import THREADS, WARPS, KeyLoop
from simkit.schedules.merge import flashinfer_merge
from simkit.schedules.parameters import LANE_LATENCY, SHUFFLE_LATENCY
from simkit.schedules.shape import AttentionShape
from simkit.schedules.steps import (
    F32_BYTES,
    Copy,
    Sync,
    global_load,
    global_store,
    in_pieces,
    lanes,
    named_barrier,
)

_INDEX_BYTES = 4
_ROWS = 16  # of a tile on tensor cores
_KEYS = {64: 256, 128: 128, 256: 64}  # of it, by head dimension, 16-bit values
_CORE_DIMS = (64, 128, 256, 512)  # head dimensions of the kernel on CUDA cores
_STAGES = 2
_REGISTERS = 64
"""Of a thread of the CUDA-core kernel, where the compiler decides: eight values each of a query,
a key, a value and the output in float32, and addresses."""


@dataclass(frozen=True, kw_only=True)
class PagedDecode:
    """``page_size``: keys. ``tensor_cores``: None: for groups of four heads and more, which tile
    16 rows well enough. ``dependent``: the merge is launched before the first kernel ends.
    ``graph``: plans fit a CUDA graph, whatever the lengths.
    """

    page_size: int = 16
    tensor_cores: bool | None = None
    dependent: bool = True
    graph: bool = False

    def uses_tensor_cores(self, shape: AttentionShape) -> bool:
        return shape.group >= 4 if self.tensor_cores is None else self.tensor_cores

    def plan(self, gpu: Gpu, shape: AttentionShape, kv_lens: Sequence[int] = ()) -> Plan:
        """Who does what. ``kv_lens``: keys of each request, by default ``shape.kv_len`` of all.
        `ShapeError` for several queries, a group over 16 heads, head dimensions that the kernels
        lack, or another number of lengths.
        """
        if shape.d_v != shape.d:
            raise ShapeError(f"K and V have one head dimension, got {shape.d} and {shape.d_v}")
        lens = np.asarray(kv_lens or [shape.kv_len] * shape.batch, np.int32)
        if shape.q_len != 1 or shape.group > _ROWS:
            raise ShapeError(
                f"decoding takes one query of up to {_ROWS} heads of a group, got q_len "
                f"{shape.q_len} of {shape.group}"
            )
        if lens.size != shape.batch:
            raise ShapeError(f"{lens.size} lengths for a batch of {shape.batch}")
        if self.uses_tensor_cores(shape):
            return prefill_plan(
                np.arange(shape.batch + 1, dtype=np.int32), lens, group=shape.group,
                kv_heads=shape.kv_heads, head_dim_v=shape.d_v, page_size=self.page_size,
                sm_count=gpu.sm_count, tile_q=_ROWS, graph=self.graph,
            )  # fmt: skip
        core = _Core.of(gpu, shape)
        fits = occupancy(gpu, core.threads, _REGISTERS, core.shared_bytes)
        return decode_plan(
            lens, group=shape.group, kv_heads=shape.kv_heads, page_size=self.page_size,
            max_grid=fits.ctas_per_sm * gpu.sm_count, graph=self.graph,
        )  # fmt: skip

    def launches(
        self, gpu: Gpu, shape: AttentionShape, kv_lens: Sequence[int] = ()
    ) -> tuple[Launch, ...]:
        """The decode kernel, and the merge if keys are split. Errors as of `plan`."""
        lens = list(kv_lens) or [shape.kv_len] * shape.batch
        plan = self.plan(gpu, shape, lens)
        batch = Batch.of(np.arange(shape.batch + 1), np.asarray(lens, np.int32), group=shape.group)
        spans = item_keys(plan, batch)
        keys = [int(stop - start) for start, stop in spans] * shape.kv_heads
        decode = self._decode(gpu, shape, sum(lens), keys, plan.is_split)
        if not plan.is_split:
            return (decode,)
        counts = np.repeat(np.diff(plan.merge_indptr), shape.heads)
        merge = flashinfer_merge(shape.d_v).launch(
            gpu, [int(count) for count in counts], shape.d_v, dependent=self.dependent
        )
        return decode, merge

    def _decode(
        self, gpu: Gpu, shape: AttentionShape, total: int, keys: Sequence[int], is_split: bool
    ) -> Launch:
        o_bytes = shape.group * (shape.d_v * (F32_BYTES if is_split else 2) + F32_BYTES)
        uses_tensor_cores = self.uses_tensor_cores(shape)
        loop: KeyLoop | _Core
        if uses_tensor_cores:
            loop = _tensor_loop(gpu, shape, self.page_size, o_bytes, is_split)
            threads = THREADS
            registers = min(255, gpu.registers_per_sm // (THREADS * CTAS_PER_SM) // 8 * 8)
        else:
            loop = _Core.of(gpu, shape, self.page_size, o_bytes, is_split)
            threads, registers = loop.threads, _REGISTERS
        kv = total * shape.kv_heads * (shape.d + shape.d_v) * shape.element
        return Launch(
            name="paged_decode",
            items=[Item(-(-own // loop.keys), int(own % loop.keys > 0)) for own in keys],
            cta=loop.agents,
            threads=threads,
            registers=registers,
            shared_bytes=loop.shared_bytes,
            path="mma.sync",
            flop=2.0 * total * shape.heads * (shape.d + shape.d_v),
            hbm_bytes=kv + shape.q_bytes,
            key=loop,
        )


def _tensor_loop(
    gpu: Gpu, shape: AttentionShape, page_size: int, o_bytes: int, is_split: bool
) -> KeyLoop:
    if shape.d not in _KEYS or shape.element != 2:
        raise ShapeError(f"d must be one of {list(_KEYS)} in 16 bits, got {shape.d}")
    keys = _KEYS[shape.d]
    return KeyLoop(
        rows=_ROWS,
        keys=keys,
        d=shape.d,
        d_v=shape.d_v,
        q_bytes=shape.group * shape.d * 2,
        o_bytes=o_bytes,
        o_missing=0.0 if is_split else 1.0,
        latency=gpu.hbm_latency,
        kv_warps=WARPS,
        order="two ahead",
        page_bytes=-(-keys // page_size) * _INDEX_BYTES,
        page_latency=gpu.l2_latency,
    )


@dataclass(frozen=True, kw_only=True)
class _Core:
    """A CTA on CUDA cores: ``lanes_of_row`` threads compute a dot product, ``heads`` of the group
    each have their own, and ``depth`` such sets divide the keys.
    """

    d: int
    heads: int
    lanes_of_row: int
    depth: int
    keys_of_thread: int
    element: int
    page_bytes: float
    o_bytes: float
    o_missing: float
    latency: float
    page_latency: float

    @staticmethod
    def of(
        gpu: Gpu,
        shape: AttentionShape,
        page_size: int = 16,
        o_bytes: int = 0,
        is_split: bool = True,
    ) -> _Core:
        if shape.d not in _CORE_DIMS or shape.element not in (1, 2):
            raise ShapeError(
                f"d must be one of {list(_CORE_DIMS)} in 8 or 16 bits, got {shape.d} in "
                f"{8 * shape.element}"
            )
        vector = max(16 // shape.element, shape.d // 32)
        row = shape.d // vector
        depth = max(128, row * shape.group) // (row * shape.group)
        each = 1 if shape.group > 1 else 2 if shape.element == 1 else 4
        keys = each * shape.group * depth
        return _Core(
            d=shape.d,
            heads=shape.group,
            lanes_of_row=row,
            depth=depth,
            keys_of_thread=each,
            element=shape.element,
            page_bytes=-(-keys // page_size) * _INDEX_BYTES,
            o_bytes=o_bytes,
            o_missing=0.0 if is_split else 1.0,
            latency=gpu.hbm_latency,
            page_latency=gpu.l2_latency,
        )

    @property
    def threads(self) -> int:
        return self.lanes_of_row * self.heads * self.depth

    @property
    def keys(self) -> int:
        return self.keys_of_thread * self.heads * self.depth

    @property
    def shared_bytes(self) -> int:
        return 2 * _STAGES * self.keys * self.d * self.element

    def agents(self, name: str, items: Sequence[Item]) -> list[Agent]:
        cta = _CoreCta(self)
        return [Agent(name, "warps", cta.warps(items)), Agent(name, "copies", cta.copies(items))]


class _CoreCta:
    def __init__(self, core: _Core) -> None:
        self.core = core
        size = core.keys * core.d * core.element
        self.k, self.v = (Copy(name, size, 1.0, core.latency) for name in "KV")
        self.k_full, self.v_full = (Barrier(f"{c.name} there", c.boxes) for c in (self.k, self.v))
        self.k_free, self.v_free, self.pages = (Barrier(n) for n in ("K free", "V free", "pages"))
        self.sync = Sync(named_barrier("sync", core.threads // 32))

    def copies(self, items: Sequence[Item]) -> Program:
        """cp.async into two stages each of K and V; page indices a tile ahead."""
        core, block = self.core, 0
        pages = global_load("page table", core.page_bytes, latency=core.page_latency)
        for item in items:
            if item.length:
                yield Start(pages, self.pages)
            for i in range(item.length):
                yield Wait(self.pages, block)
                if i + 1 < item.length:
                    yield Start(pages, self.pages)
                if block >= _STAGES:
                    yield Wait(self.k_free, block - _STAGES)
                yield from self.k.steps(self.k_full)
                if block >= _STAGES:
                    yield Wait(self.v_free, block - _STAGES)
                yield from self.v.steps(self.v_full)
                block += 1

    def warps(self, items: Sequence[Item]) -> Program:
        core, block = self.core, 0
        scores, values = core.heads * core.keys, core.heads * core.keys * core.d
        smem = values * core.element  # every head reads K and V for itself
        exchanges = (core.lanes_of_row - 1).bit_length()
        dot = lanes("QK", "compute", fma=values, widen=values, smem=smem)
        reduce = lanes(
            "QK", "compute", shuffle=scores * core.lanes_of_row * exchanges,
            alu=scores * core.lanes_of_row * exchanges,
            latency=exchanges * (SHUFFLE_LATENCY.value + LANE_LATENCY.value),
        )  # fmt: skip
        # Every lane of a row has all of its weights.
        exp = lanes("exp", "softmax", xu=scores * core.lanes_of_row, fma=scores * core.lanes_of_row)
        add = lanes("PV", "compute", fma=values, widen=values, smem=smem)
        query = core.heads * core.d * 2
        for item in items:
            yield Run(global_load("Q", query, 1.0, core.latency))
            for _ in range(item.length):
                yield Wait(self.k_full, block)
                yield from self.sync.steps()
                yield from in_pieces(dot, 2)
                yield Run(reduce)
                yield Run(exp)
                yield from self.sync.steps()
                yield Arrive(self.k_free)
                yield Wait(self.v_full, block)
                yield from self.sync.steps()
                yield from in_pieces(add, 2)
                yield from self.sync.steps()
                yield Arrive(self.v_free)
                block += 1
            yield from self._finish()

    def _finish(self) -> Iterator[Step]:
        """The sets of threads merge their states through shared memory."""
        core = self.core
        values = core.heads * core.d
        if core.depth > 1:
            states = core.depth * values
            yield Run(lanes("merge", "compute", fma=states, smem=2 * states * F32_BYTES))
            yield from self.sync.steps()
        yield Run(lanes("O", "convert", fma=values, xu=values / 2))
        yield Start(global_store("O", core.o_bytes, core.o_missing))
