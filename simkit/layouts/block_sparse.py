"""Rows of a block-sparse matrix: the one form that ragged, paged and block-sparse K/V map to.

The columns of the matrix are the slots of a K/V cache, in blocks. A row is the K/V of one request
(or of one tile of queries): the blocks in which it lies, in order, in CSR form. Pages are blocks of
``block_size`` slots; ragged rows have blocks of one slot; block-sparse attention has blocks of as
many keys as its mask.

Source: FlashInfer (MLSys 2025), section 3.1, "KV-cache as block-sparse matrix".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from simkit.errors import DtypeError, ShapeError, TableError
from simkit.layouts.tables import (
    Int64Array,
    Table,
    as_table,
    check_indices,
    check_indptr,
    check_range,
    check_table,
    indptr_of,
    ramps,
)

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Which blocks of a cache hold each request's K/V.

    ``indptr`` [batch + 1]: where each request's blocks start in ``indices``. ``indices``
    [>= indptr[-1]]: block numbers; entries from indptr[-1] on mean nothing. ``last_block_len``
    [batch]: used slots of each request's last block, 1 to block_size; it means nothing for a
    request without blocks. All three int32 or all three int64. ``block_size``: slots of a block.
    ``blocks``: blocks in the cache.

    Errors: `TableError`, `DtypeError`, `ShapeError`.
    """

    indptr: Table
    indices: Table
    last_block_len: Table
    block_size: int
    blocks: int

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise TableError(f"block_size is {self.block_size}; a block has at least one slot")
        if self.blocks < 0:
            raise TableError(f"blocks is {self.blocks}; a cache cannot have fewer than none")
        starts = check_indptr("indptr", self.indptr)
        check_table("indices", self.indices)
        check_table("last_block_len", self.last_block_len, shape=(self.batch,))
        for name, table in (("indices", self.indices), ("last_block_len", self.last_block_len)):
            if table.dtype != self.dtype:
                raise DtypeError(
                    f"{name} is {table.dtype}, indptr is {self.dtype}; tables share one dtype"
                )
        if len(self.indices) < starts[-1]:
            raise TableError(
                f"indptr[{self.batch}] = {starts[-1]}, but indices has {len(self.indices)} entries"
            )
        check_indices("indices", self.indices[: starts[-1]], size=self.blocks)
        check_range(
            "last_block_len", self.last_block_len, 1, self.block_size, where=np.diff(starts) > 0
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the three tables: int32 or int64."""
        return self.indptr.dtype

    @property
    def batch(self) -> int:
        return len(self.indptr) - 1

    @property
    def slot_count(self) -> int:
        """Slots of the cache."""
        return self.blocks * self.block_size

    @cached_property
    def starts(self) -> Int64Array:
        """indptr as int64 [batch + 1]."""
        return self.indptr.astype(np.int64)

    @cached_property
    def block_counts(self) -> Int64Array:
        """Blocks of each request, int64 [batch]."""
        return np.diff(self.starts)

    @cached_property
    def kv_lens(self) -> Int64Array:
        """Keys of each request, int64 [batch]; 0 for one without blocks."""
        full = self.block_size * (self.block_counts - 1)
        return np.where(self.block_counts > 0, full + self.last_block_len.astype(np.int64), 0)

    def locate(self, requests: NDArray[Any] | int, positions: NDArray[Any] | int) -> Int64Array:
        """Slot of each position (0 to kv_len - 1) of each request, int64; the two broadcast."""
        entry, offset = np.divmod(np.asarray(positions, np.int64), self.block_size)
        block = self.indices[self.starts[np.asarray(requests, np.int64)] + entry]
        return block.astype(np.int64) * self.block_size + offset

    def slots(self, request: int) -> Int64Array:
        """Slot of each key of a request, int64 [kv_len]: block * block_size + offset."""
        return self.locate(request, np.arange(self.kv_lens[request]))

    def all_slots(self) -> Int64Array:
        """The slots of all requests, one request after another, int64 [sum of kv_lens]."""
        requests = np.repeat(np.arange(self.batch), self.kv_lens)
        return self.locate(requests, ramps(self.kv_lens))

    def used_slots(self) -> BoolArray:
        """Which slots of the cache any request uses, bool [blocks * block_size]."""
        used = np.zeros(self.slot_count, np.bool_)
        used[self.all_slots()] = True
        return used

    def select(self, requests: NDArray[Any]) -> BlockRows:
        """The rows of these requests, in this order, over the same cache."""
        requests = check_indices("requests", np.asarray(requests), size=self.batch)
        counts = self.block_counts[requests]
        entries = np.repeat(self.starts[requests], counts) + ramps(counts)
        return BlockRows(
            as_table("indptr", indptr_of(counts), self.dtype),
            self.indices[entries],
            self.last_block_len[requests],
            self.block_size,
            self.blocks,
        )

    def to_mask(self) -> BoolArray:
        """Which blocks each row uses, bool [batch, blocks].

        `TableError` for a row that uses a block twice, or in another order than ascending: a mask
        has no word for it.
        """
        used = self.indices[: self.starts[-1]].astype(np.int64)
        row = np.repeat(np.arange(self.batch), self.block_counts)
        unordered = (used[1:] <= used[:-1]) & (row[1:] == row[:-1])
        if unordered.any():
            at = int(unordered.argmax()) + 1
            raise TableError(
                f"indices[{at}] = {used[at]} follows {used[at - 1]} in row {row[at]}; "
                f"a mask has ascending blocks only"
            )
        mask = np.zeros((self.batch, self.blocks), np.bool_)
        mask[row, used] = True
        return mask


def from_lengths(
    kv_lens: Table,
    block_size: int,
    *,
    order: NDArray[Any] | None = None,
    blocks: int | None = None,
    dtype: DTypeLike = np.int32,
) -> BlockRows:
    """Rows of these lengths in blocks of their own.

    ``order``: the block numbers, in the order in which requests take them, by default 0, 1, ...;
    ``blocks``: in the cache, by default as many as are used. Errors as for `BlockRows`.
    """
    if block_size < 1:
        raise TableError(f"block_size is {block_size}; a block has at least one slot")
    lengths = check_range("kv_lens", kv_lens, 0, np.iinfo(np.int64).max)
    counts = -(-lengths // block_size)
    indptr = indptr_of(counts)
    used = int(indptr[-1])
    indices = np.arange(used) if order is None else check_table("order", np.asarray(order))
    dtype = np.dtype(dtype)
    return BlockRows(
        as_table("indptr", indptr, dtype),
        as_table("indices", indices, dtype),
        as_table("last_block_len", _last_block_lens(lengths, counts, block_size), dtype),
        block_size,
        used if blocks is None else blocks,
    )


def from_mask(
    mask: BoolArray,
    block_size: int,
    *,
    columns: int | None = None,
    dtype: DTypeLike = np.int32,
) -> BlockRows:
    """Rows of a dense block mask, bool [rows, blocks]: True where a row uses a block.

    ``columns``: slots of the matrix, by default all of every block; the last block may be shorter.
    Errors: `ShapeError`, `DtypeError`, and those of `BlockRows`.
    """
    _check_bool("mask", mask, 2)
    batch, blocks = mask.shape
    total = blocks * block_size if columns is None else columns
    if -(-total // block_size) != blocks:
        raise ShapeError(f"columns {total} are not {blocks} blocks of {block_size}")
    row, block = np.nonzero(mask)
    counts = np.bincount(row, minlength=batch).astype(np.int64)
    # Blocks ascend, so that only the last one of a row can be the short one.
    short = mask[:, -1] if blocks else np.zeros(batch, np.bool_)
    tail = total - (blocks - 1) * block_size
    dtype = np.dtype(dtype)
    return BlockRows(
        as_table("indptr", indptr_of(counts), dtype),
        as_table("indices", block, dtype),
        as_table("last_block_len", np.where(short, tail, block_size), dtype),
        block_size,
        blocks,
    )


def split_mask(
    mask: BoolArray, block_rows: int, block_columns: int, *, dtype: DTypeLike = np.int32
) -> tuple[BlockRows, BoolArray]:
    """A mask of single elements, bool [M, N], as blocks of R x C that have any True at all.

    Returns a row for each R rows of the mask, and the blocks' elements, bool [nnz, R, C] in the
    order of ``indices``; elements beyond M or N are False. Errors: `ShapeError`, `DtypeError`.
    """
    _check_bool("mask", mask, 2)
    if min(block_rows, block_columns) < 1:
        raise ShapeError(f"blocks must have elements, got {block_rows} x {block_columns}")
    rows, columns = mask.shape
    row_blocks, column_blocks = -(-rows // block_rows), -(-columns // block_columns)
    padded = np.zeros((row_blocks * block_rows, column_blocks * block_columns), np.bool_)
    padded[:rows, :columns] = mask
    tiles = padded.reshape(row_blocks, block_rows, column_blocks, block_columns).swapaxes(1, 2)
    used: BoolArray = np.any(tiles, axis=(2, 3))
    return from_mask(used, block_columns, columns=columns, dtype=dtype), tiles[used]


def join_mask(rows: BlockRows, elements: BoolArray, shape: tuple[int, int]) -> BoolArray:
    """The mask, bool [M, N] = ``shape``, that `split_mask` has split. Errors: `ShapeError`."""
    _check_bool("elements", elements, 3)
    nnz, block_rows, block_columns = elements.shape
    expected = (int(rows.starts[-1]), -(-shape[0] // max(block_rows, 1)), rows.block_size)
    if (nnz, rows.batch, block_columns) != expected or -(-shape[1] // block_columns) != rows.blocks:
        raise ShapeError(
            f"elements {list(elements.shape)} do not fit {rows.batch} rows with {expected[0]} "
            f"blocks, {rows.blocks} of {rows.block_size} columns, for a mask of {list(shape)}"
        )
    tiles = np.zeros((rows.batch, rows.blocks, block_rows, block_columns), np.bool_)
    tiles[rows.to_mask()] = elements
    padded = tiles.swapaxes(1, 2).reshape(rows.batch * block_rows, rows.blocks * block_columns)
    return padded[: shape[0], : shape[1]]


def _last_block_lens(lengths: Int64Array, counts: Int64Array, block_size: int) -> Int64Array:
    return np.where(counts > 0, lengths - block_size * (counts - 1), 0)


def _check_bool(name: str, mask: BoolArray, axes: int) -> None:
    if mask.dtype != np.bool_:
        raise DtypeError(f"{name} must be bool, got {mask.dtype}")
    if mask.ndim != axes:
        raise ShapeError(f"{name} must have {axes} axes, got shape {list(mask.shape)}")
