"""NVIDIA's assembler takes the kernels, keeps values in registers, and needs the shared memory that
the models say. It comes with Triton, and needs no GPU.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import triton

import gpu
from gpu import jit
from gpu.compile import compile_cuda
from gpu.kernels.build import EXACT_OPTIONS, kernel_source
from properties.batch_case import BatchCase
from simkit.algorithms.batch_attention import shared_bytes

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
KERNELS = Path(gpu.__file__).parent / "kernels"

# The assembler gives up a few words of registers for one more CTA on an SM.
SPILLED_BYTES = 32

FIXED = [
    ("naive_attention", ("-DHEAD_DIM=128",)),
    ("flash_attention", ("-DHEAD_DIM=128",)),
    ("flash_decoding", ("-DHEAD_DIM=128", "-DGROUP=8")),
    ("fp8_kv_cache", ()),
    ("merge_states", ("-DHEAD_DIM=128", "-DSTATE=Float32", "-DOUTPUT=BFloat16", "-DINDEX=int")),
]

PAGED = BatchCase(page_size=16, tile_q=16, variant="causal")
BATCHED = [
    PAGED,
    replace(PAGED, d=128, dv=128, tile_q=64),
    replace(PAGED, d=256, dv=256, tile_q=64),
    replace(PAGED, d=256, dv=64, order="HND", index_bits=64, element="f16"),
    replace(PAGED, d=128, dv=128, kv="e4m3", variant="causal+rope+soft_cap+sink"),
    replace(PAGED, d=128, dv=128, variant="custom_mask+alibi", window_left=9),
]
DECODE = [
    BatchCase(q_lens=(1,), page_size=16, d=d, dv=d, group=rows, tile_q=rows, cuda_cores=True)
    for d, rows in ((64, 1), (128, 7), (256, 16))
]


def assembled(ptx: str, folder: Path, arch: str) -> list[tuple[int, int]]:
    """(bytes spilled, static shared memory in bytes) of each kernel."""
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [PTXAS, f"-arch={arch}", "-v", source, "-o", folder / "kernel.cubin"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    shared = [
        int(found[1]) if (found := re.search(r"(\d+) bytes smem", line)) else 0
        for line in done.stderr.splitlines()
        if "Used" in line
    ]
    return list(zip(spills, shared, strict=True))


def compiled(name: str, options: tuple[str, ...], arch: str) -> str:
    return compile_cuda(
        kernel_source(name), options=(*EXACT_OPTIONS, *options), arch=arch,
        name=str(KERNELS / f"{name}.cu"),
    )  # fmt: skip


@pytest.mark.parametrize(("name", "options"), FIXED, ids=[name for name, _ in FIXED])
def test_kernels_assemble(name: str, options: tuple[str, ...], tmp_path: Path) -> None:
    archs = ("sm_89", "sm_90a") if name == "fp8_kv_cache" else ("sm_80", "sm_90a")
    for arch in archs:
        for spilled, _ in assembled(compiled(name, options, arch), tmp_path, arch):
            assert spilled <= SPILLED_BYTES


@pytest.mark.parametrize("case", [*BATCHED, *DECODE], ids=lambda case: f"{case.d}-{case.variant}")
def test_batched_kernels_assemble(case: BatchCase, tmp_path: Path) -> None:
    kernel = "batch_decode" if case.cuda_cores else "batch_prefill_paged"
    own = jit.Configuration.of(kernel, case.problem, case.plan, case.units)
    archs = ("sm_89", "sm_90a") if case.kv == "e4m3" else ("sm_80", "sm_90a")
    for arch in archs:
        ptx = compiled(kernel, own.options, arch)
        ((spilled, static),) = assembled(ptx, tmp_path, arch)
        assert spilled <= SPILLED_BYTES
        # The model counts what there is; the assembler aligns it.
        counted = shared_bytes(case.problem, case.tile_q, case.units)[1]
        assert counted <= static < counted + 256
