"""Addresses of tensor copies against an element-by-element model in plain Python, and the swizzles
against the tables of the PTX ISA.
"""

from __future__ import annotations

import itertools
import timeit
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.ptx.memory import Bytes
from gpu.ptx.tma import filled, swizzle, tile_copy
from gpu.tensor_map import ELEMENTS, TensorMapFields
from simkit.errors import CapacityError, ShapeError

SPANS = {"none": 0, "32B": 32, "64B": 64, "128B": 128}
# PTX ISA 8.8, 5.5.7: which 16-byte chunk of the linear layout lies at each place of a 128-byte
# line, line by line, from an address where the pattern starts.
PATTERNS = {
    "none": ["01234567"],
    "32B": ["01234567", "10325476"],
    "64B": ["01234567", "10325476", "23016745", "32107654"],
    "128B": [
        "01234567", "10325476", "23016745", "32107654",
        "45670123", "54761032", "67452301", "76543210",
    ],
    "128B_ATOM_32B": ["01234567", "23016745", "45670123", "67452301"],
    "128B_ATOM_64B": ["01234567", "45670123"],
}  # fmt: skip


@pytest.mark.parametrize("mode", PATTERNS)
def test_swizzles_are_the_isas_tables(mode: str) -> None:
    pattern = PATTERNS[mode]
    for line in range(20):
        for place, chunk in enumerate(pattern[line % len(pattern)]):
            for byte in (0, 15):
                linear = 4096 + line * 128 + int(chunk) * 16 + byte
                expected = 4096 + line * 128 + place * 16 + byte
                assert swizzle(np.array([linear], np.int64), mode)[0] == expected


@pytest.mark.parametrize("mode", [*PATTERNS, "128B_ATOM_32B_FLIP_8B"])
def test_swizzles_are_permutations_and_their_own_inverse(mode: str) -> None:
    addresses = np.arange(4096, dtype=np.int64)
    mixed = swizzle(addresses, mode)
    assert np.array_equal(np.sort(mixed), addresses)
    assert np.array_equal(swizzle(mixed, mode), addresses)


