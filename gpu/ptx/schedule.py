"""In which order warps run and asynchronous copies land: results must not depend on it, so it can
be chosen.

``eager`` runs all warps together and copies at issue (fastest).  ``lazy`` runs one warp of each CTA
until it must wait, then the next, and copies only at the wait.  ``random(seed)`` interleaves random
sets of warps.  What a missing barrier or wait breaks under some order on a GPU, it breaks here
under one of these, every time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from simkit.errors import LaunchError

# Random schedules cut the warps into this many independently scheduled sets.
_RANDOM_STRANDS = 4
# A set of warps runs this many blocks before others get a turn, so that a spinning warp cannot
# starve them.
PATIENCE = 512
# A warp whose lanes have diverged runs this many blocks before lanes that are further on get a
# turn.
LANE_PATIENCE = 64


@dataclass(frozen=True, slots=True)
class Schedule:
    """``kind`` is eager, lazy or random; ``seed`` is random's."""

    kind: str = "eager"
    seed: int = 0

    def __str__(self) -> str:
        """As parse_schedule reads it."""
        return f"random({self.seed})" if self.kind == "random" else self.kind

    @property
    def delays_copies(self) -> bool:
        return self.kind != "eager"

    @property
    def generator(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    @property
    def luck(self) -> np.random.Generator | None:
        """What decides for each copy whether it is late after all; None where all are or none."""
        return np.random.default_rng((self.seed, 1)) if self.kind == "random" else None

    def strands(self, warps: int, warps_per_cta: int, together: int = 1) -> np.ndarray:
        """The set each warp is scheduled in; ``together`` neighbours (a warpgroup) stay in one."""
        if self.kind == "eager":
            return np.zeros(warps, np.int64)
        if self.kind == "lazy":
            return np.arange(warps) % warps_per_cta // together
        per_cta = -(-warps_per_cta // together)
        warp = np.arange(warps)
        set_of_warp = warp // warps_per_cta * per_cta + warp % warps_per_cta // together
        return self.generator.integers(0, _RANDOM_STRANDS, int(set_of_warp[-1]) + 1)[set_of_warp]


def parse_schedule(text: str) -> Schedule:
    """``eager``, ``lazy``, ``random`` or ``random(7)``.  LaunchError for anything else."""
    match = re.fullmatch(r"(eager|lazy|random)(?:\((\d+)\))?", text.strip())
    if match is None or (match[2] and match[1] != "random"):
        raise LaunchError(f"unknown schedule {text!r}: it is eager, lazy, random or random(seed)")
    return Schedule(match[1], int(match[2] or 0))
