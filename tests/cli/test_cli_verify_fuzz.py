"""``simkit verify`` and ``simkit fuzz``, on the real laws and on a law that fails."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import strategies as st

from properties import catalog
from properties.law import Context, Law, LawViolation
from simkit.cli.coverage import Coverage, histogram


@dataclass(frozen=True)
class ToyCase:
    kv_len: int = 0
    causal: bool = False


@dataclass(frozen=True)
class RaggedCase:
    q_lens: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


def _check(context: Context, case: ToyCase) -> None:
    context.record_traffic("toy", "k", "read", case.kv_len, case.kv_len)
    if case.kv_len >= 100:
        raise LawViolation(f"{case.kv_len} keys are too many")


def _law(name: str, most: int) -> Law:
    cases = st.builds(ToyCase, kv_len=st.integers(0, most), causal=st.booleans())
    return Law("toy", name, "exact", "keys are few", _check, cases, ToyCase, uses_device=False)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two laws of an algorithm "toy" in place of all others: one holds, one does not."""
    monkeypatch.setattr(catalog, "_LAWS", {"toy": [_law("holds", 99), _law("fails", 10_000)]})
    monkeypatch.chdir(tmp_path)


def test_verify_real_laws(cli, tmp_path: Path) -> None:
    path = tmp_path / "v.json"
    words = ("fp8_kv_cache", "--on", "ptx", "--examples", 0, "--json", path)
    output = cli("verify", *words).stdout
    assert "laws hold" in output.splitlines()[-1]
    data = json.loads(path.read_text())
    assert data["device"] == "ptx"
    assert {check["status"] for check in data["checks"]} == {"pass"}
    assert {"algorithm", "law", "on", "tier", "cases", "detail"} <= set(data["checks"][0])
    assert data["traffic"]
    assert all(row["predicted"] == row["measured"] for row in data["traffic"])


@pytest.mark.usefixtures("toy")
def test_failure_is_shrunk_and_repeats(cli, tmp_path: Path) -> None:
    output = cli("verify", "--on", "ptx", "--json", tmp_path / "v.json", code=1).stdout
    assert "FAILED toy: fails" in output
    assert "100 keys are too many" in output  # the smallest case there is
    assert "1 of 2 laws hold, 1 failed" in output.splitlines()[-1]
    failed = json.loads((tmp_path / "v.json").read_text())["checks"][1]
    assert json.loads(failed["case"]) == {"kv_len": 100, "causal": False}
    assert f"repeat: {failed['reproducer']}" in output
    program, *words = shlex.split(failed["reproducer"])
    assert program == "simkit"
    assert "100 keys are too many" in cli(*words, code=1).stdout
    holds = [word.replace("100", "99") for word in words]
    assert "1 of 1 laws hold; 1 cases" in cli(*holds).stdout


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing",), "no algorithm 'nothing' with laws; there are toy"),
        (("--law", "none"), "no law 'none'; there are holds, fails"),
        (("toy", "--case", "{}"), "--case needs one algorithm and --law"),
        (("toy", "--law", "holds", "--case", "{"), "the case is not JSON"),
        (("toy", "--law", "holds", "--case", '{"n": 1}'), "unknown case fields ['n']"),
        (("--on", "tpu"), "no device 'tpu'"),
        (("--examples", -1), "greater than or equal to 0"),
    ],
)
def test_verify_refuses(cli, words: tuple[object, ...], message: str) -> None:
    assert message in cli("verify", *words, code=2).stderr


@pytest.mark.usefixtures("toy")
def test_fuzz_saves_what_it_finds(cli) -> None:
    result = cli("fuzz", "--minutes", 0, "--on", "ptx", "--json", "f.json", code=1)
    assert "Coverage" in result.stdout
    (path,) = Path(".simkit/counterexamples").glob("*.json")
    assert f"simkit fuzz --replay {path}" in " ".join(result.stdout.split())
    saved = json.loads(path.read_text())
    assert (saved["law"], json.loads(saved["case"])["kv_len"]) == ("fails", 100)
    coverage = json.loads(Path("f.json").read_text())["coverage"]
    assert coverage["fields"]["causal"]["False"] > 0
    assert "100 keys are too many" in cli("fuzz", "--on", "ptx", "--replay", path, code=1).stdout


@pytest.mark.usefixtures("toy")
def test_fuzz_ends_cleanly_when_interrupted(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(context: Context, case: ToyCase) -> None:
        if case.kv_len > 50:
            raise KeyboardInterrupt

    laws = [_law("holds", 10), Law("toy", "later", "exact", "", interrupted, st.just(ToyCase(51)))]
    monkeypatch.setattr(catalog, "_LAWS", {"toy": laws})
    output = cli("fuzz", "--minutes", 1, "--on", "ptx").stdout
    assert "interrupted; 1 of 1 laws hold" in output.splitlines()[-1]


@pytest.mark.usefixtures("toy")
def test_fuzz_stops_when_nothing_is_left(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    exhaustive = Law("toy", "all", "exact", "", lambda context, case: None, uses_device=False)
    monkeypatch.setattr(catalog, "_LAWS", {"toy": [exhaustive]})
    assert "1 of 1 laws hold; 1 cases" in cli("fuzz", "--minutes", 60, "--on", "ptx").stdout


@pytest.mark.usefixtures("toy")
def test_fuzz_refuses(cli) -> None:
    assert "nofile.json" in cli("fuzz", "--replay", "nofile.json", code=2).stderr
    Path("other.json").write_text("[1]")
    assert "not a counter-example" in cli("fuzz", "--replay", "other.json", code=2).stderr


def test_coverage_counts_by_value_and_by_range() -> None:
    coverage = Coverage()
    for kv_len in (0, 1, 5):
        coverage.add("law", ToyCase(kv_len))
    coverage.add("law", None)
    assert coverage.cases == 4
    assert coverage.fields["kv_len"] == Counter([0, 1, 5])
    many = Counter([0, 1, 2, 3, 4, 7, 8, 64, 127, 127])
    assert histogram(many) == {"0": 1, "1": 1, "2-3": 2, "4-7": 2, "8-15": 1, "64-127": 3}
    assert histogram(Counter([True, False, True])) == {"False": 1, "True": 2}


def test_coverage_counts_entries_of_lists() -> None:
    coverage = Coverage()
    for case in (RaggedCase((1, 5), ((2,), (1, 1))), RaggedCase((5,), ((1,),))):
        coverage.add("law", case)
    assert coverage.fields == {
        "q_lens": {1: 1, 5: 2},
        "q_lens: how many": {2: 1, 1: 1},
        "groups": {2: 1, 1: 3},
        "groups: how many": {1: 3, 2: 2},
    }


def test_mutate(cli, tmp_path: Path) -> None:
    """Every mutant noticed, by operator and law, and the same for machines."""
    path = tmp_path / "m.json"
    result = cli("mutate", "fp8_kv_cache", "--jobs", 1, "--json", path)
    assert "100.0% of the mutants that change something are noticed" in " ".join(
        result.stdout.split()
    )
    found = json.loads(path.read_text())
    assert found["caught"] == 1
    assert {m["mutant"]["operator"] for m in found["mutants"]} == {"address", "comparison"}
    assert "no algorithm 'flash'" in cli("mutate", "flash", code=2).stderr
    assert "has no kernel" in cli("mutate", "fp8_error_study", code=2).stderr
