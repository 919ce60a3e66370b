"""cvt.rs against its definition in fractions: x goes up if its place between its neighbours and the
random number together reach 1.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray
from test_codecs_exhaustive import CODECS, values_of

from simkit.numerics import stochastic
from simkit.numerics.stochastic import TARGETS, float32_to_stochastic

CASES = 4_000


def operands(kind: str, seed: int) -> NDArray[np.float32]:
    """Numbers over the format's range, its subnormal numbers, both neighbours of its numbers."""
    rng = np.random.default_rng(seed)
    values = values_of(kind)
    low, high = np.log2(values[1]) - 4, np.log2(values[-1]) + 1
    sizes = np.exp2(rng.uniform(max(low, -149), min(high, 127.9), CASES)).astype(np.float32)
    near = rng.choice(values, CASES).astype(np.float32).view(np.uint32)
    near = (near + rng.integers(-2, 3, CASES).astype(np.uint32)).view(np.float32)
    x = np.concatenate([sizes, near[np.isfinite(near)]])
    return x * rng.choice(np.array([-1, 1], np.float32), x.size)


def expected(x: float, random: int, kind: str, satfinite: bool) -> int:
    """By the definition, from the format's values."""
    values, target = values_of(kind), TARGETS[kind]
    size = abs(Fraction(x))
    below = int(np.searchsorted(values, float(size), side="right")) - 1
    step = Fraction(values[-1]) - Fraction(values[-2])
    low = Fraction(values[below])
    high = Fraction(values[below + 1]) if below + 1 < len(values) else low + step
    place = (size - low) / (high - low)
    code = below + (place + Fraction(random, 1 << target.random_bits) >= 1)
    limit = target.largest if satfinite or target.infinity is None else target.infinity
    return min(code, limit) | (target.sign if np.signbit(x) else 0)


@pytest.mark.parametrize("kind", TARGETS)
def test_carry_decides(kind: str) -> None:
    x = operands(kind, 1)
    rng = np.random.default_rng(2)
    ends = np.array([0, (1 << TARGETS[kind].random_bits) - 1], np.uint32)
    random = rng.integers(0, 1 << TARGETS[kind].random_bits, x.size, dtype=np.uint32)
    random[::5], random[1::5] = ends[0], ends[1]
    for satfinite in (False, True):
        actual = float32_to_stochastic(x, random, kind, satfinite=satfinite)
        wanted = [
            expected(v, r, kind, satfinite)
            for v, r in zip(x.tolist(), random.tolist(), strict=True)
        ]
        np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("kind", TARGETS)
def test_no_random_bits_truncate(kind: str) -> None:
    codec, x = CODECS[kind], operands(kind, 3)
    codes = float32_to_stochastic(x, np.uint32(0), kind, satfinite=True)
    size = np.searchsorted(values_of(kind), np.abs(x.astype(np.float64)), side="right") - 1
    np.testing.assert_array_equal(codes & (codec.sign - 1), size)


def test_mean_over_all_random_bits_is_the_number() -> None:
    random = np.arange(1 << 13, dtype=np.uint32)
    for x in (1 + 2.0**-23, 1.0009, -3.1416, 60000.7):
        x32 = np.float32(x)
        codes = float32_to_stochastic(np.full(random.shape, x32), random, "f16").astype(np.uint16)
        assert codes.view(np.float16).astype(np.float64).mean() == float(x32)


@pytest.mark.parametrize("kind", TARGETS)
def test_specials(kind: str) -> None:
    target = TARGETS[kind]
    x = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0], np.float32)
    random = np.full(6, 0xFFFF, np.uint32)
    top = target.largest if target.infinity is None else target.infinity
    plain = [target.nan, target.nan, top, top | target.sign, 0, target.sign]
    assert float32_to_stochastic(x, random, kind).tolist() == plain
    limited = float32_to_stochastic(x, random, kind, relu=True, satfinite=True)
    assert limited.tolist() == [target.nan, target.nan, target.largest, 0, 0, 0]


def test_which_random_bits_an_operand_gets() -> None:
    rbits = np.array([0x8421_0F01], np.uint32)
    assert [int(r[0]) for r in stochastic.random_of_pair(rbits)] == [0x8421, 0x0F01]
    a, b, e, f = (int(r[0]) for r in stochastic.random_of_four(rbits, "e4m3"))
    assert (b, f) == (0x8421, 0x0F01)
    assert (a, e) == (0x8421, 0x80F0)
    a, b, e, f = (int(r[0]) for r in stochastic.random_of_four(rbits, "e2m1"))
    assert (b, f) == (0x840F, 0x2101)
    assert (a, e) == (0xF021, 0x8084)
