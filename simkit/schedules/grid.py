"""Launches on a GPU: CTAs on SMs, from simulations of one SM, and the clock that power allows.

A CTA works off items: tiles of queries, pieces of a batch. Items of one kind differ in length
alone (tiles of keys), and all SMs are alike, so a few simulations of one SM say what every item
takes: alone for the first item of a CTA, and after another for what one more adds. Loops settle
into a period within a few tiles; longer items are extended by what it takes (`LONGEST`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.errors import CapacityError, ShapeError
from simkit.machine.gpus import H100, Gpu
from simkit.machine.occupancy import Occupancy, occupancy
from simkit.planning.load import Placement, in_order, list_schedule
from simkit.schedules.engine import Agent, Agents, Simulation, simulate
from simkit.schedules.power import Energy, power_limited_clock
from simkit.schedules.sm import TensorPath, sm_rates, tensor_rate

LONGEST = 24
"""Tiles up to which an item is simulated as it is, where those of all kinds together are more than
``MOST_TILES``. What a longer one takes is on the line between two of the ``SAMPLES``."""

SAMPLES = (LONGEST, 34, 48, 68, 96, 136, 192, 272, 384)
"""Tiles of items that are simulated to say what those between them take, and those beyond."""

MOST_TILES = 1000

REFERENCE = H100
"""Whose order of service predictions for every GPU keep: most published figures are its own."""

# Of what bounds a launch: parts of the time of all CTAs, of a resource, and of a rate's gain.
FEW, NEARLY_ALWAYS, MATTERS = 0.6, 0.85, 0.3

MOST_ROUNDS = 16  # of finding the clock; where HBM binds, each leaves a third of the way
CLOCK_STEP = 1e-3  # relative; below it, nothing is simulated again


@dataclass(frozen=True, slots=True)
class Item:
    """``length`` tiles, of a ``kind`` that says everything else."""

    length: int
    kind: Any = None


MOST_ITEMS = 4_000_000
"""Of a launch; more would take gigabytes and minutes."""


def repeated(items: Sequence[Item], times: int) -> list[Item]:
    """The items so many times over. `CapacityError` for more than ``MOST_ITEMS`` in all."""
    if len(items) * times > MOST_ITEMS:
        raise CapacityError(
            f"{len(items) * times:,} items of CTAs; the cycle model takes {MOST_ITEMS:,} at most"
        )
    return list(items) * times


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A kernel launch, as its schedule describes it.

    ``items``: in the order in which CTAs get them. ``cta(name, items)``: the agents of one CTA.
    ``persistent``: whether a CTA takes one item after another. ``workers``: the CTA of each item,
    if the kernel is told; otherwise whoever is free takes the next. ``ctas``: of a persistent
    launch; as many as fit by default. ``cluster``: CTAs that start together. ``flop``: by the
    convention of the published figures. ``hbm_bytes``: that must move. ``dependent``: launched
    before the kernel ahead ends (programmatic dependent launch).
    """

    name: str
    items: Sequence[Item]
    cta: Callable[[str, Sequence[Item]], Sequence[Agent]]
    threads: int
    registers: int
    shared_bytes: int
    path: TensorPath = "wgmma"
    persistent: bool = False
    workers: Sequence[int] | None = None
    ctas: int | None = None
    cluster: int = 1
    flop: float = 0.0
    hbm_bytes: float = 0.0
    dependent: bool = False
    key: Any = None
    """Launches of the same key have the same CTAs, so that their simulations are shared."""

    @cached_property
    def kinds(self) -> tuple[tuple[Item, ...], NDArray[np.int64]]:
        """The different items, by kind and length, and which of them each item is."""
        # There may be millions, of which most are the same object.
        identities = np.fromiter(map(id, self.items), np.int64, len(self.items))
        _, first, which = np.unique(identities, return_index=True, return_inverse=True)
        objects = [self.items[number] for number in first.tolist()]
        different = sorted(set(objects), key=lambda item: (str(item.kind), item.length))
        number = {item: n for n, item in enumerate(different)}
        return tuple(different), np.array([number[item] for item in objects], np.int64)[which]


