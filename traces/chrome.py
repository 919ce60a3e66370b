"""Traces as Chrome Trace Event JSON, the format that Perfetto and chrome://tracing open.

`traces.chrome_export` writes it, `traces.chrome_import` reads it, also from other tools, and
`traces.chrome_rules` has the rules that both keep.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from traces.chrome_export import to_chrome
from traces.chrome_import import Imported, import_chrome
from traces.chrome_rules import checked_rows
from traces.events import Trace, TraceError

__all__ = ["Imported", "from_chrome", "load", "read", "save", "to_chrome", "validate"]


def validate(data: Any) -> None:
    """TraceError if parsed JSON is no trace; it names the first event that breaks a field rule."""
    checked_rows(data)


def from_chrome(data: Any) -> Trace:
    """The trace of parsed JSON in either form of the format (object or bare list of events).

    Warns about what has no place in a `Trace`; `read` returns that instead. TraceError names the
    first event that breaks a rule.
    """
    found = import_chrome(data)
    if found.notes:
        warnings.warn(f"{found.trace.name}: {'; '.join(found.notes)}", stacklevel=2)
    return found.trace


def save(trace: Trace, path: str | Path) -> None:
    """Writes the trace to a .json file for ui.perfetto.dev."""
    Path(path).write_text(json.dumps(to_chrome(trace), allow_nan=False), encoding="utf-8")


def load(path: str | Path) -> Trace:
    """Reads a trace file as ``from_chrome`` does; TraceError if it holds something else."""
    data, _ = _parse(path)
    return from_chrome(data)


def read(path: str | Path) -> Imported:
    """Reads a trace file, and says what of it was left out; TraceError, which names the file, if it
    is no trace.
    """
    data, notes = _parse(path)
    try:
        found = import_chrome(data, name=Path(path).stem)
        return replace(found, notes=(*notes, *found.notes))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error


def _parse(path: str | Path) -> tuple[Any, tuple[str, ...]]:
    """What a file holds, and what to tell about it."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        try:
            return json.loads(text), ()
        except json.JSONDecodeError:
            # A list needs no end: tools append events for as long as they run, and may be killed.
            if not text.lstrip().startswith("["):
                raise
            return _unfinished(text), ("the list of events lacks its end",)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not JSON: {error}") from error


def _unfinished(text: str) -> Any:
    """A list without its closing bracket, perhaps after a comma; ValueError of the text as it is
    where that is not what it lacks.
    """
    try:
        return json.loads(text.rstrip().removesuffix(",") + "]")
    except json.JSONDecodeError:
        return json.loads(text)
