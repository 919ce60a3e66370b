"""min and max by the PTX rules, over every pair of corner values."""

from __future__ import annotations

import math

import exact_arithmetic as exact
import numpy as np
import pytest

from simkit.numerics.minmax import fmax_ptx, fmin_ptx

NAN = 0x7FFFFFFF
CORNERS = np.array(
    [0, 1, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF], np.uint32
)
ALL = np.concatenate([CORNERS, CORNERS | np.uint32(1 << 31)])


def order_key(bits: int) -> int:
    """Integers in the order of the floats, -0 before +0."""
    return bits if bits < 1 << 31 else (1 << 31) - 1 - bits


def reference(x: int, y: int, pick: object) -> int:
    numbers = [v for v in (x, y) if v & 0x7FFFFFFF <= 0x7F800000]
    return pick(numbers, key=order_key) if numbers else NAN  # type: ignore[operator]


@pytest.mark.parametrize(("function", "pick"), [(fmin_ptx, min), (fmax_ptx, max)])
def test_every_pair(function: object, pick: object) -> None:
    x, y = (v.ravel() for v in np.meshgrid(ALL, ALL))
    got = function(x.view(np.float32), y.view(np.float32)).view(np.uint32)  # type: ignore[operator]
    want = [reference(*pair, pick) for pair in zip(x.tolist(), y.tolist(), strict=True)]
    assert got.tolist() == want


@pytest.mark.parametrize(("function", "pick"), [(fmin_ptx, min), (fmax_ptx, max)])
def test_long_arrays(function: object, pick: object) -> None:
    """Long enough for vector loops; with and without zeros."""
    rng = np.random.default_rng(1)
    for levels in (3, 1000):
        x, y = (rng.integers(-levels, levels, (2, 1001)) * 0.5).astype(np.float32)
        x, y = np.copysign(x, rng.standard_normal(1001)), np.copysign(y, rng.standard_normal(1001))
        x, y = x.astype(np.float32), y.astype(np.float32)
        got = function(x, y).view(np.uint32).tolist()  # type: ignore[operator]
        pairs = zip(x.view(np.uint32).tolist(), y.view(np.uint32).tolist(), strict=True)
        assert got == [reference(*pair, pick) for pair in pairs]


def test_broadcasting() -> None:
    x = exact.f32([[1, -2], [0, math.nan]])
    assert fmax_ptx(x, 0.0).tolist() == [[1, 0], [0, 0]]
    assert fmin_ptx(exact.f32([0.0, -0.0]), x).tolist() == [[0, -2], [0, 0]]
    assert fmax_ptx(1.0, 2.0) == 2
    assert math.isnan(fmin_ptx(math.nan, math.nan))
