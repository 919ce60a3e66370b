"""Ragged tensors: the rows of all requests, concatenated, and where each request's rows start."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from simkit.errors import ShapeError, TableError
from simkit.layouts.block_sparse import BlockRows
from simkit.layouts.tables import (
    Int64Array,
    Table,
    as_table,
    check_indptr,
    check_range,
    indptr_of,
    ramps,
)

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Ragged:
    """Requests' rows in a tensor [total, ...]: those of request b are indptr[b] to indptr[b + 1].

    ``indptr`` [batch + 1] int32 or int64. Errors: `TableError`, `DtypeError`, `ShapeError`.
    """

    indptr: Table

    def __post_init__(self) -> None:
        check_indptr("indptr", self.indptr)

    @classmethod
    def from_lengths(cls, lengths: Table, dtype: DTypeLike = np.int32) -> Ragged:
        """Rows of these lengths, int32 or int64 [batch]. `TableError` for one below 0."""
        checked = check_range("lengths", lengths, 0, np.iinfo(np.int64).max)
        return cls(as_table("indptr", indptr_of(checked), np.dtype(dtype)))

    @classmethod
    def from_block_rows(cls, rows: BlockRows) -> Ragged:
        """The ragged form of ``rows``; `TableError` unless their slots are 0, 1, 2, ..."""
        slots = rows.all_slots()
        wrong = slots != np.arange(slots.size)
        if wrong.any():
            at = int(wrong.argmax())
            raise TableError(f"slot {slots[at]} is the {at}th in order; ragged rows have no gaps")
        return cls(as_table("indptr", indptr_of(rows.kv_lens), rows.dtype))

    @property
    def batch(self) -> int:
        return len(self.indptr) - 1

    @property
    def total(self) -> int:
        return int(self.indptr[-1])

    @cached_property
    def lens(self) -> Int64Array:
        """Rows of each request, int64 [batch]."""
        starts = self.indptr.astype(np.int64)
        return starts[1:] - starts[:-1]

    def rows(self, request: int) -> slice:
        """Where the request's rows lie."""
        return slice(int(self.indptr[request]), int(self.indptr[request + 1]))

    def requests(self) -> Int64Array:
        """The request of each row, int64 [total]."""
        return np.repeat(np.arange(self.batch), self.lens)

    def positions(self) -> Int64Array:
        """The place of each row among those of its request, int64 [total]."""
        return ramps(self.lens)

    def to_block_rows(self) -> BlockRows:
        """The same as rows of blocks of one slot, in the order in which they lie."""
        indices = np.arange(self.total, dtype=self.indptr.dtype)
        ones = np.ones(self.batch, self.indptr.dtype)
        return BlockRows(self.indptr, indices, ones, block_size=1, blocks=self.total)

    def unpack(self, values: Array, fill: Any = 0) -> Array:
        """``values`` [total, ...] to [batch, longest, ...], ``fill`` after each request's rows."""
        self._check(values, (self.total,))
        longest = int(self.lens.max(initial=0))
        padded = np.full((self.batch, longest, *values.shape[1:]), fill, values.dtype)
        padded[self.requests(), self.positions()] = values
        return padded

    def pack(self, padded: Array) -> Array:
        """``padded`` [batch, at least the longest, ...] to [total, ...]; the rest is not read."""
        self._check(padded, (self.batch,))
        if padded.ndim < 2 or padded.shape[1] < self.lens.max(initial=0):
            raise ShapeError(
                f"padded has shape {list(padded.shape)}; the longest request has "
                f"{self.lens.max(initial=0)} rows"
            )
        return padded[self.requests(), self.positions()]

    def _check(self, values: Array, leading: tuple[int, ...]) -> None:
        if values.shape[:1] != leading:
            raise ShapeError(
                f"values have shape {list(values.shape)}; indptr asks for {leading[0]} rows"
            )
