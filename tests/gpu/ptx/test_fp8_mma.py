"""mma.sync with fp8 inputs on sm_90: two products of the f16 unit, the accumulator added last."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from lanes import device

from simkit.errors import DtypeError, PtxError
from simkit.numerics.tensor_core import dot_accumulate, tensor_core, warp_tensor_core

TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
TEXT = """.version 8.5
.target {target}
.address_size 64
.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d) {{
  .reg .b64 %rd<6>; .reg .b32 %r<6>; .reg .b32 %a<4>; .reg .b32 %b<2>; .reg .f32 %c<4>;
  ld.param.u64 %rd0, [a]; ld.param.u64 %rd1, [b]; ld.param.u64 %rd2, [c]; ld.param.u64 %rd3, [d];
  mov.u32 %r0, %tid.x;
  mul.wide.u32 %rd4, %r0, 16; add.u64 %rd0, %rd0, %rd4; add.u64 %rd2, %rd2, %rd4;
  add.u64 %rd3, %rd3, %rd4;
  mul.wide.u32 %rd5, %r0, 8; add.u64 %rd1, %rd1, %rd5;
  ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%rd0];
  ld.global.v2.b32 {{%b0, %b1}}, [%rd1];
  ld.global.v4.f32 {{%c0, %c1, %c2, %c3}}, [%rd2];
  {mma}
  st.global.v4.f32 [%rd3], {{%c0, %c1, %c2, %c3}};
  ret;
}}
"""
MMA = """mma.sync.aligned.m16n8k32.row.col.f32.{a}.{b}.f32 {{%c0, %c1, %c2, %c3}},
    {{%a0, %a1, %a2, %a3}}, {{%b0, %b1}}, {{%c0, %c1, %c2, %c3}};
"""
LANE = np.arange(32)


def fragments(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> list[np.ndarray]:
    """Registers of a [16, 32], b [32, 8] (bytes) and c [16, 8], by lane."""
    group, member = LANE // 4, LANE % 4
    a_bytes = np.empty((32, 4, 4), np.uint8)
    for register in range(4):
        rows = group + 8 * (register % 2)
        for k in range(4):
            a_bytes[:, register, k] = a[rows, 16 * (register // 2) + 4 * member + k]
    b_bytes = np.empty((32, 2, 4), np.uint8)
    for register in range(2):
        for k in range(4):
            b_bytes[:, register, k] = b[16 * register + 4 * member + k, group]
    c_values = np.empty((32, 4), np.float32)
    for register in range(4):
        c_values[:, register] = c[group + 8 * (register // 2), 2 * member + register % 2]
    return [a_bytes.view(np.uint32).reshape(-1), b_bytes.view(np.uint32).reshape(-1), c_values]


@pytest.mark.parametrize("kinds", [("e4m3", "e4m3"), ("e5m2", "e5m2"), ("e4m3", "e5m2")])
@pytest.mark.parametrize("steps", [1, 3])
def test_accumulator_is_added_last(kinds: tuple[str, str], steps: int) -> None:
    rng = np.random.default_rng(steps)
    a = rng.standard_normal((16, 32)).astype(np.float32).astype(TYPES[kinds[0]])
    b = rng.standard_normal((32, 8)).astype(np.float32).astype(TYPES[kinds[1]])
    c = (rng.standard_normal((16, 8)) * 100).astype(np.float32)
    gpu = device()
    text = TEXT.format(target="sm_90", mma=MMA.format(a=kinds[0], b=kinds[1]) * steps)
    arrays = [gpu.array(x) for x in fragments(a.view(np.uint8), b.view(np.uint8), c)]
    d = gpu.empty((32, 4), np.float32)
    gpu.load(text).kernel("k").launch((1,), (32,), [*arrays, d])

    core, f16 = warp_tensor_core("sm_90", kinds[0], 32), tensor_core("sm_90", "f16")
    wide_a, wide_b = a.astype(np.float32), b.astype(np.float32)
    first = np.arange(32) % 4 < 2
    expected, early = c, c
    for _ in range(steps):
        halves = dot_accumulate(wide_a[:, first].copy(), wide_b[first].copy(), 0.0, f16)
        halves = dot_accumulate(wide_a[:, ~first].copy(), wide_b[~first].copy(), halves, f16)
        expected = halves + expected
        early = dot_accumulate(wide_a, wide_b, early, f16)
    want = fragments(a.view(np.uint8), b.view(np.uint8), expected)[2]
    assert d.to_numpy().tobytes() == want.tobytes()
    whole = dot_accumulate(np.tile(wide_a, (1, steps)), np.tile(wide_b, (steps, 1)), c, core)
    assert whole.tobytes() == expected.tobytes()
    assert early.tobytes() != expected.tobytes()


def test_an_architecture_without_fp8_refuses_the_kernel() -> None:
    text = TEXT.format(target="sm_80", mma=MMA.format(a="e4m3", b="e4m3"))
    with pytest.raises(PtxError, match=r"mma.*e4m3[\s\S]*sm_89|sm_89[\s\S]*e4m3"):
        device("a100").load(text).kernel("k")
    with pytest.raises(DtypeError, match="sm_80 take no e4m3 inputs"):
        tensor_core(device("a100").arch, "e4m3")
