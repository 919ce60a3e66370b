"""Paged K/V caches: pages of slots in NHD or HND order, page tables as CSR rows or block tables.

All offsets are int64: a cache of more than 2^31 values is nothing special.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from simkit.errors import DtypeError, ShapeError, TableError
from simkit.layouts.block_sparse import BlockRows
from simkit.layouts.ragged import Ragged
from simkit.layouts.tables import (
    Int64Array,
    Table,
    as_table,
    check_range,
    check_table,
    indptr_of,
    ramps,
)

Array = NDArray[Any]
Order = Literal["NHD", "HND"]


@dataclass(frozen=True, eq=False)
class PagedCache:
    """K or V in pages. ``values`` [pages, page_size, heads, d] in order "NHD", which has the heads
    of a slot side by side, or [pages, heads, page_size, d] in order "HND".

    Errors: `ShapeError`.
    """

    values: Array
    order: Order = "NHD"

    def __post_init__(self) -> None:
        check_order(self.order)
        if self.values.ndim != 4:
            raise ShapeError(f"a paged cache has 4 axes, got shape {list(self.values.shape)}")

    @property
    def pages(self) -> int:
        return self.values.shape[0]

    @property
    def page_size(self) -> int:
        return self.values.shape[1 if self.order == "NHD" else 2]

    @property
    def heads(self) -> int:
        return self.values.shape[2 if self.order == "NHD" else 1]

    @property
    def d(self) -> int:
        return self.values.shape[3]

    @property
    def by_slot(self) -> Array:
        """A view [pages, page_size, heads, d], whatever the order."""
        return self.values if self.order == "NHD" else self.values.swapaxes(1, 2)

    def row_numbers(self, slots: NDArray[Any], head: NDArray[Any] | int) -> Int64Array:
        """Index of the vector of each slot and head in ``values.reshape(-1, d)``, int64.

        ``slots`` and ``head`` broadcast.
        """
        page, offset = np.divmod(np.asarray(slots, np.int64), self.page_size)
        head = np.asarray(head, np.int64)
        if self.order == "NHD":
            return (page * self.page_size + offset) * self.heads + head
        return (page * self.heads + head) * self.page_size + offset

    def gather(self, rows: BlockRows, request: int) -> Array:
        """The request's vectors, [kv_len, heads, d]. `ShapeError` unless the rows are of this
        cache.
        """
        self.check_rows(rows)
        page, offset = np.divmod(rows.slots(request), self.page_size)
        return self.by_slot[page, offset]

    def scatter(self, slots: NDArray[Any], vectors: Array) -> None:
        """Writes ``vectors`` [n, heads, d] to ``slots`` [n]. Errors: `ShapeError`, `DtypeError`,
        `TableError` for a slot outside the cache.
        """
        if vectors.dtype != self.values.dtype:
            raise DtypeError(f"the cache holds {self.values.dtype}, the vectors {vectors.dtype}")
        if vectors.shape != (len(slots), self.heads, self.d):
            raise ShapeError(
                f"vectors have shape {list(vectors.shape)}; {len(slots)} slots take "
                f"[{len(slots)}, {self.heads}, {self.d}]"
            )
        checked = check_range("slots", slots, 0, self.pages * self.page_size - 1)
        page, offset = np.divmod(checked, self.page_size)
        self.by_slot[page, offset] = vectors

    def to_order(self, order: Order) -> PagedCache:
        """The same cache in ``order``, contiguous."""
        check_order(order)
        if order == self.order:
            return self
        return PagedCache(np.ascontiguousarray(self.values.swapaxes(1, 2)), order)

    def check_rows(self, rows: BlockRows) -> None:
        """`ShapeError` unless ``rows`` are rows of a cache of this one's pages."""
        if (rows.blocks, rows.block_size) != (self.pages, self.page_size):
            raise ShapeError(
                f"the rows are of a cache of {rows.blocks} pages of {rows.block_size} slots; "
                f"this one has {self.pages} of {self.page_size}"
            )


@dataclass(frozen=True, eq=False)
class PagedKV:
    """K and V of all requests in pages: ``rows`` says where."""

    rows: BlockRows
    k: PagedCache
    v: PagedCache


def check_order(order: str) -> None:
    """`ShapeError` unless it is "NHD" or "HND"."""
    if order not in get_args(Order):
        raise ShapeError(f"order must be one of {', '.join(get_args(Order))}, not {order!r}")


