"""FlashDecoding: one query per sequence, its keys split over CTAs, then the parts combined.

Source: Dao et al., "Flash-Decoding for long-context inference" (2023). The heads that share K and
V are computed by one CTA, which reads K and V once for all. Kernels: flash_decoding.cu.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from simkit.algorithms.fma_chain import fma_chain
from simkit.algorithms.heads import (
    Array,
    fill_tile,
    heads_first,
    stack_queries,
    to_bf16,
    to_float32,
)
from simkit.algorithms.problem import BF16, AttentionProblem
from simkit.algorithms.softmax import (
    butterfly_sum,
    row_maximum,
    softmax_lse,
    softmax_output,
    softmax_shift,
    softmax_weight,
)
from simkit.algorithms.states import NoState, ReferenceState
from simkit.algorithms.tiles import tile_count, tiles
from simkit.errors import ShapeError
from simkit.machine.machine import Cta, Machine
from simkit.machine.memory import WARP_LANES, Tensor
from simkit.numerics.arrays import Float32Array
from simkit.numerics.minmax import fmax_ptx
from simkit.numerics.online_softmax import OnlineSoftmax
from simkit.numerics.scalar import add, multiply

THREADS = 128
KEY_TILE = 64
MAX_GROUP = 16  # of the kernel


@dataclass(frozen=True, eq=False)
class FlashDecodingResult:
    """``o`` [batch, heads, d], ``lse`` [batch, heads], and the partial results of the splits.

    ``m_partial`` (scaled, base 2), ``l_partial`` [splits, batch, heads]; ``o_partial`` [splits,
    batch, heads, d], un-normalised, NaN for splits without keys. In device arithmetic o is
    bfloat16 and the rest float32, in reference arithmetic all are float64.
    """

    o: Array
    lse: Array
    m_partial: Array
    l_partial: Array
    o_partial: Array


def max_splits(problem: AttentionProblem) -> int:
    """The most CTAs that the keys of a sequence can be split over: one for each tile."""
    return max(1, tile_count(problem.kv_len, KEY_TILE))


def split_keys(problem: AttentionProblem, splits: int, split: int) -> slice:
    """The keys of a split: as many whole tiles as any has, but the last ones may get fewer."""
    size = tile_count(tile_count(problem.kv_len, KEY_TILE), splits) * KEY_TILE
    return slice(*(min(edge * size, problem.kv_len) for edge in (split, split + 1)))


def split_grid(problem: AttentionProblem, splits: int) -> tuple[int, int, int]:
    """CTAs of the first kernel: (splits, kv_heads, batch)."""
    return splits, problem.kv_heads, problem.batch


def split_shared_bytes(problem: AttentionProblem) -> int:
    """Shared memory of a split's CTA: two tiles each of K and V in bfloat16; in float32 the
    queries and scores of the heads (an even number) and three numbers for each head.
    """
    heads = tile_count(problem.group, 2) * 2
    tiles_bytes = 4 * KEY_TILE * problem.d * BF16.itemsize
    return tiles_bytes + heads * (problem.d + KEY_TILE + 3) * 4


def flash_decoding(machine: Machine, problem: AttentionProblem, splits: int) -> FlashDecodingResult:
    """softmax(scale * q k^T) v for q_len = 1, as ``splits`` parts and their merge.

    Leaves the tensors q, k, v, m_partial, l_partial, o_partial, o and lse on the machine. Errors:
    `ShapeError` for several queries, and for splits outside 1 .. ``max_splits``.
    """
    _check(machine, problem, splits)
    q, k, v = problem.place_inputs(machine)
    rows = (splits, problem.batch, problem.heads)
    m_partial = machine.allocate("m_partial", rows, np.float32)
    l_partial = machine.allocate("l_partial", rows, np.float32)
    o_partial = machine.allocate("o_partial", (*rows, problem.d), np.float32)
    o = machine.allocate("o", (*rows[1:], problem.d), BF16)
    lse = machine.allocate("lse", rows[1:], np.float32)

    _split(machine, problem, splits, (q, k, v), (m_partial, l_partial, o_partial))
    _combine(machine, problem, splits, (m_partial, l_partial, o_partial), (o, lse))
    return FlashDecodingResult(
        o.values, lse.values, m_partial.values, l_partial.values, o_partial.values
    )


def _split(
    machine: Machine,
    problem: AttentionProblem,
    splits: int,
    inputs: tuple[Tensor, Tensor, Tensor],
    partials: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Kernel flash_decoding_split; the CTAs of all K/V heads and batches go together."""
    q, k, v = inputs
    by_group = (problem.batch, problem.kv_heads, problem.group)
    m_partial, l_partial = (tensor.reshape(splits, *by_group) for tensor in partials[:2])
    o_partial = partials[2].reshape(splits, *by_group, problem.d)
    ctas = problem.kv_heads * problem.batch
    for split in range(splits):
        own = split_keys(problem, splits, split)
        with machine.cta(split_shared_bytes(problem), THREADS, count=ctas) as cta:
            if own.start == own.stop:
                nothing = np.full(by_group, -np.inf, np.float32), np.zeros(by_group, np.float32)
                cta.store(m_partial[split], nothing[0], vector=4, by_row=True)
                cta.store(l_partial[split], nothing[1], vector=4, by_row=True)
                continue
            state = _STATES[machine.arithmetic].start(
                problem, machine.gpu.arch, cta.load(q[:], problem.vector)
            )
            for keys in tiles(own.stop, KEY_TILE, own.start):
                k_tile = cta.load(k[:, keys], problem.vector)
                v_tile = cta.load(v[:, keys], problem.vector)
                state = state.update(k_tile, v_tile, problem.mask(slice(0, 1), keys))
            m, l, output = state.partial()  # noqa: E741
            cta.store(m_partial[split], m, vector=4, by_row=True)
            cta.store(l_partial[split], l, vector=4, by_row=True)
            cta.store(o_partial[split], output, vector=4)


