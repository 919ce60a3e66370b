"""Compiled CUDA: divergence, loops, functions, shared memory, barriers, printf, assert, trap."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from lanes import device

from gpu.ptx.executor import PtxModule
from gpu.ptx.launch import Options
from gpu.ptx.schedule import Schedule
from simkit.errors import PtxError, TrapError

SCHEDULES = [Schedule("eager"), Schedule("lazy"), Schedule("random", 3), Schedule("random", 4)]

SOURCE = r"""
extern "C" __global__ void nested(const int* x, int* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, v = x[i], r;
    if (v & 1) {
        if (v & 2) { r = v * 3; if (v & 4) r -= 100; else r += 7; }
        else r = -v;
    } else if (v % 3 == 0) { r = v / 3; }
    else { r = v & 8 ? 1000 + v : 2000 - v; if (v > 50) r ^= 0x55; }
    out[i] = r;
}

extern "C" __global__ void collatz(const int* x, int* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned v = x[i]; int steps = 0;
    while (v != 1) { v = v & 1 ? 3 * v + 1 : v / 2; ++steps; }
    out[i] = steps;
}

extern "C" __global__ void jumps(const int* x, int* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, n = x[i], sum = 0;
    if (n < 0) { out[i] = -1; return; }
    for (int a = 0; a < n; ++a) {
        if (a % 5 == 3) continue;
        for (int b = 0; ; ++b) {
            if (b > a) break;
            if ((a * b) % 7 == 6) { sum += 100; break; }
            sum += a ^ b;
        }
        if (sum > 5000) break;
    }
    out[i] = sum;
}

extern "C" __global__ void cases(const int* x, int* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, v = x[i], r = 0;
    switch (v) {
        case 0: r = 11; break;
        case 1: r = 22;  // falls through
        case 2: r += 33; break;
        case 3: r = v * v; break;
        case 4: r = 7 - i; break;
        case 5: for (int k = 0; k < i % 7; ++k) r += k; break;
        case 6: r = 1 << (i & 7); break;
        case 7: r = ~v; break;
        case 9: r = 99; break;
        default: r = -v;
    }
    out[i] = r;
}

struct Pair { int a; double b; short c[3]; };
__device__ __noinline__ Pair combine(Pair p, Pair q, int k) {
    Pair r; r.a = p.a + q.a * k; r.b = p.b - q.b;
    for (int n = 0; n < 3; ++n) r.c[n] = p.c[n] * q.c[2 - n];
    return r;
}
__device__ __noinline__ int twice(int v) { return 2 * v + 1; }
__device__ __noinline__ int deeper(int v, int w) {
    if (v > w) return twice(v) - w;
    return twice(twice(w)) + v;
}
__device__ __noinline__ void fill(int* p, int n, int seed) {
    for (int k = 0; k < n; ++k) p[k] = seed * k;
}
__device__ __noinline__ signed char narrow(unsigned char u, bool flip) {
    return flip ? (signed char)-u : (signed char)u;
}
extern "C" __global__ void functions(const int* x, double* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, v = x[i];
    Pair p = {v, v * 0.5, {(short)v, 2, 3}}, q = {i, 1.25, {4, (short)-v, 6}};
    Pair r = combine(p, q, 3);
    if (v % 2) r = combine(r, p, -1);
    int buffer[12];
    fill(buffer, 12, v);
    int d = deeper(v, i) + (i % 3 == 0 ? deeper(i, v) : 0);
    out[4 * i] = r.a + r.b; out[4 * i + 1] = r.c[0] + 10.0 * r.c[1] + 100.0 * r.c[2];
    out[4 * i + 2] = buffer[(v & 0x7fffffff) % 12] + d; out[4 * i + 3] = narrow(v, i & 1);
}

__device__ __noinline__ int fibonacci(int n) {
    return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2);
}
extern "C" __global__ void recursive(int* out) { out[0] = fibonacci(out[0]); }

extern "C" __global__ void local_sort(const int* x, int* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, a[8];
    for (int k = 0; k < 8; ++k) a[k] = x[8 * i + k];
    for (int k = 1; k < 8; ++k)
        for (int m = k; m > 0 && a[m - 1] > a[m]; --m) {
            int t = a[m]; a[m] = a[m - 1]; a[m - 1] = t;
        }
    for (int k = 0; k < 8; ++k) out[8 * i + k] = a[k];
}

