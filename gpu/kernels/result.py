"""What every kernel's host side returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from gpu.counters import Report


@dataclass(frozen=True)
class KernelResult:
    """The tensors that an algorithm wrote, by name, and one report for each launch, in order."""

    outputs: dict[str, NDArray[Any]]
    reports: list[Report]
