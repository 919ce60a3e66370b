"""Plays a trace in the terminal: a cursor moves over time, and bars grow up to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from rich.console import Console
from rich.live import Live

from traces.critical_path import critical_path
from traces.drawing import View
from traces.events import Trace, TraceError
from traces.layout import time_range
from traces.terminal import TraceView

SECONDS = 10.0
"""What a trace takes at speed 1, whatever its length."""
FRAMES_PER_SECOND = 12
STILL_FRAMES = 4
"""Frames that are printed where nothing can move: in a file or a pipe."""


def watch(
    trace: Trace,
    console: Console | None = None,
    view: View | None = None,
    *,
    speed: float = 1.0,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Plays the range of ``view`` in ``SECONDS / speed`` seconds; where the console is no terminal,
    prints a few frames instead. Ctrl-C ends it, and what has been drawn stays.

    TraceError for a speed that is not positive, and as `traces.terminal.show`.
    """
    if not 0 < speed < float("inf"):
        raise TraceError(f"speed is {speed}; it must be a positive number")
    console, view = console or Console(), view or View()
    start, stop = time_range(trace, view.start, view.stop)
    path = critical_path(trace) if view.critical else None

    def frame(share: float) -> TraceView:
        now = start + share * (stop - start)
        return TraceView(trace, replace(view, start=start, stop=stop, now=now, arrows=0), path)

    if not console.is_terminal:
        for number in range(1, STILL_FRAMES + 1):
            console.print(frame(number / STILL_FRAMES))
        return
    with Live(frame(0), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            for share in _shares(SECONDS / speed, sleep, clock):
                live.update(frame(share), refresh=True)
        except KeyboardInterrupt:
            return


def _shares(
    seconds: float, sleep: Callable[[float], None], clock: Callable[[], float]
) -> Iterator[float]:
    """How much of the time is over, frame by frame, up to 1; frames that come too late are left
    out, so that it takes as long as it should.
    """
    begin = clock()
    share = 0.0
    while share < 1:
        sleep(1 / FRAMES_PER_SECOND)
        share = min(1.0, (clock() - begin) / seconds)
        yield share
