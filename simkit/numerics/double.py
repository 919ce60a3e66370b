"""float64 arithmetic in the directed rounding modes: "rz" toward zero, "rm" down, "rp" up.

"rn" is NumPy's own.  The nearest result comes from float64, and where the exact one lies from
rational arithmetic, element by element: slow, and right for every input.  Source: PTX ISA,
"Floating Point Instructions".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from simkit.numerics.arrays import Float64Array
from simkit.numerics.scalar import fma_f64, redirect

Exact = Callable[..., Fraction]


def add(a: Any, b: Any, mode: str) -> Float64Array:
    """``a + b``; an exact zero sum of operands that are not both +0 is -0 if ``mode`` is "rm"."""
    a, b = _operands(a, b)
    negative = np.signbit(a) | np.signbit(b)
    return _directed(np.add, lambda x, y, r: x + y - r, mode, a, b, zero_is_negative=negative)


def subtract(a: Any, b: Any, mode: str) -> Float64Array:
    """``a - b``."""
    return add(a, np.negative(np.asarray(b, np.float64)), mode)


def multiply(a: Any, b: Any, mode: str) -> Float64Array:
    """``a * b``."""
    return _directed(np.multiply, lambda x, y, r: x * y - r, mode, *_operands(a, b))


def fma(a: Any, b: Any, c: Any, mode: str) -> Float64Array:
    """``a * b + c``, rounded once."""
    a, b, c = _operands(a, b, c)
    negative = (np.signbit(a) != np.signbit(b)) | np.signbit(c)
    return _directed(
        fma_f64, lambda x, y, z, r: x * y + z - r, mode, a, b, c, zero_is_negative=negative
    )


def divide(a: Any, b: Any, mode: str) -> Float64Array:
    """``a / b``."""

    def rest(x: Fraction, y: Fraction, r: Fraction) -> Fraction:
        return (x - r * y) * (1 if y > 0 else -1)

    a, b = _operands(a, b)
    return _directed(np.true_divide, rest, mode, a, b, usable=b != 0)


def sqrt(a: Any, mode: str) -> Float64Array:
    """The square root; -0 gives -0 and a negative number NaN."""
    (a,) = _operands(a)
    return _directed(np.sqrt, lambda x, r: x - r * r, mode, a, usable=a >= 0)


def _operands(*operands: Any) -> list[Float64Array]:
    arrays = [np.asarray(x, np.float64) for x in operands]
    return [np.asarray(x) for x in np.broadcast_arrays(*arrays)]


def _directed(
    operation: Callable[..., Any],
    error: Exact,
    mode: str,
    *operands: Float64Array,
    usable: Any = True,
    zero_is_negative: Any = False,
) -> Float64Array:
    """``operation`` rounded in ``mode``.

    ``error`` has the sign of exact minus nearest result, for ``usable`` operands;
    ``zero_is_negative`` where a sum that is exactly zero is -0 in the mode "rm".
    """
    with np.errstate(all="ignore"):
        nearest = np.array(operation(*operands))
    if mode == "rn":
        return nearest
    finite = np.asarray(usable) & ~np.isnan(nearest)
    for x in operands:
        finite = finite & np.isfinite(x)
    signs = np.zeros(nearest.shape)
    for index in map(tuple, np.argwhere(finite)):
        result = float(nearest[index])
        if math.isinf(result):
            signs[index] = -math.copysign(1, result)  # it overflowed: the exact one is finite
            continue
        exact = error(*(Fraction(float(x[index])) for x in operands), Fraction(result))
        signs[index] = (exact > 0) - (exact < 0)
    if mode == "rm":
        is_zero = finite & (nearest == 0) & (signs == 0) & zero_is_negative
        np.copyto(nearest, -0.0, where=is_zero)
    redirect(nearest, signs, mode)
    return nearest
