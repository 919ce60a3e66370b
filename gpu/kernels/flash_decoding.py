"""Host side of flash_decoding.cu: attention of one query per sequence, split over the keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.device import Device, Module
from gpu.kernels.build import build_module
from gpu.kernels.checks import (
    BF16,
    AttentionSizes,
    attention_sizes,
    check_tensor,
    scale_to_base_2,
    softmax_scale,
)
from gpu.kernels.result import KernelResult
from simkit.errors import ShapeError

THREADS = 128
KEY_TILE = 64
MAX_GROUP = 16


def build(device: Device, head_dim: int, group: int, *, source: str | None = None) -> Module:
    """flash_decoding.cu for one head dimension and heads per K/V head."""
    options = (f"-DHEAD_DIM={head_dim}", f"-DGROUP={group}")
    return build_module(device, "flash_decoding", options, source)


def tile_bytes(head_dim: int) -> int:
    """Dynamic shared memory of a split's CTA: two tiles each of K and V, in bfloat16."""
    return 4 * KEY_TILE * head_dim * BF16.itemsize


def max_splits(kv_len: int) -> int:
    """The most CTAs that the keys of a sequence can be split over: one for each tile."""
    return max(1, -(-kv_len // KEY_TILE))


def flash_decoding(
    device: Device,
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    splits: int,
    *,
    scale: float | None = None,
    source: str | None = None,
) -> KernelResult:
    """softmax(scale * q k^T) v for one query a sequence: a launch over splits, then a merge.

    ``q`` [batch, heads, d], ``k`` and ``v`` [batch, kv_len, kv_heads, d], bfloat16, d 64 or 128, at
    most 16 heads for each K/V head. ``splits`` is 1 to ``max_splits(kv_len)``; each takes the same
    number of 64-key tiles, so the last ones may get none. ``source`` replaces the kernels' text.

    Outputs: ``o`` like q; ``lse`` [batch, heads] float32, natural logarithm, -inf (and o = 0)
    without keys; and the partial results in float32: ``m_partial`` (base 2, scaled) and
    ``l_partial`` [splits, batch, heads], ``o_partial`` [splits, batch, heads, d], un-normalised and
    unspecified where l_partial is 0. Raises ``DtypeError``, ``ShapeError``, ``LaunchError``.
    """
    sizes = _sizes(q, k, v, splits)
    scale_log2 = scale_to_base_2(softmax_scale(scale, sizes.head_dim))
    module = build(device, sizes.head_dim, sizes.group, source=source)
    rows = (splits, sizes.batch, sizes.heads)
    m_partial = device.empty(rows, np.float32, name="m_partial")
    l_partial = device.empty(rows, np.float32, name="l_partial")
    o_partial = device.empty((*rows, sizes.head_dim), np.float32, name="o_partial")
    o = device.empty(q.shape, BF16, name="o")
    lse = device.empty(rows[1:], np.float32, name="lse")

    inputs = [device.array(array, name=name) for name, array in (("q", q), ("k", k), ("v", v))]
    partials = [m_partial, l_partial, o_partial]
    split_report = module.kernel("flash_decoding_split").launch(
        grid=(splits, sizes.kv_heads, sizes.batch),
        block=(THREADS, 1, 1),
        args=[*inputs, *partials, sizes.kv_len, scale_log2],
        shared_bytes=tile_bytes(sizes.head_dim),
    )
    combine_report = module.kernel("flash_decoding_combine").launch(
        grid=(sizes.heads, sizes.batch, 1),
        block=(sizes.head_dim, 1, 1),
        args=[*partials, o, lse, splits],
    )
    outputs = {
        "o": o.to_numpy(),
        "lse": lse.to_numpy(),
        "m_partial": m_partial.to_numpy(),
        "l_partial": l_partial.to_numpy(),
        "o_partial": o_partial.to_numpy(),
    }
    return KernelResult(outputs, [split_report, combine_report])


def _sizes(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], splits: int) -> AttentionSizes:
    check_tensor("q", q, BF16, ("batch", "heads", "head_dim"))
    sizes = attention_sizes(q[:, np.newaxis], k, v)
    if sizes.group > MAX_GROUP:
        raise ShapeError(
            f"{sizes.heads} heads over {sizes.kv_heads} K/V heads are {sizes.group} each; "
            f"the kernel takes at most {MAX_GROUP}"
        )
    if not 1 <= splits <= max_splits(sizes.kv_len):
        raise ShapeError(
            f"splits is {splits}; kv_len {sizes.kv_len}, in tiles of {KEY_TILE} keys, can be split "
            f"1 to {max_splits(sizes.kv_len)} ways"
        )
    return sizes
