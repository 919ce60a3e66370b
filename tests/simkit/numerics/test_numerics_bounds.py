"""Error bounds: they hold, they are close, and a slightly wrong computation exceeds them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import exact_arithmetic as exact
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit.algorithms import flash_attention as flash
from simkit.algorithms import flash_decoding as decoding
from simkit.algorithms import fp8_kv_cache
from simkit.algorithms.error_bounds import (
    decoding_bounds,
    flash_attention_arithmetic,
    problem_bounds,
)
from simkit.algorithms.fma_chain import fma_chain
from simkit.algorithms.problem import AttentionProblem, attention_reference
from simkit.algorithms.variant import tanh
from simkit.errors import DtypeError, ShapeError
from simkit.machine.machine import Machine
from simkit.numerics.attention_bounds import Logits, attention_bounds, softmax_bounds
from simkit.numerics.bounds import (
    EXP2_ERROR,
    EXP2_LOG_ERROR,
    U32,
    average_error,
    dot_error,
    e4m3_error,
    log2_error,
    log_sum_error,
    merge_bounds,
    product_roundoff,
    tanh_error,
    weight_error,
)
from simkit.numerics.exp2 import exp2, log2
from simkit.numerics.fma import fma
from simkit.numerics.formats import decode_e4m3, encode_e4m3, round_bf16
from simkit.numerics.merge_state_bounds import BoundedState
from simkit.numerics.online_softmax import OnlineSoftmax
from simkit.numerics.tensor_core import (
    TENSOR_CORES,
    TensorCore,
    dot_accumulate,
    warp_tensor_core,
)

PROBLEM = AttentionProblem.random(np.random.default_rng(3), q_len=40, kv_len=200, d=64)


def ratio(found: np.ndarray, reference: np.ndarray, bound: np.ndarray) -> float:
    """The largest error over its bound."""
    error = np.abs(found.astype(np.float64) - reference)
    return float(np.max(error / bound))


def bf16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return round_bf16(rng.standard_normal(shape).astype(np.float32))


# The parts


def test_exp2_and_log2_are_within_their_bounds() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate((np.linspace(-126, 1, 400_001), rng.uniform(-1, 1, 400_000)))
    x = x.astype(np.float32)
    true = np.exp2(x.astype(np.float64))
    worst = float(np.max(np.abs(exp2(x) - true) / true))
    assert 0.7 * EXP2_ERROR < worst <= EXP2_ERROR
    y = np.exp2(rng.uniform(-30, 30, 400_000)).astype(np.float32)
    y = np.concatenate((y, np.linspace(0.5, 2, 400_001).astype(np.float32)))
    y = y[y != 1]
    true = np.log2(y.astype(np.float64))
    worst = ratio(log2(y), true, log2_error(true))
    assert 0.4 < worst <= 1


@pytest.mark.parametrize("core", [None, "sm_70 f16", "sm_80 bf16", "sm_90 bf16"])
@pytest.mark.parametrize("spread", [0, 12])
def test_dot_error_against_rationals(core: str | None, spread: int) -> None:
    """Chains and tensor-core steps against exact sums; magnitudes 2^-spread to 2^spread."""
    rng = np.random.default_rng(spread)
    scale = [2.0 ** rng.integers(-spread, spread + 1, (8, 64)) for _ in range(2)]
    a, b = ((bf16(rng, 8, 64) * s).astype(np.float32) for s in scale)
    unit = None if core is None else TENSOR_CORES[tuple(core.split())]  # type: ignore[index]
    zero = np.zeros((8, 8), np.float32)
    if unit is None:
        found = zero
        for k in range(64):
            found = fma(a[:, k, None], b[None, :, k], found)
    else:
        found = dot_accumulate(a, np.ascontiguousarray(b.T), zero, unit)
    bits = 11 if core == "sm_70 f16" else 8
    bound = dot_error(a.astype(np.float64), b.astype(np.float64), unit, significand_bits=bits)
    worst = 0.0
    for i, j in np.ndindex(8, 8):
        true = sum(Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a[i], b[j], strict=True))
        worst = max(worst, float(abs(Fraction(float(found[i, j])) - true) / Fraction(bound[i, j])))
    assert 0.02 < worst <= 1


def test_dot_error_of_subnormal_inputs() -> None:
    rng = np.random.default_rng(1)
    a, b = bf16(rng, 8, 64) * np.float32(2.0**-128), bf16(rng, 8, 64)
    a = round_bf16(a)
    core = TENSOR_CORES["sm_90", "bf16"]
    found = dot_accumulate(a, np.ascontiguousarray(b.T), np.zeros((8, 8), np.float32), core)
    a, b = a.astype(np.float64), b.astype(np.float64)
    assert ratio(found, a @ b.T, dot_error(a, b, core)) <= 1


@pytest.mark.parametrize("core", [None, TENSOR_CORES["sm_90", "bf16"]])
def test_dot_error_of_operands_that_are_off(core: TensorCore | None) -> None:
    """Both operands at the end of what they may be, zeros among them, for several matrices."""
    rng = np.random.default_rng(4)
    a, b = (np.abs(bf16(rng, 3, 5, 32)) for _ in range(2))
    b[..., ::3] = 0
    moved_a, moved_b = (
        round_bf16(x * np.float32(1 + 2.0**-6) + np.float32(2.0**-6)) for x in (a, b)
    )
    exact = [x.astype(np.float64) for x in (a, b)]
    errors = [
        moved.astype(np.float64) - x for moved, x in zip((moved_a, moved_b), exact, strict=True)
    ]
    bound = dot_error(*exact, core, a_error=errors[0], b_error=errors[1])
    for index in range(3):
        left, right = moved_a[index], np.ascontiguousarray(moved_b[index].T)
        zero = np.zeros((5, 5), np.float32)
        if core is None:
            found = fma_chain(left, right, zero)
        else:
            found = dot_accumulate(left, right, zero, core)
        one, other = (x[index] for x in exact)
        assert 0.99 < ratio(found, one @ other.T, bound[index]) <= 1
        alone = dot_error(one, other, core, a_error=errors[0][index], b_error=errors[1][index])
        np.testing.assert_allclose(bound[index], alone, rtol=1e-12)


def test_dot_error_refuses() -> None:
    x = np.ones((2, 32))
    with pytest.raises(ShapeError, match=r"\(2, 32\)"):
        dot_error(x, np.ones((2, 16)), None)
    with pytest.raises(ShapeError, match=r"\(2, 16\)"):
        dot_error(x, x, None, a_error=np.ones((2, 16)))
    with pytest.raises(ShapeError, match=r"\(3, 2, 32\)"):
        dot_error(np.ones((3, 2, 32)), x, None)
    with pytest.raises(DtypeError, match="accumulator"):
        dot_error(x, x, warp_tensor_core("sm_90", "e4m3", 32))
    with pytest.raises(DtypeError, match="accumulator"):
        product_roundoff(warp_tensor_core("sm_90", "e4m3", 32), 64)


WEIGHTS = st.lists(st.floats(0.01, 1), min_size=2, max_size=5)


@settings(max_examples=60)
@given(WEIGHTS, st.floats(1e-6, 3), st.integers(0, 2**16))
def test_perturbed_weights_stay_within(weights: list[float], size: float, seed: int) -> None:
    """Weights moved by factors up to exp(+-eta), the ends among them: averages, weights, sums."""
    rng = np.random.default_rng(seed)
    p = np.array([weights]) / sum(weights)
    eta = rng.uniform(0, size, p.shape)
    v = rng.standard_normal((len(weights), 3))
    visible = np.ones(p.shape, np.bool_)
    average, weight = average_error(p, eta, v, visible), weight_error(p, eta)
    total = log_sum_error(p, eta)
    for _ in range(20):
        moved = p * np.exp(eta * rng.choice((-1.0, 1.0, rng.uniform(-1, 1)), p.shape))
        rounding = 1e-14
        assert np.all(np.abs(moved @ v / moved.sum() - p @ v) <= average + rounding)
        assert np.all(np.abs(moved / moved.sum() - p) <= weight + rounding)
        assert abs(np.log(moved.sum())) <= total + rounding


def test_weights_that_may_be_anything_leave_the_range_of_values() -> None:
    p, v = np.array([[1.0, 0.0]]), np.array([[2.0], [-1.0]])
    eta, visible = np.full((1, 2), 1e4), np.ones((1, 2), np.bool_)
    assert average_error(p, eta, v, visible).tolist() == [[3.0]]
    assert weight_error(p, eta).tolist() == [[1.0, 1.0]]
    assert log_sum_error(p, eta).tolist() == [1e4]


@pytest.mark.parametrize("size", [1e-3, 0.3, 3, 50, 1e8])
def test_tanh_is_within_its_bound(size: float) -> None:
    """Of exact arguments, and of arguments that are off, whose error passes on by the slope."""
    rng = np.random.default_rng(7)
    x = rng.uniform(-size, size, 100_000).astype(np.float32)
    true = np.tanh(x.astype(np.float64))
    worst = ratio(tanh(x), true, tanh_error(x, np.zeros_like(x)))
    assert (0.3 if size <= 50 else 0) <= worst <= 1
    off = (x + size * 1e-3 * rng.choice((-1.0, 1.0), x.shape)).astype(np.float32)
    x_error = np.abs(off.astype(np.float64) - x)
    bound = tanh_error(x.astype(np.float64), x_error)
    assert ratio(tanh(off), true, bound) <= 1
    near = np.abs(x) < 2
    if near.any() and size <= 3:
        assert ratio(tanh(off[near]), true[near], bound[near]) > 0.9


def test_e4m3_error_against_ml_dtypes() -> None:
    rng = np.random.default_rng(2)
    x = np.concatenate((rng.uniform(-448, 448, 4000), 2.0 ** rng.uniform(-14, 8, 4000)))
    found = x.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    worst = ratio(found, x.astype(np.float32), e4m3_error(x, np.ones_like(x)))
    assert 0.95 < worst <= 1 + 2.0**-20  # x itself was rounded to float32
    for scale in (0.37, 1.9e-3):
        scaled = (x * scale).astype(np.float32)
        codes = encode_e4m3(scaled / np.float32(scale))
        back = round_bf16(decode_e4m3(codes) * np.float32(scale))
        exact_scale = np.full_like(x, float(np.float32(scale)))
        bound = e4m3_error(scaled.astype(np.float64), exact_scale, exact_scale=False)
        saturates = np.abs(scaled) > 447.9 * scale
        assert ratio(back[~saturates], scaled[~saturates], bound[~saturates]) <= 1


# Attention: bounds hold, and wrong computations exceed them


def flash_ratios() -> tuple[float, float]:
    """Of o and lse of the device arithmetic of FlashAttention, as it now is."""
    found = flash.flash_attention(Machine("h100", "device"), PROBLEM)
    o, lse = attention_reference(PROBLEM)
    bounds = problem_bounds(PROBLEM, flash_attention_arithmetic(PROBLEM, "sm_90"))
    return ratio(found.o, o, bounds.o), ratio(found.lse, lse, bounds.lse)


def test_flash_attention_is_within() -> None:
    o, lse = flash_ratios()
    assert 0.1 < o <= 1
    assert 0.02 < lse <= 1


def test_weights_in_e4m3_exceed_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "round_bf16", lambda x: decode_e4m3(encode_e4m3(x)))
    assert flash_ratios()[0] > 1


def test_rescaling_forgotten_once_exceeds_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def forgets(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        calls.append(a.ndim)
        # The second product with alpha of the output, whose last axis is the head dimension.
        is_output = a.ndim == 4 and a.shape[-1] == PROBLEM.d
        return a if is_output and sum(n == 4 for n in calls) == 4 else multiply(a, b)

    multiply = flash.multiply
    monkeypatch.setattr(flash, "multiply", forgets)
    assert flash_ratios()[0] > 1


@pytest.mark.parametrize("size", [1e-4, -1e-4, 1e-5])
def test_inexact_exp2_exceeds_the_bound(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    weight = flash.softmax_weight
    factor = np.float32(1 + size)
    monkeypatch.setattr(flash, "softmax_weight", lambda *x: weight(*x) * factor)
    assert flash_ratios()[1] > 1


@pytest.mark.parametrize("offset", [1e-3, -1e-3, 1e-5])
def test_lse_that_is_off_exceeds_the_bound(monkeypatch: pytest.MonkeyPatch, offset: float) -> None:
    lse = flash.softmax_lse
    monkeypatch.setattr(flash, "softmax_lse", lambda m, total: lse(m, total) + np.float32(offset))
    assert flash_ratios()[1] > 1


def test_a_scale_that_is_off_exceeds_the_bound() -> None:
    """Scores times a scale that is wrong in the fourth digit."""
    off = replace(PROBLEM, scale=PROBLEM.scale * 1.0005)
    found = flash.flash_attention(Machine("h100", "device"), off)
    _, lse = attention_reference(PROBLEM)
    bounds = problem_bounds(PROBLEM, flash_attention_arithmetic(PROBLEM, "sm_90"))
    assert ratio(found.lse, lse, bounds.lse) > 1


@pytest.mark.parametrize("dropped", [False, True])
def test_flash_decoding_with_and_without_a_dropped_key(dropped: bool) -> None:
    rng = np.random.default_rng(5)
    problem = AttentionProblem.random(rng, kv_len=300, heads=4, kv_heads=2, d=64)
    used = problem
    if dropped:
        used = AttentionProblem(problem.q, problem.k[:, :-1], problem.v[:, :-1])
    found = decoding.flash_decoding(Machine("h100", "device"), used, 3)
    o, lse = attention_reference(problem)
    bounds = decoding_bounds(problem, 3)
    assert (ratio(found.o, o[:, 0], bounds.o[:, 0]) > 1) == dropped
    assert (ratio(found.lse, lse[..., 0], bounds.lse[..., 0]) > 1) == dropped


def test_attention_over_an_fp8_cache() -> None:
    """K and V from the 656-byte record: within the bound of its error, not within a tenth of it."""
    rng = np.random.default_rng(6)
    kv = rng.standard_normal((96, 576)).astype(ml_dtypes.bfloat16)
    machine = Machine("h100", "device")
    cache = fp8_kv_cache.fp8_kv_quantize(machine, kv).cache
    read = fp8_kv_cache.fp8_kv_dequantize(Machine("h100", "device"), cache).out
    scales = np.repeat(np.ascontiguousarray(cache[:, 512:528]).view(np.float32), 128, axis=1)
    error = e4m3_error(kv[:, :512].astype(np.float64), scales.astype(np.float64))
    d = 64
    q = rng.standard_normal((20, d)).astype(ml_dtypes.bfloat16)

    def run(source: np.ndarray) -> AttentionProblem:
        k, v = (source[None, :, None, start : start + d] for start in (0, d))
        return AttentionProblem(q[None, :, None], k, v)

    found = flash.flash_attention(Machine("h100", "device"), run(read))
    exact_problem = run(kv)
    o, lse = attention_reference(exact_problem)
    k, v = (x[0, :, 0].astype(np.float64) for x in (exact_problem.k, exact_problem.v))
    bounds = attention_bounds(
        q.astype(np.float64), k, v, scale=d**-0.5, visible=np.ones((20, 96), np.bool_),
        arithmetic=flash_attention_arithmetic(exact_problem, "sm_90"),
        k_error=error[:, :d], v_error=error[:, d : 2 * d],
    )  # fmt: skip
    for result, reference, bound in (
        (found.o[0, :, 0], o[0, :, 0], bounds.o),
        (found.lse[0, 0], lse[0, 0], bounds.lse),
    ):
        worst = ratio(result, reference, bound)
        assert 1 / 50 < worst <= 1


def test_bounds_of_rows_without_keys_and_of_nothing() -> None:
    arithmetic = flash_attention_arithmetic(PROBLEM, "sm_90")
    q, k = np.ones((2, 64)), np.ones((3, 64))
    visible = np.array([[False] * 3, [True] * 3])
    bounds = attention_bounds(q, k, k, scale=0.125, visible=visible, arithmetic=arithmetic)
    assert not bounds.o[0].any()
    assert bounds.o[1].all()
    nothing = attention_bounds(
        q, k[:0], k[:0], scale=0.125, visible=visible[:, :0], arithmetic=arithmetic
    )
    assert not nothing.o.any()
    with pytest.raises(ShapeError, match=r"visible must be \[2, 3\]"):
        attention_bounds(q, k, k, scale=1, visible=visible.T, arithmetic=arithmetic)


def random_logits(seed: int, *shape: int) -> Logits:
    rng = np.random.default_rng(seed)
    value = rng.normal(0, 3, shape)
    return Logits(value, rng.uniform(0, 1e-4, shape), rng.random(shape) < 0.8)


def test_softmax_bounds_of_several_heads_are_those_of_each() -> None:
    logits, v = random_logits(8, 3, 6, 150), np.random.default_rng(8).standard_normal((3, 150, 16))
    arithmetic = flash_attention_arithmetic(PROBLEM, "sm_90")
    together = softmax_bounds(logits, v, arithmetic=arithmetic, factor_error=1e-7)
    for head in range(3):
        one = Logits(logits.value[head], logits.error[head], logits.visible[head])
        alone = softmax_bounds(one, v[head], arithmetic=arithmetic, factor_error=1e-7)
        for name in ("o", "lse", "o_error", "lse_error"):
            np.testing.assert_allclose(
                getattr(together, name)[head], getattr(alone, name), rtol=1e-12, err_msg=name
            )


def test_softmax_bounds_are_those_of_attention() -> None:
    """Without masks: the same state, the same bounds."""
    q, k, v = (x[0, :, 0].astype(np.float64) for x in (PROBLEM.q, PROBLEM.k, PROBLEM.v))
    arithmetic = flash_attention_arithmetic(PROBLEM, "sm_90")
    visible = np.ones((len(q), len(k)), np.bool_)
    bounds = attention_bounds(
        q, k, v, scale=PROBLEM.scale, visible=visible, arithmetic=arithmetic
    )  # fmt: skip
    error = PROBLEM.scale * dot_error(q, k, arithmetic.score_core)
    state = softmax_bounds(
        Logits(PROBLEM.scale * (q @ k.T), error, visible),
        v,
        arithmetic=arithmetic,
        factor_error=abs(float(PROBLEM.scale_log2) / PROBLEM.scale * np.log(2) - 1),
    )
    o, lse = attention_reference(PROBLEM)
    np.testing.assert_allclose(state.o, o[0, :, 0], atol=1e-12)
    np.testing.assert_allclose(state.lse, lse[0, 0], rtol=1e-12)
    np.testing.assert_allclose(state.o_error, bounds.o, rtol=1e-9)
    np.testing.assert_allclose(state.lse_error, bounds.lse, rtol=1e-9)


def test_a_sink_is_a_key_without_a_value() -> None:
    """It differs from a key by the exponential, which it has not."""
    logits, v = random_logits(9, 4, 100), np.random.default_rng(9).standard_normal((100, 8))
    logits.error[:, 0], logits.visible[:, 0], v[0] = 0, True, 0
    arithmetic = flash_attention_arithmetic(PROBLEM, "sm_90")

    def state(keys: int, sink: bool) -> BoundedState:
        part = Logits(*(x[:, :keys] for x in (logits.value, logits.error, logits.visible)))
        return softmax_bounds(part, v[:keys], arithmetic=arithmetic, factor_error=0, sink=sink)

    key, sink = (state(100, sink) for sink in (False, True))
    np.testing.assert_allclose(sink.o, key.o)
    np.testing.assert_allclose(sink.lse, key.lse)
    key, sink = (state(1, sink) for sink in (False, True))
    assert not sink.o.any()
    np.testing.assert_allclose(sink.lse, logits.value[:, 0])
    np.testing.assert_allclose(key.lse_error - sink.lse_error, EXP2_LOG_ERROR, rtol=1e-5)
    # The 64 keys after it are one tile, while 65 keys are two.
    assert (state(65, True).lse_error < state(65, False).lse_error).all()


def test_softmax_bounds_refuses_what_does_not_fit() -> None:
    logits = random_logits(0, 2, 3)
    arithmetic = flash_attention_arithmetic(PROBLEM, "sm_90")
    with pytest.raises(ShapeError, match=r"\(4, 8\)"):
        softmax_bounds(logits, np.ones((4, 8)), arithmetic=arithmetic, factor_error=0)
    with pytest.raises(ShapeError, match=r"\(2, 2\)"):
        softmax_bounds(
            Logits(logits.value, logits.error[:, :2], logits.visible), np.ones((3, 8)),
            arithmetic=arithmetic, factor_error=0,
        )  # fmt: skip


# Merges


def states(rng: np.random.Generator, count: int, spread: float = 8.0) -> list[OnlineSoftmax]:
    found = []
    for _ in range(count):
        m = (rng.standard_normal(5) * spread).astype(np.float32)
        l = rng.uniform(1, 64, 5).astype(np.float32)  # noqa: E741
        o = (rng.standard_normal((5, 8)) * l[:, None]).astype(np.float32)
        found.append(OnlineSoftmax(m, l, o))
    return found


def merged(parts: list[OnlineSoftmax], dtype: type) -> OnlineSoftmax:
    total = OnlineSoftmax.empty(5, 8, dtype)
    for part in parts:
        total = total.merge(OnlineSoftmax(*(x.astype(dtype) for x in (part.m, part.l, part.o))))
    return total


@pytest.mark.parametrize("count", [1, 2, 7, 64])
@pytest.mark.parametrize("spread", [0.5, 8.0, 100.0])
def test_merges_of_any_number_are_within(count: int, spread: float) -> None:
    parts = states(np.random.default_rng(count), count, spread)
    found, reference = merged(parts, np.float32), merged(parts, np.float64)
    bounds = merge_bounds(parts)
    assert ratio(found.output(), reference.output(), bounds.o) <= 1
    assert ratio(found.lse(), reference.lse(), bounds.lse) <= 1


def test_merge_that_is_slightly_wrong_exceeds_the_bound() -> None:
    parts = states(np.random.default_rng(0), 4, 1.0)
    reference = merged(parts, np.float64)
    bounds = merge_bounds(parts)
    found = merged([replace(parts[0], l=parts[0].l * np.float32(1 + 1e-5)), *parts[1:]], np.float32)
    assert ratio(found.output(), reference.output(), bounds.o) > 1
    assert ratio(found.lse() + np.float32(1e-5), reference.lse(), bounds.lse) > 1


def test_merge_of_empty_states() -> None:
    empty = OnlineSoftmax.empty(5, 8, np.float32)
    garbage = OnlineSoftmax(empty.m, empty.l, np.full((5, 8), np.nan, np.float32))
    part = states(np.random.default_rng(1), 1)[0]
    bounds = merge_bounds([garbage, part])
    assert np.isfinite(bounds.o).all()
    assert np.isfinite(bounds.lse).all()
    assert np.isfinite(merge_bounds([garbage, empty]).o).all()


def test_unit_roundoff_is_that_of_a_real_rounding() -> None:
    """1 + u rounds to 1 in float32, so that an error of u is reached."""
    assert exact.to_float(exact.round_nearest_even(1 + Fraction(U32))) == 1
