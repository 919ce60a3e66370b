"""The few figures of the cycle model that are no GPU's own, each with its source.

Rates, latencies of memory, clocks and energies of a GPU are in `simkit.machine.gpus`. Nothing here
belongs to one kernel, head dimension or published row.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parameter:
    """``value`` in ``unit``; ``source``: where it was measured or is documented."""

    name: str
    value: float
    unit: str
    source: str


_B300 = "B300 microbenchmark catalogue, clock of 2.032 GHz; no figure for Hopper was found"

SCHEDULERS = Parameter(
    "warp schedulers", 4, "warp instructions per cycle and SM",
    "CUDA C++ Programming Guide: one scheduler in each of four partitions",
)  # fmt: skip
WGMMA_LATENCY = Parameter(
    "wgmma result", 18, "cycles",
    "arXiv 2501.12084, table 9: m64n8k16, whose own service takes 4",
)  # fmt: skip
MMA_LATENCY = Parameter(
    "mma.sync result", 24, "cycles", "arXiv 2402.13499, table VII: m16n8k16 on H800"
)
LDMATRIX_LATENCY = Parameter(
    "ldmatrix result", 33, "cycles", "chained LDSM on sm_120 (sass-king, chapter 17)"
)
SMEM_LATENCY = Parameter("shared memory", 29, "cycles", "arXiv 2402.13499, table IV")
SHUFFLE_LATENCY = Parameter(
    "shuffle result", 24, "cycles", "three independent measurements: Hopper, Ada, B300"
)
LANE_LATENCY = Parameter(
    "dependent fp32 instruction", 4, "cycles", "4.4 cycles with the loop around it on H100 PCIe"
)
SYNC_BASE = Parameter("bar.sync", 22, "cycles", _B300)
SYNC_PER_WARP = Parameter("bar.sync, more for each warp", 2, "cycles", _B300)
MBARRIER_LATENCY = Parameter("mbarrier, arrival to going on", 123, "cycles", _B300)
CLUSTER_BARRIER_LATENCY = Parameter("barrier.cluster", 370, "cycles", _B300)
TMA_LATENCY = Parameter(
    "bulk copy, more than a load", 170, "cycles", "arXiv 2501.12084: TMA on H800"
)
L2_PORT = Parameter(
    "an SM's port to L2", 64, "bytes per cycle",
    "attention roofline models in public repositories take it; measured is only that all SMs "
    "together get 37.5 each (gpu-benches), no figure of an SM alone was found",
)  # fmt: skip
DSMEM_LATENCY = Parameter(
    "store to the peer's shared memory", 181, "cycles", "arXiv 2402.13499: clusters of 2 on H800"
)
HOST_LAUNCH = Parameter(
    "a launch on the host", 4.0e-6, "s", "3.4 Attention kernel: about 4 us a launch"
)
LAUNCH_GAP = Parameter(
    "between kernels of a stream", 2.1e-6, "s", "Hazy Research, Look Ma, No Bubbles, 2025: H100"
)
GRAPH_GAP = Parameter(
    "between kernels of a graph", 1.3e-6, "s", "Hazy Research, Look Ma, No Bubbles, 2025: H100"
)
GRAPH_LAUNCH = Parameter(
    "launch of a whole graph", 2.5e-6, "s",
    "NVIDIA, Constant-time launch for straight-line CUDA graphs, 2024",
)  # fmt: skip
PDL_GAIN = Parameter(
    "saved by programmatic dependent launch", 0.25e-6, "s",
    "0.22 to 0.32 us a kernel measured on RTX 5090; no figure for Hopper was found",
)  # fmt: skip

PARAMETERS: tuple[Parameter, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Parameter)
)
