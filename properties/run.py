"""Runs laws: corners first, then cases that Hypothesis draws and, on failure, shrinks."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed
from hypothesis.errors import Unsatisfiable

from properties.law import (
    CheckResult,
    Context,
    Law,
    LawSkipped,
    LawViolation,
    case_to_json,
)
from simkit.errors import SimkitError


class _OutOfTime(Exception):
    """Ends a run whose time is up."""


def run_law(
    law: Law,
    context: Context,
    *,
    examples: int | None = None,
    seed: int = 0,
    seconds: float | None = None,
    shrink: bool = True,
    corners: bool = True,
    progress: Callable[[int], None] | None = None,
    on_case: Callable[[Any], None] | None = None,
) -> CheckResult:
    """Checks a law on its corners and on drawn cases; the same cases for the same seed.

    ``examples`` overrides how many are drawn, ``seconds`` ends the run early (counting what was
    tried), ``progress`` is told the number of cases so far, ``on_case`` each case.  An error of
    simkit's family raised by a case is a failure of the law like a violation: a kernel that cannot
    run is not right.
    """
    started = time.perf_counter()
    count = 0
    failure: tuple[Any, Exception] | None = None

    def attempt(case: Any) -> None:
        nonlocal count, failure
        if seconds is not None and time.perf_counter() - started > seconds:
            raise _OutOfTime
        if on_case is not None:
            on_case(case)
        try:
            _check(law, context, case)
        except SimkitError as error:
            failure = (case, error)
            raise
        count += 1
        if progress is not None:
            progress(count)

    try:
        if law.strategy is None:
            attempt(None)
        else:
            for case in law.corners if corners else ():
                attempt(case)
            _explore(law, attempt, law.examples if examples is None else examples, seed, shrink)
    except _OutOfTime:
        pass
    except LawSkipped as reason:
        return CheckResult(
            law.algorithm, law.name, _on(law, context), law.tier, 0, "skip", str(reason)
        )
    except SimkitError:
        assert failure is not None
    elapsed = time.perf_counter() - started
    if failure is None:
        return CheckResult(
            law.algorithm, law.name, _on(law, context), law.tier, count, "pass", seconds=elapsed
        )
    case, error = failure
    return _failed(law, context, case, error, count + 1, elapsed)


def replay(law: Law, context: Context, case: Any) -> CheckResult:
    """Checks a law on one case. `SimkitError` for a case that is none."""
    started = time.perf_counter()
    try:
        _check(law, context, case)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise SimkitError(
            f"the case {case_to_json(case)} does not fit: {type(error).__name__}: {error}"
        ) from error
    except LawSkipped as reason:
        return CheckResult(
            law.algorithm, law.name, _on(law, context), law.tier, 0, "skip", str(reason)
        )
    except SimkitError as error:
        return _failed(law, context, case, error, 1, time.perf_counter() - started)
    elapsed = time.perf_counter() - started
    return CheckResult(
        law.algorithm, law.name, _on(law, context), law.tier, 1, "pass", seconds=elapsed
    )


def _check(law: Law, context: Context, case: Any) -> None:
    # Infinities and NaNs are among the cases on purpose.
    with np.errstate(all="ignore"):
        law.check(context, case)


def reproducer(law: Law, case: Any, on: str) -> str:
    """The command that repeats a failure."""
    line = f"simkit verify {law.algorithm} --law {law.name}"
    if case is not None:
        line += f" --case {shlex.quote(case_to_json(case))}"
    return line + (f" --on {on}" if law.uses_device else "")


def _explore(
    law: Law, attempt: Callable[[Any], None], examples: int, seed: int, shrink: bool
) -> None:
    assert law.strategy is not None
    if examples < 1:
        return
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)

    @with_seed(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=phases,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(law.strategy)
    def explore(case: Any) -> None:
        attempt(case)

    try:
        explore()
    except Unsatisfiable as error:
        raise LawViolation(f"law {law.name!r} of {law.algorithm} has no cases") from error


def _on(law: Law, context: Context) -> str:
    return context.device.name if law.uses_device else "model"


def _failed(
    law: Law, context: Context, case: Any, error: Exception, cases: int, elapsed: float
) -> CheckResult:
    on = _on(law, context)
    text = str(error) if isinstance(error, LawViolation) else f"{type(error).__name__}: {error}"
    return CheckResult(
        law.algorithm, law.name, on, law.tier, cases, "fail", text, reproducer(law, case, on),
        case_to_json(case), elapsed,
    )  # fmt: skip
