"""Triton kernels of the tests: attention, matrix products, softmax, layer norm, reductions."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def flash_attention(
    q, k, v, o, lse, n, scale_log2, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """One program: M rows of one head; q, k, v, o (heads, n, D) contiguous; n a multiple of both
    tiles.  ``lse`` in base 2.
    """
    tile = tl.program_id(0)
    base = tl.program_id(1).to(tl.int64) * n * D
    rows = tile * M + tl.arange(0, M)
    keys = tl.arange(0, N)
    dims = tl.arange(0, D)
    query = tl.load(q + base + rows[:, None] * D + dims[None, :])
    greatest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, D], tl.float32)
    end = (tile + 1) * M if CAUSAL else n
    for start in range(0, end, N):
        key = tl.load(k + base + (start + keys)[None, :] * D + dims[:, None])
        scores = tl.dot(query, key) * scale_log2
        if CAUSAL:
            scores = tl.where(rows[:, None] >= (start + keys)[None, :], scores, float("-inf"))
        new = tl.maximum(greatest, tl.max(scores, 1))
        p = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(greatest - new)
        total = total * shrink + tl.sum(p, 1)
        value = tl.load(v + base + (start + keys)[:, None] * D + dims[None, :])
        sums = tl.dot(p.to(value.dtype), value, sums * shrink[:, None])
        greatest = new
    result = sums / total[:, None]
    tl.store(o + base + rows[:, None] * D + dims[None, :], result.to(o.dtype.element_ty))
    tl.store(lse + tl.program_id(1) * n + rows, greatest + tl.log2(total))


@triton.jit
def matmul(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """c (m, n) float32 = a (m, k) @ b (k, n); any sizes."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    inner = tl.arange(0, K)
    left = a + rows[:, None] * k + inner[None, :]
    right = b + inner[:, None] * n + columns[None, :]
    sums = tl.zeros([M, N], tl.float32)
    for start in range(0, k, K):
        inside = start + inner < k
        x = tl.load(left, mask=(rows[:, None] < m) & inside[None, :], other=0.0)
        y = tl.load(right, mask=inside[:, None] & (columns[None, :] < n), other=0.0)
        sums = tl.dot(x, y, sums)
        left += K
        right += K * n
    there = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + rows[:, None] * n + columns[None, :], sums, mask=there)


@triton.jit
def matmul_descriptors(a, b, c, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """c = a (m, k) @ b (n, k) transposed, through tensor descriptors made by the host."""
    row = tl.program_id(0) * M
    column = tl.program_id(1) * N
    sums = tl.zeros([M, N], tl.float32)
    for start in range(0, k, K):
        x = a.load([row, start])
        y = b.load([column, start])
        sums = tl.dot(x, y.T, sums)
    c.store([row, column], sums.to(tl.float16))


@triton.jit
def matmul_device_descriptors(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """The same with tensor descriptors that the kernel makes itself."""
    left = tl.make_tensor_descriptor(a, [m, k], [k, 1], [M, K])
    right = tl.make_tensor_descriptor(b, [n, k], [k, 1], [N, K])
    target = tl.make_tensor_descriptor(c, [m, n], [n, 1], [M, N])
    row = tl.program_id(0) * M
    column = tl.program_id(1) * N
    sums = tl.zeros([M, N], tl.float32)
    for start in range(0, k, K):
        sums = tl.dot(left.load([row, start]), right.load([column, start]).T, sums)
    target.store([row, column], sums.to(tl.float16))


@triton.jit
def softmax(x, y, columns, BLOCK: tl.constexpr):
    """One program a row."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * columns + column, mask=column < columns, other=float("-inf"))
    value = tl.exp(value - tl.max(value, 0))
    tl.store(y + row * columns + column, value / tl.sum(value, 0), mask=column < columns)


@triton.jit
def layer_norm(x, y, weight, bias, columns, eps, BLOCK: tl.constexpr):
    """One program a row, the row in pieces of BLOCK."""
    x += tl.program_id(0) * columns
    y += tl.program_id(0) * columns
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sums += tl.load(x + at, mask=at < columns, other=0.0).to(tl.float32)
    mean = tl.sum(sums, 0) / columns
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < columns, other=0.0).to(tl.float32)
        away = tl.where(at < columns, value - mean, 0.0)
        squares += away * away
    scale = 1 / tl.sqrt(tl.sum(squares, 0) / columns + eps)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + at, mask=inside)
        b = tl.load(bias + at, mask=inside)
        tl.store(y + at, ((value - mean) * scale * w + b).to(y.dtype.element_ty), mask=inside)


@triton.jit
def sum_atomic(x, total, most, histogram, count, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """Sum and maximum of all elements, and how many fall into each unit interval."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0)
    tl.atomic_add(total, tl.sum(value, 0))
    tl.atomic_max(most, tl.max(value, 0))
    bin = tl.minimum(value.to(tl.int32), BINS - 1)
    tl.atomic_add(histogram + bin, 1, mask=at < count)


@triton.jit
def sum_columns(x, y, COLUMNS: tl.constexpr):
    """Each program adds a row of x to y."""
    column = tl.arange(0, COLUMNS)
    tl.atomic_add(y + column, tl.load(x + tl.program_id(0) * COLUMNS + column))


@triton.jit
def count_with_lock(lock, counter):
    """Each program adds 1 to the counter while it holds the lock."""
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(counter, tl.load(counter, volatile=True) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)
