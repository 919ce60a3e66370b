"""Laws of the KV layouts: every change of form is undone by the way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from properties.compare import bits_equal
from properties.data import BF16
from properties.law import Context, Law
from properties.subject import Array
from simkit.layouts import custom_mask
from simkit.layouts.block_sparse import BlockRows, from_lengths, from_mask, join_mask, split_mask
from simkit.layouts.paged import (
    Order,
    PagedKV,
    from_block_table,
    garbage_entries,
    join_kv,
    scatter_random,
    split_kv,
    to_block_table,
)
from simkit.layouts.ragged import Ragged


@dataclass(frozen=True)
class LayoutCase:
    """``batch`` requests of 0 to ``longest`` keys on pages of ``page_size``.

    ``share``: requests begin with the same tokens. ``wide_tables``: tables are int64.
    """

    batch: int = 4
    longest: int = 20
    page_size: int = 4
    heads: int = 2
    d: int = 8
    order: Order = "NHD"
    share: bool = False
    wide_tables: bool = False
    seed: int = 0

    @property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    @property
    def table_dtype(self) -> type[np.signedinteger[Any]]:
        return np.int64 if self.wide_tables else np.int32

    def ragged(self) -> Ragged:
        rng = self.rng
        lens = rng.integers(0, self.longest + 1, self.batch)
        lens[rng.random(self.batch) < 0.2] = 0
        return Ragged.from_lengths(lens, self.table_dtype)

    def tokens(self, ragged: Ragged, d: int) -> Array:
        """Any bits, [total, heads, d]; with ``share`` those of one request are those of all."""
        rng = np.random.default_rng(self.seed + d)
        longest = int(ragged.lens.max(initial=0))
        codes = rng.integers(0, 1 << 16, (longest, self.heads, d), np.uint16)
        if self.share:
            return codes[ragged.positions()].view(BF16)
        return rng.integers(0, 1 << 16, (ragged.total, self.heads, d), np.uint16).view(BF16)

    def paged(self) -> PagedKV:
        ragged = self.ragged()
        return scatter_random(
            self.rng,
            ragged,
            self.tokens(ragged, self.d),
            self.tokens(ragged, self.d + 1),
            page_size=self.page_size,
            order=self.order,
            dtype=self.table_dtype,
            share=self.share,
        )


CASES = st.builds(
    LayoutCase,
    batch=st.one_of(st.integers(1, 5), st.integers(1, 64)),
    longest=st.one_of(st.integers(0, 40), st.integers(0, 300)),
    page_size=st.one_of(st.sampled_from((1, 2, 16)), st.integers(1, 257)),
    heads=st.integers(1, 4),
    d=st.integers(1, 9),
    order=st.sampled_from(("NHD", "HND")),
    share=st.booleans(),
    wide_tables=st.booleans(),
    seed=st.integers(0, 2**16 - 1),
)
CORNERS = (
    LayoutCase(share=True, page_size=1),
    LayoutCase(share=True, longest=60, order="HND"),
    LayoutCase(longest=0),
    LayoutCase(batch=2, longest=3000, page_size=257, wide_tables=True),
)


def _bits(values: Array) -> Array:
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def _same_bits(name: str, first: Array, back: Array) -> None:
    bits_equal(name, _bits(first), _bits(back))


def _same_rows(name: str, first: BlockRows, back: BlockRows) -> None:
    """Tables up to entries that mean nothing."""
    used = int(first.starts[-1])
    _same_bits(f"{name}: indptr", first.indptr, back.indptr)
    _same_bits(f"{name}: indices", first.indices[:used], back.indices[: back.starts[-1]])
    _same_bits(f"{name}: kv_lens", first.kv_lens, back.kv_lens)


def check_paged_ragged(context: Context, case: LayoutCase) -> None:
    """Ragged tokens into pages and out again; nothing of the garbage around them comes along."""
    ragged, paged = case.ragged(), case.paged()
    for name, cache, d in (("k", paged.k, case.d), ("v", paged.v, case.d + 1)):
        tokens = case.tokens(ragged, d)
        for request in range(case.batch):
            _same_bits(
                f"{name} of request {request}",
                tokens[ragged.rows(request)],
                cache.gather(paged.rows, request),
            )
        # The same by the numbers that kernels compute.
        slots, head = paged.rows.all_slots()[:, None], np.arange(case.heads)
        rows = np.ascontiguousarray(cache.values).reshape(-1, d)
        _same_bits(f"{name} by row numbers", tokens, rows[cache.row_numbers(slots, head)])
    _same_bits("lengths", ragged.lens, paged.rows.kv_lens)


def check_block_table(context: Context, case: LayoutCase) -> None:
    """CSR rows to a block table and back, whatever stands in its unused entries."""
    rows = case.paged().rows
    width = int(rows.block_counts.max(initial=0)) + case.seed % 3
    fill = garbage_entries(case.rng, (case.batch, width), case.table_dtype)
    table, kv_lens = to_block_table(rows, max_blocks=width, fill=fill)
    back = from_block_table(table, kv_lens, block_size=rows.block_size, blocks=rows.blocks)
    _same_rows("block table", rows, back)
    unused = np.arange(width) >= rows.block_counts[:, None]
    _same_bits("unused entries", fill[unused], table[unused])


def check_orders(context: Context, case: LayoutCase) -> None:
    """NHD to HND and back; and both orders have the same vector at a slot and head."""
    paged = case.paged()
    other: Order = "HND" if case.order == "NHD" else "NHD"
    turned = paged.k.to_order(other)
    _same_bits("back", paged.k.values, turned.to_order(case.order).values)
    slots, head = np.arange(paged.rows.slot_count)[:, None], np.arange(case.heads)
    here, there = (
        cache.values.reshape(-1, case.d)[cache.row_numbers(slots, head)]
        for cache in (paged.k, turned)
    )
    _same_bits("vectors", here, there)


def check_one_tensor(context: Context, case: LayoutCase) -> None:
    """K and V in one tensor of five axes, apart, and in one again."""
    k = case.paged().k
    v = case.paged().k.to_order(case.order)
    v.values.view(np.uint16)[...] ^= 1
    joined = join_kv(k, v)
    parts = split_kv(joined, case.order)
    for name, part, original in zip("kv", parts, (k, v), strict=True):
        _same_bits(name, original.values, part.values)
    _same_bits("joined", joined, join_kv(*parts))


def check_ragged_rows(context: Context, case: LayoutCase) -> None:
    """Ragged tensors as rows of blocks of one slot, and padded ones, and back."""
    ragged = case.ragged()
    _same_bits("indptr", ragged.indptr, Ragged.from_block_rows(ragged.to_block_rows()).indptr)
    full = from_lengths(ragged.lens // case.page_size * case.page_size, case.page_size)
    _same_bits("lengths", full.kv_lens, Ragged.from_block_rows(full).lens)
    tokens = case.tokens(ragged, case.d)
    _same_bits("padded", tokens, ragged.pack(ragged.unpack(tokens, fill=np.nan)))


def check_block_mask(context: Context, case: LayoutCase) -> None:
    """Masks of blocks and of single elements as block-sparse rows, and back."""
    rng = case.rng
    shape = int(rng.integers(1, 40)), int(rng.integers(1, 60))
    block_rows, block_columns = int(rng.integers(1, 9)), int(rng.integers(1, 17))
    elements = rng.random(shape) < rng.choice([0.0, 0.05, 0.5, 1.0])
    rows, blocks = split_mask(elements, block_rows, block_columns, dtype=case.table_dtype)
    _same_bits("elements", elements, join_mask(rows, blocks, shape))
    mask = rows.to_mask()
    _same_rows("blocks", rows, from_mask(mask, block_columns, columns=shape[1], dtype=rows.dtype))
    # What a row sees, by its slots.
    packed = custom_mask.from_blocks(rows, blocks, shape[0])
    for row in range(rows.batch):
        queries = slice(row * block_rows, (row + 1) * block_rows)
        _same_bits(f"row {row}", elements[queries][:, rows.slots(row)], packed.mask(row))


def check_mask_bits(context: Context, case: LayoutCase) -> None:
    """Custom masks to bits and back, by requests and one by one, whatever the bits left over."""
    rng = case.rng
    kv_lens = case.ragged().lens
    q_lens = rng.integers(0, 9, case.batch)
    masks = [
        rng.random((q, kv)) < 0.5 for q, kv in zip(q_lens.tolist(), kv_lens.tolist(), strict=True)
    ]
    packed = custom_mask.pack(masks)
    flat = custom_mask.pack_flat(
        np.concatenate([mask.ravel() for mask in masks]), packed.q_lens, packed.kv_lens
    )
    _same_bits("flat", packed.bits, flat.bits)
    bits = packed.bits.copy()
    for end, left in zip(packed.indptr[1:], -packed.elements % custom_mask.BITS, strict=True):
        if left:
            bits[end - 1] |= 0xFF << (custom_mask.BITS - int(left)) & 0xFF
    littered = custom_mask.CustomMask(bits, packed.q_lens, packed.kv_lens)
    for request, (mask, back) in enumerate(zip(masks, custom_mask.unpack(littered), strict=True)):
        _same_bits(f"request {request}", mask, back)
        query, key = np.arange(mask.shape[0])[:, None], np.arange(mask.shape[1])
        _same_bits(f"bits of request {request}", mask, littered.visible(request, query, key))


def _law(name: str, statement: str, check: Callable[[Context, LayoutCase], None]) -> Law:
    return Law(
        algorithm="kv_append",
        name=name,
        tier="exact",
        statement=statement,
        check=check,
        strategy=CASES,
        case_type=LayoutCase,
        corners=CORNERS,
        examples=25,
        uses_device=False,
    )


LAWS = [
    _law(
        "paged_ragged",
        "ragged tokens come out of a paged cache as they went in",
        check_paged_ragged,
    ),
    _law(
        "block_table", "CSR page tables survive the way to block tables and back", check_block_table
    ),
    _law("orders", "NHD and HND hold the same, and turn into each other", check_orders),
    _law("one_tensor", "K and V of one tensor come apart and together again", check_one_tensor),
    _law("ragged_rows", "ragged tensors survive as block rows and padded", check_ragged_rows),
    _law(
        "block_mask", "block-sparse rows survive as masks, and say what they see", check_block_mask
    ),
    _law("mask_bits", "custom masks survive packing, whatever the bits left over", check_mask_bits),
]
