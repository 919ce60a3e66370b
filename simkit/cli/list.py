"""``simkit list``: the catalogue, with every reference in it resolved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import typer
from rich.text import Text

from simkit.catalog import ALGORITHMS, Algorithm
from simkit.cli.errors import NOT_HELD
from simkit.cli.options import JsonFile
from simkit.cli.output import console, table, write_json
from simkit.cli.references import check_file, resolve
from simkit.errors import SimkitError

_PARTS: dict[str, Callable[[str], Any]] = {
    "model": resolve,
    "kernel": check_file,
    "host": resolve,
    "laws": resolve,
    "trace": resolve,
}


def list_algorithms(json_file: JsonFile = None) -> None:
    """The catalogue: what there is of each algorithm, and which part of a document describes it."""
    out = console()
    broken = {row.name: _broken(row) for row in ALGORITHMS}
    out.print(
        table(
            "Algorithms",
            ("name", "kind", "what it is", "described in"),
            [(row.name, row.kind, row.title, row.section) for row in ALGORITHMS],
            wrap=(2, 3),
        )
    )
    out.print(
        table(
            "Where each part is",
            ("part", "file or function", ""),
            [cells for row in ALGORITHMS for cells in _part_cells(row, broken[row.name])],
        )
    )
    out.print("A study is a published experiment of numerics: a model without a kernel.")
    out.print("A planner is host code that deals out the work of kernels, with its schedule.")
    out.print("A simulator is a part of the cycle model, which has laws of its own.")
    out.print("A schedule is a published kernel on the cycle model: run, tune and trace take it.")
    problems = [problem for found in broken.values() for problem in found.values()]
    for problem in problems:
        out.print(problem, style="bold red")
    if not problems:
        out.print(f"{len(ALGORITHMS)} algorithms; every reference resolves.")
    rows = [asdict(row) | {"missing": broken[row.name]} for row in ALGORITHMS]
    write_json(json_file, {"algorithms": rows})
    if problems:
        raise typer.Exit(NOT_HELD)


def _part_cells(row: Algorithm, broken: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
    """The algorithm's name, then each part that it has."""
    yield "", Text(row.name, style="bold"), ""
    for part in _PARTS:
        if getattr(row, part) is not None:
            yield part, getattr(row, part), "no" if part in broken else "ok"


def _broken(row: Algorithm) -> dict[str, str]:
    """What is wrong with each part that does not resolve."""
    found = {}
    for part, check in _PARTS.items():
        reference = getattr(row, part)
        try:
            if reference is not None:
                check(reference)
        except SimkitError as error:
            found[part] = str(error)
    return found