def split_kv(cache: Array, order: Order) -> tuple[PagedCache, PagedCache]:
    """K and V of FlashInfer's one tensor: [pages, 2, page_size, heads, d] ("NHD") or
    [pages, 2, heads, page_size, d] ("HND"). Copies, contiguous. Errors: `ShapeError`.
    """
    if cache.ndim != 5 or cache.shape[1] != 2:
        raise ShapeError(f"a cache of K and V is [pages, 2, ...] with 5 axes, got {cache.shape}")
    k, v = (PagedCache(np.ascontiguousarray(cache[:, part]), order) for part in range(2))
    return k, v


def join_kv(k: PagedCache, v: PagedCache) -> Array:
    """The one tensor that `split_kv` has split. `ShapeError` unless both are alike."""
    alike = k.order == v.order and k.values.shape == v.values.shape
    if not alike or k.values.dtype != v.values.dtype:
        raise ShapeError(
            f"K is {k.order} {k.values.dtype} {list(k.values.shape)}, "
            f"V {v.order} {v.values.dtype} {list(v.values.shape)}; one tensor takes them alike"
        )
    return np.stack((k.values, v.values), axis=1)


def from_block_table(
    block_table: Table, kv_lens: Table, *, block_size: int, blocks: int
) -> BlockRows:
    """CSR rows of a block table [batch, max_blocks] and lengths [batch].

    Entries after those that the length needs are not looked at. The rows have the block table's
    dtype. Errors: `TableError`, `DtypeError`, `ShapeError`.
    """
    check_table("block_table", block_table, shape=(None, None))
    batch, max_blocks = block_table.shape
    check_table("kv_lens", kv_lens, shape=(batch,))
    if block_size < 1:
        raise TableError(f"block_size is {block_size}; a block has at least one slot")
    lengths = check_range("kv_lens", kv_lens, 0, max_blocks * block_size)
    counts = -(-lengths // block_size)
    used = np.arange(max_blocks) < counts[:, None]
    check_range("block_table", block_table, 0, blocks - 1, where=used)
    dtype = block_table.dtype
    return BlockRows(
        as_table("indptr", indptr_of(counts), dtype),
        block_table[used],
        as_table("last_block_len", lengths - block_size * np.maximum(counts - 1, 0), dtype),
        block_size,
        blocks,
    )


def to_block_table(
    rows: BlockRows, *, max_blocks: int | None = None, fill: Any = -1
) -> tuple[Table, Table]:
    """The rows' block table [batch, max_blocks] and kv_lens [batch], in the rows' dtype.

    ``max_blocks``: by default those of the longest request. ``fill``: what stands after a request's
    blocks; it broadcasts. `TableError` for a request with more blocks.
    """
    longest = int(rows.block_counts.max(initial=0))
    width = longest if max_blocks is None else max_blocks
    if longest > width:
        request = int(rows.block_counts.argmax())
        raise TableError(f"request {request} has {longest} blocks; the table has room for {width}")
    table = np.empty((rows.batch, width), rows.dtype)
    table[...] = fill
    table[np.repeat(np.arange(rows.batch), rows.block_counts), ramps(rows.block_counts)] = (
        rows.indices[: rows.starts[-1]]
    )
    return table, as_table("kv_lens", rows.kv_lens, rows.dtype)


def garbage(rng: np.random.Generator, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """What unused slots may hold: NaNs and infinities at random (bytes of 0x7F and 0xFF, which are
    the NaNs of e4m3, for integers).
    """
    dtype = np.dtype(dtype)
    if dtype.kind in "iub":
        return rng.choice(np.array([0x7F, 0xFF], np.uint8), (*shape, dtype.itemsize)).view(dtype)[
            ..., 0
        ]
    with np.errstate(all="ignore"):
        patterns = np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32).astype(dtype)
    return patterns[rng.integers(0, len(patterns), shape)]


def garbage_entries(rng: np.random.Generator, shape: tuple[int, ...], dtype: DTypeLike) -> Table:
    """What unused entries of index tables may hold: numbers that are no block of any cache."""
    limits = np.iinfo(np.dtype(dtype))
    numbers = np.array([limits.min, limits.max, -1, 2_147_480_000], np.int64)
    return rng.choice(numbers, shape).astype(dtype)


def random_rows(
    rng: np.random.Generator,
    ragged: Ragged,
    *,
    page_size: int,
    dtype: DTypeLike = np.int32,
    content: Int64Array | None = None,
    spare_pages: int = 3,
) -> BlockRows:
    """Pages at random for requests of ``ragged``'s lengths.

    Pages are permuted, ``spare_pages`` of them unused, and every entry of the tables that means
    nothing is garbage. ``content`` int64 [total]: tokens with the same number are the same, and so
    full pages of the same tokens become one page. Errors: `TableError`.
    """
    if page_size < 1:
        raise TableError(f"page_size is {page_size}; a page has at least one slot")
    counts = -(-ragged.lens // page_size)
    owners = _page_owners(ragged, counts, page_size, content)
    distinct, logical = np.unique(owners, return_inverse=True)
    pages = len(distinct) + spare_pages
    physical = rng.permutation(pages)[: len(distinct)]
    dtype = np.dtype(dtype)
    last = as_table("last_block_len", ragged.lens - page_size * np.maximum(counts - 1, 0), dtype)
    return BlockRows(
        as_table("indptr", indptr_of(counts), dtype),
        np.concatenate(
            (
                as_table("indices", physical[logical], dtype),
                garbage_entries(rng, (int(rng.integers(0, 4)),), dtype),
            )
        ),
        np.where(counts > 0, last, garbage_entries(rng, (ragged.batch,), dtype)),
        page_size,
        pages,
    )


def random_cache(
    rng: np.random.Generator, rows: BlockRows, vectors: Array, order: Order = "NHD"
) -> PagedCache:
    """A cache with ``vectors`` [sum of kv_lens, heads, d] where ``rows`` say, and `garbage` in
    every other slot. Errors: `ShapeError`.
    """
    check_order(order)
    if vectors.ndim != 3:
        raise ShapeError(f"vectors must be [tokens, heads, d], got {list(vectors.shape)}")
    heads, d = vectors.shape[1:]
    slots = (rows.block_size, heads) if order == "NHD" else (heads, rows.block_size)
    cache = PagedCache(garbage(rng, (rows.blocks, *slots, d), vectors.dtype), order)
    cache.scatter(rows.all_slots(), vectors)
    return cache


def scatter_random(
    rng: np.random.Generator,
    ragged: Ragged,
    k: Array,
    v: Array,
    *,
    page_size: int,
    order: Order = "NHD",
    dtype: DTypeLike = np.int32,
    share: bool = False,
    spare_pages: int = 3,
) -> PagedKV:
    """Lays ragged ``k`` [total, heads, dk] and ``v`` [total, heads, dv] out in pages at random.

    ``dtype``: of the tables. ``share``: full pages with the same bytes of K and V become one page.
    See `random_rows` and `random_cache` for the rest. Errors: `ShapeError`, `TableError`.
    """
    for name, values in (("k", k), ("v", v)):
        if values.ndim != 3 or len(values) != ragged.total:
            raise ShapeError(f"{name} must be [{ragged.total}, heads, d], got {list(values.shape)}")
    content = _token_content(k, v) if share else None
    rows = random_rows(
        rng, ragged, page_size=page_size, dtype=dtype, content=content, spare_pages=spare_pages
    )
    return PagedKV(rows, random_cache(rng, rows, k, order), random_cache(rng, rows, v, order))


def _page_owners(
    ragged: Ragged, counts: Int64Array, page_size: int, content: Int64Array | None
) -> Int64Array:
    """For each page the first one with the same content; pages that are not full stand alone."""
    owners = np.arange(counts.sum())
    if content is None:
        return owners
    firsts = np.repeat(ragged.indptr[:-1].astype(np.int64), counts) + page_size * ramps(counts)
    ends = np.repeat(ragged.indptr[1:].astype(np.int64), counts)
    seen: dict[bytes, int] = {}
    for entry in np.flatnonzero(firsts + page_size <= ends):
        tokens = content[firsts[entry] : firsts[entry] + page_size]
        owners[entry] = seen.setdefault(tokens.tobytes(), int(entry))
    return owners


def _token_content(k: Array, v: Array) -> Int64Array:
    """A number for each token, the same for tokens with the same bytes of K and V."""
    parts = [
        np.ascontiguousarray(x).reshape(len(x), x.shape[1] * x.shape[2]).view(np.uint8)
        for x in (k, v)
    ]
    return np.unique(np.concatenate(parts, axis=1), axis=0, return_inverse=True)[1].ravel()
