"""FlashAttention-3's experiment on numerical error: fp16 and fp8 attention on inputs with outliers.

Source: FlashAttention-3, arXiv 2407.08608v2, section 4.3. Every entry of Q, K and V is N(0, 1) +
N(0, 100) Bernoulli(0.001); the root of the mean square error (RMSE) is against float64 on the
inputs before any rounding. The paper does not state the shape. By default it is one head of 8192
queries and keys with d = 128, the paper's other single shape (8448 keys, d = 128) but for a round
number. Nothing is fitted: each method rounds what it stores in a narrow format, and no more.

Most of the mean square error comes from the few queries with an outlier: they meet keys with an
outlier in the same place, whose scores are large. All such queries are computed, and of the
ordinary ones a part, which stands for the rest: the estimate is unbiased and several times quicker.

Products accumulate in float32. Hopper's fp8 tensor cores keep 13 fraction bits; that errs far less
than e4m3 itself, which has 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from simkit.algorithms.tiles import tiles
from simkit.errors import ShapeError
from simkit.numerics.arrays import Float32Array, Float64Array
from simkit.numerics.formats import E4M3_MAX, E4M3_MIN_NORMAL, round_bf16

HEAD_DIMS = (64, 128, 256)
OUTLIER_PROBABILITY = 0.001
OUTLIER_DEVIATION = 10.0
_ORDINARY_LIMIT = 4.5  # one of 150,000 entries without outlier is larger

_ROWS = 1024  # queries that are computed together, so that a tile of scores stays in the cache
_QUERY_BLOCK = 128  # queries of a CTA, which share a scale

# Keys of a step by head dimension, without causal mask: flash-attention at 0251105a2fb1.
_FA2_KEYS = {64: 128, 128: 64, 256: 64}
_FA3_FP16_KEYS = {64: 192, 128: 176, 256: 80}
_FA3_FP8_KEYS = {64: 160, 128: 224, 256: 128}

# FlashAttention-3 shifts the exponent by 8, so that its weights use e4m3 up to 256.
_WEIGHT_SHIFT = 8


@dataclass(frozen=True)
class Inputs:
    """One head in float64: ``q``, ``k`` and ``v`` [n, d].

    ``computed``: indices of the queries to compute; ``shares``: the part of all queries that each
    of them stands for, of sum 1.
    """

    q: Float64Array
    k: Float64Array
    v: Float64Array
    computed: NDArray[np.int64]
    shares: Float64Array

    @property
    def scale(self) -> np.float32:
        return np.float32(self.q.shape[1] ** -0.5)

    @classmethod
    def random(cls, rng: np.random.Generator, n: int, d: int, ordinary: int) -> Inputs:
        """The paper's distribution, with at most ``ordinary`` queries without outlier computed."""
        q, k, v = (with_outliers(rng, (n, d)) for _ in range(3))
        has_outlier = (np.abs(q) > _ORDINARY_LIMIT).any(axis=1)
        special, rest = np.flatnonzero(has_outlier), np.flatnonzero(~has_outlier)
        chosen = rest[:ordinary]
        each = len(rest) / (n * max(len(chosen), 1))
        shares = np.concatenate((np.full(len(special), 1 / n), np.full(len(chosen), each)))
        return cls(q, k, v, np.concatenate((special, chosen)), shares)

    def rms(self, x: Float64Array) -> float:
        """Root of the mean square over all queries of ``x`` [computed, d]."""
        return math.sqrt(float(self.shares @ np.square(x, dtype=np.float64).mean(axis=1)))


@dataclass(frozen=True)
class Method:
    """A way to compute attention; ``published``: its RMSE in the paper."""

    name: str
    published: float
    compute: Callable[[Inputs, np.random.Generator], Float32Array]


@dataclass(frozen=True)
class StudyRow:
    """RMSE of a method, found here and in the paper; ``ratio``: the former over the latter."""

    method: str
    rmse: float
    published: float
    ratio: float


@dataclass(frozen=True)
class StudyResult:
    """One row for each method; ``output_rms``: the size of the output that the errors are of;
    ``computed``: how many queries were computed.
    """

    rows: tuple[StudyRow, ...]
    output_rms: float
    computed: int


def fp8_error_study(n: int = 8192, d: int = 128, ordinary: int = 512, seed: int = 0) -> StudyResult:
    """The paper's table for ``n`` queries and keys, ``ordinary`` of the queries without outliers.

    ``n`` for ``ordinary`` computes them all. Errors: `ShapeError` for a head dimension that is not
    in HEAD_DIMS, and for sizes below 1.
    """
    if d not in HEAD_DIMS:
        raise ShapeError(f"d is {d}; the kernels' tiles are known for {HEAD_DIMS}")
    if min(n, ordinary) < 1:
        raise ShapeError(f"n and ordinary must be at least 1, not {n} and {ordinary}")
    rng = np.random.default_rng(seed)
    inputs = Inputs.random(rng, n, d, ordinary)
    exact = reference(inputs)
    rows = []
    for method in METHODS:
        rmse = inputs.rms(method.compute(inputs, rng) - exact)
        rows.append(StudyRow(method.name, rmse, method.published, rmse / method.published))
    return StudyResult(tuple(rows), inputs.rms(exact), len(inputs.computed))


