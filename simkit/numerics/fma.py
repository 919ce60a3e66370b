"""Exactly rounded float32 fused multiply-add on arrays: ``fma.rn.f32``.

The product of two float32 is exact in float64; the float64 sum with the addend is not always, so
that a second rounding to float32 could go the wrong way. It can do so only if the float64 sum is
inexact *and* lies on a point where float32 rounding changes its mind. Such elements are looked
for, and only they are corrected.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

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

# The 29 fraction bits that float64 has and float32 has not; a float32 midpoint is 1000...0.
_EXTRA_BITS = np.array((1 << 29) - 1, np.int64)
_MIDPOINT = np.array(1 << 28, np.int64)
_MIN_NORMAL = 2.0**-126

# Larger arrays are done in pieces of this many elements: the temporaries stay in the cache.
_PIECE = 16384
_PADDING = 8 * 37
_MAX_SHAPES = 64


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Temporaries of one shape; allocating them anew would cost as much as the arithmetic."""

    a: Float64Array
    b: Float64Array
    c: Float64Array
    sum_bits: NDArray[np.int64]  # the memory of b, where the sum goes
    extra_bits: NDArray[np.int64]
    changes: NDArray[np.bool_]


class _ScratchPool(threading.local):
    """Per-thread buffers of `_PIECE` elements and their views by shape."""

    def __init__(self) -> None:
        # Rows a power of two apart would fall on the same cache sets: hence the padding.
        self.operands = np.empty((3, _PIECE + _PADDING), np.float64)
        self.extra_bits = np.empty(_PIECE, np.int64)
        self.changes = np.empty(_PIECE, np.bool_)
        self.views: dict[tuple[int, ...], _Scratch] = {}

    def of_shape(self, shape: tuple[int, ...], size: int) -> _Scratch:
        scratch = self.views.get(shape)
        if scratch is None:
            if len(self.views) >= _MAX_SHAPES:
                self.views.clear()
            a, b, c = (buffer[:size].reshape(shape) for buffer in self.operands)
            scratch = self.views[shape] = _Scratch(
                a,
                b,
                c,
                b.view(np.int64),
                self.extra_bits[:size].reshape(shape),
                self.changes[:size].reshape(shape),
            )
        return scratch


_pool = _ScratchPool()


def fma(
    a: Float32Like, b: Float32Like, c: Float32Like, out: Float32Array | None = None
) -> Float32Array:
    """``a * b + c`` rounded once, to nearest even, for every float32 input.

    Subnormal operands and results, overflow, infinities and signed zeros follow IEEE 754; every
    NaN result is 0x7FFFFFFF. Operands are float32 arrays or Python numbers and broadcast.

    ``out``: float32 array of the broadcast shape that receives the result; it may be one of the
    operands. Errors: `DtypeError` for operands that are not float32, `ShapeError` for an ``out``
    of another shape. Source: PTX ISA, ``fma.rn.f32``; canonical NaN as NVIDIA hardware returns it.
    """
    a, b, c = as_float32(a, "a"), as_float32(b, "b"), as_float32(c, "c")
    shape = a.shape
    if not shape == b.shape == c.shape:
        shape = _broadcast_shape(shape, b.shape, c.shape)
    if out is None:
        result = np.empty(shape, np.float32)
    else:
        _check_out(out, shape)
        result = out if out.flags.c_contiguous else np.empty(shape, np.float32)
    if result.size <= _PIECE:
        _fma_piece(a, b, c, result)
    else:
        a, b, c, flat = (_flat(x, shape) for x in (a, b, c, result))
        for start in range(0, flat.size, _PIECE):
            piece = slice(start, start + _PIECE)
            _fma_piece(_part(a, piece), _part(b, piece), _part(c, piece), flat[piece])
    if out is None or result is out:
        return result
    out[...] = result
    return out


def _broadcast_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    distinct = {shape for shape in shapes if shape}
    if len(distinct) > 1:
        return np.broadcast_shapes(*distinct)
    return distinct.pop() if distinct else ()


def _flat(x: Float32Array, shape: tuple[int, ...]) -> Float32Array:
    """``x`` broadcast to ``shape`` and flattened; scalars stay as they are."""
    if x.ndim == 0:
        return x
    return (x if x.shape == shape else np.broadcast_to(x, shape)).reshape(-1)


def _part(x: Float32Array, piece: slice) -> Float32Array:
    return x[piece] if x.ndim else x


def _check_out(out: Float32Array, shape: tuple[int, ...]) -> None:
    if out.dtype != np.float32:
        raise DtypeError(f"out must be float32, got {out.dtype}")
    if out.shape != shape:
        raise ShapeError(f"out has shape {out.shape}, the operands give {shape}")


def _fma_piece(a: Float32Array, b: Float32Array, c: Float32Array, out: Float32Array) -> None:
    """`fma` of at most `_PIECE` elements; ``out`` is C-contiguous."""
    scratch = _pool.of_shape(out.shape, out.size)
    product, total, addend, changes = scratch.a, scratch.b, scratch.c, scratch.changes
    underflows: list[str] = []
    with np.errstate(all="ignore", under="call", call=lambda kind, _: underflows.append(kind)):
        np.copyto(product, a)
        np.copyto(total, b)
        np.copyto(addend, c)
        np.multiply(product, total, out=product)
        np.add(product, addend, out=total)
        np.copyto(out, total, casting="same_kind")
    np.bitwise_and(scratch.sum_bits, _EXTRA_BITS, out=scratch.extra_bits)
    np.equal(scratch.extra_bits, _MIDPOINT, out=changes)
    if underflows:
        # Below the normal range the midpoints have other bits; the cast says when it got there.
        changes |= (np.abs(total) < _MIN_NORMAL) & (total != 0)
    if np.count_nonzero(changes):
        _round_once(scratch, out)
    # The sum of squares is NaN just if an element is: the cheapest such test there is.
    squares = np.vdot(out, out)
    if squares != squares:
        out[np.isnan(out)] = CANONICAL_NAN


def _round_once(scratch: _Scratch, out: Float32Array) -> None:
    """Set ``out`` to the sum rounded once, at the elements marked in ``scratch.changes``.

    Rounds the sum to odd in float64, which keeps what the second rounding needs to know
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    index = scratch.changes.reshape(-1).nonzero()[0]
    p, s, c = (x.reshape(-1)[index] for x in (scratch.a, scratch.b, scratch.c))
    with np.errstate(all="ignore"):
        virtual = s - p  # Knuth's TwoSum: error = the exact sum - s
        error = (p - (s - virtual)) + (c - virtual)
        inexact = error.nonzero()[0]
        if inexact.size:
            index, s, error = index[inexact], s[inexact], error[inexact]
            bits = s.view(np.int64)
            outward = np.where((error > 0) == (s > 0), 1, -1)
            bits += np.where(bits & 1 == 0, outward, 0)
            out.reshape(-1)[index] = s.astype(np.float32)
