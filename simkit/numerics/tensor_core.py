"""The dot-product-accumulate of NVIDIA tensor cores, bit for bit, on batches of small matrices.

One step adds ``terms`` exact products and the accumulator as one sum: every term is aligned to the
largest exponent, truncated toward zero ``fraction_bits`` below it, the integers are added exactly
and the sum is rounded toward zero. Longer products are chains of steps. Sources: Fasi, Higham,
Mikaitis, Pranesh, PeerJ CS 7:e330 (2021); Khattak and Mikaitis, arXiv 2512.07004; Xie et al.
(MMA-Sim), arXiv 2511.10909, both validated against hardware.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.errors import DtypeError, ShapeError
from simkit.numerics.arrays import (
    CANONICAL_NAN,
    Float32Array,
    Float32Like,
    Float64Array,
    as_float32,
)


@dataclass(frozen=True)
class TensorCore:
    """How one tensor-core instruction family adds.

    ``terms``: products per step. ``fraction_bits``: bits kept below the largest exponent.
    ``input_min_exponent``: exponent of the input format's smallest normal number; subnormal
    inputs carry it too. ``output_bits``: fraction bits of the result, 23 for float32;
    ``rounds_to_nearest``: a float16 result, rounded to nearest even rather than toward zero.
    ``min_exponent``: the least exponent that terms are aligned to. The accumulator always takes
    part with the exponent -126 or more, hence -126; the models in the literature differ here
    (-126 to -133), which shows only in results near the float32 underflow threshold.
    """

    name: str
    terms: int
    fraction_bits: int
    input_min_exponent: int
    output_bits: int = 23
    rounds_to_nearest: bool = False
    min_exponent: int = -126


_INPUT_MIN_EXPONENT = {"bf16": -126, "f16": -14, "tf32": -126, "e4m3": -6}

# architecture, input, terms, fraction bits, output fraction bits
_ROWS = (
    ("sm_70", "f16", 4, 23, 23),
    ("sm_75", "f16", 8, 24, 23),
    ("sm_80", "f16", 8, 24, 23),
    ("sm_80", "bf16", 8, 24, 23),
    ("sm_80", "tf32", 4, 24, 23),
    ("sm_89", "f16", 8, 24, 23),
    ("sm_89", "bf16", 8, 24, 23),
    ("sm_89", "tf32", 4, 24, 23),
    ("sm_89", "e4m3", 16, 13, 13),
    ("sm_90", "f16", 16, 25, 23),
    ("sm_90", "bf16", 16, 25, 23),
    ("sm_90", "tf32", 8, 25, 23),
    # wgmma; mma.sync with fp8 inputs runs on the f16 unit there and is another function.
    ("sm_90", "e4m3", 32, 13, 13),
    ("sm_100", "f16", 16, 25, 23),
    ("sm_100", "bf16", 16, 25, 23),
    ("sm_100", "tf32", 8, 25, 23),
    ("sm_100", "e4m3", 32, 25, 23),
)

TENSOR_CORES: dict[tuple[str, str], TensorCore] = {
    (arch, kind): TensorCore(
        f"{arch} {kind}", terms, fraction_bits, _INPUT_MIN_EXPONENT[kind], output_bits
    )
    for arch, kind, terms, fraction_bits, output_bits in _ROWS
}
"""Tensor cores by (architecture, input format), e.g. ``("sm_90", "bf16")``; float32 results."""


# Results of more elements are computed some rows at a time: the temporaries stay in the cache.
_PIECE = 32768
_MAX_SHAPES = 64


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Temporaries of one result shape; allocating them anew would cost as much as the sums."""

    greatest: NDArray[np.int16]
    sums: NDArray[np.int16]
    scale: NDArray[np.int32]
    term: Float32Array
    integer: NDArray[np.int32]
    accumulator: NDArray[np.int32]
    total: Float64Array


