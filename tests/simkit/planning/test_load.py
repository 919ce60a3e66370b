"""Placements: list scheduling by hand and against brute force, figures of balance."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkit.errors import ShapeError
from simkit.planning.load import in_order, item_cost, list_schedule


def test_list_schedule_by_hand() -> None:
    """Costs 5, 3, 4, 1, 2 on two workers: 5 | 3, then 4 to the second, 1 to the first, 2 too."""
    found = list_schedule([5, 3, 4, 1, 2], 2)
    assert found.worker.tolist() == [0, 1, 1, 0, 0]
    assert found.starts.tolist() == [0, 0, 3, 5, 6]
    assert found.loads.tolist() == [8, 7]
    assert (found.total, found.largest, found.makespan) == (15, 5, 8)
    assert found.ideal == 7.5
    assert found.efficiency == 15 / 16


def test_ideal_is_the_largest_item() -> None:
    found = list_schedule([10, 1], 4)
    assert (found.makespan, found.ideal) == (10, 10.0)
    assert found.efficiency == 11 / 40


def test_without_work() -> None:
    found = list_schedule([], 3)
    assert (found.makespan, found.ideal, found.efficiency) == (0, 0.0, 1.0)
    assert found.loads.tolist() == [0, 0, 0]
    with pytest.raises(ShapeError, match="workers is 0"):
        list_schedule([], 0)


@given(st.lists(st.integers(0, 20), max_size=6), st.integers(1, 3))
def test_no_placement_is_below_the_ideal_nor_list_scheduling_above_its_bound(
    costs: list[int], workers: int
) -> None:
    found = list_schedule(costs, workers)
    best = min(
        max(
            sum(cost for cost, own in zip(costs, owners, strict=True) if own == worker)
            for worker in range(workers)
        )
        for owners in itertools.product(range(workers), repeat=len(costs))
    )
    assert found.ideal <= best <= found.makespan
    # R. L. Graham: within 2 - 1 / workers of the best.
    assert found.makespan * workers <= (2 * workers - 1) * best


def test_items_with_given_workers() -> None:
    found = in_order(np.array([2, 0, 2, 0]), np.array([4, 1, 3, 2]), 4)
    assert found.starts.tolist() == [0, 0, 4, 1]
    assert found.loads.tolist() == [3, 0, 7, 0]
    assert in_order(np.zeros(0, int), np.zeros(0, int), 2).loads.tolist() == [0, 0]


def test_costs_beyond_float32() -> None:
    """2^24 + 1, which the published float32 cost does not tell from 2^24."""
    assert int(item_cost(16, 2**24 - 31)) == 2**24 + 1
