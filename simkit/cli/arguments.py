"""Arguments of a user's kernel: what a flag or a TOML entry says, and the values that it means.

Compact form: ``x=bf16[2,64]:normal`` (array), ``n=i32:64`` (scalar), ``p=bytes:00ff`` (struct),
``k=bf16[512,64]:normal@box=64x64,swizzle=128B`` (an array that the kernel gets as a tensor map).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from simkit.errors import SimkitError

Array = NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in {
        "bf16": ml_dtypes.bfloat16,
        "f16": np.float16,
        "f32": np.float32,
        "f64": np.float64,
        "e4m3": ml_dtypes.float8_e4m3fn,
        "e5m2": ml_dtypes.float8_e5m2,
        "i8": np.int8,
        "i16": np.int16,
        "i32": np.int32,
        "i64": np.int64,
        "u8": np.uint8,
        "u16": np.uint16,
        "u32": np.uint32,
        "u64": np.uint64,
    }.items()
}

_ARRAY = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\d, ]*)\](?::(?P<fill>[^@]+))?(?:@(?P<map>.+))?")
_SCALAR = re.compile(r"(?P<dtype>\w+):(?P<value>.+)")
_SEEDED = re.compile(r"(\w+)\((\d+)\)")


@dataclass(frozen=True)
class MapSpec:
    """A tensor map: ``box`` in the order of the array's shape, the rest as in gpu.TensorMap."""

    box: tuple[int, ...]
    swizzle: str = "none"
    element_strides: tuple[int, ...] = ()
    oob_fill: str = "zeros"


@dataclass(frozen=True)
class ArrayArgument:
    """An array of ``shape``: ``fill`` is of FILLS, or a .npy file below ``folder``.

    With ``map``, the kernel gets a tensor map of the array instead of its address.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: str = "empty"
    seed: int = 0
    folder: Path = Path()
    map: MapSpec | None = None


@dataclass(frozen=True)
class ScalarArgument:
    """A number of a dtype, or the ``bytes`` of a struct as hexadecimal digits."""

    name: str
    dtype: str
    value: int | float | str


@dataclass(frozen=True)
class StructArgument:
    """A struct by value: ``fields`` are arguments at byte offsets, the rest of ``size`` is zero."""

    name: str
    size: int
    fields: tuple[tuple[int, Argument], ...]


Argument = ArrayArgument | ScalarArgument | StructArgument


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return rng.standard_normal(shape).astype(dtype)


def _arange(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)


def _constant(value: float) -> Callable[..., Array]:
    return lambda rng, shape, dtype: np.full(shape, value).astype(dtype)


# "empty" is memory that nobody has written: all bits set, a NaN in every floating-point format.
FILLS: dict[str, Callable[..., Array]] = {
    "empty": lambda rng, shape, dtype: (
        np.full(int(np.prod(shape)) * dtype.itemsize, 0xFF, np.uint8).view(dtype).reshape(shape)
    ),
    "zeros": _constant(0.0),
    "ones": _constant(1.0),
    "nan": _constant(np.nan),
    "arange": _arange,
    "normal": _normal,
}
_FLOATING_FILLS = ("nan", "normal")


def parse_argument(text: str) -> Argument:
    """An argument in its compact form; SimkitError that shows the form otherwise."""
    name, _, spec = text.partition("=")
    if array := _ARRAY.fullmatch(spec.strip()):
        sizes = [part for part in array["shape"].replace(" ", "").split(",") if part]
        fill, seed = array["fill"] or "empty", 0
        if seeded := _SEEDED.fullmatch(fill):
            fill, seed = seeded[1], int(seeded[2])
        spec_of_map = None if array["map"] is None else _parse_map(text, array["map"])
        return ArrayArgument(
            name.strip(), array["dtype"], tuple(map(int, sizes)), fill, seed, map=spec_of_map
        )
    if scalar := _SCALAR.fullmatch(spec.strip()):
        return ScalarArgument(name.strip(), scalar["dtype"], scalar["value"])
    raise SimkitError(
        f"argument {text!r} is neither NAME=DTYPE[SHAPE]:FILL, such as x=bf16[2,64]:normal, "
        "nor NAME=DTYPE:VALUE, such as n=i32:64"
    )


def _parse_map(place: str, text: str) -> MapSpec:
    """``box=64x64,swizzle=128B`` and so on."""
    row: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        is_list = key in ("box", "element_strides")
        try:
            row[key] = [int(size) for size in value.split("x")] if is_list else value
        except ValueError:
            raise SimkitError(f"{place}: {key} {value!r} must be sizes such as 64x64") from None
    return _map_from_row(place, row)


_MAP_KEYS: dict[str, Any] = {"box": list, "swizzle": str, "element_strides": list, "oob_fill": str}


def _map_from_row(place: str, row: Mapping[str, Any]) -> MapSpec:
    check_keys(place, row, _MAP_KEYS)
    if "box" not in row:
        raise SimkitError(f"{place}: a tensor map needs a box")
    lists = {key: tuple(row[key]) for key in ("box", "element_strides") if key in row}
    for key, sizes in lists.items():
        if not all(isinstance(size, int) for size in sizes):
            raise SimkitError(f"{place}: {key} {list(sizes)} must be a list of sizes")
    return MapSpec(
        lists["box"],
        row.get("swizzle", "none"),
        lists.get("element_strides", ()),
        row.get("oob_fill", "zeros"),
    )


def argument_from_table(place: str, row: Mapping[str, Any], folder: Path) -> Argument:
    """An argument as TOML has it: name and dtype with value, or with shape, fill, seed and the keys
    of a tensor map; or name, size and fields of a struct.
    """
    if "fields" in row:
        return _struct_from_table(place, row, folder)
    is_scalar = "value" in row
    types: dict[str, Any] = {"name": str, "dtype": str}
    types |= (
        {"value": (int, float, str)}
        if is_scalar
        else {"shape": list, "fill": str, "seed": int, **_MAP_KEYS}
    )
    check_keys(place, row, types)
    for key in ("name", "dtype", *(() if is_scalar else ("shape",))):
        if key not in row:
            raise SimkitError(f"{place}: {key!r} is missing; an argument has {', '.join(types)}")
    if is_scalar:
        return ScalarArgument(row["name"], row["dtype"], row["value"])
    shape = row["shape"]
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise SimkitError(f"{place}: shape {shape} must be a list of sizes")
    return ArrayArgument(
        row["name"],
        row["dtype"],
        tuple(shape),
        row.get("fill", "empty"),
        row.get("seed", 0),
        folder,
        _map_from_row(place, {k: row[k] for k in _MAP_KEYS if k in row}) if "box" in row else None,
    )


def _struct_from_table(place: str, row: Mapping[str, Any], folder: Path) -> StructArgument:
    check_keys(place, row, {"name": str, "size": int, "fields": list})
    for key in ("name", "size"):
        if key not in row:
            raise SimkitError(f"{place}: {key!r} is missing; a struct has name, size and fields")
    fields = []
    for index, inner in enumerate(row["fields"]):
        where = f"{place}.fields[{index}]"
        if not isinstance(inner, dict) or not isinstance(inner.get("offset"), int):
            raise SimkitError(f"{where}: a field is an argument with an offset in bytes")
        rest = {key: value for key, value in inner.items() if key != "offset"}
        fields.append((inner["offset"], argument_from_table(where, rest, folder)))
    return StructArgument(row["name"], row["size"], tuple(fields))


def check_keys(place: str, row: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Every key is known and its value is of the type that it should be."""
    for key, value in row.items():
        if key not in types:
            raise SimkitError(f"{place}: unknown key {key!r}; there are {', '.join(types)}")
        if not isinstance(value, types[key]):
            raise SimkitError(f"{place}: {key} cannot be {value!r}")


