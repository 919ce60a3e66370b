"""Flash-Decoding: one query, its keys split over CTAs; then a kernel that combines the parts.

The heads that share K and V are rows of one tile, if they are packed. The split kernel is
FlashAttention-2's loop with other tiles.

Source: Dao et al., Flash-Decoding for long-context inference, 2023; tiles and number of splits from
github.com/Dao-AILab/flash-attention, csrc/flash_attn (2026-08-15).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from simkit.errors import ShapeError
from simkit.machine.gpus import Gpu
from simkit.planning.splits import (
    FA2_BLOCK_M,
    FA2_CTAS_PER_SM,
    MOST_SPLITS,
    fa2_block_n,
    fa2_splits,
    occupancy_units,
    split_blocks,
)
from simkit.schedules.flash_attention_2 import FlashAttention2
from simkit.schedules.grid import Item, Launch
from simkit.schedules.key_loop import THREADS, KeyLoop
from simkit.schedules.merge import fa2_combine
from simkit.schedules.shape import AttentionShape
from simkit.schedules.steps import F32_BYTES

_REGISTERS = 255


@dataclass(frozen=True, kw_only=True)
class FlashDecoding:
    """Choices of the kernels; None: what the published ones take.

    ``splits``: of the keys of a sequence; one split is the kernel without splits. ``packed``:
    whether the heads of a group are rows of one tile. ``ctas_per_sm``: that the choice of splits
    counts on, 2 today, 1 in the releases of 2023. ``dependent``: the combine kernel is launched
    before the split kernel ends.
    """

    splits: int | None = None
    packed: bool = True
    ctas_per_sm: int = FA2_CTAS_PER_SM
    dependent: bool = False

    def tiles(self, shape: AttentionShape) -> int:
        """Tiles of keys of a sequence."""
        return -(-shape.kv_len // fa2_block_n(shape.d))

    def chosen_splits(self, gpu: Gpu, shape: AttentionShape) -> int:
        """`ShapeError` for more queries than a tile has rows, or splits outside 1 to 128."""
        packed = self._rows(shape)
        tiles = self.tiles(shape)
        if self.splits is not None:
            if not 1 <= self.splits <= MOST_SPLITS:
                raise ShapeError(f"splits must be 1 to {MOST_SPLITS}, got {self.splits}")
            return self.splits
        rows, heads = packed.q_len, packed.heads
        units = occupancy_units(shape.batch, heads, rows=rows, block_m=FA2_BLOCK_M)
        return fa2_splits(units, self.ctas_per_sm * gpu.sm_count, tiles)

    def split_tiles(self, gpu: Gpu, shape: AttentionShape) -> list[range]:
        """Tiles of keys of each split; the last splits may have none."""
        tiles = self.tiles(shape)
        return split_blocks(range(tiles), self.chosen_splits(gpu, shape), longest=tiles)

    def launches(self, gpu: Gpu, shape: AttentionShape) -> tuple[Launch, ...]:
        """The split kernel and the combine kernel, or the one that does not split. Errors as of
        `chosen_splits`.
        """
        rows = self._rows(shape)
        parts = self.split_tiles(gpu, shape)
        if len(parts) == 1:
            return FlashAttention2().launches(gpu, rows)
        return self._split(gpu, rows, parts), self._combine(gpu, shape, len(parts))

    def _rows(self, shape: AttentionShape) -> AttentionShape:
        """The problem as the kernel sees it: the heads of a group as queries."""
        shape.check_16_bits("Flash-Decoding")
        if shape.q_len != 1:
            raise ShapeError(f"decoding has one query, got q_len {shape.q_len}")
        if not self.packed:
            return replace(shape, causal=False)
        if shape.group > FA2_BLOCK_M:
            raise ShapeError(f"a group of {shape.group} heads; a tile has {FA2_BLOCK_M} rows")
        return replace(shape, causal=False, heads=shape.kv_heads, q_len=shape.group)

    def _split(self, gpu: Gpu, shape: AttentionShape, parts: list[range]) -> Launch:
        keys = fa2_block_n(shape.d)
        states = shape.q_len * (shape.d_v + 1) * F32_BYTES  # with LSE
        # The heads of a group that are not packed read K and V of the same address together.
        missing = 1 / shape.group
        loop = KeyLoop(
            rows=FA2_BLOCK_M,
            keys=keys,
            d=shape.d,
            d_v=shape.d_v,
            q_bytes=shape.q_len * shape.d * 2,
            o_bytes=states,
            o_missing=0.0,  # the combine kernel reads it from L2
            missing=missing,
            latency=gpu.hbm_latency,
        )
        is_cut = shape.kv_len % keys > 0
        items = [
            Item(len(part), int(is_cut and part.stop * keys > shape.kv_len))
            for _ in range(shape.batch * shape.heads)
            for part in parts
        ]
        return Launch(
            name="flash_decoding_split",
            items=items,
            cta=loop.agents,
            threads=THREADS,
            registers=_REGISTERS,
            shared_bytes=loop.shared_bytes,
            path="mma.sync",
            flop=shape.flop,
            hbm_bytes=shape.kv_bytes + shape.q_bytes,
            key=loop,
        )

    def _combine(self, gpu: Gpu, shape: AttentionShape, splits: int) -> Launch:
        rows = shape.batch * shape.heads
        merge = fa2_combine(shape.d_v)
        return merge.launch(gpu, [splits] * rows, shape.d_v, dependent=self.dependent)
