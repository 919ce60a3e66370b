"""What a launch moved and did: one report type for every device.

The executor counts; on a GPU the same figures come from Nsight Compute.  The definitions are
DESIGN's: ``requested`` bytes asked for, ``sectors`` distinct 32-byte sectors per warp instruction,
``dram`` what the L2 lets through, ``shared`` wavefronts against the ideal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simkit.machine.memory import TensorTraffic
from traces.events import Trace


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


FAULTS = frozenset(("out_of_bounds", "misaligned", "deadlock", "trap", "illegal_use"))
"""Kinds of hazards that end a launch."""
HAZARD_KINDS = {
    "race": "Two accesses of the same bytes, one of them a write, that nothing orders.",
    "missing_proxy_fence": "A generic write that the async proxy need not see.",
    "uninitialised": "A read of memory that nobody has written.",
    "uninitialised_register": "A read of a register that may not have been written.",
    "missing_wgmma_fence": "Registers of a wgmma accessed without a wgmma.fence in between.",
    "wgmma_register": "Registers of a wgmma accessed before it is over.",
    "early_exit": "Shared memory of a CTA that may have exited.",
    "out_of_bounds": "An access outside of every allocation.",
    "misaligned": "An address that is no multiple of the access's size.",
    "deadlock": "Every warp that is left waits for something that can no longer happen.",
    "trap": "The kernel gave up.",
    "illegal_use": "An instruction whose use here is undefined.",
    "never_written": "An output of which some bytes were never written.",
    "zero_fill": "A tensor copy that reaches outside its tensor and gets zeros.",
    "bank_conflicts": "A shared-memory access that takes more wavefronts than it need.",
    "uncoalesced": "A global access that touches more sectors than its bytes fill.",
    "spills": "Registers that live in local memory.",
    "divergence": "Lanes of a warp that take different ways.",
}


@dataclass(frozen=True, slots=True)
class Hazard:
    """Something a kernel does that is wrong or costly whatever its result: kind
    (HAZARD_KINDS), sentence, PTX line.

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
    ``seconds``: wall time on the executor, kernel time on a GPU; ``output``: what printf wrote;
    ``trace``: what happened when, if that was asked for.
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
    trace: Trace | None = None

    @property
    def is_broken(self) -> bool:
        """Whether the launch ended where it went wrong."""
        return any(hazard.kind in FAULTS for hazard in self.hazards)

    @property
    def errors(self) -> list[Hazard]:
        """The hazards that make a kernel wrong."""
        return [hazard for hazard in self.hazards if hazard.severity == "error"]
