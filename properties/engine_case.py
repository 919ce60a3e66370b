"""Cases of the discrete-event engine: programs that agents run on resources, drawn by a seed.

A script deals steps to agents one after another and lets an agent wait for what the script has
completed by then. Whatever the rates, the first step of the script that is left can run, so that
such programs end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from simkit.schedules.engine import (
    Agent,
    Agents,
    Arrive,
    Barrier,
    Delay,
    Issue,
    Program,
    Run,
    Start,
    Step,
    Wait,
    Work,
)

Verb: TypeAlias = Literal["run", "issue", "start", "arrive", "wait", "delay"]

KINDS = ("mma", "softmax", "load")
AMOUNTS = (0.0, 1.0, 2.0, 3.0, 10.0, 0.1, 7.25)
LATENCIES = (0.0, 0.0, 1.0, 5.5, 30.0)
RATES = (0.3, 1.0, 1.0, 2.0, 7.0, 1000.0)
SPEED_UPS = (1.0, 1.0, 1.0 + 2.0**-40, 1.1, 2.0, 50.0)


@dataclass(frozen=True)
class Line:
    """A step of a script; ``barrier`` and ``phase`` where it has any (-1: none)."""

    verb: Verb
    work: Work | None = None
    barrier: int = -1
    phase: int = -1
    cycles: float = 0.0


@dataclass(frozen=True)
class EngineCase:
    """``steps`` of ``agents`` that use up to ``resources`` and ``barriers``, all drawn by ``seed``.

    ``ctas``: as many of these programs, each with barriers of its own. ``stuck``: whether an agent
    waits for a phase that nobody completes.
    """

    agents: int = 3
    steps: int = 30
    resources: int = 3
    barriers: int = 3
    ctas: int = 1
    stuck: bool = False
    seed: int = 0

    @property
    def rates(self) -> dict[str, float]:
        rng = np.random.default_rng((self.seed, 1))
        return {f"r{n}": float(rng.choice(RATES)) for n in range(self.resources)}

    def faster_rates(self) -> dict[str, float]:
        """None below `rates`."""
        rng = np.random.default_rng((self.seed, 2))
        return {name: rate * float(rng.choice(SPEED_UPS)) for name, rate in self.rates.items()}

    def counts(self) -> list[int]:
        """Arrivals of a phase of each barrier."""
        return np.random.default_rng((self.seed, 3)).integers(1, 4, self.barriers).tolist()

    def scripts(self) -> list[list[Line]]:
        """The lines of each agent of a CTA."""
        rng = np.random.default_rng((self.seed, 0))
        counts = self.counts()
        arrived = [0] * self.barriers
        lines: list[list[Line]] = [[] for _ in range(self.agents)]
        for _ in range(self.steps):
            own = lines[int(rng.integers(self.agents))]
            own.append(self._line(rng, arrived, counts))
            if own[-1].verb != "wait" and own[-1].barrier >= 0:
                arrived[own[-1].barrier] += 1
        if self.stuck:
            barrier = int(rng.integers(self.barriers))
            phase = arrived[barrier] // counts[barrier]
            lines[int(rng.integers(self.agents))].append(Line("wait", barrier=barrier, phase=phase))
        return lines

    def _line(self, rng: np.random.Generator, arrived: list[int], counts: list[int]) -> Line:
        verb = rng.choice(("run", "issue", "start", "arrive", "wait", "delay"))
        barrier = int(rng.integers(self.barriers))
        match verb:
            case "run":
                return Line("run", self._work(rng))
            case "issue" | "start":
                return Line(verb, self._work(rng), barrier if rng.random() < 0.7 else -1)
            case "arrive":
                return Line("arrive", barrier=barrier)
            case "delay":
                return Line("delay", cycles=float(rng.choice(LATENCIES)))
            case _:
                phases = arrived[barrier] // counts[barrier]
                if not phases:
                    return Line("arrive", barrier=barrier)
                return Line("wait", barrier=barrier, phase=int(rng.integers(phases)))

    def _work(self, rng: np.random.Generator) -> Work:
        most = min(self.resources, 3)
        names = rng.permutation(self.resources)[: int(rng.integers(most + 1))]
        amounts = tuple((f"r{n}", float(rng.choice(AMOUNTS))) for n in names)
        kind = str(rng.choice(KINDS))
        return Work(f"{kind} {len(names)}", kind, amounts, float(rng.choice(LATENCIES)))

    def build(self, order: Sequence[int] | None = None) -> Agents:
        """The agents, CTAs in ``order``."""
        scripts, counts = self.scripts(), self.counts()
        latencies = np.random.default_rng((self.seed, 4)).choice(LATENCIES, self.barriers)

        def agents() -> list[Agent]:
            found = []
            for cta in range(self.ctas) if order is None else order:
                barriers = [
                    Barrier(f"barrier {n}", count, float(latency))
                    for n, (count, latency) in enumerate(zip(counts, latencies, strict=True))
                ]
                found += [
                    Agent(f"CTA {cta}", f"agent {n}", _program(script, barriers))
                    for n, script in enumerate(scripts)
                ]
            return found

        return agents


def _program(script: Sequence[Line], barriers: Sequence[Barrier]) -> Program:
    for line in script:
        yield _step(line, barriers)


def _step(line: Line, barriers: Sequence[Barrier]) -> Step:
    barrier = barriers[line.barrier] if line.barrier >= 0 else None
    match line:
        case Line("run", Work() as work):
            return Run(work)
        case Line("issue", Work() as work):
            return Issue(work, barrier)
        case Line("start", Work() as work):
            return Start(work, barrier)
        case Line("delay"):
            return Delay(line.cycles)
    assert barrier is not None
    return Arrive(barrier) if line.verb == "arrive" else Wait(barrier, line.phase)


def engine_cases(*, stuck: bool = False, most_ctas: int = 2) -> SearchStrategy[EngineCase]:
    """Programs of up to 6 agents on up to 6 resources; those that get ``stuck``, if asked for."""
    return st.builds(
        EngineCase,
        agents=st.integers(1, 6),
        steps=st.integers(0, 120),
        resources=st.integers(1, 6),
        barriers=st.integers(1, 4),
        ctas=st.integers(1, most_ctas),
        stuck=st.just(stuck),
        seed=st.integers(0, 2**32 - 1),
    )
