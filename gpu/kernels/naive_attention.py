"""Host side of naive_attention.cu: three kernels with S and P in global memory in between."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from gpu.device import Device, Module
from gpu.kernels.build import build_module
from gpu.kernels.checks import BF16, attention_sizes, softmax_scale
from gpu.kernels.result import KernelResult

THREADS = 256
TILE = 32
ROWS_PER_CTA = 8  # of naive_softmax: one for each warp


def build(device: Device, head_dim: int, *, source: str | None = None) -> Module:
    """naive_attention.cu for one head dimension; ``source`` replaces its text."""
    return build_module(device, "naive_attention", (f"-DHEAD_DIM={head_dim}",), source)


def naive_attention(
    device: Device,
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    causal: bool = False,
    scale: float | None = None,
    source: str | None = None,
) -> KernelResult:
    """softmax(scale * q k^T) v as the formula reads: three launches.

    Arguments and errors are those of ``flash_attention``. Outputs, all bfloat16: ``s`` and ``p``
    [batch, heads, q_len, kv_len], the scaled and masked scores and their softmax; ``o`` like q.
    Rows without keys have p = 0 and o = 0. Without any key S and P are empty and only the last
    kernel is launched.
    """
    sizes = attention_sizes(q, k, v)
    scale32 = softmax_scale(scale, sizes.head_dim)
    module = build(device, sizes.head_dim, source=source)
    score_shape = (sizes.batch, sizes.heads, sizes.q_len, sizes.kv_len)
    s = device.empty(score_shape, BF16, name="s")
    p = device.empty(score_shape, BF16, name="p")
    o = device.empty(q.shape, BF16, name="o")
    lengths = [sizes.q_len, sizes.kv_len, sizes.heads, sizes.kv_heads]
    rows = sizes.batch * sizes.heads * sizes.q_len
    row_tiles = -(-sizes.q_len // TILE)
    key_tiles = -(-sizes.kv_len // TILE)
    all_heads = sizes.batch * sizes.heads
    block = (THREADS, 1, 1)

    reports = []
    if sizes.kv_len > 0:
        q_array, k_array = device.array(q, name="q"), device.array(k, name="k")
        reports.append(
            module.kernel("naive_scores").launch(
                grid=(key_tiles, row_tiles, all_heads),
                block=block,
                args=[q_array, k_array, s, *lengths, int(causal), scale32],
            )
        )
        reports.append(
            module.kernel("naive_softmax").launch(
                grid=(-(-rows // ROWS_PER_CTA), 1, 1), block=block, args=[s, p, rows, sizes.kv_len]
            )
        )
    reports.append(
        module.kernel("naive_output").launch(
            grid=(row_tiles, 1, all_heads),
            block=block,
            args=[p, device.array(v, name="v"), o, *lengths],
        )
    )
    return KernelResult({"s": s.to_numpy(), "p": p.to_numpy(), "o": o.to_numpy()}, reports)
