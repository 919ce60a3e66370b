"""Flash-Decoding: splits cover the keys, use the GPU, and take what was measured on an A100."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkit.errors import ShapeError
from simkit.machine.gpus import gpu
from simkit.schedules.flash_decoding import FlashDecoding
from simkit.schedules.grid import run_launch
from simkit.schedules.parameters import L2_PORT, PDL_GAIN
from simkit.schedules.prediction import predict
from simkit.schedules.published.serving import rows
from simkit.schedules.shape import AttentionShape

A100, H100 = gpu("a100"), gpu("h100")
LLAMA = AttentionShape(batch=1, heads=32, q_len=1, kv_len=32768, d=128, kv_heads=8)
EXACT = 1e-6  # durations are rounded up to 2^-20 of a cycle


@given(
    st.sampled_from((64, 128, 256)), st.integers(1, 70_000), st.none() | st.integers(1, 128),
    st.integers(1, 4),
)  # fmt: skip
def test_splits_cover_every_tile_once(d: int, keys: int, splits: int | None, batch: int) -> None:
    shape = AttentionShape(batch, 16, 1, keys, d, kv_heads=2)
    schedule = FlashDecoding(splits=splits)
    parts = schedule.split_tiles(H100, shape)
    assert [tile for part in parts for tile in part] == list(range(schedule.tiles(shape)))
    launches = schedule.launches(H100, shape)
    assert len(launches) == (1 if len(parts) == 1 else 2)
    if len(parts) > 1:
        assert [item.length for item in launches[0].items] == 2 * batch * [*map(len, parts)]


@pytest.mark.parametrize(
    ("batch", "kv_heads", "keys", "d", "a100", "h100"),
    [
        (1, 8, 1024, 128, 8, 8),
        (1, 8, 8192, 128, 22, 32),
        (1, 8, 131072, 128, 23, 28),
        (16, 8, 8192, 128, 3, 2),
        (1, 2, 65536, 128, 103, 128),
        (1, 8, 8192, 64, 16, 32),
        (1, 8, 8192, 256, 26, 32),
    ],
)
def test_the_published_choice(
    batch: int, kv_heads: int, keys: int, d: int, a100: int, h100: int
) -> None:
    shape = AttentionShape(batch, 4 * kv_heads, 1, keys, d, kv_heads=kv_heads)
    assert FlashDecoding().chosen_splits(A100, shape) == a100
    assert FlashDecoding().chosen_splits(H100, shape) == h100


def test_the_chapters_occupancy() -> None:
    """Batch 1, 8 K/V heads: 8 CTAs of 132 SMs; with 16 splits of 2k keys, 128."""
    (alone,) = FlashDecoding(splits=1).launches(H100, LLAMA)
    assert len(alone.items) == 8
    assert round(100 * 8 / H100.sm_count) == 6
    split, combine = FlashDecoding(splits=16).launches(H100, LLAMA)
    assert [item.length for item in split.items] == [2048 // 128] * 128
    assert sum(item.kind for item in combine.items) == 32  # a row of each head


def test_more_splits_help_until_the_sms_are_full() -> None:
    """Each doubling shortens the split kernel, up to 128 CTAs; its bytes never take less than HBM
    needs.
    """
    times = []
    for splits in (2, 4, 8, 16):
        run = run_launch(H100, FlashDecoding(splits=splits).launches(H100, LLAMA)[0])
        times.append(run.seconds)
    assert all(later < before for before, later in pairwise(times))
    # Twice the CTAs never do more than twice the work in a time.
    assert all(2 * later >= before for before, later in pairwise(times))
    least = LLAMA.kv_bytes / (H100.hbm_bytes_per_s * H100.hbm_read_fraction)
    assert times[-1] >= least
    # Splits beyond a CTA for each place only make the combine kernel longer.
    full = predict(H100, FlashDecoding(splits=32).launches(H100, LLAMA))
    over = predict(H100, FlashDecoding(splits=128).launches(H100, LLAMA))
    assert over.runs[1].seconds > full.runs[1].seconds
    assert over.seconds > full.seconds


def test_a_few_ctas_are_held_back_by_their_sms_port_and_by_latency() -> None:
    """16 CTAs on 132 SMs: each byte goes through a port of 64 bytes a cycle, and every tile waits
    for HBM, for one of K and V is in flight.
    """
    launch = FlashDecoding(splits=2).launches(H100, LLAMA)[0]
    run = run_launch(H100, launch)
    tile = 2 * 128 * 128 * 2
    tiles = launch.items[0].length
    port = tile / L2_PORT.value
    assert run.cycles >= tiles * (port + 2 * H100.hbm_latency)
    used = run.busy["hbm"] / len(launch.items) / run.cycles
    assert used < 0.6  # of its port's rate
    # Twice the latency costs every tile at least twice the difference.
    slow = replace(H100, hbm_latency=2 * H100.hbm_latency)
    slower = run_launch(slow, FlashDecoding(splits=2).launches(slow, LLAMA)[0])
    assert slower.cycles > run.cycles


def test_every_byte_is_moved_once() -> None:
    split, combine = FlashDecoding(splits=16).launches(H100, LLAMA)
    run = run_launch(H100, split)
    partial = 16 * LLAMA.heads * (128 + 1) * 4
    queries = 16 * LLAMA.q_bytes  # every split reads them
    moved = LLAMA.kv_bytes + queries + partial
    assert run.busy["l2"] * run.rates["l2"] == pytest.approx(moved, rel=EXACT)
    assert run.busy["hbm"] * run.rates["hbm"] == pytest.approx(LLAMA.kv_bytes + queries, rel=EXACT)
    merged = run_launch(H100, combine)
    o_bytes = LLAMA.q_bytes + 4 * LLAMA.heads  # and LSE
    assert merged.busy["l2"] * merged.rates["l2"] == pytest.approx(partial + o_bytes, rel=EXACT)


def test_heads_that_are_not_packed_copy_k_and_v_for_each() -> None:
    packed, apart = (
        run_launch(H100, FlashDecoding(splits=16, packed=packed).launches(H100, LLAMA)[0])
        for packed in (True, False)
    )
    partial, queries = 16 * LLAMA.heads * 129 * 4, 16 * LLAMA.q_bytes
    kv = [run.busy["l2"] * run.rates["l2"] - partial - queries for run in (packed, apart)]
    assert kv[1] == pytest.approx(LLAMA.group * kv[0], rel=EXACT)
    # They go over the keys in step, so that HBM brings each of these once.
    for run in (packed, apart):
        hbm = run.busy["hbm"] * run.rates["hbm"]
        assert hbm == pytest.approx(LLAMA.kv_bytes + queries, rel=EXACT)
    assert apart.seconds > packed.seconds


def test_a_dependent_combine_kernel_starts_earlier() -> None:
    ordinary = predict(H100, FlashDecoding().launches(H100, LLAMA))
    dependent = predict(H100, FlashDecoding(dependent=True).launches(H100, LLAMA))
    assert ordinary.seconds - dependent.seconds == pytest.approx(PDL_GAIN.value)


def test_the_published_table() -> None:
    """Ten sizes with the same K and V but one; no parameter is of this kernel."""
    errors = [
        abs(row.predicted() / row.published - 1)
        for row in rows()
        if row.group == "Flash-Decoding, A100"
    ]
    assert len(errors) == 10
    assert median(errors) <= 0.10
    assert max(errors) <= 0.25


@pytest.mark.parametrize(
    ("schedule", "shape", "message"),
    [
        (FlashDecoding(splits=0), LLAMA, "splits must be 1 to 128, got 0"),
        (FlashDecoding(splits=129), LLAMA, "got 129"),
        (FlashDecoding(), replace(LLAMA, q_len=2), "one query, got q_len 2"),
        (FlashDecoding(), replace(LLAMA, heads=128, kv_heads=1), "128 heads; a tile has 64"),
    ],
)
def test_what_the_kernel_does_not_have(
    schedule: FlashDecoding, shape: AttentionShape, message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        schedule.launches(H100, shape)
