"""What an SM has to offer: the resources of the engine and their rates, from the device table.

======== ===================== ====================================================
resource unit                  serves
======== ===================== ====================================================
tensor   FLOP                  wgmma, or mma.sync at its own rate
xu       lane instructions     ex2, rcp, and conversions of fp32 to 16 and 8 bits
fma      lane instructions     fp32 fma, multiply, add
alu      lane instructions     maximum, compare, select, integers
half     results               f16 and bf16 arithmetic
widen    results               fp8 to f16, f16 to fp32
shuffle  lane instructions     exchange between lanes of a warp
issue    warp instructions     every instruction, once
smem     bytes                 shared memory, both ways
dsmem    bytes                 stores to the shared memory of another SM of the cluster
l2       bytes                 L2 to the SM and back: the SM's port
hbm      bytes                 HBM: the SM's share
======== ===================== ====================================================

`ex2` and conversions share a pipe, at a rate of one instruction: Nsight Compute's XU is for
"transcendental and data type conversion", and on B300 F2FP.PACK_AB was measured to have the rate of
MUFU.EX2 and to share its budget. An F2FP packs two values.
"""

from __future__ import annotations

from typing import Literal

from simkit.errors import SimkitError
from simkit.machine.gpus import Gpu
from simkit.schedules.parameters import L2_PORT, SCHEDULERS

TensorPath = Literal["wgmma", "wgmma fp8", "mma.sync"]


def sm_rates(
    gpu: Gpu, clock_hz: float, path: TensorPath = "wgmma", active_sms: float | None = None
) -> dict[str, float]:
    """Units per cycle of every resource of one SM at ``clock_hz``.

    ``active_sms``: SMs that share HBM, all by default. L2 is at the rate of the SM's own port:
    not all SMs copy at a time, and whether L2 can serve all of them is a question of the grid.
    `SimkitError` where the GPU lacks the tensor cores that ``path`` wants.
    """
    sms = gpu.sm_count if active_sms is None else min(active_sms, gpu.sm_count)
    hbm = gpu.hbm_bytes_per_s * gpu.hbm_read_fraction / clock_hz / sms
    return {
        "tensor": tensor_rate(gpu, path),
        "xu": gpu.ex2_per_clk,
        "fma": gpu.fp32_lanes,
        "alu": gpu.compare_per_clk,
        "half": gpu.half_per_clk,
        "widen": gpu.widen_per_clk,
        "shuffle": gpu.shuffle_per_clk,
        "issue": SCHEDULERS.value,
        "smem": gpu.smem_bytes_per_clk,
        "dsmem": gpu.dsmem_bytes_per_clk or 1e-9,
        "l2": L2_PORT.value,
        "hbm": min(hbm, L2_PORT.value),
    }


def tensor_rate(gpu: Gpu, path: TensorPath) -> float:
    """FLOP per cycle and SM. mma.sync falls short of wgmma on Hopper."""
    if path == "mma.sync":
        return gpu.tensor_flop_per_clk * gpu.mma_sync_fraction
    if gpu.capability < (9, 0):
        raise SimkitError(f"{gpu.name} ({gpu.arch}) has no {path}: that takes Hopper or later")
    if path == "wgmma fp8":
        assert gpu.tensor_fp8_flop_per_clk is not None
        return gpu.tensor_fp8_flop_per_clk
    return gpu.tensor_flop_per_clk
