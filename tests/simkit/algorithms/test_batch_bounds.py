"""Error bounds of batched attention: they hold, they are close, wrong computations exceed them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from properties.batch_case import EXAMPLE_VARIANT, BatchCase
from properties.cascade_attention import CascadeCase
from properties.compare import Expected, tightness, within
from properties.data import KINDS
from simkit.algorithms import batch_arithmetic, batch_bounds, merge_states
from simkit.algorithms import variant as variants
from simkit.algorithms.batch_attention import batch_attention
from simkit.algorithms.batch_bounds import BatchBounds
from simkit.algorithms.batch_problem import BatchProblem, batch_reference
from simkit.algorithms.cascade_attention import cascade_attention, flat_problem
from simkit.algorithms.elements import BF16, F16
from simkit.algorithms.variant import Variant
from simkit.errors import ShapeError, TableError
from simkit.layouts.ragged import Ragged
from simkit.machine.machine import Machine
from simkit.numerics.formats import decode_e4m3, encode_e4m3
from simkit.planning.plan import Plan
from simkit.planning.prefill import prefill_plan

CLOSE = 50
"""How much larger than the largest error a bound may be: the factor of the law bound_quality."""


def bounds_of(case: BatchCase) -> BatchBounds:
    return batch_bounds.batch_bounds(case.problem, case.plan, "sm_90", case.units)


def expected(case: BatchCase) -> dict[str, Expected]:
    o, lse = batch_reference(case.problem)
    bounds = bounds_of(case)
    return {"o": Expected(o, bounds.o, "o"), "lse": Expected(lse, bounds.lse, "lse")}


def found(case: BatchCase) -> dict[str, np.ndarray]:
    machine = Machine("h100", "device")
    result = batch_attention(machine, case.problem, case.plan, units=case.units, table="ragged")
    return {"o": result.o, "lse": result.lse}


def ratios(case: BatchCase) -> tuple[float, float]:
    """The largest errors over their bounds, of o and lse."""
    outputs = found(case)
    o, lse = (tightness(outputs[name], one) for name, one in expected(case).items())
    return o, lse


TILE_16 = {"q_lens": (9, 30), "kv_lens": (150, 64), "group": 2, "tile_q": 16}
TILE_64 = {"q_lens": (9, 30), "kv_lens": (150, 64), "group": 2, "tile_q": 64}
DECODE = {"q_lens": (1, 1), "kv_lens": (150, 64), "group": 3, "tile_q": 3, "cuda_cores": True}
ALL = "causal+custom_mask+soft_cap+sink+rope"


@pytest.mark.parametrize("sizes", [TILE_16, TILE_64, DECODE], ids=("tile 16", "tile 64", "CUDA"))
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"element": "f16", "split": 64},
        {"kv": "e4m3", "split": 64},
        {"variant": "causal", "window_left": 70, "page_size": 16},
        {"variant": "soft_cap"},
        {"variant": "alibi+sink", "split": 64},
        {"variant": "rope", "d": 128, "dv": 64},
        {"variant": "rope", "element": "f16"},
        {"variant": ALL, "kv": "e4m3", "element": "f16", "split": 64},
    ],
    ids=lambda fields: " ".join(map(str, fields.values())) or "plain",
)
def test_errors_come_within_a_factor(sizes: dict[str, Any], fields: dict[str, Any]) -> None:
    for ratio in ratios(BatchCase(**sizes, **fields)):
        assert 1 / CLOSE < ratio <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_values_exceeds(kind: str) -> None:
    """Among them infinities and NaNs: in the same places as in the reference."""
    rng = np.random.default_rng(KINDS.index(kind))
    for variant in ("", "causal", "soft_cap", "alibi+sink", "rope", ALL):
        for sizes in (TILE_16, DECODE):
            case = BatchCase(
                **sizes,  # type: ignore[arg-type]
                variant=variant,
                element=str(rng.choice(("bf16", "f16"))),
                kv=str(rng.choice(("same", "e4m3"))),
                split=int(rng.choice((-1, 64))),
                data=kind,
                seed=int(rng.integers(2**16)),
            )
            outputs = found(case)
            for name, one in expected(case).items():
                assert np.isfinite(one.bound).all()
                within(f"{name} of {case}", outputs[name], one.value, one.bound, "the bound")


# Wrong computations exceed the bounds


def patched(target: Any, name: str, wrong: Callable[..., Any]) -> tuple[Any, str, Any]:
    """``wrong`` gets the right function and its arguments."""
    right = getattr(target, name)
    return target, name, lambda *x: wrong(right, *x)


def _no_rescaling(right: Any, self: Any, l: Any, alpha: Any, p: Any) -> Any:  # noqa: E741
    return right(self, l, np.ones_like(alpha), p)


def _turned_back(right: Any, x: Any, angles: Any) -> Any:
    cosines, sines = np.split(angles, 2, axis=-1)
    return right(x, np.concatenate((cosines, -sines), axis=-1))


def _no_sink(right: Any, self: Any, rows: Any, sinks: Any, first: Any) -> Any:
    return right(self, rows, None, first)


TENSOR, CUDA = batch_arithmetic.TensorCores, batch_arithmetic.CudaCores
WRONG: dict[str, tuple[dict[str, Any], tuple[Any, str, Any]]] = {
    "weights in e4m3": (
        TILE_16,
        patched(TENSOR, "round", lambda right, _, x: decode_e4m3(encode_e4m3(x))),
    ),
    "sums that are not rescaled": (TILE_16, patched(TENSOR, "add_weights", _no_rescaling)),
    "the same on CUDA cores": (DECODE, patched(CUDA, "add_weights", _no_rescaling)),
    "exponentials off by 1e-5": (
        TILE_64,
        patched(
            batch_arithmetic, "softmax_weight", lambda right, *x: right(*x) * np.float32(1 + 1e-5)
        ),
    ),
    "a merge that is off by 1e-5": (
        TILE_16 | {"split": 64},
        patched(merge_states, "log2", lambda right, x: right(x * np.float32(1 + 1e-5))),
    ),
    "tanh off by 1e-5": (
        TILE_16 | {"variant": "soft_cap"},
        patched(variants, "tanh", lambda right, x: right(x) * np.float32(1 + 1e-5)),
    ),
    "a distance that is one too many": (
        TILE_16 | {"variant": "alibi", "element": "f16"},
        patched(variants, "fma", lambda right, a, b, c: right(a, b - np.float32(1), c)),
    ),
    "no sink": (TILE_16 | {"variant": "sink"}, patched(TENSOR, "start", _no_sink)),
    "a smaller sink": (
        TILE_16 | {"variant": "sink", "split": 64},
        patched(
            TENSOR,
            "start",
            lambda right, self, rows, sinks, first: right(self, rows, sinks - np.float32(1), first),
        ),
    ),
    "Q and K turned the other way": (
        TILE_16 | {"variant": "rope"},
        patched(batch_arithmetic, "rotate", _turned_back),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_computations_exceed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, (target, attribute, wrong) = WRONG[name]
    case = BatchCase(**sizes)
    assert max(ratios(case)) <= 1
    monkeypatch.setattr(target, attribute, wrong)
    assert max(ratios(case)) > 1


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "scale"])
def test_scales_that_are_off_exceed(name: str) -> None:
    case = BatchCase(**TILE_16, kv="e4m3", element="f16")  # type: ignore[arg-type]
    off = replace(case.problem, **{name: getattr(case.problem, name) * 1.004})
    result = batch_attention(
        Machine("h100", "device"), off, case.plan, units=case.units, table="ragged"
    )
    outputs = {"o": result.o, "lse": result.lse}
    assert max(tightness(outputs[name], one) for name, one in expected(case).items()) > 1


@pytest.mark.parametrize("split", [-1, 64])
def test_cascades(split: int) -> None:
    case = CascadeCase(
        kv_lens=((200,), (20, 1, 64, 7)), variant="causal+sink", split=split, group=2
    )
    result = cascade_attention(Machine("h100", "device"), case.levels)
    o, lse = batch_reference(flat_problem(case.levels))
    bounds = batch_bounds.cascade_bounds(case.levels, "sm_90")
    for found_values, one in (
        (result.o, Expected(o, bounds.o, "")),
        (result.lse, Expected(lse, bounds.lse, "")),
    ):
        assert 1 / CLOSE < tightness(found_values, one) <= 1
    shorter = cascade_attention(Machine("h100", "device"), case.levels[:1])
    assert tightness(shorter.o, Expected(o, bounds.o, "")) > 1


# Corners


def whole_plan(problem: BatchProblem, tile_q: int = 16) -> Plan:
    return prefill_plan(
        problem.queries.indptr, problem.kv_lens, group=problem.group, kv_heads=problem.kv_heads,
        head_dim_v=problem.dv, sm_count=1, tile_q=tile_q, disable_split=True,
    )  # fmt: skip


def test_weights_below_the_normal_range_of_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 2^-24.2, which become 2^-24: an error far above 2^-11 of them."""
    q, k, v = (np.zeros((n, 1, 64), F16) for n in (1, 640, 640))
    q[..., 0] = 1
    k[1:, :, 0] = 8 * np.log(2.0**-24.2)
    v[1:] = 1000
    one, all_keys = (Ragged.from_lengths(np.array([n])) for n in (1, 640))
    problem = BatchProblem(q=q, k=k, v=v, queries=one, keys=all_keys)
    plan = whole_plan(problem)
    o, _ = batch_reference(problem)

    def ratio() -> float:
        result = batch_attention(
            Machine("h100", "device"), problem, plan, units="tensor_cores", table="ragged"
        )
        bounds = batch_bounds.batch_bounds(problem, plan, "sm_90", "tensor_cores")
        return tightness(result.o, Expected(o, bounds.o, ""))

    assert 1 / CLOSE < ratio() <= 1
    arithmetic = batch_bounds.batch_arithmetic
    monkeypatch.setattr(
        batch_bounds, "batch_arithmetic", lambda *x: replace(arithmetic(*x), weight_step=0.0)
    )
    assert ratio() > 1


