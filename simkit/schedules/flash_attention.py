"""The schedule of this project's FlashAttention kernel, gpu/kernels/flash_attention.cu.

Four warps of 16 rows with Q in registers, mma.sync, two buffers each of K and V by cp.async, and
exp2 as a polynomial on the fp32 pipe, which is what makes its bits predictable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simkit.algorithms.flash_attention import THREADS, Tile
from simkit.algorithms.problem import KERNEL_HEAD_DIMS
from simkit.errors import ShapeError
from simkit.machine.gpus import Gpu
from simkit.schedules.engine import Agent, Arrive, Barrier, Program, Start, Wait, Work
from simkit.schedules.grid import Item, Launch, repeated
from simkit.schedules.shape import AttentionShape
from simkit.schedules.steps import Copy, Softmax, Sync, WarpProduct, named_barrier
from simkit.schedules.tile_timeline import EXP2_OPS
from simkit.schedules.tiles import key_tiles, missing_part

_REGISTERS = {64: 140, 128: 196}
"""Of a thread, by head dimension, as NVIDIA's assembler makes it for sm_90a."""


@dataclass(frozen=True)
class FlashAttention:
    """Nothing is left to choose: the kernel has tiles of 64 by 64."""

    def launches(self, gpu: Gpu, shape: AttentionShape) -> tuple[Launch, ...]:
        """The one launch. `ShapeError` for d_v other than d, and values of other than 2 bytes."""
        shape.check_16_bits("this kernel")
        if shape.d_v != shape.d:
            raise ShapeError(f"this kernel has one head dimension, got {shape.d} and {shape.d_v}")
        if shape.d not in KERNEL_HEAD_DIMS:
            raise ShapeError(f"d must be one of {KERNEL_HEAD_DIMS}, got {shape.d}")
        tile = Tile()
        rows = range(0, shape.q_len, tile.q)
        items = [Item(*key_tiles(shape, row, tile.q, tile.kv)) for row in rows]
        items = repeated(items, shape.batch * shape.heads)
        missing = missing_part(gpu, shape, [item.length for item in items], tile.kv)
        loop = _Loop(tile, shape, missing, gpu.hbm_latency if missing == 1 else gpu.l2_latency)
        return (
            Launch(
                name="flash_attention",
                items=items,
                cta=loop.agents,
                threads=THREADS,
                registers=_REGISTERS[shape.d],
                shared_bytes=tile.shared_bytes(shape.d),
                path="mma.sync",
                flop=shape.flop,
                hbm_bytes=shape.kv_bytes + shape.q_bytes + shape.o_bytes,
                key=(min(tile.q, shape.q_len), shape.d, missing),
            ),
        )


class _Loop:
    """What a CTA does with a tile of queries."""

    def __init__(self, tile: Tile, shape: AttentionShape, missing: float, latency: float) -> None:
        self.softmax = Softmax(tile.q, tile.kv, shape.d_v, EXP2_OPS)
        self.qk = WarpProduct("QK", tile.q, tile.kv, shape.d, a_in_registers=True)
        self.pv = WarpProduct("PV", tile.q, shape.d_v, tile.kv, a_in_registers=True)
        there = min(tile.q, shape.q_len)  # rows beyond are neither loaded nor stored
        self.q = Copy("Q", there * shape.d * 2, 1.0, latency)
        self.kv = Copy("K and V", 2 * tile.kv * shape.d * 2, missing, latency)
        self.o_bytes = there * shape.d_v * 2

    def agents(self, name: str, items: Sequence[Item]) -> list[Agent]:
        there = Barrier("Q there", self.q.boxes), Barrier("K and V there", self.kv.boxes)
        asked = Barrier("asked")
        return [
            Agent(name, "warps", self._warps(items, *there, asked)),
            Agent(name, "copies", self._copies(items, *there, asked)),
        ]

    def _copies(self, items: Sequence[Item], q: Barrier, kv: Barrier, asked: Barrier) -> Program:
        """cp.async groups, in the order of issue."""
        phase = 0
        for item in items:
            yield Wait(asked, phase)
            phase += 1
            yield from self.q.steps(q)
            for _ in range(item.length):
                yield Wait(asked, phase)
                phase += 1
                yield from self.kv.steps(kv)

    def _warps(self, items: Sequence[Item], q: Barrier, kv: Barrier, asked: Barrier) -> Program:
        sync, block = Sync(named_barrier("sync", THREADS // 32)), 0
        for number, item in enumerate(items):
            yield Arrive(asked)  # Q, and the first K and V
            yield Arrive(asked)
            yield Wait(q, number)
            for i in range(item.length):
                yield Wait(kv, block)
                yield from sync.steps()
                if i + 1 < item.length:
                    yield Arrive(asked)
                yield from self.qk.steps()
                if i >= item.length - item.kind:
                    yield from self.softmax.mask()
                yield from self.softmax.maximum()
                yield from self.softmax.exponentials()
                yield from self.softmax.rescale()
                yield from self.softmax.convert()
                yield from self.pv.steps()
                block += 1
            yield from self.softmax.finish()
            yield Start(Work("O", "store", (("l2", self.o_bytes), ("hbm", self.o_bytes))))
