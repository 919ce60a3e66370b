"""How tensor-core operands are spread over the lanes of a warp.

Source: PTX ISA 8.8, 9.7.14.5 (mma fragments).

Lane ``4 g + t`` holds row (or column) ``g`` and the ``t``-th group of elements; a 32-bit register
holds 32 / width of them.  Since registers are (32, warps), a fragment register is (8, 4, warps)
already, and matrices come out with the warps last, as simkit.numerics.tensor_core wants them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from simkit.numerics import convert, formats

Array = np.ndarray


_HALF, _UPPER = np.array(16, np.uint32), np.array(0xFFFF0000, np.uint32)


def _bf16(word: Array) -> list[Array]:
    return [(word << _HALF).view(np.float32), (word & _UPPER).view(np.float32)]


def _f16(word: Array) -> list[Array]:
    halves = [word.astype(np.uint16), (word >> np.uint32(16)).astype(np.uint16)]
    return [formats.decode_f16(half) for half in halves]


def _tf32(word: Array) -> list[Array]:
    # The tensor core ignores the 13 low bits.
    return [(word & np.uint32(0xFFFFE000)).view(np.float32)]


def _bytes(decode: Callable[[Array], Array]) -> Callable[[Array], list[Array]]:
    def split(word: Array) -> list[Array]:
        return [decode((word >> np.uint32(8 * k)).astype(np.uint8)) for k in range(4)]

    return split


# Elements of one 32-bit register, lowest first, as float32.
DECODERS: dict[str, Callable[[Array], list[Array]]] = {
    "bf16": _bf16,
    "f16": _f16,
    "tf32": _tf32,
    "e4m3": _bytes(formats.decode_e4m3),
    "e5m2": _bytes(convert.e5m2_to_float32),
}
ELEMENTS = {"bf16": 2, "f16": 2, "tf32": 1, "e4m3": 4, "e5m2": 4}
"""How many there are in a register."""


def decode(rows: Array, kind: str) -> Array:
    """Rows [..., n] of 16 bytes (complex128) as float32 [..., n * elements of a row]."""
    words = rows.view(np.uint32)
    elements = DECODERS[kind](words)
    if len(elements) == 1:
        return elements[0]
    values = np.empty((*words.shape, len(elements)), np.float32)
    for place, element in enumerate(elements):
        values[..., place] = element
    return values.reshape(*words.shape[:-1], -1)


def matrix_a(registers: Sequence[Array], kind: str) -> Array:
    """A as float32 (16, K, warps) from its registers: rows g and g + 8 alternate, then the next
    half of K.  In memory K comes first, as products of many warps want it.
    """
    halves, warps = len(registers) // 2, registers[0].shape[1]
    width = ELEMENTS[kind]
    a = np.empty((halves, 4, width, 2, 8, warps), np.float32)
    for index, register in enumerate(registers):
        words = register.reshape(8, 4, warps).swapaxes(0, 1)
        into = a[index // 2, :, :, index % 2]
        if kind == "bf16":
            np.left_shift(words, _HALF, into[:, 0].view(np.uint32))
            np.bitwise_and(words, _UPPER, into[:, 1].view(np.uint32))
            continue
        for place, element in enumerate(DECODERS[kind](words)):
            into[:, place] = element
    return a.reshape(-1, 16, warps).swapaxes(0, 1)


def matrix_b(registers: Sequence[Array], kind: str) -> Array:
    """B as float32 (K, 8, warps)."""
    decoded = [DECODERS[kind](r) for r in registers]
    per_register = len(decoded[0])
    warps = registers[0].shape[1]
    b = np.empty((len(registers), 4, per_register, 8, warps), np.float32)
    for index, elements in enumerate(decoded):
        for place, element in enumerate(elements):
            b[index, :, place] = element.reshape(8, 4, warps).transpose(1, 0, 2)
    return b.reshape(-1, 8, warps)


def uniform_c(register: Array) -> Array | None:
    """The accumulator whose four registers are one; None if it is zero."""
    return matrix_c([register] * 4) if register.any() else None


def matrix_c(registers: Sequence[Array]) -> Array:
    """The float32 accumulator (16, 8, warps) from four registers."""
    warps = registers[0].shape[1]
    c = np.empty((2, 8, 4, 2, warps), np.float32)
    for index, register in enumerate(registers):
        c[index // 2, :, :, index % 2] = register.reshape(8, 4, warps)
    return c.reshape(16, 8, warps)


def accumulator_parts(d: Array) -> list[Array]:
    """The inverse of matrix_c: registers as views (8, 4, warps)."""
    parts = d.reshape(2, 8, 4, 2, d.shape[2])
    return [parts[k // 2, :, :, k % 2] for k in range(4)]
