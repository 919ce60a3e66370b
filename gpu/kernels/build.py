"""Compiles the kernels of this folder for a device, once for each device and build."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from gpu.device import Device, Module

# Contracting a product and a sum to one rounding would change bits, so the kernels say where they
# fuse and the compiler does not. Lines of the source go into the PTX, for errors and hazards.
EXACT_OPTIONS = ("--fmad=false", "-lineinfo")


def kernel_source(name: str) -> str:
    """The CUDA C++ text of kernel file ``name`` (without its suffix)."""
    return _path(name).read_text(encoding="utf-8")


def _path(name: str) -> Path:
    return Path(__file__).parent / f"{name}.cu"


def build_module(
    device: Device, name: str, options: Sequence[str] = (), source: str | None = None
) -> Module:
    """Kernel file ``name``, compiled for the device with ``options`` beside the exact-bits ones.

    ``source`` replaces the text of the file, for tests of changed kernels. Raises ``CompileError``.
    """
    text = kernel_source(name) if source is None else source
    all_options = (*EXACT_OPTIONS, *options)
    # Devices hash by identity, which mypy does not believe of a protocol.
    # By its path, so that places in the kernel name the file.
    file = str(_path(name)) if source is None else f"{name}.cu"
    return _compiled(device, file, all_options, text)  # type: ignore[arg-type]


# Bounded, because each entry keeps its device.
@functools.lru_cache(maxsize=64)
def _compiled(device: Device, name: str, options: tuple[str, ...], text: str) -> Module:
    return device.compile(text, options=options, name=name)
