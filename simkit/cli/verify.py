"""``simkit verify``: every law of every algorithm, against the kernels."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from properties.law import CheckResult, Context, Law
from properties.run import replay
from simkit.cli.errors import NOT_HELD
from simkit.cli.options import GpuName, JsonFile
from simkit.cli.output import console, error_console, write_json
from simkit.cli.verification import (
    as_json,
    choose_laws,
    open_context,
    print_results,
    print_traffic,
    summary,
)
from simkit.cli.workers import Job, run_jobs, run_laws
from simkit.errors import SimkitError


def verify(
    algorithms: Annotated[
        list[str] | None, typer.Argument(metavar="ALGO", help="By default all.")
    ] = None,
    on: Annotated[str, typer.Option(help="auto (a GPU if there is one), ptx or cuda.")] = "auto",
    examples: Annotated[
        int | None, typer.Option(min=0, help="Drawn cases of each law, beside its corner cases.")
    ] = None,
    law: Annotated[str | None, typer.Option(help="Only the law of this name.")] = None,
    case: Annotated[
        str | None, typer.Option(metavar="JSON", help="Only this case; needs one ALGO and --law.")
    ] = None,
    variant: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A variant of your own: the laws of its VARIANT."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Other cases for another seed.")] = 0,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Processes; by default one a core, and one on a GPU."),
    ] = None,
    gpu: GpuName = "h100",
    json_file: JsonFile = None,
) -> None:
    """Check the laws: model and kernel agree in bits and bytes, and with float64 within bounds."""
    chosen = choose_laws(algorithms or (), law, variant)
    context = open_context(on, gpu)
    out = console()
    out.print(f"Device: {context.device.name}; models stand for {context.gpu.name}.")
    if case is not None:
        if law is None or len(chosen) != 1:
            raise SimkitError("--case needs one algorithm and --law, as the line of a failure has")
        results = [replay(chosen[0], context, chosen[0].case_from_json(case))]
    else:
        processes = jobs or (1 if context.device.name == "cuda" else os.cpu_count() or 1)
        results = _run(chosen, context, examples, seed, processes, variant)
    if variant is not None:
        results = [_with_variant(result, variant) for result in results]
    print_results(out, results)
    print_traffic(out, context)
    failed = any(result.status == "fail" for result in results)
    out.print(summary(results), style="bold red" if failed else "bold green")
    write_json(json_file, as_json(context, results))
    if failed:
        raise typer.Exit(NOT_HELD)


def _with_variant(result: CheckResult, variant: Path) -> CheckResult:
    """A failure's reproducer knows the variant."""
    if not result.reproducer:
        return result
    return replace(result, reproducer=f"{result.reproducer} --variant {shlex.quote(str(variant))}")


def _run(
    laws: Sequence[Law],
    context: Context,
    examples: int | None,
    seed: int,
    processes: int,
    variant: Path | None,
) -> list[CheckResult]:
    """Runs the laws under a progress bar on standard error, which only a terminal shows."""
    by_algorithm: dict[str, list[Law]] = {}
    for law in laws:
        by_algorithm.setdefault(law.algorithm, []).append(law)
    terminal = error_console()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=terminal, transient=True, disable=not terminal.is_terminal
    ) as bar:
        task = bar.add_task("laws", total=sum(_cases(law, examples) for law in laws))

        def more(algorithm: str, cases: int) -> None:
            bar.update(task, description=algorithm, advance=cases)

        if processes == 1 or len(by_algorithm) == 1:
            before: dict[str, int] = {}

            def progress(law: Law, cases: int) -> None:
                more(f"{law.algorithm}: {law.name}", cases - before.get(law.name, 0))
                before[law.name] = cases

            found = {}
            for algorithm, own in by_algorithm.items():
                before.clear()
                found[algorithm] = run_laws(own, context, examples, seed, progress)
        else:
            # Those with most cases first, so that none is left alone at the end.
            order = sorted(by_algorithm, key=lambda name: -_weight(by_algorithm[name], examples))
            work = [
                Job(
                    name, tuple(law.name for law in by_algorithm[name]), context.device.name,
                    context.gpu.name, examples, seed, variant,
                )
                for name in order
            ]  # fmt: skip
            found, counted = run_jobs(work, processes, more)
            for traffic in counted:
                context.traffic |= traffic
    statements = {(law.algorithm, law.name): law.statement for law in laws}
    return [
        result
        if result.detail
        else replace(result, detail=statements[result.algorithm, result.law])
        for algorithm in by_algorithm
        for result in found[algorithm]
    ]


def _cases(law: Law, examples: int | None) -> int:
    """About how many cases a run of the law has."""
    if law.strategy is None:
        return 1
    return len(law.corners) + (law.examples if examples is None else examples)


def _weight(laws: Sequence[Law], examples: int | None) -> int:
    """About how long laws take: those that run kernels count."""
    return sum(_cases(law, examples) * (10 if law.uses_device else 1) for law in laws)
