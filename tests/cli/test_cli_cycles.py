"""``simkit run`` of schedules, ``tune`` and ``report``: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simkit.cli import tune
from simkit.cli.timed import TIMED

SMALL = ("--set", "n=1024", "--set", "batch=1", "--set", "heads=2")


def words(output: str) -> str:
    return " ".join(output.split())


def test_what_if_says_what_bounds_a_schedule(cli, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    output = cli("run", "flash_attention_3", *SMALL, "--set", "tile_kv=128", "--json", path).stdout
    for line in ("CTAs per SM", "limited by", "bound by", "board power", "sensitivity"):
        assert line in output
    data = json.loads(path.read_text())
    launch = data["launches"][0]
    assert data["settings"]["tile_kv"] == 128
    assert data["settings"]["stages"] == "auto"
    assert data["seconds"] > launch["seconds"] > 0
    assert launch["ctas_per_sm"] == 1
    assert "shared memory" in launch["limiters"]
    assert 0 < launch["utilisation"]["tensor"] < 1


def test_a_choice_changes_the_prediction(cli, tmp_path: Path) -> None:
    def seconds(*given: str) -> float:
        path = tmp_path / "run.json"
        cli("run", "flash_attention_3", "--set", "n=2048", *given, "--json", path)
        return float(json.loads(path.read_text())["seconds"])

    assert seconds() < seconds("--set", "specialised=false", "--set", "ping_pong=false")
    assert seconds("--gpu", "b200") < seconds()


@pytest.mark.parametrize("name", TIMED)
def test_every_schedule_runs_on_the_cycle_model(cli, name: str) -> None:
    gpu = ("--gpu", "h800")
    small = {"mla_decode": ("--set", "batch=4"), "mla_sparse_decode": ("--set", "batch=2"),
             "mla_sparse_prefill": ("--set", "q_len=64")}  # fmt: skip
    given = small.get(name, ("--set", "n=512", "--set", "batch=1"))
    assert "In all" in cli("run", name, "--on", "cycles", *gpu, *given).stdout
    drawn = cli("trace", name, "--on", "cycles", *gpu, *given, "--set", "tiles=2").stdout
    assert "critical path:" in drawn
    assert "HBM" in drawn


def test_the_grid_is_drawn_on_request(cli) -> None:
    given = ("--set", "n=512", "--set", "batch=1", "--set", "heads=2", "--set", "grid=true")
    assert "items on" in words(cli("trace", "flash_attention_3", *given).stdout)


def test_what_is_drawn_is_said(cli) -> None:
    given = (*SMALL, "--set", "tile_kv=128", "--arrows", 0)
    output = cli("trace", "flash_attention_3", *given, "--set", "tiles=2").stdout
    assert "1 CTA of an SM: 0 to" in output
    assert "one SM, the first 2 of 8 tiles of its longest item" in words(output)
    output = cli("trace", "flash_attention_3", *given, "--set", "tiles=1000").stdout
    assert "one SM, all 8 tiles of its longest item" in words(output)


def test_too_many_tiles_are_refused_before_they_are_timed(cli) -> None:
    given = ("--set", "n=1000000", "--set", "tiles=5000")
    error = words(cli("trace", "flash_attention_2", *given, code=2).stderr)
    assert "--set tiles=5000: 5,000 tiles of flash_attention_2 are too many to draw" in error
    assert "it must be 2,048 or less" in error


def test_a_launch_that_there_is_not_is_refused(cli) -> None:
    given = ("--set", "batch=4", "--set", "launch=2")
    error = cli("trace", "mla_decode", *given, code=2).stderr
    assert "--set launch=2: mla_decode has 0 (mla_decode), 1 (mla_combine)" in words(error)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--set", "tile_kv=100"), "tile_kv must be a multiple of 8 from 8 to 256, got 100"),
        (("--set", "tile_q=96"), "tile_q must be 64, 128 or 192, got 96"),
        (("--set", "stages=0"), "stages=0: it must be from 1"),
        (("--set", "overlap=maybe"), "overlap=maybe: it is true or false"),
        (("--set", "warps=4"), "has no setting 'warps'"),
        (("--set", "tile_kv=176", "--set", "stages=3"), "is outside 0 to 232448"),
        (("--gpu", "a100"), "has no wgmma"),
        (("--on", "ptx"), "is a schedule: a model without a kernel to run on ptx"),
        (("--dram",), "flash_attention_3 is a schedule: a model without a kernel, of which --dram"),
        (("--on", "gpu"), "--on 'gpu' is none of model, ptx, cuda, cycles"),
    ],
)
def test_what_cannot_run_is_said_in_one_message(cli, given: tuple[str, ...], message: str) -> None:
    result = cli("run", "flash_attention_3", *given, code=2)
    assert message in words(result.stderr)


def test_tune_ranks_what_fits(cli, tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    given = ("--set", "n=1024", "--set", "tile_q=128", "--set", "overlap=true", "--set",
             "ping_pong=true", "--set", "cluster=1", "--most", 3)  # fmt: skip
    output = cli("tune", "flash_attention_3", *given, "--json", path).stdout
    data = json.loads(path.read_text())
    times = [one["seconds"] for one in data["ranked"]]
    assert times == sorted(times)
    assert len(times) == 3
    assert data["tried"] == data["combinations"]
    assert any("shared memory" in one["why"] for one in data["infeasible"])
    assert all(one["choices"]["tile_q"] == 128 for one in data["ranked"])
    assert "ratio" in output
    others = [one["seconds"] for one in data["others"]]
    assert times + others == sorted(times + others)
    assert len(times) + len(others) + len(data["infeasible"]) == data["tried"]


def test_what_leaves_no_choice_is_timed_once(cli) -> None:
    output = cli("tune", "mla_sparse_prefill", "--set", "q_len=64").stdout
    assert "1 combination timed; 0 cannot run" in output


def test_tune_that_is_interrupted_ranks_what_it_has(
    cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rest = [tune._try, tune._try]

    def interrupted(*given: object) -> object:
        if not rest:
            raise KeyboardInterrupt
        return rest.pop()(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(tune, "_try", interrupted)
    path = tmp_path / "tune.json"
    given = ("flash_attention_2", *SMALL, "--json", path)
    output = cli("tune", *given, code=130).stdout
    assert "2 combinations timed" in output
    assert "Interrupted after 2 of 17." in output
    assert len(json.loads(path.read_text())["ranked"]) == 2
    assert "interrupted before anything" in cli("tune", *given, code=2).stderr


def test_tune_of_what_has_no_schedule(cli) -> None:
    assert "no schedule 'kv_append'" in cli("tune", "kv_append", code=2).stderr


def test_report_of_one_group(cli, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    output = cli("report", "published", "--group", "Ablation", "--json", path).stdout
    rows = json.loads(path.read_text())["rows"]
    assert [row["published"] for row in rows] == [661, 582, 570]
    for row in rows:
        assert {"name", "group", "predicted", "published", "unit", "error", "bound"} <= set(row)
        assert row["error"] == pytest.approx(row["predicted"] / row["published"] - 1)
    assert "0 orders are wrong" in words(output)


def test_report_refuses_what_there_is_not(cli) -> None:
    assert "there is published" in cli("report", "gossip", code=2).stderr
    assert "no group has 'xyz'" in cli("report", "published", "--group", "xyz", code=2).stderr


def test_our_kernel_has_a_predicted_time(cli) -> None:
    output = cli("run", "flash_attention").stdout
    assert "predicted time" in output
    assert "which is bound by" in output
