"""What a text may use (its .target) and what a device runs, instruction by instruction."""

from __future__ import annotations

import re

import pytest
from lanes import HEADER, device, device_of

from gpu.ptx.architectures import architecture
from simkit.errors import PtxError

# (instruction, the least architecture that has it, one that does not): PTX ISA, "Target ISA Notes".
NEEDS = [
    ("cp.async.ca.shared.global [%r1], [%rd1], 4;", "sm_80", "sm_75"),
    ("cp.async.commit_group;", "sm_80", "sm_75"),
    ("cp.async.bulk.commit_group;", "sm_90", "sm_89"),
    ("cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 16;", "sm_90", "sm_80"),
    ("mbarrier.init.shared.b64 [%r1], 1;", "sm_80", "sm_75"),
    ("mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;", "sm_90", "sm_80"),
    ("mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 8;", "sm_90", "sm_80"),
    ("fence.proxy.async;", "sm_90", "sm_80"),
    ("barrier.cluster.arrive;", "sm_90", "sm_80"),
    ("mapa.shared::cluster.u32 %r1, %r2, 0;", "sm_90", "sm_86"),
    ("ld.shared::cluster.u32 %r1, [%r2];", "sm_90", "sm_80"),
    ("atom.relaxed.cluster.global.add.u32 %r1, [%rd1], 1;", "sm_90", "sm_80"),
    ("griddepcontrol.wait;", "sm_90", "sm_89"),
    ("elect.sync %r1|%p1, -1;", "sm_90", "sm_80"),
    ("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r2};", "sm_90", "sm_80"),
    ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1];", "sm_75", "sm_70"),
    ("wgmma.fence.sync.aligned;", "sm_90a", "sm_90"),
    ("wgmma.commit_group.sync.aligned;", "sm_90a", "sm_80"),
    ("setmaxnreg.inc.sync.aligned.u32 40;", "sm_90a", "sm_90"),
    ("redux.sync.add.u32 %r1, %r2, -1;", "sm_80", "sm_75"),
    ("cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f2;", "sm_89", "sm_86"),
    ("cvt.rn.f16x2.e5m2x2 %r1, %h1;", "sm_89", "sm_80"),
    ("cvt.rn.bf16x2.f32 %r1, %f1, %f2;", "sm_80", "sm_75"),
    ("cvt.rn.bf16.s32 %h1, %r1;", "sm_90", "sm_80"),
    ("cvt.rna.tf32.f32 %r1, %f1;", "sm_80", "sm_75"),
    ("cvt.pack.sat.u4.s32.b32 %r1, %r2, %r3, 0;", "sm_75", "sm_72"),
    ("add.bf16x2 %r1, %r2, %r3;", "sm_90", "sm_80"),
    ("add.u16x2 %r1, %r2, %r3;", "sm_90", "sm_80"),
    ("fma.rn.bf16x2 %r1, %r2, %r3, %r4;", "sm_80", "sm_75"),
    ("fma.rn.relu.f16x2 %r1, %r2, %r3, %r4;", "sm_80", "sm_75"),
    ("fma.rn.oob.f16x2 %r1, %r2, %r3, %r4;", "sm_90", "sm_80"),
    ("max.f16x2 %r1, %r2, %r3;", "sm_80", "sm_75"),
    ("max.NaN.f32 %f1, %f2, %f3;", "sm_80", "sm_75"),
    ("max.xorsign.abs.f32 %f1, %f2, %f3;", "sm_86", "sm_80"),
    ("max.relu.s32 %r1, %r2, %r3;", "sm_90", "sm_80"),
    ("tanh.approx.f32 %f1, %f2;", "sm_75", "sm_70"),
    ("tanh.approx.bf16x2 %r1, %r2;", "sm_90", "sm_80"),
    ("ex2.approx.f16x2 %r1, %r2;", "sm_75", "sm_70"),
    ("setp.eq.bf16x2 %p1|%p2, %r2, %r3;", "sm_90", "sm_80"),
    ("atom.global.add.noftz.bf16x2 %r1, [%rd1], %r2;", "sm_90", "sm_80"),
    ("atom.global.add.noftz.f16 %h1, [%rd1], %h2;", "sm_70", "sm_62"),
    ("red.global.add.v2.f32 [%rd1], {%f1, %f2};", "sm_90", "sm_80"),
    ("atom.exch.b128 %x1, [%rd1], %x2;", "sm_90", "sm_80"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
     "{%f1,%f2,%f3,%f4}, {%r1,%r2}, {%r3}, {%f1,%f2,%f3,%f4};", "sm_75", "sm_72"),
    ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
     "{%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%f1,%f2,%f3,%f4};", "sm_80", "sm_75"),
    ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
     "{%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%f1,%f2,%f3,%f4};", "sm_89", "sm_80"),
    ("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 "
     "{%r1,%r2,%r3,%r4}, {%r5,%r6}, {%r7}, {%r1,%r2,%r3,%r4};", "sm_80", "sm_75"),
    ("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 "
     "{%fd1,%fd2}, {%fd3}, {%fd4}, {%fd1,%fd2};", "sm_80", "sm_75"),
    ("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%fd1,%fd2,%fd3,%fd4}, {%fd5,%fd6}, {%fd7}, "
     "{%fd1,%fd2,%fd3,%fd4};", "sm_90", "sm_80"),
    ("wmma.load.a.sync.aligned.row.m16n16k16.bf16 {%r1,%r2,%r3,%r4}, [%rd1];", "sm_80", "sm_75"),
    ("createpolicy.fractional.L2::evict_last.b64 %rd1, 0f3F800000;", "sm_80", "sm_75"),
    ("prefetch.global.L2::evict_last [%rd1];", "sm_80", "sm_75"),
    ("ld.global.L2::256B.u32 %r1, [%rd1];", "sm_80", "sm_75"),
    ("nanosleep.u32 10;", "sm_70", "sm_62"),
]  # fmt: skip
# The same, on what no GPU before sm_100 has.
FAMILY_NEEDS = [
    ("ld.global.v8.b32 {%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8}, [%rd1];", "sm_100", "sm_90a"),
    ("ld.global.v4.u64 {%rd2,%rd3,%rd4,%rd5}, [%rd1];", "sm_100", "sm_90a"),
    ("st.bulk.shared::cta [%r1], 8, 0;", "sm_100", "sm_90a"),
    ("max.f32 %f1, %f2, %f3, %f4;", "sm_100", "sm_90a"),
    ("cvt.rn.satfinite.e2m3x2.f32 %h1, %f1, %f2;", "sm_100a", "sm_100"),
    ("cvt.rn.satfinite.e2m3x2.f32 %h1, %f1, %f2;", "sm_100f", "sm_90a"),
    ("cvt.rz.satfinite.ue8m0x2.f32 %h1, %f1, %f2;", "sm_100a", "sm_100"),
    ("cvt.rn.satfinite.tf32.f32 %r1, %f1;", "sm_100", "sm_90a"),
]


