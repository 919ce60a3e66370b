"""Tensor-core operations in flight: issued, committed to groups, waited for, by warpgroup.

The executor does an operation at the commit (eager) or at the wait (lazy, random); until then its
accumulators hold NaN under the latter.  Source: PTX ISA 8.8, 9.7.15.7 (wgmma.fence, commit_group,
wait_group).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from gpu.ptx.wgmma import (
    ROWS,
    WARPS,
    Operation,
    poison,
    product,
    read_accumulator,
    write_accumulator,
)

if TYPE_CHECKING:
    from gpu.ptx.grid import Grid

Array = np.ndarray


class WarpgroupQueue:
    """Operations in flight: issued, then committed to groups, then waited for, per warpgroup."""

    def __init__(self, grid: Grid, delays: bool) -> None:
        self.grid = grid
        self.delays = delays
        self.open: list[Operation] = []
        # (operation, each warpgroup's group number)
        self.groups: list[tuple[Operation, Array]] = []
        self.committed = np.zeros(grid.warps, np.int64)

    def issue(self, operation: Operation) -> None:
        """An operation begins.  If it is put off, it takes its accumulator as it is now, unless
        that is the result of one in flight.
        """
        if not self.delays:
            self.open.append(operation)
            return
        flying = self._in_flight(operation)
        if flying.any():
            self.open.append(_part(operation, flying))
        if not flying.all():
            fresh = _part(operation, ~flying)
            self.open.append(replace(fresh, start=self._start(fresh)))
        poison(self.grid, operation)

    def _in_flight(self, operation: Operation) -> Array:
        """For which warpgroups an earlier operation has yet to write the accumulator."""
        earlier = [
            op.warps[:, 0]
            for op in (*self.open, *(op for op, _ in self.groups))
            if op.accumulator == operation.accumulator
        ]
        leaders = operation.warps[:, 0]
        return (
            np.isin(leaders, np.concatenate(earlier)) if earlier else np.zeros(len(leaders), bool)
        )

    def _start(self, operation: Operation) -> Array:
        if not operation.accumulate.any():
            return np.zeros((len(operation.warps), ROWS, operation.n), np.float32)
        matrix = read_accumulator(self.grid, operation)
        matrix[~operation.accumulate] = 0
        return matrix

    def commit(self, warps: Array) -> None:
        """The open operations of these warps (whole warpgroups) become a group."""
        mine, self.open = _select(self.open, warps)
        leaders = warps.reshape(-1, WARPS)[:, 0]
        if self.delays:
            self.groups += [(op, self.committed[op.warps[:, 0]].copy()) for op in mine]
        else:
            self._run(mine)
        self.committed[leaders] += 1

    def wait(self, leaders: Array, allowed: int) -> None:
        """Does what all but the ``allowed`` latest groups of these warpgroups hold."""
        if not self.groups:
            return
        waiting = np.zeros(self.grid.warps, bool)
        waiting[leaders] = True
        due: list[Operation] = []
        kept: list[tuple[Operation, Array]] = []
        for operation, number in self.groups:
            leaders = operation.warps[:, 0]
            now = waiting[leaders] & (number < self.committed[leaders] - allowed)
            if now.all():
                due.append(operation)
            elif now.any():
                due.append(operation.of(now))
                kept.append((operation.of(~now), number[~now]))
            else:
                kept.append((operation, number))
        self.groups = kept
        self._run(due)
        done: dict[tuple[str, ...], list[Array]] = {}
        for operation in due:
            done.setdefault(operation.accumulator, []).append(operation.warps[:, 0])
        for accumulator, leaders_done in done.items():
            self._hand_over(accumulator, np.unique(np.concatenate(leaders_done)))

    def _hand_over(self, accumulator: tuple[str, ...], heirs: Array) -> None:
        """An accumulator, just written for some warpgroups, that operations still in flight go on
        with stays theirs.
        """
        groups: list[tuple[Operation, Array]] = []
        for operation, number in self.groups:
            mine, heirs = self._inherited(operation, accumulator, heirs)
            groups += [
                (self._given(_part(operation, chosen), mine[chosen]), number[chosen])
                for chosen in (mine, ~mine)
                if chosen.any()
            ]
        self.groups = groups
        uncommitted: list[Operation] = []
        for operation in self.open:
            mine, heirs = self._inherited(operation, accumulator, heirs)
            uncommitted += [
                self._given(_part(operation, chosen), mine[chosen])
                for chosen in (mine, ~mine)
                if chosen.any()
            ]
        self.open = uncommitted

    def _inherited(
        self, operation: Operation, accumulator: tuple[str, ...], heirs: Array
    ) -> tuple[Array, Array]:
        """For which warpgroups an operation is the first to go on with the accumulator, among the
        ``heirs``, and the heirs that are left.
        """
        leaders = operation.warps[:, 0]
        if operation.accumulator != accumulator:
            return np.zeros(len(leaders), bool), heirs
        return np.isin(leaders, heirs), heirs[~np.isin(heirs, leaders)]

    def _given(self, operation: Operation, mine: Array) -> Operation:
        """The operation with what is in its registers now as its start, if it is ``mine``."""
        if not mine.any():
            return operation
        operation = replace(operation, start=self._start(operation))
        poison(self.grid, operation)
        return operation

    def _run(self, operations: list[Operation]) -> None:
        """Does operations in order, those that go on with one another at once."""
        index = 0
        while index < len(operations):
            chain = [operations[index]]
            while index + len(chain) < len(operations) and operations[index + len(chain)].continues(
                chain[0]
            ):
                chain.append(operations[index + len(chain)])
            index += len(chain)
            first = chain[0]
            start = self._start(first) if first.start is None else first.start
            write_accumulator(self.grid, first, product(self.grid, chain, start))


def _part(operation: Operation, chosen: Array) -> Operation:
    """The operation of a choice of its warpgroups, which may be all."""
    return operation if chosen.all() else operation.of(chosen)


def _select(operations: list[Operation], warps: Array) -> tuple[list[Operation], list[Operation]]:
    """Operations as those of some warps and those of others."""
    chosen = set(warps.tolist())
    mine: list[Operation] = []
    others: list[Operation] = []
    for operation in operations:
        inside = np.array([w in chosen for w in operation.warps[:, 0].tolist()])
        if inside.any():
            mine.append(operation if inside.all() else operation.of(inside))
        if not inside.all():
            others.append(operation if not inside.any() else operation.of(~inside))
    return mine, others
