"""Exchange between lanes: shfl, vote, match, redux, activemask, elect."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from lanes import run

from simkit.errors import LaunchError

LANE = np.arange(32)
FULL = 0xFFFFFFFF


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The lane that shfl reads and its predicate: the pseudo-code of the PTX ISA."""
    b_value, c_value, segment = b & 31, c & 31, c >> 8 & 31
    largest = (lane & segment) | (c_value & ~segment & 31)
    smallest = lane & segment
    if mode == "up":
        j = lane - b_value
        inside = j >= largest
    elif mode == "down":
        j = lane + b_value
        inside = j <= largest
    elif mode == "bfly":
        j = lane ^ b_value
        inside = j <= largest
    else:
        j = smallest | (b_value & ~segment & 31)
        inside = j <= largest
    return (j if inside else lane), inside


SEGMENTS = [0, 0x1F, 0x1C1F, 0x181F, 0x1800, 0x101F, 0x1000, 0x1E1F, 0x1F00, 0x0710, 15]


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles(mode: str) -> None:
    """Every distance and many segment masks: constant operands and operands in registers."""
    amounts = [0, 1, 2, 3, 5, 8, 16, 17, 31, 33]
    cases = [(b, c) for c in SEGMENTS for b in amounts]
    lines = ["add.u32 %r1, %t5, 1000;", "mov.u32 %r3, %laneid;"]
    lines.append(f"mad.wide.u32 %rd1, %t5, {16 * len(cases)}, %out;")
    for k, (b, c) in enumerate(cases):
        lines += [
            f"shfl.sync.{mode}.b32 %r10|%p1, %r1, {b}, {c}, -1;",
            "selp.u32 %r11, 1, 0, %p1;",
            # A value that the compiler cannot see through.
            f"and.b32 %r4, %r3, 0; add.u32 %r5, %r4, {b}; add.u32 %r6, %r4, {c};",
            f"shfl.sync.{mode}.b32 %r12|%p2, %r1, %r5, %r6, 0xffffffff;",
            "selp.u32 %r13, 1, 0, %p2;",
            f"st.global.v4.u32 [%rd1+{16 * k}], {{%r10, %r11, %r12, %r13}};",
        ]
    out = np.zeros((64, len(cases), 4), np.uint32)
    got = run("\n".join(lines), {"out": out}, block=(64,)).arrays["out"]
    for k, (b, c) in enumerate(cases):
        for lane in range(32):
            source, inside = shuffled(mode, lane, b, c)
            for warp in (0, 32):
                wanted = [1000 + warp + source, int(inside)] * 2
                assert got[warp + lane, k].tolist() == wanted, (b, hex(c), lane)


def test_shuffle_with_a_source_lane_of_each_lanes_own() -> None:
    body = """
        mul.lo.u32 %r1, %t5, 10;
        mad.lo.u32 %r2, %t5, 7, 3;
        shfl.sync.idx.b32 %r3, %r1, %r2, 0x1f, 0xffffffff;
        mad.wide.u32 %rd1, %t5, 4, %out;
        st.global.u32 [%rd1], %r3;
    """
    got = run(body, {"out": np.zeros(32, np.uint32)}).arrays["out"]
    assert np.array_equal(got, (LANE * 7 + 3) % 32 * 10)


