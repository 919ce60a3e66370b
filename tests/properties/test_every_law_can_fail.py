"""Every law can fail: for each, a kernel or a model with one fault that this very law notices."""

from __future__ import annotations

import pytest
from broken_planners import SPLIT, called
from faults import BROKEN_KERNELS, BROKEN_MODELS, find

import gpu
import properties.split_planner
from properties.catalog import law, laws
from properties.law import Context
from properties.run import run_law
from simkit.machine.gpus import gpu as find_gpu
from simkit.schedules import grid


@pytest.mark.parametrize("name", BROKEN_KERNELS, ids=": ".join)
def test_broken_kernel_fails_the_law(name: tuple[str, str]) -> None:
    algorithm, one = name
    broken = find(algorithm, BROKEN_KERNELS[name])
    result = run_law(broken.law(one), broken.context(), examples=8, shrink=False)
    assert result.status == "fail"
    # The law's own sentence, not an error on the way to it.
    assert "Error" not in result.detail.split(":")[0]


@pytest.mark.parametrize(
    ("name", "fault"),
    [(name, index) for name, faults in BROKEN_MODELS.items() for index in range(len(faults))],
    ids=str,
)
def test_broken_model_fails_the_law(
    name: tuple[str, str], fault: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a broken grid has measured is nothing for the tests that follow.
    monkeypatch.setattr(grid, "_MEASURED", {})
    monkeypatch.setattr(grid, "_ORDERS", {})
    BROKEN_MODELS[name][fault](monkeypatch)
    context = Context(gpu.open("ptx"), find_gpu("h100"))
    result = run_law(law(*name), context, shrink=False)
    assert result.status == "fail"
    assert "Error" not in result.detail.split(":")[0]


def test_published_decode_planner_overruns_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner's own check finds it, where the published one has none."""
    called(properties.split_planner, "decode_plan", published=True)(monkeypatch)
    context = Context(gpu.open("ptx"), find_gpu("h100"))
    result = run_law(law(SPLIT, "decode_grid"), context, shrink=False)
    assert result.status == "fail"
    assert "work items, but the grid has 27 CTAs" in result.detail


def test_no_law_is_left_out() -> None:
    named = {*BROKEN_KERNELS, *BROKEN_MODELS}
    assert named == {(one.algorithm, one.name) for one in laws()}
