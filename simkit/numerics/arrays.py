"""Types and the one input check that the numerics modules share."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simkit.errors import DtypeError

Float32Array: TypeAlias = NDArray[np.float32]
Float64Array: TypeAlias = NDArray[np.float64]
Float32Like: TypeAlias = NDArray[np.float32] | np.float32 | float

CANONICAL_NAN_BITS = 0x7FFFFFFF
"""The NaN that NVIDIA float32 arithmetic returns, whatever NaN went in."""

CANONICAL_NAN: np.float32 = np.uint32(CANONICAL_NAN_BITS).view(np.float32)


_FLOAT32 = np.dtype(np.float32)


def as_float32(x: Any, what: str) -> Float32Array:
    """``x`` as a float32 array; Python numbers are rounded, any other dtype is a `DtypeError`.

    ``what`` names the operand in the message.
    """
    if type(x) is np.ndarray and x.dtype is _FLOAT32:  # the common case, quickly
        return x
    if isinstance(x, np.ndarray | np.generic):
        if x.dtype != np.float32:
            raise DtypeError(f"{what} must be float32, got {x.dtype}")
        return np.asarray(x)
    if isinstance(x, float | int):
        return np.asarray(x, np.float32)
    raise DtypeError(f"{what} must be a float32 array or a Python number, got {type(x).__name__}")
