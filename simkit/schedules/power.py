"""The clock that a board's power limit allows: P = idle + energy of what is done, over time.

Energies add, as in Antepara et al. (SC '25, doi 10.1145/3712285.3759815). The energy of what runs
on SMs follows the square of the voltage, and that the clock: dynamic power goes with the cube of
the clock, as textbooks have it; HBM has a clock of its own. The energy of tensor-core products is
what the best measured matrix product takes at its measured clock and power, with the way of its
operands in it; that of other instructions is the published one of a vector operation.
"""

from __future__ import annotations

from dataclasses import dataclass

from simkit.machine.gpus import Gpu
from simkit.schedules.sm import TensorPath


@dataclass(frozen=True, slots=True)
class Energy:
    """What costs energy: tensor-core FLOP, instructions of lanes, bytes of HBM."""

    flop: float
    lane_instructions: float
    hbm_bytes: float
    path: TensorPath

    def sm_joules(self, gpu: Gpu) -> float | None:
        """At ``gpu.energy_clock_hz``; None where no energies are known."""
        each = gpu.tensor_j_per_fp8_flop if self.path == "wgmma fp8" else gpu.tensor_j_per_flop
        if each is None or gpu.lane_j is None:
            return None
        return self.flop * each + self.lane_instructions * gpu.lane_j

    def hbm_joules(self, gpu: Gpu) -> float:
        return self.hbm_bytes * (gpu.hbm_j_per_byte or 0.0)

    def watts(self, gpu: Gpu, clock_hz: float, seconds: float) -> float | None:
        """Of the board, at a clock; None where no energies are known."""
        joules = self.sm_joules(gpu)
        if joules is None or not seconds:
            return None
        scaled = joules * (clock_hz / gpu.energy_clock_hz) ** 2
        return gpu.idle_w + (scaled + self.hbm_joules(gpu)) / seconds


def power_limited_clock(gpu: Gpu, energy: Energy, cycles: float) -> float:
    """The highest clock up to ``gpu.tensor_clock_hz`` at which the board stays within its power,
    if the work takes ``cycles`` at any clock.
    """
    highest = gpu.tensor_clock_hz
    if (energy.watts(gpu, highest, cycles / highest) or 0.0) <= gpu.board_w:
        return highest
    low, high = 0.0, highest
    for _ in range(60):
        clock = (low + high) / 2
        watts = energy.watts(gpu, clock, cycles / clock)
        assert watts is not None
        low, high = (low, clock) if watts > gpu.board_w else (clock, high)
    return low
