"""mbarrier objects: counts, transactions, phases, states, what is undefined, arrivals of copies."""

from __future__ import annotations

import numpy as np
import pytest
from hopper_kernels import CUDA, PTX_HEADER, SCHEDULES, executor
from hypothesis import given
from hypothesis import strategies as st

from gpu.device import Device
from gpu.ptx import mbarrier
from gpu.ptx.schedule import Schedule
from simkit.errors import LaunchError, PtxError

# One thread runs `body` on the barriers bar[0..3] and writes what it finds with NOTE.
ONE = (
    CUDA
    + r"""
#define TEST(b, p) test_wait(b, p)
__device__ __forceinline__ u64 arrive_state(u64* b, u32 n) {
    u64 s; asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], %2;"
                        : "=l"(s) : "r"(sa(b)), "r"(n) : "memory"); return s;
}
__device__ __forceinline__ u64 arrive_early(u64* b, u32 n) {
    u64 s; asm volatile("mbarrier.arrive.noComplete.release.cta.shared::cta.b64 %0, [%1], %2;"
                        : "=l"(s) : "r"(sa(b)), "r"(n) : "memory"); return s;
}
__device__ __forceinline__ u64 drop(u64* b) {
    u64 s; asm volatile("mbarrier.arrive_drop.shared.b64 %0, [%1];"
                        : "=l"(s) : "r"(sa(b)) : "memory"); return s;
}
__device__ __forceinline__ u32 pending(u64 s) {
    u32 n; asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(n) : "l"(s)); return n;
}
__device__ __forceinline__ void expect_only(u64* b, u32 n) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
                 ::"r"(sa(b)), "r"(n) : "memory");
}
__device__ __forceinline__ void complete(u64* b, u32 n) {
    asm volatile("mbarrier.complete_tx.relaxed.cluster.shared::cta.b64 [%0], %1;"
                 ::"r"(sa(b)), "r"(n) : "memory");
}
__device__ __forceinline__ void inval(u64* b) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(sa(b)) : "memory");
}
__device__ __forceinline__ bool test_state(u64* b, u64 s) {
    u32 done;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.acquire.cta.shared::cta.b64 p, [%1], %2;"
                 " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(sa(b)), "l"(s) : "memory");
    return done;
}
__device__ __forceinline__ bool try_state(u64* b, u64 s) {
    u32 done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.shared::cta.b64 p, [%1], %2, 100;"
                 " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(sa(b)), "l"(s) : "memory");
    return done;
}
#define NOTE(x) *out++ = (u32)(x)
extern "C" __global__ void one(u32* out) {
    __shared__ __align__(8) u64 bar[4];
    BODY
}
"""
)


def run(device: Device, body: str, count: int = 16, block: int = 1) -> list[int]:
    out = device.array(np.full(count, 0xEEEE, np.uint32))
    body = " ".join(body.split())
    module = device.compile(ONE, options=(f"-DBODY={body}",), arch="sm_90a")
    module.kernel("one").launch((1,), (block,), [out])
    found = out.to_numpy().tolist()
    return found[: found.index(0xEEEE)] if 0xEEEE in found else found


def test_arrivals_end_a_phase(hopper: Device) -> None:
    body = """
        init(bar, 3);
        NOTE(TEST(bar, 0)); NOTE(TEST(bar, 1));
        arrive(bar); NOTE(TEST(bar, 0)); arrive(bar); NOTE(TEST(bar, 0));
        arrive(bar); NOTE(TEST(bar, 0)); NOTE(TEST(bar, 1));
        arrive_state(bar, 3); NOTE(TEST(bar, 1)); NOTE(TEST(bar, 0));
    """
    # The phase before the first one counts as complete, as parity 1.
    assert run(hopper, body) == [0, 1, 0, 0, 1, 0, 1, 0]


def test_transactions_end_a_phase(hopper: Device) -> None:
    body = """
        init(bar, 1);
        expect(bar, 48); NOTE(TEST(bar, 0)); complete(bar, 32); NOTE(TEST(bar, 0));
        complete(bar, 16); NOTE(TEST(bar, 0));
        complete(bar, 16); NOTE(TEST(bar, 1)); expect(bar, 16); NOTE(TEST(bar, 1));
        expect_only(bar, 5); arrive(bar); NOTE(TEST(bar, 0)); complete(bar, 5); NOTE(TEST(bar, 0));
    """
    # Bytes may be completed before they are expected.
    assert run(hopper, body) == [0, 0, 1, 0, 1, 0, 1]


