"""Validation of index tables: a refusal names the table, the position, the value and the limit.

Tables are int32 or int64. Values are handed on as int64, in which no offset into a cache overflows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.errors import DtypeError, ShapeError, TableError

Table = NDArray[Any]  # of a dtype of TABLE_DTYPES
Int64Array = NDArray[np.int64]

TABLE_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


def check_table(name: str, table: Table, *, shape: tuple[int | None, ...] = (None,)) -> Int64Array:
    """The table's values as int64; ``shape`` says its axes, None for those of any size.

    Errors: `DtypeError` unless int32 or int64, `ShapeError`.
    """
    if not isinstance(table, np.ndarray) or table.dtype not in TABLE_DTYPES:
        found = table.dtype if isinstance(table, np.ndarray) else f"a {type(table).__name__}"
        raise DtypeError(f"{name} must be an int32 or int64 array, got {found}")
    fits = table.ndim == len(shape) and all(
        wanted is None or size == wanted for size, wanted in zip(table.shape, shape, strict=True)
    )
    if not fits:
        wanted_text = ", ".join("any" if size is None else str(size) for size in shape)
        raise ShapeError(f"{name} must have shape [{wanted_text}], got {list(table.shape)}")
    return table.astype(np.int64, copy=False)


def check_range(
    name: str, table: Table, low: int, high: int, *, where: NDArray[np.bool_] | None = None
) -> Int64Array:
    """Values within ``low`` to ``high``, both included, as int64 of the table's shape.

    ``where`` (bool, of the table's shape) limits the check to entries that mean something. Errors:
    `TableError`, and those of `check_table`.
    """
    values = check_table(name, table, shape=(None,) * np.ndim(table))
    wrong = (values < low) | (values > high)
    if where is not None:
        wrong &= where
    if wrong.any():
        raise TableError(f"{_place(name, wrong, values)} is outside {low} to {high}")
    return values


def check_indices(name: str, indices: Table, *, size: int) -> Int64Array:
    """1-D ``indices`` within 0 to ``size`` - 1, as int64. Errors as for `check_range`."""
    check_table(name, indices)
    if size < 1 and indices.size:
        raise TableError(f"{name} has {indices.size} entries, but there is nothing to index")
    return check_range(name, indices, 0, size - 1)


def check_indptr(
    name: str, indptr: Table, *, batch: int | None = None, total: int | None = None
) -> Int64Array:
    """Where each of ``batch`` rows starts in a concatenation, and the end: int64 [batch + 1].

    It starts at 0, never decreases, and ends at ``total`` if that is given. Errors: `TableError`,
    and those of `check_table`.
    """
    values = check_table(name, indptr, shape=(None if batch is None else batch + 1,))
    if not values.size:
        raise ShapeError(f"{name} must have one entry more than there are rows, got none")
    if values[0]:
        raise TableError(f"{name}[0] = {values[0]}; the first row starts at 0")
    decreasing = values[1:] < values[:-1]
    if decreasing.any():
        at = int(decreasing.argmax()) + 1
        raise TableError(
            f"{name}[{at}] = {values[at]} is less than {name}[{at - 1}] = {values[at - 1]}; "
            f"rows never end before they start"
        )
    if total is not None and values[-1] != total:
        raise TableError(
            f"{name}[{values.size - 1}] = {values[-1]}; the last row ends at {total}, where the "
            f"data do"
        )
    return values


def indptr_of(lengths: Int64Array) -> Int64Array:
    """Where rows of these ``lengths`` start, and the end: int64 [len(lengths) + 1]."""
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)


def ramps(lengths: Int64Array) -> Int64Array:
    """0, 1, ... length - 1 for each of the ``lengths``, concatenated."""
    starts = indptr_of(lengths)
    return np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)


def as_table(name: str, values: NDArray[Any], dtype: np.dtype[Any]) -> Table:
    """``values`` in a table ``dtype``; `TableError` where one does not fit."""
    if dtype not in TABLE_DTYPES:
        raise DtypeError(f"{name} must be int32 or int64, not {dtype}")
    limits = np.iinfo(dtype)
    wrong = (values < limits.min) | (values > limits.max)
    if wrong.any():
        raise TableError(f"{_place(name, wrong, values)} does not fit {dtype}")
    return values.astype(dtype)


def _place(name: str, wrong: NDArray[np.bool_], values: NDArray[Any]) -> str:
    at = tuple(int(index) for index in np.argwhere(wrong)[0])
    return f"{name}[{', '.join(map(str, at))}] = {values[at]}"
