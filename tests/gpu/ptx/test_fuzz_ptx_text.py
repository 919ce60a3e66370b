"""Mutated PTX files: each is refused with its line, or runs to an end within a small budget."""

from __future__ import annotations

import re
import time
from difflib import unified_diff
from functools import cache

import numpy as np
import pytest
from lanes import device, kernel_text

import gpu
from gpu.arguments import Parameter
from gpu.kernels import flash_attention, flash_decoding, fp8_kv_cache, naive_attention
from gpu.ptx.executor import PtxModule
from gpu.ptx.launch import Options
from gpu.ptx.lexer import tokenize
from simkit.errors import PtxError, SimkitError

HOPPER = r"""
struct __align__(64) Map { char bytes[128]; };
__device__ unsigned place(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ unsigned long long descriptor(unsigned address) {
    return (unsigned long long)((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
extern "C" __global__ void k(const __grid_constant__ Map map, float* out) {
    __shared__ __align__(1024) char tile[8192];
    __shared__ __align__(8) unsigned long long full;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(place(&full)));
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 8192;"
            :: "r"(place(&full)) : "memory");
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx"
            "::bytes [%0], [%1, {%2, %3}], [%4];"
            :: "r"(place(tile)), "l"(&map), "r"(0), "r"(0), "r"(place(&full)) : "memory");
    }
    asm volatile("{ .reg .pred P; W: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], 0;"
        " @P bra D; bra W; D: }" :: "r"(place(&full)) : "memory");
    float d[4] = {0, 0, 0, 0};
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5,"
        " 1, 1, 1, 0, 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "l"(descriptor(place(tile))), "l"(descriptor(place(tile))));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = d[i];
}
"""

FLOW = r"""
.global .align 4 .b8 cell[64] = {1, 2, 3};
.global .align 8 .u64 table[2] = {cell, generic(cell)+8};
.const .f32 weights[4] = {0f3F800000, 2.0, -3.5, 0f40800000};
.func (.param .b32 result) helper(.param .b32 a, .param .align 4 .b8 pair[8]) {
    .reg .b32 %r<8>; .reg .pred %p<2>;
    ld.param.u32 %r1, [a]; ld.param.v2.u32 {%r2, %r3}, [pair];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra zero;
    add.u32 %r4, %r2, %r3;
    st.param.b32 [result], %r4;
    ret;
    zero: st.param.b32 [result], %r1;
    ret;
}
"""
BODY = r"""
.local .align 8 .b8 own[32]; .shared .align 16 .b8 pool[256]; .reg .b128 %q<3>;
.loc 1 5 3
mov.u32 %r1, 0;
loop: add.s32 %r1, %r1, 1; setp.lt.and.s32 %p1|%p2, %r1, %t5, !%p3; @%p1 bra loop;
rem.u32 %r2, %t5, 3;
ways: .branchtargets one, two, three;
brx.idx %r2, ways;
one: mov.u32 %r3, 5; bra join;
two: { .reg .b32 %r3a; inner: mov.u32 %r3a, 7; add.u32 %r3, %r3a, 1; } bra.uni join;
three: mov.u32 %r3, pool;
join: st.local.v2.u32 [own+8], {%r1, %r3}; ld.local.b64 %rd3, [own+8];
mad.wide.u32 %rd1, %t5, 4, %x; mov.u32 %r5, pool; mad.lo.u32 %r5, %t5, 4, %r5;
st.shared.u32 [%r5], %r1; bar.sync 0; @!%p1 ld.shared.u32 %r4, [%r5+-0];
{ .param .b32 ra; .param .b32 pa; .param .align 4 .b8 pb[8];
st.param.b32 [pa], %r1; st.param.v2.b32 [pb], {%r2, %r3};
call.uni (ra), helper, (pa, pb); ld.param.b32 %r6, [ra]; }
shfl.sync.bfly.b32 %r7|%p4, %r6, 1, 31, -1; vote.sync.ballot.b32 %r8, %p4, 0xffffffff;
add.cc.u32 %r9, %r7, %r8; addc.u32 %r10, %r9, 0b101; lop3.b32 %r11, %r9, %r10, 017, 0xE8;
mov.b64 %rd4, {%r9, %r10}; mov.b128 %q1, {%rd3, %rd4}; mov.b128 {%rd5, _}, %q1;
cvt.rn.f32.u32 %f1, %r11; fma.rn.ftz.f32 %f2, %f1, 0f3FC00000, 1.5e1; ex2.approx.f32 %f3, %f2;
cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f2; cvt.rn.bf16x2.f32 %r12, %f1, %f3;
prmt.b32 %r13, %r12, %r11, 0x5410;
atom.global.add.u32 %r14, [%x+64], 1; red.relaxed.gpu.global.max.s32 [%x+68], %r14;
cp.async.ca.shared.global [%r5], [%rd1], 4; cp.async.commit_group; cp.async.wait_group 0;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {%f4, %f5, %f6, %f7}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%f1, %f2, %f3, %f1};
selp.f32 %f8, %f4, %f5, %p2; st.global.f32 [%rd1], %f8; // the end /* not open */
"""


