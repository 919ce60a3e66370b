"""Index tables: what is refused, and that the message names table, position, value and limit."""

from __future__ import annotations

import numpy as np
import pytest

from simkit.errors import DtypeError, ShapeError, TableError
from simkit.layouts.tables import (
    as_table,
    check_indices,
    check_indptr,
    check_range,
    indptr_of,
    ramps,
)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_table_comes_back_as_int64(dtype: type) -> None:
    found = check_indptr("indptr", np.array([0, 3, 3, 7], dtype), batch=3, total=7)
    assert found.dtype == np.int64
    assert found.tolist() == [0, 3, 3, 7]


@pytest.mark.parametrize(
    ("indptr", "message"),
    [
        ([1, 2], r"indptr\[0\] = 1; the first row starts at 0"),
        ([0, 4, 3, 7], r"indptr\[2\] = 3 is less than indptr\[1\] = 4"),
        ([0, 4, 6], r"indptr\[2\] = 6; the last row ends at 7"),
    ],
)
def test_indptr_refuses(indptr: list[int], message: str) -> None:
    with pytest.raises(TableError, match=message):
        check_indptr("indptr", np.array(indptr, np.int32), total=7)


def test_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"kv_indptr must have shape \[4\], got \[3\]"):
        check_indptr("kv_indptr", np.zeros(3, np.int32), batch=3)
    with pytest.raises(ShapeError, match=r"must have shape \[any\], got \[2, 2\]"):
        check_indptr("kv_indptr", np.zeros((2, 2), np.int32))
    with pytest.raises(ShapeError, match="one entry more than there are rows, got none"):
        check_indptr("kv_indptr", np.zeros(0, np.int32))


@pytest.mark.parametrize("dtype", [np.float32, np.uint32, np.int16, np.bool_])
def test_other_dtypes_are_refused(dtype: type) -> None:
    with pytest.raises(DtypeError, match=f"must be an int32 or int64 array, got {dtype.__name__}"):
        check_indptr("indptr", np.zeros(2, dtype))
    with pytest.raises(DtypeError, match="got a list"):
        check_indices("indices", [0, 1], size=2)  # type: ignore[arg-type]


def test_an_index_outside_names_its_place() -> None:
    with pytest.raises(TableError, match=r"indices\[1\] = 9 is outside 0 to 8"):
        check_indices("indices", np.array([8, 9], np.int32), size=9)
    with pytest.raises(TableError, match=r"indices\[0\] = -1 is outside 0 to 8"):
        check_indices("indices", np.array([-1, 9], np.int64), size=9)
    with pytest.raises(TableError, match="nothing to index"):
        check_indices("indices", np.array([0], np.int32), size=0)
    assert check_indices("indices", np.empty(0, np.int32), size=0).size == 0


def test_entries_that_mean_nothing_are_not_checked() -> None:
    table = np.array([[0, -7], [5, 2]], np.int32)
    where = np.array([[True, False], [True, True]])
    assert check_range("table", table, 0, 5, where=where).tolist() == table.tolist()
    with pytest.raises(TableError, match=r"table\[0, 1\] = -7 is outside 0 to 5"):
        check_range("table", table, 0, 5)


def test_a_number_that_does_not_fit_is_refused() -> None:
    numbers = np.array([0, 2**31])
    assert as_table("indptr", numbers, np.dtype(np.int64)).tolist() == [0, 2**31]
    with pytest.raises(TableError, match=r"indptr\[1\] = 2147483648 does not fit int32"):
        as_table("indptr", numbers, np.dtype(np.int32))
    with pytest.raises(DtypeError, match="must be int32 or int64, not float64"):
        as_table("indptr", numbers, np.dtype(np.float64))


def test_lengths_to_starts_and_places() -> None:
    lengths = np.array([2, 0, 3])
    assert indptr_of(lengths).tolist() == [0, 2, 2, 5]
    assert ramps(lengths).tolist() == [0, 1, 0, 1, 2]
