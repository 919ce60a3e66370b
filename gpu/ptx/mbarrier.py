"""mbarrier objects: 64-bit words in shared memory, changed by arrays of arrivals and transactions.

The hardware's layout is opaque; this one keeps everything in the word, so that an object can be
copied, watched and overwritten like any other data: pending arrivals, expected arrivals, pending
transaction bytes, phase parity. Source: PTX ISA 8.8, 9.7.13.15 (mbarrier).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Array = np.ndarray

COUNT_LIMIT = (1 << 20) - 1
_COUNT_BITS = 20
_TX_BITS = 21
_TX_BIAS = 1 << 20
_EXPECTED_SHIFT = _COUNT_BITS
_TX_SHIFT = 2 * _COUNT_BITS
_PARITY_SHIFT = _TX_SHIFT + _TX_BITS
# What an object is when it is none: never initialised (shared memory starts as ones) or
# invalidated.
INVALID = (1 << 64) - 1


def pack(pending: Array, expected: Array, tx: Array, parity: Array) -> Array:
    """Words from their fields."""
    word = (
        pending
        | expected << _EXPECTED_SHIFT
        | (tx + _TX_BIAS) << _TX_SHIFT
        | parity << _PARITY_SHIFT
    )
    return word.astype(np.int64).view(np.uint64)


def unpack(words: Array) -> tuple[Array, Array, Array, Array]:
    """pending, expected, tx, parity as int64."""
    w = words.astype(np.uint64, copy=False).view(np.int64)
    count = (1 << _COUNT_BITS) - 1
    return (
        w & count,
        w >> _EXPECTED_SHIFT & count,
        (w >> _TX_SHIFT & ((1 << _TX_BITS) - 1)) - _TX_BIAS,
        w >> _PARITY_SHIFT & 1,
    )


def parity(words: Array) -> Array:
    """The parity of the phase that is not complete yet."""
    return words.astype(np.uint64, copy=False).view(np.int64) >> _PARITY_SHIFT & 1


def initial(count: Array) -> Array:
    """Fresh objects that expect ``count`` arrivals a phase."""
    zero = np.zeros_like(count)
    return pack(count, count, zero, zero)


def update(
    words: Array,
    arrivals: Array,
    tx: Array,
    drops: Array,
    fail: Callable[[int, str], None],
) -> tuple[Array, Array]:
    """Objects after arrivals and changes of the transaction count, and which phases completed.

    ``arrivals``, ``tx`` (bytes expected less bytes completed) and ``drops`` (arrivals that later
    phases no longer expect) are int64 per object.  ``fail(index, why)`` reports what is undefined
    on hardware.
    """
    pending, expected, bytes_left, phase = unpack(words)
    flipped = np.zeros(len(words), bool)
    bytes_left = bytes_left + tx
    expected = expected - drops
    if (expected < 0).any():
        fail(int(np.flatnonzero(expected < 0)[0]), "more arrivals dropped than it expects")
    left = arrivals.copy()
    while True:
        taken = np.minimum(left, pending)
        pending = pending - taken
        left = left - taken
        complete = (pending == 0) & (bytes_left == 0)
        # An object nobody touched in this call cannot be at zero: its phase would have completed
        # before.
        if not complete.any():
            break
        flipped |= complete
        phase = np.where(complete, phase ^ 1, phase)
        pending = np.where(complete, expected, pending)
        if not (complete & ((left > 0) | (expected == 0))).any() or not left.any():
            break
    if left.any():
        fail(int(np.flatnonzero(left)[0]), "more arrivals than the phase expects")
    if (np.abs(bytes_left) >= _TX_BIAS).any():
        fail(
            int(np.flatnonzero(np.abs(bytes_left) >= _TX_BIAS)[0]), "transaction count out of range"
        )
    return pack(pending, expected, bytes_left, phase), flipped


def describe(word: int) -> str:
    """An object for an error message."""
    if word == INVALID:
        return "not initialised"
    pending, expected, tx, phase = (int(v[0]) for v in unpack(np.array([word], np.uint64)))
    return f"phase parity {phase}, {pending} of {expected} arrivals and {tx} bytes missing"
