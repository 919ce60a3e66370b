"""Attention of a batch of requests, work item by work item of a plan: what the kernels of ragged,
paged and block-sparse K and V share. Kernels: gpu/kernels/include/batch_attention.cuh.

All CTAs go through their tiles together; those with fewer tiles rest. Every access of the kernel is
counted lane by lane.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from simkit.algorithms.batch_arithmetic import (
    KEY_TILE,
    WARP_ROWS,
    WARPS,
    Arithmetic,
    CudaCores,
    Reference,
    State,
    TensorCores,
)
from simkit.algorithms.batch_problem import HEAD_DIMS, BatchProblem
from simkit.algorithms.elements import ENCODE
from simkit.algorithms.merge_states import merge_partial
from simkit.algorithms.tiles import tile_count
from simkit.algorithms.variant import Place
from simkit.errors import ShapeError, TableError
from simkit.layouts.block_sparse import BlockRows
from simkit.layouts.custom_mask import BITS
from simkit.layouts.tables import Int64Array, indptr_of
from simkit.machine.machine import Cta, Machine
from simkit.machine.memory import WARP_LANES, Tensor
from simkit.planning.batch import Batch
from simkit.planning.plan import Plan, item_keys

Array = NDArray[Any]
BoolArray = NDArray[np.bool_]

THREADS = 128
TENSOR_CORE_TILES = (16, 64)
"""Packed query rows of a tile on tensor cores."""
MOST_CUDA_CORE_ROWS = 16
"""Packed query rows of a tile on CUDA cores, at most."""
VECTOR_BYTES = 16

Units = Literal["tensor_cores", "cuda_cores"]
QueryTable = Literal["ragged", "one", "blocks"]
"""How a kernel finds the queries of a request: by reading qo_indptr, or from its number."""

# Values of one array of scores that are computed together, and of one array of accesses.
_MOST_AT_ONCE = 1 << 21


@dataclass(frozen=True, eq=False)
class BatchResult:
    """``o`` [rows, heads, dv] and ``lse`` [rows, heads]; the plan's partial states ``partial_o``
    [partial rows, heads, dv] and ``partial_lse`` [partial rows, heads], None if it does not split.

    In device arithmetic o is of q's type and the rest float32, in reference arithmetic all are
    float64.
    """

    o: Array
    lse: Array
    partial_o: Array | None = None
    partial_lse: Array | None = None


def shared_bytes(problem: BatchProblem, tile_q: int, units: Units) -> tuple[int, int]:
    """Dynamic and static shared memory of a CTA in bytes."""
    d, dv = problem.d, problem.dv
    queries = tile_count(tile_q * d * 2, 128) * 128
    dynamic = queries + 2 * KEY_TILE * (d + dv) * 2
    masks = 8 * tile_q if problem.variant.custom_mask is not None else 0
    static = 24 * tile_q + 2 * KEY_TILE * 8 + masks + 4 * tile_q
    if units == "cuda_cores":
        rows = tile_count(tile_q, 2) * 2
        return dynamic, static + rows * (d + KEY_TILE + 3) * 4
    key_warps = WARPS * WARP_ROWS // tile_q
    if key_warps > 1:  # maxima and sums of the warps that share rows, and their weights
        static += 2 * key_warps * WARP_ROWS * 4 + WARP_ROWS * KEY_TILE * 2
    return dynamic, static


def check_plan(problem: BatchProblem, plan: Plan, units: Units) -> None:
    """Raises ShapeError unless the kernels have such tiles, `TableError` for another batch's plan.

    A plan that is stale, or of other requests, would have keys that nobody reads or that there are
    not.
    """
    tiles = TENSOR_CORE_TILES if units == "tensor_cores" else range(1, MOST_CUDA_CORE_ROWS + 1)
    if plan.tile_q not in tiles:
        raise ShapeError(
            f"the plan has tiles of {plan.tile_q} query rows; {units} take {list(tiles)}, which "
            f"planners are told by tile_q"
        )
    _check_tables(plan)
    lens = problem.queries.lens
    rows = len(plan.merge_indptr) - 1
    if plan.batch != problem.batch or rows != problem.rows:
        raise TableError(
            f"the plan is for {plan.batch} requests with {rows} queries, the problem has "
            f"{problem.batch} with {problem.rows}"
        )
    wrong = (plan.requests < 0) | (plan.requests >= problem.batch)
    if wrong.any():
        item = int(wrong.argmax())
        raise TableError(
            f"item {item} of the plan is of request {plan.requests[item]}; the batch has "
            f"{problem.batch}"
        )
    chunks = plan.chunks
    for name, found, expected in (
        ("merge_indptr", plan.merge_indptr, indptr_of(np.repeat(chunks, lens))),
        ("o_indptr", plan.o_indptr, indptr_of(lens * chunks)),
    ):
        wrong = found != expected
        if wrong.any():
            at = int(wrong.argmax())
            raise TableError(
                f"the plan is for other requests: its {name}[{at}] is {found[at]}, these requests "
                f"and its chunks give {expected[at]}"
            )
    if not plan.is_split and (chunks > 1).any():
        request = int((chunks > 1).argmax())
        raise TableError(
            f"request {request} has {chunks[request]} chunks of keys in a plan that does not split"
        )
    user = problem.variant.user
    if plan.is_split and user is not None and user.output is not None:
        raise ShapeError(
            f"variant {user.name} transforms outputs, which are whole only if keys are not split: "
            f"plan with disable_split"
        )
    _check_items(problem, plan)
    _check_keys_covered(problem, plan)


def _check_tables(plan: Plan) -> None:
    """The plan's arrays are as kernels read them."""
    for name in ("requests", "q_tiles", "kv_chunks"):
        table = getattr(plan, name)
        if table.dtype != np.int32 or table.shape != (plan.items,):
            raise TableError(
                f"{name} of the plan must be int32 [{plan.items}], got {table.dtype} {table.shape}"
            )
    for name in ("merge_indptr", "o_indptr"):
        table = getattr(plan, name)
        if table.dtype != np.int64 or table.ndim != 1 or not table.size:
            raise TableError(
                f"{name} of the plan must be int64 [... + 1], got {table.dtype} {table.shape}"
            )
    if plan.grid < plan.items or plan.kv_chunk < 1:
        raise TableError(
            f"the plan has {plan.items} items for a grid of {plan.grid}, and chunks of "
            f"{plan.kv_chunk} keys"
        )


