"""The device table: what each GPU has, with units and sources.

Sources, by the names that the fields carry:
- XLA: OpenXLA target configurations (xla/backends/gpu/target_config/specs, queried from devices)
  and its CUDA core table (cuda_core_info_table.cc).
- occupancy: NVIDIA's cuda_occupancy.h of CUDA 12.9.
- PTX: PTX ISA 9.1.
- CPG: CUDA C++ Programming Guide 12.6, arithmetic instruction throughput (table 4).
- dissecting: Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU Architecture, arXiv
  2402.13499 (tables IV, V, VII) and its extension arXiv 2501.12084 (tables 4, 5, 8, 9).
- gpu-benches: raw measurements in github.com/te42kyfo/gpu-benches (gpu-l2-cache, gpu-latency).
- BabelStream: Azure AI benchmarking guide, ND H100 v5, kernel Dot, which only reads.
- Antepara: Antepara et al., SC '25, doi 10.1145/3712285.3759815, energy parameters.
- GEMM: github.com/stas00/ml-engineering, compute/accelerator: best measured matrix products. An
  H200, whose SMs are the H100's, sustains 722.5 TFLOP/s of bf16 at 681 W and 1612 MHz: less the
  idle board that is 0.839 pJ per FLOP, with the way of the operands. The best fp8 product of an
  H100 is 1402.6 TFLOP/s, the best of bf16 794.5: 0.475 pJ. An A100's tensor cores take 0.70 / 0.52
  of a Hopper's (Antepara).

An instruction of a lane takes what Antepara found for a FLOP of vector FP64: control and registers
are most of it, and no source gives fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from simkit.errors import DtypeError, SimkitError

TensorInput = Literal["bf16", "f16", "fp8"]

KIB = 1024


def _fact(unit: str, source: str) -> Any:
    return field(metadata={"unit": unit, "source": source})


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. Each field's metadata has its unit and its source; ``note`` has the exceptions."""

    name: str = _fact("", "this table's key")
    title: str = _fact("", "NVIDIA product name")
    arch: str = _fact("", "PTX .target without its suffix")
    capability: tuple[int, int] = _fact("", "XLA")
    note: str = _fact("", "where a figure has another source than its field says")

    sm_count: int = _fact("SMs", "XLA")
    sm_clock_hz: float = _fact("Hz, maximum", "XLA")
    tensor_clock_hz: float = _fact("Hz, behind the published peak", "XLA")
    sustained_clock_hz: float | None = _fact("Hz, under tensor-core load", "FlashMLA, deep dive")
    tensor_flop_per_clk: int = _fact("dense bf16 or f16 FLOP per cycle and SM", "XLA")
    tensor_fp8_flop_per_clk: int | None = _fact("dense fp8 FLOP per cycle and SM", "XLA")
    fp32_lanes: int = _fact("fp32 fma per cycle and SM", "XLA, CPG")
    ex2_per_clk: int = _fact("ex2 results per cycle and SM", "CPG")
    mma_sync_fraction: float = _fact("of the tensor rate, by mma.sync", "dissecting, VII")
    compare_per_clk: int = _fact("fp32 max or compare results per cycle and SM", "CPG")
    widen_per_clk: int = _fact("fp8 or f16 to the next wider type, results", "FlashMLA, deep dive")
    half_per_clk: int = _fact("f16 or bf16 results per cycle and SM", "CPG")
    shuffle_per_clk: int = _fact("lanes per cycle and SM", "CPG")
    smem_bytes_per_clk: int = _fact("bytes per cycle and SM", "dissecting, 5: 99.8 % of 128")
    dsmem_bytes_per_clk: float | None = _fact(
        "bytes per cycle and SM in clusters of 2", "dissecting"
    )
    l2_bytes_per_clk: float = _fact("bytes read per cycle by all SMs", "gpu-benches")
    l2_latency: int = _fact("cycles of a hit", "dissecting, IV")
    hbm_latency: int = _fact("cycles", "gpu-benches")

    hbm_bytes_per_s: float = _fact("bytes per second", "XLA")
    hbm_read_fraction: float = _fact("of hbm_bytes_per_s that reads achieve", "BabelStream")
    hbm_bytes: int = _fact("bytes", "XLA")
    l2_bytes: int = _fact("bytes", "XLA")

    smem_per_sm: int = _fact("bytes", "XLA")
    smem_per_block_optin: int = _fact("bytes", "XLA")
    smem_per_block_default: int = _fact("bytes", "XLA")
    smem_reserved_per_block: int = _fact("bytes", "device property; smem_per_sm - optin")
    smem_unit: int = _fact("bytes, allocation granularity", "occupancy")
    smem_carveouts: tuple[int, ...] = _fact("bytes", "occupancy")

    registers_per_sm: int = _fact("32-bit registers", "XLA")
    register_unit: int = _fact("registers per warp, allocation granularity", "occupancy")
    max_registers_per_thread: int = _fact("registers that an instruction can name", "occupancy")
    subpartitions: int = _fact("per SM", "occupancy")
    max_threads_per_sm: int = _fact("threads", "XLA")
    max_threads_per_block: int = _fact("threads", "XLA")
    max_ctas_per_sm: int = _fact("CTAs", "occupancy")
    max_barriers_per_cta: int = _fact("named barriers", "PTX, bar")
    barriers_per_sm: int | None = _fact("named barriers; None: no limit below 9.0", "occupancy")
    warp_size: int = _fact("threads", "PTX")

    board_w: float = _fact("W, power limit", "NVIDIA data sheet")
    idle_w: float = _fact("W", "Antepara: 54 to 88 of four GPUs; 70 to 75 logged on H100")
    energy_clock_hz: float = _fact("Hz at which the energies below hold", "GEMM")
    tensor_j_per_flop: float | None = _fact("J, bf16 product with its operands' way", "GEMM")
    tensor_j_per_fp8_flop: float | None = _fact("J, fp8 product likewise", "GEMM")
    lane_j: float | None = _fact("J, instruction of a lane", "Antepara, vector FLOP")
    hbm_j_per_byte: float | None = _fact("J", "Antepara")

    @property
    def max_warps_per_sm(self) -> int:
        return self.max_threads_per_sm // self.warp_size

    @property
    def peak_flops(self) -> float:
        """Dense bf16 tensor-core FLOP per second."""
        return self.peak_flops_of("bf16")

    @property
    def sustained_flops(self) -> float:
        """Dense bf16 FLOP per second at the clock under load; the peak where none is known."""
        clock = self.sustained_clock_hz or self.tensor_clock_hz
        return self.sm_count * self.tensor_flop_per_clk * clock

    @property
    def ridge_point(self) -> float:
        """Arithmetic intensity, bf16 FLOP per HBM byte, above which a kernel is compute-bound."""
        return self.peak_flops / self.hbm_bytes_per_s

    def peak_flops_of(self, dtype: TensorInput) -> float:
        """Dense tensor-core FLOP per second; DtypeError if the tensor cores lack ``dtype``."""
        if dtype not in get_args(TensorInput):
            raise DtypeError(f"tensor-core input {dtype!r} is none of {get_args(TensorInput)}")
        rate = self.tensor_fp8_flop_per_clk if dtype == "fp8" else self.tensor_flop_per_clk
        if rate is None:
            raise DtypeError(f"{self.name} ({self.arch}) has no {dtype} tensor cores")
        return self.sm_count * rate * self.tensor_clock_hz


