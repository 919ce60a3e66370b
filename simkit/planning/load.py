"""Which worker does each item of work and when, and how evenly that loads the workers."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simkit.layouts.tables import Int64Array
from simkit.planning.batch import check_sizes


def item_cost(tile_q: Int64Array | int, keys: Int64Array | int) -> Int64Array:
    """What an item of ``tile_q`` rows and ``keys`` keys costs, in keys: its rows are loaded and
    stored, its keys loaded.

    Source: FlashInfer, scheduler.cuh, cost_function. Integers, where that has float32, which counts
    no further than 2^24.
    """
    return np.asarray(2 * np.asarray(tile_q, np.int64) + keys, np.int64)


@dataclass(frozen=True, eq=False)
class Placement:
    """Item i runs on worker ``worker[i]`` from ``starts[i]`` for ``costs[i]``.

    A worker is an SM, a cluster or a place for a CTA; costs are of one unit. int64 [items].
    """

    workers: int
    worker: NDArray[np.int64]
    starts: Int64Array
    costs: Int64Array

    @cached_property
    def loads(self) -> Int64Array:
        """Cost of all items of each worker, int64 [workers]."""
        sums = np.zeros(self.workers, np.int64)
        np.add.at(sums, self.worker, self.costs)
        return sums

    @property
    def total(self) -> int:
        return int(self.costs.sum())

    @property
    def largest(self) -> int:
        """Cost of the largest item, which no placement can divide."""
        return int(self.costs.max(initial=0))

    @property
    def makespan(self) -> int:
        """When the last worker is done."""
        return int((self.starts + self.costs).max(initial=0))

    @property
    def ideal(self) -> float:
        """A makespan that no placement of these items goes below."""
        return max(self.total / self.workers, float(self.largest))

    @property
    def efficiency(self) -> float:
        """The busy part of all workers until the last is done, 0 to 1; 1 without work."""
        return self.total / (self.workers * self.makespan) if self.makespan else 1.0


def list_schedule(costs: ArrayLike, workers: int) -> Placement:
    """Gives each item in turn to the worker that has the least so far, the first of several.

    So CTAs get to SMs, and so planners fill the queues of persistent workers. The makespan is at
    most total / workers + largest (R. L. Graham, Bounds for certain multiprocessing anomalies,
    1966). `ShapeError` without a worker.
    """
    check_sizes(workers=workers)
    cost = np.asarray(costs, np.int64)
    heap = [(0, worker) for worker in range(workers)]
    chosen = np.zeros(cost.size, np.int64)
    starts = np.zeros(cost.size, np.int64)
    for item, own in enumerate(cost.tolist()):
        load, worker = heap[0]
        heapq.heapreplace(heap, (load + own, worker))
        chosen[item], starts[item] = worker, load
    return Placement(workers, chosen, starts, cost)


def in_order(worker: NDArray[np.int64], costs: Int64Array, workers: int) -> Placement:
    """Items that are given their ``worker``, each worker's one after another."""
    order = np.argsort(worker, kind="stable")
    sums = np.cumsum(costs[order]) - costs[order]  # cost of all items before, of any worker
    firsts = np.searchsorted(worker[order], np.arange(workers))
    before = np.append(sums, costs.sum())[firsts]
    starts = np.empty_like(sums)
    starts[order] = sums - before[worker[order]]
    return Placement(workers, worker, starts, costs)