@dataclass(frozen=True)
class GridRun:
    """A launch on a GPU. ``cycles``: of the grid, at ``clock_hz``. ``busy``: of each resource,
    cycles over all SMs. ``rates``: units a cycle and SM. ``placement``: who did which item when, in
    cycles. ``power_w``: of the board, None where no energies are known. ``part``: of the SMs that
    share HBM. ``one_sm``: agents of one.
    """

    launch: Launch
    gpu: Gpu
    clock_hz: float
    cycles: float
    busy: Mapping[str, float]
    rates: Mapping[str, float]
    placement: Placement
    occupancy: Occupancy
    power_w: float | None
    part: float
    one_sm: Agents = field(repr=False)

    @cached_property
    def example(self) -> Simulation:
        """One SM with the longest item, or with as much of it as is simulated."""
        return self.simulation(self.one_sm)

    def simulation(self, agents: Agents) -> Simulation:
        """Agents at the rates of this run, in the order of service that predictions keep."""
        order = order_of(agents, self.launch.path, self.part)
        return simulate(self.rates, agents, activations=order)

    @property
    def seconds(self) -> float:
        """Of the grid, without what a launch costs."""
        return self.cycles / self.clock_hz

    @property
    def is_power_limited(self) -> bool:
        """Whether the clock is below nominal because the board's power allows no more."""
        limit = self.gpu.board_w * (1 - CLOCK_STEP) ** 3  # power goes with the cube of the clock
        return self.clock_hz < self.gpu.tensor_clock_hz and (self.power_w or 0.0) >= limit

    def utilisation(self, resource: str) -> float:
        """Of all SMs of the GPU over the whole time, 0 to 1; of L2 and HBM as a whole, of which
        few SMs have large shares.
        """
        if not self.cycles:
            return 0.0
        if resource == "hbm":
            moved = self.busy.get("hbm", 0.0) * self.rates["hbm"]
            rate = self.gpu.hbm_bytes_per_s * self.gpu.hbm_read_fraction
            return moved / (rate * self.seconds)
        if resource == "l2":
            return self.l2_bytes / (self.gpu.l2_bytes_per_clk * self.cycles)
        return self.busy.get(resource, 0.0) / (self.cycles * self.gpu.sm_count)

    @property
    def l2_bytes(self) -> float:
        """Between L2 and all SMs."""
        return self.busy.get("l2", 0.0) * self.rates["l2"]

    @cached_property
    def sensitivities(self) -> dict[str, float]:
        """By how much the example gets shorter when a resource is a tenth faster, as a part of what
        it would if nothing else mattered (0 to 1).
        """
        base = self.example.makespan
        found = {}
        for name, busy in self.example.busy.items():
            if not busy:
                continue
            faster = dict(self.example.rates) | {name: self.example.rates[name] * 1.1}
            gain = 1 - self.example.retimed(faster).makespan / base
            found[name] = gain / (1 - 1 / 1.1)
        return found

    @property
    def bound(self) -> str:
        """What holds the launch back: too few items for the SMs; the resource that is nearly always
        busy while there are items, or else the one whose rate matters most, latency if none matters
        much; and power, where the clock had to go down.
        """
        bound = "too few items" if self.placement.efficiency < FEW else self._busiest()
        return f"{bound}; power" if self.is_power_limited else bound

    def _busiest(self) -> str:
        used = {name: self.utilisation(name) / self.placement.efficiency for name in self.busy}
        name = max(used, key=lambda one: used[one])
        if used[name] >= NEARLY_ALWAYS:
            return name
        name, gain = max(self.sensitivities.items(), key=lambda pair: pair[1])
        return name if gain >= MATTERS else f"latency, {name}"


