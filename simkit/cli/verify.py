"""``simkit verify``: every law of every algorithm, against the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from properties.law import CheckResult, Context, Law
from properties.run import replay, run_law
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
    seed: Annotated[int, typer.Option(help="Other cases for another seed.")] = 0,
    gpu: GpuName = "h100",
    json_file: JsonFile = None,
) -> None:
    """Check the laws: model and kernel agree in bits and bytes, and with float64 within bounds."""
    chosen = choose_laws(algorithms or (), law)
    context = open_context(on, gpu)
    out = console()
    out.print(f"Device: {context.device.name}; models stand for {context.gpu.name}.")
    if case is not None:
        if law is None or len(chosen) != 1:
            raise SimkitError("--case needs one algorithm and --law, as the line of a failure has")
        results = [replay(chosen[0], context, chosen[0].case_from_json(case))]
    else:
        results = _run(chosen, context, examples, seed)
    print_results(out, results)
    print_traffic(out, context)
    failed = any(result.status == "fail" for result in results)
    out.print(summary(results), style="bold red" if failed else "bold green")
    write_json(json_file, as_json(context, results))
    if failed:
        raise typer.Exit(NOT_HELD)


def _run(
    laws: Sequence[Law], context: Context, examples: int | None, seed: int
) -> list[CheckResult]:
    """Runs the laws under a progress bar on standard error, which only a terminal shows."""
    terminal = error_console()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    results = []
    with Progress(
        *columns, console=terminal, transient=True, disable=not terminal.is_terminal
    ) as bar:
        total = sum(_cases(law, examples) for law in laws)
        task = bar.add_task("laws", total=total)
        done = 0
        for law in laws:
            bar.update(task, description=f"{law.algorithm}: {law.name}")
            result = run_law(
                law,
                context,
                examples=examples,
                seed=seed,
                progress=lambda cases, before=done: bar.update(task, completed=before + cases),  # type: ignore[misc]
            )
            done += _cases(law, examples)
            bar.update(task, completed=done)
            results.append(result if result.detail else replace(result, detail=law.statement))
    return results


def _cases(law: Law, examples: int | None) -> int:
    """About how many cases a run of the law has."""
    if law.strategy is None:
        return 1
    return len(law.corners) + (law.examples if examples is None else examples)
