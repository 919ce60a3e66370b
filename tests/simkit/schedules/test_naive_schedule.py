"""Naive attention as three kernels: the bytes of the model, and a roofline that binds each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simkit.algorithms.naive_attention import naive_attention
from simkit.algorithms.problem import AttentionProblem
from simkit.errors import ShapeError
from simkit.machine.gpus import gpu
from simkit.machine.machine import Machine
from simkit.machine.roofline import arithmetic_intensity, bound
from simkit.schedules.flash_attention_3 import FlashAttention3
from simkit.schedules.grid import run_launch
from simkit.schedules.matmul import Matmul
from simkit.schedules.naive_attention import NaiveAttention, score_bytes
from simkit.schedules.prediction import predict
from simkit.schedules.shape import AttentionShape

H100 = gpu("h100")
HEAD = AttentionShape(1, 1, 8192, 8192, 128)
HEADS = AttentionShape(1, 32, 8192, 8192, 128)
EXACT = 1e-6  # durations are rounded up to 2^-20 of a cycle


@pytest.mark.parametrize(("q_len", "kv_len", "kv_heads"), [(256, 256, 2), (128, 512, 1)])
def test_it_moves_the_bytes_of_the_model(q_len: int, kv_len: int, kv_heads: int) -> None:
    machine = Machine(H100, "none")
    problem = AttentionProblem.random(
        np.random.default_rng(0), batch=1, q_len=q_len, kv_len=kv_len, heads=2,
        kv_heads=kv_heads, d=64,
    )  # fmt: skip
    naive_attention(machine, problem)
    # The model's softmax reads a row three times, for a warp cannot keep it; HBM sees it once.
    traffic = {key: row.requested for key, row in machine.traffic.items()}
    s, p = traffic["s", "write"], traffic["p", "write"]
    assert (traffic["s", "read"], traffic["p", "read"]) == (3 * s, p)
    q, k, v, o = (machine.tensors[name].values.nbytes for name in "qkvo")
    shape = AttentionShape(1, 2, q_len, kv_len, 64, kv_heads=kv_heads)
    small = replace(H100, l2_bytes=s - 1)
    launches = NaiveAttention().launches(small, shape)
    assert [launch.hbm_bytes for launch in launches] == [q + k + s, s + p, p + v + o]
    # Scores that L2 holds need not go through HBM.
    launches = NaiveAttention().launches(H100, shape)
    assert [launch.hbm_bytes for launch in launches] == [q + k, 0, v + o]


def test_a_causal_mask_saves_no_time_and_halves_the_flop_of_the_convention() -> None:
    masked = replace(HEAD, causal=True)
    full, half = (predict(H100, NaiveAttention().launches(H100, each)) for each in (HEAD, masked))
    assert full.seconds == half.seconds
    assert (full.flop, half.flop) == (HEAD.flop, masked.flop)


def test_the_worked_example() -> None:
    """N = 8192, d = 128: 537 MB of S and P, 64 FLOP a byte, memory-bound on an H100."""
    scores = 4 * score_bytes(HEAD)
    assert scores == 536_870_912
    intensity = arithmetic_intensity(HEAD.flop, scores)
    assert intensity == 64
    assert bound(H100, intensity) == "memory"
    # 32 heads of a batch of 8 have 32 GiB of scores.
    assert score_bytes(AttentionShape(8, 32, 8192, 8192, 128)) == 32 * 2**30


def test_naive_attention_is_bound_by_memory_and_flash_attention_by_the_tensor_cores() -> None:
    naive = predict(H100, NaiveAttention().launches(H100, HEADS))
    flash = predict(H100, FlashAttention3().launches(H100, HEADS))
    assert all("hbm" in run.bound for run in naive.runs)
    assert "hbm" not in flash.bound
    assert flash.seconds < naive.seconds


@pytest.mark.parametrize("device", ["a100", "h100"])
def test_no_kernel_beats_its_roofline(device: str) -> None:
    machine = gpu(device)
    for launch in NaiveAttention().launches(machine, AttentionShape(1, 4, 4096, 4096, 64)):
        run = run_launch(machine, launch)
        rate = machine.hbm_bytes_per_s * machine.hbm_read_fraction
        assert run.seconds >= launch.hbm_bytes / rate
        assert run.seconds >= launch.flop / machine.peak_flops


def test_the_softmax_kernel_moves_every_score_twice_through_l2() -> None:
    shape = AttentionShape(1, 2, 1024, 1024, 64)
    run = run_launch(H100, NaiveAttention().launches(H100, shape)[1])
    assert run.busy["l2"] * run.rates["l2"] == pytest.approx(2 * score_bytes(shape), rel=EXACT)
    # 4 MiB of scores stay in L2.
    assert not run.busy["hbm"]


def test_scores_that_exceed_l2_go_through_hbm() -> None:
    shape = AttentionShape(1, 16, 2048, 2048, 64)
    run = run_launch(H100, NaiveAttention().launches(H100, shape)[1])
    assert run.busy["hbm"] * run.rates["hbm"] == pytest.approx(2 * score_bytes(shape), rel=EXACT)


@pytest.mark.parametrize("device", ["a100", "h100"])
def test_a_product_does_all_of_its_flop(device: str) -> None:
    machine = gpu(device)
    scores = NaiveAttention().launches(machine, HEAD)[0]
    run = run_launch(machine, scores)
    assert run.busy["tensor"] * run.rates["tensor"] == pytest.approx(2 * 8192**2 * 128, rel=EXACT)


@pytest.mark.parametrize(
    "wrong", [{"tile_m": 32}, {"tile_m": 256}, {"tile_n": 12}, {"tile_k": 8}, {"stages": 0}]
)
def test_tiles_that_the_product_does_not_have(wrong: dict[str, int]) -> None:
    with pytest.raises(ShapeError, match=next(iter(wrong))):
        Matmul(**wrong)
