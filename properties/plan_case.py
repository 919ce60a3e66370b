"""Cases of the planners: batches of requests by kinds of lengths, and how Hypothesis draws them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from simkit.layouts.tables import Int64Array, indptr_of
from simkit.planning.outcome import PlanProblem

LENGTHS: dict[str, Callable[[np.random.Generator, int, int], Int64Array]] = {
    "one": lambda rng, batch, most: np.ones(batch, np.int64),
    "equal": lambda rng, batch, most: np.full(batch, most),
    "uniform": lambda rng, batch, most: rng.integers(0, most, batch, endpoint=True),
    "often_empty": lambda rng, batch, most: (
        rng.integers(0, most, batch, endpoint=True) * (rng.random(batch) < 0.3)
    ),
    "one_long": lambda rng, batch, most: np.where(
        np.arange(batch) == rng.integers(batch), most, rng.integers(0, min(most, 16) + 1, batch)
    ),
    "none": lambda rng, batch, most: np.zeros(batch, np.int64),
}
"""Lengths of ``batch`` requests, none over ``most``, by kind."""

GROUPS = (1, 2, 3, 4, 7, 8, 16)


@dataclass(frozen=True)
class PlanCase:
    """Requests by kind of lengths (LENGTHS) and the longest; mask, heads, pages, GPU and mode."""

    batch: int = 1
    queries: str = "one"
    most_queries: int = 1
    keys: str = "equal"
    most_keys: int = 1024
    group: int = 4
    kv_heads: int = 8
    d: int = 128
    page: int = 16
    window_left: int = -1
    causal: bool = False
    graph: bool = False
    fixed_split: int = 0
    sm_count: int = 132
    seed: int = 0

    @property
    def q_lens(self) -> Int64Array:
        return self._lengths(0, self.queries, self.most_queries)

    @property
    def kv_lens(self) -> Int64Array:
        return self._lengths(1, self.keys, self.most_keys)

    @property
    def qo_indptr(self) -> Int64Array:
        return indptr_of(self.q_lens)

    def problem(self) -> PlanProblem:
        return PlanProblem(
            q_lens=self.q_lens,
            kv_lens=self.kv_lens,
            group=self.group,
            kv_heads=self.kv_heads,
            head_dim=self.d,
            page_size=self.page,
            window_left=self.window_left,
            causal=self.causal,
            fixed_split=self.fixed_split,
            graph=self.graph,
        )

    def rng(self) -> np.random.Generator:
        """For what a law draws beside the lengths."""
        return np.random.default_rng((self.seed, 2))

    def _lengths(self, stream: int, kind: str, most: int) -> Int64Array:
        rng = np.random.default_rng((self.seed, stream))
        return LENGTHS[kind](rng, self.batch, most).astype(np.int64)


def plan_cases(*, decode: bool = False) -> SearchStrategy[PlanCase]:
    """Batches of up to 64 requests; one query each if ``decode``."""

    def with_split(keys: int) -> SearchStrategy[PlanCase]:
        # A part of the longest request: the number of items must not follow its length.
        sizes = st.integers(1, 40).map(lambda parts: max(keys // parts, 1))
        return st.builds(
            PlanCase,
            batch=st.integers(1, 64),
            queries=st.just("one") if decode else st.sampled_from(sorted(LENGTHS)),
            most_queries=st.just(1) if decode else st.integers(1, 100),
            keys=st.sampled_from(sorted(LENGTHS)),
            most_keys=st.just(keys),
            group=st.sampled_from(GROUPS),
            kv_heads=st.sampled_from((1, 2, 3, 8)),
            d=st.sampled_from((64, 128, 256) if decode else (64, 128, 256, 512)),
            page=st.one_of(st.integers(1, 257), st.sampled_from((1, 16, 64, 128, 256))),
            window_left=st.one_of(st.just(-1), st.integers(0, 300)),
            causal=st.booleans(),
            graph=st.booleans(),
            fixed_split=st.one_of(st.just(0), sizes),
            sm_count=st.sampled_from((1, 7, 108, 132, 148)),
            seed=st.integers(0, 2**16 - 1),
        )

    lengths = st.one_of(st.integers(0, 3000), st.sampled_from((2**20, 2**31 - 1)))
    return lengths.flatmap(with_split)
