"""Cases of merging attention states: drawn states, as each entry takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from properties import data
from properties.compare import Array

Entry = Literal["merge_state", "merge_state_in_place", "merge_states", "merge_states_variable"]
ENTRIES: tuple[Entry, ...] = (
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "merge_states_variable",
)
DTYPES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
KINDS = (*data.KINDS, "inf", "huge")
"""Those of properties.data, of states: large: values of hundreds and LSEs of thousands. ties: whole
numbers, equal LSEs. zeros: +0 and -0. subnormal: o below the smallest normal number. mixed:
magnitudes from 2^-40 to 2^8. minus_inf: mostly states without keys. nan: some LSEs are NaN or +inf.
underflow: LSEs and weights at the edge to 0, beside a weight of 1 without
values. inf: infinities and NaN in o. huge: LSEs up
to the largest numbers."""
GARBAGE = np.array([np.nan, np.inf, -np.inf, -0.0, 1e4, -1e-6])
"""What the o of states without keys may hold."""

_LOWEST = np.float32(float.fromhex("-0x1.5d58a0p+6"))
"""The one float32 number whose product with log2 e rounds to -126, where weights end."""


@dataclass(frozen=True)
class MergeStatesCase:
    """States of ``heads`` heads for each of ``rows`` rows: ``states`` of them (two where the entry
    merges two), in merge_states_variable at most as many, some rows none.

    ``dtype`` of o in float32, bfloat16 or float16 (merge_states_variable: always float32),
    ``output`` of merged ones, ``index`` of merge_indptr. ``spread``: how far LSEs lie apart.
    ``empty``: per cent of states without keys. ``masked``: with a mask of rows, in place.
    ``garbage``: seed of what states without keys hold.
    """

    entry: Entry = "merge_states"
    rows: int = 3
    heads: int = 2
    states: int = 3
    d: int = 64
    dtype: str = "float32"
    output: str = "float32"
    index: str = "int32"
    spread: float = 4.0
    empty: int = 20
    masked: bool = False
    v_scale: float = 1.0
    data: str = "normal"
    garbage: int = 0
    seed: int = 0

    @property
    def count(self) -> int:
        """States of a row, at most."""
        return 2 if self.entry in ("merge_state", "merge_state_in_place") else self.states

    @property
    def scale(self) -> float:
        """What o is multiplied by, as the kernel takes it."""
        return float(np.float32(self.v_scale)) if self.entry == "merge_states_variable" else 1.0

    @cached_property
    def _states(self) -> tuple[Array, Array]:
        return _draw(self)

    @property
    def o(self) -> Array:
        """[rows, heads, states, d], before it is rounded to ``dtype``: float32."""
        return self._states[0]

    @property
    def lse(self) -> Array:
        """[rows, heads, states] float32; -inf for states that a row does not have, too."""
        return self._states[1]

    @cached_property
    def counts(self) -> Array:
        """States of each row, int64 [rows]."""
        if self.entry != "merge_states_variable":
            return np.full(self.rows, self.count)
        counts = np.random.default_rng(self.seed).integers(0, self.states + 1, self.rows)
        counts[-1] = self.states
        return counts

    @property
    def merge_indptr(self) -> Array:
        return np.concatenate(([0], np.cumsum(self.counts))).astype(self.index)

    @cached_property
    def mask(self) -> Array | None:
        """[rows] uint8, or None; any number but 0 means that a row is merged."""
        if not (self.masked and self.entry == "merge_state_in_place"):
            return None
        rng = np.random.default_rng(self.seed + 1)
        return rng.choice(np.array([0, 0, 1, 128], np.uint8), self.rows)

    def arguments(self) -> tuple[tuple[Array | None, ...], dict[str, Any]]:
        """What the entry takes, positional and by name, on the kernel's side as on the model's."""
        state, output = DTYPES[self.dtype], DTYPES[self.output]
        o, lse = np.moveaxis(self.o, 2, 0), np.moveaxis(self.lse, 2, 0)
        with np.errstate(over="ignore", invalid="ignore"):
            match self.entry:
                case "merge_state":
                    (a, b), (lse_a, lse_b) = _copies(o.astype(state)), _copies(lse)
                    return (a, lse_a, b, lse_b), {"dtype": output}
                case "merge_state_in_place":
                    own, other = _copies((o[0].astype(output), o[1].astype(state)))
                    lse_own, lse_other = _copies(lse)
                    return (own, lse_own, other, lse_other, self.mask), {}
                case "merge_states":
                    stacked = self.o.astype(state).swapaxes(1, 2), self.lse.swapaxes(1, 2)
                    return _copies(stacked), {"dtype": output}
                case "merge_states_variable":
                    partial = self.partial(self.o), self.partial(self.lse)
                    named = {"dtype": output, "v_scale": self.v_scale}
                    return (*partial, self.merge_indptr), named
        raise ValueError(f"unknown entry {self.entry!r}")

    def partial(self, values: Array) -> Array:
        """[rows, heads, states, ...] as [partial rows, heads, ...], with one more row that belongs
        to none.
        """
        rows = [np.moveaxis(values[row, :, :n], 1, 0) for row, n in enumerate(self.counts)]
        unused = np.full((1, *np.moveaxis(values, 2, 1).shape[2:]), np.nan, values.dtype)
        return np.ascontiguousarray(np.concatenate([*rows, unused]))

    def stored(self) -> tuple[Array, Array]:
        """The states as the kernel reads them, o [rows, heads, states, d] as float32 and lse."""
        types = [DTYPES[self.dtype]] * self.count
        if self.entry == "merge_state_in_place":
            types[0] = DTYPES[self.output]
        elif self.entry == "merge_states_variable":
            types = [DTYPES["float32"]] * self.count
        o = np.empty_like(self.o)
        with np.errstate(over="ignore", invalid="ignore"):
            for index, dtype in enumerate(types):
                o[:, :, index] = self.o[:, :, index].astype(dtype)
        return o, self.lse


def _copies(arrays: Any) -> tuple[Array, ...]:
    return tuple(np.ascontiguousarray(array) for array in arrays)


def _draw(case: MergeStatesCase) -> tuple[Array, Array]:
    rng = np.random.default_rng(case.seed)
    shape = (case.rows, case.heads, case.count)
    o = _values(case, rng, (*shape, case.d))
    lse = _lse(case, rng, shape).astype(np.float32)
    if case.data == "underflow":
        o[lse == 0] = 0  # they weigh all and are nothing: o is what weighs almost nothing
    empty = rng.random(shape) < (70 if case.data == "minus_inf" else case.empty) / 100
    lse[empty] = -np.inf
    lse[np.arange(case.count) >= case.counts[:, None, None].repeat(case.heads, 1)] = -np.inf
    nothing = np.isneginf(lse)
    garbage = np.random.default_rng(case.garbage)
    o[nothing] = garbage.choice(GARBAGE, o.shape)[nothing]
    return o.astype(np.float32), lse


def _values(case: MergeStatesCase, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    normal = rng.standard_normal(shape)
    match case.data:
        case "large":
            return normal * 300.0
        case "ties":
            return rng.integers(-3, 4, shape).astype(np.float64)
        case "zeros":
            return np.where(rng.random(shape) < 0.1, 1.0, np.copysign(0.0, normal))
        case "subnormal":
            half = "float16" in (case.dtype, case.output)
            return normal * 2.0 ** (-17 if half else -130)
        case "mixed":
            return normal * 2.0 ** rng.integers(-40, 9, shape)
        case "inf":
            special = rng.choice(np.array([np.inf, -np.inf, np.nan]), shape)
            return np.where(rng.random(shape) < 0.1, special, normal)
        case _:
            return normal


def _lse(case: MergeStatesCase, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    normal = rng.standard_normal(shape)
    match case.data:
        case "large":
            return normal * 3000.0
        case "ties":
            return np.broadcast_to(rng.integers(-4, 5, (*shape[:-1], 1)), shape).astype(np.float64)
        case "nan":
            special = rng.choice(np.array([np.nan, np.inf]), shape)
            return np.where(rng.random(shape) < 0.15, special, normal * case.spread)
        case "underflow":
            # To both sides of the edge, in ulps.
            low = _LOWEST + rng.choice((-1, 0, 0, 1), shape) * np.spacing(_LOWEST)
            return np.where(rng.random(shape) < 0.5, 0.0, low)
        case "huge":
            return np.sign(normal) * np.float64(np.finfo(np.float32).max) * rng.random(shape) ** 8
        case _:
            return normal * case.spread


def _counts(entry: Entry) -> SearchStrategy[int]:
    most = 40 if entry == "merge_states_variable" else 17
    return st.one_of(st.integers(0, 5), st.integers(0, most), st.just(most))


def _of_entry(entry: Entry) -> SearchStrategy[MergeStatesCase]:
    return st.builds(
        MergeStatesCase,
        entry=st.just(entry),
        rows=st.integers(1, 4),
        heads=st.integers(1, 3),
        states=_counts(entry),
        d=st.sampled_from((64, 128, 192, 256)),
        dtype=st.sampled_from(tuple(DTYPES)),
        output=st.sampled_from(tuple(DTYPES)),
        index=st.sampled_from(("int32", "int64")),
        spread=st.sampled_from((0.0, 0.5, 4.0, 40.0, 1e4)),
        empty=st.sampled_from((0, 20, 60, 100)),
        masked=st.booleans(),
        v_scale=st.sampled_from((1.0, 0.5, 1.7)),
        data=st.sampled_from(KINDS),
        garbage=st.integers(0, 3),
        seed=st.integers(0, 2**16 - 1),
    )


CASES: SearchStrategy[MergeStatesCase] = st.sampled_from(ENTRIES).flatmap(_of_entry)
