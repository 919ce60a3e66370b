"""LSE conventions: what each library's numbers mean, there and back, and what mixing them does."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from simkit.algorithms.merge_states import merged
from simkit.algorithms.problem import BF16, AttentionProblem, attention_reference
from simkit.errors import DtypeError, SimkitError
from simkit.numerics.arrays import Float32Array, Float64Array
from simkit.numerics.bounds import U_BF16
from simkit.numerics.lse import (
    CONVENTIONS,
    conversion_error,
    from_natural,
    round_trip_error,
    to_natural,
)
from simkit.numerics.merge_state_bounds import BoundedState, merge_bounded

INF, NAN = float("inf"), float("nan")
NAMES = st.sampled_from(sorted(CONVENTIONS))
# Of rows with keys; beyond, base 2 has no number.
FINITE = st.floats(-(2.0**127), 2.0**127, width=32)
NATURAL = hnp.arrays(
    np.float32, st.integers(1, 20), elements=FINITE | st.sampled_from((-INF, NAN, -0.0))
)


def floats(*values: float) -> Float32Array:
    return np.array(values, np.float32)


def test_what_each_convention_is() -> None:
    """Base and rows without keys, as the libraries' sources have them."""
    assert {name: (row.base, row.empty) for name, row in CONVENTIONS.items()} == {
        "simkit": ("e", -INF),
        "flash_attention_2": ("e", INF),
        "flash_attention_2_split": ("e", -INF),
        "flash_attention_3": ("e", -INF),
        "flashinfer": ("2", -INF),
        "flashinfer_mla_base_e": ("e", -INF),
        "flashmla_decode": ("e", INF),
        "flashmla_split": ("2", -INF),
        "flashmla_prefill": ("e", INF),
        "flashmla_prefill_2025": ("2", -INF),
    }


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("flash_attention_2", (math.log(8), INF, NAN)),
        ("flash_attention_3", (math.log(8), -INF, NAN)),
        ("flashinfer", (3.0, -INF, NAN)),
        ("flashmla_decode", (math.log(8), INF, NAN)),
        ("flashmla_split", (3.0, -INF, NAN)),
    ],
)
def test_eight_equal_keys_no_key_and_a_nan(name: str, theirs: tuple[float, ...]) -> None:
    ours = floats(math.log(8), -INF, NAN)
    np.testing.assert_array_almost_equal_nulp(from_natural(ours, name)[:1], floats(theirs[0]), 1)
    np.testing.assert_array_equal(from_natural(ours, name)[1:], theirs[1:])
    np.testing.assert_array_almost_equal_nulp(to_natural(floats(*theirs), name)[:1], ours[:1], 1)
    np.testing.assert_array_equal(to_natural(floats(*theirs), name)[1:], ours[1:])


@given(NATURAL, NAMES)
def test_there_and_back(lse: Float32Array, name: str) -> None:
    back = to_natural(from_natural(lse, name), name)
    assert back.dtype == np.float32
    finite = np.isfinite(lse)
    np.testing.assert_array_equal(back[~finite], lse[~finite])
    exact = lse[finite].astype(np.float64)
    assert (np.abs(back[finite] - exact) <= round_trip_error(exact, name)).all()
    if CONVENTIONS[name].base == "e":
        assert (back[finite].view(np.uint32) == lse[finite].view(np.uint32)).all()


@given(NATURAL, NAMES)
def test_one_conversion_is_within_its_bound(lse: Float32Array, name: str) -> None:
    lse = lse[np.isfinite(lse)]
    unit = {"e": 1.0, "2": math.log(2)}[CONVENTIONS[name].base]  # of theirs, in natural ones
    for ours, theirs in (
        (lse, from_natural(lse, name)),
        (to_natural(lse, name), lse),
    ):
        found, exact = (x.astype(np.float64) for x in (ours, theirs))
        error = np.abs(exact * unit - found)
        # The product with ln 2 in float64 here rounds, too.
        allowed = conversion_error(found, name) * (1 + 2.0**-20) + np.abs(found) * 2.0**-52
        assert (error <= allowed).all()


def test_the_bounds_are_close() -> None:
    lse = np.random.default_rng(0).uniform(-100, 100, 10_000).astype(np.float32)
    exact = lse.astype(np.float64)
    back = to_natural(from_natural(lse, "flashinfer"), "flashinfer")
    assert np.max(np.abs(back - exact) / round_trip_error(exact, "flashinfer")) > 0.5
    there = from_natural(lse, "flashinfer").astype(np.float64) * math.log(2)
    assert np.max(np.abs(there - exact) / conversion_error(exact, "flashinfer")) > 0.5


