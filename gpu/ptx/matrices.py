"""Matrices of a set of warps: ldmatrix, stmatrix and the tensor core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu.ptx import fragments, spaces, wgmma
from gpu.ptx.hazards import clocks
from gpu.ptx.lanes import Array, Mask
from gpu.ptx.memory import Bytes
from gpu.ptx.products import Product
from gpu.ptx.remote import ClusterAccess
from gpu.ptx.rows import Rows, RowsOfB
from gpu.ptx.waiting import QueueWait, WarpgroupWait
from gpu.ptx.wgmma import WARPS
from simkit.errors import LaunchError
from simkit.numerics.tensor_core import Operand, prepare

if TYPE_CHECKING:
    from gpu.ptx.grid import Grid

_MATRIX_WORDS = np.arange(4, dtype=np.int64)[None, :, None] * 4
# Byte offsets of a lane's two elements in a transposed 8 x 8 matrix of 16-bit elements, beside
# their rows.
_COLUMN_BYTES = np.repeat(np.arange(8, dtype=np.int64) * 2, 4)[:, None]
_PAIR_ROWS = np.tile(np.arange(4) * 2, 8)


class MatrixAccess(ClusterAccess):
    """What matrix instructions call."""

    def __init__(self, grid: Grid, warps: Array) -> None:
        super().__init__(grid, warps)
        # By the place of their instruction: registers of tensor-core operands, and those decoded.
        self._kept: dict[tuple[int, str], tuple[tuple[Array, ...], Operand | Array]] = {}

    def load_matrix(
        self,
        space: str,
        base: Array,
        offset: int,
        count: int,
        is_transposed: bool,
        mask: Mask,
        site: int,
    ) -> list[Array]:
        """ldmatrix: ``count`` 8 x 8 matrices of 16-bit elements whose row addresses come from 8
        lanes each.
        """
        if mask is not None and not mask.any():
            return [np.zeros(self.shape, np.uint32)] * count
        return self.load_rows(space, base, offset, count, mask, site).registers(is_transposed)

    def load_rows(
        self, space: str, base: Array, offset: int, count: int, mask: Mask, site: int
    ) -> Rows:
        """What load_matrix loads, not yet in registers."""
        grid, sharing = self.grid, self.warps_of_a_cta
        if mask is None and sharing > 1 and space == "shared" and grid.cluster_size == 1:
            used = self.array(base)[: 8 * count]
            if (used == used[:, :1]).all():
                # Every warp names the same rows of its CTA's memory.
                column = used[:, :1].astype(np.int64) + offset
                self._check(column, 16, grid.shared_bytes, None, site, "shared", "read")
                grid.counters.shared_alike(column, 16, self.n, site)
                if grid.hazards is not None:
                    everywhere = column + self.shared_base
                    grid.hazards.access("shared", everywhere, 16, None, self.warps, site, False, "")
                places = self.shared_base[::sharing, None] + column[:, 0]
                return Rows(grid.shared.gather(places, 16, 1)[0], sharing)
        _, memory, places = self._matrix_rows(space, base, offset, count, mask, site, "read")
        return Rows(memory.gather(np.ascontiguousarray(places.T), 16, 1)[0], 1)

    def store_matrix(
        self,
        space: str,
        base: Array,
        offset: int,
        values: Sequence[Array],
        is_transposed: bool,
        mask: Mask,
        site: int,
    ) -> None:
        """stmatrix: the inverse of ldmatrix."""
        taking_part, memory, rows = self._matrix_rows(
            space, base, offset, len(values), mask, site, "write"
        )
        self.grid.effects += 1
        for k, value in enumerate(values):
            addresses = rows[8 * k : 8 * k + 8]
            if taking_part is not None:
                addresses, value = addresses[:, taking_part], value[:, taking_part]
            if is_transposed:
                memory.views[2][(addresses[_PAIR_ROWS] + _COLUMN_BYTES) >> 1] = value.astype(
                    np.uint16
                )
                high = (value >> np.uint32(16)).astype(np.uint16)
                memory.views[2][(addresses[_PAIR_ROWS + 1] + _COLUMN_BYTES) >> 1] = high
            else:
                words = (addresses[:, None, :] + _MATRIX_WORDS) >> 2
                memory.views[4][words] = value.reshape(8, 4, -1)

    def _matrix_rows(
        self, space: str, base: Array, offset: int, count: int, mask: Mask, site: int,
        direction: str,
    ) -> tuple[Array | None, Bytes, Array]:  # fmt: skip
        """Which warps take part (None: all), and the matrices' rows in memory."""
        used = 8 * count
        offsets = self.array(base)[:used].astype(np.int64) + offset
        taking_part = None if mask is None else np.asarray(self.array(mask).any(axis=0))
        if taking_part is not None and not taking_part.any():
            return taking_part, self.grid.shared, offsets
        if taking_part is not None:
            # The others may hold any address: let them follow one that takes part.
            offsets = np.where(taking_part, offsets, offsets[:, taking_part.argmax(), None])
        if space == "generic":
            offsets = offsets - spaces.SHARED_WINDOW
        base_of_cta = self.shared_base
        if self.grid.cluster_size > 1:
            offsets, base_of_cta = self._of_cluster(offsets, site)
        self._check(offsets, 16, self.grid.shared_bytes, None, site, "shared", direction)
        counted = offsets if taking_part is None else offsets[:, taking_part]
        self.grid.counters.shared(counted, 16, None, site=site)
        flat = offsets + base_of_cta
        if self.grid.hazards is not None:
            chosen = flat if taking_part is None else flat[:, taking_part]
            warps = self.warps if taking_part is None else self.warps[taking_part]
            is_write = direction == "write"
            self.grid.hazards.access("shared", chosen, 16, None, warps, site, is_write, "")
        return taking_part, self.grid.shared, flat

    def operand(self, matrix: Array, kind: str) -> Operand | Array:
        """A decoded A or B with what the exact tensor core needs of it again and again."""
        core = self.grid.tensor_core(kind)
        return matrix if core is None else prepare(matrix, core)

    def kept_operand(
        self,
        decode: Callable[[Sequence[Array], str], Array],
        registers: tuple[Array, ...],
        kind: str,
        place: tuple[int, str],
    ) -> Operand | Array:
        """An operand that loops need again and again, decoded when its registers have changed."""
        kept = self._kept.get(place)
        if kept is not None and all(
            (r == k).all() for r, k in zip(registers, kept[0], strict=True)
        ):
            return kept[1]
        operand = self.operand(decode(registers, kind), kind)
        self._kept[place] = tuple(r.copy() for r in registers), operand
        return operand

    def fetched_operand(
        self, pieces: tuple[tuple[Rows, int], ...], is_transposed: bool, kind: str
    ) -> Operand | Array | RowsOfB:
        """B from rows that ldmatrix fetched and no register holds."""
        b = RowsOfB.of(pieces, is_transposed, kind)
        return b if self.grid.tensor_core(kind) is None else self.operand(b.matrix(), kind)

    def mma(self, a: Any, b: Any, c: Any, kind: str) -> Product:
        """a (16, K, warps) @ b (K, 8, warps) + c, computed when somebody reads it."""
        return self.grid.products.add(a, b, c, kind)

    def accumulators(self, product: Product) -> list[Array]:
        """The registers of an accumulator."""
        return [part.reshape(self.shape) for part in self.accumulator_parts(product)]

    def accumulator_parts(self, product: Product) -> list[Array]:
        """The registers of an accumulator as views (8, 4, warps) of the matrix."""
        return fragments.accumulator_parts(self.grid.products.force(product))

    # Warpgroups

    def _warpgroups(self, mask: Mask, site: int) -> Array:
        """The warps as (warpgroups, 4); an error if a warpgroup is not complete here."""
        warps = self.warps if mask is None else self._whole_warps(mask, site)
        if len(warps) % WARPS == 0:
            groups = warps.reshape(-1, WARPS)
            first = groups[:, :1] % self.grid.warps_per_cta
            if (first % WARPS == 0).all() and (groups == groups[:, :1] + np.arange(WARPS)).all():
                return groups
        raise LaunchError(
            f"{self.grid.place(site)}: a warpgroup instruction is executed by some of its four"
            " warps only; wgmma.fence brings them together"
        )

    def _whole_warps(self, mask: Array, site: int) -> Array:
        chosen = mask.any(axis=0)
        if not mask[:, chosen].all():
            raise LaunchError(f"{self.grid.place(site)}: executed by some lanes of a warp only")
        return self.warps[chosen]

    def warpgroup_fence(self, mask: Mask, site: int) -> WarpgroupWait | None:
        return self.grid.assembly.arrive(self._some(mask), site)

    def warpgroup_multiply(
        self,
        n: int,
        is_half: bool,
        kind_a: str,
        kind_b: str,
        a: Array | None,
        a_registers: tuple[str, ...],
        b: Array,
        accumulate: Array | bool,
        negate_a: bool,
        negate_b: bool,
        transpose_a: bool,
        transpose_b: bool,
        accumulator: tuple[str, ...],
        mask: Mask,
        site: int,
        is_saturated: bool = False,
    ) -> None:
        """wgmma.mma_async: issued here, done at the commit or later."""
        groups = self._warpgroups(mask, site)
        leaders = np.searchsorted(self.warps, groups[:, 0])

        def one_each(value: Array) -> Array:
            return self.array(value)[0, leaders].astype(np.int64)

        left = wgmma.Operand(
            kind_a, negate_a, transpose_a, None if a is None else one_each(a), a_registers
        )
        right = wgmma.Operand(kind_b, negate_b, transpose_b, one_each(b))
        added = (
            np.full(len(groups), accumulate)
            if isinstance(accumulate, bool)
            else self.array(accumulate)[0, leaders].astype(bool)
        )
        if self.grid.hazards is not None:
            for operand, rows in ((left, wgmma.ROWS), (right, n)):
                self.grid.hazards.read_operand(operand, rows, groups, site)
        if self.grid.trace is not None:
            self.grid.trace.multiply(groups[:, 0], site)
        self.grid.warpgroups.issue(
            wgmma.Operation(groups, n, left, right, added, accumulator, is_half, site, is_saturated)
        )

    def warpgroup_commit(self, mask: Mask, site: int) -> None:
        warps = self._warpgroups(mask, site).reshape(-1)
        self.grid.warpgroups.commit(warps)
        if self.grid.trace is not None:
            self.grid.trace.commit_products(warps[::WARPS], site)
        if self.grid.hazards is not None:
            # One wgmma of four warps: any of them knows of its end.
            self.grid.hazards.clocks.commit(clocks.WGMMA, warps[::WARPS])

    def warpgroup_wait(self, allowed: int, mask: Mask, site: int) -> QueueWait:
        # Its warps may wait one by one: what is due is done for the whole warpgroup.
        warps = self.warps if mask is None else self._whole_warps(mask, site)
        first = warps - warps % self.grid.warps_per_cta % WARPS
        if self.grid.hazards is not None:
            self.grid.hazards.clocks.complete(clocks.WGMMA, warps, allowed, first)
        return QueueWait(np.unique(first), allowed, site)
