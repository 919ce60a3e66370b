"""The tensor-core model against the published model done term by term in exact rationals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import exact_arithmetic as exact
import numpy as np
import pytest
from numpy.typing import NDArray

from simkit.errors import DtypeError, ShapeError
from simkit.numerics import aligned_sum, convert, formats
from simkit.numerics.tensor_core import (
    TENSOR_CORES,
    TensorCore,
    dot_accumulate,
    dot_accumulate_fast,
    prepare,
    tensor_core,
)

ALL_CORES = [pytest.param(core, kind, id=core.name) for (_, kind), core in TENSOR_CORES.items()]
HOPPER = TENSOR_CORES["sm_90", "bf16"]

DECODERS: dict[str, Callable[[NDArray[Any]], NDArray[np.float32]]] = {
    "bf16": formats.decode_bf16,
    "f16": formats.decode_f16,
    "e4m3": formats.decode_e4m3,
    "e5m2": convert.e5m2_to_float32,
    # tf32 is float32 without its 13 low bits
    "tf32": lambda codes: (codes.astype(np.uint32) << 13).view(np.float32),
}
WIDTHS = {"bf16": 16, "f16": 16, "e4m3": 8, "e5m2": 8, "tf32": 19}


def round_to(x: np.ndarray, kind: str) -> np.ndarray:
    """float32 values of format ``kind`` at or near ``x``."""
    if kind == "bf16":
        return formats.round_bf16(x)
    if kind == "f16":
        return formats.decode_f16(formats.encode_f16(x))
    if kind == "e4m3":
        return formats.decode_e4m3(formats.encode_e4m3(x))
    if kind == "e5m2":
        return convert.e5m2_to_float32(convert.float32_to_e5m2(x))
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def check(a: np.ndarray, b: np.ndarray, c: np.ndarray, core: TensorCore) -> None:
    """a [cases, K], b [cases, K], c [cases]: one dot product a case, by both implementations."""
    got = dot_accumulate(a.T[None], b.T[:, None], c[None, None], core)
    assert got.shape == (1, 1, len(c))
    for i, bits in enumerate(got.view(np.uint32).ravel().tolist()):
        x, y, z = a[i].tolist(), b[i].tolist(), float(c[i])
        want = exact.dot(
            x,
            y,
            z,
            core.terms,
            core.fraction_bits,
            core.input_min_exponent,
            core.output_bits,
        )
        assert bits == want, f"{core.name}: {x} . {y} + {z} = {bits:#x}, not {want:#x}"


def random_problem(kind: str, k: int, cases: int, seed: int, spread: float) -> list[np.ndarray]:
    """Normal values times 2^uniform(-spread, spread), a few zeros."""
    rng = np.random.default_rng(seed)

    def values(*shape: int) -> np.ndarray:
        x = rng.standard_normal(shape) * np.exp2(rng.uniform(-spread, spread, shape))
        return np.where(rng.random(shape) < 0.05, 0, x).astype(np.float32)

    a, b = (round_to(values(cases, k), kind) for _ in range(2))
    return [a, b, values(cases)]


@pytest.mark.parametrize(("core", "kind"), ALL_CORES)
def test_random_values(core: TensorCore, kind: str) -> None:
    for seed, spread in enumerate((0, 3, 8)):
        a, b, c = random_problem(kind, 32, 60, seed, spread)
        check(a, b, c, core)


@pytest.mark.parametrize(("core", "kind"), ALL_CORES)
def test_any_codes(core: TensorCore, kind: str) -> None:
    """Every bit pattern of the inputs and of the accumulator: all exponents, infinities, NaNs."""
    rng = np.random.default_rng(10)
    codes = rng.integers(0, 1 << WIDTHS[kind], (2, 100, core.terms))
    dtype = {8: np.uint8, 16: np.uint16, 19: np.uint32}[WIDTHS[kind]]
    a, b = DECODERS[kind](codes.astype(dtype))
    c = rng.integers(0, 2**32, 100, dtype=np.uint32).view(np.float32)
    check(a, b, c, core)
    a, b, c = (np.where(np.isfinite(x), x, np.float32(0)) for x in (a, b, c))
    check(a, b, c, core)


@pytest.mark.parametrize(("core", "kind"), ALL_CORES)
def test_cancellation(core: TensorCore, kind: str) -> None:
    """Large terms that cancel leave what truncation left of the small ones."""
    a, b, c = random_problem(kind, core.terms, 80, 11, 2)
    rng = np.random.default_rng(12)
    big = np.exp2(rng.integers(3, 8, 80)).astype(np.float32)
    a[:, 0], b[:, 0] = big, big
    a[:, 1], b[:, 1] = -big, big
    check(a, b, c, core)
    a[:, 1] = 0
    check(a, b, -big * big, core)  # the accumulator cancels
    check(a, b, -a[:, 0] * b[:, 0] * np.float32(1 + 2**-23), core)


@pytest.mark.parametrize(("core", "kind"), ALL_CORES)
def test_extreme_magnitudes(core: TensorCore, kind: str) -> None:
    """The greatest sums of significands, and the least and greatest values of the formats."""
    codes = np.arange(1 << WIDTHS[kind])
    dtype = {8: np.uint8, 16: np.uint16, 19: np.uint32}[WIDTHS[kind]]
    values = DECODERS[kind](codes.astype(dtype))
    values = np.unique(np.abs(values[np.isfinite(values)]))
    largest_below_two = values[values < 2][-1]
    picks = exact.f32(
        [*values[1:4], values[-1], values[-2], largest_below_two, -largest_below_two, 1]
    )
    rng = np.random.default_rng(13)
    a, b = rng.choice(picks, (2, 60, core.terms))
    c = rng.choice(exact.f32([0, -0.0, 2**-149, 2**-126, -3e-38, 3e38, -3e38, 1]), 60)
    a[:6], b[:6] = largest_below_two, largest_below_two
    b[3:6] *= -1
    c[:6] = exact.f32([0, 2 - 2**-23, -(2 - 2**-23)] * 2)
    check(a, b, c, core)


@pytest.mark.parametrize("kind", ["bf16", "tf32"])
def test_results_near_underflow(kind: str) -> None:
    """Products below 2^-101, which float32 arithmetic could not scale, and subnormal results."""
    for arch in ("sm_80", "sm_90"):
        core = TENSOR_CORES[arch, kind]
        a, b, _ = random_problem(kind, core.terms, 100, 14, 6)
        rng = np.random.default_rng(15)
        shift = np.exp2(rng.integers(-68, -50, (100, 1))).astype(np.float32)
        a, b = round_to(a * shift, kind), round_to(b * shift, kind)
        c = (rng.standard_normal(100) * 2.0**-126).astype(np.float32)
        check(a, b, c, core)
        check(a, b, np.zeros(100, np.float32), core)


@pytest.mark.parametrize(("core", "kind"), ALL_CORES)
def test_zero_products_take_no_part(core: TensorCore, kind: str) -> None:
    """Zeros against the greatest values do not raise the exponent that the others align to."""
    rng = np.random.default_rng(22)
    greatest = {"bf16": 2.0**120, "tf32": 2.0**120, "f16": 2.0**15, "e4m3": 2.0**8}.get(
        kind, 2.0**15
    )
    a = round_to(rng.uniform(1, 2, (30, core.terms)).astype(np.float32), kind)
    b = round_to((rng.uniform(1, 2, (30, core.terms)) * 2.0**-5).astype(np.float32), kind)
    a[:, ::3], b[:, ::3] = 0, greatest
    a[:, 1::3] *= np.float32(2.0**-5)
    check(a, b, exact.f32(np.zeros(30)), core)
    check(b, a, exact.f32(np.full(30, 2.0**-12 / 3)), core)
    check(a * 0, b, exact.f32(np.full(30, 1 / 3)), core)


@pytest.mark.parametrize("magnitude", [2.0**62, 2.0**63, 2.0**64, 2.0**66])
def test_products_beyond_float32_may_cancel(magnitude: float) -> None:
    a = exact.f32([[1.5 * magnitude, -1.5 * magnitude, 2.0**60, 3]] * 2)
    b = exact.f32([[1.75 * magnitude, 1.75 * magnitude, 2.0**55, 5]] * 2)
    a[1, 1] *= -1
    check(a, b, exact.f32([0, 1]), HOPPER)


def test_sum_truncated_to_zero_is_positive() -> None:
    """-2^-151 is one unit of the sum, and a quarter of the least float32."""
    a, b = exact.f32([[-(2.0**-76)]]), exact.f32([[2.0**-75]])
    assert dot_accumulate(a, b, 0.0, HOPPER).view(np.uint32) == 0
    assert dot_accumulate(a * 4, b, 0.0, HOPPER).view(np.uint32) == exact.SIGN + 1


def test_small_and_large_elements_in_one_batch() -> None:
    """One element that needs the wide arithmetic does not change the others."""
    a, b, c = random_problem("bf16", 16, 50, 16, 1)
    a[7] *= np.float32(2.0**-80)
    b[7] *= np.float32(2.0**-40)
    c[7] = 0
    c[8] = np.inf
    a[9] = 0
    c[9] = -0.0
    check(a, b, c, HOPPER)
    assert dot_accumulate(a[9, None], b[9, :, None], c[9:10, None], HOPPER).view(np.uint32) == 0


def test_chained_steps_are_steps() -> None:
    a, b, c = random_problem("bf16", 64, 10, 17, 2)
    for arch in ("sm_80", "sm_90"):
        core = TENSOR_CORES[arch, "bf16"]
        whole = dot_accumulate(a.T[None], b.T[:, None], c[None, None], core)
        result = c[None, None]
        for k in range(0, 64, core.terms):
            step = slice(k, k + core.terms)
            result = dot_accumulate(a.T[None, step], b.T[step, None], result, core)
        assert whole.tobytes() == result.tobytes()


def test_matrix_elements_are_dot_products() -> None:
    """[M, K, batch] x [K, N, batch], with a batch axis that broadcasts, and without one."""
    rng = np.random.default_rng(18)
    a = formats.round_bf16(rng.standard_normal((5, 16, 3, 4)).astype(np.float32))
    b = formats.round_bf16(rng.standard_normal((16, 7, 3, 1)).astype(np.float32))
    c = rng.standard_normal((5, 7, 3, 4)).astype(np.float32)
    got = dot_accumulate(a, b, c, HOPPER)
    assert got.shape == (5, 7, 3, 4)
    for m, n, i, j in [(0, 0, 0, 0), (4, 6, 2, 3), (2, 5, 1, 0), (1, 3, 2, 2)]:
        want = exact.dot(
            a[m, :, i, j].tolist(), b[:, n, i, 0].tolist(), float(c[m, n, i, j]), 16, 25, -126, 23
        )
        assert int(got[m, n, i, j].view(np.uint32)) == want
    alone = dot_accumulate(a[..., 1, 2], b[..., 1, 0], c[..., 1, 2], HOPPER)
    assert alone.tobytes() == np.ascontiguousarray(got[..., 1, 2]).tobytes()
    zero = dot_accumulate(a, b, 0.0, HOPPER)
    assert zero.tobytes() == dot_accumulate(a, b, np.zeros_like(c), HOPPER).tobytes()


def test_many_rows_are_the_same_as_few() -> None:
    rng = np.random.default_rng(19)
    a = formats.round_bf16(rng.standard_normal((300, 16, 2)).astype(np.float32))
    b = formats.round_bf16(rng.standard_normal((16, 90, 2)).astype(np.float32))
    c = rng.standard_normal((300, 90, 1)).astype(np.float32)
    whole = dot_accumulate(a, b, c, HOPPER)
    parts = [dot_accumulate(a[i : i + 7], b, c[i : i + 7], HOPPER) for i in range(0, len(a), 7)]
    assert whole.tobytes() == np.concatenate(parts).tobytes()


def test_operands_are_left_alone() -> None:
    a, b, c = random_problem("bf16", 16, 4, 20, 1)
    before = [x.tobytes() for x in (a, b, c)]
    first = dot_accumulate(a.T[None], b.T[:, None], c[None, None], HOPPER)
    kept = first.tobytes()
    dot_accumulate(-a.T[None], b.T[:, None], c[None, None], HOPPER)
    assert first.tobytes() == kept
    assert [x.tobytes() for x in (a, b, c)] == before


def portability_problem() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """2^22 as accumulator, 2047 small products whose sum is 255.875, and -2^22 at the very end.

    Built after the demonstration of FTTN (Li et al., arXiv 2403.00232): each small product is
    below the last bit that A100 keeps beside 2^22 (1/4) and some are below the last bit that
    H100 keeps (1/8).
    """
    block = exact.f32([3 / 16] * 2 + [3 / 32] * 4 + [1 / 8] * 10)
    a = np.tile(block, 128)
    b = np.ones(2048, np.float32)
    a[-1], b[-1] = -2048, 2048
    return a[None, :], b[:, None], exact.f32([[2.0**22]])


@pytest.mark.parametrize(
    ("arch", "result"), [("sm_70", 0), ("sm_80", 0), ("sm_90", 191.875), ("sm_100", 191.875)]
)
def test_the_same_product_differs_between_architectures(arch: str, result: float) -> None:
    """The figures of FTTN: V100 and A100 give 0, H100 gives 191.875, the truth is 255.875."""
    a, b, c = portability_problem()
    assert a.astype(np.float64) @ b + c == 255.875
    assert dot_accumulate(a, b, c, TENSOR_CORES[arch, "f16"]) == result


def test_hopper_fp8_keeps_thirteen_bits() -> None:
    """1 + 2^-13 survives in E8M13, 1 + 2^-14 does not; B200 keeps it."""
    a = exact.f32([[1, 2**-6, 0]])
    for exponent, kept in ((-7, True), (-8, False)):
        b = exact.f32([[1], [2.0**exponent], [0]])
        hopper = dot_accumulate(a, b, 0.0, TENSOR_CORES["sm_90", "e4m3"])
        assert (hopper > 1) == kept
        assert dot_accumulate(a, b, 0.0, TENSOR_CORES["sm_100", "e4m3"]) == 1 + 2.0 ** (
            exponent - 6
        )


def test_order_of_keys_matters() -> None:
    """2^24, thirty halves, -2^24 is 15; by hand, the two steps of Hopper give 13.5 or 15.5.

    Forward, 2^24 + 7.5 is cut to a multiple of 2; backward, -(2^24 - 7.5) to a multiple of 1.
    """
    a = exact.f32([[2.0**24] + [1 / 2] * 30 + [-(2.0**24)]])
    b = np.ones((32, 1), np.float32)
    assert dot_accumulate(a, b, 0.0, HOPPER) == 13.5
    assert dot_accumulate(a[:, ::-1], b, 0.0, HOPPER) == 15.5


def test_exact_zero_is_positive() -> None:
    one = exact.f32([[1, -1]])
    for c in (0.0, -0.0):
        assert dot_accumulate(one, np.ones((2, 1), np.float32), c, HOPPER).view(np.uint32) == 0
        assert dot_accumulate(-one * 0, np.ones((2, 1), np.float32), c, HOPPER).view(np.uint32) == 0


def test_infinities_and_nans() -> None:
    inf, nan = np.float32(np.inf), np.float32(np.nan)
    cases = [
        ([inf, 1], [1, 1], 0, inf),
        ([inf, 1], [-1, 1], 0, -inf),
        ([inf, 1], [0, 1], 0, nan),
        ([inf, inf], [1, -1], 0, nan),
        ([inf, 1], [1, 1], -inf, nan),
        ([1, 1], [1, 1], -inf, -inf),
        ([nan, 1], [0, 1], 0, nan),
        ([1, 1], [1, 1], nan, nan),
        ([2.0**100, 1], [2.0**100, 1], 0, inf),
        ([2.0**127, 2.0**127], [1, 1], -inf, -inf),
    ]
    for a, b, c, want in cases:
        got = dot_accumulate(exact.f32([a]), exact.f32(b)[:, None], exact.f32([[c]]), HOPPER)
        if np.isnan(want):
            assert got.view(np.uint32) == exact.CANONICAL_NAN
        else:
            assert got == want


def test_fast_is_close_and_of_the_same_shape() -> None:
    rng = np.random.default_rng(21)
    a = rng.standard_normal((4, 32, 2, 3)).astype(np.float32)
    b = rng.standard_normal((32, 5, 2, 3)).astype(np.float32)
    c = rng.standard_normal((4, 5, 2, 3)).astype(np.float32)
    got = dot_accumulate_fast(a, b, c)
    want = np.einsum("mkxy,knxy->mnxy", a.astype(np.float64), b.astype(np.float64)) + c
    bound = 40 * 2.0**-24 * (np.einsum("mkxy,knxy->mnxy", abs(a), abs(b)) + abs(c))
    assert got.dtype == np.float32
    assert np.all(np.abs(got - want) <= bound)
    assert dot_accumulate_fast(a[..., 0, 0], b[..., 0, 0], 0.0).shape == (4, 5)


def test_lookup() -> None:
    assert tensor_core("sm_90a", "bf16") is HOPPER
    assert tensor_core("sm_100f", "e4m3").fraction_bits == 25
    with pytest.raises(DtypeError, match=r"sm_80 take no e4m3 inputs, which need sm_89"):
        tensor_core("sm_80", "e4m3")


def test_shapes_that_do_not_fit() -> None:
    x = np.ones((4, 8), np.float32)
    with pytest.raises(ShapeError, match=r"\(4, 8\), \(4, 8\)"):
        dot_accumulate(x, x, 0.0, HOPPER)
    with pytest.raises(ShapeError, match=r"c \(3, 4\)"):
        dot_accumulate(x, x.T, np.ones((3, 4), np.float32), HOPPER)
    with pytest.raises(ShapeError, match=r"c \(4, 4, 2\)"):
        dot_accumulate(x, x.T, np.ones((4, 4, 2), np.float32), HOPPER)
    with pytest.raises(ShapeError, match=r"a \(4, 8, 2\), b \(8, 4, 3\)"):
        dot_accumulate(np.ones((4, 8, 2), np.float32), np.ones((8, 4, 3), np.float32), 0.0, HOPPER)
    with pytest.raises(DtypeError, match="float64"):
        dot_accumulate(np.ones((4, 8)), x.T, 0.0, HOPPER)  # type: ignore[arg-type]


@pytest.mark.parametrize("core", TENSOR_CORES.values(), ids=lambda core: core.name)
def test_rows_of_zeros_are_worked_out_as_any(core: TensorCore) -> None:
    """Skipped rows of A have the bits of the steps that they skip, whatever the accumulator."""
    rng = np.random.default_rng(1)
    a = rng.integers(-8, 9, (16, 32, 64)).astype(np.float32)
    b = rng.integers(-8, 9, (32, 8, 64)).astype(np.float32)
    a[4:13] = rng.choice(np.array([0.0, -0.0], np.float32), a[4:13].shape)
    c = rng.integers(0, 2**32, (16, 8, 64), np.uint32).view(np.float32)
    c.reshape(-1)[:6] = 0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45
    c[6].reshape(-1)[:6] = 0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45
    if core.output_bits < 23:
        c = rng.integers(-64, 64, c.shape).astype(np.float32)
    whole = aligned_sum.accumulate(prepare(a, core), prepare(b, core), c, core)
    assert np.array_equal(dot_accumulate(a, b, c, core).view(np.uint32), whole.view(np.uint32))
    # An infinity times such a zero is NaN all the same.
    b[3, 2, 5] = np.inf
    assert np.isnan(dot_accumulate(a, b, np.zeros_like(c), core)[4:13, 2, 5]).all()
