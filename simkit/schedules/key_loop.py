"""Four warps that walk over tiles of keys: mma.sync for products, cp.async for copies.

FlashAttention-2's split kernels and FlashInfer's decoding on tensor cores are this loop; they
differ in when they ask for the next tile, in who owns what of a tile, and in pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from simkit.schedules.engine import Agent, Arrive, Barrier, Program, Run, Start, Step, Wait
from simkit.schedules.grid import Item
from simkit.schedules.steps import (
    F32_BYTES,
    Copy,
    Softmax,
    Sync,
    WarpProduct,
    global_load,
    global_store,
    lanes,
    named_barrier,
)

WARPS = 4
THREADS = 32 * WARPS

Order = Literal["one ahead", "two ahead"]
"""When a tile is asked for. One ahead: V when K is there, the next K when V is there, so that one
of the two is in flight (FlashAttention-2). Two ahead: the next K after QK, the next V after PV, so
that both are (FlashInfer).
"""


@dataclass(frozen=True, kw_only=True)
class KeyLoop:
    """A CTA's item is ``length`` tiles of keys, of which the first ``kind`` need a mask.

    ``rows``, ``keys``: of a tile. ``kv_warps``: warps that share a row and divide the keys, 1 or 4;
    otherwise they divide the rows. ``q_bytes``, ``o_bytes``: of the rows that exist. ``element``:
    bytes of a value of K and V. ``missing``: part of K and V that HBM has to bring, after
    ``latency`` cycles. ``o_missing``: part of the output that goes on to HBM. ``page_bytes``: of
    the page table for a tile, which must be there before its copies; ``page_latency``: cycles.
    """

    rows: int
    keys: int
    d: int
    d_v: int
    q_bytes: float
    o_bytes: float
    latency: float
    missing: float = 1.0
    o_missing: float = 1.0
    element: int = 2
    kv_warps: int = 1
    order: Order = "one ahead"
    page_bytes: float = 0.0
    page_latency: float = 0.0

    @property
    def shared_bytes(self) -> int:
        return self.rows * self.d * 2 + self.keys * (self.d + self.d_v) * self.element

    @cached_property
    def softmax(self) -> Softmax:
        return Softmax(self.rows * self.kv_warps, self.keys // self.kv_warps, self.d_v)

    @cached_property
    def qk(self) -> WarpProduct:
        return WarpProduct("QK", self.rows * self.kv_warps, self.keys // self.kv_warps, self.d)

    @cached_property
    def pv(self) -> WarpProduct:
        rows, keys = self.rows * self.kv_warps, self.keys // self.kv_warps
        return WarpProduct("PV", rows, self.d_v, keys, a_in_registers=True)

    @cached_property
    def q(self) -> Copy:
        return Copy("Q", self.q_bytes, 1.0, self.latency)

    @cached_property
    def k(self) -> Copy:
        return Copy("K", self.keys * self.d * self.element, self.missing, self.latency)

    @cached_property
    def v(self) -> Copy:
        return Copy("V", self.keys * self.d_v * self.element, self.missing, self.latency)

    def agents(self, name: str, items: Sequence[Item]) -> list[Agent]:
        cta = _Cta(self)
        return [
            Agent(name, "warps", cta.warps(items)),
            Agent(name, "copies", cta.copies(items)),
        ]


class _Cta:
    def __init__(self, loop: KeyLoop) -> None:
        self.loop = loop
        self.q_full, self.k_full, self.v_full = (
            Barrier(f"{copy.name} there", copy.boxes) for copy in (loop.q, loop.k, loop.v)
        )
        self.q_asked, self.k_asked, self.v_asked = (Barrier(f"{name} asked") for name in "QKV")
        self.pages = Barrier("pages there")
        self.sync = Sync(named_barrier("sync", WARPS))

    def copies(self, items: Sequence[Item]) -> Program:
        """cp.async groups, in the order of issue; page indices one tile ahead."""
        loop, block = self.loop, 0
        pages = global_load("page table", loop.page_bytes, latency=loop.page_latency)
        for number, item in enumerate(items):
            yield Wait(self.q_asked, number)
            yield from loop.q.steps(self.q_full)
            if loop.page_bytes and item.length:
                yield Start(pages, self.pages)
            for i in range(item.length):
                yield Wait(self.k_asked, block)
                if loop.page_bytes:
                    yield Wait(self.pages, block)
                yield from loop.k.steps(self.k_full)
                if loop.page_bytes and i + 1 < item.length:
                    yield Start(pages, self.pages)
                yield Wait(self.v_asked, block)
                yield from loop.v.steps(self.v_full)
                block += 1

    def warps(self, items: Sequence[Item]) -> Program:
        tile = self._one_ahead if self.loop.order == "one ahead" else self._two_ahead
        block = 0
        for number, item in enumerate(items):
            yield Arrive(self.q_asked)
            if item.length:
                yield Arrive(self.k_asked)
                if self.loop.order == "two ahead":
                    yield Arrive(self.v_asked)
            yield Wait(self.q_full, number)
            for i in range(item.length):
                yield from tile(block, i, item)
                block += 1
            yield from self._finish()

    def _one_ahead(self, block: int, i: int, item: Item) -> Iterator[Step]:
        yield Wait(self.k_full, block)
        yield from self.sync.steps()
        yield Arrive(self.v_asked)
        yield from self.loop.qk.steps()
        yield from self._mask(i, item)
        yield Wait(self.v_full, block)
        yield from self.sync.steps()
        if i + 1 < item.length:
            yield Arrive(self.k_asked)
        yield from self._softmax(i)
        yield from self.loop.pv.steps()

    def _two_ahead(self, block: int, i: int, item: Item) -> Iterator[Step]:
        yield Wait(self.k_full, block)
        yield from self.sync.steps()
        yield from self.loop.qk.steps()
        yield from self._mask(i, item)
        yield from self._softmax(i)
        yield from self.sync.steps()
        if i + 1 < item.length:
            yield Arrive(self.k_asked)
        yield Wait(self.v_full, block)
        yield from self.sync.steps()
        yield from self.loop.pv.steps()
        yield from self.sync.steps()
        if i + 1 < item.length:
            yield Arrive(self.v_asked)

    def _mask(self, i: int, item: Item) -> Iterator[Step]:
        if i < (item.kind or 0):
            yield from self.loop.softmax.mask()

    def _softmax(self, i: int) -> Iterator[Step]:
        softmax = self.loop.softmax
        yield from softmax.maximum()
        if i:
            yield from softmax.rescale()
        yield from softmax.exponentials()
        yield from softmax.convert()

    def _finish(self) -> Iterator[Step]:
        loop = self.loop
        yield from loop.softmax.finish()
        if loop.kv_warps > 1:  # warps merge their states through shared memory
            yield from self.sync.steps()
            values = loop.kv_warps * loop.rows * loop.d_v
            yield Run(lanes("merge", "compute", fma=values, smem=2 * values * F32_BYTES))
        yield Start(global_store("O", loop.o_bytes, loop.o_missing))
