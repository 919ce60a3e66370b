"""What a launch moved and did: one report type for every device.

The executor counts; on a GPU the same figures come from Nsight Compute.  The definitions are
DESIGN's: ``requested`` bytes asked for, ``sectors`` distinct 32-byte sectors per warp instruction,
``dram`` what the L2 lets through, ``shared`` wavefronts against the ideal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simkit.machine.memory import TensorTraffic


@dataclass(frozen=True, slots=True)
class SharedTraffic:
    """Shared-memory accesses: warp instructions, their wavefronts, and what no bank conflict would
    have taken.
    """

    instructions: int = 0
    wavefronts: int = 0
    ideal: int = 0

    @property
    def conflicts(self) -> int:
        return self.wavefronts - self.ideal


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes and wavefronts of one launch.  ``dram_read``/``dram_write`` are None where nobody
    measured them.
    """

    tensors: tuple[TensorTraffic, ...] = ()
    shared: SharedTraffic = SharedTraffic()
    local_bytes: int = 0
    dram_read: int | None = None
    dram_write: int | None = None

    def of(self, tensor: str, direction: str) -> TensorTraffic:
        """The traffic of one tensor ("read" or "write"); zeros if it was not touched."""
        for entry in self.tensors:
            if entry.tensor == tensor and entry.direction == direction:
                return entry
        return TensorTraffic(tensor, direction, 0, 0)  # type: ignore[arg-type]

    @property
    def requested(self) -> int:
        return sum(t.requested for t in self.tensors)

    @property
    def sectors(self) -> int:
        return sum(t.sectors for t in self.tensors)


@dataclass(frozen=True, slots=True)
class Hazard:
    """Something a kernel does that is wrong or costly whatever its result: kind, sentence, PTX
    line.

    ``other_line``: of the access that it conflicts with; ``advice``: what would have prevented it;
    ``severity``: "error", or "info" for what may well be meant.  ``place`` and ``other_place`` say
    the lines in words, with those of the CUDA source where the PTX carries them.
    """

    kind: str
    message: str
    line: int = 0
    other_line: int = 0
    advice: str = ""
    severity: str = "error"
    place: str = ""
    other_place: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """One launch.

    ``instructions``: warp instructions; ``lane_instructions``: those times the active lanes;
    ``seconds``: wall time on the executor, kernel time on a GPU; ``output``: what printf wrote.
    """

    kernel: str
    device: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    seconds: float
    traffic: Traffic | None = None
    hazards: list[Hazard] = field(default_factory=list)
    instructions: int = 0
    lane_instructions: int = 0
    output: str = ""

    @property
    def errors(self) -> list[Hazard]:
        """The hazards that make a kernel wrong."""
        return [hazard for hazard in self.hazards if hazard.severity == "error"]
