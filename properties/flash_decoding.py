"""Laws of Flash-Decoding: split-KV kernel and combine against their model; the merge as an
algebra.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from gpu.device import Device
from gpu.kernels import flash_decoding as host
from gpu.kernels.result import KernelResult
from properties.attention_case import DecodeCase, decode_cases
from properties.bound_quality import quality_law
from properties.compare import Expected, bits_equal, within
from properties.law import Context, Law, Tier
from properties.subject import Array, Subject, kernel_laws
from simkit.algorithms.error_bounds import decoding_bounds
from simkit.algorithms.flash_decoding import flash_decoding
from simkit.algorithms.problem import attention_reference
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine
from simkit.numerics.bounds import merge_bounds
from simkit.numerics.online_softmax import OnlineSoftmax


def _model(machine: Machine, case: DecodeCase) -> Mapping[str, Array]:
    result = flash_decoding(machine, case.problem(), case.splits)
    return {
        "m_partial": result.m_partial, "l_partial": result.l_partial, "o_partial": result.o_partial,
        "o": result.o, "lse": result.lse,
    }  # fmt: skip


def _kernel(device: Device, case: DecodeCase, source: str | None) -> KernelResult:
    problem = case.problem()
    return host.flash_decoding(
        device, problem.q[:, 0], problem.k, problem.v, case.splits, source=source
    )


def _comparable(case: DecodeCase, name: str, model: Mapping[str, Array]) -> Array | None:
    """Splits without keys leave o_partial unwritten."""
    if name != "o_partial":
        return None
    return ~np.isneginf(model["m_partial"])[..., None] | (model["l_partial"] != 0)[..., None]


def _expected(gpu: Gpu, case: DecodeCase) -> Mapping[str, Expected]:
    problem = case.problem()
    o, lse = attention_reference(problem)
    bounds = decoding_bounds(problem, case.splits)
    return {
        "o": Expected(o[:, 0], bounds.o[:, 0], "O in bfloat16, all else in float32"),
        "lse": Expected(lse[..., 0], bounds.lse[..., 0], "rounding of scores, sums and logarithm"),
    }


SUBJECT = Subject(
    algorithm="flash_decoding",
    strategy=decode_cases(most=400, groups=(1, 2, 5)),
    case_type=DecodeCase,
    corners=(
        # An empty last split (5 tiles in 4 splits of 2), a partial tile, heads that share K and V.
        DecodeCase(kv_len=290, splits=4, group=2, kv_heads=2),
        DecodeCase(kv_len=0),
        DecodeCase(kv_len=1, d=128, batch=2),
        DecodeCase(kv_len=256, splits=2, data="large"),
        DecodeCase(kv_len=193, splits=4, data="minus_inf", group=5),
        DecodeCase(kv_len=130, splits=3, data="nan", kv_heads=2),
        # The last split begins where the keys end; other rows of the last tile than above.
        DecodeCase(kv_len=250, splits=3, group=2),
        DecodeCase(kv_len=20, group=2),
        DecodeCase(kv_len=40, group=2),
        DecodeCase(kv_len=60, group=2),
        DecodeCase(kv_len=88, group=2),
        DecodeCase(kv_len=300, data="underflow", group=2),
        # Splits of low scores alone before and after others.
        DecodeCase(kv_len=300, splits=5, data="underflow", group=2, seed=2),
    ),
    thorough=DecodeCase(kv_len=200, splits=2, group=2),
    model=_model,
    kernel=_kernel,
    expected=_expected,
    has_lse=True,
    comparable=_comparable,
)


def check_splitting(context: Context, case: DecodeCase) -> None:
    """The result with splits against the result of one split: both err, each by its own bound."""
    problem = case.problem()
    source = context.sources.get("flash_decoding")
    whole = host.flash_decoding(
        context.device, problem.q[:, 0], problem.k, problem.v, 1, source=source
    ).outputs  # fmt: skip
    split = SUBJECT.run_kernel(context, case).outputs
    one, several = decoding_bounds(problem, 1), decoding_bounds(problem, case.splits)
    reason = "bounds of both results"
    within("o", split["o"], whole["o"].astype(np.float64), (one.o + several.o)[:, 0], reason)
    within("lse", split["lse"], whole["lse"], (one.lse + several.lse)[..., 0], reason)


# The merge as an algebra


@dataclass(frozen=True)
class MergeCase:
    """Three partial states of ``rows`` rows; ``spread`` is how far their maxima lie apart,
    ``empty`` a bit mask of the states without keys (their outputs hold NaN, as unwritten memory
    may).
    """

    rows: int = 4
    spread: float = 8.0
    empty: int = 0
    exact: bool = False
    seed: int = 0

    def states(self) -> list[OnlineSoftmax]:
        rng = np.random.default_rng(self.seed)
        found = []
        for index in range(3):
            shape = (self.rows, 8)
            if self.exact:
                # Whole exponents and small dyadic numbers: every operation of the merge is exact on
                # these.
                m = rng.integers(-6, 7, self.rows).astype(np.float32)
                l = rng.integers(1, 9, self.rows).astype(np.float32)  # noqa: E741
                o = (rng.integers(-32, 33, shape) / 8).astype(np.float32)
            else:
                m = (rng.standard_normal(self.rows) * self.spread).astype(np.float32)
                l = rng.uniform(1.0, 64.0, self.rows).astype(np.float32)  # noqa: E741
                o = (rng.standard_normal(shape) * l[:, None]).astype(np.float32)
            if self.empty >> index & 1:
                m[:], l[:], o[:] = -np.inf, 0.0, np.nan
            found.append(OnlineSoftmax(m, l, o))
        return found


MERGE_CASES = st.builds(
    MergeCase,
    rows=st.integers(1, 6),
    spread=st.sampled_from((0.0, 0.5, 8.0, 60.0, 300.0)),
    empty=st.integers(0, 7),
    exact=st.just(False),
    seed=st.integers(0, 2**16 - 1),
)
EXACT_MERGE_CASES = st.builds(
    MergeCase,
    rows=st.integers(1, 6),
    empty=st.integers(0, 7),
    exact=st.just(True),
    seed=st.integers(0, 2**16 - 1),
)


def _same_up_to_rounding(
    name: str, one: OnlineSoftmax, other: OnlineSoftmax, states: list[OnlineSoftmax]
) -> None:
    """Both are merges of ``states``: each is within its bound of the exact result."""
    bounds = merge_bounds(states)
    reason = "twice the bound of a merge"
    within(f"{name}: o", one.output(), other.output(), 2 * bounds.o, reason)
    within(f"{name}: lse", one.lse(), other.lse(), 2 * bounds.lse, reason)


def check_associative(context: Context, case: MergeCase) -> None:
    a, b, c = case.states()
    _same_up_to_rounding(
        "(a b) c against a (b c)", a.merge(b).merge(c), a.merge(b.merge(c)), [a, b, c]
    )


def check_commutative(context: Context, case: MergeCase) -> None:
    a, b, _ = case.states()
    _same_up_to_rounding("a b against b a", a.merge(b), b.merge(a), [a, b])


def _written(state: OnlineSoftmax) -> Array:
    return state.l[:, None] > 0


def check_identity(context: Context, case: MergeCase) -> None:
    """Merging with the empty state changes no bit, even when the empty state's output is NaN."""
    state = case.states()[0]
    empty = OnlineSoftmax.empty(case.rows, 8, np.float32)
    garbage = OnlineSoftmax(empty.m, empty.l, np.full_like(empty.o, np.nan))
    for name, merged in (
        ("s 0", state.merge(empty)), ("0 s", empty.merge(state)),
        ("s 0 with garbage", state.merge(garbage)), ("0 with garbage s", garbage.merge(state)),
    ):  # fmt: skip
        bits_equal(f"{name}: m", state.m, merged.m)
        bits_equal(f"{name}: l", state.l, merged.l)
        bits_equal(f"{name}: o", state.o, merged.o, _written(state))


