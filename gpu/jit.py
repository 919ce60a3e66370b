"""Kernels of batched attention, compiled for one configuration: types, tile, layout, variant.

A configuration is a few words, its `key`; what differs between requests (lengths, tables, window,
caps, slopes) are arguments. A user's own variant is CUDA C++ text that is compiled into the kernel
(`simkit.algorithms.variant.UserVariant`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from gpu.device import Device, Module
from gpu.kernels.build import build_module, kernel_source
from simkit.algorithms.batch_attention import Units, check_plan
from simkit.algorithms.batch_problem import HEAD_DIMS, BatchProblem
from simkit.algorithms.elements import E4M3, F16
from simkit.algorithms.variant import UserVariant
from simkit.errors import ShapeError
from simkit.layouts.block_sparse import BlockRows
from simkit.planning.plan import Plan

_VARIANTS = ("causal", "window", "custom_mask", "soft_cap", "alibi", "sink", "rope")


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What a kernel is compiled for.

    ``kernel``: name of its file. ``tile_q``: packed query rows of a tile. ``element``: "bf16" or
    "f16"; ``kv``: that, or "e4m3". ``order``: of pages, "NHD" or "HND". ``index_bits``: of the
    tables. ``user``: name of the user's variant and a digest of its text, or "". Errors:
    `ShapeError`.
    """

    kernel: str
    head_dim: int
    head_dim_v: int
    tile_q: int
    units: Units = "tensor_cores"
    element: str = "bf16"
    kv: str = "bf16"
    order: str = "NHD"
    index_bits: int = 32
    causal: bool = False
    window: bool = False
    custom_mask: bool = False
    soft_cap: bool = False
    alibi: bool = False
    sink: bool = False
    rope: bool = False
    user: str = ""

    def __post_init__(self) -> None:
        for name, value in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if value not in HEAD_DIMS:
                raise ShapeError(f"{name} is {value}; the kernels are built for {HEAD_DIMS}")

    @classmethod
    def of(
        cls, kernel: str, problem: BatchProblem, plan: Plan, units: Units = "tensor_cores"
    ) -> Configuration:
        """What ``kernel`` needs for a problem and its plan. `TableError` for a plan of another
        batch.
        """
        check_plan(problem, plan, units)
        variant, element = problem.variant, "f16" if problem.q.dtype == F16 else "bf16"
        tables = [problem.queries.indptr, problem.keys.indptr]
        return cls(
            kernel=kernel,
            head_dim=problem.d,
            head_dim_v=problem.dv,
            tile_q=plan.tile_q,
            units=units,
            element=element,
            kv="e4m3" if problem.k.dtype == E4M3 else element,
            order=problem.order if isinstance(problem.keys, BlockRows) else "NHD",
            index_bits=64 if any(t.dtype == np.int64 for t in tables) else 32,
            causal=variant.causal,
            window=variant.window_left >= 0,
            custom_mask=variant.custom_mask is not None,
            soft_cap=variant.soft_cap > 0,
            alibi=variant.alibi_slopes is not None,
            sink=variant.sinks is not None,
            rope=variant.rope is not None,
            user="" if variant.user is None else _identity(variant.user),
        )

    @property
    def key(self) -> str:
        """The configuration in words, such as ``batch_decode-d128-q16-bf16-kv_e4m3-causal``."""
        dims = f"d{self.head_dim}" + (
            f"v{self.head_dim_v}" if self.head_dim_v != self.head_dim else ""
        )
        words = [self.kernel, dims, f"q{self.tile_q}", self.element]
        words += [f"kv_{self.kv}"] if self.kv != self.element else []
        words += ["cuda_cores"] if self.units == "cuda_cores" else []
        words += ["hnd"] if self.order == "HND" else []
        words += ["i64"] if self.index_bits == 64 else []
        words += [name for name in _VARIANTS if getattr(self, name)]
        words += [f"user_{self.user}"] if self.user else []
        return "-".join(words)

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's, beside those for exact bits."""
        flags = {
            "CUDA_CORES=1": self.units == "cuda_cores",
            "ELEMENT_FP16": self.element == "f16",
            "KV_E4M3": self.kv == "e4m3",
            "KV_HND": self.order == "HND",
            "INDEX_64": self.index_bits == 64,
            "USER_VARIANT=1": bool(self.user),
        } | {f"{name.upper()}=1": getattr(self, name) for name in _VARIANTS}
        sizes = {"HEAD_DIM": self.head_dim, "HEAD_DIM_V": self.head_dim_v, "TILE_Q": self.tile_q}
        return (
            *(f"-D{name}={value}" for name, value in sizes.items()),
            *(f"-D{name}" for name, is_set in flags.items() if is_set),
        )


def build(
    device: Device,
    configuration: Configuration,
    *,
    user: UserVariant | None = None,
    source: str | None = None,
) -> Module:
    """The configuration's module, compiled once for each device.

    ``source`` replaces the kernel's text. `CompileError` with the compiler's log, in which lines of
    the user's variant are those of ``<variant name>``.
    """
    text = source
    if user is not None:
        kernel = kernel_source(configuration.kernel) if source is None else source
        text = with_user_variant(kernel, user, configuration.kernel)
    return build_module(device, configuration.kernel, configuration.options, text)


def with_user_variant(kernel: str, user: UserVariant, name: str) -> str:
    """A kernel's text behind the user's functor, whose lines keep their numbers."""
    return (
        '#include "place.cuh"\n'
        "struct UserVariant : VariantHooks {\n"
        f'#line 1 "{user.name}"\n{user.cuda}\n'
        "};\n"
        f'#line 1 "{name}.cu"\n{kernel}'
    )


def _identity(user: UserVariant) -> str:
    """The name, and what tells texts of one name apart."""
    return f"{user.name}.{hashlib.sha256(user.cuda.encode()).hexdigest()[:8]}"
