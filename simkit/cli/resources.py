"""What a launch takes of an SM: threads, shared memory, registers; and its occupancy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from gpu.device import Kernel
from simkit.cli.output import bytes_text, table
from simkit.machine.gpus import Gpu
from simkit.machine.occupancy import Occupancy, occupancy

_COLUMNS = (
    "kernel", "CTAs", "threads", "shared", "regs", "per SM", "warps", "limit",
)  # fmt: skip
_NOTE = "per SM: CTAs that fit on one; warps: how many of its warps that is; limit: by what."


@dataclass(frozen=True)
class KernelResources:
    """Of one launch. ``shared_bytes``: of a CTA, static and dynamic. ``registers``: of a thread,
    None where unknown."""

    kernel: str
    ctas: int
    threads: int
    shared_bytes: int
    registers: int | None
    occupancy: Occupancy


def launch_resources(
    gpu: Gpu, name: str, ctas: int, threads: int, shared_bytes: int, kernel: Kernel | None = None
) -> KernelResources:
    """The resources of a launch; CapacityError for a CTA that the GPU cannot hold.

    Registers are what ``kernel`` says: on a GPU the compiler's figure, on the executor an estimate,
    the most values that are live at once.
    """
    registers = getattr(kernel, "registers", None) or getattr(kernel, "live_registers", None)
    # An estimate may exceed what a thread can have; the compiler would then spill.
    counted = min(registers or 0, gpu.max_registers_per_thread)
    found = occupancy(gpu, threads, counted, shared_bytes)
    return KernelResources(name, ctas, threads, shared_bytes, registers, found)


def print_resources(out: Console, rows: Sequence[KernelResources]) -> None:
    """A row for each launch, and what the columns mean."""
    cells = [
        (
            row.kernel,
            f"{row.ctas:,}",
            row.threads,
            bytes_text(row.shared_bytes),
            row.registers or "?",
            row.occupancy.ctas_per_sm,
            f"{row.occupancy.fraction:.0%}",
            ", ".join(row.occupancy.limiters),
        )
        for row in rows
    ]
    numbers = range(1, len(_COLUMNS) - 1)
    out.print(table("Resources", _COLUMNS, cells, numbers, wrap=(len(_COLUMNS) - 1,)))
    out.print(_NOTE)
    if any(row.registers is None for row in rows):
        out.print("Registers of a thread are unknown here (?) and not counted.")
