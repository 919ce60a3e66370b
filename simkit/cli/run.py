"""``simkit run``: one algorithm on one problem, beside others that solve it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

import gpu as gpu_package
from gpu.ptx.launch import Options
from simkit.cli.errors import NOT_HELD
from simkit.cli.evaluation import Evaluation, TrafficLine, evaluate
from simkit.cli.launching import NAME as LAUNCHES
from simkit.cli.launching import run_launches
from simkit.cli.options import GpuName, JsonFile, Settings
from simkit.cli.output import busy, bytes_text, console, si_text, table, write_json
from simkit.cli.planner import PLANNERS, run_planner
from simkit.cli.plans import print_load, print_plan
from simkit.cli.resources import print_resources
from simkit.cli.settings import parse_settings, settings_text
from simkit.cli.study import STUDIES
from simkit.cli.subjects import SUBJECTS
from simkit.cli.timed import TIMED
from simkit.cli.what_if import predict_values, prediction_json, run_schedule
from simkit.errors import CapacityError, SimkitError
from simkit.layouts import fp8_record
from simkit.machine.gpus import Gpu
from simkit.machine.gpus import gpu as find_gpu
from simkit.schedules.prediction import Prediction

_ON = ("model", "ptx", "cuda")


def run(
    algorithm: Annotated[str, typer.Argument(metavar="ALGO", help="See simkit list.")],
    settings: Settings = None,
    gpu: GpuName = "h100",
    on: Annotated[
        str, typer.Option(help="model, cycles (its schedule), ptx (the executor) or cuda.")
    ] = "model",
    seed: Annotated[int, typer.Option(min=0, help="Of the random inputs.")] = 0,
    dram: Annotated[
        bool, typer.Option("--dram", help="On ptx: also count what an L2 lets through (slower).")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Run an algorithm: error, traffic, occupancy, plan and roofline, beside naive attention.

    On cycles: how long the schedule takes by the cycle model, and what holds it back; of some
    algorithms there is nothing else.

    A study prints its table beside the published one; --gpu does not matter to it. A planner prints
    its plans and how evenly they load the GPU.
    """
    if algorithm in STUDIES:
        _no_kernel(f"{algorithm} is a study", on, dram)
        STUDIES[algorithm](settings or (), seed, json_file)
        return
    if algorithm in PLANNERS:
        _no_kernel(f"{algorithm} is a planner", on, dram)
        run_planner(algorithm, settings or (), gpu, json_file)
        return
    if algorithm == LAUNCHES:
        if on not in ("model", "cycles") or dram:
            raise SimkitError(f"{LAUNCHES} is a model without a kernel to run on {on}")
        run_launches(settings or (), json_file)
        return
    is_schedule = algorithm in TIMED and algorithm not in SUBJECTS
    if on == "cycles" or is_schedule:
        what = algorithm if is_schedule else f"{algorithm} on cycles"
        _no_kernel(f"{what} is a schedule", "model" if on == "cycles" else on, dram)
        run_schedule(algorithm, settings or (), gpu, json_file)
        return
    if algorithm not in SUBJECTS:
        names = ", ".join((*SUBJECTS, *STUDIES, *PLANNERS, *TIMED))
        raise SimkitError(f"no algorithm {algorithm!r}; there are {names}")
    chosen = SUBJECTS[algorithm]
    values = parse_settings(algorithm, chosen.settings, settings or ())
    row = find_gpu(gpu)
    if on not in _ON:
        raise SimkitError(_none_of(on))
    device = None if on == "model" else gpu_package.open(on, gpu=gpu, options=Options(dram=dram))
    with busy(f"{algorithm} on {on}"):
        found = [evaluate(chosen, values, row, device, seed)]
    notes = []
    for name, other in chosen.beside(values).items():
        if isinstance(other, str):
            notes.append(f"{name} is not beside it: {other}.")
            continue
        try:
            with busy(f"{name} on {on}, for comparison"):
                found.append(evaluate(SUBJECTS[name], other, row, device, seed))
        except CapacityError as error:
            notes.append(f"{name} does not fit: {error}.")
    predicted = {
        result.algorithm: predict_values(result.algorithm, row, result.settings)
        for result in found
        if result.algorithm in TIMED and TIMED[result.algorithm].is_ours
    }
    out = console()
    out.print(f"{algorithm} on {on}, {row.title}: {settings_text(values)}")
    _print(out, row, found, predicted, on)
    for note in notes:
        out.print(note)
    if algorithm == "fp8_kv_cache":
        record, before = fp8_record.RECORD_BYTES, fp8_record.TOKEN_VALUES * 2
        out.print(
            f"A token takes {record} bytes instead of {before} in bfloat16: {record / before:.1%}."
        )
    agrees = all(result.agrees for result in found)
    if not agrees:
        out.print("The measured traffic is not as predicted.", style="bold red")
    runs = [result.as_json() for result in found]
    predictions = {name: prediction_json(one) for name, one in predicted.items()}
    summary = {"gpu": gpu, "on": on, "runs": runs, "predictions": predictions, "notes": notes}
    write_json(json_file, summary)
    if not agrees:
        raise typer.Exit(NOT_HELD)


