"""Host side of merging states: what comes back, against float64 mathematics, and refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gpu.device import Device
from gpu.kernels.build import kernel_source
from gpu.kernels.merge_states import (
    build_variable,
    check_merge_indptr,
    launch_merge_states_variable,
    merge_state,
    merge_state_in_place,
    merge_states,
    merge_states_variable,
)
from gpu.kernels.result import KernelResult
from gpu.ptx.executor import PtxDevice
from simkit.errors import CompileError, DtypeError, LaunchError, ShapeError, TableError
from simkit.numerics.merge_state_bounds import BoundedState, merge_bounded

BF16 = np.dtype(ml_dtypes.bfloat16)
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
TYPES = (F32, BF16, F16)


@pytest.fixture(scope="module")
def device() -> Device:
    return PtxDevice("h100")


def states(*shape: int, d: int = 64, dtype: np.dtype[Any] = F32) -> tuple[NDArray[Any], ...]:
    """o [*shape, d] and lse [*shape]; a third of the states have no keys, and hold NaN."""
    rng = np.random.default_rng(sum(shape))
    lse = (rng.standard_normal(shape) * 5).astype(np.float32)
    lse[rng.random(shape) < 1 / 3] = -np.inf
    o = rng.standard_normal((*shape, d)).astype(dtype)
    o[np.isneginf(lse)] = np.nan
    return o, lse


def expected(
    o: NDArray[Any], lse: NDArray[Any], scale: float = 1.0, dtype: np.dtype[Any] = F32
) -> BoundedState:
    """The merge over the first axis, in float64, and how far one in float32 may be from it."""
    weights = np.exp(lse.astype(np.float64))
    total = weights.sum(axis=0)
    present = ~np.isneginf(lse)
    values = np.where(present[..., None], o, 0).astype(np.float64)
    p = weights / np.where(total == 0, 1, total)
    bounds = merge_bounded(
        [BoundedState.exact(*state) for state in zip(o, lse, strict=True)],
        v_scale=scale,
        dtype=dtype,
    )
    with np.errstate(divide="ignore"):
        return replace(bounds, o=scale * (p[..., None] * values).sum(axis=0), lse=np.log(total))


def assert_close(o: NDArray[Any], lse: NDArray[Any], exact: BoundedState) -> None:
    # The reference here takes exponentials of LSEs themselves, not of differences.
    slack = 2.0**-45
    assert (np.abs(o.astype(np.float64) - exact.o) <= exact.o_error + slack).all()
    empty = np.isneginf(exact.lse)
    np.testing.assert_array_equal(lse[empty], -np.inf)
    np.testing.assert_array_equal(o[empty], 0)
    error = np.abs(lse[~empty].astype(np.float64) - exact.lse[~empty])
    assert (error <= exact.lse_error[~empty] + slack).all()


def assert_result(result: KernelResult, exact: BoundedState, dtype: np.dtype[Any]) -> None:
    o, lse = result.outputs["o"], result.outputs["lse"]
    assert (o.dtype, lse.dtype) == (dtype, F32)
    assert_close(o, lse, exact)
    assert [report.hazards for report in result.reports] == [[]]


@pytest.mark.parametrize("state", TYPES)
@pytest.mark.parametrize("output", TYPES)
@pytest.mark.parametrize("d", [64, 576])
def test_entries(device: Device, state: np.dtype[Any], output: np.dtype[Any], d: int) -> None:
    o, lse = states(3, 5, 3, d=d, dtype=state)  # [states, rows, heads, d]
    stacked = np.ascontiguousarray(o.swapaxes(0, 1)), np.ascontiguousarray(lse.swapaxes(0, 1))
    found = merge_states(device, *stacked, dtype=output)
    assert_result(found, expected(o, lse, dtype=output), output)
    found = merge_state(device, o[0], lse[0], o[1], lse[1], dtype=output)
    assert_result(found, expected(o[:2], lse[:2], dtype=output), output)
    own = np.where(np.isnan(o[0]), 7, o[0]).astype(output)
    found = merge_state_in_place(device, own, lse[0], o[1], lse[1])
    both = np.stack((own.astype(np.float64), o[1].astype(np.float64)))
    assert_result(found, expected(both, lse[:2], dtype=output), output)


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("output", TYPES)
def test_ranges(device: Device, index: Any, output: np.dtype[Any]) -> None:
    o, lse = states(20, 3, d=128)
    table = np.array([0, 4, 4, 5, 17, 17], index)  # rows of 4, 0, 1, 12 and 0 partial rows
    result = merge_states_variable(device, o, lse, table, dtype=output, v_scale=0.75)
    found = result.outputs
    for row, (start, stop) in enumerate(itertools.pairwise(table)):
        if start < stop:
            exact = expected(o[start:stop], lse[start:stop], 0.75, output)
            assert_close(found["o"][row], found["lse"][row], exact)
        else:
            assert not found["o"][row].astype(np.float64).any()
            assert np.isneginf(found["lse"][row]).all()


def test_a_scale_of_one_changes_nothing(device: Device) -> None:
    o, lse = states(6, 2)
    table = np.array([0, 2, 6], np.int32)
    plain = merge_states_variable(device, o, lse, table, dtype=F32).outputs["o"]
    stacked = np.stack([o[:2], o[2:4]]), np.stack([lse[:2], lse[2:4]])
    same = merge_states(device, *stacked).outputs["o"]
    np.testing.assert_array_equal(plain[0].view(np.uint32), same[0].view(np.uint32))


def test_a_mask_leaves_rows_alone(device: Device) -> None:
    o, lse = states(2, 4, 2)
    own = np.ascontiguousarray(o[0])
    mask = np.array([1, 0, 255, 0], np.uint8)
    result = merge_state_in_place(device, own, lse[0], o[1], lse[1], mask).outputs
    whole = merge_state_in_place(device, own, lse[0], o[1], lse[1]).outputs
    for name, before in (("o", own), ("lse", lse[0])):
        np.testing.assert_array_equal(result[name][[1, 3]], before[[1, 3]])
        np.testing.assert_array_equal(result[name][[0, 2]], whole[name][[0, 2]])


def test_a_launch_after_another_kernel(device: Device) -> None:
    """On device arrays: what one merge wrote, merged again."""
    o, lse = states(8, 3, d=128)
    tables = [np.array(table, np.int32) for table in ((0, 1, 4, 4, 8), (0, 2, 4))]
    inputs = [device.array(array) for array in (o, lse)]
    for rows, table in zip((4, 2), tables, strict=True):
        output = [device.empty((rows, 3, 128), F32), device.empty((rows, 3), F32)]
        report = launch_merge_states_variable(
            device, inputs[0], inputs[1], device.array(table), output[0], output[1]
        )
        assert report.grid == (-(-rows * 3 // 4), 1, 1)
        inputs = output
    halves = [
        merge_bounded(
            [merge_bounded([BoundedState.exact(o[n], lse[n]) for n in own]) for own in rows]
        )
        for rows in (((0,), (1, 2, 3)), ((4, 5, 6, 7),))
    ]
    for row, exact in enumerate(halves):
        assert_close(inputs[0].to_numpy()[row], inputs[1].to_numpy()[row], exact)


def test_offsets_beyond_32_bits() -> None:
    """Partial rows 3 * 2^32 on, by pointers that far before the arrays: index, place and byte
    offset all exceed 32 bits.
    """
    device = PtxDevice("h100")
    o, lse = states(4, 2)
    start = 3 << 32
    table = np.array([start, start + 1, start + 4], np.int64)
    partial_o, partial_lse = device.array(o), device.array(lse)
    merged, merged_lse = device.empty((2, 2, 64), F32), device.empty((2, 2), F32)
    before = [
        (x.address - start * (values.nbytes // len(values))) % 2**64
        for x, values in ((partial_o, o), (partial_lse, lse))
    ]
    module = build_variable(device, 64, output=F32, index=np.int64)
    module.kernel("merge_states_variable").launch(
        grid=(1,),
        block=(128,),
        args=[*before, device.array(table), merged, merged_lse, 4, 2, np.float32(1)],
    )
    near = merge_states_variable(device, o, lse, table - start, dtype=F32).outputs
    np.testing.assert_array_equal(merged.to_numpy(), near["o"])
    np.testing.assert_array_equal(merged_lse.to_numpy(), near["lse"])


def test_a_source_can_stand_in_for_the_kernel(device: Device) -> None:
    o, lse = states(3, 2, 2)
    changed = kernel_source("merge_states").replace("__fadd_rn(total, weight)", "weight")
    right = merge_states(device, o, lse).outputs["lse"]
    assert (merge_states(device, o, lse, source=changed).outputs["lse"] != right).any()
    with pytest.raises(CompileError, match=r"merge_states\.cu\(1\)"):
        merge_states(device, o, lse, source="oops")


OUT, LSE = states(2, 3)
O4, LSE4 = states(2, 2, 3)
TABLE = np.array([0, 1, 2], np.int32)
Call = Callable[[Device], Any]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda d: merge_state(d, OUT, LSE, OUT[:1], LSE),
            ShapeError,
            r"o_b has shape \(1, 3, 64\)",
        ),
        (lambda d: merge_state(d, OUT, LSE, OUT, LSE.T), ShapeError, r"lse_b has shape \(3, 2\)"),
        (lambda d: merge_state(d, OUT, LSE, OUT.astype(BF16), LSE), DtypeError, "o_b bfloat16"),
        (lambda d: merge_state(d, OUT, LSE.astype(F16), OUT, LSE), DtypeError, "lse_a is float16"),
        (lambda d: merge_state(d, OUT, LSE, OUT, LSE, dtype=np.float64), DtypeError, "not float64"),
        (
            lambda d: merge_state(d, OUT[:0], LSE[:0], OUT[:0], LSE[:0]),
            LaunchError,
            "0 heads of rows",
        ),
        (lambda d: merge_states(d, O4[..., :32], LSE4), ShapeError, "head_dim is 32.*64.*1024"),
        (lambda d: merge_states(d, OUT, LSE), ShapeError, "rows, states, heads, head_dim"),
        (lambda d: merge_states(d, np.zeros(O4.shape, np.int8), LSE4), DtypeError, "not int8"),
        (
            lambda d: merge_state_in_place(d, OUT, LSE, OUT, LSE, np.ones(3, np.uint8)),
            ShapeError,
            r"mask has shape \(3,\)",
        ),
        (
            lambda d: merge_state_in_place(d, OUT, LSE, OUT, LSE, np.ones(2, np.int8)),
            DtypeError,
            "mask is int8",
        ),
        (
            lambda d: merge_states_variable(d, OUT.astype(F16), LSE, TABLE),
            DtypeError,
            "partial_o is float16",
        ),
        (
            lambda d: merge_states_variable(d, OUT, LSE, TABLE, v_scale=1e39),
            LaunchError,
            r"v_scale is 1e\+39",
        ),
        (
            lambda d: merge_states_variable(d, OUT, LSE, np.array([0, 2, 1])),
            TableError,
            r"merge_indptr\[2\] = 1 is less",
        ),
        (
            lambda d: merge_states_variable(d, OUT, LSE, np.array([0, 3])),
            TableError,
            r"merge_indptr\[1\] = 3 is outside 0 to 2",
        ),
        (
            lambda d: merge_states_variable(d, OUT, LSE, TABLE.astype(np.uint32)),
            DtypeError,
            "merge_indptr must be an int32 or int64 array, got uint32",
        ),
        (lambda d: check_merge_indptr(np.array([2, 3]), 3), TableError, r"merge_indptr\[0\] = 2"),
    ],
)
def test_refusals(device: Device, call: Call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(device)


def test_launch_refuses_arrays_that_do_not_fit(device: Device) -> None:
    arrays = {
        "partial_o": device.array(OUT),
        "partial_lse": device.array(LSE),
        "merge_indptr": device.array(TABLE),
        "o": device.empty((2, 3, 64), F32),
        "lse": device.empty((2, 3), F32),
    }
    for name, wrong, error in (
        ("partial_o", device.empty((2, 4, 64), F32), ShapeError),
        ("partial_lse", device.empty((2, 3), F16), DtypeError),
        ("merge_indptr", device.empty((3,), np.uint32), DtypeError),
        ("merge_indptr", device.empty((2,), np.int32), ShapeError),
        ("lse", device.empty((3, 2), F32), ShapeError),
        ("o", device.empty((2, 3), F32), ShapeError),
    ):
        with pytest.raises(error, match=name):
            launch_merge_states_variable(device, **(arrays | {name: wrong}))
