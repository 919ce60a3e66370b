"""Host side of kv_append.cu: new tokens' K and V into a paged cache, as they are or as FP8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gpu.counters import Report
from gpu.device import Device, Module
from gpu.kernels.build import build_module
from gpu.kernels.checks import BF16, check_tensor
from gpu.kernels.result import KernelResult
from simkit.errors import CompileError, DtypeError, LaunchError, ShapeError, TableError
from simkit.layouts.append import append_positions, append_slots
from simkit.layouts.block_sparse import BlockRows
from simkit.layouts.paged import Order, PagedCache
from simkit.layouts.ragged import Ragged
from simkit.layouts.tables import Table, check_indptr

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
F16 = np.dtype(np.float16)
TOKEN_DTYPES = (BF16, F16)
HEAD_DIMS = (64, 128, 192, 256)
THREADS = 128
TOKENS_PER_CTA = 4  # one for each warp
FIRST_FP8_ARCH = 89
_MOST = 2**31 - 1  # of tokens and of a request's keys: the kernel counts them as int


@dataclass(frozen=True)
class Build:
    """What the kernel is compiled for."""

    dk: int = 128
    dv: int = 128
    token_dtype: np.dtype[Any] = BF16
    cache_dtype: np.dtype[Any] = BF16
    order: Order = "NHD"
    table_dtype: np.dtype[Any] = np.dtype(np.int32)  # noqa: RUF009  # immutable

    @classmethod
    def of(
        cls, k_new: NDArray[Any], k_cache: PagedCache, v_cache: PagedCache, rows: BlockRows
    ) -> Build:
        """For these tensors and tables."""
        cache_dtype = k_cache.values.dtype
        return cls(k_cache.d, v_cache.d, k_new.dtype, cache_dtype, k_cache.order, rows.dtype)

    @property
    def options(self) -> tuple[str, ...]:
        flags = (
            ("-DELEMENT_FP16", self.token_dtype == F16),
            ("-DCACHE_E4M3", self.cache_dtype == E4M3),
            ("-DKV_HND", self.order == "HND"),
            ("-DINDEX_64", self.table_dtype == np.int64),
        )
        return (
            f"-DHEAD_DIM_K={self.dk}",
            f"-DHEAD_DIM_V={self.dv}",
            *(flag for flag, wanted in flags if wanted),
        )


def build(device: Device, choice: Build, *, source: str | None = None) -> Module:
    """kv_append.cu; ``CompileError`` for FP8 on a device before sm_89, which has no conversions."""
    arch = int(device.arch.removeprefix("sm_").rstrip("af"))
    if choice.cache_dtype == E4M3 and arch < FIRST_FP8_ARCH:
        raise CompileError(
            f"kv_append.cu needs sm_{FIRST_FP8_ARCH} or later for FP8 conversions; "
            f"the device is {device.arch}"
        )
    return build_module(device, "kv_append", choice.options, source)


def kv_append(
    device: Device,
    k_new: NDArray[Any],
    v_new: NDArray[Any],
    append_indptr: Table,
    rows: BlockRows,
    k_cache: PagedCache,
    v_cache: PagedCache,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    source: str | None = None,
) -> KernelResult:
    """The caches, ``k_cache`` and ``v_cache``, with the new tokens in them.

    ``k_new`` [tokens, heads, dk], ``v_new`` [tokens, heads, dv]: bfloat16 or float16, ragged by
    ``append_indptr`` [batch + 1]. ``rows``: the pages of each request and its length after the
    append; token i of a request goes to position kv_len - appended + i. Caches of float8_e4m3fn
    hold the codes of x * (1 / scale), the reciprocal and the product rounded to float32; others
    have the new tokens' type and no scale. Without tokens nothing is launched.

    Raises ``DtypeError``, ``ShapeError``, ``LaunchError`` for a scale, and ``TableError`` for
    tables that do not describe where tokens go, or let two tokens lie in one slot.
    """
    _check(k_new, v_new, k_cache, v_cache)
    for cache in (k_cache, v_cache):
        cache.check_rows(rows)
    check_indptr("append_indptr", append_indptr, total=len(k_new))
    append = Ragged(append_indptr)
    append_slots(rows, append)
    inverse_scales = (
        inverse_scale("k_scale", k_scale, k_cache.values.dtype),
        inverse_scale("v_scale", v_scale, k_cache.values.dtype),
    )
    k, v = (
        device.array(np.ascontiguousarray(cache.values), name=name)
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache))
    )
    choice = Build.of(k_new, k_cache, v_cache, rows)
    reports = []
    if append.total:
        reports.append(
            launch(device, choice, k_new, v_new, append, rows, k, v, inverse_scales, source)
        )
    return KernelResult({"k_cache": k.to_numpy(), "v_cache": v.to_numpy()}, reports)


def launch(
    device: Device,
    choice: Build,
    k_new: NDArray[Any],
    v_new: NDArray[Any],
    append: Ragged,
    rows: BlockRows,
    k_cache: object,
    v_cache: object,
    inverse_scales: tuple[np.float32, np.float32] = (np.float32(1), np.float32(1)),
    source: str | None = None,
) -> Report:
    """The launch alone, into caches on the device: arrays, or their addresses as ints."""
    batch_indices, positions = batch_indices_positions(append, rows)
    tokens, heads = k_new.shape[:2]
    return (
        build(device, choice, source=source)
        .kernel("kv_append")
        .launch(
            grid=(-(-tokens // TOKENS_PER_CTA), 1, 1),
            block=(THREADS, 1, 1),
            args=[
                device.array(k_new, name="k_new"),
                device.array(v_new, name="v_new"),
                device.array(batch_indices, name="batch_indices"),
                device.array(positions, name="positions"),
                device.array(rows.indptr, name="indptr"),
                device.array(rows.indices, name="indices"),
                k_cache,
                v_cache,
                tokens,
                heads,
                rows.block_size,
                *inverse_scales,
            ],
        )
    )


def batch_indices_positions(
    append: Ragged, rows: BlockRows
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Request of each appended token and its position there, int32 [tokens] each.

    ``TableError`` for a request of more than 2^31 - 1 keys.
    """
    if rows.kv_lens.max(initial=0) > _MOST:
        raise TableError(f"a request has {rows.kv_lens.max()} keys; the kernel counts to {_MOST}")
    positions = append_positions(rows, append)
    return append.requests().astype(np.int32), positions.astype(np.int32)


