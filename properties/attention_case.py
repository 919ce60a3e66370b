"""Cases of the attention algorithms and how Hypothesis draws them: shapes at and beside every tile
edge.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from properties.data import KINDS, attention_inputs
from simkit.algorithms.problem import AttentionProblem


@dataclass(frozen=True)
class AttentionCase:
    """A prefill problem: its sizes, mask, kind of values (data.KINDS) and seed."""

    q_len: int = 64
    kv_len: int = 64
    batch: int = 1
    kv_heads: int = 1
    group: int = 1
    d: int = 64
    causal: bool = False
    data: str = "normal"
    seed: int = 0

    def problem(self) -> AttentionProblem:
        q, k, v = attention_inputs(
            self.data, self.seed,
            (self.batch, self.q_len, self.kv_heads * self.group, self.d),
            (self.batch, self.kv_len, self.kv_heads, self.d),
        )  # fmt: skip
        return AttentionProblem(q, k, v, self.causal)


@dataclass(frozen=True)
class DecodeCase:
    """A decode problem: one query per sequence, keys split over ``splits`` CTAs (at most one per 64
    keys).
    """

    kv_len: int = 64
    splits: int = 1
    batch: int = 1
    kv_heads: int = 1
    group: int = 1
    d: int = 64
    data: str = "normal"
    seed: int = 0

    def problem(self) -> AttentionProblem:
        q, k, v = attention_inputs(
            self.data, self.seed,
            (self.batch, 1, self.kv_heads * self.group, self.d),
            (self.batch, self.kv_len, self.kv_heads, self.d),
        )  # fmt: skip
        return AttentionProblem(q, k, v)


def lengths(most: int, tile: int, least: int = 0) -> SearchStrategy[int]:
    """Lengths with the edges of tiles drawn often: k tiles, one less, one more, 0 and 1."""
    edges = sorted(
        {n for k in range(most // tile + 1) for n in (k * tile - 1, k * tile, k * tile + 1)}
        | {0, 1}
    )
    return st.one_of(
        st.integers(least, most), st.sampled_from([n for n in edges if least <= n <= most])
    )


def attention_cases(most: int, tile: int) -> SearchStrategy[AttentionCase]:
    return st.builds(
        AttentionCase,
        q_len=lengths(most, tile, 1),
        kv_len=lengths(most, tile),
        batch=st.integers(1, 2),
        kv_heads=st.integers(1, 2),
        group=st.sampled_from((1, 2, 3)),
        d=st.sampled_from((64, 128)),
        causal=st.booleans(),
        data=st.sampled_from(KINDS),
        seed=st.integers(0, 2**16 - 1),
    )


def decode_cases(most: int, groups: tuple[int, ...], tile: int = 64) -> SearchStrategy[DecodeCase]:
    def with_splits(kv_len: int) -> SearchStrategy[DecodeCase]:
        return st.builds(
            DecodeCase,
            kv_len=st.just(kv_len),
            splits=st.integers(1, max(1, -(-kv_len // tile))),
            batch=st.integers(1, 2),
            kv_heads=st.integers(1, 2),
            group=st.sampled_from(groups),
            d=st.sampled_from((64, 128)),
            data=st.sampled_from(KINDS),
            seed=st.integers(0, 2**16 - 1),
        )

    return lengths(most, tile).flatmap(with_splits)
