"""Hazards of a launch for people, with the lines they are about, and for CI as SARIF."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from gpu.counters import HAZARD_KINDS, Hazard, Report
from simkit.cli.output import table

_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_STYLES = {"error": "bold red", "info": "yellow"}


def print_hazards(out: Console, report: Report, ptx: str) -> None:
    """One table: what, where, and the PTX lines it is about."""
    if not report.hazards:
        out.print("Hazards: none found.")
        return
    lines = ptx.splitlines()
    rows = [
        (Text(h.severity, style=_STYLES[h.severity]), h.kind, _cell(h, lines))
        for h in sorted(report.hazards, key=lambda h: (h.severity, h.kind, h.line))
    ]
    out.print(table("Hazards", ("", "kind", "what and where"), rows, wrap=(2,)))


def _cell(hazard: Hazard, lines: list[str]) -> str:
    shown = [
        f"  {line}: {lines[line - 1].strip()}"
        for line in dict.fromkeys((hazard.other_line, hazard.line))
        if 0 < line <= len(lines)
    ]
    advice = [f"→ {hazard.advice}"] if hazard.advice else []
    return "\n".join((hazard.message, *shown, *advice))


def write_sarif(path: Path | None, report: Report, file: Path) -> None:
    """Static Analysis Results Interchange Format 2.1.0 (OASIS), which CI systems show beside the
    code; does nothing without a path.
    """
    if path is not None:
        text = json.dumps(sarif(report, file), indent=2, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


def sarif(report: Report, file: Path) -> dict[str, Any]:
    used = sorted({hazard.kind for hazard in report.hazards})
    return {
        "$schema": _SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "simkit",
                        "rules": [
                            {"id": kind, "shortDescription": {"text": HAZARD_KINDS[kind]}}
                            for kind in used
                        ],
                    }
                },
                "results": [_result(hazard, file) for hazard in report.hazards],
            }
        ],
    }


def _result(hazard: Hazard, file: Path) -> dict[str, Any]:
    places = [
        _location(place, line, file)
        for place, line in ((hazard.place, hazard.line), (hazard.other_place, hazard.other_line))
        if line
    ]
    advice = f" Remedy: {hazard.advice}." if hazard.advice else ""
    return {
        "ruleId": hazard.kind,
        "level": "error" if hazard.severity == "error" else "note",
        "message": {"text": hazard.message + "." + advice},
        "locations": places[:1],
        "relatedLocations": places[1:],
    }


def _location(place: str, line: int, file: Path) -> dict[str, Any]:
    """The CUDA line where the PTX carries it, else the PTX line."""
    source = re.search(r"\((.*):(\d+)\)$", place)
    uri, number = (source[1], int(source[2])) if source else (str(file), line)
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": Path(uri).as_posix()},
            "region": {"startLine": number},
        }
    }
