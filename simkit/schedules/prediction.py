"""How long a sequence of launches takes, what it achieves, and what holds it back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from simkit.errors import ShapeError
from simkit.machine.gpus import Gpu
from simkit.schedules.grid import GridRun, Launch, run_launch
from simkit.schedules.parameters import GRAPH_GAP, LAUNCH_GAP, PDL_GAIN

Submission = Literal["stream", "graph"]


@dataclass(frozen=True)
class Prediction:
    """Launches one after another. ``gaps``: seconds before each, in which the GPU does nothing."""

    gpu: Gpu
    runs: tuple[GridRun, ...]
    gaps: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """As events around the launches would measure it, once the GPU is busy."""
        return sum(self.gaps) + sum(run.seconds for run in self.runs)

    @property
    def flop(self) -> float:
        return sum(run.launch.flop for run in self.runs)

    @property
    def flops(self) -> float:
        """FLOP per second, by the convention of the published figures."""
        return self.flop / self.seconds

    @property
    def hbm_bytes_per_s(self) -> float:
        """Of what must move."""
        return sum(run.launch.hbm_bytes for run in self.runs) / self.seconds

    @property
    def longest(self) -> GridRun:
        return max(self.runs, key=lambda run: run.seconds)

    @property
    def bound(self) -> str:
        """What holds the longest launch back; launching, where that takes longer."""
        if sum(self.gaps) > self.longest.seconds:
            return "launching"
        return self.longest.bound


def predict(
    gpu: Gpu,
    launches: Sequence[Launch],
    *,
    submission: Submission = "stream",
    clock_hz: float | None = None,
) -> Prediction:
    """Runs launches one after another. Errors as of `run_launch`, and `ShapeError` for none."""
    if not launches:
        raise ShapeError("there is no launch to predict")
    gap = (LAUNCH_GAP if submission == "stream" else GRAPH_GAP).value
    runs = tuple(run_launch(gpu, launch, clock_hz) for launch in launches)
    gaps = tuple(gap - PDL_GAIN.value if launch.dependent else gap for launch in launches)
    return Prediction(gpu, runs, gaps)
