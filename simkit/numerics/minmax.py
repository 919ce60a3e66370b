"""``min.f32`` and ``max.f32`` of the PTX ISA on arrays."""

from __future__ import annotations

import numpy as np

from simkit.numerics.arrays import CANONICAL_NAN, Float32Array, Float32Like, as_float32


def fmin_ptx(a: Float32Like, b: Float32Like) -> Float32Array:
    """Element-wise minimum of float32 operands, which broadcast, as ``min.f32`` gives it.

    A NaN loses against a number; two NaN give 0x7FFFFFFF; -0 counts as less than +0.
    """
    a, b = as_float32(a, "a"), as_float32(b, "b")
    with np.errstate(invalid="ignore"):  # signalling NaNs
        result = np.asarray(np.fmin(a, b))
    if np.count_nonzero(result) != result.size:
        _settle_zeros(a, b, result, np.bitwise_or)
    _settle_nans(a, b, result)
    return result


def fmax_ptx(a: Float32Like, b: Float32Like) -> Float32Array:
    """Element-wise maximum of float32 operands, which broadcast, as ``max.f32`` gives it.

    A NaN loses against a number; two NaN give 0x7FFFFFFF; +0 counts as greater than -0.
    """
    a, b = as_float32(a, "a"), as_float32(b, "b")
    with np.errstate(invalid="ignore"):  # signalling NaNs
        result = np.asarray(np.fmax(a, b))
    if np.count_nonzero(result) != result.size:
        _settle_zeros(a, b, result, np.bitwise_and)
    _settle_nans(a, b, result)
    return result


def _settle_zeros(a: Float32Array, b: Float32Array, result: Float32Array, join: np.ufunc) -> None:
    # Equal operands have equal bits unless they are zeros, whose signs are joined here.
    joined = np.asarray(join(a.view(np.uint32), b.view(np.uint32))).view(np.float32)
    np.copyto(result, joined, where=np.equal(a, b))


def _settle_nans(a: Float32Array, b: Float32Array, result: Float32Array) -> None:
    squares = np.vdot(result, result)
    if squares != squares:
        # A signalling NaN may have won against a number: NumPy's loops differ there.
        number = np.where(np.isnan(a), b, a)
        np.copyto(result, number, where=np.isnan(result))
        np.copyto(result, CANONICAL_NAN, where=np.isnan(result))
