"""Vector clocks of the warps of a grid: what each has seen of the others and of agents.

A warp's row has a component for every warp of its cluster, for the asynchronous work of each (its
cp.async groups, bulk groups' reads and writes, wgmma groups) and for every mbarrier of the cluster.
Agents of one component complete in order, so that one number says which of them are known to be
over.  What a warp knows of other clusters is kept apart, and only where clusters talk at all.

Beside each number stands the one up to which a proxy fence covers it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gpu.ptx.grid import Grid

Array = np.ndarray

# Kinds of components of a warp.
SELF, COPIES, BULK_READS, BULK_WRITES, WGMMA = range(5)
_KINDS = 5
_MORE = 16


class Clocks:
    """``seen`` [2, warps, components]: epochs seen, and those covered by a proxy fence."""

    def __init__(self, grid: Grid, first_cluster: int, clusters: int) -> None:
        self.grid = grid
        self.width = grid.warps_per_cta * grid.cluster_size
        warps = np.arange(grid.warps)
        self.local = warps % self.width
        self.cluster = warps // self.width + first_cluster
        self.clusters = clusters
        self.columns = _KINDS * self.width
        self.seen = np.zeros((2, grid.warps, self.columns + _MORE), np.int32)
        self.seen[0, warps, self.local] = 1
        # Groups that each warp's asynchronous work has been committed in, by kind.
        self.committed = np.zeros((_KINDS, grid.warps), np.int32)
        # What warps know of other clusters [warps, clusters, components].
        self.foreign: Array | None = None
        self._foreign_left: dict[tuple[str, int], Array] = {}
        self.accumulated = {
            "barrier": np.zeros((2, grid.ctas * 16, 0), np.int32),
            "cluster": np.zeros((2, grid.ctas // grid.cluster_size, 0), np.int32),
        }

    def component(self, kind: int, warps: Array) -> Array:
        return kind * self.width + self.local[warps]

    def new_column(self) -> int:
        """A component of the cluster for an mbarrier."""
        self.columns += 1
        if self.columns > self.seen.shape[2]:
            self.seen = _wider(self.seen)
            if self.foreign is not None:
                self.foreign = _wider(self.foreign)
        return self.columns - 1

    def fit(self, rows: Array) -> Array:
        """Rows of the width that the clocks have now."""
        missing = self.seen.shape[2] - rows.shape[-1]
        if not missing:
            return rows
        return np.concatenate((rows, np.zeros((*rows.shape[:-1], missing), rows.dtype)), axis=-1)

    def epoch(self, warps: Array) -> Array:
        """The warps' own epochs."""
        return self.seen[0, warps, self.local[warps]]

    def tick(self, warps: Array) -> None:
        """What these warps do from now on is not part of what they have published."""
        self.seen[0, warps, self.local[warps]] += 1

    # Meetings

    def publish(self, name: str, places: Array, warps: Array) -> None:
        """Warps leave what they know at places (barriers) that others take it from."""
        rows = self.accumulated[name] = self.fit(self.accumulated[name])
        for part in range(2):
            np.maximum.at(rows[part], places, self.seen[part, warps])
        if self.foreign is not None:
            for place, warp in zip(places.tolist(), warps.tolist(), strict=True):
                key = name, place
                there = self._foreign_left.get(key)
                mine = self.foreign[warp]
                self._foreign_left[key] = mine.copy() if there is None else np.maximum(
                    self.fit(there), mine
                )  # fmt: skip
        self.tick(warps)

    def collect(self, name: str, places: Array, warps: Array) -> None:
        rows = self.accumulated[name] = self.fit(self.accumulated[name])
        self.learn(warps, rows[:, places])
        if self.foreign is not None:
            for place, warp in zip(places.tolist(), warps.tolist(), strict=True):
                there = self._foreign_left.get((name, place))
                if there is not None:
                    self.foreign[warp] = np.maximum(self.foreign[warp], self.fit(there))

    def move(self, name: str, target: str, places: Array) -> None:
        """What has been left at places of one kind is now at those of another, in place of what was
        there.
        """
        rows = self.accumulated[name] = self.fit(self.accumulated[name])
        there = self.accumulated.get(target)
        there = np.zeros_like(rows) if there is None else self.fit(there)
        there[:, places] = rows[:, places]
        rows[:, places] = 0
        self.accumulated[target] = there
        for place in places.tolist() if self._foreign_left else ():
            left = self._foreign_left.pop((name, place), None)
            if left is not None:
                self._foreign_left[target, place] = left

    def clear(self, name: str, places: Array) -> None:
        self.accumulated[name][:, places] = 0
        for place in places.tolist() if self._foreign_left else ():
            self._foreign_left.pop((name, place), None)

    def learn(self, warps: Array, rows: Array) -> None:
        """Each of the warps, all different, gets to know a row [2, warps, components]."""
        rows = self.fit(rows)
        self.seen[:, warps] = np.maximum(self.seen[:, warps], rows)

    def meet(self, warps: Array, groups: int) -> None:
        """Warps in groups of one size: all of a group know what any of them knew."""
        rows = self.seen[:, warps].reshape(2, groups, -1, self.seen.shape[2])
        joined = np.broadcast_to(rows.max(axis=2, keepdims=True), rows.shape)
        self.seen[:, warps] = joined.reshape(2, len(warps), -1)
        if self.foreign is not None:
            own = self.foreign[warps]
            by_group = own.reshape(groups, -1, *own.shape[1:])
            self.foreign[warps] = np.repeat(by_group.max(axis=1), len(warps) // groups, axis=0)
        self.tick(warps)

    def commit(self, kind: int, warps: Array) -> None:
        self.committed[kind, warps] += 1

    def complete(self, kind: int, warps: Array, allowed: int, leaders: Array | None = None) -> None:
        """Warps have waited for all but the latest groups of work of their own, or of leaders."""
        owners = warps if leaders is None else leaders
        columns = self.component(kind, owners)
        epochs = self.committed[kind, owners] - allowed
        self.seen[0, warps, columns] = np.maximum(self.seen[0, warps, columns], epochs)

    def fence(self, warps: Array) -> None:
        """A proxy fence covers all that its warp knows by now."""
        self.seen[1, warps] = self.seen[0, warps]
        self.tick(warps)

    # Other clusters

    def knowledge(self, warp: int) -> dict[int, Array]:
        """All that a warp knows: rows by cluster, its own first."""
        known = {int(self.cluster[warp]): self.seen[0, warp].copy()}
        if self.foreign is not None:
            others = self.foreign[warp]
            known |= {c: others[c].copy() for c in np.flatnonzero(others.any(axis=1)).tolist()}
        return known

    def learn_all(self, warp: int, known: dict[int, Array]) -> None:
        for cluster, row in known.items():
            row = self.fit(row)
            if cluster == self.cluster[warp]:
                self.seen[0, warp] = np.maximum(self.seen[0, warp], row)
                continue
            if self.foreign is None:
                shape = (self.grid.warps, self.clusters, self.seen.shape[2])
                self.foreign = np.zeros(shape, np.int32)
            self.foreign[warp, cluster] = np.maximum(self.foreign[warp, cluster], row)


def _wider(rows: Array) -> Array:
    more = np.zeros((*rows.shape[:-1], rows.shape[-1]), rows.dtype)
    return np.concatenate((rows, more), axis=-1)
