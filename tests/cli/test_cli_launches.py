"""``simkit run launches`` and ``simkit trace launches``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def test_the_chapter_s_step_is_drawn_out_by_launching(cli, tmp_path: Path) -> None:
    path = tmp_path / "launches.json"
    output = cli("run", "launches", "--json", path).stdout
    assert "GPU idle" in output
    ways = json.loads(path.read_text())["ways"]
    assert ways["stream"]["host_seconds"] == pytest.approx(330 * 4e-6)
    assert ways["graph"]["seconds"] < ways["stream"]["seconds"]
    assert not ways["stream"]["is_launch_bound"]


def test_small_kernels_are_bound_by_launching_unless_in_a_graph(cli, tmp_path: Path) -> None:
    path = tmp_path / "launches.json"
    cli("run", "launches", "--set", "kernel_us=1.5", "--json", path)
    ways = json.loads(path.read_text())["ways"]
    assert ways["stream"]["is_launch_bound"]
    assert not ways["graph"]["is_launch_bound"]


def test_trace_has_an_arrow_from_each_call(cli, tmp_path: Path) -> None:
    path = tmp_path / "launches.json"
    given = ("--set", "kernels=4", "--set", "dependent=true", "--set", "prologue_us=3")
    output = cli("trace", "launches", *given, "--export", path).stdout
    assert "stream 0" in output
    flows = [row for row in json.loads(path.read_text())["traceEvents"] if row["ph"] == "s"]
    assert len(flows) == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--set", "kernels=0"), "kernels=0: it must be from 1"),
        (("--set", "kernels=30000"), "30000 kernels; this command takes 20000"),
        (("--set", "prologue_us=20"), "0 <= prologue <= seconds"),
    ],
)
def test_refused(cli, given: tuple[str, ...], message: str) -> None:
    assert message in " ".join(cli("run", "launches", *given, code=2).stderr.split())
