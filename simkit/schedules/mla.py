"""What FlashMLA's schedules share: sizes, pieces of requests on CTAs, and how O leaves a CTA."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from simkit.errors import ShapeError
from simkit.machine.gpus import Gpu
from simkit.planning.flashmla import OVERHEAD, MlaPiece
from simkit.planning.load import list_schedule
from simkit.schedules.engine import Barrier, Run, Start, Step, Work
from simkit.schedules.grid import Item
from simkit.schedules.parameters import SHUFFLE_LATENCY, SMEM_LATENCY
from simkit.schedules.steps import F32_BYTES, THREADS, Softmax, in_pieces, lanes

ROWS = 64  # heads, or heads of queries, of a CTA
KEYS = 64  # of a block: a page, or so many top-k entries
D_QK = 576
D_V = 512
HALF = D_V // 2  # columns of O that a warpgroup owns
ELEMENT = 2
TILE = 64  # columns of a copy and of a step of Q K^T
TILES = D_QK // TILE
TILE_BYTES = KEYS * TILE * ELEMENT
Q_BYTES = ROWS * D_QK * ELEMENT
P_BYTES = ROWS * KEYS * ELEMENT
WARPS = 8  # of the two warpgroups that compute


def softmax() -> Softmax:
    """Of a block, by a warpgroup that owns half of O."""
    return Softmax(ROWS, KEYS, HALF)


def check_heads(heads: int, unit: int, most: int) -> None:
    if not 1 <= heads <= most or heads % unit:
        raise ShapeError(f"heads must be 1 to {most} in steps of {unit}, got {heads}")


@dataclass(frozen=True)
class Piece:
    """What an item's kind says beside its length: whether the piece ``is_split``."""

    is_split: bool


@dataclass(frozen=True)
class Deal:
    """Items in the order of the CTAs that take them, and the SM of each."""

    items: tuple[Item, ...]
    workers: tuple[int, ...]


def deal(pieces: Iterable[MlaPiece], copies: int, slots: int) -> Deal:
    """CTAs that each take the pieces of a part: ``copies`` CTAs a part, for the rows.

    CTAs beyond the ``slots`` of the GPU start when one of these is free.
    """
    parts: dict[int, list[Item]] = {}
    for piece in pieces:
        item = Item(max(0, piece.stop - piece.start), Piece(piece.is_split))
        parts.setdefault(piece.part, []).append(item)
    ctas = [items for items in parts.values() for _ in range(copies)]
    costs = [sum(item.length + OVERHEAD for item in items) for items in ctas]
    places = list_schedule(costs, min(slots, len(ctas))).worker.tolist()
    return Deal(
        tuple(item for items in ctas for item in items),
        tuple(place for place, items in zip(places, ctas, strict=True) for _ in items),
    )


def sums(name: str) -> tuple[Step, ...]:
    """Sums of rows, between the four lanes of a row and through shared memory."""
    work = lanes(name, "softmax", shuffle=4 * THREADS, fma=4 * THREADS, smem=ROWS * F32_BYTES)
    latency = 2 * SHUFFLE_LATENCY.value + SMEM_LATENCY.value
    return (Run(Work(work.name, work.kind, work.amounts, latency)),)


def to_staging(is_split: bool) -> tuple[Step, ...]:
    """A warpgroup's half of O over the sum, to shared memory: bf16, or fp32 of a split."""
    if not is_split:
        return softmax().finish()
    values = ROWS * HALF
    return in_pieces(
        lanes("O", "convert", fma=values, smem=F32_BYTES * values, latency=SMEM_LATENCY.value)
    )


def store(is_split: bool, columns: int = D_V, rows: int = ROWS) -> Iterator[Step]:
    """O from shared memory by bulk copies; goes on when they have read it."""
    size = rows * columns * (F32_BYTES if is_split else ELEMENT)
    yield Run(Work("O", "store", (("l2", size), ("smem", size))))
    if not is_split:  # states of splits stay in L2 until they are combined
        yield Start(Work("O", "store", (("hbm", size),)))


def load_q(gpu: Gpu, full: Barrier, latency: float, rows: int = ROWS) -> Step:
    """Q by one bulk copy, of the ``rows`` that there are."""
    size = rows * D_QK * ELEMENT
    amounts = (("l2", size), ("hbm", size), ("smem", size))
    return Start(Work("Q", "load", amounts, latency + gpu.hbm_latency), full)


def p_to_smem(name: str) -> Step:
    return Run(lanes(name, "store", smem=P_BYTES, latency=SMEM_LATENCY.value))


def flop(heads: int, attended: int) -> int:
    """By the convention of the published figures; ``attended``: keys, summed over queries."""
    return 2 * heads * attended * (D_QK + D_V)


def qo_bytes(rows: int) -> int:
    """Of Q and of O, once."""
    return rows * (D_QK + D_V) * ELEMENT


def split_counts(num_splits: Sequence[int]) -> tuple[int, ...]:
    """Splits of each request, from where they start."""
    return tuple(stop - start for start, stop in pairwise(num_splits))
