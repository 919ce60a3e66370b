"""Figures of the chapter "3.4 Attention kernel" that belong to serving: grouped heads, paged and
ragged K and V, plans, cascades and FP8; and those of FlashInfer's paper and blog. All bytes are
counted by the models of the kernels.

Each test names the section of the sentence that it checks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from properties.cascade_attention import CascadeCase
from simkit.algorithms.batch_decode import batch_decode, decode_tile, decode_units
from simkit.algorithms.batch_prefill_paged import batch_prefill_paged
from simkit.algorithms.batch_prefill_ragged import batch_prefill_ragged
from simkit.algorithms.batch_problem import BatchProblem, batch_flops, batch_reference
from simkit.algorithms.cascade_attention import Level, cascade_attention, flat_problem
from simkit.algorithms.elements import BF16, E4M3
from simkit.algorithms.kv_append import AppendProblem, kv_append
from simkit.layouts.block_sparse import from_lengths
from simkit.layouts.paged import PagedCache
from simkit.layouts.ragged import Ragged
from simkit.machine.gpus import gpu
from simkit.machine.machine import Machine
from simkit.machine.memory import unbacked
from simkit.machine.roofline import arithmetic_intensity, bound, roofline
from simkit.planning.decode import decode_plan
from simkit.planning.load import Placement
from simkit.planning.outcome import Outcome, PlanProblem
from simkit.planning.plan import Plan
from simkit.planning.prefill import CTAS_PER_SM, prefill_plan
from simkit.planning.prefill_planner import PREFILL_PLANNERS
from simkit.planning.split_planner import split_planner
from simkit.planning.splits import GOOD_ENOUGH, occupancy_units

H100 = gpu("h100")
D = 128
TOKEN = 2 * D * BF16.itemsize
"""Bytes of K and V of a key and head."""


def sized(
    q_lens: Any,
    kv_lens: Any,
    *,
    kv_heads: int = 1,
    group: int = 1,
    page_size: int = 16,
    dtype: Any = BF16,
) -> BatchProblem:
    """Requests whose tensors take no memory; ``page_size`` 0: ragged K and V."""
    queries = Ragged.from_lengths(np.asarray(q_lens, np.int64))
    lens = np.asarray(kv_lens, np.int64)
    keys: Any = from_lengths(lens, page_size) if page_size else Ragged.from_lengths(lens)
    slots = (keys.blocks, page_size) if page_size else (keys.total,)
    k = unbacked((*slots, kv_heads, D), dtype)
    q = unbacked((queries.total, kv_heads * group, D), BF16)
    return BatchProblem(q=q, k=k, v=k, queries=queries, keys=keys)


def planned(problem: BatchProblem, tile_q: int, kv_heads: int = 0, **options: Any) -> Plan:
    """The grid planner's plan for an H100; ``kv_heads``: of a problem of which this is a part."""
    return prefill_plan(
        problem.queries.indptr, problem.kv_lens, group=problem.group,
        kv_heads=kv_heads or problem.kv_heads, head_dim_v=D, page_size=16,
        sm_count=H100.sm_count, tile_q=tile_q, **options,
    )  # fmt: skip


def decoded(problem: BatchProblem, plan: Plan | None = None) -> Machine:
    """One decode step, without splits unless the plan has them."""
    tile_q = decode_tile(problem.group, decode_units(problem.group))
    machine = Machine(H100, "none")
    batch_decode(machine, problem, plan or planned(problem, tile_q, disable_split=True))
    return machine


def sectors(machine: Machine, *names: str) -> int:
    """Bytes that leave the SMs, of these tensors, read and written."""
    return sum(row.sectors for (name, _), row in machine.traffic.items() if name in names)


def every_tensor(machine: Machine) -> dict[tuple[str, str], int]:
    return {key: row.sectors for key, row in machine.traffic.items()}


