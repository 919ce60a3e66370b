"""Matrix products on CUDA cores: a chain of fused multiply-adds for each element."""

from __future__ import annotations

import numpy as np

from simkit.numerics.arrays import Float32Array
from simkit.numerics.fma import fma


def fma_chain(a: Float32Array, b: Float32Array, c: Float32Array) -> Float32Array:
    """``c`` + ``a @ b``, adding one product at a time, each sum rounded once (``fma.rn.f32``).

    ``a`` [..., M, K], ``b`` [..., K, N], ``c`` [..., M, N], all float32; the order is k = 0, 1, ...
    """
    columns = np.ascontiguousarray(np.moveaxis(a, -1, 0))[..., None]
    rows = np.ascontiguousarray(np.moveaxis(b, -2, 0))[..., None, :]
    total = np.array(c, order="C")
    for column, row in zip(columns, rows, strict=True):
        fma(column, row, total, out=total)
    return total
