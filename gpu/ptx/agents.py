"""Asynchronous agents: bulk copies, asynchronous stores and arrivals that happen on their own time.

An agent may do its work at any moment between its issue and the wait that covers it.  ``eager``
does it at once, ``lazy`` when nothing else can run any more (as late as a wait allows) or everybody
seems to spin for it, ``random`` at some moment in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from gpu.ptx.schedule import Schedule

Work = Callable[[], None]

# With a random schedule, an agent works at issue, or before a step of the warps, with these
# chances.
_AT_ONCE = 0.25
_AT_A_STEP = 0.15
# With a lazy schedule, one works after so many steps of the warps without one, or so many tests of
# an mbarrier in vain.
_STEPS = 4096
_TESTS = 64


class Agents:
    """The agents in flight of all resident CTAs."""

    def __init__(self, schedule: Schedule, random: np.random.Generator) -> None:
        self.kind = schedule.kind
        self.random = random
        self.pending: deque[Work] = deque()
        self._steps = 0
        self._tests = 0

    def start(self, work: Work) -> None:
        """Something that is to happen, now or later."""
        if self.kind == "eager" or (self.kind == "random" and self.random.random() < _AT_ONCE):
            work()
        else:
            self.pending.append(work)

    def step(self) -> None:
        """Called before each step of the warps."""
        if not self.pending:
            return
        if self.kind == "random":
            if self.random.random() < _AT_A_STEP:
                self._one()
            return
        self._steps += 1
        if self._steps >= _STEPS or self._tests >= _TESTS:
            self._one()

    def somebody_waits(self) -> None:
        """A warp has tested an mbarrier whose phase is not complete."""
        self._tests += 1

    def run_one(self) -> bool:
        """Lets one agent work because the warps wait for it; whether there was one."""
        if not self.pending:
            return False
        self._one()
        return True

    def _one(self) -> None:
        if self.kind == "random":
            self.pending.rotate(-int(self.random.integers(len(self.pending))))
        self._steps = self._tests = 0
        self.pending.popleft()()
