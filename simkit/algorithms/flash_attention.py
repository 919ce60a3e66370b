"""FlashAttention forward: exact attention in one pass over K and V, no score ever in HBM.

The order is that of FlashAttention-2 (arXiv 2307.08691): a CTA keeps a tile of queries and walks
over the keys it sees, its output un-normalised until the end. Kernel: flash_attention.cu.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simkit.algorithms.heads import (
    Array,
    fill_tile,
    heads_first,
    stack_mask,
    stack_queries,
    to_bf16,
    to_float32,
    unstack_outputs,
    unstack_rows,
)
from simkit.algorithms.problem import BF16, AttentionProblem
from simkit.algorithms.softmax import (
    row_maximum,
    softmax_lse,
    softmax_output,
    softmax_shift,
    softmax_weight,
)
from simkit.algorithms.states import AttentionState, NoState, ReferenceState
from simkit.algorithms.tiles import tile_count, tiles
from simkit.errors import ShapeError
from simkit.machine.machine import Machine
from simkit.numerics.arrays import Float32Array
from simkit.numerics.formats import round_bf16
from simkit.numerics.minmax import fmax_ptx
from simkit.numerics.scalar import add, multiply
from simkit.numerics.tensor_core import TensorCore, dot_accumulate, tensor_core

THREADS = 128


@dataclass(frozen=True)
class Tile:
    """Queries of a CTA and keys of a step; the kernel's are 64 and 64."""

    q: int = 64
    kv: int = 64

    def __post_init__(self) -> None:
        if min(self.q, self.kv) < 1:
            raise ShapeError(f"a tile has at least one query and one key, not {self}")

    def shared_bytes(self, d: int) -> int:
        """Shared memory of a CTA: Q, two each of K and V in bfloat16, and a row of LSE."""
        return (self.q + 4 * self.kv) * d * BF16.itemsize + self.q * 4


@dataclass(frozen=True, eq=False)
class FlashAttentionResult:
    """``o`` [batch, q_len, heads, d], ``lse`` [batch, heads, q_len], natural logarithm.

    bfloat16 and float32 in device arithmetic, float64 in reference arithmetic.
    """

    o: Array
    lse: Array


def grid(problem: AttentionProblem, tile: Tile = Tile()) -> tuple[int, int, int]:
    """CTAs of the launch: (tiles of queries, heads, batch)."""
    return tile_count(problem.q_len, tile.q), problem.heads, problem.batch


def flash_attention(
    machine: Machine, problem: AttentionProblem, tile: Tile = Tile()
) -> FlashAttentionResult:
    """softmax(scale * q k^T) v; leaves the tensors q, k, v, o and lse on the machine.

    CTAs of all heads and batches go through the loop together. ``tile`` can be changed except in
    device arithmetic. Errors: `ShapeError`; `CapacityError` for tiles that exceed shared memory.
    """
    state_of = _states(machine, problem, tile)
    q, k, v = problem.place_inputs(machine)
    o = machine.allocate("o", problem.q.shape, BF16)
    lse = machine.allocate("lse", (problem.batch, problem.heads, problem.q_len), np.float32)
    heads = problem.batch * problem.heads

    for rows in tiles(problem.q_len, tile.q):
        with machine.cta(tile.shared_bytes(problem.d), THREADS, count=heads) as cta:
            state = state_of.start(problem, machine.gpu.arch, cta.load(q[:, rows], problem.vector))
            for keys in problem.visible_tiles(rows, tile.kv):
                # Every head of a group has a CTA of its own, which loads the group's K and V.
                k_tile = cta.load(k[:, keys], problem.vector, repeat=problem.group)
                v_tile = cta.load(v[:, keys], problem.vector, repeat=problem.group)
                state = state.update(k_tile, v_tile, problem.mask(rows, keys))
            cta.store(o[:, rows], state.output(), problem.vector)
            cta.store(lse[:, :, rows], state.lse(), vector=4, by_row=True)
    return FlashAttentionResult(o.values, lse.values)


