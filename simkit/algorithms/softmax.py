"""Softmax as the kernels compute it: the functions of gpu/kernels/include/softmax.cuh on arrays.

Every result is float32, rounded to nearest even operation by operation; NaNs are canonical.
"""

from __future__ import annotations

import numpy as np

from simkit.numerics.arrays import Float32Array
from simkit.numerics.exp2 import LN2, exp2, log2
from simkit.numerics.fma import fma
from simkit.numerics.minmax import fmax_ptx
from simkit.numerics.scalar import add, divide, multiply

_ZERO, _ONE, _MINUS_INFINITY = np.float32(0), np.float32(1), np.float32(-np.inf)


def row_maximum(x: Float32Array) -> Float32Array:
    """Maximum along the last axis, which is not empty; a NaN loses against a number.

    The order does not matter: ``max.f32`` is associative and commutative in every bit.
    """
    while (size := x.shape[-1]) > 1:
        half = (size + 1) // 2
        x = fmax_ptx(x[..., :half], x[..., size - half :])
    return np.asarray(x[..., 0])


def butterfly_sum(x: Float32Array) -> Float32Array:
    """Sum along the last axis, a power of two long, by exchanges at halving distances.

    Every lane of the butterfly ends with the same bits, as float addition commutes.
    """
    while (size := x.shape[-1]) > 1:
        x = add(x[..., : size // 2], x[..., size // 2 :])
    return np.asarray(x[..., 0])


def softmax_shift(maximum: Float32Array) -> Float32Array:
    """What is subtracted in the exponent: the maximum, but 0 for rows that have seen no key."""
    return np.where(np.isneginf(maximum), _ZERO, maximum)


def softmax_weight(
    score: Float32Array, scale: np.float32, scaled_shift: Float32Array
) -> Float32Array:
    """2^(score * scale - scaled_shift) with one rounding before the exponential."""
    return exp2(fma(score, scale, -scaled_shift))


def softmax_output(output: Float32Array, total: Float32Array) -> Float32Array:
    """output / total; 0 where total, the sum of a row, is 0; a NaN stays one."""
    any_key = total != 0
    return divide(np.where(any_key, output, _ZERO), np.where(any_key, total, _ONE))


def softmax_lse(scaled_maximum: Float32Array, total: Float32Array) -> Float32Array:
    """Natural logarithm of a sum of exponentials; -inf where total is 0, NaN where it is NaN.

    ``scaled_maximum``: the maximum in base-2 units, to which ``total`` is relative.
    """
    lse = multiply(add(scaled_maximum, log2(total)), LN2)
    return np.where(total > 0, lse, np.where(total == 0, _MINUS_INFINITY, total))
