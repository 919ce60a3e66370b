"""Tensor-core sums of plain matrices, quickly: `dot_accumulate` without batch axes.

The sums are the ones that `aligned_sum` computes; what differs is how NumPy gets there. BLAS forms
the products of columns and rows, and it finds the exponents that a step aligns to: with 2^(8 e) in
place of each exponent e, a sum of up to 127 products is from 2^(8 g) to below 2^(8 g + 7), where g
is the greatest exponent of a product. The biased exponent of such a float64, when the powers carry
the factor 2^-6, is 8 (g + 127) + 1 to 8 (g + 127) + 7: its upper 8 bits are those of the float32
2^g, at the same place of the upper word. Steps of fewer than 16 products whose exponents do not lie
far apart do with 2^(4 e) and float32: the biased exponent of a sum is then 128 + 4 (g - g') to
128 + 4 (g - g') + 3 for a g' that the powers are made for, 30 below the greatest exponent.
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
# Steps whose exponents are found together.
_AT_ONCE = 8

_MOST_TERMS = 127
# Biases of exponents, such that the upper word of a sum of powers begins with 8 (g + 127) + 1.
_BIAS_A, _BIAS_B = 128, 127

_EXPONENT = np.array(0xFF << 23, np.uint32)
# Where the exponents of products span so little, and their powers in float32.
_NARROW_SPAN = 61
_NARROW_EXPONENT = np.array(0x7F << 25, np.uint32)
_TWO = np.array(2, np.uint32)
_NO_EXPONENT = -1000  # the exponents of zeros are below


class _Work:
    """Temporaries of a piece of ``rows`` x ``columns``, and the constants of a tensor core.

    Arrays of the piece's elements are flat: NumPy is a little faster on those.
    """

    def __init__(self, rows: int, columns: int, core: TensorCore) -> None:
        self.least = np.array((_least(core) + 127) << 23, np.uint32)
        self.unscaled = np.array((core.fraction_bits + 254) << 23, np.uint32)
        self.kept_bits = np.array(-1 << (52 - core.output_bits), np.int64)
        size, terms = rows * columns, core.terms
        # Every group of a step uses the same products: they stay in the cache. Behind the products
        # of a group is c, which counts like one more of the last where the sum has room for it.
        self.products = _apart((_GROUP + 1) * size, np.float32, 1).reshape(-1, size)
        self.product_block = self.products[:_GROUP].reshape(_GROUP * rows, columns)
        self.c = self.products[_GROUP]
        self.c_bits = self.c.view(np.uint32)
        self.c_joins = terms * 4 + 2 <= 1 << (31 - core.fraction_bits)
        self.integers = _apart((terms + 1) * size, np.int32, 2).reshape(-1, size)
        self.scales = _apart((_GROUP + 1) * size, np.float32, 3).reshape(-1, size)
        self.scale: Float32Array = self.scales[0]
        self.scale_bits = self.scale.view(np.uint32)
        self.greatest = _apart(size, np.uint32, 4)
        self.sum = _apart(size, np.int32, 5)
        self.narrow = _apart(size, np.float32, 7)
        self.total: Float64Array = _apart(size, np.float64, 8)
        self.wide: Float64Array = _apart(size, np.float64, 9)
        self.total_bits = self.total.view(np.int64)
        self.shape = shape = (_AT_ONCE, rows, columns)
        self.exponents = _apart(_AT_ONCE * size, np.uint32, 6).reshape(_AT_ONCE, size)
        self.narrow_sums = self.exponents.view(np.float32).reshape(shape)
        self.wide_sums = _apart(_AT_ONCE * size, np.float64, 10).reshape(shape)
        self.wide_upper = self.wide_sums.view(np.uint32).reshape(_AT_ONCE, -1)[:, 1::2]
        # A block is a row of diagonal matrices; what is off the diagonals stays zero.
        self.diagonals = np.zeros((_K_PIECE // _GROUP, _GROUP, rows, _GROUP), np.float32)
        self.diagonal_blocks = list(self.diagonals.reshape(-1, _GROUP * rows, _GROUP))
        # What each group of a step works on: products, their scales, and where they go as integers.
        self.groups = [
            (self.products[:_GROUP], self.scales[:_GROUP], self.integers[k : k + _GROUP])
            for k in range(0, terms, _GROUP)
        ]
        if self.c_joins:
            self.groups[-1] = self.products, self.scales, self.integers[terms - _GROUP :]
        self.added = self.integers[: terms + self.c_joins]

    def align(
        self, left: NDArray[Any], right: NDArray[Any], base: NDArray[np.uint32] | None
    ) -> NDArray[np.uint32]:
        """The greatest exponents of the products of steps [steps, elements], as bits of float32;
        ``base``: what those of narrow powers count from.
        """
        count = len(left)
        exponents = self.exponents[:count]
        if base is None:
            np.matmul(left, right, out=self.wide_sums[:count])
            return np.bitwise_and(self.wide_upper[:count], _EXPONENT, exponents)
        np.matmul(left, right, out=self.narrow_sums[:count])
        np.bitwise_and(exponents, _NARROW_EXPONENT, exponents)
        np.right_shift(exponents, _TWO, exponents)
        return np.add(exponents, base, exponents)


def _apart(size: int, dtype: type, number: int) -> NDArray[Any]:
    """Memory that begins at another cache set than that of another ``number``."""
    count = size * np.dtype(dtype).itemsize
    raw = np.zeros(count + 16384, np.uint8)
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
    if not c.any():
        return True
    size = np.abs(c)
    # Zeros are below the least exponent too: they do no harm.
    smallest = np.min(size, initial=1.0, where=size != 0)
    return bool(size.max() < 2.0**120 and smallest >= 2.0**least)  # both false for NaN


def _least(core: TensorCore) -> int:
    """The least exponent of a product such that the last bit kept is a normal number."""
    return core.fraction_bits - 120


def _bottom(operand: Operand) -> int:
    """The least exponent of an element that is not zero; 0 if all are."""
    if operand.bottom > _NO_EXPONENT:
        return operand.bottom
    exponents = operand.exponents
    return int(exponents.min(initial=0, where=exponents > _NO_EXPONENT))


def accumulate(a: Operand, b: Operand, c: Float32Array, core: TensorCore) -> Float32Array:
    """``a @ b + c`` of what `fits`: a [M, K], b [K, N], c [M, N], maybe with batch axes of 1."""
    columns = c.shape[1]
    left: NDArray[Any] = a.values.reshape(a.values.shape[:2])
    right: NDArray[Any] = b.values.reshape(b.values.shape[:2])
    start = c.reshape(c.shape[:2])
    # Only where all products are zero may there be nothing to align to.
    has_zeros = min(a.bottom, b.bottom) < _NO_EXPONENT
    exponents_a, exponents_b = a.exponents.reshape(left.shape), b.exponents.reshape(right.shape)
    span_a, span_b = a.top - a.bottom, b.top - b.bottom
    is_narrow = core.terms < 16 and span_a + span_b <= _NARROW_SPAN
    powers_a: NDArray[Any]
    powers_b: NDArray[Any]
    if is_narrow:
        bias = max(4 * span_a + 1, min(187, 374 - 4 * span_b))
        powers_a = _narrow_powers(exponents_a, bias - 4 * a.top)
        powers_b = _narrow_powers(exponents_b, 375 - bias - 4 * b.top)
    else:
        powers_a, powers_b = _powers(exponents_a, _BIAS_A), _powers(exponents_b, _BIAS_B)
    base = np.array((a.top + b.top - 30 + 95 << 23) & 0xFFFF_FFFF, np.uint32)
    missing = -left.shape[1] % core.terms
    if missing:
        left, powers_a = _longer(left, 0, missing), _longer(powers_a, 0, missing)
        right, powers_b = _longer(right, missing, 0), _longer(powers_b, missing, 0)
    result = np.empty(start.shape, np.float32)
    rows = max(1, _MOST // columns)
    for first in range(0, len(result), rows):
        piece = slice(first, first + rows)
        work = _pool.of(len(result[piece]), columns, core)
        work.c[...] = start[piece].reshape(-1)
        for k in range(0, left.shape[1], _K_PIECE):
            part = slice(k, k + _K_PIECE)
            _fill_diagonals(left[piece, part], work)
            _steps(
                right[part], powers_a[piece, part], powers_b[part], core.terms, work,
                has_zeros, base if is_narrow else None,
            )  # fmt: skip
        result[piece] = work.c.reshape(-1, columns)
    return result.reshape(c.shape)


def _longer(x: NDArray[Any], rows: int, columns: int) -> NDArray[Any]:
    return np.pad(x, ((0, rows), (0, columns)))


def _powers(exponents: NDArray[np.int16], bias: int) -> Float64Array:
    """2^(8 (e + bias) - 1023) for exponents e, 0 for the exponents of zeros."""
    bits = (exponents + np.int16(bias)).astype(np.int64)
    bits <<= np.int64(55)
    if exponents.min(initial=0) < _NO_EXPONENT:
        bits[exponents < _NO_EXPONENT] = 0
    return bits.view(np.float64)


def _narrow_powers(exponents: NDArray[np.int16], bias: int) -> Float32Array:
    """2^(4 e + bias - 127) for exponents e, which are not those of zeros."""
    bits = (exponents * np.int16(4) + np.int16(bias)).astype(np.int32)
    bits <<= np.int32(23)
    return bits.view(np.float32)


def _fill_diagonals(a: Float32Array, work: _Work) -> None:
    groups = a.shape[1] // _GROUP
    for index in range(_GROUP):
        work.diagonals[:groups, index, :, index] = a[:, index::_GROUP].T


def _steps(
    b: Float32Array,
    powers_a: NDArray[Any],
    powers_b: NDArray[Any],
    terms: int,
    work: _Work,
    has_zeros: bool,
    base: NDArray[np.uint32] | None,
) -> None:
    """Steps of the A in ``work.diagonals`` by ``b``, one after the other; ``work.c`` becomes the
    result.  ``base``: what exponents of narrow powers count from.
    """
    _, rows, columns = work.shape
    by_step_a = powers_a.reshape(rows, -1, terms).swapaxes(0, 1)
    by_step_b = powers_b.reshape(-1, terms, columns)
    by_group = b.reshape(-1, _GROUP, columns)
    first, groups = 0, terms // _GROUP
    for begin in range(0, len(by_step_b), _AT_ONCE):
        some = slice(begin, begin + _AT_ONCE)
        exponents = work.align(by_step_a[some], by_step_b[some], base)
        for greatest in exponents:
            last = first + groups
            _step(work.diagonal_blocks[first:last], by_group[first:last], work, has_zeros, greatest)
            first = last


def _step(
    blocks: list[Float32Array],
    b: Float32Array,
    work: _Work,
    has_zeros: bool,
    exponents: NDArray[np.uint32],
) -> None:
    """One step: ``exponents`` has the greatest ones of the products as the bits of float32,
    ``blocks`` and ``b`` the groups of terms.
    """
    greatest, scale_bits, scale, c = work.greatest, work.scale_bits, work.scale, work.c
    np.bitwise_and(work.c_bits, _EXPONENT, greatest)
    np.maximum(greatest, exponents, out=greatest)
    if has_zeros:
        np.maximum(greatest, work.least, out=greatest)
    np.subtract(work.unscaled, greatest, scale_bits)
    work.scales[1:] = scale

    product_block, multiply = work.product_block, np.multiply
    for block, terms, (products, scales, integers) in zip(blocks, b, work.groups, strict=True):
        block.dot(terms, product_block)
        multiply(products, scales, products)
        integers[...] = products  # truncates
    total = work.total
    np.add.reduce(work.added, axis=0, out=work.sum)
    total[...] = work.sum
    if not work.c_joins:
        np.multiply(c, scale, c)
        np.trunc(c, c)
        work.wide[...] = c
        np.add(total, work.wide, total)
    np.bitwise_and(work.total_bits, work.kept_bits, work.total_bits)
    work.narrow[...] = total
    np.divide(work.narrow, scale, c)
