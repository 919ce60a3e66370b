"""Kernels broken by one edit of their source text."""

from __future__ import annotations

from dataclasses import dataclass

import gpu
from gpu.kernels.build import kernel_source
from properties.law import Context
from simkit.machine.gpus import gpu as find_gpu


@dataclass(frozen=True)
class Mutant:
    """One edit: ``old`` becomes ``new`` in the kernel's text; at least one of ``laws`` must see it."""

    algorithm: str
    name: str
    old: str
    new: str
    laws: frozenset[str] = frozenset({"bits"})

    def context(self) -> Context:
        """What laws are checked on when this mutant stands for its kernel."""
        text = kernel_source(self.algorithm)
        assert text.count(self.old) >= 1, "the edit no longer applies"
        device = gpu.open("ptx", options=gpu.Options(budget=2_000_000))
        changed = text.replace(self.old, self.new)
        return Context(device, find_gpu("h100"), sources={self.algorithm: changed})


def mutant(algorithm: str, name: str, old: str, new: str, *laws: str) -> Mutant:
    return Mutant(algorithm, name, old, new, frozenset(laws or ("bits",)))


FLASH = "flash_attention"
DECODING = "flash_decoding"
NAIVE = "naive_attention"
CACHE = "fp8_kv_cache"
SCHEDULES = ("bits", "schedules", "hazards")
QUANTIZE = ("quantize_bits", "layout")

MUTANTS = [
    # Dropped synchronisation: right as long as all warps happen to keep step.
    mutant(
        FLASH,
        "barrier after the tile's wait dropped",
        "    __syncthreads();  // the tile is here for every warp, and no warp still reads the one before",
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
        "kScaleOffset = kScaledValues,",
        "kScaleOffset = kScaledValues + 4,",
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
        "  reinterpret_cast<unsigned*>(record + kRopeOffset)[lane] =\n      reinterpret_cast<const unsigned*>(source + kScaledValues)[lane];\n",
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


def find(algorithm: str, name: str) -> Mutant:
    """The mutant of that name."""
    (found,) = (m for m in MUTANTS if (m.algorithm, m.name) == (algorithm, name))
    return found