def run_launch(
    gpu: Gpu, launch: Launch, clock_hz: float | None = None, *, most_tiles: int = MOST_TILES
) -> GridRun:
    """Where and when everything of a launch runs.

    ``clock_hz``: a fixed clock; by default the one behind the published peak, or what power allows
    if that is less. ``most_tiles``: of all kinds of items together, up to which every item is
    simulated as it is, however long. `CapacityError` for a CTA that does not fit on an SM;
    `ShapeError` for a launch without items and for a clock that is not above 0.
    """
    if clock_hz is not None and not clock_hz > 0:
        raise ShapeError(f"the clock must be above 0 Hz, got {clock_hz}")
    if not launch.items:
        raise ShapeError(f"{launch.name} has no items, so nothing runs")
    tensor_rate(gpu, launch.path)  # whether there is one
    fits = occupancy(gpu, launch.threads, launch.registers, launch.shared_bytes)
    if not fits.ctas_per_sm:
        raise CapacityError(
            f"a CTA of {launch.name} does not fit on an SM of {gpu.name}: "
            f"{', '.join(fits.limiters)} of {launch.threads} threads with {launch.registers} "
            f"registers and {launch.shared_bytes} bytes of shared memory"
        )
    clock = clock_hz or gpu.tensor_clock_hz
    for _ in range(MOST_ROUNDS):
        run = _Grid(gpu, launch, fits, clock, most_tiles).run()
        if clock_hz is not None:
            return run
        allowed = power_limited_clock(gpu, _energy(run), run.cycles)
        if abs(allowed / clock - 1) < CLOCK_STEP:
            break
        clock = allowed
    # The cycles of a clock so near are the same; those of a higher one are rather too many.
    return _at_clock(run, min(allowed, clock))


def _at_clock(run: GridRun, clock_hz: float) -> GridRun:
    """The same cycles at another clock, with the board's power."""
    run = replace(run, clock_hz=clock_hz)
    return replace(run, power_w=_energy(run).watts(run.gpu, clock_hz, run.seconds))


def _energy(run: GridRun) -> Energy:
    units = {name: run.busy.get(name, 0.0) * run.rates[name] for name in ("tensor", "issue", "hbm")}
    return Energy(units["tensor"], 32 * units["issue"], units["hbm"], run.launch.path)


def order_of(agents: Agents, path: TensorPath, part: float) -> Sequence[int]:
    """The order of service on the reference GPU, which all predictions keep. ``part``: of its SMs
    that share HBM: few have larger shares, with which other things come first.

    What comes first is served first there. With an order of their own, rates a little apart could
    make two CTAs fall into another rhythm, and a faster GPU be slower (Graham's anomalies).
    """
    rates = sm_rates(REFERENCE, REFERENCE.tensor_clock_hz, path, part * REFERENCE.sm_count)
    return simulate(rates, agents).activations


_MEASURED: dict[Any, _Cost] = {}
_ORDERS: dict[Any, Sequence[int]] = {}


