"""Copies in flight: what cp.async and bulk stores have issued and not yet done.

A copy may read its source and write its destination at any moment between its issue and the wait
that covers it.  The executor picks the moment: at once (eager), or not before the wait (lazy),
which shows kernels that read too early, or now this, now that (random). Source: PTX ISA 8.8,
9.7.9.25.3 (cp.async, commit_group, wait_group).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
Perform = Callable[[Array | None], None]


@dataclass(slots=True)
class Copy:
    """One copy of some owners: ``group`` is each one's number of groups committed before it."""

    owners: Array
    group: Array
    perform: Perform


class Copies:
    """The copies in flight of all resident owners: warps for cp.async, threads for bulk copies.

    ``delays``: copies happen at the wait, not at issue; with ``luck``, each as it comes.
    """

    def __init__(self, owners: int, delays: bool, luck: np.random.Generator | None = None) -> None:
        self.committed = np.zeros(owners, np.int64)
        self.pending: list[Copy] = []
        self.delays = delays
        self.luck = luck

    def issue(self, owners: Array, perform: Perform) -> None:
        """A copy of these owners; ``perform(which)`` does it for a choice of them (None: all)."""
        if self.delays and (self.luck is None or self.luck.random() < 0.5):
            self.pending.append(Copy(owners, self.committed[owners], perform))
        else:
            perform(None)

    def commit(self, owners: Array) -> None:
        """The copies since the last commit of these owners are a group."""
        self.committed[owners] += 1

    def wait(self, owners: Array, allowed: int) -> None:
        """Finishes every copy of these owners but those of the ``allowed`` latest groups (-1: all,
        uncommitted ones too).
        """
        if self.pending:
            self._finish(self.pending, owners, self.committed - allowed if allowed >= 0 else None)

    def so_far(self, owners: Array) -> Callable[[], None]:
        """What finishes the copies that these owners have issued up to now."""
        mine = list(self.pending)
        return lambda: self._finish(mine, owners, None)

    def _finish(self, candidates: list[Copy], owners: Array, before: Array | None) -> None:
        """Performs the candidates' parts of these owners (of groups before a number)."""
        waiting = np.zeros(len(self.committed), bool)
        waiting[owners] = True
        replaced: dict[int, list[Copy]] = {}
        for copy in candidates:
            due = waiting[copy.owners]
            if before is not None:
                due = due & (copy.group < before[copy.owners])
            if not due.any():
                continue
            if due.all():
                copy.perform(None)
                replaced[id(copy)] = []
            else:
                copy.perform(due)
                rest = _restricted(copy.perform, ~due)
                replaced[id(copy)] = [Copy(copy.owners[~due], copy.group[~due], rest)]
        if replaced:
            self.pending = [new for copy in self.pending for new in replaced.get(id(copy), [copy])]

    def finish(self) -> None:
        """The end of the kernel completes what nobody waited for."""
        for copy in self.pending:
            copy.perform(None)
        self.pending = []


def _restricted(perform: Perform, chosen: Array) -> Perform:
    """``perform`` for what is left of its owners."""
    rest = np.flatnonzero(chosen)
    size = len(chosen)

    def run(which: Array | None) -> None:
        selected = np.zeros(size, bool)
        selected[rest if which is None else rest[which]] = True
        perform(selected)

    return run
