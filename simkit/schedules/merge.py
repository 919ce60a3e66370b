"""The kernel that merges attention states: partial outputs of splits, weighted by their LSE.

A CTA reads the LSEs of its rows, then goes round by round over the states. How many rounds it has
in flight decides what it takes, because there are few CTAs and little to do: latency of L2.

Sources: FlashAttention, csrc/flash_attn/src/flash_fwd_kernel.h (2), hopper/flash_fwd_combine (3);
FlashInfer, include/flashinfer/attention/cascade.cuh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simkit.errors import ShapeError
from simkit.machine.gpus import Gpu
from simkit.schedules.engine import Agent, Arrive, Barrier, Program, Run, Start, Wait
from simkit.schedules.grid import Item, Launch
from simkit.schedules.parameters import LANE_LATENCY, SHUFFLE_LATENCY
from simkit.schedules.steps import F32_BYTES, global_load, global_store, lanes, named_barrier

_REGISTERS = 64
_EXCHANGES = 5  # to reduce over a warp


@dataclass(frozen=True, kw_only=True)
class Merge:
    """``rows``, ``threads``: of a CTA. ``states``: of each row in a round. ``in_flight``: rounds.
    ``name``: of the launch.
    """

    rows: int
    states: int
    in_flight: int
    threads: int = 128
    name: str = "merge"

    def __post_init__(self) -> None:
        for field in ("rows", "states", "in_flight", "threads"):
            if getattr(self, field) < 1:
                raise ShapeError(f"{field} must be at least 1, got {getattr(self, field)}")

    def launch(
        self, gpu: Gpu, states: Sequence[int], d: int, *, element: int = 2, dependent: bool = False
    ) -> Launch:
        """Merges ``states[i]`` states of row i, each ``d`` float32 values and their LSE, which lie
        in L2 since another kernel has just written them.

        ``element``: bytes of a value of the output. ``dependent``: programmatic dependent launch.
        `ShapeError` without rows.
        """
        if not states or min(states) < 0:
            least = min(states, default=0)
            raise ShapeError(f"{len(states)} rows to merge, of which one has {least} states")
        groups = [states[row : row + self.rows] for row in range(0, len(states), self.rows)]
        total = sum(states)
        return Launch(
            name=self.name,
            items=[Item(-(-max(group) // self.states), len(group)) for group in groups],
            cta=_Loop(self, d, element, gpu.l2_latency).agents,
            threads=self.threads,
            registers=_REGISTERS,
            shared_bytes=self.rows * max(states) * F32_BYTES,
            path="mma.sync",
            flop=2.0 * total * d,
            hbm_bytes=len(states) * (d * element + F32_BYTES),
            dependent=dependent,
            key=(self, d, element),
        )


def fa2_combine(d: int) -> Merge:
    """FlashAttention-2: a round is used before the next is asked for."""
    rows = 4 if d % 128 == 0 else 8 if d % 64 == 0 else 16
    return Merge(rows=rows, states=1, in_flight=1, name="combine")


def fa3_combine(d: int) -> Merge:
    """FlashAttention-3: four stages of cp.async."""
    rows = 8 if d % 128 == 0 else 16 if d % 64 == 0 else 32
    return Merge(rows=rows, states=1, in_flight=4, threads=256, name="combine")


def flashinfer_merge(d: int) -> Merge:
    """FlashInfer: a CTA takes a row of a head, whose states its groups of threads divide; four
    stages of cp.async.
    """
    threads_of_state = d // max(16 // F32_BYTES, d // 32)
    return Merge(rows=1, states=max(1, 128 // threads_of_state), in_flight=4)


class _Loop:
    """What a CTA does: an item is ``length`` rounds for ``kind`` rows."""

    def __init__(self, own: Merge, d: int, element: int, latency: float) -> None:
        self.own, self.d, self.element, self.latency = own, d, element, latency

    def agents(self, name: str, items: Sequence[Item]) -> list[Agent]:
        return [Agent(name, "warps", self._program(items))]

    def _program(self, items: Sequence[Item]) -> Program:
        own, d = self.own, self.d
        sync = named_barrier("sync", own.threads // 32)
        for number, item in enumerate(items):
            rows = item.kind
            of_round = rows * own.states
            lses = item.length * of_round
            yield Run(global_load("LSE", lses * F32_BYTES, latency=self.latency))
            reduce = 2 * _EXCHANGES * own.threads  # maximum and sum
            latency = 2 * _EXCHANGES * (SHUFFLE_LATENCY.value + LANE_LATENCY.value)
            yield Run(lanes("weights", "softmax", xu=2 * lses, fma=2 * lses, shuffle=reduce,
                            alu=reduce, latency=latency))  # fmt: skip
            yield Arrive(sync)
            yield Wait(sync, number)
            there = Barrier("states there")
            states = global_load("states", of_round * d * F32_BYTES, latency=self.latency)
            add = lanes("add", "compute", fma=of_round * d, latency=LANE_LATENCY.value)
            for _ in range(min(own.in_flight, item.length)):
                yield Start(states, there)
            for i in range(item.length):
                yield Wait(there, i)
                yield Run(add)
                if i + own.in_flight < item.length:
                    yield Start(states, there)
            values = rows * d
            yield Run(lanes("O", "convert", fma=values, xu=values / 2))
            yield Start(global_store("O", values * self.element + rows * F32_BYTES))
