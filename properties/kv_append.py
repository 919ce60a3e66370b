"""Laws of appending to a paged KV cache: what is written, where, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from gpu.device import Device
from gpu.kernels import kv_append as host
from gpu.kernels.result import KernelResult
from properties import kv_layouts
from properties.compare import bits_equal, within
from properties.data import BF16, values
from properties.law import Context, Law, LawSkipped, LawViolation, Tier
from properties.subject import Array, Subject, kernel_laws, product
from simkit.algorithms.kv_append import AppendProblem, kv_append
from simkit.errors import MemoryAccessError
from simkit.layouts.block_sparse import BlockRows
from simkit.layouts.paged import Order, PagedCache, garbage, random_cache, random_rows
from simkit.layouts.ragged import Ragged
from simkit.layouts.tables import Int64Array, indptr_of
from simkit.machine.machine import Machine
from simkit.numerics.bounds import SUBNORMAL_STEP, U32, e4m3_error

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E4M3_MAX = 448.0
HEAD_DIMS = ("64x64", "128x128", "192x128", "64x256")
CACHES = ("bf16", "fp16", "bf16 to e4m3", "fp16 to e4m3")
KINDS = ("normal", "large", "zeros", "subnormal", "mixed", "codes")
"""codes: any 16 bits, NaNs and infinities too; the others as in properties.data."""


@dataclass(frozen=True)
class AppendCase:
    """``batch`` requests of 0 to ``longest`` tokens, some of which are new.

    ``decode``: requests append one token; otherwise any number up to all they have. ``head_dims``:
    of K and V. ``share``: requests begin with the same tokens, on the same pages. ``cache``: types
    of tokens and cache. ``wide_tables``: tables are int64. ``data``: kind of values.
    """

    batch: int = 3
    longest: int = 20
    page_size: int = 16
    heads: int = 2
    head_dims: str = "64x64"
    order: Order = "NHD"
    cache: str = "bf16"
    decode: bool = False
    share: bool = False
    wide_tables: bool = False
    data: str = "normal"
    seed: int = 0

    @property
    def is_fp8(self) -> bool:
        return self.cache.endswith("e4m3")

    @property
    def table_dtype(self) -> type[np.signedinteger[Any]]:
        return np.int64 if self.wide_tables else np.int32

    def problem(self) -> AppendProblem:
        """The case's cache, pages and new tokens."""
        rng = np.random.default_rng(self.seed)
        lens, new_lens = self._lengths(rng)
        before = lens - new_lens
        ragged = Ragged.from_lengths(lens)
        rows = random_rows(
            rng,
            ragged,
            page_size=self.page_size,
            dtype=self.table_dtype,
            content=_content(ragged, before) if self.share else None,
        )
        dk, dv = map(int, self.head_dims.split("x"))
        scales = 2.0 ** rng.integers(-6, 4, 2) * rng.choice([1.0, 1.1, 0.7], 2)
        return AppendProblem(
            k_new=self._tokens(rng, int(new_lens.sum()), dk),
            v_new=self._tokens(rng, int(new_lens.sum()), dv),
            append_indptr=indptr_of(new_lens).astype(self.table_dtype),
            rows=rows,
            k_cache=self._cache(rng, rows, ragged, before, dk),
            v_cache=self._cache(rng, rows, ragged, before, dv),
            k_scale=float(scales[0]) if self.is_fp8 else 1.0,
            v_scale=float(scales[1]) if self.is_fp8 else 1.0,
        )

    def _lengths(self, rng: np.random.Generator) -> tuple[Int64Array, Int64Array]:
        """Of each request, and how many of them it appends; both may be 0."""
        lens = rng.integers(0, self.longest + 1, self.batch)
        lens[rng.random(self.batch) < 0.2] = 0
        lens[rng.integers(self.batch)] = self.longest
        if self.decode:
            return lens, np.minimum(lens, 1)
        most = np.minimum(lens, 60)  # of long contexts only the tail is new
        new = rng.integers(0, most + 1)
        return lens, np.where(rng.random(self.batch) < 0.3, most, new)

    def _tokens(self, rng: np.random.Generator, count: int, d: int) -> Array:
        shape, dtype = (count, self.heads, d), np.dtype(np.float16)
        if self.cache.startswith("bf16"):
            dtype = BF16
        if self.data == "codes":
            return rng.integers(0, 1 << 16, shape, np.uint16).view(dtype)
        with np.errstate(over="ignore"):
            return values(self.data, rng, shape).astype(dtype)

    def _cache(
        self, rng: np.random.Generator, rows: BlockRows, ragged: Ragged, before: Int64Array, d: int
    ) -> PagedCache:
        """Values where tokens are already, garbage everywhere else."""
        dtype = E4M3 if self.is_fp8 else np.dtype(np.float16 if self.cache == "fp16" else BF16)
        present = rng.standard_normal((ragged.total, self.heads, d), np.float32).astype(dtype)
        is_new = ragged.positions() >= before[ragged.requests()]
        present[is_new] = garbage(rng, (int(is_new.sum()), self.heads, d), dtype)
        return random_cache(rng, rows, present, self.order)