extern __shared__ int dynamic[];
extern "C" __global__ void reverse(const int* x, int* out, int n) {
    __shared__ int fixed[4];
    int t = threadIdx.x;
    for (int k = t; k < n; k += blockDim.x) dynamic[k] = x[blockIdx.x * n + k];
    if (t < 4) fixed[t] = t * t + blockIdx.x;
    __syncthreads();
    for (int k = t; k < n; k += blockDim.x)
        out[blockIdx.x * n + k] = dynamic[n - 1 - k] + fixed[k & 3];
}

extern "C" __global__ void block_sum(const int* x, int* out, int n) {
    __shared__ int part[1024];
    int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    int threads = blockDim.x * blockDim.y * blockDim.z;
    int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z), sum = 0;
    for (int k = t; k < n; k += threads) sum += x[block * n + k];
    part[t] = sum;
    for (int half = 512; half; half /= 2) {
        __syncthreads();
        if (t < half && t + half < threads) part[t] += part[t + half];
    }
    if (t == 0) out[block] = part[0];
}

// Warps 0-1 produce, warps 2-3 consume, over a ring of two slots and named barriers.
extern "C" __global__ void produce_and_consume(const int* x, int* out, int rounds) {
    __shared__ int slot[2][64];
    int t = threadIdx.x;
    if (t < 64) {
        for (int k = 0; k < rounds; ++k) {
            if (k >= 2) asm volatile("bar.sync %0, 128;" :: "r"(3 + k % 2) : "memory");
            slot[k % 2][t] = x[64 * k + t] * 2;
            asm volatile("bar.arrive %0, 128;" :: "r"(1 + k % 2) : "memory");
        }
    } else {
        int u = t - 64, sum = 0;
        for (int k = 0; k < rounds; ++k) {
            asm volatile("bar.sync %0, 128;" :: "r"(1 + k % 2) : "memory");
            sum = sum * 3 + slot[k % 2][63 - u];
            if (k + 2 < rounds) asm volatile("bar.arrive %0, 128;" :: "r"(3 + k % 2) : "memory");
        }
        out[u] = sum;
    }
}

// Two pairs of warps, each with a barrier of its own that the other never touches.
extern "C" __global__ void pairs_of_warps(const int* x, int* out) {
    __shared__ int cell[128];
    int t = threadIdx.x, pair = t / 64;
    for (int k = 0; k < 3 + 4 * pair; ++k) {
        cell[t] = x[t] + k;
        asm volatile("bar.sync %0, 64;" :: "r"(pair + 1) : "memory");
        int other = cell[t ^ 63];
        asm volatile("barrier.sync %0, 64;" :: "r"(pair + 1) : "memory");
        out[t] = other;
    }
}

extern "C" __global__ void votes_of_blocks(const int* x, int* out) {
    int t = threadIdx.x, v = x[blockIdx.x * blockDim.x + t];
    int count = __syncthreads_count(v > 10);
    int all = __syncthreads_and(v > -100), any = __syncthreads_or(v == 55);
    out[3 * (blockIdx.x * blockDim.x + t)] = count;
    out[3 * (blockIdx.x * blockDim.x + t) + 1] = all;
    out[3 * (blockIdx.x * blockDim.x + t) + 2] = any;
}

extern "C" __global__ void relay_between_warps(int* out) {
    __shared__ volatile int turn;
    if (threadIdx.x == 0) turn = 0;
    __syncthreads();
    int warp = threadIdx.x / 32;
    while (turn != warp) { }
    if (threadIdx.x % 32 == 0) {
        out[warp] = turn * 10 + 5;
        __threadfence_block();
        turn = warp + 1;
    }
}

// Block k waits for block k + 1: the last one starts the relay.
extern "C" __global__ void relay_between_blocks(volatile int* flags, int* out) {
    int block = blockIdx.x;
    if (threadIdx.x == 0) {
        if (block + 1 < gridDim.x) while (flags[block + 1] == 0) { }
        __threadfence();
        out[block] = block + 1 < gridDim.x ? out[block + 1] + 1 : 100;
        __threadfence();
        flags[block] = 1;
    }
}

// Lane 0 of each block spins for its turn while the other lanes wait at a barrier.
extern "C" __global__ void blocks_in_turn(unsigned* turn, int* out) {
    if (threadIdx.x == 0) {
        while (*(volatile unsigned*)turn != blockIdx.x) { }
        __threadfence();
    }
    __syncthreads();
    out[threadIdx.x] = 2 * out[threadIdx.x] + blockIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        *(volatile unsigned*)turn = blockIdx.x + 1;
    }
}

