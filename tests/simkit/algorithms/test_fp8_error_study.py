"""FlashAttention-3's error experiment: its helpers, and what each method's roundings do."""

from __future__ import annotations

import numpy as np
import pytest

from simkit.algorithms import fp8_error_study as study
from simkit.algorithms.fp8_error_study import (
    METHODS,
    Inputs,
    fp8_error_study,
    hadamard,
    quantize_e4m3,
    random_rotation,
    reference,
    round_e4m3,
)
from simkit.errors import ShapeError
from simkit.numerics.formats import decode_e4m3, encode_e4m3


@pytest.mark.parametrize("d", [1, 2, 64, 128, 256])
def test_hadamard_is_orthogonal(d: int) -> None:
    matrix = hadamard(d).astype(np.float64)
    np.testing.assert_allclose(np.abs(matrix), d**-0.5, rtol=1e-7)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(d), atol=1e-6)
    rotation = random_rotation(np.random.default_rng(d), d).astype(np.float64)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(d), atol=1e-6)


def test_rotation_spreads_an_outlier_and_keeps_scores() -> None:
    rng = np.random.default_rng(0)
    rotation = random_rotation(rng, 64)
    x = np.zeros((1, 64), np.float32)
    x[0, 5] = 16
    assert np.abs(x @ rotation).tolist() == [[2.0] * 64]
    q, k = rng.standard_normal((2, 10, 64)).astype(np.float32)
    np.testing.assert_allclose((q @ rotation) @ (k @ rotation).T, q @ k.T, atol=1e-5)


@pytest.mark.parametrize("d", [0, 3, 96])
def test_hadamard_refuses(d: int) -> None:
    with pytest.raises(ShapeError, match="power of two"):
        hadamard(d)


def test_round_e4m3_is_the_codec() -> None:
    values = decode_e4m3(np.arange(256, dtype=np.uint8))
    values = np.sort(values[np.isfinite(values)])
    between = ((values[1:] + values[:-1]) / 2).astype(np.float32)  # ties
    edges = np.concatenate((values, between, [1e9, -1e9, 1e-30, 448.1, 464, 2.0**-9, 2.0**-10]))
    for x in (
        edges.astype(np.float32),
        np.nextafter(between, np.float32(np.inf)),
        np.nextafter(between, np.float32(-np.inf)),
        np.random.default_rng(1).standard_normal(10_000).astype(np.float32) * np.float32(0.05),
    ):
        np.testing.assert_array_equal(round_e4m3(x), decode_e4m3(encode_e4m3(x)))


def test_scales_by_block_and_by_tensor() -> None:
    x = np.ones((6, 4), np.float32)
    x[1, 2], x[4, 0] = -44.8, 448.0
    by_block = quantize_e4m3(x, 4)
    np.testing.assert_allclose(by_block.scales, [0.1] * 4 + [1.0] * 2, rtol=1e-6)
    assert by_block.values[1, 2] == -448
    np.testing.assert_allclose(by_block.values * by_block.scales[:, None], x, rtol=2.0**-4)
    assert quantize_e4m3(x).scales.tolist() == [1.0] * 6
    assert quantize_e4m3(np.zeros((2, 2), np.float32)).values.tolist() == [[0, 0], [0, 0]]


def test_distribution_of_the_inputs() -> None:
    x = study.with_outliers(np.random.default_rng(2), (1000, 1000))
    assert np.var(x) == pytest.approx(1 + 100 * 0.001, rel=0.02)
    # |N(0, 101)| exceeds 6 with probability 0.55; N(0, 1) does not.
    assert np.mean(np.abs(x) > 6) == pytest.approx(0.001 * 0.5505, rel=0.15)


def test_a_part_of_the_queries_estimates_all() -> None:
    rng = np.random.default_rng(3)
    inputs = Inputs.random(rng, 3000, 64, 300)
    assert inputs.shares.sum() == pytest.approx(1)
    assert len(np.unique(inputs.computed)) == len(inputs.computed) < 800
    size = np.abs(inputs.q).max(axis=1)
    assert set(np.flatnonzero(size > 6)) <= set(inputs.computed)
    everything = Inputs.random(np.random.default_rng(3), 3000, 64, 3000)
    assert sorted(everything.computed) == list(range(3000))
    np.testing.assert_allclose(everything.shares, 1 / 3000)
    estimate, all_of_it = (i.rms(reference(i)) for i in (inputs, everything))
    assert estimate == pytest.approx(all_of_it, rel=0.05)


def test_reference_by_hand() -> None:
    q, k = np.array([[2.0, 0.0]]), np.array([[np.sqrt(2) * np.log(3) / 2, 0.0], [0.0, 7.0]])
    inputs = Inputs(q, k, np.array([[4.0, 0.0], [0.0, 8.0]]), np.array([0]), np.ones(1))
    np.testing.assert_allclose(reference(inputs), [[3.0, 2.0]])


def test_flash_without_rounding_is_exact_attention() -> None:
    inputs = Inputs.random(np.random.default_rng(4), 300, 64, 300)
    q, k, v = (
        study.Quantized(x.astype(np.float32), np.ones(len(x), np.float32))
        for x in (inputs.q, inputs.k, inputs.v)
    )
    for shift in (0, 8):
        found = study.flash(inputs, q, k, v, 112, lambda x: x, lambda x: x, shift)
        assert inputs.rms(found - reference(inputs)) < 2e-6


def test_errors_are_ordered_as_published() -> None:
    rows = {row.method.strip(): row.rmse for row in fp8_error_study(1024, 128, 200, seed=1).rows}
    assert len(rows) == len(METHODS) == 7
    assert rows["FlashAttention-2 fp16"] < rows["standard fp16"] < 1e-3
    assert rows["FlashAttention-3 fp16"] == pytest.approx(rows["FlashAttention-2 fp16"], rel=0.02)
    for worse in ("standard fp8", "without rotation"):
        assert rows["FlashAttention-3 fp8"] < rows[worse]
    assert rows["FlashAttention-3 fp8"] > 10 * rows["standard fp16"]


def test_same_seed_same_table() -> None:
    assert fp8_error_study(200, 64, 20, 5) == fp8_error_study(200, 64, 20, 5)
    assert fp8_error_study(200, 64, 20, 5) != fp8_error_study(200, 64, 20, 6)


@pytest.mark.parametrize(("sizes", "text"), [((8, 96, 8), "d is 96"), ((0, 64, 8), "at least 1")])
def test_study_refuses(sizes: tuple[int, int, int], text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        fp8_error_study(*sizes)
