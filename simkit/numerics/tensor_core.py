"""The dot-product-accumulate of NVIDIA tensor cores, bit for bit, on batches of small matrices.

One step adds ``terms`` exact products and the accumulator as one sum: every term is aligned to the
largest exponent, truncated toward zero ``fraction_bits`` below it, the integers are added exactly
and the sum is rounded toward zero. Longer products are chains of steps. Sources: Fasi, Higham,
Mikaitis, Pranesh, PeerJ CS 7:e330 (2021); Khattak and Mikaitis, arXiv 2512.07004; Xie et al.
(MMA-Sim), arXiv 2511.10909, both validated against hardware.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from simkit.errors import DtypeError, ShapeError
from simkit.numerics import aligned_sum, matrix_sum, scalar
from simkit.numerics.aligned_sum import Operand, prepare
from simkit.numerics.arrays import CANONICAL_NAN, Float32Array, Float32Like, as_float32
from simkit.numerics.formats import decode_f16, encode_f16

__all__ = [
    "TENSOR_CORES",
    "Operand",
    "TensorCore",
    "dot_accumulate",
    "dot_accumulate_fast",
    "half_precision",
    "prepare",
    "tensor_core",
    "warp_tensor_core",
]


@dataclass(frozen=True)
class TensorCore:
    """How one tensor-core instruction family adds.

    ``terms``: products per step. ``fraction_bits``: bits kept below the largest exponent.
    ``input_min_exponent``: exponent of the input format's smallest normal number; subnormal
    inputs carry it too. ``output_bits``: fraction bits of the result, 23 for float32;
    ``rounds_to_nearest``: a float16 result, rounded to nearest even rather than toward zero.
    ``min_exponent``: the least exponent that terms are aligned to. The accumulator always takes
    part with the exponent -126 or more, hence -126; the models in the literature differ here
    (-126 to -133), which shows only in results near the float32 underflow threshold.
    ``late_terms``: products of one instruction that are summed without the accumulator, which an
    ordinary addition to nearest adds afterwards (`warp_tensor_core`); 0: it is one of the terms.
    """

    name: str
    terms: int
    fraction_bits: int
    input_min_exponent: int
    output_bits: int = 23
    rounds_to_nearest: bool = False
    min_exponent: int = -126
    late_terms: int = 0


_INPUT_MIN_EXPONENT = {"bf16": -126, "f16": -14, "tf32": -126, "e4m3": -6, "e5m2": -14}

# architecture, input, terms, fraction bits, output fraction bits
_ROWS = (
    ("sm_70", "f16", 4, 23, 23),
    ("sm_75", "f16", 8, 24, 23),
    ("sm_80", "f16", 8, 24, 23),
    ("sm_80", "bf16", 8, 24, 23),
    ("sm_80", "tf32", 4, 24, 23),
    ("sm_89", "f16", 8, 24, 23),
    ("sm_89", "bf16", 8, 24, 23),
    ("sm_89", "tf32", 4, 24, 23),
    ("sm_89", "e4m3", 16, 13, 13),
    ("sm_89", "e5m2", 16, 13, 13),
    ("sm_90", "f16", 16, 25, 23),
    ("sm_90", "bf16", 16, 25, 23),
    ("sm_90", "tf32", 8, 25, 23),
    # wgmma and, below, tcgen05.mma; mma.sync with fp8 inputs is another function there.
    ("sm_90", "e4m3", 32, 13, 13),
    ("sm_90", "e5m2", 32, 13, 13),
    ("sm_100", "f16", 16, 25, 23),
    ("sm_100", "bf16", 16, 25, 23),
    ("sm_100", "tf32", 8, 25, 23),
    ("sm_100", "e4m3", 32, 25, 23),
    ("sm_100", "e5m2", 32, 25, 23),
)

TENSOR_CORES: dict[tuple[str, str], TensorCore] = {
    (arch, kind): TensorCore(
        f"{arch} {kind}", terms, fraction_bits, _INPUT_MIN_EXPONENT[kind], output_bits
    )
    for arch, kind, terms, fraction_bits, output_bits in _ROWS
}
"""Tensor cores by (architecture, input format), e.g. ``("sm_90", "bf16")``; float32 results."""


_FIRST_ARCHITECTURE = {"bf16": 80, "tf32": 80, "e4m3": 89, "e5m2": 89}
"""The least architecture whose tensor cores take the format; f16: all that have tensor cores."""


def tensor_core(arch: str, kind: str) -> TensorCore:
    """The `TensorCore` of ``arch`` ("sm_90", "sm_90a", ...) for inputs ``kind`` ("bf16", ...).

    Of the architecture's own instruction: wgmma for fp8 on sm_90, tcgen05.mma on sm_100, mma.sync
    before. Error: `DtypeError` that lists what there is, for a format that the tensor cores of
    ``arch`` do not take, or a pair that is not in `TENSOR_CORES`.
    """
    core = TENSOR_CORES.get((_chip(arch), kind))
    if core is None:
        raise DtypeError(_missing(arch, kind))
    return core


def _chip(arch: str) -> str:
    return arch.rstrip("af")


def _number(arch: str) -> int:
    digits = _chip(arch).removeprefix("sm_")
    return int(digits) if digits.isdigit() else 0


def _missing(arch: str, kind: str) -> str:
    own = [k for a, k in TENSOR_CORES if a == _chip(arch)]
    first = _FIRST_ARCHITECTURE.get(kind)
    if own and first and _number(arch) < first:
        return (
            f"the tensor cores of {arch} take no {kind} inputs, which need sm_{first}; they take"
            f" {', '.join(own)}"
        )
    known = ", ".join(f"{a} {k}" for a, k in TENSOR_CORES)
    return f"no tensor-core model for {arch} with {kind} inputs; known: {known}"


def warp_tensor_core(arch: str, kind: str, k: int) -> TensorCore:
    """The `TensorCore` of ``mma.sync`` with ``k`` products an instruction; arguments and errors
    as those of `tensor_core`.

    It differs for fp8 inputs from sm_90 on, where the fp8 unit is that of wgmma or tcgen05 alone:
    the inputs are widened to f16 and go through the f16 unit, first the elements 0, 1, 4, 5, 8,
    ... of K, then the others, from a zero accumulator; the instruction's own accumulator is added
    at the end. H100 and B200 recordings of Khattak and Mikaitis agree (docs/numerics.md).
    """
    core = tensor_core(arch, kind)
    if kind not in ("e4m3", "e5m2") or _number(arch) < 90:
        return core
    f16 = tensor_core(arch, "f16")
    return replace(f16, name=f"{f16.name} for {kind}", late_terms=k)


def half_precision(core: TensorCore) -> TensorCore:
    """The same unit with a float16 accumulator: its results are rounded to nearest even."""
    return replace(core, name=f"{core.name} to f16", output_bits=10, rounds_to_nearest=True)


def dot_accumulate(
    a: Float32Array | Operand, b: Float32Array | Operand, c: Float32Like, core: TensorCore
) -> Float32Array:
    """``a @ b + c`` as the tensor core ``core`` computes it; float32 [M, N, *batch].

    ``a`` [M, K, *batch] and ``b`` [K, N, *batch] are float32 arrays whose values the input format
    can represent, ``c`` is float32 and broadcasts to [M, N, *batch]; batch axes broadcast. Operands
    of two formats, fp8 ones, are prepared with the `TensorCore` of each (`prepare`). K is cut into
    chained steps of ``core.terms``, ascending. A NaN result is 0x7FFFFFFF, infinities
    and overflow follow IEEE 754, a zero result is +0. Errors: `ShapeError`, `DtypeError`.
    """
    a, b = (x if isinstance(x, Operand) else prepare(x, core) for x in (a, b))
    c = as_float32(c, "c")
    shape = _result_shape(a.values, b.values, c)
    c = np.broadcast_to(c, shape)
    return _late(a, b, c, core) if core.late_terms else _chained(a, b, c, core)


def _chained(a: Operand, b: Operand, c: Float32Array, core: TensorCore) -> Float32Array:
    if matrix_sum.fits(a, b, c, core):
        return matrix_sum.accumulate(a, b, c, core)
    has_terms = aligned_sum.rows_with_terms(a, b, core)
    if has_terms is not None:
        # Zeros leave the accumulator as it is: tiles are often filled up with rows of them.
        with np.errstate(invalid="ignore"):
            result = np.add(c, np.float32(0))
        np.copyto(result, CANONICAL_NAN, where=np.isnan(result))
        if has_terms.any():
            left = a.part(has_terms, slice(None))
            result[has_terms] = _chained(left, b, c[has_terms], core)
        return result
    rows = max(1, aligned_sum.PIECE // max(1, math.prod(c.shape[1:])))
    if len(c) <= rows:
        return aligned_sum.accumulate(a, b, c, core)
    result = np.empty(c.shape, np.float32)
    for start in range(0, len(c), rows):
        piece = slice(start, start + rows)
        result[piece] = aligned_sum.accumulate(a.part(piece, slice(None)), b, c[piece], core)
    return result


def _late(a: Operand, b: Operand, c: Float32Array, core: TensorCore) -> Float32Array:
    """Instructions of ``core.late_terms`` products whose accumulator is added at the end."""
    unit = replace(core, late_terms=0)
    everything = slice(None)
    k = np.arange(core.late_terms)
    # A register of four fp8 numbers widens to two of two f16 numbers, and the two f16 products
    # take one of these each.
    parts = [k] if core.late_terms <= core.terms else [k[k % 4 < 2], k[k % 4 >= 2]]
    for start in range(0, a.values.shape[1], core.late_terms):
        total = np.zeros(c.shape, np.float32)
        for part in parts:
            chosen = part[part < a.values.shape[1] - start] + start
            total = _chained(a.part(everything, chosen), b.part(chosen, everything), total, unit)
        c = scalar.add(total, c)
        if core.rounds_to_nearest:
            c = decode_f16(encode_f16(c))
            np.copyto(c, CANONICAL_NAN, where=np.isnan(c))
    return np.array(c)


def dot_accumulate_fast(a: Float32Array, b: Float32Array, c: Float32Like) -> Float32Array:
    """``a @ b + c`` in ordinary float32, same shapes as `dot_accumulate`: no bits promised."""
    a, b, c = as_float32(a, "a"), as_float32(b, "b"), as_float32(c, "c")
    rows, columns, *batch = shape = _result_shape(a, b, c)
    left, right = (np.broadcast_to(x, (*x.shape[:2], *batch)) for x in (a, b))
    count = math.prod(batch)
    product = _padded(count, rows * columns)
    with np.errstate(all="ignore"):
        np.matmul(_batch_first(left), _batch_first(right), out=product.reshape(-1, rows, columns))
        return np.asarray(product.T.reshape(shape) + c)


# Matrices are turned so many elements at a time, and lie a little more than their size apart:
# distances of a power of two would make them fall on each other in the cache.
_TURNED = 64
_PADDING = 16


def _padded(count: int, size: int) -> Float32Array:
    """Room for ``count`` rows of ``size`` float32 numbers."""
    return np.empty((count, size + _PADDING), np.float32)[:, :size]


def _batch_first(x: Float32Array) -> Float32Array:
    """A copy of [M, N, *batch] as [batch, M, N], whose matrices BLAS can multiply."""
    size = x.shape[0] * x.shape[1]
    flat = x.reshape(size, -1)
    turned = _padded(flat.shape[1], size)
    for start in range(0, size, _TURNED):
        turned[:, start : start + _TURNED] = flat[start : start + _TURNED].T
    return turned.reshape(-1, *x.shape[:2])


def _result_shape(a: Float32Array, b: Float32Array, c: Float32Array) -> tuple[int, ...]:
    if a.ndim < 2 or b.ndim < 2 or a.shape[1] != b.shape[0] or a.ndim != b.ndim:
        raise ShapeError(f"a must be [M, K, *batch] and b [K, N, *batch], got {a.shape}, {b.shape}")
    try:
        shape = (a.shape[0], b.shape[1], *np.broadcast_shapes(a.shape[2:], b.shape[2:]))
        fits = np.broadcast_shapes(shape, c.shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(f"shapes do not fit together: a {a.shape}, b {b.shape}, c {c.shape}")
    return shape
