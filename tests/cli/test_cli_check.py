"""``simkit check``: kernels that are right, wrong, and not kernels at all."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from gpu.compile import compile_cuda
from simkit.cli.arguments import ArrayArgument, ScalarArgument, array_values, parse_argument
from simkit.cli.arguments import scalar_value as value_of
from simkit.cli.array_summary import summarise
from simkit.errors import SimkitError

SOURCE = r"""
extern "C" __global__ void scale(const float* x, float* y, int n, float a) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i];
}
extern "C" __global__ void strided(const float* x, float* y) {
  y[threadIdx.x] = x[8 * threadIdx.x];
}
extern "C" __global__ void conflicts(float* y) {
  __shared__ float t[32 * 32];
  t[32 * threadIdx.x] = 1.0f;
  y[threadIdx.x] = t[32 * threadIdx.x];
}
extern "C" __global__ void race(float* y) {
  __shared__ float t[128];
  t[threadIdx.x] = threadIdx.x;
  y[threadIdx.x] = t[127 - threadIdx.x];
}
extern "C" __global__ void outside(int* y) { y[threadIdx.x + 100000] = 1; }
extern "C" __global__ void endless(volatile int* y) { while (y[0] == 0) {} }
extern "C" __global__ void deadlock() {
  if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;" ::: "memory");
}
extern "C" __global__ void padded(int* y) { y[threadIdx.x] = SIZE; }
"""


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.cu"
    path.write_text(SOURCE)
    return path


def check(cli, kernels: Path, kernel: str, *words: object, code: int = 0):
    return cli("check", kernels, "-D", "SIZE=3", "--kernel", kernel, *words, code=code)


def test_report_of_a_kernel(cli, kernels: Path, tmp_path: Path) -> None:
    launch = tmp_path / "launch.toml"
    launch.write_text(
        'kernel = "scale"\ngrid = 2\nblock = [128]\n[define]\nSIZE = 1\n'
        '[[args]]\nname = "x"\ndtype = "f32"\nshape = [256]\nfill = "arange"\n'
        '[[args]]\nname = "y"\ndtype = "f32"\nshape = [256]\n'
        '[[args]]\nname = "n"\ndtype = "i32"\nvalue = 200\n'
        '[[args]]\nname = "a"\ndtype = "f32"\nvalue = 0.5\n'
    )
    saved, path = tmp_path / "saved", tmp_path / "c.json"
    words = ("--launch", launch, "--save", saved, "--json", path, "--dram")
    output = cli("check", kernels, *words).stdout
    assert "Hazards: none found." in output
    assert "Schedule independent: eager, lazy, random(0), random(1)" in " ".join(output.split())
    data = json.loads(path.read_text())
    traffic = {row["tensor"]: row for row in data["report"]["traffic"]["tensors"]}
    assert traffic["x"] == {"tensor": "x", "direction": "read", "requested": 800, "sectors": 800}
    assert data["report"]["traffic"]["dram_read"] == 800
    assert data["arrays"]["y"]["nans"] == 56
    y = np.load(saved / "y.npy")
    np.testing.assert_array_equal(y[:200], np.arange(200) * np.float32(0.5))
    # What was saved can be loaded again.
    words = ("--grid", 2, "--arg", f"x=f32[256]:{saved}/x.npy", "--arg", "y=f32[256]:zeros")
    words = (*words, "--arg", "n=i32:0x100", "--arg", "a=f32:1", "--once")
    assert "Schedule" not in check(cli, kernels, "scale", *words).stdout


def test_sectors_and_bank_conflicts(cli, kernels: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    words = ("--block", 32, "--once", "--json", path)
    check(cli, kernels, "strided", "--arg", "x=f32[256]:ones", "--arg", "y=f32[32]", *words)
    rows = json.loads(path.read_text())["report"]["traffic"]["tensors"]
    assert rows[0] == {"tensor": "x", "direction": "read", "requested": 128, "sectors": 1024}
    check(cli, kernels, "conflicts", "--arg", "y=f32[32]", *words)
    shared = json.loads(path.read_text())["report"]["traffic"]["shared"]
    # All 32 lanes in one bank; the compiler may keep the value in a register instead of a load.
    assert shared["wavefronts"] == 32 * shared["instructions"]
    assert shared["ideal"] == shared["instructions"]


def test_missing_barrier_depends_on_the_schedule(cli, kernels: Path) -> None:
    output = check(cli, kernels, "race", "--arg", "y=f32[128]", code=1).stdout
    assert "depends on the schedule" in output
    assert "y differs in" in output


@pytest.mark.parametrize(
    ("kernel", "words", "kind", "message"),
    [
        ("outside", ("--arg", "y=i32[8]"), "out_of_bounds", "past the end of 'y'"),
        ("deadlock", ("--block", 64), "deadlock", "32 of 64 threads have arrived"),
    ],
)
def test_faults_are_hazards(
    cli, kernels: Path, tmp_path: Path, kernel: str, words: tuple[object, ...], kind: str,
    message: str,
) -> None:  # fmt: skip
    """In the table and in SARIF; without detection they are errors."""
    sarif = tmp_path / "found.sarif"
    shown = check(cli, kernels, kernel, *words, "--sarif", sarif, code=1).stdout
    assert kind in shown
    assert message in " ".join(shown.split())
    (result,) = [
        r for r in json.loads(sarif.read_text())["runs"][0]["results"] if r["level"] == "error"
    ]
    assert result["ruleId"] == kind
    assert message in result["message"]["text"]
    error = check(cli, kernels, kernel, *words, "--no-hazards", code=2).stderr
    assert message in " ".join(error.split())


@pytest.mark.parametrize(
    ("kernel", "words", "message"),
    [
        ("scal", (), "scal"),
        ("scale", (), "takes 4 arguments, got 0"),
        ("scale", ("--arg", "x"), "argument 'x' is neither NAME=DTYPE[SHAPE]:FILL"),
        ("scale", ("--arg", "x=f31[2]"), "dtype 'f31' is none of bf16, f16"),
        ("scale", ("--arg", "x=f32[2]:noise"), "fill 'noise' is none of empty, zeros"),
        ("scale", ("--arg", "x=i32[2]:normal"), "needs floating point"),
        ("scale", ("--arg", "x=f32[2]:none.npy"), "there is no file none.npy"),
        ("scale", ("--arg", "n=i32:1.5"), "'1.5' is not a value of i32"),
        ("scale", ("--arg", "n=u8:300"), "'300' is not a value of u8"),
        ("scale", ("--arg", "n=i32:1", "--arg", "n=i32:2"), "names of their own"),
        ("scale", ("--grid", "0"), "--grid"),
        ("scale", ("--block", "a,b"), "--block 'a,b' must be one to three numbers"),
        ("scale", ("--schedule", "fifo"), "unknown schedule 'fifo'"),
        ("scale", ("--launch", "none.toml"), "none.toml: No such file"),
        ("endless", ("--arg", "y=i32[1]:zeros", "--budget", 1000), "budget of 1000"),
        ("outside", ("--arg", "y=i32[8]", "--block", 2000), "2000"),
        ("outside", ("--arg", "y=i32[8]", "--shared", 300_000), "shared memory"),
    ],
)
def test_check_refuses(
    cli, kernels: Path, kernel: str, words: tuple[object, ...], message: str
) -> None:
    error = check(cli, kernels, kernel, *words, code=2).stderr
    assert message in error
    assert error.startswith("error: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kernel = 3", "kernel cannot be 3"),
        ("kernal = 'x'", "unknown key 'kernal'; there are kernel, grid"),
        ("kernel = ", "is not TOML"),
        ("grid = [1, 2, 3, 4]", "grid [1, 2, 3, 4] must be one to three"),
        ("args = [{name = 'x', dtype = 'f32'}]", "args[0]: 'shape' is missing"),
        ("args = [{name = 'x', dtype = 'f32', shape = [-1]}]", "must be a list of sizes"),
        ("args = [{name = 'x', dtype = 'f32', value = 1, fill = 'nan'}]", "unknown key 'fill'"),
    ],
)
def test_launch_file_refuses(cli, kernels: Path, tmp_path: Path, text: str, message: str) -> None:
    launch = tmp_path / "launch.toml"
    launch.write_text(text)
    assert message in cli("check", kernels, "--launch", launch, code=2).stderr


def test_files_that_are_not_kernels(cli, kernels: Path, tmp_path: Path) -> None:
    assert "none.cu: No such file" in cli("check", tmp_path / "none.cu", code=2).stderr
    assert "the suffix must be one of .cu, .ptx" in cli("check", __file__, code=2).stderr
    (tmp_path / "bad.cu").write_text("__global__ void f() { x = 1; }")
    assert 'identifier "x" is undefined' in cli("check", tmp_path / "bad.cu", code=2).stderr
    assert "name one with --kernel" in cli("check", kernels, "-D", "SIZE=1", code=2).stderr


def test_ptx_that_is_broken(cli, kernels: Path, tmp_path: Path) -> None:
    ptx = compile_cuda(SOURCE, options=("-DSIZE=1",), arch="sm_90")
    broken = tmp_path / "broken.ptx"
    words = ("check", broken, "--kernel", "padded", "--arg", "y=i32[128]")
    broken.write_text(ptx)
    assert "arch or options" in cli(*words, "--define", "A=1", code=2).stderr
    cli(*words)
    broken.write_text(ptx[: ptx.index("st.global") + 4])
    assert "line" in cli(*words, code=2).stderr
    broken.write_text(ptx.replace("st.global.u32", "st.globl.u32"))
    assert "st.globl.u32" in cli(*words, code=2).stderr
    broken.write_text("")
    assert cli(*words, code=2).stderr.startswith("error: ")
    broken.write_bytes(b"\xff\xfe\x00")
    assert "is not text" in cli(*words, code=2).stderr


def test_arguments_in_their_compact_form() -> None:
    assert parse_argument("x=bf16[2, 64]:normal(7)") == ArrayArgument(
        "x", "bf16", (2, 64), "normal", 7
    )
    assert parse_argument("y=f32[]") == ArrayArgument("y", "f32", ())
    assert parse_argument("n=i32:64") == ScalarArgument("n", "i32", "64")
    assert value_of(ScalarArgument("n", "i32", "-0x10")) == np.int32(-16)
    assert value_of(ScalarArgument("s", "bytes", "00ff")) == b"\x00\xff"
    assert value_of(ScalarArgument("c", "bf16", 0.5)).dtype == ml_dtypes.bfloat16
    with pytest.raises(SimkitError, match="hexadecimal"):
        value_of(ScalarArgument("s", "bytes", "0g"))


def test_fills() -> None:
    def filled(fill: str, dtype: str = "f32", seed: int = 0) -> list[float]:
        return array_values(ArrayArgument("x", dtype, (2, 2), fill, seed)).reshape(-1).tolist()

    assert filled("arange", "i64") == [0, 1, 2, 3]
    assert filled("ones", "e4m3") == [1, 1, 1, 1]
    assert np.isnan(filled("empty", "bf16")).all()
    assert filled("empty", "i8") == [-1, -1, -1, -1]
    assert filled("normal", seed=1) == filled("normal", seed=1) != filled("normal", seed=2)


def test_bf16_arrays_survive_a_file(tmp_path: Path) -> None:
    values = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    np.save(tmp_path / "x.npy", values.view("V2"))
    argument = ArrayArgument("x", "bf16", (2, 3), "x.npy", folder=tmp_path)
    np.testing.assert_array_equal(array_values(argument), values)
    with pytest.raises(SimkitError, match=r"not bf16 \[3, 2\]"):
        array_values(ArrayArgument("x", "bf16", (3, 2), "x.npy", folder=tmp_path))


def test_array_summary_by_hand() -> None:
    found = summarise(np.array([np.nan, 2, -1, np.inf, 5], ml_dtypes.bfloat16))
    assert (found.nans, found.infinities, found.minimum, found.maximum) == (1, 1, -1.0, 5.0)
    assert summarise(np.array([[3, -4]], np.int8)).cells()[1:] == ("3 -4", "0", "0", "-4", "3")
    assert summarise(np.empty((0, 2), np.float32)).minimum is None
