"""Attention in three kernels: S = Q K^T, P = softmax(S), O = P V, with S and P in HBM.

Source: 3.4 Attention kernel, naive attention and its traffic. A causal mask saves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from simkit.machine.gpus import KIB, Gpu
from simkit.schedules.engine import Agent, Program, Run, Start, Wait
from simkit.schedules.grid import Item, Launch, repeated
from simkit.schedules.matmul import Matmul, Operands
from simkit.schedules.parameters import SMEM_LATENCY
from simkit.schedules.shape import AttentionShape
from simkit.schedules.steps import Copy, Softmax, global_store, in_pieces, lanes, named_barrier

_WARPS = 4
_MOST_ROW_BYTES = 48 * KIB  # of the rows of a CTA, so that an SM has several


@dataclass(frozen=True, kw_only=True)
class NaiveAttention:
    """``qk``, ``pv``: the two matrix products."""

    qk: Matmul = field(default_factory=Matmul)
    pv: Matmul = field(default_factory=Matmul)

    def launches(self, gpu: Gpu, shape: AttentionShape) -> tuple[Launch, ...]:
        """The three kernels. `CapacityError` later, for a row that shared memory does not hold."""
        shape.check_16_bits("naive attention")
        s = score_bytes(shape)
        # What was written last is still in L2 if it fits.
        part = 1.0 if s > gpu.l2_bytes else 0.0
        heads = shape.batch * shape.heads
        k_bytes = shape.kv_bytes * shape.d // (shape.d + shape.d_v)
        tiles_n, tiles_m = -(-shape.kv_len // self.qk.tile_n), -(-shape.q_len // self.qk.tile_m)
        repeats = -(-shape.q_len // self.pv.tile_m) * shape.group
        return (
            self.qk.launch(
                gpu, "scores", heads, shape.q_len, shape.kv_len, shape.d,
                hbm=Operands(a=1 / tiles_n, b=1 / (tiles_m * shape.group), c=part),
                hbm_bytes=shape.q_bytes + k_bytes + part * s, is_halved=shape.causal,
            ),
            self._softmax(gpu, shape, part),
            self.pv.launch(
                gpu, "output", heads, shape.q_len, shape.d_v, shape.kv_len,
                hbm=Operands(a=part / -(-shape.d_v // self.pv.tile_n), b=1 / repeats, c=1.0),
                hbm_bytes=part * s + shape.kv_bytes - k_bytes + shape.o_bytes,
                is_halved=shape.causal,
            ),
        )  # fmt: skip

    def _softmax(self, gpu: Gpu, shape: AttentionShape, part: float) -> Launch:
        """Rows of S to rows of P; a CTA has one row of each of four warps, or fewer if long."""
        row_bytes = shape.kv_len * shape.element
        rows = max(1, min(_WARPS, _MOST_ROW_BYTES // row_bytes))
        count = -(-shape.batch * shape.heads * shape.q_len // rows)
        latency = gpu.hbm_latency if part else gpu.l2_latency
        return Launch(
            name="softmax",
            items=repeated([Item(1)], count),
            cta=_Rows(rows, shape.kv_len, shape.element, part, latency).agents,
            threads=32 * _WARPS,
            registers=64,
            shared_bytes=rows * row_bytes,
            path="mma.sync",
            hbm_bytes=2 * part * score_bytes(shape),
            key=("softmax", rows, shape.kv_len, shape.element, part),
        )


def score_bytes(shape: AttentionShape) -> int:
    """Of one matrix of scores of every head; S and P take as much each."""
    return shape.batch * shape.heads * shape.q_len * shape.kv_len * shape.element


class _Rows:
    """A CTA of the softmax kernel: rows of S to shared memory, and as P back to HBM."""

    def __init__(self, rows: int, keys: int, element: int, part: float, latency: float) -> None:
        self.s = Copy("S", rows * keys * element, part, latency)
        self.softmax = Softmax(rows, keys, 0)
        size = rows * keys * element
        # Read from shared memory once for the maximum and once for the exponentials.
        self.read = lanes("S", "load", smem=size, widen=rows * keys, latency=SMEM_LATENCY.value)
        self.divide = lanes("P", "compute", fma=rows * keys)
        self.store = global_store("P", size, part)

    def agents(self, name: str, items: Sequence[Item]) -> list[Agent]:
        return [Agent(name, "warps", self._program(items))]

    def _program(self, items: Sequence[Item]) -> Program:
        sync = named_barrier("sync", _WARPS, self.s.boxes)
        for number, _ in enumerate(items):
            yield from self.s.steps(sync)
            yield Wait(sync, number)
            yield Run(self.read)
            yield from self.softmax.maximum()
            yield Run(self.read)
            yield from self.softmax.exponentials()
            yield from in_pieces(self.divide)
            yield from self.softmax.convert()
            yield Start(self.store)
