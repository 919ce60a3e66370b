"""Ragged tensors: where rows lie, and padded and block forms of them."""

from __future__ import annotations

import numpy as np
import pytest

from simkit.errors import ShapeError, TableError
from simkit.layouts.block_sparse import BlockRows, from_lengths
from simkit.layouts.ragged import Ragged

RAGGED = Ragged(np.array([0, 2, 2, 5], np.int32))


def test_rows_by_hand() -> None:
    assert RAGGED.batch == 3
    assert RAGGED.total == 5
    assert RAGGED.lens.tolist() == [2, 0, 3]
    assert RAGGED.rows(2) == slice(2, 5)
    assert RAGGED.requests().tolist() == [0, 0, 2, 2, 2]
    assert RAGGED.positions().tolist() == [0, 1, 0, 1, 2]
    assert Ragged.from_lengths(np.array([2, 0, 3])).indptr.tolist() == [0, 2, 2, 5]


def test_padding() -> None:
    values = np.arange(10, 15)
    padded = RAGGED.unpack(values, fill=-1)
    assert padded.tolist() == [[10, 11, -1], [-1, -1, -1], [12, 13, 14]]
    assert RAGGED.pack(padded).tolist() == values.tolist()
    assert Ragged(np.array([0, 0], np.int32)).unpack(np.empty((0, 4))).shape == (1, 0, 4)
    with pytest.raises(ShapeError, match="indptr asks for 5 rows"):
        RAGGED.unpack(values[:4])
    with pytest.raises(ShapeError, match="the longest request has 3 rows"):
        RAGGED.pack(padded[:, :2])


def test_blocks_of_one_slot() -> None:
    rows = RAGGED.to_block_rows()
    assert (rows.block_size, rows.blocks) == (1, 5)
    assert rows.kv_lens.tolist() == [2, 0, 3]
    assert rows.slots(2).tolist() == [2, 3, 4]
    assert Ragged.from_block_rows(rows).indptr.tolist() == [0, 2, 2, 5]


def test_blocks_without_gaps_are_ragged() -> None:
    assert Ragged.from_block_rows(from_lengths(np.array([8, 3]), 4)).indptr.tolist() == [0, 8, 11]
    with pytest.raises(TableError, match="slot 8 is the 7th in order"):
        Ragged.from_block_rows(from_lengths(np.array([7, 3]), 4))
    moved = BlockRows(*(np.array(x, np.int32) for x in ([0, 1], [1], [1])), block_size=1, blocks=2)
    with pytest.raises(TableError, match="slot 1 is the 0th in order"):
        Ragged.from_block_rows(moved)
