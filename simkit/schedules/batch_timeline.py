"""Timelines of batched attention: of each launch the CTA that has most to do, then the merge.

Durations follow from the device table as in `simkit.schedules.tile_timeline`: bytes over the SM's
share of HBM bandwidth, FLOP over its tensor-core rate, fp32 operations over its lanes, nothing else
takes time. What a CTA reads and writes moves the sectors that the model counts, those of tables
included; copies arrive in the order of issue, so that whoever waits for a table or an angle waits
for the keys that were asked for before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.algorithms.batch_arithmetic import KEY_TILE, WARPS
from simkit.algorithms.batch_attention import (
    VECTOR_BYTES,
    QueryTable,
    Units,
    check_plan,
    launch_tensors,
    problem_batch,
)
from simkit.algorithms.batch_decode import check_decode, decode_units
from simkit.algorithms.batch_problem import BatchProblem
from simkit.algorithms.block_sparse_attention import check_block_rows
from simkit.algorithms.cascade_attention import Level, check_levels, state_rows
from simkit.algorithms.elements import E4M3
from simkit.algorithms.merge_states import PAIRS_PER_CTA
from simkit.algorithms.tiles import tile_count
from simkit.algorithms.variant import Variant
from simkit.errors import ShapeError
from simkit.layouts.block_sparse import BlockRows
from simkit.layouts.custom_mask import BITS
from simkit.layouts.tables import Int64Array
from simkit.machine.gpus import Gpu
from simkit.machine.memory import SECTOR_BYTES, WARP_LANES, distinct_sectors
from simkit.planning.plan import Plan, item_keys
from simkit.schedules.cta import CtaTimeline
from simkit.schedules.merge_timeline import merge_pairs
from simkit.schedules.tile_timeline import EXP2_OPS, F32_BYTES, MOST_TILES, ONLINE_SOFTMAX_OPS
from traces.events import Trace

Array = NDArray[Any]

# fp32 operations of a logit: its scale; of a soft cap three products, exp2, sum, difference,
# quotient and sign; of ALiBi distance, magnitude, conversion and fma.
SCALE_OPS, SOFT_CAP_OPS, ALIBI_OPS = 1, EXP2_OPS + 7, 4
# Of a value: e4m3 to float and that to an element; to float, product, fma and back.
DECODE_OPS, ROTATE_OPS = 2, 4

_ANGLES_PER_THREAD = 8  # cosines, and as many sines, in two vectors each


def batch_decode(gpu: Gpu, problem: BatchProblem, plan: Plan, units: Units | None = None) -> Trace:
    """The CTA of `simkit.algorithms.batch_decode` with the most keys. Errors: as there, and
    `ShapeError` where there is no CTA, or more tiles than a timeline shows.
    """
    check_decode(problem)
    chosen = decode_units(problem.group) if units is None else units
    return _timeline(gpu, "batch_decode", problem, plan, chosen, "one")


def batch_prefill_paged(gpu: Gpu, problem: BatchProblem, plan: Plan) -> Trace:
    """The CTA with the most keys; errors as `batch_decode`."""
    return _timeline(gpu, "batch_prefill_paged", problem, plan)


def batch_prefill_ragged(gpu: Gpu, problem: BatchProblem, plan: Plan) -> Trace:
    """The CTA with the most keys; errors as `batch_decode`."""
    return _timeline(gpu, "batch_prefill_ragged", problem, plan)


def block_sparse_attention(gpu: Gpu, problem: BatchProblem, plan: Plan) -> Trace:
    """The CTA with the most keys; errors as `batch_decode`."""
    check_block_rows(problem)
    return _timeline(gpu, "block_sparse_attention", problem, plan, table="blocks")


def cascade_attention(gpu: Gpu, levels: Sequence[Level]) -> Trace:
    """The CTA with the most keys of every level, one after another, then the merge of all levels;
    errors as `batch_decode`.
    """
    check_levels(levels)
    places = state_rows(levels)
    cta: CtaTimeline | None = None
    for number, level in enumerate(levels):
        rows = places.rows[number]
        work = _Work.most(level.problem, level.plan, "tensor_cores", "ragged", rows)
        name = f"level {number}: {work.name('batch_prefill_paged')}"
        cta = CtaTimeline(gpu, name) if cta is None else cta.next_kernel(name)
        _draw(cta, work)
    assert cta is not None
    cta = _merge(cta, levels[0].problem, places.merge_indptr)
    return cta.trace(f"cascade_attention on {gpu.name}")


def _timeline(
    gpu: Gpu,
    kernel: str,
    problem: BatchProblem,
    plan: Plan,
    units: Units = "tensor_cores",
    table: QueryTable = "ragged",
) -> Trace:
    rows = plan.merge_indptr[:-1] if plan.is_split and problem.rows else None
    work = _Work.most(problem, plan, units, table, rows)
    cta = CtaTimeline(gpu, work.name(kernel))
    _draw(cta, work)
    if rows is not None:
        cta = _merge(cta, problem, plan.merge_indptr)
    return cta.trace(f"{kernel} on {gpu.name}")


@dataclass(frozen=True, eq=False)
class _Work:
    """What a CTA of the first K/V head does: the ``item`` of the plan, with keys from ``begin`` to
    before ``stop``. Properties of rows are [tile_q], those that fill up the tile included.
    """

    problem: BatchProblem
    plan: Plan
    units: Units
    table: QueryTable
    state_rows: Int64Array | None
    item: int
    begin: int
    stop: int

    @classmethod
    def most(
        cls,
        problem: BatchProblem,
        plan: Plan,
        units: Units,
        table: QueryTable,
        state_rows: Int64Array | None,
    ) -> _Work:
        """That of the first CTA with the most keys, and of those the most rows."""
        check_plan(problem, plan, units)
        if not plan.items:
            raise ShapeError("there is no query, so there is no CTA to show")
        keys = item_keys(plan, problem_batch(problem))
        packed = problem.queries.lens[plan.requests] * problem.group
        rows = np.minimum(packed - plan.q_tiles.astype(np.int64) * plan.tile_q, plan.tile_q)
        item = int(np.lexsort((np.arange(plan.items), -rows, keys[:, 0] - keys[:, 1]))[0])
        found = cls(problem, plan, units, table, state_rows, item, *map(int, keys[item]))
        if found.tiles > MOST_TILES:
            raise ShapeError(
                f"a CTA has {found.tiles} tiles of {KEY_TILE} keys; a timeline shows "
                f"{MOST_TILES} at most"
            )
        return found

    def name(self, kernel: str) -> str:
        tile = int(self.plan.q_tiles[self.item])
        return (
            f"{kernel} CTA: request {self.request}, tile {tile}, keys {self.begin} to {self.stop}"
        )

    @property
    def request(self) -> int:
        return int(self.plan.requests[self.item])

    @property
    def tiles(self) -> int:
        """Of keys."""
        return tile_count(self.stop - self.begin, KEY_TILE)

    @property
    def is_first(self) -> bool:
        """Whether the CTA has the first chunk, with which sinks go."""
        return int(self.plan.kv_chunks[self.item]) == 0

    @property
    def packed(self) -> Int64Array:
        tile_q = self.plan.tile_q
        return int(self.plan.q_tiles[self.item]) * tile_q + np.arange(tile_q)

    @property
    def row(self) -> Int64Array:
        return self.packed // self.problem.group

    @property
    def head(self) -> Int64Array:
        return self.packed % self.problem.group

    @property
    def exists(self) -> NDArray[np.bool_]:
        return np.asarray(self.row < self.q_len)

    @property
    def rows(self) -> int:
        return int(np.count_nonzero(self.exists))

    @property
    def q_len(self) -> int:
        return int(self.problem.queries.lens[self.request])

    @property
    def kv_len(self) -> int:
        return int(self.problem.kv_lens[self.request])

    @property
    def query(self) -> Int64Array:
        """Of all requests' queries; 0 for rows that do not exist."""
        start = int(self.problem.queries.indptr[self.request])
        return np.where(self.exists, start + self.row, 0)

    @property
    def state(self) -> Int64Array:
        """Row of o and lse that each row is written to."""
        if self.state_rows is None:
            return self.query
        return self.state_rows[self.query] + int(self.plan.kv_chunks[self.item])

    def keys(self, tile: int) -> Int64Array:
        first = self.begin + tile * KEY_TILE
        return np.arange(first, min(first + KEY_TILE, self.stop))


