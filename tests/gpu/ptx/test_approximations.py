"""approx="adversarial": bounds hold in the executor, and lucky verdicts are found out."""

from __future__ import annotations

import numpy as np
import pytest

import gpu
from gpu.ptx.executor import PtxDevice
from gpu.ptx.launch import Options
from simkit.numerics.approximate import BOUNDS

F32 = ["ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"]
X = np.random.default_rng(0).uniform(0.1, 6, 256).astype(np.float32)

UNARY = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 y) {{
  .reg .b64 %rd<6>; .reg .b32 %r<4>; .reg .f32 %f<6>; .reg .b16 %h<4>;
  ld.param.u64 %rd0, [x]; ld.param.u64 %rd1, [y];
  mov.u32 %r0, %tid.x; mul.wide.u32 %rd2, %r0, 4;
  add.u64 %rd0, %rd0, %rd2; add.u64 %rd1, %rd1, %rd2;
  ld.global.f32 %f0, [%rd0];
  {text}
  st.global.f32 [%rd1], %f1;
  ret;
}}
"""


def opened(**options: object) -> PtxDevice:
    device = gpu.open("ptx", options=Options(**options))  # type: ignore[arg-type]
    assert isinstance(device, PtxDevice)
    return device


def run(text: str, x: np.ndarray, device: PtxDevice) -> np.ndarray:
    kernel = device.load(UNARY.format(text=text)).kernel("k")
    y = device.empty(x.size, np.float32)
    kernel.launch((1,), (x.size,), [device.array(x), y])
    return y.to_numpy()


@pytest.mark.parametrize("name", F32)
def test_results_stay_inside_the_interval(name: str) -> None:
    text = f"{name}.approx.f32 %f1, %f0;"
    with np.errstate(all="ignore"):
        low, high = BOUNDS[name].interval(X)
    rounded = run(text, X, opened())
    results = [run(text, X, opened(approx="adversarial", approx_seed=s)) for s in range(3)]
    for found in (rounded, *results):
        assert ((low <= found) & (found <= high)).all()
    assert any(found.tobytes() != rounded.tobytes() for found in results)
    again = run(text, X, opened(approx="adversarial", approx_seed=1))
    assert again.tobytes() == results[1].tobytes()


@pytest.mark.parametrize("variant", ["approx", "full"])
def test_division(variant: str) -> None:
    text = f"mov.f32 %f2, 0f40400000; div.{variant}.f32 %f1, %f0, %f2;"
    low, high = BOUNDS[f"div.{variant}"].interval(X, np.full_like(X, 3))
    found = run(text, X, opened(approx="adversarial"))
    assert ((low <= found) & (found <= high)).all()
    assert found.tobytes() != run(text, X, opened()).tobytes()


@pytest.mark.parametrize(("kind", "name"), [("f16", "ex2"), ("f16", "tanh"), ("bf16", "tanh")])
def test_half_precision(kind: str, name: str) -> None:
    text = f"""cvt.rn.{kind}.f32 %h0, %f0; {name}.approx.{kind} %h1, %h0;
      cvt.f32.{kind} %f1, %h1;"""
    rounded_x = run(f"cvt.rn.{kind}.f32 %h0, %f0; cvt.f32.{kind} %f1, %h0;", X, opened())
    low, high = BOUNDS[f"{name}.{kind}"].interval(rounded_x)
    for options in ({}, {"approx": "adversarial", "approx_seed": 5}):
        found = run(text, X, opened(**options))
        assert ((low <= found) & (found <= high)).all()


def test_exact_instructions_are_left_alone() -> None:
    text = "rcp.rn.f32 %f2, %f0; sqrt.rn.f32 %f3, %f2; div.rn.f32 %f1, %f3, %f0;"
    exact = run(text, X, opened()).tobytes()
    assert run(text, X, opened(approx="adversarial")).tobytes() == exact


# Is x a multiple of 3?  1 and 0 for yes and no.
LUCKY = """mov.f32 %f2, 0f40400000; div.full.f32 %f3, %f0, %f2; cvt.rmi.f32.f32 %f4, %f3;
  .reg .pred %p; setp.eq.f32 %p, %f3, %f4; selp.f32 %f1, 0f3F800000, 0f00000000, %p;"""
ROBUST = """mov.f32 %f2, 0f40400000; div.full.f32 %f3, %f0, %f2; cvt.rni.f32.f32 %f4, %f3;
  mul.f32 %f5, %f4, %f2; .reg .pred %p; setp.eq.f32 %p, %f5, %f0;
  selp.f32 %f1, 0f3F800000, 0f00000000, %p;"""


def test_a_verdict_that_hangs_on_a_lucky_rounding_is_found_out() -> None:
    """An approximate quotient that is compared for equality is right when rounded to nearest,
    which no GPU promises; the one that multiplies back is right whatever the bound allows.
    """
    x = np.arange(1, 257, dtype=np.float32)
    truth = (x % 3 == 0).astype(np.float32)
    assert (run(LUCKY, x, opened()) == truth).all()
    adversaries = [opened(approx="adversarial", approx_seed=s) for s in range(5)]
    assert not any((run(LUCKY, x, device) == truth).all() for device in adversaries)
    assert all((run(ROBUST, x, device) == truth).all() for device in adversaries)
