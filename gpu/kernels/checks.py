"""Checks of kernel arguments: a refusal names the tensor, its value and what is supported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from simkit.errors import DtypeError, LaunchError, ShapeError
from simkit.numerics.exp2 import LOG2E

BF16 = np.dtype(ml_dtypes.bfloat16)
HEAD_DIMS = (64, 128)
"""Head dimensions that the attention kernels are built for."""


@dataclass(frozen=True)
class AttentionSizes:
    """The axes of an attention problem; ``group`` query heads share a K/V head."""

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


def check_tensor(
    name: str, array: NDArray[Any], dtype: DTypeLike, axes: Sequence[str | int]
) -> None:
    """The array has ``dtype`` and one axis for each of ``axes``; an integer is that axis's size."""
    if array.dtype != np.dtype(dtype):
        raise DtypeError(f"{name} is {array.dtype}; the kernel takes {np.dtype(dtype)}")
    fits = array.ndim == len(axes) and all(
        isinstance(axis, str) or axis == size for axis, size in zip(axes, array.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(map(str, axes))
        raise ShapeError(f"{name} has shape {array.shape}; the kernel takes [{wanted}]")


def attention_sizes(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> AttentionSizes:
    """Sizes of q [batch, q_len, heads, d] and k, v [batch, kv_len, kv_heads, d], all bfloat16.

    Raises ``DtypeError``, or ``ShapeError`` for shapes that do not fit together, for a head
    dimension without a build, for heads that K/V heads do not divide, and for empty axes other
    than ``kv_len``.
    """
    check_tensor("q", q, BF16, ("batch", "q_len", "heads", "head_dim"))
    batch, q_len, heads, head_dim = q.shape
    check_tensor("k", k, BF16, (batch, "kv_len", "kv_heads", head_dim))
    check_tensor("v", v, BF16, k.shape)
    kv_len, kv_heads = k.shape[1:3]
    if head_dim not in HEAD_DIMS:
        raise ShapeError(f"head_dim is {head_dim}; the kernels are built for {HEAD_DIMS}")
    if min(batch, q_len, heads, kv_heads) < 1:
        raise ShapeError(f"q has shape {q.shape}, k {k.shape}; only kv_len may be 0")
    if heads % kv_heads:
        raise ShapeError(f"q has {heads} heads, not a multiple of the {kv_heads} of k and v")
    return AttentionSizes(batch, q_len, kv_len, heads, kv_heads, head_dim)


def softmax_scale(scale: float | None, head_dim: int) -> np.float32:
    """``scale`` as the kernels take it, by default head_dim^-1/2.

    Raises ``LaunchError`` unless it is positive and finite: the row maximum of unscaled scores
    stands for that of scaled ones.
    """
    with np.errstate(all="ignore"):
        value = np.float32(head_dim**-0.5 if scale is None else scale)
        finite = math.isfinite(scale_to_base_2(value))
    if not (value > 0 and finite):
        raise LaunchError(f"scale is {scale}; scale * log2(e) must be positive, finite float32")
    return value


def scale_to_base_2(scale: np.float32) -> np.float32:
    """The factor from a score to a base-2 exponent, one float32 product: scale * log2(e)."""
    return np.float32(scale * LOG2E)
