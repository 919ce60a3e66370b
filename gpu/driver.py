"""What CuPy does not wrap of the CUDA driver: encoding tensor maps, launches with attributes."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from gpu.tensor_map import (
    DESCRIPTOR_BYTES,
    INTERLEAVES,
    L2_PROMOTIONS,
    MAX_RANK,
    OOB_FILLS,
    SWIZZLES,
    TensorMapFields,
)
from simkit.errors import DeviceUnavailableError, LaunchError

# alignof(CUtensorMap): where the driver wants its result.
_ALIGNMENT = 64
_ENCODE_TILED_ARGUMENTS = (
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
)
# CUresult
_REASONS = {
    1: "invalid value",
    3: "the driver is not initialized",
    201: "no current context",
    209: "no code for this GPU",
    700: "illegal address",
    701: "out of resources",
    719: "the launch failed",
    801: "not supported by this GPU",
    912: "invalid cluster size",
}
# CUfunction_attribute and CUlaunchAttributeID
_MAX_DYNAMIC_SHARED_BYTES = 8
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
# Every GPU with clusters can run them up to this size; larger ones must be allowed explicitly.
_PORTABLE_CLUSTER = 8
# Dynamic shared memory that needs no permission.
_PLAIN_SHARED_BYTES = 48 * 1024
# What precedes each value in a launch's ``extra`` list.
_LAUNCH_PARAM_END = 0
_LAUNCH_PARAM_BUFFER_POINTER = 1
_LAUNCH_PARAM_BUFFER_SIZE = 2

Function = Callable[..., int]


class _Extents(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class _Value(ctypes.Union):
    """CUlaunchAttributeValue, as far as it is used here."""

    _fields_ = (("pad", ctypes.c_char * 64), ("cluster", _Extents), ("flag", ctypes.c_int))


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", _Value))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", _Extents),
        ("block", _Extents),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


_LAUNCH_ARGUMENTS = (
    ctypes.POINTER(_Config),
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
)
_SET_ATTRIBUTE_ARGUMENTS = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)


def _function(name: str, arguments: Sequence[Any], first_version: str) -> Function:
    """A function of the driver.  DeviceUnavailableError without a driver that has it."""
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        function: Any = getattr(ctypes.CDLL(library), name)
    except OSError as error:
        raise DeviceUnavailableError(f"no NVIDIA driver for {name}: {error}") from error
    except AttributeError as error:
        raise DeviceUnavailableError(
            f"the NVIDIA driver ({library}) has no {name}; CUDA {first_version}'s is the first"
        ) from error
    function.argtypes = arguments
    function.restype = ctypes.c_int
    return function


@lru_cache(maxsize=1)
def encode_tiled_function() -> Function:
    """cuTensorMapEncodeTiled.  DeviceUnavailableError without a driver that has it."""
    return _function("cuTensorMapEncodeTiled", _ENCODE_TILED_ARGUMENTS, "12.0")


@lru_cache(maxsize=1)
def launch_function() -> Function:
    """cuLaunchKernelEx.  DeviceUnavailableError without a driver that has it."""
    return _function("cuLaunchKernelEx", _LAUNCH_ARGUMENTS, "11.8")


@lru_cache(maxsize=1)
def set_attribute_function() -> Function:
    """cuFuncSetAttribute.  DeviceUnavailableError without a driver that has it."""
    return _function("cuFuncSetAttribute", _SET_ATTRIBUTE_ARGUMENTS, "9.0")


def launch(
    function: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
    stream: int,
    parameters: bytes,
    cluster: tuple[int, int, int] = (1, 1, 1),
    programmatic: bool = False,
) -> None:
    """Starts a kernel on a stream.

    ``function`` and ``stream`` are the driver's handles, ``parameters`` the kernel's parameters as
    they lie in memory.  ``cluster`` (1, 1, 1) leaves the cluster to the kernel.  ``programmatic``
    lets it start before the kernel before it in the stream has ended, as far as that one allows.
    LaunchError if the driver refuses.
    """
    size = cluster[0] * cluster[1] * cluster[2]
    for attribute, value, is_needed in (
        (_MAX_DYNAMIC_SHARED_BYTES, shared_bytes, shared_bytes > _PLAIN_SHARED_BYTES),
        (_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, size > _PORTABLE_CLUSTER),
    ):
        if is_needed:
            result = set_attribute_function()(function, attribute, value)
            _check(result, "cuFuncSetAttribute", f"attribute {attribute}, value {value}")
    attributes = (_Attribute * 2)()
    count = 0
    if size > 1:
        attributes[count].id = _CLUSTER_DIMENSION
        attributes[count].value.cluster = _Extents(*cluster)
        count += 1
    if programmatic:
        attributes[count].id = _PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[count].value.flag = 1
        count += 1
    config = _Config(_Extents(*grid), _Extents(*block), shared_bytes, stream, attributes, count)
    buffer = ctypes.create_string_buffer(parameters, max(len(parameters), 1))
    length = ctypes.c_size_t(len(parameters))
    extra = (ctypes.c_void_p * 5)(
        _LAUNCH_PARAM_BUFFER_POINTER, ctypes.addressof(buffer),
        _LAUNCH_PARAM_BUFFER_SIZE, ctypes.addressof(length), _LAUNCH_PARAM_END,
    )  # fmt: skip
    result = launch_function()(ctypes.byref(config), function, None, extra)
    _check(result, "cuLaunchKernelEx", f"grid {grid}, block {block}, cluster {cluster}")


def _check(result: int, name: str, what: str) -> None:
    if result:
        reason = _REASONS.get(result, "see CUresult")
        raise LaunchError(f"{name} failed with {result} ({reason}) for {what}")


def encode_tiled(fields: TensorMapFields, function: Function | None = None) -> bytes:
    """The 128-byte descriptor that a GPU reads, encoded by ``function`` (by default the driver's).

    LaunchError if it refuses the fields.
    """
    function = function or encode_tiled_function()
    room = ctypes.create_string_buffer(DESCRIPTOR_BYTES + _ALIGNMENT)
    start = -ctypes.addressof(room) % _ALIGNMENT
    wide, narrow = ctypes.c_uint64 * MAX_RANK, ctypes.c_uint32 * MAX_RANK
    result = function(
        ctypes.addressof(room) + start,
        fields.element.value,
        fields.rank,
        fields.address,
        wide(*fields.dims),
        wide(*fields.strides),
        narrow(*fields.box),
        narrow(*fields.element_strides),
        INTERLEAVES[fields.interleave],
        SWIZZLES[fields.swizzle].value,
        L2_PROMOTIONS[fields.l2_promotion],
        OOB_FILLS[fields.oob_fill],
    )
    _check(result, "cuTensorMapEncodeTiled", str(fields))
    return room.raw[start : start + DESCRIPTOR_BYTES]
