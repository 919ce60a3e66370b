"""The timeline of merging states: its bytes are the model's, its times follow from the table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit.algorithms import merge_states as models
from simkit.algorithms.problem import BF16
from simkit.errors import ShapeError
from simkit.machine.gpus import gpu
from simkit.machine.machine import Machine
from simkit.machine.memory import WARP_LANES, unbacked
from simkit.schedules.merge_timeline import merge_states
from traces.events import Trace

H100 = gpu("h100")
BYTES_PER_CYCLE = 13.8816  # one SM's share of HBM


def moved(trace: Trace, kind: str) -> int:
    return sum(int(event.args["bytes"]) for event in trace.events if event.kind == kind)


@given(
    st.integers(1, 4),
    st.integers(0, 9),
    st.sampled_from((64, 192)),
    st.sampled_from(((np.float32, BF16), (BF16, BF16), (np.float16, np.float32))),
)
@settings(max_examples=25)
def test_it_moves_the_bytes_of_the_model(
    heads: int, states: int, d: int, types: tuple[np.dtype, np.dtype]
) -> None:
    """Up to four heads of a row are one CTA; all lanes of a warp read its LSEs."""
    state, output = (np.dtype(dtype) for dtype in types)
    machine = Machine(H100, "none")
    shape = (1, states, heads, d)
    models.merge_states(
        machine, unbacked(shape, state), unbacked(shape[:-1], np.float32), dtype=output
    )
    assert machine.ctas == 1
    trace = merge_states(
        H100, heads, states, d, state_bytes=state.itemsize, output_bytes=output.itemsize
    )
    counted = {"load": 0, "store": 0}
    for (tensor, direction), row in machine.traffic.items():
        each = WARP_LANES if tensor == "partial_lse" else 1
        counted["load" if direction == "read" else "store"] += row.requested // each
    assert {kind: moved(trace, kind) for kind in counted} == counted


def test_times_of_one_state() -> None:
    trace = merge_states(H100, 100, 1, 128)
    by_name = {event.name: event for event in trace.events}
    assert by_name["load LSEs"].duration == pytest.approx(4 * 4 / BYTES_PER_CYCLE, rel=1e-4)
    assert by_name["load O 0"].duration == pytest.approx(4 * 128 * 4 / BYTES_PER_CYCLE, rel=1e-4)
    # 128 fp32 lanes: 13 operations in each of the lanes of four warps, then 4 * 128 multiply-adds.
    assert by_name["weight 0"].duration == 13
    assert by_name["sum 0"].duration == 4
    assert by_name["weight 0"].start == by_name["load O 0"].start + by_name["load O 0"].duration


@pytest.mark.parametrize(("pairs", "states"), [(0, 1), (1, -1), (1, 20_001)])
def test_sizes_that_make_no_timeline(pairs: int, states: int) -> None:
    with pytest.raises(ShapeError, match=f"{pairs} heads.*{states} states"):
        merge_states(H100, pairs, states, 64)
