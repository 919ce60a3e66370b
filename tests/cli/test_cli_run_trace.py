"""``simkit run`` and ``simkit trace``."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from simkit.cli.evaluation import output_error
from simkit.cli.subjects import SUBJECTS
from traces import chrome

MIB = 1 << 20


def test_document_example(cli, tmp_path: Path) -> None:
    """3.4, worked example: one head, N = 8192, d = 128: 8 MiB against 64 FLOP/byte and S, P."""
    path = tmp_path / "run.json"
    words = ("--set", "n=8192", "--set", "d=128", "--set", "heads=1")
    output = cli("run", "flash_attention", *words, "--json", path).stdout
    assert "smaller case" in output
    flash, naive = json.loads(path.read_text())["runs"]
    assert flash["place"]["flops"] == naive["place"]["flops"] == 4 * 8192**2 * 128
    lse = 8192 * 4
    assert flash["place"]["hbm_bytes"] == 8 * MIB + lse
    assert flash["place"]["bound"] == "compute"
    assert naive["place"]["hbm_bytes"] == 8 * MIB + 4 * 128 * MIB
    assert naive["place"]["bound"] == "memory"
    assert naive["place"]["intensity"] == pytest.approx(64, rel=0.02)
    reads = {(row["tensor"], row["direction"]): row["sectors"] for row in flash["traffic"]}
    assert reads["k", "read"] == 128 * 2 * MIB  # all of K for each of 128 query tiles
    assert flash["errors"][0]["max_abs"] < 2.0**-8
    assert flash["error_settings"]["kv_len"] < 8192


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ("flash_attention", ("q_len=33", "kv_len=65", "d=64", "heads=1", "causal=true")),
        ("naive_attention", ("q_len=5", "kv_len=40", "d=64", "heads=1")),
        ("flash_decoding", ("kv_len=200", "d=64", "heads=2", "splits=3")),
        ("fp8_kv_cache", ("tokens=5",)),
    ],
)
def test_kernel_moves_what_was_predicted(
    cli, tmp_path: Path, algorithm: str, words: tuple[str, ...]
) -> None:
    path = tmp_path / "run.json"
    settings = [part for word in words for part in ("--set", word)]
    cli("run", algorithm, *settings, "--on", "ptx", "--json", path)
    for run in json.loads(path.read_text())["runs"]:
        assert run["traffic"]
        for row in run["traffic"]:
            assert row["measured_requested"] == row["requested"]
            assert row["measured_sectors"] == row["sectors"]
        assert run["resources"][0]["occupancy"]["limiters"]
        assert all(error["max_rel"] < 0.07 for error in run["errors"])  # e4m3 has 2^-4


def test_naive_attention_that_does_not_fit(cli) -> None:
    # S of 8192^2 * 64 heads * 16 sequences * 2 bytes is 128 GiB.
    words = ("--set", "n=8192", "--set", "heads=64", "--set", "batch=16")
    output = cli("run", "flash_attention", *words).stdout
    assert "naive_attention does not fit: tensor 's'" in " ".join(output.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("flash",), "no algorithm 'flash'; there are naive_attention, flash_attention"),
        (("flash_attention", "--set", "m=3"), "no setting 'm'; it has: n (both lengths), q_len"),
        (("flash_attention", "--set", "q_len=x"), "--set q_len=x: it must be a whole number"),
        (("flash_attention", "--set", "q_len=0"), "--set q_len=0: it must be from 1 to 2147483647"),
        (("flash_attention", "--set", "causal=2"), "it is true or false"),
        (("flash_attention", "--set", "heads=3", "--set", "kv_heads=2"), "multiple of kv_heads"),
        (("flash_attention", "--set", "d=96"), "96"),
        (("flash_decoding", "--set", "kv_len=64", "--set", "splits=2"), "splits"),
        (("flash_attention", "--set", f"n={10**20}"), "it must be from 1 to 2147483647"),
        (("flash_attention", "--set", "n=1_000_000_000"), "h100 has 84942979072"),
        (("flash_attention", "--gpu", "h900"), "no GPU 'h900'"),
        (("flash_attention", "--on", "gpu"), "--on 'gpu' is none of model, ptx, cuda"),
    ],
)
def test_run_refuses(cli, words: tuple[str, ...], message: str) -> None:
    error = cli("run", *words, code=2).stderr
    assert message in error
    assert error.startswith("error: ")


def test_study_beside_the_published_table(cli, tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    words = ("--set", "n=200", "--set", "d=64", "--set", "ordinary=20")
    output = cli("run", "fp8_error_study", *words, "--seed", 3, "--json", path).stdout
    assert "published" in output
    data = json.loads(path.read_text())
    assert data["settings"] == {"n": 200, "d": 64, "ordinary": 20, "seed": 3}
    assert [row["published"] for row in data["rows"]] == [
        3.2e-4, 1.9e-4, 1.9e-4, 2.4e-2, 9.1e-3, 9.3e-3, 2.4e-2
    ]  # fmt: skip
    for row in data["rows"]:
        assert row["ratio"] == pytest.approx(row["rmse"] / row["published"])
        assert row["method"].strip() in output
    cli("run", "fp8_error_study", *words, "--set", "seed=3", "--json", tmp_path / "same.json")
    assert json.loads((tmp_path / "same.json").read_text()) == data


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "fp8_error_study", "--on", "ptx"), "a model without a kernel to run on ptx"),
        (("run", "fp8_error_study", "--set", "d=96"), "d is 96"),
        (("run", "fp8_error_study", "--set", "heads=2"), "no setting 'heads'; it has: n (queries"),
        (("trace", "fp8_error_study"), "fp8_error_study is a study: it has no schedule"),
    ],
)
def test_study_refuses(cli, words: tuple[str, ...], message: str) -> None:
    assert message in cli(*words, code=2).stderr


def test_output_error_by_hand() -> None:
    reference = np.array([4.0, -2.0, -np.inf, 0.0])
    values = np.array([4.5, -2.0, -np.inf, 0.0], np.float32)
    error = output_error("o", values, reference)
    assert (error.max_abs, error.max_rel, error.rmse) == (0.5, 0.125, 0.25)
    wrong = output_error("o", values.astype(ml_dtypes.bfloat16), np.array([4.5, -2, 1, 0]))
    assert wrong.max_abs == np.inf


@pytest.mark.parametrize("algorithm", SUBJECTS)
def test_trace_draws_and_exports(cli, tmp_path: Path, algorithm: str) -> None:
    path = tmp_path / "trace.json"
    output = cli("trace", algorithm, "--export", path, "--json", tmp_path / "t.json").stdout
    assert "copies" in output
    assert "load" in output
    found = chrome.load(path)
    assert found.events
    assert json.loads((tmp_path / "t.json").read_text())["cycles"] == found.stop


def test_trace_refuses(cli) -> None:
    assert "no algorithm 'flash'" in cli("trace", "flash", code=2).stderr
    words = ("trace", "flash_attention", "--start", 50, "--stop", 10)
    split = ("trace", "flash_decoding", "--set", "kv_len=64", "--set", "splits=2")
    assert "splits is 2; it must be 1 to 1" in cli(*split, code=2).stderr
    assert "is empty" in cli(*words, code=2).stderr
    assert (
        "no setting 'tokens'" in cli("trace", "flash_attention", "--set", "tokens=1", code=2).stderr
    )