def test_states_stand_for_phases(hopper: Device) -> None:
    body = """
        init(bar, 4);
        u64 a = arrive_early(bar, 1); NOTE(pending(a));
        u64 b = arrive_early(bar, 2); NOTE(pending(b)); NOTE(test_state(bar, b));
        u64 c = arrive_state(bar, 1); NOTE(test_state(bar, a)); NOTE(test_state(bar, c));
        u64 d = arrive_state(bar, 1); NOTE(test_state(bar, d)); NOTE(try_state(bar, c));
        arrive_state(bar, 3); while (!try_state(bar, d)) {} NOTE(test_state(bar, d));
    """
    assert run(hopper, body) == [4, 3, 0, 1, 1, 0, 1, 1]


def test_dropped_arrivals_are_missed_no_more(hopper: Device) -> None:
    body = """
        init(bar, 3);
        drop(bar); arrive(bar); NOTE(TEST(bar, 0)); arrive(bar); NOTE(TEST(bar, 0));
        arrive(bar); NOTE(TEST(bar, 1)); arrive(bar); NOTE(TEST(bar, 1));
        asm volatile("mbarrier.arrive_drop.expect_tx.relaxed.cluster.shared::cta.b64 _, [%0], 8;"
                     ::"r"(sa(bar)) : "memory");
        arrive(bar); NOTE(TEST(bar, 0)); complete(bar, 8); NOTE(TEST(bar, 0));
        arrive(bar); NOTE(TEST(bar, 1));
    """
    assert run(hopper, body) == [0, 1, 0, 1, 0, 1, 1]


def test_the_lanes_of_a_warp_arrive_one_by_one(hopper: Device) -> None:
    body = """
        if (threadIdx.x == 0) init(bar, 96);
        __syncwarp();
        u64 s = arrive_early(bar, 2);
        out[threadIdx.x] = pending(s);
        __syncwarp();
        s = arrive_state(bar, 1);
        if (!test_state(bar, s)) out[0] = 1;
    """
    found = run(hopper, body, count=32, block=32)
    assert sorted(found) == [96 - 2 * k for k in range(32)][::-1]


def test_generic_addresses(hopper: Device) -> None:
    body = """
        asm volatile("mbarrier.init.b64 [%0], 1;" ::"l"(bar + 1) : "memory");
        asm volatile("mbarrier.expect_tx.b64 [%0], 32;" ::"l"(bar + 1) : "memory");
        asm volatile("mbarrier.arrive.release.cluster.b64 _, [%0];" ::"l"(bar + 1) : "memory");
        NOTE(TEST(bar + 1, 0));
        asm volatile("mbarrier.complete_tx.b64 [%0], 32;" ::"l"(bar + 1) : "memory");
        NOTE(TEST(bar + 1, 0));
        asm volatile("mbarrier.inval.b64 [%0];" ::"l"(bar + 1) : "memory");
        asm volatile("mbarrier.init.b64 [%0], 7;" ::"l"(bar + 1) : "memory");
        NOTE(TEST(bar + 1, 1));
    """
    assert run(hopper, body) == [0, 1, 1]


MANY_PHASES = (
    CUDA
    + r"""
// Warps pass a token around a ring of barriers, many times.
extern "C" __global__ void ring(u32* out, int rounds) {
    __shared__ __align__(8) u64 bar[4];
    __shared__ u32 token;
    int w = threadIdx.x / 32, n = blockDim.x / 32;
    if (threadIdx.x == 0) {
        token = 0;
        for (int i = 0; i < n; i++) init(bar + i, 32);
    }
    __syncthreads();
    if (w == n - 1) arrive(bar);
    for (int r = 0; r < rounds; r++) {
        wait(bar + w, r % 2);
        if (threadIdx.x % 32 == 0) token = token * 3 + w + 1;
        __syncwarp();
        arrive(bar + (w + 1) % n);
    }
    __syncthreads();
    if (threadIdx.x == 0) *out = token;
}
"""
)


