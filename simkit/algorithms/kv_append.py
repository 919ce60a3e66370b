"""Appending new tokens' K and V to a paged cache, as they are or as FP8.

Values are copied, or become the e4m3 code of x * (1 / scale): one float32 reciprocal of the scale,
one rounded product, one conversion that saturates. Either is the same in reference and in device
arithmetic. Kernel: kv_append.cu. Source of the operation: FlashInfer, append_paged_kv_cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from simkit.algorithms.elements import BF16, DECODE, E4M3, F16, Array
from simkit.algorithms.tiles import tile_count, tiles
from simkit.errors import DtypeError, ShapeError
from simkit.layouts.append import append_positions, append_slots
from simkit.layouts.block_sparse import BlockRows
from simkit.layouts.paged import PagedCache
from simkit.layouts.ragged import Ragged
from simkit.layouts.tables import Int64Array, Table, check_indptr
from simkit.machine.machine import Cta, Machine
from simkit.machine.memory import WARP_LANES, Tensor
from simkit.numerics.formats import encode_e4m3
from simkit.numerics.scalar import divide, multiply

TOKEN_DTYPES = (BF16, F16)
HEAD_DIMS = (64, 128, 192, 256)
THREADS = 128
TOKENS_PER_CTA = THREADS // WARP_LANES

_VECTOR_VALUES = 8  # of a lane: 16 bytes of the new tokens


@dataclass(frozen=True, eq=False)
class AppendProblem:
    """New tokens and the cache that they go to.

    ``k_new`` [tokens, heads, dk], ``v_new`` [tokens, heads, dv]: bfloat16 or float16, ragged by
    ``append_indptr`` [batch + 1]. ``rows``: the pages of each request, with its length *after* the
    append; token i of a request goes to position kv_len - appended + i. ``k_cache``, ``v_cache``:
    of the new tokens' type, or of float8_e4m3fn, whose codes are of x / ``k_scale`` and
    x / ``v_scale``.

    Errors: `DtypeError`, `ShapeError`, and `TableError` as for `append_slots`.
    """

    k_new: Array
    v_new: Array
    append_indptr: Table
    rows: BlockRows
    k_cache: PagedCache
    v_cache: PagedCache
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        check_indptr("append_indptr", self.append_indptr, total=self.tokens)
        for name, new, cache, scale in self.parts():
            if new.dtype not in TOKEN_DTYPES or new.dtype != self.k_new.dtype:
                raise DtypeError(f"{name}_new is {new.dtype}; k_new and v_new are bfloat16 or fp16")
            if (
                cache.values.dtype not in (new.dtype, E4M3)
                or cache.values.dtype != self.cache_dtype
            ):
                raise DtypeError(
                    f"{name}_cache is {cache.values.dtype}; both caches are {new.dtype} or {E4M3}"
                )
            wanted = (self.tokens, cache.heads, cache.d)
            if new.shape != wanted or cache.heads != self.heads or not cache.heads:
                raise ShapeError(
                    f"{name}_new has shape {list(new.shape)}; {self.tokens} tokens of this cache "
                    f"have {list(wanted)}"
                )
            if cache.d not in HEAD_DIMS:
                raise ShapeError(f"{name} has {cache.d} values a head; supported are {HEAD_DIMS}")
            cache.check_rows(self.rows)
            _check_scale(f"{name}_scale", scale, self.cache_dtype)
        if self.k_cache.order != self.v_cache.order:
            raise ShapeError(f"k_cache is {self.k_cache.order}, v_cache {self.v_cache.order}")
        self.slots  # noqa: B018  # raises where the tables do not take the tokens

    def parts(self) -> tuple[tuple[str, Array, PagedCache, float], ...]:
        """(name, new tokens, cache, scale) of K and of V."""
        return (
            ("k", self.k_new, self.k_cache, self.k_scale),
            ("v", self.v_new, self.v_cache, self.v_scale),
        )

    @property
    def tokens(self) -> int:
        return len(self.k_new)

    @property
    def heads(self) -> int:
        return self.k_cache.heads

    @property
    def cache_dtype(self) -> np.dtype[Any]:
        return self.k_cache.values.dtype

    @cached_property
    def append(self) -> Ragged:
        return Ragged(self.append_indptr)

    @cached_property
    def slots(self) -> Int64Array:
        """Where each token goes, int64 [tokens]."""
        return append_slots(self.rows, self.append)


@dataclass(frozen=True, eq=False)
class AppendResult:
    """The caches afterwards."""

    k_cache: PagedCache
    v_cache: PagedCache


def cached_values(values: Array, dtype: np.dtype[Any], scale: float) -> Array:
    """``values`` of bfloat16 or float16 as a cache of ``dtype`` holds them; any shape."""
    if dtype != E4M3:
        return values
    inverse = divide(np.float32(1), np.float32(scale))
    return encode_e4m3(multiply(DECODE[values.dtype](values), inverse)).view(E4M3)


def kv_append(machine: Machine, problem: AppendProblem) -> AppendResult:
    """The caches with the new tokens in them; the problem's own stay as they are.

    Leaves the tensors k_new, v_new, batch_indices, positions, indptr, indices, k_cache and v_cache
    on the machine; tensors that no kernel touches, as nothing is appended, are there too.
    """
    p = problem
    requests, positions = p.append.requests(), append_positions(p.rows, p.append)
    new = {name: machine.tensor(f"{name}_new", values) for name, values, *_ in p.parts()}
    tables = {
        name: machine.tensor(name, np.ascontiguousarray(values))
        for name, values in (
            ("batch_indices", requests.astype(np.int32)),
            ("positions", positions.astype(np.int32)),
            ("indptr", p.rows.indptr),
            ("indices", p.rows.indices),
        )
    }
    caches = {
        name: machine.tensor(
            f"{name}_cache", cache.values.copy() if machine.computes else cache.values
        )
        for name, _, cache, _ in p.parts()
    }
    with machine.cta(threads=THREADS, count=tile_count(p.tokens, TOKENS_PER_CTA)) as cta:
        # A warp works on one token: lanes that have a vector of it read the same table entries.
        lanes = min(p.heads * max(p.k_cache.d, p.v_cache.d) // _VECTOR_VALUES, WARP_LANES)
        for name, entries in (
            ("batch_indices", np.arange(p.tokens)),
            ("positions", np.arange(p.tokens)),
            ("indptr", requests),
            ("indices", p.rows.starts[requests] + positions // p.rows.block_size),
        ):
            cta.load_lanes(tables[name], np.broadcast_to(entries, (lanes, p.tokens)))
        for name, _, cache, scale in p.parts():
            by_token = new[name].reshape(p.tokens, p.heads * cache.d)
            values = cta.load(by_token[:], by_row=True)
            if machine.computes:
                values = cached_values(values, p.cache_dtype, scale)
            _store(cta, caches[name], cache, p.slots, values)
    order = p.k_cache.order
    return AppendResult(*(PagedCache(caches[name].array, order) for name in "kv"))


def _store(cta: Cta, target: Tensor, cache: PagedCache, slots: Int64Array, values: Array) -> None:
    """Stores ``values`` [tokens, heads * d] at ``slots``: lane i of a warp has vectors i, i + 32,
    i + 64 and so on of a token.
    """
    vectors_per_head = cache.d // _VECTOR_VALUES
    by_vector = values.reshape(len(slots), cache.heads * vectors_per_head, _VECTOR_VALUES)
    for lanes in tiles(cache.heads * vectors_per_head, WARP_LANES):
        head, chunk = np.divmod(np.arange(lanes.start, lanes.stop), vectors_per_head)
        row = cache.row_numbers(slots, head[:, None])
        cta.store_lanes(
            target,
            row * cache.d + chunk[:, None] * _VECTOR_VALUES,
            by_vector[:, lanes].swapaxes(0, 1),
            vector=_VECTOR_VALUES * cache.values.itemsize,
        )


def _check_scale(name: str, scale: float, dtype: np.dtype[Any]) -> None:
    if dtype != E4M3:
        if scale != 1:
            raise ShapeError(f"{name} is {scale}; a cache of {dtype} holds unscaled values")
        return
    value = np.float32(scale)
    smallest = np.finfo(np.float32).smallest_normal
    with np.errstate(all="ignore"):
        usable = value >= smallest and smallest <= np.float32(1) / value < np.inf
    if not usable:
        raise ShapeError(f"{name} is {scale}; it and its reciprocal must be normal float32")
