"""Configurations of batched attention: their keys and options, and users' own variants."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gpu
from gpu import jit
from gpu.kernels.batch_prefill_ragged import batch_prefill_ragged as run
from properties.batch_case import EXAMPLE_VARIANT, BatchCase
from properties.law import Context
from properties.run import run_law
from properties.user_variant import load_variant, variant_laws
from simkit.algorithms.batch_problem import batch_reference
from simkit.algorithms.variant import UserVariant, Variant
from simkit.errors import CompileError, DtypeError, ShapeError, SimkitError
from simkit.machine.gpus import gpu as find_gpu

CASE = BatchCase(q_lens=(20, 3), kv_lens=(70, 9), tile_q=16)


def configuration(case: BatchCase) -> jit.Configuration:
    return jit.Configuration.of("batch_prefill_ragged", case.problem, case.plan)


def test_keys_are_readable() -> None:
    assert configuration(CASE).key == "batch_prefill_ragged-d64-q16-bf16"
    rich = replace(
        CASE, d=128, dv=64, element="f16", kv="e4m3", index_bits=64, window_left=5,
        variant="causal+soft_cap+sink+damped",
    )  # fmt: skip
    *words, user = configuration(rich).key.split("-")
    assert "-".join(words) == (
        "batch_prefill_ragged-d128v64-q16-f16-kv_e4m3-i64-causal-window-soft_cap-sink"
    )
    assert re.fullmatch(r"user_damped\.[0-9a-f]{8}", user)


def test_different_configurations_have_different_keys_and_options() -> None:
    plain = configuration(CASE)
    changes = (
        {"head_dim": 128}, {"head_dim_v": 128}, {"tile_q": 64}, {"units": "cuda_cores"},
        {"element": "f16"}, {"kv": "e4m3"}, {"order": "HND"}, {"index_bits": 64}, {"causal": True},
        {"window": True}, {"custom_mask": True}, {"soft_cap": True}, {"alibi": True},
        {"sink": True}, {"rope": True}, {"user": "mine"},
    )  # fmt: skip
    found = [plain, *(replace(plain, **change) for change in changes)]  # type: ignore[arg-type]
    assert len({one.key for one in found}) == len(found)
    assert len({one.options for one in found}) == len(found)


def test_lengths_and_numbers_are_no_part_of_it() -> None:
    """One module serves all batches: lengths, windows, caps and groups are arguments."""
    case = replace(CASE, variant="causal+soft_cap", window_left=5)
    other = replace(case, q_lens=(1,) * 30, kv_lens=(300,) * 30, window_left=80, seed=9, group=7)
    assert configuration(case) == configuration(other)


def test_keys_tell_texts_of_one_name_apart() -> None:
    problem = replace(CASE, variant="damped").problem
    changed = replace(EXAMPLE_VARIANT, cuda=EXAMPLE_VARIANT.cuda + " ")
    other = replace(problem, variant=replace(problem.variant, user=changed))
    keys = {jit.Configuration.of("k", one, CASE.plan).key for one in (problem, other)}
    assert len(keys) == 2


# Variants of one's own

RELATIVE = UserVariant(
    name="relative_bias",
    cuda="""
  static __device__ __forceinline__ float logit(float logit, const Place& at, const float* values) {
    const int distance = min(abs(at.position() - at.key), 15);
    return __fadd_rn(logit, values[distance]);
  }
""",
    logit=lambda logit, at, values: logit + values[np.minimum(np.abs(at.position - at.key), 15)],
    values=np.linspace(1, -2, 16).astype(np.float32),
)


def test_a_variant_obeys_the_laws() -> None:
    context = Context(gpu.open("ptx"), find_gpu("h100"))
    for law in variant_laws(RELATIVE, examples=2):
        if law.name in ("bits", "traffic"):
            result = run_law(law, context)
            assert result.status == "pass", result.detail


def test_a_variant_and_its_reference() -> None:
    problem = replace(CASE.problem, variant=Variant(causal=True, user=RELATIVE))
    o, lse = batch_reference(problem)
    found = run(gpu.open("ptx"), problem, replace_plan(problem)).outputs
    assert np.abs(found["o"].astype(np.float64) - o).max() < 0.02
    assert np.abs(found["lse"] - lse).max() < 1e-5


def replace_plan(problem):  # type: ignore[no-untyped-def]
    return replace(CASE, variant="causal").plan


def test_a_counterpart_that_computes_something_else_is_noticed() -> None:
    context = Context(gpu.open("ptx"), find_gpu("h100"))
    wrong = replace(RELATIVE, name="wrong_sign", logit=lambda x, at, values: x - values[0])
    bits = next(law for law in variant_laws(wrong, examples=2) if law.name == "bits")
    assert run_law(bits, context, shrink=False).status == "fail"


def test_a_variant_that_does_not_compile_is_named_with_its_line() -> None:
    broken = UserVariant(
        name="broken", cuda="\n  static __device__ float logit(float x) { return y; }"
    )
    problem = replace(CASE.problem, variant=Variant(user=broken))
    with pytest.raises(CompileError, match=r'broken\(2\): error: identifier "y" is undefined'):
        run(gpu.open("ptx"), problem, CASE.plan)


def test_a_counterpart_that_raises_is_named() -> None:
    context = Context(gpu.open("ptx"), find_gpu("h100"))
    raising = replace(RELATIVE, name="raising", logit=lambda x, at, values: x / values[1000])
    for law in variant_laws(raising, examples=0)[:1]:
        result = run_law(law, context, shrink=False)
        assert result.status == "fail"
        assert "variant raising: its logit in Python raises IndexError" in result.detail


def test_names_and_values_of_variants() -> None:
    with pytest.raises(ShapeError, match="identifier"):
        UserVariant(name="two words", cuda="")
    with pytest.raises(DtypeError, match="float64"):
        UserVariant(name="wide", cuda="", values=np.zeros(3))  # type: ignore[arg-type]
    variant_laws(RELATIVE)
    with pytest.raises(SimkitError, match="already"):
        variant_laws(replace(RELATIVE, cuda=""))


def test_variants_come_from_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from simkit.algorithms.variant import UserVariant\n"
        "VARIANT = UserVariant(name='mine', cuda='')\n"
    )
    assert load_variant(file).name == "mine"
    for text, message in (("x = 1", "must define VARIANT"), ("1 / 0", "ZeroDivisionError")):
        file.write_text(text)
        with pytest.raises(SimkitError, match=message):
            load_variant(file)
    with pytest.raises(SimkitError, match="no Python file"):
        load_variant(tmp_path / "none.py")
