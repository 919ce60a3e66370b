"""Running attention of a tile of queries: the interface, float64 arithmetic, and none at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from simkit.algorithms.heads import (
    Array,
    heads_first,
    stack_mask,
    stack_queries,
    unstack_outputs,
    unstack_rows,
)
from simkit.algorithms.problem import AttentionProblem
from simkit.numerics.arrays import Float64Array
from simkit.numerics.online_softmax import OnlineSoftmax


class AttentionState(Protocol):
    """What a CTA holds on chip: its queries and their attention to the keys seen so far.

    Values are None where there is no arithmetic.
    """

    @classmethod
    def start(cls, problem: AttentionProblem, arch: str, q: Array) -> AttentionState:
        """Before any key: ``q`` [batch, rows, heads, d] on tensor cores of ``arch``."""

    def update(self, k: Array, v: Array, mask: NDArray[np.bool_]) -> AttentionState:
        """After more keys: ``k``, ``v`` [batch, keys, kv_heads, d], ``mask`` [rows, keys]."""

    def output(self) -> Any:
        """Normalised output, [batch, rows, heads, d]."""

    def lse(self) -> Any:
        """Natural logarithm of the sum of exponentials, [batch, heads, rows]."""


@dataclass(frozen=True)
class ReferenceState:
    """float64: an `OnlineSoftmax` for each batch and K/V head, with the group's rows stacked."""

    problem: AttentionProblem
    rows: int
    q: Float64Array  # [batch, kv_heads, group * rows, d], in base-2 score units
    parts: tuple[OnlineSoftmax, ...]

    @classmethod
    def start(cls, problem: AttentionProblem, arch: str, q: Array) -> ReferenceState:
        queries = stack_queries(q.astype(np.float64), problem.kv_heads)
        batch, kv_heads, stacked_rows, d = queries.shape
        empty = OnlineSoftmax.empty(stacked_rows, d)
        scaled = queries * (problem.scale * np.log2(np.e))
        return cls(problem, q.shape[1], scaled, (empty,) * (batch * kv_heads))

    def update(self, k: Array, v: Array, mask: NDArray[np.bool_]) -> ReferenceState:
        keys, values = (heads_first(x.astype(np.float64)) for x in (k, v))
        scores = self.q @ keys.swapaxes(-1, -2)
        scores = np.where(stack_mask(mask, self.problem.group), scores, -np.inf)
        per_head = zip(self.parts, _matrices(scores), _matrices(values), strict=True)
        return replace(self, parts=tuple(part.update(s, x) for part, s, x in per_head))

    def output(self) -> Float64Array:
        outputs = np.reshape([part.output() for part in self.parts], self.q.shape)
        return unstack_outputs(outputs, self.rows)

    def lse(self) -> Float64Array:
        lse = np.reshape([part.lse() for part in self.parts], self.q.shape[:-1])
        return unstack_rows(lse, self.rows)

    def partial(self) -> tuple[Float64Array, Float64Array, Float64Array]:
        """Maximum (base 2) and sum [batch, kv_heads, group * rows], and un-normalised output
        [batch, kv_heads, group * rows, d], for a later merge.
        """
        return (
            np.reshape([part.m for part in self.parts], self.q.shape[:-1]),
            np.reshape([part.l for part in self.parts], self.q.shape[:-1]),
            np.reshape([part.o for part in self.parts], self.q.shape),
        )


@dataclass(frozen=True)
class NoState:
    """No arithmetic: bytes are counted as if there were some."""

    @classmethod
    def start(cls, problem: AttentionProblem, arch: str, q: Array) -> NoState:
        return cls()

    def update(self, k: Array, v: Array, mask: NDArray[np.bool_]) -> NoState:
        return self

    def output(self) -> None:
        return None

    def lse(self) -> None:
        return None

    def partial(self) -> tuple[None, None, None]:
        return None, None, None


def _matrices(stacked: Array) -> Array:
    """[batch, kv_heads, M, N] to [batch * kv_heads, M, N]."""
    return stacked.reshape(-1, *stacked.shape[-2:])
