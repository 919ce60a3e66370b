"""Sectors, wavefronts and regions against plain Python that walks byte by byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit.errors import DtypeError, MemoryAccessError, ShapeError
from simkit.machine.machine import Machine
from simkit.machine.memory import (
    VECTOR_SIZES,
    Region,
    distinct_sectors,
    sector_addresses,
    wavefronts,
)


def sectors_by_byte(addresses: np.ndarray, size: int, active: np.ndarray) -> list[int]:
    found: list[int] = []
    for column in range(addresses.shape[1]):
        touched = {
            (int(addresses[lane, column]) + byte) // 32
            for lane in range(addresses.shape[0])
            if active[lane, column]
            for byte in range(size)
        }
        found += [32 * sector for sector in sorted(touched)]
    return found


@st.composite
def warp_accesses(draw: st.DrawFn, aligned: bool) -> tuple[np.ndarray, int, np.ndarray | None]:
    size = draw(st.sampled_from(VECTOR_SIZES if aligned else (1, 3, 16, 40, 100)))
    n = draw(st.integers(0, 4))
    span = draw(st.sampled_from((4, 64, 4096)))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    addresses = rng.integers(0, span, (32, n)) * (size if aligned else 1)
    if draw(st.booleans()):
        addresses = np.sort(addresses, axis=0)
    dtype = draw(st.sampled_from((np.int64, np.uint64, np.int32)))
    odds = draw(st.sampled_from((None, 0.05, 0.5, 0.9)))
    active = None if odds is None else rng.random((32, n)) < odds
    return addresses.astype(dtype), size, active


@given(warp_accesses(aligned=False))
def test_sectors_equal_a_walk_over_all_bytes(
    case: tuple[np.ndarray, int, np.ndarray | None],
) -> None:
    addresses, size, active = case
    expected = sectors_by_byte(addresses, size, np.ones(addresses.shape, bool))
    if active is not None:
        expected = sectors_by_byte(addresses, size, active)
    assert distinct_sectors(addresses, size, active) == len(expected)
    assert sector_addresses(addresses, size, active).tolist() == expected


def lane_addresses(*addresses: Any) -> np.ndarray:
    return np.array(addresses, np.int64).reshape(-1, 1)


@pytest.mark.parametrize(
    ("stride", "size", "expected"),
    [
        (16, 16, 16),  # 512 consecutive bytes
        (4, 4, 4),  # 128 consecutive bytes
        (2, 2, 2),
        (0, 4, 1),  # a broadcast
        (32, 4, 32),  # every lane in a sector of its own
        (1152, 16, 32),  # rows of 576 bf16
    ],
)
def test_sectors_of_well_known_patterns(stride: int, size: int, expected: int) -> None:
    assert distinct_sectors(stride * np.arange(32)[:, None], size) == expected


def test_misaligned_row_takes_one_more_sector() -> None:
    assert distinct_sectors(16 + 16 * np.arange(32)[:, None], 16) == 17


def test_the_highest_addresses_do_not_overflow() -> None:
    top = np.full((32, 1), 2**63 + 64, np.uint64)
    assert distinct_sectors(top, 16) == 1
    assert distinct_sectors(np.zeros((32, 1), np.uint64), 16) == 1


def test_sector_arguments_are_checked() -> None:
    with pytest.raises(ShapeError, match=r"\(32,\)"):
        distinct_sectors(np.zeros(32, np.int64), 4)
    with pytest.raises(ShapeError, match="size 0"):
        distinct_sectors(np.zeros((32, 1), np.int64), 0)
    with pytest.raises(ShapeError, match="active"):
        distinct_sectors(np.zeros((32, 2), np.int64), 4, np.ones((32, 1), bool))


def wavefronts_by_word(addresses: np.ndarray, size: int, active: np.ndarray) -> tuple[int, int]:
    lanes_per_phase = {1: 32, 2: 32, 4: 32, 8: 16, 16: 8}[size]
    actual = ideal = 0
    for column in range(addresses.shape[1]):
        for start in range(0, 32, lanes_per_phase):
            words: set[int] = set()
            for lane in range(start, start + lanes_per_phase):
                if active[lane, column]:
                    first = int(addresses[lane, column])
                    words |= {(first + byte) // 4 for byte in range(size)}
            banks = [word % 32 for word in words]
            actual += max((banks.count(bank) for bank in range(32)), default=0)
            ideal += -(-len(words) // 32)
    return actual, ideal


@given(warp_accesses(aligned=True))
def test_wavefronts_equal_a_count_by_bank(
    case: tuple[np.ndarray, int, np.ndarray | None],
) -> None:
    addresses, size, active = case
    everyone = np.ones(addresses.shape, bool) if active is None else active
    assert wavefronts(addresses, size, active) == wavefronts_by_word(addresses, size, everyone)


@pytest.mark.parametrize(
    ("addresses", "size", "expected"),
    [
        (4 * np.arange(32), 4, (1, 1)),
        (8 * np.arange(32), 4, (2, 1)),  # stride of two words: two-way conflict
        (128 * np.arange(32), 4, (32, 1)),  # all in one bank
        (np.zeros(32, int), 4, (1, 1)),  # a broadcast
        (132 * np.arange(32), 4, (1, 1)),  # a column of a tile padded by one word
        (2 * np.arange(32), 2, (1, 1)),  # two lanes a word
        (8 * np.arange(32), 8, (2, 2)),
        (16 * np.arange(32), 16, (4, 4)),
        (128 * np.arange(32), 16, (32, 4)),  # ldmatrix on 64 bf16 a row, no swizzle
        (128 * np.arange(32) + 16 * (np.arange(32) % 8), 16, (4, 4)),  # the same, swizzled
        (144 * np.arange(32), 16, (4, 4)),  # the same, padded by 16 bytes
    ],
)
def test_wavefronts_of_well_known_patterns(
    addresses: np.ndarray, size: int, expected: tuple[int, int]
) -> None:
    assert wavefronts(addresses[:, None], size) == expected


def test_wavefront_arguments_are_checked() -> None:
    with pytest.raises(ShapeError, match="size 12"):
        wavefronts(np.zeros((32, 1), np.int64), 12)
    with pytest.raises(ShapeError, match=r"\(16, 1\)"):
        wavefronts(np.zeros((16, 1), np.int64), 4)


def traffic_by_lane(region: Region, vector: int, lanes: int, share: int) -> tuple[int, int]:
    """Deals the region's bytes out to lanes and counts sectors per warp instruction."""
    base = region.tensor.address
    numbers = np.arange(region.tensor.array.size).reshape(region.tensor.shape)
    # A view with the region's own strides, over element numbers in place of values.
    offset = (region.address - base) // region.view.itemsize
    steps = [stride // region.view.itemsize * 8 for stride in region.view.strides]
    view = np.lib.stride_tricks.as_strided(numbers.ravel()[offset:], region.shape, steps)
    itemsize = region.view.itemsize
    every_byte = [
        base + int(number) * itemsize + byte for number in view.ravel() for byte in range(itemsize)
    ]
    chunks = [every_byte[i : i + vector] for i in range(0, len(every_byte), vector)]
    if share > lanes:
        warps = [[chunk] * lanes for chunk in chunks for _ in range(-(-share // lanes))]
    else:
        dealt = [chunk for chunk in chunks for _ in range(share)]
        warps = [dealt[i : i + lanes] for i in range(0, len(dealt), lanes)]
    sectors = sum(len({byte // 32 for chunk in warp for byte in chunk}) for warp in warps)
    return len(every_byte) * share, 32 * sectors


@st.composite
def regions(draw: st.DrawFn) -> tuple[Region, int, int, int]:
    shape = draw(st.tuples(*[st.integers(1, 9), st.integers(1, 5), st.sampled_from((8, 24, 64))]))
    dtype = draw(st.sampled_from((np.uint8, np.uint16, np.float32)))
    tensor = Machine().tensor("x", np.zeros(shape, dtype))
    index = []
    for length in shape:
        start = draw(st.integers(0, length - 1))
        stop = draw(st.integers(start, length))
        index.append(draw(st.sampled_from((start, slice(None), slice(start, stop), slice(0, 0)))))
    lanes = draw(st.sampled_from((1, 8, 30, 32)))
    share = draw(st.sampled_from((1, 2, 32, 48, 64)))
    return tensor[tuple(index)], draw(st.sampled_from(VECTOR_SIZES)), lanes, share


@given(regions())
@settings(max_examples=300)
def test_region_traffic_equals_dealing_bytes_to_lanes(
    case: tuple[Region, int, int, int],
) -> None:
    region, vector, lanes, share = case
    try:
        counted = region.traffic(vector, lanes, share)
    except (ShapeError, MemoryAccessError):
        run, outer = region.runs()
        misfit = run % vector or (share < lanes and lanes % share)
        assert misfit or region.address % vector or any(s % vector for _, s in outer)
        return
    assert counted == traffic_by_lane(region, vector, lanes, share)


def test_a_region_knows_where_it_lies() -> None:
    machine = Machine()
    machine.tensor("first", np.zeros(3, np.uint8))
    kv = machine.tensor("kv", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    assert kv.address % 256 == 0
    assert kv[1, 2, 3].address == kv.address + 4 * 23
    assert kv[:, 1].runs() == (16, ((2, 48),))
    assert kv[1].runs() == (48, ())
    assert kv[1].nbytes == 48
    assert kv.reshape(6, 4)[5].address == kv.address + 80
    assert kv[0, 0, 0].shape == ()


@pytest.mark.parametrize("index", [[0, 1], np.array([True, False]), True, 1.0])
def test_fancy_indexing_is_refused(index: Any) -> None:
    kv = Machine().tensor("kv", np.zeros((2, 4)))
    with pytest.raises(ShapeError, match="kv"):
        kv[index]


def test_errors_name_the_tensor() -> None:
    machine = Machine()
    kv = machine.tensor("kv", np.zeros((4, 6), np.float32))
    with pytest.raises(MemoryAccessError, match=r"'kv' of shape \(4, 6\)"):
        kv[4]
    with pytest.raises(ShapeError, match=r"kv.*\(5, 5\)"):
        kv.reshape(5, 5)
    with pytest.raises(ShapeError, match="runs of 20 bytes"):
        kv[0, :5].traffic(16)
    with pytest.raises(MemoryAccessError, match="stride 24"):
        kv[:, :4].traffic(16)
    with pytest.raises(ShapeError, match="C-contiguous"):
        machine.tensor("transposed", np.zeros((4, 6)).T)
    with machine.cta() as cta:
        with pytest.raises(ShapeError, match=r"\(3,\)"):
            cta.store(kv[0], np.zeros(3, np.float32), vector=4)
        with pytest.raises(DtypeError, match="float64"):
            cta.store(kv[0], np.zeros(6), vector=4)
