"""The oracle has teeth: a kernel broken by one edit of its source fails a law, which is named."""

from __future__ import annotations

import pytest
from mutants import CACHE, DECODING, FLASH, MUTANTS, NAIVE, Mutant

from properties.catalog import laws
from properties.law import CheckResult, Context
from properties.run import run_law


def first_failure(broken: Mutant, context: Context) -> CheckResult | None:
    """The first law that fails, tried in the order verify uses."""
    for law in laws(broken.algorithm):
        if not law.uses_device:
            continue
        result = run_law(law, context, examples=8, shrink=False)
        if result.status == "fail":
            return result
    return None


@pytest.mark.parametrize("broken", MUTANTS, ids=lambda m: f"{m.algorithm}: {m.name}")
def test_broken_kernel_fails_a_law(broken: Mutant) -> None:
    result = first_failure(broken, broken.context())
    assert result is not None, "no law noticed"
    assert result.law in broken.laws
    assert result.reproducer.startswith(f"simkit verify {broken.algorithm} --law {result.law}")
    assert result.detail


@pytest.mark.parametrize("algorithm", [NAIVE, FLASH, DECODING, CACHE])
def test_at_least_five_mutants(algorithm: str) -> None:
    assert sum(m.algorithm == algorithm for m in MUTANTS) >= 5