def test_phases_alternate_for_long(hopper: Device) -> None:
    out = hopper.empty((1,), np.uint32)
    module = hopper.compile(MANY_PHASES, arch="sm_90a")
    module.kernel("ring").launch((1,), (128,), [out, 37])
    token = 0
    for _ in range(37):
        for w in range(4):
            token = (token * 3 + w + 1) % 2**32
    assert out.to_numpy()[0] == token


COPIES = (
    CUDA
    + r"""
extern "C" __global__ void copies(const u32* x, u32* out) {
    __shared__ __align__(16) u32 cell[2][64];
    __shared__ __align__(8) u64 bar;
    int t = threadIdx.x;
    if (t == 0) init(&bar, COUNT);
    __syncthreads();
    for (int r = 0; r < 2; r++) {
        for (int k = 0; k < 2; k++) {
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                         ::"r"(sa(&cell[k][t])), "l"(x + 128 * r + 64 * k + t) : "memory");
#ifdef NOINC
            asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];"
                         ::"r"(sa(&bar)) : "memory");
#else
            asm volatile("cp.async.mbarrier.arrive.b64 [%0];" ::"l"(&bar) : "memory");
#endif
        }
#ifndef NOINC
        arrive(&bar);
#endif
#ifndef BROKEN
        wait(&bar, r);
#endif
        out[128 * r + t] = cell[0][63 - t];
        out[128 * r + 64 + t] = cell[1][63 - t];
        __syncthreads();
    }
}

// A copy that a wait has finished is not done again when its arrival comes.
extern "C" __global__ void once(const u32* x, u32* out) {
    __shared__ __align__(16) u32 cell[64];
    __shared__ __align__(8) u64 bar;
    int t = threadIdx.x;
    if (t == 0) init(&bar, 64);
    __syncthreads();
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                 ::"r"(sa(cell + t)), "l"(x + t) : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(sa(&bar)) : "memory");
    if (t < 32) asm volatile("cp.async.wait_all;" ::: "memory");
    if (t < 32) cell[t] = 5;
    wait(&bar, 0);
    out[t] = cell[t];
}
"""
)


@pytest.mark.parametrize("options", [("-DCOUNT=64",), ("-DCOUNT=128", "-DNOINC")])
def test_copies_arrive_when_they_have_landed(hopper: Device, options: tuple[str, ...]) -> None:
    x, out = np.arange(256, dtype=np.uint32), hopper.empty((256,), np.uint32)
    module = hopper.compile(COPIES, options=options, arch="sm_90a")
    module.kernel("copies").launch((1,), (64,), [hopper.array(x), out])
    assert np.array_equal(out.to_numpy().reshape(4, 64), x.reshape(4, 64)[:, ::-1])


def test_a_copy_lands_once(hopper: Device) -> None:
    x, out = np.arange(64, dtype=np.uint32) + 100, hopper.empty((64,), np.uint32)
    module = hopper.compile(COPIES, options=("-DCOUNT=64",), arch="sm_90a")
    module.kernel("once").launch((1,), (64,), [hopper.array(x), out])
    assert np.array_equal(out.to_numpy(), np.where(np.arange(64) < 32, 5, x))


def test_lazy_shows_copies_that_nobody_waits_for() -> None:
    device = executor(Schedule("lazy"))
    out = device.empty((256,), np.uint32)
    module = device.compile(COPIES, options=("-DCOUNT=64", "-DBROKEN"), arch="sm_90a")
    module.kernel("copies").launch((1,), (64,), [device.array(np.zeros(256, np.uint32)), out])
    assert out.to_numpy().max() == 0xFFFFFFFF


