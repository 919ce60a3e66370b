"""Tiles of keys that tiles of queries see, and how many of their bytes come from HBM."""

from __future__ import annotations

from collections.abc import Sequence

from simkit.machine.gpus import Gpu
from simkit.schedules.shape import AttentionShape


def key_tiles(shape: AttentionShape, first_row: int, rows: int, keys: int) -> tuple[int, int]:
    """Tiles of ``keys`` that the rows see, and how many of them need a mask."""
    seen = shape.visible(first_row, rows)
    tiles = -(-seen // keys)
    if not shape.causal:
        return tiles, int(shape.kv_len % keys > 0)
    by_all = max(0, min(shape.kv_len, first_row + shape.kv_len - shape.q_len + 1))
    return tiles, tiles - by_all // keys


def missing_part(gpu: Gpu, shape: AttentionShape, lengths: Sequence[int], keys: int) -> float:
    """Part of the copies of K and V that L2 cannot serve, 0 to 1.

    ``lengths``: tiles of every item. CTAs that run at a time work on neighbouring heads: if K and V
    of these fit in L2, each is fetched once; otherwise once by the heads of a group, which go
    through them in step.
    """
    copied = sum(lengths) * keys * (shape.d + shape.d_v) * shape.element
    if not copied:
        return 0.0
    per_head = shape.kv_len * (shape.d + shape.d_v) * shape.element
    items_per_head = len(lengths) / (shape.batch * shape.kv_heads)
    at_a_time = min(shape.batch * shape.kv_heads, gpu.sm_count / items_per_head + 1)
    if at_a_time * per_head > gpu.l2_bytes:
        return 1 / shape.group
    return min(1.0, shape.kv_bytes / copied)
