"""FlashInfer's decoding on pages: the plan's items as CTAs, page tables ahead, a merge."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkit.errors import ShapeError
from simkit.machine.gpus import gpu
from simkit.schedules.engine import simulate
from simkit.schedules.grid import Item, run_launch
from simkit.schedules.key_loop import KeyLoop
from simkit.schedules.paged_decode import PagedDecode
from simkit.schedules.parameters import PDL_GAIN
from simkit.schedules.prediction import predict
from simkit.schedules.shape import AttentionShape
from simkit.schedules.sm import sm_rates

A100, H100 = gpu("a100"), gpu("h100")
LLAMA = AttentionShape(batch=4, heads=32, q_len=1, kv_len=8192, d=128, kv_heads=8)
LENGTHS = tuple(16 * pages for pages in (64, 128, 256, 512))
EXACT = 1e-6  # durations are rounded up to 2^-20 of a cycle


def test_the_planners_golden_values() -> None:
    """One request of 512 pages: 27 items of 304 keys on an A100, 32 of 256 on an H100."""
    one = replace(LLAMA, batch=1)
    schedule = PagedDecode(tensor_cores=True)
    for device, items, chunk in ((A100, 27, 304), (H100, 32, 256)):
        plan = schedule.plan(device, one)
        assert (plan.items, plan.kv_chunk) == (items, chunk)
        decode, merge = schedule.launches(device, one)
        assert len(decode.items) == 8 * items
        assert len(merge.items) == 32  # a CTA for each head


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=8), st.booleans(), st.sampled_from((1, 16))
)
def test_items_cover_the_keys_of_every_request(
    lens: list[int], tensor_cores: bool, page_size: int
) -> None:
    shape = AttentionShape(len(lens), 8, 1, 1, 128, kv_heads=2)
    schedule = PagedDecode(tensor_cores=tensor_cores, page_size=page_size)
    launches = schedule.launches(H100, shape, lens)
    tile = 128 if tensor_cores else 8
    least = 2 * sum(-(-keys // tile) for keys in lens)
    tiles = sum(item.length for item in launches[0].items)
    plan = schedule.plan(H100, shape, lens)
    assert least <= tiles <= least + 2 * plan.items
    assert len(launches) == 1 + plan.is_split
    assert launches[0].hbm_bytes == 2 * sum(lens) * 2 * 128 * 2 + shape.q_bytes


def test_every_byte_is_moved_once() -> None:
    """Chunks of whole tiles: K and V, the query of each item, indices of pages, partial states."""
    for tensor_cores, tile, pages in ((True, 128, 8), (False, 8, 1)):
        schedule = PagedDecode(tensor_cores=tensor_cores)
        shape = replace(LLAMA, batch=1, kv_len=16384)
        decode = schedule.launches(H100, shape)[0]
        run = run_launch(H100, decode)
        items, tiles = len(decode.items), sum(item.length for item in decode.items)
        moved = items * 4 * (128 * 2 + 129 * 4) + tiles * (2 * tile * 128 * 2 + 4 * pages)
        assert run.busy["l2"] * run.rates["l2"] == pytest.approx(moved, rel=EXACT)
        assert tiles * tile == 8 * 16384


@pytest.mark.parametrize("tensor_cores", [True, False])
@pytest.mark.parametrize("device", ["a100", "h100"])
def test_it_never_beats_hbm(device: str, tensor_cores: bool) -> None:
    machine = gpu(device)
    decode = PagedDecode(tensor_cores=tensor_cores).launches(machine, LLAMA, LENGTHS)[0]
    rate = machine.hbm_bytes_per_s * machine.hbm_read_fraction
    assert run_launch(machine, decode).seconds >= decode.hbm_bytes / rate


def test_splitting_a_long_request_helps() -> None:
    """One long request among short ones: as one item it would hold up the batch."""
    lens = (16384, 128, 128, 128)
    split = predict(H100, PagedDecode().launches(H100, LLAMA, lens))
    (whole,) = PagedDecode().launches(H100, replace(LLAMA, batch=64, kv_len=16384))
    alone = run_launch(H100, replace(whole, items=[Item(128, 0)] * 8))
    assert split.seconds < alone.seconds


def test_page_tables_are_read_ahead() -> None:
    """Only the first tile waits for its indices: one latency of L2, whatever the length."""
    loop = KeyLoop(
        rows=16, keys=128, d=128, d_v=128, q_bytes=1024, o_bytes=1024, latency=650, kv_warps=4,
        order="two ahead",
    )  # fmt: skip
    paged = replace(loop, page_bytes=32, page_latency=263)
    rates = sm_rates(H100, 1.8e9, "mma.sync")

    def makespan(loop: KeyLoop, tiles: int) -> float:
        return simulate(rates, lambda: loop.agents("CTA", [Item(tiles, 0)])).makespan

    for tiles in (1, 8, 16):
        late = makespan(paged, tiles) - makespan(loop, tiles)
        transfer = tiles * 32 / rates["l2"]
        assert 0 < late <= 263 + transfer + 1e-6


def test_a_stage_is_not_overwritten_while_it_is_read() -> None:
    """With memory that is all one SM's, copies wait for the CUDA cores: a third tile of K for the
    first QK, of V for the first PV.
    """
    launch = PagedDecode(tensor_cores=False).launches(H100, replace(LLAMA, batch=1))[0]
    rates = sm_rates(H100, 1.8e9, "mma.sync", 1)
    done = simulate(rates, lambda: launch.cta("CTA", [Item(6, 0)])).services
    for tensor, product in (("K", "exp"), ("V", "PV")):
        copies = [one.start for one in done if one.work.name == tensor][::2]  # then they arrive
        uses = [one.stop for one in done if one.work.name == product]
        last = uses[len(uses) // 6 - 1 :: len(uses) // 6]  # of a tile
        assert len(copies) == len(last) == 6
        waits = [copy - use for copy, use in zip(copies[2:], last, strict=False)]
        assert min(waits) >= 0
        assert min(waits) < 60  # two meetings: some copy goes as soon as it may


def test_both_tiles_in_flight_hide_more_than_one() -> None:
    """An SM's share of HBM brings a tile of K in some 2,400 cycles, and each waits 650 more if it
    is asked for when the one before is there; with another in flight HBM never rests.
    """
    loop = KeyLoop(
        rows=16, keys=128, d=128, d_v=128, q_bytes=1024, o_bytes=1024, latency=650, kv_warps=4
    )
    rates = sm_rates(H100, 1.8e9, "mma.sync")

    def makespan(loop: KeyLoop, tiles: int) -> float:
        return simulate(rates, lambda: loop.agents("CTA", [Item(tiles, 0)])).makespan

    tile = 2 * 128 * 128 * 2 / rates["hbm"]
    one, two = (
        (makespan(each, 20) - makespan(each, 10)) / 10
        for each in (loop, replace(loop, order="two ahead"))
    )
    assert one >= tile + 2 * 650
    assert two == pytest.approx(tile, rel=EXACT)


def test_a_dependent_merge_starts_earlier() -> None:
    times = [
        predict(H100, PagedDecode(dependent=dependent).launches(H100, LLAMA, LENGTHS)).seconds
        for dependent in (True, False)
    ]
    assert times[1] - times[0] == pytest.approx(PDL_GAIN.value)


def test_a_graphs_launch_merges_whatever_the_lengths() -> None:
    short = (16, 16, 16, 16)
    assert len(PagedDecode().launches(H100, LLAMA, short)) == 1
    assert len(PagedDecode(graph=True).launches(H100, LLAMA, short)) == 2


@pytest.mark.parametrize(
    ("shape", "lens", "message"),
    [
        (replace(LLAMA, q_len=2), (), "got q_len 2"),
        (replace(LLAMA, heads=32, kv_heads=1), (), "up to 16 heads"),
        (LLAMA, (1, 2), "2 lengths for a batch of 4"),
        (replace(LLAMA, d=96, d_v=96), (), r"d must be one of \[64, 128, 256\]"),
        (replace(LLAMA, d_v=64), (), "one head dimension, got 128 and 64"),
        (
            replace(LLAMA, heads=8, d=4, d_v=4),
            (),
            r"d must be one of \[64, 128, 256, 512\].* got 4",
        ),
    ],
)
def test_what_the_kernels_do_not_have(
    shape: AttentionShape, lens: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        PagedDecode().launches(H100, shape, lens)
