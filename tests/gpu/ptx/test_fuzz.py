"""Damaged PTX: refused with an error of ours, or run to an end. Nothing else ever happens."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from lanes import device, kernel_text

from gpu.ptx.executor import PtxModule
from gpu.ptx.launch import Options
from simkit.errors import SimkitError

CUDA = r"""
struct Pair { int a; float b; };
__constant__ float table[4] = {1.0f, 2.0f, 3.0f, 4.0f};
__device__ __noinline__ Pair helper(Pair p, int k) { return {p.a + k, p.b * table[k & 3]}; }
extern "C" __global__ void k(float* x, int n) {
    __shared__ float cell[64];
    int t = threadIdx.x;
    float v = t < n ? x[t] : 0.0f;
    for (int i = 0; i < (t & 3); ++i) v = fmaf(v, 1.5f, (float)i);
    switch (t % 6) {
        case 0: v += 1; break; case 1: v *= 2; break; case 2: v -= 3; break;
        case 3: v = sqrtf(fabsf(v)); break; case 4: v = -v; break; default: v = expf(v);
    }
    cell[t] = v;
    __syncthreads();
    v += cell[63 - t] + __shfl_xor_sync(~0u, v, 1);
    Pair p = helper({t, v}, n);
    if (t < n) atomicAdd(x + t, p.b + p.a);
}
"""

RAW = """
    .shared .align 16 .b8 pool[1024];
    mov.u64 %rd1, pool; mad.wide.u32 %rd2, %t5, 16, %rd1;
    cp.async.ca.shared.global [%rd2], [%x], 16;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%rd2];
    mov.f32 %f1, 0f3F800000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
        {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r1, %r2}, {%f1, %f2, %f3, %f4};
    setp.lt.f32 %p1, %f1, %f2;
    @%p1 bra skip;
    vote.sync.ballot.b32 %r5, %p1, 0xffffffff;
    prmt.b32 %r6, %r1, %r2, 0x5410;
    cvt.rn.bf16x2.f32 %r7, %f1, %f2;
    st.global.v4.u32 [%x], {%r5, %r6, %r7, %r4};
    skip:
    red.global.add.u32 [%x+16], 1;
"""


@cache
def texts() -> tuple[str, str]:
    compiled = device().compile(CUDA, arch="sm_90").ptx
    # Comments are not worth damaging.
    lines = [line for line in compiled.splitlines() if line and not line.startswith("//")]
    return "\n".join(lines) + "\n", kernel_text(RAW, {"x": np.zeros(1), "n": np.uint32(0)})


def damaged(text: str, generator: np.random.Generator) -> str:
    """The text with a few bytes changed, dropped, doubled or exchanged, or two lines exchanged."""
    data = bytearray(text.encode())
    for _ in range(int(generator.integers(1, 5))):
        at = int(generator.integers(len(data)))
        kind = int(generator.integers(7))
        if kind == 0:
            data[at] = int(generator.integers(32, 127))
        elif kind == 1:
            del data[at : at + int(generator.integers(1, 9))]
        elif kind == 2:
            data[at:at] = data[at : at + int(generator.integers(1, 25))]
        elif kind == 3:
            data[at:at] = bytes(
                [int(generator.choice(list(b".,;:{}()[]%@!<>|+-\"'/*0_$\n\0\xff")))]
            )
        elif kind == 4:
            other = int(generator.integers(len(data)))
            data[at], data[other] = data[other], data[at]
        elif kind == 5:
            digits = [k for k, byte in enumerate(data) if chr(byte).isdigit()]
            data[int(generator.choice(digits))] = int(generator.choice(list(b"0123456789")))
        else:
            lines = bytes(data).split(b"\n")
            one, two = generator.integers(len(lines), size=2)
            lines[one], lines[two] = lines[two], lines[one]
            data = bytearray(b"\n".join(lines))
    return bytes(data).decode("utf-8", "replace")


def rearranged(text: str, generator: np.random.Generator) -> str:
    """The text with a few words of its body exchanged for others of it: names, opcodes, modifiers,
    numbers. Most of it still parses."""
    head, body = text[: text.index("{")], text[text.index("{") :]
    pieces = re.split(r"([%$\w]+|\.[\w:]+)", body)
    words = range(1, len(pieces), 2)
    for _ in range(int(generator.integers(1, 4))):
        one, two = (int(generator.choice(words)) for _ in range(2))
        alike = [k for k in words if _kind(pieces[k]) == _kind(pieces[one])]
        two = int(generator.choice(alike)) if generator.random() < 0.8 else two
        pieces[one] = pieces[two]
    return head + "".join(pieces)


def _kind(word: str) -> str:
    return "number" if word[0].isdigit() else word[0] if word[0] in "%.$" else "word"


@pytest.mark.parametrize("change", [damaged, rearranged])
@pytest.mark.parametrize("seed", range(8))
def test_damaged_text(seed: int, change: Callable[[str, np.random.Generator], str]) -> None:
    """30 texts a seed, half of them compiled CUDA, half written by hand."""
    generator = np.random.default_rng(seed)
    dev = device().with_options(Options(budget=3000))
    refused = 0
    for case in range(30):
        text = change(texts()[case % 2], generator)
        try:
            module = PtxModule(dev, text)
            kernel = module.kernel(module.kernels[0] if module.kernels else "k")
            arguments = [dev.array(np.ones(64, np.float32)), np.uint32(48)]
            kernel.launch((2,), (64,), arguments)
        except SimkitError as error:
            refused += bool(str(error))
        except Exception as error:  # the text that did it is what one needs to see
            pytest.fail(f"seed {seed}, case {case}: {type(error).__name__}: {error}\n{text}")
    assert refused


def test_the_texts_are_sound() -> None:
    for text in texts():
        x = device().array(np.ones(64, np.float32))
        device().load(text).kernel("k").launch((2,), (64,), [x, np.uint32(48)])


def test_every_line_left_out() -> None:
    dev = device().with_options(Options(budget=3000))
    for text in texts():
        lines = text.split("\n")
        for k in range(len(lines)):
            try:
                module = PtxModule(dev, "\n".join(lines[:k] + lines[k + 1 :]))
                x = dev.array(np.ones(64, np.float32))
                module.kernel("k").launch((1,), (64,), [x, np.uint32(48)])
            except SimkitError:
                continue
