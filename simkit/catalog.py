"""The table of everything that simkit implements: which file has the model, kernel, laws and trace.

References are strings, because the model imports neither the kernels nor the laws; the command
line resolves them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from simkit.errors import SimkitError

Kind = Literal["kernel", "study"]
"""kernel: a model proved against a CUDA kernel. study: a published experiment of numerics, redone
with the model alone."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One algorithm of the documents.

    ``section``: where a document describes it. ``model``, ``host``, ``trace``: "module:function" of
    the model, of the kernel's host side and of the schedule. ``kernel``: the CUDA C++ file,
    "package/file". ``laws``: module of the laws. A study has no kernel, host and trace.
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
)


def algorithm(name: str) -> Algorithm:
    """The row of that name; SimkitError that lists the names otherwise."""
    for row in ALGORITHMS:
        if row.name == name:
            return row
    names = ", ".join(row.name for row in ALGORITHMS)
    raise SimkitError(f"no algorithm {name!r} in the catalogue; it has {names}")