# 解码 attention 与 Flash-Decoding: GQA


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_a_group_raises_the_intensity_of_a_decode_step(group: int) -> None:
    """解码 attention: each tile of K and V serves g heads, so that the intensity of decoding rises
    from about 1 to about g FLOP/byte.
    """
    problem = sized([1, 1], [8192, 8192], kv_heads=2, group=group)
    machine = decoded(problem)
    kv = sectors(machine, "k", "v")
    # K and V move once, whatever the group, ...
    assert kv == 2 * 8192 * 2 * TOKEN
    # ... which is a g-th for each query head, ...
    assert kv / (2 * problem.heads) == 8192 * TOKEN / group
    # ... and exactly g FLOP for each of these bytes.
    assert batch_flops(problem) == group * kv
    # Q, O and tables are all else.
    intensity = arithmetic_intensity(batch_flops(problem), machine.hbm_bytes)
    assert intensity < group
    assert intensity == pytest.approx(group, rel=0.01)
    assert bound(H100, intensity) == "memory"


# 实例演算 · Flash-Decoding 的占用率; 自测


def decode_step(batch: int, kv_len: int) -> dict[str, Outcome]:
    """What the planners make of Llama-3-8B's heads: 32 on 8 K/V heads of 128 values."""
    problem = PlanProblem(
        q_lens=np.ones(batch, np.int64), kv_lens=np.full(batch, kv_len), group=4, kv_heads=8,
        head_dim=D,
    )  # fmt: skip
    return {one.planner: one for one in split_planner(problem, H100.sm_count).outcomes}


def test_a_batch_of_256_needs_no_flash_decoding() -> None:
    """自测: 256 sequences x 8 K/V heads are 2,048 independent units, far more than SMs, and no
    planner splits them.
    """
    units = occupancy_units(256, 8)
    assert units == 2048
    assert units > 15 * H100.sm_count
    outcomes = decode_step(256, 4096)
    for name in ("fa2", "fa3", "fa4"):
        assert outcomes[name].facts["splits"] == 1
        assert outcomes[name].facts["units"] == units
    assert outcomes["decode"].facts["is_split"] is False
    for name in ("fa2", "fa3", "fa4", "decode"):
        assert len(outcomes[name].items) == units
    # The same of the plan that the kernel runs: a CTA of each request and K/V head.
    problem = sized(np.ones(256), np.full(256, 4096), kv_heads=8, group=4)
    plan = planned(problem, 16)
    assert (plan.is_split, plan.grid * problem.kv_heads) == (False, units)


def test_splitting_a_full_gpu_only_adds_a_merge() -> None:
    """自测: with so many units, splitting K and V adds the cost of merging and saves nothing."""
    problem = sized(np.ones(256), np.full(256, 512), group=4)
    whole, split = (
        decoded(problem, planned(problem, 16, **options))
        for options in ({"disable_split": True}, {"fixed_split": 128})
    )
    assert sectors(whole, "k", "v") == sectors(split, "k", "v")
    assert split.hbm_bytes > whole.hbm_bytes
    assert split.ctas > whole.ctas
    # Four states of each of 1,024 heads of queries, written and read again.
    states = 4 * 256 * 4 * D * 4
    assert sectors(split, "partial_o") == 2 * states


def test_a_batch_of_one_leaves_the_gpu_idle_without_splits() -> None:
    """Flash-Decoding 的占用率: 8 CTAs for 8 K/V heads, about 6 % of the SMs; 16 chunks of 2K of
    32K keys make 128, nearly one for each SM.
    """
    problem = sized([1], [32 * 1024], kv_heads=8, group=4)
    whole, split = (
        planned(problem, 16, **options)
        for options in ({"disable_split": True}, {"fixed_split": 2048})
    )
    ctas = [plan.grid * problem.kv_heads for plan in (whole, split)]
    assert ctas == [8, 128]
    assert f"{ctas[0] / H100.sm_count:.0%}" == "6%"
    assert 0.95 < ctas[1] / H100.sm_count <= 1
    assert split.chunks.tolist() == [16]
    # A partial result of each K/V head and chunk, of each head of the group.
    assert split.partial_rows * problem.kv_heads == 8 * 16


