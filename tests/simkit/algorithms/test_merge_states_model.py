"""The merging model: states of parts of the keys merge to attention to all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attention_cases import problems
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit.algorithms.merge_states import (
    State,
    merge_partial,
    merge_reference,
    merge_state,
    merge_state_in_place,
    merge_states,
    merge_states_variable,
    merged,
)
from simkit.algorithms.problem import BF16, AttentionProblem, attention_reference
from simkit.errors import DtypeError, ShapeError, TableError
from simkit.machine.machine import Machine
from simkit.machine.memory import unbacked

INF = np.float32(np.inf)


def states(
    *shape: int, d: int = 64, empty: float = 0.0, seed: int = 0, dtype: Any = np.float32
) -> State:
    """Random ones; those without keys hold NaN."""
    rng = np.random.default_rng(seed)
    lse = (rng.standard_normal(shape) * 3).astype(np.float32)
    lse[rng.random(shape) < empty] = -INF
    o = rng.standard_normal((*shape, d)).astype(dtype)
    o[np.isneginf(lse)] = np.nan
    return State(o, lse)


def moved(machine: Machine) -> dict[tuple[str, str], tuple[int, int]]:
    return {key: (row.requested, row.sectors) for key, row in machine.traffic.items()}


@settings(max_examples=40)
@given(problems(d=(8,), max_q_len=5, max_kv_len=60), st.data())
def test_parts_of_the_keys_merge_to_all_of_them(
    problem: AttentionProblem, data: st.DataObject
) -> None:
    """Parts may be empty; a causal mask hides some of them from some queries."""
    edges = sorted(data.draw(st.lists(st.integers(0, problem.kv_len), max_size=3), label="edges"))
    bounds = [0, *edges, problem.kv_len]
    o, lse = attention_reference(problem)
    parts = []
    for start, stop in itertools.pairwise(bounds):
        # Hidden keys instead of left-out ones, so that the mask stays where it is.
        seen = np.zeros(problem.kv_len, bool)
        seen[start:stop] = True
        parts.append(_attention_to(problem, seen))
    stacked = State(
        np.stack([part.o for part in parts], axis=-2), np.stack([part.lse for part in parts], -1)
    )
    whole = merge_reference(stacked.o, stacked.lse)
    np.testing.assert_allclose(whole.o, o, rtol=0, atol=1e-12)
    np.testing.assert_allclose(whole.lse, lse.swapaxes(1, 2), rtol=0, atol=1e-12)


def _attention_to(problem: AttentionProblem, seen: np.ndarray) -> State:
    """By the formula, to the keys ``seen`` only; [batch, q_len, heads(, d)]."""
    q = problem.q.astype(np.float64)
    k, v = (np.repeat(x.astype(np.float64), problem.group, axis=2) for x in (problem.k, problem.v))
    visible = problem.mask(slice(0, problem.q_len), slice(0, problem.kv_len)) & seen
    scores = np.einsum("bihd,bjhd->bihj", q, k) * problem.scale
    weights = np.exp(scores) * visible[:, None]
    total = weights.sum(axis=-1)
    o = np.einsum("bihj,bjhd->bihd", weights, v) / np.where(total == 0, 1, total)[..., None]
    with np.errstate(divide="ignore"):
        return State(o, np.log(total))


def test_two_states_by_hand() -> None:
    o = np.array([[1, 2], [3, -4]], np.float32)
    equal = merged(o, np.array([5, 5], np.float32))
    np.testing.assert_array_equal(equal.o, [2, -1])
    assert equal.lse == np.float32(5 + np.log(2))
    # Weights 1 and e^-30; 2^-24 is half an ulp of 1.
    far = merged(o, np.array([0, -30], np.float32))
    np.testing.assert_array_equal(far.o, np.float32([1 + 2 * np.exp(-30), 2 - 6 * np.exp(-30)]))
    assert far.lse == 0
    none = merged(np.full((2, 2), np.nan, np.float32), np.array([-INF, -INF]))
    np.testing.assert_array_equal(none.o, [0, 0])
    assert np.isneginf(none.lse)


def test_a_state_alone_is_copied_for_every_kind_of_number() -> None:
    """All exponents and signs, subnormal numbers, zeros and infinities, beside any LSE."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, (4096, 64), dtype=np.uint64).astype(np.uint32)
    bits[:4] = np.array([0, 1 << 31, 1, 0x7F800000], np.uint32)[:, None]
    o = bits.view(np.float32)
    o[np.isnan(o)] = 0
    lse = rng.integers(0, 1 << 32, 4096, dtype=np.uint64).astype(np.uint32).view(np.float32)
    lse[~np.isfinite(lse)] = 1
    lse[:2] = 0, 1e-45
    alone = merged(o[:, None], lse[:, None])
    np.testing.assert_array_equal(alone.o.view(np.uint32), o.view(np.uint32))
    np.testing.assert_array_equal(alone.lse.view(np.uint32), lse.view(np.uint32))


