"""Attention of a batch of requests of any lengths, as an engine has it, and its solution by the
formula.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.algorithms.elements import BF16, E4M3, F16
from simkit.algorithms.variant import Place, Variant, exact_rotate
from simkit.errors import DtypeError, ShapeError, check_array
from simkit.layouts.block_sparse import BlockRows
from simkit.layouts.paged import Order, PagedCache, check_order
from simkit.layouts.ragged import Ragged
from simkit.layouts.tables import Int64Array
from simkit.machine.memory import unbacked
from simkit.numerics.arrays import Float64Array
from simkit.numerics.exp2 import LOG2E

Array = NDArray[Any]

HEAD_DIMS = (64, 128, 256)
"""Head dimensions, of K and of V, that the kernels are built for."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchProblem:
    """Attention of every query of every request to the keys of its request.

    ``q`` [rows, heads, d], bfloat16 or float16, the requests' queries as ``queries`` says. ``k``,
    ``v``: ragged [keys, kv_heads, d] if ``keys`` is `Ragged`; in blocks [blocks, block, kv_heads,
    d], or heads before slots with ``order`` "HND", if it is `BlockRows`. V may have another head
    dimension. K and V are of q's type, or e4m3: then ``k_scale`` and ``v_scale`` say what a 1
    stands for. ``scale``: of q . k, d^-1/2 by default.

    Solutions: o [rows, heads, dv] and the natural-logarithm lse [rows, heads]; queries without keys
    have o = 0 and lse = -inf (with a sink, lse = sink). Errors: `DtypeError`, `ShapeError`, and
    `TableError` from the layouts.
    """

    q: Array
    k: Array
    v: Array
    queries: Ragged
    keys: Ragged | BlockRows
    order: Order = "NHD"
    variant: Variant = field(default_factory=Variant)
    scale: float = None  # type: ignore[assignment]  # set below, when d is known
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        self._check_arrays()
        self._check_layout()
        self._check_variant()
        if self.scale is None:
            object.__setattr__(self, "scale", self.d**-0.5)
        with np.errstate(all="ignore"):
            representable = self.score_scale > 0 and np.isfinite(self.score_scale * LOG2E)
        if not representable:
            raise ShapeError(
                f"scale * k_scale must be a positive, finite float32, also times log2(e), got "
                f"{self.scale} * {self.k_scale}"
            )
        if not np.isfinite(np.float32(self.v_scale)):
            raise ShapeError(f"v_scale must be a finite float32, got {self.v_scale}")

    def _check_arrays(self) -> None:
        for name, tensor in (("q", self.q), ("k", self.k), ("v", self.v)):
            check_array(name, tensor)
        if not isinstance(self.queries, Ragged) or not isinstance(self.keys, Ragged | BlockRows):
            raise DtypeError(
                f"queries must be Ragged, keys Ragged or BlockRows, got "
                f"{type(self.queries).__name__} and {type(self.keys).__name__}"
            )
        for name in ("scale", "k_scale", "v_scale"):
            value = getattr(self, name)
            number = isinstance(value, int | float | np.number)
            if not number and not (name == "scale" and value is None):
                raise DtypeError(f"{name} must be a number, got {type(value).__name__}")
        if self.q.dtype not in (BF16, F16):
            raise DtypeError(f"q must be bfloat16 or float16, got {self.q.dtype}")
        for name, tensor in (("k", self.k), ("v", self.v)):
            if tensor.dtype not in (self.q.dtype, E4M3) or self.k.dtype != self.v.dtype:
                raise DtypeError(
                    f"k and v must both be {self.q.dtype}, as q is, or e4m3; {name} is "
                    f"{tensor.dtype}"
                )
        axes = 3 if isinstance(self.keys, Ragged) else 4
        if self.q.ndim != 3 or self.k.ndim != axes or self.k.shape[:-1] != self.v.shape[:-1]:
            raise ShapeError(
                f"q must be [rows, heads, d], k and v must have {axes} axes that agree but for the "
                f"last, got q {self.q.shape}, k {self.k.shape}, v {self.v.shape}"
            )
        if self.k.shape[-1] != self.d:
            raise ShapeError(f"q has head dimension {self.d}, k has {self.k.shape[-1]}")
        if not self.heads or not self.kv_heads or self.heads % self.kv_heads:
            raise ShapeError(
                f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )

    def _check_layout(self) -> None:
        if self.queries.indptr.dtype != self.keys.indptr.dtype:
            raise DtypeError(
                f"the tables of queries are {self.queries.indptr.dtype}, those of keys "
                f"{self.keys.indptr.dtype}; they share one dtype"
            )
        check_order(self.order)
        if self.queries.total != self.rows:
            raise ShapeError(f"queries describes {self.queries.total} rows, q has {self.rows}")
        if self.queries.batch != self.keys.batch:
            raise ShapeError(
                f"queries has {self.queries.batch} requests, keys has {self.keys.batch}"
            )
        if isinstance(self.keys, Ragged):
            if self.keys.total != len(self.k):
                raise ShapeError(f"keys describes {self.keys.total} rows, k has {len(self.k)}")
        else:
            PagedCache(self.k, self.order).check_rows(self.keys)

    def _check_variant(self) -> None:
        variant, heads = self.variant, (self.heads,)
        for name, tensor in (("alibi_slopes", variant.alibi_slopes), ("sinks", variant.sinks)):
            if tensor is not None and tensor.shape != heads:
                raise ShapeError(f"{name} must be [{self.heads}], got {tensor.shape}")
        mask = variant.custom_mask
        if mask is not None:
            for name, lens, own in (
                ("q_lens", mask.q_lens, self.queries.lens),
                ("kv_lens", mask.kv_lens, self.kv_lens),
            ):
                if not np.array_equal(lens, own):
                    raise ShapeError(f"{name} of the custom mask are not those of the requests")
        if variant.rope is not None:
            longest = int(np.maximum(self.kv_lens, 1).max(initial=1))
            ahead = (self.queries.lens > self.kv_lens) & (self.kv_lens > 0)
            if not variant.causal and ahead.any():
                request = int(ahead.argmax())
                raise ShapeError(
                    f"request {request} has {self.queries.lens[request]} queries and "
                    f"{self.kv_lens[request]} keys: its first queries have positions below 0, for "
                    f"which there are no angles; only a causal mask hides all keys from them"
                )
            if variant.rope.shape[1] != self.d or len(variant.rope) < longest:
                raise ShapeError(
                    f"rope must be [at least {longest} positions, {self.d}], got "
                    f"{variant.rope.shape}"
                )

    @property
    def rows(self) -> int:
        """Queries of all requests."""
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def d(self) -> int:
        return self.q.shape[2]

    @property
    def dv(self) -> int:
        return self.v.shape[-1]

    @property
    def batch(self) -> int:
        return self.queries.batch

    @property
    def kv_heads(self) -> int:
        heads_axis = 1 if isinstance(self.keys, Ragged) or self.order == "HND" else 2
        return self.k.shape[heads_axis]

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        return self.heads // self.kv_heads

    @cached_property
    def kv_lens(self) -> Int64Array:
        """Keys of each request, int64 [batch]."""
        return self.keys.lens if isinstance(self.keys, Ragged) else self.keys.kv_lens

    @property
    def score_scale(self) -> np.float32:
        """From q . k, of what is stored, to a logit: float32 as kernels take it."""
        return np.float32(self.scale * self.k_scale)

    @property
    def factor(self) -> np.float32:
        """From what the softmax takes, raw scores or logits, to a base-2 exponent."""
        return LOG2E if self.variant.transforms_logits else np.float32(self.score_scale * LOG2E)

    def vector_numbers(self, requests: Array, keys: Array, head: Array) -> Int64Array:
        """Which vector of ``k.reshape(-1, d)``, and of v alike, a request's key has in a K/V head;
        the three broadcast.
        """
        if isinstance(self.keys, Ragged):
            return (self.keys.indptr.astype(np.int64)[requests] + keys) * self.kv_heads + head
        slots = self.keys.locate(requests, keys)
        return PagedCache(self.k, self.order).row_numbers(slots, head)

    def gathered(self, request: int) -> tuple[Array, Array]:
        """K [kv_len, kv_heads, d] and V [kv_len, kv_heads, dv] of a request, as they are stored."""
        keys = np.arange(self.kv_lens[request])[:, None]
        index = self.vector_numbers(np.asarray(request), keys, np.arange(self.kv_heads))
        return self.k.reshape(-1, self.d)[index], self.v.reshape(-1, self.dv)[index]

    def without_values(self) -> BatchProblem:
        """The same sizes and tables, q, k and v taking no memory: for counting bytes."""
        q, k, v = (unbacked(x.shape, x.dtype) for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v)


