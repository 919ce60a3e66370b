"""How results are compared: bit for bit, or by an error that is held against a bound; failures say
where and how far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from properties.law import LawViolation

Array = np.ndarray[Any, Any]

_BF16 = np.dtype(ml_dtypes.bfloat16)


def bits_equal(name: str, model: Array, kernel: Array, where: Array | None = None) -> None:
    """Both arrays have the same bits; any NaN equals any NaN.  ``where`` limits the comparison.

    LawViolation with the number of differences and the first one.
    """
    if model.shape != kernel.shape or model.dtype != kernel.dtype:
        raise LawViolation(
            f"{name}: the model gives {model.dtype} {model.shape}, "
            f"the kernel {kernel.dtype} {kernel.shape}"
        )
    bits = np.dtype(f"u{model.dtype.itemsize}")
    different = np.ascontiguousarray(model).view(bits) != np.ascontiguousarray(kernel).view(bits)
    if model.dtype.kind == "f" or model.dtype == _BF16:
        different &= ~(np.isnan(model) & np.isnan(kernel))
    if where is not None:
        different &= np.broadcast_to(where, different.shape)
    count = int(np.count_nonzero(different))
    if count:
        place = tuple(int(i) for i in np.argwhere(different)[0])
        raise LawViolation(
            f"{name}: {count} of {different.size} elements differ from the model;"
            f" first at {list(place)}:"
            f" kernel {_show(kernel[place])}, model {_show(model[place])}"
        )


@dataclass(frozen=True, eq=False)
class Expected:
    """What an output should be: ``value`` in float64, ``bound`` on the absolute error (it
    broadcasts) with the ``reason`` for it; ``where`` limits the comparison.
    """

    value: Array
    bound: Array
    reason: str
    where: Array | None = None


def within(
    name: str,
    value: Array,
    reference: Array,
    bound: Array | float,
    reason: str,
    where: Array | None = None,
) -> None:
    """|value - reference| <= bound everywhere; infinities and NaNs in the same places.

    LawViolation with the worst element; ``reason`` says where the bound comes from; ``where``
    limits the comparison.
    """
    value, reference = value.astype(np.float64), np.asarray(reference, np.float64)
    if where is not None:
        value = np.where(where, value, 0.0)
        reference = np.where(where, reference, 0.0)
    if value.shape != reference.shape:
        raise LawViolation(f"{name}: shape {value.shape}, the reference has {reference.shape}")
    special = ~np.isfinite(reference)
    same = np.where(np.isnan(reference), np.isnan(value), value == reference)
    if not (same | ~special).all():
        place = tuple(int(i) for i in np.argwhere(special & ~same)[0])
        raise LawViolation(
            f"{name} at {list(place)}: {value[place]}, the reference is {reference[place]}"
        )
    with np.errstate(invalid="ignore"):
        error = np.where(special, 0.0, np.abs(value - reference))
    allowed_error = np.broadcast_to(bound, error.shape)
    if np.isnan(allowed_error).any():
        raise LawViolation(f"{name}: the bound is NaN in places ({reason})")
    excess = np.where(np.isnan(error), np.inf, error - allowed_error)
    if error.size and float(excess.max()) > 0:
        place = tuple(int(i) for i in np.unravel_index(int(excess.argmax()), excess.shape))
        allowed = float(allowed_error[place])
        raise LawViolation(
            f"{name} at {list(place)}: {value[place]:.9g}, the reference is {reference[place]:.9g};"
            f" error {error[place]:.3g} exceeds {allowed:.3g} ({reason})"
        )


def _show(value: Any) -> str:
    raw = np.asarray(value)
    bits = int(raw.reshape(1).view(f"u{raw.dtype.itemsize}")[0])
    return f"{raw} (0x{bits:0{2 * raw.dtype.itemsize}x})"


def tightness(value: Array, expected: Expected) -> float:
    """The largest error over its bound: 1 is a bound that is reached, 0 no error at all."""
    reference, found = np.asarray(expected.value, np.float64), value.astype(np.float64)
    compared = np.isfinite(reference)
    if expected.where is not None:
        compared &= np.broadcast_to(expected.where, compared.shape)
    error = np.abs(found - reference, where=compared, out=np.zeros(reference.shape))
    bound = np.where(error > 0, np.broadcast_to(expected.bound, error.shape), 1.0)
    # An error beyond a bound of 0 is as wrong as can be.
    ratio = np.divide(error, bound, where=bound > 0, out=np.full(error.shape, np.inf))
    return float(ratio.max(initial=0.0))
