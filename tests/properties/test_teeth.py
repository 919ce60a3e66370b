"""The oracle has teeth: a kernel broken by one edit of its source fails a law, which is named."""

from __future__ import annotations

import pytest
from faults import MUTANTS
from mutants import Mutant, edited_source

from properties.law import CheckResult
from properties.run import run_law
from simkit.catalog import ALGORITHMS

KERNELS = [row.name for row in ALGORITHMS if row.kind == "kernel"]


def first_failure(broken: Mutant) -> CheckResult | None:
    """The first law of those that should notice it which does, by its corners if they suffice."""
    context = broken.context()
    for examples in (0, 8):
        for name in broken.laws:
            one = broken.law(name)
            result = run_law(one, context, examples=examples, shrink=False, corners=not examples)
            if result.status == "fail":
                return result
    return None


@pytest.mark.parametrize("broken", MUTANTS, ids=lambda m: f"{m.algorithm}: {m.name}")
def test_broken_kernel_fails_a_law(broken: Mutant) -> None:
    result = first_failure(broken)
    assert result is not None, "no law noticed"
    assert result.reproducer.startswith(f"simkit verify {broken.algorithm} --law {result.law}")
    # It is the kernel that is wrong, not the text.
    assert result.detail
    assert "CompileError" not in result.detail


@pytest.mark.parametrize("algorithm", KERNELS)
def test_at_least_five_mutants(algorithm: str) -> None:
    assert sum(m.algorithm == algorithm for m in MUTANTS) >= 5


def test_edit_of_a_header_keeps_files_and_lines() -> None:
    """A header stands in the place of its include, between directives that name both files."""
    text = edited_source("batch_decode", "return shift == 0 ? low : ", "return ")
    lines = text.splitlines()
    start = lines.index('#line 1 "batch_attention.cuh"')
    assert lines[start - 2 : start] == [
        "#ifndef INLINED_batch_attention_cuh",
        "#define INLINED_batch_attention_cuh",
    ]
    # What is not changed, nor includes anything that is, stays an include.
    assert '#include "batch_step.cuh"' in lines
    back = lines.index('#line 8 "batch_decode.cu"')
    assert lines[back + 2].startswith('extern "C" __global__')