_CARVEOUTS_80 = tuple(KIB * size for size in (0, 8, 16, 32, 64, 100, 132, 164))

A100 = Gpu(
    name="a100",
    title="A100 SXM4 80 GB",
    arch="sm_80",
    capability=(8, 0),
    note="the part of HBM bandwidth that reads achieve is that of an H800 PCIe (arXiv 2501.12084, "
    "table 5); no source gives an A100's",
    sm_count=108,
    sm_clock_hz=1.41e9,
    tensor_clock_hz=1.41e9,
    sustained_clock_hz=None,
    tensor_flop_per_clk=2048,
    tensor_fp8_flop_per_clk=None,
    fp32_lanes=64,
    ex2_per_clk=16,
    mma_sync_fraction=1.0,
    compare_per_clk=64,
    widen_per_clk=64,
    half_per_clk=256,
    shuffle_per_clk=32,
    smem_bytes_per_clk=128,
    dsmem_bytes_per_clk=None,
    l2_bytes_per_clk=2007.9,
    l2_latency=261,
    hbm_latency=466,
    hbm_read_fraction=0.91,
    hbm_bytes_per_s=2039.04e9,
    hbm_bytes=85_100_068_864,
    l2_bytes=40 * KIB * KIB,
    smem_per_sm=164 * KIB,
    smem_per_block_optin=163 * KIB,
    smem_per_block_default=48 * KIB,
    smem_reserved_per_block=KIB,
    smem_unit=128,
    smem_carveouts=_CARVEOUTS_80,
    registers_per_sm=65_536,
    register_unit=256,
    max_registers_per_thread=255,
    subpartitions=4,
    max_threads_per_sm=2048,
    max_threads_per_block=1024,
    max_ctas_per_sm=32,
    max_barriers_per_cta=16,
    barriers_per_sm=None,
    warp_size=32,
    board_w=400.0,
    idle_w=75.0,
    energy_clock_hz=1.41e9,
    tensor_j_per_flop=1.13e-12,
    tensor_j_per_fp8_flop=None,
    lane_j=28.5e-12,
    hbm_j_per_byte=8 * 13.11e-12,
)