def _draw(cta: CtaTimeline, work: _Work) -> None:
    """The CTA from its first table to its last store."""
    problem = work.problem
    _tables(cta, work)
    if work.tiles:
        row_bytes = problem.d * problem.q.dtype.itemsize
        cta.load("Q", work.rows * row_bytes)
        _load_keys(cta, work, 0)
    for tile in range(work.tiles):
        cta.wait_for_loads()
        if tile + 1 < work.tiles:
            _load_keys(cta, work, tile + 1)
        if tile + 2 < work.tiles:
            _load_indices(cta, work, tile + 2)
        _prepare(cta, work, tile)
        _multiply(cta, work, tile)
    value_bytes = F32_BYTES if work.state_rows is not None else problem.q.dtype.itemsize
    cta.store("O", work.rows * problem.dv * value_bytes)
    number = work.state * problem.heads + work.head
    cta.store("LSE", _sectors(number, F32_BYTES, work.exists))


def _tables(cta: CtaTimeline, work: _Work) -> None:
    """The item, its request's ranges, then what each row and key of the first tiles need: each says
    where to look for the next. Every warp reads what all threads need.
    """
    problem, variant = work.problem, work.problem.variant
    tensors = launch_tensors(problem, work.plan, work.table, work.state_rows)
    ranges = [("qo_indptr", 2), ("kv_indptr", 2), ("q_tiles", 1), ("kv_chunks", 1)]
    if isinstance(problem.keys, BlockRows) and problem.keys.block_counts[work.request]:
        ranges.append(("kv_last_len", 1))
    ranges.append(("mask_indptr", 1))
    for tables in ([("requests", 1)], ranges):
        for name, entries in tables:
            if name in tensors:
                cta.load(name, entries * WARPS * SECTOR_BYTES)
        cta.wait_for_loads()
    if work.state_rows is not None:
        cta.load("state_rows", _sectors(work.query, work.state_rows.itemsize, work.exists))
    if variant.alibi_slopes is not None:
        cta.load("slopes", _sectors(work.head, F32_BYTES))
    if variant.sinks is not None and work.is_first:
        cta.load("sinks", _sectors(work.head, F32_BYTES))
    for tile in range(min(work.tiles, 2)):
        _load_indices(cta, work, tile)
    cta.wait_for_loads()


