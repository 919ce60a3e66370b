"""What makes one attention of another: transform of the logits, mask, transform of the output.

The device side is gpu/kernels/include/variant.cuh, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.errors import DtypeError, ShapeError, SimkitError, check_array
from simkit.layouts.custom_mask import CustomMask
from simkit.numerics.arrays import Float32Array, Float64Array
from simkit.numerics.exp2 import exp2
from simkit.numerics.fma import fma
from simkit.numerics.scalar import add, divide, multiply, subtract

Array = NDArray[Any]


LEAST_SOFT_CAP, LARGEST_SOFT_CAP = 2.0**-20, 2.0**10
"""The kernels' tanh has an absolute error of some 2^-24: above, caps would swallow small logits."""
LARGEST_SINK = 2.0**20
"""In size: beyond, base-2 exponents in float32 have few bits left for fractions."""


@dataclass(frozen=True, eq=False)
class Place:
    """Pairs of a query and a key, int64 arrays that broadcast: query ``row`` of ``request`` in head
    ``head`` and its key ``key``, of ``q_len`` and ``kv_len``.
    """

    request: Array
    head: Array
    row: Array
    key: Array
    q_len: Array
    kv_len: Array

    @property
    def position(self) -> Array:
        """Of the query among the keys: the last query stands at the last key."""
        return self.row + self.kv_len - self.q_len


@dataclass(frozen=True, eq=False)
class UserVariant:
    """A variant of one's own: CUDA C++, and what it computes in NumPy.

    ``cuda``: the members of a ``struct UserVariant : VariantHooks`` (variant.cuh), static functions
    ``logit``, ``visible`` and ``output``; what is left out does nothing. The Python functions get
    arrays, float32 for the kernel's bits and float64 for the reference, and use NumPy's operators,
    each of which rounds once like the CUDA code's; natural units. ``values``: float32 [n], of both.
    ``output`` is of the whole output, so that plans for such a variant may not split keys.
    ``name``: for the cache of compiled kernels and messages.
    """

    name: str
    cuda: str
    logit: Callable[[Array, Place, Array], Array] | None = None
    visible: Callable[[Place, Array], NDArray[np.bool_]] | None = None
    output: Callable[[Array, Place, Array, Array], Array] | None = None
    values: Float32Array | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ShapeError(f"a variant's name is an identifier, not {self.name!r}")
        if not isinstance(self.cuda, str):
            raise DtypeError(f"cuda of {self.name} is text, not {type(self.cuda).__name__}")
        if self.values is not None:
            check_array("values", self.values)
        if self.values is not None and self.values.dtype != np.float32:
            raise DtypeError(f"values must be float32, got {self.values.dtype}")

    @property
    def array(self) -> Float32Array:
        return np.zeros(0, np.float32) if self.values is None else self.values

    def call(self, hook: str, *arguments: Any) -> Any:
        """The Python counterpart of a hook; `SimkitError` that names it where it raises."""
        try:
            return getattr(self, hook)(*arguments)
        except Exception as error:
            raise SimkitError(
                f"variant {self.name}: its {hook} in Python raises {type(error).__name__}: {error}"
            ) from error


