"""``simkit gpus`` and ``simkit list``, and the command as a program of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import simkit.cli.list
from simkit.catalog import ALGORITHMS
from simkit.cli.output import bytes_text, plain, si_text


def test_gpus_shows_every_gpu(cli) -> None:
    output = cli("gpus").stdout
    for name in ("a100", "h100", "h800", "h200", "b200"):
        assert name in output
    assert "295" in output  # the ridge point of H100, document 3.4


def test_one_gpu_has_units_and_sources(cli, tmp_path: Path) -> None:
    output = cli("gpus", "H800", "--json", tmp_path / "h800.json").stdout
    assert "occupancy" in output
    assert "bytes per second" in output
    figures = json.loads((tmp_path / "h800.json").read_text())["gpus"][0]
    assert figures["sm_count"] == {"value": 132, "unit": "SMs", "source": "XLA"}


def test_occupancy_of_a_cta(cli, tmp_path: Path) -> None:
    # 168 registers: 168 * 32 = 5376 per warp; 16384 / 5376 = 3 warps a sub-partition, 12 an SM.
    path = tmp_path / "o.json"
    words = ("--threads", 128, "--registers", 168, "--shared", 1000)
    output = cli("gpus", "h100", *words, "--json", path).stdout
    assert "registers" in output
    assert json.loads(path.read_text())["occupancy"]["h100"]["ctas_per_sm"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("h1000",), "no GPU 'h1000' in the device table; it has a100, h100"),
        (("h100", "--threads", 2048), "2048 is outside 1 to 1024 on h100"),
        (("--shared", 100), "needs --threads"),
        (("--threads", "many"), "should be a valid integer"),
    ],
)
def test_gpus_refuses(cli, words: tuple[object, ...], message: str) -> None:
    assert message in cli("gpus", *words, code=2).stderr


def test_list_resolves_everything(cli, tmp_path: Path) -> None:
    output = cli("list", "--json", tmp_path / "list.json").stdout
    assert "every reference resolves" in output
    rows = json.loads((tmp_path / "list.json").read_text())["algorithms"]
    assert [row["name"] for row in rows] == [row.name for row in ALGORITHMS]
    assert all(row["missing"] == {} for row in rows)
    missing = {"kernel": set(), "study": {"kernel", "host", "trace"}, "planner": {"kernel", "host"}}
    missing["simulator"] = missing["schedule"] = missing["study"]
    for row in rows:
        without = {part for part in ("kernel", "host", "trace") if row[part] is None}
        assert without == missing[row["kind"]]
        # Whole, so that it can be copied.
        assert row["model"] in output
    for kind in ("study", "planner", "simulator", "schedule"):
        assert f"A {kind} is " in output


@pytest.mark.parametrize(
    ("part", "reference"),
    [
        ("model", "simkit.algorithms.flash_attention:flash"),
        ("laws", "properties.none"),
        ("kernel", "gpu/kernels/none.cu"),
        ("kernel", "gpu/nothing/none.cu"),
    ],
)
def test_list_says_what_is_missing(
    cli, monkeypatch: pytest.MonkeyPatch, part: str, reference: str
) -> None:
    broken = replace(ALGORITHMS[0], **{part: reference})
    monkeypatch.setattr(simkit.cli.list, "ALGORITHMS", (broken, *ALGORITHMS[1:]))
    output = cli("list", code=1).stdout
    assert f"catalogue: '{reference}'" in " ".join(output.split())


def test_no_command_and_unknown_command(cli) -> None:
    assert "Usage" in cli(code=2).output
    assert "nonsense" in cli("nonsense", code=2).stderr


def test_json_file_that_cannot_be_written(cli, tmp_path: Path) -> None:
    path = tmp_path / "no" / "such" / "folder.json"
    message = cli("gpus", "--json", path, code=2).stderr
    assert message == f"error: {path}: No such file or directory\n"


def test_piped_into_ascii() -> None:
    """As a program, into a pipe that cannot encode what is drawn."""
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    words = [sys.executable, "-m", "simkit.cli.app", "trace", "flash_attention"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.isascii()
    assert done.stderr == ""
    assert "tensor cores" in done.stdout


def test_numbers_read_well() -> None:
    assert bytes_text(656) == "656 B"
    assert bytes_text(8 << 20) == "8 MiB"
    assert si_text(989.2e12, "FLOP/s") == "989.2 TFLOP/s"
    assert si_text(0.0, "s") == "0 s"
    assert si_text(34.7e-6, "s") == "34.7 µs"


def test_json_has_no_nan() -> None:
    assert plain({"a": (float("nan"), float("-inf"), 1.5, True, None)}) == {
        "a": ["nan", "-inf", 1.5, True, None]
    }
