"""The grid planners: published sizes, a plan by hand, faults of the published algorithms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simkit.errors import CapacityError, DtypeError, ShapeError, TableError
from simkit.planning.decode import decode_plan
from simkit.planning.plan import Plan, coverage
from simkit.planning.prefill import cta_tile_q, prefill_plan

A100, H100 = 108, 132
FOUR = (64, 128, 256, 512)  # pages


def paged(pages: tuple[int, ...], sm_count: int, **changes: Any) -> Plan:
    """One query per request, 32 heads on 8, pages of 16 keys, unless changed."""
    arguments: dict[str, Any] = {"group": 4, "kv_heads": 8, "head_dim_v": 128, "page_size": 16}
    arguments |= {"sm_count": sm_count} | changes
    kv_lens = np.array(pages, np.int64) * arguments["page_size"]
    return prefill_plan(np.arange(len(pages) + 1), kv_lens, **arguments)


@pytest.mark.parametrize(
    ("sm_count", "pages", "chunk", "o_indptr"),
    [
        (A100, (512,), 304, [0, 27]),
        (H100, (512,), 256, [0, 32]),
        (A100, FOUR, 592, [0, 2, 6, 13, 27]),
        (H100, FOUR, 512, [0, 2, 6, 14, 30]),
        (A100, (0, 1, 512), 336, [0, 1, 2, 27]),
        (H100, (0, 1, 512), 272, [0, 1, 2, 33]),
    ],
)
def test_published_decode_steps(
    sm_count: int, pages: tuple[int, ...], chunk: int, o_indptr: list[int]
) -> None:
    plan = paged(pages, sm_count)
    assert (plan.tile_q, plan.kv_chunk, plan.is_split) == (16, chunk, True)
    assert plan.o_indptr.tolist() == plan.merge_indptr.tolist() == o_indptr
    assert plan.items == plan.grid == o_indptr[-1]


def test_published_graph_is_padded() -> None:
    plan = paged(FOUR, H100, graph=True)
    assert (plan.items, plan.grid) == (30, 33)


@pytest.mark.parametrize("sm_count", [A100, H100])
def test_published_prefill_is_not_split(sm_count: int) -> None:
    """74 tiles are more than the bound of 54 or 66 already."""
    plan = prefill_plan(
        np.array([0, 577, 1154], np.int32),
        np.array([2048, 2048], np.int32),
        group=8, kv_heads=4, head_dim_v=128, page_size=16, sm_count=sm_count,
    )  # fmt: skip
    assert (plan.tile_q, plan.is_split, plan.items) == (128, False, 74)
    assert plan.o_indptr.tolist() == [0, 577, 1154]


@pytest.mark.parametrize("sm_count", [A100, H100])
@pytest.mark.parametrize("causal", [False, True])
def test_published_window(sm_count: int, causal: bool) -> None:
    """127 keys and a tile of 16 are 9 pages at most: two chunks of the least size."""
    plan = paged(FOUR, sm_count, window_left=127, causal=causal)
    assert (plan.kv_chunk, plan.items, plan.chunks.tolist()) == (128, 8, [2] * 4)


@pytest.mark.parametrize("sm_count", [A100, H100])
def test_published_page_of_one_key(sm_count: int) -> None:
    plan = prefill_plan(
        np.arange(4), np.array([17, 514, 8736]),
        group=8, kv_heads=2, head_dim_v=128, page_size=1, sm_count=sm_count,
    )  # fmt: skip
    assert (plan.kv_chunk, plan.items) == (128, 75)


@pytest.mark.parametrize(("sm_count", "pages", "items"), [(A100, 37, 27), (H100, 32, 30)])
def test_published_decode_planner(sm_count: int, pages: int, items: int) -> None:
    plan = decode_plan(
        np.array(FOUR) * 16, group=4, kv_heads=8, page_size=16, max_grid=2 * sm_count
    )
    assert (plan.kv_chunk, plan.items, plan.is_split) == (16 * pages, items, True)


def test_published_decode_planner_forgets_requests_without_keys() -> None:
    """19 empty requests beside one of 512 pages: c = 19 pages makes 27 chunks, and 46 items."""
    lengths = np.array([0] * 19 + [512 * 16])
    arguments: dict[str, Any] = {"group": 4, "kv_heads": 8, "page_size": 16, "max_grid": 216}
    published = decode_plan(lengths, **arguments, published=True)
    assert (published.kv_chunk, published.items) == (19 * 16, 46)
    with pytest.raises(TableError, match="46 work items, but the grid has 27 CTAs"):
        decode_plan(lengths, **arguments, graph=True, published=True)
    ours = decode_plan(lengths, **arguments, graph=True)
    assert (ours.kv_chunk, ours.items, ours.grid) == (64 * 16, 27, 27)


def test_published_window_bound_loses_keys() -> None:
    """Without a right bound, a tile's first query sees from its window to the last key."""
    indptr, lengths = np.array([0, 600]), np.array([900])
    mask: dict[str, Any] = {"group": 1, "window_left": 5}
    arguments: dict[str, Any] = {"kv_heads": 8, "head_dim_v": 128, "sm_count": H100}

    def seen_by_first_tile(published: bool) -> int:
        plan = prefill_plan(indptr, lengths, **mask, **arguments, published=published)
        keys = coverage(plan, indptr, lengths, **mask)[plan.q_tiles == 0]
        return int((keys[:, 1] - keys[:, 0]).sum())

    first = 900 - 600 - 5  # the first query's window
    assert seen_by_first_tile(published=False) == 900 - first
    assert seen_by_first_tile(published=True) == 2 * 128