class _ScratchPool(threading.local):
    """Per-thread buffers and their views by shape."""

    def __init__(self) -> None:
        self.views: dict[tuple[int, ...], _Scratch] = {}
        self.buffers = self._allocate(_PIECE)

    def _allocate(self, size: int) -> _Scratch:
        return _Scratch(
            greatest=np.empty(size, np.int16),
            sums=np.empty(size, np.int16),
            scale=np.empty(size, np.int32),
            term=np.empty(size, np.float32),
            integer=np.empty(size, np.int32),
            accumulator=np.empty(size, np.int32),
            total=np.empty(size, np.float64),
        )

    def of_shape(self, shape: tuple[int, ...]) -> _Scratch:
        scratch = self.views.get(shape)
        if scratch is None:
            size = math.prod(shape)
            if len(self.views) >= _MAX_SHAPES:
                self.views.clear()
            base = self.buffers if size <= _PIECE else self._allocate(size)
            arrays = (getattr(base, field.name) for field in fields(_Scratch))
            scratch = _Scratch(*(array[:size].reshape(shape) for array in arrays))
            if size <= _PIECE:
                self.views[shape] = scratch
        return scratch


_pool = _ScratchPool()


def tensor_core(arch: str, kind: str) -> TensorCore:
    """The `TensorCore` of ``arch`` ("sm_90", "sm_90a", ...) for inputs ``kind`` ("bf16", ...).

    Error: `DtypeError` that lists what there is, for a pair that is not in `TENSOR_CORES`.
    """
    core = TENSOR_CORES.get((arch.rstrip("af"), kind))
    if core is None:
        known = ", ".join(f"{a} {k}" for a, k in TENSOR_CORES)
        raise DtypeError(f"no tensor-core model for {arch} with {kind} inputs; known: {known}")
    return core


@dataclass(frozen=True, slots=True)
class Operand:
    """A or B with the exponents that a step aligns by: worth keeping where it is used again."""

    values: Float32Array
    exponents: NDArray[np.int16]
    top: int

    def part(self, rows: Any, columns: Any) -> Operand:
        """A submatrix; ``top`` stays, as the bound that it then is."""
        return Operand(self.values[rows, columns], self.exponents[rows, columns], self.top)


def prepare(x: Float32Array, core: TensorCore) -> Operand:
    """``x`` as `dot_accumulate` can take it in place of the array, any number of times."""
    x = as_float32(x, "operand")
    exponents = _exponents(x, core.input_min_exponent)
    return Operand(x, exponents, int(exponents.max(initial=-127)))


def half_precision(core: TensorCore) -> TensorCore:
    """The same unit with a float16 accumulator: its results are rounded to nearest even."""
    return replace(core, name=f"{core.name} to f16", output_bits=10, rounds_to_nearest=True)


