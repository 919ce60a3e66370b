"""Runs the resident CTAs of a launch: the register file, the state of every warp, and who runs
next.

Warps at the same block run together.  The default order sweeps over the blocks upwards: every
runnable warp runs once a sweep, so nobody starves, and warps that took different ways meet again
where the ways join.  Lanes of one warp that diverged run lowest block first until they are together
again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu.ptx import spaces
from gpu.ptx.agents import Agents
from gpu.ptx.barriers import Barriers
from gpu.ptx.blocks import EXIT
from gpu.ptx.clusters import Assembly, ClusterBarriers
from gpu.ptx.copies import Copies
from gpu.ptx.frame import Arrival, Frame
from gpu.ptx.memory import Bytes, banked
from gpu.ptx.products import Products
from gpu.ptx.schedule import LANE_PATIENCE, PATIENCE
from gpu.ptx.special_registers import coordinate, cta_coordinate, special_register
from gpu.ptx.types import DTYPES, storage_code
from gpu.ptx.waiting import GridWait, MbarrierWait, Wait, WarpgroupWait
from gpu.ptx.warpgroup_queue import WarpgroupQueue
from simkit.errors import BudgetError, DeadlockError, LaunchError
from simkit.numerics.tensor_core import TensorCore, dot_accumulate, dot_accumulate_fast

if TYPE_CHECKING:
    from gpu.ptx.hazards.detector import Detector
    from gpu.ptx.launch import Launch
    from gpu.ptx.tracing.recorder import Recorder

Array = np.ndarray

# Choosing and leaving a block takes about as long as this many array operations; counting them also
# bounds loops of nothing but empty blocks.
_BLOCK_COST = 8
# Frames of warp sets that come up again and again are kept, up to this many.
_FRAMES_KEPT = 512
# Waits time out together when nobody can run, so many times without effect before that is called a
# deadlock; and when others have run so many blocks without a phase coming to its end.
_TIME_OUTS = 32
_PATIENCE = 2048
# A test of an mbarrier in vain counts like so many blocks: others may spin too.
_VAIN_TEST = 64
# Warps that a deadlock report describes.
_LINES = 16


@dataclass(slots=True)
class Group:
    """Warps that run together.

    ``places``: for each block where some of their lanes are, which (None: all lanes).
    """

    frame: Frame
    places: dict[int, Array | None]
    strand: int
    turns: int = 0
    diverged: int = 0  # blocks run since the lanes went different ways
    exception: int = EXIT  # the block to run next although it is not the lowest

    @property
    def block(self) -> int:
        return self.exception if self.exception in self.places else min(self.places)


@dataclass(slots=True)
class Parked:
    """A group that waits, already placed at the block where it goes on."""

    group: Group
    wait: Wait
    target: int


@dataclass(slots=True)
class Statistics:
    """Work done: array operations (what the budget limits), warp instructions, lane
    instructions.
    """

    operations: int = 0
    instructions: int = 0
    lane_instructions: int = 0


@dataclass
class Grid:
    """CTAs ``first`` to ``first + ctas - 1`` of a launch."""

    launch: Launch
    first: int
    ctas: int
    statistics: Statistics
    output: list[str]
    registers: dict[str, Array] = field(init=False)
    shared_stride: int = field(init=False)

    def __post_init__(self) -> None:
        launch = self.launch
        threads = launch.threads
        self.warps_per_cta = -(-threads // 32)
        self.warps = self.ctas * self.warps_per_cta
        self.cluster_size: int = launch.cluster_size
        self.cta_of_warp: Array = np.repeat(np.arange(self.ctas), self.warps_per_cta)
        self.schedule = launch.options.schedule
        self.counters = launch.counters
        self.memory = launch.memory
        self.parameters = launch.parameters
        self.parameter_memory = launch.parameter_memory
        self.shared_bytes = launch.shared_bytes
        self.local_bytes = launch.program.local_bytes
        self.shared, self.shared_stride = banked(self.ctas, self.shared_bytes)
        self.local, local_stride = self._local_memory()
        self.local_base = (
            np.arange(self.warps)[None, :] * 32 + np.arange(32)[:, None]
        ) * local_stride
        self.live = np.ones((32, self.warps), bool)
        if threads % 32:
            self.live[threads % 32 :, self.warps_per_cta - 1 :: self.warps_per_cta] = False
        self.living_warps = np.full(self.ctas, self.warps_per_cta)
        self.registers = {
            name: np.zeros((32, self.warps), DTYPES[storage_code(launch.program.registers[name])])
            for name in launch.program.persistent
        }
        self._pools: dict[tuple[str, int], Array] = {}
        self._specials: dict[str, Array] = {}
        self._frames: dict[bytes, Frame] = {}
        self.random = self.schedule.generator
        self.copies = Copies(self.warps, self.schedule.delays_copies, self.schedule.luck)
        self.bulk_copies = Copies(32 * self.warps, self.schedule.delays_copies, self.schedule.luck)
        self.agents = Agents(self.schedule, self.random)
        self.barriers = Barriers(self)
        self.cluster_of_warp = self.cta_of_warp // self.cluster_size
        self.clusters = ClusterBarriers(self)
        self.assembly = Assembly(self)
        self.warpgroups = WarpgroupQueue(self, self.schedule.delays_copies)
        self.products = Products(self._multiply)
        self.hazards: Detector | None = launch.detector(self)
        self.trace: Recorder | None = launch.recorder(self)
        self.bound: Frame | None = None
        # Groups that wait for something else than a CTA's barrier, and whether any may go on now.
        self.parked: list[Parked] = []
        # Dependent launches: the grid this one depends on, and CTAs that allow others to start.
        self.primary: Grid | None = None
        self.has_triggered = np.zeros(self.ctas, bool)
        self.has_started = self.has_ended = False
        self.changed = False
        # How often something has happened that other threads can see.
        self.effects = 0
        self._time_outs = 0
        self._last_time_out: object = None
        self._blocks_parked = 0
        self.strand_of_warp = self.schedule.strands(
            self.warps, self.warps_per_cta, 4 if launch.program.uses_warpgroups else 1
        )
        self.runnable: dict[int, list[Group]] = {}
        self.position = 0
        self.current_strand = 0

    def _local_memory(self) -> tuple[Bytes, int]:
        if not self.local_bytes:
            return banked(1, 0)
        return banked(32 * self.warps, self.local_bytes)

    def release(self) -> None:
        """Gives back what takes most memory, now that all CTAs have ended.

        Grid and frames refer to each other: without this, fresh pages would be needed for every
        launch until the garbage collector comes round.
        """
        self.shared, self.shared_stride = banked(0, 0)
        self.local, _ = banked(0, 0)
        for arrays in (self.registers, self._pools, self._specials, self._frames):
            arrays.clear()

    # What frames ask for

    def temporary(self, code: str, index: int) -> Array:
        """A flat buffer for block-local registers, one value for every lane."""
        key = (code, index)
        if key not in self._pools:
            self._pools[key] = np.zeros(32 * self.warps, DTYPES[code])
        return self._pools[key]

    def special(self, name: str, code: str) -> Array:
        """A predefined register for all lanes (32, warps)."""
        if name not in self._specials:
            value = np.broadcast_to(special_register(self, name), (32, self.warps))
            self._specials[name] = np.ascontiguousarray(value.astype(DTYPES[code]))
        return self._specials[name]

    def clock(self, name: str, step: int) -> Array:
        """Clocks advance with the work done, ``step`` instructions of it in the block at hand; only
        their order means anything.
        """
        value = self.statistics.operations + step
        if name.startswith("%globaltimer"):
            value += self.launch.started
        if name in ("%clock_hi", "%globaltimer_hi"):
            value >>= 32
        dtype = np.uint64 if name in ("%clock64", "%globaltimer") else np.uint32
        return np.array(value & int(np.iinfo(dtype).max), dtype)

    def tensor_core(self, kind: str) -> TensorCore | None:
        return self.launch.tensor_core(kind)

    def _multiply(self, a: Any, b: Any, c: Array, kind: str) -> Array:
        """Exactly as the tensor core, or in plain float32."""
        core = self.tensor_core(kind)
        return dot_accumulate_fast(a, b, c) if core is None else dot_accumulate(a, b, c, core)

    def warpgroup_core(self, kind: str, is_half: bool) -> TensorCore | None:
        return self.launch.warpgroup_core(kind, is_half)

    def read_register(self, name: str, warps: Array | slice) -> Array:
        """A register of some warps (32, warps), also while they run a block on copies."""
        copies, places = self._register(name, warps)
        return copies[:, places]

    def write_register(self, name: str, warps: Array | slice, values: Array) -> None:
        """The same for writing."""
        copies, places = self._register(name, warps)
        copies[:, places] = values.view(copies.dtype)

    def _register(self, name: str, warps: Array | slice) -> tuple[Array, Array | slice]:
        """Where a register is now, and where some warps are in it."""
        copies = None if self.bound is None else self.bound.copy_of(name)
        if copies is None:
            return self.registers[name], warps
        assert self.bound is not None
        numbers = np.arange(warps.start, warps.stop) if isinstance(warps, slice) else warps
        return copies, np.searchsorted(self.bound.warps, numbers)

    def string(self, address: int) -> str:
        """A zero-terminated string in global memory."""
        data = self.memory.bytes.data
        start = address - spaces.GLOBAL_BASE
        if not 0 <= start < len(data):
            raise LaunchError(f"string address 0x{address:x} is outside global memory")
        piece = data[start : start + 4096].tobytes()
        return piece.split(b"\0", 1)[0].decode("utf-8", "replace")

    def place(self, site: int) -> str:
        return self.launch.place(site)

    def thread_name(self, lane: int, warp: int) -> str:
        thread = lane + 32 * (int(warp) % self.warps_per_cta)
        x, y, z = (int(coordinate(np.array(thread), self.launch.block, d)) for d in range(3))
        return f"thread ({x}, {y}, {z}) of {self.cta_name(int(self.cta_of_warp[warp]))}"

    def cta_name(self, cta: int) -> str:
        x, y, z = (int(cta_coordinate(self, np.array(cta), d)) for d in range(3))
        return f"block ({x}, {y}, {z})"

    def cta_in_cluster(self, cta: Array, rank: Array) -> Array:
        """The CTA of a rank in the cluster of a CTA."""
        return cta - cta % self.cluster_size + rank

    def living_in_cluster(self, cluster: int) -> int:
        """Threads of a cluster that have not exited."""
        warps = self.cluster_size * self.warps_per_cta
        return int(np.count_nonzero(self.live[:, cluster * warps : (cluster + 1) * warps]))

    def frame(self, warps: Array) -> Frame:
        key = warps.tobytes()
        found = self._frames.get(key)
        if found is None:
            if len(self._frames) >= _FRAMES_KEPT:
                self._frames.clear()
            found = self._frames[key] = Frame(self, warps)
        return found

    # Scheduling

    def run(self, until_triggered: bool = False) -> None:
        """Runs all CTAs to their ends.

        Or, with ``until_triggered``, to where a dependent launch may start; or to where all that
        is left waits for the launch that this one depends on.  Another call goes on from there.
        """
        if not self.has_started:
            self.has_started = True
            self.resume(np.arange(self.warps), np.zeros(self.warps, np.int64))
        while True:
            if until_triggered and self.may_start_dependents():
                return
            if self.changed and (not self.runnable or self._may_wake()):
                self._wake()
            if self.runnable:
                self.agents.step()
                self._run_block(self._choose())
                self._blocks_parked += 1
                if self._blocks_parked >= _PATIENCE:
                    self._time_out()
            elif not self._unblock():
                break
        if self._waits_for_primary():
            return
        if self.living_warps.any():
            raise DeadlockError(
                f"kernel {self.launch.program.name!r} is deadlocked:\n    "
                + "\n    ".join((*self.barriers.describe(), *self._describe_parked()))
            )
        while self.agents.run_one():
            pass
        self.copies.finish()
        self.bulk_copies.finish()
        self.has_ended = True

    def may_start_dependents(self) -> bool:
        """Whether every CTA has allowed dependent launches, or exited."""
        return bool((self.has_triggered | (self.living_warps == 0)).all())

    def _waits_for_primary(self) -> bool:
        return (
            self.primary is not None
            and not self.primary.has_ended
            and any(isinstance(one.wait, GridWait) for one in self.parked)
        )

    def _may_wake(self) -> bool:
        """Waiting warps join at the start of a sweep, so that they run with as many as possible."""
        return self.schedule.kind != "eager" or self.position > max(self.runnable, default=-1)

    def _wake(self) -> None:
        """Lets every parked warp go on whose condition now holds."""
        self.changed = False
        self._blocks_parked = 0
        parked, self.parked = self.parked, []
        for one in parked:
            self._park(one.group, one.wait, one.target)

    def _unblock(self) -> bool:
        """Nobody can run: an agent works, or a wait times out; False if nothing is left to try."""
        if self.agents.run_one() or self.changed:
            return True
        waits = [one for one in self.parked if isinstance(one.wait, MbarrierWait)]
        if not waits or self._is_stuck():
            return False
        self._time_out()
        return True

    def _is_stuck(self) -> bool:
        """Whether waits have timed out again and again and nothing but that has happened since.

        Some kernels only peek at a barrier and do something else first if it is not ready; those
        that wait for it come back with everything as it was.
        """
        sites = np.zeros(self.warps, np.int64)
        for one in self.parked:
            sites[one.group.frame.warps] = one.wait.site
        state = (self.effects, np.count_nonzero(self.live), sites.tobytes())
        self._time_outs = self._time_outs + 1 if state == self._last_time_out else 0
        self._last_time_out = state
        return self._time_outs >= _TIME_OUTS

    def test_failed(self) -> None:
        """A warp has tested an mbarrier whose phase is not complete; it may go on doing so."""
        self.agents.somebody_waits()
        self._blocks_parked += _VAIN_TEST

    def _time_out(self) -> None:
        """Every try_wait gives up, as it may after some time."""
        self._blocks_parked = 0
        parked, self.parked = self.parked, []
        for one in parked:
            if isinstance(one.wait, MbarrierWait):
                self._finish(one.wait, one.group.frame.warps)
                self._settle(one.group)
            else:
                self.parked.append(one)

    def _park(self, group: Group, wait: Wait, target: int) -> None:
        """Warps of a group whose wait is over go on; the others are set aside."""
        warps = group.frame.warps
        ready = wait.ready(self, warps)
        if ready.all():
            self._finish(wait, warps)
            self._settle(group)
            if isinstance(wait, WarpgroupWait):
                self._wake_companions()
            return
        if (
            len(group.places) > 1
            and isinstance(wait, MbarrierWait)
            and self._pass_by(group, target)
        ):
            # Other lanes of the warp may have to arrive first.
            self._finish(wait, warps)
            return
        if ready.any():
            done, group = self._divide(group, ready)
            self._finish(wait.of(ready), done.frame.warps)
            self._settle(done)
            wait = wait.of(~ready)
        self.parked.append(Parked(group, wait, target))

    def _finish(self, wait: Wait, warps: Array) -> None:
        """Warps whose wait is over, or has timed out, go on."""
        wait.finish(self, warps)
        if self.trace is not None:
            self.trace.end_wait(warps.tolist())

    def _wake_companions(self) -> None:
        """The last warp of a warpgroup has come: the others go on with it, not after it."""
        parked, self.parked = self.parked, []
        for one in parked:
            if isinstance(one.wait, WarpgroupWait):
                self._park(one.group, one.wait, one.target)
            else:
                self.parked.append(one)

    def _divide(self, group: Group, chosen: Array) -> tuple[Group, Group]:
        """A group as the chosen warps and the others."""

        def part(which: Array) -> Group:
            places = {b: None if m is None else m[:, which] for b, m in group.places.items()}
            places = {b: m for b, m in places.items() if m is None or m.any()}
            return Group(self.frame(group.frame.warps[which]), places, group.strand, group.turns)

        return part(chosen), part(~chosen)

    def _describe_parked(self) -> list[str]:
        """One line per waiting warp, for a deadlock report."""
        lines = []
        for one in self.parked:
            warps = one.group.frame.warps[: _LINES + 1]
            wait = one.wait.of(np.arange(len(one.group.frame.warps)) <= _LINES)
            for warp, what in zip(warps.tolist(), wait.describe(self, warps), strict=True):
                lines.append(
                    f"{self.cta_name(int(self.cta_of_warp[warp]))}: warp"
                    f" {warp % self.warps_per_cta} waits at {self.place(wait.site)}: {what}"
                )
        total = sum(one.group.frame.n for one in self.parked)
        more = [f"... and {total - _LINES} more warps"] if total > _LINES else []
        return lines[:_LINES] + more

    def resume(self, warps: Array, blocks: Array) -> None:
        """Makes warps runnable at the given blocks."""
        if not len(warps):
            return
        full = self.live[:, warps].all(axis=0)
        keys = np.stack((self.strand_of_warp[warps], blocks, full.astype(np.int64)))
        if (keys == keys[:, :1]).all():
            self._start(warps, int(keys[0, 0]), int(keys[1, 0]), bool(keys[2, 0]))
            return
        for strand, block, is_full in np.unique(keys, axis=1).T:
            chosen = (keys[0] == strand) & (keys[1] == block) & (keys[2] == is_full)
            self._start(warps[chosen], int(strand), int(block), bool(is_full))

    def _start(self, warps: Array, strand: int, block: int, is_full: bool) -> None:
        mask = None if is_full else self.live[:, warps]
        self._add(Group(self.frame(warps), {block: mask}, strand))

    def _add(self, group: Group) -> None:
        group.exception = EXIT
        group.diverged = group.diverged + 1 if len(group.places) > 1 else 0
        if group.diverged:
            if group.diverged % LANE_PATIENCE == 0:
                self._let_others_pass(group)
            elif self.launch.program.blocks[group.block].waits_for_others:
                # What is not at the barrier may yet come there, or leave.
                group.exception = next(iter(self._independent(group, group.block)), EXIT)
        self.runnable.setdefault(group.block, []).append(group)

    def _let_others_pass(self, group: Group) -> None:
        """The lanes of the lowest block may be spinning for what other lanes have yet to do: those
        get a turn, in rotation, where they need not wait for the first ones to join them.
        """
        others = self._independent(group, min(group.places))
        if others:
            group.exception = others[group.diverged // LANE_PATIENCE % len(others)]

    def _independent(self, group: Group, block: int) -> list[int]:
        """Where the lanes are that need not wait for those at a block."""
        blocks = self.launch.program.blocks
        return [b for b in sorted(group.places) if b != block and not blocks[b].needs_convergence]

    def _pass_by(self, group: Group, target: int) -> bool:
        """Runs other lanes of a diverged group than those that wait; False if all have to wait."""
        others = self._independent(group, target)
        if others:
            group.diverged += 1
            group.exception = others[group.diverged % len(others)]
            self.runnable.setdefault(group.block, []).append(group)
        return bool(others)

    def _choose(self) -> Group:
        """The next group to run, taken out of the runnable ones and joined with its like."""
        kind = self.schedule.kind
        if kind == "eager":
            block = min((b for b in self.runnable if b >= self.position), default=-1)
            if block < 0:
                block = min(self.runnable)
            self.position = block + 1
            chosen = self.runnable[block][0]
        elif kind == "lazy":
            chosen = self._next_strand()
        else:
            groups = [g for waiting in self.runnable.values() for g in waiting]
            chosen = groups[int(self.random.integers(len(groups)))]
        return self._take(chosen)

    def _next_strand(self) -> Group:
        """The current strand until it waits or has had its turn, then the next one."""
        strands = {g.strand for waiting in self.runnable.values() for g in waiting}
        if self.current_strand not in strands:
            later = [s for s in strands if s > self.current_strand]
            self.current_strand = min(later or strands)
        own = [
            b
            for b, waiting in self.runnable.items()
            for g in waiting
            if g.strand == self.current_strand
        ]
        # Sweeping, so that groups that spin do not starve the one they spin for.
        block = min((b for b in own if b >= self.position), default=min(own))
        self.position = block + 1
        group = next(g for g in self.runnable[block] if g.strand == self.current_strand)
        group.turns += 1
        if group.turns >= PATIENCE:
            group.turns = 0
            self.current_strand += 1
        return group

    def _take(self, chosen: Group) -> Group:
        """Removes a group, with the whole warps of its strand that stand at the same block."""
        block = chosen.block
        waiting = self.runnable.pop(block)
        if len(waiting) == 1:
            return chosen
        if len(chosen.places) == 1 and chosen.places[block] is None:
            like = [
                g for g in waiting
                if g.strand == chosen.strand and len(g.places) == 1 and g.places[block] is None
            ]  # fmt: skip
        else:
            like = [chosen]
        rest = [g for g in waiting if not any(g is taken for taken in like)]
        if rest:
            self.runnable[block] = rest
        if len(like) == 1:
            return chosen
        warps = np.sort(np.concatenate([g.frame.warps for g in like]))
        return Group(self.frame(warps), {block: None}, chosen.strand, chosen.turns)

    def _run_block(self, group: Group) -> None:
        index = group.block
        mask = group.places.pop(index)
        block = self.launch.program.blocks[index]
        code = self.launch.code(index, mask is not None)
        frame = group.frame
        views = frame.bind(code)
        self.bound = frame
        if self.trace is not None:
            self.trace.enter(index, frame.warps, mask)
        result = code.function(views, mask, frame)
        if self.trace is not None:
            self.trace.leave(waits=block.kind == "sync" and result is not None)
        self.bound = None
        frame.release(code)
        self._count(code.instructions, frame, mask)
        if block.kind == "jump":
            self._move(group, block.targets[0], mask)
        elif block.kind == "branch":
            self._branch(group, block.targets, np.broadcast_to(result, frame.shape), mask)
            return
        elif block.kind == "switch":
            self._switch(group, block.targets, np.broadcast_to(result, frame.shape), mask)
            return
        elif isinstance(result, Arrival):
            self._arrive(group, result, block.targets[0], mask)
        else:
            self._move(group, block.targets[0], mask)
            if result is not None:
                self._park(group, result, block.targets[0])
                return
        self._settle(group)

    def _count(self, operations: int, frame: Frame, mask: Array | None) -> None:
        statistics = self.statistics
        statistics.operations += operations + _BLOCK_COST
        warps = frame.n if mask is None else int(mask.any(axis=0).sum())
        lanes = 32 * frame.n if mask is None else int(np.count_nonzero(mask))
        statistics.instructions += operations * warps
        statistics.lane_instructions += operations * lanes
        if statistics.operations > self.launch.options.budget:
            raise BudgetError(
                f"kernel {self.launch.program.name!r} used up its budget of"
                f" {self.launch.options.budget} array"
                f" instructions; it was at"
                f" {self.place(self.launch.first_line(frame, self.runnable))}"
                + "".join(f"\n    {line}" for line in self._describe_parked())
            )

    def _move(self, group: Group, target: int, mask: Array | None) -> None:
        """Lanes of a group go to a block."""
        if target == EXIT:
            self._exit(group.frame, mask)
            return
        if target in group.places and mask is not None:
            there = group.places[target]
            mask = mask if there is None else there | mask
        group.places[target] = mask

    def _branch(self, group: Group, targets: list[int], taken: Array, mask: Array | None) -> None:
        if mask is not None:
            for target, part in ((targets[0], taken & mask), (targets[1], mask & ~taken)):
                if part.any():
                    self._move(group, target, part)
            self._settle(group)
            return
        count = int(np.count_nonzero(taken))
        if count in (0, taken.size):
            self._move(group, targets[0] if count else targets[1], None)
            self._settle(group)
            return
        per_warp = taken.sum(axis=0)
        warps = group.frame.warps
        for target, chosen in ((targets[0], per_warp == 32), (targets[1], per_warp == 0)):
            if chosen.any():
                self._split(group, warps[chosen], target)
        mixed = (per_warp > 0) & (per_warp < 32)
        if mixed.any():
            part = Group(self.frame(warps[mixed]), {}, group.strand, group.turns)
            inside = taken[:, mixed]
            self._move(part, targets[0], inside)
            self._move(part, targets[1], ~inside)
            self._settle(part)

    def _switch(self, group: Group, targets: list[int], index: Array, mask: Array | None) -> None:
        """brx.idx: an index outside the list is undefined on hardware, an error here."""
        beyond = index >= len(targets) if mask is None else (index >= len(targets)) & mask
        if beyond.any():
            raise LaunchError(
                f"branch index {int(index[beyond][0])} is outside a list of {len(targets)} targets"
            )
        active = np.ones(index.shape, bool) if mask is None else mask
        full = active.all(axis=0)
        warps = group.frame.warps
        same = (index == index[0]).all(axis=0) & full
        if mask is None and same.any():
            for value in np.unique(index[0][same]):
                self._split(group, warps[same & (index[0] == value)], targets[int(value)])
            if same.all():
                return
            group = Group(self.frame(warps[~same]), {}, group.strand, group.turns)
            index, active = index[:, ~same], active[:, ~same]
        for value in np.unique(index[active]):
            self._move(group, targets[int(value)], active & (index == value))
        self._settle(group)

    def _split(self, group: Group, warps: Array, target: int) -> None:
        part = Group(self.frame(warps), {}, group.strand, group.turns)
        self._move(part, target, None)
        self._settle(part)

    def _settle(self, group: Group) -> None:
        """Puts a group back among the runnable ones, undoing its divergence where its lanes have
        met again.
        """
        places = group.places
        if not places:
            return
        if len(places) > 1 and group.frame.n > 1:
            group = self._without_whole_warps(group)
            places = group.places
            if not places:
                return
        if len(places) == 1:
            ((block, mask),) = places.items()
            if mask is not None:
                full = mask.all(axis=0)
                if full.all():
                    places[block] = None
                elif full.any() or not mask.any(axis=0).all():
                    warps = group.frame.warps
                    if full.any():
                        self._add(
                            Group(self.frame(warps[full]), {block: None}, group.strand, group.turns)
                        )
                    rest = ~full & mask.any(axis=0)
                    if not rest.any():
                        return
                    group = Group(
                        self.frame(warps[rest]), {block: mask[:, rest]}, group.strand, group.turns
                    )
        self._add(group)

    def _without_whole_warps(self, group: Group) -> Group:
        """What is left of a diverged group without the warps whose lanes have all met again: those
        need not wait until the lanes of other warps have.
        """
        there = {b: np.asarray(m.any(axis=0)) for b, m in group.places.items() if m is not None}
        whole = np.sum([*there.values()], axis=0) == 1
        if len(there) < len(group.places) or not whole.any():
            return group
        warps = group.frame.warps
        for block, mask in group.places.items():
            here = whole & there[block]
            if mask is not None and here.any():
                part: dict[int, Array | None] = {block: mask[:, here]}
                self._settle(Group(self.frame(warps[here]), part, group.strand, group.turns))
        if whole.all():
            return Group(group.frame, {}, group.strand)
        left = {b: m[:, ~whole] for b, m in group.places.items() if m is not None}
        places: dict[int, Array | None] = {b: m for b, m in left.items() if m.any()}
        frame = self.frame(warps[~whole])
        return Group(frame, places, group.strand, group.turns, group.diverged)

    def _arrive(self, group: Group, arrival: Arrival, target: int, mask: Array | None) -> None:
        """Warps of a group reach a barrier; the ones that complete go on, the others wait there."""
        frame = group.frame
        if mask is None:
            if self._whole_ctas_arrive(frame, arrival):
                if self.hazards is not None:
                    self.hazards.meet(frame.warps)
                if self.trace is not None:
                    self.trace.meet(frame.warps, int(arrival.number))
                group.places[target] = None
                return
            self.barriers.wait(frame.warps, arrival, target, None)
            return
        chosen = mask.any(axis=0)
        living = self.live[:, frame.warps]
        torn = chosen & (mask != living).any(axis=0)
        if torn.any():
            warp = int(frame.warps[torn][0])
            lanes = int(mask[:, torn][:, 0].sum())
            raise LaunchError(
                f"{self.place(arrival.site)}: barrier reached by {lanes} of"
                f" {int(self.live[:, warp].sum())} lanes of warp"
                f" {warp % self.warps_per_cta} of"
                f" {self.cta_name(int(self.cta_of_warp[warp]))}; the others went elsewhere"
            )
        number, threads = (
            np.broadcast_to(v, (frame.n,))[chosen] for v in (arrival.number, arrival.threads)
        )
        predicate = None if arrival.predicate is None else arrival.predicate[:, chosen]
        arrived = Arrival(
            number, threads, arrival.site, arrival.operation, predicate, arrival.target
        )
        self.barriers.wait(frame.warps[chosen], arrived, target, mask[:, chosen])
        if group.places and chosen.any():
            rest = ~chosen
            group.frame = self.frame(frame.warps[rest])
            group.places = {b: None if m is None else m[:, rest] for b, m in group.places.items()}

    def _whole_ctas_arrive(self, frame: Frame, arrival: Arrival) -> bool:
        """The usual case: all living warps of some CTAs arrive together at a barrier for all of
        them.
        """
        if (
            not isinstance(arrival.number, int)
            or not isinstance(arrival.threads, int)
            or arrival.operation
        ):
            return False
        if arrival.threads not in (0, 32 * self.warps_per_cta) or not 0 <= arrival.number < 16:
            return False
        if frame.n != self.warps:
            present = np.bincount(frame.cta, minlength=self.ctas)
            here = present > 0
            if not (present[here] == self.living_warps[here]).all():
                return False
            if arrival.threads and (self.living_warps[here] != self.warps_per_cta).any():
                return False
        return self.barriers.is_idle()

    def _exit(self, frame: Frame, mask: Array | None) -> None:
        before = self.live[:, frame.warps].any(axis=0)
        if mask is None:
            self.live[:, frame.warps] = False
        else:
            self.live[:, frame.warps] &= ~mask
        gone = before & ~self.live[:, frame.warps].any(axis=0)
        if gone.any():
            ctas = frame.cta[gone]
            np.subtract.at(self.living_warps, ctas, 1)
            if self.hazards is not None:
                over = np.unique(ctas)
                self.hazards.exit(over[self.living_warps[over] == 0])
            self.barriers.release(np.unique(ctas))
        self.clusters.release(np.unique(frame.cta // self.cluster_size))
