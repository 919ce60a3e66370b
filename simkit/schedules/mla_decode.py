"""FlashMLA's dense decode on Hopper: two warpgroups that own half of O each, like a seesaw.

Source: FlashMLA, docs/20250422-new-kernel-deep-dive.md and csrc/sm90/decode/dense (2026-04-29);
the kernel before it, ``seesaw=False``: csrc/flash_fwd_mla_kernel.h (2025-02-21). K is V as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from simkit.errors import ShapeError
from simkit.machine.gpus import Gpu
from simkit.planning.flashmla import MlaPiece, dense_parts, pieces, tile_schedule
from simkit.schedules import mla
from simkit.schedules.engine import (
    Agent,
    Arrive,
    Barrier,
    Delay,
    Program,
    Run,
    Start,
    Step,
    Wait,
    Work,
)
from simkit.schedules.grid import Item, Launch
from simkit.schedules.mla import HALF, KEYS, ROWS, TILE, TILE_BYTES, TILES
from simkit.schedules.mla_combine import MlaCombine
from simkit.schedules.parameters import SMEM_LATENCY, TMA_LATENCY
from simkit.schedules.steps import (
    F32_BYTES,
    PACKED,
    WARP,
    Copy,
    Product,
    Sync,
    global_store,
    in_pieces,
    lanes,
    mbarrier,
    named_barrier,
)

_MOST_HEADS = 1024
_LEFT = range(4)  # tiles of K that hold the left half of V
_RIGHT = range(4, TILES)
_SIDES = (_LEFT, _RIGHT)
_NAMES = ("left", "right")


@dataclass(frozen=True, kw_only=True)
class MlaShape:
    """``heads`` query heads of ``q_len`` queries of each request, one head of K, which is V.

    ``lengths``: keys of each request; by default ``kv_len`` of all.
    """

    batch: int
    kv_len: int
    heads: int = 128
    q_len: int = 1
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("batch", "kv_len", "q_len"):
            if getattr(self, name) < 1:
                raise ShapeError(f"{name} must be at least 1, got {getattr(self, name)}")
        mla.check_heads(self.heads, 1, _MOST_HEADS)
        if not self.lengths:
            object.__setattr__(self, "lengths", (self.kv_len,) * self.batch)
        if len(self.lengths) != self.batch or min(self.lengths) < 0:
            raise ShapeError(f"lengths must be {self.batch} from 0 on, got {self.lengths}")

    @property
    def rows(self) -> int:
        """Of a request."""
        return self.heads * self.q_len

    @property
    def flop(self) -> int:
        return mla.flop(self.heads, self.q_len * sum(self.lengths))

    @property
    def hbm_bytes(self) -> int:
        """K once, Q and O."""
        keys = sum(self.lengths) * mla.D_QK * mla.ELEMENT
        return keys + mla.qo_bytes(self.batch * self.rows)


@dataclass(frozen=True, kw_only=True)
class MlaDecode:
    """``seesaw``: both warpgroups take blocks, in turns, and hand P to each other; otherwise one
    does Q K^T and softmax for both. ``naive``: a CTA for every 64 rows of a request, without tile
    scheduler. ``dependent``: of the combine kernel.
    """

    seesaw: bool = True
    naive: bool = False
    dependent: bool = True

    def launches(self, gpu: Gpu, shape: MlaShape) -> tuple[Launch, ...]:
        """The kernel, and the combine kernel if some request is split."""
        tiles = -(-shape.rows // ROWS)
        splits: tuple[int, ...] = (1,) * shape.batch
        if self.naive:
            found = [MlaPiece(i, i, 0, -(-keys // KEYS), i, False)
                     for i, keys in enumerate(shape.lengths)]  # fmt: skip
        else:
            parts = dense_parts(gpu.sm_count, kv_heads=1, rows=shape.rows)
            lengths = np.array(shape.lengths, np.int64)
            schedule = tile_schedule(lengths, parts)
            found = list(pieces(schedule, lengths))
            splits = mla.split_counts(schedule.num_splits.tolist())
        dealt = mla.deal(found, tiles, gpu.sm_count)
        # The CTAs of a part read the same blocks at about the same time.
        rows = min(ROWS, shape.rows)
        cta = (_Seesaw if self.seesaw else _OneForBoth)(gpu, 1 / tiles, rows)
        kernel = Launch(
            name="mla_decode",
            items=dealt.items,
            cta=cta.agents,
            threads=256,
            registers=255,
            shared_bytes=cta.shared_bytes,
            persistent=not self.naive,
            workers=None if self.naive else dealt.workers,
            flop=shape.flop,
            hbm_bytes=shape.hbm_bytes,
            key=(self.seesaw, tiles, rows),
        )
        combine = MlaCombine(dependent=self.dependent)
        return (kernel, *combine.launches(gpu, splits, heads=shape.heads, q_len=shape.q_len))


class _Products:
    """Products of a block, and copies of its tiles; ``missing``: part of K that L2 lacks; ``rows``:
    that there are of the tile.
    """

    shared_bytes: int

    def __init__(self, gpu: Gpu, missing: float, rows: int) -> None:
        self.gpu, self.missing, self.rows = gpu, missing, rows
        self.softmax = mla.softmax()
        self.qk_tile = Product("QK", ROWS, KEYS, TILE)
        self.qk_tile_rq = Product("QK", ROWS, KEYS, TILE, a_in_smem=False)
        self.qk = Product("QK", ROWS, KEYS, mla.D_QK)
        self.pv = Product("PV", ROWS, HALF, KEYS, a_in_smem=False)
        self.pv_remote = Product("PV", ROWS, HALF, KEYS)

    def metadata(self) -> Step:
        """The part that a CTA is told."""
        return Delay(self.gpu.hbm_latency)

    def lookup(self) -> Step:
        """Length and first pages of a request, one after the other."""
        return Delay(2 * self.gpu.l2_latency)


class _Seesaw(_Products):
    """Blocks in pairs: warpgroup 0 has the first of each and O's left half, 1 the other."""

    # Q, K0, K1, P0; P1 takes the place of Q's last tile. Maxima, sums, scales, 19 barriers.
    shared_bytes = 3 * mla.Q_BYTES + mla.P_BYTES + 256 + 512 + 2 * 256 + 19 * 8

    def agents(self, name: str, items: Sequence[Item]) -> list[Agent]:
        pair = _Pair(self)
        return [
            Agent(name, "copies", pair.copies(items)),
            Agent(name, "warpgroup 0", pair.left(items)),
            Agent(name, "warpgroup 1", pair.right(items)),
        ]


