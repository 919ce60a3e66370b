"""Tensor-core products that have been asked for and not computed yet.

Kernels multiply one A by many Bs and feed each sum to the next step of K.  Put off until a result
is read, those are a few large products instead of many small ones: steps of one accumulator become
one longer K, accumulators with the same A become one wider N.  Nothing changes in the sums: an
accumulator takes its steps in order, and accumulators do not mix.

Where no bits are promised, B comes as the rows that ldmatrix fetched (rows.py): warps with the same
B then make one product for the whole grid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpu.ptx import rows
from gpu.ptx.fragments import decode
from gpu.ptx.rows import RowsOfB
from simkit.numerics.tensor_core import Operand

Array = np.ndarray
# (a (16, K, warps), b (K, N, warps), c (16, N, warps) or 0, input type) -> (16, N, warps)
Multiply = Callable[[Any, Any, Any, str], Array]

# Warps that have to share a B to make copying their A into one matrix worth while.
_ENOUGH_WARPS = 16


@dataclass(slots=True, eq=False)
class Product:
    """``start`` (None: 0) plus the products of pairs of fragments, in order; ``value`` once
    computed.
    """

    kind: str
    start: Array | None
    left: list[Any]
    right: list[Any]
    value: Array | None = None


@dataclass(slots=True)
class Products:
    """The products that nobody has read yet."""

    multiply: Multiply
    waiting: dict[int, Product] = field(default_factory=dict)
    buffers: dict[tuple[str, tuple[int, ...]], Array] = field(default_factory=dict)
    joined: list[tuple[list[Array], Array]] = field(default_factory=list)

    def add(self, a: Any, b: Any, c: Any, kind: str) -> Product:
        """One mma: goes on with the product ``c`` where it can, else starts with its value."""
        if (
            isinstance(c, Product)
            and c.value is None
            and c.kind == kind
            and _joinable(c.right[-1], b)
        ):
            new = Product(kind, c.start, [*c.left, a], [*c.right, b])
            self.waiting.pop(id(c), None)
        else:
            new = Product(kind, self.force(c) if isinstance(c, Product) else c, [a], [b])
        self.waiting[id(new)] = new
        return new

    def force(self, product: Product) -> Array:
        """The value of a product; computes those with the same A along with it."""
        if product.value is None:
            self.waiting.pop(id(product), None)
            alike = [p for p in self.waiting.values() if _same_a(p, product)]
            for other in alike:
                del self.waiting[id(other)]
            self._compute([product, *alike])
        assert product.value is not None
        return product.value

    def _compute(self, products: Sequence[Product]) -> None:
        first = products[0]
        if isinstance(first.right[0], RowsOfB):
            self._compute_from_rows(products)
            return
        steps = len(first.left)
        if steps == len(products) == 1:
            c = np.float32(0) if first.start is None else first.start
            first.value = self.multiply(first.left[0], first.right[0], c, first.kind)
            return
        a = self._joined("a", [first.left], by_columns=True)
        b = self._joined("b", [p.right for p in products], by_columns=False)
        starts: Any = first.start
        if starts is None or len(products) > 1:
            values = a.values if isinstance(a, Operand) else a
            shape = (len(values), 8 * len(products), values.shape[2])
            starts = self._buffer("c", shape, np.float32)
            for index, product in enumerate(products):
                start = np.float32(0) if product.start is None else product.start
                starts[:, 8 * index : 8 * index + 8] = start
        result = self.multiply(a, b, starts, first.kind)
        for index, product in enumerate(products):
            product.value = result[:, 8 * index : 8 * index + 8]

    def _compute_from_rows(self, products: Sequence[Product]) -> None:
        first = products[0]
        b = rows.join([product.right for product in products])
        a = self._joined_a(first.left)
        warps = a.shape[2]
        starts = rows.runs(b.data)
        if warps < _ENOUGH_WARPS * len(starts):
            starts = np.arange(len(b.data))
        values = decode(b.data[starts], first.kind)
        if first.right[0].is_transposed:
            values = values.swapaxes(1, 2)
        result = _multiply_rows(a, values, starts * b.sharing)
        for index, product in enumerate(products):
            value = result[8 * index : 8 * index + 8].swapaxes(0, 1)
            product.value = value if product.start is None else np.add(value, product.start, value)

    def _joined_a(self, steps: list[Array]) -> Array:
        """A of several steps as one [K, 16, warps]; the last two are kept, for Q stays the same
        while P changes.
        """
        for index, (known, whole) in enumerate(self.joined):
            if len(known) == len(steps) and all(x is y for x, y in zip(known, steps, strict=True)):
                self.joined.append(self.joined.pop(index))
                return whole
        m, _, warps = steps[0].shape
        shape = (sum(step.shape[1] for step in steps), m, warps)
        old = self.joined.pop(0)[1] if len(self.joined) == 2 else None
        whole = old if old is not None and old.shape == shape else np.empty(shape, np.float32)
        np.concatenate([step.swapaxes(0, 1) for step in steps], out=whole)
        self.joined.append((steps, whole))
        return whole

    def _joined(self, name: str, parts: Sequence[Sequence[Any]], *, by_columns: bool) -> Any:
        """Fragments as one matrix: steps along K (the columns of A, the rows of B), and one list of
        steps after the other along N.  Prepared operands stay prepared.
        """
        if isinstance(parts[0][0], Operand):
            values = [[step.values for step in steps] for steps in parts]
            exponents = [[step.exponents for step in steps] for steps in parts]
            return Operand(
                self._tiled(f"{name} values", values, by_columns),
                self._tiled(f"{name} exponents", exponents, by_columns),
                min(step.bottom for steps in parts for step in steps),
                max(step.top for steps in parts for step in steps),
            )
        return self._tiled(name, parts, by_columns)

    def _tiled(self, name: str, parts: Sequence[Sequence[Array]], by_columns: bool) -> Array:
        first = parts[0][0]
        rows, columns, warps = first.shape
        if by_columns:
            whole = self._buffer(name, (rows, columns * len(parts[0]), warps), first.dtype)
            for k, step in enumerate(parts[0]):
                whole[:, k * columns : (k + 1) * columns] = step
            return whole
        shape = (rows * len(parts[0]), columns * len(parts), warps)
        whole = self._buffer(name, shape, first.dtype)
        for n, steps in enumerate(parts):
            for k, step in enumerate(steps):
                whole[k * rows : (k + 1) * rows, n * columns : (n + 1) * columns] = step
        return whole

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Memory that is used again: fresh pages would cost as much as the copies."""
        key = (name, shape)
        if key not in self.buffers:
            self.buffers[key] = np.empty(shape, dtype)
        return self.buffers[key]


