"""The tensor-core model against integers, on random and on adversarial dot products.

The quick tier runs always; the full one with ``-m proof`` (`make proof`).
"""

from __future__ import annotations

import os
from pathlib import Path

import integer_tensor_core as reference
import numpy as np
import pytest
from integer_tensor_core import FP8_BY_F16, INPUTS, UNITS, Unit
from numpy.typing import NDArray

from simkit.errors import DtypeError
from simkit.numerics import convert, formats
from simkit.numerics.tensor_core import (
    TENSOR_CORES,
    TensorCore,
    dot_accumulate,
    half_precision,
    prepare,
    tensor_core,
    warp_tensor_core,
)

TIERS = [pytest.param(2_000, id="quick"), pytest.param(100_000, id="full", marks=pytest.mark.proof)]
CHUNK = 5_000
ALL_UNITS = [pytest.param(*key, id="-".join(key)) for key in UNITS]

DECODERS = {
    "bf16": formats.decode_bf16,
    "f16": formats.decode_f16,
    "tf32": lambda codes: (codes.astype(np.uint32) << np.uint32(13)).view(np.float32),
    "e4m3": formats.decode_e4m3,
    "e5m2": convert.e5m2_to_float32,
}
CODE_TYPES = {8: np.uint8, 16: np.uint16, 19: np.uint32}


def inputs_near(x: NDArray[np.float64], kind: str) -> NDArray[np.float32]:
    """Numbers of an input format: ``x`` truncated to it, its largest number where ``x`` is above.

    By arithmetic on float64, with no codec of simkit.
    """
    source = INPUTS[kind]
    top = {"bf16": 127, "tf32": 127, "f16": 15, "e4m3": 8, "e5m2": 15}[kind]
    largest = (2 - 2.0**-source.fraction_bits) * 2.0**top
    if kind == "e4m3":
        largest = 448.0
    exponent = np.maximum(np.frexp(x)[1] - 1, source.least)
    quantum = np.ldexp(1.0, exponent - source.fraction_bits)
    return np.clip(np.trunc(x / quantum) * quantum, -largest, largest).astype(np.float32)


