"""simkit check on kernels with tensor maps, structs by value and clusters."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from simkit.cli.app import app

COPY_TILE = r"""
struct __align__(64) Map { char bytes[128]; };
struct __align__(64) Parameters { int rows; int pad[15]; Map map; float* out; };

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void copy_tile(const Map* map, float* out, int rows) {
  __shared__ __align__(128) float tile[8 * 32];
  __shared__ __align__(8) unsigned long long full;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full)));
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;"
                 ::"r"(shared_address(&full)) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(tile)), "l"(map), "r"(0),
        "r"(8 * (int)blockIdx.x), "r"(shared_address(&full)) : "memory");
  }
  __syncthreads();
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;"
               " @!p bra again; }" ::"r"(shared_address(&full)) : "memory");
  for (int i = threadIdx.x; i < 8 * 32; i += blockDim.x) {
    if (8 * blockIdx.x + i / 32 < rows) out[256 * blockIdx.x + i] = 2.0f * tile[i];
  }
}

extern "C" __global__ void with_map(const __grid_constant__ Map map, float* out, int rows) {
  copy_tile(&map, out, rows);
}

extern "C" __global__ void with_struct(const __grid_constant__ Parameters parameters) {
  copy_tile(&parameters.map, parameters.out, parameters.rows);
}

extern "C" __global__ void ranks(int* out) {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) out[blockIdx.x] = rank;
}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "tile.cu"
    path.write_text(COPY_TILE)
    return path


def check(source: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", str(source), "--arch", "sm_90a", *words])
    return result.exit_code, result.output


def test_a_tensor_map_argument(source: Path, tmp_path: Path) -> None:
    # 20 rows in tiles of 8: the last tile hangs over and is filled with zeros.
    code, output = check(
        source, "--kernel", "with_map", "--grid", "3", "--block", "64", "--save", str(tmp_path),
        "--arg", "x=f32[20,32]:arange@box=8x32", "--arg", "out=f32[20,32]:zeros",
        "--arg", "rows=i32:20", "--json", str(tmp_path / "report.json"),
    )  # fmt: skip
    assert code == 0, output
    expected = 2.0 * np.arange(20 * 32, dtype=np.float32).reshape(20, 32)
    assert np.array_equal(np.load(tmp_path / "out.npy"), expected)
    traffic = json.loads((tmp_path / "report.json").read_text())["report"]["traffic"]["tensors"]
    assert any(row["tensor"] == "x" and row["requested"] == 20 * 32 * 4 for row in traffic)


def test_a_struct_by_value_with_a_tensor_map_inside(source: Path, tmp_path: Path) -> None:
    launch = tmp_path / "launch.toml"
    launch.write_text(
        """
        kernel = "with_struct"
        grid = 2
        block = 32
        [[args]]
        name = "parameters"
        size = 256
        fields = [
          { offset = 0, name = "rows", dtype = "i32", value = 16 },
          {offset = 64, name = "x", dtype = "f32", shape = [16,32], fill = "arange", box = [8, 32]},
          { offset = 192, name = "out", dtype = "f32", shape = [16, 32] },
        ]
        """
    )
    code, output = check(source, "--launch", str(launch), "--save", str(tmp_path))
    assert code == 0, output
    expected = 2.0 * np.arange(16 * 32, dtype=np.float32).reshape(16, 32)
    assert np.array_equal(np.load(tmp_path / "out.npy"), expected)


def test_a_cluster_launch(source: Path, tmp_path: Path) -> None:
    code, output = check(
        source, "--kernel", "ranks", "--grid", "8", "--block", "32", "--cluster", "4",
        "--arg", "out=i32[8]", "--save", str(tmp_path),
    )  # fmt: skip
    assert code == 0, output
    assert np.load(tmp_path / "out.npy").tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arg", "x=f32[20,32]@box=8x300"], "256"),
        (["--arg", "x=f32[20,32]@box=eight"], "box"),
        (["--arg", "x=f32[20,32]@swizzle=128B"], "box"),
        (["--arg", "x=f32[20,32]@box=8x32,colour=red"], "colour"),
        (["--arg", "x=f32[20,30]@box=8x30"], "16"),
    ],
)
def test_wrong_tensor_maps_are_one_message(source: Path, words: list[str], message: str) -> None:
    code, output = check(
        source, "--kernel", "with_map", *words, "--arg", "out=f32[20,32]", "--arg", "rows=i32:20"
    )
    assert code == 2
    assert message in output
    assert "Traceback" not in output
