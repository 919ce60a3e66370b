"""The online-softmax state (m, l, o): running maximum, running sum, un-normalised output.

Source: Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135; the merge of
split-KV partial results is the same law.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from simkit.errors import DtypeError, ShapeError
from simkit.numerics.exp2 import LN2, exp2, log2
from simkit.numerics.fma import fma
from simkit.numerics.minmax import fmax_ptx

FloatArray = NDArray[Any]


@dataclass(frozen=True)
class _Arithmetic:
    """The operations of one dtype."""

    maximum: Callable[[FloatArray, FloatArray], FloatArray]
    exp2: Callable[[FloatArray], FloatArray]
    log2: Callable[[FloatArray], FloatArray]
    fma: Callable[[FloatArray, FloatArray, FloatArray], FloatArray]
    ln2: np.floating[Any]


_ARITHMETIC = {
    np.dtype(np.float64): _Arithmetic(
        np.maximum, np.exp2, np.log2, lambda a, b, c: a * b + c, np.float64(np.log(2.0))
    ),
    np.dtype(np.float32): _Arithmetic(fmax_ptx, exp2, log2, fma, LN2),
}


@dataclass(frozen=True)
class OnlineSoftmax:
    """Softmax-weighted sum of values over the keys seen so far, for independent rows.

    ``m`` [rows]: maximum of the scores in base-2 units (score * scale * log2 e), -inf at first.
    ``l`` [rows]: sum of 2^(score - m). ``o`` [rows, d]: sum of 2^(score - m) * v, not divided by
    ``l``. All of one dtype: float64 is reference arithmetic, float32 is the combine kernel's,
    operation by operation. Errors: `ShapeError`, `DtypeError`.
    """

    m: FloatArray
    l: FloatArray  # noqa: E741  (the papers' name)
    o: FloatArray

    def __post_init__(self) -> None:
        if self.m.shape != self.l.shape or self.o.shape[:-1] != self.m.shape or self.m.ndim != 1:
            raise ShapeError(
                f"m and l must be [rows] and o [rows, d], "
                f"got {self.m.shape}, {self.l.shape}, {self.o.shape}"
            )
        if self.m.dtype not in _ARITHMETIC or not self.m.dtype == self.l.dtype == self.o.dtype:
            raise DtypeError(
                f"m, l and o must be all float32 or all float64, "
                f"got {self.m.dtype}, {self.l.dtype}, {self.o.dtype}"
            )

    @classmethod
    def empty(cls, rows: int, d: int, dtype: DTypeLike = np.float64) -> OnlineSoftmax:
        """The state before any key: m = -inf, l = 0, o = 0; the neutral element of `merge`."""
        return cls(np.full(rows, -np.inf, dtype), np.zeros(rows, dtype), np.zeros((rows, d), dtype))

    def update(self, scores: FloatArray, v: FloatArray) -> OnlineSoftmax:
        """The state after more keys: ``scores`` [rows, keys] in base-2 units, ``v`` [keys, d].

        -inf masks a key. Only for float64 states: kernels each have an order of their own.
        """
        if self.m.dtype != np.float64:
            raise DtypeError(f"update is reference arithmetic: float64 states, got {self.m.dtype}")
        if scores.shape != (self.m.size, len(v)) or v.shape[1:] != self.o.shape[1:]:
            raise ShapeError(
                f"scores must be [rows, keys] and v [keys, d] for o {self.o.shape}, "
                f"got {scores.shape}, {v.shape}"
            )
        scores, v = scores.astype(np.float64), v.astype(np.float64)
        with np.errstate(all="ignore"):
            m = np.maximum(self.m, scores.max(axis=1, initial=-np.inf))
            ms = _finite_shift(m)
            weights = np.exp2(scores - ms[:, None])
            decay = np.exp2(self.m - ms)
            return OnlineSoftmax(
                m,
                self.l * decay + weights.sum(axis=1),
                self.o * decay[:, None] + weights @ v,
            )

    def merge(self, other: OnlineSoftmax) -> OnlineSoftmax:
        """The state of both sets of keys together, by row.

        A side with l = 0 is ignored altogether, whatever its m and o hold (a kernel does not
        write the output of an empty split). Otherwise::

            M = max(m1, m2); Ms = (M == -inf) ? 0 : M; a = exp2(m1 - Ms); b = exp2(m2 - Ms)
            l = fma(l1, a, l2 * b); o = fma(o1, a, o2 * b)
        """
        if self.o.shape != other.o.shape:
            raise ShapeError(f"cannot merge o {self.o.shape} with o {other.o.shape}")
        if self.o.dtype != other.o.dtype:
            raise DtypeError(f"cannot merge {self.o.dtype} with {other.o.dtype}")
        op = _ARITHMETIC[self.o.dtype]
        with np.errstate(all="ignore"):
            m = op.maximum(self.m, other.m)
            ms = _finite_shift(m)
            a, b = op.exp2(self.m - ms), op.exp2(other.m - ms)
            total = op.fma(self.l, a, other.l * b)
            o = op.fma(self.o, a[:, None], other.o * b[:, None])
        only_self, only_other = other.l == 0, (self.l == 0) & (other.l != 0)
        for merged, mine, theirs in (
            (m, self.m, other.m),
            (total, self.l, other.l),
            (o, self.o, other.o),
        ):
            merged[only_self] = mine[only_self]
            merged[only_other] = theirs[only_other]
        return OnlineSoftmax(m, total, o)

    def output(self) -> FloatArray:
        """Normalised output o / l [rows, d]; rows that have seen no key are 0."""
        with np.errstate(all="ignore"):
            output = self.o / self.l[:, None]
        output[self.l == 0] = 0
        return output

    def lse(self) -> FloatArray:
        """Natural logarithm of the sum of exponentials [rows]: (m + log2 l) * ln 2; -inf if l = 0.

        Source of the convention: FlashAttention's LSE.
        """
        op = _ARITHMETIC[self.l.dtype]
        with np.errstate(all="ignore"):
            lse = np.asarray((self.m + op.log2(self.l)) * op.ln2)
        lse[self.l == 0] = -np.inf
        return lse


def _finite_shift(m: FloatArray) -> FloatArray:
    return np.where(np.isneginf(m), m.dtype.type(0), m)
