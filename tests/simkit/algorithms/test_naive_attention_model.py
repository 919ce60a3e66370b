"""The naive model: the formula, and the bytes of S and P that it pays for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_cases import (
    BF16_ROUNDOFF,
    FLOAT32_SLACK,
    float64,
    problems,
    weighted_magnitude,
)
from hypothesis import given, settings

from simkit.algorithms.naive_attention import (
    naive_attention,
    output_shared_bytes,
    scores_shared_bytes,
    scratch_bytes,
)
from simkit.algorithms.problem import BF16, AttentionProblem, attention_reference
from simkit.errors import ShapeError
from simkit.machine.machine import Machine

small_problems = problems(max_q_len=70, max_kv_len=100)


def _problem(**sizes: Any) -> AttentionProblem:
    return AttentionProblem.random(np.random.default_rng(0), **sizes)


def _scores(problem: AttentionProblem) -> np.ndarray[Any, Any]:
    q, k = float64(problem.q), np.repeat(float64(problem.k), problem.group, axis=2)
    scores = np.einsum("bihd,bjhd->bhij", q, k) * problem.scale
    visible = problem.mask(slice(0, problem.q_len), slice(0, problem.kv_len))
    return np.where(visible, scores, -np.inf)


@settings(max_examples=40)
@given(problems(d=(8, 64), max_q_len=70, max_kv_len=100))
def test_exact_in_reference_arithmetic(problem: AttentionProblem) -> None:
    result = naive_attention(Machine("h100"), problem)
    o, lse = attention_reference(problem)
    np.testing.assert_allclose(result.o, o, rtol=0, atol=1e-12)
    scores = _scores(problem)
    np.testing.assert_allclose(result.s, scores, rtol=1e-12, atol=1e-12)
    expected = np.exp(scores - np.where(np.isneginf(lse), 0, lse)[..., None])
    np.testing.assert_allclose(result.p, expected, rtol=0, atol=1e-12)


@settings(max_examples=40)
@given(small_problems)
def test_device_arithmetic_is_within_its_precision(problem: AttentionProblem) -> None:
    result = naive_attention(Machine("h100", "device"), problem)
    assert result.o.dtype == result.s.dtype == result.p.dtype == BF16
    scores = _scores(problem)
    finite = np.isfinite(scores)
    assert np.array_equal(np.isneginf(float64(result.s)), ~finite)
    error = np.abs(float64(result.s)[finite] - scores[finite])
    largest = np.abs(scores[finite]).max(initial=0.0)
    assert np.all(error <= BF16_ROUNDOFF * np.abs(scores[finite]) + FLOAT32_SLACK)
    # A score off by e changes its weight by a factor of exp(e), and so the sum; then P and O are
    # rounded once each.
    o, lse = attention_reference(problem)
    change = np.expm1(2 * (BF16_ROUNDOFF * largest + FLOAT32_SLACK)) + 2.5 * BF16_ROUNDOFF
    bound = change * weighted_magnitude(problem, lse)
    assert np.all(np.abs(float64(result.o) - o) <= bound)


def test_probabilities_of_a_row() -> None:
    problem = _problem(batch=2, q_len=40, kv_len=33, heads=2, causal=True)
    p = float64(naive_attention(Machine("h100", "device"), problem).p)
    visible = problem.mask(slice(0, 40), slice(0, 33))
    assert np.all(p[..., ~visible] == 0)
    # Each probability is off by its rounding alone, so the sum is by as much.
    sums = p.sum(axis=-1)
    keys = visible.any(axis=-1)
    assert np.all(np.abs(sums[..., keys] - 1) <= BF16_ROUNDOFF + 1e-5)
    assert np.all(sums[..., ~keys] == 0)


def test_bytes_of_one_case() -> None:
    batch, heads, kv_heads, q_len, kv_len, d = 2, 4, 2, 64, 96, 64
    problem = _problem(
        batch=batch, q_len=q_len, kv_len=kv_len, heads=heads, kv_heads=kv_heads, d=d, causal=True
    )
    machine = Machine("h100", "none")
    naive_attention(machine, problem)
    all_heads, pairs = batch * heads, q_len * kv_len
    row_tiles, key_tiles = 2, 3
    expected = {
        ("q", "read"): key_tiles * all_heads * q_len * d * 2,  # for each tile of keys
        ("k", "read"): row_tiles * all_heads * kv_len * d * 2,  # for each tile of rows
        ("v", "read"): row_tiles * all_heads * kv_len * d * 2,
        ("s", "write"): all_heads * pairs * 2,
        ("s", "read"): 3 * all_heads * pairs * 2,  # maximum, sum, result
        ("p", "write"): all_heads * pairs * 2,
        ("p", "read"): all_heads * pairs * 2,
        ("o", "write"): all_heads * q_len * d * 2,
    }
    assert {key: row.requested for key, row in machine.traffic.items()} == expected
    # Rows of 96 elements are whole sectors.
    assert {key: row.sectors for key, row in machine.traffic.items()} == expected
    assert machine.ctas == all_heads * row_tiles * key_tiles + all_heads * q_len // 8 + (
        all_heads * row_tiles
    )
    assert machine.compulsory_bytes("s", "p") == 4 * all_heads * pairs * 2
    assert scratch_bytes(problem) == all_heads * pairs * 2


def test_sectors_of_rows_that_are_not() -> None:
    # Rows of 33 elements are 66 bytes: row r starts at byte 66 r, and its 33rd element is alone.
    machine = Machine("h100", "none")
    naive_attention(machine, _problem(q_len=5, kv_len=33))
    sectors = 0
    for row in range(5):
        first, last = 66 * row, 66 * row + 62
        sectors += last // 32 - first // 32 + 1
        sectors += 1
    assert machine.traffic["s", "write"].sectors == 32 * sectors
    assert machine.traffic["s", "read"].sectors == 3 * 32 * sectors
    assert machine.traffic["p", "read"].sectors == 32 * sectors


@settings(max_examples=20)
@given(small_problems)
def test_every_arithmetic_moves_the_same_bytes(problem: AttentionProblem) -> None:
    machines = [Machine("h100", arithmetic) for arithmetic in ("none", "reference", "device")]
    for machine in machines:
        naive_attention(machine, problem)
    assert machines[0].traffic == machines[1].traffic == machines[2].traffic


@pytest.mark.parametrize("arithmetic", ["none", "reference", "device"])
def test_without_keys_only_zeros_are_written(arithmetic: Any) -> None:
    machine = Machine("h100", arithmetic)
    result = naive_attention(machine, _problem(q_len=33, kv_len=0, heads=2))
    assert result.s.shape == result.p.shape == (1, 2, 33, 0)
    assert not result.o.any()
    assert [key for key, _ in machine.traffic.items()] == [("o", "write")]
    assert machine.ctas == 2 * 2


def test_shared_memory_and_head_dimensions() -> None:
    # As the compiler reports them for the kernels.
    assert [scores_shared_bytes(d) for d in (64, 128)] == [18432, 34816]
    assert [output_shared_bytes(d) for d in (64, 128)] == [16512, 28800]
    with pytest.raises(ShapeError, match="d is 16"):
        naive_attention(Machine("h100", "device"), _problem(kv_len=1, d=16))
