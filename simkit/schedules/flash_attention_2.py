"""FlashAttention-2: four warps, each with its rows of Q, mma.sync and cp.async; CTAs share an SM.

Source: Dao, FlashAttention-2, arXiv 2307.08691; tiles and waits from
github.com/Dao-AILab/flash-attention, csrc/flash_attn/src (2026-08-15).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simkit.errors import ShapeError
from simkit.machine.gpus import KIB, Gpu
from simkit.schedules.engine import Agent, Arrive, Barrier, Program, Start, Wait, Work
from simkit.schedules.grid import Item, Launch, repeated
from simkit.schedules.shape import AttentionShape
from simkit.schedules.steps import Copy, Softmax, Sync, WarpProduct, named_barrier
from simkit.schedules.tiles import kernel_dim, key_tiles, missing_part

_MOST_REGISTERS = 255
HEAD_DIMS = (32, 64, 96, 128, 192, 256)
"""Of the kernels; another head dimension takes the next one, with zeros."""


@dataclass(frozen=True)
class Chosen:
    """`FlashAttention2` with nothing left open."""

    tile_q: int
    tile_kv: int
    warps: int


@dataclass(frozen=True, kw_only=True)
class FlashAttention2:
    """Choices of the kernel; None: what the published kernel takes for the shape and GPU.

    ``warps``: of a CTA, 4 or 8.
    """

    tile_q: int | None = None
    tile_kv: int | None = None
    warps: int | None = None

    def chosen(self, gpu: Gpu, shape: AttentionShape) -> Chosen:
        """Every choice made. `ShapeError` for tiles and head dimensions that the kernel lacks."""
        rows, keys, warps = _tile(gpu, kernel_dim(max(shape.d, shape.d_v), HEAD_DIMS))
        own = Chosen(self.tile_q or rows, self.tile_kv or keys, self.warps or warps)
        if own.warps not in (4, 8):
            raise ShapeError(f"warps must be 4 or 8, got {own.warps}")
        if own.tile_q % (16 * own.warps):
            raise ShapeError(f"tile_q must be a multiple of 16 rows a warp, got {own.tile_q}")
        if own.tile_kv % 16 or not 16 <= own.tile_kv <= 256:
            raise ShapeError(f"tile_kv must be a multiple of 16 from 16 to 256, got {own.tile_kv}")
        return own

    def launches(self, gpu: Gpu, shape: AttentionShape) -> tuple[Launch, ...]:
        """The one launch. Errors as of `chosen`."""
        shape.check_16_bits("FlashAttention-2")
        own = self.chosen(gpu, shape)
        tiles = range(0, shape.q_len, own.tile_q)
        items = [Item(*key_tiles(shape, row, own.tile_q, own.tile_kv)) for row in tiles]
        items = repeated(items, shape.batch * shape.heads)
        missing = missing_part(gpu, shape, [item.length for item in items], own.tile_kv)
        latency = gpu.hbm_latency if missing == 1 else gpu.l2_latency
        loop = _Loop(own, shape, missing, latency)
        return (
            Launch(
                name="flash_attention_2",
                items=items,
                cta=loop.agents,
                threads=32 * own.warps,
                registers=_MOST_REGISTERS,
                shared_bytes=loop.shared_bytes,
                path="mma.sync",
                flop=shape.flop,
                hbm_bytes=shape.kv_bytes + shape.q_bytes + shape.o_bytes,
                key=(own, min(own.tile_q, shape.q_len), shape.d, shape.d_v, missing),
            ),
        )


def _tile(gpu: Gpu, d: int) -> tuple[int, int, int]:
    """Rows, keys and warps."""
    if d <= 64:
        return 128, 128, 4
    if d <= 128:
        return 128, 64, 4
    if d <= 192:
        return 128, 64, 8
    big = 2 * d * (128 + 2 * 64)
    fits = gpu.smem_per_block_optin >= big and gpu.smem_per_sm < 2 * (2 * d * (64 + 2 * 64))
    return (128, 64, 8) if fits and gpu.smem_per_sm < 192 * KIB else (64, 64, 4)


class _Loop:
    """What a CTA does with a tile of queries; each agent is four of its warps."""

    def __init__(self, own: Chosen, shape: AttentionShape, missing: float, latency: float) -> None:
        self.warps = own.warps
        self.groups = own.warps // 4
        rows, keys = own.tile_q // self.groups, own.tile_kv
        d = kernel_dim(max(shape.d, shape.d_v), HEAD_DIMS)
        self.shared_bytes = (own.tile_q + 2 * keys) * d * 2
        self.softmax = Softmax(rows, keys, d)
        self.qk = WarpProduct("QK", rows, keys, d)
        self.pv = WarpProduct("PV", rows, d, keys, a_in_registers=True)
        share = self.groups
        there = min(own.tile_q, shape.q_len)  # rows beyond are neither loaded nor stored
        self.q = Copy("Q", there * shape.d * 2 / share, 1.0, latency)
        self.k = Copy("K", keys * shape.d * 2 / share, missing, latency)
        self.v = Copy("V", keys * shape.d_v * 2 / share, missing, latency)
        self.o_bytes = there * shape.d_v * 2 / share

    def agents(self, name: str, items: Sequence[Item]) -> list[Agent]:
        sync = named_barrier("sync", self.warps, self.groups)
        found = []
        for group in range(self.groups):
            warps = _Warps(self, sync)
            found.append(Agent(name, f"warps {4 * group}-{4 * group + 3}", warps.program(items)))
            found.append(Agent(name, f"copies {group}", warps.copies(items)))
        return found


class _Warps:
    """Four warps, and the copies that they issue: one tile of K and one of V in flight."""

    def __init__(self, loop: _Loop, sync: Barrier) -> None:
        self.loop, self.sync = loop, Sync(sync)
        self.q_full, self.k_full, self.v_full = (
            Barrier(f"{copy.name} there", copy.boxes) for copy in (loop.q, loop.k, loop.v)
        )
        self.k_asked, self.v_asked, self.q_asked = (Barrier(f"{n} asked") for n in "KVQ")

    def copies(self, items: Sequence[Item]) -> Program:
        """cp.async groups, in the order of issue."""
        loop, block = self.loop, 0
        for number, item in enumerate(items):
            yield Wait(self.q_asked, number)
            yield from loop.q.steps(self.q_full)
            for _ in range(item.length):
                yield Wait(self.k_asked, block)
                yield from loop.k.steps(self.k_full)
                yield Wait(self.v_asked, block)
                yield from loop.v.steps(self.v_full)
                block += 1

    def program(self, items: Sequence[Item]) -> Program:
        loop, block = self.loop, 0
        for number, item in enumerate(items):
            yield Arrive(self.q_asked)
            yield Arrive(self.k_asked)
            yield Wait(self.q_full, number)
            for i in range(item.length):
                yield Wait(self.k_full, block)
                yield from self.sync.steps()
                yield Arrive(self.v_asked)
                yield from loop.qk.steps()
                if i < item.kind:
                    yield from loop.softmax.mask()
                yield Wait(self.v_full, block)
                yield from self.sync.steps()
                if i + 1 < item.length:
                    yield Arrive(self.k_asked)
                yield from loop.softmax.maximum()
                if i:
                    yield from loop.softmax.rescale()
                yield from loop.softmax.exponentials()
                yield from loop.softmax.convert()
                yield from loop.pv.steps()
                block += 1
            yield from loop.softmax.finish()
            yield Start(Work("O", "store", (("l2", loop.o_bytes), ("hbm", loop.o_bytes))))
