"""A matrix product as a kernel: tiles of C, each a loop over k, fed by copies a few stages ahead.

wgmma where there is one: a producer warp and a warpgroup for 64 rows of the tile. Otherwise
mma.sync: four warps for each 64 rows, and cp.async. cuBLAS's choices are not public; the tile is
the default of CUTLASS's profiler on Hopper, 128 x 128 x 64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from simkit.errors import ShapeError
from simkit.machine.gpus import Gpu
from simkit.schedules.engine import Agent, Arrive, Barrier, Program, Start, Step, Wait
from simkit.schedules.grid import Item, Launch, repeated
from simkit.schedules.parameters import TMA_LATENCY
from simkit.schedules.steps import (
    Copy,
    Product,
    WarpProduct,
    global_store,
    in_pieces,
    lanes,
    mbarrier,
)

_ROWS = 64  # of a warpgroup
_REGISTERS = 168


@dataclass(frozen=True, kw_only=True)
class Operands:
    """``a``, ``b``, ``c``: part of each that HBM has to bring or take, 0 to 1, of what the CTAs
    copy between them.
    """

    a: float = 1.0
    b: float = 1.0
    c: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """Tiles [``tile_m``, ``tile_n``] of C, ``tile_k`` at a time, ``stages`` of these in flight."""

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    stages: int = 3

    def __post_init__(self) -> None:
        if self.tile_m % _ROWS or not 1 <= self.tile_m // _ROWS <= 3:
            raise ShapeError(f"tile_m must be 64, 128 or 192, got {self.tile_m}")
        for name, step in (("tile_n", 8), ("tile_k", 16), ("stages", 1)):
            value = getattr(self, name)
            if value < step or value % step:
                raise ShapeError(f"{name} must be a multiple of {step} from {step}, got {value}")

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.tile_m + self.tile_n) * self.tile_k * 2

    def launch(
        self,
        gpu: Gpu,
        name: str,
        count: int,
        m: int,
        n: int,
        k: int,
        *,
        hbm: Operands,
        hbm_bytes: float,
        is_halved: bool = False,
    ) -> Launch:
        """``count`` products [m, k] by [k, n] of 16-bit values. ``hbm_bytes``: that must move.
        ``is_halved``: whether half of the FLOP count, as figures do under a causal mask.
        """
        tiles = count * -(-m // self.tile_m) * -(-n // self.tile_n)
        uses_wgmma = gpu.capability >= (9, 0)
        loop = _Loop(self, gpu, min(n, self.tile_n), hbm, uses_wgmma)
        return Launch(
            name=name,
            items=repeated([Item(-(-k // self.tile_k))], tiles),
            cta=loop.agents,
            threads=128 * (loop.groups + uses_wgmma),
            registers=min(_REGISTERS, gpu.registers_per_sm // (128 * (loop.groups + 1)) // 8 * 8),
            shared_bytes=self.shared_bytes,
            path="wgmma" if uses_wgmma else "mma.sync",
            flop=(1.0 if is_halved else 2.0) * count * m * n * k,
            hbm_bytes=hbm_bytes,
            key=(self, min(n, self.tile_n), hbm, uses_wgmma),
        )


class _Loop:
    """What a CTA does with a tile of C: an item is ``length`` steps of k."""

    def __init__(self, own: Matmul, gpu: Gpu, n: int, hbm: Operands, uses_wgmma: bool) -> None:
        self.own, self.uses_wgmma = own, uses_wgmma
        self.groups = own.tile_m // _ROWS
        latency = gpu.hbm_latency + (TMA_LATENCY.value if uses_wgmma else 0)
        self.a = Copy("A", own.tile_m * own.tile_k * 2, hbm.a, latency)
        self.b = Copy("B", n * own.tile_k * 2, hbm.b, latency)
        self.product = Product("C", _ROWS, n, own.tile_k)
        self.warp_product = WarpProduct("C", _ROWS, n, own.tile_k)
        values = _ROWS * n
        self.convert = lanes("C", "convert", xu=values / 2, smem=2 * values)
        self.store = global_store("C", values * 2, hbm.c)

    def agents(self, name: str, items: Sequence[Item]) -> list[Agent]:
        stages = range(self.own.stages)
        full = [mbarrier(f"full {s}", self.a.boxes + self.b.boxes) for s in stages]
        empty = [mbarrier(f"empty {s}", self.groups) for s in stages]
        groups = [
            Agent(name, f"warps {4 * group}-{4 * group + 3}", self._consumer(items, full, empty))
            for group in range(self.groups)
        ]
        return [Agent(name, "producer", self._producer(items, full, empty)), *groups]

    def _producer(
        self, items: Sequence[Item], full: Sequence[Barrier], empty: Sequence[Barrier]
    ) -> Program:
        stages, block = self.own.stages, 0
        for item in items:
            for _ in range(item.length):
                stage, phase = block % stages, block // stages
                if phase:
                    yield Wait(empty[stage], phase - 1)
                yield from self.a.steps(full[stage])
                yield from self.b.steps(full[stage])
                block += 1

    def _consumer(
        self, items: Sequence[Item], full: Sequence[Barrier], empty: Sequence[Barrier]
    ) -> Program:
        stages, block = self.own.stages, 0
        for item in items:
            done = Barrier("C")
            for i in range(item.length):
                yield Wait(full[block % stages], block // stages)
                yield from self._multiply(done, i)
                yield Arrive(empty[block % stages])
                block += 1
            yield from in_pieces(self.convert)
            yield Start(self.store)

    def _multiply(self, done: Barrier, i: int) -> Iterator[Step]:
        if not self.uses_wgmma:
            yield from self.warp_product.steps()
            return
        yield from self.product.issue(done)
        yield Wait(done, i)
