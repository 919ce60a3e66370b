"""cp.async in flight: what has been issued and not yet written to shared memory.

A copy may read its source and write its destination at any moment between its issue and the wait
that covers it.  The executor picks the moment: at once (eager), or not before the wait (lazy),
which shows kernels that read too early. Source: PTX ISA 8.8, 9.7.9.25.3 (cp.async, commit_group,
wait_group).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(slots=True)
class Copy:
    """One cp.async of some warps: ``group`` is each warp's number of groups committed before it."""

    warps: Array
    group: Array
    perform: Callable[[Array | None], None]


class Copies:
    """The copies in flight of all resident warps."""

    def __init__(self, warps: int) -> None:
        self.committed = np.zeros(warps, np.int64)
        self.pending: list[Copy] = []

    def issue(self, warps: Array, perform: Callable[[Array | None], None]) -> None:
        """Records a copy; ``perform(which)`` does it for a choice of its warps (None: all)."""
        self.pending.append(Copy(warps, self.committed[warps], perform))

    def commit(self, warps: Array) -> None:
        self.committed[warps] += 1

    def wait(self, warps: Array, allowed: int) -> None:
        """Finishes every copy of these warps but those of the ``allowed`` latest groups (-1: all,
        uncommitted too).
        """
        if not self.pending:
            return
        waiting = np.zeros(len(self.committed), bool)
        waiting[warps] = True
        kept: list[Copy] = []
        for copy in self.pending:
            due = waiting[copy.warps]
            if allowed >= 0:
                due = due & (copy.group < self.committed[copy.warps] - allowed)
            if due.all():
                copy.perform(None)
            elif due.any():
                copy.perform(due)
                kept.append(
                    Copy(copy.warps[~due], copy.group[~due], _restricted(copy.perform, ~due))
                )
            else:
                kept.append(copy)
        self.pending = kept

    def finish(self) -> None:
        """The end of the kernel completes what nobody waited for."""
        for copy in self.pending:
            copy.perform(None)
        self.pending = []


def _restricted(
    perform: Callable[[Array | None], None], chosen: Array
) -> Callable[[Array | None], None]:
    """``perform`` for what is left of its warps."""
    rest = np.flatnonzero(chosen)
    size = len(chosen)

    def run(which: Array | None) -> None:
        selected = np.zeros(size, bool)
        selected[rest if which is None else rest[which]] = True
        perform(selected)

    return run
