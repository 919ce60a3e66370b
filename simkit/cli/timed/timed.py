"""What the cycle model times: an algorithm with its problem, its choices and its launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from simkit.cli.settings import AUTO, Setting, Values
from simkit.machine.gpus import Gpu
from simkit.schedules.grid import Launch

CLOCK = Setting("clock_mhz", 0, "a fixed clock; 0: what the board's power allows", least=0)


def clock_of(values: Values) -> float | None:
    """Hz, None where power decides."""
    return values["clock_mhz"] * 1e6 or None


@dataclass(frozen=True, eq=False)
class Timed:
    """``problem``: its sizes. ``choices``: of the kernel, which a search varies.

    ``launches(gpu, values)``: errors as of the schedule. ``is_ours``: whether it is the schedule of
    the kernel in gpu/kernels, not of a published one of that name.
    """

    name: str
    problem: tuple[Setting, ...]
    choices: tuple[Setting, ...]
    launches: Callable[[Gpu, Values], tuple[Launch, ...]]
    is_ours: bool = False

    @property
    def settings(self) -> tuple[Setting, ...]:
        return (*self.problem, *self.choices)

    def chosen(self, values: Values) -> Mapping[str, Any]:
        """The choices that somebody made."""
        names = (setting.name for setting in self.choices)
        return {name: values[name] for name in names if values[name] != AUTO}