def dot_accumulate(
    a: Float32Array | Operand, b: Float32Array | Operand, c: Float32Like, core: TensorCore
) -> Float32Array:
    """``a @ b + c`` as the tensor core ``core`` computes it; float32 [M, N, *batch].

    ``a`` [M, K, *batch] and ``b`` [K, N, *batch] are float32 arrays whose values the input format
    can represent, ``c`` is float32 and broadcasts to [M, N, *batch]; batch axes broadcast. K is
    cut into chained steps of ``core.terms``, ascending. A NaN result is 0x7FFFFFFF, infinities
    and overflow follow IEEE 754, a zero result is +0. Errors: `ShapeError`, `DtypeError`.
    """
    a, b = (x if isinstance(x, Operand) else prepare(x, core) for x in (a, b))
    c = as_float32(c, "c")
    shape = _result_shape(a.values, b.values, c)
    row_size = math.prod(shape[1:])
    rows = max(1, _PIECE // max(1, row_size))
    if shape[0] <= rows:
        return _dot_accumulate_piece(a, b, np.broadcast_to(c, shape), core)
    c = np.broadcast_to(c, shape)
    result = np.empty(shape, np.float32)
    for start in range(0, shape[0], rows):
        piece = slice(start, start + rows)
        result[piece] = _dot_accumulate_piece(a.part(piece, slice(None)), b, c[piece], core)
    return result


def _dot_accumulate_piece(
    a: Operand, b: Operand, c: Float32Array, core: TensorCore
) -> Float32Array:
    """`dot_accumulate` of so few rows that the temporaries stay in the cache."""
    work = _pool.of_shape(c.shape)
    result = c
    with np.errstate(all="ignore"):
        for start in range(0, a.values.shape[1], core.terms):
            k = slice(start, start + core.terms)
            result = _step(a.part(slice(None), k), b.part(k, slice(None)), result, core, work)
    return result.copy() if result is c else result


def dot_accumulate_fast(a: Float32Array, b: Float32Array, c: Float32Like) -> Float32Array:
    """``a @ b + c`` in ordinary float32, same shapes as `dot_accumulate`: no bits promised."""
    a, b, c = as_float32(a, "a"), as_float32(b, "b"), as_float32(c, "c")
    _result_shape(a, b, c)
    with np.errstate(all="ignore"):
        product = np.matmul(np.moveaxis(a, (0, 1), (-2, -1)), np.moveaxis(b, (0, 1), (-2, -1)))
        return np.asarray(np.moveaxis(product, (-2, -1), (0, 1)) + c)


def _result_shape(a: Float32Array, b: Float32Array, c: Float32Array) -> tuple[int, ...]:
    if a.ndim < 2 or b.ndim < 2 or a.shape[1] != b.shape[0] or a.ndim != b.ndim:
        raise ShapeError(f"a must be [M, K, *batch] and b [K, N, *batch], got {a.shape}, {b.shape}")
    try:
        shape = (a.shape[0], b.shape[1], *np.broadcast_shapes(a.shape[2:], b.shape[2:]))
        fits = np.broadcast_shapes(shape, c.shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(f"shapes do not fit together: a {a.shape}, b {b.shape}, c {c.shape}")
    return shape


# Exponents are int16. That of zero is far below all others, even in a sum of two exponents.
_ZERO_SHIFT = np.int16(12)
_NO_TERM = -2048
_NOT_FINITE_EXPONENT = 128


def _exponents(x: Float32Array, min_exponent: int) -> NDArray[np.int16]:
    """Exponents of ``x``, at least ``min_exponent``; 128 for inf and NaN, far below for zero."""
    exponents = np.right_shift(x.view(np.uint32), np.uint32(23)).astype(np.int16)
    exponents &= np.int16(255)
    exponents -= np.int16(127)
    if exponents.min(initial=min_exponent) < min_exponent:
        # NumPy's maximum with an array is several times faster than with a scalar.
        np.maximum(exponents, np.full(x.shape, min_exponent, np.int16), out=exponents)
        exponents -= np.equal(x, 0).astype(np.int16) << _ZERO_SHIFT
    return exponents


def _step(
    left: Operand, right: Operand, c: Float32Array, core: TensorCore, work: _Scratch
) -> Float32Array:
    """One step: a [M, k, *batch], b [k, N, *batch], c [M, N, *batch] with k <= core.terms."""
    a, b = left.values, right.values
    exponent_c = _exponents(c, -126)
    if _NOT_FINITE_EXPONENT in (left.top, right.top, int(exponent_c.max(initial=-127))):
        return _step_with_specials(a, b, c, core, work)
    greatest = work.greatest
    np.copyto(greatest, exponent_c)
    for k in range(a.shape[1]):
        np.add(left.exponents[:, k, None], right.exponents[k], out=work.sums)
        np.maximum(greatest, work.sums, out=greatest)

    # In float32, products must not overflow, and the last bit kept must be a normal number.
    least = core.fraction_bits - 120
    narrow = left.top + right.top <= 124
    if greatest.min(initial=least) < least:
        narrow = narrow and not np.any((greatest < least) & (greatest > _NO_TERM))
        np.maximum(greatest, np.int16(least if narrow else core.min_exponent), out=greatest)
    return (_truncated_sum_float32 if narrow else _truncated_sum_float64)(a, b, c, core, work)


def _truncated_sum_float32(
    a: Float32Array, b: Float32Array, c: Float32Array, core: TensorCore, work: _Scratch
) -> Float32Array:
    """The sum of a step, with terms in float32 and integer accumulation.

    Products of two 11-bit significands are exact in float32, scaling by powers of two is too.
    """
    scale_bits, term, integer, accumulator = work.scale, work.term, work.integer, work.accumulator
    np.copyto(scale_bits, work.greatest)
    np.subtract(np.int32(core.fraction_bits + 127), scale_bits, out=scale_bits)
    scale_bits <<= np.int32(23)
    scale = scale_bits.view(np.float32)
    total = work.total
    np.multiply(c, scale, out=term)
    np.copyto(total, np.trunc(term, out=term))
    # A truncated product is below 4 * 2^fraction_bits: so many of them fit an int32.
    group = 1 << (29 - core.fraction_bits)
    for start in range(0, a.shape[1], group):
        accumulator[...] = 0
        for k in range(start, min(start + group, a.shape[1])):
            np.multiply(a[:, k, None], b[k], out=term)
            np.multiply(term, scale, out=term)
            np.copyto(integer, term, casting="unsafe")
            np.add(accumulator, integer, out=accumulator)
        np.add(total, accumulator, out=total)
    if core.rounds_to_nearest:
        return _rounded_to_f16(np.divide(total, scale, dtype=np.float64))
    _clear_low_bits(total, core.output_bits)
    # 1 / scale by its bits; the product is exact, as the result is a normal number, or overflows.
    np.subtract(np.int32(254 << 23), scale_bits, out=scale_bits)
    return np.multiply(total.astype(np.float32), scale)


def _truncated_sum_float64(
    a: Float32Array, b: Float32Array, c: Float32Array, core: TensorCore, work: _Scratch
) -> Float32Array:
    """The sum of a step for every finite input; float64 holds all products and sums exactly."""
    np.copyto(work.scale, work.greatest)
    scale = np.ldexp(1.0, core.fraction_bits - work.scale)
    total = np.trunc(c * scale)
    for k in range(a.shape[1]):
        term = np.multiply(a[:, k, None], b[k], dtype=np.float64)
        term *= scale
        total += np.trunc(term, out=term)
    total /= scale
    if core.rounds_to_nearest:
        return _rounded_to_f16(total)
    _clear_low_bits(total, core.output_bits)
    quantum = 2.0 ** (-126 - core.output_bits)
    subnormal = np.abs(total) < 2.0**-126
    total[subnormal] = np.trunc(total[subnormal] / quantum) * quantum
    return np.asarray((total + 0.0).astype(np.float32))  # + 0.0: a sum truncated to zero is +0


def _step_with_specials(
    a: Float32Array, b: Float32Array, c: Float32Array, core: TensorCore, work: _Scratch
) -> Float32Array:
    """A step with infinities or NaNs among its inputs."""
    finite = [np.where(np.isfinite(x), x, np.float32(0)) for x in (a, b, c)]
    result = _step(prepare(finite[0], core), prepare(finite[1], core), finite[2], core, work)
    specials = np.where(np.isfinite(c), 0.0, c)
    for k in range(a.shape[1]):
        product = np.multiply(a[:, k, None], b[k], dtype=np.float64)
        specials = specials + np.where(np.isfinite(product), 0.0, product)
    np.copyto(result, specials, casting="same_kind", where=np.isinf(specials))
    result[np.isnan(specials)] = CANONICAL_NAN
    return result


def _rounded_to_f16(x: Float64Array) -> Float32Array:
    """Float64 ``x`` rounded once to the nearest float16; + 0.0 makes a zero +0."""
    return np.asarray((x.astype(np.float16) + np.float16(0)).astype(np.float32))


def _clear_low_bits(x: Float64Array, fraction_bits: int) -> Float64Array:
    """Round float64 ``x`` toward zero to ``fraction_bits``, in place."""
    bits = x.view(np.int64)
    bits &= np.int64(-1 << (52 - fraction_bits))
    return x
