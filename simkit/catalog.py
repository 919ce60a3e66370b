"""The table of everything that simkit implements: which file has the model, kernel, laws and trace.

References are strings, because the model imports neither the kernels nor the laws; the command
line resolves them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from simkit.errors import SimkitError

Kind = Literal["kernel", "study", "planner", "simulator", "schedule"]
"""kernel: a model proved against a CUDA kernel. study: a published experiment of numerics, redone
with the model alone. planner: host code that deals out the work of kernels, with its schedule.
simulator: a part of the cycle model, which has laws of its own. schedule: a published kernel on the
cycle model."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One algorithm of the documents.

    ``section``: where a document describes it. ``model``, ``host``, ``trace``: "module:function" of
    the model, of the kernel's host side and of the schedule. ``kernel``: the CUDA C++ file,
    "package/file". ``laws``: module of the laws. Studies, simulators and schedules have no kernel,
    host and trace; a planner has no kernel and host.
    """

    name: str
    title: str
    section: str
    model: str
    laws: str
    kind: Kind = "kernel"
    kernel: str | None = None
    host: str | None = None
    trace: str | None = None


ALGORITHMS: tuple[Algorithm, ...] = (
    Algorithm(
        name="naive_attention",
        title="Attention as the formula reads, S and P in HBM",
        section="3.4 Attention kernel: naive attention and its memory traffic",
        model="simkit.algorithms.naive_attention:naive_attention",
        kernel="gpu/kernels/naive_attention.cu",
        host="gpu.kernels.naive_attention:naive_attention",
        laws="properties.naive_attention",
        trace="simkit.schedules.tile_timeline:naive_attention",
    ),
    Algorithm(
        name="flash_attention",
        title="FlashAttention: tiles and online softmax, no score in HBM",
        section="3.4 Attention kernel: FlashAttention, tiling",
        model="simkit.algorithms.flash_attention:flash_attention",
        kernel="gpu/kernels/flash_attention.cu",
        host="gpu.kernels.flash_attention:flash_attention",
        laws="properties.flash_attention",
        trace="simkit.schedules.tile_timeline:flash_attention",
    ),
    Algorithm(
        name="flash_decoding",
        title="Flash-Decoding: one query, its keys split over CTAs",
        section="3.4 Attention kernel: decoding attention and Flash-Decoding",
        model="simkit.algorithms.flash_decoding:flash_decoding",
        kernel="gpu/kernels/flash_decoding.cu",
        host="gpu.kernels.flash_decoding:flash_decoding",
        laws="properties.flash_decoding",
        trace="simkit.schedules.tile_timeline:flash_decoding",
    ),
    Algorithm(
        name="fp8_kv_cache",
        title="FP8 KV cache: the 656-byte token record",
        section="FlashMLA source walk-through: byte layout of the FP8 KV cache",
        model="simkit.algorithms.fp8_kv_cache:fp8_kv_quantize",
        kernel="gpu/kernels/fp8_kv_cache.cu",
        host="gpu.kernels.fp8_kv_cache:fp8_kv_quantize",
        laws="properties.fp8_kv_cache",
        trace="simkit.schedules.tile_timeline:fp8_kv_cache",
    ),
    Algorithm(
        name="fp8_error_study",
        title="FlashAttention-3's error experiment: fp16 and fp8 on inputs with outliers",
        section="3.4 Attention kernel: FlashAttention-3, FP8",
        kind="study",
        model="simkit.algorithms.fp8_error_study:fp8_error_study",
        laws="properties.fp8_error_study",
    ),
    Algorithm(
        name="kv_append",
        title="Appending to a paged KV cache, as it is or as FP8; the layouts of K and V",
        section="3.4 Attention kernel: paged and ragged layouts, FlashInfer",
        model="simkit.algorithms.kv_append:kv_append",
        kernel="gpu/kernels/kv_append.cu",
        host="gpu.kernels.kv_append:kv_append",
        laws="properties.kv_append",
        trace="simkit.schedules.append_timeline:kv_append",
    ),
    Algorithm(
        name="batch_decode",
        title="One query of each request, K and V in pages, split and merged",
        section="3.4 Attention kernel: paged and ragged layouts, FlashInfer",
        model="simkit.algorithms.batch_decode:batch_decode",
        kernel="gpu/kernels/batch_decode.cu",
        host="gpu.kernels.batch_decode:batch_decode",
        laws="properties.batch_decode",
        trace="simkit.schedules.batch_timeline:batch_decode",
    ),
    Algorithm(
        name="batch_prefill_paged",
        title="Queries and keys of any number for each request, K and V in pages",
        section="3.4 Attention kernel: paged and ragged layouts, FlashInfer",
        model="simkit.algorithms.batch_prefill_paged:batch_prefill_paged",
        kernel="gpu/kernels/batch_prefill_paged.cu",
        host="gpu.kernels.batch_prefill_paged:batch_prefill_paged",
        laws="properties.batch_prefill_paged",
        trace="simkit.schedules.batch_timeline:batch_prefill_paged",
    ),
    Algorithm(
        name="batch_prefill_ragged",
        title="The same with ragged K and V; every variant of attention",
        section="3.4 Attention kernel: paged and ragged layouts, FlashInfer",
        model="simkit.algorithms.batch_prefill_ragged:batch_prefill_ragged",
        kernel="gpu/kernels/batch_prefill_ragged.cu",
        host="gpu.kernels.batch_prefill_ragged:batch_prefill_ragged",
        laws="properties.batch_prefill_ragged",
        trace="simkit.schedules.batch_timeline:batch_prefill_ragged",
    ),
    Algorithm(
        name="block_sparse_attention",
        title="Blocks of keys for each block of queries, with a mask within",
        section="3.4 Attention kernel: paged and ragged layouts, FlashInfer",
        model="simkit.algorithms.block_sparse_attention:block_sparse_attention",
        kernel="gpu/kernels/block_sparse_attention.cu",
        host="gpu.kernels.block_sparse_attention:block_sparse_attention",
        laws="properties.block_sparse_attention",
        trace="simkit.schedules.batch_timeline:block_sparse_attention",
    ),
    Algorithm(
        name="merge_states",
        title="Attention to several sets of keys, as attention to all of them",
        section="3.4 Attention kernel: online softmax, Flash-Decoding, cascade attention",
        model="simkit.algorithms.merge_states:merge_states",
        kernel="gpu/kernels/merge_states.cu",
        host="gpu.kernels.merge_states:merge_states",
        laws="properties.merge_states",
        trace="simkit.schedules.merge_timeline:merge_states",
    ),
    Algorithm(
        name="cascade_attention",
        title="Shared prefixes read once for all their queries, any number of levels",
        section="3.4 Attention kernel: cascade attention, FlashInfer",
        model="simkit.algorithms.cascade_attention:cascade_attention",
        kernel="gpu/kernels/batch_prefill_paged.cu",
        host="gpu.kernels.cascade_attention:cascade_attention",
        laws="properties.cascade_attention",
        trace="simkit.schedules.batch_timeline:cascade_attention",
    ),
    Algorithm(
        name="split_planner",
        title="Split heuristics: FlashAttention-2 to 4, FlashInfer's decode, FlashMLA's scheduler",
        section="3.4 Attention kernel: decoding attention and Flash-Decoding",
        kind="planner",
        model="simkit.planning.split_planner:split_planner",
        laws="properties.split_planner",
        trace="simkit.schedules.plan_timeline:split_planner",
    ),
    Algorithm(
        name="prefill_planner",
        title="FlashInfer's plan: query tiles and key chunks, by grid or by least loaded worker",
        section="3.4 Attention kernel: paged and ragged layouts, FlashInfer",
        kind="planner",
        model="simkit.planning.prefill_planner:prefill_planner",
        laws="properties.prefill_planner",
        trace="simkit.schedules.plan_timeline:prefill_planner",
    ),
    Algorithm(
        name="engine",
        title="Discrete events: agents run programs on resources that serve in order of arrival",
        section="3.4 Attention kernel: FlashAttention-3, warp specialisation and ping-pong",
        kind="simulator",
        model="simkit.schedules.engine:simulate",
        laws="properties.engine",
    ),
    Algorithm(
        name="grid",
        title="Launches: CTAs on SMs, from simulations of one SM, at the clock that power allows",
        section="3.4 Attention kernel: FlashAttention-2 and 3, what bounds them",
        kind="simulator",
        model="simkit.schedules.grid:run_launch",
        laws="properties.grid",
    ),
    Algorithm(
        name="launches",
        title="A CPU launches kernels: streams, CUDA graphs, programmatic dependent launch",
        section="3.4 Attention kernel: kernel launch overhead and CUDA graphs",
        kind="simulator",
        model="simkit.schedules.launches:timeline",
        laws="properties.launches",
    ),
    Algorithm(
        name="flash_attention_1",
        title="FlashAttention: K and V outside, Q and O read and written in every step",
        section="3.4 Attention kernel: FlashAttention, tiling",
        kind="schedule",
        model="simkit.schedules.flash_attention_1:FlashAttention1",
        laws="properties.grid",
    ),
    Algorithm(
        name="flash_attention_2",
        title="FlashAttention-2: rows of Q for each warp, mma.sync, CTAs that share an SM",
        section="3.4 Attention kernel: FlashAttention-2 and -3",
        kind="schedule",
        model="simkit.schedules.flash_attention_2:FlashAttention2",
        laws="properties.grid",
    ),
    Algorithm(
        name="flash_attention_3",
        title="FlashAttention-3: a producer, warpgroups in turns, softmax beside products",
        section="3.4 Attention kernel: FlashAttention-2 and -3",
        kind="schedule",
        model="simkit.schedules.flash_attention_3:FlashAttention3",
        laws="properties.grid",
    ),
    Algorithm(
        name="paged_decode",
        title="FlashInfer's decode on pages, split by its plan and merged",
        section="3.4 Attention kernel: paged and ragged layouts, FlashInfer",
        kind="schedule",
        model="simkit.schedules.paged_decode:PagedDecode",
        laws="properties.grid",
    ),
    Algorithm(
        name="mla_decode",
        title="FlashMLA's dense decode: seesaw, tile scheduler, combine",
        section="FlashMLA source walk-through: the seesaw schedule",
        kind="schedule",
        model="simkit.schedules.mla_decode:MlaDecode",
        laws="properties.grid",
    ),
    Algorithm(
        name="mla_sparse_decode",
        title="FlashMLA's FP8 sparse decode: dequantisation, crossover",
        section="FlashMLA source walk-through: the crossover mechanism",
        kind="schedule",
        model="simkit.schedules.mla_sparse_decode:MlaSparseDecode",
        laws="properties.grid",
    ),
    Algorithm(
        name="mla_sparse_prefill",
        title="FlashMLA's sparse prefill",
        section="FlashMLA source walk-through: the performance table",
        kind="schedule",
        model="simkit.schedules.mla_sparse_prefill:MlaSparsePrefill",
        laws="properties.grid",
    ),
)


def algorithm(name: str) -> Algorithm:
    """The row of that name; SimkitError that lists the names otherwise."""
    for row in ALGORITHMS:
        if row.name == name:
            return row
    names = ", ".join(row.name for row in ALGORITHMS)
    raise SimkitError(f"no algorithm {name!r} in the catalogue; it has {names}")
