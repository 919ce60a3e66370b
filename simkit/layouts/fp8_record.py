"""The 656-byte FP8 KV-cache record of DeepSeek V3.2: where its parts lie.

One record for each token and layer of multi-head latent attention (MLA)::

    bytes   0 .. 511  NOPE    512 values without positional encoding, e4m3
    bytes 512 .. 527  SCALES  four float32, each for 128 values
    bytes 528 .. 655  ROPE    64 values with rotary encoding, bfloat16, unquantised

Source: FlashMLA, README, "FP8 KV cache"; the 1 x 128 tiles of DeepSeek-V3.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from simkit.errors import DtypeError, ShapeError
from simkit.numerics.arrays import Float32Array

NOPE_VALUES = 512
ROPE_VALUES = 64
TOKEN_VALUES = NOPE_VALUES + ROPE_VALUES
VALUES_PER_SCALE = 128
SCALE_COUNT = NOPE_VALUES // VALUES_PER_SCALE

NOPE_BYTES = slice(0, NOPE_VALUES)
SCALE_BYTES = slice(NOPE_BYTES.stop, NOPE_BYTES.stop + SCALE_COUNT * 4)
ROPE_BYTES = slice(SCALE_BYTES.stop, SCALE_BYTES.stop + ROPE_VALUES * 2)
RECORD_BYTES: int = ROPE_BYTES.stop

_PARTS = (
    ("codes", NOPE_BYTES, np.dtype(np.uint8), NOPE_VALUES),
    ("scales", SCALE_BYTES, np.dtype(np.float32), SCALE_COUNT),
    ("rope", ROPE_BYTES, np.dtype(ml_dtypes.bfloat16), ROPE_VALUES),
)


def pack(
    codes: NDArray[np.uint8], scales: Float32Array, rope: NDArray[ml_dtypes.bfloat16]
) -> NDArray[np.uint8]:
    """Records [tokens, 656] of e4m3 ``codes`` [tokens, 512], ``scales`` [tokens, 4] float32 and
    ``rope`` [tokens, 64] bfloat16. Errors: `ShapeError`, `DtypeError`.
    """
    tokens = len(codes)
    records = np.empty((tokens, RECORD_BYTES), np.uint8)
    parts: tuple[NDArray[Any], ...] = (codes, scales, rope)
    for (name, place, dtype, size), part in zip(_PARTS, parts, strict=True):
        if part.dtype != dtype:
            raise DtypeError(f"{name} must be {dtype}, got {part.dtype}")
        if part.shape != (tokens, size):
            raise ShapeError(f"{name} must be [{tokens}, {size}], got {part.shape}")
        records[:, place] = np.ascontiguousarray(part).view(np.uint8)
    return records


def unpack(
    records: NDArray[np.uint8],
) -> tuple[NDArray[np.uint8], Float32Array, NDArray[ml_dtypes.bfloat16]]:
    """The parts of ``records`` [tokens, 656], as `pack` takes them. Errors as there."""
    if records.dtype != np.uint8:
        raise DtypeError(f"records must be uint8, got {records.dtype}")
    if records.ndim != 2 or records.shape[1] != RECORD_BYTES:
        raise ShapeError(f"records must be [tokens, {RECORD_BYTES}], got {records.shape}")
    codes, scales, rope = (
        np.ascontiguousarray(records[:, place]).view(dtype) for _, place, dtype, _ in _PARTS
    )
    return codes, scales, rope
