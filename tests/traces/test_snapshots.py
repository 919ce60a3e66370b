"""Views as they were when somebody last looked at them; `snapshot_cases` writes them anew."""

from __future__ import annotations

import re

import pytest
from snapshot_cases import CASES, FOLDER, path

_CODES = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("name", CASES)
def test_view_is_as_it_was(name: str) -> None:
    assert path(name).is_file(), f"{path(name)} is missing: python tests/traces/snapshot_cases.py"
    # Lines, so that a difference is told by line.
    stored = path(name).read_text(encoding="utf-8").split("\n")
    assert CASES[name].text().split("\n") == stored


def test_there_are_no_other_snapshots() -> None:
    assert {file.name for file in FOLDER.iterdir()} == {path(name).name for name in CASES}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.colour])
def test_colours_add_escape_codes_alone(name: str) -> None:
    """What is read without colour is all there is to read."""
    coloured = CASES[name].text()
    assert _CODES.search(coloured)
    assert _CODES.sub("", coloured) == CASES["pipeline_80"].text()


def test_themes_differ_and_without_colour_there_is_none() -> None:
    dark, light, none = (
        set(_CODES.findall(CASES[f"pipeline_{theme}_80"].text()))
        for theme in ("dark", "light", "no_colour")
    )
    assert dark != light
    assert none <= {"\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[3m"}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ascii_only])
def test_ascii_is_ascii(name: str) -> None:
    assert CASES[name].text().isascii()
