"""The laws that every kernel with a model obeys, written once: same bits, same bytes, any schedule,
small error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis.strategies import SearchStrategy

from gpu.device import Device
from gpu.kernels.result import KernelResult
from gpu.ptx.executor import PtxDevice
from gpu.ptx.schedule import Schedule
from properties.compare import Array, Expected, bits_equal, within
from properties.law import Context, Law, LawSkipped, LawViolation, Tier
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine
from simkit.machine.memory import Direction

# Random schedules that the `thorough` case of a subject is run under; other cases get one each.
RANDOM_SCHEDULES = 20


@dataclass(frozen=True)
class Subject:
    """An algorithm as the laws see it.

    ``model(machine, case)`` and ``kernel(device, case, source)`` give arrays by tensor name;
    ``comparable`` may limit the elements that are compared (unwritten ones have no bits).
    ``expected(gpu, case)`` gives outputs in float64 with derived bounds on the kernel's errors;
    ``has_lse``: "lse" is among them.  ``large``: corners that take seconds, for the laws that run
    the kernel once.  ``thorough`` is a small case with every kind of
    synchronisation, for the law of schedules.  ``uncounted``: tensors that only code of a user's
    own reads, whose traffic nobody predicts.
    """

    algorithm: str
    strategy: SearchStrategy[Any]
    case_type: type
    corners: tuple[Any, ...]
    model: Callable[[Machine, Any], Mapping[str, Array]]
    kernel: Callable[[Device, Any, str | None], KernelResult]
    expected: Callable[[Gpu, Any], Mapping[str, Expected]] | None = None
    has_lse: bool = False
    comparable: Callable[[Any, str, Mapping[str, Array]], Array | None] | None = None
    large: tuple[Any, ...] = ()
    thorough: Any = None
    uncounted: frozenset[str] = frozenset()

    def run_kernel(self, context: Context, case: Any, device: Device | None = None) -> KernelResult:
        """One run on ``device``; without it, that on the context's device, which is remembered."""
        source = context.sources.get(self.algorithm)
        if device is not None:
            return self.kernel(device, case, source)
        found: KernelResult = context.memory.run(
            (self.kernel, source, case),
            lambda: self.kernel(context.device, case, source),
            lambda result: _bytes(result.outputs),
        )
        return found

    def run_model(self, context: Context, case: Any) -> tuple[Machine, Mapping[str, Array]]:
        """The machine after the model's run in device arithmetic, and its outputs; remembered."""

        def make() -> tuple[Machine, Mapping[str, Array]]:
            machine = context.machine("device")
            return machine, self.model(machine, case)

        key = (self.model, case)
        found: tuple[Machine, Mapping[str, Array]] = context.memory.run(
            key, make, lambda run: sum(x.array.nbytes for x in run[0].tensors.values())
        )
        return found


def _bytes(arrays: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in arrays.values())


