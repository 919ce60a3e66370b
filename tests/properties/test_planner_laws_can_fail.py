"""Every law of the planners can fail: for each, planners with one fault that this law notices."""

from __future__ import annotations

import pytest
from broken_planners import BROKEN_PLANNERS, PREFILL, SPLIT, called

import gpu
import properties.split_planner as split_laws
from properties.catalog import law, laws
from properties.law import Context
from properties.run import run_law
from simkit.machine.gpus import gpu as find_gpu

CONTEXT = Context(gpu.open("ptx"), find_gpu("h100"))


@pytest.mark.parametrize(
    ("name", "fault"),
    [(name, index) for name, faults in BROKEN_PLANNERS.items() for index in range(len(faults))],
    ids=str,
)
def test_broken_planner_fails_the_law(
    name: tuple[str, str], fault: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    BROKEN_PLANNERS[name][fault](monkeypatch)
    result = run_law(law(*name), CONTEXT, shrink=False)
    assert result.status == "fail"
    assert "Error" not in result.detail.split(":")[0]


def test_published_decode_planner_overruns_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own check finds it, where the published planner has none."""
    called(split_laws, "decode_plan", published=True)(monkeypatch)
    result = run_law(law(SPLIT, "decode_grid"), CONTEXT, shrink=False)
    assert result.status == "fail"
    assert "work items, but the grid has 27 CTAs" in result.detail


@pytest.mark.parametrize("planner", [PREFILL, SPLIT])
def test_laws_hold_and_each_has_a_broken_planner(planner: str) -> None:
    for one in laws(planner):
        result = run_law(one, CONTEXT)
        assert result.status == "pass", result.detail
        assert BROKEN_PLANNERS[planner, one.name]
