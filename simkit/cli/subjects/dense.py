"""Attention of sequences of one length: naive attention, FlashAttention, Flash-Decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpu.device import Device
from gpu.kernels import flash_attention as flash_host
from gpu.kernels import flash_decoding as decoding_host
from gpu.kernels import naive_attention as naive_host
from gpu.kernels.result import KernelResult
from simkit.algorithms import flash_attention as flash
from simkit.algorithms import flash_decoding as decoding
from simkit.algorithms import naive_attention as naive
from simkit.algorithms.problem import AttentionProblem, attention_flops, attention_reference
from simkit.algorithms.tiles import tile_count
from simkit.cli.settings import Setting, Values
from simkit.cli.subjects.subject import (
    Array,
    LaunchShape,
    Subject,
    Workload,
    on_fp32_lanes,
    on_one_machine,
    on_tensor_cores,
)
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine
from simkit.schedules import tile_timeline

LEAST_LENGTH = 64
"""Below it, a smaller problem would be another one: tails and nothing else."""


def _workload(gpu: Gpu, values: Values, seed: int | None) -> Workload:
    sizes: dict[str, Any] = {name: values[name] for name in ("batch", "kv_len", "heads", "d")}
    sizes |= {"q_len": values.get("q_len", 1), "kv_heads": values["kv_heads"]}
    sizes |= {"causal": values.get("causal", False)}
    splits = values.get("splits", 1)
    if seed is None:
        return Workload(AttentionProblem.sized(**sizes), splits)
    return Workload(AttentionProblem.random(np.random.default_rng(seed), **sizes), splits)


def _naive_model(machine: Machine, work: Workload) -> Mapping[str, Array]:
    return {"o": naive.naive_attention(machine, work.data).o}


def _flash_model(machine: Machine, work: Workload) -> Mapping[str, Array]:
    result = flash.flash_attention(machine, work.data)
    return {"o": result.o, "lse": result.lse}


def _decoding_model(machine: Machine, work: Workload) -> Mapping[str, Array]:
    result = decoding.flash_decoding(machine, work.data, work.splits)
    return {"o": result.o, "lse": result.lse}


def _naive_kernel(device: Device, work: Workload) -> KernelResult:
    p = work.data
    return naive_host.naive_attention(device, p.q, p.k, p.v, causal=p.causal)


def _flash_kernel(device: Device, work: Workload) -> KernelResult:
    p = work.data
    return flash_host.flash_attention(device, p.q, p.k, p.v, causal=p.causal)


def _decoding_kernel(device: Device, work: Workload) -> KernelResult:
    p = work.data
    return decoding_host.flash_decoding(device, p.q[:, 0], p.k, p.v, work.splits)


def _reference(work: Workload) -> Mapping[str, Array]:
    o, lse = attention_reference(work.data)
    return {"o": o, "lse": lse}


def _decoding_reference(work: Workload) -> Mapping[str, Array]:
    o, lse = attention_reference(work.data)
    return {"o": o[:, 0], "lse": lse[:, :, 0]}


def _pair_multiplications(work: Workload) -> int:
    return attention_flops(work.data) // 2


def _all_multiplications(work: Workload) -> int:
    p = work.data  # naive attention computes what the mask hides, too
    return 2 * int(p.d * p.q_len * p.kv_len * p.heads * p.batch)


def _smaller(values: Values) -> Values:
    """Half the longer length; then one sequence; then one K/V head with its group."""
    lengths = [name for name in ("q_len", "kv_len") if values.get(name, 0) > LEAST_LENGTH]
    if lengths:
        longest = max(lengths, key=lambda name: values[name])
        changed = {**values, longest: max(values[longest] // 2, LEAST_LENGTH)}
        if "splits" in values:
            changed["splits"] = min(changed["splits"], tile_count(changed["kv_len"], 64))
        return changed
    if values["batch"] > 1:
        return {**values, "batch": 1}
    return {**values, "heads": values["heads"] // values["kv_heads"], "kv_heads": 1}


def _naive_launches(work: Workload) -> tuple[LaunchShape, ...]:
    p = work.data
    row_tiles, key_tiles = tile_count(p.q_len, naive.TILE), tile_count(p.kv_len, naive.TILE)
    heads = p.batch * p.heads
    rows = tile_count(heads * p.q_len, naive.ROWS_PER_CTA)

    def shape(kernel: str, ctas: int, shared_bytes: int = 0) -> LaunchShape:
        return LaunchShape(
            kernel, ctas, naive.THREADS, lambda device: naive_host.build(device, p.d), shared_bytes
        )

    first = (
        shape("naive_scores", key_tiles * row_tiles * heads, naive.scores_shared_bytes(p.d)),
        shape("naive_softmax", rows),
    )
    last = shape("naive_output", row_tiles * heads, naive.output_shared_bytes(p.d))
    return (*(first if p.kv_len else ()), last)


def _flash_launches(work: Workload) -> tuple[LaunchShape, ...]:
    p, tile = work.data, flash.Tile()
    ctas = tile_count(p.q_len, tile.q) * p.heads * p.batch
    return (
        LaunchShape(
            "flash_attention",
            ctas,
            flash.THREADS,
            lambda device: flash_host.build(device, p.d),
            tile.shared_bytes(p.d),
        ),
    )


def _decoding_launches(work: Workload) -> tuple[LaunchShape, ...]:
    p = work.data
    ctas = work.splits * p.kv_heads * p.batch

    def build(device: Device) -> Any:
        return decoding_host.build(device, p.d, p.group)

    shared = decoding.split_shared_bytes(p)
    return (
        LaunchShape("flash_decoding_split", ctas, decoding.THREADS, build, shared),
        LaunchShape("flash_decoding_combine", p.heads * p.batch, p.d, build),
    )


def naive_settings(values: Values) -> Values:
    """Those of naive attention for the problem of another algorithm, whose lengths are sizes."""
    one_query = {"q_len": 1, "causal": False}
    names = [setting.name for setting in _PREFILL if not setting.sets]
    return {name: values.get(name, one_query.get(name, 0)) for name in names}


def _beside_naive(values: Values) -> Mapping[str, Values | str]:
    return {"naive_attention": naive_settings(values)}


_SIZES = (
    Setting("batch", 1, "sequences"),
    Setting("heads", 2, "query heads"),
    Setting("kv_heads", None, "K/V heads, heads by default", like="heads"),
    Setting("d", 128, "head dimension, 64 or 128"),
)
_PREFILL = (
    Setting("n", None, "both lengths", sets=("q_len", "kv_len")),
    Setting("q_len", 256, "queries"),
    Setting("kv_len", None, "keys, q_len by default", least=0, like="q_len"),
    *_SIZES,
    Setting("causal", False, "mask keys after the query", kind="flag"),
)
_DECODE = (
    Setting("n", None, "keys", sets=("kv_len",)),
    Setting("kv_len", 4096, "keys", least=0),
    Setting("batch", 1, "sequences"),
    Setting("heads", 8, "query heads"),
    Setting("kv_heads", 1, "K/V heads"),
    Setting("d", 128, "head dimension, 64 or 128"),
    Setting("splits", 8, "CTAs that share the keys of a head"),
)

DENSE_SUBJECTS = (
    Subject(
        name="naive_attention",
        settings=_PREFILL,
        workload=_workload,
        model=on_one_machine(_naive_model),
        kernel=_naive_kernel,
        reference=_reference,
        flops=lambda work: attention_flops(work.data),
        multiplications=_all_multiplications,
        smaller=_smaller,
        launches=_naive_launches,
        trace=lambda gpu, work: tile_timeline.naive_attention(gpu, work.data),
        units=on_fp32_lanes,
        beside=lambda values: {},
    ),
    Subject(
        name="flash_attention",
        settings=_PREFILL,
        workload=_workload,
        model=on_one_machine(_flash_model),
        kernel=_flash_kernel,
        reference=_reference,
        flops=lambda work: attention_flops(work.data),
        multiplications=_pair_multiplications,
        smaller=_smaller,
        launches=_flash_launches,
        trace=lambda gpu, work: tile_timeline.flash_attention(gpu, work.data),
        units=on_tensor_cores,
        beside=_beside_naive,
    ),
    Subject(
        name="flash_decoding",
        settings=_DECODE,
        workload=_workload,
        model=on_one_machine(_decoding_model),
        kernel=_decoding_kernel,
        reference=_decoding_reference,
        flops=lambda work: attention_flops(work.data),
        multiplications=_pair_multiplications,
        smaller=_smaller,
        launches=_decoding_launches,
        trace=lambda gpu, work: tile_timeline.flash_decoding(gpu, work.data, work.splits),
        units=on_fp32_lanes,
        beside=_beside_naive,
    ),
)
