"""FlashAttention-3 on Hopper: a producer warp, warpgroups that take turns at the tensor cores.

Source: Shah et al., FlashAttention-3, arXiv 2407.08608; tiles, registers and barriers from
github.com/Dao-AILab/flash-attention, hopper/ (2026-08-15).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from simkit.errors import ShapeError
from simkit.machine.gpus import Gpu
from simkit.planning.splits import fa3_tile
from simkit.schedules.engine import Agent, Arrive, Barrier, Program, Run, Start, Step, Wait, Work
from simkit.schedules.grid import Item, Launch, repeated
from simkit.schedules.parameters import SMEM_LATENCY, TMA_LATENCY
from simkit.schedules.shape import AttentionShape
from simkit.schedules.steps import (
    Copy,
    Product,
    Softmax,
    in_pieces,
    lanes,
    mbarrier,
    named_barrier,
)
from simkit.schedules.tiles import kernel_dim, key_tiles, missing_part

_FP8_KEYS = {64: 160, 96: 128, 128: 224, 192: 160, 256: 128}
_V_DIMS = {64: (64, 256), 96: (96,), 128: (128,), 192: (128, 192), 256: (256,)}
"""Head dimensions of V by those of K that kernels have; others take the next, with zeros. V of 512
beside K of 64 has two warpgroups for one tile of rows, which is not modelled.
"""
_ROWS = 64  # of a warpgroup
_WARPS = 4  # of a warpgroup


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """`FlashAttention3` with nothing left open."""

    tile_q: int
    tile_kv: int
    stages: int
    overlap: bool
    ping_pong: bool
    specialised: bool
    cluster: int


@dataclass(frozen=True, kw_only=True)
class FlashAttention3:
    """Choices of the kernel; None: what the published kernel takes for the shape.

    ``tile_q``, ``tile_kv``: rows and keys of a tile. ``stages``: tiles of K and of V in flight.
    ``overlap``: softmax of a tile beside the second product of the one before, in a warpgroup.
    ``ping_pong``: warpgroups take turns. ``specialised``: a producer warp copies; otherwise the
    warpgroups do, and meet in every tile. ``cluster``: CTAs that share copies of K and V.
    """

    tile_q: int | None = None
    tile_kv: int | None = None
    stages: int = 2
    overlap: bool | None = None
    ping_pong: bool | None = None
    specialised: bool = True
    cluster: int | None = None

    def chosen(self, shape: AttentionShape) -> Chosen:
        """Every choice made. `ShapeError` for tiles and head dimensions that the kernel lacks."""
        if shape.element not in (1, 2):
            raise ShapeError(f"values have 1 or 2 bytes, got {shape.element}")
        d, d_v = _dims(shape)
        rows, keys = fa3_tile(d, d_v=d_v, causal=shape.causal)
        if shape.element == 1:
            rows, keys = 192 if d <= 96 else 128, _FP8_KEYS[d]
        tile_q, tile_kv = self.tile_q or rows, self.tile_kv or keys
        if tile_q % _ROWS or not 1 <= tile_q // _ROWS <= 3:
            raise ShapeError(f"tile_q must be 64, 128 or 192, got {tile_q}")
        if tile_kv % 8 or not 8 <= tile_kv <= 256:
            raise ShapeError(f"tile_kv must be a multiple of 8 from 8 to 256, got {tile_kv}")
        if not 1 <= self.stages <= 8:
            raise ShapeError(f"stages must be 1 to 8, got {self.stages}")
        groups = tile_q // _ROWS
        overlap = (d > 64 or d_v == 64) if self.overlap is None else self.overlap
        # With overlap, warpgroups of long products need no turns.
        gains = d >= 128 if shape.element == 1 else d <= 128
        turns = groups >= 2 and gains if overlap else groups == 2
        pairs = d == 192 if shape.element == 1 else d >= 128
        can_share = not shape.causal and -(-shape.q_len // tile_q) % 2 == 0
        if self.cluster not in (None, 1, 2) or (self.cluster == 2 and not can_share):
            raise ShapeError(
                f"cluster must be 1, or 2 for an even number of tiles without a mask, got "
                f"{self.cluster} for {shape.q_len} queries in tiles of {tile_q}"
            )
        return Chosen(
            tile_q=tile_q,
            tile_kv=tile_kv,
            stages=self.stages,
            overlap=overlap,
            ping_pong=turns if self.ping_pong is None else self.ping_pong,
            specialised=self.specialised,
            cluster=self.cluster or (2 if pairs and can_share else 1),
        )

    def launches(self, gpu: Gpu, shape: AttentionShape) -> tuple[Launch, ...]:
        """The one launch. Errors as of `chosen`."""
        own = self.chosen(shape)
        tiles = range(0, shape.q_len, own.tile_q)
        items = [Item(*key_tiles(shape, row, own.tile_q, own.tile_kv)) for row in tiles]
        items = repeated(items, shape.batch * shape.heads)
        if shape.causal:  # the scheduler gives out the longest first
            items.sort(key=lambda item: -item.length)
        lengths = [item.length for item in items]
        missing = missing_part(gpu, shape, lengths, own.tile_kv, shared_by=own.cluster)
        loop = _Loop(gpu, own, shape, missing)
        threads = 128 * (own.tile_q // _ROWS + 1)
        return (
            Launch(
                name="flash_attention_3",
                items=items,
                cta=loop.agents,
                threads=threads,
                # All of the SM's; setmaxnreg moves them from the producer to the others.
                registers=min(255, gpu.registers_per_sm // threads // 8 * 8),
                shared_bytes=loop.shared_bytes,
                path="wgmma fp8" if shape.element == 1 else "wgmma",
                persistent=shape.element == 2,  # as published: the fp8 kernel is not
                cluster=own.cluster,
                flop=shape.flop,
                hbm_bytes=shape.kv_bytes + shape.q_bytes + shape.o_bytes,
                key=(
                    own, min(own.tile_q, shape.q_len), shape.d, shape.d_v, shape.causal,
                    shape.element, missing,
                ),
            ),
        )  # fmt: skip


def _dims(shape: AttentionShape) -> tuple[int, int]:
    """Head dimensions of the kernel for K and V."""
    d = kernel_dim(shape.d, tuple(_V_DIMS))
    return d, kernel_dim(shape.d_v, _V_DIMS[d])


class _Loop:
    """What a CTA does with its items. ``missing``: part of K and V that comes from HBM."""

    def __init__(self, gpu: Gpu, own: Chosen, shape: AttentionShape, missing: float) -> None:
        self.own = own
        self.groups = own.tile_q // _ROWS
        e, keys = shape.element, own.tile_kv
        d, d_v = _dims(shape)
        self.softmax = Softmax(_ROWS, keys, d_v)
        # P goes through shared memory where registers are short.
        short = d == 96 or (d == d_v == 64 and not shape.causal)
        self.p_bytes = _ROWS * keys * e if short and e == 2 else 0
        self.qk = Product("QK", _ROWS, keys, d, e)
        self.pv = Product("PV", _ROWS, d_v, keys, e, a_in_smem=self.p_bytes > 0)
        self.shared_bytes = (
            own.tile_q * max(d * e, d_v * 2)
            + own.stages * keys * (d + d_v) * e
            + self.groups * self.p_bytes
        )
        latency = TMA_LATENCY.value + (gpu.hbm_latency if missing == 1 else gpu.l2_latency)
        there = min(own.tile_q, shape.q_len)  # rows and columns beyond are zeros without a copy
        self.q = Copy("Q", there * shape.d * e, 1.0, TMA_LATENCY.value + gpu.hbm_latency)
        self.k = Copy("K", keys * shape.d * e, missing, latency, own.cluster)
        self.v = Copy("V", keys * shape.d_v * e, missing, latency, own.cluster)
        self.o_bytes = there * shape.d_v * 2 / self.groups
        # wgmma takes fp8 operands along k alone: the producer's warps turn V in shared memory, by
        # ldmatrix, one byte permutation for four bytes, and stmatrix (section 3.3 of the paper).
        self.transposes = e == 1
        self.transpose = lanes(
            "transpose V", "convert", smem=2 * keys * d_v, alu=keys * d_v / 4,
            latency=SMEM_LATENCY.value,
        )  # fmt: skip
        self.rescales_early = d > 128 and e == 2  # beside QK instead of after softmax

    def agents(self, name: str, items: Sequence[Item]) -> list[Agent]:
        cta = _Cta(self)
        consumers = [
            Agent(name, f"warpgroup {w}", cta.consumer(w, items)) for w in range(self.groups)
        ]
        producers = [Agent(name, "producer", cta.producer(items))]
        if self.transposes:
            producers.append(Agent(name, "transposing warps", cta.transposer(items)))
        return [*producers, *consumers]


class _Cta:
    """The barriers of one CTA, and the programs that meet at them."""

    def __init__(self, loop: _Loop) -> None:
        self.loop, self.own = loop, loop.own
        stages, groups = range(loop.own.stages), loop.groups
        self.q_full, self.q_empty = mbarrier("Q full", loop.q.boxes), mbarrier("Q empty", groups)
        self.k_full = [mbarrier(f"K full {s}", loop.k.boxes) for s in stages]
        self.v_full = [
            mbarrier(f"V full {s}", 1 if loop.transposes else loop.v.boxes) for s in stages
        ]
        self.v_there = [mbarrier(f"V there {s}", loop.v.boxes) for s in stages]
        self.k_empty = [mbarrier(f"K empty {s}", groups) for s in stages]
        self.v_empty = [mbarrier(f"V empty {s}", groups) for s in stages]
        self.turns = [named_barrier(f"turn of {w}", 2 * _WARPS) for w in range(groups)]
        self.meeting = named_barrier("sync", groups * _WARPS, groups)

    def producer(self, items: Sequence[Item]) -> Program:
        """Copies in the order in which they are wanted: with overlap, K is a tile ahead of V."""
        block = 0
        for number, item in enumerate(items):
            if number:
                yield Wait(self.q_empty, number - 1)
            yield from self.loop.q.steps(self.q_full)
            ahead = int(self.own.overlap)
            for i in range(item.length + ahead):
                if i < item.length:
                    yield from self._copy(self.loop.k, block + i, self.k_full, self.k_empty)
                if i >= ahead:
                    full = self.v_there if self.loop.transposes else self.v_full
                    yield from self._copy(self.loop.v, block + i - ahead, full, self.v_empty)
            block += item.length

    def transposer(self, items: Sequence[Item]) -> Program:
        stages = self.own.stages
        for block in range(sum(item.length for item in items)):
            yield Wait(self.v_there[block % stages], block // stages)
            yield from in_pieces(self.loop.transpose)
            yield Arrive(self.v_full[block % stages])

    def _copy(
        self, copy: Copy, block: int, full: Sequence[Barrier], empty: Sequence[Barrier]
    ) -> Iterator[Step]:
        stage, phase = block % self.own.stages, block // self.own.stages
        if phase:
            yield Wait(empty[stage], phase - 1)
        yield from copy.steps(full[stage])

    def consumer(self, w: int, items: Sequence[Item]) -> Program:
        tile = _overlapped if self.own.overlap else _one_after_another
        warpgroup = _Warpgroup(self, w)
        for number, item in enumerate(items):
            yield Wait(self.q_full, number)
            if item.length:
                yield from tile(warpgroup, item)
            else:
                yield Arrive(self.q_empty)  # rows that see no key
            yield from self.loop.softmax.finish()
            size = self.loop.o_bytes
            yield Start(Work("O", "store", (("l2", size), ("hbm", size))))


class _Warpgroup:
    """What one warpgroup does with a tile; ``block`` counts its tiles of keys, of all items."""

    def __init__(self, cta: _Cta, w: int) -> None:
        self.cta, self.loop, self.own, self.w = cta, cta.loop, cta.own, w
        self.block = 0
        self.turn = 0

    def wait(self, full: Sequence[Barrier], block: int) -> Step:
        return Wait(full[block % self.own.stages], block // self.own.stages)

    def release(self, empty: Sequence[Barrier], block: int) -> Step:
        return Arrive(empty[block % self.own.stages])

    def enter(self) -> Iterator[Step]:
        """Waits for its turn; the first warpgroup has the first one for nothing."""
        if not self.own.specialised:
            yield Arrive(self.cta.meeting)
            yield Wait(self.cta.meeting, self.turn)
        if self.own.ping_pong and (self.w or self.turn):
            yield Wait(self.cta.turns[self.w], self.turn if self.w else self.turn - 1)
        self.turn += 1

    def leave(self) -> Iterator[Step]:
        if self.own.ping_pong:
            yield Arrive(self.cta.turns[(self.w + 1) % self.loop.groups])

    def scores(self, is_masked: bool) -> Iterator[Step]:
        if is_masked:
            yield from self.loop.softmax.mask()
        yield from self.loop.softmax.maximum()
        yield from self.loop.softmax.exponentials()

    def p(self) -> Iterator[Step]:
        yield from self.loop.softmax.convert()
        if self.loop.p_bytes:
            size, latency = self.loop.p_bytes, SMEM_LATENCY.value
            yield Run(lanes("P to smem", "store", smem=size, latency=latency))


def _overlapped(self: _Warpgroup, item: Item) -> Iterator[Step]:
    """Softmax of a tile runs beside PV of the one before (arXiv 2407.08608, algorithm 2)."""
    cta, loop, masked = self.cta, self.loop, item.kind
    s, o = Barrier("S"), Barrier("O")
    yield self.wait(cta.k_full, self.block)
    yield from loop.qk.issue(s)
    yield Wait(s, 0)
    yield self.release(cta.k_empty, self.block)
    yield from self.scores(masked > 0)
    yield from self.p()
    if item.length == 1:
        yield Arrive(cta.q_empty)
    for i in range(1, item.length):
        before, self.block = self.block, self.block + 1
        yield self.wait(cta.k_full, self.block)
        yield from self.enter()
        yield from loop.qk.issue(s)
        if loop.rescales_early:
            yield from loop.softmax.rescale()
        yield self.wait(cta.v_full, before)
        yield from loop.pv.issue(o)
        yield from self.leave()
        yield Wait(s, i)
        yield self.release(cta.k_empty, self.block)
        if i + 1 == item.length:
            yield Arrive(cta.q_empty)
        yield from self.scores(i < masked)
        yield Wait(o, i - 1)
        yield self.release(cta.v_empty, before)
        yield from self.p()
        if not loop.rescales_early:
            yield from loop.softmax.rescale()
    yield self.wait(cta.v_full, self.block)
    yield from loop.pv.issue(o)
    yield Wait(o, item.length - 1)
    yield self.release(cta.v_empty, self.block)
    self.block += 1


def _one_after_another(self: _Warpgroup, item: Item) -> Iterator[Step]:
    """QK, softmax and PV of a tile in turn."""
    cta, loop = self.cta, self.loop
    s, o = Barrier("S"), Barrier("O")
    for i in range(item.length):
        yield self.wait(cta.k_full, self.block)
        yield from self.enter()
        yield from loop.qk.issue(s)
        yield from self.leave()
        yield Wait(s, i)
        yield self.release(cta.k_empty, self.block)
        if i + 1 == item.length:
            yield Arrive(cta.q_empty)
        yield from self.scores(i < item.kind)
        yield from self.p()
        if i:
            yield from loop.softmax.rescale()
        yield self.wait(cta.v_full, self.block)
        yield from loop.pv.issue(o)
        yield Wait(o, i)
        yield self.release(cta.v_empty, self.block)
        self.block += 1
