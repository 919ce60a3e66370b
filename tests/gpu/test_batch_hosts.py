"""Host side of batched attention: what is refused before a launch, and what a launch is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gpu
from gpu.device import Device
from gpu.kernels.batch_attention import ARGUMENTS
from gpu.kernels.batch_decode import batch_decode
from gpu.kernels.batch_prefill_paged import batch_prefill_paged
from gpu.kernels.batch_prefill_ragged import batch_prefill_ragged
from gpu.kernels.block_sparse_attention import block_sparse_attention
from gpu.kernels.cascade_attention import cascade_attention
from properties.batch_case import BatchCase
from properties.cascade_attention import CascadeCase
from simkit.algorithms.batch_prefill_ragged import batch_prefill_ragged as model
from simkit.algorithms.batch_problem import BatchProblem, batch_reference
from simkit.algorithms.elements import BF16, E4M3
from simkit.algorithms.variant import Variant, rope_angles
from simkit.errors import CompileError, DtypeError, ShapeError, TableError
from simkit.layouts.block_sparse import BlockRows
from simkit.layouts.ragged import Ragged
from simkit.machine.machine import Machine
from simkit.planning.plan import Plan
from simkit.planning.prefill import prefill_plan

RAGGED = BatchCase(q_lens=(5, 0, 20), kv_lens=(70, 3, 130), tile_q=16)
PAGED = replace(RAGGED, page_size=16)
DECODE = BatchCase(q_lens=(1, 1), kv_lens=(70, 3), page_size=16, tile_q=16)


@pytest.fixture(scope="module")
def device() -> Device:
    return gpu.open("ptx")


def plan_of(problem: BatchProblem, **how: Any) -> Plan:
    return prefill_plan(
        problem.queries.indptr, problem.kv_lens, group=problem.group, kv_heads=problem.kv_heads,
        head_dim_v=problem.dv, sm_count=8, **{"tile_q": 16, **how},
    )  # fmt: skip


# Tables


def rows(**changes: Any) -> BlockRows:
    tables: dict[str, Any] = {
        "indptr": np.array([0, 2, 3], np.int32),
        "indices": np.array([4, 1, 0], np.int32),
        "last_block_len": np.array([16, 3], np.int32),
    }
    return BlockRows(**(tables | changes), block_size=16, blocks=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": np.array([4, 5, 0], np.int32)}, r"indices\[1\].*5"),
        ({"indices": np.array([4, -1, 0], np.int32)}, r"indices\[1\].*-1"),
        ({"indices": np.array([4], np.int32)}, "indices has 1"),
        ({"indptr": np.array([0, 3, 2], np.int32)}, "indptr"),
        ({"indptr": np.array([1, 2, 3], np.int32)}, "indptr"),
        ({"last_block_len": np.array([0, 3], np.int32)}, r"last_block_len\[0\].*0"),
        ({"last_block_len": np.array([16, 17], np.int32)}, r"last_block_len\[1\].*17"),
    ],
)
def test_wrong_tables(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TableError, match=message):
        rows(**change)


# Plans


def test_a_plan_of_other_lengths_is_stale(device: Device) -> None:
    longer = replace(RAGGED, kv_lens=(70, 3, 400), split=64)
    shorter = replace(longer, kv_lens=(70, 3, 130))
    with pytest.raises(TableError, match="leaves out keys"):
        batch_prefill_ragged(device, longer.problem, shorter.plan)


def test_a_plan_of_other_queries(device: Device) -> None:
    other = replace(RAGGED, q_lens=(20, 0, 5))
    with pytest.raises(TableError, match="request"):
        batch_prefill_ragged(device, RAGGED.problem, other.plan)
    fewer = replace(RAGGED, q_lens=(5, 20), kv_lens=(70, 130))
    with pytest.raises(TableError, match="2 requests"):
        batch_prefill_ragged(device, RAGGED.problem, fewer.plan)


@pytest.mark.parametrize(("tile", "message"), [(0, "2 times"), (7, "tile 7")])
def test_items_are_those_of_the_batch_once(device: Device, tile: int, message: str) -> None:
    case = replace(RAGGED, q_lens=(5, 0, 40))
    q_tiles = case.plan.q_tiles.copy()
    q_tiles[-1] = tile
    with pytest.raises(TableError, match=message):
        batch_prefill_ragged(device, case.problem, replace(case.plan, q_tiles=q_tiles))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: {"is_split": False}, "2 chunks of keys in a plan that does not split"),
        (lambda plan: {"requests": plan.requests.astype(np.int64)}, "requests .* int64"),
        (lambda plan: {"requests": plan.requests + 1}, "of request 3; the batch has 3"),
        (lambda plan: {"kv_chunks": plan.kv_chunks[:-1]}, "kv_chunks of the plan must be"),
        (lambda plan: {"grid": 1}, "for a grid of 1"),
        (lambda plan: {"o_indptr": plan.o_indptr // 2}, "o_indptr"),
        (lambda plan: {"merge_indptr": plan.merge_indptr + 1}, "merge_indptr"),
        (lambda plan: {"kv_chunk": 0}, "chunks of 0 keys"),
    ],
)
def test_plans_that_are_none(device: Device, change: Any, message: str) -> None:
    case = replace(RAGGED, split=64)
    plan = replace(case.plan, **change(case.plan))
    with pytest.raises(TableError, match=message):
        batch_prefill_ragged(device, case.problem, plan)


def test_outputs_that_users_transform_are_whole(device: Device) -> None:
    case = replace(RAGGED, variant="damped")
    split = replace(RAGGED, split=64).plan
    with pytest.raises(ShapeError, match="damped transforms outputs"):
        batch_prefill_ragged(device, case.problem, split)


def test_fp8_needs_an_architecture_that_has_it() -> None:
    case = replace(PAGED, kv="e4m3")
    with pytest.raises(CompileError, match=r"needs sm_89 .* the device is sm_80"):
        batch_prefill_paged(gpu.open("ptx", gpu="a100"), case.problem, case.plan)


@pytest.mark.parametrize("window", [2**31 - 1, 2**40])
def test_a_window_of_any_length_is_no_limit(device: Device, window: int) -> None:
    """More queries than keys, without a causal mask: the first positions are below 0."""
    case = replace(RAGGED, q_lens=(9,), kv_lens=(3,))
    all_keys = batch_prefill_ragged(device, case.problem, case.plan).outputs
    problem = replace(case.problem, variant=Variant(window_left=window))
    found = batch_prefill_ragged(device, problem, case.plan).outputs
    assert np.array_equal(found["o"], all_keys["o"])
    assert np.array_equal(found["lse"], all_keys["lse"])


def test_tiles_that_there_are(device: Device) -> None:
    with pytest.raises(ShapeError, match="tiles of 128"):
        batch_prefill_ragged(device, RAGGED.problem, plan_of(RAGGED.problem, tile_q=128))
    case = replace(DECODE, group=17, tile_q=17, cuda_cores=True)
    with pytest.raises(ShapeError, match="tiles of 17"):
        batch_decode(device, case.problem, case.plan, units="cuda_cores")


# Problems


def test_layouts_that_kernels_do_not_take(device: Device) -> None:
    with pytest.raises(ShapeError, match="ragged"):
        batch_prefill_ragged(device, PAGED.problem, PAGED.plan)
    with pytest.raises(ShapeError, match="pages"):
        batch_prefill_paged(device, RAGGED.problem, RAGGED.plan)
    with pytest.raises(ShapeError, match="one query of each request; request 0 has 5"):
        batch_decode(device, PAGED.problem, PAGED.plan)
    with pytest.raises(ShapeError, match="block row 1 has 0 queries, the first has 5"):
        block_sparse_attention(device, PAGED.problem, PAGED.plan)


def test_head_dimensions_that_there_are(device: Device) -> None:
    case = replace(RAGGED, d=96, dv=96)
    with pytest.raises(ShapeError, match="head_dim is 96"):
        batch_prefill_ragged(device, case.problem, case.plan)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scale": -1.0}, ShapeError, "positive"),
        ({"k_scale": float("nan")}, ShapeError, "positive"),
        ({"v_scale": float("inf")}, ShapeError, "v_scale"),
        ({"q": np.zeros((25, 1, 64), np.float32)}, DtypeError, "float32"),
        ({"k": np.zeros((203, 1, 64), E4M3)}, DtypeError, "both"),
        ({"q": np.zeros((24, 1, 64), BF16)}, ShapeError, "25 rows"),
        ({"v": np.zeros((203, 2, 64), BF16)}, ShapeError, "agree"),
        ({"keys": Ragged.from_lengths(np.array([70, 133]))}, ShapeError, "2"),
        ({"variant": Variant(sinks=np.zeros(2, np.float32))}, ShapeError, "sinks must be"),
        ({"variant": Variant(rope=rope_angles(100, 64))}, ShapeError, "130 positions"),
        ({"q": [1.0]}, DtypeError, "q must be a NumPy array, got list"),
        ({"queries": np.zeros(3)}, DtypeError, "queries must be Ragged"),
        ({"scale": "1"}, DtypeError, "scale must be a number"),
        ({"order": "XYZ"}, ShapeError, "XYZ"),
        (
            {"keys": Ragged.from_lengths(np.array([70, 3, 130]), np.int64)},
            DtypeError,
            "queries are int32, those of keys int64",
        ),
    ],
)
def test_problems_that_do_not_fit_together(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        replace(RAGGED.problem, **change)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"window_left": -2}, ShapeError, "-2"),
        ({"soft_cap": -1.0}, ShapeError, "soft_cap"),
        ({"soft_cap": 1e9}, ShapeError, "0.* to 1024"),
        ({"soft_cap": "1"}, ShapeError, "soft_cap"),
        ({"window_left": 2.5}, ShapeError, "2.5"),
        ({"sinks": np.array([1e10], np.float32)}, ShapeError, "sink is 1e.10"),
        ({"alibi_slopes": np.zeros(3)}, DtypeError, "float32"),
        ({"alibi_slopes": [1.0]}, DtypeError, "got list"),
        ({"custom_mask": np.zeros(3)}, DtypeError, "CustomMask"),
        (
            {"rope": rope_angles(4, 64), "alibi_slopes": np.zeros(1, np.float32)},
            ShapeError,
            "at most",
        ),
    ],
)
def test_variants_that_there_are_not(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Variant(**fields)


@pytest.mark.parametrize(
    ("level", "change", "message"),
    [
        (0, {"variant": Variant(causal=True)}, "level 0 is causal; only the last, 1"),
        (0, {"variant": Variant(sinks=np.zeros(1, np.float32))}, "sinks"),
        (1, {"variant": Variant(window_left=5)}, "window_left"),
        (1, {"variant": Variant(alibi_slopes=np.zeros(1, np.float32))}, "alibi_slopes"),
        (1, {"variant": Variant(rope=rope_angles(100, 64))}, "rope"),
        (1, {"q": np.zeros((4, 1, 64), BF16)}, "other queries"),
        (1, {"variant": Variant(soft_cap=3.0)}, "soft_cap"),
        (1, {"scale": 1.0}, "scale"),
    ],
)
def test_levels_that_do_not_cascade(
    device: Device, level: int, change: dict[str, Any], message: str
) -> None:
    levels = list(CascadeCase(variant="").levels)
    levels[level] = replace(levels[level], problem=replace(levels[level].problem, **change))
    with pytest.raises(ShapeError, match=message):
        cascade_attention(device, levels)


def test_rotary_embedding_has_no_angles_below_zero() -> None:
    variant = Variant(rope=rope_angles(200, 64))
    case = replace(RAGGED, q_lens=(5, 0, 20), kv_lens=(3, 3, 130))
    with pytest.raises(ShapeError, match="request 0 has 5 queries and 3 keys"):
        replace(case.problem, variant=variant)
    replace(case.problem, variant=replace(variant, causal=True))


def test_a_sink_of_minus_infinity_is_no_key() -> None:
    """Counting alone knows which states are empty as well as arithmetic does."""
    case = BatchCase(q_lens=(3,), kv_lens=(0,), group=2, tile_q=16, split=0, graph=True)
    sinks = np.array([-np.inf, 1.0], np.float32)
    problem = replace(case.problem, variant=Variant(sinks=sinks))
    traffic = []
    for arithmetic in ("device", "none"):
        machine = Machine("h100", arithmetic)  # type: ignore[arg-type]
        model(machine, problem, case.plan)
        traffic.append(machine.traffic)
    assert traffic[0] == traffic[1]


def test_queries_that_stand_among_a_prefix(device: Device) -> None:
    case = CascadeCase(q_lens=(1, 3, 1, 1), kv_lens=((100,), (20, 2, 64, 7)))
    with pytest.raises(ShapeError, match="request 1 has 3 queries and 2 keys"):
        cascade_attention(device, case.levels)


# What the kernel is given


def test_arguments_are_laid_out_as_in_c() -> None:
    # 15 pointers; six pointers and three words of the variant, padded; ten words.
    assert ARGUMENTS.fields is not None
    assert ARGUMENTS.fields["variant"][1] == 15 * 8
    assert ARGUMENTS.fields["heads"][1] == 15 * 8 + 6 * 8 + 16
    assert ARGUMENTS.itemsize == 15 * 8 + 64 + 10 * 4


def test_a_cache_beyond_2_31_elements(device: Device) -> None:
    """K of more than 2^31 FP8 values; the request's pages are the first and the last."""
    d, dv, page = 256, 64, 1024
    blocks = 2**31 // (page * d) + 2
    rng = np.random.default_rng(0)
    values = rng.standard_normal((2, page, 1, d)).astype(np.float32)
    k = np.zeros((blocks, page, 1, d), E4M3)
    v = np.zeros((blocks, page, 1, dv), E4M3)
    last = blocks - 1
    k[[0, last]] = values.astype(E4M3)
    v[[0, last]] = values[..., :dv].astype(E4M3)
    assert k.size > 2**31
    keys = BlockRows(
        np.array([0, 2], np.int32), np.array([last, 0], np.int32), np.array([40], np.int32),
        page, blocks,
    )  # fmt: skip
    q = rng.standard_normal((1, 1, d)).astype(BF16)
    ones = Ragged.from_lengths(np.array([1]))
    problem = BatchProblem(q=q, k=k, v=v, queries=ones, keys=keys)
    # The same keys in a small cache.
    near = replace(
        problem, k=k[[0, last]], v=v[[0, last]],
        keys=replace(keys, indices=np.array([1, 0], np.int32), blocks=2),
    )  # fmt: skip
    plan = plan_of(problem, disable_split=True)
    for units in ("tensor_cores", "cuda_cores"):
        own = plan if units == "tensor_cores" else plan_of(problem, tile_q=1, disable_split=True)
        far, expected = (
            batch_decode(device, x, own, units=units).outputs  # type: ignore[arg-type]
            for x in (problem, near)
        )
        assert np.array_equal(far["o"], expected["o"])
        assert np.array_equal(far["lse"], expected["lse"])
    o, _ = batch_reference(near)
    assert np.abs(o - expected["o"].astype(np.float64)).max() < 0.01
