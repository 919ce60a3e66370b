"""Host side of flash_attention.cu: FlashAttention forward on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.device import Device, Module
from gpu.kernels.build import build_module
from gpu.kernels.checks import BF16, attention_sizes, scale_to_base_2, softmax_scale
from gpu.kernels.result import KernelResult

THREADS = 128
QUERY_TILE = 64
KEY_TILE = 64


def build(device: Device, head_dim: int, *, source: str | None = None) -> Module:
    """flash_attention.cu for one head dimension; ``source`` replaces its text."""
    return build_module(device, "flash_attention", (f"-DHEAD_DIM={head_dim}",), source)


def tile_bytes(head_dim: int) -> int:
    """Dynamic shared memory of a CTA: one tile of Q, and two each of K and V, in bfloat16."""
    return (QUERY_TILE + 4 * KEY_TILE) * head_dim * BF16.itemsize


def flash_attention(
    device: Device,
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    causal: bool = False,
    scale: float | None = None,
    source: str | None = None,
) -> KernelResult:
    """softmax(scale * q k^T) v without scores in global memory, one launch.

    ``q`` [batch, q_len, heads, d], ``k`` and ``v`` [batch, kv_len, kv_heads, d], bfloat16, d 64 or
    128. ``causal`` aligns the diagonal to the bottom right: row i sees keys up to
    i + kv_len - q_len. ``scale`` is d^-1/2 by default. ``source`` replaces the kernel's text.

    Outputs: ``o`` like q; ``lse`` [batch, heads, q_len] float32, natural logarithm. Rows without
    keys have o = 0 and lse = -inf. Raises ``DtypeError``, ``ShapeError``, ``LaunchError``.
    """
    sizes = attention_sizes(q, k, v)
    scale_log2 = scale_to_base_2(softmax_scale(scale, sizes.head_dim))
    kernel = build(device, sizes.head_dim, source=source).kernel("flash_attention")
    o = device.empty(q.shape, BF16, name="o")
    lse = device.empty((sizes.batch, sizes.heads, sizes.q_len), np.float32, name="lse")
    report = kernel.launch(
        grid=(-(-sizes.q_len // QUERY_TILE), sizes.heads, sizes.batch),
        block=(THREADS, 1, 1),
        args=[
            device.array(q, name="q"),
            device.array(k, name="k"),
            device.array(v, name="v"),
            o,
            lse,
            sizes.q_len,
            sizes.kv_len,
            sizes.heads,
            sizes.kv_heads,
            int(causal),
            scale_log2,
        ],
        shared_bytes=tile_bytes(sizes.head_dim),
    )
    return KernelResult({"o": o.to_numpy(), "lse": lse.to_numpy()}, [report])
