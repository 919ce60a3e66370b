"""Bit-packed custom masks: for each request, which of its queries sees which of its keys.

A request's mask, q_len x kv_len, is flattened row by row and packed eight to a byte, the first in
the lowest bit. Each request starts at a byte of its own, so that the offsets in ``indptr`` are in
bytes and the bits left over in a request's last byte mean nothing. (FlashInfer's unpacked masks
have offsets in elements, cumsum(q_len * kv_len); packing rounds each request up to whole bytes.)
Offsets of bits do not fit 32 bits: 64K queries with 64K keys are 2^32 of them.

Source: FlashInfer, segment_packbits and the packed_custom_mask of its prefill wrappers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.errors import DtypeError, ShapeError
from simkit.layouts.block_sparse import BlockRows
from simkit.layouts.tables import Int64Array, check_indices, check_range, check_table, indptr_of

BITS = 8

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class CustomMask:
    """Packed masks of all requests.

    ``bits`` uint8 [bytes of all requests]; ``q_lens`` and ``kv_lens`` [batch] int32 or int64: the
    masks' shapes. Errors: `DtypeError`, `ShapeError`, `TableError`.
    """

    bits: NDArray[np.uint8]
    q_lens: NDArray[Any]
    kv_lens: NDArray[Any]

    def __post_init__(self) -> None:
        check_table("q_lens", self.q_lens)
        check_table("kv_lens", self.kv_lens, shape=self.q_lens.shape)
        for name, lens in (("q_lens", self.q_lens), ("kv_lens", self.kv_lens)):
            check_range(name, lens, 0, np.iinfo(np.int32).max)
        if self.bits.dtype != np.uint8:
            raise DtypeError(f"bits must be uint8, got {self.bits.dtype}")
        if self.bits.shape != (self.indptr[-1],):
            raise ShapeError(
                f"bits has shape {list(self.bits.shape)}; the masks take [{self.indptr[-1]}] bytes"
            )

    @property
    def batch(self) -> int:
        return len(self.q_lens)

    @cached_property
    def elements(self) -> Int64Array:
        """Elements of each request's mask, int64 [batch]."""
        return self.q_lens.astype(np.int64) * self.kv_lens.astype(np.int64)

    @cached_property
    def indptr(self) -> Int64Array:
        """Byte at which each request starts, and the end: int64 [batch + 1]."""
        return indptr_of(-(-self.elements // BITS))

    def visible(
        self, requests: NDArray[Any] | int, queries: NDArray[Any] | int, keys: NDArray[Any] | int
    ) -> BoolArray:
        """Whether the queries see the keys; numbers within each request, which broadcast.

        The bit is ``bits[indptr[request] + e // 8] >> e % 8 & 1`` for e = query * kv_len + key.
        """
        request, query, key = np.broadcast_arrays(
            *(np.asarray(x, np.int64) for x in (requests, queries, keys))
        )
        check_indices("requests", request.ravel(), size=self.batch)
        for name, index, lens in (("query", query, self.q_lens), ("key", key, self.kv_lens)):
            if ((index < 0) | (index >= lens[request])).any():
                raise ShapeError(f"a {name} is outside its request's mask")
        element = query * self.kv_lens[request] + key
        byte = self.bits[self.indptr[request] + element // BITS]
        return (byte >> (element % BITS).astype(np.uint8) & 1).astype(np.bool_)

    def mask(self, request: int) -> BoolArray:
        """The request's mask, bool [q_len, kv_len]."""
        own = self.bits[self.indptr[request] : self.indptr[request + 1]]
        elements = np.unpackbits(own, count=int(self.elements[request]), bitorder="little")
        shape = int(self.q_lens[request]), int(self.kv_lens[request])
        return elements.astype(np.bool_).reshape(shape)


def pack(masks: Sequence[BoolArray]) -> CustomMask:
    """Packs each request's mask, bool [q_len, kv_len]. Errors: `DtypeError`, `ShapeError`."""
    for request, mask in enumerate(masks):
        if mask.dtype != np.bool_:
            raise DtypeError(f"mask of request {request} must be bool, got {mask.dtype}")
        if mask.ndim != 2:
            raise ShapeError(
                f"mask of request {request} must be [q_len, kv_len], got {list(mask.shape)}"
            )
    packed = [np.packbits(mask.ravel(), bitorder="little") for mask in masks]
    shapes = np.array([mask.shape for mask in masks], np.int64).reshape(-1, 2)
    bits = np.concatenate([np.empty(0, np.uint8), *packed])
    return CustomMask(bits, shapes[:, 0].copy(), shapes[:, 1].copy())


def pack_flat(flat: BoolArray, q_lens: NDArray[Any], kv_lens: NDArray[Any]) -> CustomMask:
    """Packs masks that are flattened and concatenated, bool [sum of q_len * kv_len].

    Errors: `DtypeError`, `ShapeError`, `TableError`.
    """
    check_table("q_lens", q_lens)
    check_table("kv_lens", kv_lens, shape=q_lens.shape)
    starts = indptr_of(q_lens.astype(np.int64) * kv_lens.astype(np.int64))
    if flat.shape != (starts[-1],):
        raise ShapeError(f"flat has shape {list(flat.shape)}; the masks have {starts[-1]} elements")
    return pack(
        [
            flat[first:end].reshape(q_len, kv_len)
            for first, end, q_len, kv_len in zip(
                starts[:-1], starts[1:], q_lens, kv_lens, strict=True
            )
        ]
    )


def unpack(packed: CustomMask) -> list[BoolArray]:
    """Each request's mask, bool [q_len, kv_len]."""
    return [packed.mask(request) for request in range(packed.batch)]


def from_blocks(rows: BlockRows, elements: BoolArray, q_len: int) -> CustomMask:
    """Custom mask of block-sparse attention with a mask in its blocks.

    ``elements`` bool [nnz, R, C], as of `split_mask`; ``q_len`` queries in tiles of R, one for each
    row. A tile's mask has a column for each key of its blocks, in their order. Errors:
    `ShapeError`.
    """
    nnz, block_rows, block_columns = elements.shape
    if (nnz, block_columns) != (rows.starts[-1], rows.block_size):
        raise ShapeError(
            f"elements {list(elements.shape)} do not fit {rows.starts[-1]} blocks of "
            f"{rows.block_size} keys"
        )
    if -(-q_len // block_rows) != rows.batch:
        raise ShapeError(f"{q_len} queries in tiles of {block_rows} are not {rows.batch} rows")
    masks = []
    for row, kv_len in enumerate(rows.kv_lens):
        own = elements[rows.starts[row] : rows.starts[row + 1]]
        queries = min(block_rows, q_len - row * block_rows)
        masks.append(own.swapaxes(0, 1).reshape(block_rows, -1)[:queries, :kv_len])
    return pack(masks)