H100 = replace(
    A100,
    name="h100",
    title="H100 SXM 80 GB",
    arch="sm_90",
    capability=(9, 0),
    note="",
    sm_count=132,
    sm_clock_hz=1.98e9,
    tensor_clock_hz=1.8295e9,
    tensor_flop_per_clk=4096,
    tensor_fp8_flop_per_clk=8192,
    fp32_lanes=128,
    mma_sync_fraction=0.629,
    dsmem_bytes_per_clk=16.3,
    l2_bytes_per_clk=4950.0,
    l2_latency=263,
    hbm_latency=650,
    hbm_read_fraction=0.949,
    hbm_bytes_per_s=3352.32e9,
    hbm_bytes=84_942_979_072,
    l2_bytes=50 * KIB * KIB,
    smem_per_sm=228 * KIB,
    smem_per_block_optin=227 * KIB,
    smem_carveouts=(*_CARVEOUTS_80, 196 * KIB, 228 * KIB),
    barriers_per_sm=64,
    board_w=700.0,
    energy_clock_hz=1.612e9,
    tensor_j_per_flop=0.839e-12,
    tensor_j_per_fp8_flop=0.475e-12,
    lane_j=23.6e-12,
    hbm_j_per_byte=8 * 11.68e-12,
)

H800 = replace(
    H100,
    name="h800",
    title="H800 SXM 80 GB",
    note="SM count, tensor clock, clock under load and HBM bandwidth from FlashMLA's notes; "
    "the rest is taken to be the H100's, which has the same die",
    tensor_clock_hz=1.83e9,
    sustained_clock_hz=1.6e9,
    hbm_bytes_per_s=3350e9,
)

H200 = replace(
    H100,
    name="h200",
    title="H200 SXM 141 GB",
    hbm_bytes_per_s=4800e9,
    hbm_bytes=151_397_597_184,
)

B200 = replace(
    H100,
    name="b200",
    title="B200",
    arch="sm_100",
    capability=(10, 0),
    note="tensor clock is XLA's fit to the published peak; ex2 is measured (cudnn-frontend pull "
    "request 1178); no source gives the other instruction rates, the L2 rate of an SM and "
    "latencies for 10.0, the figures are 9.0's; its power is not modelled",
    sm_count=148,
    sm_clock_hz=1.965e9,
    tensor_clock_hz=1.8353e9,
    tensor_flop_per_clk=8192,
    tensor_fp8_flop_per_clk=16_384,
    hbm_bytes_per_s=7672.32e9,
    hbm_bytes=191_514_411_008,
    l2_bytes=132_644_864,
    l2_bytes_per_clk=37.5 * 148,
    board_w=1000.0,
    tensor_j_per_flop=None,
    tensor_j_per_fp8_flop=None,
    lane_j=None,
    hbm_j_per_byte=None,
)

GPUS: dict[str, Gpu] = {row.name: row for row in (A100, H100, H800, H200, B200)}


def gpu(name: str) -> Gpu:
    """The GPU of that name (upper or lower case); SimkitError that lists the names otherwise."""
    found = GPUS.get(name.lower())
    if found is None:
        raise SimkitError(f"no GPU {name!r} in the device table; it has {', '.join(GPUS)}")
    return found
