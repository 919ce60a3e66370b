"""``simkit run`` and ``simkit trace`` of the planners, and their timelines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from simkit.cli.app import app
from simkit.errors import ShapeError
from simkit.machine.gpus import gpu
from simkit.planning.outcome import PlanProblem
from simkit.planning.prefill_planner import PREFILL_PLANNERS, prefill_planner
from simkit.planning.split_planner import SPLIT_PLANNERS, split_planner
from simkit.schedules import plan_timeline
from traces import chrome

H100 = gpu("h100")


def simkit(*words: object, code: int = 0) -> Result:
    environment = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    result = CliRunner().invoke(app, [str(word) for word in words], env=environment)
    assert result.exit_code == code, result.output
    assert max(map(len, result.stdout.splitlines()), default=0) <= 80
    return result


def settings(*given: str) -> list[str]:
    return [part for one in given for part in ("--set", one)]


def test_run_shows_plan_and_load(tmp_path: Path) -> None:
    """The published decode step of 64, 128, 256 and 512 pages: chunks of 512 keys, 30 items."""
    path = tmp_path / "plan.json"
    lengths = settings("q_len=1", "kv_len=1024,2048,4096,8192")
    output = simkit("run", "prefill_planner", *lengths, "--json", path).stdout
    for name in PREFILL_PLANNERS:
        assert name in output
    assert "Plan of the grid planner" in output
    found = json.loads(path.read_text())
    grid = found["plans"][0]
    assert (grid["planner"], grid["facts"]["kv_chunk"], grid["facts"]["grid"]) == ("grid", 512, 30)
    assert len(grid["items"]["cost"]) == 30 * 8
    assert grid["load"]["total"] == sum(grid["load"]["loads"]) == sum(grid["items"]["cost"])
    # Each key once for each of 8 heads, and 32 for each item's tile of 16 rows.
    assert grid["load"]["total"] == 8 * (15_360 + 30 * 32)
    assert found["settings"]["kv_len"] == "1024,2048,4096,8192"


def test_run_of_the_split_planners(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = settings("batch=1", "kv_len=8192", "group=1", "page=1")
    output = simkit("run", "split_planner", *words, "--gpu", "a100", "--json", path).stdout
    for name in SPLIT_PLANNERS:
        assert name in output
    facts = {plan["planner"]: plan["facts"] for plan in json.loads(path.read_text())["plans"]}
    assert facts["fa2"]["splits"] == 22
    # A window is not what these planners are for: all refuse, with one message.
    one = settings("planner=decode", "kv_len=100_000")
    assert "decode" in simkit("run", "split_planner", *one).stdout


def test_one_planner_and_those_that_refuse() -> None:
    words = settings("window_left=127", "kv_len=900,30")
    output = simkit("run", "prefill_planner", *words, *settings("q_len=1")).stdout
    assert "sm90 refused: window_left is 127; this planner knows no windows." in output
    error = simkit("run", "prefill_planner", *words, *settings("q_len=1", "planner=mla"), code=2)
    assert "window_left is 127" in error.stderr


def test_many_requests_are_cut_short() -> None:
    output = simkit("run", "prefill_planner", *settings("batch=50", "q_len=1", "kv_len=64")).stdout
    assert "and 18 more requests; --json has all." in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("planner=fa9",), "--set planner=fa9: it is all, or one of fa2, fa3, fa4, decode, flashm"),
        (("kv_len=1,x",), "--set kv_len=1,x: it must be a whole number, or some with commas"),
        (("kv_len=1,2", "q_len=1,1,1"), "q_len has 3 lengths and kv_len has 2"),
        (("q_len=2",), "q_lens[0] is 2; a decode step has one query for each request"),
        (("kv_len=-4",), "kv_lens[0] = -4 is outside 0 to 2147483647"),
        (("heads=3",), "no setting 'heads'; it has: q_len (one number, or some with commas)"),
        (("page=0",), "--set page=0: it must be from 1 to"),
    ],
)
def test_run_refuses(words: tuple[str, ...], message: str) -> None:
    assert message in simkit("run", "split_planner", *settings(*words), code=2).stderr


def test_run_has_no_kernel() -> None:
    error = simkit("run", "prefill_planner", "--on", "ptx", code=2).stderr
    assert "prefill_planner is a planner: a model without a kernel to run on ptx" in error


@pytest.mark.parametrize(
    ("algorithm", "planner", "lane"),
    [("prefill_planner", "grid", "CTA slot"), ("prefill_planner", "mla", "cluster"),
     ("split_planner", "fa3", "CTA slot"), ("split_planner", "flashmla", "part")],
)  # fmt: skip
def test_trace_draws_and_exports(tmp_path: Path, algorithm: str, planner: str, lane: str) -> None:
    path = tmp_path / "trace.json"
    words = settings(f"planner={planner}", "q_len=1", "lanes=5")
    summary = tmp_path / "summary.json"
    output = simkit("trace", algorithm, *words, "--export", path, "--json", summary).stdout
    assert f"  {lane} " in output
    assert "5 of" in output
    found = chrome.load(path)
    tracks = json.loads(summary.read_text())["tracks"]
    assert len(tracks) == len(found.tracks) > 5
    assert max(track["used"] for track in tracks) == pytest.approx(1)


def test_trace_of_all_workers() -> None:
    words = settings("planner=mla", "batch=1", "q_len=1", "kv_len=8", "lanes=200", "group=16")
    assert "workers, the most" not in simkit("trace", "prefill_planner", *words).stdout


def test_timeline_is_the_placement() -> None:
    """A key of 128 + 128 bf16 values over a 264th of HBM's bytes per cycle."""
    problem = PlanProblem(q_lens=np.ones(3, int), kv_lens=np.array([100, 900, 5000]))
    (found,) = (one for one in prefill_planner(problem, 132).outcomes if one.planner == "grid")
    trace = plan_timeline.prefill_planner(H100, problem, "grid")
    cycles = 512 * 264 * 1.8295e9 / 3352.32e9
    assert len(trace.tracks) == found.placement.workers == 264
    assert len(trace.events) == len(found.items)
    assert trace.stop == pytest.approx(found.placement.makespan * cycles)
    for number, track in enumerate(trace.tracks):
        spent = sum(event.duration for event in trace.events if event.track == track)
        assert spent == pytest.approx(found.placement.loads[number] * cycles)
    keys = sum(int(e.args["stop_key"]) - int(e.args["first_key"]) for e in trace.events)
    assert keys == 8 * 6000


