"""Other libraries' log-sum-exp conventions as named converters.

simkit's LSE is a natural logarithm, -inf for rows without keys. Elsewhere it may be one to base 2,
or +inf without keys, and the same library may mean different things in its final and its partial
results. Nothing about a number says which: hence one table by name, and no factor anywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from simkit.errors import SimkitError
from simkit.numerics.arrays import Float32Array, Float64Array, as_float32
from simkit.numerics.bounds import LOG_2, SUBNORMAL_STEP, U32
from simkit.numerics.exp2 import LN2, LOG2E
from simkit.numerics.scalar import multiply

Base = Literal["e", "2"]


@dataclass(frozen=True)
class LseConvention:
    """What an LSE array holds: ``base`` of the logarithm, ``empty`` for a row without keys (+inf or
    -inf; the other infinity does not occur), ``source`` of the knowledge.
    """

    base: Base
    empty: float
    source: str


CONVENTIONS: Mapping[str, LseConvention] = MappingProxyType(
    {
        "simkit": LseConvention("e", -np.inf, "every public edge of simkit"),
        "flash_attention_2": LseConvention("e", np.inf, "softmax_lse of the forward pass"),
        "flash_attention_2_split": LseConvention("e", -np.inf, "partial LSE of its split-KV"),
        "flash_attention_3": LseConvention(
            "e", -np.inf, "softmax_lse; an empty K of a whole call is filled with +inf instead"
        ),
        "flashinfer": LseConvention("2", -np.inf, "LSE of decode, prefill and cascade"),
        "flashinfer_mla_base_e": LseConvention("e", -np.inf, "MLA with return_lse_base_on_e"),
        "flashmla_decode": LseConvention("e", np.inf, "flash_mla_with_kvcache, dense and sparse"),
        "flashmla_split": LseConvention("2", -np.inf, "lse_accum of its split-KV decoding"),
        "flashmla_prefill": LseConvention("e", np.inf, "flash_mla_sparse_fwd since 2026"),
        "flashmla_prefill_2025": LseConvention("2", -np.inf, "flash_mla_sparse_fwd before 2026"),
    }
)
"""By name: the library, and which of its results if they differ. FlashAttention's splits that are
empty give -inf, their combined result +inf (flash-attention issue 978). FlashMLA became a natural
logarithm in January 2026; FlashInfer's backends differ (flashinfer issue 4485)."""

_TO_NATURAL: dict[Base, np.float32] = {"e": np.float32(1), "2": LN2}
_FROM_NATURAL: dict[Base, np.float32] = {"e": np.float32(1), "2": LOG2E}


def convention(name: str) -> LseConvention:
    """The convention of that name; SimkitError that lists the names otherwise."""
    if name not in CONVENTIONS:
        raise SimkitError(f"no LSE convention {name!r}; there are {', '.join(CONVENTIONS)}")
    return CONVENTIONS[name]


def to_natural(lse: Float32Array, name: str) -> Float32Array:
    """``lse`` float32, any shape, of the convention ``name`` as simkit's; a new array.

    Base 2 is multiplied by ln 2 in float32, a natural logarithm stays as it is. Rows without keys
    become -inf, NaN stays NaN. Errors: `SimkitError` for a name that there is not, and for an
    infinity that the convention does not have: the array is of another one. `DtypeError`.
    """
    chosen = convention(name)
    lse = as_float32(lse, "lse")
    _check_infinity(lse, -chosen.empty, name)
    scaled = multiply(lse, _TO_NATURAL[chosen.base])
    return np.where(np.isinf(lse), np.float32(-np.inf), scaled)


def from_natural(lse: Float32Array, name: str) -> Float32Array:
    """simkit's ``lse`` float32, any shape, in the convention ``name``; a new array.

    Base 2 is multiplied by log2 e in float32; -inf becomes what rows without keys are. Errors: as
    for `to_natural`, and `SimkitError` for a number that has no base-2 logarithm in float32.
    """
    chosen = convention(name)
    lse = as_float32(lse, "lse")
    _check_infinity(lse, np.inf, "simkit")
    scaled = multiply(lse, _FROM_NATURAL[chosen.base])
    overflown = np.isinf(scaled) & np.isfinite(lse)
    if overflown.any():
        raise SimkitError(f"{_first(lse, overflown)} has no base-{chosen.base} number in float32")
    return np.where(np.isneginf(lse), np.float32(chosen.empty), scaled)


def conversion_error(lse: Float64Array, name: str) -> Float64Array:
    """Error of one conversion to or from base 2 against exact arithmetic, relative to simkit's
    ``lse``: the rounded constant, and the rounding of the product. 0 for natural logarithms.

    In units of the natural logarithm, whichever way the conversion goes.
    """
    if convention(name).base == "e":
        return np.zeros(np.shape(lse))
    constant = max(abs(float(LN2) / LOG_2 - 1.0), abs(float(LOG2E) * LOG_2 - 1.0))
    relative = (1 + constant) * (1 + U32) - 1
    size = np.where(np.isfinite(lse), np.abs(lse), 0.0)
    return np.asarray(relative * size + SUBNORMAL_STEP)


def round_trip_error(lse: Float64Array, name: str) -> Float64Array:
    """How far `to_natural` of `from_natural` is from ``lse`` at most: two roundings, and how far
    the product of the two constants is from 1. 0 for natural logarithms.
    """
    if convention(name).base == "e":
        return np.zeros(np.shape(lse))
    constants = float(LN2) * float(LOG2E)
    relative = abs(constants - 1.0) + constants * ((1 + U32) ** 2 - 1)
    size = np.where(np.isfinite(lse), np.abs(lse), 0.0)
    return np.asarray(relative * size + 2 * SUBNORMAL_STEP)


def _check_infinity(lse: Float32Array, foreign: float, name: str) -> None:
    found = lse == foreign
    if found.any():
        others = [other for other, row in CONVENTIONS.items() if row.empty == foreign]
        raise SimkitError(
            f"{_first(lse, found)}, which does not occur in the LSE convention {name!r}: rows "
            f"without keys are {CONVENTIONS[name].empty} there; they are {foreign} in "
            f"{', '.join(others)}"
        )


def _first(lse: Float32Array, where: np.ndarray) -> str:
    place = tuple(int(index) for index in np.argwhere(where)[0])
    return f"lse[{', '.join(map(str, place))}] = {lse[place]:.9g}"
