"""Barriers of a CTA: who has arrived, who waits, who may go on.

Source: PTX ISA 8.8, 9.7.13.1 (bar, barrier).

Each CTA has 16.  A barrier completes when the threads that arrived (whole warps) reach the expected
number: the one the instruction gives, or every thread of the CTA that has not exited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from simkit.errors import LaunchError

if TYPE_CHECKING:
    from gpu.ptx.frame import Arrival
    from gpu.ptx.grid import Grid

Array = np.ndarray

BARRIERS = 16
_NOT_WAITING = -1


class Barriers:
    """Barrier state of all resident CTAs; waiting warps by their position in the register file."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        shape = (grid.ctas, BARRIERS)
        self.arrived = np.zeros(shape, np.int64)
        self.expected = np.zeros(shape, np.int64)  # 0: all living threads
        self.waiting = np.full(grid.warps, _NOT_WAITING, np.int64)
        self.next_block = np.zeros(grid.warps, np.int64)
        self.site = np.zeros(grid.warps, np.int64)
        self.votes = np.zeros((grid.ctas, BARRIERS, 2), np.int64)  # true predicates, all predicates
        self.reductions: dict[int, tuple[str, str]] = {}  # by site: operation, register

    def wait(self, warps: Array, arrival: Arrival, next_block: int, mask: Array | None) -> None:
        """These warps arrive and wait; releases whoever that completes."""
        number = self._numbers(arrival.number, len(warps), arrival.site)
        threads = np.broadcast_to(np.asarray(arrival.threads, np.int64), number.shape)
        self._check_threads(threads, arrival.site)
        cta = self.grid.cta_of_warp[warps]
        if arrival.operation:
            assert arrival.predicate is not None
            votes = arrival.predicate if mask is None else arrival.predicate & mask
            total = np.full(len(warps), 32) if mask is None else mask.sum(axis=0)
            np.add.at(self.votes[:, :, 0], (cta, number), votes.sum(axis=0))
            np.add.at(self.votes[:, :, 1], (cta, number), total)
            self.reductions[arrival.site] = (arrival.operation, arrival.target)
        self.waiting[warps] = number
        self.next_block[warps] = next_block
        self.site[warps] = arrival.site
        if self.grid.hazards is not None:
            self.grid.hazards.come_to_barrier(cta * BARRIERS + number, warps)
        if self.grid.trace is not None:
            self.grid.trace.come_to_barrier(cta, number, warps, arrival.site)
        self._add(cta, number, threads, arrival.site)
        self.release(np.unique(cta))

    def arrive(self, warps: Array, number: int | Array, threads: int | Array, site: int) -> None:
        """bar.arrive: counted, not waiting."""
        numbers = self._numbers(number, len(warps), site)
        counts = np.broadcast_to(np.asarray(threads, np.int64), numbers.shape)
        self._check_threads(counts, site)
        cta = self.grid.cta_of_warp[warps]
        if self.grid.hazards is not None:
            self.grid.hazards.come_to_barrier(cta * BARRIERS + numbers, warps)
        if self.grid.trace is not None:
            self.grid.trace.come_to_barrier(cta, numbers, warps, site)
        self._add(cta, numbers, counts, site)
        self.release(np.unique(cta))

    def _numbers(self, number: int | Array, count: int, site: int) -> Array:
        numbers = np.broadcast_to(np.asarray(number, np.int64), (count,))
        if ((numbers < 0) | (numbers >= BARRIERS)).any():
            raise LaunchError(
                f"{self.grid.place(site)}: barrier {int(numbers.max())} does not exist, a CTA"
                f" has {BARRIERS}"
            )
        return numbers

    def _check_threads(self, threads: Array, site: int) -> None:
        if (threads % 32).any():
            bad = int(threads[threads % 32 != 0][0])
            raise LaunchError(
                f"{self.grid.place(site)}: barrier for {bad} threads, not a multiple of 32"
            )

    def _add(self, cta: Array, number: Array, threads: Array, site: int) -> None:
        known = self.expected[cta, number]
        conflict = (self.arrived[cta, number] > 0) & (known != threads)
        if conflict.any():
            raise LaunchError(
                f"{self.grid.place(site)}: barrier {int(number[conflict][0])} for"
                f" {int(threads[conflict][0]) or 'all'} threads, while others wait at it for"
                f" {int(known[conflict][0]) or 'all'}"
            )
        self.grid.effects += 1
        np.add.at(self.arrived, (cta, number), 32)
        self.expected[cta, number] = threads

    def release(self, ctas: Array) -> None:
        """Lets the warps of complete barriers of these CTAs go on."""
        expected = self.expected[ctas]
        living = 32 * self.grid.living_warps[ctas][:, None]
        arrived = self.arrived[ctas]
        complete = (arrived > 0) & (arrived >= np.where(expected > 0, expected, living))
        if not complete.any():
            return
        # A CTA-wide table keeps the selection of warps free of loops.
        table = np.zeros(self.arrived.shape, bool)
        table[ctas] = complete
        waits = self.waiting != _NOT_WAITING
        free = waits.copy()
        free[waits] = table[self.grid.cta_of_warp[waits], self.waiting[waits]]
        warps = np.flatnonzero(free)
        if self.reductions and len(warps):
            self._deliver(warps)
        if self.grid.hazards is not None:
            places = self.grid.cta_of_warp[warps] * BARRIERS + self.waiting[warps]
            self.grid.hazards.leave_barrier(places, warps, np.flatnonzero(table.reshape(-1)))
        if self.grid.trace is not None:
            self.grid.trace.leave_barrier(np.argwhere(table), self.waiting[warps], warps)
        self.arrived[table] = 0
        self.expected[table] = 0
        self.votes[table] = 0
        self.waiting[warps] = _NOT_WAITING
        self.grid.resume(warps, self.next_block[warps])

    def _deliver(self, warps: Array) -> None:
        """Writes the results of bar.red into the registers of the released warps."""
        for site in np.unique(self.site[warps]):
            if int(site) not in self.reductions:
                continue
            operation, target = self.reductions[int(site)]
            register = self.grid.registers.get(target)
            if register is None:
                continue
            chosen = warps[self.site[warps] == site]
            true, total = np.moveaxis(
                self.votes[self.grid.cta_of_warp[chosen], self.waiting[chosen]], -1, 0
            )
            value = {"popc": true, "and": true == total, "or": true > 0}[operation]
            register[:, chosen] = value.astype(register.dtype)

    def is_idle(self) -> bool:
        """Whether nobody has arrived anywhere: then a CTA that arrives as a whole need not wait at
        all.
        """
        return not self.arrived.any()

    def describe(self) -> list[str]:
        """One line per waiting place, for a deadlock report."""
        lines = []
        warps = np.flatnonzero(self.waiting != _NOT_WAITING)
        places = {
            (int(self.site[w]), int(self.grid.cta_of_warp[w]), int(self.waiting[w])) for w in warps
        }
        for site, cta, number in sorted(places)[:8]:
            here = [w for w in warps if self.site[w] == site and self.grid.cta_of_warp[w] == cta]
            expected = int(self.expected[cta, number]) or 32 * int(self.grid.living_warps[cta])
            names = ", ".join(str(int(w) % self.grid.warps_per_cta) for w in here)
            lines.append(
                f"{self.grid.cta_name(cta)}: warps {names} wait at barrier {number},"
                f" {self.grid.place(site)}:"
                f" {int(self.arrived[cta, number])} of {expected} threads have arrived"
            )
        if len(places) > 8:
            lines.append(f"... and {len(places) - 8} more places")
        return lines