def _none_of(on: str) -> str:
    return f"--on {on!r} is none of {', '.join(_ON)}, cycles"


def _no_kernel(what: str, on: str, dram: bool) -> None:
    """SimkitError where a model without a kernel is to run on a device."""
    if on not in (*_ON, "cycles"):
        raise SimkitError(_none_of(on))
    if on != "model":
        raise SimkitError(f"{what}: a model without a kernel to run on {on}")
    if dram:
        raise SimkitError(f"{what}: a model without a kernel, of which --dram could count bytes")


def _print(
    out: Console,
    gpu: Gpu,
    found: Sequence[Evaluation],
    predicted: Mapping[str, Prediction],
    on: str,
) -> None:
    out.print(
        table(
            "Error against float64",
            ("algorithm", "output", "max abs", "max rel", "RMSE"),
            [
                (
                    result.algorithm,
                    error.tensor,
                    f"{error.max_abs:.3g}",
                    f"{error.max_rel:.3g}",
                    f"{error.rmse:.3g}",
                )
                for result in found
                for error in result.errors
            ],
            numbers=(2, 3, 4),
        )
    )
    out.print("max rel: the largest error over the largest magnitude.")
    for result in found:
        if result.error_settings != result.settings:
            out.print(
                f"The error of {result.algorithm} was measured on a smaller case: "
                f"{settings_text(result.error_settings)}."
            )
    measured = on != "model"
    columns = ("algorithm", "tensor", "direction", "requested", "sectors")
    rows = [
        (result.algorithm, *_traffic_cells(line, measured))
        for result in found
        for line in result.traffic
    ]
    title = "Traffic" if measured else "Traffic, predicted"
    extra = ("measured",) if measured else ()
    out.print(table(title, (*columns, *extra), rows, numbers=(3, 4), wrap=(5,)))
    for result in found:
        if result.dram_bytes is not None:
            read, write = map(bytes_text, result.dram_bytes)
            out.print(f"DRAM, {result.algorithm}: {read} read, {write} written.")
    print_resources(out, [row for result in found for row in result.resources])
    _print_plans(out, gpu, found[0])
    if found[0].algorithm in TIMED and found[0].algorithm not in predicted:
        out.print(f"simkit run {found[0].algorithm} --on cycles times a published kernel of it.")
    out.print(_roofline_table(found, predicted, on))
    out.print("HBM bytes: each tensor once in every direction, which no cache avoids.")
    if predicted:
        out.print("predicted time: by the cycle model, launching included (docs/cycles.md).")


def _print_plans(out: Console, gpu: Gpu, result: Evaluation) -> None:
    """Of each launch that works off a plan."""
    for plan in result.plans:
        print_plan(out, f"Plan of {plan.load.planner}", plan.plan, plan.batch)
        out.print(f"The kernel is compiled as {plan.key}.")
    if result.plans:
        print_load(out, gpu, [plan.load for plan in result.plans])


def _traffic_cells(line: TrafficLine, measured: bool) -> tuple[str, ...]:
    cells = (line.tensor, line.direction, bytes_text(line.requested), bytes_text(line.sectors))
    if not measured:
        return cells
    if line.measured_requested is None:
        return (*cells, "not measured")
    if line.agrees:
        return (*cells, "the same")
    return (*cells, f"{line.measured_requested:,} B, {line.measured_sectors:,} B")


def _roofline_table(
    found: Sequence[Evaluation], predicted: Mapping[str, Prediction], on: str
) -> Any:
    places = [result.place for result in found]
    rows: list[tuple[object, ...]] = [
        ("FLOP", *(si_text(place.flops, "FLOP") for place in places)),
        ("bytes out of the SMs", *(bytes_text(_sectors(result)) for result in found)),
        ("HBM bytes", *(bytes_text(place.hbm_bytes) for place in places)),
        ("FLOP per HBM byte", *(f"{place.intensity:.2f}" for place in places)),
        ("ridge point", *(f"{place.ridge:.1f}" for place in places)),
        ("bound by", *(place.bound for place in places)),
        ("attainable", *(si_text(place.attainable, "FLOP/s") for place in places)),
        ("products on", *(result.units for result in found)),
        ("peak of those", *(si_text(place.unit_peak, "FLOP/s") for place in places)),
        ("least time", *(si_text(place.seconds, "s") for place in places)),
    ]
    if predicted:
        names = [result.algorithm for result in found]
        times = (
            si_text(predicted[name].seconds, "s") if name in predicted else "" for name in names
        )
        bounds = (predicted[name].bound if name in predicted else "" for name in names)
        rows += [("predicted time", *times), ("which is bound by", *bounds)]
    if any(result.kernel_seconds is not None for result in found):
        times = (si_text(result.kernel_seconds or 0.0, "s") for result in found)
        rows.append((f"kernel time on {on}", *times))
    columns = ("", *(result.algorithm for result in found))
    return table("Roofline", columns, rows, numbers=range(1, len(columns)))


def _sectors(result: Evaluation) -> int:
    return sum(line.sectors for line in result.traffic)
