"""The problem and its dense solution, against loops over Python floats."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from attention_cases import problems
from hypothesis import given, settings

from simkit.algorithms.problem import (
    BF16,
    AttentionProblem,
    attention_flops,
    attention_reference,
    visible_pairs,
)
from simkit.errors import DtypeError, ShapeError
from simkit.machine.machine import Machine


@settings(max_examples=30)
@given(problems(d=(3,), max_q_len=5, max_kv_len=6))
def test_reference_is_the_formula(problem: AttentionProblem) -> None:
    o, lse = attention_reference(problem)
    q, k, v = (x.astype(float).tolist() for x in (problem.q, problem.k, problem.v))
    for b, i, h in np.ndindex(problem.q.shape[:3]):
        shared = h // problem.group
        seen = [
            j
            for j in range(problem.kv_len)
            if not problem.causal or j <= i + problem.kv_len - problem.q_len
        ]
        scores = [
            problem.scale
            * math.fsum(x * y for x, y in zip(q[b][i][h], k[b][j][shared], strict=True))
            for j in seen
        ]
        total = math.fsum(map(math.exp, scores))
        assert lse[b, h, i] == pytest.approx(math.log(total) if seen else -math.inf)
        for dim in range(problem.d):
            weighted = (
                math.exp(s) * v[b][j][shared][dim] for s, j in zip(scores, seen, strict=True)
            )
            expected = math.fsum(weighted) / total if seen else 0.0
            assert o[b, i, h, dim] == pytest.approx(expected, abs=1e-12)


def _problem(**sizes: Any) -> AttentionProblem:
    return AttentionProblem.random(np.random.default_rng(0), **sizes)


def test_causal_mask_is_aligned_bottom_right() -> None:
    problem = _problem(q_len=2, kv_len=4, causal=True)
    assert problem.mask(slice(0, 2), slice(0, 4)).tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    problem = _problem(q_len=4, kv_len=2, causal=True)
    assert problem.mask(slice(0, 4), slice(0, 2)).tolist() == [[0, 0], [0, 0], [1, 0], [1, 1]]
    assert problem.visible_keys(slice(0, 2)) == 0
    assert problem.visible_keys(slice(0, 3)) == 1


def test_a_tile_is_visible_as_a_whole() -> None:
    problem = _problem(q_len=70, kv_len=100, causal=True)
    # Rows 0 .. 63 see keys 0 .. 93; the second tile ends with the last key there is.
    assert list(problem.visible_tiles(slice(0, 64), 64)) == [slice(0, 64), slice(64, 100)]
    assert list(problem.visible_tiles(slice(0, 10), 64)) == [slice(0, 64)]


@settings(max_examples=50)
@given(problems(d=(1,)))
def test_pairs_and_tiles_follow_the_mask(problem: AttentionProblem) -> None:
    mask = problem.mask(slice(0, problem.q_len), slice(0, problem.kv_len))
    assert visible_pairs(problem) == mask.sum()
    for first in range(0, problem.q_len, 16):
        rows = slice(first, min(first + 16, problem.q_len))
        tiles = list(problem.visible_tiles(rows, 16))
        in_tiles = np.zeros(problem.kv_len, bool)
        for tile in tiles:
            assert mask[rows, tile].any()
            in_tiles[tile] = True
        assert not mask[rows][:, ~in_tiles].any()


def test_flops_are_4_n_squared_d() -> None:
    problem = _problem(batch=2, q_len=48, kv_len=48, heads=3, d=16)
    assert attention_flops(problem) == 4 * 48**2 * 16 * 2 * 3
    causal = _problem(q_len=48, kv_len=48, d=16, causal=True)
    assert attention_flops(causal) == 4 * (48 * 49 // 2) * 16


def test_scale_is_the_inverse_root_of_d_unless_given() -> None:
    assert _problem(kv_len=1, d=64).scale == 0.125
    assert _problem(kv_len=1, d=64, scale=0.5).scale == 0.5
    # The kernels' factor is a float32 product of float32 factors.
    expected = np.float32(np.float32(128**-0.5) * np.float32(1.4426950408889634))
    assert _problem(kv_len=1, d=128).scale_log2 == expected


def test_a_sized_problem_takes_no_memory() -> None:
    problem = AttentionProblem.sized(batch=64, q_len=2**17, kv_len=2**17, heads=64, d=128)
    assert problem.q.nbytes == 128 * 2**30
    assert not problem.q[-1, -1].any()


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ((1, 2, 4), (1, 3, 2, 64), (1, 3, 2, 64), "q must be"),
        ((1, 2, 4, 64), (1, 3, 2, 64), (1, 3, 1, 64), "must agree"),
        ((1, 2, 4, 64), (1, 3, 2, 32), (1, 3, 2, 32), "must agree"),
        ((2, 2, 4, 64), (1, 3, 2, 64), (1, 3, 2, 64), "must agree"),
        ((1, 2, 4, 64), (1, 3, 3, 64), (1, 3, 3, 64), "4 and 3"),
        ((1, 0, 4, 64), (1, 3, 2, 64), (1, 3, 2, 64), "only kv_len may be 0"),
        ((1, 2, 4, 64), (1, 3, 0, 64), (1, 3, 0, 64), "only kv_len may be 0"),
    ],
)
def test_shapes_that_do_not_fit(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        AttentionProblem(np.zeros(q, BF16), np.zeros(k, BF16), np.zeros(v, BF16))


def test_other_element_types_and_scales_are_refused() -> None:
    x = np.zeros((1, 1, 1, 64), BF16)
    with pytest.raises(DtypeError, match="k must be bfloat16, got float32"):
        AttentionProblem(x, x.astype(np.float32), x)
    for scale in (0.0, -1.0, np.inf, np.nan, 1e-60, 3e38):
        with pytest.raises(ShapeError, match="scale"):
            AttentionProblem(x, x, x, scale=scale)


def test_strided_inputs_are_placed_contiguously() -> None:
    whole = _problem(q_len=4, kv_len=4, heads=2)
    part = AttentionProblem(whole.q[:, ::2], whole.k, whole.v)
    q, _, _ = part.place_inputs(Machine())
    assert np.array_equal(q.array, whole.q[:, ::2])
