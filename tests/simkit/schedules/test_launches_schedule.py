"""Launches over time, against timelines worked out by hand. Times here are microseconds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkit.errors import ShapeError
from simkit.machine.gpus import gpu
from simkit.schedules.flash_decoding import FlashDecoding
from simkit.schedules.launches import Costs, Kernel, Timeline, kernels_of, timeline
from simkit.schedules.prediction import predict
from simkit.schedules.shape import AttentionShape

US = 1e-6
COSTS = Costs(host=4.0, gap=2.0, pdl=0.25, graph=2.5, graph_gap=1.0)


def kernel(seconds: float, **others: Any) -> Kernel:
    return Kernel(name="kernel", seconds=seconds, **others)


def spans(found: Timeline) -> list[tuple[float, float]]:
    return [(span.start, span.stop) for span in found.spans]


def test_long_kernels_wait_for_each_other() -> None:
    """Submitted at 4, 8, 12; the gap of 2 follows each end."""
    found = timeline([kernel(10)] * 3, costs=COSTS)
    assert spans(found) == [(4, 14), (16, 26), (28, 38)]
    assert (found.seconds, found.busy, found.idle) == (38, 30, 8)
    assert (found.host_seconds, found.unhindered) == (12, 34)
    assert not found.is_launch_bound


def test_short_kernels_wait_for_the_cpu() -> None:
    found = timeline([kernel(1)] * 3, costs=COSTS)
    assert spans(found) == [(4, 5), (8, 9), (12, 13)]
    assert (found.busy, found.idle, found.unhindered) == (3, 10, 7)
    assert found.is_launch_bound


def test_a_graph_is_one_launch() -> None:
    found = timeline([kernel(1)] * 3, submission="graph", costs=COSTS)
    assert spans(found) == [(2.5, 3.5), (4.5, 5.5), (6.5, 7.5)]
    assert found.host_seconds == 2.5
    assert not found.is_launch_bound


def test_a_dependent_launch_saves_a_part_of_the_gap_and_its_prologue() -> None:
    first, second = kernel(20), kernel(10, dependent=True)
    assert spans(timeline([first, second], costs=COSTS)) == [(4, 24), (25.75, 35.75)]
    early = kernel(10, dependent=True, prologue=3)
    assert spans(timeline([first, early], costs=COSTS)) == [(4, 24), (22.75, 32.75)]
    # A prologue cannot start before the kernel ahead has, nor before it is submitted.
    longer = kernel(40, dependent=True, prologue=40)
    assert spans(timeline([first, longer], costs=COSTS)) == [(4, 24), (8, 48)]
    # In a graph both wait: the first for another stream, and the second's prologue for the first.
    kernels = [
        kernel(20, stream=1, share=0.5),
        kernel(10, share=0.5, after=(0,)),
        kernel(40, share=0.5, dependent=True, prologue=40),
    ]
    found = timeline(kernels, submission="graph", costs=COSTS)
    assert spans(found) == [(2.5, 22.5), (23.5, 33.5), (23.5, 63.5)]


def test_streams_run_side_by_side_where_the_gpu_has_room() -> None:
    """Halves overlap; a third kernel of a half waits for room, and whole ones for everything."""
    half = {"share": 0.5}
    found = timeline([kernel(20, stream=n, **half) for n in range(3)], costs=COSTS)
    assert spans(found) == [(4, 24), (8, 28), (24, 44)]
    assert (found.busy, found.seconds) == (40, 44)
    whole = timeline([kernel(20, stream=n) for n in range(2)], costs=COSTS)
    assert spans(whole) == [(4, 24), (24, 44)]


def test_events_order_streams() -> None:
    """The second stream's kernel waits for the first's, and for the gap."""
    kernels = [kernel(20, share=0.5), kernel(5, stream=1, share=0.5, after=(0,))]
    assert spans(timeline(kernels, costs=COSTS)) == [(4, 24), (26, 31)]


def test_the_chapters_330_launches() -> None:
    """About 1.3 ms of the CPU; one launch with a graph."""
    kernels = [kernel(4.8e-3 / 330)] * 330
    stream, graph = (timeline(kernels, submission=how) for how in ("stream", "graph"))
    assert round(1e3 * stream.host_seconds, 1) == 1.3
    assert not stream.is_launch_bound
    assert graph.host_seconds == pytest.approx(2.5 * US)
    # A model an eighth as large is bound by its launches, until they are a graph.
    small = [kernel(0.6e-3 / 330)] * 330
    assert timeline(small).is_launch_bound
    assert not timeline(small, submission="graph").is_launch_bound


@given(
    st.lists(
        st.builds(
            kernel, st.floats(0, 50), stream=st.integers(0, 2), dependent=st.booleans(),
            share=st.floats(0.1, 1),
        ),
        min_size=1, max_size=12,
    ),
    st.sampled_from(("stream", "graph")),
)  # fmt: skip
def test_what_holds_for_any_kernels(kernels: list[Kernel], how: Any) -> None:
    found = timeline(kernels, submission=how, costs=COSTS)
    assert [span.kernel for span in found.spans] == kernels
    for span in found.spans:
        assert span.start >= span.submitted
        assert span.stop - span.start == pytest.approx(span.kernel.seconds, abs=1e-9)
        beside = [other for other in found.spans if other.start <= span.start < other.stop]
        assert sum(other.kernel.share for other in beside) <= 1 + 1e-6
    work = sum(each.seconds for each in kernels)
    assert max(each.seconds for each in kernels) <= found.busy + 1e-9 <= work + 2e-9
    assert found.idle >= -1e-9
    by_stream: dict[int, float] = {}
    for span in found.spans:
        assert span.start >= by_stream.get(span.kernel.stream, 0.0)
        by_stream[span.kernel.stream] = span.stop


def test_a_prediction_is_a_sequence_of_kernels() -> None:
    """Its seconds are those of a busy stream: all but the first submission."""
    h100 = gpu("h100")
    shape = AttentionShape(1, 32, 1, 262144, 128, kv_heads=8)
    prediction = predict(h100, FlashDecoding(dependent=True).launches(h100, shape))
    kernels = kernels_of(prediction)
    assert [each.name for each in kernels] == ["flash_decoding_split", "combine"]
    assert [each.dependent for each in kernels] == [False, True]
    found = timeline(kernels)
    gap = prediction.gaps[0]
    assert found.seconds == pytest.approx(4 * US + prediction.seconds - gap)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seconds": -1}, "takes -1 s"),
        ({"seconds": 1, "prologue": 2, "dependent": True}, "prologue of 2 s"),
        ({"seconds": 1, "prologue": 0.5}, "takes a dependent launch"),
        ({"seconds": 1, "share": 0}, "takes 0 of the GPU"),
        ({"seconds": 1, "share": 1.5}, "takes 1.5 of the GPU"),
    ],
)
def test_kernels_that_are_none(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        Kernel(name="kernel", **wrong)


def test_sequences_that_are_none() -> None:
    with pytest.raises(ShapeError, match="no kernel to launch"):
        timeline([])
    for after in ((1,), (0, 2), (-1,)):
        with pytest.raises(ShapeError, match=r"kernel 1 .* waits for"):
            timeline([kernel(1), kernel(1, after=after)])
