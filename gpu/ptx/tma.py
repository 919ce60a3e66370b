"""Addresses of a tiled tensor copy: which bytes of global memory go where in shared memory.

Pure functions on arrays.  Sources: PTX ISA 8.8, 5.5.3 (tiled mode) and 5.5.7 (swizzling modes);
CUDA driver API, cuTensorMapEncodeTiled (element strides); CUDA C++ programming guide, TMA swizzle.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gpu.tensor_map import SWIZZLES, TensorMapFields
from simkit.errors import CapacityError, ShapeError

Array = np.ndarray

# No GPU of the device table has more shared memory; a larger tile fits nowhere.
_LARGEST_TILE = 256 * 1024
# What the TMA writes for elements outside the tensor, 16 bits at a time.  PTX only says that the
# NaN is "special"; these are the bits that GPUs of sm_100 and sm_121 have been seen to write.
OOB_NAN = 0x7FF7
_FILLS = {"zeros": 0, "nan": OOB_NAN}


def swizzle(addresses: Array, mode: str) -> Array:
    """Where the bytes at linear shared-memory addresses (int64) lie under a swizzle mode.

    The mode exclusive-ors address bits with higher ones, so that it depends on the address alone,
    not on where the tile begins; it is its own inverse.  The 16 bytes from a multiple of 16 stay
    together, or 8 bytes in the mode that flips them.
    """
    mixed = addresses
    for changed, distance in SWIZZLES[mode].exclusive_ors:
        mixed = mixed ^ ((addresses >> distance) & changed)
    return mixed


@dataclass(frozen=True, slots=True)
class TileCopy:
    """The pieces of a tile for each lane that copies one.

    unit: bytes of a piece, a power of two, at most 16.  starts (lanes,) int64: absolute addresses
    of the tiles; steps (pieces,) int64: from there to each piece; both are multiples of the unit.
    valid (lanes, pieces) bool: which pieces lie inside the tensor; the others are filled on a load
    and skipped on a store.  is_whole: all are valid.  shared_offsets (pieces,) int64: bytes from
    the tile's shared address, before swizzling.  shared_bytes: where the tile ends, likewise.
    bytes: of all pieces, what complete_tx counts.
    """

    unit: int
    starts: Array
    steps: Array
    valid: Array
    is_whole: bool
    shared_offsets: Array
    shared_bytes: int
    bytes: int

    @property
    def global_offsets(self) -> Array:
        """Absolute addresses (lanes, pieces) int64, meaningless where not valid."""
        return self.starts[:, None] + self.steps


def tile_copy(fields: TensorMapFields, coordinates: Array) -> TileCopy:
    """The pieces of the tiles at ``coordinates`` (lanes, rank) int64, innermost first.

    In shared memory rows are packed, but for swizzled rows that are shorter than the swizzle's
    span: each takes a whole span.  ShapeError for a wrong number of coordinates, CapacityError for
    a tile that exceeds any shared memory.
    """
    if coordinates.ndim != 2 or coordinates.shape[1] != fields.rank:
        raise ShapeError(
            f"coordinates of shape {coordinates.shape} for a tensor map of {fields.rank} dimensions"
        )
    coordinates = coordinates.astype(np.int64, copy=False)
    size = fields.element.size
    inner = coordinates[:, 0] * size
    # Pieces must not straddle the tensor's ends, nor begin off their own size.
    alignment = _piece_limit(fields.swizzle) | int(np.bitwise_or.reduce(inner))
    first = coordinates.min(axis=0, initial=0).tolist()
    last = coordinates.max(axis=0, initial=-(2**63)).tolist()
    if last[0] + fields.box[0] > fields.dims[0]:
        alignment |= fields.dims[0] * size
    unit = alignment & -alignment
    table = _table(fields, unit)
    base = coordinates[:, 1:] @ table.strides
    base += inner
    base += fields.address
    shape = (len(coordinates), len(table.global_offsets))
    is_whole = min(first) >= 0 and all(
        c + r < d for c, r, d in zip(last, table.reach, fields.dims, strict=True)
    )
    valid = np.broadcast_to(np.True_, shape) if is_whole else _valid(fields, table, coordinates)
    return TileCopy(
        unit,
        base,
        table.global_offsets,
        valid,
        is_whole,
        table.shared_offsets,
        table.shared_bytes,
        fields.tile_bytes,
    )


def filled(data: Array, valid: Array, fields: TensorMapFields) -> Array:
    """``data`` (any shape, one piece an item) with the map's fill in the pieces not valid."""
    width = min(data.dtype.itemsize, 8)
    # As integers, since a floating move could change the bits of a NaN.
    words = data.view(f"u{width}").reshape(*data.shape, -1)
    fill = np.array([_FILLS[fields.oob_fill]] * 4, np.uint16).view(words.dtype)[0]
    return np.where(valid[..., None], words, fill).view(data.dtype)[..., 0]


def _piece_limit(mode: str) -> int:
    """The largest piece that a swizzle mode keeps together."""
    changed = 16
    for bits, _ in SWIZZLES[mode].exclusive_ors:
        changed |= bits
    return changed & -changed


@dataclass(frozen=True, slots=True)
class _Table:
    """What tiles of a map have in common, wherever they are: the offsets of the pieces; along each
    dimension the distance of every piece's first element from the box's, and of its last element.
    """

    global_offsets: Array
    shared_offsets: Array
    shared_bytes: int
    strides: Array
    steps: tuple[Array, ...]
    reach: tuple[int, ...]


@lru_cache(maxsize=32)
def _table(fields: TensorMapFields, unit: int) -> _Table:
    row = fields.tile[0] * fields.element.size
    span = SWIZZLES[fields.swizzle].span
    rows = fields.tile_bytes // row
    pitch = max(row, span)
    if rows * pitch > _LARGEST_TILE:
        raise CapacityError(
            f"a tile of {'x'.join(map(str, reversed(fields.tile)))} elements of"
            f" {fields.element.size} bytes takes {rows * pitch} bytes of shared memory, more than"
            f" any GPU has ({_LARGEST_TILE})"
        )
    pieces = np.arange(0, row, unit, dtype=np.int64)
    outer = [
        np.arange(count, dtype=np.int64) * jump
        for count, jump in zip(fields.tile[1:], fields.element_strides[1:], strict=True)
    ]
    starts = np.zeros(1, np.int64)
    for distances, stride in zip(outer, fields.strides, strict=True):
        starts = ((distances * stride)[:, None] + starts).reshape(-1)
    shared = np.arange(rows, dtype=np.int64) * pitch
    return _Table(
        (starts[:, None] + pieces).reshape(-1),
        (shared[:, None] + pieces).reshape(-1),
        rows * pitch,
        np.array(fields.strides, np.int64),
        (pieces // fields.element.size, *outer),
        (fields.box[0] - 1, *(int(distances[-1]) for distances in outer)),
    )


def _valid(fields: TensorMapFields, table: _Table, coordinates: Array) -> Array:
    """Which pieces lie inside the tensor in every dimension."""
    lanes = len(coordinates)
    valid = np.ones((lanes, 1), bool)
    for d in range(fields.rank - 1, -1, -1):
        places = coordinates[:, d : d + 1] + table.steps[d]
        inside = (places >= 0) & (places < fields.dims[d])
        valid = (valid[:, :, None] & inside[:, None, :]).reshape(lanes, -1)
    return valid
