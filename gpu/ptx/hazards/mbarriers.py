"""What arrivals and copies have left at mbarriers, and what waits take from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gpu.ptx.hazards.detector import Detector

Array = np.ndarray


class Mbarriers:
    """The mbarriers of a wave: a row for each object, a component for each one's bulk copies."""

    def __init__(self, detector: Detector) -> None:
        self.detector = detector
        self.clocks = detector.clocks
        self.grid = detector.grid
        self.index: dict[int, int] = {}
        self._columns: dict[tuple[int, int], int] = {}
        self.column = np.zeros(0, np.int64)
        self.completed = np.zeros(0, np.int32)
        self.arrived = np.zeros((2, 0, 0), np.int32)
        self.published = np.zeros((2, 0, 0), np.int32)
        self.is_fenced = np.zeros(0, bool)
        self.made_by = np.zeros(0, np.int64)
        self.site = np.zeros(0, np.int64)

    def numbers(self, objects: Array) -> Array:
        """The rows of objects (flat offsets in shared memory)."""
        new = [o for o in np.unique(objects).tolist() if o not in self.index]
        if new:
            for flat in new:
                self._add(flat)
            count = len(self.index)
            self.arrived, self.published = (
                np.pad(x, ((0, 0), (0, count - x.shape[1]), (0, 0)))
                for x in (self.arrived, self.published)
            )
            self.completed = np.pad(self.completed, (0, count - len(self.completed)))
            self.is_fenced = np.pad(self.is_fenced, (0, count - len(self.is_fenced)))
            self.made_by = np.pad(self.made_by, (0, count - len(self.made_by)), constant_values=-1)
            self.site = np.pad(self.site, (0, count - len(self.site)))
        self.arrived, self.published = (self.clocks.fit(x) for x in (self.arrived, self.published))
        return np.array([self.index[o] for o in objects.tolist()], np.int64)

    def _add(self, flat: int) -> None:
        cta, offset = divmod(flat, self.grid.shared_stride)
        key = cta % self.grid.cluster_size, offset
        if key not in self._columns:
            self._columns[key] = self.clocks.new_column()
        self.index[flat] = len(self.index)
        self.column = np.append(self.column, self._columns[key])

    def initialise(self, objects: Array, warps: Array, site: int) -> None:
        numbers = self.numbers(objects)
        self.arrived[:, numbers] = 0
        self.published[:, numbers] = 0
        self.is_fenced[numbers] = False
        self.made_by[numbers], self.site[numbers] = warps, site

    def fence(self, warps: Array) -> None:
        """fence.mbarrier_init and proxy fences make objects known to the async proxy."""
        self.is_fenced |= np.isin(self.made_by, warps)

    def arrive(self, objects: Array, warps: Array) -> None:
        """Warps leave what they know at objects, one for each of both."""
        numbers = self.numbers(objects)
        for part in range(2):
            np.maximum.at(self.arrived[part], numbers, self.clocks.seen[part, warps])
        self.clocks.tick(np.unique(warps))

    def complete(self, objects: Array) -> None:
        """Phases of objects, all different, are over."""
        numbers = self.numbers(objects)
        self.completed[numbers] += 1
        self.published[:, numbers] = self.arrived[:, numbers]
        self.published[0, numbers, self.column[numbers]] = self.completed[numbers]

    def learn(self, objects: Array, warps: Array) -> None:
        """Warps have seen the last phase of objects end."""
        numbers = self.numbers(objects)
        for part in range(2):
            rows = self.published[part, numbers]
            np.maximum.at(self.clocks.seen[part], warps, rows)

    def copies(
        self, objects: Array, warps: Array, site: int, is_async: bool = True
    ) -> tuple[Array, Array]:
        """Component and epoch of copies that complete on objects, one for each of both."""
        numbers = self.numbers(objects)
        late = ~self.is_fenced[numbers] & (self.made_by[numbers] >= 0)
        if is_async and late.any():
            made = int(self.site[numbers[late][0]])
            findings = self.detector.state.findings
            findings.add(
                "missing_proxy_fence",
                site,
                made,
                f"a copy ({findings.place(site)}) completes on an mbarrier whose initialisation"
                f" ({findings.place(made)}) no fence has shown to the async proxy",
                "fence.mbarrier_init.release.cluster or fence.proxy.async after mbarrier.init",
                "info",
            )
        self.arrive(objects, warps)
        return self.column[numbers], self.completed[numbers] + 1
