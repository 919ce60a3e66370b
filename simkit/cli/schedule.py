"""A schedule as ``simkit trace`` handles it: the trace, what to say about it, what to write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simkit.cli.output import si_text
from traces.critical_path import critical_path
from traces.events import Trace

MOST_TRACKS = 40
"""Tracks that are drawn unless somebody asks for more."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """A trace with its heading and its notes.

    ``drawn``: what the terminal shows of it, None for all. ``summary``: what it is, for machines.
    ``clock_hz``: of its cycles; None where they are no cycles. ``most``: tracks to draw at most.
    """

    heading: str
    trace: Trace
    summary: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    drawn: Trace | None = None
    clock_hz: float | None = None
    most: int | None = MOST_TRACKS

    @property
    def shown(self) -> Trace:
        """What the terminal shows."""
        return self.trace if self.drawn is None else self.drawn

    @property
    def seconds(self) -> float | None:
        """Until its last event ends; None where there is no clock."""
        return None if self.clock_hz is None else self.trace.stop / self.clock_hz

    def to_json(self) -> dict[str, Any]:
        """What it is, how long it takes, how much its tracks are used, and its critical path."""
        trace = self.trace
        tracks = [
            {"process": one.process, "track": one.name, "used": trace.utilisation(one)}
            for one in trace.tracks
        ]
        time = {trace.unit: trace.stop} | (
            {} if self.seconds is None else {"seconds": self.seconds}
        )
        path = critical_path(trace)
        critical = {
            "length": path.length,
            "kinds": path.by_kind,
            "tracks": [
                {"process": track.process, "track": track.name, trace.unit: share}
                for track, share in path.by_track.items()
            ],
        }
        return {
            **self.summary,
            "unit": trace.unit,
            **time,
            "tracks": tracks,
            "critical_path": critical,
        }


def cycles_note(trace: Trace, clock_hz: float, condition: str) -> str:
    """How long a schedule's cycles are, under which condition."""
    seconds = si_text(trace.stop / clock_hz, "s")
    return f"{trace.stop:,.0f} cycles are {seconds}{condition}."