def _load_indices(cta: CtaTimeline, work: _Work, tile: int) -> None:
    """A thread for each key finds its page."""
    keys = work.problem.keys
    if isinstance(keys, BlockRows):
        entry = int(keys.starts[work.request]) + work.keys(tile) // keys.block_size
        cta.load(f"pages {tile}", _sectors(entry, keys.indices.itemsize))


def _load_keys(cta: CtaTimeline, work: _Work, tile: int) -> None:
    problem, keys = work.problem, work.keys(tile).size
    cta.load(f"K {tile}", keys * problem.d * problem.k.dtype.itemsize)
    cta.load(f"V {tile}", keys * problem.dv * problem.v.dtype.itemsize)


def _prepare(cta: CtaTimeline, work: _Work, tile: int) -> None:
    """What tiles go through before they are multiplied: FP8 decoded, Q and K turned; and the bits
    of a custom mask.
    """
    problem = work.problem
    if problem.k.dtype == E4M3:
        cta.lanes(f"decode {tile}", KEY_TILE * (problem.d + problem.dv) * DECODE_OPS, "convert")
    if problem.variant.rope is not None:
        _rotate(cta, work, f"K {tile}", work.keys(tile))
        if tile == 0:
            position = np.maximum(work.row + work.kv_len - work.q_len, 0)
            _rotate(cta, work, "Q", position, work.exists)
    if problem.variant.custom_mask is not None:
        cta.load(f"mask {tile}", _mask_sectors(work, tile))
        cta.wait_for_loads()


