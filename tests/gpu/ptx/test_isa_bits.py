"""fns, szext and the rarer products, from the ISA's pseudo-code and Python's integers."""

from __future__ import annotations

import numpy as np
import pytest
from lanes import corner_integers, lanewise, pairs


def nth_set_bit(mask: int, base: int, offset: int) -> int:
    """The ISA's pseudo-code."""
    if offset == 0:
        return base if mask >> base & 1 else 0xFFFFFFFF
    place, count, step = base, abs(offset) - 1, 1 if offset > 0 else -1
    while 0 <= place < 32:
        if mask >> place & 1:
            if count == 0:
                return place
            count -= 1
        place += step
    return 0xFFFFFFFF


def test_fns() -> None:
    generator = np.random.default_rng(3)
    mask = generator.integers(0, 1 << 32, 512, np.uint32)
    mask[::5] &= generator.integers(0, 1 << 32, len(mask[::5]), np.uint32)
    mask[:4] = [0, 0xFFFFFFFF, 1, 1 << 31]
    base = generator.integers(0, 32, 512).astype(np.uint32)
    offset = generator.integers(-12, 13, 512).astype(np.int32)
    sources = {"m": mask, "b": base, "o": offset}
    got = lanewise("fns.b32 %d, %m, %b, %o;", sources, {"d": np.uint32})["d"]
    rows = zip(mask.tolist(), base.tolist(), offset.tolist(), strict=True)
    assert got.tolist() == [nth_set_bit(*row) for row in rows]


def extended(a: int, n: int, kind: str, mode: str) -> int:
    """The ISA's pseudo-code."""
    width = n & 31
    too_large = n >= 32 and mode == "clamp"
    mask = 0 if too_large else (0xFFFFFFFF << width) & 0xFFFFFFFF
    sign = 0
    if width and not too_large and kind == "s32":
        sign = a >> (width - 1) & 1
    return (a & ~mask) | (mask if sign else 0)


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_szext(kind: str) -> None:
    counts = np.array([0, 1, 2, 7, 8, 31, 32, 33, 63, 255, 0xFFFFFFFF], np.uint32)
    a, n = pairs(corner_integers(32, False), counts)
    text = f"szext.clamp.{kind} %c, %a, %n;\nszext.wrap.{kind} %w, %a, %n;"
    got = lanewise(text, {"a": a, "n": n}, {"c": np.uint32, "w": np.uint32})
    for result, mode in (("c", "clamp"), ("w", "wrap")):
        rows = zip(a.tolist(), n.tolist(), strict=True)
        assert got[result].tolist() == [extended(x, y, kind, mode) for x, y in rows], mode


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def test_high_and_saturating_products() -> None:
    a, b = pairs(corner_integers(32, True, 8), corner_integers(32, True, 8)[::2])
    c = np.resize(corner_integers(32, True, 8), a.shape)
    text = """
        mul24.hi.s32 %d, %a, %b;
        mul24.hi.u32 %e, %a, %b;
        mad24.hi.s32 %f, %a, %b, %c;
        mad24.hi.sat.s32 %g, %a, %b, %c;
        mad.hi.sat.s32 %h, %a, %b, %c;
    """
    got = lanewise(text, {"a": a, "b": b, "c": c}, dict.fromkeys("defgh", np.int32))
    for k, (x, y, z) in enumerate(zip(a.tolist(), b.tolist(), c.tolist(), strict=True)):
        product = signed(x, 24) * signed(y, 24) >> 16
        plain = (x & 0xFFFFFF) * (y & 0xFFFFFF) >> 16
        assert got["d"][k] == signed(product, 32)
        assert got["e"][k] == signed(plain, 32)
        assert got["f"][k] == signed(product + z, 32)
        assert got["g"][k] == min(max(signed(product, 32) + z, -(2**31)), 2**31 - 1)
        assert got["h"][k] == min(max((x * y >> 32) + z, -(2**31)), 2**31 - 1)
