"""What a kernel is given for its arguments: arrays on the device, tensor maps, scalars, structs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gpu
from gpu.device import Array, Device
from simkit.cli.arguments import (
    Argument,
    ArrayArgument,
    ScalarArgument,
    StructArgument,
    array_values,
    scalar_value,
)
from simkit.errors import SimkitError


def _flat(arguments: Sequence[Argument]) -> Iterator[Argument]:
    """The arguments and the fields of structs."""
    for argument in arguments:
        yield argument
        if isinstance(argument, StructArgument):
            yield from _flat([inner for _, inner in argument.fields])


def place_arrays(device: Device, arguments: Sequence[Argument]) -> dict[str, Array]:
    """The arrays on the device, by name; SimkitError for names that are empty or used twice."""
    names = [argument.name for argument in _flat(arguments)]
    if "" in names or len(set(names)) < len(names):
        raise SimkitError(f"arguments need names of their own, got {', '.join(names)}")
    return {
        argument.name: device.array(array_values(argument), name=argument.name)
        for argument in _flat(arguments)
        if isinstance(argument, ArrayArgument)
    }


def argument_value(argument: Argument, arrays: dict[str, Array]) -> Any:
    """The value to launch with."""
    if isinstance(argument, ScalarArgument):
        return scalar_value(argument)
    if isinstance(argument, StructArgument):
        return _struct_bytes(argument, arrays)
    array = arrays[argument.name]
    if argument.map is None:
        return array
    spec = argument.map
    return gpu.TensorMap(
        array,
        spec.box,
        element_strides=spec.element_strides or None,
        swizzle=spec.swizzle,
        oob_fill=spec.oob_fill,
    )


def _struct_bytes(argument: StructArgument, arrays: dict[str, Array]) -> bytes:
    data = bytearray(argument.size)
    for offset, inner in argument.fields:
        value = argument_value(inner, arrays)
        if isinstance(value, bytes):
            piece = value
        elif isinstance(inner, ScalarArgument):
            piece = value.tobytes()
        elif isinstance(value, gpu.TensorMap):
            piece = bytes(value)
        else:
            piece = value.address.to_bytes(8, "little")
        if offset < 0 or offset + len(piece) > argument.size:
            raise SimkitError(
                f"argument {argument.name!r}: {inner.name!r} has {len(piece)} bytes at offset"
                f" {offset}, the struct has {argument.size}"
            )
        data[offset : offset + len(piece)] = piece
    return bytes(data)
