"""FlashMLA's tile scheduler: published metadata, sizes and lengths."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from simkit.errors import ShapeError, TableError
from simkit.planning.flashmla import (
    Part,
    dense_parts,
    pieces,
    sparse_lengths,
    sparse_parts,
    tile_schedule,
)

Fields = tuple[int, ...]


def fields(part: Part) -> Fields:
    return tuple(map(int, dataclasses.astuple(part)))


@pytest.mark.parametrize(
    ("lengths", "payload", "num_splits", "parts"),
    [
        (
            [1000, 0, 64, 65, 4096],
            33,
            [0, 1, 2, 3, 4, 7],
            [
                (0, 2, 0, 1, 0, 0, 0),
                (3, 4, 0, 21, 0, 0, 1),
                (4, 4, 21, 49, 1, 1, 1),
                (4, 4, 49, 64, 2, 1, 1),
            ],
        ),
        (
            [4096, 4096],
            40,
            [0, 2, 5],
            [
                (0, 0, 0, 35, 0, 1, 1),
                (0, 1, 35, 1, 1, 1, 1),
                (1, 1, 1, 36, 1, 1, 1),
                (1, 1, 36, 64, 2, 1, 1),
            ],
        ),
        ([0, 0, 0], 14, [0, 1, 2, 3], [(0, 1, 0, 0, 0, 0, 0), (2, 2, 0, 0, 0, 0, 0)]),
        (
            [16384, 128, 128, 300],
            53,
            [0, 6, 7, 8, 9],
            [
                *((0, 0, 48 * n, 48 * (n + 1), n, int(True), 1) for n in range(1, 5)),
                (0, 3, 240, 5, 5, 1, 0),
            ],
        ),
    ],
)
def test_published_metadata(
    lengths: list[int], payload: int, num_splits: list[int], parts: list[Fields]
) -> None:
    count = {3: 2, 4: 6}.get(len(lengths), 4)
    schedule = tile_schedule(np.array(lengths), count)
    assert schedule.payload == payload
    assert schedule.num_splits.tolist() == num_splits
    assert [fields(part) for part in schedule.parts][-len(parts) :] == parts


def test_published_idle_parts() -> None:
    schedule = tile_schedule(np.array([1], np.int32), 4)
    assert schedule.payload == 7
    assert schedule.num_splits.tolist() == [0, 1]
    assert fields(schedule.parts[0]) == (0, 0, 0, 1, 0, 0, 0)
    assert [(part.begin_request, part.end_request) for part in schedule.parts[1:]] == [(1, 0)] * 3
    assert len([*pieces(schedule, np.array([1]))]) == 1


def test_published_sparse_batch() -> None:
    """top-k 2048, 128 requests of two queries, 128 heads, 132 SMs: nothing is split."""
    parts = sparse_parts("sm90", 132, q_len=2, heads=128)
    schedule = tile_schedule(sparse_lengths(128, 2048), parts)
    assert (parts, schedule.payload) == (33, 149)
    assert schedule.num_splits.tolist() == list(range(129))
    assert sum(part.begin_request < 128 for part in schedule.parts) == 32


def test_numbers_of_parts() -> None:
    assert dense_parts(132, kv_heads=1, rows=128) == 66
    assert dense_parts(132, kv_heads=1, rows=256) == 33
    # Where an early revision divided by zero.
    assert dense_parts(8, kv_heads=16, rows=64) == 1
    assert sparse_parts("sm100_head64", 148, q_len=2, heads=64) == 74
    assert sparse_parts("sm100_head128_small_topk", 148, q_len=1, heads=128) == 74
    with pytest.raises(ShapeError, match="kernel 'sm90' with 32 heads; there are sm90, sm100_he"):
        sparse_parts("sm90", 132, q_len=1, heads=32)


def test_sparse_lengths() -> None:
    """The first list is never empty and ends a block if there is a second."""
    given = np.array([0, 1, 64, 65])
    assert sparse_lengths(4, 128, topk_lengths=given).tolist() == [1, 1, 64, 65]
    extra = sparse_lengths(4, 128, topk_lengths=given, extra_topk=9, extra_lengths=np.arange(4))
    assert extra.tolist() == [64, 65, 66, 131]
    assert sparse_lengths(1, 100, extra_topk=9).tolist() == [128 + 9]
    with pytest.raises(TableError, match=r"topk_lengths\[0\] = 129 is outside 0 to 128"):
        sparse_lengths(1, 128, topk_lengths=np.array([129]))
    with pytest.raises(ShapeError, match=r"extra_lengths must be \[2\], got \[1\]"):
        sparse_lengths(2, 128, extra_topk=9, extra_lengths=np.array([1]))


def test_pieces_by_hand() -> None:
    """4096 keys twice on 4 parts: the second part ends request 0 and has a block of request 1."""
    lengths = np.array([4096, 4096])
    found = [tuple(piece) for piece in pieces(tile_schedule(lengths, 4), lengths)]
    assert found == [
        (0, 0, 0, 35, 0, True),
        (1, 0, 35, 64, 1, True),
        (1, 1, 0, 1, 2, True),
        (2, 1, 1, 36, 3, True),
        (3, 1, 36, 64, 4, True),
    ]


def test_refusals() -> None:
    with pytest.raises(ShapeError, match="parts is 0"):
        tile_schedule(np.array([1]), 0)
    with pytest.raises(TableError, match=r"lengths\[0\] = -1"):
        tile_schedule(np.array([-1]), 1)
    with pytest.raises(ShapeError, match=r"lengths must be \[batch\], got \[1, 1\]"):
        tile_schedule(np.array([[1]]), 1)
    assert tile_schedule(np.zeros(0, np.int64), 2).num_splits.tolist() == [0]