@dataclass(frozen=True, eq=False, kw_only=True)
class Variant:
    """Which keys a query sees, and what becomes of its logits.

    ``causal``: no key after its own position; positions end in the bottom right corner.
    ``window_left``: no key more than so many before it; -1 is no limit. ``custom_mask``: bits of
    every request. ``soft_cap`` > 0: logit = cap tanh(logit / cap). ``alibi_slopes`` float32
    [heads]: logit -= slope |position - key|. ``sinks`` float32 [heads]: a logit that only the sum
    of weights sees. ``rope`` float32 [positions, d]: cosines, then sines, of the angles by which
    pairs (i, i + d / 2) of Q and K are turned. Order: rope, scale, soft_cap, alibi, ``user``; a key
    is seen if everything lets it. Errors: `ShapeError`, `DtypeError`.

    Sources: FlashAttention (masks, ALiBi, soft cap), FlashInfer's variants (sink, hooks).
    """

    causal: bool = False
    window_left: int = -1
    custom_mask: CustomMask | None = None
    soft_cap: float = 0.0
    alibi_slopes: Float32Array | None = None
    sinks: Float32Array | None = None
    rope: Float32Array | None = None
    user: UserVariant | None = None

    def __post_init__(self) -> None:
        for name, tensor, axes in (
            ("alibi_slopes", self.alibi_slopes, 1),
            ("sinks", self.sinks, 1),
            ("rope", self.rope, 2),
        ):
            if tensor is not None:
                check_array(name, tensor)
            if tensor is not None and (tensor.dtype != np.float32 or tensor.ndim != axes):
                raise DtypeError(
                    f"{name} must be float32 of {axes} axes, got {tensor.dtype} {tensor.shape}"
                )
        if not isinstance(self.window_left, int | np.integer) or self.window_left < -1:
            raise ShapeError(f"window_left is {self.window_left!r}; it is -1 (no limit) or more")
        if not isinstance(self.soft_cap, int | float | np.floating) or not (
            self.soft_cap == 0 or LEAST_SOFT_CAP <= self.soft_cap <= LARGEST_SOFT_CAP
        ):
            raise ShapeError(
                f"soft_cap is {self.soft_cap!r}; it is 0 (none) or {LEAST_SOFT_CAP:g} to "
                f"{LARGEST_SOFT_CAP:g}: the kernels' tanh errs by 2^-24 of it"
            )
        if self.sinks is not None and (self.sinks > -np.inf).any():
            largest = np.abs(self.sinks[self.sinks > -np.inf]).max()
            if largest > LARGEST_SINK:
                raise ShapeError(
                    f"a sink is {largest:g} in size; it is at most {LARGEST_SINK:g}, or -inf"
                )
        for name, own, kind in (
            ("custom_mask", self.custom_mask, CustomMask),
            ("user", self.user, UserVariant),
        ):
            if own is not None and not isinstance(own, kind):
                raise DtypeError(f"{name} must be a {kind.__name__}, got {type(own).__name__}")
        if self.rope is not None and self.alibi_slopes is not None:
            raise ShapeError("rope and alibi_slopes are two encodings of position: one at most")

    @property
    def transforms_logits(self) -> bool:
        """Whether scores become logits before the softmax, or are scaled in its exponent."""
        some = (self.alibi_slopes, self.sinks, self.user)
        return self.soft_cap > 0 or any(x is not None for x in some)

    def logits(self, scores: Float32Array, at: Place, scale: np.float32) -> Float32Array:
        """Logits in natural units, as the kernels compute them from scores q . k."""
        found = multiply(scores, scale)
        if self.soft_cap > 0:
            cap = np.float32(self.soft_cap)
            found = multiply(cap, tanh(multiply(found, soft_cap_inverse(self.soft_cap))))
        if self.alibi_slopes is not None:
            distance = np.abs(at.position - at.key).astype(np.float32)
            found = fma(self.alibi_slopes[at.head], -distance, found)
        if self.user is not None and self.user.logit is not None:
            found = self.user.call("logit", found, at, self.user.array)
        return found

    def exact_logits(self, scores: Float64Array, at: Place, scale: float) -> Float64Array:
        """The same by the formula in float64."""
        found = scores * scale
        if self.soft_cap > 0:
            found = self.soft_cap * np.tanh(found / self.soft_cap)
        if self.alibi_slopes is not None:
            slopes = self.alibi_slopes.astype(np.float64)[at.head]
            found = found - slopes * np.abs(at.position - at.key)
        if self.user is not None and self.user.logit is not None:
            found = self.user.call("logit", found, at, self.user.array.astype(np.float64))
        return found

    def visible(self, at: Place) -> NDArray[np.bool_]:
        """Whether a query sees a key, which must exist."""
        position = at.position
        seen = (at.key < at.kv_len) & (at.row < at.q_len)
        if self.causal:
            seen = seen & (at.key <= position)
        if self.window_left >= 0:
            seen = seen & (at.key >= position - self.window_left)
        if self.custom_mask is not None:
            seen = np.broadcast_arrays(seen, at.key, at.row)[0].copy()
            index = (np.broadcast_to(x, seen.shape)[seen] for x in (at.request, at.row, at.key))
            seen[seen] = self.custom_mask.visible(*index)
        if self.user is not None and self.user.visible is not None:
            seen = seen & self.user.call("visible", at, self.user.array)
        return np.asarray(seen)

    def output(self, output: Array, at: Place, dimension: Array) -> Array:
        """The normalised output as the user's variant transforms it."""
        if self.user is None or self.user.output is None:
            return output
        values = self.user.array.astype(output.dtype)
        return self.user.call("output", output, at, dimension, values)


def soft_cap_inverse(cap: float) -> np.float32:
    """What kernels multiply by instead of dividing."""
    return np.float32(1.0 / cap)


_MINUS_TWO_LOG2_E = np.float32(float.fromhex("-0x1.715476p+1"))


def tanh(x: Float32Array) -> Float32Array:
    """(1 - e) / (1 + e) with e = 2^(-2 log2(e) |x|), as the kernels compute it.

    The error is absolute: e errs by at most 2^-24 and some, whatever is left of 1 - e.
    """
    power = exp2(multiply(_MINUS_TWO_LOG2_E, np.abs(x)))
    one = np.float32(1)
    size = divide(subtract(one, power), add(one, power))
    return np.where(x < 0, -size, size)


def rotate(x: Float32Array, angles: Float32Array) -> Float32Array:
    """Rotary embedding of ``x`` [..., d] by ``angles`` [..., d] (cosines, sines), float32, not yet
    rounded to elements: fma(a, cos, -(b sin)) and fma(b, cos, a sin) for pairs (a, b).
    """
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    cosine, sine = angles[..., :half], angles[..., half:]
    turned = (fma(a, cosine, -multiply(b, sine)), fma(b, cosine, multiply(a, sine)))
    return np.concatenate(turned, axis=-1)


def exact_rotate(x: Float64Array, angles: Float64Array) -> Float64Array:
    """`rotate` in float64."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    cosine, sine = angles[..., :half], angles[..., half:]
    return np.concatenate((a * cosine - b * sine, b * cosine + a * sine), axis=-1)


def rope_angles(positions: int, d: int, *, theta: float = 1e4, scale: float = 1.0) -> Float32Array:
    """Cosines and sines [positions, d] of position / (scale theta^(2 i / d)), rounded once.

    Source: Su et al., RoFormer, arXiv 2104.09864; the pairing (i, i + d / 2) is GPT-NeoX's.
    """
    frequency = theta ** (-2.0 * np.arange(d // 2) / d) / scale
    angle = np.arange(positions)[:, None] * frequency
    return np.concatenate((np.cos(angle), np.sin(angle)), axis=-1).astype(np.float32)
