"""Tensor-core sums of plain matrices, quickly: `dot_accumulate` without batch axes.

The sums are the ones that `aligned_sum` computes; what differs is how NumPy gets there. BLAS forms
the products of columns and rows, and it finds the exponents that a step aligns to: with 2^(8 e) in
place of each exponent e, a sum of up to 127 products is from 2^(8 g) to below 2^(8 g + 7), where g
is the greatest exponent of a product. The biased exponent of such a float64, when the powers carry
the factor 2^-6, is 8 (g + 127) + 1 to 8 (g + 127) + 7: its upper 8 bits are those of the float32
2^g, at the same place of the upper word.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from simkit.numerics.arrays import Float32Array, Float64Array

if TYPE_CHECKING:
    from simkit.numerics.tensor_core import Operand, TensorCore

# Elements of a result that are worth the preparations, and that fit the cache with temporaries.
_FEWEST = 512
_MOST = 8192
_K_PIECE = 256
# Columns and rows that one BLAS call multiplies pairwise, as a product with a diagonal matrix.
_GROUP = 4
_MAX_SHAPES = 8

_MOST_TERMS = 127
# Biases of exponents, such that the upper word of a sum of powers begins with 8 (g + 127) + 1.
_BIAS_A, _BIAS_B = 128, 127

_EXPONENT = np.array(0xFF << 23, np.uint32)
_ONE_OVER = np.array(254 << 23, np.uint32)  # minus the bits of 2^e: those of 2^-e
_NO_EXPONENT = -1000  # the exponents of zeros are below


class _Work:
    """Temporaries of a piece of ``rows`` x ``columns``, and the constants of a tensor core."""

    def __init__(self, rows: int, columns: int, core: TensorCore) -> None:
        self.least = np.array((_least(core) + 127) << 23, np.uint32)
        self.unscaled = np.array((core.fraction_bits + 254) << 23, np.uint32)
        self.kept_bits = np.array(-1 << (52 - core.output_bits), np.int64)
        shape, size, terms = (rows, columns), rows * columns, core.terms
        # Every group of a step uses the same products: they stay in the cache.
        self.products = _apart(_GROUP * size, np.float32, 1).reshape(_GROUP, size)
        self.product_block = self.products.reshape(_GROUP * rows, columns)
        self.integers = _apart(terms * size, np.int32, 2).reshape(terms, size)
        self.scales = _apart(_GROUP * size, np.float32, 3).reshape(_GROUP, size)
        self.scale: Float32Array = self.scales[0].reshape(shape)
        self.scale_bits = self.scale.view(np.uint32)
        self.greatest = _apart(size, np.uint32, 4).reshape(shape)
        self.sum = _apart(size, np.int32, 5)
        self.sum_matrix = self.sum.reshape(shape)
        self.term = _apart(size, np.float32, 6).reshape(shape)
        self.narrow = _apart(size, np.float32, 7).reshape(shape)
        self.total: Float64Array = _apart(size, np.float64, 8).reshape(shape)
        self.wide: Float64Array = _apart(size, np.float64, 9).reshape(shape)
        self.total_bits = self.total.view(np.int64)
        self.total_upper = self.total.view(np.uint32)[:, 1::2]
        # A block is a row of diagonal matrices; what is off the diagonals stays zero.
        self.diagonals = np.zeros((_K_PIECE // _GROUP, _GROUP, rows, _GROUP), np.float32)
        self.diagonal_blocks = self.diagonals.reshape(-1, _GROUP * rows, _GROUP)


def _apart(size: int, dtype: type, number: int) -> NDArray[Any]:
    """Memory that begins at another cache set than that of another ``number``."""
    count = size * np.dtype(dtype).itemsize
    raw = np.zeros(count + 8192, np.uint8)
    start = -raw.ctypes.data % 4096 + 448 * number
    return raw[start : start + count].view(dtype)


class _WorkPool(threading.local):
    """Per-thread temporaries by shape."""

    def __init__(self) -> None:
        self.works: dict[tuple[int, int, TensorCore], _Work] = {}

    def of(self, rows: int, columns: int, core: TensorCore) -> _Work:
        key = (rows, columns, core)
        if key not in self.works:
            if len(self.works) >= _MAX_SHAPES:
                self.works.clear()
            self.works[key] = _Work(*key)
        return self.works[key]


_pool = _WorkPool()


def fits(a: Operand, b: Operand, c: Float32Array, core: TensorCore) -> bool:
    """Whether `accumulate` can do ``a @ b + c``: plain matrices of tame numbers.

    Tame: no intermediate value, the last bit that a step keeps included, leaves the normal range
    of float32, whatever cancels.
    """
    rows, columns = c.shape[:2]
    if c.size != rows * columns or c.size < _FEWEST or columns > _MOST // 8:
        return False
    if core.terms % _GROUP or core.terms > min(_MOST_TERMS, 1 << (29 - core.fraction_bits)):
        return False
    if core.min_exponent != -126 or core.rounds_to_nearest or a.values.shape[1] > 1 << 16:
        return False
    least = _least(core)
    if max(a.top, b.top) > 127:  # an infinity or a NaN, however small the other operand
        return False
    if a.top + b.top > 100 or _bottom(a) + _bottom(b) < least:
        return False
    size = np.abs(c)
    # Zeros are below the least exponent too: they do no harm.
    smallest = np.min(size, initial=1.0, where=size != 0)
    return bool(size.max() < 2.0**120 and smallest >= 2.0**least)  # both false for NaN


def _least(core: TensorCore) -> int:
    """The least exponent of a product such that the last bit kept is a normal number."""
    return core.fraction_bits - 120


def _bottom(operand: Operand) -> int:
    """The least exponent of an element that is not zero; 0 if all are."""
    bottom = int(operand.exponents.min(initial=0))
    if bottom < _NO_EXPONENT:
        exponents = operand.exponents
        bottom = int(exponents.min(initial=0, where=exponents > _NO_EXPONENT))
    return bottom


def accumulate(a: Operand, b: Operand, c: Float32Array, core: TensorCore) -> Float32Array:
    """``a @ b + c`` of what `fits`: a [M, K], b [K, N], c [M, N], maybe with batch axes of 1."""
    columns = c.shape[1]
    left, right, start = (x.reshape(x.shape[:2]) for x in (a.values, b.values, c))
    powers_a = _powers(a.exponents.reshape(left.shape), _BIAS_A)
    powers_b = _powers(b.exponents.reshape(right.shape), _BIAS_B)
    result = np.empty(start.shape, np.float32)
    rows = max(1, _MOST // columns)
    for first in range(0, len(result), rows):
        piece = slice(first, first + rows)
        result[piece] = _accumulate_rows(
            left[piece], right, start[piece], powers_a[piece], powers_b, core
        )
    return result.reshape(c.shape)


def _powers(exponents: NDArray[np.int16], bias: int) -> Float64Array:
    """2^(8 (e + bias) - 1023) for exponents e, 0 for the exponents of zeros."""
    bits = (exponents + np.int16(bias)).astype(np.int64)
    bits <<= np.int64(55)
    if exponents.min(initial=0) < _NO_EXPONENT:
        bits[exponents < _NO_EXPONENT] = 0
    return bits.view(np.float64)


def _accumulate_rows(
    a: Float32Array,
    b: Float32Array,
    c: Float32Array,
    powers_a: Float64Array,
    powers_b: Float64Array,
    core: TensorCore,
) -> Float32Array:
    work = _pool.of(len(c), c.shape[1], core)
    result = c
    for first in range(0, a.shape[1], _K_PIECE):
        part = np.ascontiguousarray(a[:, first : first + _K_PIECE])
        _fill_diagonals(part, work)
        for start in range(0, part.shape[1], core.terms):
            k = slice(first + start, first + start + core.terms)
            powers_a[:, k].dot(powers_b[k], work.total)
            result = _step(start // _GROUP, b[k], result, work)
    return result


def _fill_diagonals(a: Float32Array, work: _Work) -> None:
    missing = -a.shape[1] % _GROUP
    if missing:
        a = np.pad(a, ((0, 0), (0, missing)))
    groups = a.shape[1] // _GROUP
    for index in range(_GROUP):
        work.diagonals[:groups, index, :, index] = a[:, index::_GROUP].T


def _step(block: int, b: Float32Array, c: Float32Array, work: _Work) -> Float32Array:
    """One step; ``work.total`` has the sums of powers, and column groups start at ``block``."""
    greatest, scale_bits = work.greatest, work.scale_bits
    np.bitwise_and(c.view(np.uint32), _EXPONENT, out=greatest)
    np.bitwise_and(work.total_upper, _EXPONENT, out=scale_bits)
    np.maximum(greatest, scale_bits, out=greatest)
    # Only where everything is zero, or a cancelled sum meets zeros, is there less than this.
    np.maximum(greatest, work.least, out=greatest)
    np.subtract(work.unscaled, greatest, out=scale_bits)
    work.scales[1:] = work.scales[0]

    if len(b) % _GROUP:
        b = np.pad(b, ((0, -len(b) % _GROUP), (0, 0)))
    products = work.products
    for index in range(0, len(b), _GROUP):
        group = slice(index, index + _GROUP)
        work.diagonal_blocks[block + index // _GROUP].dot(b[group], work.product_block)
        np.multiply(products, work.scales, out=products)
        work.integers[group] = products  # truncates
    np.add.reduce(work.integers[: len(b)], axis=0, out=work.sum)

    term, total = work.term, work.total
    np.multiply(c, work.scale, out=term)
    np.trunc(term, out=term)
    work.wide[...] = term
    total[...] = work.sum_matrix
    np.add(total, work.wide, out=total)
    np.bitwise_and(work.total_bits, work.kept_bits, out=work.total_bits)
    work.narrow[...] = total
    np.subtract(_ONE_OVER, scale_bits, out=scale_bits)
    return np.multiply(work.narrow, work.scale, out=work.narrow)
