"""The requests that a plan is for, checked, and which keys the rows of a query tile may see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from simkit.errors import ShapeError
from simkit.layouts.tables import Int64Array, Table, check_indptr, check_range

MOST_LENGTH = 2**31 - 1
"""Kernels count queries, keys and work items in int32."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Requests and their mask. Packed row p of a request is query p // group, head p % group of the
    query heads that share a K/V head.

    ``q_lens``, ``kv_lens`` int64 [batch]. Query i of a request sees keys from
    i + kv_len - q_len - ``window_left`` (from 0 if that is -1) up to i + kv_len - q_len if
    ``causal``, up to the last otherwise.
    """

    q_lens: Int64Array
    kv_lens: Int64Array
    group: int = 1
    window_left: int = -1
    causal: bool = False

    @classmethod
    def of(
        cls,
        qo_indptr: Table,
        kv_lens: Table,
        *,
        group: int = 1,
        window_left: int = -1,
        causal: bool = False,
    ) -> Batch:
        """Checks the tables, int32 or int64 [batch + 1] and [batch].

        Errors: `TableError` for a decreasing indptr or a length outside 0 to 2^31 - 1,
        `ShapeError`, `DtypeError`.
        """
        indptr = check_indptr("qo_indptr", qo_indptr)
        check_range("qo_indptr", indptr, 0, MOST_LENGTH)
        lengths = check_range("kv_lens", kv_lens, 0, MOST_LENGTH)
        if lengths.shape != (indptr.size - 1,):
            raise ShapeError(
                f"kv_lens must have a length for each of the {indptr.size - 1} requests of "
                f"qo_indptr, got shape {list(lengths.shape)}"
            )
        check_sizes(group=group)
        if not -1 <= window_left <= MOST_LENGTH:
            raise ShapeError(f"window_left is {window_left}; it is -1 (none) to {MOST_LENGTH}")
        return cls(np.diff(indptr), lengths, group, window_left, causal)

    @property
    def size(self) -> int:
        """How many requests."""
        return len(self.q_lens)

    @property
    def rows(self) -> int:
        """Queries of all requests."""
        return int(self.q_lens.sum())

    @property
    def packed_lens(self) -> Int64Array:
        """Packed rows of each request."""
        return self.q_lens * self.group

    def mean_packed_len(self) -> int:
        """Packed rows of a request on average, rounded down."""
        return self.rows * self.group // max(self.size, 1)

    def tiles(self, tile_q: int) -> Int64Array:
        """Query tiles of each request."""
        return ceil_div(self.packed_lens, tile_q)

    def tile_keys(
        self, requests: NDArray[np.integer], q_tiles: NDArray[np.integer], tile_q: int
    ) -> Int64Array:
        """First key that any row of each tile may see, and the one after the last: int64 [n, 2].

        Both are the same where no row sees a key.
        """
        request, tile = np.asarray(requests, np.int64), np.asarray(q_tiles, np.int64)
        kv_lens, shift = self.kv_lens[request], (self.kv_lens - self.q_lens)[request]
        last_packed = np.minimum((tile + 1) * tile_q, self.packed_lens[request]) - 1
        stops = kv_lens
        if self.causal:
            stops = np.clip(last_packed // self.group + shift + 1, 0, kv_lens)
        starts = np.zeros_like(stops)
        if self.window_left >= 0:
            starts = np.clip(tile * tile_q // self.group + shift - self.window_left, 0, stops)
        return np.stack([starts, stops], axis=-1)


@overload
def ceil_div(count: int, size: int) -> int: ...
@overload
def ceil_div(count: Int64Array, size: Int64Array | int) -> Int64Array: ...
@overload
def ceil_div(count: int, size: Int64Array) -> Int64Array: ...
def ceil_div(count: Int64Array | int, size: Int64Array | int) -> Int64Array | int:
    """How many pieces of ``size`` cover ``count``."""
    return -(-count // size)


def check_sizes(least: int = 1, **sizes: int) -> None:
    """ShapeError for a size that is not from ``least`` to 2^31 - 1."""
    for name, size in sizes.items():
        if not least <= size <= MOST_LENGTH:
            raise ShapeError(f"{name} is {size}; it must be {least} to {MOST_LENGTH}")
