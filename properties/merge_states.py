"""Laws of merging attention states: the kernels against their model, and the merge as an algebra
whose neutral element is any state without keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from gpu.device import Device
from gpu.kernels import merge_states as host
from gpu.kernels.result import KernelResult
from properties.bound_quality import quality_law
from properties.compare import Expected, bits_equal, within
from properties.law import Context, Law, Tier
from properties.merge_states_case import (
    CASES,
    DTYPES,
    ENTRIES,
    GARBAGE,
    KINDS,
    Entry,
    MergeStatesCase,
)
from properties.subject import Array, Subject, kernel_laws
from simkit.algorithms import merge_states as models
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine
from simkit.numerics import lse as conventions
from simkit.numerics.exp2 import LN2
from simkit.numerics.fma import fma
from simkit.numerics.merge_state_bounds import BoundedState, merge_bounded

F32 = np.dtype(np.float32)

_MODELS: dict[Entry, Callable[..., models.State]] = {
    "merge_state": models.merge_state,
    "merge_state_in_place": models.merge_state_in_place,
    "merge_states": models.merge_states,
    "merge_states_variable": models.merge_states_variable,
}
_HOSTS: dict[Entry, Callable[..., KernelResult]] = {
    "merge_state": host.merge_state,
    "merge_state_in_place": host.merge_state_in_place,
    "merge_states": host.merge_states,
    "merge_states_variable": host.merge_states_variable,
}


def _model(machine: Machine, case: MergeStatesCase) -> Mapping[str, Array]:
    arrays, named = case.arguments()
    state = _MODELS[case.entry](machine, *arrays, **named)
    return {"o": state.o, "lse": state.lse}


def _kernel(device: Device, case: MergeStatesCase, source: str | None) -> KernelResult:
    arrays, named = case.arguments()
    return _HOSTS[case.entry](device, *arrays, **named, source=source)


def _expected(gpu: Gpu, case: MergeStatesCase) -> Mapping[str, Expected]:
    o, lse = case.stored()
    exact = models.merge_reference(o, lse)
    bounds = _bounded(o, lse, v_scale=case.scale, dtype=DTYPES[case.output])
    merges = _merged_rows(case)
    bounded = _bounded_values(o, lse) & merges[:, None, None]
    return {
        "o": Expected(
            exact.o * case.scale, bounds.o_error, "weights, sums, division, storing", bounded
        ),
        "lse": Expected(
            exact.lse, bounds.lse_error, "weights, their sum, its logarithm", merges[:, None]
        ),
    }


def _merged_rows(case: MergeStatesCase) -> Array:
    """Which rows the mask leaves to be merged, bool [rows]."""
    return np.full(case.rows, True) if case.mask is None else np.asarray(case.mask != 0)


def _bounded_values(o: Array, lse: Array) -> Array:
    """Merged values [..., d] that only finite ones go into. An infinite one times a weight of 0 is
    left to the model.
    """
    return np.all(np.isfinite(o) | np.isneginf(lse)[..., None], axis=-2)


def _bounded(o: Array, lse: Array, **stored: Any) -> BoundedState:
    """Of states o [..., states, d], lse [..., states]; without any, as of one without keys."""
    if not lse.shape[-1]:
        o, lse = np.zeros((*lse.shape[:-1], 1, o.shape[-1])), np.full((*lse.shape[:-1], 1), -np.inf)
    states = [BoundedState.exact(o[..., n, :], lse[..., n]) for n in range(lse.shape[-1])]
    return merge_bounded(states, **stored)


def _corners() -> tuple[MergeStatesCase, ...]:
    """Two builds of each kernel, with all that can end or leave out something: counts of states,
    heads of rows that fill no CTA, states without keys, masks, weights of 0, NaN.
    """
    builds: tuple[dict[str, Any], ...] = (
        {"d": 64, "dtype": "float32", "output": "float32", "index": "int32"},
        {"d": 256, "dtype": "bfloat16", "output": "bfloat16", "index": "int64"},
    )
    shapes: tuple[dict[str, Any], ...] = (
        *({"entry": "merge_states", "states": n, "rows": 5} for n in (0, 1, 4, 17)),
        *({"entry": "merge_states_variable", "states": n, "rows": 7} for n in (0, 4, 40)),
        {"entry": "merge_state", "rows": 5},
        {"entry": "merge_state_in_place", "rows": 5},
        {"entry": "merge_state_in_place", "rows": 5, "masked": True},
    )
    first = [MergeStatesCase(**shape, **build) for build in builds for shape in shapes]
    kinds = [
        MergeStatesCase(entry, **build, data=kind, rows=13, states=4, empty=10)
        for build in builds
        for entry in ENTRIES
        for kind in ("minus_inf", "underflow", "nan")
    ]
    others = [
        MergeStatesCase("merge_states_variable", states=6, spread=40.0, v_scale=1.7),
        *(MergeStatesCase(states=4, data=kind) for kind in ("inf", "huge", "large")),
        MergeStatesCase(states=6, data="subnormal", empty=0),
        MergeStatesCase(states=1, data="zeros", empty=0),
    ]
    return (*first, *kinds, *others)


SUBJECT = Subject(
    algorithm="merge_states",
    strategy=CASES,
    case_type=MergeStatesCase,
    corners=_corners(),
    thorough=MergeStatesCase("merge_state_in_place", rows=5, masked=True),
    model=_model,
    kernel=_kernel,
    expected=_expected,
    has_lse=True,
)


# The kernels as functions of states o [rows, heads, states, d] and lse [rows, heads, states]


@dataclass(frozen=True)
class _Kernels:
    """Float32 states to float32 outputs, or of the ``dtype`` that a method takes."""

    device: Device
    source: str | None

    @classmethod
    def of(cls, context: Context) -> _Kernels:
        return cls(context.device, context.sources.get("merge_states"))

    def all(self, o: Array, lse: Array) -> models.State:
        """All states of a row at once: merge_states."""
        return self._run(host.merge_states, o.swapaxes(1, 2), lse.swapaxes(1, 2))

    def pair(self, a: models.State, b: models.State) -> models.State:
        """Of states o [rows, heads, d], lse [rows, heads]: merge_state."""
        return self._run(host.merge_state, a.o, a.lse, b.o, b.lse)

    def in_place(self, a: models.State, b: models.State, mask: Array | None = None) -> models.State:
        """As ``pair``: merge_state_in_place."""
        return self._run(host.merge_state_in_place, a.o, a.lse, b.o, b.lse, mask=mask)

    def ranges(self, o: Array, lse: Array, counts: Sequence[int]) -> models.State:
        """Of partial rows o [partial rows, heads, d], so many for each row:
        merge_states_variable.
        """
        indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        return self._run(host.merge_states_variable, o, lse, indptr, dtype=F32)

    def _run(
        self, entry: Callable[..., KernelResult], *arrays: Array, **named: Any
    ) -> models.State:
        contiguous = (np.ascontiguousarray(array) for array in arrays)
        outputs = entry(self.device, *contiguous, source=self.source, **named).outputs
        return models.State(outputs["o"], outputs["lse"])


def _parts(o: Array, lse: Array) -> list[models.State]:
    """The states one by one."""
    return [models.State(o[:, :, n], lse[:, :, n]) for n in range(lse.shape[2])]


def _same(name: str, one: models.State, other: models.State) -> None:
    bits_equal(f"{name}: o", one.o, other.o)
    bits_equal(f"{name}: lse", one.lse, other.lse)


def _copied(state: models.State) -> models.State:
    """What comes out where a state is the only one: the state; but an LSE of -0 is +0, a state
    without keys holds nothing, and one whose LSE is no number is none.
    """
    empty, undefined = np.isneginf(state.lse), np.isnan(state.lse) | np.isposinf(state.lse)
    o = np.where(empty[..., None], F32.type(0), state.o)
    return models.State(
        np.where(undefined[..., None], F32.type(np.nan), o),
        np.where(undefined, F32.type(np.nan), state.lse + F32.type(0)),
    )


def check_copy(context: Context, case: MergeStatesCase) -> None:
    """One state through each entry, alone or beside one without keys."""
    kernels = _Kernels.of(context)
    o, lse = case.o[:, :, :1], case.lse[:, :, :1]
    (state,) = _parts(o, lse)
    empty = _empty_like(state, case.garbage)
    expected = _copied(state)
    _same("merge_states of one", expected, kernels.all(o, lse))
    _same("state and empty", expected, kernels.pair(state, empty))
    _same("empty and state", expected, kernels.pair(empty, state))
    _same("empty merged into state", expected, kernels.in_place(state, empty))
    _same("state merged into empty", expected, kernels.in_place(empty, state))
    alone = kernels.ranges(state.o, state.lse, [1] * case.rows)
    _same("merge_states_variable of one", expected, alone)


def _empty_like(state: models.State, garbage: int) -> models.State:
    """States without keys, and something in their outputs."""
    rng = np.random.default_rng(garbage)
    return models.State(
        rng.choice(GARBAGE, state.o.shape).astype(F32), np.full_like(state.lse, -np.inf)
    )


def check_identity(context: Context, case: MergeStatesCase) -> None:
    """States without keys before, between and after others."""
    kernels = _Kernels.of(context)
    merged = kernels.all(case.o, case.lse)
    rng = np.random.default_rng(case.garbage)
    places = np.sort(rng.integers(0, case.count + 1, 3))
    more_o = np.insert(case.o, places, rng.choice(GARBAGE, case.d).astype(F32), axis=2)
    more_lse = np.insert(case.lse, places, -np.inf, axis=2)
    _same("three states without keys more", merged, kernels.all(more_o, more_lse))
    # Rows without their states that have no keys, which one head can leave out for itself.
    o, lse = case.o[:, 0], case.lse[:, 0]
    present = ~np.isneginf(lse)
    kept = kernels.ranges(o[present][:, None], lse[present][:, None], present.sum(axis=1))
    _same("only states with keys", models.State(merged.o[:, :1], merged.lse[:, :1]), kept)


def check_garbage(context: Context, case: MergeStatesCase) -> None:
    """What states without keys hold makes no difference to any entry, type or bit."""
    first = SUBJECT.run_kernel(context, case).outputs
    other = replace(case, garbage=case.garbage + 1)
    again = SUBJECT.run_kernel(context, other).outputs
    # Rows of mask 0 keep what they hold.
    bits_equal("o", first["o"], again["o"], _merged_rows(case)[:, None, None])
    bits_equal("lse", first["lse"], again["lse"])


def check_mask(context: Context, case: MergeStatesCase) -> None:
    """In place with a mask: rows of 0 keep every bit, NaN payloads too; others are merged as
    without one.
    """
    kernels = _Kernels.of(context)
    own, other = _parts(case.o, case.lse)
    marked = own.o.copy()
    marked[:, :, 0] = np.uint32(0x7FC12345).view(F32)  # a NaN that arithmetic would change
    own = models.State(marked, own.lse)
    mask = case.mask
    assert mask is not None
    masked, merged = kernels.in_place(own, other, mask), kernels.in_place(own, other)
    for name in ("o", "lse"):
        before, after, whole = (getattr(x, name).view(np.uint32) for x in (own, masked, merged))
        bits_equal(f"{name} of rows with mask 0", before[mask == 0], after[mask == 0])
        bits_equal(f"{name} of other rows", whole[mask != 0], after[mask != 0])


def check_mean(context: Context, case: MergeStatesCase) -> None:
    """Equal LSEs have weights of exactly 1. Sums of small dyadic numbers are exact too, in any
    order: o is the mean, rounded once, and of 2^k states lse is the LSE plus k ln 2, rounded once.
    """
    rng = np.random.default_rng(case.seed)
    shape = (case.rows, case.heads, case.states, case.d)
    o = (rng.integers(-64, 65, shape) / 8).astype(F32)
    common = (rng.standard_normal(shape[:2]) * case.spread).astype(F32)
    found = _Kernels.of(context).all(o, np.repeat(common[..., None], case.states, axis=2))
    # A quotient of float32 numbers rounds from float64 as from the exact one.
    mean = (o.astype(np.float64).sum(axis=2) / case.states).astype(F32)
    bits_equal("o", mean + F32.type(0), found.o + F32.type(0))
    power = int(case.states).bit_length() - 1
    if case.states == 1 << power:
        exact = fma(np.full_like(common, power), LN2, common)
        bits_equal("lse", exact, found.lse)


def _agree(
    name: str,
    one: models.State,
    one_bounds: BoundedState,
    other: models.State,
    other_bounds: BoundedState,
    where: Array,
) -> None:
    """Two results of the same states, each off by its own bound at most."""
    reason = "the bounds of both"
    o, lse = (
        one_bounds.o_error + other_bounds.o_error,
        one_bounds.lse_error + other_bounds.lse_error,
    )
    within(f"{name}: o", one.o, other.o, o, reason, where)
    within(f"{name}: lse", one.lse, other.lse, lse, reason)


def check_grouping(context: Context, case: MergeStatesCase) -> None:
    """(a b) c, a (b c) and a b c at once."""
    kernels = _Kernels.of(context)
    a, b, c = _parts(case.o, case.lse)
    x, y, z = (BoundedState.exact(state.o, state.lse) for state in (a, b, c))
    together = kernels.all(case.o, case.lse)
    bounds = merge_bounded([x, y, z])
    left = kernels.pair(kernels.pair(a, b), c)
    left_bounds = merge_bounded([merge_bounded([x, y]), z])
    right = kernels.pair(a, kernels.pair(b, c))
    right_bounds = merge_bounded([x, merge_bounded([y, z])])
    where = _bounded_values(case.o, case.lse)
    _agree("(a b) c against a (b c)", left, left_bounds, right, right_bounds, where)
    _agree("(a b) c against a b c", left, left_bounds, together, bounds, where)


def check_order(context: Context, case: MergeStatesCase) -> None:
    """All orders of three states, or some of more; of two the LSE is the same to the last bit."""
    kernels = _Kernels.of(context)
    rng = np.random.default_rng(case.seed)
    orders = (
        list(itertools.permutations(range(case.states)))
        if case.states <= 3
        else [tuple(rng.permutation(case.states)) for _ in range(6)]
    )
    first = kernels.all(case.o, case.lse)
    bounds = _bounded(case.o, case.lse)
    # One launch for all orders: each is a copy of the rows.
    o, lse = (
        np.concatenate([x[:, :, list(order)] for order in orders]) for x in (case.o, case.lse)
    )
    found = kernels.all(o, lse)
    for index, order in enumerate(orders):
        own = slice(index * case.rows, (index + 1) * case.rows)
        one = models.State(found.o[own], found.lse[own])
        name = f"order {' '.join(map(str, order))}"
        _agree(name, one, bounds, first, bounds, _bounded_values(case.o, case.lse))
        if case.states == 2:
            bits_equal(f"{name}: lse", first.lse, one.lse)


def check_chunks(context: Context, case: MergeStatesCase) -> None:
    """The states of a row in chunks, some of them empty, which are merged afterwards, as split-KV
    attention does; against all states at once.
    """
    kernels = _Kernels.of(context)
    rng = np.random.default_rng(case.seed)
    edges = np.sort(rng.integers(0, case.count + 1, 3))
    chunks = [slice(*pair) for pair in itertools.pairwise((0, *edges, case.count))]
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    # Partial rows: row by row, its states in order.
    o, lse = (
        np.moveaxis(x, 2, 1).reshape(-1, *x.shape[1:2], *x.shape[3:]) for x in (case.o, case.lse)
    )
    parts = kernels.ranges(o, lse, sizes * case.rows)
    whole = kernels.ranges(parts.o, parts.lse, [len(chunks)] * case.rows)
    bounds = merge_bounded([_bounded(case.o[:, :, own], case.lse[:, :, own]) for own in chunks])
    at_once = kernels.ranges(o, lse, [case.count] * case.rows)
    name = f"chunks of {', '.join(map(str, sizes))}"
    _agree(
        name, whole, bounds, at_once, _bounded(case.o, case.lse), _bounded_values(case.o, case.lse)
    )


def check_conventions(context: Context, case: MergeStatesCase) -> None:
    """States that went through another library's convention and back merge to the same, within
    what the conversion of the LSE can move; infinities and NaN come back as they were.
    """
    exact = models.merged(case.o, case.lse)
    bounds = _bounded(case.o, case.lse)
    for name in conventions.CONVENTIONS:
        back = conventions.to_natural(conventions.from_natural(case.lse, name), name)
        moved = conventions.round_trip_error(case.lse.astype(np.float64), name)
        within(f"{name}: lse back", back, case.lse, moved, "two conversions")
        states = [
            replace(BoundedState.exact(case.o[:, :, n], case.lse[:, :, n]), lse_error=moved[..., n])
            for n in range(case.count)
        ]
        found = models.merged(case.o, back)
        _agree(name, found, merge_bounded(states), exact, bounds, _bounded_values(case.o, case.lse))


def _draw(rng: np.random.Generator, kind: str) -> MergeStatesCase:
    entry = ENTRIES[rng.integers(len(ENTRIES))]
    return MergeStatesCase(
        entry=entry,
        rows=4,
        states=int(rng.integers(2, 9)),
        d=int(rng.choice((64, 128))),
        output=str(rng.choice(("float32", "bfloat16"))),
        spread=float(rng.choice((0.5, 4.0))),
        data=kind,
        seed=int(rng.integers(2**16)),
    )


def _float32(**fixed: Any) -> SearchStrategy[MergeStatesCase]:
    """Cases of float32 states with some of their sizes ``fixed`` or drawn otherwise."""
    drawn: dict[str, SearchStrategy[Any]] = {
        "rows": st.integers(1, 3),
        "heads": st.integers(1, 2),
        "states": st.integers(1, 12),
        "spread": st.sampled_from((0.0, 0.5, 4.0, 40.0, 1e4)),
        "empty": st.sampled_from((0, 20, 60)),
        "data": st.sampled_from(KINDS),
        "garbage": st.integers(0, 3),
        "seed": st.integers(0, 2**16 - 1),
    }
    return st.builds(MergeStatesCase, **(drawn | fixed))


def _law(
    name: str,
    tier: Tier,
    statement: str,
    check: Callable[[Context, MergeStatesCase], None],
    strategy: SearchStrategy[MergeStatesCase],
    corners: tuple[MergeStatesCase, ...],
    examples: int = 12,
    *,
    uses_device: bool = True,
) -> Law:
    return Law(
        algorithm="merge_states",
        name=name,
        tier=tier,
        statement=statement,
        check=check,
        strategy=strategy,
        case_type=MergeStatesCase,
        corners=corners,
        examples=examples,
        uses_device=uses_device,
    )


_PAIR = MergeStatesCase("merge_state_in_place", rows=6, masked=True)

LAWS = [
    *kernel_laws(SUBJECT, examples=40),
    quality_law("merge_states", _draw, _model, _expected),
    _law(
        "copy",
        "exact",
        "a state alone, or beside one without keys, comes out bit for bit",
        check_copy,
        _float32(states=st.just(1)),
        tuple(
            MergeStatesCase(rows=8, states=1, data=kind, spread=1e4, empty=25)
            for kind in ("normal", "zeros", "subnormal", "inf", "nan", "huge")
        ),
    ),
    _law(
        "identity",
        "exact",
        "states without keys change no bit, wherever they stand",
        check_identity,
        _float32(),
        (MergeStatesCase(heads=1, empty=40), MergeStatesCase(heads=1, states=7, data="inf")),
    ),
    _law(
        "garbage",
        "exact",
        "what the output of a state without keys holds is not read",
        check_garbage,
        CASES,
        (MergeStatesCase(empty=60), *(MergeStatesCase(entry, empty=60) for entry in ENTRIES)),
    ),
    _law(
        "mask",
        "exact",
        "merging in place leaves the rows of mask 0 as they are, bit for bit",
        check_mask,
        _float32(entry=st.just("merge_state_in_place"), masked=st.just(True)),
        (_PAIR, replace(_PAIR, empty=60, data="inf")),
    ),
    _law(
        "mean",
        "exact",
        "states of equal LSE merge to their mean, in any order, rounded once",
        check_mean,
        _float32(states=st.integers(1, 17), data=st.just("ties")),
        tuple(MergeStatesCase(states=n, spread=1e4) for n in (1, 2, 7, 16)),
    ),
    _law(
        "grouping",
        "bounded",
        "(a b) c, a (b c) and a b c are the same within the bounds of their merges",
        check_grouping,
        _float32(states=st.just(3)),
        (MergeStatesCase(empty=0), MergeStatesCase(empty=50, spread=40.0)),
    ),
    _law(
        "order",
        "bounded",
        "the order of states matters within the bound of a merge; of two, not to the LSE",
        check_order,
        _float32(),
        (MergeStatesCase(empty=0), MergeStatesCase(states=2, empty=0), MergeStatesCase(states=17)),
    ),
    _law(
        "chunks",
        "bounded",
        "states merged in chunks merge to what they merge to at once, within both bounds",
        check_chunks,
        _float32(),
        (MergeStatesCase(states=9, empty=0), MergeStatesCase(states=2, rows=4)),
    ),
    _law(
        "conventions",
        "bounded",
        "another library's LSE convention and back moves a merge by the conversion's rounding",
        check_conventions,
        _float32(data=st.sampled_from([kind for kind in KINDS if kind not in ("nan", "huge")])),
        (MergeStatesCase(spread=1e4), MergeStatesCase(empty=60)),
        uses_device=False,
    ),
]
