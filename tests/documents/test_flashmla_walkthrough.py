"""Figures of the FlashMLA source walkthrough that belong to its FP8 KV cache, from the model.

Each test names the section of the sentence that it checks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.algorithms.fp8_kv_cache import fp8_kv_dequantize, fp8_kv_quantize
from simkit.algorithms.problem import BF16
from simkit.layouts.fp8_record import (
    NOPE_BYTES,
    ROPE_BYTES,
    SCALE_BYTES,
    TOKEN_VALUES,
    unpack,
)
from simkit.machine.machine import Machine
from simkit.machine.memory import unbacked

GIB = 2**30
LAYERS = 62
CONTEXT = 128 * 1024


@cache
def _full_context() -> Machine:
    """The cache of one layer for a request of 128K tokens."""
    machine = Machine("h800", "none")
    fp8_kv_quantize(machine, unbacked((CONTEXT, TOKEN_VALUES), BF16))
    return machine


def _tokens(count: int) -> NDArray[Any]:
    return np.random.default_rng(0).standard_normal((count, TOKEN_VALUES)).astype(BF16)


def test_a_token_takes_656_bytes() -> None:
    """Introduction: the FP8 KV cache of a token takes 656 bytes."""
    machine = Machine("h800", "device")
    cache_of_tokens = fp8_kv_quantize(machine, _tokens(10)).cache
    assert cache_of_tokens.nbytes == 10 * 656
    assert machine.traffic["cache", "write"].requested == 10 * 656


def test_bf16_cache_of_a_full_context() -> None:
    """数据加载: 576 x 2 x 62 x 128 x 1024 is about 8.72 GiB for a request of 128K tokens."""
    assert f"{LAYERS * _full_context().compulsory_bytes('kv') / GIB:.2f}" == "8.72"


def test_the_fp8_cache_takes_nearly_half() -> None:
    """数据加载: quantisation nearly halves the memory."""
    machine = _full_context()
    ratio = machine.compulsory_bytes("cache") / machine.compulsory_bytes("kv")
    assert ratio == 656 / 1152
    assert 0.5 < ratio < 0.6


def test_fields_of_the_record() -> None:
    """数据加载, table: 512 bytes of e4m3, 16 bytes of scales, 128 bytes of RoPE."""
    sizes = [part.stop - part.start for part in (NOPE_BYTES, SCALE_BYTES, ROPE_BYTES)]
    assert sizes == [512, 16, 128]
    codes, scales, rope = unpack(fp8_kv_quantize(Machine(), _tokens(1)).cache)
    assert (codes.size, scales.size, rope.size) == (512, 4, 64)
    assert (scales.dtype, rope.dtype) == (np.float32, BF16)


def test_128_values_share_a_scale() -> None:
    """数据加载, table: every 128 FP8 values share one scale."""
    kv = _tokens(1)
    before = unpack(fp8_kv_quantize(Machine(), kv).cache)[1]
    for tile in range(4):
        changed = kv.copy()
        changed[0, 128 * tile + 5] = 1000
        after = unpack(fp8_kv_quantize(Machine(), changed).cache)[1]
        assert np.flatnonzero(after != before).tolist() == [tile]


def test_rope_is_not_quantised() -> None:
    """数据加载, table: the last 64 dimensions stay as they are."""
    kv = _tokens(5)
    cache_of_tokens = fp8_kv_quantize(Machine("h800", "device"), kv).cache
    out = fp8_kv_dequantize(Machine("h800", "device"), cache_of_tokens).out
    assert np.array_equal(out[:, 512:], kv[:, 512:])
    assert not np.array_equal(out[:, :512], kv[:, :512])


def test_the_vector_is_whole_again_after_dequantisation() -> None:
    """数据加载: 512 dequantised and 64 RoPE values make up the vector of 576 in bfloat16."""
    out = fp8_kv_dequantize(Machine("h800", "device"), fp8_kv_quantize(Machine(), _tokens(3)).cache)
    assert out.out.shape == (3, 576)
    assert out.out.dtype == BF16