def test_timeline_of_too_much() -> None:
    problem = PlanProblem(q_lens=np.array([128 * 2501]), kv_lens=np.array([1]), group=1)
    with pytest.raises(ShapeError, match="grid has 20008 items; a timeline shows 20000"):
        plan_timeline.prefill_planner(H100, problem)


def test_fa2_leaves_splits_of_short_requests_empty() -> None:
    """Cut from the longest of 8192 keys, a request of 1024 has all its blocks in one split."""
    lengths = np.array([1024, 8192])
    problem = PlanProblem(q_lens=np.ones(2, int), kv_lens=lengths, kv_heads=1, group=1)
    by_name = {one.planner: one for one in split_planner(problem, 132).outcomes}
    fa2, fa3 = by_name["fa2"].items, by_name["fa3"].items
    splits = int(by_name["fa2"].facts["splits"])
    assert np.count_nonzero(fa2[:, 0] == 0) == np.count_nonzero(fa2[:, 0] == 1) == splits
    used = fa2[(fa2[:, 0] == 0) & (fa2[:, 4] > fa2[:, 3])]
    assert len(used) == -(-8 // -(-64 // splits)) < splits
    # FlashAttention-3 takes the long request first, and gives it more splits.
    assert fa3[0, 0] == 1
    assert np.count_nonzero(fa3[:, 0] == 1) > np.count_nonzero(fa3[:, 0] == 0)


def test_problem_refuses() -> None:
    with pytest.raises(ShapeError, match="page_size is 0"):
        PlanProblem(q_lens=np.ones(1, int), kv_lens=np.ones(1, int), page_size=0)
