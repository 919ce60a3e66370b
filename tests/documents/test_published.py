"""docs/published.md is what the cycle model predicts, and the accuracy that is promised holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from simkit.cli.report import LEAST_WITHIN, MOST_MEDIAN
from simkit.schedules.published.accuracy import Compared, accuracy, compare, published_rows
from simkit.schedules.published.page import page

PAGE = Path(__file__).parents[2] / "docs" / "published.md"


@pytest.fixture(scope="module")
def compared() -> list[Compared]:
    return [compare(row) for row in published_rows()]


def test_accuracy(compared: list[Compared]) -> None:
    found = accuracy(compared)
    assert found.rows > 100
    assert found.median <= MOST_MEDIAN
    assert found.within >= LEAST_WITHIN
    assert not found.broken


def test_the_page_is_up_to_date(compared: list[Compared]) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(compared, accuracy(compared)), "make docs"


def test_rows_that_miss_say_why(compared: list[Compared]) -> None:
    missed = [one for one in compared if one.row.is_counted and abs(one.error) > 0.2]
    assert [one.row.name for one in missed if not one.row.note] == []


def test_names_are_unique(compared: list[Compared]) -> None:
    names = [one.row.name for one in compared]
    assert len(set(names)) == len(names)
