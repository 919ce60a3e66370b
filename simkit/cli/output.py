"""What the commands print with: the console, tables that fit 80 columns, numbers, JSON files."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

STATUS_STYLES = {"pass": "green", "fail": "bold red", "skip": "yellow"}

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SI_PREFIXES = (
    (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"),
    (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"), (1e-12, "p"),
)  # fmt: skip


def console() -> Console:
    """Standard output; text is printed as it stands, without markup or automatic colours."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=False)


def error_console() -> Console:
    """Standard error, for the one message of a failure and for progress."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Shows that something takes a while, on standard error and only in a terminal."""
    terminal = error_console()
    if not terminal.is_terminal:
        yield
        return
    with terminal.status(Text(what)):
        yield


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    numbers: Sequence[int] = (),
    wrap: Sequence[int] = (),
) -> Table:
    """A plain table.

    Columns whose index is in ``numbers`` are set to the right; those in ``wrap`` give way where the
    width is short, the others stay on one line.
    """
    grid = Table(
        title=f"\n{title}",  # a blank line parts it from what comes before
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for index, name in enumerate(columns):
        grid.add_column(
            Text(name),
            justify="right" if index in numbers else "left",
            no_wrap=index not in wrap,
            overflow="fold",
        )
    for row in rows:
        grid.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return grid


def status_text(status: str) -> Text:
    """pass, fail or skip in its colour."""
    return Text(status, style=STATUS_STYLES[status])


def bytes_text(count: int) -> str:
    """A number of bytes: exact below 10,000, in binary units above (``537 MiB``)."""
    if count < 10_000:
        return f"{count:,} B"
    power = min(int(math.log2(count)) // 10, len(_BINARY_UNITS) - 1)
    return f"{count / 1024**power:.4g} {_BINARY_UNITS[power]}"


def si_text(value: float, unit: str) -> str:
    """A quantity with an SI prefix and four digits: ``989.2 TFLOP/s``."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}"
    for factor, prefix in _SI_PREFIXES:
        if abs(value) >= factor:
            return f"{value / factor:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def count_text(count: int, what: str) -> str:
    """So many of something: "1 CTA", "2 CTAs", "1,000 events"."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def write_json(path: Path | None, value: object) -> None:
    """Writes ``value`` to the file of ``--json``; does nothing without one.

    Dataclasses become objects and NumPy numbers plain ones; infinities and NaN, which JSON lacks,
    become the strings "inf", "-inf" and "nan".
    """
    if path is not None:
        text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")


def plain(value: Any) -> Any:
    """``value`` as JSON has it; see ``write_json``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
