"""Values to put into tensors: ordinary ones, and those that break kernels.  Each is drawn by name
and seed.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

BF16 = np.dtype(ml_dtypes.bfloat16)

KINDS = ("normal", "large", "ties", "zeros", "subnormal", "mixed", "minus_inf", "nan")
"""normal: N(0, 1).  large: scores of hundreds, so that softmax is one-hot and the running maximum
jumps.  ties: whole numbers, so that maxima repeat.  zeros: +0 and -0 among a few ones.  subnormal:
below the smallest normal bf16.  mixed: magnitudes from 2^-40 to 2^8.  minus_inf: some queries whose
every score is -inf.  nan: some queries with a NaN."""


def values(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """A bfloat16 tensor of one kind of values."""
    normal = rng.standard_normal(shape)
    match kind:
        case "normal" | "minus_inf" | "nan":
            found = normal
        case "large":
            found = normal * 12.0
        case "ties":
            found = rng.integers(-1, 2, shape).astype(np.float64)
        case "zeros":
            found = np.where(rng.random(shape) < 0.1, 1.0, np.copysign(0.0, normal))
        case "subnormal":
            found = normal * 2.0**-130
        case "mixed":
            found = normal * 2.0 ** rng.integers(-40, 9, shape)
        case _:
            raise ValueError(f"unknown kind of values {kind!r}")
    return found.astype(BF16)


def attention_inputs(
    kind: str, seed: int, q_shape: tuple[int, ...], kv_shape: tuple[int, ...]
) -> tuple[Array, Array, Array]:
    """q, k and v.  With "minus_inf", about a third of the queries score -inf with every key: a
    first component of -inf against keys whose first component is positive.
    """
    rng = np.random.default_rng(seed)
    q, k, v = values(kind, rng, q_shape), values(kind, rng, kv_shape), values(kind, rng, kv_shape)
    if kind == "minus_inf":
        k[..., 0] = (np.abs(k[..., 0].astype(np.float64)) + 0.5).astype(BF16)
        q[..., 0] = np.where(
            rng.random(q.shape[:-1]) < 0.35, -np.inf, q[..., 0].astype(np.float64)
        ).astype(BF16)
    if kind == "nan":
        q[..., 1] = np.where(rng.random(q.shape[:-1]) < 0.35, np.nan, q[..., 1].astype(np.float64))
    return q, k, v