def _multiply_rows(a: Array, b: Array, starts: Array) -> Array:
    """``a`` [K, M, warps] by ``b`` [runs, N, K], whose run i starts at warp ``starts[i]``:
    [N, M, warps].
    """
    k, m, warps = a.shape
    count, n, _ = b.shape
    result = np.empty((n, m, warps), np.float32)
    if count == 1:
        np.matmul(b[0], a.reshape(k, -1), out=result.reshape(n, -1))
    elif count * _ENOUGH_WARPS <= warps:
        for start, stop, part in zip(starts, [*starts[1:], warps], b, strict=True):
            own = np.ascontiguousarray(a[:, :, start:stop]).reshape(k, -1)
            result[:, :, start:stop] = (part @ own).reshape(n, m, -1)
    else:
        by_owner = np.ascontiguousarray(a.transpose(2, 1, 0)).reshape(count, -1, k)
        products = (by_owner @ b.swapaxes(1, 2)).reshape(warps, m, n)
        result[...] = products.transpose(2, 1, 0)
    return result


def _joinable(one: Any, other: Any) -> bool:
    """Whether two operands B can be steps of one product."""
    forms = (x.form if isinstance(x, RowsOfB) else None for x in (one, other))
    return next(forms) == next(forms)


def _same_a(one: Product, other: Product) -> bool:
    return (
        one.kind == other.kind
        and len(one.left) == len(other.left)
        and _joinable(one.right[0], other.right[0])
        and all(x is y for x, y in zip(one.left, other.left, strict=True))
    )
