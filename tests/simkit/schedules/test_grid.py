"""Launches on a GPU: a schedule whose every figure is known, then the limits of a launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from simkit.errors import CapacityError, ShapeError
from simkit.machine.gpus import gpu as find_gpu
from simkit.schedules import grid
from simkit.schedules.engine import Agent, Program, Run, Start, Work
from simkit.schedules.flash_attention_2 import FlashAttention2
from simkit.schedules.flash_attention_3 import FlashAttention3
from simkit.schedules.grid import GridRun, Item, Launch, run_launch
from simkit.schedules.mla_decode import MlaDecode, MlaShape
from simkit.schedules.parameters import L2_PORT
from simkit.schedules.shape import AttentionShape
from simkit.schedules.sm import sm_rates

H100 = find_gpu("h100")
SMS = H100.sm_count
PER_TILE, DRAIN = 1000, 300  # cycles
RATES = sm_rates(H100, 1e9)


def agent(items: Sequence[Item]) -> Program:
    """Every tile fills the tensor core; an item's result is stored while the next one runs."""
    tile = Work("tile", "mma", (("tensor", PER_TILE * RATES["tensor"]),))
    for item in items:
        for _ in range(item.length):
            yield Run(tile)
        yield Start(Work("O", "store", (("smem", DRAIN * RATES["smem"]),)))


def cta(name: str, items: Sequence[Item]) -> list[Agent]:
    return [Agent(name, "warps", agent(items))]


launch = partial(
    Launch, name="tiles", cta=cta, threads=1024, registers=64, shared_bytes=0, flop=0.0
)


def run(**changes: object) -> GridRun:
    return run_launch(H100, launch(**changes), 1e9)  # type: ignore[arg-type]


def test_one_cta_alone() -> None:
    found = run(items=[Item(3)])
    assert found.cycles == 3 * PER_TILE + DRAIN
    assert found.busy["tensor"] == 3 * PER_TILE
    assert found.busy["smem"] == DRAIN
    assert found.seconds == (3 * PER_TILE + DRAIN) / 1e9
    assert found.utilisation("tensor") == pytest.approx(3000 / 3300 / SMS, rel=1e-15)
    assert found.bound == "too few items"


def test_waves_of_ctas() -> None:
    """One CTA fills an SM; a second wave takes as long again."""
    each = 2 * PER_TILE + DRAIN
    assert run(items=[Item(2)] * SMS).cycles == each
    found = run(items=[Item(2)] * (SMS + 1))
    assert found.cycles == 2 * each
    assert found.placement.starts.tolist() == [0] * SMS + [each]
    assert found.bound == "too few items"  # one in a wave of its own
    assert run(items=[Item(2)] * 4 * SMS).bound == "tensor"


def test_residents_share_their_sm() -> None:
    found = run(items=[Item(2)] * (2 * SMS), threads=512)
    assert found.occupancy.ctas_per_sm == 2
    assert found.cycles == 2 * 2 * PER_TILE + DRAIN


def test_persistent_ctas_drain_once() -> None:
    found = run(items=[Item(2)] * (3 * SMS), persistent=True)
    assert found.cycles == 3 * 2 * PER_TILE + DRAIN
    assert found.placement.makespan == 3 * 2 * PER_TILE
    assert found.utilisation("tensor") == 6000 / 6300


def test_workers_that_are_given() -> None:
    found = run(
        items=[Item(1), Item(2), Item(3)], persistent=True, workers=np.array([0, 0, 1]).tolist()
    )
    assert found.placement.loads.tolist() == [3 * PER_TILE, 3 * PER_TILE]
    assert found.placement.starts.tolist() == [0, PER_TILE, 0]


def test_number_of_persistent_ctas() -> None:
    found = run(items=[Item(1)] * 8, persistent=True, ctas=4)
    assert found.placement.workers == 4
    assert found.cycles == 2 * PER_TILE + DRAIN
    more = run(items=[Item(1)] * 1000, persistent=True, ctas=10_000)
    assert more.placement.workers == SMS
    odd = run(items=[Item(1)] * 1000, persistent=True, cluster=5)
    assert odd.placement.workers == SMS - SMS % 5


