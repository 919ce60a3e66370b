"""Batched attention, broken: its kernels by one edit of their text or of the headers that are their
body, the host side by a patch.

Most of these faults serving engines have had: each comes once, in the kernel that shows it best.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mutants import Mutant, edited_source, mutant

from gpu.counters import Report
from gpu.kernels import batch_attention as batch_host
from gpu.kernels.merge_states import launch_merge_states_variable
from properties import batch_case
from simkit.algorithms.batch_bounds import batch_bounds
from simkit.algorithms.batch_problem import BatchProblem
from simkit.numerics.exp2 import LOG2E

DECODE = "batch_decode"
PAGED = "batch_prefill_paged"
RAGGED = "batch_prefill_ragged"
SPARSE = "block_sparse_attention"
CASCADE = "cascade_attention"
ORDER = ("schedules", "hazards", "bits")
HALVES = "    for (int half = 0; half < 2; ++half) {\n"

MUTANTS: list[Mutant] = [
    # Which query, which head: packed rows
    mutant(
        PAGED,
        "query of a packed row by shifts",
        "place.row = packed / group;",
        "place.row = packed >> (31 - __clz(group));",
    ),
    mutant(
        RAGGED,
        "keys of a tile by shifts of its rows",
        "const int first_row = first_packed / group;",
        "const int first_row = first_packed >> (31 - __clz(group));",
        "bits",
        "traffic",
    ),
    mutant(
        DECODE,
        "heads of a group far apart",
        "place.head = kv_head * group + packed - place.row * group;",
        "place.head = (packed - place.row * group) * a.kv_heads + kv_head;",
    ),
    mutant(CASCADE, "one K/V head for all", "kv_head(head)", "kv_head(0)"),
    mutant(
        DECODE,
        "rows that fill up a tile are stored",
        "if (place.row >= q_len) continue;",
        "if (place.row > q_len) continue;",
        "bits",
        "schedules",
        "traffic",
    ),
    mutant(
        PAGED,
        "queries of the next request are loaded",
        "place.row < q_len ? kVectorBytes : 0",
        "kVectorBytes",
        "traffic",
    ),
    mutant(
        SPARSE,
        "last block row as long as the others",
        "q_len(min(a.block_rows, static_cast<int>(a.q_rows - start)))",
        "q_len(a.block_rows)",
        "bits",
        "traffic",
    ),
    # Where keys lie: tables
    mutant(
        PAGED,
        "int64 tables read as int32",
        "using index = long long;",
        "using index = int;",
        shows='"index_bits": 64',
    ),
    mutant(
        DECODE,
        "length of the last page ignored",
        "static_cast<int>((count - 1) * size + last_block_len[request])",
        "static_cast<int>(count * size)",
        "bits",
        "traffic",
    ),
    mutant(
        DECODE,
        "last length of a request without pages read",
        "count > 0 ? static_cast<int>((count - 1) * size + last_block_len[request]) : 0",
        "static_cast<int>((count - 1) * size + last_block_len[request])",
        "traffic",
    ),
    mutant(PAGED, "NHD and HND swapped", "#ifdef KV_HND", "#ifndef KV_HND"),
    mutant(PAGED, "page of the next key", "key / block_size", "(key + 1) / block_size"),
    mutant(
        SPARSE,
        "blocks of the block row before",
        "blocks = indices + first;",
        "blocks = indices + max(first - 1, index(0));",
    ),
    mutant(RAGGED, "keys of the first request", "(start + key) * kv_heads", "key * kv_heads"),
    mutant(
        CASCADE,
        "every chunk begins with the first key",
        "key < stop ? keys.number(key) : 0",
        "key < stop ? keys.number(key - begin) : 0",
        shows='"split": 64',
    ),
    mutant(
        CASCADE,
        "numbers of keys do not alternate",
        "numbers[tile % 2][threadIdx.x]",
        "numbers[0][threadIdx.x]",
        *ORDER,
    ),
    mutant(
        DECODE,
        "keys after the last are loaded, too",
        "static_cast<int>(row) < count ? kVectorBytes : 0",
        "kVectorBytes",
        "bits",
        "traffic",
    ),
    # What a query sees
    mutant(
        RAGGED,
        "window one key short",
        "position - variant.window_left,",
        "position - variant.window_left + 1,",
        shows='"window_left": 63',
    ),
    mutant(
        DECODE,
        "window one key too long",
        "max(position - variant.window_left, 0)",
        "max(position - variant.window_left - 1, 0)",
        shows='"window_left": 0',
    ),
    mutant(
        PAGED,
        "window of the last row only",
        "first_key >= last_band.first",
        "first_key >= first_band.first",
        shows='"window_left": 63',
    ),
    mutant(
        RAGGED,
        "diagonal of the first row only",
        "end_key <= first_band.end",
        "end_key <= last_band.end",
    ),
    mutant(
        PAGED,
        "diagonal aligned top left",
        "return row + kv_len - q_len;",
        "return row;",
    ),
    mutant(RAGGED, "mask edge off by one", "min(position + 1, kv_len)", "min(position, kv_len)"),
    mutant(
        DECODE,
        "keys after the chunk are seen",
        "at.key < stop && is_visible",
        "is_visible",
        shows='"split": 64',
    ),
    mutant(
        PAGED,
        "custom mask ignored in full tiles",
        "sees_all = !CUSTOM_MASK && ",
        "sees_all = ",
        shows="custom_mask",
    ),
    mutant(
        SPARSE,
        "custom mask ignored",
        "if (CUSTOM_MASK) visible = visible && custom;",
        "",
        shows='"elements": true',
    ),
    mutant(
        RAGGED,
        "mask bits high bit first",
        ">> offset & 1",
        ">> (offset ^ 7) & 1",
        shows="custom_mask",
    ),
    mutant(
        RAGGED,
        "mask rows begin at bytes",
        "return shift == 0 ? low : low >> shift | high << (64 - shift);",
        "return low;",
        shows="custom_mask",
    ),
    mutant(
        PAGED,
        "ninth byte of a row of the mask lost",
        "low >> shift | high << (64 - shift)",
        "low >> shift",
        shows="custom_mask",
    ),
    mutant(
        DECODE,
        "mask of the first request",
        "variant.mask + variant.mask_indptr[request]",
        "variant.mask",
        "bits",
        "traffic",
        shows="custom_mask",
    ),
    mutant(
        SPARSE,
        "mask of the first query",
        "custom_bits[row.row - first_row]",
        "custom_bits[0]",
        shows='"elements": true',
    ),
    # What keys weigh
    mutant(
        RAGGED,
        "soft cap of the score before its scale",
        "tanh_polynomial(__fmul_rn(logit, variant.soft_cap_inverse))",
        "tanh_polynomial(__fmul_rn(score, variant.soft_cap_inverse))",
        shows="soft_cap",
    ),
    mutant(
        CASCADE,
        "tanh of positive numbers only",
        "x < 0.0f ? -size : size",
        "size",
        shows="soft_cap",
    ),
    mutant(
        RAGGED, "ALiBi favours what is far", "slope, -distance", "slope, distance", shows="alibi"
    ),
    mutant(
        DECODE,
        "ALiBi by the row, not its position",
        "abs(at.position() - at.key)",
        "abs(at.row - at.key)",
        shows="alibi",
    ),
    mutant(
        RAGGED,
        "ALiBi slope of the K/V head",
        "variant.alibi_slopes[place.head]",
        "variant.alibi_slopes[kv_head]",
        "bits",
        "traffic",
        shows="alibi",
    ),
    mutant(RAGGED, "sink in every chunk", "chunk == 0", "true", "bits", "traffic", shows="sink"),
    mutant(
        DECODE,
        "sink counts for every lane",
        "key_warp == 0 && lane.member == 0 ? 1.0f : 0.0f",
        "1.0f",
        shows="sink",
    ),
    mutant(
        CASCADE,
        "sink has a value of its own",
        "sum[half] = key_warp == 0 && lane.member == 0 ? 1.0f : 0.0f;",
        "sum[half] = key_warp == 0 && lane.member == 0 ? 1.0f : 0.0f;"
        " for (auto& tile : output) tile[2 * half] = tile[2 * half + 1] = 1.0f;",
        shows="sink",
    ),
    mutant(
        RAGGED,
        "RoPE position of queries off by one",
        "max(rows[row].row + kv_len - q_len, 0)",
        "max(rows[row].row + kv_len - q_len - 1, 0)",
        "bits",
        "traffic",
        shows="rope",
    ),
    mutant(
        DECODE,
        "RoPE positions begin anew in every tile",
        "return first_key + row < stop ? first_key + row : -1;",
        "return first_key + row < stop ? static_cast<int>(row) : -1;",
        "bits",
        "traffic",
        shows="rope",
    ),
    mutant(
        PAGED,
        "RoPE of neighbouring values",
        "turned_a[i] = __fmaf_rn(a[i], cosine, -__fmul_rn(b[i], sine));",
        "turned_a[i] = i % 2 ? __fmaf_rn(a[i], cosine, __fmul_rn(a[i ^ 1], sine))"
        " : __fmaf_rn(a[i], cosine, -__fmul_rn(a[i ^ 1], sine));",
        shows="rope",
    ),
    mutant(
        DECODE,
        "codes of a pair swapped",
        "x[2 * pair],\n                         x[2 * pair + 1]",
        "x[2 * pair + 1],\n                         x[2 * pair]",
        shows="e4m3",
    ),
    mutant(
        RAGGED,
        "v_scale dropped",
        "__fmul_rn(transform_output(variant, value, at, column), a.v_scale)",
        "transform_output(variant, value, at, column)",
        shows="e4m3",
    ),
    mutant(
        PAGED,
        "FP8 tiles overlap",
        "tile % 2 * (kValueTileBytes / 2 * kKvBytes)",
        "tile % 2 * (kValueTileBytes / 4 * kKvBytes)",
        *ORDER,
    ),
    mutant(
        RAGGED,
        "output hook of the next column",
        "transform_output(variant, value, at, column)",
        "transform_output(variant, value, at, column + 1)",
        shows="damped",
    ),
    mutant(
        RAGGED,
        "hidden keys of a user's variant seen in full tiles",
        "!CUSTOM_MASK && !USER_VARIANT && ",
        "!CUSTOM_MASK && ",
        shows="damped",
    ),
    # Softmax
    mutant(
        PAGED,
        "output not rescaled",
        "output[tile][2 * half + 1] = __fmul_rn(output[tile][2 * half + 1], alpha);",
        "",
    ),
    mutant(
        DECODE,
        "output of CUDA cores not rescaled",
        "      output[i] = __fmul_rn(output[i], shared.alpha[row]);\n",
        "",
        shows='"cuda_cores": true',
    ),
    mutant(
        RAGGED,
        "sum not rescaled",
        "float total = __fmul_rn(sum[half], alpha);",
        "float total = sum[half];",
    ),
    mutant(
        SPARSE,
        "maximum of the tile alone",
        "const float next = fmaxf(maximum[half], maxima[half]);",
        "const float next = maxima[half];",
    ),
    mutant(
        CASCADE,
        "maximum of the warp's own keys",
        "maxima[half] = fmaxf(maxima[half], shared.maxima[warp][lane.row(half)]);",
        "",
    ),
    mutant(
        DECODE,
        "maximum of half the lanes",
        "butterfly_max<kWarpSize / 2>(fmaxf(left, right))",
        "butterfly_max<kWarpSize / 4>(fmaxf(left, right))",
        shows='"cuda_cores": true',
    ),
    mutant(
        SPARSE,
        "sum without the last warp",
        "int warp = 1; warp < kKeyWarps;",
        "int warp = 1; warp < kKeyWarps - 1;",
    ),
    mutant(
        CASCADE,
        "rows without keys divided by 0",
        "__fdiv_rn(any_key ? output : 0.0f, any_key ? sum : 1.0f)",
        "__fdiv_rn(output, sum)",
        shows='"kv_lens": [[0]',
    ),
    mutant(
        PAGED,
        "minus infinity is a number",
        "return __int_as_float(0xff800000);",
        "return -5e4f;",
    ),
    mutant(
        CASCADE,
        "LSE in base 2",
        "constexpr float ln2 = 0x1.62e430p-1f;",
        "constexpr float ln2 = 1;",
    ),
    # Items of the plan
    mutant(
        DECODE,
        "requests without keys are left out",
        "  AttentionTile attention;\n",
        "  if (tiles == 0) return;\n  AttentionTile attention;\n",
    ),
    mutant(
        RAGGED,
        "tiles before the first key are left out",
        "  AttentionTile attention;\n",
        "  if (last_band.end <= 0) return;\n  AttentionTile attention;\n",
    ),
    mutant(
        DECODE,
        "CTAs without an item work, too",
        "  const int request = a.requests[blockIdx.x];\n  if (request < 0) return;\n",
        "  const int request = max(a.requests[blockIdx.x], 0);\n",
        "traffic",
        "hazards",
        shows='"graph": true',
    ),
    mutant(
        RAGGED,
        "chunk one key short",
        "min(from + a.kv_chunk, static_cast",
        "min(from + a.kv_chunk - 1, static_cast",
        "bits",
        "traffic",
    ),
    mutant(
        PAGED,
        "chunks overlap by a key",
        "min(from + a.kv_chunk, static_cast",
        "min(from + a.kv_chunk + 1, static_cast",
        "bits",
        "traffic",
        shows='"split": 64',
    ),
    mutant(
        CASCADE,
        "first key of a chunk lost",
        "min(from, static_cast<long long>(stop))",
        "min(from + (chunk > 0), static_cast<long long>(stop))",
        "bits",
        "traffic",
        shows='"split": 64',
    ),
    mutant(
        SPARSE,
        "last tile of a chunk skipped",
        "const int tiles = (stop - begin + kKeyTile - 1) / kKeyTile;",
        "const int tiles = (stop - begin + kKeyTile - 2) / kKeyTile;",
        "bits",
        "traffic",
    ),
    mutant(
        PAGED,
        "states of all requests where the first one's are",
        "a.state_rows[queries.start + place.row]",
        "a.state_rows[place.row]",
        shows='"split": 64',
    ),
    mutant(
        CASCADE,
        "chunks in one state",
        "a.state_rows[queries.start + place.row] + chunk",
        "a.state_rows[queries.start + place.row]",
        "bits",
        "hazards",
        shows='"split": 64',
    ),
    mutant(
        SPARSE,
        "chunks in one state",
        "a.state_rows[queries.start + place.row] + chunk",
        "a.state_rows[queries.start + place.row]",
        "bits",
        "hazards",
        shows='"split": 64',
    ),
    mutant(
        DECODE,
        "partial LSE of the head before",
        "[row * a.heads + place.head] = row_lse",
        "[row * a.heads + place.head / 2 * 2] = row_lse",
        "bits",
        "hazards",
    ),
    # Order: right as long as all warps happen to keep step.
    mutant(
        PAGED,
        "barrier after the tile's wait dropped",
        "    __syncthreads();  // the tile is here",
        "    // the tile is here",
        *ORDER,
    ),
    mutant(RAGGED, "wait allows one group more", "cp_async_wait<0>", "cp_async_wait<1>", *ORDER),
    mutant(
        RAGGED,
        "barrier after decoding dropped",
        "    if (kPrepares) __syncthreads();\n",
        "",
        "bits",
        "hazards",
        shows="e4m3",
    ),
    mutant(
        PAGED,
        "barrier before O is staged dropped",
        "  __syncthreads();  // O takes the place of K and V\n",
        "",
        "hazards",
        shows='"tile_q": 64',
    ),
    mutant(
        SPARSE,
        "barrier before O is stored dropped",
        "  __syncthreads();\n\n  // Rows of 16-byte chunks",
        "\n  // Rows of 16-byte chunks",
        *ORDER,
    ),
    mutant(
        PAGED,
        "barrier before the first copies dropped",
        "  if (tiles > 1) find_rows(1);\n  __syncthreads();\n",
        "  if (tiles > 1) find_rows(1);\n",
        *ORDER,
    ),
    mutant(
        CASCADE,
        "barrier before maxima are read dropped",
        "    __syncthreads();\n#pragma unroll\n" + HALVES + "#pragma unroll",
        "#pragma unroll\n" + HALVES + "#pragma unroll",
        *ORDER,
    ),
    mutant(
        SPARSE,
        "barrier before weights are read dropped",
        "      __syncthreads();\n      const unsigned row",
        "      const unsigned row",
        *ORDER,
    ),
    mutant(
        DECODE,
        "barrier before sums are read dropped",
        "    __syncthreads();\n#pragma unroll\n" + HALVES + "      sum",
        "#pragma unroll\n" + HALVES + "      sum",
        *ORDER,
    ),
    mutant(
        DECODE,
        "barrier between scores and softmax dropped",
        "    scores(step, shared);\n    __syncthreads();\n",
        "    scores(step, shared);\n",
        "hazards",
        "bits",
        shows='"cuda_cores": true',
    ),
    mutant(
        DECODE,
        "barrier between softmax and output dropped",
        "    softmax(step.factor, shared);\n    __syncthreads();\n",
        "    softmax(step.factor, shared);\n",
        "hazards",
        "bits",
        shows='"cuda_cores": true',
    ),
]

BROKEN_KERNELS: dict[tuple[str, str], str] = {
    (DECODE, "bits"): "heads of a group far apart",
    (DECODE, "traffic"): "length of the last page ignored",
    (DECODE, "schedules"): "barrier before sums are read dropped",
    (DECODE, "hazards"): "partial LSE of the head before",
    (DECODE, "accuracy"): "output of CUDA cores not rescaled",
    (DECODE, "lse"): "sink counts for every lane",
    (PAGED, "bits"): "query of a packed row by shifts",
    (PAGED, "traffic"): "chunks overlap by a key",
    (PAGED, "schedules"): "barrier after the tile's wait dropped",
    (PAGED, "hazards"): "barrier before the first copies dropped",
    (PAGED, "accuracy"): "page of the next key",
    (PAGED, "lse"): "minus infinity is a number",
    (PAGED, "layouts"): "NHD and HND swapped",
    (RAGGED, "bits"): "mask bits high bit first",
    (RAGGED, "traffic"): "chunk one key short",
    (RAGGED, "schedules"): "wait allows one group more",
    (RAGGED, "hazards"): "wait allows one group more",
    (RAGGED, "accuracy"): "v_scale dropped",
    (RAGGED, "lse"): "sum not rescaled",
    (RAGGED, "alone"): "keys of the first request",
    (RAGGED, "flash_attention"): "mask edge off by one",
    (SPARSE, "bits"): "mask of the first query",
    (SPARSE, "traffic"): "last tile of a chunk skipped",
    (SPARSE, "schedules"): "barrier before O is stored dropped",
    (SPARSE, "hazards"): "chunks in one state",
    (SPARSE, "accuracy"): "mask of the first query",
    (SPARSE, "lse"): "sum without the last warp",
    (CASCADE, "bits"): "sink has a value of its own",
    (CASCADE, "traffic"): "first key of a chunk lost",
    (CASCADE, "schedules"): "barrier before maxima are read dropped",
    (CASCADE, "hazards"): "chunks in one state",
    (CASCADE, "accuracy"): "one K/V head for all",
    (CASCADE, "lse"): "LSE in base 2",
    (CASCADE, "flat"): "every chunk begins with the first key",
}

Patch = Callable[[pytest.MonkeyPatch], None]


def replaced(place: Any, name: str, function: Callable[..., Any]) -> Patch:
    return lambda patch: patch.setattr(place, name, function)


def merge_without_last_state(*args: Any) -> Report:
    """The merge of partial states leaves out the last one of each query."""
    loop = "for (long long state = first; state < end; ++state)"
    source = edited_source("merge_states", loop, loop.replace("state < end", "state + 1 < end"))
    return launch_merge_states_variable(*args, source=source)


def changed_arguments(**changes: Callable[[BatchProblem], Any]) -> Patch:
    """The kernel's arguments ``changes``, as these functions of the problem give them."""

    def arguments(problem: BatchProblem, *args: Any) -> np.void:
        found = np.frombuffer(bytearray(original(problem, *args).tobytes()), batch_host.ARGUMENTS)
        for name, change in changes.items():
            found[name] = change(problem)
        return np.void(found.tobytes())

    original = batch_host._arguments
    return replaced(batch_host, "_arguments", arguments)


def scaled_bounds(factor: float) -> Patch:
    """The derived bounds times ``factor``."""

    def scaled(*args: Any) -> Any:
        bounds = batch_bounds(*args)
        return replace(bounds, o=bounds.o * factor, lse=bounds.lse * factor)

    return replaced(batch_case, "batch_bounds", scaled)


MERGE = "launch_merge_states_variable"
BROKEN_MODELS: dict[tuple[str, str], list[Patch]] = {
    (DECODE, "accuracy"): [
        replaced(batch_host, MERGE, merge_without_last_state),
        # k_scale is a part of the factor from scores to exponents.
        changed_arguments(factor=lambda problem: np.float32(problem.scale * LOG2E)),
        changed_arguments(v_scale=lambda problem: np.float32(1)),
    ],
    (RAGGED, "bound_quality"): [scaled_bounds(1 / 100), scaled_bounds(100)],
    (CASCADE, "flat"): [replaced(batch_host, MERGE, merge_without_last_state)],
}
"""Host sides and models with one fault each, by the law that notices it."""
