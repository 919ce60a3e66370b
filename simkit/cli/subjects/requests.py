"""Batches of requests from settings: their tensors, pages, variants, and smaller batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from simkit.algorithms.batch_problem import BatchProblem
from simkit.algorithms.elements import BF16, E4M3
from simkit.algorithms.kv_append import cached_values
from simkit.algorithms.variant import Variant, rope_angles
from simkit.cli.settings import Lengths, Setting, Values, by_request
from simkit.cli.subjects.dense import LEAST_LENGTH
from simkit.cli.subjects.subject import Array
from simkit.layouts.block_sparse import BlockRows
from simkit.layouts.paged import Order, random_cache, random_rows
from simkit.layouts.ragged import Ragged
from simkit.layouts.tables import Int64Array
from simkit.machine.memory import unbacked
from simkit.numerics.arrays import Float32Array

BATCH = Setting("batch", 4, "requests, where lengths are one number")
HEADS = (
    Setting("heads", 8, "query heads"),
    Setting("kv_heads", 2, "K/V heads"),
    Setting("d", 128, "head dimension, 64, 128 or 256"),
)
V_DIM = Setting("dv", None, "head dimension of V, d by default", like="d")
PAGE_SIZE = Setting("page_size", 16, "keys of a page")
HND = Setting("hnd", False, "pages with heads outside, [heads, slots, d]", kind="flag")
FP8 = Setting("fp8", False, "K and V of e4m3, with a scale for each", kind="flag")
PREFIX = Setting("prefix", 0, "keys that all requests share, in the same pages", least=0)
CAUSAL = Setting("causal", False, "mask keys after the query", kind="flag")
SOFT_CAP = Setting("soft_cap", 0.0, "of logits, 0 for none", least=0, kind="number")
SINK = Setting("sink", False, "a sink in each head", kind="flag")
VARIANT = (
    Setting("window", -1, "keys before a query's own that it sees, -1 for all", least=-1),
    SOFT_CAP,
    Setting("alibi", False, "slopes of ALiBi", kind="flag"),
    SINK,
    Setting("rope", False, "rotary embedding of Q and K", kind="flag"),
)

_MOST_E4M3 = 448.0


def length_setting(name: str, default: int | None, help: str, **more: Any) -> Setting:
    """Lengths, one number by default; None is as for `Setting`."""
    lengths = None if default is None else Lengths((default,))
    return Setting(name, lengths, help, least=0, kind="lengths", **more)


@dataclass(frozen=True)
class Draw:
    """Standard normal bfloat16 tensors, a different one for each ``level`` and ``part``; with seed
    None tensors that take no memory.
    """

    seed: int | None
    level: int = 0

    def __call__(self, shape: tuple[int, ...], part: int = 0) -> Array:
        if self.seed is None:
            return unbacked(shape, BF16)
        rng = np.random.default_rng([self.seed, self.level, part])
        return rng.standard_normal(shape, np.float32).astype(BF16)


def page_order(values: Values) -> Order:
    return "HND" if values["hnd"] else "NHD"


def cache_shape(values: Values, rows: BlockRows, d: int) -> tuple[int, ...]:
    """Of K or V in pages."""
    slots, heads = rows.block_size, values["kv_heads"]
    middle = (heads, slots) if values["hnd"] else (slots, heads)
    return (rows.blocks, *middle, d)


def pages(values: Values, kv_lens: Int64Array, prefix: int = 0) -> tuple[BlockRows, Int64Array]:
    """Pages in any order, always the same, and the number of each key's vector: keys of the prefix
    that all requests share have one.
    """
    ragged = Ragged.from_lengths(kv_lens)
    position = ragged.positions()
    content = np.where(position < prefix, position, prefix + np.arange(ragged.total))
    content = np.unique(content, return_inverse=True)[1]
    rows = random_rows(
        np.random.default_rng(0),
        ragged,
        page_size=values["page_size"],
        content=content,
        spare_pages=0,
    )
    return rows, content


def vectors(draw: Draw, values: Values, count: int) -> list[tuple[Array, float]]:
    """K and V [count, kv_heads, ...] as they are stored, each with what a 1 stands for: e4m3 takes
    the range that it has.
    """
    found = []
    for part, size in enumerate((values["d"], values.get("dv", values["d"])), 1):
        x, scale = draw((count, values["kv_heads"], size), part), 1.0
        if values.get("fp8", False) and draw.seed is None:
            x = unbacked(x.shape, E4M3)
        elif values.get("fp8", False):
            scale = float(np.abs(x.astype(np.float32)).max(initial=0)) / _MOST_E4M3 or 1.0
            x = cached_values(x, E4M3, scale)
        found.append((x, scale))
    return found


def in_pages(draw: Draw, values: Values, rows: BlockRows, by_key: Array, content: Array) -> Array:
    """A cache with the vectors ``by_key[content]``, NaN and infinity in what is unused."""
    if draw.seed is None:
        return unbacked(cache_shape(values, rows, by_key.shape[-1]), by_key.dtype)
    rng = np.random.default_rng(draw.seed)
    return random_cache(rng, rows, by_key[content], page_order(values)).values


def variant(values: Values, kv_lens: Int64Array) -> Variant:
    """Slopes of ALiBi from 1/2 to 2^-8, sinks from -1 to 1, angles with theta = 10,000."""
    heads = values["heads"]
    slopes = (2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)).astype(np.float32)
    longest = int(np.maximum(kv_lens, 1).max(initial=1))
    return Variant(
        causal=values.get("causal", False),
        window_left=values.get("window", -1),
        soft_cap=values["soft_cap"],
        alibi_slopes=slopes if values.get("alibi") else None,
        sinks=sinks(values),
        rope=rope_angles(longest, values["d"]) if values.get("rope") else None,
    )


def sinks(values: Values) -> Float32Array | None:
    return np.linspace(-1, 1, values["heads"], dtype=np.float32) if values["sink"] else None


def batch_problem(values: Values, seed: int | None) -> BatchProblem:
    """Requests with K and V in pages if there is a page_size, ragged otherwise; with seed None the
    tensors take no memory.
    """
    draw = Draw(seed)
    q_lens, kv_lens = by_request({"q_len": (1,), **values}, "q_len", "kv_len")
    queries = Ragged.from_lengths(q_lens)
    keys: Ragged | BlockRows
    order: Order = "NHD"
    if "page_size" in values:
        keys, content = pages(values, kv_lens, values["prefix"])
        stored = vectors(draw, values, int(content.max(initial=-1)) + 1)
        k, v = (in_pages(draw, values, keys, x, content) for x, _ in stored)
        order = page_order(values)
    else:
        keys = Ragged.from_lengths(kv_lens)
        stored = vectors(draw, values, keys.total)
        k, v = (x for x, _ in stored)
    return BatchProblem(
        q=draw((queries.total, values["heads"], values["d"])),
        k=k,
        v=v,
        queries=queries,
        keys=keys,
        order=order,
        variant=variant(values, kv_lens),
        k_scale=stored[0][1],
        v_scale=stored[1][1],
    )


def shorter(values: Values, *names: str) -> Values:
    """The lengths of that name at most half of what the longest is."""
    longest = max(max(values[name]) for name in names)
    most = max(longest // 2, LEAST_LENGTH)
    cut = {name: Lengths(min(length, most) for length in values[name]) for name in names}
    return {**values, **cut}


def fewer(values: Values, *names: str) -> Values:
    """The first half of the requests; the named lengths may be lists."""
    half = max(len(by_request(values, *names)[0]) // 2, 1)
    cut = {name: Lengths(values[name][:half]) for name in names}
    return {**values, "batch": half, **cut}


def smaller_batch(values: Values, *names: str) -> Values:
    """Half the longest lengths; then half the requests; then one K/V head with its group."""
    for smaller in (shorter(values, *names), fewer(values, *names)):
        if smaller != values:
            return smaller
    return {**values, "heads": values["heads"] // values["kv_heads"], "kv_heads": 1}