def bare(text: str) -> str:
    """Without comments and debug sections, which are not worth damaging."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("//")]
    return "\n".join(lines) + "\n"


@cache
def base(name: str) -> str:
    """A valid text to start from."""
    dev = device()
    if name == "flow":
        return bare(kernel_text(BODY, {"x": np.zeros(1)}, FLOW))
    if name == "hopper":
        return bare(dev.compile(HOPPER, arch="sm_90a", name="hopper.cu").ptx)
    if name == "lines":
        options = ("-lineinfo",)
        source = 'extern "C" __global__ void k(int* x) { x[threadIdx.x] = 1; }'
        return bare(dev.compile(source, options, arch="sm_80", name="lines.cu").ptx)
    module = {
        "flash_attention": lambda: flash_attention.build(dev, 64),
        "naive_attention": lambda: naive_attention.build(dev, 64),
        "flash_decoding": lambda: flash_decoding.build(dev, 64, 1),
        "fp8_kv_cache": lambda: fp8_kv_cache.build(dev),
    }[name]()
    assert isinstance(module, PtxModule)
    return bare(module.ptx)


# Words and numbers that are wrong in most places, and right in some.
_WORDS = """
    .b8 .u16 .f32 .f64 .pred .b128 .v2 .v4 .align .reg .shared .param .entry .func .global .maxntid
    .reqntid .visible .extern .loc .file .section .pragma .branchtargets .callprototype mov.b64
    add.f32 ld.global.u32 st.shared.v4.b32 bra bra.uni ret exit call brx.idx @ ! | _ { } ( ) [ ] ; ,
    : + - = < > ~ % $ & * / ? %r1 %rd1 %f1 %h1 %p1 %tid.x %clock64 WARP_SZ 0 1 -1 2 3 7 16 31 32 63
    64 4095 65536 2147483647 -2147483648 4294967296 9223372036854775807 18446744073709551616
    99999999999999999999999 0x7fffffff 0xffffffffffffffff 0f7F800000 0fFFFFFFFF 0d7FF0000000000000
    1e400 1.5 08 0b12 0x 0f12 1U
