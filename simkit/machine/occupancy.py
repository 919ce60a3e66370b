"""How many CTAs an SM holds, by the rules of NVIDIA's cuda_occupancy.h (CUDA 12.9)."""

from __future__ import annotations

from dataclasses import dataclass

from simkit.errors import CapacityError
from simkit.machine.gpus import Gpu


@dataclass(frozen=True)
class Occupancy:
    """What fits on one SM.

    ``limiters``: the names of all resources that stop at ``ctas_per_sm``, out of warps, shared
    memory, CTAs, registers, barriers. ``limits``: CTAs per SM that each would allow alone (no
    registers or barriers where none are used or, for barriers, below compute capability 9.0).
    ``fraction``: resident warps over the warps that an SM can hold.
    """

    ctas_per_sm: int
    limiters: tuple[str, ...]
    warps_per_cta: int
    warps: int
    fraction: float
    limits: dict[str, int]


def occupancy(
    gpu: Gpu, threads: int, registers: int, shared_bytes: int, barriers: int = 1
) -> Occupancy:
    """CTAs per SM for ``threads`` per CTA, ``registers`` per thread, ``shared_bytes`` per CTA
    (static and dynamic, without the system's own) and named ``barriers`` per CTA, with the largest
    shared-memory carve-out. CapacityError for a CTA that the GPU cannot launch at all.
    """
    _check_cta(gpu, threads, registers, shared_bytes, barriers)
    warps_per_cta = -(-threads // gpu.warp_size)
    limits = {
        "warps": gpu.max_warps_per_sm // warps_per_cta,
        "shared memory": _shared_limit(gpu, shared_bytes),
        "CTAs": gpu.max_ctas_per_sm,
    }
    if registers:
        limits["registers"] = _register_limit(gpu, warps_per_cta, registers)
    if gpu.barriers_per_sm is not None and barriers:
        limits["barriers"] = gpu.barriers_per_sm // barriers
    ctas = min(limits.values())
    warps = ctas * warps_per_cta
    return Occupancy(
        ctas_per_sm=ctas,
        limiters=tuple(name for name, limit in limits.items() if limit == ctas),
        warps_per_cta=warps_per_cta,
        warps=warps,
        fraction=warps / gpu.max_warps_per_sm,
        limits=limits,
    )


def _check_cta(gpu: Gpu, threads: int, registers: int, shared_bytes: int, barriers: int) -> None:
    ranges = (
        ("threads per CTA", threads, 1, gpu.max_threads_per_block),
        ("registers per thread", registers, 0, gpu.max_registers_per_thread),
        ("shared memory bytes per CTA", shared_bytes, 0, gpu.smem_per_block_optin),
        ("named barriers per CTA", barriers, 0, gpu.max_barriers_per_cta),
    )
    for what, value, low, high in ranges:
        if not low <= value <= high:
            raise CapacityError(f"{what}: {value} is outside {low} to {high} on {gpu.name}")
    # The register file is dealt out to whole rounds of the sub-partitions.
    warps = _round_up(-(-threads // gpu.warp_size), gpu.subpartitions)
    needed = warps * _registers_per_warp(gpu, registers)
    if needed > gpu.registers_per_sm:
        raise CapacityError(
            f"{threads} threads of {registers} registers take {needed} registers; "
            f"an SM of {gpu.name} has {gpu.registers_per_sm}"
        )


def _register_limit(gpu: Gpu, warps_per_cta: int, registers: int) -> int:
    per_partition = gpu.registers_per_sm // gpu.subpartitions // _registers_per_warp(gpu, registers)
    return per_partition * gpu.subpartitions // warps_per_cta


def _shared_limit(gpu: Gpu, shared_bytes: int) -> int:
    taken = _round_up(shared_bytes + gpu.smem_reserved_per_block, gpu.smem_unit)
    return max(gpu.smem_carveouts) // taken


def _registers_per_warp(gpu: Gpu, registers: int) -> int:
    return _round_up(registers * gpu.warp_size, gpu.register_unit)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
