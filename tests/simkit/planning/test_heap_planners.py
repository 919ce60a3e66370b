"""The planners of persistent workers: published sizes, queues by hand, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from simkit.errors import ShapeError, TableError
from simkit.planning import holistic, mla
from simkit.planning.holistic import holistic_plan
from simkit.planning.mla import mla_plan
from simkit.planning.sm90 import sm90_plan
from simkit.planning.worklist import WRITES_OUTPUT


@pytest.mark.parametrize(
    ("sm_count", "limit", "works", "merges", "rows"),
    [(108, 256, 32, 16, 512), (132, 192, 43, 16, 688)],
)
def test_published_mla_of_16_heads(
    sm_count: int, limit: int, works: int, merges: int, rows: int
) -> None:
    plan = mla_plan(np.array([0, 1]), np.array([8192]), heads=16, sm_count=sm_count)
    assert (plan.cluster_size, plan.tile_q, plan.kv_limit) == (1, 64, limit)
    assert (plan.work.items, len(plan.merge_ctas), plan.work.partial_rows) == (works, merges, rows)


@pytest.mark.parametrize("sm_count", [108, 132])
def test_published_mla_of_128_heads(sm_count: int) -> None:
    plan = mla_plan(np.array([0, 1]), np.array([8192]), heads=128, sm_count=sm_count)
    assert (plan.cluster_size, plan.tile_q, plan.kv_limit) == (2, 128, 256)
    assert (plan.work.items, len(plan.merge_ctas), plan.work.partial_rows) == (32, 64, 4096)


@pytest.mark.parametrize(
    ("sm_count", "limit", "merges", "least", "most"),
    [(108, 1280, 96, 512, 2048), (132, 1024, 128, 0, 1280)],
)
def test_published_mla_batch(sm_count: int, limit: int, merges: int, least: int, most: int) -> None:
    plan = mla_plan(np.arange(17), np.full(16, 4096), heads=128, sm_count=sm_count)
    assert (plan.kv_limit, plan.work.items, plan.work.partial_rows) == (limit, 64, 8192)
    assert len(plan.merge_ctas) == merges
    loads = plan.work.placement.loads
    assert (loads.min(), loads.max()) == (least, most)


@pytest.mark.parametrize("sm_count", [108, 132])
def test_published_causal_mla(sm_count: int) -> None:
    plan = mla_plan(
        np.array([0, 3, 6, 9]), np.array([0, 17, 514]), heads=64, sm_count=sm_count, causal=True
    )
    assert (plan.kv_limit, plan.work.items, plan.work.partial_rows) == (128, 14, 960)
    assert len(plan.merge_ctas) == 16


@pytest.mark.parametrize(
    ("share", "limit"),
    [(1, 32), (8, 32), (9, 64), (16, 64), (17, 128), (32, 128), (33, 192), (64, 192), (65, 256),
     (256, 256), (257, 512)],
)  # fmt: skip
def test_mla_limits(share: int, limit: int) -> None:
    assert mla.key_limit(share) == limit


def test_holistic_limits() -> None:
    found = [holistic.key_limit(share) for share in (1, 128, 129, 256, 257)]
    assert found == [128, 128, 256, 256, 512]
    assert (holistic.holistic_workers(132, 128), holistic.holistic_workers(132, 256)) == (264, 132)


def test_mla_queues_by_hand() -> None:
    """One tile of 64 rows with 100 keys in 4 pieces of at most 32, on 3 SMs."""
    plan = mla_plan(np.array([0, 1]), np.array([100]), heads=64, sm_count=20)
    work = plan.work  # a share is 5 keys
    assert plan.kv_limit == 32
    spans = list(zip(work.kv_start.tolist(), work.kv_stop.tolist(), strict=True))
    assert spans == [(0, 32), (32, 64), (64, 96), (96, 100)]
    assert work.worker.tolist() == [0, 1, 2, 3]
    assert work.partial_start.tolist() == [0, 1, 2, 3]
    assert work.chunks.tolist() == [4] * 4
    assert work.merge_indptr.tolist() == list(range(0, 65 * 4, 4))
    assert work.merge_rows.tolist() == list(range(64))
    # 100 // 32 = 3 CTAs of 22 rows.
    assert plan.merge_ctas.tolist() == [[0, 22], [22, 44], [44, 64]]
    assert work.placement.costs.tolist() == [128 + 32] * 3 + [128 + 4]


def test_sm90_takes_long_requests_and_last_tiles_first() -> None:
    """2 requests of 130 and 1 queries, causal; the second has more keys."""
    indptr, lengths = np.array([0, 130, 131]), np.array([200, 300])
    work = sm90_plan(indptr, lengths, heads=1, head_dim_v=128, sm_count=8, causal=True)
    items = list(
        zip(work.request.tolist(), work.q_tile.tolist(), work.kv_stop.tolist(), strict=True)
    )
    # Tile 0 ends with query 127, which sees up to key 127 + 70.
    assert items == [(1, 0, 300), (0, 1, 200), (0, 0, 198)]
    assert (work.partial_start == WRITES_OUTPUT).all()
    assert work.placement.costs.tolist() == [556, 456, 454]
    narrow = sm90_plan(indptr, lengths, heads=1, head_dim_v=64, sm_count=8)
    assert narrow.tile_q.tolist() == [192, 192]


def test_sm90_keeps_the_order_of_equal_requests() -> None:
    """std::sort need not; more than 16 requests, from where on it does not."""
    work = sm90_plan(np.arange(41), np.full(40, 64), heads=1, head_dim_v=128, sm_count=40)
    assert work.request.tolist() == list(range(40))


def test_sm90_shares_long_lists_between_heads() -> None:
    """4096 tiles of a head still have a list for each, 4097 do not."""
    for tiles, copies in ((4096, 1), (4097, 2)):
        work = sm90_plan(
            np.array([0, tiles * 128]), np.array([1]), heads=2, head_dim_v=128, sm_count=132
        )
        assert (work.head_copies, work.items) == (copies, tiles * 2 // copies)
        assert work.placement.total == tiles * 2 * (2 * 128 + 1)


def test_holistic_queues_by_hand() -> None:
    """17 packed rows are a big tile, 16 a small one; big ones have half the limit."""
    indptr, lengths = np.array([0, 17, 33]), np.array([200, 300])
    work = holistic_plan(indptr, lengths, group=1, kv_heads=2, head_dim=128, sm_count=2)
    # 500 keys of 2 heads on 4 CTAs are 250 each: 256 keys at most, 128 in a big tile.
    assert sorted(zip(work.tile_q.tolist(), work.kv_start.tolist(), strict=True)) == [
        (16, 0), (16, 0), (16, 256), (16, 256), (128, 0), (128, 0), (128, 128), (128, 128)
    ]  # fmt: skip
    # Costs 384, 384, 328, 328 of the big pieces; small ones follow: 288 to the first that is free.
    assert work.placement.loads.tolist() == [384 + 76, 384 + 76, 328 + 288, 328 + 288]
    assert work.merge_rows.tolist() == list(range(33))
    assert work.merge_indptr.tolist() == list(range(0, 67, 2))
    small = work.tile_q == 16
    assert sorted(work.partial_start[small].tolist()) == [34, 34, 35, 35]


def test_tables_have_a_size() -> None:
    """16384 items for MLA, which the source does not check, 65536 of either tile."""
    indptr = np.arange(16386)
    with pytest.raises(TableError, match=r"16385 work items .* exceed the 16384"):
        mla_plan(indptr, np.ones(16385, int), heads=1, sm_count=132)
    assert mla_plan(indptr[:-1], np.ones(16384, int), heads=1, sm_count=132).work.items == 16384
    with pytest.raises(TableError, match=r"131080 work items of 16 rows \(16385 .* exceed the 655"):
        holistic_plan(indptr, np.ones(16385, int), group=1, kv_heads=8, head_dim=128, sm_count=132)


def test_no_requests_and_one_sm() -> None:
    none = np.zeros(1, np.int64), np.zeros(0, np.int64)
    assert sm90_plan(*none, heads=1, head_dim_v=64, sm_count=1).items == 0
    assert mla_plan(*none, heads=128, sm_count=1).work.items == 0
    assert holistic_plan(*none, group=1, kv_heads=1, head_dim=64, sm_count=1).items == 0
    # A cluster of two CTAs does not fit one SM.
    assert mla_plan(np.array([0, 9]), np.array([5]), heads=128, sm_count=1).cluster_size == 1
    with pytest.raises(ShapeError, match="sm_count is 0"):
        mla_plan(*none, heads=1, sm_count=0)
