"""Tensor-core products that have been asked for and not computed yet.

Kernels multiply one A by many Bs and feed each sum to the next step of K.  Put off until a result
is read, those are a few large products instead of many small ones: steps of one accumulator become
one longer K, accumulators with the same A become one wider N.  Nothing changes in the sums: an
accumulator takes its steps in order, and accumulators do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simkit.numerics.tensor_core import Operand

Array = np.ndarray
# (a (16, K, warps), b (K, N, warps), c (16, N, warps), input type) -> (16, N, warps)
Multiply = Callable[[Any, Any, Array, str], Array]


@dataclass(slots=True, eq=False)
class Product:
    """``start`` plus the products of pairs of fragments, in order; ``value`` once computed."""

    kind: str
    start: Array
    left: list[Any]
    right: list[Any]
    value: Array | None = None


@dataclass(slots=True)
class Products:
    """The products that nobody has read yet."""

    multiply: Multiply
    waiting: list[Product] = field(default_factory=list)
    buffers: dict[tuple[str, tuple[int, ...]], Array] = field(default_factory=dict)

    def add(self, a: Any, b: Any, c: Any, kind: str) -> Product:
        """One mma: goes on with the product ``c`` where it can, else starts with its value."""
        if isinstance(c, Product) and c.value is None and c.kind == kind:
            new = Product(kind, c.start, [*c.left, a], [*c.right, b])
            self.waiting = [p for p in self.waiting if p is not c]
        else:
            new = Product(kind, self.force(c) if isinstance(c, Product) else c, [a], [b])
        self.waiting.append(new)
        return new

    def force(self, product: Product) -> Array:
        """The value of a product; computes those with the same A along with it."""
        if product.value is None:
            alike = [p for p in self.waiting if p is not product and _same_a(p, product)]
            self.waiting = [p for p in self.waiting if not any(p is q for q in (product, *alike))]
            self._compute([product, *alike])
        assert product.value is not None
        return product.value

    def _compute(self, products: Sequence[Product]) -> None:
        first = products[0]
        steps = len(first.left)
        if steps == len(products) == 1:
            first.value = self.multiply(first.left[0], first.right[0], first.start, first.kind)
            return
        a = self._joined("a", [first.left], by_columns=True)
        b = self._joined("b", [p.right for p in products], by_columns=False)
        c = first.start
        if len(products) > 1:
            c = self._buffer("c", (c.shape[0], 8 * len(products), c.shape[2]), np.float32)
            for index, product in enumerate(products):
                c[:, 8 * index : 8 * index + 8] = product.start
        result = self.multiply(a, b, c, first.kind)
        for index, product in enumerate(products):
            product.value = result[:, 8 * index : 8 * index + 8]

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


def _same_a(one: Product, other: Product) -> bool:
    return (
        one.kind == other.kind
        and len(one.left) == len(other.left)
        and all(x is y for x, y in zip(one.left, other.left, strict=True))
    )