def _combine(
    machine: Machine,
    problem: AttentionProblem,
    splits: int,
    partials: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
) -> None:
    """Kernel flash_decoding_combine: a CTA for each head, a thread for each dimension."""
    m_partial, l_partial, o_partial = partials
    o, lse = outputs
    d = problem.d
    heads = problem.batch * problem.heads
    lanes = min(d, WARP_LANES)
    with machine.cta(threads=d, count=heads) as cta:
        total = OnlineSoftmax.empty(heads, d, np.float32 if machine.is_device else np.float64)
        for split in range(splits):
            # Every thread reads the two numbers of its head.
            m = cta.load(m_partial[split], vector=4, lanes=lanes, share=d)
            l = cta.load(l_partial[split], vector=4, lanes=lanes, share=d)  # noqa: E741
            own = split_keys(problem, splits, split)
            present = l != 0 if machine.computes else np.full(l.shape, own.start < own.stop)
            part = _load_present(cta, o_partial, split, present)
            if machine.computes:
                l = np.where(present, l, 0)  # noqa: E741
                total = total.merge(OnlineSoftmax(m.ravel(), l.ravel(), part.reshape(heads, d)))
        output, row_lse = _finish(total)
        cta.store(o[:], output.reshape(o.shape), vector=2, by_row=True)
        cta.store(lse[:], row_lse.reshape(lse.shape), vector=4, lanes=1)


def _load_present(cta: Cta, o_partial: Tensor, split: int, present: NDArray[np.bool_]) -> Array:
    """Outputs [batch, heads, d] of a split where ``present`` [batch, heads], anything elsewhere."""
    if present.all():
        return cta.load(o_partial[split], vector=4)
    part = np.zeros(o_partial.shape[1:], o_partial.values.dtype)
    for head in np.argwhere(present):
        part[tuple(head)] = cta.load(o_partial[(split, *head)], vector=4)
    return part


