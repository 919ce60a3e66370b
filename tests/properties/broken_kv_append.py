"""Faults in kv_append and the KV layouts, and which law notices each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mutants import mutant

from properties import kv_layouts
from simkit.layouts import custom_mask
from simkit.layouts.paged import PagedCache
from simkit.layouts.ragged import Ragged

APPEND = "kv_append"
PLACES = ("bits", "places")

MUTANTS = [
    mutant(APPEND, "scale forgotten", "e4m3x8(x, inverse_scale)", "e4m3x8(x, 1.0f)"),
    mutant(APPEND, "K and V share a scale", "lane, v_inverse_scale);", "lane, k_inverse_scale);"),
    mutant(
        APPEND,
        "codes of four values swapped",
        "  return floats_to_e4m3x8(x, inverse_scale);",
        "  const uint2 codes = floats_to_e4m3x8(x, inverse_scale);\n"
        "  return make_uint2(codes.y, codes.x);",
    ),
    mutant(
        APPEND,
        "every vector copied twice",
        "i += kWarpSize)",
        "i += kWarpSize / 2)",
        "traffic",
    ),
    mutant(APPEND, "last vectors left out", "i < heads * vectors", "i + 8 < heads * vectors"),
    mutant(
        APPEND,
        "last token left out",
        "if (token >= tokens ||",
        "if (token >= tokens - 1 ||",
    ),
    mutant(
        APPEND,
        "two tokens in one slot",
        "position % page_size;",
        "position % page_size / 2 * 2;",
        "bits",
        "schedules",
        "hazards",
    ),
    mutant(
        APPEND,
        "page of the next slot",
        "pages[position / page_size]",
        "pages[(position + 1) / page_size]",
    ),
    mutant(
        APPEND,
        "slot by the token, not its position",
        "= position % page_size;",
        "= token % page_size;",
    ),
    mutant(
        APPEND,
        "tables of the request after",
        "indptr[batch_indices[token]]",
        "indptr[batch_indices[token] + 1]",
    ),
    mutant(APPEND, "pages by slot in an HND cache", "#ifdef KV_HND\n  const", "#if 0\n  const"),
    mutant(
        APPEND,
        "page number in 32 bits",
        "const long long page =",
        "const int page =",
        "traffic",
        "far_pages",
    ),
    mutant(
        APPEND,
        "head of the neighbour",
        "i / vectors_per_head * slot.next_head",
        "(heads - 1 - i / vectors_per_head) * slot.next_head",
    ),
]

BROKEN_KERNELS = {
    (APPEND, "bits"): "codes of four values swapped",
    (APPEND, "traffic"): "every vector copied twice",
    (APPEND, "schedules"): "two tokens in one slot",
    (APPEND, "hazards"): "two tokens in one slot",
    (APPEND, "places"): "page of the next slot",
    (APPEND, "accuracy"): "scale forgotten",
    (APPEND, "untouched"): "pages by slot in an HND cache",
    (APPEND, "pieces"): "slot by the token, not its position",
    (APPEND, "far_pages"): "page number in 32 bits",
}

Patch = Callable[[pytest.MonkeyPatch], None]


def replaced(place: Any, name: str, function: Callable[..., Any]) -> Patch:
    return lambda patch: patch.setattr(place, name, function)


def rows_of_the_next_head(cache: PagedCache, slots: Any, head: Any) -> Any:
    page, offset = np.divmod(slots, cache.page_size)
    return (page * cache.page_size + offset) * cache.heads + (head + 1) % cache.heads


def without_the_last_key(table: Any, kv_lens: Any, **sizes: int) -> Any:
    return from_block_table(table, np.maximum(kv_lens - 1, 0), **sizes)


def turned_by_reshape(cache: PagedCache, order: Any) -> PagedCache:
    """Another shape over the same bytes."""
    pages, first, second, d = cache.values.shape
    return PagedCache(cache.values.reshape(pages, second, first, d), order)


def v_before_k(cache: Any, order: Any) -> Any:
    return split_kv(cache, order)[::-1]


def first_rows(ragged: Ragged, padded: Any) -> Any:
    """The first rows of everything, those that fill up included."""
    return padded.reshape(-1, *padded.shape[2:])[: ragged.total]


def all_blocks_full(mask: Any, block_size: int, **rest: Any) -> Any:
    return from_mask(mask, block_size, dtype=rest["dtype"])


def first_bit_on_top(mask: custom_mask.CustomMask, requests: Any, queries: Any, keys: Any) -> Any:
    element = queries * mask.kv_lens[requests].astype(np.int64) + keys
    byte = mask.bits[mask.indptr[requests] + element // 8]
    return (byte >> (7 - element % 8).astype(np.uint8) & 1).astype(np.bool_)


from_block_table = kv_layouts.from_block_table
from_mask = kv_layouts.from_mask
split_kv = kv_layouts.split_kv

BROKEN_MODELS: dict[tuple[str, str], list[Patch]] = {
    (APPEND, "paged_ragged"): [replaced(PagedCache, "row_numbers", rows_of_the_next_head)],
    (APPEND, "block_table"): [replaced(kv_layouts, "from_block_table", without_the_last_key)],
    (APPEND, "orders"): [replaced(PagedCache, "to_order", turned_by_reshape)],
    (APPEND, "one_tensor"): [replaced(kv_layouts, "split_kv", v_before_k)],
    (APPEND, "ragged_rows"): [replaced(Ragged, "pack", first_rows)],
    (APPEND, "block_mask"): [replaced(kv_layouts, "from_mask", all_blocks_full)],
    (APPEND, "mask_bits"): [replaced(custom_mask.CustomMask, "visible", first_bit_on_top)],
}
