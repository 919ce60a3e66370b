"""What the kernels of batched attention compute for a tile of keys: on tensor cores, on CUDA cores,
in float64, or nothing at all.

Arrays have the axes [items, kv_heads, rows, ...]: work items of a plan, and the packed rows of
their query tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from simkit.algorithms.batch_problem import BatchProblem
from simkit.algorithms.elements import DECODE, ENCODE, TENSOR_CORE_KIND
from simkit.algorithms.fma_chain import fma_chain
from simkit.algorithms.softmax import (
    butterfly_sum,
    row_maximum,
    softmax_lse,
    softmax_output,
    softmax_shift,
    softmax_weight,
)
from simkit.algorithms.variant import Place, exact_rotate, rotate
from simkit.numerics.arrays import Float32Array, Float64Array
from simkit.numerics.minmax import fmax_ptx
from simkit.numerics.scalar import add, multiply
from simkit.numerics.tensor_core import TensorCore, dot_accumulate, tensor_core

Array = NDArray[Any]

KEY_TILE = 64
WARPS = 4
WARP_ROWS = 16  # of an mma
# Of an accumulator of mma.m16n8k16, eight columns wide, a lane has two columns of a row.
_LANES_PER_ROW = 4
_COLUMNS_PER_LANE = 2


class Arithmetic(Protocol):
    """States of query tiles, and how keys change them."""

    def decode(self, values: Array) -> Array:
        """Stored values of K or V, or of Q, as what is computed with."""

    def rotate(self, x: Array, angles: Array) -> Array:
        """Rotary embedding, rounded as it is before products."""

    def start(self, rows: tuple[int, int, int], sinks: Array | None, first: Array) -> Any:
        """A state before any key for [items, kv_heads, rows]; ``sinks`` like it, of the items that
        are ``first`` [items], which start with them.
        """

    def advance(self, state: Any, q: Array, k: Array, v: Array, seen: Array, at: Place) -> Any:
        """After a tile of keys ``k``, ``v`` [items, kv_heads, keys, ...], those ``seen`` alone."""

    def finish(self, state: Any, at: Place) -> tuple[Array, Array]:
        """Outputs [items, kv_heads, rows, dv], normalised and scaled, and natural LSEs."""


@dataclass(frozen=True)
class State:
    """``m`` [items, kv_heads, rows]: maximum of what the softmax takes. ``l`` like it, or with an
    axis of parts behind; ``o`` [items, kv_heads, rows, dv], un-normalised.
    """

    m: Array
    l: Array  # noqa: E741
    o: Array

    def part(self, items: Array) -> State:
        return State(self.m[items], self.l[items], self.o[items])

    def put(self, items: Array, part: State) -> None:
        for mine, new in ((self.m, part.m), (self.l, part.l), (self.o, part.o)):
            mine[items] = new


class _Device:
    """What tensor and CUDA cores have in common: the kernel's float32 operations."""

    sum_parts: tuple[int, ...] = ()

    def __init__(self, problem: BatchProblem, arch: str, tile_q: int) -> None:
        self.problem = problem
        self.tile_q = tile_q
        self.core: TensorCore = tensor_core(arch, TENSOR_CORE_KIND[problem.q.dtype])
        self.element = problem.q.dtype

    def decode(self, values: Array) -> Float32Array:
        return DECODE[values.dtype](values)

    def round(self, x: Float32Array) -> Float32Array:
        return DECODE[self.element](ENCODE[self.element](x))

    def rotate(self, x: Array, angles: Array) -> Float32Array:
        return self.round(rotate(x, angles))

    def start(self, rows: tuple[int, int, int], sinks: Array | None, first: Array) -> State:
        m = np.full(rows, -np.inf, np.float32)
        l = np.zeros((*rows, *self.sum_parts), np.float32)  # noqa: E741
        if sinks is not None:
            has_sink = np.broadcast_to(first[:, None, None], rows)
            m = np.where(has_sink, sinks, m).astype(np.float32)
            l.reshape(*rows, -1)[..., 0] = has_sink
        return State(m, l, np.zeros((*rows, self.problem.dv), np.float32))

    def advance(self, state: State, q: Array, k: Array, v: Array, seen: Array, at: Place) -> State:
        factor = self.problem.factor
        s = self.scores(q, k)
        if self.problem.variant.transforms_logits:
            s = self.problem.variant.logits(s, at, self.problem.score_scale)
        s = np.where(seen, s, np.float32(-np.inf))
        m = fmax_ptx(state.m, row_maximum(s))
        scaled_shift = multiply(softmax_shift(m), factor)
        alpha = softmax_weight(state.m, factor, scaled_shift)
        p = softmax_weight(s, factor, scaled_shift[..., None])
        l = self.add_weights(state.l, alpha, p)  # noqa: E741
        return State(m, l, self.values(p, v, multiply(state.o, alpha[..., None])))

    def finish(self, state: State, at: Place) -> tuple[Array, Array]:
        total = self.total(state.l)
        o = softmax_output(state.o, total[..., None])
        o = self.problem.variant.output(o, at, np.arange(self.problem.dv))
        lse = softmax_lse(multiply(state.m, self.problem.factor), total)
        return multiply(o, np.float32(self.problem.v_scale)), lse

    def scores(self, q: Array, k: Array) -> Float32Array:
        raise NotImplementedError

    def values(self, p: Array, v: Array, o: Array) -> Float32Array:
        raise NotImplementedError

    def add_weights(self, l: Array, alpha: Array, p: Array) -> Float32Array:  # noqa: E741
        raise NotImplementedError

    def total(self, l: Array) -> Float32Array:  # noqa: E741
        raise NotImplementedError


