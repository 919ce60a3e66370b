"""The Device interface: the one boundary behind which a GPU and the PTX executor look alike.

``gpu.open("ptx")`` needs no GPU, ``gpu.open("cuda")`` needs one, ``gpu.open("auto")`` prefers one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gpu.counters import Report

Dimensions = tuple[int, ...]


class Array(Protocol):
    """An array in device memory."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def address(self) -> int:
        """The device pointer as an int, for structs that are built by hand."""
        ...

    def to_numpy(self) -> np.ndarray:
        """A copy on the host."""
        ...


class Variable(Protocol):
    """A ``__device__`` variable of a module, as bytes."""

    shape: tuple[int, ...]

    def fill(self, values: np.ndarray) -> None:
        """Overwrites it with as many bytes (uint8)."""
        ...


class Kernel(Protocol):
    """One entry of a module."""

    name: str

    def launch(
        self,
        grid: Dimensions,
        block: Dimensions,
        args: Sequence[object],
        shared_bytes: int = 0,
        cluster: Dimensions = (1, 1, 1),
    ) -> Report:
        """Runs the kernel to its end.

        ``args``: arrays, NumPy scalars, Python ints and floats (typed by the kernel's parameters),
        or bytes and NumPy structured scalars for by-value structs; checked against the parameters
        before anything runs.
        """
        ...


class Module(Protocol):
    """Compiled code."""

    ptx: str

    def kernel(self, name: str) -> Kernel:
        """The entry of that name, as it stands in the PTX; an error lists the entries there are."""
        ...

    def variable(self, name: str) -> Variable | None:
        """The ``__device__`` variable of that name, as it stands in the PTX; None without it."""
        ...


@dataclass(frozen=True)
class Call:
    """A launch as a value: what `Kernel.launch` would be called with."""

    kernel: Kernel
    grid: Dimensions
    block: Dimensions
    args: Sequence[object]
    shared_bytes: int = 0
    cluster: Dimensions = (1, 1, 1)


class Device(Protocol):
    """A machine that runs kernels."""

    name: str
    arch: str

    def compile(
        self,
        source: str,
        options: Sequence[str] = (),
        arch: str | None = None,
        name: str = "kernel.cu",
    ) -> Module:
        """CUDA C++ through NVRTC to a module."""
        ...

    def load(self, ptx: str) -> Module:
        """PTX text, from any compiler."""
        ...

    def array(self, values: np.ndarray, name: str = "") -> Array:
        """A copy of a NumPy array in device memory; ``name`` is what traffic reports call it."""
        ...

    def launch_dependent(self, primary: Call, secondary: Call) -> tuple[Report, Report]:
        """Programmatic dependent launch: the secondary kernel may start once every CTA of the
        primary has executed ``griddepcontrol.launch_dependents`` or exited; its
        ``griddepcontrol.wait`` waits for the end of the primary.
        """
        ...

    def empty(self, shape: int | tuple[int, ...], dtype: Any, name: str = "") -> Array:
        """Device memory that nobody has written yet."""
        ...
