"""The FlashAttention model: exact in float64, within its precision on the device, bytes as FA-2."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_cases import (
    BF16_ROUNDOFF,
    FLOAT32_SLACK,
    float64,
    problems,
    rms,
    weighted_magnitude,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit.algorithms.flash_attention import Tile, flash_attention, grid
from simkit.algorithms.problem import BF16, AttentionProblem, attention_reference
from simkit.errors import CapacityError, ShapeError
from simkit.machine.machine import Machine
from simkit.numerics.exp2 import LN2
from simkit.numerics.formats import round_bf16

TILE_SIZES = st.integers(1, 80)


def _problem(seed: int = 0, **sizes: Any) -> AttentionProblem:
    return AttentionProblem.random(np.random.default_rng(seed), **sizes)


@settings(max_examples=60)
@given(problems(d=(8, 64)), TILE_SIZES, TILE_SIZES)
def test_exact_for_every_tiling(problem: AttentionProblem, q_tile: int, kv_tile: int) -> None:
    result = flash_attention(Machine("h100"), problem, Tile(q_tile, kv_tile))
    o, lse = attention_reference(problem)
    np.testing.assert_allclose(result.o, o, rtol=0, atol=1e-12)
    np.testing.assert_allclose(result.lse, lse, rtol=0, atol=1e-12)


@settings(max_examples=60)
@given(problems())
def test_device_arithmetic_is_within_its_precision(problem: AttentionProblem) -> None:
    result = flash_attention(Machine("h100", "device"), problem)
    assert result.o.dtype == BF16
    assert result.lse.dtype == np.float32
    o, lse = attention_reference(problem)
    # The weights and the output are rounded to bfloat16, once each.
    bound = (2 * BF16_ROUNDOFF + FLOAT32_SLACK) * weighted_magnitude(problem, lse)
    assert np.all(np.abs(float64(result.o) - o) <= bound)
    empty = np.isneginf(lse)
    assert np.array_equal(np.isneginf(result.lse), empty)
    error = np.abs(float64(result.lse)[~empty] - lse[~empty])
    assert np.all(error <= FLOAT32_SLACK * (1 + np.abs(lse[~empty])))


@pytest.mark.parametrize("gpu", ["a100", "h100", "b200"])
def test_device_error_is_that_of_its_precision(gpu: str) -> None:
    problem = _problem(q_len=128, kv_len=256, heads=2, d=128, causal=True)
    o, _ = attention_reference(problem)
    error = rms(float64(flash_attention(Machine(gpu, "device"), problem).o) - o)
    assert error <= 1.25 * rms(_with_bf16_weights(problem) - o)


def _with_bf16_weights(problem: AttentionProblem) -> np.ndarray[Any, Any]:
    """The formula in float64, but for the weights and the output in bfloat16."""
    q, k, v = (float64(x) for x in (problem.q, problem.k, problem.v))
    scores = np.einsum("bihd,bjhd->bhij", q, k) * problem.scale
    visible = problem.mask(slice(0, problem.q_len), slice(0, problem.kv_len))
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    rounded = float64(round_bf16(weights.astype(np.float32)))
    o = np.einsum("bhij,bjhd->bihd", rounded, v) / np.moveaxis(weights.sum(-1), 1, 2)[..., None]
    return float64(round_bf16(o.astype(np.float32)))


@pytest.mark.parametrize("d", [64, 128])
def test_one_key_is_copied(d: int) -> None:
    problem = _problem(q_len=65, kv_len=1, heads=2, kv_heads=1, d=d)
    result = flash_attention(Machine("h100", "device"), problem)
    assert np.array_equal(result.o, np.broadcast_to(problem.v, result.o.shape))
    # Its weight is 2^0; what is left of the LSE is the score, scaled twice.
    score = np.einsum("bihd,bjd->bhi", float64(problem.q), float64(problem.k[:, :, 0]))
    expected = score.astype(np.float32) * problem.scale_log2 * LN2
    np.testing.assert_allclose(result.lse, expected, rtol=2e-6, atol=1e-6)


def test_equal_scores_average_exactly() -> None:
    # 2^7 keys of weight 1 and values that are small integers: every step is exact.
    v = np.arange(128).reshape(1, 128, 1, 1) + np.zeros((1, 1, 1, 64))
    problem = AttentionProblem(
        np.zeros((1, 3, 1, 64), BF16), np.ones((1, 128, 1, 64), BF16), v.astype(BF16)
    )
    result = flash_attention(Machine("h100", "device"), problem)
    assert np.all(result.o == np.float32(63.5))
    np.testing.assert_array_equal(result.lse, np.float32(7) * LN2)


def test_heads_that_share_keys_equal_heads_with_copies() -> None:
    shared = _problem(batch=2, q_len=70, kv_len=130, heads=6, kv_heads=2, causal=True)
    copies = AttentionProblem(
        shared.q, np.repeat(shared.k, 3, axis=2), np.repeat(shared.v, 3, axis=2), causal=True
    )
    results = [flash_attention(Machine("h100", "device"), x) for x in (shared, copies)]
    assert np.array_equal(results[0].o, results[1].o)
    assert np.array_equal(results[0].lse, results[1].lse)


def test_heads_and_batches_are_independent() -> None:
    problem = _problem(batch=2, q_len=70, kv_len=130, heads=2)
    together = flash_attention(Machine("h100", "device"), problem)
    for batch, head in np.ndindex(2, 2):
        b, h = slice(batch, batch + 1), slice(head, head + 1)
        alone = AttentionProblem(problem.q[b, :, h], problem.k[b, :, h], problem.v[b, :, h])
        result = flash_attention(Machine("h100", "device"), alone)
        assert np.array_equal(result.o, together.o[b, :, h])
        assert np.array_equal(result.lse, together.lse[b, h])


@settings(max_examples=40)
@given(problems(), TILE_SIZES, TILE_SIZES)
def test_bytes_are_those_of_flash_attention_2(
    problem: AttentionProblem, q_tile: int, kv_tile: int
) -> None:
    # Elements of a head: N d (Q once) + T_r 2 N d (K, V) + N d (O) + N (LSE).
    machine = Machine("h100", "none")
    dense = AttentionProblem(problem.q, problem.k, problem.v)
    flash_attention(machine, dense, Tile(q_tile, kv_tile))
    heads, row_tiles = problem.batch * problem.heads, -(-problem.q_len // q_tile)
    q_bytes = heads * problem.q_len * problem.d * 2
    kv_bytes = heads * row_tiles * problem.kv_len * problem.d * 2
    expected = {
        ("q", "read"): q_bytes,
        ("k", "read"): kv_bytes,
        ("v", "read"): kv_bytes,
        ("o", "write"): q_bytes,
        ("lse", "write"): heads * problem.q_len * 4,
    }
    moved = {key: row.requested for key, row in machine.traffic.items()}
    assert moved == {key: size for key, size in expected.items() if size}
    for name in "qkvo":
        for key, row in machine.traffic.items():
            assert key[0] != name or row.sectors == row.requested
    assert machine.ctas == heads * row_tiles == np.prod(grid(dense, Tile(q_tile, kv_tile)))


@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_causal_skips_the_tiles_above_the_diagonal(tiles: int) -> None:
    machine = Machine("h100", "none")
    flash_attention(machine, _problem(q_len=64 * tiles, kv_len=64 * tiles, causal=True))
    visited = tiles * (tiles + 1) // 2
    assert machine.traffic["k", "read"].requested == visited * 64 * 64 * 2
    assert machine.traffic["v", "read"].requested == visited * 64 * 64 * 2


def test_lse_sectors() -> None:
    # 70 rows a head, 280 bytes: warps of 32, 32 and 6 rows; the second head starts at byte 280.
    machine = Machine("h100", "none")
    flash_attention(machine, _problem(q_len=70, kv_len=64, heads=2))
    first = 4 + 4 + 1  # bytes 0 .. 127, 128 .. 255, 256 .. 279
    second = 5 + 5 + 2  # bytes 280 .. 407, 408 .. 535, 536 .. 559: 24 into a sector, each
    assert machine.traffic["lse", "write"].requested == 2 * 70 * 4
    assert machine.traffic["lse", "write"].sectors == 32 * (first + second)


@settings(max_examples=25)
@given(problems())
def test_every_arithmetic_moves_the_same_bytes(problem: AttentionProblem) -> None:
    machines = [Machine("h100", arithmetic) for arithmetic in ("none", "reference", "device")]
    for machine in machines:
        flash_attention(machine, problem)
    assert machines[0].traffic == machines[1].traffic == machines[2].traffic
    assert machines[0].ctas == machines[1].ctas == machines[2].ctas


def test_shared_memory() -> None:
    machine = Machine("h100", "none")
    flash_attention(machine, _problem(q_len=1, kv_len=1, d=128))
    assert machine.sram_peak == 5 * 64 * 128 * 2 + 64 * 4
    with pytest.raises(CapacityError, match="shared memory"):
        flash_attention(Machine("h100"), _problem(q_len=1, kv_len=1, d=128), Tile(512, 256))


def test_device_arithmetic_is_defined_for_the_kernel_only() -> None:
    with pytest.raises(ShapeError, match="d is 32"):
        flash_attention(Machine("h100", "device"), _problem(q_len=1, kv_len=1, d=32))
    with pytest.raises(ShapeError, match="kv=32"):
        flash_attention(Machine("h100", "device"), _problem(q_len=1, kv_len=1), Tile(64, 32))
    with pytest.raises(ShapeError, match="q=0"):
        Tile(0, 64)
