"""FlashMLA's schedules: sizes, that all work is done once, and what makes them faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit.errors import ShapeError
from simkit.machine.gpus import gpu
from simkit.machine.occupancy import occupancy
from simkit.schedules import mla_sparse_decode
from simkit.schedules.engine import Simulation, simulate
from simkit.schedules.grid import Item, Launch, run_launch
from simkit.schedules.mla import HALF, Piece
from simkit.schedules.mla_combine import MlaCombine
from simkit.schedules.mla_decode import MlaDecode, MlaShape
from simkit.schedules.mla_sparse_decode import MlaSparseDecode, MlaSparseShape
from simkit.schedules.mla_sparse_prefill import MlaPrefillShape, MlaSparsePrefill, missing_part
from simkit.schedules.prediction import predict
from simkit.schedules.sm import sm_rates

H800 = gpu("h800")
# Powers of two, so that all amounts take whole ticks and sums are exact.
RATES = sm_rates(H800, H800.tensor_clock_hz) | {"l2": 32.0, "dsmem": 16.0, "hbm": 8.0}
BLOCK_FLOP = 2 * 64 * 64 * (576 + 512)
BLOCK_BYTES = 64 * 576 * 2


def dense(seesaw: bool) -> Launch:
    return MlaDecode(seesaw=seesaw).launches(H800, MlaShape(batch=1, kv_len=64))[0]


def sparse(crossover: bool) -> Launch:
    return MlaSparseDecode(crossover=crossover).launches(H800, MlaSparseShape(batch=1, topk=64))[0]


def prefill() -> Launch:
    return MlaSparsePrefill().launches(H800, MlaPrefillShape(q_len=1, topk=128, kv_len=4096))[0]


KERNELS: dict[str, Callable[[], Launch]] = {
    "seesaw": lambda: dense(True),
    "one for both": lambda: dense(False),
    "crossover": lambda: sparse(True),
    "no crossover": lambda: sparse(False),
    "prefill": prefill,
}
ANY_LENGTH = tuple(name for name in KERNELS if name != "prefill")


def one_sm(launch: Launch, *lengths: int, is_split: bool = False) -> Simulation:
    items = [Item(length, Piece(is_split)) for length in lengths]
    return simulate(RATES, lambda: launch.cta("CTA", items))


def count(simulation: Simulation, name: str) -> int:
    return sum(service.work.name == name for service in simulation.services)


@pytest.mark.parametrize(
    ("kernel", "threads", "shared_bytes"),
    [
        ("seesaw", 256, 230_808),
        ("crossover", 384, 230_584),
        ("no crossover", 384, 230_584),
        ("one for both", 256, 3 * 73_728 + 8192 + 1024),
        ("prefill", 384, 3 * 73_728 + 8192 + 128 + 256 + 512 + 512 + 80),
    ],
)
def test_a_cta_has_the_published_size_and_an_sm_to_itself(
    kernel: str, threads: int, shared_bytes: int
) -> None:
    launch = KERNELS[kernel]()
    assert (launch.threads, launch.shared_bytes) == (threads, shared_bytes)
    fits = occupancy(H800, launch.threads, launch.registers, launch.shared_bytes)
    assert fits.ctas_per_sm == 1


@pytest.mark.parametrize("kernel", ANY_LENGTH)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=4))
@settings(max_examples=12, deadline=None)
def test_every_block_is_multiplied_once(kernel: str, lengths: list[int]) -> None:
    found = one_sm(KERNELS[kernel](), *lengths)
    blocks = sum(lengths)
    assert count(found, "QK") == blocks * 576 // 16
    assert count(found, "PV") == blocks * 2 * 64 // 16
    assert found.work_done("tensor") == blocks * BLOCK_FLOP


@given(st.integers(1, 6))
@settings(max_examples=6, deadline=None)
def test_prefill_multiplies_every_pair_of_blocks_once(pairs: int) -> None:
    found = one_sm(prefill(), 2 * pairs)
    assert count(found, "QK") == 2 * pairs * 576 // 16
    assert found.work_done("tensor") == 2 * pairs * BLOCK_FLOP


def test_every_block_is_copied_once_and_o_leaves_once() -> None:
    o_bytes, q_bytes = 64 * 512 * 2, BLOCK_BYTES
    for kernel in ("seesaw", "one for both"):
        found = one_sm(KERNELS[kernel](), 5, 4)
        expected = 9 * BLOCK_BYTES + 2 * (q_bytes + o_bytes)
        assert found.work_done("l2") == expected
        split = one_sm(KERNELS[kernel](), 5, 4, is_split=True)
        more = split.work_done("l2") - found.work_done("l2")
        assert more == 2 * o_bytes  # fp32 instead of bf16


def test_crossover_halves_what_a_cta_dequantises_and_sends_the_rest() -> None:
    alone, pair = one_sm(sparse(False), 4), one_sm(sparse(True), 4)
    assert alone.work_done("widen") == 2 * pair.work_done("widen")
    assert alone.work_done("widen") == 4 * 64 * 512 * 2
    assert pair.work_done("dsmem") == 4 * BLOCK_BYTES / 2
    assert alone.work_done("dsmem") == 0


@given(st.lists(st.integers(0, 700), min_size=1, max_size=12), st.sampled_from((16, 64, 128)))
@settings(max_examples=30, deadline=None)
def test_the_deal_has_every_block_of_the_batch(lengths: list[int], heads: int) -> None:
    shape = MlaShape(batch=len(lengths), kv_len=700, heads=heads, lengths=tuple(lengths))
    blocks = sum(-(-keys // 64) for keys in lengths) * -(-heads // 64)
    for naive in (False, True):
        kernel = MlaDecode(naive=naive).launches(H800, shape)[0]
        assert sum(item.length for item in kernel.items) == blocks
    assert kernel.workers is None


def test_the_grid_does_all_the_work() -> None:
    shape = MlaShape(batch=70, kv_len=64 * 18)
    run = run_launch(H800, MlaDecode().launches(H800, shape)[0], clock_hz=1.6e9)
    done = run.busy["tensor"] * run.rates["tensor"]
    assert done == 70 * 18 * 2 * BLOCK_FLOP
    assert run.launch.flop == 70 * 18 * 2 * BLOCK_FLOP  # no padding at 128 heads


def test_parts_never_take_more_sms_than_there_are() -> None:
    for heads, q_len in ((128, 1), (128, 4), (128, 80), (16, 1)):
        shape = MlaShape(batch=9, kv_len=4096, heads=heads, q_len=q_len)
        kernel = MlaDecode().launches(H800, shape)[0]
        assert kernel.workers is not None
        assert max(kernel.workers) < H800.sm_count
        assert len(kernel.workers) == len(kernel.items)


def test_the_combine_kernel_follows_where_a_request_is_split() -> None:
    one = MlaDecode().launches(H800, MlaShape(batch=1, kv_len=32_768))
    assert [launch.name for launch in one] == ["mla_decode", "mla_combine"]
    # 32 parts of four requests each: none is split.
    many = MlaSparseDecode().launches(H800, MlaSparseShape(batch=128, topk=2048, q_len=2))
    assert [launch.name for launch in many] == ["mla_sparse_decode"]
    assert len(set(many[0].workers or ())) == 32 * 4
    # A part takes ceil((512 + 5) / 66) = 8 blocks of the 512; a CTA merges 8 of the 128 heads.
    assert Counter(item.length for item in one[1].items) == {64: 16}


def test_dependent_launch_saves_time() -> None:
    shape = MlaShape(batch=1, kv_len=32_768)
    plain = predict(H800, MlaDecode(dependent=False).launches(H800, shape))
    dependent = predict(H800, MlaDecode().launches(H800, shape))
    assert dependent.seconds < plain.seconds


def test_the_combine_kernel_leaves_unsplit_requests_alone() -> None:
    some = MlaCombine().launches(H800, [2] + [1] * 100, heads=128, q_len=1)[0]
    states = simulate(RATES, lambda: some.cta("CTA", some.items)).work_done("fma")
    weights = 5 * 256  # of the sum over a warp
    assert states == 16 * (2 * 8 * 512 + weights)
    every = MlaCombine().launches(H800, [2] * 101, heads=128, q_len=1)[0]
    assert run_launch(H800, some).cycles < run_launch(H800, every).cycles
    assert MlaCombine().launches(H800, [1] * 100, heads=128, q_len=1) == ()


def test_the_tile_scheduler_pays_on_skewed_batches() -> None:
    skewed = MlaShape(batch=33, kv_len=512, lengths=(32_768,) + (512,) * 32)
    dealt = predict(H800, MlaDecode().launches(H800, skewed))
    naive = predict(H800, MlaDecode(naive=True).launches(H800, skewed))
    assert naive.seconds > 4 * dealt.seconds


@pytest.mark.parametrize("kv_len", [4096, 32_768])
def test_seesaw_is_faster_where_computing_decides(kv_len: int) -> None:
    shape = MlaShape(batch=128, kv_len=kv_len, q_len=2)
    new = predict(H800, MlaDecode().launches(H800, shape))
    old = predict(H800, MlaDecode(seesaw=False).launches(H800, shape))
    assert new.flops > old.flops


def test_few_heads_are_bound_by_memory_and_many_are_not() -> None:
    few = predict(H800, MlaDecode().launches(H800, MlaShape(batch=128, kv_len=8192, heads=16)))
    many = predict(H800, MlaDecode().launches(H800, MlaShape(batch=128, kv_len=8192, q_len=2)))
    assert "hbm" in few.bound
    assert "hbm" not in many.bound
    assert few.hbm_bytes_per_s > many.hbm_bytes_per_s


def test_crossover_and_a_longer_topk_make_sparse_decode_faster() -> None:
    def flops(crossover: bool, topk: int) -> float:
        shape = MlaSparseShape(batch=128, topk=topk, q_len=2)
        return predict(H800, MlaSparseDecode(crossover=crossover).launches(H800, shape)).flops

    short, long, alone = flops(True, 2048), flops(True, 32_768), flops(False, 2048)
    assert alone < short < long


def test_sharing_tokens_needs_two_halves_of_heads() -> None:
    """With 64 heads there is no peer, whatever is asked for."""
    shape = MlaSparseShape(batch=8, topk=128, heads=64)
    launch = MlaSparseDecode(crossover=True).launches(H800, shape)[0]
    assert launch.cluster == 1
    assert one_sm(launch, 2).work_done("dsmem") == 0


def test_slower_instructions_matter_where_a_cta_dequantises_alone() -> None:
    """Without crossover dequantising decides; with it, the conversions hardly do."""

    def loss(crossover: bool) -> float:
        launch = sparse(crossover)
        slow = dict(RATES) | {"widen": RATES["widen"] / 2, "xu": RATES["xu"] / 2}
        items = [Item(16, Piece(False))]
        times = [simulate(r, lambda: launch.cta("CTA", items)).makespan for r in (RATES, slow)]
        return times[1] / times[0]

    assert loss(False) > loss(True) > 1


def test_gathered_tokens_come_from_hbm_as_far_as_l2_is_too_small() -> None:
    fits = MlaPrefillShape(q_len=4096, topk=2048, kv_len=8192)
    huge = replace(fits, kv_len=131_072)
    once = 8192 / (4096 * 2 * 2048)
    assert missing_part(H800, fits) == pytest.approx(once, rel=1e-12)
    kept = H800.l2_bytes / (131_072 * 576 * 2)
    assert missing_part(H800, huge) == pytest.approx((1 - kept) / 2, rel=1e-12)
    # One query: every token from HBM, once for both halves of the heads.
    assert missing_part(H800, replace(fits, q_len=1, kv_len=2048)) == 0.5


def test_tokens_that_no_query_attends_stay_where_they_are() -> None:
    """Two queries of 128 tokens each, of a million: 256 have to move, to two CTAs each."""
    few = MlaPrefillShape(q_len=2, topk=128, kv_len=10**6)
    assert few.hbm_bytes == 256 * 1152 + 2 * 128 * 1088 * 2
    (kernel,) = MlaSparsePrefill().launches(H800, few)
    run = run_launch(H800, kernel)
    assert missing_part(H800, few) == 0.5
    indices = 2 * 2 * 128 * 4
    moved = run.busy["hbm"] * run.rates["hbm"]
    assert moved == pytest.approx(few.hbm_bytes + indices, rel=1e-6)


@pytest.mark.parametrize("heads", [1, 16, 17])
@pytest.mark.parametrize("seesaw", [True, False])
def test_rows_that_are_not_there_are_neither_loaded_nor_stored(heads: int, seesaw: bool) -> None:
    shape = MlaShape(batch=3, kv_len=128, heads=heads)
    kernel = MlaDecode(seesaw=seesaw, naive=True).launches(H800, shape)[0]
    run = run_launch(H800, kernel)
    assert run.busy["hbm"] * run.rates["hbm"] == pytest.approx(shape.hbm_bytes, rel=1e-6)


def test_named_sizes() -> None:
    assert mla_sparse_decode.SHARED_BYTES == 230_584
    assert HALF == 256
    assert MlaShape(batch=2, kv_len=100, q_len=3).flop == 2 * 128 * 3 * 200 * 1088
    assert MlaSparseShape(batch=128, topk=2048, q_len=2).flop == 2 * 128 * 2 * 128 * 2048 * 1088
    assert MlaShape(batch=1, kv_len=10, heads=16).hbm_bytes == 10 * 1152 + 16 * 1088 * 2


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: MlaShape(batch=0, kv_len=1), "batch must be at least 1, got 0"),
        (lambda: MlaShape(batch=2, kv_len=1, lengths=(1,)), r"lengths must be 2 from 0 on"),
        (lambda: MlaShape(batch=1, kv_len=1, heads=0), "heads must be 1 to 1024"),
        (lambda: MlaSparseShape(batch=1, topk=100), "topk must be a multiple of 64, got 100"),
        (lambda: MlaSparseShape(batch=1, topk=64, heads=96), "heads must be 1 to 128 in steps"),
        (lambda: MlaPrefillShape(q_len=1, topk=64, kv_len=1), "topk must be a multiple of 128"),
        (lambda: MlaCombine().launches(H800, [161], heads=8, q_len=1), "1 to 160 splits"),
    ],
)
def test_sizes_that_the_kernels_lack(make: Callable[[], object], told: str) -> None:
    with pytest.raises(ShapeError, match=told):
        make()
