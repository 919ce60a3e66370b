"""Bytes of the FP8 record, against the struct module."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest

from simkit.errors import DtypeError, ShapeError
from simkit.layouts.fp8_record import RECORD_BYTES, pack, unpack

CODES = np.arange(2 * 512, dtype=np.uint16).astype(np.uint8).reshape(2, 512)
SCALES = np.array([[1, 2, 0.5, 2.0**-13], [4, 8, 16, 2.0**100]], np.float32)
ROPE = np.linspace(-3, 3, 2 * 64, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(2, 64)


def test_every_byte_has_its_place() -> None:
    records = pack(CODES, SCALES, ROPE)
    for token in range(2):
        # bfloat16 is the upper half of float32.
        floats = struct.pack("<64f", *ROPE[token].astype(float))
        rope = b"".join(floats[4 * i + 2 : 4 * i + 4] for i in range(64))
        expected = bytes(CODES[token]) + struct.pack("<4f", *SCALES[token]) + rope
        assert records[token].tobytes() == expected


def test_unpack_undoes_pack() -> None:
    for part, original in zip(
        unpack(pack(CODES, SCALES, ROPE)), (CODES, SCALES, ROPE), strict=True
    ):
        assert part.dtype == original.dtype
        assert np.array_equal(part, original)


def test_pack_undoes_unpack() -> None:
    records = np.random.default_rng(0).integers(0, 256, (3, RECORD_BYTES), np.uint8)
    assert np.array_equal(pack(*unpack(records)), records)


def test_parts_of_another_kind_are_refused() -> None:
    with pytest.raises(DtypeError, match="scales must be float32, got float64"):
        pack(CODES, SCALES.astype(np.float64), ROPE)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"rope must be \[2, 64\], got \(2, 32\)"):
        pack(CODES, SCALES, ROPE[:, :32])
    with pytest.raises(ShapeError, match="656"):
        unpack(np.zeros((2, 576), np.uint8))
    with pytest.raises(DtypeError, match="uint8"):
        unpack(np.zeros((2, 656), np.int8))  # type: ignore[arg-type]
