"""Order through places in memory: releases, acquires, and fences around strong accesses.

Source: PTX ISA 8.8, 8.7-8.10 (memory consistency model: release and acquire patterns).
"""

from __future__ import annotations

import numpy as np

from gpu.ptx.hazards.clocks import Clocks
from gpu.ptx.hazards.findings import HazardState

Array = np.ndarray
# Rows of clocks by cluster.
Knowledge = dict[int, Array]


class MemoryOrder:
    """What the warps of a wave release to memory and acquire from it."""

    def __init__(self, clocks: Clocks, state: HazardState) -> None:
        self._clocks = clocks
        self._released = state.released
        self._first = clocks.grid.first
        self._cta_of_warp = clocks.grid.cta_of_warp
        # What fences have made ready to publish (and whether for one CTA), or have yet to take in,
        # by warp.
        self._ready: dict[int, tuple[Knowledge, bool]] = {}
        self._pending: dict[int, Knowledge] = {}

    def fence(self, scope: str, warps: Array) -> None:
        """A fence between strong accesses, which makes a release of the next one and an acquire of
        the last.
        """
        for warp in warps.tolist():
            if warp in self._pending:
                self._clocks.learn_all(warp, self._pending.pop(warp))
            self._ready[warp] = self._clocks.knowledge(warp), scope == "cta"
        self._clocks.tick(warps)

    def access(
        self, space: str, offsets: Array, mask: Array | None, warps: Array, order: str,
        is_write: bool,
    ) -> None:  # fmt: skip
        """Releases and acquires through a place in memory."""
        is_atomic = order.startswith("atomic")
        releases = "release" in order or "acq_rel" in order
        acquires = "acquire" in order or "acq_rel" in order
        released = self._released
        if space != "global":
            space = f"{space} of wave {self._first}"  # another wave's memory is another one
        for column, warp in enumerate(warps.tolist()):
            lanes = offsets[:, column] if mask is None else offsets[mask[:, column], column]
            cta = int(self._cta_of_warp[warp])
            for place in np.unique(lanes).tolist():
                # What a scope of one CTA has released is for that CTA.
                wide, narrow = (space, place, -1), (space, place, self._first + cta)
                if is_atomic or not is_write:
                    for key in (wide, narrow):
                        there = released.get(key)
                        if there is None:
                            continue
                        if acquires:
                            self._clocks.learn_all(warp, there)
                        else:
                            self._pending[warp] = _join(self._pending.get(warp, {}), there)
                if not is_write:
                    continue
                left, is_narrow = self._ready.get(warp, ({}, False))
                if releases:
                    left, is_narrow = self._clocks.knowledge(warp), order.endswith("cta")
                if not is_atomic:
                    # A plain store ends what others have released there.
                    released.pop(wide, None)
                    released.pop(narrow, None)
                if left:
                    key = narrow if is_narrow else wide
                    released[key] = _join(released.get(key, {}), left)
        if releases:
            self._clocks.tick(warps)


def _join(one: Knowledge, other: Knowledge) -> Knowledge:
    """What two have known together."""
    joined = dict(one)
    for cluster, row in other.items():
        mine = joined.get(cluster)
        if mine is None:
            joined[cluster] = row
            continue
        width = max(len(mine), len(row))
        joined[cluster] = np.maximum(*(np.pad(x, (0, width - len(x))) for x in (mine, row)))
    return joined
