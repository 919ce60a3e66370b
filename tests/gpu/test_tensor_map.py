"""Tensor maps: the driver's checks, both descriptors, and maps as kernel arguments."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpu
from gpu import driver
from gpu.arguments import Parameter, pack
from gpu.tensor_map import ELEMENTS, SWIZZLES, TensorMap, TensorMapFields, decode, encode
from simkit.errors import (
    DeviceUnavailableError,
    DtypeError,
    LaunchError,
    MemoryAccessError,
    ShapeError,
    SimkitError,
)


def an_array(shape: tuple[int, ...] = (4, 128, 64), dtype: Any = ml_dtypes.bfloat16) -> Any:
    return types.SimpleNamespace(
        name="k", address=0x7000_0000_0100, shape=shape, dtype=np.dtype(dtype)
    )


def test_python_counts_outermost_first_and_fields_innermost_first() -> None:
    fields = TensorMap(an_array(), (1, 32, 64), element_strides=(1, 2, 1)).fields
    assert fields.dims == (64, 128, 4)
    assert fields.strides == (128, 128 * 128)
    assert fields.box == (64, 32, 1)
    assert fields.element_strides == (1, 2, 1)
    assert fields.tile == (64, 16, 1)
    assert fields.tile_bytes == 64 * 16 * 2
    assert (fields.element.name, fields.code, fields.rank) == ("bf16", "u2", 3)


def test_shape_strides_and_dtype_describe_another_view() -> None:
    array = an_array((10_000,), np.uint8)
    view = TensorMap(array, (8, 32), shape=(20, 100), strides=(320, 2), dtype=np.float16).fields
    assert (view.dims, view.strides, view.element.name) == ((100, 20), (320,), "f16")
    assert TensorMap(an_array((5, 64)), (8,), shape=(320,)).fields.dims == (320,)
    # Rows of a sliced NumPy array: its own strides can be handed over.
    rows = np.zeros((20, 128), np.float32)[::2, :40]
    taken = TensorMap(
        an_array((20, 128), np.float32), (4, 16), shape=rows.shape, strides=rows.strides
    )
    assert (taken.fields.dims, taken.fields.strides) == ((40, 10), (1024,))


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.uint8, "u8"), (np.int8, "u8"), (np.bool_, "u8"), (ml_dtypes.float8_e4m3fn, "u8"),
        (ml_dtypes.float8_e5m2, "u8"), (np.uint16, "u16"), (np.int16, "u16"), (np.uint32, "u32"),
        (np.int32, "s32"), (np.uint64, "u64"), (np.int64, "s64"), (np.float16, "f16"),
        (np.float32, "f32"), (np.float64, "f64"), (ml_dtypes.bfloat16, "bf16"),
    ],
)  # fmt: skip
def test_dtypes(dtype: Any, name: str) -> None:
    element = TensorMap(an_array((8, 64), dtype), (8, 16)).fields.element
    assert element.name == name
    assert element.size == np.dtype(dtype).itemsize == np.dtype(element.code).itemsize
    assert ELEMENTS[element.value] is element


def refused(error: type[SimkitError], *words: str, **changes: Any) -> None:
    arguments: dict[str, Any] = {"array": an_array(), "box": (1, 32, 64), **changes}
    with pytest.raises(error) as caught:
        TensorMap(arguments.pop("array"), arguments.pop("box"), **arguments)
    for word in ("'k'", *words):
        assert word in str(caught.value)


def test_the_driver_s_checks() -> None:
    off = an_array()
    off.address += 8
    refused(MemoryAccessError, "0x700000000108", "multiple of 16", array=off)
    refused(ShapeError, "0 dimensions", "1 to 5", array=an_array(()), box=())
    refused(
        ShapeError, "6 dimensions", "1 to 5", array=an_array((1,) * 5 + (64,)), box=(1,) * 5 + (8,)
    )
    refused(ShapeError, "box has 2 entries", "3 dimensions", box=(32, 64))
    refused(ShapeError, "shape[1] is 0", "1 to 4294967296", shape=(4, 0, 64))
    refused(ShapeError, "shape[0] is 4294967297", shape=(2**32 + 1, 1, 64), strides=(128, 128, 2))
    refused(ShapeError, "strides[1] is 136", "multiple of 16", shape=(4, 128, 68))
    refused(ShapeError, "strides[0] is 1099511627776", "1099511627775", strides=(2**40, 128, 2))
    refused(ShapeError, "strides[0] is -128", "0 to", strides=(-128, 128, 2))
    refused(ShapeError, "innermost stride is 4", "2 bytes", strides=(2**20, 256, 4))
    refused(ShapeError, "box[1] is 257", "1 to 256", box=(1, 257, 64))
    refused(ShapeError, "box[0] is 0", "1 to 256", box=(0, 32, 64))
    refused(ShapeError, "box[2] is 63", "126 bytes", "multiple of 16", box=(1, 32, 63))
    refused(ShapeError, "box[2] is 64", "128 bytes", "64 of", "'64B'", swizzle="64B")
    refused(ShapeError, "element_strides[1] is 9", "1 to 8", element_strides=(1, 9, 1))
    refused(ShapeError, "element_strides[2] is 2", "innermost", element_strides=(1, 1, 2))
    refused(DtypeError, "complex64", "bfloat16", array=an_array((8, 64), np.complex64), box=(8, 8))
    refused(DtypeError, "u16", "no NaN", array=an_array(dtype=np.int16), oob_fill="nan")
    refused(ShapeError, "uint8", "bfloat16", "shape must be given", dtype=np.uint8)
    refused(LaunchError, "swizzle is '256B'", "none, 32B, 64B, 128B", swizzle="256B")
    refused(LaunchError, "interleave is 'x'", "none, 16B, 32B", interleave="x")
    refused(LaunchError, "l2_promotion is '32B'", l2_promotion="32B")
    refused(LaunchError, "oob_fill is 'ones'", oob_fill="ones")


def test_interleaved_layouts_have_checks_of_their_own() -> None:
    refused(
        ShapeError, "2 dimensions", "3 to 5", array=an_array((8, 64)), box=(8, 8), interleave="16B"
    )
    refused(ShapeError, "swizzle '32B', not '128B'", interleave="32B", swizzle="128B")
    off = an_array()
    off.address += 16
    refused(MemoryAccessError, "multiple of 32", array=off, interleave="32B", swizzle="32B")
    refused(
        ShapeError, "strides[1] is 48", "multiple of 32",
        shape=(4, 8, 16), strides=(64 * 48, 48, 2), interleave="32B", swizzle="32B",
    )  # fmt: skip
    fields = TensorMap(an_array(), (1, 32, 64), interleave="32B", swizzle="32B").fields
    with pytest.raises(LaunchError, match="interleave '32B'"):
        encode(fields)


def test_limits_are_allowed() -> None:
    TensorMap(an_array(), (1, 256, 64), element_strides=(8, 8, 1), swizzle="128B")
    TensorMap(an_array((2**32,), np.uint8), (256,))
    TensorMap(an_array(), (4, 1, 64), shape=(4, 2**32, 64), strides=(2**40 - 16, 0, 2))


# The executor's descriptor


@st.composite
def fields(draw: st.DrawFn) -> TensorMapFields:
    rank = draw(st.integers(1, 5))

    def some(low: int, high: int, count: int = rank) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=count, max_size=count)))

    return TensorMapFields(
        draw(st.sampled_from(ELEMENTS)),
        draw(st.integers(0, 2**60 - 1)) * 16,
        some(1, 2**32),
        tuple(16 * s for s in some(0, 2**36 - 1, rank - 1)),
        some(1, 256),
        some(1, 8),
        draw(st.sampled_from(list(SWIZZLES))),
        "none",
        draw(st.sampled_from(["none", "64B", "128B", "256B"])),
        draw(st.sampled_from(["zeros", "nan"])),
    )


@given(fields(), st.integers(0, 1000))
def test_descriptors_survive_being_copied_anywhere(given: TensorMapFields, offset: int) -> None:
    memory = bytearray(b"\xff" * 2048)
    memory[offset : offset + 128] = encode(given)
    assert decode(bytes(memory[offset : offset + 128])) == given


@given(fields(), st.integers(0, 127), st.integers(1, 255))
def test_any_damaged_byte_is_noticed(given: TensorMapFields, place: int, change: int) -> None:
    damaged = bytearray(encode(given))
    damaged[place] ^= change
    with pytest.raises(LaunchError, match="tensor map"):
        decode(bytes(damaged))


def test_foreign_descriptors_say_what_they_are() -> None:
    for data, words in (
        (bytes(128), "0x00: nobody has written it"),
        (b"\xff" * 128, "0xff: nobody has written it"),
        (bytes(range(128)), "begins with 00 01 02 03 04 05 06 07; make it with gpu.TensorMap"),
        (bytes(64), "has 128 bytes, this one has 64"),
    ):
        with pytest.raises(LaunchError, match=words):
            decode(data)
    later = bytearray(encode(TensorMap(an_array(), (1, 32, 64)).fields))
    later[4] += 1
    with pytest.raises(LaunchError, match="version 2, known is 1"):
        decode(bytes(later))


def test_an_array_of_the_executor_gets_its_descriptor() -> None:
    device = gpu.open("ptx")
    array = device.array(np.zeros((16, 64), np.float32), name="x")
    tensor_map = gpu.TensorMap(array, (16, 32), swizzle="128B", oob_fill="nan")
    found = decode(bytes(tensor_map))
    assert found == tensor_map.fields
    assert (found.address, found.dims, found.strides) == (array.address, (64, 16), (256,))
    assert (found.swizzle, found.oob_fill) == ("128B", "nan")


# The driver's descriptor

PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_int, *driver._ENCODE_TILED_ARGUMENTS)


def fake_driver(calls: list[dict[str, Any]], result: int = 0) -> Callable[..., int]:
    """A C function of cuTensorMapEncodeTiled's signature that records what it is given."""

    def encode_tiled(
        to: int, dtype: int, rank: int, address: int, dims: Any, strides: Any, box: Any,
        element_strides: Any, interleave: int, swizzle: int, promotion: int, fill: int,
    ) -> int:  # fmt: skip
        calls.append(
            {
                "alignment": to % 64,
                "dtype": dtype,
                "address": address,
                "dims": dims[:rank],
                "strides": strides[: rank - 1],
                "box": box[:rank],
                "element_strides": element_strides[:rank],
                "modes": (interleave, swizzle, promotion, fill),
            }
        )
        ctypes.memmove(to, bytes(range(128)), 128)
        return result

    return PROTOTYPE(encode_tiled)


