"""The clock that power allows, on a board with round figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simkit.machine.gpus import gpu as find_gpu
from simkit.schedules.power import Energy, power_limited_clock

BOARD = replace(
    find_gpu("h100"),
    idle_w=100.0,
    board_w=500.0,
    tensor_clock_hz=2.0e9,
    energy_clock_hz=1.0e9,
    tensor_j_per_flop=1e-12,
    tensor_j_per_fp8_flop=0.5e-12,
    lane_j=1e-11,
    hbm_j_per_byte=1e-10,
)
CYCLES = 1e6  # a millisecond at 1 GHz
PRODUCTS = Energy(1e11, 0, 0, "wgmma")  # 0.1 J at 1 GHz


def test_power_is_idle_and_energy_over_time() -> None:
    assert PRODUCTS.watts(BOARD, 1e9, 1e-3) == pytest.approx(100 + 100, rel=1e-15)
    # Twice the clock: four times the energy in half the time.
    assert PRODUCTS.watts(BOARD, 2e9, 0.5e-3) == pytest.approx(100 + 800, rel=1e-15)
    assert replace(PRODUCTS, path="wgmma fp8").watts(BOARD, 1e9, 1e-3) == pytest.approx(
        150, rel=1e-15
    )
    # HBM has a clock of its own.
    copies = Energy(0, 0, 1e9, "wgmma")
    assert copies.watts(BOARD, 2e9, 1e-3) == pytest.approx(100 + 100, rel=1e-15)
    assert Energy(0, 1e10, 0, "wgmma").watts(BOARD, 1e9, 1e-3) == pytest.approx(200, rel=1e-15)


def test_clock_is_where_the_cube_meets_the_limit() -> None:
    # 100 W at 1 GHz, with the cube of the clock; 400 W are there for it.
    found = power_limited_clock(BOARD, PRODUCTS, CYCLES)
    assert found == pytest.approx(4 ** (1 / 3) * 1e9, rel=1e-12)


def test_clock_is_nominal_within_the_limit() -> None:
    assert power_limited_clock(BOARD, replace(PRODUCTS, flop=4e10), CYCLES) == 2.0e9
    assert power_limited_clock(replace(BOARD, board_w=900.1), PRODUCTS, CYCLES) == 2.0e9


def test_any_work_has_a_clock() -> None:
    """However much energy a cycle takes: 10^6 times as much, a hundredth of the clock."""
    found = power_limited_clock(BOARD, replace(PRODUCTS, flop=1e17), CYCLES)
    assert found == pytest.approx(4 ** (1 / 3) * 1e7, rel=1e-9)


def test_no_energies_no_limit() -> None:
    unknown = replace(BOARD, tensor_j_per_flop=None)
    assert PRODUCTS.watts(unknown, 1e9, 1e-3) is None
    assert power_limited_clock(unknown, PRODUCTS, CYCLES) == 2.0e9
