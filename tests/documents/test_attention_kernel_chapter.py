"""Figures of the chapter "3.4 Attention kernel", computed by the models.

Each test names the section of the sentence that it checks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from simkit.algorithms.flash_attention import Tile, flash_attention
from simkit.algorithms.flash_decoding import flash_decoding, split_grid, split_keys
from simkit.algorithms.naive_attention import naive_attention, scratch_bytes
from simkit.algorithms.problem import AttentionProblem, attention_flops, attention_reference
from simkit.machine.gpus import gpu
from simkit.machine.machine import Machine
from simkit.machine.roofline import arithmetic_intensity, bound
from simkit.numerics.online_softmax import OnlineSoftmax

MIB, GIB = 2**20, 2**30
H100 = gpu("h100")

ONE_HEAD = AttentionProblem.sized(q_len=8192, kv_len=8192, d=128)
LLAMA_3_8B = AttentionProblem.sized(kv_len=32 * 1024, heads=32, kv_heads=8, d=128)
"""One token of one sequence with a context of 32K."""


def _counted(model: Any, problem: AttentionProblem, *options: Any) -> Machine:
    machine = Machine("h100", "none")
    model(machine, problem, *options)
    return machine


def _random(**sizes: Any) -> AttentionProblem:
    return AttentionProblem.random(np.random.default_rng(0), **sizes)


# 工作原理 · 朴素 attention 及其内存流量; 实例演算 · 单个头的朴素 vs flash


def test_flops_of_one_head() -> None:
    """实例演算: 4 N^2 d = 4 x 8192^2 x 128, about 3.4e10."""
    assert f"{attention_flops(ONE_HEAD):.1e}" == "3.4e+10"


def test_scores_of_one_head() -> None:
    """实例演算: S and P have 6.7e7 elements each, 128 MiB."""
    tensors = _counted(naive_attention, ONE_HEAD).tensors
    for name in ("s", "p"):
        assert f"{tensors[name].array.size:.1e}" == "6.7e+07"
        assert tensors[name].array.nbytes == scratch_bytes(ONE_HEAD) == 128 * MIB


def test_traffic_of_the_intermediates() -> None:
    """实例演算: each written once and read once is about 537 MB; 朴素...内存流量: "at least"."""
    machine = _counted(naive_attention, ONE_HEAD)
    assert f"{machine.compulsory_bytes('s', 'p') / 1e6:.0f}" == "537"
    moved = sum(machine.traffic[name, way].requested for name in "sp" for way in ("read", "write"))
    # The kernel reads S twice more: for the maximum, for the sum and for the result.
    assert moved == machine.compulsory_bytes("s", "p") + 2 * scratch_bytes(ONE_HEAD)


def test_naive_attention_is_memory_bound() -> None:
    """朴素...内存流量: d / b = 64 FLOP/byte, far below the ridge of about 295 on an H100."""
    machine = _counted(naive_attention, ONE_HEAD)
    intensity = arithmetic_intensity(attention_flops(ONE_HEAD), machine.compulsory_bytes("s", "p"))
    assert intensity == ONE_HEAD.d / ONE_HEAD.q.itemsize == 64
    assert f"{H100.ridge_point:.0f}" == "295"
    assert bound(H100, intensity) == "memory"


def test_scratch_of_a_batch() -> None:
    """实例演算: 32 heads and a batch of 8 need 256 x 128 MiB = 32 GiB for the scores alone."""
    problem = AttentionProblem.sized(batch=8, q_len=8192, kv_len=8192, heads=32, d=128)
    machine = _counted(naive_attention, problem)
    assert machine.tensors["s"].array.nbytes == scratch_bytes(problem) == 32 * GIB


def test_compulsory_traffic_of_flash_attention() -> None:
    """实例演算: reading Q, K, V and writing O is 8 MiB a head, without scratch of N^2."""
    machine = _counted(flash_attention, ONE_HEAD)
    assert machine.compulsory_bytes("q", "k", "v", "o") == 8 * MIB
    assert sorted(machine.tensors) == ["k", "lse", "o", "q", "v"]


def test_flash_attention_becomes_compute_bound() -> None:
    """实例演算: the kernel becomes compute-bound, where L2 serves the repeated reads."""
    compulsory = _counted(flash_attention, ONE_HEAD).compulsory_bytes()
    intensity = arithmetic_intensity(attention_flops(ONE_HEAD), compulsory)
    assert bound(H100, intensity) == "compute"


def test_repeated_reads_are_cheaper_than_scores() -> None:
    """实例演算: K and V are read again for each tile of Q, which L2 can serve, and that is much
    cheaper than what the naive kernels move.
    """
    flash, naive = (_counted(model, ONE_HEAD) for model in (flash_attention, naive_attention))
    row_tiles = 8192 // 64
    for name in "kv":
        tensor = flash.tensors[name].array
        assert flash.traffic[name, "read"].requested == row_tiles * tensor.nbytes
    assert flash.tensors["k"].array.nbytes + flash.tensors["v"].array.nbytes < H100.l2_bytes
    assert naive.requested_bytes > 4 * flash.requested_bytes
    # What is left when caches serve every repeated read.
    assert naive.compulsory_bytes() > 60 * flash.compulsory_bytes()


def test_traffic_grows_with_n_and_with_n_squared() -> None:
    """自测: why FlashAttention's traffic does not depend on N^2 and the naive one's does."""

    def compulsory(model: Any, n: int) -> int:
        return _counted(model, AttentionProblem.sized(q_len=n, kv_len=n)).compulsory_bytes()

    for n in (1024, 2048, 4096):
        assert compulsory(flash_attention, 2 * n) == 2 * compulsory(flash_attention, n)
        extra = compulsory(naive_attention, 2 * n) - 2 * compulsory(naive_attention, n)
        assert extra == 2 * (4 * n**2 * 2)  # (2 N)^2 - 2 N^2 elements of S and P, there and back


# 工作原理 · 在线 softmax


def test_rescaling_when_the_maximum_grows_from_3_to_5() -> None:
    """自测: l and o are multiplied by e^(3 - 5) = e^-2."""
    log2_e = math.log2(math.e)
    value = np.array([[1.0]])
    before = OnlineSoftmax.empty(1, 1).update(np.array([[3 * log2_e]]), value)
    after = before.update(np.array([[5 * log2_e]]), 0 * value)
    assert before.l[0] == before.o[0, 0] == 1
    assert after.o[0, 0] == pytest.approx(math.exp(-2))
    assert after.l[0] == pytest.approx(math.exp(-2) + 1)


def test_online_softmax_is_exact() -> None:
    """常见误区: FlashAttention is exact, not an approximation, whatever the tiles."""
    problem = _random(q_len=100, kv_len=100, causal=True)
    o, _ = attention_reference(problem)
    for tile in (Tile(16, 16), Tile(64, 64), Tile(100, 1), Tile(7, 100)):
        assert np.abs(flash_attention(Machine(), problem, tile).o - o).max() < 1e-14


# 工作原理 · FlashAttention：分块


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_reads_of_keys_shrink_with_on_chip_memory(rows: int) -> None:
    """FlashAttention: HBM accesses are of order N^2 d^2 / M: twice the rows, half the reads."""
    problem = AttentionProblem.sized(q_len=1024, kv_len=1024)
    small, large = (_counted(flash_attention, problem, Tile(r, r)) for r in (rows, 2 * rows))
    assert large.sram_peak == 2 * small.sram_peak
    for name in "kv":
        reads = [machine.traffic[name, "read"].requested for machine in (small, large)]
        assert reads[0] == 2 * reads[1]


def test_extra_memory_is_linear() -> None:
    """FlashAttention: extra memory O(N) instead of O(N^2): one number for each row."""
    machine = _counted(flash_attention, ONE_HEAD)
    assert machine.tensors["lse"].array.size == 8192


def test_causal_halves_the_work() -> None:
    """FlashAttention: tiles above the diagonal are skipped, which halves the work."""
    causal = AttentionProblem.sized(q_len=8192, kv_len=8192, d=128, causal=True)
    full, half = (_counted(flash_attention, problem) for problem in (ONE_HEAD, causal))
    tiles = 8192 // 64
    expected = (tiles + 1) / (2 * tiles)  # the diagonal itself is not skipped
    assert half.traffic["k", "read"].requested / full.traffic["k", "read"].requested == expected
    assert attention_flops(causal) / attention_flops(ONE_HEAD) == pytest.approx(0.5, abs=1e-4)


# 工作原理 · 解码 attention 与 Flash-Decoding; 实例演算 · Flash-Decoding 的占用率


def test_one_cta_for_each_kv_head_leaves_sms_idle() -> None:
    """Flash-Decoding 的占用率: eight CTAs, about 6 % of the 132 SMs of an H100."""
    ctas = math.prod(split_grid(LLAMA_3_8B, 1))
    assert (ctas, H100.sm_count) == (8, 132)
    assert f"{ctas / H100.sm_count:.0%}" == "6%"


def test_sixteen_splits_fill_the_gpu() -> None:
    """Flash-Decoding 的占用率: 16 splits of 2K keys, 8 x 16 = 128 CTAs, nearly one for each SM."""
    keys = [split_keys(LLAMA_3_8B, 16, split) for split in range(16)]
    assert {part.stop - part.start for part in keys} == {2 * 1024}
    ctas = math.prod(split_grid(LLAMA_3_8B, 16))
    assert ctas == 16 * math.prod(split_grid(LLAMA_3_8B, 1)) == 128
    assert 0.95 < ctas / H100.sm_count <= 1
    combining = LLAMA_3_8B.heads
    assert _counted(flash_decoding, LLAMA_3_8B, 16).ctas == ctas + combining


def test_partial_results_are_tiny() -> None:
    """Flash-Decoding 的占用率: the merge handles 8 x 16 tiny partial results."""
    machine = _counted(flash_decoding, LLAMA_3_8B, 16)
    partial = machine.tensors["m_partial"].array
    assert partial.size // LLAMA_3_8B.group == 8 * 16
    moved = machine.compulsory_bytes("m_partial", "l_partial", "o_partial")
    assert moved < 0.01 * machine.compulsory_bytes("k", "v")


def test_a_large_batch_needs_no_splits() -> None:
    """自测: 256 sequences x 8 K/V heads are 2,048 independent units, far more than SMs."""
    problem = AttentionProblem.sized(batch=256, kv_len=1024, heads=32, kv_heads=8, d=128)
    assert math.prod(split_grid(problem, 1)) == 2048
    assert math.prod(split_grid(problem, 1)) > 15 * H100.sm_count


@pytest.mark.parametrize("group", [1, 4, 8])
def test_a_group_reuses_keys(group: int) -> None:
    """解码 attention: GQA raises the intensity of decoding from about 1 to about g FLOP/byte."""
    problem = AttentionProblem.sized(kv_len=32 * 1024, heads=8 * group, kv_heads=8, d=128)
    machine = _counted(flash_decoding, problem, 16)
    for name in "kv":
        assert machine.traffic[name, "read"].requested == machine.tensors[name].array.nbytes
    intensity = arithmetic_intensity(attention_flops(problem), machine.hbm_bytes)
    assert intensity == pytest.approx(group, rel=0.05)
    assert bound(H100, intensity) == "memory"


def test_the_order_of_sums_depends_on_the_splits() -> None:
    """常见误区: with another number of splits the result may differ in the last digits."""
    problem = _random(kv_len=1024, heads=8, kv_heads=2)
    one, four = (flash_decoding(Machine("h100", "device"), problem, n) for n in (1, 4))
    assert not np.array_equal(one.lse, four.lse)
    np.testing.assert_allclose(one.lse, four.lse, rtol=1e-6)


# 代码


def test_flash_equals_naive_in_the_listing() -> None:
    """代码: "flash vs naive", N = 100, d = 64, causal, tiles of 16 x 16."""
    problem = _random(q_len=100, kv_len=100, causal=True)
    flash = flash_attention(Machine(), problem, Tile(16, 16)).o
    assert np.abs(flash - naive_attention(Machine(), problem).o).max() < 1e-14


def test_decoding_equals_naive_in_the_listing() -> None:
    """代码: "decode vs naive", 1000 keys in 8 splits."""
    problem = _random(kv_len=1000)
    decoded = flash_decoding(Machine(), problem, 8).o
    assert np.abs(decoded - naive_attention(Machine(), problem).o[:, 0]).max() < 1e-14
