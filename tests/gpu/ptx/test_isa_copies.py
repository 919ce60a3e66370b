"""cp.async: sizes, partial sources, groups, under every schedule of copies."""

from __future__ import annotations

import numpy as np
import pytest
from lanes import run

from gpu.ptx.launch import Options
from gpu.ptx.schedule import Schedule

SCHEDULES = [Schedule("eager"), Schedule("lazy"), Schedule("random", 1), Schedule("random", 2)]


def options(schedule: Schedule) -> Options:
    return Options(schedule=schedule, budget=100_000)


WAITS = {
    "wait_all": "cp.async.wait_all;",
    "wait_group": "cp.async.commit_group; cp.async.wait_group 0;",
}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(("size", "cache"), [(4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")])
@pytest.mark.parametrize("wait", WAITS)
def test_sizes(size: int, cache: str, wait: str, schedule: Schedule) -> None:
    source = np.random.default_rng(size).integers(0, 256, (64, size), np.uint8)
    body = f"""
        .shared .align 16 .b8 pool[1024];
        mov.u64 %rd1, pool; mad.wide.u32 %rd1, %t5, {size}, %rd1;
        mad.wide.u32 %rd2, %t5, {size}, %src;
        cp.async.{cache}.shared.global [%rd1], [%rd2], {size};
        {WAITS[wait]}
        bar.sync 0;
        sub.u32 %r1, 63, %t5; mov.u64 %rd3, pool; mad.wide.u32 %rd3, %r1, {size}, %rd3;
        mad.wide.u32 %rd4, %t5, {size}, %dst;
        ld.shared.u32 %r2, [%rd3];
        st.global.u32 [%rd4], %r2;
        {"ld.shared.u32 %r3, [%rd3+4]; st.global.u32 [%rd4+4], %r3;" if size > 4 else ""}
        {"ld.shared.b64 %rd5, [%rd3+8]; st.global.b64 [%rd4+8], %rd5;" if size > 8 else ""}
    """
    arrays = {"src": source, "dst": np.zeros_like(source)}
    got = run(body, arrays, block=(64,), options=options(schedule)).arrays["dst"]
    assert np.array_equal(got, source[::-1])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("size", [4, 8, 16])
def test_source_sizes(size: int, schedule: Schedule) -> None:
    """Lane k copies k mod (size + 1) bytes; the rest of the destination is filled with zeros."""
    source = np.random.default_rng(size).integers(1, 256, (32, size), np.uint8)
    body = f"""
        .shared .align 16 .b8 pool[512];
        mov.u64 %rd1, pool; mad.wide.u32 %rd1, %t5, {size}, %rd1;
        mad.wide.u32 %rd2, %t5, {size}, %src;
        rem.u32 %r1, %t5, {size + 1};
        cp.async.ca.shared.global [%rd1], [%rd2], {size}, %r1;
        cp.async.commit_group;
        cp.async.wait_group 0;
        mad.wide.u32 %rd3, %t5, {size}, %dst;
        ld.shared.u32 %r2, [%rd1]; st.global.u32 [%rd3], %r2;
        {"ld.shared.u32 %r3, [%rd1+4]; st.global.u32 [%rd3+4], %r3;" if size > 4 else ""}
        {"ld.shared.b64 %rd5, [%rd1+8]; st.global.b64 [%rd3+8], %rd5;" if size > 8 else ""}
    """
    arrays = {"src": source, "dst": np.zeros_like(source)}
    done = run(body, arrays, options=options(schedule))
    taken = np.arange(32) % (size + 1)
    wanted = np.where(np.arange(size) < taken[:, None], source, 0)
    assert np.array_equal(done.arrays["dst"], wanted)
    # Only what is read is asked for.
    assert done.report.traffic is not None
    assert done.report.traffic.of("src", "read").requested == taken.sum()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_source_size_zero_does_not_touch_the_source(schedule: Schedule) -> None:
    """A null pointer is fine for lanes that copy nothing."""
    source = np.arange(32 * 4, dtype=np.uint32).reshape(32, 4)
    body = """
        .shared .align 16 .b8 pool[512];
        mov.u64 %rd1, pool; mad.wide.u32 %rd1, %t5, 16, %rd1;
        mad.wide.u32 %rd2, %t5, 16, %src;
        setp.lt.u32 %p1, %t5, 20;
        selp.b64 %rd2, %rd2, 0, %p1;
        selp.u32 %r1, 16, 0, %p1;
        cp.async.cg.shared.global.L2::128B [%rd1], [%rd2], 16, %r1;
        cp.async.wait_all;
        mad.wide.u32 %rd3, %t5, 16, %dst;
        ld.shared.v4.u32 {%r2, %r3, %r4, %r5}, [%rd1];
        st.global.v4.u32 [%rd3], {%r2, %r3, %r4, %r5};
    """
    arrays = {"src": source, "dst": np.ones_like(source)}
    done = run(body, arrays, options=options(schedule))
    assert np.array_equal(done.arrays["dst"], np.where(np.arange(32)[:, None] < 20, source, 0))
    assert done.report.traffic is not None
    assert done.report.traffic.of("src", "read").requested == 20 * 16


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_ignored_source(schedule: Schedule) -> None:
    """The predicate form: a true ``ignore-src`` fills with zeros."""
    source = np.arange(32, dtype=np.uint32) + 1
    body = """
        .shared .align 16 .b8 pool[128];
        mov.u64 %rd1, pool; mad.wide.u32 %rd1, %t5, 4, %rd1;
        mad.wide.u32 %rd2, %t5, 4, %src;
        setp.ge.u32 %p1, %t5, 12;
        cp.async.ca.shared.global [%rd1], [%rd2], 4, %p1;
        cp.async.wait_all;
        mad.wide.u32 %rd3, %t5, 4, %dst;
        ld.shared.u32 %r2, [%rd1];
        st.global.u32 [%rd3], %r2;
    """
    got = run(body, {"src": source, "dst": np.ones_like(source)}, options=options(schedule)).arrays
    assert np.array_equal(got["dst"], np.where(np.arange(32) < 12, source, 0))


GROUPS = """
    .shared .align 16 .b8 pool[1024];
    mov.u64 %rd1, pool; mad.wide.u32 %rd1, %t5, 4, %rd1;
    mad.wide.u32 %rd2, %t5, 4, %src;
    cp.async.ca.shared.global [%rd1], [%rd2], 4;
    cp.async.commit_group;
    cp.async.ca.shared.global [%rd1+128], [%rd2+128], 4;
    cp.async.ca.shared.global [%rd1+256], [%rd2+256], 4;
    cp.async.commit_group;
    cp.async.ca.shared.global [%rd1+384], [%rd2+384], 4;
    cp.async.commit_group;
    cp.async.wait_group WAIT;
    mad.wide.u32 %rd3, %t5, 16, %dst;
    ld.shared.u32 %r1, [%rd1]; ld.shared.u32 %r2, [%rd1+128];
    ld.shared.u32 %r3, [%rd1+256]; ld.shared.u32 %r4, [%rd1+384];
    st.global.v4.u32 [%rd3], {%r1, %r2, %r3, %r4};
"""


@pytest.mark.parametrize(("pending", "complete"), [(0, 4), (1, 3), (2, 1), (3, 0), (5, 0)])
def test_groups(pending: int, complete: int) -> None:
    """wait_group N leaves the last N groups in flight: lazily they have not landed, eagerly all
    have."""
    source = np.arange(128, dtype=np.uint32)
    arrays = {"src": source, "dst": np.zeros((32, 4), np.uint32)}
    text = GROUPS.replace("WAIT", str(pending))
    wanted = source.reshape(4, 32).T
    eager = run(text, arrays, options=options(Schedule("eager"))).arrays["dst"]
    assert np.array_equal(eager, wanted)
    lazy = run(text, arrays, options=options(Schedule("lazy"))).arrays["dst"]
    assert np.array_equal(lazy[:, :complete], wanted[:, :complete])
    assert (lazy[:, complete:] == 0xFFFFFFFF).all()


def test_groups_of_lanes_that_diverge() -> None:
    """Each lane's groups are its own: lanes 0-15 issue one copy more than the others."""
    source = np.arange(64, dtype=np.uint32)
    body = """
        .shared .align 16 .b8 pool[256];
        mov.u64 %rd1, pool; mad.wide.u32 %rd1, %t5, 4, %rd1;
        mad.wide.u32 %rd2, %t5, 4, %src;
        setp.ge.u32 %p1, %t5, 16;
        @%p1 bra skip;
        cp.async.ca.shared.global [%rd1], [%rd2], 4;
        skip:
        cp.async.ca.shared.global [%rd1+128], [%rd2+128], 4;
        cp.async.commit_group;
        cp.async.wait_group 0;
        mad.wide.u32 %rd3, %t5, 8, %dst;
        ld.shared.u32 %r1, [%rd1]; ld.shared.u32 %r2, [%rd1+128];
        st.global.v2.u32 [%rd3], {%r1, %r2};
    """
    arrays = {"src": source, "dst": np.zeros((32, 2), np.uint32)}
    for schedule in SCHEDULES:
        got = run(body, arrays, options=options(schedule)).arrays["dst"]
        lane = np.arange(32)
        assert np.array_equal(got[:, 0], np.where(lane < 16, lane, 0xFFFFFFFF))
        assert np.array_equal(got[:, 1], lane + 32)


def test_a_missing_wait_shows() -> None:
    """Eagerly the copy has landed by luck; lazily the destination is still unwritten."""
    source = np.arange(32, dtype=np.uint32)
    body = """
        .shared .align 16 .b8 pool[128];
        mov.u64 %rd1, pool; mad.wide.u32 %rd1, %t5, 4, %rd1;
        mad.wide.u32 %rd2, %t5, 4, %src;
        cp.async.ca.shared.global [%rd1], [%rd2], 4;
        cp.async.commit_group;
        mad.wide.u32 %rd3, %t5, 4, %dst;
        ld.shared.u32 %r1, [%rd1];
        st.global.u32 [%rd3], %r1;
    """
    arrays = {"src": source, "dst": np.zeros(32, np.uint32)}
    lazy = run(body, arrays, options=options(Schedule("lazy"))).arrays["dst"]
    assert (lazy == 0xFFFFFFFF).all()


def test_a_pipeline_of_tiles() -> None:
    """Double buffering: the copy of tile k + 1 overlaps the sum over tile k."""
    tiles, threads = 7, 64
    source = np.random.default_rng(0).integers(0, 1000, (tiles, threads), np.uint32)
    body = f"""
        .shared .align 16 .b8 pool[512];
        mov.u64 %rd10, pool;
        mad.wide.u32 %rd11, %t5, 4, %rd10;
        mad.wide.u32 %rd12, %t5, 4, %src;
        mov.u32 %r1, 0;  // tile
        mov.u32 %r2, 0;  // sum
        cp.async.ca.shared.global [%rd11], [%rd12], 4;
        cp.async.commit_group;
        loop:
        add.u32 %r3, %r1, 1;
        setp.ge.u32 %p1, %r3, {tiles};
        and.b32 %r4, %r3, 1; shl.b32 %r4, %r4, 8; cvt.u64.u32 %rd1, %r4; add.u64 %rd2, %rd11, %rd1;
        mad.wide.u32 %rd3, %r3, {4 * threads}, %rd12;
        @%p1 bra last;
        cp.async.ca.shared.global [%rd2], [%rd3], 4;
        last:
        cp.async.commit_group;
        cp.async.wait_group 1;
        bar.sync 0;
        // Every thread adds its neighbour's element: another warp's for lanes at the edge.
        add.u32 %r5, %t5, 31; rem.u32 %r5, %r5, {threads};
        and.b32 %r6, %r1, 1; shl.b32 %r6, %r6, 6; add.u32 %r5, %r5, %r6;
        mad.wide.u32 %rd4, %r5, 4, %rd10;
        ld.shared.u32 %r7, [%rd4];
        add.u32 %r2, %r2, %r7;
        bar.sync 0;
        add.u32 %r1, %r1, 1;
        setp.lt.u32 %p2, %r1, {tiles};
        @%p2 bra loop;
        mad.wide.u32 %rd5, %t5, 4, %dst;
        st.global.u32 [%rd5], %r2;
    """
    wanted = np.roll(source.sum(axis=0), -31)
    arrays = {"src": source, "dst": np.zeros(threads, np.uint32)}
    for schedule in SCHEDULES:
        got = run(body, arrays, block=(threads,), options=options(schedule)).arrays["dst"]
        assert np.array_equal(got, wanted), schedule
        # Without the second barrier a warp may overwrite the buffer that another one still reads.
    broken = body.replace("bar.sync 0;\n        add.u32 %r1", "add.u32 %r1")
    assert broken != body
    wrong = [
        not np.array_equal(
            run(broken, arrays, block=(threads,), options=options(schedule)).arrays["dst"], wanted
        )
        for schedule in [*SCHEDULES, *(Schedule("random", seed) for seed in range(3, 12))]
    ]
    assert any(wrong)