def test_the_flip_swaps_8_bytes_in_every_other_line() -> None:
    lines = np.arange(512, dtype=np.int64)
    whole, flipped = swizzle(lines, "128B_ATOM_32B"), swizzle(lines, "128B_ATOM_32B_FLIP_8B")
    odd = (lines // 128) % 2 == 1
    assert np.array_equal(flipped[~odd], whole[~odd])
    assert np.array_equal(flipped[odd], whole[odd] ^ 8)


def brute_force(
    fields: TensorMapFields, start: tuple[int, ...], memory: bytes, base: int, shared: bytearray
) -> tuple[int, list[int]]:
    """One copy to shared address ``base``, element by element; bytes moved, addresses written."""
    size = fields.element.size
    steps = zip(fields.box, fields.element_strides, strict=True)
    counts = [len(range(0, extent, step)) for extent, step in steps]
    pitch = max(counts[0] * size, SPANS[fields.swizzle])
    moved, written = 0, []
    for index in itertools.product(*(range(c) for c in reversed(counts))):
        index = index[::-1]
        row = 0
        for dim in range(fields.rank - 1, 0, -1):
            row = row * counts[dim] + index[dim]
        where, inside = fields.address, True
        for dim in range(fields.rank):
            place = start[dim] + index[dim] * fields.element_strides[dim]
            inside = inside and 0 <= place < fields.dims[dim]
            where += place * (size if dim == 0 else fields.strides[dim - 1])
        fill = b"\xf7\x7f" * 4 if fields.oob_fill == "nan" else bytes(8)
        value = memory[where : where + size] if inside else fill[:size]
        to = base + row * pitch + index[0] * size
        lines, chunk = divmod(to, 128)
        pattern = PATTERNS[fields.swizzle]
        to = lines * 128 + pattern[lines % len(pattern)].index(str(chunk // 16)) * 16 + chunk % 16
        shared[to : to + size] = value
        moved += size
        written.append(to)
    return moved, written


def copied(fields: TensorMapFields, starts: np.ndarray, memory: Bytes, base: int) -> list[bytes]:
    """The same through tile_copy, as the executor does it: 8 KiB of shared memory for each lane."""
    copy = tile_copy(fields, starts)
    assert copy.valid.shape == copy.global_offsets.shape == (len(starts), len(copy.shared_offsets))
    assert copy.is_whole == bool(copy.valid.all())
    data = memory.gather(np.where(copy.valid, copy.global_offsets, 0), copy.unit, 1)[0]
    data = filled(data, copy.valid, fields)
    shared = Bytes(np.full(len(starts) * 8192, 0xEE, np.uint8))
    flat = np.arange(len(starts))[:, None] * 8192 + base + copy.shared_offsets
    shared.scatter(swizzle(flat, fields.swizzle), copy.unit, [data], None)
    return [shared.data[i : i + 8192].tobytes() for i in range(0, len(shared.data), 8192)]


@st.composite
def maps(draw: st.DrawFn) -> tuple[TensorMapFields, np.ndarray]:
    """A small tensor map, and where three lanes copy."""
    element = draw(st.sampled_from(ELEMENTS))
    mode = draw(st.sampled_from(sorted(SPANS)))
    rank = draw(st.integers(1, 5))
    row = draw(st.sampled_from([16, 32, 48, 64, 128]))
    row = min(row, SPANS[mode] or row)
    dims = [draw(st.integers(1, 40))] + [draw(st.integers(1, 6)) for _ in range(rank - 1)]
    box = [row // element.size] + [draw(st.integers(1, 5)) for _ in range(rank - 1)]
    while np.prod(box[1:]) > 24:
        box[int(np.argmax(box[1:])) + 1] -= 1
    jumps = [1] + [draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in range(rank - 1)]
    strides: list[int] = []
    extent = dims[0] * element.size
    for dim in dims[1:]:
        strides.append(-(-extent // 16) * 16 + 16 * draw(st.integers(0, 1)))
        extent = strides[-1] * dim
    fill = draw(st.sampled_from(["zeros", "nan"] if element.is_float else ["zeros"]))
    fields = TensorMapFields(
        element, 64, tuple(dims), tuple(strides), tuple(box), tuple(jumps), mode, oob_fill=fill
    )
    multiple = draw(st.sampled_from([1, max(1, 16 // element.size)]))
    starts = [
        [draw(st.integers(-box[0] - 1, dims[0])) // multiple * multiple]
        + [draw(st.integers(-6, 7)) for _ in dims[1:]]
        for _ in range(3)
    ]
    return fields, np.array(starts, np.int64)


@settings(max_examples=150)
@given(maps(), st.sampled_from([0, 128, 384, 896]))
def test_copies_equal_the_brute_force_model(
    case: tuple[TensorMapFields, np.ndarray], base: int
) -> None:
    fields, starts = case
    extent = fields.address + fields.dims[0] * fields.element.size
    if fields.rank > 1:
        extent = fields.address + fields.strides[-1] * fields.dims[-1]
    data = np.random.default_rng(1).integers(0, 256, extent // 16 * 16 + 64, np.uint8)
    found = copied(fields, starts, Bytes(data), base)
    copy = tile_copy(fields, starts)
    for lane, start in enumerate(starts.tolist()):
        expected = bytearray(b"\xee" * 8192)
        moved, written = brute_force(fields, tuple(start), data.tobytes(), base, expected)
        assert found[lane] == bytes(expected)
        assert copy.bytes == fields.tile_bytes == moved
        assert max(written) < base + copy.shared_bytes


def a_map(**changes: Any) -> TensorMapFields:
    """64 x 64 elements of bf16 from a matrix of 100 rows of 72."""
    values: dict[str, Any] = {
        "element": ELEMENTS[9],
        "address": 1024,
        "dims": (72, 100),
        "strides": (144,),
        "box": (64, 64),
        "element_strides": (1, 1),
        "swizzle": "128B",
    }
    return TensorMapFields(**{**values, **changes})


def test_a_tile_of_bf16_moves_16_byte_pieces() -> None:
    copy = tile_copy(a_map(), np.array([[8, 3]]))
    assert (copy.unit, copy.bytes, copy.shared_bytes, copy.is_whole) == (16, 8192, 8192, True)
    assert copy.global_offsets[0, :9].tolist() == [
        1024 + 3 * 144 + 16 + 16 * i for i in range(8)
    ] + [1024 + 4 * 144 + 16]
    assert copy.shared_offsets[:9].tolist() == list(range(0, 144, 16))


def test_pieces_shrink_to_what_the_coordinates_and_the_edge_allow() -> None:
    assert tile_copy(a_map(), np.array([[8, 0], [16, 0]])).unit == 16
    assert tile_copy(a_map(), np.array([[8, 0], [12, 0]])).unit == 8
    assert tile_copy(a_map(), np.array([[8, 0], [-3, 0]])).unit == 2
    assert tile_copy(a_map(dims=(71, 100)), np.array([[0, 0]])).unit == 16
    assert tile_copy(a_map(dims=(71, 100)), np.array([[8, 0]])).unit == 2
    assert tile_copy(a_map(swizzle="128B_ATOM_32B_FLIP_8B"), np.array([[8, 0]])).unit == 8


def test_rows_outside_count_and_are_not_valid() -> None:
    copy = tile_copy(a_map(), np.array([[0, 98], [0, 36], [0, -64], [2**31 - 1, -(2**31)]]))
    rows = copy.valid.reshape(4, 64, -1).all(axis=2).sum(axis=1)
    assert rows.tolist() == [2, 64, 0, 0]
    assert copy.bytes == 64 * 64 * 2


def test_the_last_row_and_column_of_a_tile_may_be_outside() -> None:
    rows = tile_copy(a_map(), np.array([[0, 36], [0, 37]]))
    assert rows.valid.reshape(2, 64, -1).all(axis=2).sum(axis=1).tolist() == [64, 63]
    columns = tile_copy(a_map(), np.array([[8, 0], [9, 0]]))
    assert (columns.unit, columns.is_whole) == (2, False)
    assert columns.valid.reshape(2, 64, 64).all(axis=1).sum(axis=1).tolist() == [64, 63]


def test_element_strides_take_every_nth_row() -> None:
    copy = tile_copy(a_map(box=(8, 9), element_strides=(1, 4), swizzle="none"), np.array([[0, 95]]))
    assert copy.bytes == 3 * 16
    assert copy.shared_offsets.tolist() == [0, 16, 32]
    assert copy.valid.tolist() == [[True, True, False]]
    assert copy.global_offsets[0, :2].tolist() == [1024 + 95 * 144, 1024 + 99 * 144]


def test_short_swizzled_rows_take_a_whole_span() -> None:
    copy = tile_copy(a_map(box=(8, 4)), np.array([[0, 0]]))
    assert copy.shared_offsets.tolist() == [0, 128, 256, 384]
    assert (copy.bytes, copy.shared_bytes) == (64, 512)
    places = swizzle(copy.shared_offsets, "128B")
    assert places.tolist() == [0, 128 + 16, 256 + 32, 384 + 48]


def test_fills_are_zeros_and_nans_of_every_format() -> None:
    valid = np.array([[True, False]])
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        size = np.dtype(dtype).itemsize
        element = next(e for e in ELEMENTS if np.dtype(dtype).name in e.dtypes)
        for unit in (size, 16):
            code = "c16" if unit == 16 else f"u{unit}"
            data = np.arange(1, 33, dtype=np.uint8)[: 2 * unit].view(code).reshape(1, 2)
            zeros = filled(data, valid, a_map(element=element))
            nans = filled(data, valid, a_map(element=element, oob_fill="nan"))
            assert zeros.tobytes() == data.tobytes()[:unit] + bytes(unit)
            assert nans.tobytes()[:unit] == data.tobytes()[:unit]
            with np.errstate(invalid="ignore"):
                assert np.isnan(np.frombuffer(nans.tobytes()[unit:], dtype)).all()


def test_wrong_coordinates_and_tiles_that_fit_nowhere() -> None:
    with pytest.raises(ShapeError, match=r"\(1, 3\).*2 dimensions"):
        tile_copy(a_map(), np.zeros((1, 3), np.int64))
    large = a_map(dims=(256,) * 5, strides=(512,) * 4, box=(256,) * 5, element_strides=(1,) * 5)
    with pytest.raises(CapacityError, match="256x256x256x256x256"):
        tile_copy(large, np.zeros((1, 5), np.int64))


def test_a_tile_for_every_sm_is_quick() -> None:
    fields = a_map(dims=(128, 100_000), strides=(256,))
    starts = np.zeros((132, 2), np.int64)
    starts[:, 1] = np.arange(132) * 64
    tile_copy(fields, starts)
    # 60 us where nothing else runs; the limit notices tables that are built anew.
    assert min(timeit.repeat(lambda: tile_copy(fields, starts), number=10, repeat=5)) / 10 < 1e-3