extern "C" __global__ void last_block_sums(const int* x, int* partial, unsigned* ticket, int* out) {
    __shared__ bool is_last;
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = x[blockIdx.x] * 3;
        __threadfence();
        is_last = atomicAdd(ticket, 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (is_last && threadIdx.x == 0) {
        int sum = 0;
        for (int k = 0; k < gridDim.x; ++k) sum += partial[k];
        *out = sum;
    }
}
"""


@cache
def module() -> PtxModule:
    return device().compile(SOURCE, arch="sm_90")


def launch(name: str, arrays: list, *, grid: tuple = (1,), block: tuple = (64,), shared: int = 0,
           schedule: Schedule | None = None) -> list[np.ndarray]:  # fmt: skip
    """The arrays after the kernel has run; ints are passed by value."""
    dev = device().with_options(Options(schedule=schedule or Schedule(), budget=400_000))
    loaded = PtxModule(dev, module().ptx) if schedule else module()
    held = [device().array(a) if isinstance(a, np.ndarray) else a for a in arrays]
    loaded.kernel(name).launch(grid, block, held, shared_bytes=shared)
    return [a.to_numpy() for a in held if not isinstance(a, int)]


def truncated(a: int, b: int) -> int:
    return abs(a) // b * (1 if a >= 0 else -1)


def nested(v: int) -> int:
    if v & 1:
        if v & 2:
            return v * 3 - 100 if v & 4 else v * 3 + 7
        return -v
    if v % 3 == 0:
        return truncated(v, 3)
    r = 1000 + v if v & 8 else 2000 - v
    return r ^ 0x55 if v > 50 else r


def collatz(v: int) -> int:
    steps = 0
    while v != 1:
        v = 3 * v + 1 if v & 1 else v // 2
        steps += 1
    return steps


def jumps(n: int) -> int:
    if n < 0:
        return -1
    total = 0
    for a in range(n):
        if a % 5 == 3:
            continue
        for b in range(a + 1):
            if a * b % 7 == 6:
                total += 100
                break
            total += a ^ b
        if total > 5000:
            break
    return total


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    ("name", "function", "low", "high"),
    [("nested", nested, -100, 100), ("collatz", collatz, 1, 200), ("jumps", jumps, -5, 60)],
)
def test_divergent_control_flow(name, function, low, high, schedule) -> None:  # type: ignore[no-untyped-def]
    x = np.random.default_rng(2).integers(low, high, 3 * 96, np.int32)
    _, out = launch(name, [x, np.zeros_like(x)], grid=(3,), block=(96,), schedule=schedule)
    assert out.tolist() == [function(v) for v in x.tolist()]


def test_divergence_of_whole_warps() -> None:
    """Each warp uniform, all warps different: nothing is masked, and all meet again."""
    x = np.repeat(np.arange(1, 9, dtype=np.int32) * 13, 32)
    _, out = launch("collatz", [x, np.zeros_like(x)], block=(256,))
    assert out.tolist() == [collatz(v) for v in x.tolist()]


def test_switch() -> None:
    def case(v: int, i: int) -> int:
        table = {
            0: 11, 1: 55, 2: 33, 3: v * v, 4: 7 - i, 5: sum(range(i % 7)), 6: 1 << (i & 7),
            7: ~v, 9: 99,
        }  # fmt: skip
        return table.get(v, -v)

    x = np.random.default_rng(1).integers(-2, 12, 128, np.int32)
    _, out = launch("cases", [x, np.zeros_like(x)], block=(128,))
    assert out.tolist() == [case(v, i) for i, v in enumerate(x.tolist())]
    x = np.repeat(np.array([3, 9, 5, 0], np.int32), 32)
    _, out = launch("cases", [x, np.zeros_like(x)], block=(128,))
    assert out.tolist() == [case(v, i) for i, v in enumerate(x.tolist())]


def test_functions_with_structs_and_several_call_sites() -> None:
    x = np.random.default_rng(9).integers(-90, 90, 64, np.int32)
    _, out = launch("functions", [x, np.zeros(256)])

    def combine(p, q, k):  # type: ignore[no-untyped-def]
        shorts = [p[2][n] * q[2][2 - n] for n in range(3)]
        wrapped = [(s + 2**15) % 2**16 - 2**15 for s in shorts]
        return p[0] + q[0] * k, p[1] - q[1], wrapped

    def twice(v: int) -> int:
        return 2 * v + 1

    def deeper(v: int, w: int) -> int:
        return twice(v) - w if v > w else twice(twice(w)) + v

    for i, v in enumerate(x.tolist()):
        p, q = (v, v * 0.5, [v, 2, 3]), (i, 1.25, [4, -v, 6])
        r = combine(p, q, 3)
        if v % 2:
            r = combine(r, p, -1)
        d = deeper(v, i) + (deeper(i, v) if i % 3 == 0 else 0)
        byte = v & 0xFF
        signed = (-byte if i & 1 else byte) & 0xFF
        wanted = [
            r[0] + r[1],
            r[2][0] + 10 * r[2][1] + 100 * r[2][2],
            v * ((v & 0x7FFFFFFF) % 12) + d,
            signed - 256 if signed > 127 else signed,
        ]
        assert out[4 * i : 4 * i + 4].tolist() == wanted, i


def test_recursion_is_refused() -> None:
    with pytest.raises(PtxError, match=r"PTX line \d+: recursive call of .*fibonacci"):
        launch("recursive", [np.array([5], np.int32)], block=(1,))


def test_guarded_calls() -> None:
    """A predicated call runs for some lanes only."""
    ptx = """.version 8.5
.target sm_90
.address_size 64
.func (.param .b32 result) bump(.param .b32 value) {
    .reg .b32 %r<3>; .reg .pred %p;
    ld.param.u32 %r1, [value];
    setp.gt.u32 %p, %r1, 20;
    @%p bra big;
    add.u32 %r2, %r1, 100;
    st.param.b32 [result], %r2;
    ret;
big:
    mul.lo.u32 %r2, %r1, 3;
    st.param.b32 [result], %r2;
    ret;
}
.visible .entry k(.param .u64 out) {
    .reg .b32 %r<5>; .reg .b64 %rd<3>; .reg .pred %p;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, 7;
    and.b32 %r3, %r1, 1;
    setp.ne.u32 %p, %r3, 0;
    {
        .param .b32 in; .param .b32 back;
        st.param.b32 [in], %r1;
        @%p call.uni (back), bump, (in);
        @%p ld.param.b32 %r2, [back];
    }
    mad.wide.u32 %rd2, %r1, 4, %rd1;
    st.global.u32 [%rd2], %r2;
    ret;
}"""
    out = device().array(np.zeros(32, np.uint32))
    device().load(ptx).kernel("k").launch((1,), (32,), [out])
    lane = np.arange(32)
    called = np.where(lane > 20, lane * 3, lane + 100)
    assert np.array_equal(out.to_numpy(), np.where(lane % 2, called, 7))


def test_local_arrays() -> None:
    x = np.random.default_rng(3).integers(-1000, 1000, (96, 8), np.int32)
    _, out = launch("local_sort", [x, np.zeros_like(x)], block=(96,))
    assert np.array_equal(out, np.sort(x, axis=1))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_static_and_dynamic_shared_memory(schedule: Schedule) -> None:
    n = 150
    x = np.random.default_rng(4).integers(0, 1000, (4, n), np.int32)
    _, out = launch("reverse", [x, np.zeros_like(x), n], grid=(4,), block=(70,), shared=4 * n,
                    schedule=schedule)  # fmt: skip
    extra = (np.arange(n) % 4) ** 2 + np.arange(4)[:, None]
    assert np.array_equal(out, x[:, ::-1] + extra)


BLOCKS = [(1,), (31,), (33,), (100,), (1000,), (5, 7), (3, 5, 7), (32, 2, 4)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks_of_odd_sizes(block: tuple[int, ...]) -> None:
    n = 333
    x = np.random.default_rng(5).integers(-99, 99, (12, n), np.int32)
    _, out = launch("block_sum", [x, np.zeros(12, np.int32), n], grid=(2, 3, 2), block=block)
    assert np.array_equal(out, x.sum(axis=1))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_trees_of_barriers(schedule: Schedule) -> None:
    x = np.random.default_rng(6).integers(-99, 99, (3, 500), np.int32)
    _, out = launch("block_sum", [x, np.zeros(3, np.int32), 500], grid=(3,), block=(200,),
                    schedule=schedule)  # fmt: skip
    assert np.array_equal(out, x.sum(axis=1))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_producers_and_consumers(schedule: Schedule) -> None:
    rounds = 9
    x = np.random.default_rng(7).integers(-9, 9, (rounds, 64), np.int32)
    _, out = launch("produce_and_consume", [x, np.zeros(64, np.int32), rounds], block=(128,),
                    schedule=schedule)  # fmt: skip
    total = np.zeros(64, np.int64)
    for k in range(rounds):
        total = total * 3 + 2 * x[k, ::-1]
    assert np.array_equal(out, total)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_barriers_of_some_warps(schedule: Schedule) -> None:
    x = np.arange(128, dtype=np.int32) * 10
    _, out = launch("pairs_of_warps", [x, np.zeros_like(x)], block=(128,), schedule=schedule)
    thread = np.arange(128)
    assert np.array_equal(out, (thread ^ 63) * 10 + np.where(thread < 64, 2, 6))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("threads", [40, 96])
def test_reducing_barriers(threads: int, schedule: Schedule) -> None:
    x = np.random.default_rng(8).integers(-50, 50, (5, threads), np.int32)
    x[2, 7], x[3, 9], x[4, 1] = 55, -100, 55
    _, out = launch("votes_of_blocks", [x, np.zeros((5, threads, 3), np.int32)], grid=(5,),
                    block=(threads,), schedule=schedule)  # fmt: skip
    for block in range(5):
        row = x[block]
        assert (out[block, :, 0] == (row > 10).sum()).all()
        assert ((out[block, :, 1] != 0) == (row > -100).all()).all()
        assert ((out[block, :, 2] != 0) == (row == 55).any()).all()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_spinning_warps(schedule: Schedule) -> None:
    (out,) = launch("relay_between_warps", [np.zeros(6, np.int32)], block=(192,), schedule=schedule)
    assert out.tolist() == [10 * k + 5 for k in range(6)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_blocks_that_take_turns(schedule: Schedule) -> None:
    """A block that has its turn goes on, whatever lanes of other blocks spin for in vain."""
    turn, out = np.zeros(1, np.uint32), np.zeros(64, np.int32)
    turn, out = launch("blocks_in_turn", [turn, out], grid=(6,), schedule=schedule)
    expected = 0
    for block in range(6):
        expected = 2 * expected + block
    assert (out == expected).all()
    assert turn[0] == 6


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_spinning_blocks(schedule: Schedule) -> None:
    arrays = [np.zeros(9, np.int32), np.zeros(9, np.int32)]
    _, out = launch("relay_between_blocks", arrays, grid=(9,), block=(32,), schedule=schedule)
    assert out.tolist() == [108 - k for k in range(9)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_last_block(schedule: Schedule) -> None:
    x = np.arange(20, dtype=np.int32)
    arrays = [x, np.zeros(20, np.int32), np.zeros(1, np.uint32), np.zeros(1, np.int32)]
    *_, out = launch("last_block_sums", arrays, grid=(20,), block=(64,), schedule=schedule)
    assert out[0] == 3 * x.sum()


MESSAGES = r"""
extern "C" __global__ void print(const float* x) {
    int i = threadIdx.x;
    if (i % 2 == 0)
        printf("%d: %5.2f|%-4u|%x|%s|%c|%lld|%%|%e\n", i, x[i], 7u, 255 + i, "text", 'A' + i,
               -(1ll << 40) - i, (double)x[i]);
    if (i == 3) printf("no arguments\n");
}
extern "C" __global__ void check(int limit) { assert(threadIdx.x < limit); }
extern "C" __global__ void stop(int where) { if (threadIdx.x == where) __trap(); }
"""


@cache
def messages() -> PtxModule:
    return device().compile(MESSAGES, arch="sm_90", options=("-lineinfo",), name="messages.cu")


def test_printf() -> None:
    x = np.array([1.5, 0, -2.25, 0], np.float32)
    report = messages().kernel("print").launch((1,), (4,), [device().array(x)])
    lines = sorted(report.output.splitlines())
    assert lines == sorted([
        "0:  1.50|7   |ff|text|A|-1099511627776|%|1.500000e+00",
        "2: -2.25|7   |101|text|C|-1099511627778|%|-2.250000e+00",
        "no arguments",
    ])  # fmt: skip


def test_assert() -> None:
    messages().kernel("check").launch((2,), (64,), [64])
    with pytest.raises(TrapError) as caught:
        messages().kernel("check").launch((2,), (64,), [40])
    message = str(caught.value)
    assert "threadIdx.x < limit" in message
    assert "messages.cu" in message
    assert "thread (40, 0, 0) of block (0, 0, 0)" in message


def test_trap() -> None:
    messages().kernel("stop").launch((1,), (64,), [64])
    with pytest.raises(TrapError) as caught:
        messages().kernel("stop").launch((1,), (64,), [33])
    assert "thread (33, 0, 0) of block (0, 0, 0)" in str(caught.value)
    assert "messages.cu" in str(caught.value)