@pytest.mark.parametrize("convert", [to_natural, from_natural])
def test_unknown_names_list_what_there_is(convert: object) -> None:
    with pytest.raises(SimkitError, match=r"no LSE convention 'fa2'.*flash_attention_2, .*flashi"):
        convert(floats(1), "fa2")  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "foreign", "others"),
    [
        ("flash_attention_3", INF, "inf in flash_attention_2, flashmla_decode"),
        ("flashinfer", INF, "inf in flash_attention_2, flashmla_decode"),
        ("flash_attention_2", -INF, "-inf in simkit, flash_attention_2_split"),
        ("flashmla_decode", -INF, "-inf in simkit, flash_attention_2_split"),
    ],
)
def test_the_wrong_infinity_is_noticed(name: str, foreign: float, others: str) -> None:
    """What tells conventions apart at all: an infinity that the named one does not have."""
    lse = np.zeros((3, 2), np.float32)
    lse[2, 1] = foreign
    with pytest.raises(SimkitError, match=rf"lse\[2, 1\] = {foreign}, .*{name}.*{others}"):
        to_natural(lse, name)


def test_other_refusals() -> None:
    with pytest.raises(SimkitError, match=r"lse\[1\] = inf, .*'simkit'"):
        from_natural(floats(0, INF), "flash_attention_2")
    with pytest.raises(SimkitError, match=r"lse\[0\] = 3\.00000001e\+38 has no base-2 number"):
        from_natural(floats(3e38), "flashinfer")
    with pytest.raises(DtypeError, match="float64"):
        to_natural(np.zeros(2), "flashinfer")


class TestMixing:
    """A prefix of 4096 keys and a chunk of 512, attended to apart and merged."""

    def states(self) -> tuple[BoundedState, Float64Array]:
        """o [heads, 2, d] and lse [heads, 2], rounded to bfloat16 and float32 with their errors;
        and attention to all keys.
        """
        problem = AttentionProblem.random(np.random.default_rng(0), kv_len=4608, heads=8)
        parts = [
            attention_reference(AttentionProblem(problem.q, problem.k[:, keys], problem.v[:, keys]))
            for keys in (slice(0, 4096), slice(4096, None))
        ]
        o = np.stack([part[0][0, 0] for part in parts], axis=1)
        lse = np.stack([part[1][0, :, 0] for part in parts], axis=1)
        lse_error = np.abs(lse - lse.astype(np.float32)) + 2 * conversion_error(lse, "flashinfer")
        state = BoundedState(o, lse, U_BF16 * np.abs(o), lse_error)
        return state, attention_reference(problem)[0][0, 0]

    def error(self, state: BoundedState, lse: Float32Array, exact: Float64Array) -> Float64Array:
        o = state.o.astype(BF16).astype(np.float32)
        return np.abs(merged(o, lse).o.astype(BF16).astype(np.float64) - exact)

    def test_base_2_taken_for_a_natural_logarithm(self) -> None:
        state, exact = self.states()
        natural = state.lse.astype(np.float32)
        # The chunk came from FlashInfer, the prefix from FlashAttention.
        theirs = natural.copy()
        theirs[:, 1] = from_natural(natural[:, 1], "flashinfer")
        right = theirs.copy()
        right[:, 1] = to_natural(theirs[:, 1], "flashinfer")

        parts = [
            BoundedState(state.o[:, n], state.lse[:, n], state.o_error[:, n], state.lse_error[:, n])
            for n in range(2)
        ]
        bound = merge_bounded(parts, dtype=BF16).o_error
        converted, mixed = (self.error(state, lse, exact) for lse in (right, theirs))
        assert (converted <= bound).all()
        assert converted.max() < 5e-4
        assert mixed.max() > 0.1
        assert (mixed > bound).mean() > 0.9

    def test_plus_infinity_taken_for_a_number(self) -> None:
        """A chunk of which a row saw no key, from FlashAttention-2."""
        state, _ = self.states()
        o, lse = state.o.astype(np.float32), state.lse.astype(np.float32)
        theirs = lse.copy()
        theirs[0, 1] = INF
        assert np.isnan(merged(o, theirs).o[0]).all()
        converted = merged(o, to_natural(theirs, "flash_attention_2"))
        np.testing.assert_array_equal(converted.o[0], o[0, 0])
        assert converted.lse[0] == lse[0, 0]