def test_the_one_bit_that_changes() -> None:
    """log2(1) is +0, and -0 + +0 is +0; the sign of a zero in o stays."""
    alone = merged(np.full((1, 2), -0.0, np.float32), np.array([-0.0], np.float32))
    assert np.signbit(alone.o).all()
    assert not np.signbit(alone.lse)


@given(st.integers(0, 5), st.integers(0, 3), st.integers(0, 2**16))
def test_states_without_keys_change_nothing(count: int, more: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    one = states(3, count, seed=seed, empty=0.3)
    places = rng.integers(0, count + 1, more)
    other = State(
        np.insert(one.o, places, rng.choice([np.nan, np.inf, 7]), axis=1),
        np.insert(one.lse, places, -np.inf, axis=1),
    )
    a, b = merged(one.o, one.lse), merged(other.o, other.lse)
    np.testing.assert_array_equal(a.o.view(np.uint32), b.o.view(np.uint32))
    np.testing.assert_array_equal(a.lse.view(np.uint32), b.lse.view(np.uint32))


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_an_lse_that_is_no_number_makes_none(special: float) -> None:
    one = states(2, 3)
    one.lse[0, 1] = special
    found = merged(one.o, one.lse)
    assert np.isnan(found.o[0]).all()
    assert np.isnan(found.lse[0])
    assert np.isfinite(found.o[1]).all()


def test_lse_as_large_as_numbers_go() -> None:
    """The difference of the largest and the smallest number overflows: a weight of 0."""
    largest = np.finfo(np.float32).max
    found = merged(
        np.array([[1.0], [2.0]], np.float32), np.array([largest, -largest], np.float32)
    )  # fmt: skip
    assert (found.o, found.lse) == (1, largest)


# The entries

ENTRIES: dict[str, Callable[[Machine, State], State]] = {
    "merge_state": lambda machine, s: merge_state(
        machine, s.o[:, 0], s.lse[:, 0], s.o[:, 1], s.lse[:, 1]
    ),
    "merge_state_in_place": lambda machine, s: merge_state_in_place(
        machine, s.o[:, 0], s.lse[:, 0], s.o[:, 1], s.lse[:, 1]
    ),
    "merge_states": lambda machine, s: merge_states(machine, s.o, s.lse),
    "merge_states_variable": lambda machine, s: merge_states_variable(
        machine,
        s.o.reshape(-1, *s.o.shape[2:]),
        s.lse.reshape(-1, *s.lse.shape[2:]),
        2 * np.arange(len(s.lse) + 1),
        dtype=np.float32,
    ),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_entries_agree(entry: str) -> None:
    """Two states of [rows, 2, heads, d] through each of the four."""
    given_states = states(4, 2, 3, empty=0.4)
    by_head = State(given_states.o.swapaxes(1, 2), given_states.lse.swapaxes(1, 2))
    found = ENTRIES[entry](Machine("h100", "device"), given_states)
    expected = merged(by_head.o, by_head.lse)
    np.testing.assert_array_equal(found.o, expected.o)
    np.testing.assert_array_equal(found.lse, expected.lse)
    found = ENTRIES[entry](Machine("h100"), given_states)
    exact = merge_reference(by_head.o, by_head.lse)
    assert found.o.dtype == np.float64
    np.testing.assert_array_equal(found.o, exact.o)
    np.testing.assert_array_equal(found.lse, exact.lse)


@settings(max_examples=25)
@given(
    st.sampled_from(sorted(ENTRIES)),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from((0.0, 0.4, 1.0)),
)
def test_every_arithmetic_moves_the_same_bytes(
    entry: str, rows: int, heads: int, empty: float
) -> None:
    given_states = states(rows, 2, heads, empty=empty)
    machines = [Machine("h100", arithmetic) for arithmetic in ("none", "reference", "device")]
    for machine in machines:
        ENTRIES[entry](machine, given_states)
    assert moved(machines[0]) == moved(machines[1]) == moved(machines[2])


def test_bytes_of_one_case() -> None:
    rows, heads, d = 5, 3, 128
    partial = states(7, heads, d=d)
    partial.lse[2, 1] = -np.inf  # its output is not read
    machine = Machine("h100", "device")
    indptr = np.array([0, 2, 2, 3, 6, 6], np.int64)  # the last partial row belongs to none
    merge_states_variable(machine, partial.o, partial.lse, indptr, v_scale=2.0)
    used, pairs = 6 * heads, rows * heads
    # A warp reads 32 times the same number, which is one sector; LSEs twice.
    assert moved(machine) == {
        ("merge_indptr", "read"): (2 * pairs * 32 * 8, 2 * pairs * 32),
        ("partial_lse", "read"): (2 * used * 32 * 4, 2 * used * 32),
        ("partial_o", "read"): ((used - 1) * d * 4,) * 2,
        ("o", "write"): (pairs * d * 2,) * 2,
        ("lse", "write"): (pairs * 4, pairs * 32),
    }
    assert machine.ctas == 4  # of 4 warps for 15 heads of rows


def test_masked_rows_are_neither_read_nor_written() -> None:
    own, other = states(3, 2), states(3, 2, seed=1)
    mask = np.array([1, 0, 200], np.uint8)
    machine = Machine("h100", "device")
    before = own.o.copy(), own.lse.copy()
    found = merge_state_in_place(machine, own.o, own.lse, other.o, other.lse, mask)
    np.testing.assert_array_equal(found.o[1], own.o[1])
    np.testing.assert_array_equal(found.lse[1], own.lse[1])
    assert (found.lse[[0, 2]] != own.lse[[0, 2]]).all()
    # The result is a new one.
    np.testing.assert_array_equal(own.o, before[0])
    np.testing.assert_array_equal(own.lse, before[1])
    values, numbers = (2 * 2 * 64 * 4,) * 2, 2 * 2 * 32
    assert moved(machine) == {
        ("mask", "read"): (3 * 2 * 32, 3 * 2 * 32),
        ("lse", "read"): (numbers * 4, numbers),
        ("lse_other", "read"): (numbers * 4, numbers),
        ("o", "read"): values,
        ("o_other", "read"): values,
        ("o", "write"): values,
        ("lse", "write"): (2 * 2 * 4, 2 * 2 * 32),
    }


def test_rows_without_partial_states() -> None:
    partial = states(0, 2)
    indptr = np.zeros(4, np.int32)
    for arithmetic in ("reference", "device"):
        machine = Machine("h100", arithmetic)  # type: ignore[arg-type]
        found = merge_states_variable(machine, partial.o, partial.lse, indptr)
        assert found.o.shape == (3, 2, 64)
        assert not found.o.astype(np.float64).any()
        assert np.isneginf(found.lse).all()
        assert set(machine.traffic) == {
            ("merge_indptr", "read"), ("o", "write"), ("lse", "write")
        }  # fmt: skip


def test_no_states_at_all() -> None:
    found = merge_states(Machine("h100", "device"), *_fields(states(2, 0, 3)))
    assert not found.o.any()
    assert np.isneginf(found.lse).all()


def test_scale_comes_before_rounding() -> None:
    partial = State(np.full((1, 1, 64), 1 + 2.0**-8, np.float32), np.zeros((1, 1), np.float32))
    indptr = np.array([0, 1], np.int32)

    def scaled(v_scale: float) -> float:
        machine = Machine("h100", "device")
        found = merge_states_variable(machine, *_fields(partial), indptr, v_scale=v_scale)
        return float(found.o[0, 0, 0])

    # Half way between two bfloat16 numbers, the even one of which is 1; a little more is not.
    assert scaled(1.0) == 1.0
    assert scaled(1 + 2.0**-20) == 1 + 2.0**-7
    assert scaled(2.0) == 2.0


def test_partial_states_of_a_model_that_only_counts() -> None:
    """The caller says which parts have keys, as their LSEs have no values."""
    machine = Machine("h100", "none")
    tensors = {
        "partial_o": machine.allocate("partial_o", (4, 2, 64), np.float32),
        "partial_lse": machine.allocate("partial_lse", (4, 2), np.float32),
        "merge_indptr": machine.tensor("merge_indptr", np.array([0, 3, 4], np.int32)),
        "o": machine.allocate("o", (2, 2, 64), BF16),
        "lse": machine.allocate("lse", (2, 2), np.float32),
    }
    present = np.array([[True, True], [False, True], [True, True], [True, True]])
    merge_partial(machine, **tensors, present=present)
    assert machine.traffic["partial_o", "read"].requested == 7 * 64 * 4


def test_counting_takes_no_memory() -> None:
    machine = Machine("h100", "none")
    rows, count, heads, d = 2048, 16, 16, 128
    shape = (rows, count, heads, d)
    merge_states(machine, unbacked(shape, BF16), unbacked(shape[:-1], np.float32))
    assert machine.traffic["partial_o", "read"].sectors == np.prod(shape) * 2


def _fields(state: State) -> tuple[np.ndarray, np.ndarray]:
    return state.o, state.lse


PAIR = states(2, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: merge_state(m, *_fields(PAIR), *_fields(states(2, 4))), ShapeError, r"alike"),
        (
            lambda m: merge_state(m, *_fields(PAIR), *_fields(states(2, 3, dtype=BF16))),
            DtypeError,
            "o_a is float32, o_b bfloat16",
        ),
        (
            lambda m: merge_state(m, *_fields(PAIR), *_fields(PAIR), dtype=np.float64),
            DtypeError,
            "not float64",
        ),
        (lambda m: merge_states(m, *_fields(states(2, 2, 3, d=96))), ShapeError, "d is 96.*64"),
        (lambda m: merge_states(m, *_fields(states(2, 3))), ShapeError, "rows, states, heads, d"),
        (lambda m: merge_states(m, *_fields(states(0, 2, 3))), ShapeError, "a row and a head"),
        (
            lambda m: merge_states(m, PAIR.o.astype(np.float64), PAIR.lse),
            DtypeError,
            "o must be float32.*float64",
        ),
        (lambda m: merge_states(m, PAIR.o, PAIR.lse[1:]), ShapeError, r"lse must be \[2, 3\]"),
        (
            lambda m: merge_state_in_place(m, *_fields(PAIR), *_fields(PAIR), np.ones(3, np.uint8)),
            ShapeError,
            r"mask must be uint8 \[2\], got uint8 \[3\]",
        ),
        (
            lambda m: merge_states_variable(m, *_fields(states(2, 3, dtype=BF16)), np.arange(3)),
            DtypeError,
            "o must be float32, got bfloat16",
        ),
    ],
)
def test_refusals(call: Callable[[Machine], State], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(Machine("h100", "device"))


@pytest.mark.parametrize(
    ("indptr", "error", "message"),
    [
        (np.array([0, 2, 1], np.int32), TableError, r"merge_indptr\[2\] = 1 is less"),
        (np.array([0, 1, 3], np.int64), TableError, r"merge_indptr\[2\] = 3 is outside 0 to 2"),
        (np.array([1, 2], np.int32), TableError, r"merge_indptr\[0\] = 1"),
        (np.array([0, 2], np.uint32), DtypeError, "uint32"),
        (np.array([0], np.int32), ShapeError, "one row at least"),
    ],
)
def test_tables_that_describe_no_ranges(
    indptr: np.ndarray, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        merge_states_variable(Machine("h100", "device"), *_fields(PAIR), indptr)