def _check_keys_covered(problem: BatchProblem, plan: Plan) -> None:
    batch = problem_batch(problem)
    stops = batch.tile_keys(plan.requests, plan.q_tiles, plan.tile_q)[:, 1]
    last = plan.kv_chunks == plan.chunks[plan.requests] - 1
    short = np.flatnonzero(last & (item_keys(plan, batch)[:, 1] < stops))
    if short.size:
        item = int(short[0])
        raise TableError(
            f"the plan leaves out keys: {plan.chunks[plan.requests[item]]} chunks of "
            f"{plan.kv_chunk} end before key {stops[item]} of request {plan.requests[item]}"
        )


def _check_items(problem: BatchProblem, plan: Plan) -> None:
    """Every tile and chunk of every request is an item, once."""
    tiles = -(-problem.queries.lens * problem.group // plan.tile_q)
    request, tile, chunk = (
        x.astype(np.int64) for x in (plan.requests, plan.q_tiles, plan.kv_chunks)
    )
    wrong = (tile < 0) | (tile >= tiles[request]) | (chunk < 0)
    wrong |= chunk >= plan.chunks[request]
    if wrong.any():
        item = int(wrong.argmax())
        raise TableError(
            f"item {item} of the plan is tile {tile[item]}, chunk {chunk[item]} of request "
            f"{request[item]}; the batch has {problem.batch} requests, of up to "
            f"{int(tiles.max(initial=0))} tiles of {plan.tile_q} rows"
        )
    starts = indptr_of(tiles * plan.chunks)
    times = np.bincount(starts[request] + tile * plan.chunks[request] + chunk, minlength=starts[-1])
    wrong = times != 1
    if wrong.any():
        at = int(wrong.argmax())
        owner = int(np.searchsorted(starts, at, side="right")) - 1
        raise TableError(
            f"the plan has a tile and chunk of request {owner} {times[at]} times; each is an item "
            f"once"
        )


def problem_batch(problem: BatchProblem) -> Batch:
    """The requests as planners see them."""
    return Batch(
        problem.queries.lens,
        problem.kv_lens,
        problem.group,
        problem.variant.window_left,
        problem.variant.causal,
    )


def batch_attention(
    machine: Machine, problem: BatchProblem, plan: Plan, *, units: Units, table: QueryTable
) -> BatchResult:
    """Runs a plan; merges its partial states if it splits.

    Leaves the tensors q, k, v, o, lse, those of the layout (qo_indptr, kv_indptr, kv_indices,
    kv_last_len), of the plan (requests, q_tiles, kv_chunks, and if it splits state_rows,
    merge_indptr, partial_o, partial_lse) and of the variant on the machine. Errors: `ShapeError`,
    `TableError`; `CapacityError` for tiles that exceed shared memory.
    """
    check_plan(problem, plan, units)
    rows = (problem.rows, problem.heads)
    o = machine.allocate("o", (*rows, problem.dv), problem.q.dtype)
    lse = machine.allocate("lse", rows, np.float32)
    if not plan.is_split or not problem.rows:
        run_plan(machine, problem, plan, (o, lse), units=units, table=table)
        return BatchResult(o.values, lse.values)
    partial = allocate_states(machine, problem, plan.partial_rows)
    present = run_plan(
        machine, problem, plan, partial, units=units, table=table,
        state_rows=plan.merge_indptr[:-1],
    )  # fmt: skip
    merge_indptr = machine.tensor("merge_indptr", plan.merge_indptr)
    merge_partial(machine, *partial, merge_indptr, o, lse, present=present)
    return BatchResult(o.values, lse.values, *(tensor.values for tensor in partial))


def allocate_states(machine: Machine, problem: BatchProblem, rows: int) -> tuple[Tensor, Tensor]:
    """partial_o [rows, heads, dv] and partial_lse [rows, heads], float32."""
    shape = (rows, problem.heads)
    return (
        machine.allocate("partial_o", (*shape, problem.dv), np.float32),
        machine.allocate("partial_lse", shape, np.float32),
    )


def run_plan(
    machine: Machine,
    problem: BatchProblem,
    plan: Plan,
    target: tuple[Tensor, Tensor],
    *,
    units: Units,
    table: QueryTable,
    state_rows: Int64Array | None = None,
    suffix: str = "",
) -> BoolArray | None:
    """One launch, which leaves o and lse in ``target``: of every query, or with ``state_rows``
    [queries] of every query and chunk of its keys, from that row on.

    ``suffix``: of the names of the tensors that are placed. Returns which states have keys, [rows
    of target, heads], without arithmetic, where the states do not tell.
    """
    check_plan(problem, plan, units)
    is_reference = machine.arithmetic == "reference"
    if not is_reference and (problem.d not in HEAD_DIMS or problem.dv not in HEAD_DIMS):
        raise ShapeError(
            f"head dimensions are {problem.d} and {problem.dv}; the kernels are built for "
            f"{HEAD_DIMS}"
        )
    launch = _Launch.place(machine, problem, plan, target, table, state_rows, suffix)
    with machine.cta(
        sum(shared_bytes(problem, plan.tile_q, units)),
        THREADS,
        count=max(plan.grid, 1) * problem.kv_heads,
    ) as cta:
        launch.count_tables(cta)
        arithmetic = _arithmetic(machine, problem, plan.tile_q, units)
        for items in _pieces(problem, plan):
            _run_items(launch, cta, arithmetic, items)
    if machine.computes or state_rows is None:
        return None
    return launch.states_with_keys()


def _arithmetic(
    machine: Machine, problem: BatchProblem, tile_q: int, units: Units
) -> Arithmetic | None:
    """None where nothing is computed."""
    if not machine.computes:
        return None
    kinds = {"tensor_cores": TensorCores, "cuda_cores": CudaCores}
    kind = kinds[units] if machine.is_device else Reference
    return kind(problem, machine.gpu.arch, tile_q)


def _pieces(problem: BatchProblem, plan: Plan) -> Iterator[Int64Array]:
    """Items that are computed together."""
    each = problem.kv_heads * max(
        plan.tile_q * KEY_TILE, (plan.tile_q + KEY_TILE) * max(problem.d, problem.dv)
    )
    size = max(1, _MOST_AT_ONCE // each)
    # Neighbours by length rest little.
    lengths = np.diff(item_keys(plan, problem_batch(problem)))[:, 0]
    order = np.argsort(lengths, kind="stable")
    for start in range(0, plan.items, size):
        yield order[start : start + size]


@dataclass(frozen=True, eq=False)
class _Launch:
    """Tensors in HBM by the kernel's names, and the geometry of all items, int64 [items]."""

    problem: BatchProblem
    plan: Plan
    tensors: dict[str, Tensor]
    o: Tensor
    lse: Tensor
    state_rows: Int64Array | None
    begin: Int64Array
    stop: Int64Array

    @classmethod
    def place(
        cls,
        machine: Machine,
        problem: BatchProblem,
        plan: Plan,
        target: tuple[Tensor, Tensor],
        table: QueryTable,
        state_rows: Int64Array | None,
        suffix: str,
    ) -> _Launch:
        tensors = {
            name: machine.tensor(name + suffix, np.ascontiguousarray(array))
            for name, array in launch_tensors(problem, plan, table, state_rows).items()
        }
        begin, stop = item_keys(plan, problem_batch(problem)).T
        return cls(problem, plan, tensors, *target, state_rows, begin, stop)

    def count_tables(self, cta: Cta) -> None:
        """What every thread of a CTA reads: the plan's item, and the request's ranges."""
        problem, plan, heads = self.problem, self.plan, self.problem.kv_heads
        self._uniform(cta, "requests", np.repeat(np.arange(plan.grid), heads))
        items = np.repeat(np.arange(plan.items), heads)
        self._uniform(cta, "q_tiles", items)
        self._uniform(cta, "kv_chunks", items)
        requests = plan.requests.astype(np.int64)[items]
        if "qo_indptr" in self.tensors:
            self._uniform(cta, "qo_indptr", requests)
            self._uniform(cta, "qo_indptr", requests + 1)
        self._uniform(cta, "kv_indptr", requests)
        self._uniform(cta, "kv_indptr", requests + 1)
        if isinstance(problem.keys, BlockRows):
            has_blocks = problem.keys.block_counts[requests] > 0
            self._uniform(cta, "kv_last_len", requests[has_blocks])
        if problem.variant.custom_mask is not None:
            self._uniform(cta, "mask_indptr", requests)

    def _uniform(self, cta: Cta, name: str, index: Array) -> None:
        warps = np.repeat(index, WARPS)
        cta.load_lanes(self.tensors[name], np.broadcast_to(warps, (WARP_LANES, warps.size)))

    def states_with_keys(self) -> BoolArray:
        """Which states have keys, [rows of the target, heads], from the masks alone."""
        problem, plan = self.problem, self.plan
        present = np.zeros(self.lse.shape, bool)
        for items in _pieces(problem, plan):
            rows = _Rows.of(self, items)
            seen = np.zeros((len(items), problem.kv_heads, plan.tile_q), bool)
            if problem.variant.sinks is not None:
                has_sink = problem.variant.sinks[rows.head] > -np.inf
                seen |= (plan.kv_chunks[items] == 0)[:, None, None] & has_sink
            for step in range(rows.steps):
                _, at, is_own = rows.keys(step)
                visible = problem.variant.visible(at) & is_own
                seen |= np.broadcast_to(visible, (*seen.shape, KEY_TILE)).any(axis=-1)
            chosen = rows.exists[:, None] & seen
            place = np.broadcast_to(rows.target[:, None], seen.shape)
            present[place[chosen], np.broadcast_to(rows.head, seen.shape)[chosen]] = True
        return present


@dataclass(frozen=True, eq=False)
class _Rows:
    """Some items' packed rows: ``row`` [items, rows], ``head`` [items, kv_heads, rows]."""

    launch: _Launch
    items: Int64Array
    request: Int64Array
    row: Int64Array
    head: Int64Array

    @classmethod
    def of(cls, launch: _Launch, items: Int64Array) -> _Rows:
        problem, plan = launch.problem, launch.plan
        packed = plan.q_tiles.astype(np.int64)[items, None] * plan.tile_q + np.arange(plan.tile_q)
        row, in_group = np.divmod(packed, problem.group)
        first_head = np.arange(problem.kv_heads)[None, :, None] * problem.group
        return cls(
            launch,
            items,
            plan.requests.astype(np.int64)[items],
            row,
            first_head + in_group[:, None],
        )

    @property
    def q_len(self) -> Int64Array:
        return self.launch.problem.queries.lens[self.request]

    @property
    def kv_len(self) -> Int64Array:
        return self.launch.problem.kv_lens[self.request]

    @property
    def exists(self) -> BoolArray:
        """Rows that are queries, [items, rows]; the others fill up the tile."""
        return np.asarray(self.row < self.q_len[:, None])

    @property
    def steps(self) -> int:
        """Tiles of keys of the item that has most."""
        spans = self.launch.stop[self.items] - self.launch.begin[self.items]
        return tile_count(int(spans.max(initial=0)), KEY_TILE)

    @property
    def global_row(self) -> Int64Array:
        """[items, rows]; of rows that exist."""
        starts = self.launch.problem.queries.indptr.astype(np.int64)
        return starts[self.request][:, None] + self.row

    @property
    def target(self) -> Int64Array:
        """Row of the stored state of each row, [items, rows]; 0 for rows that fill up the tile."""
        row = np.where(self.exists, self.global_row, 0)
        if self.launch.state_rows is None:
            return row
        chunk = self.launch.plan.kv_chunks.astype(np.int64)[self.items]
        return np.where(self.exists, self.launch.state_rows[row] + chunk[:, None], 0)

    def select(self, chosen: BoolArray) -> _Rows:
        return _Rows(
            self.launch, self.items[chosen], self.request[chosen], self.row[chosen],
            self.head[chosen],
        )  # fmt: skip

    def place(self, key: Array) -> Place:
        """Pairs with ``key``, which broadcasts to [items, kv_heads, rows, keys]."""
        four = (slice(None), None, None, None)
        return Place(
            request=self.request[four],
            head=self.head[..., None],
            row=self.row[:, None, :, None],
            key=key,
            q_len=self.q_len[four],
            kv_len=self.kv_len[four],
        )

    def keys(self, step: int) -> tuple[Int64Array, Place, BoolArray]:
        """Keys of a tile [items, 64], pairs with them, and which keys are the chunk's."""
        begin, stop = self.launch.begin[self.items], self.launch.stop[self.items]
        key = begin[:, None] + step * KEY_TILE + np.arange(KEY_TILE)
        is_own = key < stop[:, None]
        return key, self.place(key[:, None, None, :]), is_own[:, None, None, :]


def _run_items(launch: _Launch, cta: Cta, arithmetic: Arithmetic | None, items: Int64Array) -> None:
    """Some CTAs from the queries to the stored states."""
    problem, plan = launch.problem, launch.plan
    rows = _Rows.of(launch, items)
    shape = (len(items), problem.kv_heads, plan.tile_q)
    first = plan.kv_chunks[items] == 0
    _count_row_tables(launch, cta, rows, first)
    has_keys = launch.stop[items] > launch.begin[items]
    queries = np.zeros((*shape, problem.d), problem.q.dtype)
    queries[has_keys] = _load_queries(launch, cta, rows.select(has_keys))
    q = None if arithmetic is None else arithmetic.decode(queries)
    if problem.variant.rope is not None:
        q = _rotate_queries(launch, cta, arithmetic, rows, has_keys, q)
    state: State | None = None
    if arithmetic is not None:
        sinks = problem.variant.sinks
        state = arithmetic.start(shape, None if sinks is None else sinks[rows.head], first)
    for step in range(rows.steps):
        active = launch.begin[items] + step * KEY_TILE < launch.stop[items]
        part = rows.select(active)
        key, at, is_own = part.keys(step)
        k, v = _load_keys(launch, cta, part, key, is_own[:, 0, 0])
        if problem.variant.custom_mask is not None:
            _count_mask(launch, cta, part, key[:, 0])
        if problem.variant.rope is not None:
            angles = _load_angles(launch, cta, np.where(is_own[:, 0, 0], key, -1))
        if arithmetic is None or state is None or q is None:
            continue
        k, v = arithmetic.decode(k), arithmetic.decode(v)
        if problem.variant.rope is not None:
            k = arithmetic.rotate(k, angles)
        seen = problem.variant.visible(at) & is_own
        state.put(active, arithmetic.advance(state.part(active), q[active], k, v, seen, at))
    result = None
    if arithmetic is not None and state is not None:
        result = arithmetic.finish(state, rows.place(np.zeros((1, 1, 1, 1), np.int64)))
    _store(launch, cta, rows, result)


def _count_row_tables(launch: _Launch, cta: Cta, rows: _Rows, first: BoolArray) -> None:
    """Slopes, sinks, and where states go: a thread for each row."""
    variant = launch.problem.variant
    if launch.state_rows is not None:
        shape = rows.head.shape
        row = np.where(rows.exists, rows.global_row, 0)
        _by_thread(
            cta,
            launch.tensors["state_rows"],
            np.broadcast_to(row[:, None], shape),
            np.broadcast_to(rows.exists[:, None], shape),
        )
    if variant.alibi_slopes is not None:
        _by_thread(cta, launch.tensors["alibi_slopes"], rows.head)
    if variant.sinks is not None:
        _by_thread(cta, launch.tensors["sinks"], rows.head[first])


def _by_thread(cta: Cta, tensor: Tensor, index: Array, active: Array | None = None) -> None:
    """Thread i of each CTA reads element index[..., i]."""
    lanes, taken = _warps(index, active)
    cta.load_lanes(tensor, lanes, taken)


def _warps(index: Array, active: Array | None) -> tuple[Array, Array | None]:
    """[..., threads] as [32, n]: the lanes of each warp; threads fill up whole warps with none."""
    threads = index.shape[-1]
    missing = -threads % WARP_LANES
    if missing:
        taken = np.ones(index.shape, bool) if active is None else active
        pad = [(0, 0)] * (index.ndim - 1) + [(0, missing)]
        index = np.pad(index, pad)
        active = np.pad(np.broadcast_to(taken, (*index.shape[:-1], threads)), pad)
    warps = (index.size // WARP_LANES, WARP_LANES)
    return index.reshape(warps).T, None if active is None else active.reshape(warps).T


def _load_vectors(
    cta: Cta, tensor: Tensor, number: Int64Array, active: BoolArray, length: int
) -> Array:
    """Vectors ``number`` [items, kv_heads, n] of ``length`` values, zeros where not ``active``:
    threads take 16 bytes each, along the vectors.
    """
    per_chunk = VECTOR_BYTES // tensor.dtype.itemsize
    threads = number.shape[-1] * (length // per_chunk)
    start = number[..., None] * length + np.arange(0, length, per_chunk)
    taken = np.broadcast_to(active[..., None], start.shape)
    by_thread = (*number.shape[:-1], threads)
    lanes, chosen = _warps(start.reshape(by_thread), taken.reshape(by_thread))
    values = cta.load_lanes(tensor, lanes, chosen, VECTOR_BYTES)
    # Without the threads that fill up the last warp.
    padded = (*number.shape[:-1], tile_count(threads, WARP_LANES) * WARP_LANES, per_chunk)
    values = values.swapaxes(0, 1).reshape(padded)[..., :threads, :]
    return values.reshape(*number.shape, length)


def _load_queries(launch: _Launch, cta: Cta, rows: _Rows) -> Array:
    """Queries [items, kv_heads, rows, d]; zeros in rows that fill up the tile."""
    number = rows.global_row[:, None] * launch.problem.heads + rows.head
    exists = np.broadcast_to(rows.exists[:, None], number.shape)
    return _load_vectors(
        cta, launch.tensors["q"], np.where(exists, number, 0), exists, launch.problem.d
    )


def _load_keys(
    launch: _Launch, cta: Cta, rows: _Rows, key: Int64Array, is_own: BoolArray
) -> tuple[Array, Array]:
    """K and V of a tile [items, kv_heads, 64, ...]; zeros after the chunk's last key."""
    problem = launch.problem
    key = np.where(is_own, key, 0)
    heads = np.arange(problem.kv_heads)[None, :, None]
    taken = np.broadcast_to(is_own[:, None], (*key.shape[:1], problem.kv_heads, KEY_TILE))
    if isinstance(problem.keys, BlockRows):
        entry = problem.keys.starts[rows.request][:, None] + key // problem.keys.block_size
        entry = np.broadcast_to(entry[:, None], taken.shape)
        _by_thread(cta, launch.tensors["kv_indices"], np.where(taken, entry, 0), taken)
    number = np.zeros(taken.shape, np.int64)
    owner = np.broadcast_to(rows.request[:, None, None], taken.shape)[taken]
    whole = (np.broadcast_to(x, taken.shape)[taken] for x in (key[:, None], heads))
    number[taken] = problem.vector_numbers(owner, *whole)
    return (
        _load_vectors(cta, launch.tensors["k"], number, taken, problem.d),
        _load_vectors(cta, launch.tensors["v"], number, taken, problem.dv),
    )


def _count_mask(launch: _Launch, cta: Cta, rows: _Rows, first_key: Int64Array) -> None:
    """A thread for each query reads the bytes that hold the tile's bits."""
    problem, plan = launch.problem, launch.plan
    assert problem.variant.custom_mask is not None
    indptr = problem.variant.custom_mask.indptr
    query = rows.row[:, :1] + np.arange(plan.tile_q)
    last_row = np.minimum(rows.row[:, -1], rows.q_len - 1)
    exists = query <= last_row[:, None]
    bit = query * rows.kv_len[:, None] + first_key[:, None]
    count = np.minimum(KEY_TILE, launch.stop[rows.items] - first_key)
    last = (bit + count[:, None] - 1) // BITS
    heads = (len(rows.items), problem.kv_heads, plan.tile_q)
    for byte in range(KEY_TILE // BITS + 1):
        taken = exists & (bit // BITS + byte <= last)
        index = np.where(taken, indptr[rows.request][:, None] + bit // BITS + byte, 0)
        _by_thread(
            cta,
            launch.tensors["mask"],
            np.broadcast_to(index[:, None], heads),
            np.broadcast_to(taken[:, None], heads),
        )


def _load_angles(launch: _Launch, cta: Cta, position: Int64Array) -> Array:
    """Cosines and sines [items, 1, n, d] of positions [items, n], -1 for none; the CTAs of all K/V
    heads read them, in chunks of eight elements, as two vectors of cosines and two of sines.
    """
    tensor, d = launch.tensors["rope"], launch.problem.d
    items, rows = position.shape
    threads = (items, launch.problem.kv_heads, rows * (d // 2 // 8))
    used = np.maximum(position, 0)
    by_chunk = used[..., None] * d + np.arange(0, d // 2, 8)
    start = np.broadcast_to(by_chunk.reshape(items, 1, threads[2]), threads)
    is_used = np.broadcast_to((position >= 0)[..., None], by_chunk.shape)
    chosen = np.broadcast_to(is_used.reshape(items, 1, threads[2]), threads)
    for offset in (0, 4, d // 2, d // 2 + 4):
        lanes, active = _warps(start + offset, chosen)
        cta.load_lanes(tensor, lanes, active, VECTOR_BYTES)
    return np.asarray(tensor.values[used])[:, None]


def _rotate_queries(
    launch: _Launch,
    cta: Cta,
    arithmetic: Arithmetic | None,
    rows: _Rows,
    has_keys: BoolArray,
    q: Array | None,
) -> Array | None:
    part = rows.select(has_keys)
    position = np.maximum(part.row + (part.kv_len - part.q_len)[:, None], 0)
    position = np.where(part.exists, position, -1)
    angles = _load_angles(launch, cta, position)
    if arithmetic is None or q is None:
        return q
    turned = q.copy()
    turned[has_keys] = np.where(
        part.exists[:, None, :, None], arithmetic.rotate(q[has_keys], angles), q[has_keys]
    )
    return turned


def _store(launch: _Launch, cta: Cta, rows: _Rows, result: tuple[Array, Array] | None) -> None:
    """O in vectors of 16 bytes along the rows, LSE a thread for each row."""
    problem, plan = launch.problem, launch.plan
    o, lse = launch.o, launch.lse
    number = rows.target[:, None] * problem.heads + rows.head
    exists = np.broadcast_to(rows.exists[:, None], number.shape)
    number = np.where(exists, number, 0)
    values, logarithms = result if result is not None else (None, None)
    per_chunk = VECTOR_BYTES // o.dtype.itemsize
    start = number[..., None] * problem.dv + np.arange(0, problem.dv, per_chunk)
    taken = np.broadcast_to(exists[..., None], start.shape)
    by_thread = (*number.shape[:-1], plan.tile_q * (problem.dv // per_chunk))
    lanes, active = _warps(start.reshape(by_thread), taken.reshape(by_thread))
    if values is not None:
        values = _stored(cta.machine, o, values).reshape(*by_thread, per_chunk)
        missing = -by_thread[-1] % WARP_LANES
        values = np.pad(values, [(0, 0)] * (values.ndim - 2) + [(0, missing), (0, 0)])
        values = values.reshape(lanes.shape[1], WARP_LANES, per_chunk).swapaxes(0, 1)
    cta.store_lanes(o, lanes, values, active, VECTOR_BYTES)
    lanes, active = _warps(number, exists)
    if logarithms is not None:
        logarithms, _ = _warps(logarithms, None)
    cta.store_lanes(lse, lanes, logarithms, active)


def _stored(machine: Machine, tensor: Tensor, values: Array) -> Array:
    """float32 results as the tensor holds them; exact ones stay."""
    if not machine.is_device:
        return values
    return ENCODE[tensor.dtype](values)


def launch_tensors(
    problem: BatchProblem, plan: Plan, table: QueryTable, state_rows: Int64Array | None
) -> dict[str, Array]:
    """What a launch reads, by the names that kernels and models call it.

    CTAs of the padded grid without an item have the request -1.
    """
    idle = np.full(plan.grid - plan.items, -1, np.int32)
    tensors: dict[str, Array] = {
        "q": problem.q,
        "k": problem.k,
        "v": problem.v,
        "requests": np.concatenate((plan.requests, idle)),
        "q_tiles": plan.q_tiles,
        "kv_chunks": plan.kv_chunks,
        "kv_indptr": problem.keys.indptr,
    }
    if table == "ragged":
        tensors["qo_indptr"] = problem.queries.indptr
    if isinstance(problem.keys, BlockRows):
        tensors["kv_indices"] = problem.keys.indices
        tensors["kv_last_len"] = problem.keys.last_block_len
    if state_rows is not None:
        tensors["state_rows"] = state_rows
    return tensors | _variant_tensors(problem)


def _variant_tensors(problem: BatchProblem) -> dict[str, Array]:
    variant = problem.variant
    tensors: dict[str, Array | None] = {
        "alibi_slopes": variant.alibi_slopes,
        "sinks": variant.sinks,
        "rope": variant.rope,
    }
    if variant.custom_mask is not None:
        tensors["mask"] = variant.custom_mask.bits
        tensors["mask_indptr"] = variant.custom_mask.indptr
    if variant.user is not None:
        tensors["variant_values"] = variant.user.array
    return {name: array for name, array in tensors.items() if array is not None}