def test_shuffle_over_its_own_source() -> None:
    """A tree of additions in place."""
    lines = ["add.u32 %r1, %t5, 1;"]
    for distance in (16, 8, 4, 2, 1):
        lines += [f"shfl.sync.bfly.b32 %r2, %r1, {distance}, 0x1f, -1;", "add.u32 %r1, %r1, %r2;"]
        lines.append("shfl.sync.idx.b32 %r1, %r1, %r1, 0, -1;" if distance == 99 else "")
    lines += ["mad.wide.u32 %rd1, %t5, 4, %out;", "st.global.u32 [%rd1], %r1;"]
    got = run("\n".join(lines), {"out": np.zeros(32, np.uint32)}).arrays["out"]
    assert (got == 32 * 33 // 2).all()


def test_shuffle_among_some_lanes() -> None:
    """Lanes 0-15 in one branch, 16-31 in the other, each with its own member mask."""
    body = """
        add.u32 %r1, %t5, 100;
        mov.u32 %r2, 0;
        setp.ge.u32 %p1, %t5, 16;
        @%p1 bra high;
        shfl.sync.down.b32 %r2, %r1, 1, 0x1f, 0xffff;
        bra.uni join;
        high:
        shfl.sync.up.b32 %r2, %r1, 2, 0x0, 0xffff0000;
        join:
        mad.wide.u32 %rd1, %t5, 4, %out;
        st.global.u32 [%rd1], %r2;
    """
    got = run(body, {"out": np.zeros(32, np.uint32)}).arrays["out"]
    assert got[:15].tolist() == [101 + k for k in range(15)]
    assert got[18:].tolist() == [100 + k for k in range(16, 30)]


@pytest.mark.parametrize("members", [FULL, 0x0000FFFF, 0xF0F0F0F0, 1 << 31])
def test_votes(members: int) -> None:
    """all, any, uni and ballot over the member lanes, for several predicates."""
    patterns = [0, FULL, 0xAAAAAAAA, members, FULL ^ members, 1, 0x80000000]
    named = LANE[(members >> LANE & 1) == 1]
    lines = [
        f"mov.u32 %r1, {members}; shr.u32 %r2, %r1, %t5; and.b32 %r2, %r2, 1;",
        "setp.eq.u32 %p1, %r2, 0;",
        f"mad.wide.u32 %rd1, %t5, {16 * len(patterns)}, %out;",
        "@%p1 bra skip;",
    ]
    for k, pattern in enumerate(patterns):
        lines += [
            f"mov.u32 %r3, {pattern}; shr.u32 %r3, %r3, %t5; and.b32 %r3, %r3, 1;",
            "setp.ne.u32 %p2, %r3, 0;",
            f"vote.sync.all.pred %p3, %p2, {members};",
            f"vote.sync.any.pred %p4, %p2, {members};",
            f"vote.sync.uni.pred %p5, %p2, {members};",
            f"vote.sync.ballot.b32 %r7, %p2, {members};",
            f"vote.sync.any.pred %p6, !%p2, {members};",
            "selp.u32 %r4, 1, 0, %p3; selp.u32 %r5, 1, 0, %p4; selp.u32 %r6, 1, 0, %p5;",
            "selp.u32 %r8, 2, 0, %p6; or.b32 %r6, %r6, %r8;",
            f"st.global.v4.u32 [%rd1+{16 * k}], {{%r4, %r5, %r6, %r7}};",
        ]
    lines.append("skip:")
    out = np.full((32, len(patterns), 4), 99, np.uint32)
    got = run("\n".join(lines), {"out": out}).arrays["out"]
    for k, pattern in enumerate(patterns):
        votes = [pattern >> int(lane) & 1 for lane in named]
        uniform = len(set(votes)) == 1
        unanimous, some, none = all(votes), any(votes), not all(votes)
        ballot = pattern & members
        wanted = [int(unanimous), int(some), int(uniform) + 2 * int(none), ballot]
        assert (got[named, k] == wanted).all(), hex(pattern)
    assert (np.delete(got, named, 0) == 99).all()


@pytest.mark.parametrize("bits", [32, 64])
def test_match(bits: int) -> None:
    values = np.array([lane % 5 if lane < 20 else 7 for lane in range(32)], f"u{bits // 8}")
    values[31] = np.array(-1).astype(values.dtype)
    register = "r" if bits == 32 else "rd"
    body = f"""
        mad.wide.u32 %rd9, %t5, {bits // 8}, %src;
        ld.global.b{bits} %{register}1, [%rd9];
        match.any.sync.b{bits} %r2, %{register}1, 0xffffffff;
        match.all.sync.b{bits} %r3|%p1, %{register}1, 0xffffffff;
        and.b{bits} %{register}4, %{register}1, 0;
        match.all.sync.b{bits} %r5|%p2, %{register}4, -1;
        selp.u32 %r6, 1, 0, %p1; selp.u32 %r7, 2, 0, %p2; or.b32 %r8, %r6, %r7;
        mad.wide.u32 %rd8, %t5, 16, %out;
        st.global.v4.u32 [%rd8], {{%r2, %r3, %r5, %r8}};
    """
    got = run(body, {"src": values, "out": np.zeros((32, 4), np.uint32)}).arrays["out"]
    for lane in range(32):
        same = sum(1 << k for k in range(32) if values[k] == values[lane])
        assert got[lane].tolist() == [same, 0, FULL, 2]


REDUCTIONS: dict[str, tuple[str, Callable[[list[int]], int]]] = {
    "add.u32": ("u", lambda v: sum(v) & FULL),
    "add.s32": ("i", lambda v: sum(v) & FULL),
    "min.u32": ("u", min),
    "max.u32": ("u", max),
    "min.s32": ("i", lambda v: min(v) & FULL),
    "max.s32": ("i", lambda v: max(v) & FULL),
    "and.b32": ("u", lambda v: int(np.bitwise_and.reduce(np.array(v, np.uint32)))),
    "or.b32": ("u", lambda v: int(np.bitwise_or.reduce(np.array(v, np.uint32)))),
    "xor.b32": ("u", lambda v: int(np.bitwise_xor.reduce(np.array(v, np.uint32)))),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("members", [FULL, 0x00FF00F0])
def test_redux(name: str, members: int) -> None:
    kind, function = REDUCTIONS[name]
    generator = np.random.default_rng(len(name))
    values = generator.integers(0, 1 << 32, 32, np.uint32)
    values[5] = 0x80000000
    body = f"""
        mov.u32 %r1, {members}; shr.u32 %r2, %r1, %t5; and.b32 %r2, %r2, 1;
        setp.eq.u32 %p1, %r2, 0;
        @%p1 bra skip;
        mad.wide.u32 %rd1, %t5, 4, %src;
        ld.global.u32 %r3, [%rd1];
        redux.sync.{name} %r4, %r3, {members};
        mad.wide.u32 %rd2, %t5, 4, %out;
        st.global.u32 [%rd2], %r4;
        skip:
    """
    got = run(body, {"src": values, "out": np.zeros(32, np.uint32)}).arrays["out"]
    named = (members >> LANE & 1) == 1
    wanted = function(values[named].view(f"{kind}4").tolist())
    assert np.array_equal(got, np.where(named, wanted, 0))


def test_active_mask_in_divergent_code() -> None:
    body = """
        activemask.b32 %r1;
        rem.u32 %r3, %t5, 3;
        setp.eq.u32 %p1, %r3, 1;
        mov.u32 %r2, 0;
        @%p1 bra there;
        activemask.b32 %r2;
        bra.uni join;
        there:
        activemask.b32 %r2;
        join:
        activemask.b32 %r4;
        mad.wide.u32 %rd1, %t5, 16, %out;
        st.global.v4.u32 [%rd1], {%r1, %r2, %r4, %r3};
    """
    got = run(body, {"out": np.zeros((32, 4), np.uint32)}).arrays["out"]
    third = sum(1 << k for k in range(32) if k % 3 == 1)
    assert (got[:, 0] == FULL).all()
    assert np.array_equal(got[:, 1], np.where(LANE % 3 == 1, third, FULL ^ third))
    assert (got[:, 2] == FULL).all()


def test_active_mask_of_a_partial_warp() -> None:
    body = """
        activemask.b32 %r1;
        mad.wide.u32 %rd1, %t5, 4, %out;
        st.global.u32 [%rd1], %r1;
    """
    got = run(body, {"out": np.zeros(40, np.uint32)}, block=(40,)).arrays["out"]
    assert (got[:32] == FULL).all()
    assert (got[32:] == 0xFF).all()


def test_elect() -> None:
    """One lane of the members is the leader, and all of them know which."""
    body = """
        elect.sync %r1|%p1, 0xffffffff;
        selp.u32 %r2, 1, 0, %p1;
        setp.lt.u32 %p2, %t5, 8;
        mov.u32 %r3, 0; mov.u32 %r4, 0;
        @%p2 bra skip;
        elect.sync %r3|%p3, 0xffffff00;
        selp.u32 %r4, 1, 0, %p3;
        skip:
        mad.wide.u32 %rd1, %t5, 16, %out;
        st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4};
    """
    got = run(body, {"out": np.zeros((32, 4), np.uint32)}).arrays["out"]
    assert got[:, 1].sum() == 1
    assert (got[:, 0] == got[:, 1].argmax()).all()
    assert got[8:, 3].sum() == 1
    assert (got[8:, 2] == 8 + got[8:, 3].argmax()).all()


def test_warp_barrier_joins_lanes() -> None:
    body = """
        setp.lt.u32 %p1, %t5, 4;
        @!%p1 bra join;
        mov.u32 %r1, 5;
        join:
        bar.warp.sync 0xffffffff;
        shfl.sync.idx.b32 %r2, %t5, 3, 0x1f, -1;
        mad.wide.u32 %rd1, %t5, 4, %out;
        st.global.u32 [%rd1], %r2;
    """
    assert (run(body, {"out": np.zeros(32, np.uint32)}).arrays["out"] == 3).all()


def test_a_member_that_does_not_come_is_an_error() -> None:
    body = """
        setp.lt.u32 %p1, %t5, 7;
        @%p1 bra skip;
        shfl.sync.idx.b32 %r2, %t5, 3, 0x1f, -1;
        mov.u32 %r3, 1;
        bra skip;
        skip:
        st.global.u32 [%out], %t5;
    """
    with pytest.raises(LaunchError) as caught:
        run(body, {"out": np.zeros(32, np.uint32)})
    assert "thread (0, 0, 0) of block (0, 0, 0)" in str(caught.value)
    assert "PTX line 14" in str(caught.value)


def test_lanes_that_have_left_are_not_waited_for() -> None:
    body = """
        setp.lt.u32 %p1, %t5, 7;
        @%p1 ret;
        mov.u32 %r1, 1;
        vote.sync.ballot.b32 %r2, %p1, 0xffffff80;
        setp.ge.u32 %p2, %t5, 7;
        vote.sync.ballot.b32 %r3, %p2, -1;
        mad.wide.u32 %rd1, %t5, 4, %out;
        st.global.u32 [%rd1], %r3;
    """
    got = run(body, {"out": np.zeros(32, np.uint32)}).arrays["out"]
    assert (got[:7] == 0).all()
    assert (got[7:] == 0xFFFFFF80).all()
