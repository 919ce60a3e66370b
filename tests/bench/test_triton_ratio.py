"""How many times faster than Triton's interpreter the executor is, and how near to NumPy.

One head of flash attention, tile 64 x 64, d = 64, N = 2048: under Triton's interpreter, as Triton
compiles it for sm_90, and our kernel with mma.sync. The bare tensor core: one chain of wgmma on 132
CTAs, beside NumPy's products of the same matrices.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpu
from gpu.kernels.flash_attention import flash_attention
from gpu.ptx.launch import Options

BF16 = np.dtype(ml_dtypes.bfloat16)
N, D = 2048, 64
FAST = Options(numerics="fast")
TRITON_TESTS = Path(__file__).parents[1] / "gpu" / "triton"


@cache
def interpreter_seconds() -> float:
    """Of one run, imports and the check of its result apart."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "interpret_flash_attention.py", str(N)],
        cwd=TRITON_TESTS, capture_output=True, text=True, check=True,
    )  # fmt: skip
    seconds, error = map(float, run.stdout.split())
    assert error < 1e-3
    return seconds


def tell(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        print(f"\n{text}")


def note_ratio(
    benchmark: Any, capsys: pytest.CaptureFixture[str], what: str, at_least: float
) -> None:
    slow, fast = interpreter_seconds(), benchmark.stats.stats.min
    benchmark.extra_info["interpreter_ratio"] = slow / fast
    tell(
        capsys,
        f"{what}: {fast * 1e3:.0f} ms, Triton's interpreter {slow * 1e3:.0f} ms,"
        f" ratio {slow / fast:.1f}",
    )
    assert slow / fast >= at_least


def test_triton_flash_attention(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton.language")
    import kernels_in_triton as kernels
    from triton_launch import compile_ptx, launch

    signature = dict.fromkeys("qkvo", "*fp16") | {"lse": "*fp32", "n": "i32", "scale_log2": "fp32"}
    constants = {"CAUSAL": False, "M": 64, "N": 64, "D": D}
    kernel = compile_ptx(kernels.flash_attention, signature, constants, 90)
    device = gpu.open("ptx", options=FAST)
    entry = device.load(kernel.ptx).kernel(kernel.name)
    generator = np.random.default_rng(0)
    q, k, v = (device.array(generator.standard_normal((N, D)).astype(np.float16)) for _ in range(3))
    o, lse = device.empty((N, D), np.float16), device.empty(N, np.float32)
    scale = np.float32(np.log2(np.e) / 8)

    def run() -> None:
        launch(device, kernel, (N // 64, 1), [q, k, v, o, lse, N, scale], entry)

    benchmark.pedantic(run, rounds=8, warmup_rounds=3)
    note_ratio(benchmark, capsys, "Triton's flash attention, sm_90 PTX", at_least=10)


def test_own_flash_attention(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton.language")
    device = gpu.open("ptx", options=FAST)
    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal((1, N, 1, D)).astype(BF16) for _ in range(3))
    # The first few runs still get their memory from the system.
    benchmark.pedantic(lambda: flash_attention(device, q, k, v), rounds=8, warmup_rounds=3)
    note_ratio(benchmark, capsys, "flash_attention.cu, mma.sync", at_least=20)


STEPS, TILES, CTAS = 36, 9, 132
_ACCUMULATOR = ", ".join(f"%{i}" for i in range(32))
_BOUND = ", ".join(f'"+f"(d[{i}])' for i in range(32))
WGMMA_CHAIN = f"""
struct __align__(64) Map {{ char bytes[128]; }};
__device__ unsigned shared_address(const void* p) {{
  return (unsigned)__cvta_generic_to_shared(p);
}}
// K-major, rows of 128 bytes with the 128-byte swizzle, 8 rows every 1024 bytes.
__device__ unsigned long long descriptor(unsigned address) {{
  return (address & 0x3FFFF) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}}
__device__ void load(unsigned target, const Map* map, int column, int row, unsigned barrier) {{
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {{%2, %3}}], [%4];"
      :: "r"(target), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}}
extern "C" __global__ void __launch_bounds__(128)
chain(const __grid_constant__ Map map_a, const __grid_constant__ Map map_b, float* out,
      int chains) {{
  extern __shared__ __align__(1024) char memory[];
  __shared__ __align__(8) unsigned long long full;
  unsigned a = shared_address(memory), b = a + {TILES} * 8192, barrier = shared_address(&full);
  if (threadIdx.x == 0) {{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(barrier), "r"({TILES} * 16384) : "memory");
    for (int tile = 0; tile < {TILES}; ++tile) {{
      load(a + 8192 * tile, &map_a, 64 * tile, 64 * blockIdx.x, barrier);
      load(b + 8192 * tile, &map_b, 64 * tile, 64 * blockIdx.x, barrier);
    }}
  }}
  __syncthreads();
  asm volatile("{{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;"
               " @!p bra again; }}" :: "r"(barrier) : "memory");
  float d[32];
#pragma unroll 1
  for (int chain = 0; chain < chains; ++chain) {{
    for (int i = 0; i < 32; ++i) d[i] = 0;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < {STEPS}; ++step) {{
      unsigned offset = step / 4 * 8192 + step % 4 * 32;
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{_ACCUMULATOR}}},"
          " %32, %33, 1, 1, 1, 0, 0;"
          : {_BOUND} : "l"(descriptor(a + offset)), "l"(descriptor(b + offset)));
    }}
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }}
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int j = 0; j < 8; ++j)
    for (int i = 0; i < 4; i += 2) {{
      int row = 64 * blockIdx.x + 16 * warp + lane / 4 + 4 * i;
      float2 pair = make_float2(d[4 * j + i], d[4 * j + i + 1]);
      *(float2*)&out[row * 64 + 8 * j + 2 * (lane % 4)] = pair;
    }}
}}
"""


def test_wgmma_chain(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """64 x 64 x 576 on each of 132 CTAs: what a chain adds to a launch, that is a launch with five
    of them less one with one.
    """
    k = 64 * TILES
    device = gpu.open("ptx", options=FAST)
    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal((CTAS * 64, k)).astype(BF16) for _ in range(2))
    arrays = device.array(a, "a"), device.array(b, "b")
    out = device.empty((CTAS * 64, 64), np.float32, "out")
    maps = [gpu.TensorMap(x, (64, 64), swizzle="128B") for x in arrays]
    kernel = device.compile(WGMMA_CHAIN, arch="sm_90a").kernel("chain")

    def run(chains: int = 1) -> None:
        kernel.launch((CTAS,), (128,), [*maps, out, chains], shared_bytes=TILES * 16384 + 1024)

    benchmark.pedantic(run, rounds=5, warmup_rounds=1)
    left = a.astype(np.float32).reshape(CTAS, 64, k)
    right = b.astype(np.float32).reshape(CTAS, 64, k).swapaxes(1, 2)
    products = least_seconds(lambda: left @ right)
    np.testing.assert_allclose(out.to_numpy(), (left @ right).reshape(-1, 64), rtol=1e-3, atol=1e-3)
    once = benchmark.stats.stats.min
    chain = (least_seconds(lambda: run(5)) - once) / 4
    ratio = chain / products
    benchmark.extra_info["numpy_ratio"] = ratio
    tell(
        capsys,
        f"wgmma 64 x 64 x {k} on {CTAS} CTAs: {chain * 1e3:.1f} ms a chain,"
        f" NumPy's products {products * 1e3:.1f} ms, ratio {ratio:.2f};"
        f" launch with TMA and stores {once * 1e3:.1f} ms",
    )
    assert ratio <= 3


def least_seconds(function: Callable[[], object]) -> float:
    """Of five runs."""
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
