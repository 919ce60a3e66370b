"""Tile timelines: what one CTA of each algorithm's kernels does when, alone on its SM.

Durations follow from the device table: bytes over the SM's share of HBM bandwidth, FLOP over its
tensor-core rate, fp32 operations over its lanes. Nothing comes from L2, and instruction issue,
latencies and barriers take no time: a lower bound for a kernel whose working set misses L2.
The unit is the cycle of the clock behind the published peak (``Gpu.tensor_clock_hz``).
"""

from __future__ import annotations

from simkit.algorithms import flash_attention as flash
from simkit.algorithms import flash_decoding as decoding
from simkit.algorithms import fp8_kv_cache as kv_cache
from simkit.algorithms import naive_attention as naive
from simkit.algorithms.problem import AttentionProblem
from simkit.algorithms.tiles import tile_count, tiles
from simkit.errors import ShapeError
from simkit.layouts import fp8_record
from simkit.machine.gpus import Gpu
from simkit.schedules.cta import CtaTimeline
from traces.events import Trace

BF16_BYTES = 2
F32_BYTES = 4

# fp32 operations of exp2 (simkit.numerics.exp2): add, two subtractions, six fma, a multiplication.
EXP2_OPS = 10
# Of one score in online softmax: maximum, fma before exp2, exp2, and the sum.
ONLINE_SOFTMAX_OPS = EXP2_OPS + 3
# Of one value on its way to FP8: maximum of magnitudes, multiplication, conversion; and back.
QUANTIZE_OPS, DEQUANTIZE_OPS = 3, 2


MOST_TILES = 20_000
"""Longer timelines are refused: nobody reads a million events, and viewers do not open them."""


def flash_attention(gpu: Gpu, problem: AttentionProblem) -> Trace:
    """The CTA with the last tile of queries, which sees the most keys, of one head.

    The copy of the next K and V starts when the products with the present ones start.
    """
    tile = flash.Tile()
    _check_length("kv_len", problem.kv_len, tile.kv)
    rows = slice((tile_count(problem.q_len, tile.q) - 1) * tile.q, problem.q_len)
    q_rows, d = _length(rows), problem.d
    row_bytes = d * BF16_BYTES
    cta = CtaTimeline(gpu, "flash_attention CTA")
    cta.load("Q", q_rows * row_bytes)
    key_tiles = list(problem.visible_tiles(rows, tile.kv))
    if key_tiles:
        _load_keys(cta, 0, _length(key_tiles[0]) * row_bytes)
    for index in range(len(key_tiles)):
        cta.wait_for_loads()
        if index + 1 < len(key_tiles):
            _load_keys(cta, index + 1, _length(key_tiles[index + 1]) * row_bytes)
        # Tensor cores compute whole tiles, padded ones too.
        scores, product = tile.q * tile.kv, 2 * tile.q * tile.kv * d
        cta.tensor_cores(f"S {index}", product)
        cta.lanes(f"softmax {index}", scores * ONLINE_SOFTMAX_OPS + tile.q * d, "softmax")
        cta.tensor_cores(f"O {index}", product)
    cta.store("O", q_rows * row_bytes)
    cta.store("LSE", q_rows * F32_BYTES)
    return cta.trace(f"flash_attention on {gpu.name}")


def naive_attention(gpu: Gpu, problem: AttentionProblem) -> Trace:
    """One CTA of each of the three kernels, one after another; no copy overlaps with arithmetic."""
    tile, d, kv_len = naive.TILE, problem.d, problem.kv_len
    _check_length("kv_len", kv_len, tile)
    q_rows, keys = min(tile, problem.q_len), min(tile, kv_len)
    row_bytes = d * BF16_BYTES
    products = CtaTimeline(gpu, "naive_scores CTA")
    if kv_len:
        products.load("Q", q_rows * row_bytes)
        products.load("K", keys * row_bytes)
        products.wait_for_loads()
        products.lanes("S", tile * tile * (d + 1))
        products.store("S", q_rows * keys * BF16_BYTES)

    softmax = products.next_kernel("naive_softmax CTA")
    warp_rows = min(naive.ROWS_PER_CTA, problem.batch * problem.heads * problem.q_len)
    scores = warp_rows * kv_len
    passes = (("max", 1), ("sum", EXP2_OPS + 2), ("P", EXP2_OPS + 2))
    for name, operations in passes if kv_len else ():
        softmax.load("S", scores * BF16_BYTES)
        softmax.wait_for_loads()
        softmax.lanes(name, scores * operations, "softmax")
        softmax.wait_for_compute()
    if kv_len:
        softmax.store("P", scores * BF16_BYTES)

    output = softmax.next_kernel("naive_output CTA")
    for index, part in enumerate(tiles(kv_len, tile)):
        output.load(f"P {index}", q_rows * _length(part) * BF16_BYTES)
        output.load(f"V {index}", _length(part) * row_bytes)
        output.wait_for_loads()
        output.lanes(f"O {index}", tile * _length(part) * d)
        output.wait_for_compute()
    output.store("O", q_rows * row_bytes)
    return output.trace(f"naive_attention on {gpu.name}")


