"""Tiles of Q, K and V, rearranged so that the heads that share K and V stand together.

The rows of a group's heads are stacked into one matrix, head by head: they multiply the same K
and V. All functions keep the dtype.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from simkit.numerics.arrays import Float32Array
from simkit.numerics.formats import decode_bf16, encode_bf16

Array = NDArray[Any]


def stack_queries(tile: Array, kv_heads: int) -> Array:
    """[batch, rows, heads, d] to [batch, kv_heads, group * rows, d]."""
    batch, rows, heads, d = tile.shape
    grouped = tile.reshape(batch, rows, kv_heads, heads // kv_heads, d)
    return np.ascontiguousarray(grouped.transpose(0, 2, 3, 1, 4)).reshape(batch, kv_heads, -1, d)


def unstack_outputs(stacked: Array, rows: int) -> Array:
    """[batch, kv_heads, group * rows, d] to [batch, rows, heads, d]."""
    batch, _, _, d = stacked.shape
    by_head = stacked.reshape(batch, -1, rows, d)
    return np.ascontiguousarray(by_head.transpose(0, 2, 1, 3))


def unstack_rows(stacked: Array, rows: int) -> Array:
    """[batch, kv_heads, group * rows] to [batch, heads, rows]."""
    return stacked.reshape(stacked.shape[0], -1, rows)


def heads_first(tile: Array) -> Array:
    """K or V [batch, keys, kv_heads, d] to [batch, kv_heads, keys, d]."""
    return np.ascontiguousarray(tile.transpose(0, 2, 1, 3))


def fill_tile(values: Array, axis: int, size: int) -> Array:
    """``values`` with zeros after them, up to ``size`` along ``axis``, as in shared memory."""
    widths = [(0, 0)] * values.ndim
    widths[axis] = (0, size - values.shape[axis])
    return np.pad(values, widths) if size > values.shape[axis] else values


def stack_mask(mask: NDArray[np.bool_], group: int) -> NDArray[np.bool_]:
    """[rows, keys] to [group * rows, keys]: all heads have the same mask."""
    return np.tile(mask, (group, 1))


def to_float32(values: Array) -> Float32Array:
    """float32 of bfloat16 values; exact."""
    return decode_bf16(values.view(np.uint16))


def to_bf16(values: Float32Array) -> Array:
    """bfloat16 of float32 values, rounded to nearest even (``cvt.rn.bf16.f32``)."""
    return encode_bf16(values).view(ml_dtypes.bfloat16)
