"""Each algorithm as ``run`` and ``trace`` see it: settings, inputs, model, kernel, launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpu.device import Device, Module
from gpu.kernels import flash_attention as flash_host
from gpu.kernels import flash_decoding as decoding_host
from gpu.kernels import fp8_kv_cache as kv_cache_host
from gpu.kernels import naive_attention as naive_host
from gpu.kernels.result import KernelResult
from simkit.algorithms import flash_attention as flash
from simkit.algorithms import flash_decoding as decoding
from simkit.algorithms import fp8_kv_cache as kv_cache
from simkit.algorithms import naive_attention as naive
from simkit.algorithms.problem import (
    BF16,
    AttentionProblem,
    attention_flops,
    attention_reference,
)
from simkit.algorithms.tiles import tile_count
from simkit.cli.settings import Setting, Values
from simkit.errors import SimkitError
from simkit.layouts import fp8_record
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine
from simkit.machine.memory import unbacked
from simkit.schedules import tile_timeline
from traces.events import Trace

Array = NDArray[Any]
Units = Literal["tensor cores", "fp32 lanes"]

_LEAST_LENGTH = 64  # below it, a smaller problem would be another one: tails and nothing else


@dataclass(frozen=True)
class LaunchShape:
    """One kernel launch: CTAs, threads of a CTA, and its shared memory in bytes (all of it)."""

    kernel: str
    ctas: int
    threads: int
    shared_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Workload:
    """A problem with what there is to know of it before it runs.

    ``data``: an AttentionProblem, or kv [tokens, 576]. ``splits``: of Flash-Decoding.
    """

    data: Any
    splits: int = 1


@dataclass(frozen=True, eq=False)
class ModelRun:
    """Outputs by tensor name, and the machines with the traffic of each part."""

    outputs: Mapping[str, Array]
    machines: tuple[Machine, ...]


@dataclass(frozen=True, eq=False)
class Subject:
    """An algorithm as ``run`` and ``trace`` see it.

    ``workload(values, seed)``: inputs, or with seed None a workload that takes no memory.
    ``multiplications``: how many multiply-adds device arithmetic emulates. ``smaller``: settings
    with about half the work, the same ones when there is no less. ``units``: what multiplies.
    ``comparison``: whether naive attention solves the same problem.
    """

    name: str
    settings: tuple[Setting, ...]
    workload: Callable[[Values, int | None], Workload]
    model: Callable[[Callable[[], Machine], Workload], ModelRun]
    kernel: Callable[[Device, Workload], KernelResult]
    build: Callable[[Device, Workload], Module]
    reference: Callable[[Workload], Mapping[str, Array]]
    flops: Callable[[Workload], int]
    multiplications: Callable[[Workload], int]
    smaller: Callable[[Values], Values]
    launches: Callable[[Workload], tuple[LaunchShape, ...]]
    trace: Callable[[Gpu, Workload], Trace]
    units: Units
    comparison: bool = True


def subject(name: str) -> Subject:
    """The subject of that name; SimkitError that lists the names otherwise."""
    if name not in SUBJECTS:
        raise SimkitError(f"no algorithm {name!r}; there are {', '.join(SUBJECTS)}")
    return SUBJECTS[name]


def _problem(values: Values, seed: int | None) -> AttentionProblem:
    sizes: dict[str, Any] = {name: values[name] for name in ("batch", "kv_len", "heads", "d")}
    sizes |= {"q_len": values.get("q_len", 1), "kv_heads": values["kv_heads"]}
    sizes |= {"causal": bool(values.get("causal", False))}
    if seed is None:
        return AttentionProblem.sized(**sizes)
    return AttentionProblem.random(np.random.default_rng(seed), **sizes)


def _attention_workload(values: Values, seed: int | None) -> Workload:
    return Workload(_problem(values, seed), values.get("splits", 1))


def _cache_workload(values: Values, seed: int | None) -> Workload:
    shape = (values["tokens"], fp8_record.TOKEN_VALUES)
    if seed is None:
        return Workload(unbacked(shape, BF16))
    return Workload(np.random.default_rng(seed).standard_normal(shape).astype(BF16))


def _naive_model(new_machine: Callable[[], Machine], work: Workload) -> ModelRun:
    machine = new_machine()
    return ModelRun({"o": naive.naive_attention(machine, work.data).o}, (machine,))


def _flash_model(new_machine: Callable[[], Machine], work: Workload) -> ModelRun:
    machine = new_machine()
    result = flash.flash_attention(machine, work.data)
    return ModelRun({"o": result.o, "lse": result.lse}, (machine,))


def _decoding_model(new_machine: Callable[[], Machine], work: Workload) -> ModelRun:
    machine = new_machine()
    result = decoding.flash_decoding(machine, work.data, work.splits)
    return ModelRun({"o": result.o, "lse": result.lse}, (machine,))


def _cache_model(new_machine: Callable[[], Machine], work: Workload) -> ModelRun:
    write, read = new_machine(), new_machine()
    cache = kv_cache.fp8_kv_quantize(write, work.data).cache
    if not write.computes:
        cache = unbacked(cache.shape, cache.dtype)
    out = kv_cache.fp8_kv_dequantize(read, cache).out
    return ModelRun({"out": out}, (write, read))


def _naive_kernel(device: Device, work: Workload) -> KernelResult:
    p = work.data
    return naive_host.naive_attention(device, p.q, p.k, p.v, causal=p.causal)


def _flash_kernel(device: Device, work: Workload) -> KernelResult:
    p = work.data
    return flash_host.flash_attention(device, p.q, p.k, p.v, causal=p.causal)


def _decoding_kernel(device: Device, work: Workload) -> KernelResult:
    p = work.data
    return decoding_host.flash_decoding(device, p.q[:, 0], p.k, p.v, work.splits)


def _cache_kernel(device: Device, work: Workload) -> KernelResult:
    written = kv_cache_host.fp8_kv_quantize(device, work.data)
    read = kv_cache_host.fp8_kv_dequantize(device, written.outputs["cache"])
    return KernelResult(written.outputs | read.outputs, [*written.reports, *read.reports])


def _attention_reference(work: Workload) -> Mapping[str, Array]:
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


def _smaller_attention(values: Values) -> Values:
    """Half the longer length; then one sequence; then one K/V head with its group."""
    lengths = [name for name in ("q_len", "kv_len") if values.get(name, 0) > _LEAST_LENGTH]
    if lengths:
        longest = max(lengths, key=lambda name: values[name])
        changed = {**values, longest: max(values[longest] // 2, _LEAST_LENGTH)}
        if "splits" in values:
            changed["splits"] = min(changed["splits"], tile_count(changed["kv_len"], 64))
        return changed
    if values["batch"] > 1:
        return {**values, "batch": 1}
    return {**values, "heads": values["heads"] // values["kv_heads"], "kv_heads": 1}


def _smaller_cache(values: Values) -> Values:
    return {**values, "tokens": max(values["tokens"] // 2, 1)}


def _naive_launches(work: Workload) -> tuple[LaunchShape, ...]:
    p = work.data
    row_tiles, key_tiles = tile_count(p.q_len, naive.TILE), tile_count(p.kv_len, naive.TILE)
    heads, threads = p.batch * p.heads, naive.THREADS
    rows = tile_count(heads * p.q_len, naive.ROWS_PER_CTA)
    first = (
        LaunchShape(
            "naive_scores", key_tiles * row_tiles * heads, threads, naive.scores_shared_bytes(p.d)
        ),
        LaunchShape("naive_softmax", rows, threads),
    )
    last = LaunchShape("naive_output", row_tiles * heads, threads, naive.output_shared_bytes(p.d))
    return (*(first if p.kv_len else ()), last)


def _flash_launches(work: Workload) -> tuple[LaunchShape, ...]:
    p, tile = work.data, flash.Tile()
    ctas = tile_count(p.q_len, tile.q) * p.heads * p.batch
    return (LaunchShape("flash_attention", ctas, flash.THREADS, tile.shared_bytes(p.d)),)


def _decoding_launches(work: Workload) -> tuple[LaunchShape, ...]:
    p = work.data
    shared = decoding.split_shared_bytes(p)
    ctas = work.splits * p.kv_heads * p.batch
    return (
        LaunchShape("flash_decoding_split", ctas, decoding.THREADS, shared),
        LaunchShape("flash_decoding_combine", p.heads * p.batch, p.d),
    )


def _cache_launches(work: Workload) -> tuple[LaunchShape, ...]:
    ctas = tile_count(len(work.data), kv_cache.TOKENS_PER_CTA)
    names = ("fp8_kv_quantize", "fp8_kv_dequantize")
    return tuple(LaunchShape(name, ctas, kv_cache.THREADS) for name in names)


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
    Setting("causal", False, "mask keys after the query", is_flag=True),
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

SUBJECTS: dict[str, Subject] = {
    row.name: row
    for row in (
        Subject(
            name="naive_attention",
            settings=_PREFILL,
            workload=_attention_workload,
            model=_naive_model,
            kernel=_naive_kernel,
            build=lambda device, work: naive_host.build(device, work.data.d),
            reference=_attention_reference,
            flops=lambda work: attention_flops(work.data),
            multiplications=_all_multiplications,
            smaller=_smaller_attention,
            launches=_naive_launches,
            trace=lambda gpu, work: tile_timeline.naive_attention(gpu, work.data),
            units="fp32 lanes",
            comparison=False,
        ),
        Subject(
            name="flash_attention",
            settings=_PREFILL,
            workload=_attention_workload,
            model=_flash_model,
            kernel=_flash_kernel,
            build=lambda device, work: flash_host.build(device, work.data.d),
            reference=_attention_reference,
            flops=lambda work: attention_flops(work.data),
            multiplications=_pair_multiplications,
            smaller=_smaller_attention,
            launches=_flash_launches,
            trace=lambda gpu, work: tile_timeline.flash_attention(gpu, work.data),
            units="tensor cores",
        ),
        Subject(
            name="flash_decoding",
            settings=_DECODE,
            workload=_attention_workload,
            model=_decoding_model,
            kernel=_decoding_kernel,
            build=lambda device, work: decoding_host.build(device, work.data.d, work.data.group),
            reference=_decoding_reference,
            flops=lambda work: attention_flops(work.data),
            multiplications=_pair_multiplications,
            smaller=_smaller_attention,
            launches=_decoding_launches,
            trace=lambda gpu, work: tile_timeline.flash_decoding(gpu, work.data, work.splits),
            units="fp32 lanes",
        ),
        Subject(
            name="fp8_kv_cache",
            settings=(Setting("tokens", 1024, "tokens written and read"),),
            workload=_cache_workload,
            model=_cache_model,
            kernel=_cache_kernel,
            build=lambda device, work: kv_cache_host.build(device),
            reference=lambda work: {"out": work.data.astype(np.float64)},
            # A multiplication of each scaled value, on the way in and on the way out.
            flops=lambda work: 2 * len(work.data) * fp8_record.NOPE_VALUES,
            multiplications=lambda work: 2 * len(work.data) * fp8_record.NOPE_VALUES,
            smaller=_smaller_cache,
            launches=_cache_launches,
            trace=lambda gpu, work: tile_timeline.fp8_kv_cache(gpu, len(work.data)),
            units="fp32 lanes",
            comparison=False,
        ),
    )
}
