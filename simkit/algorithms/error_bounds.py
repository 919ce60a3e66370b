"""Error bounds of the attention algorithms: what each kernel rounds, and bounds for a problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simkit.algorithms.flash_attention import Tile
from simkit.algorithms.flash_decoding import KEY_TILE, split_keys
from simkit.algorithms.naive_attention import TILE as NAIVE_TILE
from simkit.algorithms.problem import AttentionProblem
from simkit.algorithms.tiles import tile_count
from simkit.machine.memory import WARP_LANES
from simkit.numerics.arrays import Float64Array
from simkit.numerics.attention_bounds import AttentionArithmetic, attention_bounds
from simkit.numerics.bounds import SUBNORMAL_STEP, U32, U_BF16, product_roundoff
from simkit.numerics.exp2 import LOG2E
from simkit.numerics.tensor_core import tensor_core

_BUTTERFLY_ADDS = 5  # over the lanes of a warp


@dataclass(frozen=True)
class ProblemBounds:
    """Bounds on absolute errors: ``o`` [batch, q_len, heads, d], ``lse`` [batch, heads, q_len],
    ``weights`` (P) [batch, heads, q_len, kv_len].
    """

    o: Float64Array
    lse: Float64Array
    weights: Float64Array


def flash_attention_arithmetic(problem: AttentionProblem, arch: str) -> AttentionArithmetic:
    """Tensor cores of ``arch``, P in bfloat16; a lane adds a quarter of a tile's weights in order,
    after it has rescaled its sum, and at the end the sums of four lanes are added in two steps.
    """
    core, tile = tensor_core(arch, "bf16"), Tile()
    lane_adds = tile.kv // 4
    product, floor = product_roundoff(core, tile.kv)
    return AttentionArithmetic(
        key_tile=tile.kv,
        query_tile=tile.q,
        score_core=core,
        exponent_scale=float(problem.scale_log2),
        sum_own=(lane_adds + 2) * U32,
        sum_later=(1 + lane_adds) * U32,
        output_own=product,
        output_later=product + U32,
        output_floor=floor,
        weight_roundoff=U_BF16,
    )


def flash_decoding_arithmetic(problem: AttentionProblem) -> AttentionArithmetic:
    """Chains of multiply-adds, P in float32; a tile's weights are added as a tree: two keys of a
    lane, then the lanes, then the sum so far.
    """
    return AttentionArithmetic(
        key_tile=KEY_TILE,
        query_tile=1,
        score_core=None,
        exponent_scale=float(problem.scale_log2),
        sum_own=(1 + _BUTTERFLY_ADDS + 1) * U32,
        sum_later=2 * U32,
        output_own=KEY_TILE * U32,
        output_later=(1 + KEY_TILE) * U32,
        output_floor=KEY_TILE * SUBNORMAL_STEP,
    )


def naive_attention_arithmetic(problem: AttentionProblem) -> AttentionArithmetic:
    """Chains of multiply-adds; S (scaled) and P (divided by its sum) are rounded to bfloat16."""
    keys = problem.kv_len
    scale_error = abs(float(problem.scale_float32) / problem.scale - 1)
    return AttentionArithmetic(
        key_tile=max(keys, 1),
        query_tile=NAIVE_TILE,
        score_core=None,
        exponent_scale=float(LOG2E),
        sum_own=(tile_count(keys, WARP_LANES) + _BUTTERFLY_ADDS) * U32,
        sum_later=0.0,
        output_own=(1 + keys) * U32,
        output_later=0.0,
        output_floor=(1 + keys) * SUBNORMAL_STEP,
        score_roundoff=(1 + scale_error) * (1 + U32) * (1 + U_BF16) - 1,
        weight_roundoff=U_BF16,
    )


def problem_bounds(
    problem: AttentionProblem,
    arithmetic: AttentionArithmetic,
    splits: Sequence[slice] | None = None,
) -> ProblemBounds:
    """`attention_bounds` of every head; the reference is exact arithmetic on the same bfloat16."""
    q, k, v = (x.astype(np.float64) for x in (problem.q, problem.k, problem.v))
    visible = np.array(problem.mask(slice(0, problem.q_len), slice(0, problem.kv_len)))
    rows = (problem.batch, problem.heads, problem.q_len)
    o, lse = np.zeros(problem.q.shape), np.zeros(rows)
    weights = np.zeros((*rows, problem.kv_len))
    for batch, head in np.ndindex(rows[:2]):
        own = (batch, slice(None), head // problem.group)
        with np.errstate(under="ignore"):
            found = attention_bounds(
                q[batch, :, head], k[own], v[own], scale=problem.scale, visible=visible,
                arithmetic=arithmetic, splits=splits,
            )  # fmt: skip
        o[batch, :, head], lse[batch, head] = found.o, found.lse
        weights[batch, head] = found.weights
    return ProblemBounds(o, lse, weights)


def decoding_bounds(problem: AttentionProblem, splits: int) -> ProblemBounds:
    """`problem_bounds` of Flash-Decoding with ``splits`` splits, those without keys left out."""
    ranges = (split_keys(problem, splits, split) for split in range(splits))
    present = [keys for keys in ranges if keys.start < keys.stop]
    return problem_bounds(problem, flash_decoding_arithmetic(problem), present)
