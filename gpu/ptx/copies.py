"""Copies in flight: what cp.async and bulk stores have issued and not yet done.

A copy may read its source and write its destination at any moment between its issue and the wait
that covers it.  The executor picks the moment: at once (eager), or not before the wait (lazy),
which shows kernels that read too early, or now this, now that (random). Source: PTX ISA 8.8,
9.7.9.25.3 (cp.async, commit_group, wait_group), 9.7.9.25.4-5 (bulk copies, wait_group.read).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray
Perform = Callable[[Array | None], None]


@dataclass(slots=True, eq=False)
class Copy:
    """One copy of some owners: ``group`` is each one's number of groups committed before it.

    ``perform(which)`` does it for a choice of the owners (None: all), ``read(which)`` only fetches
    their data, for perform to write later.  ``due`` are the owners it has yet to be done for,
    ``unread`` those whose data has yet to be fetched.
    """

    owners: Array
    group: Array
    perform: Perform
    read: Perform | None = None
    due: Array = field(init=False)
    unread: Array = field(init=False)

    def __post_init__(self) -> None:
        self.due = np.ones(len(self.owners), bool)
        self.unread = self.due.copy()

    def finish(self, which: Array) -> None:
        """Does it for those of ``which`` it is due for."""
        now = self.due & which
        if now.any():
            self.due = self.due & ~now
            self.perform(None if now.all() else now)

    def fetch(self, which: Array) -> None:
        """Reads the sources of those of ``which`` it is due for."""
        now = self.due & self.unread & which
        if self.read is not None and now.any():
            self.unread = self.unread & ~now
            self.read(now)


class Copies:
    """The copies in flight of all resident owners: warps for cp.async, threads for bulk copies.

    ``delays``: copies happen at the wait, not at issue; with ``luck``, each as it comes.
    """

    def __init__(self, owners: int, delays: bool, luck: np.random.Generator | None = None) -> None:
        self.committed = np.zeros(owners, np.int64)
        self.pending: list[Copy] = []
        self.delays = delays
        self.luck = luck

    def issue(self, owners: Array, perform: Perform, read: Perform | None = None) -> None:
        """A copy of these owners; see Copy."""
        if self.delays and (self.luck is None or self.luck.random() < 0.5):
            self.pending.append(Copy(owners, self.committed[owners], perform, read))
        else:
            perform(None)

    def commit(self, owners: Array) -> None:
        """The copies since the last commit of these owners are a group."""
        self.committed[owners] += 1

    def wait(self, owners: Array, allowed: int, only_reads: bool = False) -> None:
        """Finishes every copy of these owners but those of the ``allowed`` latest groups (-1: all,
        uncommitted ones too); with ``only_reads`` they need not have written yet.
        """
        if not self.pending:
            return
        waiting = self._members(owners)
        for copy in self.pending:
            which = waiting[copy.owners]
            if allowed >= 0:
                which &= copy.group < self.committed[copy.owners] - allowed
            if only_reads:
                copy.fetch(which)
            else:
                copy.finish(which)
        self._forget()

    def so_far(self, owners: Array) -> Callable[[], None]:
        """What finishes the copies that these owners have issued up to now."""
        mine = list(self.pending)
        waiting = self._members(owners)

        def finish() -> None:
            for copy in mine:
                copy.finish(waiting[copy.owners])
            self._forget()

        return finish

    def finish(self) -> None:
        """The end of the kernel completes what nobody waited for."""
        for copy in self.pending:
            copy.finish(copy.due)
        self.pending = []

    def _members(self, owners: Array) -> Array:
        waiting = np.zeros(len(self.committed), bool)
        waiting[owners] = True
        return waiting

    def _forget(self) -> None:
        self.pending = [copy for copy in self.pending if copy.due.any()]
