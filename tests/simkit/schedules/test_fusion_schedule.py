"""Fusion: the tensors in between stay in registers."""

from __future__ import annotations

import pytest

from simkit.errors import ShapeError
from simkit.machine.gpus import gpu
from simkit.schedules.fusion import Operation, elementwise, fused, operation_bytes
from simkit.schedules.prediction import predict

H100 = gpu("h100")
GATED = (
    Operation(name="add", reads=("x", "residual"), writes=("a",)),
    Operation(name="silu", reads=("a",), writes=("b",), fma=4),
    Operation(name="multiply", reads=("b", "y"), writes=("c",)),
)


def test_a_fused_chain_reads_its_inputs_and_writes_its_result() -> None:
    one = fused(GATED)
    assert (one.reads, one.writes, one.fma) == (("x", "residual", "y"), ("c",), 6)
    assert sum(operation_bytes(each, 1000) for each in GATED) == 8 * 2000
    assert operation_bytes(one, 1000) == 4 * 2000


@pytest.mark.parametrize("values", [2**12, 2**25])
def test_it_takes_less_time(values: int) -> None:
    """Two launches less, and half the bytes."""
    apart = predict(H100, [elementwise(H100, each, values) for each in GATED])
    together = predict(H100, [elementwise(H100, fused(GATED), values)])
    assert together.seconds < apart.seconds
    if values == 2**25:
        rate = H100.hbm_bytes_per_s * H100.hbm_read_fraction
        for run in (*apart.runs, *together.runs):
            assert run.busy["hbm"] * run.rates["hbm"] == pytest.approx(run.launch.hbm_bytes)
            assert run.launch.hbm_bytes / rate <= run.seconds
            assert run.bound.startswith("hbm")
    else:
        assert apart.bound == "launching"


def test_a_kept_tensor_is_written_too() -> None:
    """Residual addition and normalisation in a kernel: both sums are wanted."""
    norm = Operation(name="norm", reads=("a", "weight"), writes=("n",), fma=3)
    one = fused((GATED[0], norm), keep=("a",))
    assert (one.reads, one.writes) == (("x", "residual", "weight"), ("a", "n"))


def test_an_operation_alone_is_itself() -> None:
    assert fused(GATED[:1]) == GATED[0]


def test_chains_that_cannot_be_fused() -> None:
    with pytest.raises(ShapeError, match="no operation"):
        fused([])
    with pytest.raises(ShapeError, match=r"writes \['x'\]"):
        fused(GATED, keep=("a", "x"))
    with pytest.raises(ShapeError, match="add of 0 values"):
        elementwise(H100, GATED[0], 0)