def test_the_driver_gets_the_fields_by_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    function = fake_driver(calls)
    monkeypatch.setattr(driver, "encode_tiled_function", lambda: function)
    tensor_map = TensorMap(
        an_array((3, 2**32, 64)),
        (1, 32, 16),
        strides=(2**40 - 16, 128, 2),
        element_strides=(1, 2, 1),
        swizzle="32B",
        l2_promotion="256B",
        oob_fill="nan",
    )
    assert not calls
    assert bytes(tensor_map) == bytes(range(128))
    assert bytes(tensor_map) == bytes(range(128))
    # cuda.h: BFLOAT16 is 9, SWIZZLE_32B 1, L2_256B 3, NAN_REQUEST_ZERO_FMA 1.
    assert calls == [
        {
            "alignment": 0,
            "dtype": 9,
            "address": 0x7000_0000_0100,
            "dims": [64, 2**32, 3],
            "strides": [128, 2**40 - 16],
            "box": [16, 32, 1],
            "element_strides": [1, 2, 1],
            "modes": (0, 1, 3, 1),
        }
    ]


def test_one_dimension_and_interleaving_reach_the_driver() -> None:
    calls: list[dict[str, Any]] = []
    driver.encode_tiled(TensorMap(an_array((64,), np.int32), (64,)).fields, fake_driver(calls))
    interleaved = TensorMap(an_array(), (1, 32, 64), interleave="16B", swizzle="64B")
    driver.encode_tiled(interleaved.fields, fake_driver(calls))
    assert (calls[0]["dims"], calls[0]["strides"], calls[0]["dtype"]) == ([64], [], 3)
    assert calls[1]["modes"] == (1, 2, 0, 0)


