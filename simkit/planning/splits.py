"""Into how many pieces FlashAttention splits the keys of a query tile, and which piece has which.

Sources: FlashAttention, csrc/flash_attn/flash_api.cpp (2), hopper/heuristics.h, tile_size.h and
flash_prepare_scheduler.cu (3), flash_attn/cute (4).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from simkit.errors import ShapeError
from simkit.layouts.tables import Int64Array, Table, check_range
from simkit.numerics.arrays import Float32Array
from simkit.planning.batch import MOST_LENGTH, ceil_div, check_sizes

MOST_SPLITS = 128
FULL = np.float32(0.8)
"""From this part of the slots on, the tiles are work enough without splitting."""
GOOD_ENOUGH = 0.85
"""Of the best efficiency. A float64, as the literal in the source is; efficiencies are float32."""
L2_BYTES = 50 * 2**20
"""What FlashAttention-3 takes the L2 to be, on any GPU."""
FEW_BLOCKS = 4
"""FlashAttention-3 and -4 never split so few blocks of keys."""
MOST_DYNAMIC_REQUESTS = 992
"""Of a batch for which FlashAttention-3 counts splits one request at a time."""
MARGIN = np.float32(1.1)
"""Blocks of an SM over the mean, so that rounding up does not make a second wave."""

FA2_BLOCK_M = 64
"""Rows of a tile of FlashAttention-2's split kernels."""
FA2_CTAS_PER_SM = 2


def fa2_block_n(d: int) -> int:
    """Keys of a block of FlashAttention-2's split kernels for head dimension ``d``."""
    return 256 if d <= 64 else 128 if d <= 128 else 64


def fa3_tile(
    d: int,
    *,
    d_v: int | None = None,
    causal: bool = False,
    local: bool = False,
    gather: bool = False,
) -> tuple[int, int]:
    """Rows and keys of a tile of FlashAttention-3 on Hopper, 16-bit inputs.

    ``d_v``: head dimension of V, ``d`` by default. ``local``: with a window. ``gather``: pages that
    TMA cannot fetch. `ShapeError` for a head dimension over 256.
    """
    d_v = d if d_v is None else d_v
    if d <= 64:
        if d_v > 64:
            return (64, 64) if d_v > 256 else (128, 96)
        return 192, 128 if causal or local or gather else 192
    if d <= 96:
        return 192, 128 if local or gather else 144
    if d <= 128:
        return 128, 128 if causal or local or gather else 176
    if d <= 192:
        return 128, 96 if local or gather else 128 if d_v <= 128 else 112
    if d <= 256:
        return 128, 64 if local else 80
    raise ShapeError(f"d is {d}; FlashAttention-3 has tiles up to 256")


def occupancy_units(batch: int, kv_heads: int, *, rows: int = 1, block_m: int = 1) -> int:
    """CTAs of a launch that splits no keys: tiles of ``block_m`` rows of every sequence and K/V
    head.

    ``rows``: queries of a sequence, times the heads of a group if those are packed.
    """
    return batch * kv_heads * ceil_div(rows, block_m)


def efficiencies(units: int, slots: int, most: int) -> Float32Array:
    """Busy part of all waves with 1 to ``most`` splits of each of ``units`` tiles, float32 [most].

    ``slots``: CTAs that run at a time.
    """
    waves = (units * np.arange(1, most + 1)).astype(np.float32) / np.float32(slots)
    return waves / np.ceil(waves)


def eligible(blocks: int, most: int) -> NDArray[np.bool_]:
    """Whether 1 to ``most`` splits cut ``blocks`` differently than one split less, bool [most]."""
    splits = np.arange(1, most + 1)
    return (splits == 1) | (ceil_div(blocks, splits) != ceil_div(blocks, np.maximum(splits - 1, 1)))


def fa2_splits(units: int, slots: int, blocks: int, *, cap: int = MOST_SPLITS) -> int:
    """FlashAttention-2's number of splits: the fewest that keep the GPU nearly as busy as can be.

    ``units``: tiles of all heads and sequences. ``slots``: CTAs that run at a time, two for each
    SM. ``blocks``: of the longest sequence's keys. The answer is at most ``cap``, ``slots`` and
    ``blocks``. `ShapeError` for a size below 1.
    """
    check_sizes(units=units, slots=slots, cap=cap)
    check_sizes(0, blocks=blocks)
    if _fills(units, slots) or not blocks:
        return 1
    most = min(cap, slots, blocks)
    return _fewest_good(np.where(eligible(blocks, most), efficiencies(units, slots, most), 0))


def fa3_splits(
    units: int,
    sm_count: int,
    blocks: int,
    *,
    m_blocks: int = 1,
    head_bytes: int = 0,
    masked: bool = False,
    cap: int = MOST_SPLITS,
) -> int:
    """FlashAttention-3's number of splits, where any number cuts differently enough.

    ``units``: tiles of all K/V heads and sequences, of which ``m_blocks`` share a K/V head.
    ``head_bytes``: K and V of one head, which are split if they exceed the L2, are read often
    enough and ``masked`` (causal or local) is not set. `ShapeError` for a size below 1.
    """
    check_sizes(units=units, sm_count=sm_count, m_blocks=m_blocks, cap=cap)
    check_sizes(0, blocks=blocks)
    if _fills(units, sm_count):
        is_worth_it = head_bytes > L2_BYTES and m_blocks >= 2 * sm_count and not masked
        return min(ceil_div(head_bytes, L2_BYTES), cap) if is_worth_it else 1
    if blocks <= FEW_BLOCKS:
        return 1
    return _fewest_good(efficiencies(units, sm_count, min(cap, sm_count, blocks)))