def check_exact_algebra(context: Context, case: MergeCase) -> None:
    """Where every operation is exact, the merge is associative and commutative bit for bit."""
    a, b, c = case.states()
    pairs = (
        ("(a b) c against a (b c)", a.merge(b).merge(c), a.merge(b.merge(c))),
        ("a b against b a", a.merge(b), b.merge(a)),
    )
    for name, one, other in pairs:
        bits_equal(f"{name}: m", one.m, other.m)
        bits_equal(f"{name}: l", one.l, other.l)
        # +0 and -0 are one number here: sums of opposite numbers may give either.
        bits_equal(f"{name}: o", one.o + np.float32(0), other.o + np.float32(0), _written(one))


def _merge_law(
    name: str,
    tier: Tier,
    statement: str,
    check: Callable[[Context, MergeCase], None],
    strategy: SearchStrategy[MergeCase],
) -> Law:
    is_exact = strategy is EXACT_MERGE_CASES
    return Law(
        algorithm="flash_decoding",
        name=name,
        tier=tier,
        statement=statement,
        check=check,
        strategy=strategy,
        case_type=MergeCase,
        corners=(MergeCase(empty=1, exact=is_exact), MergeCase(empty=7, exact=is_exact)),
        examples=100,
        uses_device=False,
    )


def _draw(rng: np.random.Generator, kind: str) -> DecodeCase:
    kv_len = int(rng.integers(1, 700))
    return DecodeCase(
        kv_len=kv_len,
        splits=int(rng.integers(1, -(-kv_len // 64) + 1)),
        group=2,
        d=int(rng.choice((64, 128))),
        data=kind,
        seed=int(rng.integers(2**16)),
    )


LAWS = [
    *kernel_laws(SUBJECT, examples=40),
    quality_law("flash_decoding", _draw, _model, _expected),
    Law(
        algorithm="flash_decoding",
        name="splitting",
        tier="bounded",
        statement="any number of splits gives the result of one, within the rounding of its sums",
        check=check_splitting,
        strategy=SUBJECT.strategy,
        case_type=DecodeCase,
        corners=SUBJECT.corners,
        examples=12,
    ),
    _merge_law(
        "merge_associative",
        "bounded",
        "(a b) c = a (b c) within the rounding of two merges",
        check_associative,
        MERGE_CASES,
    ),
    _merge_law(
        "merge_commutative",
        "bounded",
        "a b = b a within the rounding of a merge",
        check_commutative,
        MERGE_CASES,
    ),
    _merge_law(
        "merge_identity",
        "exact",
        "the empty state is the identity, whatever its output holds",
        check_identity,
        MERGE_CASES,
    ),
    _merge_law(
        "merge_exact",
        "exact",
        "on whole exponents and small dyadic numbers the merge is an exact commutative monoid",
        check_exact_algebra,
        EXACT_MERGE_CASES,
    ),
]