def text_for(target: str, body: str) -> str:
    registers = (
        ".reg .b16 %h<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>; .reg .f64 %fd<9>;"
        ".reg .pred %p<9>; .reg .b128 %x<9>;"
    )
    header = HEADER.replace("sm_90a", target)
    return f"{header}.visible .entry k() {{\n{registers}\n{body}\nret;\n}}\n"


@pytest.mark.parametrize(("body", "enough", "short"), NEEDS + FAMILY_NEEDS)
def test_an_instruction_needs_its_architecture(body: str, enough: str, short: str) -> None:
    device_of(enough).load(text_for(enough, body)).kernel("k")
    with pytest.raises(PtxError) as caught:
        device_of(short).load(text_for(short, body)).kernel("k")
    message = str(caught.value)
    assert f"a text for {short} (.target) may not use" in message
    assert f"line 6: {body}" in message
    needed = re.search(r"needs (sm_\w+)", message)
    assert needed is not None
    assert needed[1] == {"sm_100a": "sm_100f", "sm_90a": needed[1]}.get(enough, enough)


def test_every_such_instruction_is_listed() -> None:
    body = "cp.async.commit_group;\nadd.u32 %r1, %r2, %r3;\nredux.sync.add.u32 %r1, %r2, -1;"
    with pytest.raises(PtxError) as caught:
        device().load(text_for("sm_75", body)).kernel("k")
    assert "2 instructions that a text for sm_75 (.target) may not use" in str(caught.value)
    assert "line 6: cp.async.commit_group;  (needs sm_80)" in str(caught.value)
    assert "line 8: redux" in str(caught.value)


@pytest.mark.parametrize(
    ("target", "gpu", "runs"),
    [
        ("sm_70", "a100", True), ("sm_80", "a100", True), ("sm_86", "a100", False),
        ("sm_90", "a100", False), ("sm_90a", "a100", False), ("sm_80", "h100", True),
        ("sm_90", "h100", True), ("sm_90a", "h100", True), ("sm_100", "h100", False),
        ("sm_90", "b200", True), ("sm_90a", "b200", False), ("sm_100a", "b200", True),
        ("sm_100f", "b200", True), ("sm_103f", "b200", False), ("sm_120", "b200", False),
        ("sm_120a", "b200", False),
    ],
)  # fmt: skip
def test_a_device_runs_texts_for_its_kind(target: str, gpu: str, runs: bool) -> None:
    text = text_for(target, "")
    if runs:
        device(gpu).load(text).kernel("k").launch((1,), (1,), [])
        return
    with pytest.raises(PtxError) as caught:
        device(gpu).load(text)
    own = device(gpu).gpu.arch
    assert str(caught.value) == (
        f"PTX line 2: the text is for {target} (.target), which a device of architecture {own}"
        " does not run"
    )


@pytest.mark.parametrize("target", ["sm_9", "sm_90b", "compute_90", "x", "sm_1000", "sm_90aa"])
def test_unknown_targets(target: str) -> None:
    assert architecture(target) is None
    with pytest.raises(PtxError, match=f"PTX line 2: unknown architecture '{target}'"):
        device().load(text_for(target, ""))
