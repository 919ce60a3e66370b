"""Everything published that the cycle model predicts, and how well it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from simkit.schedules.published.attention import ablation_rows, table_rows
from simkit.schedules.published.mla import (
    CROSSOVER,
    LONG_CROSSOVER,
    SEESAW,
    WITHOUT_CROSSOVER,
    WITHOUT_SEESAW,
    mla_rows,
)
from simkit.schedules.published.row import PublishedRow
from simkit.schedules.published.serving import rows as serving_rows


@dataclass(frozen=True)
class Compared:
    """A row with what was predicted. ``error``: predicted over published, less 1."""

    row: PublishedRow
    predicted: float
    bound: str

    @property
    def error(self) -> float:
        return self.predicted / self.row.published - 1


@dataclass(frozen=True)
class Order:
    """A published order: the row ``better`` is better than ``worse`` (by name)."""

    better: str
    worse: str


@dataclass(frozen=True)
class Accuracy:
    """Of the rows that count. ``within``: the part with an error of at most a fifth."""

    rows: int
    median: float
    within: float
    broken: tuple[Order, ...]


WITHIN = 0.2


def published_rows() -> Iterator[PublishedRow]:
    """All rows, group by group."""
    for rows in _GROUPS:
        yield from rows()


def compare(row: PublishedRow) -> Compared:
    """Predicts one row."""
    return Compared(row, row.predicted(), row.bound())


def accuracy(compared: Sequence[Compared]) -> Accuracy:
    """Over the rows that count; orders over all."""
    errors = [abs(one.error) for one in compared if one.row.is_counted]
    by_name = {one.row.name: one.predicted for one in compared}
    broken = tuple(
        order
        for order in orders()
        if order.better in by_name
        and order.worse in by_name
        and by_name[order.better] <= by_name[order.worse]
    )
    within = sum(error <= WITHIN for error in errors) / len(errors) if errors else 1.0
    return Accuracy(len(errors), median(errors) if errors else 0.0, within, broken)


def orders() -> Iterator[Order]:
    """The published orders: FlashAttention-3 over 2, each ablation, FlashMLA's two inventions."""
    names = [row.name for row in table_rows()]
    for name in names:
        if name.startswith("FA-3 fp16"):
            yield Order(name, name.replace("FA-3", "FA-2"))
    ablation = [row.name for row in ablation_rows()]
    yield from map(Order, ablation, ablation[1:])
    yield Order(SEESAW, WITHOUT_SEESAW)
    yield Order(CROSSOVER, WITHOUT_CROSSOVER)
    yield Order(LONG_CROSSOVER, CROSSOVER)


_GROUPS: tuple[Callable[[], Iterator[PublishedRow]], ...] = (
    table_rows,
    ablation_rows,
    mla_rows,
    serving_rows,
)
