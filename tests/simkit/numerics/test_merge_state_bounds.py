"""Bounds of merges: they hold, they are close, they nest, and wrong merges exceed them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit.algorithms.merge_states import State, merge_reference, merged
from simkit.algorithms.problem import BF16
from simkit.numerics.merge_state_bounds import ROUNDINGS, BoundedState, merge_bounded

SPREADS = (0.0, 0.5, 4.0, 40.0, 300.0, 1e4, 1e37)


def states(rows: int, count: int, spread: float, empty: float, seed: int) -> State:
    rng = np.random.default_rng(seed)
    lse = (rng.standard_normal((rows, count)) * spread).astype(np.float32)
    lse[rng.random(lse.shape) < empty] = -np.inf
    return State(rng.standard_normal((rows, count, 16)).astype(np.float32), lse)


def bounded(state: State) -> list[BoundedState]:
    return [BoundedState.exact(state.o[:, n], state.lse[:, n]) for n in range(state.lse.shape[1])]


def errors(found: State, exact: BoundedState | State) -> tuple[np.ndarray, np.ndarray]:
    """Of o and lse; those of equal infinities are 0."""
    o = np.abs(found.o.astype(np.float64) - exact.o)
    with np.errstate(invalid="ignore"):
        lse = np.where(found.lse == exact.lse, 0.0, np.abs(found.lse - exact.lse))
    return o, lse


@settings(max_examples=150)
@given(
    st.integers(1, 20),
    st.sampled_from(SPREADS),
    st.sampled_from((0.0, 0.3, 1.0)),
    st.integers(0, 2**16),
)
def test_merges_are_within_their_bounds(count: int, spread: float, empty: float, seed: int) -> None:
    given_states = states(3, count, spread, empty, seed)
    bounds = merge_bounded(bounded(given_states))
    reference = merge_reference(given_states.o, given_states.lse)
    np.testing.assert_allclose(bounds.o, reference.o, rtol=0, atol=1e-14)
    np.testing.assert_array_equal(np.isneginf(bounds.lse), np.isneginf(reference.lse))
    o, lse = errors(merged(given_states.o, given_states.lse), reference)
    assert (o <= bounds.o_error).all()
    assert (lse <= bounds.lse_error).all()
    # What is copied has no error at all.
    alone = (~np.isneginf(given_states.lse)).sum(axis=1) <= 1
    assert not bounds.o_error[alone].any()
    assert not bounds.lse_error[alone].any()


def tree(leaves: list[Any], join: Callable[[list[Any]], Any], splits: list[int]) -> Any:
    """Neighbours joined at the places ``splits`` one after another, then all that is left."""
    leaves = list(leaves)
    for place in splits:
        if len(leaves) > 1:
            at = place % (len(leaves) - 1)
            leaves[at : at + 2] = [join(leaves[at : at + 2])]
    return join(leaves)


@settings(max_examples=150)
@given(
    st.integers(2, 9),
    st.lists(st.integers(0, 20), max_size=8),
    st.sampled_from(SPREADS),
    st.integers(0, 2**16),
)
def test_merges_of_merges_are_within_theirs(
    count: int, splits: list[int], spread: float, seed: int
) -> None:
    given_states = states(3, count, spread, 0.2, seed)
    parts = [State(given_states.o[:, n], given_states.lse[:, n]) for n in range(count)]

    def join(some: list[State]) -> State:
        return merged(np.stack([s.o for s in some], 1), np.stack([s.lse for s in some], 1))

    found = tree(parts, join, splits)
    bounds = tree(bounded(given_states), merge_bounded, splits)
    o, lse = errors(found, merge_reference(given_states.o, given_states.lse))
    assert (o <= bounds.o_error).all()
    assert (lse <= bounds.lse_error).all()


@pytest.mark.parametrize("count", [2, 5, 17])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_the_bounds_are_close(count: int, spread: float) -> None:
    given_states = states(200, count, spread, 0.0, count)
    bounds = merge_bounded(bounded(given_states))
    reference = merge_reference(given_states.o, given_states.lse)
    o, lse = errors(merged(given_states.o, given_states.lse), reference)
    assert 0.1 < np.max(o / bounds.o_error) <= 1
    assert 0.1 < np.max(lse / bounds.lse_error) <= 1


@pytest.mark.parametrize("dtype", sorted(ROUNDINGS, key=str))
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_scaled_and_stored_outputs(dtype: np.dtype[Any], scale: float) -> None:
    given_states = states(100, 3, 1.0, 0.0, 5)
    factor = np.float32(scale)
    bounds = merge_bounded(bounded(given_states), v_scale=float(factor), dtype=dtype)
    exact = merge_reference(given_states.o, given_states.lse).o * float(factor)
    found = merged(given_states.o, given_states.lse).o * factor
    ratio = np.abs(found.astype(dtype).astype(np.float64) - exact) / bounds.o_error
    assert 0.2 < np.max(ratio) <= 1


@pytest.mark.parametrize(
    ("o_error", "lse_error", "o_moves", "lse_moves"),
    [
        (0.25, 0.0, 0.125, 0.0),  # half of it, the state's weight
        (0.0, 1e-3, 0.25e-3, 0.5e-3),  # d/de of 1 / (1 + exp(e)) and of ln(1 + exp(e)), at 0
    ],
)
def test_errors_of_states_are_carried(
    o_error: float, lse_error: float, o_moves: float, lse_moves: float
) -> None:
    """Two states of the same LSE with the outputs 0 and 1, the first one off."""
    zero, number = np.zeros((1, 1)), np.zeros(1)
    off = BoundedState(zero, number, np.full((1, 1), o_error), np.full(1, lse_error))
    bounds = merge_bounded([off, BoundedState.exact(zero + 1, number)])
    assert bounds.o_error[0, 0] == pytest.approx(o_moves, rel=2e-3)
    assert bounds.lse_error[0] == pytest.approx(lse_moves, rel=2e-3, abs=1e-6)


def test_undefined_rows_have_no_bound_to_speak_of() -> None:
    given_states = states(2, 2, 1.0, 0.0, 0)
    given_states.lse[0, 0] = np.nan
    bounds = merge_bounded(bounded(given_states))
    assert np.isnan(bounds.lse[0])
    assert bounds.lse_error[0] == 0
    assert (bounds.o_error[0] == 0).all()
    assert bounds.lse_error[1] > 0


@pytest.mark.parametrize("spread", [0.5, 40.0])
def test_a_slightly_wrong_merge_exceeds_them(spread: float) -> None:
    """Weights from e^x with 2^-18 too much of the exponent."""
    given_states = states(50, 3, spread, 0.0, 1)
    bounds = merge_bounded(bounded(given_states))
    wrong = merged(given_states.o, given_states.lse * np.float32(1 + 2.0**-18))
    o, _ = errors(wrong, merge_reference(given_states.o, given_states.lse))
    assert (o > bounds.o_error).any()


def test_bf16_is_a_rounding_of_its_own() -> None:
    one = states(4, 1, 1.0, 0.0, 3)
    bounds = merge_bounded(bounded(one), dtype=BF16)
    error = np.abs(one.o[:, 0].astype(BF16).astype(np.float64) - one.o[:, 0])
    assert (error <= bounds.o_error).all()
    assert (bounds.o_error <= 2.0**-8 * np.abs(one.o[:, 0]) + 2.0**-134).all()
