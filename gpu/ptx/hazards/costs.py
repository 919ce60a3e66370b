"""What is slow or looks forgotten: conflicts, wasted sectors, spills, idle lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from gpu.counters import Hazard
from gpu.ptx.memory import GlobalMemory
from gpu.ptx.traffic import TrafficCounter

if TYPE_CHECKING:
    from gpu.ptx.grid import Statistics

# Places of one kind that are named, the worst first.
_WORST = 5
# Sectors count as wasted where less than this part of their bytes is asked for.
_EFFICIENCY = 0.5
# Lanes count as idle where fewer than this part of them work.
_BUSY = 0.9


def costs(
    counters: TrafficCounter, statistics: Statistics, place: Callable[[int], str]
) -> list[Hazard]:
    """The worst places of a launch."""
    found = []
    conflicts = [
        (actual - ideal, actual, ideal, site)
        for site, (actual, ideal) in counters.wavefronts_by_site.items()
        if site and actual > ideal
    ]
    for _, actual, ideal, site in sorted(conflicts, reverse=True)[:_WORST]:
        found.append(
            Hazard(
                "bank_conflicts",
                f"{actual:,} wavefronts of shared memory where {ideal:,} would do ({place(site)})",
                site,
                advice="pad or swizzle the rows, so that lanes of a phase meet different banks",
                severity="info",
            )
        )
    wasted = [
        (moved - asked, asked, moved, site)
        for site, (asked, moved) in counters.bytes_by_site.items()
        if site and asked < _EFFICIENCY * moved
    ]
    for _, asked, moved, site in sorted(wasted, reverse=True)[:_WORST]:
        found.append(
            Hazard(
                "uncoalesced",
                f"sectors of {moved:,} bytes for {asked:,} that are asked for ({place(site)})",
                site,
                advice="let neighbouring lanes access neighbouring bytes",
                severity="info",
            )
        )
    if counters.local_bytes:
        found.append(
            Hazard(
                "spills",
                f"{counters.local_bytes:,} bytes to and from local memory",
                advice="fewer live values, or arrays with indices known at compile time",
                severity="info",
            )
        )
    slots = 32 * statistics.instructions
    if slots and statistics.lane_instructions < _BUSY * slots:
        share = statistics.lane_instructions / slots
        found.append(
            Hazard(
                "divergence",
                f"{share:.0%} of the lanes work on average; others are idle or took another way",
                advice="let the lanes of a warp take the same branches",
                severity="info",
            )
        )
    return found


def never_written(memory: GlobalMemory, parameters: np.ndarray) -> list[Hazard]:
    """Arrays given to the launch empty, of which some bytes still hold nothing."""
    given = parameters.tobytes()
    found = []
    for allocation in memory.allocations:
        written = allocation.written
        if written is None or allocation.address.to_bytes(8, "little") not in given:
            continue
        missing = len(written) - int(np.count_nonzero(written))
        if missing:
            first = int(np.argmin(written))
            found.append(
                Hazard(
                    "never_written",
                    f"{missing:,} of {len(written):,} bytes of {allocation.name!r} were never"
                    f" written, the first at byte {first}",
                    advice="write them, if they are to hold a result",
                    severity="info",
                )
            )
    return found
