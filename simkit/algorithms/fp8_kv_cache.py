"""The FP8 KV cache of DeepSeek V3.2: bfloat16 tokens to 656-byte records and back.

Quantisation by tiles of 1 x 128 values with power-of-two scales. Every step is exact or rounded
once, so that reference and device arithmetic are the same. Kernels: fp8_kv_cache.cu.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simkit.algorithms.heads import Array, to_bf16, to_float32
from simkit.algorithms.problem import BF16
from simkit.algorithms.softmax import row_maximum
from simkit.algorithms.tiles import tile_count
from simkit.errors import DtypeError, ShapeError
from simkit.layouts.fp8_record import (
    NOPE_BYTES,
    NOPE_VALUES,
    RECORD_BYTES,
    ROPE_BYTES,
    SCALE_BYTES,
    SCALE_COUNT,
    TOKEN_VALUES,
    VALUES_PER_SCALE,
)
from simkit.machine.machine import Machine
from simkit.machine.memory import WARP_LANES
from simkit.numerics.arrays import Float32Array
from simkit.numerics.formats import E4M3_MAX, decode_e4m3, encode_e4m3
from simkit.numerics.minmax import fmax_ptx
from simkit.numerics.scalar import divide, multiply

THREADS = 128
TOKENS_PER_CTA = THREADS // WARP_LANES

_VECTOR_VALUES = 8  # bfloat16 values of a 16-byte access; a lane has two such, side by side
_SMALLEST_RATIO = np.float32(1e-4)  # so that a tile of zeros has a scale too
_MANTISSA_MASK = np.uint32((1 << 23) - 1)


@dataclass(frozen=True, eq=False)
class QuantizeResult:
    """``cache`` [tokens, 656] uint8, one record of `simkit.layouts.fp8_record` for each token."""

    cache: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class DequantizeResult:
    """``out`` [tokens, 576] bfloat16 (float64 of the same values in reference arithmetic)."""

    out: Array


def tile_scales(nope: Float32Array) -> Float32Array:
    """Scale of each tile of 128 values: the power of two at or above max(amax / 448, 1e-4).

    ``nope`` [tokens, 512] to [tokens, 4]; NaNs do not count. Source: FlashMLA, tests/quant.py.
    """
    by_tile = np.abs(nope).reshape(len(nope), SCALE_COUNT, VALUES_PER_SCALE)
    amax = fmax_ptx(row_maximum(by_tile), np.float32(0))
    ratio = fmax_ptx(divide(amax, E4M3_MAX), _SMALLEST_RATIO)
    # Any fraction is carried into the exponent.
    return ((ratio.view(np.uint32) + _MANTISSA_MASK) & ~_MANTISSA_MASK).view(np.float32)


def quantize(nope: Float32Array, scales: Float32Array) -> NDArray[np.uint8]:
    """e4m3 codes of ``nope`` / scale, [tokens, 512]; the division is exact."""
    inverse = divide(np.float32(1), scales)
    return encode_e4m3(multiply(nope, np.repeat(inverse, VALUES_PER_SCALE, axis=-1)))


def dequantize(codes: NDArray[np.uint8], scales: Float32Array) -> Array:
    """bfloat16 of code * scale, [tokens, 512]."""
    return to_bf16(multiply(decode_e4m3(codes), np.repeat(scales, VALUES_PER_SCALE, axis=-1)))


def fp8_kv_quantize(machine: Machine, kv: Array) -> QuantizeResult:
    """``kv`` [tokens, 576] bfloat16 to records; leaves the tensors kv and cache on the machine.

    Errors: `DtypeError`, `ShapeError`.
    """
    _check("kv", kv, BF16, TOKEN_VALUES)
    tokens = len(kv)
    source = machine.tensor("kv", kv)
    cache = machine.allocate("cache", (tokens, RECORD_BYTES), np.uint8)
    with machine.cta(threads=THREADS, count=tile_count(tokens, TOKENS_PER_CTA)) as cta:
        # A lane has 16 values, which it reads as two vectors with two instructions.
        vectors = source.reshape(tokens, TOKEN_VALUES // (2 * _VECTOR_VALUES), 2, _VECTOR_VALUES)
        halves = [cta.load(vectors[:, :WARP_LANES, half]) for half in range(2)]
        rope = cta.load(source[:, NOPE_VALUES:], vector=4)
        codes = scales = rope_bytes = None
        if machine.computes:
            nope = to_float32(np.stack(halves, axis=2).reshape(tokens, NOPE_VALUES))
            tile_scale = tile_scales(nope)
            codes, scales = quantize(nope, tile_scale), tile_scale.view(np.uint8)
            rope_bytes = rope.view(np.uint8)
        cta.store(cache[:, NOPE_BYTES], codes)
        cta.store(cache[:, SCALE_BYTES], scales, vector=4, lanes=SCALE_COUNT)
        cta.store(cache[:, ROPE_BYTES], rope_bytes, vector=4)
    return QuantizeResult(cache.values)


def fp8_kv_dequantize(machine: Machine, cache: NDArray[np.uint8]) -> DequantizeResult:
    """Records [tokens, 656] to ``out`` [tokens, 576] bfloat16; leaves cache and out on the machine.

    Errors: `DtypeError`, `ShapeError`.
    """
    _check("cache", cache, np.dtype(np.uint8), RECORD_BYTES)
    tokens = len(cache)
    source = machine.tensor("cache", cache)
    out = machine.allocate("out", (tokens, TOKEN_VALUES), BF16)
    with machine.cta(threads=THREADS, count=tile_count(tokens, TOKENS_PER_CTA)) as cta:
        codes = cta.load(source[:, NOPE_BYTES])
        # Each lane reads the scale of its 16 values.
        scales = cta.load(source[:, SCALE_BYTES], vector=4, share=WARP_LANES // SCALE_COUNT)
        rope = cta.load(source[:, ROPE_BYTES], vector=4)
        vectors = out.reshape(tokens, TOKEN_VALUES // (2 * _VECTOR_VALUES), 2, _VECTOR_VALUES)
        halves: tuple[Array | None, Array | None] = (None, None)
        if machine.computes:
            nope = dequantize(codes, scales.view(np.float32))
            by_lane = nope.reshape(tokens, WARP_LANES, 2, _VECTOR_VALUES)
            halves = by_lane[:, :, 0], by_lane[:, :, 1]
        for half, values in enumerate(halves):
            cta.store(vectors[:, :WARP_LANES, half], values)
        cta.store(out[:, NOPE_VALUES:], rope.view(BF16), vector=4)
    return DequantizeResult(out.values)


def _check(name: str, array: Array, dtype: np.dtype[np.generic], width: int) -> None:
    if array.dtype != dtype:
        raise DtypeError(f"{name} must be {dtype}, got {array.dtype}")
    if array.ndim != 2 or array.shape[1] != width or not len(array):
        raise ShapeError(f"{name} must be [tokens, {width}], at least one, got {array.shape}")
