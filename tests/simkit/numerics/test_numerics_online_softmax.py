"""Laws of the online-softmax state, and its float32 merge done by hand in exact rationals."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import exact_arithmetic as exact
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit.errors import DtypeError, ShapeError
from simkit.numerics.exp2 import exp2, log2
from simkit.numerics.online_softmax import OnlineSoftmax

ROWS, D = 3, 4
LN2 = float(np.float32(0.6931472))


def softmax(scores: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Textbook output and natural LSE in float64 of base-2 ``scores``; rows without keys: 0."""
    weights = np.exp2(scores - scores.max(axis=1, keepdims=True, initial=-1e6))
    total = weights.sum(axis=1)
    with np.errstate(divide="ignore"):
        lse = (scores.max(axis=1, initial=-1e6) + np.log2(total)) * np.log(2)
    return weights @ v / np.where(total == 0, 1, total)[:, None], lse


def problem(seed: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((ROWS, keys)) * 20
    scores[rng.random((ROWS, keys)) < 0.2] = -np.inf
    return scores, rng.standard_normal((keys, D))


def seen(scores: np.ndarray, v: np.ndarray) -> OnlineSoftmax:
    return OnlineSoftmax.empty(ROWS, D).update(scores, v)


def assert_same(x: OnlineSoftmax, y: OnlineSoftmax) -> None:
    """Equal up to float64 rounding, of which at most a few dozen occur."""
    np.testing.assert_array_equal(x.m, y.m)
    np.testing.assert_allclose(x.l, y.l, rtol=1e-13)
    np.testing.assert_allclose(x.o, y.o, rtol=1e-12, atol=1e-12)


def assert_identical(x: OnlineSoftmax, y: OnlineSoftmax) -> None:
    for mine, theirs in ((x.m, y.m), (x.l, y.l), (x.o, y.o)):
        assert mine.dtype == theirs.dtype
        assert mine.tobytes() == theirs.tobytes()


cuts = st.lists(st.integers(0, 24), max_size=5).map(lambda c: sorted([0, *c, 24]))


@settings(max_examples=60)
@given(st.integers(0, 1000), cuts)
def test_updates_and_merges_in_any_split_give_softmax(seed: int, bounds: list[int]) -> None:
    scores, v = problem(seed, 24)
    parts = [slice(*pair) for pair in pairwise(bounds)]
    updated, merged = OnlineSoftmax.empty(ROWS, D), OnlineSoftmax.empty(ROWS, D)
    for part in parts:
        updated = updated.update(scores[:, part], v[part])
        merged = merged.merge(seen(scores[:, part], v[part]))
    output, lse = softmax(scores, v)
    for state in (updated, merged):
        np.testing.assert_allclose(state.output(), output, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(state.lse(), lse, rtol=1e-12)


@settings(max_examples=60)
@given(st.integers(0, 1000))
def test_merge_is_associative_and_commutative(seed: int) -> None:
    x, y, z = (seen(*problem(seed + i, 5)) for i in range(3))
    assert_same(x.merge(y), y.merge(x))
    assert_same(x.merge(y).merge(z), x.merge(y.merge(z)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_empty_is_neutral_to_the_bit(dtype: type) -> None:
    x = device_state(1) if dtype == np.float32 else seen(*problem(1, 9))
    empty = OnlineSoftmax.empty(ROWS, D, dtype)
    assert_identical(x.merge(empty), x)
    assert_identical(empty.merge(x), x)
    assert_identical(empty.merge(empty), empty)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_garbage_of_an_empty_split_is_ignored(dtype: type) -> None:
    x = OnlineSoftmax(
        np.array([1, 2, 3], dtype), np.array([1, 2, 3], dtype), np.ones((ROWS, D), dtype)
    )
    garbage = OnlineSoftmax(
        np.array([np.nan, np.inf, -np.inf], dtype),
        np.zeros(ROWS, dtype),
        np.full((ROWS, D), np.nan, dtype),
    )
    assert_identical(x.merge(garbage), x)
    assert_identical(garbage.merge(x), x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_are_independent(dtype: type) -> None:
    """One row empty on this side, one on the other, one on both, one on neither."""
    ninf = -np.inf
    x = OnlineSoftmax(
        np.array([ninf, 1, ninf, 1], dtype),
        np.array([0, 2, 0, 2], dtype),
        np.array([[0], [6], [0], [6]], dtype),
    )
    y = OnlineSoftmax(
        np.array([3, ninf, ninf, 2], dtype),
        np.array([4, 0, 0, 1], dtype),
        np.array([[8], [7], [7], [1]], dtype),
    )
    merged = x.merge(y)
    assert merged.m.tolist() == [3, 1, ninf, 2]
    assert merged.l.tolist() == [4, 2, 0, 2]
    assert merged.output().tolist() == [[2], [3], [0], [2]]
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(merged.lse(), np.log([4 * 8, 2 * 2, 0, 4 * 2]), rtol=1e-6)


def device_state(seed: int, rows: int = ROWS) -> OnlineSoftmax:
    rng = np.random.default_rng(seed)
    return OnlineSoftmax(
        (rng.standard_normal(rows) * 10).astype(np.float32),
        rng.uniform(1, 100, rows).astype(np.float32),
        rng.standard_normal((rows, D)).astype(np.float32),
    )


def test_float32_merge_is_the_documented_operations() -> None:
    x, y = device_state(2, 40), device_state(3, 40)
    y.m[:5] = x.m[:5]
    y.m[5:8] = x.m[5:8] - np.float32(300)  # decays to nothing
    merged = x.merge(y)
    to_float = exact.to_float
    for row in range(40):
        m1, m2 = float(x.m[row]), float(y.m[row])
        m = max(m1, m2)
        # float32 differences by fma; exp2 has tests of its own
        a, b = (float(exp2(to_float(exact.fma(v, 1.0, -m)))) for v in (m1, m2))
        assert float(merged.m[row]) == m
        pairs = [(x.l[row], y.l[row], merged.l[row])]
        pairs += [(x.o[row, i], y.o[row, i], merged.o[row, i]) for i in range(D)]
        for mine, theirs, got in pairs:
            product = to_float(exact.fma(float(theirs), b, -0.0))
            assert int(got.view(np.uint32)) == exact.fma(float(mine), a, product)


def test_float32_output_and_lse_are_the_documented_operations() -> None:
    state = device_state(4)
    output, lse = state.output(), state.lse()
    assert output.dtype == lse.dtype == np.float32
    for row in range(ROWS):
        for i in range(D):
            quotient = Fraction(float(state.o[row, i])) / Fraction(float(state.l[row]))
            assert int(output[row, i].view(np.uint32)) == exact.round_nearest_even(quotient)
        total = exact.to_float(exact.fma(float(log2(state.l)[row]), 1.0, float(state.m[row])))
        assert int(lse[row].view(np.uint32)) == exact.fma(total, LN2, -0.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nothing_seen(dtype: type) -> None:
    empty = OnlineSoftmax.empty(2, D, dtype)
    assert empty.output().tolist() == [[0] * D] * 2
    assert empty.lse().tolist() == [-np.inf] * 2
    if dtype == np.float64:
        masked = empty.update(np.full((2, 7), -np.inf), np.ones((7, D)))
        assert_identical(masked, empty)
        assert_identical(empty.update(np.ones((2, 0)), np.ones((0, D))), empty)


def test_float32_agrees_with_float64_to_its_precision() -> None:
    """Each merge adds a few roundings of relative size 2^-24 to l and to o."""
    narrow, wide = OnlineSoftmax.empty(ROWS, D, np.float32), OnlineSoftmax.empty(ROWS, D)
    scale = np.zeros((ROWS, D))
    for i in range(8):
        x = device_state(10 + i)
        narrow = narrow.merge(x)
        wide = wide.merge(OnlineSoftmax(*(v.astype(np.float64) for v in (x.m, x.l, x.o))))
        scale = np.maximum(scale, np.abs(x.o))
    np.testing.assert_allclose(narrow.l, wide.l, rtol=8 * 4 * 2**-24)
    # exp2(m1 - M) is off by the rounding of the difference too: |m| < 40, 2^-24 * 40 * ln 2
    bound = 8 * (4 + 40) * 2.0**-24 * 8 * scale.max()
    assert np.all(np.abs(narrow.o - wide.o) <= bound)


def test_errors() -> None:
    x = OnlineSoftmax.empty(ROWS, D)
    with pytest.raises(ShapeError, match=r"\(3, 4\).*\(2, 4\)"):
        x.merge(OnlineSoftmax.empty(2, D))
    with pytest.raises(DtypeError, match=r"float64.*float32"):
        x.merge(OnlineSoftmax.empty(ROWS, D, np.float32))
    with pytest.raises(DtypeError, match="float32"):
        OnlineSoftmax.empty(ROWS, D, np.float32).update(np.ones((ROWS, 1)), np.ones((1, D)))
    with pytest.raises(ShapeError, match=r"\(3, 2\), \(5, 4\)"):
        x.update(np.ones((ROWS, 2)), np.ones((5, D)))
    with pytest.raises(DtypeError, match="float16"):
        OnlineSoftmax.empty(ROWS, D, np.float16)
    with pytest.raises(ShapeError, match=r"\(3,\), \(2,\)"):
        OnlineSoftmax(np.zeros(3), np.zeros(2), np.zeros((3, 4)))