"""
WORDS = _WORDS.split()
BYTES = b" \n\t.,;:{}()[]%@!<>|+-\"'/*0_$#\\\0\x7f\xff\xc3"


def by_bytes(text: str, generator: np.random.Generator) -> str:
    """Some bytes changed, dropped, doubled, exchanged; sometimes not UTF-8 any more."""
    data = bytearray(text.encode())
    for _ in range(int(generator.integers(1, 4))):
        at = int(generator.integers(len(data)))
        size = int(generator.geometric(0.2))
        kind = int(generator.integers(7))
        if kind == 0:
            data[at] ^= 1 << int(generator.integers(8))
        elif kind == 1:
            data[at] = int(generator.choice(list(BYTES)))
        elif kind == 2:
            data.insert(at, int(generator.choice(list(BYTES))))
        elif kind == 3:
            del data[at : at + size]
        elif kind == 4:
            data[at:at] = data[at : at + size]
        elif kind == 5:
            other = int(generator.integers(len(data)))
            data[at : at + size], data[other : other + size] = (
                data[other : other + size],
                data[at : at + size],
            )
        else:
            del data[at:]
            break
    return bytes(data).decode("latin-1" if generator.random() < 0.1 else "utf-8", "replace")


_PIECE = re.compile(r"(\s+|[%$\w.:]+|.)", re.DOTALL)


def by_tokens(text: str, generator: np.random.Generator) -> str:
    """Some words exchanged, replaced, dropped, doubled or made other words of their kind."""
    pieces = _PIECE.findall(text)
    start = next(k for k, piece in enumerate(pieces) if "{" in piece)
    places = [k for k, piece in enumerate(pieces) if piece.strip()]
    inside = [k for k in places if k > start]
    for _ in range(int(generator.integers(1, 4))):
        at = int(generator.choice(inside if generator.random() < 0.9 else places))
        other = int(generator.choice(inside))
        kind = int(generator.integers(7))
        if kind == 0:
            pieces[at] = str(generator.choice(WORDS))
        elif kind == 1:
            pieces[at], pieces[other] = pieces[other], pieces[at]
        elif kind == 2:
            pieces[at] = ""
        elif kind == 3:
            pieces[at] += f" {generator.choice(WORDS)}"
        elif kind == 4:
            alike = [k for k in inside if pieces[k][:1] == pieces[at][:1]]
            pieces[at] = pieces[int(generator.choice(alike or inside))]
        elif kind == 5 and "." in pieces[at][1:]:
            # One modifier from elsewhere, or one less.
            parts, others = pieces[at].split("."), pieces[other].split(".")
            parts[int(generator.integers(1, len(parts)))] = str(generator.choice(others))
            pieces[at] = ".".join(p for p in parts if p)
        else:
            number = re.sub(r"\d+$", lambda m: str(int(generator.integers(0, 20))), pieces[at])
            pieces[at] = number
    return "".join(pieces)


MUTATIONS = {"bytes": by_bytes, "tokens": by_tokens}


@cache
def tensor_map() -> gpu.TensorMap:
    return gpu.TensorMap(device().array(np.zeros((64, 64), np.uint16)), (64, 64), swizzle="128B")


def arguments(parameters: list[Parameter]) -> list[object]:
    """Something that fits each parameter: arrays for 64 bits, small numbers, a tensor map."""
    dev = device()
    found: list[object] = []
    for p in parameters:
        if p.is_struct and p.size == 128:
            found.append(tensor_map())
        elif p.is_struct or p.size == 16:
            found.append(bytes(p.size))
        elif p.size == 8 and p.element != "f64":
            found.append(dev.array(np.ones(4096, np.uint32)))
        else:
            found.append(1.0 if p.element.startswith("f") else 1)
    return found


def outcome(text: str, threads: int = 32) -> str:
    """ "refused", "failed" (an error of ours while it runs) or "ran"; anything else is raised."""
    dev = device().with_options(Options(budget=5000))
    try:
        module = PtxModule(dev, text)
        kernels = [module.kernel(name) for name in module.kernels]
    except PtxError as error:
        if not re.search(r"\bline \d+", str(error)):
            raise AssertionError(f"no line in {error!r}") from error
        return "refused"
    for kernel in kernels:
        try:
            limit = int(np.prod(kernel.program.performance.get("maxntid", (threads,)) or (1,)))
            block = (max(1, min(threads, limit)),)
            kernel.launch((1,), block, arguments(kernel.parameters), shared_bytes=49152)
        except SimkitError:
            return "failed"
    return "ran"


# (text, mutants by each kind of mutation, threads)
CASES = [
    ("flow", 380, 32), ("lines", 430, 32), ("hopper", 200, 128), ("fp8_kv_cache", 50, 128),
    ("flash_decoding", 20, 128), ("naive_attention", 15, 128), ("flash_attention", 8, 128),
]  # fmt: skip
PARTS = 2


def test_there_are_enough_of_them() -> None:
    assert sum(count for _, count, _ in CASES) * len(MUTATIONS) >= 2000


@pytest.mark.parametrize(("name", "threads"), [(name, threads) for name, _, threads in CASES])
def test_the_texts_themselves_run(name: str, threads: int) -> None:
    assert outcome(base(name), threads) == "ran"


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize(("name", "count", "threads"), CASES)
def test_mutants(name: str, count: int, threads: int, mutation: str, part: int) -> None:
    """Refused with a line, stopped by an error of ours, or run; soon, and never anything else."""
    seen: dict[str, int] = {}
    for seed in range(part, count, PARTS):
        text = MUTATIONS[mutation](base(name), np.random.default_rng((seed, len(name))))
        started = time.process_time()
        try:
            result = outcome(text, threads)
        except Exception as error:
            changes = "\n".join(unified_diff(base(name).splitlines(), text.splitlines(), n=0))
            pytest.fail(f"{name}, {mutation}, seed {seed}: {error!r}\n{changes}")
        seen[result] = seen.get(result, 0) + 1
        assert time.process_time() - started < 5, f"{name}, {mutation}, seed {seed} takes too long"
    assert seen.get("refused", 0) > 0


# What no grammar allows between two tokens of this text: were anything skipped, some would pass.
STRAYS = ["?", "=", "&", "~", "'", "..", "0x", "<>", "]", ")", "\\", ".file", "%", "0 0", "a b"]


@pytest.mark.parametrize("stray", STRAYS)
def test_nothing_is_skipped(stray: str) -> None:
    """A stray token anywhere is refused, at its line or at one that it broke."""
    text = base("flow")
    tokens = list(re.finditer(r"//[^\n]*|/\*.*?\*/|\"[^\"]*\"|[%$\w.:]+|\S", text))
    places = [m.start() for m in tokens if not m.group().startswith(("//", "/*"))]
    assert len(tokenize(text)) > 400
    for place in places[:: max(1, len(places) // 30)]:
        broken = f"{text[:place]} {stray} {text[place:]}"
        with pytest.raises(PtxError) as caught:
            device().load(broken).kernel("k")
        assert re.search(r"\bline \d+", str(caught.value)), broken[place - 40 : place + 40]


@pytest.mark.parametrize(
    "text",
    [
        "{" * 5000, ".global .u32 a[1] = " + "{" * 5000, ".global .u32 a" + "[2]" * 5000 + ";",
        ".visible .entry k() { mov.b32 " + "{" * 5000, ".visible .entry k() " + "{" * 5000,
        ".visible .entry k() { .reg .b32 %r<131073>; }",
        ".global .u64 a[9223372036854775807];", ".const .b8 a[70000];",
        ".visible .entry k() { .local .b8 a[1000000]; ret; }",
        ".visible .entry k(.param .b8 a[100000]) { ret; }",
        ".section x " + "{" * 5000,
    ],
    ids=range(11),
)  # fmt: skip
def test_sizes_beyond_all_bounds(text: str) -> None:
    """Depths, counts and sizes that nothing can hold are refused, not tried."""
    started = time.process_time()
    with pytest.raises(PtxError, match=r"\bline \d+"):
        device().load(f".version 8.5\n.target sm_90a\n.address_size 64\n{text}").kernel("k")
    assert time.process_time() - started < 2


ALMOST_RIGHT = [
    (".global .u32 .f32 a;", "behind the type .u32"),
    (".global .u32 .v4 a;", ".v4 behind the type .u32"),
    (".global .u32 a[];", "'a' has no size"),
    (".visible .entry k() { .shared .b8 a[]; ret; }", "'a' has no size"),
    (".visible .entry k() { .shared .b8 a[4]; .shared .b8 a[4]; ret; }", "declared twice"),
    (".visible .entry k() {\n.loc 1 1 0 add.f32\nret; }", "does not know"),
    (".visible .entry k() {\n.loc 1 1 0, inlined 1 2 3\nret; }", "unknown attribute 'inlined'"),
    (".visible .entry k() { .reg .b32 %r; mov.u32 %r, %tid; ret; }", "'%tid' is not declared"),
    (".visible .entry k() { .reg .b32 %r; mov.u32 %r, %tid.q; ret; }", "%tid.q"),
    (".visible .entry k() { { .reg .b32 %r; .shared .b32 a; } .reg .b32 %r;"
     " ld.shared.u32 %r, [a]; ret; }", "unknown name 'a'"),
    (".visible .entry k() { { l: } bra l; ret; }", "branch to an unknown label"),
    (".visible .entry k() { bra.sync l; l: ret; }", "no such form of bra"),
    (".visible .entry k() { ret 1; }", "no such form of ret"),
    (".visible .entry k() { exit.uni; }", "no such form of exit"),
    (".func f() { ret 1; }\n.visible .entry k() { call f; ret; }", "no such form of ret"),
    (".func f() { ret; }\n.visible .entry k() { call.unit f; ret; }", "there is no call.unit"),
    (".func f(.param .b32 a) { .reg .b64 %r; ld.param.b64 %r, [a]; ret; }\n"
     ".visible .entry k() { .param .b32 x; call f, (x); ret; }", "has 4 bytes"),
    (".func f(.param .b32 a) { ret; }\n"
     ".visible .entry k() { .param .b64 x; call f, (x); ret; }", "'x' has 8 bytes"),
    (".visible .entry k() { p: .callprototype _ (); ret; }", "indirect calls are not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), ALMOST_RIGHT)
def test_what_looks_almost_right(text: str, expected: str) -> None:
    with pytest.raises(PtxError) as caught:
        device().load(f".version 8.5\n.target sm_90a\n.address_size 64\n{text}").kernel("k")
    assert expected in str(caught.value)
    assert re.search(r"\bline [4-9]", str(caught.value)), caught.value