def test_plan_by_hand() -> None:
    """3 and 0 and 1 queries of 2 heads in tiles of 4 rows; 250, 90 and 0 keys in chunks of 100."""
    indptr, lengths = np.array([0, 3, 3, 4]), np.array([250, 90, 0])
    arguments: dict[str, Any] = {"group": 2, "causal": True}
    plan = prefill_plan(
        indptr, lengths, **arguments, kv_heads=1, head_dim_v=64, sm_count=1, tile_q=4,
        fixed_split=100,
    )  # fmt: skip
    assert plan.requests.tolist() == [0] * 6 + [2]
    assert plan.q_tiles.tolist() == [0, 0, 0, 1, 1, 1, 0]
    assert plan.kv_chunks.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert plan.requests.dtype == plan.q_tiles.dtype == plan.kv_chunks.dtype == np.int32
    assert plan.chunks.tolist() == [3, 0, 1]
    assert plan.merge_indptr.tolist() == [0, 3, 6, 9, 10]
    assert plan.o_indptr.tolist() == [0, 9, 9, 10]
    # Queries 0 and 1 see up to key 248, query 2 all 250.
    assert coverage(plan, indptr, lengths, **arguments).tolist() == [
        [0, 100], [100, 200], [200, 249], [0, 100], [100, 200], [200, 250], [0, 0]
    ]  # fmt: skip
    assert plan.partial_rows == 10
    assert plan.workspace_elements(heads=2, head_dim_v=64) == 10 * 2 * 65
    assert plan.workspace_bytes(heads=2, head_dim_v=64, rows=11) == 11 * 2 * 65 * 4
    # 7 items of 4 packed rows are 14 rows of either head.
    assert plan.most_partial_rows(2) == 14


def test_a_query_before_all_keys_sees_none() -> None:
    """5 queries, 2 keys: the first three see nothing, but their items exist."""
    indptr, lengths = np.array([0, 5]), np.array([2])
    plan = prefill_plan(
        indptr, lengths, group=1, kv_heads=1, head_dim_v=64, sm_count=1, tile_q=3, causal=True
    )
    keys = coverage(plan, indptr, lengths, group=1, causal=True)
    assert keys.tolist() == [[0, 0], [0, 2]]


def test_without_requests_or_queries() -> None:
    none = np.zeros(0, np.int64)
    plan = paged((), H100)
    assert (plan.items, plan.grid, plan.batch, plan.partial_rows) == (0, 0, 0, 0)
    plan = prefill_plan(
        np.zeros(3, np.int32), np.array([5, 0]), group=1, kv_heads=1, head_dim_v=64, sm_count=1
    )
    assert (plan.items, plan.chunks.tolist()) == (0, [0, 0])
    assert decode_plan(none, group=1, kv_heads=1, page_size=1, max_grid=1).items == 0


@pytest.mark.parametrize(
    ("packed", "d_v", "tile"),
    [
        (1, 128, 16), (16, 128, 16), (17, 128, 64), (64, 128, 64), (65, 128, 128),
        (65, 256, 64), (16, 256, 16), (32, 512, 16), (33, 512, 32),
    ],
)  # fmt: skip
def test_tile_sizes(packed: int, d_v: int, tile: int) -> None:
    assert cta_tile_q(packed, d_v) == tile