class _Grid:
    """One launch at one clock."""

    def __init__(
        self, gpu: Gpu, launch: Launch, fits: Occupancy, clock: float, most_tiles: int,
        items: int | None = None,
    ) -> None:  # fmt: skip
        self.gpu, self.launch, self.fits, self.clock = gpu, launch, fits, clock
        self.most_tiles = most_tiles
        items = len(launch.items) if items is None else items
        slots = gpu.sm_count * fits.ctas_per_sm
        if launch.cluster > 1:
            slots -= slots % launch.cluster
        self.ctas = min(launch.ctas or slots, slots) if launch.persistent else slots
        if launch.workers is not None:
            self.ctas = max(launch.workers) + 1
        self.used = min(self.ctas, items)
        self.residents = -(-self.used // gpu.sm_count)
        # Where SMs have unequal numbers of CTAs, L2 and HBM serve CTAs alike, not SMs.
        active = self.used / self.residents
        self.part = active / gpu.sm_count
        self.rates = sm_rates(gpu, clock, launch.path, active)
        self.longest = _longest_simulated(launch.kinds[0], most_tiles)

    def run(self) -> GridRun:
        launch = self.launch
        kinds, which = launch.kinds
        first = {item: self._cost((item,)) for item in kinds}
        more = {item: self._more(item) for item in kinds} if launch.persistent else first
        costs = np.array([ceil(more[item].cycles) for item in kinds], np.int64)[which]
        last = len(launch.items) % self.ctas if len(launch.items) > self.ctas else 0
        if last and len(kinds) == 1 and not launch.persistent and launch.workers is None:
            # The last wave has fewer CTAs, so that each has more of its SM and of HBM.
            wave = _Grid(self.gpu, launch, self.fits, self.clock, self.most_tiles, last)
            costs[-last:] = ceil(wave._cost((kinds[0],)).cycles)
        if launch.workers is not None:
            placement = in_order(np.asarray(launch.workers, np.int64), costs, self.ctas)
        elif len(kinds) == 1:  # whoever is free first is next in turn
            placement = in_order(np.arange(len(costs)) % self.ctas, costs, self.ctas)
        else:
            placement = list_schedule(costs, self.ctas)
        longest = max(kinds, key=lambda item: item.length)
        # What the first item of a CTA takes beyond one in the middle: filling and draining. Beyond
        # what it costs as one of those, in whole cycles, so that a lone item takes what it does.
        edge = max(0.0, first[longest].cycles - ceil(more[longest].cycles))
        cycles = placement.makespan + edge
        busy: dict[str, float] = {}
        for item, count in zip(kinds, np.bincount(which).tolist(), strict=True):
            for name, amount in more[item].busy.items():
                busy[name] = busy.get(name, 0.0) + count * amount
        # Every SM has its own port to L2, but L2 serves them all.
        l2_cycles = busy.get("l2", 0.0) * self.rates["l2"] / self.gpu.l2_bytes_per_clk
        run = GridRun(
            launch=launch, gpu=self.gpu, clock_hz=self.clock, cycles=max(cycles, l2_cycles),
            busy=busy,
            rates=self.rates, placement=placement, occupancy=self.fits, power_w=None,
            part=self.part, one_sm=self._agents((_shortened(longest),)),
        )  # fmt: skip
        return _at_clock(run, self.clock)

    def _more(self, item: Item) -> _Cost:
        """What one more item adds to a CTA that is at work."""
        one, two = self._cost((item,)), self._cost((item, item))
        return two.minus(one)

    def _cost(self, items: tuple[Item, ...]) -> _Cost:
        """Of a CTA, with as many beside it as an SM holds."""
        length = items[0].length
        if length <= self.longest:
            return self._measured(items)
        at = min(bisect_left(SAMPLES, length), len(SAMPLES) - 1)
        fewer, more = SAMPLES[at - 1 : at + 1]
        a, b = (
            self._measured(tuple(Item(tiles, item.kind) for item in items))
            for tiles in (fewer, more)
        )
        return a.plus(b.minus(a), (length - fewer) / (more - fewer))

    def _measured(self, items: tuple[Item, ...]) -> _Cost:
        launch = self.launch
        rates = tuple(self.rates.values())
        key = (launch.name, launch.key, self.gpu, items, self.residents, self.part, rates)
        if launch.key is not None and key in _MEASURED:
            return _MEASURED[key]
        agents = self._agents(items)
        order_key = (launch.name, launch.key, self.gpu, items, self.residents, self.part)
        order = _ORDERS.get(order_key) if launch.key is not None else None
        if order is None:
            order = order_of(agents, launch.path, self.part)
            if launch.key is not None:
                _ORDERS[order_key] = order
        found = simulate(self.rates, agents, activations=order)
        busy = {name: value / self.residents for name, value in found.busy.items()}
        cost = _Cost(found.makespan, busy)
        if launch.key is not None:
            _MEASURED[key] = cost
        return cost

    def _agents(self, items: tuple[Item, ...]) -> Agents:
        """Of one SM, each of whose CTAs has these items."""
        names = [f"CTA {number}" for number in range(self.residents)]
        return lambda: [agent for name in names for agent in self.launch.cta(name, items)]


@dataclass(frozen=True)
class _Cost:
    """Of a CTA: its cycles, and cycles of resources that it keeps busy."""

    cycles: float
    busy: Mapping[str, float]

    def plus(self, other: _Cost, times: float) -> _Cost:
        return _Cost(
            self.cycles + times * other.cycles,
            {name: self.busy[name] + times * other.busy[name] for name in self.busy},
        )

    def minus(self, other: _Cost) -> _Cost:
        return self.plus(other, -1.0)


def _longest_simulated(kinds: Sequence[Item], most_tiles: int) -> int:
    """Tiles up to which items are simulated as they are."""
    lengths = [item.length for item in kinds]
    return max(lengths) if sum(lengths) <= most_tiles else LONGEST


def _shortened(item: Item) -> Item:
    return Item(min(item.length, LONGEST), item.kind)
