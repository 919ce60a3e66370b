"""FlashAttention-1: the paper's blocks and bytes, and what they cost beside FlashAttention-2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simkit.errors import CapacityError, ShapeError
from simkit.machine.gpus import gpu
from simkit.schedules.flash_attention_1 import Chosen, FlashAttention1
from simkit.schedules.flash_attention_2 import FlashAttention2
from simkit.schedules.grid import run_launch
from simkit.schedules.naive_attention import NaiveAttention
from simkit.schedules.prediction import predict
from simkit.schedules.shape import AttentionShape

A100 = gpu("a100")
GPT2 = AttentionShape(batch=64, heads=16, q_len=1024, kv_len=1024, d=64)
EXACT = 1e-6  # durations are rounded up to 2^-20 of a cycle


def test_blocks_by_the_formula() -> None:
    """163 KiB are M = 83,456 values: ceil(M / 4d) is 326 for d = 64 and 163 for d = 128."""
    schedule = FlashAttention1()
    assert schedule.chosen(A100, GPT2) == Chosen(tile_q=64, tile_kv=320)
    assert schedule.chosen(A100, replace(GPT2, d=128, d_v=128)) == Chosen(tile_q=128, tile_kv=160)
    assert schedule.chosen(A100, replace(GPT2, kv_len=100)) == Chosen(tile_q=64, tile_kv=112)
    # Few keys are one block.
    for keys in (1, 63, 64, 320):
        assert schedule.launches(A100, replace(GPT2, kv_len=keys))[0].items[0].length == 1


def test_bytes_by_the_formula() -> None:
    """2 N d once, and in each of 4 outer steps 3 N d of Q and O and 4 N of statistics."""
    (launch,) = FlashAttention1().launches(A100, GPT2)
    each = 2 * 1024 * 64 * 2 + 4 * (3 * 1024 * 64 * 2 + 4 * 1024 * 4)
    assert launch.hbm_bytes == 64 * 16 * each == 1_946_157_056


def test_the_program_moves_the_bytes_of_the_formula() -> None:
    shape = AttentionShape(batch=1, heads=4, q_len=640, kv_len=640, d=64)
    (launch,) = FlashAttention1().launches(A100, shape)
    run = run_launch(A100, launch)
    rows = 3 * 640 * 64 * 2 + 4 * 640 * 4
    moved = {name: run.busy[name] * run.rates[name] for name in ("l2", "hbm", "tensor")}
    assert moved["l2"] == pytest.approx(4 * (2 * 640 * 64 * 2 + 2 * rows), rel=EXACT)
    # 2 outer steps; the rows of four heads stay in L2, so that HBM sees them once.
    assert launch.hbm_bytes == 4 * (2 * 640 * 64 * 2 + rows)
    assert moved["hbm"] == pytest.approx(launch.hbm_bytes, rel=EXACT)
    assert moved["tensor"] == pytest.approx(shape.flop, rel=EXACT)


def test_it_moves_fewer_bytes_than_the_naive_kernels_and_takes_less_time() -> None:
    """Figure 2 of the paper has the same order, with the backward pass: 40.3 and 4.4 GB, 41.7 and
    7.3 ms; FlashAttention-2 takes less again.
    """
    schedules = (NaiveAttention(), FlashAttention1(), FlashAttention2())
    naive, first, second = (predict(A100, each.launches(A100, GPT2)) for each in schedules)
    moved = [sum(run.launch.hbm_bytes for run in each.runs) for each in (naive, first, second)]
    assert moved[0] > moved[1] > moved[2]
    assert naive.seconds > first.seconds > second.seconds


def test_a_few_heads_leave_most_of_the_gpu_idle() -> None:
    """A CTA has a whole head: with 8, more SMs do not help, which FlashAttention-2 changed."""
    few = AttentionShape(batch=1, heads=8, q_len=2048, kv_len=2048, d=64)
    (launch,) = FlashAttention1().launches(A100, few)
    assert len(launch.items) == 8
    assert run_launch(A100, launch).bound == "too few items"


@pytest.mark.parametrize(
    ("schedule", "change", "message"),
    [
        ({}, {"causal": True}, "no causal mask"),
        ({}, {"kv_heads": 4}, "no groups"),
        ({}, {"d_v": 128}, "d_v is d"),
        ({"tile_q": 32}, {}, "32 x 320"),
        ({"tile_kv": 100}, {}, "64 x 100"),
    ],
)
def test_what_the_algorithm_does_not_have(
    schedule: dict[str, int], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        FlashAttention1(**schedule).launches(A100, replace(GPT2, **change))


def test_too_many_queries_are_refused() -> None:
    shape = AttentionShape(1, 1, 100_000, 100_000, 64)
    with pytest.raises(CapacityError, match="q_len 100000: every block of keys"):
        FlashAttention1().launches(gpu("h100"), shape)