def with_outliers(rng: np.random.Generator, shape: tuple[int, ...]) -> Float64Array:
    """N(0, 1) + N(0, 100) Bernoulli(0.001)."""
    outlier = rng.random(shape) < OUTLIER_PROBABILITY
    return rng.standard_normal(shape) + outlier * OUTLIER_DEVIATION * rng.standard_normal(shape)


def reference(inputs: Inputs) -> Float64Array:
    """softmax(q k^T / sqrt d) v in float64, [computed, d]."""
    q = inputs.q[inputs.computed]
    output = np.empty_like(q)
    for rows in tiles(len(q), _ROWS):
        scores = q[rows] @ inputs.k.T / math.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        output[rows] = weights @ inputs.v / weights.sum(axis=1, keepdims=True)
    return output


def round_f16(x: Float64Array | Float32Array) -> Float32Array:
    """float16 of ``x``, rounded to nearest even, as float32; overflow gives infinity."""
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(np.float16).astype(np.float32)


def round_e4m3(x: Float32Array) -> Float32Array:
    """e4m3 of float32 ``x``, rounded to nearest even, saturating at +-448, as float32.

    The value of `decode_e4m3` of `encode_e4m3` for every number, without the codes in between.
    """
    x = np.clip(x, -E4M3_MAX, E4M3_MAX)
    bits = x.view(np.uint32)
    rounded = (bits >> np.uint32(20)) & np.uint32(1)
    rounded += np.uint32(0x7FFFF)
    rounded += bits
    rounded &= np.uint32(0xFFF00000)
    values = rounded.view(np.float32)
    subnormal = np.abs(x) < E4M3_MIN_NORMAL
    if subnormal.any():
        # 1.5 * 2^14 has the last place 2^-9, the subnormal step: the sum is rounded to it.
        shift = np.float32(1.5 * 2**14)
        np.copyto(values, (x + shift) - shift, where=subnormal)
    return values


@dataclass(frozen=True)
class Quantized:
    """A matrix as ``values`` [rows, d] of a narrow format, times one scale for each row [rows]."""

    values: Float32Array
    scales: Float32Array

    def rows(self, index: NDArray[np.int64] | slice) -> Quantized:
        return Quantized(self.values[index], self.scales[index])


def as_f16(x: Float64Array) -> Quantized:
    """``x`` rounded to float16, not scaled."""
    return Quantized(round_f16(x), np.ones(len(x), np.float32))


def quantize_e4m3(x: Float32Array, block: int | None = None) -> Quantized:
    """``x`` [rows, d] as e4m3, with a scale of amax / 448 for each ``block`` of rows or for all."""
    values = np.empty_like(x)
    scales = np.empty(len(x), np.float32)
    for rows in tiles(len(x), block or len(x)):
        amax = np.abs(x[rows]).max()
        scales[rows] = amax / E4M3_MAX if amax > 0 else np.float32(1)
        values[rows] = round_e4m3(x[rows] / scales[rows.start])
    return Quantized(values, scales)


def hadamard(d: int) -> Float32Array:
    """The orthogonal d x d Hadamard matrix of Sylvester, d a power of two: entries +-d^-1/2."""
    if d < 1 or d & (d - 1):
        raise ShapeError(f"a Hadamard matrix of Sylvester needs a power of two, not {d}")
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < d:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix * np.float32(d**-0.5)


def random_rotation(rng: np.random.Generator, d: int) -> Float32Array:
    """Incoherent processing: random signs times Hadamard, orthogonal, [d, d].

    Q M and K M have the scores of Q and K, but an outlier of a row is spread over all its entries.
    """
    return rng.choice(np.array([-1, 1], np.float32), d)[:, None] * hadamard(d)


def standard_fp16(inputs: Inputs, rng: np.random.Generator) -> Float32Array:
    """Attention as three float16 operations: every matrix product, and every step of softmax, is
    computed in float32 and stored in float16.
    """
    q, k, v = (round_f16(x) for x in (inputs.q[inputs.computed], inputs.k, inputs.v))
    output = np.empty_like(q)
    for rows in tiles(len(q), _ROWS):
        scores = round_f16(round_f16(q[rows] @ k.T) * inputs.scale)
        output[rows] = round_f16(_softmax_f16(scores) @ v)
    return output