def _finish(total: OnlineSoftmax) -> tuple[Array, Array]:
    """Output and LSE of the merged parts, in the arithmetic of their dtype."""
    if total.o.dtype == np.float64:
        return total.output(), total.lse()
    output = softmax_output(total.o, total.l[:, None])
    return to_bf16(output), softmax_lse(total.m, total.l)


class _SplitState(Protocol):
    """The part of a split: queries of the group, and their attention to the keys seen so far."""

    @classmethod
    def start(cls, problem: AttentionProblem, arch: str, q: Array) -> _SplitState:
        """Before any key: ``q`` [batch, 1, heads, d]."""

    def update(self, k: Array, v: Array, mask: NDArray[np.bool_]) -> _SplitState:
        """After more keys: ``k``, ``v`` [batch, keys, kv_heads, d], ``mask`` [1, keys]."""

    def partial(self) -> tuple[Any, Any, Any]:
        """Maximum (scaled, base 2) and sum [batch, kv_heads, group], un-normalised output
        [batch, kv_heads, group, d].
        """


@dataclass(frozen=True)
class _DeviceState:
    """The kernel's arithmetic: fma chains on CUDA cores, weights kept in float32."""

    problem: AttentionProblem
    q: Float32Array  # [batch, kv_heads, group, d]
    m: Float32Array  # [batch, kv_heads, group]: maximum of raw, unscaled scores
    l: Float32Array  # noqa: E741  like m
    o: Float32Array  # like q, un-normalised

    @classmethod
    def start(cls, problem: AttentionProblem, arch: str, q: Array) -> _DeviceState:
        queries = stack_queries(to_float32(q), problem.kv_heads)
        m = np.full(queries.shape[:-1], -np.inf, np.float32)
        return cls(problem, queries, m, np.zeros_like(m), np.zeros_like(queries))

    def update(self, k: Array, v: Array, mask: NDArray[np.bool_]) -> _DeviceState:
        keys, values = (fill_tile(heads_first(to_float32(x)), 2, KEY_TILE) for x in (k, v))
        scale = self.problem.scale_log2
        s = fma_chain(self.q, keys.swapaxes(2, 3), np.zeros((*self.m.shape, KEY_TILE), np.float32))
        s = np.where(fill_tile(mask, 1, KEY_TILE), s, np.float32(-np.inf))

        m = fmax_ptx(self.m, row_maximum(s))
        scaled_shift = multiply(softmax_shift(m), scale)
        alpha = softmax_weight(self.m, scale, scaled_shift)
        p = softmax_weight(s, scale, scaled_shift[..., None])
        l = add(multiply(self.l, alpha), butterfly_sum(p))  # noqa: E741
        o = fma_chain(p, values, multiply(self.o, alpha[..., None]))
        return replace(self, m=m, l=l, o=o)

    def partial(self) -> tuple[Float32Array, Float32Array, Float32Array]:
        return multiply(self.m, self.problem.scale_log2), self.l, self.o


_STATES: dict[str, type[_SplitState]] = {
    "reference": ReferenceState,
    "device": _DeviceState,
    "none": NoState,
}


def _check(machine: Machine, problem: AttentionProblem, splits: int) -> None:
    if problem.q_len != 1:
        raise ShapeError(f"decoding takes one query per sequence, got q_len {problem.q_len}")
    if not 1 <= splits <= max_splits(problem):
        raise ShapeError(
            f"splits is {splits}; kv_len {problem.kv_len}, in tiles of {KEY_TILE} keys, can be "
            f"split 1 to {max_splits(problem)} ways"
        )
    if machine.is_device:
        problem.check_device_head_dim()
        if problem.group > MAX_GROUP:
            raise ShapeError(
                f"{problem.group} heads share a K/V head; device arithmetic is defined for at "
                f"most {MAX_GROUP}"
            )
