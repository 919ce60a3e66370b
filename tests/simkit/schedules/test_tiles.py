"""Which part of K and V comes from HBM: compulsory bytes, waves of CTAs, multicast."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simkit.errors import ShapeError
from simkit.machine.gpus import gpu
from simkit.schedules.flash_attention import FlashAttention
from simkit.schedules.flash_attention_2 import FlashAttention2
from simkit.schedules.flash_attention_3 import FlashAttention3
from simkit.schedules.grid import run_launch
from simkit.schedules.prediction import predict
from simkit.schedules.shape import AttentionShape
from simkit.schedules.tiles import kernel_dim, key_tiles, missing_part

H100 = gpu("h100")
EXACT = 1e-6  # durations are rounded up to 2^-20 of a cycle


def lengths(shape: AttentionShape, rows: int, keys: int) -> list[int]:
    tiles = [key_tiles(shape, row, rows, keys)[0] for row in range(0, shape.q_len, rows)]
    return tiles * (shape.batch * shape.heads)


def test_what_fits_in_l2_is_fetched_once() -> None:
    """8 tiles of queries of each of 2 heads of a group read K and V: one of 16 has to fetch it."""
    shape = AttentionShape(4, 6, 1024, 1024, 128, kv_heads=3)
    tiles = lengths(shape, 128, 128)
    assert missing_part(H100, shape, tiles, 128) == 1 / 16
    # Each transfer to two CTAs is one of half as many.
    assert missing_part(H100, shape, tiles, 128, shared_by=2) == 1 / 8


def test_what_does_not_fit_is_fetched_once_a_wave() -> None:
    """2^18 keys of d = 128 are 128 MiB. 300 tiles of queries take three waves of 132 SMs."""
    shape = AttentionShape(1, 1, 300 * 128, 2**18, 128)
    assert missing_part(H100, shape, lengths(shape, 128, 128), 128) == 3 / 300
    # Two heads of a group, of 66 tiles each, are one wave.
    group = AttentionShape(1, 2, 66 * 128, 2**18, 128, kv_heads=1)
    assert missing_part(H100, group, lengths(group, 128, 128), 128) == 1 / 132
    # A wave reads what its longest item does.
    causal = AttentionShape(1, 1, 2**18, 2**18, 128, causal=True)
    found = missing_part(H100, causal, lengths(causal, 128, 128), 128)
    assert found == sum(range(2048, 0, -132)) / sum(range(1, 2049))


@pytest.mark.parametrize("causal", [False, True])
def test_long_sequences_keep_their_throughput(causal: bool) -> None:
    """K and V of a head exceed L2 from 102,400 keys on, which 132 CTAs read together."""
    shapes = [AttentionShape(1, 4, n, n, 128, causal) for n in (2**16, 2**18)]
    short, long = (predict(H100, FlashAttention3().launches(H100, shape)) for shape in shapes)
    assert long.flops >= 0.99 * short.flops


@pytest.mark.parametrize("d_v", [64, 128])
@pytest.mark.parametrize("schedule", [FlashAttention2(), FlashAttention3()])
def test_every_byte_that_must_move_does_and_no_other(
    schedule: FlashAttention2 | FlashAttention3, d_v: int
) -> None:
    """K and V fit in L2, CTAs of FlashAttention-3 share copies in pairs."""
    shape = AttentionShape(2, 4, 1024, 1024, 192, d_v=d_v, kv_heads=2)
    (launch,) = schedule.launches(H100, shape)
    run = run_launch(H100, launch)
    values = 2 * (2 * 1024 * (192 + d_v)) + 2 * 4 * 1024 * (192 + d_v)
    assert launch.hbm_bytes == 2 * values
    assert run.busy["hbm"] * run.rates["hbm"] == pytest.approx(2 * values, rel=EXACT)


@pytest.mark.parametrize("schedule", [FlashAttention(), FlashAttention2(), FlashAttention3()])
def test_queries_that_are_not_there_are_not_loaded(
    schedule: FlashAttention | FlashAttention2 | FlashAttention3,
) -> None:
    shape = AttentionShape(3, 2, 5, 1024, 128)
    (launch,) = schedule.launches(H100, shape)
    assert launch.hbm_bytes == shape.kv_bytes + 2 * shape.q_bytes
    run = run_launch(H100, launch)
    assert run.busy["hbm"] * run.rates["hbm"] == pytest.approx(launch.hbm_bytes, rel=EXACT)


def test_head_dimensions_are_those_of_the_kernels() -> None:
    assert [kernel_dim(d, (64, 96)) for d in (1, 64, 65, 96)] == [64, 64, 96, 96]
    with pytest.raises(ShapeError, match="at most 96, got 97"):
        kernel_dim(97, (64, 96))


@pytest.mark.parametrize(("d", "own"), [(33, 64), (80, 96), (129, 192), (200, 256)])
def test_a_kernel_multiplies_zeros_too_and_moves_none(d: int, own: int) -> None:
    shape = AttentionShape(1, 2, 128, 128, d)
    (launch,) = FlashAttention2().launches(H100, shape)
    run = run_launch(H100, launch)
    assert run.busy["tensor"] * run.rates["tensor"] == pytest.approx(shape.flop // d * own)
    assert run.busy["hbm"] * run.rates["hbm"] == pytest.approx(launch.hbm_bytes, rel=EXACT)
    (full,) = FlashAttention2().launches(H100, replace(shape, d=own, d_v=own))
    assert launch.shared_bytes == full.shared_bytes


@pytest.mark.parametrize(
    ("schedule", "wrong", "message"),
    [
        (FlashAttention2(), {"d": 300}, "at most 256, got 300"),
        (FlashAttention2(), {"element": 1}, "FlashAttention-2 takes values of 2 bytes, got 1"),
        (FlashAttention(), {"d_v": 128}, "one head dimension, got 64 and 128"),
        (FlashAttention(), {"d": 96, "d_v": 96}, r"one of \(64, 128\), got 96"),
        (FlashAttention(), {"element": 1}, "values of 2 bytes, got 1"),
    ],
)
def test_what_the_kernels_do_not_have(
    schedule: FlashAttention | FlashAttention2, wrong: dict[str, Any], message: str
) -> None:
    shape = AttentionShape(1, 2, 128, 128, 64)
    with pytest.raises(ShapeError, match=message):
        schedule.launches(H100, replace(shape, **wrong))
