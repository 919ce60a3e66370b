"""Tensor maps: what the TMA's tensor copies are told about a tensor in global memory and the box
to move.

A GPU gets the driver's opaque descriptor, the executor a descriptor of ours.  Both are 128 bytes
that say everything by themselves, so that a kernel may take them as a parameter, find them inside a
struct or copy them about.  Sources: CUDA driver API, cuTensorMapEncodeTiled; PTX ISA 8.8, 5.5.
"""

from __future__ import annotations

import operator
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from simkit.errors import DtypeError, LaunchError, MemoryAccessError, ShapeError

DESCRIPTOR_BYTES = 128
MAX_RANK = 5


@dataclass(frozen=True, slots=True)
class Element:
    """An element type of a tensor map: its name in PTX, CUtensorMapDataType's value, the NumPy
    dtype code of its bits and the dtypes of arrays that are moved as such.
    """

    name: str
    value: int
    code: str
    dtypes: tuple[str, ...]

    @property
    def size(self) -> int:
        return int(self.code[1])

    @property
    def is_float(self) -> bool:
        return "f" in self.name


# The TMA only moves elements: signed and 8-bit floating ones travel as unsigned ones.
ELEMENTS = (
    Element(
        "u8", 0, "u1", ("uint8", "bool", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
    ),
    Element("u16", 1, "u2", ("uint16", "int16")),
    Element("u32", 2, "u4", ("uint32",)),
    Element("s32", 3, "i4", ("int32",)),
    Element("u64", 4, "u8", ("uint64",)),
    Element("s64", 5, "i8", ("int64",)),
    Element("f16", 6, "f2", ("float16",)),
    Element("f32", 7, "f4", ("float32",)),
    Element("f64", 8, "f8", ("float64",)),
    Element("bf16", 9, "u2", ("bfloat16",)),
)
_ELEMENT_OF_DTYPE = {dtype: element for element in ELEMENTS for dtype in element.dtypes}


@dataclass(frozen=True, slots=True)
class Swizzle:
    """A swizzle mode: CUtensorMapSwizzle's value, the bytes of a row that it mixes, and for each
    exclusive or the bits that change and how much higher the bits lie that change them.
    """

    value: int
    span: int
    exclusive_ors: tuple[tuple[int, int], ...]


# Source: PTX ISA 8.8, 5.5.7.  The atom modes need sm_100.
SWIZZLES = {
    "none": Swizzle(0, 0, ()),
    "32B": Swizzle(1, 32, ((0x10, 3),)),
    "64B": Swizzle(2, 64, ((0x30, 3),)),
    "128B": Swizzle(3, 128, ((0x70, 3),)),
    "128B_ATOM_32B": Swizzle(4, 128, ((0x60, 2),)),
    "128B_ATOM_32B_FLIP_8B": Swizzle(5, 128, ((0x60, 2), (0x08, 4))),
    "128B_ATOM_64B": Swizzle(6, 128, ((0x40, 1),)),
}
INTERLEAVES = {"none": 0, "16B": 1, "32B": 2}
L2_PROMOTIONS = {"none": 0, "64B": 1, "128B": 2, "256B": 3}
OOB_FILLS = {"zeros": 0, "nan": 1}


@dataclass(frozen=True, slots=True)
class TensorMapFields:
    """What a tensor map says, as the hardware counts: innermost dimension first.

    ``dims`` and ``box`` are in elements, ``strides`` in bytes, from the second dimension on.  With
    an element stride e only every e-th element of the box is moved, ceil(box / e) of them.
    """

    element: Element
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: str = "none"
    interleave: str = "none"
    l2_promotion: str = "none"
    oob_fill: str = "zeros"

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def code(self) -> str:
        """The NumPy dtype code of an element's bits."""
        return self.element.code

    @property
    def tile(self) -> tuple[int, ...]:
        """How many elements are moved along each dimension."""
        return tuple(-(-b // e) for b, e in zip(self.box, self.element_strides, strict=True))

    @property
    def tile_bytes(self) -> int:
        """Bytes of one copy, filled ones included: what complete_tx counts."""
        count = self.element.size
        for extent in self.tile:
            count *= extent
        return count


class TensorMap:
    """A tensor in device memory and the box that ``cp.async.bulk.tensor`` moves of it.

    All sequences are in NumPy's order, innermost dimension last, as in ``array.shape``; a kernel's
    coordinates and ``fields`` are innermost first.

    ``array``: a device array, or on a GPU anything with ``__cuda_array_interface__``; it is kept
    alive.  ``box``: elements of the box along each dimension.  ``shape``: the tensor's extents if
    they are not the array's (a flattened view, fewer rows).  ``strides``: bytes, as in
    ``ndarray.strides``, by default contiguous; the last one is the element's size.
    ``element_strides``: move only every n-th element of the box along each dimension.  ``dtype``:
    of the elements, if not the array's.  ``swizzle``: how rows are mixed in shared memory, a key of
    SWIZZLES.  ``oob_fill``: what elements outside the tensor read as, "zeros" or "nan".

    ``bytes(tensor_map)`` is the descriptor.  ShapeError, DtypeError, MemoryAccessError (alignment)
    and LaunchError (unknown mode) for whatever the driver refuses.
    """

    def __init__(
        self,
        array: Any,
        box: Sequence[int],
        *,
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        element_strides: Sequence[int] | None = None,
        dtype: Any = None,
        swizzle: str = "none",
        interleave: str = "none",
        l2_promotion: str = "none",
        oob_fill: str = "zeros",
    ) -> None:
        self.array = array
        address, array_shape, array_dtype, array_strides = _described(array)
        self.name = str(getattr(array, "name", "") or f"array at 0x{address:x}")
        chosen = array_dtype if dtype is None else np.dtype(dtype)
        element = _ELEMENT_OF_DTYPE.get(chosen.name)
        if element is None:
            known = ", ".join(sorted(_ELEMENT_OF_DTYPE))
            raise DtypeError(f"TensorMap of {self.name!r}: dtype {chosen} is none of {known}")
        if shape is None and chosen.itemsize != array_dtype.itemsize:
            raise ShapeError(
                f"TensorMap of {self.name!r}: dtype {chosen} is not as wide as the array's"
                f" {array_dtype}, so that the tensor's shape must be given"
            )
        extents = _integers(array_shape if shape is None else shape)
        rank = len(extents)
        if strides is None and shape is None:
            strides = array_strides
        steps = _contiguous(extents, element.size) if strides is None else _integers(strides)
        jumps = (1,) * rank if element_strides is None else _integers(element_strides)
        box = _integers(box)
        for what, given in (("box", box), ("strides", steps), ("element_strides", jumps)):
            if len(given) != rank:
                raise ShapeError(
                    f"TensorMap of {self.name!r}: {what} has {len(given)} entries, the tensor"
                    f" {rank} dimensions"
                )
        if steps and steps[-1] != element.size:
            raise ShapeError(
                f"TensorMap of {self.name!r}: the innermost stride is {steps[-1]} bytes, but"
                f" elements must be adjacent ({element.size} bytes)"
            )
        self.fields = TensorMapFields(
            element, address, extents[::-1], steps[::-1][1:], box[::-1], jumps[::-1],
            swizzle, interleave, l2_promotion, oob_fill,
        )  # fmt: skip
        check(self.fields, self.name)

    @cached_property
    def _descriptor(self) -> bytes:
        # Both import this module.
        from gpu.driver import encode_tiled
        from gpu.ptx.executor import PtxArray

        if isinstance(self.array, PtxArray):
            return encode(self.fields)
        return encode_tiled(self.fields)

    def __bytes__(self) -> bytes:
        return self._descriptor

    def __repr__(self) -> str:
        return f"TensorMap({self.name!r}, {self.fields})"


def _described(array: Any) -> tuple[int, tuple[int, ...], np.dtype[Any], tuple[int, ...] | None]:
    """Address, shape, dtype and strides (None: contiguous) of a device array."""
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        return int(array.address), tuple(array.shape), np.dtype(array.dtype), None
    return (
        int(interface["data"][0]),
        tuple(interface["shape"]),
        np.dtype(interface["typestr"]),
        interface.get("strides"),
    )


def _integers(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(operator.index(v) for v in values)


def _contiguous(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    strides = [size]
    for extent in shape[:0:-1]:
        strides.append(strides[-1] * extent)
    return tuple(strides[: len(shape)][::-1])


def check(fields: TensorMapFields, name: str) -> None:
    """What cuTensorMapEncodeTiled refuses, as errors that say value, limit and field (whose index
    is in NumPy's order).
    """
    where = f"TensorMap of {name!r}"
    rank, size = fields.rank, fields.element.size
    for what, value, known in (
        ("swizzle", fields.swizzle, SWIZZLES),
        ("interleave", fields.interleave, INTERLEAVES),
        ("l2_promotion", fields.l2_promotion, L2_PROMOTIONS),
        ("oob_fill", fields.oob_fill, OOB_FILLS),
    ):
        if value not in known:
            raise LaunchError(f"{where}: {what} is {value!r}, not one of {', '.join(known)}")
    is_interleaved = fields.interleave != "none"
    least_rank = 3 if is_interleaved else 1
    if not least_rank <= rank <= MAX_RANK:
        raise ShapeError(
            f"{where}: {rank} dimensions, interleave {fields.interleave!r} needs"
            f" {least_rank} to {MAX_RANK}"
        )
    unit = 32 if fields.interleave == "32B" else 16
    if fields.address % unit:
        raise MemoryAccessError(
            f"{where}: address 0x{fields.address:x} is not a multiple of {unit} bytes"
        )
    _check_range(where, "shape", fields.dims, 1, 2**32)
    _check_range(where, "strides", fields.strides, 0, 2**40 - 1)
    for i, stride in enumerate(fields.strides):
        if stride % unit:
            raise ShapeError(
                f"{where}: strides[{rank - 2 - i}] is {stride} bytes, not a multiple of {unit}"
            )
    _check_range(where, "box", fields.box, 1, 256)
    _check_range(where, "element_strides", fields.element_strides, 1, 8)
    if is_interleaved:
        if fields.interleave == "32B" and fields.swizzle != "32B":
            raise ShapeError(
                f"{where}: interleave '32B' needs swizzle '32B', not {fields.swizzle!r}"
            )
    else:
        if fields.element_strides[0] != 1:
            raise ShapeError(
                f"{where}: element_strides[{rank - 1}] is {fields.element_strides[0]}, the"
                " innermost dimension has no stride other than 1"
            )
        row = fields.box[0] * size
        if row % 16:
            raise ShapeError(
                f"{where}: box[{rank - 1}] is {fields.box[0]} elements of {size} bytes, {row} bytes"
                " are not a multiple of 16"
            )
        span = SWIZZLES[fields.swizzle].span
        if span and row > span:
            raise ShapeError(
                f"{where}: box[{rank - 1}] is {fields.box[0]} elements of {size} bytes, {row} bytes"
                f" are more than the {span} of swizzle {fields.swizzle!r}"
            )
    if fields.oob_fill == "nan" and not fields.element.is_float:
        raise DtypeError(f"{where}: oob_fill 'nan' of {fields.element.name}, which has no NaN")


def _check_range(where: str, what: str, values: tuple[int, ...], low: int, high: int) -> None:
    for i, value in enumerate(reversed(values)):
        if not low <= value <= high:
            raise ShapeError(f"{where}: {what}[{i}] is {value}, allowed are {low} to {high}")


# The executor's descriptor

_MAGIC = b"simT"
_VERSION = 1
# Magic, version, rank, element, swizzle, L2 promotion, fill; checksum; address; of each dimension
# its size - 1, box - 1 and element stride; strides; spare bytes.
_LAYOUT = struct.Struct("<4s6B2xIQ5I5B5B2x4Q40x")
_CHECKSUM = slice(12, 16)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a field lies in the descriptor, for each dimension, and what is subtracted from its
    value there.
    """

    start: int
    size: int
    count: int = 1
    less: int = 0
    names: tuple[int | None, ...] | None = None


# tensormap.replace numbers the element types in an order of its own; tf32 and the like it moves as
# f32.  Source: PTX ISA 8.8, 9.7.9.28, tables 31-35.
_REPLACED_ELEMENTS = (0, 1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 7, 7)
_PLACES = {
    "global_address": _Place(16, 8),
    "rank": _Place(5, 1, names=(1, 2, 3, 4, 5)),
    "box_dim": _Place(44, 1, MAX_RANK, less=1),
    "global_dim": _Place(24, 4, MAX_RANK, less=1),
    "global_stride": _Place(56, 8, MAX_RANK - 1),
    "element_stride": _Place(49, 1, MAX_RANK),
    "elemtype": _Place(6, 1, names=_REPLACED_ELEMENTS),
    "interleave_layout": _Place(10, 1, names=(0,)),
    "swizzle_mode": _Place(7, 1, names=(0, 1, 2, 3)),
    "swizzle_atomicity": _Place(10, 1, names=(0,)),
    "fill_mode": _Place(9, 1, names=(0, 1)),
}
REPLACEABLE = tuple(_PLACES)
"""The fields that tensormap.replace knows."""


def replaced(descriptors: np.ndarray, field: str, ordinal: int, values: np.ndarray) -> np.ndarray:
    """Descriptors (n, 128) uint8 with a field set to ``values`` (n,), as tensormap.replace does.

    Where all bytes are zero a map is begun.  A map is checked when it is used, since it becomes
    whole field by field.  LaunchError for other bytes, a wrong ordinal, or a value that the
    executor does not know.
    """
    place = _PLACES[field]
    if not 0 <= ordinal < place.count:
        raise LaunchError(f"{field} has no dimension {ordinal}")
    if place.names is not None:
        if int(values.max(initial=0)) >= len(place.names):
            raise LaunchError(f"{field} {int(values.max())} is not known")
        values = np.array(place.names, np.uint64)[values]
    result = descriptors.copy()
    blank = ~descriptors.any(axis=1)
    strange = ~blank & (descriptors[:, :4] != np.frombuffer(_MAGIC, np.uint8)).any(axis=1)
    if strange.any():
        found = descriptors[strange][0, :8].tobytes().hex(" ")
        raise LaunchError(f"neither a tensor map nor zeros: it begins with {found}")
    result[:, :4] = np.frombuffer(_MAGIC, np.uint8)
    result[:, 4] = _VERSION
    start = place.start + place.size * ordinal
    stored = np.ascontiguousarray((values - np.uint64(place.less))[:, None])
    result[:, start : start + place.size] = stored.view(np.uint8)[:, : place.size]
    result[:, _CHECKSUM] = 0
    sums = np.array([[zlib.crc32(row)] for row in result], np.uint32)
    result[:, _CHECKSUM] = sums.view(np.uint8)
    return result


def encode(fields: TensorMapFields) -> bytes:
    """The executor's descriptor.  LaunchError for an interleaved layout, which it does not know."""
    if fields.interleave != "none":
        raise LaunchError(
            f"the executor has no interleaved tensors (interleave {fields.interleave!r})"
        )
    unused = (0,) * (MAX_RANK - fields.rank)
    data = bytearray(
        _LAYOUT.pack(
            _MAGIC,
            _VERSION,
            fields.rank,
            fields.element.value,
            SWIZZLES[fields.swizzle].value,
            L2_PROMOTIONS[fields.l2_promotion],
            OOB_FILLS[fields.oob_fill],
            0,
            fields.address,
            *(d - 1 for d in fields.dims),
            *unused,
            *(b - 1 for b in fields.box),
            *unused,
            *fields.element_strides,
            *unused,
            *fields.strides,
            *unused,
        )
    )
    data[_CHECKSUM] = zlib.crc32(data).to_bytes(4, "little")
    return bytes(data)


@lru_cache(maxsize=256)
def usable(descriptor: bytes) -> TensorMapFields:
    """The fields of a descriptor that a copy uses: checked, since nobody checks what a kernel made
    with tensormap.replace.  Errors as of ``decode`` and ``check``.
    """
    fields = decode(descriptor)
    check(fields, "tensormap.replace")
    return fields


def decode(descriptor: bytes) -> TensorMapFields:
    """The fields of a descriptor that ``encode`` made.

    LaunchError for any other bytes: not 128, unwritten, the driver's, changed since.
    """
    if len(descriptor) != DESCRIPTOR_BYTES:
        raise LaunchError(
            f"a tensor map has {DESCRIPTOR_BYTES} bytes, this one has {len(descriptor)}"
        )
    magic, version, rank, element, swizzle, promotion, fill, checksum, address, *rest = (
        _LAYOUT.unpack(descriptor)
    )
    if magic != _MAGIC:
        values = set(descriptor)
        if values in ({0}, {0xFF}):
            found = f"128 bytes of 0x{descriptor[0]:02x}: nobody has written it"
        else:
            found = f"it begins with {descriptor[:8].hex(' ')}; make it with gpu.TensorMap"
        raise LaunchError(f"no tensor map of the executor: {found}")
    if version != _VERSION:
        raise LaunchError(f"a tensor map of version {version}, known is {_VERSION}")
    blank = bytearray(descriptor)
    blank[_CHECKSUM] = bytes(4)
    if zlib.crc32(blank) != checksum:
        raise LaunchError(
            f"a damaged tensor map: its checksum is 0x{zlib.crc32(blank):08x}, it says"
            f" 0x{checksum:08x}"
        )
    sizes, boxes, jumps, strides = rest[:5], rest[5:10], rest[10:15], rest[15:]
    return TensorMapFields(
        ELEMENTS[element],
        address,
        tuple(v + 1 for v in sizes[:rank]),
        tuple(strides[: max(rank - 1, 0)]),
        tuple(v + 1 for v in boxes[:rank]),
        tuple(jumps[:rank]),
        list(SWIZZLES)[swizzle],
        "none",
        list(L2_PROMOTIONS)[promotion],
        list(OOB_FILLS)[fill],
    )