def request_place(problem: BatchProblem, request: int) -> Place:
    """All pairs of a request: arrays that broadcast to [heads, q_len, kv_len]."""
    q_len, kv_len = int(problem.queries.lens[request]), int(problem.kv_lens[request])
    return Place(
        request=np.asarray(request),
        head=np.arange(problem.heads)[:, None, None],
        row=np.arange(q_len)[None, :, None],
        key=np.arange(kv_len)[None, None, :],
        q_len=np.asarray(q_len),
        kv_len=np.asarray(kv_len),
    )


def visible_pairs(problem: BatchProblem) -> int:
    """Pairs of a query and a key that the mask leaves, of one head."""
    total = 0
    for request in range(problem.batch):
        at = request_place(problem, request)
        one_head = Place(at.request, at.head[:1], at.row, at.key, at.q_len, at.kv_len)
        total += int(np.count_nonzero(problem.variant.visible(one_head)))
    return total


def batch_flops(problem: BatchProblem) -> int:
    """FLOP of the two matrix products: 2 (d + dv) for every visible pair and head."""
    return 2 * (problem.d + problem.dv) * visible_pairs(problem) * problem.heads


def batch_reference(problem: BatchProblem) -> tuple[Float64Array, Float64Array]:
    """The solution by the dense formula in float64: o [rows, heads, dv], lse [rows, heads]."""
    o = np.zeros((problem.rows, problem.heads, problem.dv))
    lse = np.full((problem.rows, problem.heads), -np.inf)
    for request in range(problem.batch):
        own = problem.queries.rows(request)
        if own.start < own.stop:
            o[own], lse[own] = _request_reference(problem, request)
    return o, lse


