"""Triton kernels that each use many features of the language in a small space."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def functions(x, y, N: tl.constexpr):
    """A row of y for each group of functions."""
    at = tl.arange(0, N)
    v = tl.load(x + at)
    positive = tl.abs(v)
    tl.store(y + at, tl.sin(v) + tl.cos(v) + tl.exp(v) + tl.log(positive + 1))
    tl.store(y + N + at, tl.rsqrt(positive + 1) + tl.sigmoid(v) + tl.floor(v) + tl.ceil(v))
    tl.store(y + 2 * N + at, tl.erf(v) + libdevice.tanh(v) + libdevice.log1p(positive))
    tl.store(y + 3 * N + at, libdevice.pow(positive, 2.5) + libdevice.atan2(v, v + 1))


@triton.jit
def across_lanes(x, i, y, z, N: tl.constexpr):
    """Scans, sorting, histograms, arg-reductions."""
    at = tl.arange(0, N)
    v = tl.load(x + at)
    w = tl.load(i + at)
    tl.store(y + at, tl.cumsum(v, 0))
    tl.store(y + N + at, tl.sort(v))
    tl.store(z + at, tl.histogram(w, N))
    tl.store(z + N + at, tl.argmax(v, 0))
    tl.store(z + 2 * N + at, w // 7 + w % 13 + (w << 3) + tl.flip(w))
    tl.store(z + 3 * N + at, tl.xor_sum(w, 0) + tl.min(w, 0))


@triton.jit
def rearranged(x, i, gathered, turned, halves, N: tl.constexpr, M: tl.constexpr):
    """Gather along columns, transposition, splitting into even and odd columns."""
    row = tl.arange(0, N)[:, None]
    column = tl.arange(0, M)[None, :]
    v = tl.load(x + row * M + column)
    tl.store(gathered + row * M + column, tl.gather(v, tl.load(i + row * M + column), 0))
    tl.store(turned + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], tl.trans(v))
    even, odd = tl.split(tl.reshape(v, (N, M // 2, 2)))
    tl.store(halves + row * (M // 2) + tl.arange(0, M // 2)[None, :], even * odd)


@triton.jit
def printed(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.device_print("x is", tl.load(x + at))


@triton.jit
def asserted(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.device_assert(tl.load(x + at) >= 0, "x is negative")


@triton.jit
def persistent_matmul(
    a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PROGRAMS: tl.constexpr
):
    """c (m, n) = a (m, k) @ b (n, k) transposed: each program takes every PROGRAMS-th tile."""
    left = tl.make_tensor_descriptor(a, [m, k], [k, 1], [M, K])
    right = tl.make_tensor_descriptor(b, [n, k], [k, 1], [N, K])
    target = tl.make_tensor_descriptor(c, [m, n], [n, 1], [M, N])
    across = tl.cdiv(n, N)
    for tile in tl.range(tl.program_id(0), tl.cdiv(m, M) * across, PROGRAMS, flatten=True):
        row = tile // across * M
        column = tile % across * N
        sums = tl.zeros([M, N], tl.float32)
        for start in range(0, k, K):
            sums = tl.dot(left.load([row, start]), right.load([column, start]).T, sums)
        target.store([row, column], sums.to(tl.float16))


@triton.jit
def add_by_descriptor(a, c, M: tl.constexpr, N: tl.constexpr):
    """c += a by a tensor copy that reduces."""
    source = tl.make_tensor_descriptor(a, [M, N], [N, 1], [M, N])
    target = tl.make_tensor_descriptor(c, [M, N], [N, 1], [M, N])
    target.atomic_add([0, 0], source.load([0, 0]))


@triton.jit
def one_dot(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, OUT: tl.constexpr):
    """c (M, N) = a (M, K) @ b (K, N), one program."""
    row = tl.arange(0, M)[:, None]
    column = tl.arange(0, N)[None, :]
    x = tl.load(a + row * K + tl.arange(0, K)[None, :])
    y = tl.load(b + tl.arange(0, K)[:, None] * N + column)
    tl.store(c + row * N + column, tl.dot(x, y, out_dtype=OUT))
