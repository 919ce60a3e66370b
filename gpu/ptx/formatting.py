"""printf of the device: which arguments a format string takes, and its text.

Source: CUDA C++ guide, formatted output.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

_CONVERSION = re.compile(
    r"%(?P<flags>[-+ #0]*\d*(?:\.\d+)?)(?P<length>hh|h|ll|l|z|j|t)?(?P<kind>[diouxXcfFeEgGaAps%])"
)


@dataclass(frozen=True, slots=True)
class Argument:
    """One value in vprintf's buffer: each is aligned to its own size there."""

    offset: int
    size: int
    kind: str


def arguments(template: str) -> list[Argument]:
    """The arguments that a format string takes, with their places in the buffer."""
    found: list[Argument] = []
    end = 0
    for match in _CONVERSION.finditer(template):
        kind = match["kind"]
        if kind == "%":
            continue
        is_long = match["length"] in ("l", "ll", "z", "j", "t")
        size = 8 if kind in "fFeEgGaAps" or is_long else 4
        end = -(-end // size) * size
        found.append(Argument(end, size, kind))
        end += size
    return found


def render(
    template: str, parameters: list[Argument], raw: list[int], string: Callable[[int], str]
) -> str:
    """The text for raw argument bits."""
    values = iter(zip(parameters, raw, strict=True))

    def one(match: re.Match[str]) -> str:
        if match["kind"] == "%":
            return "%"
        argument, bits = next(values)
        kind, flags = argument.kind, match["flags"]
        if kind in "fFeEgG":
            return f"%{flags}{kind}" % struct.unpack("<d", struct.pack("<Q", bits))[0]
        if kind in "aA":
            return float(struct.unpack("<d", struct.pack("<Q", bits))[0]).hex()
        if kind in "di":
            signed = bits - (1 << 8 * argument.size) if bits >> (8 * argument.size - 1) else bits
            return f"%{flags}d" % signed
        if kind == "c":
            return chr(bits & 0xFF)
        if kind == "s":
            return f"%{flags}s" % string(bits)
        if kind == "p":
            return f"0x{bits:x}"
        return f"%{flags}{'d' if kind == 'u' else kind}" % bits

    return _CONVERSION.sub(one, template)
