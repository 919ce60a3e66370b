"""What the cycle model's simulation of one SM looks like, or the whole grid, as a schedule."""

from __future__ import annotations

from collections.abc import Sequence

from simkit.cli.output import count_text, si_text
from simkit.cli.schedule import MOST_TRACKS, Schedule
from simkit.cli.settings import Setting, Values, parse_settings, settings_text
from simkit.cli.timed import timed
from simkit.cli.timed.timed import CLOCK, Timed, clock_of
from simkit.errors import SimkitError
from simkit.machine.gpus import gpu as find_gpu
from simkit.schedules.engine import Simulation
from simkit.schedules.grid import GridRun, Item
from simkit.schedules.picture import grid_trace, simulation_trace
from simkit.schedules.prediction import Prediction, predict

MOST_TILES = 2048
"""Of an item that is drawn: more take longer than anyone waits for a picture."""

_DRAWN = (
    Setting("tiles", 6, "tiles of an item that are drawn"),
    Setting("launch", 0, "the launch that is drawn, from 0", least=0),
    Setting("grid", False, "draw all CTAs instead of one SM", kind="flag"),
)


def timed_schedule(algorithm: str, settings: Sequence[str], gpu: str) -> Schedule:
    """The longest item on one SM, or all items on all; `SimkitError` for what cannot run."""
    chosen, row = timed(algorithm), find_gpu(gpu)
    values = parse_settings(algorithm, (*chosen.settings, CLOCK, *_DRAWN), settings)
    found = predict(row, chosen.launches(row, values), clock_hz=clock_of(values))
    if values["launch"] >= len(found.runs):
        names = ", ".join(f"{number} ({run.launch.name})" for number, run in enumerate(found.runs))
        raise SimkitError(f"--set launch={values['launch']}: {algorithm} has {names}")
    run = found.runs[values["launch"]]
    if values["grid"]:
        trace = grid_trace(run)
        what = f"{count_text(len(run.launch.items), 'item')} on "
        what += count_text(run.placement.workers, "CTA")
    else:
        name = f"{run.launch.name}: {count_text(run.occupancy.ctas_per_sm, 'CTA')} of an SM"
        longest = max(run.launch.items, key=lambda item: item.length)
        item = Item(min(values["tiles"], longest.length), longest.kind)
        if item.length > MOST_TILES:
            given = f"--set tiles={values['tiles']}: {item.length:,} tiles of {run.launch.name}"
            raise SimkitError(f"{given} are too many to draw; it must be {MOST_TILES:,} or less")
        trace = simulation_trace(_example(run, item), name)
        whole = longest.length == item.length
        part = "all" if whole else f"the first {item.length:,} of"
        what = f"one SM, {part} {count_text(longest.length, 'tile')} of its longest item"
    return Schedule(
        heading=f"{algorithm}, {row.title}: {settings_text(_told(chosen, values))}",
        trace=trace,
        summary={"algorithm": algorithm, "gpu": row.name, "settings": values},
        notes=(f"Drawn: {what} at {si_text(run.clock_hz, 'Hz')}.", _whole(found, run)),
        clock_hz=run.clock_hz,
        most=MOST_TRACKS,
    )


def _told(chosen: Timed, values: Values) -> Values:
    """The problem, and the choices that somebody made."""
    problem = {setting.name: values[setting.name] for setting in chosen.problem if not setting.sets}
    return problem | dict(chosen.chosen(values))


def _whole(found: Prediction, run: GridRun) -> str:
    return (
        f"The whole: {si_text(found.seconds, 's')}, {run.launch.name} bound by {run.bound}; "
        f"tensor cores {run.utilisation('tensor'):.0%} busy."
    )


def _example(run: GridRun, item: Item) -> Simulation:
    """One SM whose CTAs all have this item."""
    residents = sorted({agent.process for agent in run.one_sm()})
    return run.simulation(
        lambda: [agent for name in residents for agent in run.launch.cta(name, (item,))]
    )
