"""What CuPy does not wrap of the CUDA driver: encoding tensor maps."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache

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
    801: "not supported by this GPU",
}


@lru_cache(maxsize=1)
def encode_tiled_function() -> Callable[..., int]:
    """The driver's cuTensorMapEncodeTiled.  DeviceUnavailableError without a driver that has it."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        function = ctypes.CDLL(name).cuTensorMapEncodeTiled
    except OSError as error:
        raise DeviceUnavailableError(f"no NVIDIA driver for tensor maps: {error}") from error
    except AttributeError as error:
        raise DeviceUnavailableError(
            f"the NVIDIA driver ({name}) has no cuTensorMapEncodeTiled; CUDA 12.0's is the first"
        ) from error
    function.argtypes = _ENCODE_TILED_ARGUMENTS
    function.restype = ctypes.c_int
    return function


def encode_tiled(fields: TensorMapFields, function: Callable[..., int] | None = None) -> bytes:
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
    if result:
        raise LaunchError(
            f"cuTensorMapEncodeTiled failed with {result}"
            f" ({_REASONS.get(result, 'see CUresult')}) for {fields}"
        )
    return room.raw[start : start + DESCRIPTOR_BYTES]