@dataclass(frozen=True)
class _DeviceState:
    """The kernel's arithmetic, for all heads: the group's rows are stacked, K and V shared."""

    problem: AttentionProblem
    core: TensorCore
    rows: int
    q: Float32Array  # [batch, kv_heads, group * rows, d]
    m: Float32Array  # [batch, kv_heads, group * rows]: maximum of raw, unscaled scores
    l: Float32Array  # noqa: E741  [..., 4]: a row's sum, in parts of the four lanes that hold it
    o: Float32Array  # like q, un-normalised

    @classmethod
    def start(cls, problem: AttentionProblem, arch: str, q: Array) -> _DeviceState:
        queries = stack_queries(to_float32(q), problem.kv_heads)
        m = np.full(queries.shape[:-1], -np.inf, np.float32)
        l = np.zeros((*m.shape, _LANES_PER_ROW), np.float32)  # noqa: E741
        core = tensor_core(arch, "bf16")
        return cls(problem, core, q.shape[1], queries, m, l, np.zeros_like(queries))

    def update(self, k: Array, v: Array, mask: NDArray[np.bool_]) -> _DeviceState:
        keys, values = (fill_tile(heads_first(to_float32(x)), 2, Tile().kv) for x in (k, v))
        visible = stack_mask(fill_tile(mask, 1, Tile().kv), self.problem.group)
        scale = self.problem.scale_log2
        zero = np.zeros((*self.m.shape, Tile().kv), np.float32)
        s = _multiply(self.q, keys.swapaxes(2, 3), zero, self.core)
        s = np.where(visible, s, np.float32(-np.inf))

        m = fmax_ptx(self.m, row_maximum(s))
        scaled_shift = multiply(softmax_shift(m), scale)
        alpha = softmax_weight(self.m, scale, scaled_shift)[..., None]
        p = softmax_weight(s, scale, scaled_shift[..., None])
        l = _add_by_lane(multiply(self.l, alpha), p)  # noqa: E741
        o = _multiply(round_bf16(p), values, multiply(self.o, alpha), self.core)
        return replace(self, m=m, l=l, o=o)

    def output(self) -> Array:
        return unstack_outputs(to_bf16(softmax_output(self.o, self._sum()[..., None])), self.rows)

    def lse(self) -> Float32Array:
        scaled_maximum = multiply(self.m, self.problem.scale_log2)
        return unstack_rows(softmax_lse(scaled_maximum, self._sum()), self.rows)

    def _sum(self) -> Float32Array:
        lane = np.moveaxis(self.l, -1, 0)
        return add(add(lane[0], lane[1]), add(lane[2], lane[3]))


# Of an accumulator of mma.m16n8k16, eight columns wide, a lane has two columns of a row.
_LANES_PER_ROW = 4
_COLUMNS_PER_LANE = 2


def _add_by_lane(l: Float32Array, p: Float32Array) -> Float32Array:  # noqa: E741
    """Sums [..., 4] plus the weights [..., keys] that each lane holds, in the lane's order."""
    by_lane = p.reshape(*p.shape[:-1], -1, _LANES_PER_ROW, _COLUMNS_PER_LANE)
    for accumulator in np.moveaxis(by_lane, -3, 0):
        for column in range(_COLUMNS_PER_LANE):
            l = add(l, accumulator[..., column])  # noqa: E741
    return l


def _multiply(a: Float32Array, b: Float32Array, c: Float32Array, core: TensorCore) -> Float32Array:
    """``a @ b + c`` on tensor cores, head by head; [batch, kv_heads, M, N]."""
    result = np.empty_like(c)
    for head in np.ndindex(c.shape[:2]):
        result[head] = dot_accumulate(a[head], b[head], c[head], core)
    return result


_STATES: dict[str, type[AttentionState]] = {
    "reference": ReferenceState,
    "device": _DeviceState,
    "none": NoState,
}


def _states(machine: Machine, problem: AttentionProblem, tile: Tile) -> type[AttentionState]:
    if machine.is_device:
        problem.check_device_head_dim()
        if tile != Tile():
            raise ShapeError(f"device arithmetic is that of the kernel's {Tile()}, not {tile}")
    return _STATES[machine.arithmetic]
