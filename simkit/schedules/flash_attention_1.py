"""FlashAttention-1: keys outside, queries inside; O and its statistics go through HBM every step.

Source: Dao et al., FlashAttention, arXiv 2205.14135, algorithm 1 with its block sizes for M values
of shared memory: Bc = ceil(M / 4d), Br = min(Bc, d). A CTA has a head. Bc is rounded down to what
tensor cores take, 16, and is no more than holds all keys; Br is rounded to 64, rows of four warps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from simkit.errors import CapacityError, ShapeError
from simkit.machine.gpus import Gpu
from simkit.schedules.engine import Agent, Barrier, Program, Start, Step, Wait
from simkit.schedules.grid import Item, Launch, repeated
from simkit.schedules.shape import AttentionShape
from simkit.schedules.steps import (
    F32_BYTES,
    Copy,
    Softmax,
    WarpProduct,
    global_store,
    in_pieces,
    lanes,
    named_barrier,
)

_WARPS = 4
_STATISTICS = 2  # of a row: maximum and sum

MOST_QUERIES = 32_768


@dataclass(frozen=True)
class Chosen:
    """`FlashAttention1` with nothing left open."""

    tile_q: int
    tile_kv: int


@dataclass(frozen=True, kw_only=True)
class FlashAttention1:
    """``tile_q``, ``tile_kv``: rows and keys of a block; None: those of the paper's formula."""

    tile_q: int | None = None
    tile_kv: int | None = None

    def chosen(self, gpu: Gpu, shape: AttentionShape) -> Chosen:
        """Every choice made. `ShapeError` for a causal mask or several heads to a K/V head, which
        the algorithm does not have, and blocks that are no multiples of 16.
        """
        shape.check_16_bits("FlashAttention-1")
        if shape.causal or shape.group > 1 or shape.d_v != shape.d:
            raise ShapeError(
                f"FlashAttention-1 has no causal mask, no groups, and d_v is d: got causal "
                f"{shape.causal}, {shape.group} heads a K/V head, d {shape.d} and d_v {shape.d_v}"
            )
        values = gpu.smem_per_block_optin // shape.element
        columns = -(-values // (4 * shape.d))
        rows = self.tile_q or max(64, min(columns, shape.d) // 64 * 64)
        keys = self.tile_kv or min(max(16, columns // 16 * 16), -(-shape.kv_len // 16) * 16)
        if rows % 64 or keys % 16 or min(rows, keys) < 16:
            raise ShapeError(f"blocks are multiples of 64 rows and 16 keys, got {rows} x {keys}")
        if shape.q_len > MOST_QUERIES:
            raise CapacityError(
                f"q_len {shape.q_len}: every block of keys goes through all queries, which takes "
                f"minutes to simulate beyond {MOST_QUERIES}"
            )
        return Chosen(rows, keys)

    def launches(self, gpu: Gpu, shape: AttentionShape) -> tuple[Launch, ...]:
        """The one launch. Errors as of `chosen`."""
        own = self.chosen(gpu, shape)
        heads = shape.batch * shape.heads
        blocks = -(-shape.kv_len // own.tile_kv)
        rows_bytes = _row_bytes(shape) * shape.q_len
        at_a_time = min(heads, gpu.sm_count) * rows_bytes
        loop = _Loop(own, gpu, shape, 1.0 if at_a_time > gpu.l2_bytes else 1 / blocks)
        return (
            Launch(
                name="flash_attention_1",
                items=repeated([Item(blocks)], heads),
                cta=loop.agents,
                threads=32 * _WARPS,
                registers=255,
                # K, V, Q and O, a quarter each: what the formula is made for.
                shared_bytes=(own.tile_kv + own.tile_q) * 2 * shape.d * shape.element,
                path="mma.sync",
                flop=shape.flop,
                hbm_bytes=shape.kv_bytes + heads * blocks * rows_bytes * loop.missing,
                key=(own, shape, loop.missing),
            ),
        )


def _row_bytes(shape: AttentionShape) -> int:
    """Of a row in a step of the outer loop: Q, O and statistics read, the latter two written."""
    return 3 * shape.d * shape.element + 2 * _STATISTICS * F32_BYTES


class _Loop:
    """What a CTA does: an item is ``length`` blocks of keys, each with all queries of the head."""

    def __init__(self, own: Chosen, gpu: Gpu, shape: AttentionShape, missing: float) -> None:
        self.own, self.missing = own, missing
        rows, keys, d, element = own.tile_q, own.tile_kv, shape.d, shape.element
        self.steps = -(-shape.q_len // rows)
        latency = gpu.hbm_latency if missing == 1 else gpu.l2_latency
        self.k = Copy("K", keys * d * element, 1.0, gpu.hbm_latency)
        self.v = Copy("V", keys * d * element, 1.0, gpu.hbm_latency)
        state = rows * (d * element + _STATISTICS * F32_BYTES)
        self.q = Copy("Q", rows * d * element, missing, latency)
        self.o = Copy("O, l, m", state, missing, latency)
        self.qk = WarpProduct("QK", rows, keys, d)
        self.pv = WarpProduct("PV", rows, d, keys, a_in_registers=True)
        self.softmax = Softmax(rows, keys, d)
        # O stays normalised: the old one times l and the new one over l, every step.
        self.normalise = lanes("O", "compute", fma=3 * rows * d, smem=2 * rows * d * element)
        self.store = global_store("O, l, m", state, missing)

    def agents(self, name: str, items: Sequence[Item]) -> list[Agent]:
        return [Agent(name, "warps", self._program(items))]

    def _program(self, items: Sequence[Item]) -> Program:
        sync = named_barrier("sync", _WARPS, self.k.boxes + self.v.boxes)
        rows = named_barrier("rows", _WARPS, self.q.boxes + self.o.boxes)
        outer = inner = 0
        for item in items:
            for _ in range(item.length):
                yield from self.k.steps(sync)
                yield from self.v.steps(sync)
                yield Wait(sync, outer)
                outer += 1
                for _ in range(self.steps):
                    yield from self._step(rows, inner)
                    inner += 1

    def _step(self, rows: Barrier, number: int) -> Iterator[Step]:
        yield from self.q.steps(rows)
        yield from self.o.steps(rows)
        yield Wait(rows, number)
        yield from self.qk.steps()
        yield from self.softmax.maximum()
        yield from self.softmax.exponentials()
        yield from self.softmax.convert()
        yield from self.pv.steps()
        yield from in_pieces(self.normalise, 2)
        yield Start(self.store)