def test_rows_without_keys() -> None:
    """More queries than keys, and no keys: exact zeros; with sinks the LSE is the sink, rounded."""
    sizes: dict[str, Any] = {"q_lens": (20, 3), "kv_lens": (7, 0), "group": 2, "tile_q": 16}
    case = BatchCase(**sizes, variant="causal", split=64)
    bounds = bounds_of(case)
    assert not bounds.o[:13].any()
    assert not bounds.lse[20:].any()
    nothing = bounds_of(BatchCase(q_lens=(0,), kv_lens=(5,)))
    assert (nothing.o.shape, nothing.lse.shape) == ((0, 1, 64), (0, 1))
    assert bounds.o[13:20].all()
    with_sinks = BatchCase(**sizes, variant="causal+sink")
    bounds = bounds_of(with_sinks)
    assert bounds.o[:13].max() < 1e-36
    sinks = with_sinks.problem.variant.sinks
    assert sinks is not None
    error = np.abs(found(with_sinks)["lse"][20:] - sinks.astype(np.float64))
    assert (error <= bounds.lse[20:]).all()
    assert 0 < bounds.lse[20:].max() < 1e-5


def test_infinite_scores_under_a_soft_cap() -> None:
    """They are logits of exactly -cap: the bound is that of a few roundings."""
    plain = BatchCase(**TILE_16, data="minus_inf", variant="soft_cap")  # type: ignore[arg-type]
    infinite = np.isinf(plain.problem.q.astype(np.float64)).any(axis=-1)
    bounds, outputs = bounds_of(plain), found(plain)
    assert infinite.any()
    assert 0 < bounds.lse[infinite].max() < 1e-4
    for name, one in expected(plain).items():
        within(name, outputs[name], one.value, one.bound, "the bound")


