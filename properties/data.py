"""Values to put into tensors: ordinary ones, and those that break kernels.  Each is drawn by name
and seed.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from gpu.kernels.checks import scale_to_base_2, softmax_scale

Array = np.ndarray[Any, Any]

BF16 = np.dtype(ml_dtypes.bfloat16)

KINDS = ("normal", "large", "ties", "zeros", "subnormal", "mixed", "minus_inf", "nan", "underflow")
"""normal: N(0, 1).  large: scores of hundreds, so that softmax is one-hot and the running maximum
jumps.  ties: whole numbers, so that maxima repeat.  zeros: +0 and -0 among a few ones.  subnormal:
below the smallest normal bf16.  mixed: magnitudes from 2^-40 to 2^8.  minus_inf: some queries whose
every score is -inf.  nan: some queries with a NaN.  underflow: scores that are 0, without
values, or lie exactly 126 below in base-2 units, where the exponential ends."""

# The one bfloat16 score that, minus itself in base-2 units, is -126: the product of the fused
# multiply-add is not rounded, that of the maximum is.
_WITH_RESIDUE = -3439329280.0


def values(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """A bfloat16 tensor of one kind of values."""
    normal = rng.standard_normal(shape)
    match kind:
        case "normal" | "minus_inf" | "nan" | "underflow":
            found = normal
        case "large":
            found = normal * 12.0
        case "residue":
            found = np.zeros(shape)
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
    if kind == "underflow":
        q[...], k[...] = 0, 0
        q[..., :3] = 1
        # Key by key, or for whole tiles, so that splits have no other.
        is_low = rng.random(k.shape[:-1]) < 0.5
        is_low |= np.repeat(rng.random((*k.shape[:1], -(-k.shape[1] // 64), *k.shape[2:-1])) < 0.3,
                            64, axis=1)[:, : k.shape[1]]  # fmt: skip
        is_low[:, :64] = True  # the first maximum is to be outdone
        k[..., :3] = np.where(is_low[..., None], _in_three(_lowest_score(k.shape[-1])), 0)
        # What is not low weighs all, and is nothing: the output is what is low.
        v[~is_low] = 0
    if kind == "residue":
        # Not drawn (KINDS): a corner of kernels that round scores to bfloat16.
        q[..., :3] = 8
        k[..., :3] = _in_three(np.float32(_WITH_RESIDUE / 8 / softmax_scale(None, k.shape[-1])))
        v[...] = rng.standard_normal(v.shape)
    if kind == "nan":
        q[..., 1] = np.where(rng.random(q.shape[:-1]) < 0.35, np.nan, q[..., 1].astype(np.float64))
    return q, k, v


def _lowest_score(d: int) -> np.float32:
    """A score that the scale of heads of ``d`` values turns into -126 to the last bit."""
    scale = scale_to_base_2(softmax_scale(None, d))
    near = np.float32(-126 / np.float64(scale)).view(np.uint32)
    scores = np.arange(near - 64, near + 64, dtype=np.uint32).view(np.float32)
    exact = scores[(scores.astype(np.float64) * scale).astype(np.float32) == -126]
    if not len(exact):
        raise ValueError(f"no float32 score times {scale} is -126")
    return np.float32(exact[0])


def _in_three(x: np.float32) -> Array:
    """A float32 number as the sum of three bfloat16 ones."""
    parts = []
    left = np.float64(x)
    for _ in range(3):
        # Truncated: what is left never has more bits than it had.
        part = np.float32(left).view(np.uint32) & np.uint32(0xFFFF0000)
        parts.append(part.view(np.float32))
        left -= np.float64(parts[-1])
    return np.array(parts, np.float32).astype(BF16)