def _request_reference(problem: BatchProblem, request: int) -> tuple[Float64Array, Float64Array]:
    variant, at = problem.variant, request_place(problem, request)
    q = problem.q[problem.queries.rows(request)].astype(np.float64).swapaxes(0, 1)
    k, v = (
        np.repeat(x.astype(np.float64).swapaxes(0, 1), problem.group, axis=0)
        for x in problem.gathered(request)
    )
    if variant.rope is not None:
        angles = variant.rope.astype(np.float64)
        q = exact_rotate(q, angles[np.maximum(at.position[0, :, 0], 0)])
        k = exact_rotate(k, angles[: k.shape[1]])
    with np.errstate(all="ignore"):
        scores = variant.exact_logits(q @ k.swapaxes(1, 2), at, problem.scale * problem.k_scale)
        seen = np.broadcast_to(variant.visible(at), scores.shape)
        scores = np.where(seen, scores, -np.inf)
        maximum = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        if variant.sinks is not None:
            sinks = variant.sinks.astype(np.float64)[:, None, None]
            maximum = np.maximum(maximum, sinks)
        shift = np.where(np.isneginf(maximum), 0, maximum)
        weights = np.exp(scores - shift)
        total = weights.sum(axis=-1, keepdims=True)
        if variant.sinks is not None:
            total = total + np.exp(sinks - shift)
        lse = np.squeeze(shift + np.log(total), axis=-1)
        p = np.where(total == 0, 0, weights / total)
        output = p @ v
    output = variant.output(output, _output_place(at), np.arange(problem.dv))
    return (output * problem.v_scale).swapaxes(0, 1), lse.swapaxes(0, 1)


def _output_place(at: Place) -> Place:
    """Of outputs [heads, q_len, dv]: the key is 0."""
    return Place(at.request, at.head, at.row, np.zeros((1, 1, 1), np.int64), at.q_len, at.kv_len)
