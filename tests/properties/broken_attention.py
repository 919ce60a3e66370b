"""Naive attention, FlashAttention, Flash-Decoding and the FP8 KV cache, broken: kernels by one edit
of their text, and models by a patch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mutants import Mutant, mutant

import properties.flash_attention
import properties.flash_decoding
from simkit.algorithms import fp8_error_study as study
from simkit.numerics import formats
from simkit.numerics.online_softmax import OnlineSoftmax

FLASH = "flash_attention"
DECODING = "flash_decoding"
NAIVE = "naive_attention"
CACHE = "fp8_kv_cache"
SCHEDULES = ("schedules", "hazards", "bits")
QUANTIZE = ("quantize_bits", "layout")

MUTANTS: list[Mutant] = [
    # Dropped synchronisation: right as long as all warps happen to keep step.
    mutant(
        FLASH,
        "barrier after the tile's wait dropped",
        "    __syncthreads();  // the tile is here for every warp, and no warp still reads the one"
        " before",
        "",
        *SCHEDULES,
    ),
    mutant(
        FLASH,
        "barrier before O is stored dropped",
        "  __syncthreads();\n  store_tile",
        "  store_tile",
        *SCHEDULES,
    ),
    mutant(
        FLASH,
        "wait for the copy of K and V dropped",
        "    cp_async_wait<0>();\n    __syncthreads();  // the tile is here",
        "    __syncthreads();  // the tile is here",
        *SCHEDULES,
    ),
    mutant(
        FLASH,
        "wait for Q allows one group more",
        "cp_async_wait<1>",
        "cp_async_wait<2>",
        *SCHEDULES,
    ),
    # Wrong arithmetic
    mutant(FLASH, "mask edge off by one", "if (key > last_key)", "if (key >= last_key)"),
    mutant(
        FLASH,
        "mask only in the last tile",
        "mask.last_key(first_row)) {",
        "mask.last_key(first_row + 63)) {",
    ),
    mutant(FLASH, "accumulator not rescaled", "    rescale(output, alpha);\n", ""),
    mutant(FLASH, "sum not rescaled", "__fmul_rn(state.sum[half], alpha[half])", "state.sum[half]"),
    mutant(
        FLASH,
        "running maximum lost",
        "maximum = fmaxf(state.maximum[half], butterfly_max<2>(maximum));",
        "maximum = butterfly_max<2>(maximum);",
    ),
    mutant(
        FLASH,
        "maximum of two lanes of four",
        "butterfly_max<2>(maximum)",
        "butterfly_max<1>(maximum)",
    ),
    mutant(
        FLASH,
        "scale forgotten in alpha",
        "softmax_weight(state.maximum[half], scale, scaled_shift)",
        "softmax_weight(state.maximum[half], 1.0f, scaled_shift)",
    ),
    mutant(
        FLASH,
        "last tile skipped",
        "(visible_keys + kKeyTile - 1) / kKeyTile",
        "max(visible_keys / kKeyTile, 1)",
    ),
    mutant(
        FLASH,
        "buffers do not alternate",
        "const unsigned buffer = tile % 2 * kTileBytes;\n    float s",
        "const unsigned buffer = 0;\n    float s",
    ),
    mutant(FLASH, "wrong KV head", "head / (heads / kv_heads)", "head % kv_heads"),
    mutant(
        FLASH,
        "LSE in base 2 units",
        "lse_rows[row] = softmax_lse(scaled_maximum, sum)",
        "lse_rows[row] = softmax_lse(state.maximum[half], sum)",
    ),
    mutant(FLASH, "diagonal aligned top left", "row + kv_len - q_len)", "row)"),
    mutant(
        FLASH,
        "one tile read too often",
        "(visible_keys + kKeyTile - 1) / kKeyTile",
        "(kv_len + kKeyTile - 1) / kKeyTile",
        "bits",
        "traffic",
    ),
    # Flash-Decoding
    mutant(
        DECODING,
        "barrier between scores and softmax dropped",
        "kv_len - tile * kKeyTile);\n    __syncthreads();",
        "kv_len - tile * kKeyTile);",
        *SCHEDULES,
    ),
    mutant(
        DECODING,
        "barrier between softmax and output dropped",
        "states, scale_log2);\n    __syncthreads();",
        "states, scale_log2);",
        *SCHEDULES,
    ),
    mutant(DECODING, "wait for the copy dropped", "    cp_async_wait<0>();\n", "", *SCHEDULES),
    mutant(
        DECODING,
        "padded keys not masked",
        "static_cast<int>(key) < keys_left ? sums[i] : negative_infinity()",
        "sums[i]",
    ),
    mutant(
        DECODING,
        "output not rescaled",
        "__fmul_rn(output[i], alpha[first_head + i * kOutputHeads])",
        "output[i]",
    ),
    mutant(
        DECODING,
        "maximum not scaled",
        "__fmul_rn(maxima[threadIdx.x], scale_log2)",
        "maxima[threadIdx.x]",
    ),
    mutant(
        DECODING,
        "empty split leaves its sum unwritten",
        "      l_partial[partial_start + threadIdx.x] = 0.0f;\n",
        "",
    ),
    mutant(
        DECODING,
        "last split merged twice",
        "split < splits; ++split) {\n    const",
        "split < splits + (splits > 1); ++split) {\n    const",
        "bits",
        "traffic",
    ),
    mutant(
        DECODING, "merge without the other's weight", "__fmul_rn(b.output, b_weight)", "b.output"
    ),
    mutant(
        DECODING,
        "splits lose the last tile",
        "min(first_tile + split_tiles, all_tiles)",
        "min(first_tile + split_tiles, max(all_tiles - 1, 1))",
    ),
    mutant(
        DECODING,
        "wrong offset of the partial output",
        "partial_start * kHeadDim + index",
        "partial_start + index",
    ),
    # Naive attention
    mutant(
        NAIVE,
        "barrier after loading dropped",
        "            first_key);\n  __syncthreads();",
        "            first_key);",
        *SCHEDULES,
    ),
    mutant(
        NAIVE,
        "barrier of the output loop dropped",
        "    load_tile(v_tile, v_rows, first_key);\n    __syncthreads();",
        "    load_tile(v_tile, v_rows, first_key);",
        *SCHEDULES,
    ),
    mutant(
        NAIVE,
        "no barrier before tiles are overwritten",
        "    __syncthreads();  // no thread still reads the tiles before\n",
        "",
        *SCHEDULES,
    ),
    mutant(NAIVE, "scale forgotten", "__fmul_rn(scores[j], scale)", "scores[j]"),
    mutant(
        NAIVE,
        "mask edge off by one",
        "first_key + tile_key + j <= last_key",
        "first_key + tile_key + j < last_key",
    ),
    mutant(
        NAIVE,
        "softmax skips the last keys",
        "key < kv_len; key += kWarpSize) {\n    sum",
        "key + 1 < kv_len; key += kWarpSize) {\n    sum",
        "bits",
        "traffic",
    ),
    mutant(
        NAIVE,
        "output skips the tail",
        "first_key < kv_len; first_key += kTile",
        "first_key + kTile <= kv_len; first_key += kTile",
        "bits",
        "traffic",
    ),
    mutant(NAIVE, "wrong V head", "query / (heads / kv_heads)", "query % kv_heads"),
    # FP8 KV cache
    mutant(
        CACHE,
        "wrong byte offset of the scales",
        "reinterpret_cast<float*>(record + kScaleOffset)",
        "reinterpret_cast<float*>(record + kScaleOffset + 4)",
        *QUANTIZE,
    ),
    mutant(
        CACHE,
        "scale of the neighbour tile",
        "[lane / kLanesPerScale] = scale",
        "[lane / kLanesPerScale ^ 1] = scale",
        *QUANTIZE,
    ),
    mutant(
        CACHE,
        "amax over half a tile",
        "distance < kLanesPerScale",
        "distance < kLanesPerScale / 2",
        *QUANTIZE,
    ),
    mutant(
        CACHE,
        "scale not rounded to a power of two",
        "round_up_to_power_of_two(fmaxf(__fdiv_rn(amax, largest), smallest_ratio))",
        "fmaxf(__fdiv_rn(amax, largest), smallest_ratio)",
        *QUANTIZE,
    ),
    mutant(
        CACHE,
        "RoPE not copied",
        "  reinterpret_cast<unsigned*>(record + kRopeOffset)[lane] =\n"
        "      reinterpret_cast<const unsigned*>(source + kScaledValues)[lane];\n",
        "",
        *QUANTIZE,
    ),
    mutant(
        CACHE,
        "last token skipped",
        "if (token >= tokens) return;\n  const bf16* source",
        "if (token >= tokens - 1) return;\n  const bf16* source",
        *QUANTIZE,
    ),
    mutant(
        CACHE,
        "bytes of a pair swapped",
        "static_cast<unsigned short>(codes), x[0], x[1]",
        "static_cast<unsigned short>(codes), x[1], x[0]",
        "dequantize_bits",
        "round_trip",
    ),
    mutant(
        CACHE,
        "two tokens in one record",
        "unsigned char* record = cache + token * kRecordBytes;\n\n",
        "unsigned char* record = cache + token / 2 * 2 * kRecordBytes;\n\n",
        *QUANTIZE,
    ),
    mutant(
        CACHE,
        "last token not read",
        "if (token >= tokens) return;\n  const unsigned char* record",
        "if (token >= tokens - 1) return;\n  const unsigned char* record",
        "dequantize_bits",
        "round_trip",
    ),
    mutant(
        CACHE,
        "two tokens read into one",
        "bf16* target = out + token * kTokenValues",
        "bf16* target = out + token / 2 * 2 * kTokenValues",
        "dequantize_bits",
        "round_trip",
    ),
]

BROKEN_KERNELS: dict[tuple[str, str], str] = {
    (NAIVE, "bits"): "wrong V head",
    (NAIVE, "traffic"): "output skips the tail",
    (NAIVE, "schedules"): "no barrier before tiles are overwritten",
    (NAIVE, "hazards"): "barrier of the output loop dropped",
    (NAIVE, "accuracy"): "mask edge off by one",
    (FLASH, "bits"): "wrong KV head",
    (FLASH, "traffic"): "one tile read too often",
    (FLASH, "schedules"): "barrier before O is stored dropped",
    (FLASH, "hazards"): "wait for the copy of K and V dropped",
    (FLASH, "accuracy"): "accumulator not rescaled",
    (FLASH, "lse"): "LSE in base 2 units",
    (DECODING, "bits"): "merge without the other's weight",
    (DECODING, "traffic"): "splits lose the last tile",
    (DECODING, "schedules"): "barrier between scores and softmax dropped",
    (DECODING, "hazards"): "empty split leaves its sum unwritten",
    (DECODING, "accuracy"): "output not rescaled",
    (DECODING, "lse"): "maximum not scaled",
    (DECODING, "splitting"): "wrong offset of the partial output",
    (CACHE, "layout"): "RoPE not copied",
    (CACHE, "quantize_bits"): "amax over half a tile",
    (CACHE, "quantize_traffic"): "last token skipped",
    (CACHE, "quantize_schedules"): "two tokens in one record",
    (CACHE, "quantize_hazards"): "two tokens in one record",
    (CACHE, "dequantize_hazards"): "two tokens read into one",
    (CACHE, "dequantize_bits"): "bytes of a pair swapped",
    (CACHE, "dequantize_traffic"): "last token not read",
    (CACHE, "dequantize_schedules"): "two tokens read into one",
    (CACHE, "round_trip"): "scale of the neighbour tile",
    (CACHE, "idempotent"): "bytes of a pair swapped",
}

Patch = Callable[[pytest.MonkeyPatch], None]


def scaled_bounds(algorithm: Any, function: str, factor: float) -> Patch:
    """The derived bounds times ``factor``."""
    original = getattr(algorithm, function)

    def scaled(*args: Any) -> Any:
        bounds = original(*args)
        return replace(bounds, o=bounds.o * factor, lse=bounds.lse * factor)

    return lambda patch: patch.setattr(algorithm, function, scaled)


def broken_merge(merge: Callable[[OnlineSoftmax, OnlineSoftmax], OnlineSoftmax]) -> Patch:
    return lambda patch: patch.setattr(OnlineSoftmax, "merge", merge)


def unscaled_merge(one: OnlineSoftmax, other: OnlineSoftmax) -> OnlineSoftmax:
    """Forgets the weight of the second state."""
    m = np.maximum(one.m, other.m)
    weight = np.exp2(one.m - np.where(np.isneginf(m), 0, m))
    o = np.nan_to_num(one.o) * weight[:, None] + np.nan_to_num(other.o)
    return OnlineSoftmax(m, one.l * weight + other.l, o)


def merge_that_reads_empty_outputs(one: OnlineSoftmax, other: OnlineSoftmax) -> OnlineSoftmax:
    """Multiplies what an empty state holds by zero instead of ignoring it."""
    m = np.maximum(one.m, other.m)
    shift = np.where(np.isneginf(m), 0, m)
    a, b = np.exp2(one.m - shift), np.exp2(other.m - shift)
    return OnlineSoftmax(m, one.l * a + other.l * b, one.o * a[:, None] + other.o * b[:, None])


def ties_toward_zero(patch: pytest.MonkeyPatch) -> None:
    """Rounds e4m3 ties toward zero."""
    encode = formats.encode_e4m3
    patch.setattr(formats, "encode_e4m3", lambda x: encode(np.nextafter(x, np.float32(0))))


def unrounded_study(patch: pytest.MonkeyPatch) -> None:
    """Leaves everything unrounded that the paper rounds to e4m3."""
    patch.setattr(study, "round_e4m3", lambda x: x)


BROKEN_MODELS: dict[tuple[str, str], list[Patch]] = {
    (FLASH, "bound_quality"): [
        scaled_bounds(properties.flash_attention, "problem_bounds", 1 / 100),
        scaled_bounds(properties.flash_attention, "problem_bounds", 100),
    ],
    (DECODING, "bound_quality"): [
        scaled_bounds(properties.flash_decoding, "decoding_bounds", 1 / 100),
        scaled_bounds(properties.flash_decoding, "decoding_bounds", 100),
    ],
    (DECODING, "merge_associative"): [broken_merge(unscaled_merge)],
    (DECODING, "merge_commutative"): [broken_merge(unscaled_merge)],
    (DECODING, "merge_exact"): [broken_merge(unscaled_merge)],
    (DECODING, "merge_identity"): [broken_merge(merge_that_reads_empty_outputs)],
    (CACHE, "codecs"): [ties_toward_zero],
    ("fp8_error_study", "published"): [unrounded_study],
}
