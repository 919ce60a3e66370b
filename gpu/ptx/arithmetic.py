"""float32 arithmetic of a launch: as the GPU rounds it, or as NumPy does if no bits are promised.

Functions take ``(*operands, out=None)``, ``out`` also by position; it may be one of the operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from simkit.numerics import minmax
from simkit.numerics.arrays import CANONICAL_NAN
from simkit.numerics.fma import fma

Array = np.ndarray
Operation = Callable[..., Array]


@dataclass(frozen=True)
class Arithmetic:
    """Round-to-nearest operations that are more than a ufunc on a GPU."""

    add: Operation
    sub: Operation
    mul: Operation
    fma: Operation
    min: Operation
    max: Operation


def canonical(function: Callable[..., Any]) -> Operation:
    """A float32 operation whose NaNs are the GPU's: 0x7FFFFFFF, whatever the CPU makes."""

    def operation(*operands: Array) -> Array:
        result = np.asarray(function(*operands))
        # The minimum is NaN if anything is: one pass, which as a rule finds nothing to do.
        smallest = result.min()
        if smallest != smallest:
            np.copyto(result, CANONICAL_NAN, where=np.isnan(result))
        return result

    return operation


def _into(function: Callable[[Array, Array], Array]) -> Operation:
    def operation(a: Array, b: Array, out: Array | None = None) -> Array:
        result = function(a, b)
        if out is not None:
            out[...] = result
        return result

    return operation


_add, _multiply = np.add, np.multiply


def _multiply_and_add(a: Array, b: Array, c: Array, out: Array | None = None) -> Array:
    """``a * b + c`` with two roundings."""
    # Through ``out``, which is in the cache, unless c is still needed there.
    product = _multiply(a, b) if out is c else _multiply(a, b, out)
    return _add(product, c, out)


EXACT = Arithmetic(
    add=canonical(np.add),
    sub=canonical(np.subtract),
    mul=canonical(np.multiply),
    fma=fma,
    min=_into(minmax.fmin_ptx),
    max=_into(minmax.fmax_ptx),
)
FAST = Arithmetic(np.add, np.subtract, np.multiply, _multiply_and_add, np.fmin, np.fmax)
"""For looking around: bits of NaNs, signs of zeros and the rounding of fma are the CPU's."""
