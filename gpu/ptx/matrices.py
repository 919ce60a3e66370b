"""Matrices of a set of warps: ldmatrix, stmatrix and the tensor core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu.ptx import spaces
from gpu.ptx.asynchrony import AsyncAccess
from gpu.ptx.lanes import Array
from gpu.ptx.memory import Bytes
from simkit.numerics.tensor_core import Operand, dot_accumulate, dot_accumulate_fast, prepare

_MATRIX_WORDS = np.arange(4, dtype=np.int64)[None, :, None] * 4
# Byte offsets of a lane's two elements in a transposed 8 x 8 matrix of 16-bit elements, beside
# their rows.
_COLUMN_BYTES = np.repeat(np.arange(8, dtype=np.int64) * 2, 4)[:, None]
_PAIR_ROWS = np.tile(np.arange(4) * 2, 8)


class MatrixAccess(AsyncAccess):
    """What matrix instructions call."""

    def load_matrix(
        self, space: str, base: Array, offset: int, count: int, is_transposed: bool, site: int
    ) -> list[Array]:
        """ldmatrix: ``count`` 8 x 8 matrices of 16-bit elements whose row addresses come from 8
        lanes each.
        """
        memory, rows = self._matrix_rows(space, base, offset, count, site, "read")
        values = []
        for k in range(count):
            addresses = rows[8 * k : 8 * k + 8]
            if is_transposed:
                low = memory.views[2].take((addresses[_PAIR_ROWS] + _COLUMN_BYTES) >> 1)
                high = memory.views[2].take((addresses[_PAIR_ROWS + 1] + _COLUMN_BYTES) >> 1)
                values.append(low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16))
            else:
                words = (addresses[:, None, :] + _MATRIX_WORDS) >> 2
                values.append(memory.views[4].take(words).reshape(self.shape))
        return values

    def store_matrix(
        self,
        space: str,
        base: Array,
        offset: int,
        values: Sequence[Array],
        is_transposed: bool,
        site: int,
    ) -> None:
        """stmatrix: the inverse of ldmatrix."""
        memory, rows = self._matrix_rows(space, base, offset, len(values), site, "write")
        for k, value in enumerate(values):
            addresses = rows[8 * k : 8 * k + 8]
            if is_transposed:
                memory.views[2][(addresses[_PAIR_ROWS] + _COLUMN_BYTES) >> 1] = value.astype(
                    np.uint16
                )
                high = (value >> np.uint32(16)).astype(np.uint16)
                memory.views[2][(addresses[_PAIR_ROWS + 1] + _COLUMN_BYTES) >> 1] = high
            else:
                words = (addresses[:, None, :] + _MATRIX_WORDS) >> 2
                memory.views[4][words] = value.reshape(8, 4, self.n)

    def _matrix_rows(
        self, space: str, base: Array, offset: int, count: int, site: int, direction: str
    ) -> tuple[Bytes, Array]:
        used = 8 * count
        offsets = self.array(base)[:used].astype(np.int64) + offset
        if space == "generic":
            offsets = offsets - spaces.SHARED_WINDOW
        self._check(offsets, 16, self.grid.shared_bytes, None, site, "shared", direction)
        self.grid.counters.shared(offsets, 16, None)
        return self.grid.shared, offsets + self.shared_base

    def operand(self, matrix: Array, kind: str) -> Operand | Array:
        """A decoded A or B with what the exact tensor core needs of it again and again."""
        core = self.grid.tensor_core(kind)
        return matrix if core is None else prepare(matrix, core)

    def mma(self, a: Any, b: Any, c: Array, kind: str) -> Array:
        """a (16, K, warps) @ b (K, 8, warps) + c, exactly as the tensor core or in plain
        float32.
        """
        core = self.grid.tensor_core(kind)
        return dot_accumulate_fast(a, b, c) if core is None else dot_accumulate(a, b, c, core)
