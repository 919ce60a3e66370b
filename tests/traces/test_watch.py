"""Playing a trace: frames over time in a terminal, a few of them in a file."""

from __future__ import annotations

import io
import re

import pytest
from pipelines import pipeline
from rich.console import Console

from traces.drawing import View
from traces.events import TraceError
from traces.watch import FRAMES_PER_SECOND, SECONDS, STILL_FRAMES, watch


class Time:
    """A clock that its own sleep moves; Ctrl-C after ``patience`` naps."""

    def __init__(self, patience: float = float("inf")) -> None:
        self.now, self.naps, self.patience = 100.0, 0, patience

    def sleep(self, seconds: float) -> None:
        self.naps += 1
        if self.naps > self.patience:
            raise KeyboardInterrupt
        self.now += seconds

    def clock(self) -> float:
        return self.now


def played(time: Time, terminal: bool = True, speed: float = 1.0, **view: float) -> str:
    file = io.StringIO()
    console = Console(file=file, width=80, height=50, force_terminal=terminal, _environ={})
    watch(pipeline(), console, View(**view), speed=speed, sleep=time.sleep, clock=time.clock)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())


def moments(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(r", now ([\d,.]+)", text)]


def test_a_terminal_sees_time_go_by_to_the_end() -> None:
    time = Time()
    found = moments(played(time))
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0, 2000)
    assert time.now == pytest.approx(100 + SECONDS, abs=1 / FRAMES_PER_SECOND)
    assert len(set(found)) >= SECONDS * FRAMES_PER_SECOND


def test_speed_and_range() -> None:
    time = Time()
    found = moments(played(time, speed=4, start=500, stop=900))
    assert (found[0], found[-1]) == (500, 900)
    assert time.now == pytest.approx(100 + SECONDS / 4, abs=1 / FRAMES_PER_SECOND)


def test_what_comes_later_is_not_drawn_yet() -> None:
    frames = played(Time(), terminal=False).split("pipeline: ")[1:]
    assert [moments(frame) for frame in frames] == [[500], [1000], [1500], [2000]]
    assert len(frames) == STILL_FRAMES
    assert [frame.count("O2") for frame in frames] == [0, 0, 0, 1]
    assert all(frame.count("▼") == 1 for frame in frames)


def test_ctrl_c_ends_it_and_leaves_what_was_drawn() -> None:
    time = Time(patience=6)
    found = moments(played(time))
    assert time.naps == 7
    assert found[-1] == pytest.approx(2000 * 6 / FRAMES_PER_SECOND / SECONDS)


@pytest.mark.parametrize("speed", [0, -1, float("nan"), float("inf")])
def test_speeds_that_there_are_not(speed: float) -> None:
    with pytest.raises(TraceError, match=f"speed is {speed}; it must be a positive number"):
        played(Time(), speed=speed)