def test_graph_modes() -> None:
    """2 queries of 8 heads on 2 in tiles of 16 rows: at most 2 tiles, without chunks no more."""
    lengths = np.array([500, 700])
    arguments: dict[str, Any] = {"group": 8, "kv_heads": 2, "head_dim_v": 128, "sm_count": H100}
    plan = prefill_plan(np.arange(3), lengths, **arguments, graph=True, disable_split=True)
    assert (plan.grid, plan.is_split, plan.items) == (2, False, 2)
    # A graph that merges does so for lengths of one chunk, too.
    plan = prefill_plan(np.arange(3), lengths, **arguments, graph=True, fixed_split=1000)
    assert (plan.grid, plan.is_split, plan.partial_rows) == (132, True, 2)
    with pytest.raises(TableError, match="1200 work items, but the grid has 132 CTAs"):
        prefill_plan(np.arange(3), lengths, **arguments, graph=True, fixed_split=1)
    with pytest.raises(TableError, match=r"qo_indptr\[2\] = 2; the graph was captured for 1 quer"):
        prefill_plan(np.arange(3), lengths, **arguments, graph=True, max_rows=1)
    with pytest.raises(ShapeError, match="max_rows is 9; only a plan for a CUDA graph has it"):
        prefill_plan(np.arange(3), lengths, **arguments, max_rows=9)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"qo_indptr": [0, 2, 1]}, TableError, r"qo_indptr\[2\] = 1 is less than"),
        ({"qo_indptr": [1, 2, 3]}, TableError, r"qo_indptr\[0\] = 1"),
        ({"qo_indptr": [0, 1, 2**31]}, TableError, r"qo_indptr\[2\] = 2147483648 is outside"),
        ({"kv_lens": [3, -1]}, TableError, r"kv_lens\[1\] = -1 is outside 0 to 2147483647"),
        ({"kv_lens": [3]}, ShapeError, r"each of the 2 requests of qo_indptr, got shape \[1\]"),
        ({"kv_lens": [3.0, 1.0]}, DtypeError, "kv_lens must be an int32 or int64 array"),
        ({"group": 0}, ShapeError, "group is 0; it must be 1 to"),
        ({"page_size": 0}, ShapeError, "page_size is 0; it must be 1 to"),
        ({"kv_heads": 0}, ShapeError, "kv_heads is 0; it must be 1 to"),
        ({"sm_count": 0}, ShapeError, "sm_count is 0; it must be 1 to"),
        ({"head_dim_v": 0}, ShapeError, "head_dim_v is 0; it must be 1 to"),
        ({"tile_q": 0}, ShapeError, "tile_q is 0; it must be 1 to"),
        ({"window_left": -2}, ShapeError, "window_left is -2; it is -1"),
        ({"fixed_split": -1}, ShapeError, "fixed_split is -1 keys"),
        ({"fixed_split": 64, "disable_split": True}, ShapeError, "fixed_split is 64 keys with"),
    ],
)
def test_prefill_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"qo_indptr": [0, 1, 2], "kv_lens": [3, 4], "group": 1}
    arguments |= {"kv_heads": 1, "head_dim_v": 64, "sm_count": 1} | changes
    tables = [np.array(arguments.pop(name)) for name in ("qo_indptr", "kv_lens")]
    with pytest.raises(error, match=message):
        prefill_plan(*tables, **arguments)


@pytest.mark.parametrize("name", ["group", "kv_heads", "page_size", "max_grid"])
def test_decode_refuses(name: str) -> None:
    arguments = dict.fromkeys(("group", "kv_heads", "page_size", "max_grid"), 1) | {name: 0}
    with pytest.raises(ShapeError, match=f"{name} is 0; it must be 1 to"):
        decode_plan(np.array([5]), **arguments)
    with pytest.raises(TableError, match=r"kv_lens\[0\] = -5"):
        decode_plan(np.array([-5]), group=1, kv_heads=1, page_size=1, max_grid=1)


def test_more_items_than_tables_hold() -> None:
    with pytest.raises(CapacityError, match="4294967294 work items; tables hold 134217728"):
        prefill_plan(
            np.arange(3), np.full(2, 2**31 - 1),
            group=1, kv_heads=1, head_dim_v=64, sm_count=1, fixed_split=1,
        )  # fmt: skip
