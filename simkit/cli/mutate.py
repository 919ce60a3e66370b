"""``simkit mutate``: do the laws of an algorithm notice a change of its kernel's PTX?"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from properties import mutation
from properties.mutation import Mutant, Outcome
from simkit.cli.errors import NOT_HELD
from simkit.cli.options import JsonFile
from simkit.cli.output import console, error_console, table, write_json
from simkit.cli.verification import choose_laws
from simkit.errors import SimkitError


def mutate(
    algorithm: Annotated[str, typer.Argument(metavar="ALGO")],
    every_build: Annotated[
        bool, typer.Option("--every-build", help="Every build of the kernel, not just one.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; as many as there are cores by default.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Break the kernel's PTX in every small way, and see that a law notices each."""
    choose_laws([algorithm], None)
    texts = mutation.texts(algorithm)
    if not texts:
        raise SimkitError(f"{algorithm} has no kernel that could be changed")
    work = [
        (mutant, text)
        for text in (texts if every_build else texts[:1])
        for mutant in mutation.mutants(algorithm, text)
    ]
    outcomes = sorted(_run(work, jobs or os.cpu_count() or 1), key=lambda o: o.mutant.line)
    share = mutation.caught(outcomes)
    survivors = [outcome for outcome in outcomes if not outcome.law]
    out = console()
    out.print(_summary(outcomes))
    if survivors:
        out.print(_survivors(survivors))
    unexplained = sum(not outcome.reason for outcome in survivors)
    is_good = share >= mutation.LEAST_CAUGHT and not unexplained and len(outcomes) == len(work)
    out.print(
        f"{share:.1%} of the mutants that change something are noticed"
        f" ({mutation.LEAST_CAUGHT:.0%} wanted); {len(survivors)} of {len(outcomes)} survive,"
        f" {unexplained} without a reason."
        + (f" Stopped after {len(outcomes)} of {len(work)}." if len(outcomes) < len(work) else ""),
        style="bold green" if is_good else "bold red",
    )
    write_json(json_file, {"algorithm": algorithm, "caught": share, "mutants": outcomes})
    if not is_good:
        raise typer.Exit(NOT_HELD)


def _run(work: list[tuple[Mutant, str]], jobs: int) -> list[Outcome]:
    """The outcomes, as many as there are when somebody interrupts."""
    outcomes = []
    with _bar(len(work)) as bar, ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        futures = [pool.submit(mutation.run, *one) for one in work]
        try:
            for future in as_completed(futures):
                outcomes.append(future.result())
                bar.advance(bar.task_ids[0])
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
    return outcomes


@contextmanager
def _bar(total: int) -> Iterator[Progress]:
    terminal = error_console()
    columns = (TextColumn("mutants"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=terminal, transient=True, disable=not terminal.is_terminal
    ) as bar:
        bar.add_task("mutants", total=total)
        yield bar


def _summary(outcomes: list[Outcome]) -> object:
    """By what was changed: how many, and which law noticed."""
    rows = []
    for operator in dict.fromkeys(o.mutant.operator for o in outcomes):
        of_it = [o for o in outcomes if o.mutant.operator == operator]
        laws = Counter(o.law for o in of_it if o.law)
        rows.append(
            (
                operator,
                len(of_it),
                sum(laws.values()),
                ", ".join(f"{name} {count}" for name, count in laws.most_common()),
            )
        )
    return table("Mutants", ("changed", "mutants", "noticed", "by"), rows, (1, 2), wrap=(3,))


def _survivors(survivors: list[Outcome]) -> object:
    rows = [
        (
            o.mutant.line,
            f"{o.mutant.before}\n{o.mutant.after}",
            o.mutant.source,
            o.reason or "none known: a hole in the laws, or an equivalent mutant",
        )
        for o in survivors
    ]
    columns = ("line", "PTX", "CUDA", "why")
    return table("Survivors", columns, rows, numbers=(0,), wrap=(1, 2, 3))
