"""FlashMLA's sparse prefill on Hopper: a warpgroup gathers tokens, two compute like a seesaw.

Source: FlashMLA, csrc/sm90/prefill/sparse (2026-04-29). A CTA has 64 heads of one query and ends
with it; K is bf16, and V as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from simkit.errors import ShapeError
from simkit.machine.gpus import Gpu
from simkit.schedules import mla
from simkit.schedules.engine import Agent, Arrive, Barrier, Program, Run, Step, Wait, Work
from simkit.schedules.grid import Item, Launch
from simkit.schedules.mla import ELEMENT, HALF, KEYS, ROWS, TILE, TILE_BYTES, TILES, Piece
from simkit.schedules.parameters import TMA_LATENCY
from simkit.schedules.steps import (
    PACKED,
    WARP,
    Copy,
    Product,
    global_load,
    in_pieces,
    lanes,
    mbarrier,
    named_barrier,
)

_THREADS = 384
_LEFT = range(4)  # tiles of K that hold the left half of V
_RIGHT = range(4, TILES)
_SIDES = (_LEFT, _RIGHT)
_ORDER = ((0, 0), (1, 1), (0, 1), (1, 0))  # buffers and sides, as they become free
_NAMED = (("left", _LEFT), ("right", _RIGHT))
# Q, two K, S, valid flags, maxima, sums, the row results, 10 barriers.
SHARED_BYTES = 3 * mla.Q_BYTES + mla.P_BYTES + 128 + 256 + 512 + 2 * 256 + 10 * 8


@dataclass(frozen=True, kw_only=True)
class MlaPrefillShape:
    """Each of ``q_len`` queries attends ``topk`` of ``kv_len`` tokens, a multiple of 128; ``heads``
    in steps of 64.
    """

    q_len: int
    topk: int
    kv_len: int
    heads: int = 128

    def __post_init__(self) -> None:
        for name in ("q_len", "topk", "kv_len"):
            if getattr(self, name) < 1:
                raise ShapeError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.topk % (2 * KEYS):
            raise ShapeError(f"topk must be a multiple of {2 * KEYS}, got {self.topk}")
        mla.check_heads(self.heads, ROWS, 16 * ROWS)

    @property
    def flop(self) -> int:
        return mla.flop(self.heads, self.q_len * self.topk)

    @property
    def kv_bytes(self) -> int:
        return self.kv_len * mla.D_QK * ELEMENT

    @property
    def read_bytes(self) -> int:
        """Of K, once: all of it, or what the queries attend if that is less."""
        return min(self.kv_len, self.q_len * self.topk) * mla.D_QK * ELEMENT

    @property
    def hbm_bytes(self) -> int:
        """What is read of K once, Q and O."""
        return self.read_bytes + mla.qo_bytes(self.q_len * self.heads)


@dataclass(frozen=True, kw_only=True)
class MlaSparsePrefill:
    """The published kernel leaves nothing to choose."""

    def launches(self, gpu: Gpu, shape: MlaPrefillShape) -> tuple[Launch, ...]:
        """The one launch."""
        halves = shape.heads // ROWS
        missing = missing_part(gpu, shape)
        cta = _Cta(gpu, missing)
        item = Item(shape.topk // KEYS, Piece(is_split=False))
        return (
            Launch(
                name="mla_sparse_prefill",
                items=(item,) * (shape.q_len * halves),
                cta=cta.agents,
                threads=_THREADS,
                registers=gpu.registers_per_sm // _THREADS // 8 * 8,
                shared_bytes=SHARED_BYTES,
                flop=shape.flop,
                hbm_bytes=shape.hbm_bytes,
                key=missing,
            ),
        )


def missing_part(gpu: Gpu, shape: MlaPrefillShape) -> float:
    """Part of the gathered tokens that L2 lacks: tokens are anywhere in K, of which L2 holds as
    much as it can; the CTAs of a query share them, and each token comes from HBM once at least.
    """
    halves = shape.heads // ROWS
    gathered = shape.q_len * halves * shape.topk * mla.D_QK * ELEMENT
    absent = max(0.0, 1 - gpu.l2_bytes / shape.kv_bytes) / halves
    return max(absent, min(1.0, shape.read_bytes / gathered))


class _Cta:
    def __init__(self, gpu: Gpu, missing: float) -> None:
        self.gpu, self.missing = gpu, missing
        # A tile is there with the last of its rows: from HBM if any is.
        some = 1 - (1 - missing) ** KEYS
        self.latency = gpu.l2_latency + some * (gpu.hbm_latency - gpu.l2_latency)
        self.softmax = mla.softmax()
        self.qk = Product("QK", ROWS, KEYS, TILE)
        self.pv = Product("PV", ROWS, HALF, KEYS, a_in_smem=False)
        self.pv_remote = Product("PV", ROWS, HALF, KEYS)

    def agents(self, name: str, items: Sequence[Item]) -> list[Agent]:
        found = []
        for item in items:
            pair = _Pair(self, item)
            found += [
                Agent(name, "producer", pair.producer()),
                Agent(name, "copies", pair.copies()),
                Agent(name, "warpgroup 0", pair.left()),
                Agent(name, "warpgroup 1", pair.right()),
            ]
        return found


class _Pair:
    """The barriers of a CTA: K0 and K1 are there and free half by half, left and right."""

    def __init__(self, cta: _Cta, item: Item) -> None:
        self.cta, self.pairs = cta, item.length // 2
        self.q_full = mbarrier("Q full")
        self.ready = [
            [mbarrier(f"K{b} {side} ready", len(tiles)) for side, tiles in _NAMED]
            for b in range(2)
        ]  # fmt: skip
        self.asked = Barrier("copy asked")
        self.free = [[mbarrier(f"K{b} {side} free") for side, _ in _NAMED] for b in range(2)]
        self.scale = [named_barrier(f"maxima {b}", mla.WARPS) for b in range(2)]
        self.s_ready = [named_barrier(f"S{b} ready", mla.WARPS) for b in range(2)]
        self.sums_ready = named_barrier("sums ready", mla.WARPS, 2)

    def producer(self) -> Program:
        """Halves in the order in which they are wanted; the indices of a pair come first."""
        cta = self.cta
        indices = global_load("indices", 2 * KEYS * 4, 1.0, cta.gpu.hbm_latency)
        for pair in range(self.pairs):
            yield Run(indices)
            for buffer, side in _ORDER:
                if pair:
                    yield Wait(self.free[buffer][side], pair - 1)
                for _ in _SIDES[side]:
                    # cp.async: 16 bytes a lane, an address for each.
                    copies = TILE_BYTES / 16
                    work = (("alu", copies), ("issue", 2 * copies / WARP))
                    yield Run(Work("copy", "load", work))
                    yield Arrive(self.asked)

    def copies(self) -> Program:
        """What the producer asks for, in its order."""
        copy = Copy("K", TILE_BYTES, self.cta.missing, self.cta.latency)
        asked = 0
        for _ in range(self.pairs):
            for buffer, side in _ORDER:
                for _ in _SIDES[side]:
                    yield Wait(self.asked, asked)
                    asked += 1
                    yield from copy.steps(self.ready[buffer][side])

    def scores(self, buffer: int, side: int, pair: int, done: Barrier) -> Iterator[Step]:
        yield Wait(self.ready[buffer][side], pair)
        for _ in _SIDES[side]:
            yield from self.cta.qk.issue(done)

    def left(self) -> Program:
        cta, softmax = self.cta, self.cta.softmax
        yield mla.load_q(cta.gpu, self.q_full, TMA_LATENCY.value)
        yield Wait(self.q_full, 0)
        s, o = Barrier("S0", TILES), Barrier("O left")
        yield from self.scores(0, 0, 0, s)
        yield from self.scores(0, 1, 0, s)
        yield Wait(s, 0)
        for pair in range(self.pairs):
            yield from softmax.mask()
            yield from softmax.maximum()
            yield from softmax.rescale()
            yield from softmax.exponentials()
            yield from softmax.convert()
            yield Arrive(self.scale[0])
            yield from cta.pv.issue(o)
            yield Wait(o, 2 * pair)
            yield Arrive(self.free[0][0])
            yield Wait(self.scale[1], pair)
            scores = ROWS * KEYS
            yield from in_pieces(lanes("S0", "convert", fma=scores, xu=scores / PACKED))
            yield mla.p_to_smem("sS0")
            yield Arrive(self.s_ready[0])
            yield Wait(self.s_ready[1], pair)
            yield from softmax.rescale()
            yield from cta.pv_remote.issue(o)
            if pair + 1 < self.pairs:
                yield from self.scores(0, 0, pair + 1, s)
            yield Wait(o, 2 * pair + 1)
            yield Arrive(self.free[1][0])
            if pair + 1 < self.pairs:
                yield from self.scores(0, 1, pair + 1, s)
                yield Wait(s, pair + 1)
        yield from self._finish()

    def right(self) -> Program:
        cta, softmax = self.cta, self.cta.softmax
        yield Wait(self.q_full, 0)
        s, local, remote = Barrier("S1", TILES), Barrier("O right, S1"), Barrier("O right, S0")
        for pair in range(self.pairs):
            yield from self.scores(1, 1, pair, s)
            yield from self.scores(1, 0, pair, s)
            yield Wait(s, pair)
            yield from softmax.mask()
            yield Wait(self.scale[0], pair)
            yield from softmax.maximum()
            yield from softmax.rescale()
            yield from softmax.exponentials()
            yield from softmax.convert()
            yield Arrive(self.scale[1])
            yield from cta.pv.issue(local)
            yield mla.p_to_smem("sS1")
            yield Wait(self.s_ready[0], pair)
            yield from cta.pv_remote.issue(remote)
            yield Arrive(self.s_ready[1])
            yield Wait(local, pair)
            yield Arrive(self.free[1][1])
            yield Wait(remote, pair)
            yield Arrive(self.free[0][1])
        yield from self._finish()

    def _finish(self) -> Iterator[Step]:
        """Each warpgroup's half of O, in the place of Q."""
        yield from mla.sums("l")
        yield Arrive(self.sums_ready)
        yield Wait(self.sums_ready, 0)
        yield from mla.to_staging(is_split=False)
        yield from mla.store(False, HALF)