def inverse_scale(name: str, scale: float, cache_dtype: np.dtype[Any]) -> np.float32:
    """1 / ``scale``, rounded to float32, as the kernel takes it.

    ``LaunchError`` unless both are normal numbers, and 1 for a cache that is no FP8.
    """
    if cache_dtype != E4M3 and scale != 1:
        raise LaunchError(f"{name} is {scale}; a cache of {cache_dtype} takes no scale")
    smallest = np.finfo(np.float32).smallest_normal
    with np.errstate(all="ignore"):
        value = np.float32(scale)
        inverse = np.float32(1) / value
    if not (smallest <= value < np.inf and smallest <= inverse < np.inf):
        raise LaunchError(f"{name} is {scale}; it and 1 / {name} must be normal, positive float32")
    return np.float32(inverse)


def _check(
    k_new: NDArray[Any], v_new: NDArray[Any], k_cache: PagedCache, v_cache: PagedCache
) -> None:
    if k_new.dtype not in TOKEN_DTYPES:
        raise DtypeError(f"k_new is {k_new.dtype}; the kernel takes bfloat16 and float16")
    if k_cache.values.dtype not in (k_new.dtype, E4M3):
        raise DtypeError(
            f"k_cache is {k_cache.values.dtype}; new tokens of {k_new.dtype} go to "
            f"{k_new.dtype} or {E4M3}"
        )
    if v_cache.values.dtype != k_cache.values.dtype:
        raise DtypeError(f"v_cache is {v_cache.values.dtype}, k_cache {k_cache.values.dtype}")
    check_tensor("k_new", k_new, k_new.dtype, ("tokens", k_cache.heads, k_cache.d))
    check_tensor("v_new", v_new, k_new.dtype, (len(k_new), k_cache.heads, v_cache.d))
    if v_cache.heads != k_cache.heads or not k_cache.heads:
        raise ShapeError(f"v_cache has {v_cache.heads} heads, k_cache {k_cache.heads}")
    if v_cache.order != k_cache.order:
        raise ShapeError(f"v_cache is {v_cache.order}, k_cache is {k_cache.order}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.d not in HEAD_DIMS:
            raise ShapeError(f"{name} has {cache.d} values a head; the kernel takes {HEAD_DIMS}")
    if len(k_new) > _MOST:
        raise ShapeError(f"{len(k_new)} tokens; the kernel counts to {_MOST}")
