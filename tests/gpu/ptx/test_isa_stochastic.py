"""cvt.rs in the executor: which operand lands where, and on which architecture."""

from __future__ import annotations

import numpy as np
import pytest
from lanes import device, lanewise

from simkit.errors import PtxError
from simkit.numerics import stochastic

RNG = np.random.default_rng(0)
A, B, E, F = RNG.standard_normal((4, 96)).astype(np.float32) * np.float32(3)
RBITS = RNG.integers(0, 1 << 32, 96, dtype=np.uint32)


@pytest.mark.parametrize("flags", ["", ".relu", ".satfinite", ".relu.satfinite"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_pairs(kind: str, flags: str) -> None:
    text = f"cvt.rs{flags}.{kind}x2.f32 %d, %a, %b, %r;"
    found = lanewise(text, {"a": A, "b": B, "r": RBITS}, {"d": np.uint32}, target="sm_100a")["d"]
    options = {flag: True for flag in flags.split(".") if flag}
    high = stochastic.float32_to_stochastic(A, RBITS >> np.uint32(16), kind, **options)
    low = stochastic.float32_to_stochastic(B, RBITS, kind, **options)
    np.testing.assert_array_equal(found >> np.uint32(16), high)
    np.testing.assert_array_equal(found & np.uint32(0xFFFF), low)


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
def test_four_elements(kind: str, relu: str) -> None:
    text = f"cvt.rs{relu}.satfinite.{kind}x4.f32 %d, {{%a, %b, %e, %f}}, %r;"
    sources = {"a": A, "b": B, "e": E, "f": F, "r": RBITS}
    width = 4 if kind == "e2m1" else 8
    result = {"d": np.uint16 if kind == "e2m1" else np.uint32}
    found = lanewise(text, sources, result, target="sm_100a")["d"].astype(np.uint32)
    random = stochastic.random_of_four(RBITS, kind)
    for place, (x, bits) in enumerate(zip((F, E, B, A), random[::-1], strict=True)):
        wanted = stochastic.float32_to_stochastic(x, bits, kind, relu=bool(relu))
        element = found >> np.uint32(width * place) & np.uint32((1 << width) - 1)
        np.testing.assert_array_equal(element, wanted)


def test_needs_its_architecture() -> None:
    text = """.version 8.7
    .target {target}
    .address_size 64
    .visible .entry k() {{
      .reg .b32 %d; .reg .f32 %a;
      mov.f32 %a, 0f3F800000;
      cvt.rs.f16x2.f32 %d, %a, %a, %d;
      ret;
    }}"""
    device("b200").load(text.format(target="sm_100a")).kernel("k")
    with pytest.raises(PtxError, match="sm_100a"):
        device().load(text.format(target="sm_90a")).kernel("k")
