"""Cases of the attention algorithms and how Hypothesis draws them: shapes at and beside every tile
edge.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from properties.data import BF16, KINDS, attention_inputs
from simkit.algorithms.problem import AttentionProblem

Array = np.ndarray


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


def emulate(problem: AttentionProblem, rounds_scores: bool = False) -> Array:
    """Attention in float64 with only the unavoidable roundings of bfloat16: probabilities before
    the product with V (scores too where an algorithm stores them), and the output.
    """
    q = problem.q.astype(np.float64)
    k, v = (np.repeat(x.astype(np.float64), problem.group, axis=2) for x in (problem.k, problem.v))
    scores = np.einsum("bihd,bjhd->bhij", q, k) * problem.scale
    if rounds_scores:
        scores = _bf16(scores)
    if problem.causal:
        visible = np.tri(problem.q_len, problem.kv_len, problem.kv_len - problem.q_len) > 0
        scores = np.where(visible, scores, -np.inf)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        maximum = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(np.isneginf(maximum), 0, maximum))
        total = weights.sum(axis=-1, keepdims=True)
        if rounds_scores:
            weights = _bf16(np.where(total == 0, 0, weights / total))
            output = np.einsum("bhij,bjhd->bihd", weights, v)
        else:
            sums = np.einsum("bhij,bjhd->bihd", _bf16(weights), v)
            output = np.where(total == 0, 0, sums.transpose(0, 2, 1, 3) / total).transpose(
                0, 2, 1, 3
            )
    return _bf16(output)


def _bf16(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return x.astype(BF16).astype(np.float64)
