"""Where appended tokens go, and tables that let two tokens lie in one slot."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit.errors import ShapeError, TableError
from simkit.layouts.append import append_positions, append_slots
from simkit.layouts.block_sparse import BlockRows
from simkit.layouts.ragged import Ragged


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


# Two requests of pages of four slots, page 3 shared: 6 tokens on pages 3 and 1, 5 on 3 and 0.
SHARED = BlockRows(i32(0, 2, 4), i32(3, 1, 3, 0), i32(2, 1), block_size=4, blocks=5)


def test_where_appended_tokens_go() -> None:
    append = Ragged(i32(0, 2, 3))
    assert append_positions(SHARED, append).tolist() == [4, 5, 4]
    assert append_slots(SHARED, append).tolist() == [4, 5, 0]


@pytest.mark.parametrize(
    ("rows", "append", "message"),
    [
        (SHARED, i32(0, 7, 7), "request 0 appends 7 tokens, but has 6 afterwards"),
        # Into the page that both have.
        (
            SHARED,
            i32(0, 3, 3),
            r"appended token 0 of request 0 goes to slot 3 of page 3, which holds tokens of "
            r"requests 0, 1; a page that is shared must be copied",
        ),
        # Both append to the same page.
        (
            BlockRows(i32(0, 1, 2), i32(2, 2), i32(1, 1), block_size=4, blocks=5),
            i32(0, 1, 2),
            r"appended token 0 of request 0 goes to slot 0 of page 2, which holds tokens of "
            r"requests 0, 1",
        ),
        # One request has a page twice.
        (
            BlockRows(i32(0, 2), i32(2, 2), i32(1), block_size=4, blocks=5),
            i32(0, 1),
            "slot 0 of page 2, which holds tokens of requests 0, 0",
        ),
    ],
)
def test_appending_refuses(rows: BlockRows, append: Any, message: str) -> None:
    with pytest.raises(TableError, match=message):
        append_slots(rows, Ragged(append))


def test_slots_of_a_shared_page_that_nobody_else_uses() -> None:
    # Request 1 has three of page 3's slots; request 0 appends the fourth one.
    rows = BlockRows(i32(0, 1, 2), i32(3, 3), i32(4, 3), block_size=4, blocks=5)
    assert append_slots(rows, Ragged(i32(0, 1, 1))).tolist() == [15]
    with pytest.raises(ShapeError, match="1 requests append, the tables have 2"):
        append_slots(rows, Ragged(i32(0, 1)))


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_two_tokens_in_one_slot_are_found_exactly(seed: int) -> None:
    """Against the slots of all tokens, one by one, for tables that often use a page twice."""
    rng = np.random.default_rng(seed)
    size, blocks, batch = int(rng.integers(1, 5)), int(rng.integers(1, 30)), 4
    counts = rng.integers(0, 3, batch)
    indptr = np.concatenate(([0], np.cumsum(counts)))
    indices, last = rng.integers(0, blocks, indptr[-1]), rng.integers(1, size + 1, batch)
    rows = BlockRows(indptr, indices, last, size, blocks)
    lengths = np.where(counts, (counts - 1) * size + last, 0).tolist()
    new = [int(rng.integers(0, length + 1)) for length in lengths]
    owners: Counter[int] = Counter()
    appended = []
    for request, length in enumerate(lengths):
        for position in range(length):
            page = int(indices[indptr[request] + position // size])
            slot = page * size + position % size
            owners[slot] += 1
            if position >= length - new[request]:
                appended.append(slot)
    append = Ragged.from_lengths(np.array(new))
    if any(owners[slot] > 1 for slot in appended):
        with pytest.raises(TableError, match="must be copied before it is written to"):
            append_slots(rows, append)
    else:
        assert append_slots(rows, append).tolist() == appended
