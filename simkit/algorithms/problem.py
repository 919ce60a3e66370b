"""The attention problem that the algorithms solve, and its solution by the formula."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from simkit.algorithms.tiles import tile_count, tiles
from simkit.errors import DtypeError, ShapeError
from simkit.machine.machine import Machine
from simkit.machine.memory import Tensor, unbacked
from simkit.numerics.arrays import Float64Array
from simkit.numerics.exp2 import LOG2E

Array = NDArray[Any]

BF16 = np.dtype(ml_dtypes.bfloat16)
KERNEL_HEAD_DIMS = (64, 128)
"""Head dimensions that the kernels are built for, and device arithmetic is defined for."""


@dataclass(frozen=True, eq=False)
class AttentionProblem:
    """softmax(scale * q k^T) v for every head of every sequence of a batch.

    ``q`` [batch, q_len, heads, d]; ``k``, ``v`` [batch, kv_len, kv_heads, d]: bfloat16. heads is a
    multiple of kv_heads: neighbouring heads share K and V (GQA). ``causal``: query i sees keys
    j <= i + kv_len - q_len (aligned bottom right). ``scale``: positive, d^-1/2 by default.

    Solutions: o like q and the natural-logarithm lse [batch, heads, q_len]; queries without keys
    have o = 0 and lse = -inf. Only kv_len may be 0. Errors: `DtypeError`, `ShapeError`.
    """

    q: Array
    k: Array
    v: Array
    causal: bool = False
    scale: float = None  # type: ignore[assignment]  # set below, when d is known

    def __post_init__(self) -> None:
        for name, tensor in (("q", self.q), ("k", self.k), ("v", self.v)):
            if tensor.dtype != BF16:
                raise DtypeError(f"{name} must be {BF16}, got {tensor.dtype}")
            if tensor.ndim != 4:
                raise ShapeError(f"{name} must be [batch, length, heads, d], got {tensor.shape}")
        shapes = f"q {self.q.shape}, k {self.k.shape}, v {self.v.shape}"
        if self.k.shape != self.v.shape or self.k.shape[::3] != self.q.shape[::3]:
            raise ShapeError(f"batch, d and all axes of k and v must agree, got {shapes}")
        if 0 in self.q.shape or not self.kv_heads:
            raise ShapeError(f"only kv_len may be 0, got {shapes}")
        if self.heads % self.kv_heads:
            raise ShapeError(
                f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )
        if self.scale is None:
            object.__setattr__(self, "scale", self.d**-0.5)
        with np.errstate(all="ignore"):
            representable = self.scale_float32 > 0 and np.isfinite(self.scale_log2)
        if not representable:
            raise ShapeError(
                f"scale and scale * log2(e) must be positive, finite float32, got {self.scale}"
            )

    @classmethod
    def random(
        cls,
        rng: np.random.Generator,
        *,
        batch: int = 1,
        q_len: int = 1,
        kv_len: int,
        heads: int = 1,
        kv_heads: int | None = None,
        d: int = 64,
        causal: bool = False,
        scale: float | None = None,
    ) -> AttentionProblem:
        """Standard normal q, k and v, rounded to bfloat16; ``kv_heads`` is heads by default."""
        kv_shape = (batch, kv_len, kv_heads or heads, d)
        q, k, v = (
            rng.standard_normal(shape, np.float32).astype(BF16)
            for shape in ((batch, q_len, heads, d), kv_shape, kv_shape)
        )
        return cls(q, k, v, causal, scale)  # type: ignore[arg-type]

    @classmethod
    def sized(
        cls,
        *,
        batch: int = 1,
        q_len: int = 1,
        kv_len: int,
        heads: int = 1,
        kv_heads: int | None = None,
        d: int = 64,
        causal: bool = False,
    ) -> AttentionProblem:
        """A problem of any size that takes no memory, for counting bytes; its values are 0."""
        k = unbacked((batch, kv_len, kv_heads or heads, d), BF16)
        return cls(unbacked((batch, q_len, heads, d), BF16), k, k, causal)

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def q_len(self) -> int:
        return self.q.shape[1]

    @property
    def heads(self) -> int:
        return self.q.shape[2]

    @property
    def d(self) -> int:
        return self.q.shape[3]

    @property
    def kv_len(self) -> int:
        return self.k.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        return self.heads // self.kv_heads

    @property
    def vector(self) -> int:
        """Bytes per lane of the widest access that rows of this head dimension allow."""
        return math.gcd(16, self.d * BF16.itemsize)

    @property
    def scale_float32(self) -> np.float32:
        """The scale as kernels take it."""
        return np.float32(self.scale)

    @property
    def scale_log2(self) -> np.float32:
        """From a score to a base-2 exponent: scale * log2(e), one float32 product."""
        return np.float32(self.scale_float32 * LOG2E)

    def visible_keys(self, rows: slice) -> int:
        """How many leading keys at least one of the rows sees."""
        if not self.causal:
            return self.kv_len
        return min(max(rows.stop + self.kv_len - self.q_len, 0), self.kv_len)

    def visible_tiles(self, rows: slice, size: int) -> Iterator[slice]:
        """Tiles of keys that at least one of the rows sees a part of."""
        seen = tile_count(self.visible_keys(rows), size) * size
        return tiles(min(seen, self.kv_len), size)

    def mask(self, rows: slice, keys: slice) -> NDArray[np.bool_]:
        """Which of the keys each of the rows sees, [rows, keys]."""
        row, key = np.ogrid[rows, keys]
        if not self.causal:
            return np.broadcast_to(key < self.kv_len, (row.size, key.size))
        return np.asarray(key <= row + self.kv_len - self.q_len)

    def place_inputs(self, machine: Machine) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors "q", "k" and "v" in HBM, contiguous as the kernels take them."""
        q, k, v = (np.ascontiguousarray(x) for x in (self.q, self.k, self.v))
        return machine.tensor("q", q), machine.tensor("k", k), machine.tensor("v", v)

    def check_device_head_dim(self) -> None:
        """Raises ShapeError for a head dimension without a kernel."""
        if self.d not in KERNEL_HEAD_DIMS:
            raise ShapeError(f"d is {self.d}; device arithmetic is defined for {KERNEL_HEAD_DIMS}")


