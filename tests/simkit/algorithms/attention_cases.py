"""What the tests of the attention models share: problems to draw, and error bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from simkit.algorithms.problem import AttentionProblem

BF16_ROUNDOFF = 2.0**-8  # largest relative error of one rounding to bfloat16

# Everything that happens in float32. The largest part is the error of scores: 128 products whose
# magnitudes add up to about 82, scaled by 0.3 at most, are off by less than 2^-23 128 82 0.3, and
# weights by that once on their own and once through their sum: below 2^-10.
FLOAT32_SLACK = 2.0**-10


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    d: tuple[int, ...] = (64, 128),
    max_q_len: int = 100,
    max_kv_len: int = 200,
) -> AttentionProblem:
    """Problems whose sizes are empty, one, around a tile edge, or anything else."""
    kv_heads = draw(st.sampled_from((1, 2)))
    edges = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129)
    q_edges = st.sampled_from([edge for edge in edges if edge <= max_q_len])
    kv_edges = st.sampled_from([0, *(edge for edge in edges if edge <= max_kv_len)])
    return AttentionProblem.random(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        batch=draw(st.sampled_from((1, 2))),
        q_len=draw(q_edges | st.integers(1, max_q_len)),
        kv_len=draw(kv_edges | st.integers(0, max_kv_len)),
        heads=kv_heads * draw(st.sampled_from((1, 2, 3))),
        kv_heads=kv_heads,
        d=draw(st.sampled_from(d)),
        causal=draw(st.booleans()),
        scale=draw(st.sampled_from((None, 0.02, 0.3))),
    )


def float64(values: NDArray[Any]) -> NDArray[np.float64]:
    return values.astype(np.float64)


def weighted_magnitude(problem: AttentionProblem, lse: NDArray[np.float64]) -> NDArray[np.float64]:
    """sum_j p_j |v_j| like o: what the relative errors of the weights act on."""
    q, k, v = (float64(x) for x in (problem.q, problem.k, np.abs(problem.v)))
    k, v = (np.repeat(x, problem.group, axis=2) for x in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, k) * problem.scale
    visible = problem.mask(slice(0, problem.q_len), slice(0, problem.kv_len))
    with np.errstate(all="ignore"):
        p = np.where(visible, np.exp(scores - lse[..., None]), 0)
    return np.einsum("bhij,bjhd->bihd", p, v)


def rms(error: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(np.square(error))))