def flash_decoding(gpu: Gpu, problem: AttentionProblem, splits: int) -> Trace:
    """The first split's CTA, which has the most keys, then a CTA that combines one head."""
    d, group = problem.d, problem.group
    _check_length("kv_len", problem.kv_len, decoding.KEY_TILE)
    if not 1 <= splits <= decoding.max_splits(problem):
        raise ShapeError(f"splits is {splits}; it must be 1 to {decoding.max_splits(problem)}")
    heads = tile_count(group, 2) * 2  # scores go two heads at a time
    row_bytes = d * BF16_BYTES
    split = CtaTimeline(gpu, "flash_decoding_split CTA")
    key_tiles = list(tiles(decoding.split_keys(problem, splits, 0).stop, decoding.KEY_TILE))
    if key_tiles:
        _load_keys(split, 0, _length(key_tiles[0]) * row_bytes)
        split.load("Q", group * row_bytes)
    for index in range(len(key_tiles)):
        split.wait_for_loads()
        if index + 1 < len(key_tiles):
            _load_keys(split, index + 1, _length(key_tiles[index + 1]) * row_bytes)
        split.lanes(f"S {index}", heads * decoding.KEY_TILE * d)
        split.lanes(f"softmax {index}", heads * decoding.KEY_TILE * ONLINE_SOFTMAX_OPS, "softmax")
        split.lanes(f"O {index}", group * (decoding.KEY_TILE + 1) * d)
    split.store("m, l", 2 * group * F32_BYTES)
    if key_tiles:
        split.store("O", group * d * F32_BYTES)

    combine = split.next_kernel("flash_decoding_combine CTA")
    for index in range(splits):
        combine.load(f"m, l {index}", 2 * F32_BYTES)
        combine.load(f"O {index}", d * F32_BYTES)
        combine.wait_for_loads()
        # Two weights, and the sum and the output scaled by them, in each of d threads.
        combine.lanes(f"merge {index}", d * (2 * (EXP2_OPS + 1) + 4), "softmax")
        combine.wait_for_compute()
    combine.store("O", d * BF16_BYTES)
    combine.store("LSE", F32_BYTES)
    return combine.trace(f"flash_decoding on {gpu.name}")


def fp8_kv_cache(gpu: Gpu, tokens: int) -> Trace:
    """One CTA that writes records of the FP8 KV cache, and one that reads them."""
    if tokens < 1:
        raise ShapeError(f"the FP8 KV cache takes at least one token, got {tokens}")
    own = min(tokens, kv_cache.TOKENS_PER_CTA)
    value_bytes = fp8_record.TOKEN_VALUES * BF16_BYTES
    write = CtaTimeline(gpu, "fp8_kv_quantize CTA")
    write.load("KV", own * value_bytes)
    write.wait_for_loads()
    write.lanes("quantize", own * fp8_record.NOPE_VALUES * QUANTIZE_OPS, "convert")
    write.store("records", own * fp8_record.RECORD_BYTES)

    read = write.next_kernel("fp8_kv_dequantize CTA")
    read.load("records", own * fp8_record.RECORD_BYTES)
    read.wait_for_loads()
    read.lanes("dequantize", own * fp8_record.NOPE_VALUES * DEQUANTIZE_OPS, "convert")
    read.store("KV", own * value_bytes)
    return read.trace(f"fp8_kv_cache on {gpu.name}")


def _check_length(name: str, value: int, tile: int) -> None:
    if tile_count(value, tile) > MOST_TILES:
        raise ShapeError(
            f"{name} {value} is {tile_count(value, tile)} tiles of {tile}; "
            f"a timeline shows {MOST_TILES} at most"
        )


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _load_keys(cta: CtaTimeline, index: int, tile_bytes: int) -> None:
    cta.load(f"K {index}", tile_bytes)
    cta.load(f"V {index}", tile_bytes)
