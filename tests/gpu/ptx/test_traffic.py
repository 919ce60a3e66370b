"""Counters of global and shared traffic against figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from lanes import run

from gpu.counters import Traffic
from gpu.ptx.launch import Options

BIG = np.zeros(1 << 15, np.uint8)


def traffic_of(body: str, **keywords) -> Traffic:  # type: ignore[no-untyped-def]
    """The traffic of a kernel with the array ``x``, whose address is a multiple of 256."""
    traffic = run(body, {"x": BIG}, **keywords).report.traffic
    assert traffic is not None
    return traffic


def counted(body: str, direction: str = "read", **keywords) -> tuple[int, int]:  # type: ignore[no-untyped-def]
    entry = traffic_of(body, **keywords).of("x", direction)
    return entry.requested, entry.sectors


def load(stride: int, width: int, start: int = 0, before: str = "", guard: str = "") -> str:
    target = {1: "ld.global.u8 %r1", 2: "ld.global.u16 %r1", 4: "ld.global.u32 %r1"}
    target |= {8: "ld.global.u64 %rd2", 16: "ld.global.v2.u64 {%rd2, %rd3}"}
    return f"""
        mad.wide.u32 %rd1, %t5, {stride}, %x;
        {before}
        {guard} {target[width]}, [%rd1+{start}];
    """


# (stride between lanes, bytes per lane, start, sectors of 32 bytes that a warp touches)
ACCESSES = [
    (1, 1, 0, 1),  # 32 bytes
    (2, 2, 0, 2),
    (4, 4, 0, 4),  # 128 bytes: coalesced
    (8, 8, 0, 8),
    (16, 16, 0, 16),
    (4, 4, 4, 5),  # 128 bytes from byte 4: one sector more
    (4, 4, 28, 5),
    (4, 4, 32, 4),
    (8, 4, 0, 8),  # every other word
    (32, 4, 0, 32),  # a sector each
    (36, 4, 0, 32),
    (128, 4, 0, 32),
    (64, 16, 0, 32),
    (20, 4, 0, 20),  # 31 * 20 + 4 = 624 bytes without a gap of a whole sector: 20 sectors
    (0, 4, 0, 1),  # broadcast
    (0, 16, 48, 1),
    (0, 8, 24, 1),
]


@pytest.mark.parametrize(("stride", "width", "start", "sectors"), ACCESSES)
def test_global_loads(stride: int, width: int, start: int, sectors: int) -> None:
    assert counted(load(stride, width, start)) == (32 * width, 32 * sectors)


def test_each_warp_counts_for_itself() -> None:
    """Four warps in two blocks read the same 128 bytes: 4 sectors each time."""
    body = "and.b32 %r2, %t5, 31; mad.wide.u32 %rd1, %r2, 4, %x; ld.global.u32 %r1, [%rd1];"
    assert counted(body, grid=(2,), block=(64,)) == (4 * 128, 4 * 128)


def test_masked_lanes_count_for_nothing() -> None:
    """Eight lanes of a warp under a guard, the same in a branch."""
    before = "setp.lt.u32 %p1, %t5, 8;"
    assert counted(load(4, 4, 0, before, "@%p1")) == (32, 32)
    every = "rem.u32 %r2, %t5, 4; setp.eq.u32 %p1, %r2, 1;"
    assert counted(load(32, 4, 0, every, "@%p1")) == (8 * 4, 8 * 32)
    branch = load(4, 4).replace("ld.global", "@!%p1 bra skip; ld.global") + "skip:"
    assert counted("setp.lt.u32 %p1, %t5, 8;" + branch) == (32, 32)
    nobody = "setp.gt.u32 %p1, %t5, 99;"
    assert counted(load(4, 4, 0, nobody, "@%p1")) == (0, 0)


def test_partial_warps() -> None:
    """40 threads: a full warp and 8 lanes."""
    assert counted(load(4, 4), block=(40,)) == (160, 5 * 32)


def test_stores_and_atomics() -> None:
    store = "mad.wide.u32 %rd1, %t5, 4, %x; st.global.v2.u32 [%rd1+0], {%r1, %r2};"
    store = store.replace(", 4, %x", ", 8, %x")
    assert counted(store, "write") == (256, 256)
    assert counted(store, "read") == (0, 0)
    atomic = "red.global.add.u32 [%x], 1;"
    assert counted(atomic, "write") == (128, 32)
    spread = "mad.wide.u32 %rd1, %t5, 4, %x; atom.global.add.u32 %r1, [%rd1], 1;"
    assert counted(spread, "write") == (128, 128)


def test_accesses_to_several_arrays_in_one_instruction() -> None:
    """Even lanes read x, odd ones y: 16 words at a stride of 8 bytes, 8 sectors each."""
    body = """
        and.b32 %r2, %t5, 1; setp.eq.u32 %p1, %r2, 0;
        selp.b64 %rd1, %x, %y, %p1;
        mad.wide.u32 %rd1, %t5, 4, %rd1;
        ld.global.u32 %r1, [%rd1];
    """
    x, y = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    traffic = run(body, {"x": x, "y": y}).report.traffic
    assert traffic is not None
    for name in "xy":
        entry = traffic.of(name, "read")
        assert (entry.requested, entry.sectors) == (64, 4 * 32)
    assert traffic.requested == 128
    assert traffic.sectors == 256


def test_local_memory_counts_apart() -> None:
    body = """
        .local .align 8 .b8 own[16];
        st.local.u64 [own], 1;
        ld.local.u32 %r1, [own+4];
    """
    traffic = traffic_of(body)
    assert traffic.local_bytes == 32 * 8 + 32 * 4
    assert traffic.requested == 0


def shared(stride: int, width: int, before: str = "", guard: str = "") -> str:
    target = {1: "ld.shared.u8 %r1", 2: "ld.shared.u16 %r1", 4: "ld.shared.u32 %r1"}
    target |= {8: "ld.shared.u64 %rd2", 16: "ld.shared.v2.u64 {%rd2, %rd3}"}
    return f"""
        .shared .align 16 .b8 pool[16384];
        mov.u64 %rd4, pool; mad.wide.u32 %rd1, %t5, {stride}, %rd4;
        {before}
        {guard} {target[width]}, [%rd1];
    """


# (stride, width, wavefronts, without conflicts): 32 banks of 4 bytes, lanes of one word share it.
SHARED = [
    (4, 4, 1, 1),
    (8, 4, 2, 1),  # even banks only, two words each
    (16, 4, 4, 1),
    (128, 4, 32, 1),  # a column: all lanes in bank 0
    (132, 4, 1, 1),  # a padded column
    (12, 4, 1, 1),  # an odd number of words
    (0, 4, 1, 1),  # broadcast
    (1, 1, 1, 1),
    (2, 2, 1, 1),
    (64, 2, 16, 1),
    (8, 8, 2, 2),  # half a warp at a time
    (16, 8, 4, 2),
    (0, 8, 2, 2),
    (16, 16, 4, 4),  # a quarter at a time
    (32, 16, 8, 4),
    (144, 16, 4, 4),
    (128, 16, 32, 4),
]


@pytest.mark.parametrize(("stride", "width", "actual", "ideal"), SHARED)
def test_shared_wavefronts(stride: int, width: int, actual: int, ideal: int) -> None:
    figures = traffic_of(shared(stride, width)).shared
    assert (figures.instructions, figures.wavefronts, figures.ideal) == (1, actual, ideal)
    assert figures.conflicts == actual - ideal


def test_shared_wavefronts_of_many_warps_and_masks() -> None:
    figures = traffic_of(shared(8, 4), grid=(3,), block=(64,)).shared
    assert (figures.instructions, figures.wavefronts, figures.ideal) == (6, 12, 6)
    # 16 lanes at a stride of 8 bytes fit the 32 banks.
    before = "setp.lt.u32 %p1, %t5, 16;"
    figures = traffic_of(shared(8, 4, before, "@%p1")).shared
    assert (figures.instructions, figures.wavefronts) == (1, 1)


def test_ldmatrix_wavefronts() -> None:
    """Each 8 x 8 matrix is eight rows of 16 bytes: one wavefront if they fill the banks, eight if
    all rows start in the same bank."""
    body = """
        .shared .align 128 .b8 pool[8192];
        mov.u64 %rd4, pool; mad.wide.u32 %rd1, %t5, STRIDE, %rd4;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%rd1];
    """
    for stride, wavefronts in ((16, 4), (144, 4), (32, 8), (128, 32)):
        figures = traffic_of(body.replace("STRIDE", str(stride))).shared
        assert (figures.wavefronts, figures.ideal) == (wavefronts, 4), stride


def test_copies_count_as_global_reads() -> None:
    body = """
        .shared .align 16 .b8 pool[512];
        mov.u64 %rd1, pool; mad.wide.u32 %rd1, %t5, 16, %rd1; mad.wide.u32 %rd2, %t5, 16, %x;
        cp.async.cg.shared.global [%rd1], [%rd2], 16;
        cp.async.wait_all;
    """
    assert counted(body) == (512, 512)


def test_what_idle_lanes_hold_is_no_source_size() -> None:
    body = """
        .shared .align 16 .b8 pool[512];
        mov.u64 %rd1, pool; mad.wide.u32 %rd1, %t5, 16, %rd1; mad.wide.u32 %rd2, %t5, 16, %x;
        mov.u32 %r1, 7; setp.lt.u32 %p1, %t5, 8; @%p1 mov.u32 %r1, 16;
        @%p1 cp.async.cg.shared.global [%rd1], [%rd2], 16, %r1;
        cp.async.wait_all;
    """
    assert counted(body) == (128, 128)


def test_copies_that_read_a_part_are_one_access() -> None:
    """Ten bytes of each sixteen: as many sectors as if all were read, and one store each."""
    body = """
        .shared .align 16 .b8 pool[512];
        mov.u64 %rd1, pool; mad.wide.u32 %rd1, %t5, 16, %rd1; mad.wide.u32 %rd2, %t5, 16, %x;
        cp.async.cg.shared.global [%rd1], [%rd2], 16, 10;
        cp.async.wait_all;
    """
    traffic = traffic_of(body)
    entry = traffic.of("x", "read")
    assert (entry.requested, entry.sectors) == (320, 512)
    assert (traffic.shared.wavefronts, traffic.shared.ideal) == (4, 4)


def test_dram_lets_through_what_the_cache_lacks() -> None:
    """Four warps read the same 4096 bytes twice: they come from memory once."""
    body = """
        mov.u32 %r9, 0;
        again:
        mad.wide.u32 %rd1, %t5, 32, %x;
        ld.global.u32 %r1, [%rd1];
        add.u32 %r9, %r9, 1; setp.lt.u32 %p1, %r9, 2; @%p1 bra again;
    """
    traffic = traffic_of(body, block=(128,), options=Options(dram=True))
    assert traffic.of("x", "read").sectors == 2 * 4096
    assert traffic.dram_read == 4096
    assert traffic.dram_write == 0
    assert traffic_of(body).dram_read is None


def test_instruction_counts() -> None:
    """Three instructions of a loop that lanes leave one after the other."""
    straight = run("add.u32 %r1, %t5, 1; st.global.u32 [%x], %r1;", {"x": np.zeros(1, np.uint32)})
    masked = run(
        "setp.lt.u32 %p1, %t5, 4; @!%p1 bra end; st.global.u32 [%x], %t5; end:",
        {"x": np.zeros(1, np.uint32)},
    )
    assert straight.report.lane_instructions == 32 * straight.report.instructions
    assert masked.report.lane_instructions < 32 * masked.report.instructions
