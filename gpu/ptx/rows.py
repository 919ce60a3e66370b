"""What ldmatrix fetched: rows of 16 bytes, kept as they lay in memory.

Warps of a CTA mostly fetch the same rows of B, and CTAs often have the same B.  Rows are therefore
kept once for each owner, a CTA or a warp, and become the registers of every warp only where an
instruction wants registers; the tensor core takes them as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpu.ptx.fragments import decode

Array = np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """``data`` [owners, 8 * matrices]: 16-byte rows (complex128) of 8 x 8 matrices of 16-bit
    elements; ``sharing`` neighbouring warps have one owner.
    """

    data: Array
    sharing: int

    def by_warp(self) -> Rows:
        """The same with every warp as an owner."""
        return self if self.sharing == 1 else Rows(np.repeat(self.data, self.sharing, axis=0), 1)

    def registers(self, is_transposed: bool) -> list[Array]:
        """The destinations of ldmatrix, one uint32 [32, warps] for each matrix."""
        owners, count = len(self.data), self.data.shape[1] // 8
        if is_transposed:
            # Lane 4 c + t gets column c of rows 2 t and 2 t + 1.
            elements = self.data.view(np.uint16).reshape(owners, count, 4, 2, 8)
            halves = np.empty((count, 8, 4, owners, 2), np.uint16)
            halves[...] = elements.transpose(1, 4, 2, 0, 3)
            words = halves.view(np.uint32)[..., 0]
        else:
            # Lane 4 r + t gets word t of row r.
            words = self.data.view(np.uint32).reshape(owners, count, 8, 4).transpose(1, 2, 3, 0)
        lanes = words.reshape(count, 32, owners)
        return list(np.repeat(lanes, self.sharing, axis=2) if self.sharing > 1 else lanes)


@dataclass(frozen=True, slots=True, eq=False)
class RowsOfB:
    """An operand B of mma in fetched rows: matrices ``pieces`` of some loads, one below the other
    along K.  Rows are columns of B, or with ``is_transposed`` (ldmatrix.trans) rows of it.
    """

    pieces: tuple[tuple[Rows, int], ...]
    is_transposed: bool
    kind: str
    form: tuple[object, ...]
    """Operands of one form can be parts of one matrix."""

    @classmethod
    def of(cls, pieces: tuple[tuple[Rows, int], ...], is_transposed: bool, kind: str) -> RowsOfB:
        sharing = pieces[0][0].sharing
        if any(rows.sharing != sharing for rows, _ in pieces):
            pieces, sharing = tuple((rows.by_warp(), index) for rows, index in pieces), 1
        return cls(pieces, is_transposed, kind, (kind, is_transposed, len(pieces), sharing))

    def matrix(self) -> Array:
        """B as float32 (K, 8, warps)."""
        rows = join([[self]])
        b = decode(rows.data, self.kind)
        if not self.is_transposed:
            b = b.swapaxes(1, 2)
        return np.repeat(b.transpose(1, 2, 0), rows.sharing, axis=2)


def join(parts: list[list[RowsOfB]]) -> Rows:
    """B of several products in one: ``parts`` [tiles along N][steps along K], all alike.

    Rows [owners, 8 * tiles, steps * pieces], each of which goes on along K; transposed,
    [owners, 8 * steps * pieces, tiles], along N.
    """
    first = parts[0][0]
    pieces = [[piece for step in tile for piece in step.pieces] for tile in parts]
    rows, _ = pieces[0][0]
    tiles, along_k, owners = len(parts), len(pieces[0]), len(rows.data)
    shape = (8 * along_k, tiles) if first.is_transposed else (8 * tiles, along_k)
    joined = np.empty((owners, *shape), rows.data.dtype)
    for n, tile in enumerate(pieces):
        for k, (source, index) in enumerate(tile):
            matrix = source.data[:, 8 * index : 8 * index + 8]
            if first.is_transposed:
                joined[:, 8 * k : 8 * k + 8, n] = matrix
            else:
                joined[:, 8 * n : 8 * n + 8, k] = matrix
    return Rows(joined, rows.sharing)


def runs(joined: Array) -> Array:
    """Where an owner's rows are not those of the owner before: [runs], starting with 0."""
    words = joined.view(np.uint64).reshape(len(joined), -1)
    is_new = (words[1:] != words[:-1]).any(axis=1)
    return np.concatenate(([0], np.flatnonzero(is_new) + 1))