def _order(blocks: int) -> Iterator[tuple[int, int]]:
    """Buffers and sides of the copies of a piece: the first pair, then as each becomes free."""
    for block in range(0, blocks, 2):
        second = block + 1 < blocks
        if block == 0:
            yield from ((0, 0), (0, 1), (1, 1), (1, 0)) if second else ((0, 0), (0, 1))
        else:
            yield from ((0, 0), (1, 1), (0, 1), (1, 0)) if second else ((0, 0), (0, 1))


class _Pair:
    """The two warpgroups of a CTA. ``used`` counts the blocks that have gone through a buffer."""

    def __init__(self, cta: _Seesaw) -> None:
        self.cta = cta
        self.q_full = mbarrier("Q full")
        self.k_full = [
            [mbarrier(f"K{b} tile {t} full") for t in range(TILES)] for b in range(2)
        ]  # fmt: skip
        self.asked = [[Barrier(f"K{b} {side} asked") for side in _NAMES] for b in range(2)]
        self.scale = [named_barrier(f"sScale{b} ready", mla.WARPS) for b in range(2)]
        self.p0_ready = named_barrier("sP0 ready", mla.WARPS)
        self.issued = named_barrier("rO1 sP0 sV0R issued", mla.WARPS)
        met = named_barrier("sync", mla.WARPS, 2)
        self.sync = [Sync(met), Sync(met)]
        self.used = [0, 0]
        self.single = 0  # pairs of one block: nobody tells warpgroup 0 of a second product

    def copies(self, items: Sequence[Item]) -> Program:
        """What the warpgroups ask for, in the order in which they do."""
        latency = TMA_LATENCY.value + self.cta.gpu.hbm_latency
        copy = Copy("K", TILE_BYTES, self.cta.missing, latency)
        done = [[0, 0], [0, 0]]
        for item in items:
            for buffer, side in _order(item.length):
                yield Wait(self.asked[buffer][side], done[buffer][side])
                done[buffer][side] += 1
                for tile in _SIDES[side]:
                    yield from copy.steps(self.k_full[buffer][tile])

    def ask(self, buffer: int, side: int) -> Step:
        return Arrive(self.asked[buffer][side])

    def scores(self, buffer: int, tiles: Sequence[int], done: Barrier) -> Iterator[Step]:
        """Q K^T tile by tile, each when its copy is there. The last tile of Q is in registers."""
        for tile in tiles:
            yield Wait(self.k_full[buffer][tile], self.used[buffer])
            product = self.cta.qk_tile_rq if tile == TILES - 1 else self.cta.qk_tile
            yield from product.issue(done)

    def left(self, items: Sequence[Item]) -> Program:
        cta = self.cta
        yield cta.metadata()
        yield mla.load_q(cta.gpu, self.q_full, TMA_LATENCY.value, cta.rows)
        turn = 0
        for number, item in enumerate(items):
            yield cta.lookup()
            for buffer, side in _order(min(item.length, 2)):
                yield self.ask(buffer, side)
            yield Wait(self.q_full, number)
            if item.length:
                s = Barrier("S0")
                for full in self.k_full[0]:
                    yield Wait(full, self.used[0])
                yield from cta.qk.issue(s)
                yield Wait(s, 0)
                self.used[0] += 1
            for block in range(0, item.length, 2):
                yield from self._left_pair(item.length - block, turn)
                turn += 1
            yield from mla.sums("l")
            yield from self.sync[0].steps()
            if number + 1 < len(items):
                yield mla.load_q(cta.gpu, self.q_full, TMA_LATENCY.value, cta.rows)
            yield from mla.to_staging(item.kind.is_split)
            yield from self.sync[0].steps()
            yield from mla.store(item.kind.is_split, rows=cta.rows)
            yield from self.sync[0].steps()

    def _left_pair(self, remaining: int, turn: int) -> Iterator[Step]:
        """``remaining``: blocks from the first of the pair on."""
        cta, softmax, o = self.cta, self.cta.softmax, Barrier("O left")
        if remaining <= 2:
            yield from softmax.mask()
        yield from softmax.maximum()
        yield from softmax.rescale()
        yield from softmax.exponentials()
        yield from softmax.convert()
        yield Arrive(self.scale[0])
        yield from cta.pv.issue(o)
        yield Wait(o, 0)
        yield Wait(self.scale[1], turn)
        if remaining > 2:
            yield self.ask(0, 0)
        scores = ROWS * KEYS
        yield from in_pieces(lanes("P0", "convert", fma=scores, xu=scores / PACKED))
        yield mla.p_to_smem("sP0")
        yield Arrive(self.p0_ready)
        if remaining > 1:
            yield Wait(self.issued, turn - self.single)
            yield from softmax.rescale()
            yield from cta.pv_remote.issue(o)
        if remaining > 2:
            s = Barrier("S0", TILES)
            yield from self.scores(0, _LEFT, s)
            if remaining > 3:
                yield Wait(o, 1)
                yield self.ask(1, 0)
            yield from self.scores(0, _RIGHT, s)
            yield Wait(s, 0)
            self.used[0] += 1
        if remaining > 1:
            yield Wait(o, 1)
        else:
            self.single += 1

    def right(self, items: Sequence[Item]) -> Program:
        cta = self.cta
        yield cta.metadata()
        turn = 0
        for number, item in enumerate(items):
            yield cta.lookup()
            yield Wait(self.q_full, number)
            if item.length > 1:
                s = Barrier("S1", TILES)
                yield from self.scores(1, (*_RIGHT, *_LEFT), s)
                yield Wait(s, 0)
                self.used[1] += 1
            for block in range(0, item.length, 2):
                yield from self._right_pair(item.length - block, turn)
                turn += 1
            yield from mla.sums("l")
            yield from self.sync[1].steps()
            yield from mla.to_staging(item.kind.is_split)
            yield from self.sync[1].steps()
            yield from self.sync[1].steps()

    def _right_pair(self, remaining: int, turn: int) -> Iterator[Step]:
        cta, softmax = self.cta, self.cta.softmax
        local, remote = Barrier("O right, own P"), Barrier("O right, P0")
        yield Wait(self.scale[0], turn)
        if remaining > 1:
            if remaining <= 3:
                yield from softmax.mask()
            yield from softmax.maximum()
            yield from softmax.exponentials()
            yield from softmax.convert()
        yield from softmax.rescale()
        yield Arrive(self.scale[1])
        if remaining > 1:
            yield mla.p_to_smem("sP1")
            yield from cta.pv.issue(local)
        yield Wait(self.p0_ready, turn)
        yield from cta.pv_remote.issue(remote)
        if remaining > 1:
            yield Arrive(self.issued)
        if remaining > 3:
            yield Wait(local, 0)
            yield self.ask(1, 1)
        if remaining > 2:
            yield Wait(remote, 0)
            yield self.ask(0, 1)
        if remaining > 3:
            s = Barrier("S1", TILES)
            yield from self.scores(1, (*_RIGHT, *_LEFT), s)
            yield Wait(s, 0)
            self.used[1] += 1
        yield Wait(remote, 0)


