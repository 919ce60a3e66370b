"""CUDA C++ to PTX: options, errors and the cache of gpu.compile; what the kernels compile to."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import gpu.compile as compiler
from gpu.compile import compile_cuda, supported_archs, toolkit
from simkit.errors import CompileError, DeviceUnavailableError
from simkit.numerics.exp2 import EXP2_COEFFICIENTS, LN2, LOG2_COEFFICIENTS, LOG2E

KERNELS = Path(compiler.__file__).parent / "kernels"
EMPTY = 'extern "C" __global__ void nothing() {}\n'
FMA = 'extern "C" __global__ void f(float* x) { x[0] = x[1] * x[2] + x[3]; }\n'

# Every build that the host side asks for, apart from the group sizes in between.
BUILDS = [
    ("flash_attention", ("-DHEAD_DIM=64",), ("flash_attention",)),
    ("flash_attention", ("-DHEAD_DIM=128",), ("flash_attention",)),
    ("naive_attention", ("-DHEAD_DIM=64",), ("naive_scores", "naive_softmax", "naive_output")),
    ("naive_attention", ("-DHEAD_DIM=128",), ("naive_scores", "naive_softmax", "naive_output")),
    *(
        (
            "flash_decoding",
            (f"-DHEAD_DIM={dim}", f"-DGROUP={group}"),
            ("flash_decoding_split", "flash_decoding_combine"),
        )
        for dim, group in [(64, 1), (64, 5), (128, 8), (128, 16)]
    ),
    ("fp8_kv_cache", (), ("fp8_kv_quantize", "fp8_kv_dequantize")),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, empty at first."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("SIMKIT_CACHE_DIR", str(directory))
    return directory


def forbid_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "_compile", refuse)


# What comes out.


def test_an_entry_is_there_by_its_name_with_its_target() -> None:
    ptx = compile_cuda(EMPTY, arch="sm_80")
    assert ".visible .entry nothing()" in ptx
    assert ".target sm_80\n" in ptx


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_90a", "sm_100a"])
def test_architectures_of_the_device_table(arch: str) -> None:
    assert f".target {arch}\n" in compile_cuda(EMPTY, arch=arch)


def test_every_architecture_that_is_listed_compiles() -> None:
    for arch in supported_archs():
        assert f".target {arch}\n" in compile_cuda(EMPTY, arch=arch)


def test_contraction_is_as_the_caller_asks() -> None:
    assert "fma.rn.f32" in compile_cuda(FMA)
    exact = compile_cuda(FMA, options=("--fmad=false",))
    assert "fma.rn.f32" not in exact
    assert "mul.f32" in exact or "mul.rn.f32" in exact


def test_definitions_headers_and_line_information_reach_the_compiler() -> None:
    source = '#include "softmax.cuh"\n#include <cuda_bf16.h>\n' + (
        'extern "C" __global__ void f(float* x) { x[0] = exp2_polynomial(WHAT); }\n'
    )
    ptx = compile_cuda(source, options=("-DWHAT=0.0f", "-lineinfo"), name="mine.cu")
    assert re.search(r'\.file\s+\d+ ".*mine\.cu"', ptx)
    assert ".loc" in ptx


# What goes wrong.


def test_an_error_has_the_file_and_the_line() -> None:
    with pytest.raises(CompileError, match=r"wrong\.cu\(3\): error: .*\"oops\" is undefined"):
        compile_cuda("\n\n__global__ void f() { oops; }\n", name="wrong.cu")


def test_an_error_in_a_header_has_the_header_and_its_line(tmp_path: Path) -> None:
    (tmp_path / "broken.cuh").write_text("\nint int;\n")
    with pytest.raises(CompileError, match=r"broken\.cuh\(2\): error"):
        compile_cuda('#include "broken.cuh"\n', options=(f"-I{tmp_path}",))


@pytest.mark.parametrize(
    "arch", ["sm_12", "sm_80a", "sm_90f", "compute_90", "90", "sm_90A", "", "sm_90 "]
)
def test_an_unknown_architecture_is_refused_with_those_there_are(arch: str) -> None:
    with pytest.raises(CompileError) as error:
        compile_cuda(EMPTY, arch=arch)
    assert repr(arch) in str(error.value)
    for known in ("sm_80", "sm_90a", "sm_100a"):
        assert known in str(error.value)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (EMPTY, ("--no-such-option",), "no-such-option"),
        ('#include "absent.cuh"\n', (), "absent.cuh"),
        ("int a;\n\0", (), r"kernel\.cu\(2\): the source has a NUL character"),
    ],
)
def test_other_refusals_say_why(source: str, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(CompileError, match=message):
        compile_cuda(source, options=options)


@pytest.fixture
def forgotten_toolkit() -> Iterator[None]:
    toolkit.cache_clear()
    yield
    toolkit.cache_clear()


@pytest.mark.usefixtures("forgotten_toolkit")
def test_without_the_wheels_the_message_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceUnavailableError, match="nvidia-cuda-nvrtc-cu12"):
        compile_cuda(EMPTY)


# The cache.


def test_the_second_time_comes_from_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ptx = compile_cuda(EMPTY)
    assert [file.suffix for file in (cache / "ptx").iterdir()] == [".ptx"]
    forbid_compiling(monkeypatch)
    assert compile_cuda(EMPTY) == ptx


@pytest.mark.parametrize(
    ("source", "options", "arch", "name"),
    [
        (EMPTY + "\n", ("-DA",), "sm_90", "a.cu"),
        (EMPTY, ("-DB",), "sm_90", "a.cu"),
        (EMPTY, ("-D", "A"), "sm_90", "a.cu"),
        (EMPTY, ("-DA", "-DB"), "sm_90", "a.cu"),
        (EMPTY, ("-DA",), "sm_90a", "a.cu"),
        (EMPTY, ("-DA",), "sm_90", "b.cu"),
    ],
)
def test_any_other_input_is_another_entry(
    cache: Path, source: str, options: tuple[str, ...], arch: str, name: str
) -> None:
    compile_cuda(EMPTY, options=("-DA",), arch="sm_90", name="a.cu")
    compile_cuda(source, options=options, arch=arch, name=name)
    assert len(list((cache / "ptx").iterdir())) == 2


@pytest.mark.parametrize("how", ["joined", "apart", "beside"])
def test_a_changed_header_is_compiled_again(tmp_path: Path, how: str) -> None:
    # The header that changes is included by another one.
    (tmp_path / "outer.cuh").write_text('#include "inner.cuh"\n')
    source = '#include "outer.cuh"\nextern "C" __global__ void f(int* x) { x[0] = VALUE; }\n'
    options = {"joined": (f"-I{tmp_path}",), "apart": ("-I", str(tmp_path)), "beside": ()}[how]
    name = str(tmp_path / "f.cu") if how == "beside" else "f.cu"
    for value in (1234567, 7654321):
        (tmp_path / "inner.cuh").write_text(f"#define VALUE {value}\n")
        assert str(value) in compile_cuda(source, options=options, name=name)


@pytest.mark.parametrize(
    ("line", "options"),
    [("#define HEADER <value.cuh>\n#include HEADER\n", "-I{0}"), ("", "-include={0}/value.cuh")],
)
def test_headers_that_the_text_does_not_tell_are_never_cached(
    cache: Path, tmp_path: Path, line: str, options: str
) -> None:
    source = line + 'extern "C" __global__ void f(int* x) { x[0] = VALUE; }\n'
    for value in (1234567, 7654321):
        (tmp_path / "value.cuh").write_text(f"#define VALUE {value}\n")
        assert str(value) in compile_cuda(source, options=(options.format(tmp_path),))
    assert not cache.exists()


def test_errors_are_not_cached(cache: Path, tmp_path: Path) -> None:
    source = '#include "late.cuh"\n'
    with pytest.raises(CompileError):
        compile_cuda(source, options=(f"-I{tmp_path}",))
    (tmp_path / "late.cuh").write_text(EMPTY)
    assert "nothing" in compile_cuda(source, options=(f"-I{tmp_path}",))


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("SIMKIT_CACHE_DIR", str(tmp_path / "file"))
    assert "nothing" in compile_cuda(EMPTY)


def test_threads_that_compile_the_same_get_the_same(cache: Path) -> None:
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda: results.append(compile_cuda(EMPTY))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1
    assert [file.suffix for file in (cache / "ptx").iterdir()] == [".ptx"]


# The kernels.


def read_kernel(name: str) -> str:
    return (KERNELS / f"{name}.cu").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "options", "entries"), BUILDS)
def test_kernels_compile_to_their_entries_and_nothing_else(
    name: str, options: tuple[str, ...], entries: tuple[str, ...]
) -> None:
    ptx = compile_cuda(read_kernel(name), options=("--fmad=false", *options), arch="sm_90a")
    assert set(re.findall(r"\.visible \.entry (\w+)\(", ptx)) == set(entries)
    # All is inlined, and no constant has become a variable.
    assert not re.search(r"^\s*(call|\.func|\.global|\.const|\.local)\b", ptx, re.M)
    # Every operation on floats says that it rounds to nearest, and none is approximate.
    arithmetic = set(
        re.findall(r"^\s*((?:add|sub|mul|fma|div|rcp|ex2|lg2)\.[\w.]*f32)\b", ptx, re.M)
    )
    assert arithmetic <= {f"{name}.rn.f32" for name in ("add", "sub", "mul", "fma", "div")}


@pytest.mark.parametrize("dim", [0, 32, 96, 256])
@pytest.mark.parametrize("name", ["flash_attention", "naive_attention"])
def test_other_head_dimensions_do_not_compile(name: str, dim: int) -> None:
    with pytest.raises(CompileError, match=rf"{name}\.cu\(\d+\): error.*HEAD_DIM is 64 or 128"):
        compile_cuda(read_kernel(name), options=(f"-DHEAD_DIM={dim}",), name=f"{name}.cu")


def assemble(source: str, options: tuple[str, ...], arch: str) -> str:
    """The assembler's report on every kernel: a real architecture makes NVRTC assemble too."""
    kit = toolkit()
    arguments = [
        f"--gpu-architecture={arch}",
        "--ptxas-options=-v",
        f"--include-path={compiler.INCLUDE_DIRECTORY}",
        *options,
    ]
    encoded = (ctypes.c_char_p * len(arguments))(*(text.encode() for text in arguments))
    program = ctypes.c_void_p()
    kit.call("CreateProgram", ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        kit.call("CompileProgram", program, len(encoded), encoded)
        return kit.text("ProgramLog", program)
    finally:
        kit.call("DestroyProgram", ctypes.byref(program))


@pytest.mark.parametrize(("name", "options", "entries"), BUILDS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_kernels_assemble(
    name: str, options: tuple[str, ...], entries: tuple[str, ...], arch: str
) -> None:
    if name == "fp8_kv_cache" and arch == "sm_80":
        arch = "sm_89"  # the first one that converts to FP8
    log = assemble(read_kernel(name), ("--fmad=false", *options), arch)
    assert "warning" not in log
    spills = [int(size) for size in re.findall(r"(\d+) bytes spill", log)]
    assert len(spills) == 2 * len(entries)
    # Elsewhere the assembler spills a few registers by choice, to fit one more CTA on an SM.
    assert max(spills) == 0 if arch == "sm_90a" else max(spills) <= 32


def header_floats(text: str, pattern: str) -> list[np.float32]:
    found = re.search(pattern, text, re.DOTALL)
    assert found is not None
    return [
        np.float32(float.fromhex(number)) for number in re.findall(r"0x[\d.a-f]+p[+-]\d+", found[1])
    ]


def test_the_header_has_the_coefficients_of_the_model() -> None:
    text = (KERNELS / "include" / "softmax.cuh").read_text(encoding="utf-8")
    body = r"float {}_polynomial\(.*?coefficients\[\] = \{{(.*?)\}};"
    assert header_floats(text, body.format("exp2")) == list(EXP2_COEFFICIENTS)
    assert header_floats(text, body.format("log2")) == list(LOG2_COEFFICIENTS)
    assert header_floats(text, r"ln2 = ([^;]*)f;") == [LN2]
    naive = read_kernel("naive_attention")
    assert header_floats(naive, r"log2_e = ([^;]*)f;") == [LOG2E]
