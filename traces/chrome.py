"""Traces as Chrome Trace Event JSON, the format that Perfetto and chrome://tracing open.

`traces.chrome_export` writes it, `traces.chrome_import` reads it, also from other tools, and
`traces.chrome_rules` has the rules that both keep.
"""

from __future__ import annotations

import json
import warnings
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
    return from_chrome(_parse(path))


def read(path: str | Path) -> Imported:
    """Reads a trace file, and says what of it was left out; TraceError if it is no trace."""
    return import_chrome(_parse(path), name=Path(path).stem)


def _parse(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not JSON: {error}") from error