def standard_fp8(inputs: Inputs, rng: np.random.Generator) -> Float32Array:
    """The same with Q, K, V and P in e4m3, each with one scale; softmax in float16."""
    q, k, v = (quantize_e4m3(round_f16(x)) for x in (inputs.q, inputs.k, inputs.v))
    q = q.rows(inputs.computed)
    output = np.empty_like(q.values)
    for rows in tiles(len(output), _ROWS):
        product = (q.values[rows] @ k.values.T) * (q.scales[rows, None] * k.scales)
        scores = round_f16(round_f16(product) * inputs.scale)
        # No weight exceeds 1, so that 1 / 448 serves as the scale of all of P.
        weights = round_e4m3(_softmax_f16(scores) * E4M3_MAX)
        output[rows] = round_bf16((weights @ v.values) * (v.scales[0] / E4M3_MAX))
    return output


def _softmax_f16(scores: Float32Array) -> Float32Array:
    with np.errstate(under="ignore"):
        shifted = round_f16(scores - scores.max(axis=1, keepdims=True))
        weights = round_f16(np.exp(shifted))
        return round_f16(weights / round_f16(weights.sum(axis=1, keepdims=True)))


def flash(
    inputs: Inputs,
    q: Quantized,
    k: Quantized,
    v: Quantized,
    keys: int,
    round_weights: Callable[[Float32Array], Float32Array],
    round_output: Callable[[Float32Array], Float32Array],
    shift: int = 0,
) -> Float32Array:
    """FlashAttention in float32 with narrow operands of both products: weights 2^``shift`` p are
    rounded by ``round_weights``. Tiles of ``keys``, the last first; their rows of V share a scale.
    """
    q = q.rows(inputs.computed)
    output = np.empty_like(q.values)
    for rows in tiles(len(output), _ROWS):
        queries = q.values[rows]
        q_scale = (q.scales[rows] * inputs.scale)[:, None]
        m = np.full((len(queries), 1), -np.inf, np.float32)
        l, o = np.zeros_like(m), np.zeros_like(queries)  # noqa: E741
        for tile in reversed(list(tiles(len(k.values), keys))):
            s = queries @ k.values[tile].T
            s *= q_scale * k.scales[tile]
            m_new = np.maximum(m, s.max(axis=1, keepdims=True))
            with np.errstate(under="ignore"):
                alpha = np.exp(m - m_new)
                p = np.exp(s - (m_new - np.float32(shift * math.log(2))))
                l = l * alpha + p.sum(axis=1, keepdims=True)  # noqa: E741
                o = o * alpha + (round_weights(p) @ v.values[tile]) * v.scales[tile.start]
            m = m_new
        output[rows] = round_output(o / l)
    return output


def flash_fp16(inputs: Inputs, rng: np.random.Generator, tile_keys: dict[int, int]) -> Float32Array:
    """FlashAttention with float16 inputs, weights and output; softmax in float32."""
    q, k, v = (as_f16(x) for x in (inputs.q, inputs.k, inputs.v))
    return flash(inputs, q, k, v, tile_keys[q.values.shape[1]], round_f16, round_f16)


def flash_fp8(
    inputs: Inputs, rng: np.random.Generator, *, by_block: bool, incoherent: bool
) -> Float32Array:
    """FlashAttention-3 with e4m3 inputs and weights: float16 activations, rotated in float32 if
    ``incoherent``, are quantised with a scale for each tile that a CTA loads, or for all rows.
    """
    q, k, v = (round_f16(x) for x in (inputs.q, inputs.k, inputs.v))
    d = q.shape[1]
    keys = _FA3_FP8_KEYS[d]
    if incoherent:
        rotation = random_rotation(rng, d)
        q, k = q @ rotation, k @ rotation
    q_block, kv_block = (_QUERY_BLOCK, keys) if by_block else (None, None)
    return flash(
        inputs,
        quantize_e4m3(q, q_block),
        quantize_e4m3(k, kv_block),
        quantize_e4m3(v, kv_block),
        keys,
        round_e4m3,
        round_bf16,
        _WEIGHT_SHIFT,
    )


METHODS: tuple[Method, ...] = (
    Method("standard fp16", 3.2e-4, standard_fp16),
    Method("FlashAttention-2 fp16", 1.9e-4, partial(flash_fp16, tile_keys=_FA2_KEYS)),
    Method("FlashAttention-3 fp16", 1.9e-4, partial(flash_fp16, tile_keys=_FA3_FP16_KEYS)),
    Method("standard fp8", 2.4e-2, standard_fp8),
    Method("FlashAttention-3 fp8", 9.1e-3, partial(flash_fp8, by_block=True, incoherent=True)),
    Method("  without block scales", 9.3e-3, partial(flash_fp8, by_block=False, incoherent=True)),
    Method("  without rotation", 2.4e-2, partial(flash_fp8, by_block=True, incoherent=False)),
)
"""The paper's table, in its order."""
