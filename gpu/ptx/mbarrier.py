"""mbarrier objects: 64-bit words in shared memory, changed by arrays of arrivals and transactions.

The hardware's layout is opaque; this one keeps everything in the word, so that an object can be
copied, watched and overwritten like any other data: pending arrivals, expected arrivals, pending
transaction bytes, phase parity, and a mark that other data is unlikely to carry.  Source: PTX ISA
8.8, 9.7.13.15 (mbarrier).
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
_MARK_SHIFT = 62
_MARK = 1
# What invalidated objects hold, like memory that nobody has written.
INVALID = (1 << 64) - 1


def pack(pending: Array, expected: Array, tx: Array, parity: Array) -> Array:
    """Words from their fields."""
    word = (
        pending
        | expected << _EXPECTED_SHIFT
        | (tx + _TX_BIAS) << _TX_SHIFT
        | parity << _PARITY_SHIFT
        | _MARK << _MARK_SHIFT
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


def are_valid(words: Array) -> Array:
    """Which words are initialised objects."""
    return words.astype(np.uint64, copy=False).view(np.int64) >> _MARK_SHIFT == _MARK


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

    def check(bad: Array, why: str) -> None:
        if bad.any():
            fail(int(np.flatnonzero(bad)[0]), why)

    pending, expected, bytes_left, phase = unpack(words)
    bytes_left = bytes_left + tx
    expected = expected - drops
    check(expected < 0, "is told to drop more arrivals than it expects")
    check(np.abs(bytes_left) >= _TX_BIAS, f"has to count {bytes_left.max()} bytes, too many")
    # Arrivals of the next phase cannot be among these: somebody has to see this one complete first.
    pending = pending - arrivals
    check(pending < 0, "gets more arrivals than the phase expects")
    check(pending > COUNT_LIMIT, f"waits for more than {COUNT_LIMIT} arrivals")
    # Once all arrivals have been dropped, an object that nobody touches is at zero too.
    complete = (pending == 0) & (bytes_left == 0) & ((arrivals != 0) | (tx != 0))
    phase = np.where(complete, phase ^ 1, phase)
    pending = np.where(complete, expected, pending)
    return pack(pending, expected, bytes_left, phase), complete


def sequential(before: Array, objects: Array, arrivals: Array) -> Array:
    """The words that lanes saw who arrived one after the other at objects that held ``before``."""
    if len(objects) < 2:
        return before
    order = np.argsort(objects, kind="stable")
    counts = arrivals[order]
    earlier = np.cumsum(counts) - counts
    sorted_objects = objects[order]
    first = np.searchsorted(sorted_objects, sorted_objects)
    earlier -= earlier[first]
    pending, expected, tx, phase = unpack(before[order])
    result = np.empty_like(before)
    result[order] = pack(np.maximum(pending - earlier, 0), expected, tx, phase)
    return result


def describe(word: int) -> str:
    """An object for an error message."""
    if not are_valid(np.array([word], np.uint64)).all():
        return "not initialised"
    pending, expected, tx, phase = (int(v[0]) for v in unpack(np.array([word], np.uint64)))
    return f"phase parity {phase}, {pending} of {expected} arrivals and {tx} bytes missing"
