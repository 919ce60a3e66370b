"""Compiles the kernels of this folder for a device, once for each device and build."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from gpu.device import Device, Module

# Contracting a product and a sum to one rounding would change bits, so the kernels say where they
# fuse and the compiler does not.
EXACT_OPTIONS = ("--fmad=false",)

_Key = tuple[str, tuple[str, ...]]
_modules: WeakKeyDictionary[Device, dict[_Key, Module]] = WeakKeyDictionary()


def kernel_source(name: str) -> str:
    """The CUDA C++ text of kernel file ``name`` (without its suffix)."""
    return (Path(__file__).parent / f"{name}.cu").read_text(encoding="utf-8")


def build_module(
    device: Device, name: str, options: Sequence[str] = (), source: str | None = None
) -> Module:
    """Kernel file ``name``, compiled for the device with ``options`` beside the exact-bits ones.

    ``source`` replaces the text of the file, for tests of changed kernels. Raises ``CompileError``.
    """
    text = kernel_source(name) if source is None else source
    key = (text, tuple(options))
    modules = _modules.setdefault(device, {})
    if key not in modules:
        modules[key] = device.compile(text, options=(*EXACT_OPTIONS, *options))
    return modules[key]