UNDEFINED = {
    "arrive(bar);": "is used \\(not initialised\\)",
    "test_wait(bar, 0);": "is used \\(not initialised\\)",
    "try_wait(bar, 0);": "is used \\(not initialised\\)",
    "expect_only(bar, 4);": "is used \\(not initialised\\)",
    "inval(bar);": "is used \\(not initialised\\)",
    "init(bar, 2); inval(bar); arrive(bar);": "is used \\(not initialised\\)",
    "bar[0] = 0; arrive(bar);": "is used \\(not initialised\\)",
    "init(bar, 2); arrive_state(bar, 3);": "more arrivals than the phase expects",
    "init(bar, 1); expect(bar, 8); arrive(bar);": "more arrivals than the phase expects",
    "init(bar, 1); drop(bar); arrive(bar);": "more arrivals than the phase expects",
    "init(bar, 1); drop(bar); drop(bar);": "drop more arrivals than it expects",
    "init(bar, 2); arrive_early(bar, 2);": "completes its phase although .noComplete",
    "init(bar, 0);": "an mbarrier for 0 arrivals; it can be for 1 to 1048575",
    "init(bar, 1 << 20);": "an mbarrier for 1048576 arrivals",
    "init(bar, 1); arrive_state(bar, 0);": "0 arrivals at an mbarrier; possible are 1 to 1048575",
    "init(bar, 1); expect(bar, 1 << 20);": "1048576 bytes at an mbarrier",
    "init(bar, 9); expect(bar, 1 << 19); expect(bar, 1 << 19);": "1048576 bytes, too many",
    "init((u64*)((char*)bar + 4), 1);": "not a multiple of 8",
    "init(bar + 40, 1);": "mbarrier of 8 bytes at shared address",
}


@pytest.mark.parametrize("body", UNDEFINED)
def test_undefined_uses_are_errors(body: str) -> None:
    for schedule in SCHEDULES[:3]:
        with pytest.raises(Exception, match=UNDEFINED[body]) as caught:
            run(executor(schedule), body)
        assert "PTX line" in str(caught.value)


def test_the_error_says_what_the_object_is_like() -> None:
    with pytest.raises(LaunchError) as caught:
        run(
            executor(),
            "init(bar, 3); init(bar + 1, 3); expect(bar + 1, 40); arrive_state(bar + 1, 7);",
        )
    assert (
        "mbarrier at shared offset 8 of block (0, 0, 0) gets more arrivals than the phase expects"
        " (phase parity 0, 2 of 3 arrivals and 40 bytes missing)" in str(caught.value)
    )


def test_remote_arrivals_have_no_result() -> None:
    text = (
        PTX_HEADER
        + """
.visible .entry k() { .reg .b64 %s; .shared .align 8 .b64 bar;
    mbarrier.arrive.shared::cluster.b64 %s, [bar]; ret; }
"""
    )
    with pytest.raises(PtxError, match="no result, only _"):
        executor().load(text).kernel("k").launch((1,), (32,), [])


# The object itself


@given(st.data())
def test_objects_follow_the_counting_rules(data: st.DataObject) -> None:
    """Single steps against the ISA's rules, written down with plain integers."""
    count = data.draw(st.integers(1, 5))
    word = mbarrier.initial(np.array([count]))
    pending, expected, bytes_left, phase = count, count, 0, 0
    for _ in range(data.draw(st.integers(1, 12))):
        arrivals = data.draw(st.integers(0, 2))
        tx = data.draw(st.sampled_from([0, 0, 16, -16, 48]))
        drops = arrivals if data.draw(st.booleans()) and arrivals < expected else 0
        if arrivals > pending:
            with pytest.raises(ValueError, match="more arrivals"):
                update(word, arrivals, tx, 0)
            return
        word, flipped = update(word, arrivals, tx, drops)
        pending, bytes_left, expected = pending - arrivals, bytes_left + tx, expected - drops
        is_over = pending == 0 and bytes_left == 0 and (arrivals > 0 or tx != 0)
        if is_over:
            phase, pending = 1 - phase, expected
        assert bool(flipped[0]) == is_over
        assert [int(v[0]) for v in mbarrier.unpack(word)] == [pending, expected, bytes_left, phase]


def update(word: np.ndarray, arrivals: int, tx: int, drops: int) -> tuple[np.ndarray, np.ndarray]:
    def fail(index: int, why: str) -> None:
        raise ValueError(why)

    return mbarrier.update(word, *(np.array([v], np.int64) for v in (arrivals, tx, drops)), fail)