def _content(ragged: Ragged, before: Int64Array) -> Int64Array:
    """Numbers of tokens: those that are there already depend on the position alone."""
    is_new = ragged.positions() >= before[ragged.requests()]
    return np.where(is_new, -1 - np.arange(ragged.total), ragged.positions())


LENGTHS = st.one_of(st.integers(0, 40), st.integers(0, 300), st.integers(0, 3000))
CASES = st.builds(
    AppendCase,
    batch=st.one_of(st.integers(1, 6), st.integers(1, 64)),
    longest=LENGTHS,
    page_size=st.one_of(st.sampled_from((1, 2, 16, 64)), st.integers(1, 257)),
    heads=st.integers(1, 5),
    head_dims=st.sampled_from(HEAD_DIMS),
    order=st.sampled_from(("NHD", "HND")),
    cache=st.sampled_from(CACHES),
    decode=st.booleans(),
    share=st.booleans(),
    wide_tables=st.booleans(),
    data=st.sampled_from(KINDS),
    seed=st.integers(0, 2**16 - 1),
).filter(lambda case: case.batch * case.longest * case.heads <= 12_000)
CORNERS = (
    # One head leaves lanes without a vector, five take them more than one turn.
    *product(AppendCase, order=("NHD", "HND"), cache=CACHES, heads=(5, 1), data=("codes",)),
    AppendCase(share=True, longest=70, wide_tables=True, head_dims="192x128", heads=3),
    AppendCase(share=True, wide_tables=True, head_dims="192x128", heads=1),
    AppendCase(batch=64, decode=True, page_size=1, head_dims="64x256", heads=5),
    AppendCase(head_dims="64x256", heads=1),
    AppendCase(batch=2, longest=3000, page_size=257, order="HND", share=True, heads=1),
    AppendCase(batch=1, longest=0),
)


