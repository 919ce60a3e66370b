"""Accesses as numbers: who, when, where in the program, and how."""

from __future__ import annotations

import numpy as np

Array = np.ndarray

WRITE, ASYNC, STRONG = 1, 2, 4
"""Flags of an event.  ASYNC: by the async proxy; STRONG: atomic, volatile or with an ordering."""

_FIRST_CAPACITY = 1 << 14
_COLUMNS = {
    "component": np.int32,
    "epoch": np.int32,
    "cluster": np.int32,
    "warp": np.int32,
    "site": np.int32,
    "flags": np.uint8,
}


class Events:
    """Event ``i`` happened in epoch ``epoch[i]`` of clock component ``component[i]`` of a cluster.

    Number 0 stands for nothing: nobody ever has to have seen it.
    """

    def __init__(self) -> None:
        self.count = 1
        for name, dtype in _COLUMNS.items():
            setattr(self, name, np.zeros(_FIRST_CAPACITY, dtype))

    component: Array
    epoch: Array
    cluster: Array
    warp: Array
    site: Array
    flags: Array

    def add(
        self, component: Array, epoch: Array, cluster: Array, warp: Array, site: int, flags: int
    ) -> Array:
        """One event for each element; their numbers."""
        first, self.count = self.count, self.count + len(component)
        if self.count > len(self.epoch):
            for name in _COLUMNS:
                old = getattr(self, name)
                setattr(self, name, np.concatenate((old, np.zeros(max(len(old), len(component)),
                                                                  old.dtype))))  # fmt: skip
        new = slice(first, self.count)
        self.component[new], self.epoch[new] = component, epoch
        self.cluster[new], self.warp[new] = cluster, warp
        self.site[new], self.flags[new] = site, flags
        return np.arange(first, self.count, dtype=np.int32)
