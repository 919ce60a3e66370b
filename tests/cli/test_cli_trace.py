"""``simkit trace``: views, files, comparisons, images, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simkit.cli.trace_schedule import split_settings
from traces import chrome
from traces.events import Event, Flow, Trace, Track

TMA, TENSOR = Track("SM 0", "TMA"), Track("SM 0", "tensor core")
SMALL = Trace(
    "small",
    (Event("K0", "load", TMA, 0, 100), Event("S0", "mma", TENSOR, 120, 80)),
    flows=(Flow("full", TMA, 100, TENSOR, 120),),
    unit="ns",
)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    chrome.save(SMALL, path)
    return path


def words(output: str) -> str:
    return " ".join(output.split())


@pytest.mark.parametrize(
    ("given", "title"),
    [
        (("--start", 1000, "--stop", 5000), "flash_attention on h100: 1,000 to 5,000 cycles"),
        (("--zoom", "1000:5000"), "flash_attention on h100: 1,000 to 5,000 cycles"),
        (("--zoom", ":5000"), "flash_attention on h100: 0 to 5,000 cycles"),
        (
            ("--zoom", "5000:", "--width", 60),
            "flash_attention on h100: 5,000 to 12,813.13 cycles",
        ),
    ],
)
def test_zoom(cli, given: tuple[object, ...], title: str) -> None:
    assert title in cli("trace", "flash_attention", *given).stdout


def test_critical_path_width_and_tracks(cli, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    output = cli("trace", "flash_attention", "--width", 60, "--json", path).stdout
    drawn = [line for line in output.splitlines() if line.startswith("  copies")]
    assert [len(line) for line in drawn] == [60]
    assert "━" in output
    assert "critical path: " in output
    data = json.loads(path.read_text())
    critical = data["critical_path"]
    assert critical["length"] == pytest.approx(data["cycles"])
    assert sum(critical["kinds"].values()) == pytest.approx(critical["length"])
    assert sum(row["cycles"] for row in critical["tracks"]) == pytest.approx(critical["length"])
    output = cli("trace", "flash_attention", "--no-critical", "--tracks", "lanes").stdout
    assert "━" not in output
    assert "fp32 lanes" in output
    assert "copies" not in output
    output = cli("trace", "flash_attention", "--most", 1).stdout
    assert "2 tracks are left out" in output


def test_what_is_exported_is_imported_again(cli, tmp_path: Path) -> None:
    path = tmp_path / "flash.json"
    first = cli("trace", "flash_attention", "--export", path).stdout
    second = cli("trace", "--import", path).stdout

    def view(output: str) -> list[str]:
        lines = output.splitlines()
        (title,) = (i for i, line in enumerate(lines) if line.startswith("flash_attention on"))
        (legend,) = (i for i, line in enumerate(lines) if "━━ critical path" in line)
        return lines[title : legend + 1]

    assert view(first) == view(second)
    assert f"{path.name}: " in second.replace("\n", "")


def test_import_tells_what_it_is_and_what_is_left_out(cli, small: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    output = cli("trace", "--import", small, "--json", path).stdout
    assert "small: 0 to 200 ns" in output
    assert "a  SM 0/TMA 100 → tensor core 120  full  (20 ns)" in output
    data = json.loads(path.read_text())
    assert (data["unit"], data["ns"], data["file"]) == ("ns", 200, str(small))
    assert data["critical_path"]["kinds"] == {"load": 100, "mma": 80, "idle": 20}
    rows = [{"ph": "X", "name": "x", "pid": 1, "tid": 2, "ts": 5, "dur": 1}, {"ph": "R", "ts": 1}]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(rows))
    output = cli("trace", "--import", other).stdout
    assert "other: 0 to 1,000 ns" in output
    assert "phase R (mark) left out: 1." in output


def test_versus_a_setting_a_gpu_an_algorithm_and_a_file(cli, small: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    common = ("trace", "flash_attention", "--json", path)

    def compared(*given: object) -> tuple[str, dict[str, object]]:
        output = cli(*common, *given).stdout
        return words(output), json.loads(path.read_text())

    output, data = compared("--set", "q_len=128", "--versus-set", "kv_len=512")
    assert "second: flash_attention, H100 SXM 80 GB: q_len=128 kv_len=512" in output
    versus = data["versus"]
    assert isinstance(versus, dict)
    assert versus["settings"]["q_len"] == 128
    assert data["ratio"] == pytest.approx(versus["cycles"] / data["cycles"])
    assert f"x {data['ratio']:.3f}" in output
    assert "used: tensor cores" in output

    output, data = compared("--versus-gpu", "h200")
    assert "second: flash_attention, H200" in output
    assert "In time: 7.004 µs and 5.055 µs, x 0.722." in output
    assert data["seconds_ratio"] == pytest.approx(data["ratio"])  # the clocks are the same

    output, data = compared("--versus", "batch_decode:kv_len=0,17,2048,fp8=true")
    assert "second: batch_decode" in output
    assert "kv_len=0,17,2048" in output
    assert "fp8=true" in output

    output = cli("trace", "--import", small, "--versus", small).stdout
    assert output.count("small: 0 to 200 ns") == 2
    assert "x 1.000" in output
    message = cli("trace", "flash_attention", "--versus", small, code=2).stderr
    assert "is in cycles and 'small' in ns: there is no common time axis" in message


@pytest.mark.parametrize(("on", "track"), [("cycles", "tensor core"), ("ptx", "warp 0")])
def test_versus_is_on_what_the_first_is_on(cli, tmp_path: Path, on: str, track: str) -> None:
    path = tmp_path / "c.json"
    given = ("--set", "q_len=64", "--set", "heads=1", "--versus-set", "kv_len=128", "--ctas", 1)
    cli("trace", "flash_attention", "--on", on, *given, "--arrows", 0, "--json", path)
    data = json.loads(path.read_text())
    for one in (data, data["versus"]):
        assert track in {each["track"] for each in one["tracks"]}
    assert data["versus"]["unit"] == data["unit"]
    assert data["versus"]["settings"]["batch"] == data["settings"]["batch"]


def test_what_of_a_file_is_not_drawn_and_which_file_is_wrong(cli, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    sample = {"ph": "C", "name": "memory", "pid": 1, "ts": 2, "args": {"value": 3}}
    path.write_text(json.dumps([sample]))
    output = cli("trace", "--import", path).stdout
    assert "0 events on 0 tracks" in words(output)
    assert "not drawn, but exported: 1 counter." in output
    path.write_text(json.dumps([sample | {"ph": ["C"]}]))
    error = cli("trace", "--import", path, code=2).stderr
    assert f"{path}: traceEvents[0]: phase ['C'] is none of M, X," in words(error)


def test_versus_of_planners_counts_all_workers(cli, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    given = ("--set", "planner=fa2", "--versus-set", "planner=fa3", "--json", path)
    output = cli("trace", "split_planner", *given).stdout
    assert "first: 16 of " in output
    assert len(json.loads(path.read_text())["versus"]["tracks"]) > 16


def test_watch_prints_frames_into_a_pipe(cli) -> None:
    output = cli("trace", "flash_attention", "--watch", "--no-critical").stdout
    assert output.count("▼") == 4
    assert output.count(", now ") == 4


def test_svg_shows_one_schedule_or_two(cli, tmp_path: Path) -> None:
    path = tmp_path / "view.svg"
    cli("trace", "flash_attention", "--svg", path)
    one = path.read_text()
    assert one.startswith("<svg")
    assert "copies" in one
    cli("trace", "flash_attention", "--svg", path, "--versus-gpu", "b200", "--theme", "light")
    assert "b200" in path.read_text()


def test_settings_of_the_other_algorithm() -> None:
    assert split_settings("") == []
    assert split_settings("a=1") == ["a=1"]
    assert split_settings("kv_len=0,17,2048,fp8=true") == ["kv_len=0,17,2048", "fp8=true"]
    assert split_settings("17,a=1") == ["17", "a=1"]


FLASH = ("trace", "flash_attention")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("trace",), "name an ALGO (see simkit list), or a file with --import"),
        ((*FLASH, "--import", "x.json"), "has its own schedule: no ALGO and no --set"),
        (("trace", "--import", "/nowhere.json"), "/nowhere.json: No such file"),
        ((*FLASH, "--zoom", "1:2", "--start", 1), "give one or the other"),
        ((*FLASH, "--zoom", "12"), "--zoom 12: it is A:B"),
        ((*FLASH, "--zoom", "a:b"), "--zoom a:b: it is A:B"),
        ((*FLASH, "--theme", "pink"), "theme 'pink' is none of dark, light"),
        ((*FLASH, "--tracks", "nowhere"), "no track of 'flash_attention on h100' has 'nowhere'"),
        ((*FLASH, "--versus", "flash"), "no algorithm 'flash'"),
        ((*FLASH, "--versus", "naive_attention:m=3"), "naive_attention has no setting 'm'"),
        ((*FLASH, "--versus", "a.json", "--versus-set", "n=1"), "a.json is a file: --versus-set"),
        ((*FLASH, "--versus-gpu", "h900"), "no GPU 'h900'"),
        ((*FLASH, "--watch", "--interactive"), "are two ways to show it"),
        ((*FLASH, "--watch", "--versus-gpu", "h200"), "show one schedule, not two"),
        ((*FLASH, "--watch", "--speed", 0), "speed is 0.0; it must be a positive number"),
        ((*FLASH, "--interactive"), "--interactive needs a terminal"),
        (("trace", "fp8_error_study"), "fp8_error_study is a study"),
    ],
)
def test_what_it_refuses(cli, given: tuple[object, ...], message: str) -> None:
    error = cli(*given, code=2).stderr
    assert error.startswith("error: ")
    assert message in words(error)


def test_a_file_has_no_settings_to_compare(cli, small: Path) -> None:
    error = cli("trace", "--import", small, "--versus-set", "n=1", code=2).stderr
    assert "--import has no settings to change" in error
