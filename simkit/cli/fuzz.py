"""``simkit fuzz``: laws on fresh cases until the time is up."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from properties.law import CheckResult, Context, Law
from properties.run import replay, run_law
from simkit.cli.counterexamples import load_counterexample, save_counterexample
from simkit.cli.coverage import Coverage
from simkit.cli.errors import NOT_HELD
from simkit.cli.options import GpuName, JsonFile
from simkit.cli.output import console, error_console, write_json
from simkit.cli.verification import as_json, choose_laws, open_context, print_results, summary

_SLICE_EXAMPLES = 20  # cases of a law before the next law gets a turn
_LEAST_SECONDS = 1.0  # of a law's first turn, even if the time is up
_REFRESHES_PER_S = 4


def fuzz(
    algorithms: Annotated[
        list[str] | None, typer.Argument(metavar="ALGO", help="By default all.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0, help="How long.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Other cases for another seed.")] = 0,
    on: Annotated[str, typer.Option(help="auto (a GPU if there is one), ptx or cuda.")] = "auto",
    law: Annotated[str | None, typer.Option(help="Only laws of this name.")] = None,
    replay_file: Annotated[
        Path | None, typer.Option("--replay", metavar="FILE", help="Repeat a saved case instead.")
    ] = None,
    gpu: GpuName = "h100",
    json_file: JsonFile = None,
) -> None:
    """Look for a case that violates a law, until the time is up; Ctrl-C ends it early."""
    out = console()
    coverage = Coverage()
    interrupted = False
    if replay_file is not None:
        saved = load_counterexample(replay_file)
        chosen = choose_laws([saved.algorithm], saved.law)
        context = open_context(on, gpu)
        case = chosen[0].case_from_json(saved.case) if saved.case != "null" else None
        results = [replay(chosen[0], context, case)]
    else:
        chosen = choose_laws(algorithms or (), law)
        context = open_context(on, gpu)
        totals: dict[str, CheckResult] = {}
        try:
            _fuzz(chosen, context, minutes * 60, seed, coverage, totals)
        except KeyboardInterrupt:
            interrupted = True
        results = list(totals.values())
    print_results(out, results)
    failures = [result for result in results if result.status == "fail"]
    if replay_file is None:
        out.print(coverage.table())
        for result in failures:
            path = save_counterexample(result)
            out.print(f"saved {path}; repeat with: simkit fuzz --replay {path}", soft_wrap=True)
    ended = "interrupted; " if interrupted else ""
    out.print(ended + summary(results), style="bold red" if failures else "bold green")
    write_json(json_file, as_json(context, results) | {"coverage": coverage.as_json()})
    if failures:
        raise typer.Exit(NOT_HELD)


def _fuzz(
    laws: Sequence[Law],
    context: Context,
    seconds: float,
    seed: int,
    coverage: Coverage,
    totals: dict[str, CheckResult],
) -> None:
    """Gives each law a slice of cases in turn; a law that failed is left out from then on."""
    deadline = time.monotonic() + seconds
    terminal = error_console()

    def view() -> Group:
        left = max(0, deadline - time.monotonic())
        failed = sum(result.status == "fail" for result in totals.values())
        state = f"{coverage.cases:,} cases, {failed} laws failed, {left:.0f} s left; Ctrl-C ends"
        return Group(coverage.table(), Text(state))

    live: AbstractContextManager[object] = nullcontext()
    if terminal.is_terminal:
        live = Live(
            get_renderable=view,
            console=terminal,
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
        )
    with live:
        # Every law gets one slice at least: a run too short for that would say nothing of some.
        active = list(laws)
        for turn in itertools.count():
            for law in active:
                left = deadline - time.monotonic()
                if turn and left <= 0:
                    break
                key = f"{law.algorithm} {law.name}"
                result = run_law(
                    law,
                    context,
                    examples=_SLICE_EXAMPLES,
                    seed=seed + turn,
                    seconds=max(left, _LEAST_SECONDS),
                    corners=turn == 0,
                    on_case=functools.partial(coverage.add, key),
                )
                totals[key] = _sum(totals.get(key), result)
            active = [law for law in active if _has_more(law, totals)]
            if not active or deadline <= time.monotonic():
                return


def _has_more(law: Law, totals: dict[str, CheckResult]) -> bool:
    """Whether another turn can say more: not after a failure, nor where one run covers all."""
    return law.strategy is not None and totals[f"{law.algorithm} {law.name}"].status == "pass"


def _sum(before: CheckResult | None, result: CheckResult) -> CheckResult:
    """``result`` with the cases and seconds of the turns before."""
    if before is None:
        return result
    return replace(
        result, cases=before.cases + result.cases, seconds=before.seconds + result.seconds
    )