class _OneForBoth(_Products):
    """Warpgroup 0 does Q K^T and softmax; P and scales go to warpgroup 1, which also copies the
    next block. Blocks come one at a time, and all threads meet before each.
    """

    # Q, two K, P, scales.
    shared_bytes = 3 * mla.Q_BYTES + mla.P_BYTES + 1024

    def agents(self, name: str, items: Sequence[Item]) -> list[Agent]:
        both = _Both(self)
        return [
            Agent(name, "copies", both.copies(items)),
            Agent(name, "warpgroup 0", both.first(items)),
            Agent(name, "warpgroup 1", both.second(items)),
        ]


class _Both:
    def __init__(self, cta: _OneForBoth) -> None:
        self.cta = cta
        self.asked = Barrier("copy asked")
        self.q = Copy("Q", cta.rows * mla.D_QK * mla.ELEMENT, 1.0, cta.gpu.hbm_latency)
        self.q_there = Barrier("Q there", self.q.boxes)
        self.k_there = Barrier("K there", TILES)
        met = named_barrier("sync", mla.WARPS, 2)
        self.sync = [Sync(met), Sync(met)]
        self.s_ready = named_barrier("S ready", mla.WARPS)
        self.sums_ready = named_barrier("sums ready", mla.WARPS)

    def copies(self, items: Sequence[Item]) -> Program:
        cta, asked = self.cta, 0
        k = Copy("K", mla.Q_BYTES, cta.missing, cta.gpu.hbm_latency)
        for item in items:
            for copy in (self.q, *[k] * item.length):
                yield Wait(self.asked, asked)
                asked += 1
                yield from copy.steps(self.q_there if copy is self.q else self.k_there)

    def copy(self) -> Iterator[Step]:
        """The next by cp.async of 16 bytes a lane; goes on when all are issued."""
        for _ in range(TILES):
            yield Run(Work("copy", "load", (("issue", TILE_BYTES / 16 / WARP),)))
        yield Arrive(self.asked)

    def first(self, items: Sequence[Item]) -> Program:
        cta, softmax = self.cta, self.cta.softmax
        yield cta.metadata()
        for item in items:
            yield cta.lookup()
            s, o = Barrier("S"), Barrier("O left")
            for block in range(item.length):
                yield from self.sync[0].steps()
                yield from cta.qk.issue(s)
                yield Wait(s, block)
                if block == 0:  # the last block of the piece comes first
                    yield from softmax.mask()
                yield from softmax.maximum()
                yield from softmax.exponentials()
                yield from softmax.convert()
                yield mla.p_to_smem("P")
                yield Arrive(self.s_ready)
                yield from softmax.rescale()
                yield from cta.pv.issue(o)
                yield Wait(o, block)
            yield Arrive(self.sums_ready)
            yield from mla.sums("l")
            yield from self.sync[0].steps()
            yield from mla.to_staging(item.kind.is_split)
            yield from self.sync[0].steps()
            yield from self._store(item.kind.is_split)
            yield from self.sync[0].steps()

    def _store(self, is_split: bool) -> Iterator[Step]:
        """By the lanes of one warpgroup, through registers: nobody waits for the writes."""
        size = self.cta.rows * mla.D_V * (F32_BYTES if is_split else mla.ELEMENT)
        yield from in_pieces(lanes("O", "store", smem=size, latency=SMEM_LATENCY.value))
        yield Run(Work("O", "store", (("issue", size / 16 / WARP),)))
        yield Start(global_store("O", size, 0.0 if is_split else 1.0))

    def second(self, items: Sequence[Item]) -> Program:
        cta, softmax = self.cta, self.cta.softmax
        yield cta.metadata()
        turn = 0
        for number, item in enumerate(items):
            yield cta.lookup()
            o = Barrier("O right")
            yield from self.copy()
            if item.length:
                yield from self.copy()
            for block in range(item.length):
                yield Wait(self.k_there, turn)
                if block == 0:
                    yield Wait(self.q_there, number)
                yield from self.sync[1].steps()
                if block + 1 < item.length:
                    yield from self.copy()
                yield Wait(self.s_ready, turn)
                yield Run(lanes("P", "load", smem=mla.P_BYTES, latency=SMEM_LATENCY.value))
                yield from softmax.rescale()
                yield from cta.pv.issue(o)
                yield Wait(o, block)
                turn += 1
            yield Wait(self.sums_ready, number)
            yield from self.sync[1].steps()
            yield from mla.to_staging(item.kind.is_split)
            yield from self.sync[1].steps()
            yield from self.sync[1].steps()
