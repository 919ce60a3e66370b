"""What tensors hold: 16-bit floats, float32 or e4m3; decoding is exact, encoding rounds once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from simkit.numerics.arrays import Float32Array
from simkit.numerics.formats import decode_bf16, decode_e4m3, decode_f16, encode_bf16, encode_f16

Array = NDArray[Any]

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

DECODE: dict[np.dtype[Any], Callable[[Array], Float32Array]] = {
    F32: lambda x: x,
    BF16: lambda x: decode_bf16(x.view(np.uint16)),
    F16: lambda x: decode_f16(x.view(np.uint16)),
    E4M3: lambda x: decode_e4m3(x.view(np.uint8)),
}
"""float32 of stored values, exact, by dtype."""

ENCODE: dict[np.dtype[Any], Callable[[Float32Array], Array]] = {
    F32: lambda x: x,
    BF16: lambda x: encode_bf16(x).view(BF16),
    F16: lambda x: encode_f16(x).view(F16),
}
"""Stored values of float32 ones, rounded to nearest even, by dtype."""

TENSOR_CORE_KIND = {BF16: "bf16", F16: "f16"}
"""What `simkit.numerics.tensor_core` calls them."""