def test_planners_split_a_batch_of_one_until_the_gpu_is_full() -> None:
    """Flash-Decoding 的占用率: every planner splits the example, FlashAttention-4 into 16, and none
    into more than run at a time.
    """
    outcomes = decode_step(1, 32 * 1024)
    assert outcomes["fa4"].facts["splits"] == 16
    assert len(outcomes["fa4"].items) == 128
    for name in ("fa2", "fa3", "fa4", "decode"):
        outcome = outcomes[name]
        assert GOOD_ENOUGH <= len(outcome.items) / outcome.placement.workers <= 1
    plan = decode_plan(
        np.array([32 * 1024]), group=4, kv_heads=8, page_size=16,
        max_grid=CTAS_PER_SM * H100.sm_count,
    )  # fmt: skip
    assert plan.is_split
    assert plan.items * 8 == len(outcomes["decode"].items)


# 分页与不规则布局：FlashInfer


def one_long_request(short: int) -> PlanProblem:
    """A decode step of one request of 64K keys among ``short`` ones of 256."""
    kv_lens = np.array([*[256] * short, 64 * 1024])
    return PlanProblem(q_lens=np.ones(short + 1, np.int64), kv_lens=kv_lens, group=4, kv_heads=8)


def placed(name: str, problem: PlanProblem) -> Placement:
    return PREFILL_PLANNERS[name](problem, H100.sm_count).placement


@pytest.mark.parametrize(("name", "short"), [("grid", 15), ("holistic", 15), ("holistic", 63)])
def test_plans_spread_long_and_short_requests_over_the_gpu(name: str, short: int) -> None:
    """FlashInfer: a plan on the CPU divides the work so that long and short sequences load the SMs
    evenly.
    """
    problem = one_long_request(short)
    whole = placed("grid", replace(problem, disable_split=True))
    # Without chunks, all wait for the long request; with them it ends within Graham's bound.
    assert whole.makespan >= 64 * 1024
    planned_load = placed(name, problem)
    assert planned_load.makespan < whole.makespan / 10
    assert planned_load.makespan <= planned_load.total / planned_load.workers + planned_load.largest
    # Chunks cost their rows again, and no key twice.
    assert planned_load.total < 1.02 * whole.total


def test_a_grid_that_short_requests_fill_does_not_split_the_long_one() -> None:
    """FlashInfer: what is searched is the smallest chunk whose items fit into two CTAs for each SM.
    64 requests with 8 K/V heads fill those, and the long one stays whole.
    """
    problem = one_long_request(63)
    assert CTAS_PER_SM * H100.sm_count < 64 * 8
    assert PREFILL_PLANNERS["grid"](problem, H100.sm_count).facts["is_split"] is False
    assert placed("grid", problem).makespan > 20 * placed("holistic", problem).makespan


LENGTHS = (1000, 17, 523, 64, 2047)