@pytest.mark.parametrize(("element", "in_doubt"), [(BF16, 1e-3), (F16, 5e-3)])
def test_rotations_enclose_those_of_the_kernel(element: np.dtype[Any], in_doubt: float) -> None:
    """And are certain but where float32 decides between two neighbours."""
    angles = variants.rope_angles(2000, 64)
    x = np.random.default_rng(0).standard_normal((2000, 64)).astype(element)
    least, value, most = batch_bounds._rotations(
        x.astype(np.float64), angles.astype(np.float64), element
    )
    kernel = variants.rotate(x.astype(np.float32), angles).astype(element).astype(np.float64)
    assert (least <= kernel).all()
    assert (kernel <= most).all()
    certain = least == most
    assert 0 < np.mean(~certain) < in_doubt
    assert (kernel == value)[certain].all()


def test_a_users_mask_has_bounds_and_other_hooks_have_none() -> None:
    case = BatchCase(**TILE_16)  # type: ignore[arg-type]
    mask = replace(EXAMPLE_VARIANT, cuda="", logit=None, output=None)
    masked = replace(case.problem, variant=Variant(user=mask))
    result = batch_attention(
        Machine("h100", "device"), masked, case.plan, units="tensor_cores", table="ragged"
    )
    o, lse = batch_reference(masked)
    bounds = batch_bounds.batch_bounds(masked, case.plan, "sm_90", "tensor_cores")
    assert 1 / CLOSE < tightness(result.o, Expected(o, bounds.o, "")) <= 1
    assert 1 / CLOSE < tightness(result.lse, Expected(lse, bounds.lse, "")) <= 1
    for hooks in ({"output": None}, {"logit": None}):
        user = replace(EXAMPLE_VARIANT, **hooks)  # type: ignore[arg-type]
        transformed = replace(case.problem, variant=Variant(user=user))
        assert not batch_bounds.has_bounds(transformed)
        with pytest.raises(ShapeError, match=r"no bound follows for the variant 'damped'"):
            batch_bounds.batch_bounds(transformed, case.plan, "sm_90", "tensor_cores")


def test_a_plan_of_other_requests_is_refused() -> None:
    case, other = (BatchCase(**TILE_16 | {"q_lens": q_lens}) for q_lens in ((9, 30), (30, 9)))  # type: ignore[arg-type]
    with pytest.raises(TableError, match="o_indptr"):
        batch_bounds.batch_bounds(case.problem, other.plan, "sm_90", "tensor_cores")
