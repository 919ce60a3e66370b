"""What the machine does with values: exact ones behind tensors, none at all; warps by row."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit.errors import DtypeError
from simkit.machine.machine import Machine
from simkit.machine.memory import Tensor, distinct_sectors, unbacked


def test_reference_tensors_keep_what_rounding_would_lose() -> None:
    machine = Machine("h100", "reference")
    o = machine.allocate("o", (2, 4), ml_dtypes.bfloat16)
    assert np.isnan(o.values).all()
    third = np.full(4, 1 / 3)
    with machine.cta() as cta:
        cta.store(o[1], third, vector=2)
        assert np.array_equal(cta.load(o[1], vector=2), third)
        assert np.array_equal(cta.load(o.reshape(4, 2)[2], vector=2), third[:2])
    # The bytes, and what is counted, are those of bfloat16.
    assert np.array_equal(o.array[1], third.astype(ml_dtypes.bfloat16))
    assert machine.traffic["o", "write"].requested == 8


def test_device_tensors_take_their_own_type_only() -> None:
    machine = Machine("h100", "device")
    o = machine.allocate("o", (4,), np.float32)
    assert np.isnan(o.values).all()
    with machine.cta() as cta, pytest.raises(DtypeError, match="float32, the values are float64"):
        cta.store(o[:], np.ones(4))


def test_codes_have_no_exact_values() -> None:
    cache = Machine("h100", "reference").allocate("cache", (3,), np.uint8)
    assert cache.values.tolist() == [255] * 3


def test_without_arithmetic_bytes_are_counted_and_no_memory_is_taken() -> None:
    machine = Machine("h100", "none")
    s = machine.allocate("s", (32, 32768, 32768), np.uint8)
    t = machine.allocate("t", (512,), np.uint8)
    with machine.cta() as cta:
        cta.store(s[3], None)
        cta.load(s[3, :2])
        cta.load(t[:], repeat=5)
    assert machine.traffic["s", "write"].requested == 2**30
    assert machine.traffic["s", "read"].requested == 2**16
    assert not machine.computes
    # What was touched of s, and t once although it was read five times.
    assert machine.compulsory_bytes("s") == 2**30 + 2**16
    assert machine.compulsory_bytes() == 2**30 + 2**16 + 512
    assert machine.compulsory_bytes("q") == 0


def test_unbacked_arrays_are_read_only_zeros() -> None:
    array = unbacked((3, 5), ml_dtypes.bfloat16)
    assert array.flags.c_contiguous
    assert not array.any()
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1
    assert unbacked((3, 0), np.float32).shape == (3, 0)


def test_a_cta_can_stand_for_many() -> None:
    machine = Machine()
    with machine.cta(count=12):
        pass
    assert machine.ctas == 12


@settings(max_examples=100)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 70),
    width=st.integers(1, 70),
    offset=st.integers(0, 20),
    lanes=st.sampled_from((8, 32)),
)
def test_by_row_every_row_starts_a_warp(
    rows: int, columns: int, width: int, offset: int, lanes: int
) -> None:
    columns = min(columns, width)
    backing = np.zeros((rows + offset, width), np.uint16)
    tensor = Tensor("s", backing, address=1 << 32)
    expected = 0
    for row in range(offset, rows + offset):
        for first in range(0, columns, lanes):
            elements = np.arange(first, min(first + lanes, columns))
            addresses = (1 << 32) + 2 * (row * width + elements)
            expected += 32 * distinct_sectors(addresses[:, None], 2)
    region = tensor[offset:, :columns]
    assert region.traffic(2, lanes, by_row=True) == (rows * columns * 2, expected)