def kernel_laws(subject: Subject, examples: int = 25) -> list[Law]:
    """The laws of a subject; ``examples`` of the first, fewer of the slower ones."""
    laws = [
        _law(
            subject,
            "bits",
            "exact",
            "the kernel's outputs equal the model's device arithmetic bit for bit",
            check_bits,
            examples,
            corners=(*subject.corners, *subject.large),
        ),
        _law(
            subject,
            "traffic",
            "exact",
            "bytes requested and sectors touched are as predicted, per tensor and direction",
            check_traffic,
            max(examples // 2, 5),
            corners=(*subject.corners, *subject.large),
        ),
        _law(
            subject,
            "schedules",
            "exact",
            "the outputs do not depend on the order of warps, CTAs and asynchronous copies",
            check_schedules,
            max(examples // 10, 2),
            corners=(subject.thorough or subject.corners[0],),
        ),
    ]
    laws.append(
        _law(
            subject,
            "hazards",
            "exact",
            "no race, missing fence or read of what nobody has written, under any schedule",
            check_hazards,
            max(examples // 10, 2),
            corners=tuple(
                dict.fromkeys((subject.thorough or subject.corners[0], *subject.corners))
            ),
        )
    )
    if subject.expected is not None:
        laws.append(
            _law(
                subject,
                "accuracy",
                "bounded",
                "the error against float64 is within the bound that follows from its roundings",
                check_accuracy,
                max(examples // 2, 5),
            )
        )
    if subject.has_lse:
        laws.append(
            _law(
                subject,
                "lse",
                "bounded",
                "the LSE is within the bound of its roundings; rows without keys give -inf",
                check_lse,
                max(examples // 3, 5),
            )
        )
    return laws


def _law(
    subject: Subject,
    name: str,
    tier: Tier,
    statement: str,
    check: Callable[[Subject, Context, Any], None],
    examples: int,
    corners: tuple[Any, ...] | None = None,
) -> Law:
    return Law(
        algorithm=subject.algorithm,
        name=name,
        tier=tier,
        statement=statement,
        check=lambda context, case: check(subject, context, case),
        strategy=subject.strategy,
        case_type=subject.case_type,
        corners=subject.corners if corners is None else corners,
        examples=examples,
    )


def check_bits(subject: Subject, context: Context, case: Any) -> None:
    _, model = subject.run_model(context, case)
    kernel = subject.run_kernel(context, case).outputs
    comparable = subject.comparable
    for name, expected in model.items():
        if name not in kernel:
            raise LawViolation(f"the kernel writes no {name!r}; it writes {', '.join(kernel)}")
        bits_equal(
            name, expected, kernel[name], comparable(case, name, model) if comparable else None
        )


def check_traffic(subject: Subject, context: Context, case: Any) -> None:
    machine, _ = subject.run_model(context, case)
    reports = subject.run_kernel(context, case).reports
    measured: dict[tuple[str, Direction], list[int]] = {}
    for report in reports:
        if report.traffic is None:
            raise LawSkipped(f"the device {report.device!r} does not count traffic")
        for entry in report.traffic.tensors:
            total = measured.setdefault((entry.tensor, entry.direction), [0, 0])
            total[0] += entry.requested
            total[1] += entry.sectors
    predicted = {key: (t.requested, t.sectors) for key, t in machine.traffic.items()}
    problems = []
    for key in sorted(set(predicted) | set(measured)):
        tensor, direction = key
        if tensor in subject.uncounted:
            continue
        expected, found = predicted.get(key, (0, 0)), tuple(measured.get(key, (0, 0)))
        context.record_traffic(subject.algorithm, tensor, direction, expected[1], found[1])
        if expected != found:
            problems.append(
                f"{tensor} {direction}: predicted {expected[0]} bytes in"
                f" {expected[1]} bytes of sectors,"
                f" measured {found[0]} in {found[1]}"
            )
    if problems:
        raise LawViolation("; ".join(problems))


def check_schedules(subject: Subject, context: Context, case: Any) -> None:
    """On the executor under adversarial schedules; on a GPU, which has its own, by running
    again.
    """
    device = context.device
    first = subject.run_kernel(context, case).outputs
    others: list[tuple[str, Device]]
    if isinstance(device, PtxDevice):
        others = [
            (f"{s.kind}({s.seed})", device.with_options(replace(device.options, schedule=s)))
            for s in _schedules(subject, case)
        ]
    else:
        others = [(f"run {n}", device) for n in (2, 3)]
    for name, other in others:
        again = subject.run_kernel(context, case, other).outputs
        for tensor, values in first.items():
            try:
                bits_equal(tensor, values, again[tensor])
            except LawViolation as violation:
                text = (
                    str(violation)
                    .replace("the model", "the first run")
                    .replace("model", "first run")
                )
                raise LawViolation(f"schedule {name}: {text}") from violation


def _schedules(subject: Subject, case: Any) -> list[Schedule]:
    """lazy, and 20 random ones for the thorough case, one that the case's seed picks for others."""
    seeds = range(RANDOM_SCHEDULES) if _is_thorough(subject, case) else (case.seed,)
    return [Schedule("lazy"), *(Schedule("random", seed) for seed in seeds)]


def _is_thorough(subject: Subject, case: Any) -> bool:
    return bool(case == (subject.thorough or subject.corners[0]))


def check_hazards(subject: Subject, context: Context, case: Any) -> None:
    """What follows from the program's order alone, so that no schedule has to show it."""
    device = context.device
    if not isinstance(device, PtxDevice):
        raise LawSkipped(f"the device {device.name!r} does not see accesses; the executor does")
    schedules = [device.options.schedule, Schedule("lazy"), Schedule("random", case.seed)]
    if not _is_thorough(subject, case):
        # What is found follows from the program's order, hardly from the schedule: one of them.
        schedules = [schedules[case.seed % len(schedules)]]
    for schedule in schedules:
        watching = device.with_options(replace(device.options, schedule=schedule, hazards=True))
        for report in subject.run_kernel(context, case, watching).reports:
            for hazard in report.errors:
                raise LawViolation(f"{report.kernel}: {hazard.kind}: {hazard.message}")


def check_accuracy(subject: Subject, context: Context, case: Any) -> None:
    _check_expected(subject, context, case, lambda name: name != "lse")


def check_lse(subject: Subject, context: Context, case: Any) -> None:
    _check_expected(subject, context, case, lambda name: name == "lse")


def _check_expected(
    subject: Subject, context: Context, case: Any, chosen: Callable[[str], bool]
) -> None:
    expected = subject.expected
    assert expected is not None
    kernel = subject.run_kernel(context, case).outputs
    solution: Mapping[str, Expected] = context.memory.run(
        (expected, case),
        lambda: expected(context.gpu, case),
        lambda found: sum(np.asarray(one.value).nbytes for one in found.values()),
    )
    for name, one in solution.items():
        if chosen(name):
            within(name, kernel[name], one.value, one.bound, one.reason, one.where)


def product(case_type: type, **choices: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cases for every combination of the choices."""
    names = list(choices)
    return tuple(
        case_type(**dict(zip(names, values, strict=True)))
        for values in itertools.product(*choices.values())
    )