class TensorCores(_Device):
    """tensor_core_tile.cuh: tiles of 64 rows, or of 16 that four warps share. A row's sum is kept
    in parts of the lanes, and of the warps that share the row.
    """

    def __init__(self, problem: BatchProblem, arch: str, tile_q: int) -> None:
        super().__init__(problem, arch, tile_q)
        self.sum_parts = (WARPS * WARP_ROWS // tile_q, _LANES_PER_ROW)

    def scores(self, q: Array, k: Array) -> Float32Array:
        zero = np.zeros((*q.shape[:-1], k.shape[-2]), np.float32)
        return self._multiply(q, k.swapaxes(-1, -2), zero)

    def values(self, p: Array, v: Array, o: Array) -> Float32Array:
        return self._multiply(self.round(p), v, o)

    def _multiply(self, a: Array, b: Array, c: Array) -> Float32Array:
        result = np.empty_like(c)
        for index in np.ndindex(c.shape[:2]):
            result[index] = dot_accumulate(a[index], b[index], c[index], self.core)
        return result

    def add_weights(self, l: Array, alpha: Array, p: Array) -> Float32Array:  # noqa: E741
        l = multiply(l, alpha[..., None, None])  # noqa: E741
        shape = (*p.shape[:-1], l.shape[-2], -1, _LANES_PER_ROW, _COLUMNS_PER_LANE)
        for accumulator in np.moveaxis(p.reshape(shape), -3, 0):
            for column in range(_COLUMNS_PER_LANE):
                l = add(l, accumulator[..., column])  # noqa: E741
        return l

    def total(self, l: Array) -> Float32Array:  # noqa: E741
        lanes = np.moveaxis(l, -1, 0)
        warps = np.moveaxis(add(add(lanes[0], lanes[1]), add(lanes[2], lanes[3])), -1, 0)
        total = warps[0]
        for warp in warps[1:]:
            total = add(total, warp)
        return total


class CudaCores(_Device):
    """cuda_core_tile.cuh: chains of fused multiply-adds, weights in float32."""

    def scores(self, q: Array, k: Array) -> Float32Array:
        zero = np.zeros((*q.shape[:-1], k.shape[-2]), np.float32)
        return fma_chain(q, k.swapaxes(-1, -2), zero)

    def values(self, p: Array, v: Array, o: Array) -> Float32Array:
        return fma_chain(p, v, o)

    def add_weights(self, l: Array, alpha: Array, p: Array) -> Float32Array:  # noqa: E741
        return add(multiply(l, alpha), butterfly_sum(p))

    def total(self, l: Array) -> Float32Array:  # noqa: E741
        return np.asarray(l)


class Reference:
    """float64, the same tiles."""

    def __init__(self, problem: BatchProblem, arch: str, tile_q: int) -> None:
        self.problem = problem

    def decode(self, values: Array) -> Float64Array:
        return values.astype(np.float64)

    def rotate(self, x: Array, angles: Array) -> Float64Array:
        return exact_rotate(x, angles.astype(np.float64))

    def start(self, rows: tuple[int, int, int], sinks: Array | None, first: Array) -> State:
        m, l = np.full(rows, -np.inf), np.zeros(rows)  # noqa: E741
        if sinks is not None:
            has_sink = np.broadcast_to(first[:, None, None], rows)
            m, l = np.where(has_sink, sinks, m), has_sink.astype(np.float64)  # noqa: E741
        return State(m, l, np.zeros((*rows, self.problem.dv)))

    def advance(self, state: State, q: Array, k: Array, v: Array, seen: Array, at: Place) -> State:
        scale = self.problem.scale * self.problem.k_scale
        s = self.problem.variant.exact_logits(q @ k.swapaxes(-1, -2), at, scale)
        s = np.where(seen, s, -np.inf)
        m = np.maximum(state.m, s.max(axis=-1))
        shift = np.where(np.isneginf(m), 0.0, m)
        alpha, p = np.exp(state.m - shift), np.exp(s - shift[..., None])
        return State(m, state.l * alpha + p.sum(axis=-1), state.o * alpha[..., None] + p @ v)

    def finish(self, state: State, at: Place) -> tuple[Array, Array]:
        has_keys = state.l != 0
        total = np.where(has_keys, state.l, 1.0)
        o = np.where(has_keys[..., None], state.o, 0.0) / total[..., None]
        o = self.problem.variant.output(o, at, np.arange(self.problem.dv))
        lse = np.where(has_keys, state.m + np.log(total), -np.inf)
        return o * self.problem.v_scale, lse
