"""The FlashDecoding model: any split gives the same attention, and each part is one of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_cases import (
    BF16_ROUNDOFF,
    FLOAT32_SLACK,
    float64,
    problems,
    weighted_magnitude,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit.algorithms.flash_decoding import (
    flash_decoding,
    max_splits,
    split_keys,
    split_shared_bytes,
)
from simkit.algorithms.problem import BF16, AttentionProblem, attention_reference
from simkit.errors import ShapeError
from simkit.machine.machine import Machine

decoding_problems = problems(max_q_len=1, max_kv_len=330)


def _problem(**sizes: Any) -> AttentionProblem:
    return AttentionProblem.random(np.random.default_rng(0), **sizes)


def _splits(data: st.DataObject, problem: AttentionProblem) -> int:
    return data.draw(st.integers(1, max_splits(problem)), label="splits")


@settings(max_examples=60)
@given(problems(d=(8, 64), max_q_len=1, max_kv_len=330), st.data())
def test_exact_for_every_number_of_splits(problem: AttentionProblem, data: st.DataObject) -> None:
    result = flash_decoding(Machine("h100"), problem, _splits(data, problem))
    o, lse = attention_reference(problem)
    np.testing.assert_allclose(result.o, o[:, 0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(result.lse, lse[..., 0], rtol=0, atol=1e-12)


@settings(max_examples=60)
@given(decoding_problems, st.data())
def test_device_arithmetic_is_within_its_precision(
    problem: AttentionProblem, data: st.DataObject
) -> None:
    result = flash_decoding(Machine("h100", "device"), problem, _splits(data, problem))
    assert (result.o.dtype, result.lse.dtype) == (BF16, np.float32)
    o, lse = attention_reference(problem)
    # Weights stay in float32: only the output is rounded to bfloat16.
    bound = (BF16_ROUNDOFF + FLOAT32_SLACK) * weighted_magnitude(problem, lse)
    assert np.all(np.abs(float64(result.o) - o[:, 0]) <= bound[:, 0])
    if problem.kv_len:
        error = np.abs(float64(result.lse) - lse[..., 0])
        assert np.all(error <= FLOAT32_SLACK * (1 + np.abs(lse[..., 0])))
    else:
        assert np.all(np.isneginf(result.lse))
        assert not result.o.any()


@pytest.mark.parametrize("arithmetic", ["reference", "device"])
def test_a_part_is_attention_to_its_own_keys(arithmetic: Any) -> None:
    problem = _problem(batch=2, kv_len=200, heads=4, kv_heads=2)
    result = flash_decoding(Machine("h100", arithmetic), problem, splits=3)
    for split in range(2):
        keys = split_keys(problem, 3, split)
        part = AttentionProblem(problem.q, problem.k[:, keys], problem.v[:, keys])
        o, lse = attention_reference(part)
        m, l = float64(result.m_partial[split]), float64(result.l_partial[split])  # noqa: E741
        np.testing.assert_allclose((m + np.log2(l)) * np.log(2), lse[..., 0], atol=1e-6)
        np.testing.assert_allclose(result.o_partial[split] / l[..., None], o[:, 0], atol=1e-6)


@pytest.mark.parametrize("arithmetic", ["reference", "device"])
def test_a_split_without_keys_writes_no_output(arithmetic: Any) -> None:
    # Five tiles over four splits: two, two, one and none.
    problem = _problem(kv_len=300, heads=2)
    keys = [split_keys(problem, 4, split) for split in range(4)]
    assert keys == [slice(0, 128), slice(128, 256), slice(256, 300), slice(300, 300)]
    machine = Machine("h100", arithmetic)
    result = flash_decoding(machine, problem, splits=4)
    assert np.all(np.isneginf(result.m_partial[3]))
    assert np.all(result.l_partial[3] == 0)
    assert np.all(np.isnan(result.o_partial[3]))
    assert not np.isnan(result.o_partial[:3]).any()
    moved = machine.traffic["o_partial", "write"].requested
    assert moved == machine.traffic["o_partial", "read"].requested == 3 * 2 * 64 * 4


@settings(max_examples=100)
@given(problems(d=(1,), max_q_len=1, max_kv_len=2000), st.data())
def test_splits_cover_the_keys_once(problem: AttentionProblem, data: st.DataObject) -> None:
    splits = _splits(data, problem)
    keys = [split_keys(problem, splits, split) for split in range(splits)]
    covered = [key for part in keys for key in range(part.start, part.stop)]
    assert covered == list(range(problem.kv_len))
    assert all(part.start % 64 == 0 for part in keys if part.start < part.stop)


def test_bytes_of_one_case() -> None:
    batch, heads, kv_heads, d, kv_len, splits = 2, 6, 2, 128, 300, 3
    problem = _problem(batch=batch, kv_len=kv_len, heads=heads, kv_heads=kv_heads, d=d)
    machine = Machine("h100", "none")
    flash_decoding(machine, problem, splits)
    rows = batch * heads
    moved = {key: (row.requested, row.sectors) for key, row in machine.traffic.items()}
    kv_bytes = batch * kv_len * kv_heads * d * 2  # K and V once, whatever the group
    numbers = splits * rows * 4
    # Numbers of a group of three heads are 12 bytes, 12 apart: the third of every eight groups and
    # the sixth lie in two sectors. Tensors of 48 bytes a split: splits start at 0, 48 and 96.
    groups = splits * batch * kv_heads
    straddling = sum((12 * i) // 32 != (12 * i + 11) // 32 for i in range(groups))
    number_sectors = 32 * (groups + straddling)
    # d threads read each number: d / 32 warps, a sector each.
    broadcast = (numbers * d, splits * rows * d)
    assert moved == {
        ("q", "read"): (splits * rows * d * 2,) * 2,
        ("k", "read"): (kv_bytes,) * 2,
        ("v", "read"): (kv_bytes,) * 2,
        ("m_partial", "write"): (numbers, number_sectors),
        ("l_partial", "write"): (numbers, number_sectors),
        ("o_partial", "write"): (splits * rows * d * 4,) * 2,
        ("m_partial", "read"): broadcast,
        ("l_partial", "read"): broadcast,
        ("o_partial", "read"): (splits * rows * d * 4,) * 2,
        ("o", "write"): (rows * d * 2,) * 2,
        ("lse", "write"): (rows * 4, rows * 32),
    }
    assert machine.ctas == splits * kv_heads * batch + rows


@settings(max_examples=25)
@given(decoding_problems, st.data())
def test_every_arithmetic_moves_the_same_bytes(
    problem: AttentionProblem, data: st.DataObject
) -> None:
    splits = _splits(data, problem)
    machines = [Machine("h100", arithmetic) for arithmetic in ("none", "reference", "device")]
    for machine in machines:
        flash_decoding(machine, problem, splits)
    assert machines[0].traffic == machines[1].traffic == machines[2].traffic


def test_a_part_that_is_nan_makes_the_result_nan() -> None:
    # The sum of the second split is NaN in the first head: hiding that would hide a bug.
    problem = _problem(kv_len=128, heads=2)
    k = problem.k.copy()
    k[0, 100, 0] = np.nan
    poisoned = AttentionProblem(problem.q, k, problem.v)
    machine = Machine("h100", "device")
    result = flash_decoding(machine, poisoned, splits=2)
    assert np.isnan(result.l_partial[1, 0, 0])
    assert machine.traffic["o_partial", "read"].requested == 4 * 64 * 4
    assert np.isnan(result.o[0, 0].astype(np.float32)).all()
    assert np.isnan(result.lse[0, 0])
    clean = flash_decoding(Machine("h100", "device"), problem, splits=2)
    assert np.array_equal(result.o[0, 1], clean.o[0, 1])


def test_shared_memory() -> None:
    # Three heads are computed as four: 64 queries and 64 scores each, and three numbers.
    machine = Machine("h100", "none")
    problem = _problem(kv_len=64, heads=3, kv_heads=1)
    flash_decoding(machine, problem, 1)
    assert machine.sram_peak == split_shared_bytes(problem) == 4 * 64 * 64 * 2 + 4 * (128 + 3) * 4


def test_what_is_refused() -> None:
    with pytest.raises(ShapeError, match="q_len 2"):
        flash_decoding(Machine(), _problem(q_len=2, kv_len=64), 1)
    for splits in (0, 3):
        with pytest.raises(ShapeError, match=f"splits is {splits}.* 1 to 2 ways"):
            flash_decoding(Machine(), _problem(kv_len=128), splits)
    with pytest.raises(ShapeError, match="17 heads"):
        flash_decoding(Machine("h100", "device"), _problem(kv_len=1, heads=17, kv_heads=1), 1)
    with pytest.raises(ShapeError, match="d is 8"):
        flash_decoding(Machine("h100", "device"), _problem(kv_len=1, d=8), 1)
