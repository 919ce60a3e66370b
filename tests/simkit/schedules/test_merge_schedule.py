"""The merge kernel: rounds at the latency of L2, however little it moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simkit.errors import ShapeError
from simkit.machine.gpus import gpu
from simkit.schedules.grid import run_launch
from simkit.schedules.merge import Merge, fa2_combine, fa3_combine, flashinfer_merge

A100, H100 = gpu("a100"), gpu("h100")
EXACT = 1e-6  # durations are rounded up to 2^-20 of a cycle


def cycles(merge: Merge, states: int, rows: int = 16, d: int = 128) -> float:
    return run_launch(A100, merge.launch(A100, [states] * rows, d)).cycles


def test_a_round_of_flash_attention_2() -> None:
    """4 rows x 128 float32 through a port of 64 bytes: 32 cycles, 261 of L2, 512 multiply-adds on
    64 lanes: 8, of which the last is ready 4 later. LSEs of one more state of 4 rows: 16 bytes are
    0.25 cycles, and 8 ex2 on 16 lanes 0.5.
    """
    merge = fa2_combine(128)
    assert cycles(merge, 9) - cycles(merge, 8) == pytest.approx(32 + 261 + 8 + 4 + 0.75, abs=1)


def test_a_merge_of_one_state() -> None:
    """LSEs of 4 rows: 0.25 cycles and 261 of L2. Ten exchanges of 128 lanes: 40 cycles at 32 lanes,
    and 24 + 4 each until they are there; 22 + 2 x 4 to meet. A round. 256 conversions on 16 lanes,
    1,040 bytes through the port.
    """
    by_hand = (0.25 + 261) + (40 + 10 * 28) + 30 + (32 + 261 + 8 + 4) + 16 + 16.25
    assert cycles(fa2_combine(128), 1) == pytest.approx(by_hand, abs=1)


def test_rounds_in_flight_share_the_latency() -> None:
    """Of 16 rounds, four in flight wait for L2 four times instead of sixteen."""
    times = [
        cycles(Merge(rows=4, states=1, in_flight=in_flight), 16) for in_flight in (1, 2, 4, 16)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] - times[2] == pytest.approx(12 * 261, rel=0.25)
    assert times[0] < 4.5 * times[2]


@pytest.mark.parametrize(
    ("merge", "rows", "states"),
    [(fa2_combine(128), 4, 1), (fa3_combine(128), 8, 1), (flashinfer_merge(128), 1, 4)],
)
def test_the_published_tiles(merge: Merge, rows: int, states: int) -> None:
    assert (merge.rows, merge.states) == (rows, states)
    launch = merge.launch(H100, [8] * 32, 128)
    assert len(launch.items) == 32 // rows
    assert launch.items[0].length == 8 // states


def test_it_moves_every_state_once() -> None:
    """Whole rounds: 8 states of 16 rows, their LSEs, and what comes out."""
    for merge in (fa2_combine(128), fa3_combine(128), flashinfer_merge(128)):
        run = run_launch(H100, merge.launch(H100, [8] * 16, 128))
        moved = 8 * 16 * 129 * 4 + 16 * (128 * 2 + 4)
        assert run.busy["l2"] * run.rates["l2"] == pytest.approx(moved, rel=EXACT)


def test_rows_without_states_only_store() -> None:
    run = run_launch(H100, fa2_combine(128).launch(H100, [0] * 4, 128))
    assert run.busy["l2"] * run.rates["l2"] == pytest.approx(4 * (256 + 4), rel=EXACT)


def test_it_is_bound_by_latency() -> None:
    run = run_launch(A100, fa2_combine(128).launch(A100, [47] * 16, 128))
    assert run.utilisation("l2") < 0.05
    # 47 rounds at the latency of L2 at least: 8.7 of some 10 us.
    assert run.seconds > 47 * 261 / 1.41e9


@pytest.mark.parametrize("field", ["rows", "states", "in_flight", "threads"])
def test_sizes_that_make_no_kernel(field: str) -> None:
    with pytest.raises(ShapeError, match=f"{field} must be at least 1, got 0"):
        replace(fa2_combine(128), **{field: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("states", [[], [3, -1]])
def test_states_that_are_none(states: list[int]) -> None:
    with pytest.raises(ShapeError, match=f"{len(states)} rows to merge"):
        fa2_combine(128).launch(H100, states, 128)
