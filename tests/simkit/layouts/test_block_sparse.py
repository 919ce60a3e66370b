"""Block-sparse rows, against tables that are small enough to work out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simkit.errors import DtypeError, ShapeError, TableError
from simkit.layouts.block_sparse import (
    BlockRows,
    from_lengths,
    from_mask,
    join_mask,
    split_mask,
)


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


# Three requests on seven blocks of four slots: 6 keys on blocks 5 and 2, none, 4 keys on block 0.
ROWS = BlockRows(i32(0, 2, 2, 3), i32(5, 2, 0, -99), i32(2, -5, 4), block_size=4, blocks=7)


def test_rows_by_hand() -> None:
    assert ROWS.batch == 3
    assert ROWS.slot_count == 28
    assert ROWS.kv_lens.tolist() == [6, 0, 4]
    assert [ROWS.slots(request).tolist() for request in range(3)] == [
        [20, 21, 22, 23, 8, 9],
        [],
        [0, 1, 2, 3],
    ]
    assert ROWS.all_slots().tolist() == [20, 21, 22, 23, 8, 9, 0, 1, 2, 3]
    assert np.flatnonzero(ROWS.used_slots()).tolist() == [0, 1, 2, 3, 8, 9, 20, 21, 22, 23]
    assert ROWS.locate(np.array([0, 2]), 3).tolist() == [23, 3]


def test_slots_are_int64_where_int32_would_overflow() -> None:
    rows = BlockRows(i32(0, 1), i32(2**31 - 2), i32(3), block_size=256, blocks=2**31 - 1)
    first = (2**31 - 2) * 256
    assert rows.slots(0).dtype == np.int64
    assert rows.slots(0).tolist() == [first, first + 1, first + 2]
    long = BlockRows(i32(0, 3), i32(0, 1, 2), i32(7), block_size=2**30, blocks=3)
    assert long.kv_lens.tolist() == [2**31 + 7]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"indptr": i32(0, 2, 1, 3)}, TableError, r"indptr\[2\] = 1 is less than indptr\[1\] = 2"),
        ({"indptr": i32(0, 2, 2, 5)}, TableError, r"indptr\[3\] = 5, but indices has 4 entries"),
        ({"indices": i32(5, 7, 0)}, TableError, r"indices\[1\] = 7 is outside 0 to 6"),
        ({"indices": i32(5, -1, 0)}, TableError, r"indices\[1\] = -1 is outside 0 to 6"),
        (
            {"last_block_len": i32(0, 1, 1)},
            TableError,
            r"last_block_len\[0\] = 0 is outside 1 to 4",
        ),
        (
            {"last_block_len": i32(2, 1, 5)},
            TableError,
            r"last_block_len\[2\] = 5 is outside 1 to 4",
        ),
        ({"last_block_len": i32(2, 1)}, ShapeError, r"must have shape \[3\], got \[2\]"),
        ({"indices": np.array([5, 2, 0])}, DtypeError, "indices is int64, indptr is int32"),
        ({"block_size": 0}, TableError, "block_size is 0"),
        ({"blocks": -1}, TableError, "blocks is -1"),
    ],
)
def test_rows_refuse(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    tables = {
        "indptr": ROWS.indptr,
        "indices": ROWS.indices,
        "last_block_len": ROWS.last_block_len,
        "block_size": 4,
        "blocks": 7,
    }
    with pytest.raises(error, match=message):
        BlockRows(**{**tables, **changed})


def test_rows_of_lengths() -> None:
    rows = from_lengths(np.array([5, 0, 8]), 4, order=np.array([3, 0, 4, 1]), blocks=5)
    assert rows.dtype == np.int32
    assert rows.indptr.tolist() == [0, 2, 2, 4]
    assert rows.indices.tolist() == [3, 0, 4, 1]
    assert rows.kv_lens.tolist() == [5, 0, 8]
    assert rows.last_block_len[[0, 2]].tolist() == [1, 4]
    assert from_lengths(np.array([5]), 4, dtype=np.int64).dtype == np.int64
    with pytest.raises(TableError, match=r"kv_lens\[0\] = -1"):
        from_lengths(np.array([-1]), 4)


def test_selected_rows_keep_their_blocks() -> None:
    rows = ROWS.select(np.array([2, 0]))
    assert rows.indptr.tolist() == [0, 1, 3]
    assert rows.indices.tolist() == [0, 5, 2]
    assert rows.kv_lens.tolist() == [4, 6]
    with pytest.raises(TableError, match=r"requests\[0\] = 3"):
        ROWS.select(np.array([3]))


def test_a_mask_of_blocks() -> None:
    mask = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0]], bool)
    rows = from_mask(mask, 4, columns=10)
    assert rows.indptr.tolist() == [0, 2, 2, 3]
    assert rows.indices.tolist() == [0, 2, 1]
    # The last of ten columns is the second one of its block.
    assert rows.kv_lens.tolist() == [6, 0, 4]
    assert np.array_equal(rows.to_mask(), mask)
    with pytest.raises(ShapeError, match="columns 13 are not 3 blocks of 4"):
        from_mask(mask, 4, columns=13)
    with pytest.raises(DtypeError, match="mask must be bool, got int64"):
        from_mask(mask.astype(int), 4)


def test_rows_that_no_mask_can_say() -> None:
    for indices in (i32(2, 2), i32(3, 1)):
        rows = BlockRows(i32(0, 2), indices, i32(1), block_size=1, blocks=4)
        with pytest.raises(TableError, match="a mask has ascending blocks only"):
            rows.to_mask()


def test_a_mask_of_elements() -> None:
    mask = np.zeros((5, 7), bool)
    mask[0, 1] = mask[4, 6] = mask[4, 0] = True
    rows, elements = split_mask(mask, 2, 3)
    # Rows of two queries, blocks of three keys; the last of each is cut off.
    assert rows.indptr.tolist() == [0, 1, 1, 3]
    assert rows.indices.tolist() == [0, 0, 2]
    assert rows.kv_lens.tolist() == [3, 0, 4]
    expected = np.zeros((3, 2, 3), bool)
    expected[0, 0, 1] = expected[1, 0, 0] = expected[2, 0, 0] = True
    assert np.array_equal(elements, expected)
    assert np.array_equal(join_mask(rows, elements, (5, 7)), mask)
    with pytest.raises(ShapeError, match="do not fit"):
        join_mask(rows, elements, (7, 7))
