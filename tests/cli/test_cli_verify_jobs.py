"""``simkit verify`` on several processes, and with a variant of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

VARIANT = """
import numpy as np
from simkit.algorithms.variant import UserVariant

VARIANT = UserVariant(
    name="shifted_CASE",
    cuda='''
  static __device__ __forceinline__ float logit(float logit, const Place& at, const float*) {
    return at.key % 3 == 0 ? __fadd_rn(logit, 1.0f) : logit;
  }
''',
    logit=lambda logit, at, values: np.where(at.key % 3 == 0, logit + np.float32(SHIFT), logit),
)
"""


def variant(folder: Path, case: str, shift: float) -> Path:
    file = folder / f"{case}.py"
    file.write_text(VARIANT.replace("CASE", case).replace("SHIFT", str(shift)))
    return file


def checks(path: Path) -> list[dict[str, object]]:
    found = json.loads(path.read_text())["checks"]
    return [{key: value for key, value in one.items() if key != "seconds"} for one in found]


def test_processes_change_nothing(cli, tmp_path: Path) -> None:
    """The same laws, cases, order and traffic, whatever the number of processes."""
    words = ("verify", "merge_states", "fp8_kv_cache", "split_planner", "--on", "ptx")
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    cli(*words, "--examples", 2, "--jobs", 1, "--json", one)
    output = cli(*words, "--examples", 2, "--jobs", 2, "--json", two).stdout
    assert "laws hold" in output
    assert checks(one) == checks(two)
    first, second = (json.loads(path.read_text())["traffic"] for path in (one, two))
    assert first
    assert first == second


def test_a_variant_that_is_what_it_says(cli, tmp_path: Path) -> None:
    file = variant(tmp_path, "right", 1.0)
    output = cli(
        "verify", "batch_decode", "--variant", file, "--law", "bits", "--on", "ptx",
        "--examples", 1,
    ).stdout  # fmt: skip
    assert "1 of 1 laws hold" in output


def test_a_variant_that_is_not(cli, tmp_path: Path) -> None:
    file = variant(tmp_path, "wrong", 2.0)
    words = ("verify", "batch_decode", "--variant", file, "--law", "bits", "--on", "ptx")
    output = cli(*words, "--examples", 0, code=1).stdout
    assert "FAILED batch_decode: bits" in output
    repeat = next(line for line in output.splitlines() if "repeat:" in line)
    assert f"--variant {file}" in repeat
    assert "shifted_wrong" in repeat  # the case names it


@pytest.mark.parametrize(
    ("text", "message"),
    [("x = 1", "must define VARIANT"), ("import nothing_of_this_name", "does not run")],
)
def test_a_file_without_a_variant(cli, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    assert message in cli("verify", "--variant", file, code=2).stderr


def test_algorithms_that_take_no_variant(cli, tmp_path: Path) -> None:
    file = variant(tmp_path, "elsewhere", 1.0)
    message = cli("verify", "flash_attention", "--variant", file, code=2).stderr
    assert "no algorithm 'flash_attention' with laws; there are batch_prefill_ragged" in message


@pytest.mark.parametrize(
    "case", ['{"q_lens": "x"}', '{"seed": -1}', '{"data": "bogus"}', '{"element": "f64"}']
)
def test_a_case_that_is_none_is_bad_input(cli, case: str) -> None:
    words = ("verify", "batch_prefill_paged", "--law", "bits", "--on", "ptx", "--case", case)
    assert "does not fit" in cli(*words, code=2).stderr


def test_a_seed_below_zero(cli) -> None:
    assert "--seed" in cli("run", "batch_decode", "--seed", "-1", code=2).stderr
