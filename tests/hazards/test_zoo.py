"""The hazard zoo as a truth table: what is broken is found, by kind and lines, nothing else is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from zoo import ZOO, Pair

import gpu
from gpu.counters import HAZARD_KINDS, Hazard, Report
from gpu.ptx.executor import PtxDevice
from gpu.ptx.schedule import Schedule

SCHEDULES = [Schedule("eager"), Schedule("lazy"), Schedule("random", 0), Schedule("random", 1)]


def device(schedule: Schedule) -> PtxDevice:
    opened = gpu.open("ptx", options=gpu.Options(hazards=True, schedule=schedule, budget=200_000))
    assert isinstance(opened, PtxDevice)
    return opened


def hazards(reports: Sequence[Report]) -> list[Hazard]:
    return [hazard for report in reports for hazard in report.hazards]


def lines(hazard: Hazard) -> set[int]:
    """The lines of the source that a hazard names: CUDA's if there are any, else PTX's."""
    found = re.findall(r"zoo\.cu:(\d+)", hazard.place + hazard.other_place)
    return set(map(int, found)) if found else {hazard.line, hazard.other_line} - {0}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.kind}{s.seed or ''}")
@pytest.mark.parametrize("pair", ZOO, ids=lambda pair: pair.name)
def test_what_is_right_has_no_hazards(pair: Pair, schedule: Schedule) -> None:
    found = hazards(pair.reports(device(schedule), is_broken=False))
    assert [h for h in found if h.severity == "error" or h.kind == pair.kind] == []


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.kind}{s.seed or ''}")
@pytest.mark.parametrize("pair", ZOO, ids=lambda pair: pair.name)
def test_what_is_broken_is_found(pair: Pair, schedule: Schedule) -> None:
    found = hazards(pair.reports(device(schedule), is_broken=True))
    of_kind = [hazard for hazard in found if hazard.kind in pair.kind.split(" or ")]
    assert of_kind, f"found only {[(h.kind, h.message) for h in found]}"
    if pair.lines() and of_kind[0].kind != "deadlock":
        assert any(lines(hazard) == pair.lines() for hazard in of_kind), [
            (hazard.message, lines(hazard)) for hazard in of_kind
        ]


def test_the_zoo_is_large_and_varied() -> None:
    assert 2 * len(ZOO) >= 40
    assert len({pair.name for pair in ZOO}) == len(ZOO)
    assert {kind for pair in ZOO for kind in pair.kind.split(" or ")} <= set(HAZARD_KINDS)


@pytest.mark.parametrize("is_broken", [False, True])
def test_ctas_that_are_not_resident_together(is_broken: bool) -> None:
    """More CTAs than run at once: order between them goes from wave to wave."""
    (pair,) = [p for p in ZOO if p.name == "the last CTA adds up: a fence before the ticket"]
    many = replace(pair, grid=1500)
    found = hazards(many.reports(device(Schedule("eager")), is_broken))
    kinds = {hazard.kind for hazard in found if hazard.severity == "error"}
    assert kinds == ({"race"} if is_broken else set())


def test_a_freed_array_is_named() -> None:
    (pair,) = [p for p in ZOO if p.name == "an array that has been freed"]
    found = hazards(pair.reports(device(Schedule("eager")), is_broken=True))
    assert any("byte 0 of 'x', which has been freed" in hazard.message for hazard in found)
