"""``simkit report``: what the cycle model predicts beside what others have measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from simkit.cli.errors import NOT_HELD
from simkit.cli.options import JsonFile
from simkit.cli.output import console, error_console, table, write_json
from simkit.errors import SimkitError
from simkit.schedules.published.accuracy import (
    WITHIN,
    Accuracy,
    Compared,
    accuracy,
    compare,
    published_rows,
)
from simkit.schedules.published.page import page

MOST_MEDIAN, LEAST_WITHIN = 0.10, 0.80
"""What is promised: the median error at most this, this part of the rows within a fifth."""


def report(
    what: Annotated[str, typer.Argument(help="published: figures of papers and projects.")],
    group: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only groups whose name has TEXT.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE.md", help="Write the page that docs/ keeps.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Print predicted, published, error and bound of every row.

    Exit 1 if an order is wrong or, over all rows, the median error is above 10 % or fewer than 80 %
    are within 20 %.
    """
    if what != "published":
        raise SimkitError(f"no report {what!r}; there is published")
    rows = [
        row for row in published_rows() if group is None or group.casefold() in row.group.casefold()
    ]
    if not rows:
        groups = dict.fromkeys(row.group for row in published_rows())
        raise SimkitError(f"no group has {group!r} in its name; there are {', '.join(groups)}")
    if markdown is not None and group is not None:
        raise SimkitError("--markdown writes all groups: leave out --group")
    with Progress(console=error_console(), transient=True) as progress:
        found = [compare(row) for row in progress.track(rows, description="predicting")]
    total = accuracy(found)
    out = console()
    for name, members in groupby(found, key=lambda one: one.row.group):
        out.print(
            table(
                name,
                ("row", "predicted", "published", "unit", "error", "bound by"),
                [_cells(one, name) for one in members],
                numbers=(1, 2, 4),
                wrap=(0, 5),
            )
        )
    out.print()
    out.print(_summary(total))
    for order in total.broken:
        out.print(f"{order.better} should be above {order.worse}.", style="bold red")
    if markdown is not None:
        markdown.write_text(page(found, total), encoding="utf-8")
        out.print(f"Written to {markdown}.")
    write_json(json_file, {"rows": [_row_json(one) for one in found], "accuracy": total})
    if total.broken or (group is None and not _is_accurate(total)):
        raise typer.Exit(NOT_HELD)


def _cells(one: Compared, group: str) -> Sequence[object]:
    name = one.row.name.removeprefix(group).strip() or one.row.name
    predicted, published = f"{one.predicted:,.4g}", f"{one.row.published:,.4g}"
    return name, predicted, published, one.row.unit, f"{one.error:+.1%}", one.bound


def _summary(total: Accuracy) -> str:
    return (
        f"{total.rows} rows that count: median error {total.median:.1%}, "
        f"{total.within:.0%} within {WITHIN:.0%}; {len(total.broken)} orders are wrong."
    )


def _is_accurate(total: Accuracy) -> bool:
    return total.median <= MOST_MEDIAN and total.within >= LEAST_WITHIN


def _row_json(one: Compared) -> dict[str, Any]:
    row = one.row
    return {
        "name": row.name,
        "group": row.group,
        "predicted": one.predicted,
        "published": row.published,
        "unit": row.unit,
        "error": one.error,
        "bound": one.bound,
        "source": row.source,
        "counted": row.is_counted,
        "note": row.note,
    }
