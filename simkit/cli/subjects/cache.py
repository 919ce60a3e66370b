"""Writing to K/V caches: FP8 records of MLA, and tokens appended to pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from gpu.device import Device
from gpu.kernels import fp8_kv_cache as kv_cache_host
from gpu.kernels import kv_append as append_host
from gpu.kernels.result import KernelResult
from simkit.algorithms import fp8_kv_cache as kv_cache
from simkit.algorithms import kv_append as append
from simkit.algorithms.problem import BF16
from simkit.algorithms.tiles import tile_count
from simkit.cli.settings import Setting, Values, by_request
from simkit.cli.subjects.requests import (
    HND,
    PAGE_SIZE,
    Draw,
    cache_shape,
    fewer,
    length_setting,
    page_order,
    pages,
    shorter,
)
from simkit.cli.subjects.subject import (
    Array,
    LaunchShape,
    ModelRun,
    Subject,
    Workload,
    not_attention,
    on_fp32_lanes,
    on_one_machine,
)
from simkit.layouts import fp8_record
from simkit.layouts.paged import PagedCache
from simkit.layouts.ragged import Ragged
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine
from simkit.machine.memory import unbacked
from simkit.schedules import append_timeline, tile_timeline

# FP8 records


def _record_workload(gpu: Gpu, values: Values, seed: int | None) -> Workload:
    return Workload(Draw(seed)((values["tokens"], fp8_record.TOKEN_VALUES)))


def _record_model(new_machine: Callable[[], Machine], work: Workload) -> ModelRun:
    write, read = new_machine(), new_machine()
    cache = kv_cache.fp8_kv_quantize(write, work.data).cache
    if not write.computes:
        cache = unbacked(cache.shape, cache.dtype)
    out = kv_cache.fp8_kv_dequantize(read, cache).out
    return ModelRun({"out": out}, (write, read))


def _record_kernel(device: Device, work: Workload) -> KernelResult:
    written = kv_cache_host.fp8_kv_quantize(device, work.data)
    read = kv_cache_host.fp8_kv_dequantize(device, written.outputs["cache"])
    return KernelResult(written.outputs | read.outputs, [*written.reports, *read.reports])


def _record_launches(work: Workload) -> tuple[LaunchShape, ...]:
    ctas = tile_count(len(work.data), kv_cache.TOKENS_PER_CTA)
    names = ("fp8_kv_quantize", "fp8_kv_dequantize")
    return tuple(LaunchShape(name, ctas, kv_cache.THREADS, kv_cache_host.build) for name in names)


def _record_multiplications(work: Workload) -> int:
    """One of each scaled value, on the way in and on the way out."""
    return 2 * len(work.data) * fp8_record.NOPE_VALUES


# Appending


def _append_workload(gpu: Gpu, values: Values, seed: int | None) -> Workload:
    appended, before = by_request(values, "append", "kv_len")
    rows, _ = pages(values, before + appended)
    draw, empty = Draw(seed), unbacked if seed is None else np.zeros
    new = (int(appended.sum()), values["kv_heads"], values["d"])
    cache = cache_shape(values, rows, values["d"]), append.E4M3 if values["fp8"] else BF16
    k, v = (PagedCache(empty(*cache), page_order(values)) for _ in "kv")
    indptr = Ragged.from_lengths(appended).indptr
    return Workload(append.AppendProblem(draw(new, 1), draw(new, 2), indptr, rows, k, v))


def _appended(p: append.AppendProblem, k: Array, v: Array) -> Mapping[str, Array]:
    """What the caches hold of the new tokens."""
    page, offset = np.divmod(p.slots, p.rows.block_size)
    caches = (PagedCache(values, p.k_cache.order) for values in (k, v))
    return {name: cache.by_slot[page, offset] for name, cache in zip("kv", caches, strict=True)}


def _append_model(machine: Machine, work: Workload) -> Mapping[str, Array]:
    result = append.kv_append(machine, work.data)
    return _appended(work.data, result.k_cache.values, result.v_cache.values)


def _append_kernel(device: Device, work: Workload) -> KernelResult:
    p = work.data
    result = append_host.kv_append(
        device, p.k_new, p.v_new, p.append_indptr, p.rows, p.k_cache, p.v_cache
    )
    caches = (result.outputs["k_cache"], result.outputs["v_cache"])
    return KernelResult(dict(_appended(p, *caches)), result.reports)


def _append_reference(work: Workload) -> Mapping[str, Array]:
    return {"k": work.data.k_new, "v": work.data.v_new}


def _append_launches(work: Workload) -> tuple[LaunchShape, ...]:
    p = work.data
    choice = append_host.Build.of(p.k_new, p.k_cache, p.v_cache, p.rows)
    ctas = tile_count(p.tokens, append.TOKENS_PER_CTA)
    shape = LaunchShape(
        "kv_append", ctas, append.THREADS, lambda device: append_host.build(device, choice)
    )
    return (shape,) if ctas else ()


def _append_multiplications(work: Workload) -> int:
    """One of each value on its way to FP8; other caches hold copies."""
    p = work.data
    return int(p.k_new.size + p.v_new.size) if p.cache_dtype == append.E4M3 else 0


def _smaller_append(values: Values) -> Values:
    smaller = shorter(values, "append", "kv_len")
    return fewer(values, "append", "kv_len") if smaller == values else smaller


_APPEND = (
    length_setting("kv_len", 1024, "keys of each request before"),
    length_setting("append", 1, "tokens of each request"),
    Setting("batch", 16, "requests, where lengths are one number"),
    Setting("kv_heads", 8, "K/V heads"),
    Setting("d", 128, "head dimension, 64, 128, 192 or 256"),
    PAGE_SIZE,
    HND,
    Setting("fp8", False, "a cache of e4m3", kind="flag"),
)

CACHE_SUBJECTS = (
    Subject(
        name="fp8_kv_cache",
        settings=(Setting("tokens", 1024, "tokens written and read"),),
        workload=_record_workload,
        model=_record_model,
        kernel=_record_kernel,
        reference=lambda work: {"out": work.data.astype(np.float64)},
        flops=_record_multiplications,
        multiplications=_record_multiplications,
        smaller=lambda values: {**values, "tokens": max(values["tokens"] // 2, 1)},
        launches=_record_launches,
        trace=lambda gpu, work: tile_timeline.fp8_kv_cache(gpu, len(work.data)),
        units=on_fp32_lanes,
        beside=not_attention,
    ),
    Subject(
        name="kv_append",
        settings=_APPEND,
        workload=_append_workload,
        model=on_one_machine(_append_model),
        kernel=_append_kernel,
        reference=_append_reference,
        flops=_append_multiplications,
        multiplications=_append_multiplications,
        smaller=_smaller_append,
        launches=_append_launches,
        trace=lambda gpu, work: append_timeline.kv_append(gpu, work.data),
        units=on_fp32_lanes,
        beside=not_attention,
    ),
)
