"""Every law holds, on the device that ``--on`` names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from properties.catalog import algorithms, law, laws
from properties.law import Context, Law, LawViolation, case_to_json
from properties.run import replay, run_law
from simkit.catalog import ALGORITHMS
from simkit.errors import SimkitError


@pytest.mark.parametrize("one", laws(), ids=lambda one: f"{one.algorithm}: {one.name}")
def test_law_holds(one: Law, context: Context) -> None:
    # A few cases of another seed than verify's, so that the two together try more; the many are
    # verify's.
    result = run_law(one, context, examples=-(-one.examples // 10), seed=1)
    assert result.status == "pass", f"{result.detail}\n{result.reproducer}"
    assert result.cases >= 1


KERNELS = [row.name for row in ALGORITHMS if row.kind == "kernel"]


def test_catalogue_and_laws_have_the_same_algorithms() -> None:
    # A schedule has the laws of the grid.
    own = [row.name for row in ALGORITHMS if row.kind != "schedule"]
    assert sorted(algorithms()) == sorted(own)


@pytest.mark.parametrize("algorithm", KERNELS)
def test_every_kernel_has_laws_of_bits_bytes_and_order(algorithm: str) -> None:
    names = " ".join(one.name for one in laws(algorithm))
    for kind in ("bits", "traffic", "schedules"):
        assert kind in names


@pytest.mark.parametrize("one", laws(), ids=lambda one: f"{one.algorithm}: {one.name}")
def test_cases_are_json(one: Law) -> None:
    for case in one.corners:
        assert one.case_from_json(case_to_json(case)) == case


def test_unknown_names_list_what_there_is() -> None:
    with pytest.raises(SimkitError, match="flash_attention"):
        laws("flash_atention")
    with pytest.raises(SimkitError, match="merge_identity"):
        law("flash_decoding", "merge_idenity")


@pytest.mark.parametrize("text", ["{", "[]", '{"q_length": 3}', "3"])
def test_bad_case_is_one_error(text: str) -> None:
    with pytest.raises(SimkitError):
        law("flash_attention", "bits").case_from_json(text)


def failing_law(least: int) -> Law:
    """The bits law's cases with a check that fails from a key length on."""
    one = law("flash_attention", "lse")

    def check(context: Context, case: object) -> None:
        if case.kv_len >= least:  # type: ignore[attr-defined]
            raise LawViolation(f"{case.kv_len} keys are too many")  # type: ignore[attr-defined]

    return replace(one, statement="", check=check, corners=(), examples=50, uses_device=False)


def test_failures_are_shrunk_and_replayable(context: Context) -> None:
    broken = failing_law(37)
    result = run_law(broken, context)
    assert result.status == "fail"
    case = broken.case_from_json(result.case)
    assert case.kv_len == 37
    assert (case.batch, case.kv_heads, case.group) == (1, 1, 1)
    assert result.case in result.reproducer
    assert replay(broken, context, case).status == "fail"
    assert replay(broken, context, type(case)(kv_len=36)).status == "pass"


def test_same_seed_same_cases(context: Context) -> None:
    def cases(seed: int) -> list[object]:
        seen: list[object] = []
        run_law(failing_law(10**6), context, examples=12, seed=seed, on_case=seen.append)
        return seen

    assert cases(3) == cases(3)
    assert cases(3) != cases(4)


def test_time_limit_ends_a_run(context: Context) -> None:
    result = run_law(failing_law(10**6), context, examples=10**6, seconds=0.2)
    assert result.status == "pass"
    assert 1 <= result.cases < 10**6


def test_errors_of_the_kernel_are_failures(context: Context) -> None:
    one = law("flash_attention", "bits")
    broken = Context(context.device, context.gpu, {"flash_attention": "this is not CUDA"})
    result = run_law(one, broken, examples=1, shrink=False)
    assert result.status == "fail"
    assert "CompileError" in result.detail
