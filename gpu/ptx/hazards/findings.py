"""The hazards of a launch, and what outlives its waves: events, global shadows, releases."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gpu.counters import Hazard
from gpu.ptx.hazards.events import Events
from gpu.ptx.hazards.shadow import ReadLog, Shadow
from gpu.ptx.memory import Allocation
from simkit.errors import DeadlockError, MemoryAccessError, SimkitError, TrapError

Array = np.ndarray

_FAULTS = {
    MemoryAccessError: "out_of_bounds",
    DeadlockError: "deadlock",
    TrapError: "trap",
}
_MOST = 64
"""Hazards that are told apart; a kernel that is wrong everywhere is told so many times."""


@dataclass
class GlobalShadow:
    """An allocation: its writes once there are any, until then its reads."""

    allocation: Allocation
    log: ReadLog = field(default_factory=ReadLog)
    shadow: Shadow | None = None


@dataclass
class Findings:
    """Hazards of one launch, each pair of places in the program once."""

    place: Callable[[int], str]
    found: dict[tuple[object, ...], Hazard] = field(default_factory=dict)

    def add(
        self, kind: str, line: int, other: int, message: str, advice: str = "",
        severity: str = "error", other_place: str = "",
    ) -> None:  # fmt: skip
        """``other_place``: where ``other`` is, if that may be in another kernel."""
        key = (kind, line, other)
        if key in self.found or len(self.found) >= _MOST:
            return
        self.found[key] = Hazard(
            kind, message, line, other, advice, severity, other_place=other_place
        )

    def fault(self, error: SimkitError) -> None:
        """An error that ended the launch."""
        text = str(error)
        kind = _FAULTS.get(type(error), "illegal_use")
        if kind == "out_of_bounds" and "not a multiple of" in text:
            kind = "misaligned"
        line = re.search(r"PTX line (\d+)(?: \([^()]*:\d+\))?", text)
        number, place = (int(line[1]), line[0]) if line else (0, "an unknown line")
        self.found[kind, number, "fault"] = Hazard(kind, text, number, place=place)


class HazardState:
    """What outlives the waves of a launch: global memory's shadow and the findings."""

    def __init__(self, place: Callable[[int], str], clusters: int) -> None:
        self.events = Events()
        self.memory: dict[int, GlobalShadow] = {}
        self.findings = Findings(place)
        self.clusters = clusters
        # By space, place and CTA (-1: for all): what releases have left there.
        self.released: dict[tuple[str, int, int], dict[int, Array]] = {}
        # Clusters of the launch before, if this is a dependent one, and where its lines are.
        self.before = 0
        self.place_before = place

    def follow(self, primary: HazardState) -> None:
        """Makes this the state of a launch that may overlap with another's."""
        self.events, self.memory = primary.events, primary.memory
        self.released = primary.released
        self.before, self.place_before = primary.clusters, primary.findings.place
        self.clusters += primary.clusters

    def place_of(self, event: int) -> str:
        is_before = int(self.events.cluster[event]) < self.before
        place = self.place_before if is_before else self.findings.place
        return place(int(self.events.site[event]))
