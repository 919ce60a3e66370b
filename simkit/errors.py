"""simkit's exceptions: each says the value, the limit and the place.

The command line turns any of them into one readable message and exit code 2.
"""

from __future__ import annotations

import numpy as np


class SimkitError(Exception):
    """Base of every error that a wrong input, kernel or machine can cause."""


class ShapeError(SimkitError):
    """Array shapes that do not fit together, or a size that is not supported."""


class DtypeError(SimkitError):
    """An element type other than the one that is asked for."""


class TableError(SimkitError):
    """An index table (indptr, page table, plan) that does not describe a layout or its work."""


class CapacityError(SimkitError):
    """More shared memory, registers or threads than the machine has."""


class LaunchError(SimkitError):
    """A launch that the machine would refuse: wrong arguments, grid or block."""


class CompileError(SimkitError):
    """CUDA C++ that does not compile; the message is the compiler's log."""


class PtxError(SimkitError):
    """PTX text that is malformed, or that uses what the executor does not know."""


class MemoryAccessError(SimkitError):
    """A load or store outside an allocation, or misaligned for its size."""


class DeadlockError(SimkitError):
    """Every warp that is left waits for something that can no longer happen."""


class BudgetError(SimkitError):
    """The instruction budget of a launch is used up: the kernel does not end."""


class TrapError(SimkitError):
    """The kernel executed ``trap``."""


class DeviceUnavailableError(SimkitError):
    """A device that this machine does not have, or a missing library for it."""


def check_array(name: str, value: object) -> None:
    """DtypeError for what is no NumPy array."""
    if not isinstance(value, np.ndarray):
        raise DtypeError(f"{name} must be a NumPy array, got {type(value).__name__}")
