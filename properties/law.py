"""A law: a sentence about model and kernel, the cases it is tried on, and the function that finds a
violation.
"""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal

from hypothesis.strategies import SearchStrategy

from gpu.device import Device
from simkit.errors import SimkitError
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine

Tier = Literal["exact", "bounded", "statistical"]
Status = Literal["pass", "fail", "skip"]


class LawViolation(SimkitError):
    """A law that does not hold: what differs, where, and by how much."""


class LawSkipped(SimkitError):
    """A law that this device cannot be held to; the message says why."""


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """Predicted and measured bytes of one tensor in one direction, summed over the cases of a
    run.
    """

    algorithm: str
    tensor: str
    direction: str
    predicted: int
    measured: int


class Memory:
    """Runs of kernels and models, for laws that look at the same case: the last ones, as far as
    their arrays fit.
    """

    def __init__(self, most_bytes: int = 256 << 20) -> None:
        self.most_bytes = most_bytes
        self._runs: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0

    def run(self, key: Hashable, make: Callable[[], Any], size: Callable[[Any], int]) -> Any:
        """``make()``, or what it gave before; ``size`` of it in bytes."""
        if key in self._runs:
            self._runs.move_to_end(key)
            return self._runs[key][0]
        made = make()
        self._runs[key] = made, size(made)
        self._bytes += size(made)
        while self._bytes > self.most_bytes:
            _, (_, freed) = self._runs.popitem(last=False)
            self._bytes -= freed
        return made


@dataclass
class Context:
    """What laws are checked on.

    ``device`` runs kernels; ``gpu`` is the machine that models stand for.  ``sources`` replaces
    kernel source text by algorithm: how tests show that a broken kernel is noticed.  ``memory``
    keeps runs on ``device`` that several laws look at.
    """

    device: Device
    gpu: Gpu
    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    traffic: dict[tuple[str, str, str], tuple[int, int]] = dataclasses.field(default_factory=dict)
    memory: Memory = dataclasses.field(default_factory=Memory)

    def machine(self, arithmetic: Literal["reference", "device"]) -> Machine:
        return Machine(self.gpu, arithmetic)

    def record_traffic(
        self, algorithm: str, tensor: str, direction: str, predicted: int, measured: int
    ) -> None:
        """Adds to the totals that the report shows beside each other."""
        key = (algorithm, tensor, direction)
        before = self.traffic.get(key, (0, 0))
        self.traffic[key] = (before[0] + predicted, before[1] + measured)

    def traffic_rows(self) -> list[TrafficRow]:
        return [TrafficRow(*key, *sums) for key, sums in sorted(self.traffic.items())]


@dataclass(frozen=True)
class Law:
    """One law.

    ``check(context, case)`` raises LawViolation.  ``strategy`` draws cases (frozen dataclasses of
    plain scalars, so that each is a line of JSON); None means that one call with None covers
    everything.  ``corners`` are tried first, ``examples`` is how many drawn cases an ordinary run
    adds.  ``uses_device``: it runs a kernel.
    """

    algorithm: str
    name: str
    tier: Tier
    statement: str
    check: Callable[[Context, Any], None]
    strategy: SearchStrategy[Any] | None = None
    case_type: type | None = None
    corners: tuple[Any, ...] = ()
    examples: int = 25
    uses_device: bool = True

    def case_from_json(self, text: str) -> Any:
        """A case from its JSON.  SimkitError for text that is not one."""
        if self.case_type is None:
            raise SimkitError(
                f"law {self.name!r} of {self.algorithm} has no cases: it covers everything at once"
            )
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise SimkitError(f"the case is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise SimkitError(f"a case is an object, got {text!r}")
        known = {f.name: f for f in dataclasses.fields(self.case_type)}
        unknown = set(values) - set(known)
        if unknown:
            raise SimkitError(f"unknown case fields {sorted(unknown)}; there are {sorted(known)}")
        try:
            return self.case_type(**values)
        except (TypeError, ValueError) as error:
            raise SimkitError(f"the case {text} does not fit: {error}") from error


def case_to_json(case: Any) -> str:
    """A case as one line of JSON."""
    return "null" if case is None else json.dumps(dataclasses.asdict(case))


@dataclass(frozen=True)
class CheckResult:
    """How a law fared: ``detail`` says what was violated or why it was skipped, ``reproducer``
    repeats a failure.
    """

    algorithm: str
    law: str
    on: str
    tier: Tier
    cases: int
    status: Status
    detail: str = ""
    reproducer: str = ""
    case: str = ""
    seconds: float = 0.0
