"""Simulations and launches as traces: agents above the resources that serve them, items on SMs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from simkit.schedules.engine import ScheduleError, Simulation
from simkit.schedules.grid import GridRun
from simkit.schedules.history import Service, Waited
from traces.events import Event, Flow, Trace, Track

MOST_EVENTS = 100_000

SM = "SM"
"""Process of the resources."""

RESOURCE_NAMES: Mapping[str, tuple[str, str]] = {
    "tensor": ("tensor core", "FLOP"),
    "xu": ("MUFU/XU", "lane instructions"),
    "fma": ("FMA", "lane instructions"),
    "alu": ("ALU", "lane instructions"),
    "half": ("half precision", "results"),
    "widen": ("widening", "results"),
    "shuffle": ("shuffle", "lane instructions"),
    "issue": ("issue", "warp instructions"),
    "smem": ("shared memory", "bytes"),
    "dsmem": ("peer's shared memory", "bytes"),
    "l2": ("L2", "bytes"),
    "hbm": ("HBM", "bytes"),
}
"""Track and unit of each resource of `simkit.schedules.sm`; others go by their own names."""


def simulation_trace(simulation: Simulation, name: str, *, most_events: int = MOST_EVENTS) -> Trace:
    """Agents with their runs and waits, then every resource with what it served, in cycles.

    Services one right after another by the same agent under the same name are one event, with the
    sum of their amounts. A run lasts from when it is asked for. What an agent issues or starts is
    on the tracks of resources; its own has how long a full pipe held it back. A wait that a work's
    end released is of kind "wait", one that an agent released of kind "barrier". Arrows lead to a
    wait from what released it, and from an agent to what it issues or starts. `ScheduleError` for
    more than ``most_events`` and for agents of one name.
    """
    if len(set(simulation.agents)) < len(simulation.agents):
        raise ScheduleError(f"{name}: two agents have the same process and name")
    return _Picture(simulation).trace(name, most_events)


@dataclass(slots=True)
class _Bar:
    """An event in the making. ``key``: what another must share to be part of it."""

    track: Track
    name: str
    kind: str
    start: float
    stop: float
    args: dict[str, str | float]
    key: object = None

    def event(self) -> Event:
        return Event(
            self.name, self.kind, self.track, self.start, self.stop - self.start, self.args
        )

    @property
    def end(self) -> float:
        """As the event has it, which keeps its duration instead."""
        return self.start + (self.stop - self.start)


class _Picture:
    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.agents = [Track(*agent) for agent in simulation.agents]
        self.bars: list[_Bar] = []
        self.last: dict[Track, _Bar] = {}
        self.served: dict[tuple[int, str], _Bar] = {}  # by service and resource
        self.flows: list[Flow] = []
        self.first = self._first_after_waits()

    def trace(self, name: str, most_events: int) -> Trace:
        services = self.simulation.services
        for number, service in enumerate(services):
            self._draw_on_agent(service)
            self._draw_on_resources(number, service)
        for waited in self.simulation.waits:
            self._draw_wait(waited)
        if len(self.bars) > most_events:
            raise ScheduleError(
                f"{name} has {len(self.bars):,} events; a trace has at most {most_events:,}"
            )
        used = [name for name, busy in self.simulation.busy.items() if busy]
        return Trace(
            name,
            tuple(bar.event() for bar in self.bars),
            tracks=(*self.agents, *map(_resource_track, used)),
            flows=tuple(self.flows),
        )

    def _first_after_waits(self) -> set[int]:
        """Services that an agent issues or starts next after it waited."""
        stops: dict[int, list[float]] = {}
        for waited in self.simulation.waits:
            stops.setdefault(waited.agent, []).append(waited.stop)
        waits = {agent: iter(times) for agent, times in stops.items()}
        following = {agent: next(times) for agent, times in waits.items()}
        found = set()
        for number, service in enumerate(self.simulation.services):
            until = following.get(service.agent)
            if until is None or service.asked < until:
                continue
            while until is not None and until <= service.asked:
                until = next(waits[service.agent], None)
            following[service.agent] = until  # type: ignore[assignment]
            if service.mode != "run" and service.spans:
                found.add(number)
        return found

    def _draw_on_agent(self, service: Service) -> None:
        track, work = self.agents[service.agent], service.work
        asked, start = service.asked, service.start
        if service.mode == "run":
            args: dict[str, str | float] = dict(work.amounts)
            args["waited for pipes"] = start - asked
            self._add(_Bar(track, work.name, work.kind, asked, service.result, args, work.name))
        elif service.mode == "issue" and start > asked:
            name = f"issue {work.name}"
            self._add(_Bar(track, name, "wait", asked, start, {}, name))
            before = self.last.get(_resource_track(service.spans[0].resource))
            if before is not None and before.stop > asked:
                self._flow("free", before.track, min(before.end, start), track, start)

    def _draw_on_resources(self, number: int, service: Service) -> None:
        agent = self.agents[service.agent]
        # The first says when an agent may go on, the last to end when the result is there.
        shown = (*service.spans[:1], max(service.spans, key=lambda span: span.stop, default=None))
        for span, (_, amount) in zip(service.spans, service.work.amounts, strict=True):
            unit = RESOURCE_NAMES.get(span.resource, ("", "units"))[1]
            bar = _Bar(
                _resource_track(span.resource),
                service.work.name,
                service.work.kind,
                span.start,
                span.stop,
                {"agent": str(agent), unit: amount},
                (service.agent, service.work.name),
            )
            found = self._add(bar, alone=number in self.first)
            self.served[number, span.resource] = found
            if found is bar and span in shown and service.mode != "run":
                self._flow("issue", agent, service.asked, bar.track, bar.start)

    def _draw_wait(self, waited: Waited) -> None:
        track, told = self.agents[waited.agent], waited.told
        kind = "barrier" if told.service < 0 else "wait"
        bar = self._add(_Bar(track, waited.barrier, kind, waited.start, waited.stop, {}))
        if told.service < 0:
            if told.agent != waited.agent:
                source = self.agents[told.agent]
                self._flow("arrive", source, told.time, track, bar.end)
            return
        service = self.simulation.services[told.service]
        last = max(service.spans, key=lambda span: span.stop, default=None)
        if last is not None:
            of = self.served[told.service, last.resource]
            self._flow(service.work.name, of.track, min(last.stop, of.end), track, bar.end)

    def _flow(
        self, name: str, source: Track, source_time: float, target: Track, target_time: float
    ) -> None:
        self.flows.append(Flow(name, source, source_time, target, max(source_time, target_time)))

    def _add(self, bar: _Bar, *, alone: bool = False) -> _Bar:
        """The bar, or the one right before it on its track of which it becomes a part."""
        last = None if alone or bar.key is None else self.last.get(bar.track)
        if last and (last.key, last.kind, last.stop) == (bar.key, bar.kind, bar.start):
            last.stop = bar.stop
            for name, value in bar.args.items():
                if not isinstance(value, str):
                    last.args[name] = float(last.args.get(name, 0)) + value
            return last
        self.bars.append(bar)
        self.last[bar.track] = bar
        return bar


def _resource_track(resource: str) -> Track:
    return Track(SM, RESOURCE_NAMES.get(resource, (resource, ""))[0])


def grid_trace(run: GridRun, *, most_events: int = MOST_EVENTS) -> Trace:
    """Items on the places for CTAs, those of an SM beside each other; it ends with the launch.

    Of more than ``most_events``, as many of the first SMs are drawn as have no more; the name says
    which. `ScheduleError` where one SM has more.
    """
    launch, placement, sms = run.launch, run.placement, run.gpu.sm_count
    sm_of_item = placement.worker % sms
    events_of_sm = np.bincount(sm_of_item, minlength=min(sms, placement.workers))
    edge = run.cycles - placement.makespan
    if edge:
        used = np.unique(placement.worker)
        events_of_sm = events_of_sm + np.bincount(used % sms, minlength=events_of_sm.size)
    drawn = int(np.searchsorted(np.cumsum(events_of_sm), most_events, side="right"))
    if not drawn:
        raise ScheduleError(
            f"an SM has {events_of_sm[0]:,} events of {launch.name}; a trace has at most "
            f"{most_events:,}"
        )
    name = f"{launch.name} on {run.gpu.name}"
    if drawn < events_of_sm.size:
        name += f", the first {drawn} of {events_of_sm.size} SMs"
    workers = [w for w in range(placement.workers) if w % sms < drawn]
    workers.sort(key=lambda worker: (worker % sms, worker))
    several = placement.workers > sms
    tracks = {
        worker: Track(
            launch.name,
            f"SM {worker % sms}, CTA {worker // sms}" if several else f"SM {worker % sms}",
        )
        for worker in workers
    }
    return Trace(name, tuple(_items(run, tracks, edge)), tracks=tuple(tracks.values()))


def _items(run: GridRun, tracks: Mapping[int, Track], edge: float) -> Iterable[Event]:
    """What the launch takes beyond its items comes first, on its own."""
    placement = run.placement
    begun = set()
    places = zip(
        placement.worker.tolist(), placement.starts.tolist(), placement.costs.tolist(), strict=True
    )
    for number, (worker, start, cost) in enumerate(places):
        if worker not in tracks:
            continue
        if edge and worker not in begun:
            begun.add(worker)
            yield Event("filling, draining, L2", "launch", tracks[worker], 0.0, edge)
        item = run.launch.items[number]
        args: dict[str, str | int] = {"item": number, "tiles": item.length, "kind": str(item.kind)}
        yield Event(f"{item.length} tiles", "compute", tracks[worker], start + edge, cost, args)
