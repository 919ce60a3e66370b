"""The field rules of Chrome Trace Event JSON: what each phase of event must have, and as what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from traces.events import TraceError

Row = Mapping[str, Any]
_MOST = 1e300

IGNORED = {
    "P": "sample",
    "N": "object creation",
    "O": "object snapshot",
    "D": "object deletion",
    "R": "mark",
    "c": "clock synchronisation",
    "v": "process memory dump",
    "V": "global memory dump",
    "(": "context entry",
    ")": "context exit",
}
"""Phases of the format that a schedule has no use for."""

OLD_ASYNC = {"S": "b", "T": "n", "p": "n", "F": "e"}
"""Phases of the format's former asynchronous events, and what they are called now."""


@dataclass(frozen=True)
class _Rule:
    """What a field may be: ``holds`` decides, ``wanted`` says it."""

    wanted: str
    holds: Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """Whether the value is a number to calculate with: finite, and so are its sums."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


_TEXT = _Rule("text", lambda value: isinstance(value, str))
_TIME = _Rule("a finite number of microseconds", is_number)
_LENGTH = _Rule(
    "a number of microseconds, not negative", lambda value: is_number(value) and value >= 0
)
_ID = _Rule("a whole number or text", _is_id)
_OBJECT = _Rule("an object", lambda value: isinstance(value, Mapping))
_SERIES = _Rule(
    "an object of one or more finite numbers",
    lambda value: (
        isinstance(value, Mapping) and bool(value) and all(map(is_number, value.values()))
    ),
)

# Of any event that has the field.
_ALWAYS = {
    "name": _TEXT,
    "cat": _TEXT,
    "cname": _TEXT,
    "ts": _TIME,
    "dur": _LENGTH,
    "tts": _TIME,
    "tdur": _LENGTH,
    "pid": _ID,
    "tid": _ID,
    "id": _ID,
    "id2": _OBJECT,
    "args": _OBJECT,
    "bp": _Rule('"e"', lambda value: value == "e"),
    "s": _Rule('"g", "p" or "t"', lambda value: value in ("g", "p", "t")),
}
_PLACE = ("pid", "tid", "ts")
_REQUIRED = {
    "M": ("name", "pid", "args"),
    "X": ("name", *_PLACE, "dur"),
    "B": ("name", *_PLACE),
    "E": _PLACE,
    "i": ("name", "pid", "ts"),
    "I": ("name", "pid", "ts"),
    "C": ("name", "pid", "ts", "args"),
    **dict.fromkeys("bne", ("name", "pid", "ts")),
    **dict.fromkeys(OLD_ASYNC, ("name", "pid", "ts")),
    **dict.fromkeys("stf", ("name", *_PLACE)),
}
_NAMED = {"process_name": ("name", _TEXT), "thread_name": ("name", _TEXT)}
_SORTED = dict.fromkeys(("process_sort_index", "thread_sort_index"), ("sort_index", _TIME))
_METADATA = _NAMED | _SORTED | {"process_labels": ("labels", _TEXT)}
_WITH_ID = frozenset("bnestf") | OLD_ASYNC.keys()


def checked_rows(data: Any) -> list[Row]:
    """The events of a trace in either form of the format; TraceError names the first that breaks a
    rule, by its place in ``traceEvents``, and the rule.
    """
    rows = data.get("traceEvents") if isinstance(data, Mapping) else data
    if not isinstance(rows, list):
        raise TraceError("a trace is a list of events or an object with the list traceEvents")
    if isinstance(data, Mapping):
        unit = data.get("displayTimeUnit", "ms")
        if unit not in ("ms", "ns"):
            raise TraceError(f'displayTimeUnit must be "ms" or "ns", not {unit!r}')
        if not isinstance(data.get("metadata", {}), Mapping):
            raise TraceError(f"metadata must be an object, not {data['metadata']!r}")
    for number, row in enumerate(rows):
        problem = _problem(row)
        if problem:
            raise TraceError(f"traceEvents[{number}]: {problem}")
    return rows


def _problem(row: Any) -> str | None:
    """What is wrong with an event, if anything is."""
    if not isinstance(row, Mapping):
        return f"an event is an object, not {row!r}"
    phase = row.get("ph")
    if isinstance(phase, str) and phase in IGNORED:
        return None
    if not isinstance(phase, str) or phase not in _REQUIRED:
        known = ", ".join([*_REQUIRED, *IGNORED])
        return f"phase {phase!r} is none of {known}"
    missing = [name for name in _REQUIRED[phase] if name not in row]
    if phase in _WITH_ID and "id" not in row and "id2" not in row:
        missing.append("id")
    if missing:
        return f"{phase!r} without {', '.join(missing)}"
    for name, value in row.items():
        if name in _ALWAYS and not _ALWAYS[name].holds(value):
            return f"{phase!r}: {name} must be {_ALWAYS[name].wanted}, not {value!r}"
    if phase == "C" and not _SERIES.holds(row["args"]):
        return f"'C': args must be {_SERIES.wanted}, not {row['args']!r}"
    if phase == "M" and row["name"] in _METADATA:
        key, rule = _METADATA[row["name"]]
        if not rule.holds(row["args"].get(key)):
            value = row["args"].get(key)
            return f"{row['name']}: {key} must be {rule.wanted}, not {value!r}"
    return None
