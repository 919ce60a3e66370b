"""What a launch takes of an SM: threads, shared memory, registers, and the occupancy that leaves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpu.device import Kernel
from simkit.cli.output import bytes_text
from simkit.machine.gpus import Gpu
from simkit.machine.occupancy import Occupancy, occupancy


@dataclass(frozen=True)
class KernelResources:
    """Of one launch. ``ctas``: of its grid. ``registers``: of a thread, None where unknown."""

    kernel: str
    ctas: int
    threads: int
    static_shared: int
    dynamic_shared: int
    registers: int | None
    occupancy: Occupancy

    @property
    def shared_bytes(self) -> int:
        return self.static_shared + self.dynamic_shared


def kernel_resources(
    kernel: Kernel,
    gpu: Gpu,
    block: tuple[int, ...],
    dynamic_shared: int,
    grid: tuple[int, ...] = (1, 1, 1),
) -> KernelResources:
    """The resources of launching ``kernel`` with such blocks.

    Static shared memory and registers are what the kernel object says; registers on the executor
    are an estimate, the most values that are live at once. CapacityError where nothing fits.
    """
    threads = ctas = 1
    for extent in block:
        threads *= extent
    for extent in grid:
        ctas *= extent
    static = getattr(kernel, "static_shared", 0)
    registers = getattr(kernel, "registers", None) or getattr(kernel, "live_registers", None)
    found = occupancy(gpu, threads, registers or 0, static + dynamic_shared)
    return KernelResources(
        kernel.name, ctas, threads, static, dynamic_shared, registers, found
    )


def resource_rows(rows: Iterable[KernelResources]) -> list[tuple[object, ...]]:
    """Cells for kernel, CTAs, threads, shared memory, registers, CTAs per SM, warps, limit."""
    return [
        (
            row.kernel,
            f"{row.ctas:,}",
            row.threads,
            bytes_text(row.shared_bytes),
            row.registers or "unknown",
            row.occupancy.ctas_per_sm,
            f"{row.occupancy.fraction:.0%}",
            ", ".join(row.occupancy.limiters),
        )
        for row in rows
    ]
