"""numerics="fast": products of rows that ldmatrix fetched, and results near the exact ones."""

from __future__ import annotations

import numpy as np
import pytest

import gpu
from gpu.ptx import fragments
from gpu.ptx.arithmetic import FAST
from gpu.ptx.products import Products
from gpu.ptx.rows import Rows, RowsOfB
from properties.attention_case import AttentionCase
from properties.catalog import law
from properties.law import Context
from properties.run import replay
from simkit.machine.gpus import gpu as find_gpu

KINDS = {"bf16": 16, "f16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}


def rows(owners: int, sharing: int, matrices: int, seed: int = 0) -> Rows:
    words = np.random.default_rng(seed).integers(0, 1 << 32, (owners, 32 * matrices), np.uint32)
    return Rows(words.view(np.complex128), sharing)


# ldmatrix.trans moves 16-bit elements.
@pytest.mark.parametrize(
    ("kind", "is_transposed"), [*((k, False) for k in KINDS), ("bf16", True), ("f16", True)]
)
@pytest.mark.parametrize(("owners", "sharing"), [(6, 1), (3, 2), (1, 6)])
def test_rows_and_registers_are_the_same_b(
    kind: str, owners: int, sharing: int, is_transposed: bool
) -> None:
    fetched = rows(owners, sharing, 4)
    registers = fetched.registers(is_transposed)
    for one, other in zip(registers, fetched.by_warp().registers(is_transposed), strict=True):
        np.testing.assert_array_equal(one, other)
    b = RowsOfB.of(((fetched, 2), (fetched, 1)), is_transposed, kind).matrix()
    assert b.shape == (KINDS[kind], 8, owners * sharing)
    expected = fragments.matrix_b([registers[2], registers[1]], kind)
    np.testing.assert_array_equal(b.view(np.uint32), expected.view(np.uint32))


def test_pieces_of_different_owners() -> None:
    """One row of B from a load that CTAs share, the next from one that differs by warp."""
    shared, own = rows(2, 3, 1), rows(6, 1, 1, seed=1)
    b = RowsOfB.of(((shared, 0), (own, 0)), False, "bf16")
    registers = [*shared.registers(False), *own.registers(False)]
    expected = fragments.matrix_b(registers, "bf16")
    np.testing.assert_array_equal(b.matrix().view(np.uint32), expected.view(np.uint32))


# Owners of 4 warps each, and how many neighbours have the same B: all, 16 warps or more, fewer.
@pytest.mark.parametrize("alike", [24, 8, 1])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_of_fetched_rows(alike: int, is_transposed: bool) -> None:
    rng = np.random.default_rng(alike)
    warps = 96
    a = [rng.standard_normal((16, 16, warps)).astype(np.float32) for _ in range(2)]
    starts = [None, rng.standard_normal((16, 8, warps)).astype(np.float32)]
    values = rng.standard_normal((24 // alike, 8, 8, 8)).astype(np.float32)
    words = (values.view(np.uint32) >> 16).astype(np.uint16).reshape(24 // alike, -1)
    fetched = Rows(np.repeat(words, alike, axis=0).view(np.complex128), 4)
    products = Products(lambda *_: pytest.fail("these are computed from rows"))
    found = []
    for tile, start in enumerate(starts):
        product: object = start
        for step in range(2):
            first = 4 * tile + 2 * step
            b = RowsOfB.of(((fetched, first), (fetched, first + 1)), is_transposed, "bf16")
            product = products.add(a[step], b, product, "bf16")
        found.append(product)
    numbers = (words.astype(np.uint32) << 16).view(np.float32).reshape(-1, 8, 8, 8)
    for tile, (product, start) in enumerate(zip(found, starts, strict=True)):
        # [run, K, 8]: matrices below each other along K, their rows columns of B if not transposed
        b = numbers[:, 4 * tile : 4 * tile + 4]
        b = (b if is_transposed else b.swapaxes(2, 3)).reshape(-1, 32, 8)
        by_warp = np.repeat(b, 4 * alike, axis=0).astype(np.float64)
        left = np.concatenate(a, axis=1).transpose(2, 0, 1).astype(np.float64)
        expected = (left @ by_warp).transpose(1, 2, 0) + (0 if start is None else start)
        np.testing.assert_allclose(products.force(product), expected, atol=1e-4)


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(q_len=300, kv_len=130),
        AttentionCase(q_len=300, kv_len=130, group=2, kv_heads=2, causal=True),
        AttentionCase(q_len=65, kv_len=70, batch=2, kv_heads=3),
        AttentionCase(q_len=65, kv_len=129, d=128, data="large"),
    ],
    ids=lambda case: f"{case.q_len}x{case.kv_len}",
)
@pytest.mark.parametrize("name", ["accuracy", "lse", "traffic"])
def test_laws_without_bits_hold(case: AttentionCase, name: str) -> None:
    device = gpu.open("ptx", options=gpu.Options(numerics="fast"))
    result = replay(law("flash_attention", name), Context(device, find_gpu("h100")), case)
    assert result.status == "pass", result.detail


def test_fast_arithmetic_may_write_over_its_operands() -> None:
    a, b, c = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    expected = a * b + c
    for target in range(3):
        operands = [a.copy(), b.copy(), c.copy()]
        np.testing.assert_array_equal(FAST.fma(*operands, operands[target]), expected)
        np.testing.assert_array_equal(operands[target], expected)
