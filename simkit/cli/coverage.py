"""Which cases a fuzzing run has tried: a histogram for each field of the cases."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from rich.table import Table

from simkit.cli.output import table

_MOST_VALUES = 8  # of a field, before they are put together in ranges
_HIDDEN = ("seed",)  # says nothing about the shape of a case


class Coverage:
    """Counts of cases by law, and by field and value; of fields that are lists, by entry."""

    def __init__(self) -> None:
        self.cases = 0
        self.by_law: Counter[str] = Counter()
        self.fields: dict[str, Counter[Any]] = {}

    def add(self, law: str, case: Any) -> None:
        """Counts one case (a dataclass of scalars, or None) of a law."""
        self.cases += 1
        self.by_law[law] += 1
        if case is None:
            return
        for field in dataclasses.fields(case):
            if field.name not in _HIDDEN:
                self._count(field.name, getattr(case, field.name))

    def _count(self, name: str, value: Any) -> None:
        """One value of a field; of a list how long it is, and all its entries."""
        if not isinstance(value, tuple):
            self.fields.setdefault(name, Counter())[value] += 1
            return
        self._count(f"{name}: how many", len(value))
        for entry in value:
            self._count(name, entry)

    def table(self) -> Table:
        """A row for each field: how many cases had each value, or one of a range of them."""
        rows = [
            (name, len(counts), "  ".join(f"{key}: {n}" for key, n in histogram(counts).items()))
            for name, counts in sorted(self.fields.items())
        ]
        return table(
            "Coverage: cases by field",
            ("field", "values", "how often each"),
            rows,
            numbers=(1,),
            wrap=(2,),
        )

    def as_json(self) -> dict[str, Any]:
        """Everything counted."""
        fields = {name: histogram(counts) for name, counts in self.fields.items()}
        return {"cases": self.cases, "laws": self.by_law, "fields": fields}


def histogram(counts: Counter[Any]) -> dict[str, int]:
    """Counts in order of value; where there are many values, by powers of two: ``64-127``."""
    in_ranges = len(counts) > _MOST_VALUES
    found: dict[str, int] = {}
    for value in sorted(counts, key=_order):
        name = _range(value) if in_ranges else str(value)
        found[name] = found.get(name, 0) + counts[value]
    return found


def _range(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int) or value < 2:
        return str(value)
    low = 1 << (value.bit_length() - 1)
    return f"{low}-{2 * low - 1}"


def _order(value: Any) -> tuple[bool, float, str]:
    is_number = isinstance(value, int | float)
    return (not is_number, float(value) if is_number else 0.0, str(value))