def _rotate(
    cta: CtaTimeline, work: _Work, name: str, position: Int64Array, exists: Array | None = None
) -> None:
    d = work.problem.d
    taken = np.ones(position.size, bool) if exists is None else exists
    threads = d // 2 // _ANGLES_PER_THREAD  # of a row
    first = position[:, None] * d + np.arange(threads) * _ANGLES_PER_THREAD
    active = np.repeat(taken, threads)
    half_vector = VECTOR_BYTES // F32_BYTES
    moved = sum(
        _sectors(first.ravel() + offset, F32_BYTES, active, VECTOR_BYTES)
        for offset in (0, half_vector, d // 2, d // 2 + half_vector)
    )
    cta.load(f"angles {name}", moved)
    cta.wait_for_loads()
    cta.lanes(f"turn {name}", int(np.count_nonzero(taken)) * d * ROTATE_OPS)


def _mask_sectors(work: _Work, tile: int) -> int:
    """A thread for each query reads the bytes that hold the tile's bits, one by one."""
    mask = work.problem.variant.custom_mask
    assert mask is not None
    keys, tile_q = work.keys(tile), work.plan.tile_q
    query = work.row[0] + np.arange(tile_q)
    exists = query <= min(int(work.row[-1]), work.q_len - 1)
    bit = query * work.kv_len + keys[0]
    last = (bit + keys.size - 1) // BITS
    moved = 0
    for byte in range(KEY_TILE // BITS + 1):
        place = bit // BITS + byte
        moved += _sectors(int(mask.indptr[work.request]) + place, 1, exists & (place <= last))
    return moved


def _multiply(cta: CtaTimeline, work: _Work, tile: int) -> None:
    """Whole tiles, padded ones, too."""
    problem, tile_q = work.problem, work.plan.tile_q
    each = ONLINE_SOFTMAX_OPS + _logit_ops(problem.variant)
    if work.units == "tensor_cores":
        softmax = tile_q * (KEY_TILE * each + problem.dv)  # O is rescaled
        cta.tensor_cores(f"S {tile}", 2 * tile_q * KEY_TILE * problem.d)
        cta.lanes(f"softmax {tile}", softmax, "softmax")
        cta.tensor_cores(f"O {tile}", 2 * tile_q * KEY_TILE * problem.dv)
        return
    rows = tile_count(tile_q, 2) * 2  # scores go two rows at a time
    cta.lanes(f"S {tile}", rows * KEY_TILE * problem.d)
    cta.lanes(f"softmax {tile}", rows * KEY_TILE * each, "softmax")
    cta.lanes(f"O {tile}", tile_q * (KEY_TILE + 1) * problem.dv)


def _logit_ops(variant: Variant) -> int:
    return (
        SCALE_OPS * variant.transforms_logits
        + SOFT_CAP_OPS * (variant.soft_cap > 0)
        + ALIBI_OPS * (variant.alibi_slopes is not None)
    )


def _merge(cta: CtaTimeline, problem: BatchProblem, merge_indptr: Int64Array) -> CtaTimeline:
    """The CTA that merges the row with most states, and the heads and rows beside it."""
    states = np.diff(merge_indptr)
    first = int(states.argmax()) * problem.heads // PAIRS_PER_CTA * PAIRS_PER_CTA
    pairs = np.arange(first, min(first + PAIRS_PER_CTA, states.size * problem.heads))
    merge = cta.next_kernel("merge_states_variable CTA")
    merge.load("merge_indptr", 2 * pairs.size * merge_indptr.itemsize)
    merge.wait_for_loads()
    counts = states[pairs // problem.heads].tolist()
    merge_pairs(merge, counts, problem.dv, output_bytes=problem.q.dtype.itemsize)
    return merge


def _sectors(
    index: Int64Array, itemsize: int, active: Array | None = None, size: int | None = None
) -> int:
    """Bytes of the sectors that a CTA's threads touch: thread i ``size`` bytes (an item) from item
    index[i] of a tensor on.
    """
    missing = -index.size % WARP_LANES
    taken = np.ones(index.size, bool) if active is None else active
    address, chosen = (
        np.pad(x, (0, missing)).reshape(-1, WARP_LANES).T for x in (index * itemsize, taken)
    )
    return distinct_sectors(address, size or itemsize, chosen) * SECTOR_BYTES