def fa3_dynamic_splits(
    m_blocks: Table, n_blocks: Table, *, heads: int, sm_count: int, cap: int
) -> Int64Array:
    """FlashAttention-3's splits of each request of a batch with lengths of its own, int64 [batch].

    ``m_blocks``, ``n_blocks`` [batch] int32 or int64: tiles of queries and blocks of keys of each.
    ``heads``: K/V heads if their group is packed. ``cap``: splits that the launch has room for.
    Each request gets as many as make its pieces a fair share of an SM. Errors: `TableError`,
    `DtypeError`, `ShapeError`.
    """
    check_sizes(heads=heads, sm_count=sm_count, cap=cap)
    tiles = check_range("m_blocks", m_blocks, 0, MOST_LENGTH)
    blocks = check_range("n_blocks", n_blocks, 0, MOST_LENGTH)
    if tiles.shape != blocks.shape or tiles.ndim != 1:
        raise ShapeError(
            f"m_blocks and n_blocks must be [batch], got {list(tiles.shape)}, {list(blocks.shape)}"
        )
    if cap == 1 or tiles.size > MOST_DYNAMIC_REQUESTS:
        return np.ones(tiles.size, np.int64)
    total = np.float32(int(np.sum(tiles * blocks)))
    share = total * MARGIN * np.float32(heads) / np.float32(sm_count)
    # A batch without work would divide by zero in the source.
    blocks_per_sm = max(int(np.ceil(share)), 1)
    return np.clip(ceil_div(blocks, blocks_per_sm), 1, cap)


def fa4_splits(units: int, sm_count: int, blocks: int, *, cap: int = MOST_SPLITS) -> int:
    """FlashAttention-4's number of splits: as many as SMs are left to a tile.

    Arguments as for `fa3_splits`; ``units`` may be 0. At least 1, also where there are more tiles
    than SMs, for which the source's formula gives 0.
    """
    check_sizes(sm_count=sm_count, cap=cap)
    check_sizes(0, units=units, blocks=blocks)
    if blocks <= FEW_BLOCKS or units < 1:
        return 1
    return max(min(sm_count // units, cap, blocks), 1)


def fa3_loaded_keys(
    kv_len: int, block_m: int, window_left: int = -1, window_right: int = -1
) -> int:
    """Keys that a tile of ``block_m`` rows loads, of which FlashAttention-3 counts blocks; windows
    of -1 have no bound.
    """
    if window_left < 0 or window_right < 0:
        return kv_len
    return max(0, min(kv_len, window_left + window_right + 1 + block_m))


def visible_blocks(
    m_block: int,
    *,
    block_m: int,
    block_n: int,
    q_len: int,
    kv_len: int,
    window_left: int = -1,
    window_right: int = -1,
    group: int = 1,
) -> range:
    """Blocks of keys of which some row of tile ``m_block`` may see a part.

    Query i sees keys from i + kv_len - q_len - ``window_left`` to i + kv_len - q_len +
    ``window_right``, both included; -1 has no bound, causal is a right bound of 0. The tile's rows
    are packed: row r is query r // ``group``.
    """
    shift = kv_len - q_len
    stop = kv_len
    if window_right >= 0:
        after_last = ceil_div((m_block + 1) * block_m, group)
        stop = min(kv_len, after_last + shift + window_right)
    start = 0
    if window_left >= 0:
        start = max(0, m_block * block_m // group + shift - window_left)
    last_block = max(ceil_div(stop, block_n), 0)
    return range(min(start // block_n, last_block), last_block)


def split_blocks(blocks: range, splits: int, *, longest: int | None = None) -> list[range]:
    """The blocks of keys of each split; some may be empty.

    FlashAttention-3 divides ``blocks``, what its tile sees. FlashAttention-2 cuts the ``longest``
    sequence's blocks and leaves each split those of ``blocks`` in its part, none if the sequence is
    short. `ShapeError` for no split or a longest sequence with fewer blocks.
    """
    check_sizes(splits=splits)
    if longest is not None and longest < blocks.stop:
        raise ShapeError(
            f"the longest sequence has {longest} blocks, but one ends at {blocks.stop}"
        )
    first, count = (blocks.start, len(blocks)) if longest is None else (0, longest)
    size = ceil_div(count, splits)
    cuts = [min(max(first + n * size, blocks.start), blocks.stop) for n in range(splits + 1)]
    return [range(*pair) for pair in pairwise(cuts)]


def _fills(units: int, slots: int) -> bool:
    return bool(np.float32(units) >= FULL * np.float32(slots))


def _fewest_good(efficiency: Float32Array) -> int:
    """The fewest splits whose efficiency is nearly the best."""
    good = efficiency.astype(np.float64) >= GOOD_ENOUGH * np.float64(efficiency.max())
    return 1 + int(good.argmax())
