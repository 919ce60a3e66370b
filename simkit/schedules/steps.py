"""What warps do in attention kernels, as works of the engine: softmax, products, copies.

Amounts are of one agent, a warpgroup (four warps, one in each partition of the SM). Long phases
are cut into pieces, because warps share pipes instruction by instruction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simkit.schedules.engine import Arrive, Barrier, Issue, Run, Start, Step, Wait, Work
from simkit.schedules.parameters import (
    DSMEM_LATENCY,
    LANE_LATENCY,
    LDMATRIX_LATENCY,
    MBARRIER_LATENCY,
    MMA_LATENCY,
    SHUFFLE_LATENCY,
    SMEM_LATENCY,
    SYNC_BASE,
    SYNC_PER_WARP,
    WGMMA_LATENCY,
)

PIECES = 8  # of a phase of arithmetic
BOX_BYTES = 8192  # of a bulk copy: 64 rows of 128 bytes, as kernels cut them
WARP = 32
THREADS = 128  # of a warpgroup
F32_BYTES = 4
MASK_OPS = 2  # of a score: compare and select
PACKED = 2
"""Values that one conversion packs (F2FP.PACK_AB in what compilers make for sm_90a)."""


def lanes(
    name: str,
    kind: str,
    *,
    fma: float = 0,
    alu: float = 0,
    xu: float = 0,
    half: float = 0,
    widen: float = 0,
    shuffle: float = 0,
    smem: float = 0,
    latency: float = 0,
) -> Work:
    """Arithmetic by lanes, in lane instructions of each pipe; ``smem`` in bytes."""
    instructions = (fma + alu + shuffle + xu + half + widen) / WARP
    amounts = (
        ("fma", fma), ("alu", alu), ("xu", xu), ("half", half), ("widen", widen),
        ("shuffle", shuffle), ("smem", smem), ("issue", instructions),
    )  # fmt: skip
    return Work(name, kind, tuple(pair for pair in amounts if pair[1]), latency)


def in_pieces(work: Work, pieces: int = PIECES) -> tuple[Run, ...]:
    """The same work in equal pieces; the last has the latency."""
    part = tuple((name, amount / pieces) for name, amount in work.amounts)
    first = Run(Work(work.name, work.kind, part))
    return (first,) * (pieces - 1) + (Run(Work(work.name, work.kind, part, work.latency)),)


@dataclass(frozen=True)
class Softmax:
    """Online softmax of a tile of ``rows`` × ``keys`` scores by one agent, with ``d_v`` columns of
    O. The steps come in the order of FlashAttention's kernels. ``exp2_ops``: fp32 operations of a
    polynomial instead of ex2 (0: ex2).
    """

    rows: int
    keys: int
    d_v: int
    exp2_ops: int = 0

    @property
    def scores(self) -> int:
        return self.rows * self.keys

    def mask(self) -> tuple[Step, ...]:
        return in_pieces(lanes("mask", "softmax", alu=self.scores * MASK_OPS))

    def maximum(self) -> tuple[Step, ...]:
        """Of each row: by lanes, then by two shuffles between the four lanes of a row."""
        exchange = lanes("maximum", "softmax", shuffle=4 * THREADS, alu=4 * THREADS)
        latency = 2 * (SHUFFLE_LATENCY.value + LANE_LATENCY.value)
        return (
            *in_pieces(lanes("maximum", "softmax", alu=self.scores)),
            Run(Work(exchange.name, exchange.kind, exchange.amounts, latency)),
        )

    def exponentials(self) -> tuple[Step, ...]:
        """Of a score: one fma, one exponential, and its sum."""
        xu = 0 if self.exp2_ops else self.scores
        fma = (2 + self.exp2_ops) * self.scores
        return in_pieces(lanes("exp", "softmax", xu=xu, fma=fma))

    def convert(self) -> tuple[Step, ...]:
        """P to the type of the next product: an instruction packs two values."""
        return in_pieces(lanes("P", "convert", xu=self.scores / PACKED))

    def rescale(self) -> tuple[Step, ...]:
        """O by the change of the maximum."""
        return in_pieces(lanes("rescale O", "compute", fma=self.rows * self.d_v), 2)

    def finish(self) -> tuple[Step, ...]:
        """O over the sum, converted, to shared memory."""
        values = self.rows * self.d_v
        store = lanes(
            "O", "convert", fma=values, xu=values / PACKED, smem=2 * values,
            latency=SMEM_LATENCY.value,
        )  # fmt: skip
        return in_pieces(store)


@dataclass(frozen=True)
class Product:
    """A chain of wgmma by one warpgroup: [rows, k] by [k, columns].

    ``element``: bytes of an operand. ``a_in_smem``: whether A comes from shared memory as B does.
    """

    name: str
    rows: int
    columns: int
    k: int
    element: int = 2
    a_in_smem: bool = True

    @property
    def flop(self) -> int:
        return 2 * self.rows * self.columns * self.k

    @property
    def instructions(self) -> int:
        """wgmma of 32 bytes of k, and of at most 256 columns."""
        return -(-self.k * self.element // 32) * -(-self.columns // 256)

    def issue(self, done: Barrier) -> Iterator[Step]:
        """The products one by one; ``done`` when the last has its result."""
        n = self.instructions
        operands = self.columns * self.k * self.element
        if self.a_in_smem:
            operands += self.rows * self.k * self.element * -(-self.columns // 256)
        amounts = (("tensor", self.flop / n), ("smem", operands / n), ("issue", 4))
        one = Issue(Work(self.name, "mma", amounts, WGMMA_LATENCY.value))
        for _ in range(n - 1):
            yield one
        yield Issue(one.work, done)


@dataclass(frozen=True)
class WarpProduct:
    """A chain of mma.sync by four warps that own ``rows`` between them, each with all of B.

    Operands come by ldmatrix one step of k ahead of the products. ``a_in_registers``: whether A is
    in registers already.
    """

    name: str
    rows: int
    columns: int
    k: int
    a_in_registers: bool = False

    @property
    def flop(self) -> int:
        return 2 * self.rows * self.columns * self.k

    def steps(self) -> Iterator[Step]:
        """Goes on when the results are there."""
        step, n = 16, -(-self.k // 16)
        b = 4 * self.columns * step * 2
        a = 0 if self.a_in_registers else self.rows * step * 2
        loads = (a + b) / 512  # ldmatrix.x4 moves 512 bytes
        load = Work(f"{self.name} operands", "load", (("smem", a + b), ("issue", loads)),
                    LDMATRIX_LATENCY.value)  # fmt: skip
        flop = self.flop / n
        product = Work(self.name, "mma", (("tensor", flop), ("issue", flop / 4096)),
                       MMA_LATENCY.value)  # fmt: skip
        ready = Barrier(f"{self.name} operands")
        done = Barrier(self.name)
        yield Start(load, ready)
        for number in range(n):
            if number + 1 < n:
                yield Start(load, ready)
            yield Wait(ready, number)
            yield Issue(product, done)
        yield Wait(done, n - 1)


@dataclass(frozen=True)
class Copy:
    """A bulk copy of ``count`` bytes to shared memory, box by box: from L2, ``missing`` of it (0 to
    1) from HBM. ``shared_by``: SMs that one transfer serves (multicast).
    """

    name: str
    count: float
    missing: float = 0.0
    latency: float = 0.0
    shared_by: int = 1

    @property
    def boxes(self) -> int:
        return max(1, -(-int(self.count) // BOX_BYTES))

    def steps(self, full: Barrier) -> Iterator[Step]:
        """``full`` takes one arrival for each box. The agent is the copy engine."""
        box = self.count / self.boxes
        amounts = [("l2", box / self.shared_by)]
        if self.missing:
            amounts.append(("hbm", box * self.missing / self.shared_by))
        transfer = Run(Work(self.name, "load", tuple(amounts)))
        arrival = Start(Work(self.name, "load", (("smem", box),), self.latency), full)
        for _ in range(self.boxes):
            yield transfer
            yield arrival


def to_peer(name: str, count: float, landed: Barrier) -> Step:
    """Stores of ``count`` bytes to the peer's shared memory, which takes as many from the peer: the
    CTAs of a pair do the same, so that ``landed`` is told when those are in as well.
    """
    work = Work(name, "store", (("dsmem", count), ("smem", count)), DSMEM_LATENCY.value)
    return Issue(work, landed)


def from_fp8(values: int) -> tuple[Step, ...]:
    """fp8 to bf16 times its scale: a shift for two of four values, fp8 to f16, f16 to fp32, fp32 to
    bf16, product, one after another, as FlashMLA counts them (docs/20250929) and nvcc makes them.
    """
    latency = LANE_LATENCY.value
    return (
        Run(lanes("shift", "convert", alu=values / 4, latency=latency)),
        Run(lanes("fp8 to f16", "convert", widen=values, latency=latency)),
        Run(lanes("f16 to fp32", "convert", widen=values, latency=latency)),
        Run(lanes("fp32 to bf16", "convert", xu=values / PACKED, latency=latency)),
        Run(lanes("times scale", "convert", half=values, latency=latency)),
    )


def mbarrier(name: str, count: int = 1) -> Barrier:
    return Barrier(name, count, MBARRIER_LATENCY.value)


def named_barrier(name: str, warps: int, arrivals: int = 1) -> Barrier:
    """bar.sync of ``warps``, of which ``arrivals`` agents tell."""
    return Barrier(name, arrivals, SYNC_BASE.value + SYNC_PER_WARP.value * warps)


class Sync:
    """One agent's __syncthreads, again and again at a ``barrier`` of all agents of its CTA."""

    def __init__(self, barrier: Barrier) -> None:
        self._barrier = barrier
        self._phase = 0

    def steps(self) -> Iterator[Step]:
        yield Arrive(self._barrier)
        yield Wait(self._barrier, self._phase)
        self._phase += 1


def global_load(name: str, count: float, missing: float = 0.0, latency: float = 0.0) -> Work:
    """A load of ``count`` bytes to registers: from L2, ``missing`` of it (0 to 1) from HBM."""
    hbm = (("hbm", count * missing),) if missing else ()
    return Work(name, "load", (("l2", count), *hbm), latency)


def global_store(name: str, count: float, missing: float = 1.0) -> Work:
    """A store of ``count`` bytes to L2, of which ``missing`` (0 to 1) goes on to HBM."""
    hbm = (("hbm", count * missing),) if missing else ()
    return Work(name, "store", (("l2", count), *hbm))
