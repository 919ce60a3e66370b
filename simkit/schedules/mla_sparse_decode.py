"""FlashMLA's sparse decode of an fp8 cache on Hopper: a warpgroup gathers and dequantises tokens,
two warpgroups compute; CTAs in pairs dequantise for each other.

Source: FlashMLA, docs/20250929-hopper-fp8-sparse-deep-dive.md and csrc/sm90/decode/sparse_fp8
(2026-04-29), the format of 656 bytes a token. Without crossover: its kernel for clusters of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from simkit.errors import ShapeError
from simkit.machine.gpus import Gpu
from simkit.planning.flashmla import pieces, sparse_lengths, sparse_parts, tile_schedule
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
)
from simkit.schedules.grid import Item, Launch
from simkit.schedules.mla import ELEMENT, HALF, KEYS, ROWS, TILE, TILES
from simkit.schedules.mla_combine import MlaCombine
from simkit.schedules.parameters import (
    CLUSTER_BARRIER_LATENCY,
    DSMEM_LATENCY,
    MBARRIER_LATENCY,
    SMEM_LATENCY,
    TMA_LATENCY,
)
from simkit.schedules.steps import (
    THREADS,
    Product,
    from_fp8,
    global_load,
    lanes,
    mbarrier,
    named_barrier,
    to_peer,
)

ROUND = 32  # tokens that the producer has in hand: four lanes for each
BUFFERS = 2
TOKEN_BYTES = 21 * 32  # 656 in sectors, wherever the token starts
FP8_TILES = mla.D_V // TILE  # the rest is bf16
_TILE_BYTES = ROUND * TILE  # in fp8, of a round
_WIDE_BYTES = _TILE_BYTES * ELEMENT
_WARPS = 12


@dataclass(frozen=True, kw_only=True)
class MlaSparseShape:
    """Each of ``q_len`` queries of a request attends ``topk`` tokens of its own, a multiple of 64;
    ``heads``: 64 or 128.
    """

    batch: int
    topk: int
    heads: int = 128
    q_len: int = 1

    def __post_init__(self) -> None:
        for name in ("batch", "topk", "q_len"):
            if getattr(self, name) < 1:
                raise ShapeError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.topk % KEYS:
            raise ShapeError(f"topk must be a multiple of {KEYS}, got {self.topk}")
        mla.check_heads(self.heads, ROWS, 2 * ROWS)

    @property
    def attended(self) -> int:
        """Tokens, summed over queries."""
        return self.batch * self.q_len * self.topk

    @property
    def flop(self) -> int:
        return mla.flop(self.heads, self.attended)

    @property
    def hbm_bytes(self) -> int:
        """Tokens of 656 bytes, Q and O."""
        return self.attended * 656 + mla.qo_bytes(self.batch * self.q_len * self.heads)


@dataclass(frozen=True, kw_only=True)
class MlaSparseDecode:
    """``crossover``: the two CTAs of 128 heads dequantise half of the tokens each and send them to
    the other. ``dependent``: of the combine kernel.
    """

    crossover: bool = True
    dependent: bool = True

    def launches(self, gpu: Gpu, shape: MlaSparseShape) -> tuple[Launch, ...]:
        """The kernel, and the combine kernel if some request is split."""
        halves = shape.heads // ROWS
        pair = self.crossover and halves == 2
        parts = sparse_parts("sm90", gpu.sm_count, q_len=shape.q_len, heads=shape.heads)
        lengths = sparse_lengths(shape.batch, shape.topk)
        schedule = tile_schedule(lengths, parts)
        dealt = mla.deal(pieces(schedule, lengths), halves * shape.q_len, gpu.sm_count)
        # CTAs of the same query read the same tokens; a pair shares them out.
        cta = _Cta(gpu, pair, 1.0 if pair else 1 / halves)
        kernel = Launch(
            name="mla_sparse_decode",
            items=dealt.items,
            cta=cta.agents,
            threads=32 * _WARPS,
            registers=gpu.registers_per_sm // (32 * _WARPS) // 8 * 8,
            shared_bytes=SHARED_BYTES,
            persistent=True,
            workers=dealt.workers,
            cluster=2 if pair else 1,
            flop=shape.flop,
            hbm_bytes=shape.hbm_bytes,
            key=(pair, halves),
        )
        splits = mla.split_counts(schedule.num_splits.tolist())
        combine = MlaCombine(dependent=self.dependent)
        return (kernel, *combine.launches(gpu, splits, heads=shape.heads, q_len=shape.q_len))


# Q, two K, S, valid flags, maxima, sums and scales, 7 barriers.
SHARED_BYTES = mla.Q_BYTES + BUFFERS * mla.Q_BYTES + mla.P_BYTES + 128 + 4 * 256 + 7 * 8


class _Cta:
    """A CTA, and what its peer does to it: the same at the same time."""

    def __init__(self, gpu: Gpu, pair: bool, missing: float) -> None:
        self.gpu, self.pair, self.missing = gpu, pair, missing
        self.softmax = mla.softmax()
        self.qk = Product("QK", ROWS, KEYS, mla.D_QK)
        self.pv_left = Product("PV", ROWS, HALF, KEYS, a_in_smem=False)
        self.pv_right = Product("PV", ROWS, HALF, KEYS)
        self.rounds = KEYS // ROUND // (2 if pair else 1)

    def agents(self, name: str, items: Sequence[Item]) -> list[Agent]:
        block = _Block(self)
        return [
            Agent(name, "producer", block.producer(items)),
            Agent(name, "warpgroup 0", block.left(items)),
            Agent(name, "warpgroup 1", block.right(items)),
        ]


class _Block:
    """The barriers of a CTA. ``local``, ``remote``: tokens that are there; ``free``: for new."""

    def __init__(self, cta: _Cta) -> None:
        self.cta = cta
        self.q_full = mbarrier("Q full")
        self.local = [mbarrier(f"K{b} local ready") for b in range(BUFFERS)]
        self.remote = [mbarrier(f"K{b} remote ready", TILES) for b in range(BUFFERS)]
        # The peer's two arrivals come when our own do, later by the way between the SMs.
        way = DSMEM_LATENCY.value if cta.pair else 0.0
        self.free = [Barrier(f"K{b} free", 2, MBARRIER_LATENCY.value + way) for b in range(BUFFERS)]
        self.s_ready = named_barrier("S ready", mla.WARPS)
        self.s_free = named_barrier("S free", mla.WARPS)
        self.sums_ready = named_barrier("sums ready", mla.WARPS, 2)
        self.stored = named_barrier("stored", mla.WARPS, 2)
        self.met = (
            Barrier("cluster", 3, CLUSTER_BARRIER_LATENCY.value)
            if cta.pair
            else named_barrier("sync", _WARPS, 3)
        )

    def meet(self, number: int) -> Iterator[Step]:
        """All threads of the cluster, after each request."""
        yield Arrive(self.met)
        yield Wait(self.met, number)

    def producer(self, items: Sequence[Item]) -> Program:
        cta = self.cta
        yield Delay(cta.gpu.hbm_latency)  # the part that a CTA is told
        use = [0] * BUFFERS
        for number, item in enumerate(items):
            yield Delay(cta.gpu.hbm_latency)  # the first indices; others come a block ahead
            for block in range(item.length):
                buffer = block % BUFFERS
                yield from self._gather(buffer, use[buffer])
                use[buffer] += 1
            yield from self.meet(number)

    def _gather(self, buffer: int, use: int) -> Iterator[Step]:
        """A block of tokens, or half of one."""
        cta = self.cta
        for number in range(cta.rounds):
            there = Barrier("tokens")
            size = ROUND * TOKEN_BYTES / TILES
            load = global_load("tokens", size, cta.missing, cta.gpu.hbm_latency)
            if number == 0 and use:
                yield Wait(self.free[buffer], use - 1)
            for _ in range(TILES):
                yield Run(lanes("address", "load", alu=THREADS))
                yield Start(load, there)
            for tile in range(TILES):
                yield Wait(there, tile)
                if tile < FP8_TILES:
                    # Zeros for a token that there is not: a select for four values.
                    yield Run(lanes("valid", "convert", alu=ROUND * TILE / 4))
                    yield from from_fp8(ROUND * TILE)
                yield Run(lanes("tokens", "store", smem=_WIDE_BYTES))
                if cta.pair:
                    yield to_peer("to the peer", _WIDE_BYTES, self.remote[buffer])
        yield Delay(SMEM_LATENCY.value)  # until the stores are seen by the tensor cores
        yield Arrive(self.local[buffer])

    def left(self, items: Sequence[Item]) -> Program:
        """Q K^T, softmax, and O's left half."""
        cta, softmax = self.cta, self.cta.softmax
        yield Delay(cta.gpu.hbm_latency)
        yield mla.load_q(cta.gpu, self.q_full, TMA_LATENCY.value)
        use = [0] * BUFFERS
        waits = 0
        for number, item in enumerate(items):
            s, o = Barrier("S"), Barrier("O left")
            yield Wait(self.q_full, number)
            for block in range(item.length):
                buffer = block % BUFFERS
                yield Wait(self.local[buffer], use[buffer])
                if cta.pair:
                    yield Wait(self.remote[buffer], use[buffer])
                yield from cta.qk.issue(s)
                yield Wait(s, block)
                if block:
                    yield Wait(self.s_free, waits)
                    waits += 1
                yield from softmax.mask()
                yield from softmax.maximum()
                yield from softmax.rescale()
                yield from softmax.exponentials()
                yield from softmax.convert()
                yield mla.p_to_smem("S")
                yield from cta.pv_left.issue(o)
                yield Arrive(self.s_ready)
                yield Wait(o, block)
                yield Arrive(self.free[buffer])
                use[buffer] += 1
            if number + 1 < len(items):
                yield mla.load_q(cta.gpu, self.q_full, TMA_LATENCY.value)
            yield from mla.sums("l")
            yield from self._finish(item, number)
            yield from self.meet(number)

    def right(self, items: Sequence[Item]) -> Program:
        """O's right half, from S and scales in shared memory."""
        cta = self.cta
        yield Delay(cta.gpu.hbm_latency)
        turn = 0
        for number, item in enumerate(items):
            o = Barrier("O right")
            for block in range(item.length):
                yield Wait(self.s_ready, turn)
                yield from cta.softmax.rescale()
                yield from cta.pv_right.issue(o)
                yield Wait(o, block)
                yield Arrive(self.free[block % BUFFERS])
                if block + 1 < item.length:
                    yield Arrive(self.s_free)
                turn += 1
            yield from self._finish(item, number)
            yield from self.meet(number)

    def _finish(self, item: Item, number: int) -> Iterator[Step]:
        """Half of O, when the sums are there and the buffers that it is staged in are free."""
        yield Arrive(self.sums_ready)
        yield Wait(self.sums_ready, number)
        yield from mla.to_staging(item.kind.is_split)
        yield from mla.store(item.kind.is_split, HALF)