def _bits(outputs: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs as integers: not even a NaN may become another one."""
    return {name: array.view(f"u{array.dtype.itemsize}") for name, array in outputs.items()}


def _model(machine: Machine, case: AppendCase) -> Mapping[str, Array]:
    result = kv_append(machine, case.problem())
    return _bits({"k_cache": result.k_cache.values, "v_cache": result.v_cache.values})


def _append(device: Device, p: AppendProblem, source: str | None) -> KernelResult:
    arch = int(device.arch.removeprefix("sm_").rstrip("af"))
    if p.cache_dtype == E4M3 and arch < host.FIRST_FP8_ARCH:
        raise LawSkipped(f"sm_{arch} has no FP8 conversions")
    return host.kv_append(
        device,
        p.k_new,
        p.v_new,
        p.append_indptr,
        p.rows,
        p.k_cache,
        p.v_cache,
        k_scale=p.k_scale,
        v_scale=p.v_scale,
        source=source,
    )


def _kernel(device: Device, case: AppendCase, source: str | None) -> KernelResult:
    result = _append(device, case.problem(), source)
    return KernelResult(_bits(result.outputs), result.reports)


APPEND = Subject("kv_append", CASES, AppendCase, CORNERS, _model, _kernel)


def _run(context: Context, problem: AppendProblem) -> tuple[PagedCache, PagedCache]:
    outputs = _append(context.device, problem, context.sources.get("kv_append")).outputs
    order = problem.k_cache.order
    return PagedCache(outputs["k_cache"], order), PagedCache(outputs["v_cache"], order)


def check_places(context: Context, case: AppendCase) -> None:
    """Written with loops from the definition alone: every token at its slot, all else as before."""
    p = case.problem()
    expected = [np.array(cache.by_slot) for cache in (p.k_cache, p.v_cache)]
    token = 0
    for request in range(case.batch):
        first, end = int(p.rows.indptr[request]), int(p.rows.indptr[request + 1])
        pages = [int(page) for page in p.rows.indices[first:end]]
        length = (len(pages) - 1) * case.page_size + int(p.rows.last_block_len[request])
        own = int(p.append_indptr[request + 1]) - int(p.append_indptr[request])
        for position in range(length - own, length) if pages else ():
            page, offset = pages[position // case.page_size], position % case.page_size
            for cache, new, scale in zip(
                expected, (p.k_new, p.v_new), (p.k_scale, p.v_scale), strict=True
            ):
                cache[page, offset] = _stored(new[token], cache.dtype, scale)
            token += 1
    for name, cache, found in zip("kv", expected, _run(context, p), strict=True):
        bits = f"u{cache.dtype.itemsize}"
        bits_equal(
            f"{name}_cache", cache.view(bits), np.ascontiguousarray(found.by_slot).view(bits)
        )


def _stored(token: Array, dtype: np.dtype[Any], scale: float) -> Array:
    """A token as the cache has it, by NumPy and ml_dtypes."""
    if dtype != E4M3:
        return token
    with np.errstate(all="ignore"):
        scaled = token.astype(np.float32) * (np.float32(1) / np.float32(scale))
        codes = np.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(E4M3).view(np.uint8)
    return np.where(np.isnan(scaled), np.uint8(0x7F), codes).view(E4M3)


def check_accuracy(context: Context, case: AppendCase) -> None:
    """Code * scale against x, of magnitudes up to 448 scale: larger ones saturate.

    The computed quotient is x / scale (1 + e) with |e| < 3 u, from the reciprocal and the product,
    or has a subnormal's error; rounding it errs by half a step there.
    """
    p = case.problem()
    caches = _run(context, p)
    for name, cache, new, scale in zip(
        "kv", caches, (p.k_new, p.v_new), (p.k_scale, p.v_scale), strict=True
    ):
        x = new.astype(np.float64)
        page, offset = np.divmod(p.slots, case.page_size)
        found = cache.by_slot[page, offset].astype(np.float64)
        if not case.is_fp8:
            within(f"{name}_cache", found, x, 0.0, "a copy")
            continue
        exact = np.float64(np.float32(scale))
        limit = E4M3_MAX * exact
        x = np.clip(x, -limit, limit)
        size = np.abs(np.nan_to_num(x))
        largest = np.minimum(size * (1 + 3 * U32), limit)
        bound = e4m3_error(largest, np.full(x.shape, exact)) + 3 * U32 * size
        bound += SUBNORMAL_STEP * exact
        within(f"{name}_cache", found * exact, x, bound, "half a step of e4m3 and two roundings")


def check_untouched(context: Context, case: AppendCase) -> None:
    """Slots to which nothing is appended keep their bits, those that nobody uses too."""
    p = case.problem()
    for name, before, after in zip("kv", (p.k_cache, p.v_cache), _run(context, p), strict=True):
        is_new = np.zeros(p.rows.slot_count, bool)
        is_new[p.slots] = True
        kept = ~is_new.reshape(p.rows.blocks, case.page_size)
        bits = f"u{before.values.dtype.itemsize}"
        bits_equal(f"{name}_cache", before.by_slot[kept].view(bits), after.by_slot[kept].view(bits))


def _shortened(rows: BlockRows, lens: Int64Array) -> BlockRows:
    """The first ``lens`` tokens of each request on the pages that they are on."""
    counts = -(-lens // rows.block_size)
    chosen = [
        rows.indices[first : first + count]
        for first, count in zip(rows.starts[:-1], counts, strict=True)
    ]
    last = np.maximum(lens - rows.block_size * (counts - 1), 1)
    dtype = rows.dtype
    return BlockRows(
        indptr_of(counts).astype(dtype),
        np.concatenate(chosen),
        np.where(counts > 0, last, 0).astype(dtype),
        rows.block_size,
        rows.blocks,
    )


def check_pieces(context: Context, case: AppendCase) -> None:
    """Some of each request's new tokens in a first append, the others in a second one."""
    p = case.problem()
    rng = np.random.default_rng(case.seed + 1)
    first_lens = rng.integers(0, p.append.lens + 1)
    is_first = p.append.positions() < first_lens[p.append.requests()]
    dtype = p.rows.dtype
    first = replace(
        p,
        k_new=p.k_new[is_first],
        v_new=p.v_new[is_first],
        append_indptr=indptr_of(first_lens).astype(dtype),
        rows=_shortened(p.rows, p.rows.kv_lens - p.append.lens + first_lens),
    )
    k_between, v_between = _run(context, first)
    second = replace(
        p,
        k_new=p.k_new[~is_first],
        v_new=p.v_new[~is_first],
        append_indptr=indptr_of(p.append.lens - first_lens).astype(dtype),
        k_cache=k_between,
        v_cache=v_between,
    )
    for name, once, twice in zip("kv", _run(context, p), _run(context, second), strict=True):
        bits = f"u{once.values.dtype.itemsize}"
        bits_equal(f"{name}_cache", once.values.view(bits), twice.values.view(bits))


def check_far_pages(context: Context, case: AppendCase) -> None:
    """The same append to pages so far up that 2^31 head vectors lie before them.

    Only the pages in use are there: the kernel is told where the first page of the whole cache
    would be.
    """
    p = case.problem()
    near = _run(context, p)
    vectors = case.page_size * case.heads  # of a page
    moved = min(2**31 // vectors + 1, 2**31 - 1 - p.rows.blocks)  # page numbers may be int32
    caches = {
        name: context.device.array(cache.values, name=name)
        for name, cache in (("k_cache", p.k_cache), ("v_cache", p.v_cache))
    }
    if p.tokens:
        try:
            host.launch(
                context.device,
                host.Build.of(p.k_new, p.k_cache, p.v_cache, p.rows),
                p.k_new,
                p.v_new,
                p.append,
                _moved_up(p.rows, moved),
                caches["k_cache"].address - moved * p.k_cache.values[0].nbytes,
                caches["v_cache"].address - moved * p.v_cache.values[0].nbytes,
                (
                    host.inverse_scale("k_scale", p.k_scale, p.cache_dtype),
                    host.inverse_scale("v_scale", p.v_scale, p.cache_dtype),
                ),
                context.sources.get("kv_append"),
            )
        except MemoryAccessError as error:
            raise LawViolation(f"pages {moved} further up: {error}") from error
    for cache, (name, far) in zip(near, caches.items(), strict=True):
        bits = f"u{cache.values.dtype.itemsize}"
        bits_equal(name, cache.values.view(bits), far.to_numpy().view(bits))


def _moved_up(rows: BlockRows, pages: int) -> BlockRows:
    """The same rows in a cache with so many pages before this one's."""
    indices = rows.indices[: rows.starts[-1]] + rows.dtype.type(pages)
    return replace(rows, indices=indices, blocks=rows.blocks + pages)


def _law(
    name: str,
    tier: Tier,
    statement: str,
    check: Callable[[Context, AppendCase], None],
    examples: int = 10,
) -> Law:
    return Law(
        algorithm="kv_append",
        name=name,
        tier=tier,
        statement=statement,
        check=check,
        strategy=CASES,
        case_type=AppendCase,
        corners=CORNERS,
        examples=examples,
    )


LAWS = [
    *kernel_laws(APPEND, examples=20),
    _law(
        "places",
        "exact",
        "every token lies where the page table says, found by loops",
        check_places,
    ),
    _law(
        "accuracy",
        "bounded",
        "a copy is exact; e4m3 loses half a step and the roundings of the scale",
        check_accuracy,
    ),
    _law("untouched", "exact", "all slots without a new token keep their bits", check_untouched),
    _law("pieces", "exact", "appending in two pieces is appending at once", check_pieces, 6),
    _law(
        "far_pages",
        "exact",
        "pages beyond 2^31 head vectors are like any other",
        check_far_pages,
        6,
    ),
    *kv_layouts.LAWS,
]