def visible_pairs(problem: AttentionProblem) -> int:
    """(query, key) pairs of one head that the mask leaves."""
    if not problem.causal:
        return problem.q_len * problem.kv_len
    # Row i sees i + 1 + kv_len - q_len keys, none if that is negative.
    last = problem.kv_len
    first = max(problem.kv_len - problem.q_len + 1, 1)
    return (first + last) * (last - first + 1) // 2


def attention_flops(problem: AttentionProblem) -> int:
    """FLOP of the two matrix products: 2 d each for every visible pair and head.

    4 N^2 d for a head of N queries and keys, about half of it if causal. Source of the
    convention: FlashAttention-2, arXiv 2307.08691, section 4.1.
    """
    return 4 * problem.d * visible_pairs(problem) * problem.batch * problem.heads


def attention_reference(problem: AttentionProblem) -> tuple[Float64Array, Float64Array]:
    """The solution by the dense formula in float64: o [batch, q_len, heads, d] and natural lse
    [batch, heads, q_len].
    """
    q = problem.q.astype(np.float64)
    k, v = (np.repeat(x.astype(np.float64), problem.group, axis=2) for x in (problem.k, problem.v))
    scores = np.einsum("bihd,bjhd->bhij", q, k) * problem.scale
    hidden_by = np.tri(problem.q_len, problem.kv_len, problem.kv_len - problem.q_len) == 0
    if problem.causal:
        scores[:, :, hidden_by] = -np.inf
    with np.errstate(divide="ignore", invalid="ignore"):
        maximum = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(np.isneginf(maximum), 0, maximum))
        total = weights.sum(axis=-1, keepdims=True)
        lse = np.squeeze(maximum + np.log(total), axis=-1)
        probabilities = np.where(total == 0, 0, weights / total)
    return np.einsum("bhij,bjhd->bihd", probabilities, v), lse
