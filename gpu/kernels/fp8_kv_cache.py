"""Host side of fp8_kv_cache.cu: the 656-byte FP8 KV-cache record of DeepSeek V3.2."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.device import Device, Module
from gpu.kernels.build import build_module
from gpu.kernels.checks import BF16, check_tensor
from gpu.kernels.result import KernelResult
from simkit.errors import CompileError, ShapeError

THREADS = 128
TOKENS_PER_CTA = 4  # one for each warp
TOKEN_VALUES = 576
RECORD_BYTES = 656
FIRST_ARCH = 89  # with FP8 conversions


def build(device: Device, *, source: str | None = None) -> Module:
    """fp8_kv_cache.cu; ``CompileError`` for a device before sm_89, which cannot convert to FP8."""
    if int(device.arch.removeprefix("sm_").rstrip("af")) < FIRST_ARCH:
        raise CompileError(
            f"fp8_kv_cache.cu needs sm_{FIRST_ARCH} or later for FP8 conversions; "
            f"the device is {device.arch}"
        )
    return build_module(device, "fp8_kv_cache", (), source)


def fp8_kv_quantize(device: Device, kv: NDArray[Any], *, source: str | None = None) -> KernelResult:
    """``kv`` [tokens, 576] bfloat16 to ``cache`` [tokens, 656] uint8.

    A record is 512 e4m3 codes, four float32 scales (powers of two, one for each 128 values) and
    the last 64 values unchanged. Raises ``DtypeError`` or ``ShapeError``.
    """
    check_tensor("kv", kv, BF16, ("tokens", TOKEN_VALUES))
    tokens = _token_count("kv", kv)
    cache = device.empty((tokens, RECORD_BYTES), np.uint8, name="cache")
    kernel = build(device, source=source).kernel("fp8_kv_quantize")
    report = kernel.launch(
        grid=(-(-tokens // TOKENS_PER_CTA), 1, 1),
        block=(THREADS, 1, 1),
        args=[device.array(kv, name="kv"), cache, tokens],
    )
    return KernelResult({"cache": cache.to_numpy()}, [report])


def fp8_kv_dequantize(
    device: Device, cache: NDArray[Any], *, source: str | None = None
) -> KernelResult:
    """``cache`` [tokens, 656] uint8 to ``out`` [tokens, 576] bfloat16: code * scale, rounded once.

    Raises ``DtypeError`` or ``ShapeError``.
    """
    check_tensor("cache", cache, np.uint8, ("tokens", RECORD_BYTES))
    tokens = _token_count("cache", cache)
    out = device.empty((tokens, TOKEN_VALUES), BF16, name="out")
    kernel = build(device, source=source).kernel("fp8_kv_dequantize")
    report = kernel.launch(
        grid=(-(-tokens // TOKENS_PER_CTA), 1, 1),
        block=(THREADS, 1, 1),
        args=[device.array(cache, name="cache"), out, tokens],
    )
    return KernelResult({"out": out.to_numpy()}, [report])


def _token_count(name: str, array: NDArray[Any]) -> int:
    tokens = array.shape[0]
    if tokens < 1:
        raise ShapeError(f"{name} has shape {array.shape}; the kernel takes at least one token")
    return tokens