def test_few_sms_may_use_all_of_hbm() -> None:
    """Each SM with a CTA has a large share, up to what its port lets through."""
    bytes_of_tile = 64_000.0

    def copies(name: str, items: Sequence[Item]) -> list[Agent]:
        work = Work("copy", "load", (("hbm", bytes_of_tile),))
        return [Agent(name, "copies", (Run(work) for item in items for _ in range(item.length)))]

    for sms in (SMS // 2, SMS, 1):
        found = run(items=[Item(100)] * sms, cta=copies)
        rate = H100.hbm_bytes_per_s * H100.hbm_read_fraction
        least = max(sms * 100 * bytes_of_tile / rate, 100 * bytes_of_tile / L2_PORT.value / 1e9)
        assert found.seconds == pytest.approx(least, abs=1e-9)  # items take whole cycles
        used = sms * 100 * bytes_of_tile / rate / least
        assert found.utilisation("hbm") == pytest.approx(used, rel=1e-9 / least)
    assert used < 0.1


def test_the_clock_is_found_where_hbm_binds() -> None:
    """Cycles that HBM takes go with the clock, so that each guess brings it a part nearer. From a
    nominal clock of four times the H100's, it is the one of a run at that clock all the same.
    """
    fast = replace(H100, tensor_clock_hz=4 * H100.tensor_clock_hz)
    shape = MlaShape(batch=500, kv_len=1000, heads=1, q_len=3)
    kernel = MlaDecode(seesaw=False, naive=True).launches(fast, shape)[0]
    found = run_launch(fast, kernel)
    assert found.is_power_limited
    assert found.cycles == pytest.approx(
        run_launch(fast, kernel, found.clock_hz).cycles, rel=2 * grid.CLOCK_STEP
    )


def test_few_ctas_are_served_in_the_order_that_their_share_of_hbm_makes() -> None:
    """Three CTAs with all of HBM are bound by products: twice the rows take hardly longer."""
    lengths = (64, 63, 8000)
    few, more = (
        run_launch(H100, MlaDecode(naive=True).launches(H100, shape)[0]).seconds
        for shape in (
            MlaShape(batch=3, kv_len=1, heads=heads, lengths=lengths) for heads in (64, 128)
        )
    )
    assert few <= more <= 1.05 * few


def test_a_lone_item_takes_what_it_does() -> None:
    """Also where one more would take another fraction of a cycle."""
    shape = AttentionShape(batch=1, heads=1, q_len=1, kv_len=1, d=128)
    (kernel,) = FlashAttention3(stages=1, specialised=False).launches(H100, shape)
    found = run_launch(H100, kernel)
    assert found.cycles == found.example.makespan


@pytest.mark.parametrize("length", [grid.LONGEST, grid.LONGEST + 1, 1000, 1001, 100_000])
def test_long_items(length: int) -> None:
    """Up to 1000 tiles simulated, beyond on the line: here both are exact."""
    found = run(items=[Item(length)], persistent=True)
    assert found.cycles == length * PER_TILE + DRAIN
    assert found.example.makespan == min(length, grid.LONGEST) * PER_TILE + DRAIN


def test_a_higher_rate_counts_where_it_is_the_bound() -> None:
    found = run(items=[Item(10)])
    # All but the last store is tensor time.
    assert found.sensitivities["tensor"] == pytest.approx(10_000 / 10_300, abs=1e-6)
    assert found.sensitivities["smem"] == pytest.approx(300 / 10_300, abs=1e-6)
    assert set(found.sensitivities) == {"tensor", "smem"}


def test_launches_share_simulations_only_of_the_same_gpu() -> None:
    """A latency is in no rate."""
    shape = AttentionShape(batch=1, heads=2, q_len=512, kv_len=512, d=64)
    slow = replace(H100, l2_latency=H100.l2_latency + 5000, hbm_latency=H100.hbm_latency + 5000)
    cycles = [
        run_launch(gpu, FlashAttention2().launches(gpu, shape)[0], 1e9).cycles
        for gpu in (H100, slow, H100)
    ]
    assert cycles[1] > cycles[0] + 5000
    assert cycles[2] == cycles[0]


def test_power_limit() -> None:
    """Within the limit, and above what a clock a thousandth higher would take."""
    shape = AttentionShape(batch=4, heads=16, q_len=2048, kv_len=2048, d=128)
    kernel = FlashAttention3().launches(H100, shape)[0]
    found = run_launch(H100, kernel)
    assert found.is_power_limited
    assert found.power_w is not None
    assert H100.board_w * (1 - 1e-9) < found.power_w <= H100.board_w
    assert found.bound.endswith("; power")
    fixed = run_launch(H100, kernel, H100.tensor_clock_hz)
    assert fixed.power_w is not None
    assert fixed.power_w > H100.board_w
    assert not fixed.is_power_limited


def test_launch_that_cannot_run_is_one_error() -> None:
    with pytest.raises(ShapeError, match="tiles has no items"):
        run(items=[])
    with pytest.raises(CapacityError, match=r"1024 threads of 255 registers .* h100 has 65536"):
        run(items=[Item(1)], registers=255)
    with pytest.raises(ShapeError, match="clock must be above 0 Hz, got -1"):
        run_launch(H100, launch(items=[Item(1)]), -1.0)


def test_more_items_than_can_be_placed_are_refused() -> None:
    assert grid.repeated([Item(1), Item(2)], 2) == [Item(1), Item(2)] * 2
    with pytest.raises(CapacityError, match=r"4,000,002 items of CTAs; .* takes 4,000,000 at most"):
        grid.repeated([Item(1), Item(2)], 2_000_001)