def array_values(argument: ArrayArgument) -> Array:
    """The array that an argument describes; SimkitError that names it and says what there is."""
    place = f"argument {argument.name!r}"
    dtype = _dtype(place, argument.dtype)
    if argument.fill.endswith(".npy"):
        return _from_file(place, argument, dtype)
    if argument.fill not in FILLS:
        raise SimkitError(
            f"{place}: fill {argument.fill!r} is none of {', '.join(FILLS)} or a .npy file"
        )
    if argument.fill in _FLOATING_FILLS and dtype.kind in "iu":
        raise SimkitError(f"{place}: fill {argument.fill!r} needs floating point, not {dtype}")
    return FILLS[argument.fill](np.random.default_rng(argument.seed), argument.shape, dtype)


def scalar_value(argument: ScalarArgument) -> np.generic | bytes:
    """The number, or the struct's bytes; SimkitError if the dtype cannot hold the value."""
    place = f"argument {argument.name!r}"
    if argument.dtype == "bytes":
        try:
            return bytes.fromhex(str(argument.value))
        except ValueError:
            raise SimkitError(
                f"{place}: {argument.value!r} is not a string of hexadecimal digits"
            ) from None
    dtype = _dtype(place, argument.dtype)
    try:
        if dtype.kind not in "iu":
            return dtype.type(float(argument.value))
        value = int(argument.value, 0) if isinstance(argument.value, str) else argument.value
        if int(value) == value:
            return dtype.type(int(value))
    except (ValueError, OverflowError):
        pass
    raise SimkitError(f"{place}: {argument.value!r} is not a value of {argument.dtype}")


def _dtype(place: str, name: str) -> np.dtype[Any]:
    if name not in DTYPES:
        raise SimkitError(f"{place}: dtype {name!r} is none of {', '.join(DTYPES)}, bytes")
    return DTYPES[name]


def _from_file(place: str, argument: ArrayArgument, dtype: np.dtype[Any]) -> Array:
    path = argument.folder / argument.fill
    try:
        values = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise SimkitError(f"{place}: there is no file {path}") from None
    except (ValueError, EOFError, OSError) as error:
        raise SimkitError(f"{place}: {path} does not load as .npy: {error}") from error
    # NumPy's format has no name for bfloat16 and fp8: they are saved as bytes of that size.
    if values.dtype.kind == "V" and values.dtype.itemsize == dtype.itemsize:
        values = values.view(dtype)
    if values.dtype != dtype or values.shape != argument.shape:
        raise SimkitError(
            f"{place}: {path} holds {values.dtype} {list(values.shape)}, "
            f"not {argument.dtype} {list(argument.shape)}"
        )
    return np.ascontiguousarray(values)
