"""FlashMLA's combine kernel: states of the splits of a request are merged, one warp a head.

Source: FlashMLA, csrc/smxx/decode/combine (2026-04-29). CTAs of requests that are not split return
at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simkit.errors import ShapeError
from simkit.machine.gpus import Gpu
from simkit.schedules.engine import Agent, Barrier, Delay, Program, Run, Start, Wait
from simkit.schedules.grid import Item, Launch
from simkit.schedules.mla import D_V, ELEMENT
from simkit.schedules.parameters import LANE_LATENCY, SHUFFLE_LATENCY, SMEM_LATENCY
from simkit.schedules.steps import F32_BYTES, PACKED, WARP, global_load, global_store, lanes

HEADS = 8  # of a CTA, one a warp
_GROUP = 4  # warps of an agent
_REGISTERS = 64
_STEPS = 5  # of a tree over 32 lanes
MOST_SPLITS = 160


@dataclass(frozen=True, kw_only=True)
class MlaCombine:
    """``dependent``: launched before the kernel ahead ends (programmatic dependent launch)."""

    dependent: bool = True

    def launches(
        self, gpu: Gpu, splits: Sequence[int], *, heads: int, q_len: int
    ) -> tuple[Launch, ...]:
        """The one launch; none if no request is split.

        ``splits``: of each request, 1 to 160. `ShapeError` for others.
        """
        if not all(1 <= count <= MOST_SPLITS for count in splits):
            raise ShapeError(f"a request has 1 to {MOST_SPLITS} splits, got {sorted(set(splits))}")
        if max(splits, default=1) == 1:
            return ()
        groups = -(-heads // HEADS)
        items = [
            Item(0 if count == 1 else count)
            for count in splits
            for _ in range(q_len * groups)
        ]  # fmt: skip
        merged = [count for count in splits if count > 1]
        rows = q_len * heads * len(merged)
        return (
            Launch(
                name="mla_combine",
                items=items,
                cta=_Cta(gpu).agents,
                threads=WARP * HEADS,
                registers=_REGISTERS,
                shared_bytes=HEADS * (MOST_SPLITS + 1) * F32_BYTES,
                hbm_bytes=rows * D_V * ELEMENT,
                dependent=self.dependent,
                key="warp of a head",
            ),
        )


class _Cta:
    """States are in L2, where the kernel ahead has just written them."""

    def __init__(self, gpu: Gpu) -> None:
        self.latency = gpu.l2_latency
        self.state_bytes = _GROUP * D_V * F32_BYTES  # of a split, for the heads of an agent

    def agents(self, name: str, items: Sequence[Item]) -> list[Agent]:
        return [
            Agent(name, f"warps {first}-{first + _GROUP - 1}", self.program(items))
            for first in range(0, HEADS, _GROUP)
        ]

    def program(self, items: Sequence[Item]) -> Program:
        load = global_load("states", self.state_bytes, latency=self.latency)
        for item in items:
            yield Delay(self.latency)  # where the splits of the request start
            if not item.length:
                continue
            there = Barrier("states")
            yield Start(load, there)
            lse_bytes = _GROUP * item.length * F32_BYTES
            yield Run(global_load("lse", lse_bytes, latency=self.latency))
            yield from self._weights()
            for split in range(item.length):
                yield Wait(there, split)
                yield Run(lanes("merge", "compute", fma=_GROUP * D_V, latency=LANE_LATENCY.value))
                if split + 1 < item.length:  # one split is in flight
                    yield Start(load, there)
            values = _GROUP * D_V
            yield Run(lanes("O", "convert", xu=values / PACKED))
            yield Start(global_store("O", values * ELEMENT))

    def _weights(self) -> Sequence[Run]:
        """Maximum and sum of the states' LSE by trees over the lanes, and a weight for each."""
        lanes_of = _GROUP * WARP
        tree = _STEPS * (SHUFFLE_LATENCY.value + LANE_LATENCY.value)
        return (
            Run(lanes("maximum", "softmax", shuffle=_STEPS * lanes_of, alu=_STEPS * lanes_of,
                      latency=tree)),
            Run(lanes("sum", "softmax", xu=lanes_of, shuffle=_STEPS * lanes_of,
                      fma=_STEPS * lanes_of, latency=tree)),
            Run(lanes("weights", "softmax", xu=lanes_of, smem=F32_BYTES * lanes_of,
                      latency=SMEM_LATENCY.value)),
        )  # fmt: skip