def both_layouts(page_size: int, group: int = 4) -> tuple[Machine, Machine]:
    """The same requests with ragged K and V, and with pages: 16 packed rows each, one tile."""
    machines = Machine(H100, "none"), Machine(H100, "none")
    queries = [16 // group] * len(LENGTHS)
    for machine, size, run in zip(
        machines, (0, page_size), (batch_prefill_ragged, batch_prefill_paged), strict=True
    ):
        problem = sized(queries, LENGTHS, group=group, page_size=size)
        run(machine, problem, planned(problem, 16, disable_split=True))
    return machines


@pytest.mark.parametrize("page_size", [1, 16, 64, 100])
def test_pages_cost_their_table_and_nothing_else(page_size: int) -> None:
    """分页 KV: the page table and the length of the last page are all that is read besides what
    ragged K and V take; nobody reads what fills up the last page.
    """
    ragged, paged = (every_tensor(machine) for machine in both_layouts(page_size))
    tables = {key: paged.pop(key) for key in list(paged) if key not in ragged}
    assert paged == ragged
    assert list(tables) == [("kv_last_len", "read"), ("kv_indices", "read")]
    assert ragged["k", "read"] == ragged["v", "read"] == sum(LENGTHS) * TOKEN // 2
    # A sector for each of a CTA's four warps says how long the last page is.
    assert tables["kv_last_len", "read"] == len(LENGTHS) * 4 * 32


def test_padding_of_the_last_page_takes_memory_but_no_traffic() -> None:
    """分页 KV: a request wastes less than a page, which is never read."""
    for page_size in (16, 64, 100):
        _, machine = both_layouts(page_size)
        unused = machine.tensors["k"].array.nbytes // (D * BF16.itemsize) - sum(LENGTHS)
        assert unused == sum(-length % page_size for length in LENGTHS)
        assert 0 < unused < len(LENGTHS) * page_size
        assert sectors(machine, "k") == sum(LENGTHS) * D * BF16.itemsize


def test_gathering_single_keys_costs_less_than_one_per_cent() -> None:
    """FlashInfer, MLSys 2025: with pages of one key, decoding takes at most 1 % longer. Its indices
    are 4 bytes for each key of 512 bytes in every head, 0.8 %.
    """
    problem = sized([1], [8192], group=4, page_size=1)
    machine = decoded(problem)
    assert sectors(machine, "kv_indices") == 8192 * 4
    assert sectors(machine, "kv_indices") / sectors(machine, "k", "v") == 4 / TOKEN < 0.01
    # Pages of 16 need a sixteenth of the entries, but every warp takes a sector at least.
    paged = decoded(sized([1], [8192], group=4, page_size=16))
    assert sectors(paged, "kv_indices") == 8192 // 32 * 32


@pytest.mark.parametrize("tile_q", [16, 64])
def test_keys_are_read_again_for_every_tile_of_queries(tile_q: int) -> None:
    """FlashAttention 分块: K and V are streamed once for each tile of queries, paged or not."""
    for page_size, run in ((0, batch_prefill_ragged), (16, batch_prefill_paged)):
        problem = sized([128, 40], [300, 200], page_size=page_size)
        machine = Machine(H100, "none")
        run(machine, problem, planned(problem, tile_q, disable_split=True))
        tiles = -(-128 // tile_q), -(-40 // tile_q)
        assert sectors(machine, "k", "v") == (tiles[0] * 300 + tiles[1] * 200) * TOKEN
        # What is left when caches serve every repeated read: each tensor as it lies in memory.
        held = machine.tensors["k"].array.nbytes + machine.tensors["v"].array.nbytes
        assert machine.compulsory_bytes("k", "v") == held


def test_ragged_tensors_have_no_padding() -> None:
    """不规则张量: the tokens of all sequences one after another, and where each starts."""
    problem = sized([1] * len(LENGTHS), LENGTHS, page_size=0)
    assert len(problem.k) == sum(LENGTHS)
    assert problem.keys.indptr.tolist() == [0, 1000, 1017, 1540, 1604, 3651]
    # As a batch [requests, longest] would have it, two thirds would be padding.
    assert f"{len(problem.k) / (len(LENGTHS) * max(LENGTHS)):.0%}" == "36%"


# 分页与不规则布局：FlashInfer · FP8 KV


@pytest.mark.parametrize("group", [1, 4])
def test_fp8_halves_the_bytes_of_keys_and_values(group: int) -> None:
    """An FP8 cache halves what a decode step reads of K and V, and nothing else."""
    wide, narrow = (
        every_tensor(decoded(sized([1, 1], [700, 33], group=group, dtype=dtype)))
        for dtype in (BF16, E4M3)
    )
    assert wide.keys() == narrow.keys()
    for key, moved in wide.items():
        factor = 2 if key in (("k", "read"), ("v", "read")) else 1
        assert moved == factor * narrow[key]


def test_fp8_halves_what_appending_writes() -> None:
    """Tokens come in bfloat16 and go to e4m3."""
    found = []
    for dtype in (BF16, E4M3):
        rows = from_lengths(np.full(8, 100), 16)
        new = unbacked((8, 4, D), BF16)
        pages = PagedCache(unbacked((rows.blocks, 16, 4, D), dtype))
        machine = Machine(H100, "none")
        kv_append(machine, AppendProblem(new, new, np.arange(9), rows, pages, pages))
        found.append(every_tensor(machine))
    wide, narrow = found
    for name in ("k_cache", "v_cache"):
        assert wide.pop((name, "write")) == 2 * narrow.pop((name, "write"))
    assert wide == narrow


# 分页与不规则布局：FlashInfer · cascade attention
#
# FlashInfer's blog "Cascade Inference" (2024): 256 requests, 32 heads of 128 values without
# grouping, pages of 16, about 128 keys of each request's own, H100.

BATCH, HEADS, UNIQUE = 256, 32, 128
PREFIXES = (1024, 2048, 8192, 32768)
PUBLISHED = (3.3, 5.5, 15.0, 31.0)
"""How much faster than vLLM's PagedAttention, read off the bars of a figure."""
PUBLISHED_AGAINST_FLASHINFER = 26.0
"""Of the longest prefix, faster than FlashInfer itself without a cascade."""
PUBLISHED_ON_A100 = 26.0
"""Of the longest prefix, faster than PagedAttention on an A100."""
PREFIX_TILE = 64


@dataclass(frozen=True)
class Traffic:
    """Bytes of one head: sectors that leave the SMs, and each tensor once, which no cache avoids;
    of all tensors and of K and V.
    """

    sectors: int
    once: int
    kv_sectors: int
    kv_once: int


def traffic(machine: Machine, *kv: str) -> Traffic:
    return Traffic(
        machine.hbm_bytes, machine.compulsory_bytes(),
        sectors(machine, *kv), machine.compulsory_bytes(*kv),
    )  # fmt: skip


@cache
def cascade_levels(prefix: int, unique: int = UNIQUE, batch: int = BATCH) -> tuple[Level, Level]:
    """One of the heads, planned as one of 32: heads only multiply all bytes."""
    shared, own = sized([batch], [prefix]), sized([1] * batch, [unique] * batch)
    tiles = (shared, PREFIX_TILE), (own, 16)
    return tuple(Level(p, planned(p, tile_q, kv_heads=HEADS)) for p, tile_q in tiles)  # type: ignore[return-value]


@cache
def cascade(prefix: int, unique: int = UNIQUE, batch: int = BATCH) -> Traffic:
    machine = Machine(H100, "none")
    cascade_attention(machine, cascade_levels(prefix, unique, batch))
    return traffic(machine, "k_0", "v_0", "k_1", "v_1")


@cache
def flat(prefix: int, unique: int = UNIQUE, batch: int = BATCH) -> Traffic:
    """Without a cascade: requests of one length, of which each moves what one alone does."""
    alone = traffic(decoded(sized([1], [prefix + unique])), "k", "v")
    sizes = (alone.sectors, alone.once, alone.kv_sectors, alone.kv_once)
    return Traffic(*(batch * size for size in sizes))


def test_requests_of_one_length_move_as_much_each() -> None:
    machine = decoded(sized([1] * 5, [150] * 5))
    assert machine.hbm_bytes == flat(100, 50, batch=5).sectors
    assert sectors(machine, "k", "v") == flat(100, 50, batch=5).kv_sectors


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_cascade_reads_the_prefix_once_for_all_queries(prefix: int) -> None:
    """cascade attention: attention to the shared prefix is computed once for all queries. Of K and
    V, (prefix + unique) / (prefix / batch + unique) is saved, exactly, if caches serve the tiles
    of queries after the first; without caches the tile takes the place of the batch.
    """
    with_cascade, without = cascade(prefix), flat(prefix)
    assert without.kv_sectors == without.kv_once == BATCH * (prefix + UNIQUE) * TOKEN
    tiles = BATCH // PREFIX_TILE
    assert with_cascade.kv_once == (prefix + BATCH * UNIQUE) * TOKEN
    assert with_cascade.kv_sectors == (tiles * prefix + BATCH * UNIQUE) * TOKEN
    saved = (prefix + UNIQUE) / (prefix / BATCH + UNIQUE)
    assert without.kv_once / with_cascade.kv_once == pytest.approx(saved, rel=1e-12)
    # Q, O, tables and the states between the levels take away from that.
    assert without.once / with_cascade.once < saved


def test_savings_tend_to_the_share_of_keys() -> None:
    """The longer the requests, the less all else matters: the saving of all bytes tends to that of
    K and V, from which it lacks less than the share of all else.
    """
    shares = []
    for scale in (1, 4, 16, 64):
        prefix, unique, batch = 256 * scale, 64 * scale, 8
        saved = (prefix + unique) / (prefix / batch + unique)
        with_cascade = cascade(prefix, unique, batch)
        found = flat(prefix, unique, batch).once / with_cascade.once
        shares.append(1 - with_cascade.kv_once / with_cascade.once)
        assert saved * (1 - shares[-1]) < found < saved
    assert all(after < before for before, after in pairwise(shares))
    assert shares[-1] < 0.01


def test_a_cascade_on_an_h100_is_memory_bound() -> None:
    """So bytes are time: 256 queries for each key of the prefix are below its ridge of 295
    FLOP/byte, even if K and V come from HBM once.
    """
    for level in cascade_levels(PREFIXES[-1]):
        machine = Machine(H100, "none")
        batch_prefill_paged(machine, level.problem, level.plan)
        intensity = arithmetic_intensity(batch_flops(level.problem), machine.compulsory_bytes())
        assert intensity < level.problem.queries.lens.max() <= BATCH
        assert bound(H100, intensity) == "memory"


def test_the_published_speed_up_of_cascades() -> None:
    """Blog, figure: 3.3, 5.5, 15 and 31 times for prefixes of 1K, 2K, 8K and 32K.

    If nothing but bandwidth limits either, a cascade is faster by the bytes that it saves: at least
    by those that leave the SMs, at most by those that no cache avoids. A published figure above the
    latter would be one of a baseline that wastes bandwidth. All are below the former, too, and of
    the same order of magnitude: a factor of the square root of 10. All curves rise and saturate: a
    longer prefix pays, but less than in proportion.
    """
    least = [flat(prefix).sectors / cascade(prefix).sectors for prefix in PREFIXES]
    most = [flat(prefix).once / cascade(prefix).once for prefix in PREFIXES]
    for published, low, high in zip(PUBLISHED, least, most, strict=True):
        assert published < low < high
        assert low / published < 10**0.5
    assert PUBLISHED_AGAINST_FLASHINFER < PUBLISHED[-1] < least[-1]
    for curve in (PUBLISHED, least, most):
        assert all(before < after for before, after in pairwise(curve))
        slopes = [speed / prefix for speed, prefix in zip(curve, PREFIXES, strict=True)]
        assert all(before > after for before, after in pairwise(slopes))
    # However long the prefix: each of its keys is read once instead of once a request.
    assert max(most) < BATCH


def test_cascades_pay_less_on_an_a100() -> None:
    """Blog, figure: 31 times on an H100, about 26 on an A100, for the longest prefix. An A100's
    ridge is lower, and 256 queries for each key are above it.
    """
    one = sized([1], [PREFIXES[-1] + UNIQUE])
    speeds = {}
    for name in ("h100", "a100"):
        machine = gpu(name)
        parts = [
            roofline(
                machine,
                batch_flops(level.problem),
                sum(level.problem.kv_lens) * TOKEN,  # K and V once
            )
            for level in cascade_levels(PREFIXES[-1])
        ]
        alone = roofline(machine, batch_flops(one), int(one.kv_lens[0]) * TOKEN).seconds
        speeds[name] = BATCH * alone / sum(part.seconds for part in parts)
        assert [part.bound for part in parts] == [
            "compute" if name == "a100" else "memory", "memory",
        ]  # fmt: skip
    assert PUBLISHED[-1] > PUBLISHED_ON_A100
    assert PUBLISHED_ON_A100 < speeds["a100"] < speeds["h100"]


def test_a_cascade_is_exact() -> None:
    """自测: attention to prefix and suffix is the merge of attention to each."""
    case = CascadeCase(q_lens=(3, 1, 4), groups=((3,), (1, 1, 1)), kv_lens=((90,), (40, 7, 64)))
    found = cascade_attention(Machine(), case.levels)
    o, lse = batch_reference(flat_problem(case.levels))
    assert np.abs(found.o - o).max() < 1e-14
    assert np.abs(found.lse - lse).max() < 1e-14
