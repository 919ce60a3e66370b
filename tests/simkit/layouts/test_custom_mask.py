"""Custom masks bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from simkit.errors import DtypeError, ShapeError, TableError
from simkit.layouts.block_sparse import split_mask
from simkit.layouts.custom_mask import CustomMask, from_blocks, pack, pack_flat, unpack
from simkit.machine.memory import unbacked

# 2 x 5 in two bytes, no queries in none, 3 x 3 in two.
MASKS = [
    np.array([[1, 0, 0, 1, 1], [0, 1, 1, 0, 1]], bool),
    np.zeros((0, 4), bool),
    np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1]], bool),
]


def test_bits_by_hand() -> None:
    packed = pack(MASKS)
    # Rows in order, the first element in bit 0: 11011001 and 10, then 00010001 and 1.
    assert packed.bits.tolist() == [0b11011001, 0b10, 0b00010001, 0b1]
    assert packed.indptr.tolist() == [0, 2, 2, 4]
    assert packed.indptr.dtype == np.int64
    assert packed.q_lens.tolist() == [2, 0, 3]
    assert packed.kv_lens.tolist() == [5, 4, 3]
    for mask, back in zip(MASKS, unpack(packed), strict=True):
        assert np.array_equal(mask, back)
    flat = np.concatenate([mask.ravel() for mask in MASKS])
    assert np.array_equal(pack_flat(flat, packed.q_lens, packed.kv_lens).bits, packed.bits)


def test_one_bit_at_a_time() -> None:
    packed = pack(MASKS)
    assert packed.visible(0, 1, np.arange(5)).tolist() == [False, True, True, False, True]
    assert packed.visible(2, np.arange(3), np.arange(3)).all()
    assert packed.visible(np.array([0, 2]), 0, 0).tolist() == [True, True]
    with pytest.raises(ShapeError, match="a key is outside its request's mask"):
        packed.visible(0, 1, 5)
    with pytest.raises(ShapeError, match="a query is outside its request's mask"):
        packed.visible(1, 0, 0)
    with pytest.raises(TableError, match=r"requests\[0\] = 3"):
        packed.visible(3, 0, 0)


def test_offsets_beyond_32_bits() -> None:
    lens = np.array([130_000, 100_000], np.int32)
    indptr = [0, 2_112_500_000, 2_112_500_000 + 1_250_000_000]
    bits = unbacked((indptr[-1],), np.uint8)
    packed = CustomMask(bits, lens, lens)
    assert packed.indptr.tolist() == indptr
    assert not packed.visible(1, 99_999, 99_999)
    assert not packed.visible(0, 129_999, 129_999)


def test_what_is_no_mask() -> None:
    with pytest.raises(DtypeError, match="mask of request 0 must be bool, got uint8"):
        pack([MASKS[0].astype(np.uint8)])
    with pytest.raises(ShapeError, match=r"mask of request 1 must be \[q_len, kv_len\]"):
        pack([MASKS[0], np.zeros(3, bool)])
    lens = np.array([3], np.int32)
    with pytest.raises(ShapeError, match=r"bits has shape \[1\]; the masks take \[2\] bytes"):
        CustomMask(np.zeros(1, np.uint8), lens, lens)
    with pytest.raises(TableError, match=r"q_lens\[0\] = -3"):
        CustomMask(np.zeros(2, np.uint8), -lens, lens)
    with pytest.raises(ShapeError, match="the masks have 9 elements"):
        pack_flat(np.zeros(8, bool), lens, lens)
    assert pack([]).bits.size == 0


def test_the_mask_of_block_sparse_attention() -> None:
    mask = np.zeros((3, 8), bool)
    mask[0, 1] = mask[1, 6] = mask[2, 7] = True
    rows, elements = split_mask(mask, 2, 4)
    packed = from_blocks(rows, elements, 3)
    # The first two queries see both blocks, the third one the second block.
    assert packed.mask(0).astype(int).tolist() == [
        [0, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 0],
    ]
    assert packed.mask(1).astype(int).tolist() == [[0, 0, 0, 1]]
    with pytest.raises(ShapeError, match="5 queries in tiles of 2 are not 2 rows"):
        from_blocks(rows, elements, 5)
