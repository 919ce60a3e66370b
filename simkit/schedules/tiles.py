"""Tiles of keys that tiles of queries see, and how many of their bytes come from HBM."""

from __future__ import annotations

from collections.abc import Sequence

from simkit.errors import ShapeError
from simkit.machine.gpus import Gpu
from simkit.schedules.shape import AttentionShape


def kernel_dim(d: int, dims: Sequence[int]) -> int:
    """The least of a kernel's head dimensions, in rising order, that holds ``d`` values.
    `ShapeError` for more than the greatest.
    """
    for own in dims:
        if d <= own:
            return own
    raise ShapeError(f"the head dimension must be at most {dims[-1]}, got {d}")


def key_tiles(shape: AttentionShape, first_row: int, rows: int, keys: int) -> tuple[int, int]:
    """Tiles of ``keys`` that the rows see, and how many of them need a mask."""
    seen = shape.visible(first_row, rows)
    tiles = -(-seen // keys)
    if not shape.causal:
        return tiles, int(shape.kv_len % keys > 0)
    by_all = max(0, min(shape.kv_len, first_row + shape.kv_len - shape.q_len + 1))
    return tiles, tiles - by_all // keys


def missing_part(
    gpu: Gpu, shape: AttentionShape, lengths: Sequence[int], keys: int, *, shared_by: int = 1
) -> float:
    """Part of the transfers of K and V that L2 cannot serve, 0 to 1.

    ``lengths``: tiles of every item. ``shared_by``: CTAs that a transfer serves (multicast). CTAs
    that run at a time have neighbouring tiles and heads: if K and V of these fit in L2, each is
    fetched once. Otherwise those of a K/V head that run at a time go through K and V in step, so
    that each such wave fetches what its longest item reads.
    """
    tile_bytes = keys * (shape.d + shape.d_v) * shape.element
    transferred = sum(lengths) * tile_bytes / shared_by
    if not transferred:
        return 0.0
    kv_heads = shape.batch * shape.kv_heads
    per_head = shape.kv_bytes // kv_heads
    items_per_head = len(lengths) // kv_heads
    fetched = shape.kv_bytes
    if min(kv_heads, gpu.sm_count / items_per_head + 1) * per_head > gpu.l2_bytes:
        wave = min(items_per_head, gpu.sm_count)
        longest = sorted(lengths, reverse=True)[:: wave * kv_heads]
        fetched = max(fetched, kv_heads * sum(longest) * tile_bytes)
    return min(1.0, fetched / transferred)
