"""Every law can fail: for each, a kernel or a model with one fault that this very law notices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mutants import CACHE, DECODING, FLASH, NAIVE, find

import gpu
import properties.flash_attention
import properties.flash_decoding
from properties.catalog import law, laws
from properties.law import Context
from properties.run import run_law
from simkit.algorithms import fp8_error_study as study
from simkit.machine.gpus import gpu as find_gpu
from simkit.numerics import formats
from simkit.numerics.online_softmax import OnlineSoftmax

BROKEN_KERNELS = {
    (NAIVE, "bits"): "wrong V head",
    (NAIVE, "traffic"): "output skips the tail",
    (NAIVE, "schedules"): "no barrier before tiles are overwritten",
    (NAIVE, "hazards"): "barrier of the output loop dropped",
    (NAIVE, "accuracy"): "mask edge off by one",
    (FLASH, "bits"): "wrong KV head",
    (FLASH, "traffic"): "one tile read too often",
    (FLASH, "schedules"): "barrier before O is stored dropped",
    (FLASH, "hazards"): "wait for the copy of K and V dropped",
    (FLASH, "accuracy"): "accumulator not rescaled",
    (FLASH, "lse"): "LSE in base 2 units",
    (DECODING, "bits"): "merge without the other's weight",
    (DECODING, "traffic"): "splits lose the last tile",
    (DECODING, "schedules"): "barrier between scores and softmax dropped",
    (DECODING, "hazards"): "empty split leaves its sum unwritten",
    (DECODING, "accuracy"): "output not rescaled",
    (DECODING, "lse"): "maximum not scaled",
    (DECODING, "splitting"): "wrong offset of the partial output",
    (CACHE, "layout"): "RoPE not copied",
    (CACHE, "quantize_bits"): "amax over half a tile",
    (CACHE, "quantize_traffic"): "last token skipped",
    (CACHE, "quantize_schedules"): "two tokens in one record",
    (CACHE, "quantize_hazards"): "two tokens in one record",
    (CACHE, "dequantize_hazards"): "two tokens read into one",
    (CACHE, "dequantize_bits"): "bytes of a pair swapped",
    (CACHE, "dequantize_traffic"): "last token not read",
    (CACHE, "dequantize_schedules"): "two tokens read into one",
    (CACHE, "round_trip"): "scale of the neighbour tile",
    (CACHE, "idempotent"): "bytes of a pair swapped",
}


@pytest.mark.parametrize("name", BROKEN_KERNELS, ids=": ".join)
def test_broken_kernel_fails_the_law(name: tuple[str, str]) -> None:
    algorithm, one = name
    context = find(algorithm, BROKEN_KERNELS[name]).context()
    result = run_law(law(algorithm, one), context, examples=8, shrink=False)
    assert result.status == "fail"
    # The law's own sentence, not an error on the way to it.
    assert "Error" not in result.detail.split(":")[0]


Patch = Callable[[pytest.MonkeyPatch], None]


def scaled_bounds(algorithm: Any, function: str, factor: float) -> Patch:
    """The derived bounds times ``factor``."""
    original = getattr(algorithm, function)

    def scaled(*args: Any) -> Any:
        bounds = original(*args)
        return replace(bounds, o=bounds.o * factor, lse=bounds.lse * factor)

    return lambda patch: patch.setattr(algorithm, function, scaled)


def broken_merge(merge: Callable[[OnlineSoftmax, OnlineSoftmax], OnlineSoftmax]) -> Patch:
    return lambda patch: patch.setattr(OnlineSoftmax, "merge", merge)


def unscaled_merge(one: OnlineSoftmax, other: OnlineSoftmax) -> OnlineSoftmax:
    """Forgets the weight of the second state."""
    m = np.maximum(one.m, other.m)
    weight = np.exp2(one.m - np.where(np.isneginf(m), 0, m))
    o = np.nan_to_num(one.o) * weight[:, None] + np.nan_to_num(other.o)
    return OnlineSoftmax(m, one.l * weight + other.l, o)


def merge_that_reads_empty_outputs(one: OnlineSoftmax, other: OnlineSoftmax) -> OnlineSoftmax:
    """Multiplies what an empty state holds by zero instead of ignoring it."""
    m = np.maximum(one.m, other.m)
    shift = np.where(np.isneginf(m), 0, m)
    a, b = np.exp2(one.m - shift), np.exp2(other.m - shift)
    return OnlineSoftmax(m, one.l * a + other.l * b, one.o * a[:, None] + other.o * b[:, None])


def ties_toward_zero(patch: pytest.MonkeyPatch) -> None:
    """Rounds e4m3 ties toward zero."""
    encode = formats.encode_e4m3
    patch.setattr(formats, "encode_e4m3", lambda x: encode(np.nextafter(x, np.float32(0))))


def unrounded_study(patch: pytest.MonkeyPatch) -> None:
    """Leaves everything unrounded that the paper rounds to e4m3."""
    patch.setattr(study, "round_e4m3", lambda x: x)


BROKEN_MODELS: dict[tuple[str, str], list[Patch]] = {
    (FLASH, "bound_quality"): [
        scaled_bounds(properties.flash_attention, "problem_bounds", 1 / 100),
        scaled_bounds(properties.flash_attention, "problem_bounds", 100),
    ],
    (DECODING, "bound_quality"): [
        scaled_bounds(properties.flash_decoding, "decoding_bounds", 1 / 100),
        scaled_bounds(properties.flash_decoding, "decoding_bounds", 100),
    ],
    (DECODING, "merge_associative"): [broken_merge(unscaled_merge)],
    (DECODING, "merge_commutative"): [broken_merge(unscaled_merge)],
    (DECODING, "merge_exact"): [broken_merge(unscaled_merge)],
    (DECODING, "merge_identity"): [broken_merge(merge_that_reads_empty_outputs)],
    (CACHE, "codecs"): [ties_toward_zero],
    ("fp8_error_study", "published"): [unrounded_study],
}


@pytest.mark.parametrize(
    ("name", "fault"),
    [(name, index) for name, faults in BROKEN_MODELS.items() for index in range(len(faults))],
    ids=str,
)
def test_broken_model_fails_the_law(
    name: tuple[str, str], fault: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    BROKEN_MODELS[name][fault](monkeypatch)
    context = Context(gpu.open("ptx"), find_gpu("h100"))
    result = run_law(law(*name), context, shrink=False)
    assert result.status == "fail"
    assert "Error" not in result.detail.split(":")[0]


def test_no_law_is_left_out() -> None:
    named = [*BROKEN_KERNELS, *BROKEN_MODELS]
    assert sorted(named) == sorted((one.algorithm, one.name) for one in laws())
