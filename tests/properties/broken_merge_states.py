"""Merging attention states, broken: kernels by one edit of their text, and models by a patch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mutants import Mutant, mutant

import properties.merge_states
from simkit.numerics import lse
from simkit.numerics.merge_state_bounds import BoundedState, merge_bounded

MERGE = "merge_states"

MUTANTS: list[Mutant] = [
    mutant(
        MERGE,
        "states without keys are read",
        "    if (lse == negative_infinity()) return;\n",
        "",
    ),
    # The exponent by one multiply-add, with a residue that is not 0 for the largest LSE.
    mutant(
        MERGE,
        "product before the difference",
        "exp2_polynomial(__fmul_rn(__fsub_rn(lse, maximum), log2_e))",
        "softmax_weight(lse, log2_e, __fmul_rn(maximum, log2_e))",
    ),
    mutant(
        MERGE,
        "log2 e forgotten",
        "__fmul_rn(__fsub_rn(lse, maximum), log2_e)",
        "__fsub_rn(lse, maximum)",
    ),
    mutant(
        MERGE,
        "maximum is of the last state",
        "maximum = fmaxf(maximum, partial_lse[state * heads + head])",
        "maximum = partial_lse[state * heads + head]",
    ),
    mutant(MERGE, "total counts states", "__fadd_rn(total, weight)", "__fadd_rn(total, 1.0f)"),
    mutant(MERGE, "not divided", "softmax_output(output[chunk][i], total)", "output[chunk][i]"),
    mutant(MERGE, "-0 becomes +0", "output[chunk][i] = -0.0f", "output[chunk][i] = 0.0f"),
    mutant(
        MERGE, "LSE in base 2", "constexpr float ln2 = 0x1.62e430p-1f", "constexpr float ln2 = 1"
    ),
    mutant(
        MERGE,
        "last state skipped",
        "for (long long state = first; state < end; ++state) {\n    const",
        "for (long long state = first; state + 1 < end; ++state) {\n    const",
        "bits",
        "traffic",
    ),
    mutant(MERGE, "states of the next head", "= pair % heads;", "= (pair + 1) % heads;"),
    mutant(MERGE, "heads and states swapped", "pair / heads * states", "pair / states * states"),
    mutant(MERGE, "mask ignored", "mask[pair / heads] == 0", "false"),
    mutant(MERGE, "mask inverted", "mask[pair / heads] == 0", "mask[pair / heads] != 0"),
    mutant(MERGE, "own state forgotten", "  merged.add<OUTPUT>(o + pair * kHeadDim, own);\n", ""),
    mutant(
        MERGE,
        "scale forgotten",
        "merge_indptr[row + 1], v_scale)",
        "merge_indptr[row + 1], 1.0f)",
    ),
    mutant(
        MERGE,
        "table read as int32",
        "merge_indptr[row],\n",
        "reinterpret_cast<const int*>(merge_indptr)[row],\n",
    ),
    mutant(
        MERGE,
        "two warps write one head",
        "    store_output(o + pair * kHeadDim, scale);\n",
        "    pair = pair / 2 * 2;\n    store_output(o + pair * kHeadDim, scale);\n",
        "bits",
        "schedules",
        "hazards",
    ),
]

BROKEN_KERNELS: dict[tuple[str, str], str] = {
    (MERGE, "bits"): "states of the next head",
    (MERGE, "traffic"): "last state skipped",
    (MERGE, "schedules"): "two warps write one head",
    (MERGE, "hazards"): "two warps write one head",
    (MERGE, "accuracy"): "log2 e forgotten",
    (MERGE, "lse"): "LSE in base 2",
    (MERGE, "copy"): "-0 becomes +0",
    (MERGE, "identity"): "states without keys are read",
    (MERGE, "garbage"): "states without keys are read",
    (MERGE, "mask"): "mask ignored",
    (MERGE, "mean"): "not divided",
    (MERGE, "grouping"): "total counts states",
    (MERGE, "order"): "last state skipped",
    (MERGE, "chunks"): "total counts states",
}

Patch = Callable[[pytest.MonkeyPatch], None]


def scaled_bounds(factor: float) -> Patch:
    """The derived bounds times ``factor``."""

    def scaled(*args: Any, **named: Any) -> BoundedState:
        found = merge_bounded(*args, **named)
        return replace(found, o_error=found.o_error * factor, lse_error=found.lse_error * factor)

    return lambda patch: patch.setattr(properties.merge_states, "merge_bounded", scaled)


def unconverted(patch: pytest.MonkeyPatch) -> None:
    """Takes a base-2 LSE for a natural one."""
    patch.setitem(lse._TO_NATURAL, "2", np.float32(1))


BROKEN_MODELS: dict[tuple[str, str], list[Patch]] = {
    (MERGE, "bound_quality"): [scaled_bounds(1 / 100), scaled_bounds(100)],
    (MERGE, "conventions"): [unconverted],
}