def test_the_driver_s_refusal_is_an_error() -> None:
    with pytest.raises(
        LaunchError, match=r"failed with 1 \(invalid value\) for .*'bf16'.*\(64, 128, 4\)"
    ):
        driver.encode_tiled(TensorMap(an_array(), (1, 32, 64)).fields, fake_driver([], 1))


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    driver.encode_tiled_function.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(DeviceUnavailableError, match=r"libcuda\.so|nvcuda"):
        bytes(TensorMap(an_array(), (1, 32, 64)))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    with pytest.raises(DeviceUnavailableError, match=r"no cuTensorMapEncodeTiled"):
        bytes(TensorMap(an_array(), (1, 32, 64)))


def test_foreign_arrays_are_encoded_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    function = fake_driver(calls)
    monkeypatch.setattr(driver, "encode_tiled_function", lambda: function)
    foreign = types.SimpleNamespace(
        __cuda_array_interface__={
            "data": (0x1000, False), "shape": (8, 32), "typestr": "<f4", "strides": (256, 4),
        }
    )  # fmt: skip
    assert len(bytes(TensorMap(foreign, (8, 32)))) == 128
    assert (calls[0]["address"], calls[0]["dims"], calls[0]["strides"]) == (0x1000, [32, 8], [256])


# As arguments


def test_a_map_is_a_128_byte_struct_argument() -> None:
    device = gpu.open("ptx")
    array = device.array(np.zeros((16, 64), np.float32), name="x")
    tensor_map = gpu.TensorMap(array, (16, 32))
    parameter = Parameter("map", "b8", 128, 64)
    assert pack("k", [parameter], [tensor_map]) == [bytes(tensor_map)]
    # As a part of a larger struct, its bytes are an argument like any others.
    assert pack("k", [Parameter("both", "b8", 136, 64)], [bytes(8) + bytes(tensor_map)])
    for wrong in (Parameter("p", "u64", 8, 8), Parameter("p", "b8", 64, 64)):
        with pytest.raises(LaunchError, match=r"argument 0 \(p: .*TensorMap.*128 bytes"):
            pack("k", [wrong], [tensor_map])
