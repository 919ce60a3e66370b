"""A published figure and how to predict it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from simkit.schedules.prediction import Prediction


@dataclass(frozen=True, eq=False)
class PublishedRow:
    """``predicted()`` in ``unit``, ``bound()`` what bounds it. ``source``: where the figure stands.

    ``is_counted``: whether the row belongs to the accuracy that is promised; short sequences do
    not. ``note``: what the figure leaves open, or why the model misses it.
    """

    name: str
    group: str
    published: float
    unit: str
    source: str
    predicted: Callable[[], float]
    bound: Callable[[], str]
    is_counted: bool = True
    note: str = ""


def timed_row(
    name: str,
    group: str,
    published: float,
    unit: str,
    source: str,
    prediction: Callable[[], Prediction],
    measure: Callable[[Prediction], float],
    *,
    is_counted: bool = True,
    note: str = "",
) -> PublishedRow:
    """The row of a prediction, of which ``measure`` takes the figure."""
    once = cache(prediction)
    return PublishedRow(
        name, group, published, unit, source,
        lambda: measure(once()), lambda: once().bound, is_counted, note,
    )  # fmt: skip


def tflops(prediction: Prediction) -> float:
    """TFLOP/s by the convention of the published figures."""
    return prediction.flops / 1e12


def microseconds(prediction: Prediction) -> float:
    return prediction.seconds * 1e6


def gigabytes_per_s(prediction: Prediction) -> float:
    """Of the bytes that must move."""
    return prediction.hbm_bytes_per_s / 1e9