def codes(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Any bit patterns of an input format."""
    width = INPUTS[kind].width
    dtype = CODE_TYPES[width]
    return DECODERS[kind](rng.integers(0, 1 << width, shape, dtype=np.uint32).astype(dtype))


def dots(
    rng: np.random.Generator, kinds: tuple[str, str], width: int, cases: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Dot products of six families, equally many of each.

    Ordinary numbers; widely spread ones; any finite codes; any codes and accumulators, infinities
    and NaN included; large terms that cancel; extremes: least and greatest numbers, zeros, results
    near underflow.
    """
    family = rng.integers(0, 6, (cases, 1))
    spread = np.choose(family, [0.0, 12.0, 3.0, 3.0, 4.0, 2.0])
    pair = []
    for kind in kinds:
        x = rng.standard_normal((cases, width)) * np.exp2(
            rng.uniform(-1, 1, (cases, width)) * spread
        )
        x = np.where(rng.random((cases, width)) < 0.08, 0 * x, x)
        # Near underflow: as small as the format allows, together.
        low = INPUTS[kind].least / (2 if INPUTS[kind].least < -20 else 1)
        tiny = (family == 5) & (rng.random((cases, 1)) < 0.6)
        x = np.where(tiny, x * np.exp2(low + rng.integers(-14, 4, (cases, 1))), x)
        values = inputs_near(x, kind)
        any_code = codes(rng, kind, (cases, width))
        finite = np.where(np.isfinite(any_code), any_code, np.float32(1))
        pool = np.unique(np.abs(codes(rng, kind, (4000,))))
        pool = pool[np.isfinite(pool)]
        ends = np.concatenate([pool[:3], pool[-3:], [np.float32(0), np.float32(1.75)]])
        signed = rng.choice(np.concatenate([ends, -ends]).astype(np.float32), (cases, width))
        values = np.where(family == 2, finite, values)
        values = np.where(family == 3, any_code, values)
        values = np.where((family == 5) & ~tiny, signed, values)
        pair.append(values.astype(np.float32))
    a, b = pair
    cancelling = (family[:, 0] == 4) & (width > 1)
    first, second = rng.integers(0, width, (2, cases))
    rows = np.flatnonzero(cancelling & (first != second))
    big = np.exp2(rng.integers(2, 6, len(rows))).astype(np.float32)
    a[rows, first[rows]], b[rows, first[rows]] = big, big
    a[rows, second[rows]], b[rows, second[rows]] = -big, big

    c = (rng.standard_normal(cases) * np.exp2(rng.uniform(-6, 6, cases))).astype(np.float32)
    raw = rng.integers(0, 1 << 32, cases, dtype=np.uint32).view(np.float32)
    finite_raw = np.where(np.isfinite(raw), raw, np.float32(-0.0))
    with np.errstate(all="ignore"):
        sums = -(a.astype(np.float64) * b).sum(axis=1)
        opposite = np.where(np.isfinite(sums), sums, 0).astype(np.float32)
    near_zero = rng.choice(np.array([0, -0.0, 2**-149, -(2.0**-126), 3e38], np.float32), cases)
    which = rng.random(cases)
    c = np.where(which < 0.15, np.float32(0), c)
    c = np.where((which >= 0.15) & (which < 0.3), finite_raw, c)
    c = np.where((which >= 0.3) & (which < 0.4), opposite, c)
    c = np.where((which >= 0.4) & (which < 0.5) & (family[:, 0] == 5), near_zero, c)
    return a, b, np.where(family[:, 0] == 3, raw, c)


def as_accumulator(c: NDArray[np.float32], to_f16: bool) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return c.astype(np.float16).astype(np.float32) if to_f16 else c


def compare(
    core: TensorCore | tuple[TensorCore, TensorCore],
    unit: Unit,
    kinds: tuple[str, str],
    width: int,
    cases: int,
    seed: int,
    to_f16: bool = False,
) -> None:
    """``cases`` dot products by the model and by integers."""
    rng = np.random.default_rng(seed)
    core_a, core_b = core if isinstance(core, tuple) else (core, core)
    for _ in range(-(-cases // CHUNK)):
        a, b, c = dots(rng, kinds, width, min(cases, CHUNK))
        c = as_accumulator(c, to_f16)
        left = prepare(np.ascontiguousarray(a.T)[None], core_a)
        right = prepare(np.ascontiguousarray(b.T)[:, None], core_b)
        got = dot_accumulate(left, right, c[None, None], core_a)[0, 0].view(np.uint32)
        want = reference.dot(a, b, c, unit, kinds, to_f16)
        wrong = np.flatnonzero(got != want)
        assert not len(wrong), (
            f"{core_a.name}: {len(wrong)} of {len(c)} differ, first {a[wrong[0]].tolist()} ."
            f" {b[wrong[0]].tolist()} + {float(c[wrong[0]])!r} ="
            f" {got[wrong[0]]:#x}, not {want[wrong[0]]:#x}"
        )


@pytest.mark.parametrize("cases", TIERS)
@pytest.mark.parametrize(("arch", "kind"), ALL_UNITS)
def test_every_unit(arch: str, kind: str, cases: int) -> None:
    """One step, and chained ones: a third of the cases each of 1, 2 and 3 steps and a bit."""
    unit = UNITS[arch, kind]
    for steps, seed in ((1, 1), (2, 2)):
        width = unit.products * steps
        compare(tensor_core(arch, kind), unit, (kind, kind), width, cases // 2, seed)
    if cases > CHUNK:
        width = 3 * unit.products + 1
        compare(tensor_core(arch, kind), unit, (kind, kind), width, cases // 10, 3)


@pytest.mark.parametrize("cases", TIERS)
@pytest.mark.parametrize(
    ("arch", "kind"),
    [p for p in ALL_UNITS if p.values[1] in ("f16", "e4m3", "e5m2")],
)
def test_f16_results(arch: str, kind: str, cases: int) -> None:
    unit = UNITS[arch, kind]
    core = half_precision(tensor_core(arch, kind))
    compare(core, unit, (kind, kind), unit.products, cases // 2, 4, to_f16=True)
    compare(core, unit, (kind, kind), 2 * unit.products, cases // 2, 5, to_f16=True)


@pytest.mark.parametrize("cases", TIERS)
@pytest.mark.parametrize("kinds", [("e4m3", "e5m2"), ("e5m2", "e4m3")], ids="-".join)
@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100"])
def test_two_formats(arch: str, kinds: tuple[str, str], cases: int) -> None:
    cores = (tensor_core(arch, kinds[0]), tensor_core(arch, kinds[1]))
    unit = UNITS[arch, kinds[0]]
    compare(cores, unit, kinds, unit.products, cases // 4, 6)


@pytest.mark.parametrize("cases", TIERS)
@pytest.mark.parametrize("to_f16", [False, True], ids=["f32", "f16"])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_fp8_by_the_f16_unit(arch: str, kind: str, to_f16: bool, cases: int) -> None:
    """mma.sync with fp8 inputs: two f16 products and a late accumulator."""
    core = warp_tensor_core(arch, kind, 32)
    core = half_precision(core) if to_f16 else core
    compare(core, FP8_BY_F16, (kind, kind), 32, cases // 2, 7, to_f16)
    compare(core, FP8_BY_F16, (kind, kind), 64, cases // 2, 8, to_f16)


@pytest.mark.parametrize("cases", [pytest.param(1, id="quick")])
def test_empty_sums(cases: int) -> None:
    """No products at all: the accumulator as it is, or cut to the result's format."""
    a, b = np.zeros((1, 0, 3), np.float32), np.zeros((0, 1, 3), np.float32)
    c = np.array([[[1.5, -0.0, np.inf]]], np.float32)
    for core in TENSOR_CORES.values():
        assert dot_accumulate(a, b, c, core).tobytes() == c.tobytes()
    zeros = np.zeros((1, 16, 3), np.float32)
    kept = dot_accumulate(zeros, zeros.reshape(16, 1, 3), c, TENSOR_CORES["sm_90", "bf16"])
    assert kept.view(np.uint32).ravel().tolist() == [0x3FC00000, 0, 0x7F800000]


@pytest.mark.parametrize("cases", TIERS)
@pytest.mark.parametrize(("arch", "kind"), ALL_UNITS)
def test_plain_matrices(arch: str, kind: str, cases: int) -> None:
    """The quick way through BLAS gives the bits of the other, whatever the values and shapes."""
    core = tensor_core(arch, kind)
    rng = np.random.default_rng(9)
    for _ in range(cases // 500):
        rows, columns = rng.integers(16, 80, 2)
        depth = int(rng.integers(1, 5)) * core.terms + int(rng.integers(0, core.terms))
        scale = float(rng.choice([0, 2, 8]))
        a, b, c = (
            rng.standard_normal(shape) * np.exp2(rng.uniform(-scale, scale, shape))
            for shape in ((rows, depth), (depth, columns), (rows, columns))
        )
        if rng.random() < 0.5:
            a[rng.random(a.shape) < 0.2] = 0
            a[rng.random(rows) < 0.1] = 0
        c[rng.random(c.shape) < 0.3] = 0
        left, right = inputs_near(a, kind), inputs_near(b, kind)
        start = c.astype(np.float32)
        if rng.random() < 0.3:
            # What the quick way leaves to the other.
            odd = [np.inf, -np.inf, np.nan, 2.0**-149, -(2.0**-126), 3e38]
            place = rng.integers(0, start.size, 3)
            start.flat[place] = rng.choice(np.array(odd, np.float32), 3)
        whole = dot_accumulate(left, right, start, core)
        # With a second batch element, no longer a plain matrix.
        batch = dot_accumulate(
            np.stack([left, left], 2), np.stack([right, right], 2), start[..., None], core
        )
        assert whole.tobytes() == np.ascontiguousarray(batch[..., 1]).tobytes()


@pytest.mark.parametrize("middle", [-40, 0, 25])
@pytest.mark.parametrize(
    "spans", [(0, 61), (30, 31), (61, 0), (47, 14), (15, 47), (63, 0), (31, 32), (40, 41)]
)
@pytest.mark.parametrize("kind", ["bf16", "tf32"])
def test_exponents_far_apart(kind: str, spans: tuple[int, int], middle: int) -> None:
    """Exponents of products up to the limit of narrow powers and beyond, extremes side by side."""
    core = tensor_core("sm_80", kind)
    rng = np.random.default_rng(spans)
    # Of whole rows and columns, the extremes among them, so that steps see nothing larger; sums
    # have bits just below those that a step keeps.
    by_row, by_column = (
        rng.integers(0, span + 1, n) for span, n in zip(spans, (32, 40), strict=True)
    )
    by_row[:2], by_column[:2] = (0, spans[0]), (0, spans[1])
    by_row, by_column = by_row - spans[0] // 2 + middle, by_column - spans[1] // 2
    left, right = (
        inputs_near(rng.choice([-1, 1], shape) * rng.uniform(1, 2, shape) * np.exp2(e), kind)
        for shape, e in (((32, 32), by_row[:, None]), ((32, 40), by_column))
    )
    near = np.exp2(by_row[:, None] + by_column + rng.integers(-4, 3, (32, 40)))
    start = (rng.standard_normal((32, 40)) * near).astype(np.float32)
    whole = dot_accumulate(left, right, start, core)
    batch = dot_accumulate(
        np.stack([left, left], 2), np.stack([right, right], 2), start[..., None], core
    )
    assert whole.tobytes() == np.ascontiguousarray(batch[..., 1]).tobytes()


@pytest.mark.parametrize(("arch", "kind"), ALL_UNITS)
def test_largest_sums(arch: str, kind: str) -> None:
    """Significands of all ones and one sign: what a step adds up is as large as it can be."""
    core = tensor_core(arch, kind)
    ones = inputs_near(np.full((32, 32), 1.9999999), kind)
    start = np.full((32, 32), np.nextafter(np.float32(2), np.float32(0)))
    whole = dot_accumulate(ones, ones, start, core)
    pair = np.stack([ones, ones], 2)
    batch = dot_accumulate(pair, pair, start[..., None], core)
    assert whole.tobytes() == np.ascontiguousarray(batch[..., 1]).tobytes()


@pytest.mark.parametrize("size", [-100, -60, 0, 60])
@pytest.mark.parametrize("kind", ["bf16", "tf32"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_infinities_in_plain_matrices(arch: str, kind: str, size: int) -> None:
    """However small the other operand: the sum of the two greatest exponents says nothing."""
    core = tensor_core(arch, kind)
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((64, 32)), rng.standard_normal((32, 64)) * 2.0**size
    left, right = inputs_near(a, kind), inputs_near(np.abs(b), kind)
    left[0, 0], left[1, 1], left[2, 2] = np.inf, np.nan, -np.inf
    got = dot_accumulate(left, right, np.zeros((64, 64), np.float32), core)
    assert (got[0] == np.inf).all()
    assert (got[1].view(np.uint32) == 0x7FFFFFFF).all()
    assert (got[2] == -np.inf).all()
    assert np.isfinite(got[3:]).all()
    # Operands in each other's place.
    turned = dot_accumulate(
        np.ascontiguousarray(right.T), np.ascontiguousarray(left.T), np.float32(0), core
    )
    assert turned.T.tobytes() == got.tobytes()


def test_formats_that_an_architecture_lacks() -> None:
    with pytest.raises(DtypeError, match=r"sm_80 take no e4m3 inputs.*sm_89.*f16, bf16, tf32"):
        tensor_core("sm_80", "e4m3")
    with pytest.raises(DtypeError, match=r"sm_75 take no bf16 inputs.*sm_80.*f16"):
        warp_tensor_core("sm_75", "bf16", 16)
    with pytest.raises(DtypeError, match=r"no tensor-core model for sm_90a with e2m1 inputs"):
        tensor_core("sm_90a", "e2m1")
    with pytest.raises(DtypeError, match=r"no tensor-core model for sm_61 with f16 inputs"):
        tensor_core("sm_61", "f16")


# Recorded results of real GPUs, if they are at hand: the folder model_validation of
# github.com/north-numerical-computing/MATLAB-tensor-core (Khattak and Mikaitis, BSD licence).
RECORDINGS = os.environ.get("SIMKIT_TENSOR_CORE_RECORDINGS", "")
GPUS = {
    "V100": "sm_70",
    "A100": "sm_80",
    "A2": "sm_80",
    "Ada": "sm_89",
    "L40S": "sm_89",
    "H100": "sm_90",
    "H200": "sm_90",
    "B200": "sm_100",
}
RECORDED = {"fp16": "f16", "bf16": "bf16", "tf32": "tf32", "E4M3": "e4m3", "E5M2": "e5m2"}


def recorded(path: Path, base: int) -> NDArray[np.float32]:
    rows = [[int(word, base) for word in line.split()] for line in path.read_text().split("\n")]
    return np.array([row for row in rows if row], np.uint32).view(np.float32)


@pytest.mark.proof
@pytest.mark.skipif(not RECORDINGS, reason="SIMKIT_TENSOR_CORE_RECORDINGS names no folder")
@pytest.mark.parametrize("output", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", RECORDED)
@pytest.mark.parametrize("gpu", GPUS)
def test_recordings_of_gpus(gpu: str, kind: str, output: str) -> None:
    """5,000 dot products of each GPU, input and output format.

    fp8 on H100 and H200 with float32 results was recorded from wgmma without an accumulator,
    everything else from wmma and mma.sync.
    """
    folder = Path(RECORDINGS) / gpu / kind
    results = folder / f"d_{gpu}_{output}.txt"
    if not results.exists():
        pytest.skip("not recorded")
    a, b = (recorded(folder / f"{x}_{gpu}_{kind}.txt", 16) for x in "ab")
    c = recorded(folder / f"c_{gpu}_fp32.txt", 2)[:, 0]
    by_wgmma = gpu in ("H100", "H200") and RECORDED[kind].startswith("e") and output == "fp32"
    core = warp_tensor_core(GPUS[gpu], RECORDED[kind], 32)
    if by_wgmma:
        core, c = tensor_core(GPUS[gpu], RECORDED[kind]), np.zeros_like(c)
    if output == "fp16":
        core = half_precision(core)
    c = as_accumulator(c, output == "fp16")
    left, right = np.ascontiguousarray(a.T)[None], np.ascontiguousarray(b.T)[:, None]
    got = dot_accumulate(left, right, c[None, None], core)[0, 0]
    np.testing.assert_array_equal(got.view(np.uint32), recorded(results, 2)[:, 0].view(np.uint32))
