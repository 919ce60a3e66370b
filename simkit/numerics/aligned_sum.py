"""One step of a tensor core after another: aligned, truncated, exactly added sums of products.

Batches of small matrices with the batch axes last; plain matrices go through `matrix_sum`.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from simkit.numerics.arrays import CANONICAL_NAN, Float32Array, Float64Array, as_float32

if TYPE_CHECKING:
    from simkit.numerics.tensor_core import TensorCore

# Results of more elements are computed some rows at a time: the temporaries stay in the cache.
PIECE = 32768
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
        self.buffers = self._allocate(PIECE)

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
            base = self.buffers if size <= PIECE else self._allocate(size)
            arrays = (getattr(base, field.name) for field in fields(_Scratch))
            scratch = _Scratch(*(array[:size].reshape(shape) for array in arrays))
            if size <= PIECE:
                self.views[shape] = scratch
        return scratch


_pool = _ScratchPool()


@dataclass(frozen=True, slots=True)
class Operand:
    """A or B with the exponents that a step aligns by: worth keeping where it is used again.

    ``bottom``, ``top``: no exponent is below or above; those of zeros are, far below all others.
    """

    values: Float32Array
    exponents: NDArray[np.int16]
    bottom: int
    top: int

    @classmethod
    def of(cls, values: Float32Array, exponents: NDArray[np.int16]) -> Operand:
        bottom, top = int(exponents.min(initial=0)), int(exponents.max(initial=-127))
        return cls(values, exponents, bottom, top)

    def part(self, rows: Any, columns: Any) -> Operand:
        """A submatrix, with the same bounds."""
        values, exponents = self.values[rows, columns], self.exponents[rows, columns]
        return Operand(values, exponents, self.bottom, self.top)


def prepare(x: Float32Array, core: TensorCore) -> Operand:
    """``x`` as `dot_accumulate` can take it in place of the array, any number of times."""
    x = as_float32(x, "operand")
    exponents = _exponents(x, core.input_min_exponent)
    return Operand.of(x, exponents)


def rows_with_terms(a: Operand, b: Operand, core: TensorCore) -> NDArray[np.bool_] | None:
    """Which rows of ``a`` [M, K, *batch] are not zero throughout; None if all of them are not.

    None also where a row of zeros may change the accumulator: if ``b`` is not finite, or the sum
    keeps fewer bits than the accumulator has.
    """
    exact = core.fraction_bits >= 23 and core.output_bits == 23 and not core.rounds_to_nearest
    if a.bottom > _NO_TERM or b.top == _NOT_FINITE_EXPONENT or not exact:
        return None
    largest = a.exponents.max(axis=tuple(range(1, a.exponents.ndim)), initial=_OF_ZERO)
    found = np.asarray(largest > _NO_TERM)
    return None if found.all() else found


def accumulate(a: Operand, b: Operand, c: Float32Array, core: TensorCore) -> Float32Array:
    """`dot_accumulate` of so few rows that the temporaries stay in the cache."""
    work = _pool.of_shape(c.shape)
    result = c
    with np.errstate(all="ignore"):
        for start in range(0, a.values.shape[1], core.terms):
            k = slice(start, start + core.terms)
            result = _step(a.part(slice(None), k), b.part(k, slice(None)), result, core, work)
    return result.copy() if result is c else result


# Exponents are int16. That of zero is far below all others, even in a sum of two exponents.
_ZERO_SHIFT = np.int16(12)
_OF_ZERO = np.int16(-4096)
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
        return _step_with_specials(left, right, c, core, work)
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
    left: Operand, right: Operand, c: Float32Array, core: TensorCore, work: _Scratch
) -> Float32Array:
    """A step with infinities or NaNs among its inputs."""
    a, b = left.values, right.values
    finite = np.where(np.isfinite(c), c, np.float32(0))
    result = _step(_finite_part(left), _finite_part(right), finite, core, work)
    specials = np.where(np.isfinite(c), 0.0, c)
    for k in range(a.shape[1]):
        product = np.multiply(a[:, k, None], b[k], dtype=np.float64)
        specials = specials + np.where(np.isfinite(product), 0.0, product)
    np.copyto(result, specials, casting="same_kind", where=np.isinf(specials))
    result[np.isnan(specials)] = CANONICAL_NAN
    return result


def _finite_part(x: Operand) -> Operand:
    """The operand with zeros for its infinities and NaNs."""
    special = x.exponents == _NOT_FINITE_EXPONENT
    exponents = np.where(special, _OF_ZERO, x.exponents)
    values = np.where(special, np.float32(0), x.values)
    return Operand.of(values, exponents)


def _rounded_to_f16(x: Float64Array) -> Float32Array:
    """Float64 ``x`` rounded once to the nearest float16; + 0.0 makes a zero +0."""
    return np.asarray((x.astype(np.float16) + np.float16(0)).astype(np.float32))


def _clear_low_bits(x: Float64Array, fraction_bits: int) -> Float64Array:
    """Round float64 ``x`` toward zero to ``fraction_bits``, in place."""
    bits = x.view(np.int64)
    bits &= np.int64(-1 << (52 - fraction_bits))
    return x
