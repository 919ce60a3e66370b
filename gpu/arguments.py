"""Packs launch arguments into a kernel's parameter bytes; the same checks for every device."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpu.ptx.syntax import Variable
from gpu.tensor_map import TensorMap
from simkit.errors import LaunchError


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel parameter: PTX type (``b8`` for structs), bytes and alignment."""

    name: str
    element: str
    size: int
    align: int

    @staticmethod
    def of(variable: Variable) -> Parameter:
        return Parameter(variable.name, variable.element, variable.size, variable.align)

    @property
    def is_struct(self) -> bool:
        return self.element == "b8"


def pack(kernel: str, parameters: Sequence[Parameter], args: Sequence[object]) -> list[bytes]:
    """The bytes of each argument.

    LaunchError, naming the parameter, for a wrong number of arguments or one of the wrong size or
    type.
    """
    if len(args) != len(parameters):
        names = ", ".join(f"{p.name} ({p.element}, {p.size} bytes)" for p in parameters)
        raise LaunchError(
            f"kernel {kernel!r} takes {len(parameters)} arguments, got {len(args)};"
            f" parameters: {names}"
        )
    return [
        _pack_one(kernel, i, p, a) for i, (p, a) in enumerate(zip(parameters, args, strict=True))
    ]


def offsets(parameters: Sequence[Parameter]) -> tuple[list[int], int]:
    """Byte offset of each parameter and the size of them all: one after the other, each at its
    alignment.
    """
    found: list[int] = []
    end = 0
    for parameter in parameters:
        end = -(-end // parameter.align) * parameter.align
        found.append(end)
        end += parameter.size
    return found, end


def parameter_buffer(parameters: Sequence[Parameter], packed: Sequence[bytes]) -> bytes:
    """The packed arguments as the one buffer that a kernel reads its parameters from."""
    places, size = offsets(parameters)
    data = bytearray(size)
    for place, piece in zip(places, packed, strict=True):
        data[place : place + len(piece)] = piece
    return bytes(data)


def _pack_one(kernel: str, index: int, parameter: Parameter, value: object) -> bytes:
    def wrong(why: str) -> LaunchError:
        return LaunchError(
            f"kernel {kernel!r}, argument {index} ({parameter.name}: {parameter.element},"
            f" {parameter.size} bytes): {why}"
        )

    address = getattr(value, "address", None)
    if address is not None and not isinstance(value, np.generic):
        if parameter.size != 8 or parameter.element in ("f64", "b8"):
            raise wrong("got an array, the parameter is not a pointer")
        return struct.pack("<Q", int(address))
    if isinstance(value, TensorMap):
        data = bytes(value)
        if not parameter.is_struct or parameter.size != len(data):
            raise wrong(f"got a TensorMap, which is a by-value struct of {len(data)} bytes")
        return data
    if isinstance(value, bytes | bytearray | np.void):
        data = bytes(value) if not isinstance(value, np.void) else value.tobytes()
        if len(data) != parameter.size:
            raise wrong(f"got {len(data)} bytes")
        return data
    if isinstance(value, np.ndarray):
        raise wrong("got a NumPy array; put it on the device with device.array()")
    if isinstance(value, np.generic):
        data = value.tobytes()
        if len(data) != parameter.size:
            raise wrong(f"got {value.dtype} of {len(data)} bytes")
        is_float = value.dtype.kind == "f"
        if parameter.element in ("f32", "f64") and not is_float:
            raise wrong(f"got {value.dtype}, the parameter is floating point")
        if parameter.element[0] in "us" and is_float:
            raise wrong(f"got {value.dtype}, the parameter is an integer")
        return data
    if isinstance(value, bool | int):
        if parameter.is_struct and parameter.size not in (1, 2, 4, 8):
            raise wrong("got an int for a struct; pass bytes or a NumPy structured scalar")
        if parameter.element in ("f32", "f64"):
            return struct.pack("<f" if parameter.size == 4 else "<d", float(value))
        bits = 8 * parameter.size
        if not -(1 << (bits - 1)) <= int(value) < 1 << bits:
            raise wrong(f"{int(value)} does not fit in {bits} bits")
        return (int(value) & ((1 << bits) - 1)).to_bytes(parameter.size, "little")
    if isinstance(value, float):
        if parameter.element[0] in "us":
            raise wrong("got a float, the parameter is an integer")
        if parameter.size == 4:
            return struct.pack("<f", value)
        if parameter.size == 8:
            return struct.pack("<d", value)
        raise wrong("a float needs 4 or 8 bytes")
    raise wrong(f"got {type(value).__name__}")
