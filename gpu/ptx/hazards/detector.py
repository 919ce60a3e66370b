"""What the executor tells of accesses and synchronisation, and the hazards that follow from it.

Two accesses of the same bytes, one of them a write, race unless what their warps and agents have
seen of each other (clocks.py) orders them.  An asynchronous agent's access may happen at any moment
from its issue on: what came before has to be ordered before the issue, and what follows has to wait
for its completion.  Nothing here depends on when the executor happens to do its work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from gpu.ptx import wgmma
from gpu.ptx.hazards import clocks as kinds
from gpu.ptx.hazards.clocks import Clocks
from gpu.ptx.hazards.events import ASYNC, STRONG, WRITE
from gpu.ptx.hazards.findings import GlobalShadow, HazardState
from gpu.ptx.hazards.mbarriers import Mbarriers
from gpu.ptx.hazards.order import MemoryOrder
from gpu.ptx.hazards.shadow import Shadow
from gpu.ptx.memory import Allocation
from gpu.ptx.spaces import GLOBAL_BASE
from gpu.tensor_map import DESCRIPTOR_BYTES

if TYPE_CHECKING:
    from gpu.ptx.grid import Grid

Array = np.ndarray

_AGENTS = {kinds.SELF: "", kinds.COPIES: "a cp.async of ", kinds.WGMMA: "a wgmma of "}


class Detector:
    """Hazards of the CTAs of one wave."""

    def __init__(self, grid: Grid, state: HazardState) -> None:
        self.grid = grid
        self.state = state
        self.events = state.events
        self.clocks = Clocks(grid, state.before + grid.first // grid.cluster_size, state.clusters)
        self.shared = Shadow(len(grid.shared.data))
        self.barriers = Mbarriers(self)
        self.sees_primary = np.zeros(grid.warps, bool)
        # CTAs of a cluster that have exited, and tensor maps that warps have fenced: when.
        self.exited = np.zeros(grid.ctas, bool)
        self._fenced_maps: dict[tuple[int, int], int] = {}
        # Of the store at hand: whether memory holds what its lanes write, and those of its lanes
        # that others have overwritten, with what reports them.
        self._holds: Callable[[], Array] | None = None
        self._lost: list[tuple[Array, Callable[[Array], None]]] = []
        self.order = MemoryOrder(self.clocks, state)

    # Accesses

    def access(
        self, space: str, offsets: Array, size: int, mask: Array | None, warps: Array, site: int,
        is_write: bool, order: str, holds: Callable[[], Array] | None = None,
    ) -> Callable[[], None] | None:  # fmt: skip
        """A load, store or atomic (``order`` "atomic ...") of some warps: ``offsets`` [lanes,
        warps] from the start of the space's memory.  ``order``: "" for a weak access.

        ``holds``: whether memory holds what each lane stores.  Warps that store the same are let
        off, as compilers make them do; the result, if any, is to be called after the store to see.
        """
        if order:
            # Before the access: a release publishes what came before it, an acquire what follows.
            self.order.access(space, offsets, mask, warps, order, is_write)
        flags = (WRITE if is_write else 0) | (STRONG if order else 0)
        component = self.clocks.component(kinds.SELF, warps)
        epoch = self.clocks.epoch(warps)
        columns = np.broadcast_to(np.arange(len(warps)), offsets.shape)
        if mask is not None:
            offsets, columns = offsets[mask], columns[mask]
            if not offsets.size:
                return None
        self._holds = None
        if holds is not None:
            self._holds = (
                (lambda: holds()[mask]) if mask is not None else lambda: holds().reshape(-1)
            )
        self._lost.clear()
        self._touch(space, offsets.reshape(-1), size, columns.reshape(-1), warps, component, epoch,
                    site, flags)  # fmt: skip
        if not self._lost or self._holds is None:
            self._holds = None
            return None
        return self._settle

    def _settle(self) -> None:
        """Reports lanes whose store another warp's of the same instruction has overwritten."""
        assert self._holds is not None
        kept = self._holds()
        for chosen, report in self._lost:
            wrong = ~kept[chosen]
            if wrong.any():
                report(wrong)
        self._lost.clear()
        self._holds = None

    def agent(
        self, space: str, offsets: Array, size: int, valid: Array | None, warps: Array,
        component: Array, epoch: Array, site: int, is_write: bool, is_async: bool = True,
        is_strong: bool = False,
    ) -> None:  # fmt: skip
        """Accesses [agents, pieces] of asynchronous agents that some warps start, one for each
        row; ``component`` and ``epoch`` say when they are over.
        """
        columns = np.broadcast_to(np.arange(len(offsets))[:, None], offsets.shape)
        if valid is not None:
            offsets, columns = offsets[valid], columns[valid]
        if offsets.size:
            flags = (WRITE if is_write else 0) | (ASYNC if is_async else 0)
            flags |= STRONG if is_strong else 0
            self._touch(space, offsets.reshape(-1), size, columns.reshape(-1), warps, component,
                        epoch, site, flags)  # fmt: skip

    def group(
        self, space: str, offsets: Array, size: int, valid: Array | None, warps: Array, kind: int,
        site: int, is_write: bool, is_async: bool = True, is_strong: bool = False,
        owners: Array | None = None,
    ) -> None:  # fmt: skip
        """The same of agents whose completion groups of work (``kind``) tell, those of the warps or
        of ``owners``.
        """
        owners = warps if owners is None else owners
        component = self.clocks.component(kind, owners)
        epoch = self.clocks.committed[kind, owners] + 1
        self.agent(space, offsets, size, valid, warps, component, epoch, site, is_write, is_async,
                   is_strong)  # fmt: skip

    def _touch(
        self, space: str, offsets: Array, size: int, columns: Array, warps: Array,
        component: Array, epoch: Array, site: int, flags: int,
    ) -> None:  # fmt: skip
        """Checks accesses [n] against what is known of their bytes, and makes them known."""
        events = self.events.add(component, epoch, self.clocks.cluster[warps], warps, site, flags)
        if space == "shared":
            if self.exited.any():
                self._check_exited(offsets, columns, warps, events)
            self._check_shadow(self.shared, space, "", offsets, size, columns, warps, events, flags,
                               np.arange(len(offsets)))  # fmt: skip
            return
        memory = self.grid.memory
        allocation = memory.find(int(offsets.min()), int(offsets.max()) + size)
        if allocation is not None:
            self._touch_allocation(allocation, offsets, size, columns, warps, events, flags,
                                   np.arange(len(offsets)))  # fmt: skip
            return
        owners = memory.owners(offsets, size)
        for owner in np.unique(owners[owners >= 0]).tolist():
            here = owners == owner
            self._touch_allocation(
                memory.allocations[owner], offsets[here], size, columns[here], warps, events, flags,
                np.flatnonzero(here),
            )  # fmt: skip

    def _touch_allocation(
        self, allocation: Allocation, offsets: Array, size: int, columns: Array, warps: Array,
        events: Array, flags: int, which: Array,
    ) -> None:  # fmt: skip
        own = offsets - allocation.start
        self._check_initialised(allocation, own, size, columns, events, flags)
        known = self.state.memory.get(allocation.start)
        if known is None:
            known = self.state.memory[allocation.start] = GlobalShadow(allocation)
        if flags & WRITE:
            if known.shadow is None:
                known.shadow = Shadow(allocation.end - allocation.start)
            access, reads = known.log.overlapping(own, size)
            if len(reads):
                self._check(reads, own[access], columns[access], warps, events, flags,
                            "global", allocation.name)  # fmt: skip
        if known.shadow is not None:
            self._check_shadow(known.shadow, "global", allocation.name, own, size, columns, warps,
                               events, flags, which)  # fmt: skip
        if not flags & WRITE:
            known.log.add(own, size, columns, events)

    def _check_shadow(
        self, shadow: Shadow, space: str, name: str, offsets: Array, size: int, columns: Array,
        warps: Array, events: Array, flags: int, which: Array,
    ) -> None:  # fmt: skip
        granules, each = shadow.granules(offsets, size)
        if each > 1:
            columns, which = np.repeat(columns, each), np.repeat(which, each)
        before = shadow.writes.take(granules)
        if space == "shared" and not flags & WRITE and not before.all():
            self._uninitialised(before, granules * shadow.granule, columns, events, "shared")
        place = granules * shadow.granule
        self._check(before, place, columns, warps, events, flags, space, name, which)
        mine = events.take(columns)
        if flags & WRITE:
            for reads in shadow.reads if space == "shared" else ():
                self._check(reads.take(granules), place, columns, warps, events, flags, space, name)
            shadow.writes[granules] = mine
            after = shadow.writes.take(granules)
            lost = np.flatnonzero(after != mine)
            if len(lost) and not flags & STRONG:

                def report(wrong: Array) -> None:
                    some = lost[wrong]
                    self._report(after[some], place[some], columns[some], events, flags, space,
                                 name, "race")  # fmt: skip

                if self._holds is None:
                    report(np.ones(len(lost), bool))
                else:
                    self._lost.append((which[lost], report))
        elif space == "shared":
            slots = shadow.slots(self.events.component[events])
            shadow.reads[slots.take(columns), granules] = mine

    def _check(
        self, before: Array, place: Array, columns: Array, warps: Array, events: Array, flags: int,
        space: str, name: str, which: Array | None = None,
    ) -> None:  # fmt: skip
        """Reports those earlier events that the warps of the new ones have not seen.

        ``which``: the lanes of a store, where writes of what is there already are let off.
        """
        log, clocks = self.events, self.clocks
        component, epoch = log.component.take(before), log.epoch.take(before)
        owner = warps.take(columns)
        if space == "shared":
            known = clocks.seen[0, owner, component]
        else:
            away = log.cluster.take(before) != clocks.cluster.take(owner)
            away &= before > 0
            if away.any():
                known = clocks.seen[0, owner, np.where(away, 0, component)]
                known = np.where(away, self._foreign(owner, before, component), known)
            else:
                known = clocks.seen[0, owner, component]
        bad = known < epoch
        earlier = log.flags.take(before)
        if flags & STRONG:
            bad &= (earlier & STRONG) == 0
        if bad.any() and which is not None and self._holds is not None:
            bad &= ~(self._holds()[which] & (earlier & WRITE > 0))
        if bad.any():
            self._report(before[bad], place[bad], columns[bad], events, flags, space, name, "race")
        if flags & ASYNC:
            # Ordered, but by the generic proxy only.
            unfenced = ((earlier & (ASYNC | WRITE)) == WRITE) & ~bad
            if space != "shared":
                unfenced &= ~away
            if unfenced.any():
                unfenced &= clocks.seen[1, owner, component % clocks.seen.shape[2]] < epoch
                if unfenced.any():
                    self._report(before[unfenced], place[unfenced], columns[unfenced], events,
                                 flags, space, name, "missing_proxy_fence")  # fmt: skip

    def _foreign(self, owner: Array, before: Array, component: Array) -> Array:
        cluster = self.events.cluster.take(before)
        known = np.zeros(len(before), np.int32)
        if self.clocks.foreign is not None:
            # Another launch may have more components than this one knows anything of.
            inside = component < self.clocks.foreign.shape[2]
            known[inside] = self.clocks.foreign[owner[inside], cluster[inside], component[inside]]
        over = (cluster < self.state.before) & self.sees_primary.take(owner)
        known[over] = np.iinfo(np.int32).max
        return known

    # Reports

    def _report(
        self, before: Array, place: Array, columns: Array, events: Array, flags: int, space: str,
        name: str, kind: str,
    ) -> None:  # fmt: skip
        """One hazard for each pair of places in the program, with an example of each."""
        log, findings = self.events, self.state.findings
        sites = log.site.take(before)
        line = int(log.site[events[0]])
        for other in np.unique(sites).tolist():
            if (kind, line, other) in findings.found:
                continue
            at = int(np.flatnonzero(sites == other)[0])
            new, old = int(events[columns[at]]), int(before[at])
            where = self._bytes(int(place[at]), space, name)
            ways = (
                "write" if int(log.flags[old]) & WRITE else "read",
                "write" if flags & WRITE else "read",
            )
            count = int((sites == other).sum())
            first, second = self._who(old), self._who(new)
            if kind == "race":
                message = (
                    f"{ways[0]} by {first} ({self.state.place_of(old)}) and {ways[1]} by {second}"
                    f" ({findings.place(line)}) of {where} are not ordered"
                )
                advice = self._advice(old, new, space)
            else:
                message = (
                    f"{ways[0]} by {first} ({self.state.place_of(old)}) is followed by an"
                    f" asynchronous {ways[1]} by {second} ({findings.place(line)}) of {where}"
                    " without a proxy fence between them"
                )
                advice = "fence.proxy.async after the write, before the barrier that orders the two"
            more = f" ({count} such accesses at once)" if count > 1 else ""
            elsewhere = self.state.place_of(old) if self.state.before else ""
            findings.add(kind, line, other, message + more, advice, other_place=elsewhere)

    def _bytes(self, place: int, space: str, name: str) -> str:
        if space == "shared":
            cta, offset = divmod(place, self.grid.shared_stride)
            return f"shared byte {offset} of {self.grid.cta_name(cta)}"
        return f"byte {place} of {name!r}"

    def _who(self, event: int) -> str:
        log, clocks, grid = self.events, self.clocks, self.grid
        cluster, component = int(log.cluster[event]), int(log.component[event])
        kind = component // clocks.width
        # Every other component is an mbarrier's, told by the bulk copies that complete on it.
        agent = _AGENTS.get(kind, "a bulk copy of ")
        warp = int(log.warp[event])
        if cluster != int(clocks.cluster[min(warp, grid.warps - 1)]):
            # Of another wave of CTAs.
            return f"{agent}a warp of cluster {cluster}"
        name = grid.cta_name(int(grid.cta_of_warp[warp]))
        number = warp % grid.warps_per_cta
        threads = f"threads {32 * number}-{min(32 * number + 32, grid.launch.threads) - 1}"
        return f"{agent}warp {number} ({threads}) of {name}"

    def _advice(self, old: int, new: int, space: str) -> str:
        """The synchronisation that would have ordered two accesses."""
        log, clocks = self.events, self.clocks
        kind = int(log.component[old]) // clocks.width
        same_cluster = log.cluster[old] == log.cluster[new]
        if kind == kinds.COPIES:
            return "cp.async.wait_group (and a barrier for other warps) before the access"
        if kind in (kinds.BULK_READS, kinds.BULK_WRITES):
            return "cp.async.bulk.wait_group (.read for its source) before the access"
        if kind == kinds.WGMMA:
            return "wgmma.wait_group, then an arrival at a barrier, before the access"
        if kind > kinds.WGMMA:
            return "a wait for the phase of the copy's mbarrier before the access"
        if not same_cluster:
            return "release and acquire at gpu scope between the two CTAs, or another launch"
        if self.grid.cluster_size > 1 and space == "shared":
            return (
                "bar.sync, an mbarrier, or barrier.cluster between CTAs, before the second access"
            )
        return "bar.sync or an mbarrier between the two"

    def _uninitialised(
        self, before: Array, place: Array, columns: Array, events: Array, space: str, name: str = ""
    ) -> None:
        at = int(np.flatnonzero(before == 0)[0])
        event = int(events[columns[at]])
        line = int(self.events.site[event])
        self.state.findings.add(
            "uninitialised",
            line,
            0,
            f"{self._who(event)} reads {self._bytes(int(place[at]), space, name)}, which nobody has"
            f" written ({self.state.findings.place(line)})",
            "write it first, or do not read it",
        )

    def _check_initialised(
        self, allocation: Allocation, offsets: Array, size: int, columns: Array, events: Array,
        flags: int,
    ) -> None:  # fmt: skip
        written = allocation.written
        if written is None:
            return
        spread = offsets[:, None] + np.arange(size)
        if flags & WRITE:
            written[spread] = True
            return
        known = np.logical_and.reduce(written[spread], axis=1)
        if not known.all():
            self._uninitialised(known.astype(np.int32), offsets, columns, events, "global",
                                allocation.name)  # fmt: skip

    # Synchronisation of warps

    def meet(self, warps: Array) -> None:
        """A barrier of whole CTAs."""
        ctas = self.grid.cta_of_warp[warps]
        starts = np.flatnonzero(np.diff(ctas, prepend=-1))
        if (
            len(warps) == len(starts) * (len(warps) // len(starts))
            and (starts == np.arange(len(starts)) * (len(warps) // len(starts))).all()
        ):
            self.clocks.meet(warps, len(starts))
            return
        for cta in np.unique(ctas):
            self.clocks.meet(warps[ctas == cta], 1)

    def come_to_barrier(self, places: Array, warps: Array) -> None:
        """``places``: CTA and number of each warp's barrier in one."""
        self.clocks.publish("barrier", places, warps)

    def leave_barrier(self, places: Array, warps: Array, complete: Array) -> None:
        """Warps go on; all barriers at the places ``complete`` start again."""
        self.clocks.collect("barrier", places, warps)
        self.clocks.clear("barrier", complete)

    def come_to_cluster_barrier(self, warps: Array) -> None:
        self.clocks.publish("cluster", self.grid.cluster_of_warp[warps], warps)

    def end_cluster_barrier(self, clusters: Array) -> None:
        """What a phase's arrivals have left is for those who wait for its end."""
        self.clocks.move("cluster", "cluster over", clusters)

    def leave_cluster_barrier(self, warps: Array) -> None:
        self.clocks.collect("cluster over", self.grid.cluster_of_warp[warps], warps)

    def initialise(self, objects: Array, warps: Array, site: int) -> None:
        """mbarrier.init: a write like others, which users of the object must have seen."""
        self._use(objects, warps, site, WRITE)
        self.barriers.initialise(objects, warps, site)

    def arrive(
        self, objects: Array, warps: Array, counts: Array, site: int, releases: bool
    ) -> None:
        self._use(objects, warps, site, STRONG)
        if releases and (counts > 0).any():
            self.barriers.arrive(objects[counts > 0], warps[counts > 0])

    def see_phase(self, objects: Array, warps: Array, site: int) -> None:
        """Warps find that the phase that they wait for is over."""
        if len(objects):
            self._use(objects, warps, site, STRONG)
            self.barriers.learn(objects, warps)

    def arrive_after_copies(self, objects: Array, warps: Array) -> None:
        """cp.async.mbarrier.arrive: who waits there knows the copies so far to have landed."""
        self.clocks.commit(kinds.COPIES, np.unique(warps))
        numbers = self.barriers.numbers(objects)
        component = self.clocks.component(kinds.COPIES, warps)
        epochs = self.clocks.committed[kinds.COPIES, warps]
        np.maximum.at(self.barriers.arrived[0], (numbers, component), epochs)
        self.barriers.arrive(objects, warps)

    def _use(self, objects: Array, warps: Array, site: int, flags: int) -> None:
        """Accesses to the 8 bytes of mbarriers by warps, one for each of both."""
        users, columns = np.unique(warps, return_inverse=True)
        component = self.clocks.component(kinds.SELF, users)
        self._touch("shared", objects, 8, columns, users, component, self.clocks.epoch(users),
                    site, flags)  # fmt: skip

    def read_operand(self, operand: wgmma.Operand, rows: int, groups: Array, site: int) -> None:
        """A wgmma of some warpgroups [groups, 4] reads a matrix: each warp as an agent of its
        own, for all of them have to know that it is there.
        """
        if operand.descriptors is None:
            return
        element = wgmma.ELEMENT_BYTES[operand.kind]
        k = 32 // element
        for one in np.unique(operand.descriptors).tolist():
            chosen = operand.descriptors == one
            pattern = wgmma.chain_pattern((one,), not operand.transposed, rows, k, element)
            offsets = pattern.reshape(-1).astype(np.int64) * 16
            if int(offsets.max()) + 16 > self.grid.shared_bytes:
                return  # an error where the operation is done
            warps = groups[chosen].reshape(-1)
            places = self.grid.cta_of_warp[warps][:, None] * self.grid.shared_stride + offsets
            self.group("shared", places, 16, None, warps, kinds.WGMMA, site, is_write=False,
                       owners=np.repeat(groups[chosen, 0], 4))  # fmt: skip

    def exit(self, ctas: Array) -> None:
        """CTAs whose last warp exits: their peers have to be done with their shared memory."""
        if self.grid.cluster_size == 1:
            return
        stride, granule = self.grid.shared_stride, self.shared.granule
        for cta in ctas.tolist():
            self.exited[cta] = True
            part = slice(cta * stride // granule, (cta + 1) * stride // granule)
            reads = self.shared.reads[:, part].reshape(-1)
            events = np.unique(np.concatenate((self.shared.writes[part], reads)))
            events = events[events > 0]
            owners = self.grid.cta_of_warp[self.events.warp[events]]
            warps = np.flatnonzero(self.grid.cta_of_warp == cta)
            component = self.events.component[events]
            known = self.clocks.seen[0][warps[:, None], component].max(axis=0, initial=0)
            late = (owners != cta) & (known < self.events.epoch[events])
            for event in events[late].tolist():
                self._report_exit(int(event), cta)

    def _check_exited(self, offsets: Array, columns: Array, warps: Array, events: Array) -> None:
        targets = offsets // self.grid.shared_stride
        late = self.exited[targets] & (self.grid.cta_of_warp[warps[columns]] != targets)
        if late.any():
            at = int(np.flatnonzero(late)[0])
            self._report_exit(int(events[columns[at]]), int(targets[at]))

    def _report_exit(self, event: int, cta: int) -> None:
        line = int(self.events.site[event])
        self.state.findings.add(
            "early_exit",
            line,
            0,
            f"{self.grid.cta_name(cta)} may have exited when {self._who(event)} accesses its shared"
            f" memory ({self.state.place_of(event)})",
            "barrier.cluster.arrive and wait before the CTA exits",
        )

    def use_map(self, address: int, warps: Array, site: int) -> None:
        """A tensor copy takes its map from global memory."""
        start = address - GLOBAL_BASE
        allocation = self.grid.memory.find(start, start + DESCRIPTOR_BYTES)
        known = None if allocation is None else self.state.memory.get(allocation.start)
        if allocation is None or known is None or known.shadow is None:
            return
        shadow = known.shadow
        first = (start - allocation.start) // shadow.granule
        last = (start - allocation.start + DESCRIPTOR_BYTES - 1) // shadow.granule
        written = int(shadow.writes[first : last + 1].max())
        for warp in warps.tolist():
            if written >= self._fenced_maps.get((warp, address), 0) and written:
                self.state.findings.add(
                    "missing_proxy_fence",
                    site,
                    int(self.events.site[written]),
                    f"the tensor map that a copy uses ({self.state.findings.place(site)}) was"
                    f" changed ({self.state.place_of(written)}) with no tensormap fence between",
                    "fence.proxy.tensormap::generic.acquire of the map before the copy",
                )

    def fence_maps(self, addresses: Array, warps: Array) -> None:
        """fence.proxy.tensormap::generic.acquire by lanes of warps, one for each of both."""
        for address, warp in zip(addresses.tolist(), warps.tolist(), strict=True):
            self._fenced_maps[warp, int(address)] = self.events.count

    def note_fill(self, filling: str, site: int) -> None:
        self.state.findings.add(
            "zero_fill", site, 0,
            f"a tensor copy reaches outside its tensor and gets {filling}"
            f" ({self.state.findings.place(site)})",
            "", "info",
        )  # fmt: skip

    def proxy_fence(self, warps: Array) -> None:
        self.barriers.fence(warps)
        self.clocks.fence(warps)

    def see_primary(self, warps: Array) -> None:
        """griddepcontrol.wait: all of the launch before is over and known."""
        self.sees_primary[warps] = True

    def fence(self, scope: str, warps: Array) -> None:
        self.order.fence(scope, warps)
