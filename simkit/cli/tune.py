"""``simkit tune``: every combination of a schedule's choices, the fastest first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

import typer
from rich.progress import Progress

from simkit.cli.errors import INTERRUPTED
from simkit.cli.options import GpuName, JsonFile, Settings
from simkit.cli.output import console, count_text, error_console, si_text, table, write_json
from simkit.cli.settings import AUTO, Values, parse_settings, settings_text
from simkit.cli.timed import timed
from simkit.cli.timed.timed import CLOCK, Timed, clock_of
from simkit.cli.what_if import prediction_json
from simkit.errors import CapacityError, ShapeError, SimkitError
from simkit.machine.gpus import Gpu
from simkit.machine.gpus import gpu as find_gpu
from simkit.schedules.prediction import Prediction, predict


@dataclass(frozen=True)
class _Tried:
    """One combination; ``found`` None where ``why`` says that it cannot run."""

    choices: Mapping[str, Any]
    found: Prediction | None
    why: str = ""


def tune(
    algorithm: Annotated[str, typer.Argument(metavar="ALGO", help="See simkit list.")],
    settings: Settings = None,
    gpu: GpuName = "h100",
    most: Annotated[int, typer.Option(min=1, help="Combinations to show.")] = 10,
    json_file: JsonFile = None,
) -> None:
    """Rank a schedule's choices by predicted time; --set fixes a choice or a size.

    Interrupted, it ranks what it has tried so far and exits with 130. The file of --json has
    the times of all others, too.
    """
    chosen, row = timed(algorithm), find_gpu(gpu)
    values = parse_settings(algorithm, (*chosen.settings, CLOCK), settings or ())
    combinations = list(_combinations(chosen, values))
    tried, is_whole = _try_all(chosen, row, values, combinations)
    ranked = sorted((one for one in tried if one.found is not None), key=lambda one: _seconds(one))
    if not ranked:
        raise SimkitError(
            f"none of {count_text(len(tried), 'combination')} can run: {tried[0].why}"
            if tried
            else "interrupted before anything was timed"
        )
    out = console()
    problem = {setting.name: values[setting.name] for setting in chosen.problem if not setting.sets}
    out.print(f"{algorithm} on {row.title}: {settings_text(problem)}")
    base = next((one for one in tried if not one.choices and one.found), None)
    out.print(
        table(
            "Fastest",
            ("", "time", "ratio", "achieves", "CTAs", "choices", "bound by"),
            [(number, *_cells(one, base)) for number, one in enumerate(ranked[:most], start=1)],
            numbers=(0, 1, 2, 3, 4),
            wrap=(5, 6),
        )
    )
    out.print("ratio: to the time of the kernel's own choices. CTAs: on an SM.")
    cannot = len(tried) - len(ranked)
    timed_text = count_text(len(ranked), "combination") + " timed"
    out.print(f"{timed_text}; {cannot:,} cannot run: they do not fit or do not exist.")
    if not is_whole:
        out.print(f"Interrupted after {len(tried)} of {len(combinations)}.", style="bold red")
    write_json(
        json_file,
        {
            "algorithm": algorithm,
            "gpu": row.name,
            "settings": values,
            "combinations": len(combinations),
            "tried": len(tried),
            "ranked": [
                {"choices": one.choices} | prediction_json(one.found)
                for one in ranked[:most]
                if one.found
            ],
            # Their bounds are left out: to find one is to time a combination several times.
            "others": [{"choices": one.choices, "seconds": _seconds(one)} for one in ranked[most:]],
            "infeasible": [{"choices": one.choices, "why": one.why} for one in tried if one.why],
        },
    )
    if not is_whole:
        raise typer.Exit(INTERRUPTED)


def _combinations(chosen: Timed, values: Values) -> Iterator[Mapping[str, Any]]:
    """The kernel's own choices first, then all others."""
    yield chosen.chosen(values)
    left = [setting for setting in chosen.choices if values[setting.name] == AUTO]
    names = [setting.name for setting in left]
    for picked in product(*(setting.tries for setting in left)) if left else ():
        yield {**chosen.chosen(values), **dict(zip(names, picked, strict=True))}


def _try_all(
    chosen: Timed, gpu: Gpu, values: Values, combinations: Sequence[Mapping[str, Any]]
) -> tuple[list[_Tried], bool]:
    """Everything that was tried, and whether that is everything."""
    tried: list[_Tried] = []
    with Progress(console=error_console(), transient=True) as progress:
        task = progress.add_task("tuning", total=len(combinations))
        try:
            for choices in combinations:
                tried.append(_try(chosen, gpu, values, choices))
                progress.advance(task)
        except KeyboardInterrupt:
            return tried, False
    return tried, True


def _try(chosen: Timed, gpu: Gpu, values: Values, choices: Mapping[str, Any]) -> _Tried:
    try:
        launches = chosen.launches(gpu, {**values, **choices})
        return _Tried(choices, predict(gpu, launches, clock_hz=clock_of(values)))
    except (CapacityError, ShapeError) as error:
        return _Tried(choices, None, str(error))


def _seconds(one: _Tried) -> float:
    assert one.found is not None
    return one.found.seconds


def _cells(one: _Tried, base: _Tried | None) -> tuple[object, ...]:
    assert one.found is not None
    found = one.found
    ratio = "" if base is None else f"{_seconds(one) / _seconds(base):.3f}"
    choices = settings_text(one.choices) or "the kernel's own"
    ctas = found.longest.occupancy.ctas_per_sm
    achieved = si_text(found.flops, "FLOP/s")
    return si_text(found.seconds, "s"), ratio, achieved, ctas, choices, found.bound
