"""``simkit run``: one algorithm on one problem, with naive attention beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

import gpu as gpu_package
from gpu.device import Device
from gpu.ptx.launch import Options
from simkit.cli.errors import NOT_HELD
from simkit.cli.evaluation import Evaluation, TrafficLine, evaluate
from simkit.cli.options import GpuName, JsonFile, Settings
from simkit.cli.output import busy, bytes_text, console, si_text, table, write_json
from simkit.cli.resources import (
    print_resources,
)
from simkit.cli.settings import Values, parse_settings, settings_text
from simkit.cli.study import STUDIES
from simkit.cli.subjects import SUBJECTS
from simkit.errors import CapacityError, SimkitError
from simkit.layouts import fp8_record
from simkit.machine.gpus import Gpu
from simkit.machine.gpus import gpu as find_gpu

_ON = ("model", "ptx", "cuda")


def run(
    algorithm: Annotated[str, typer.Argument(metavar="ALGO", help="See simkit list.")],
    settings: Settings = None,
    gpu: GpuName = "h100",
    on: Annotated[str, typer.Option(help="model, ptx (the executor) or cuda.")] = "model",
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    dram: Annotated[
        bool, typer.Option("--dram", help="On ptx: also count what an L2 lets through (slower).")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Run an algorithm: error, traffic, occupancy and roofline, beside naive attention.

    A study prints its table beside the published one; --gpu does not matter to it.
    """
    if algorithm in STUDIES:
        if on != "model" or dram:
            raise SimkitError(f"{algorithm} is a study: a model without a kernel to run on {on}")
        STUDIES[algorithm](settings or (), seed, json_file)
        return
    if algorithm not in SUBJECTS:
        names = ", ".join((*SUBJECTS, *STUDIES))
        raise SimkitError(f"no algorithm {algorithm!r}; there are {names}")
    chosen = SUBJECTS[algorithm]
    values = parse_settings(algorithm, chosen.settings, settings or ())
    row = find_gpu(gpu)
    if on not in _ON:
        raise SimkitError(f"--on {on!r} is none of {', '.join(_ON)}")
    device = None if on == "model" else gpu_package.open(on, gpu=gpu, options=Options(dram=dram))
    with busy(f"{algorithm} on {on}"):
        found = [evaluate(chosen, values, row, device, seed)]
    out = console()
    note = ""
    if chosen.comparison:
        try:
            with busy(f"naive_attention on {on}, for comparison"):
                found.append(_naive(values, row, device, seed))
        except CapacityError as error:
            note = f"Naive attention does not fit: {error}."
    out.print(f"{algorithm} on {on}, {row.title}: {settings_text(values)}")
    _print(out, found, on)
    if note:
        out.print(note)
    if algorithm == "fp8_kv_cache":
        record, before = fp8_record.RECORD_BYTES, fp8_record.TOKEN_VALUES * 2
        out.print(
            f"A token takes {record} bytes instead of {before} in bfloat16: {record / before:.1%}."
        )
    agrees = all(result.agrees for result in found)
    if not agrees:
        out.print("The measured traffic is not as predicted.", style="bold red")
    write_json(
        json_file,
        {"gpu": gpu, "on": on, "runs": [asdict(result) for result in found], "note": note},
    )
    if not agrees:
        raise typer.Exit(NOT_HELD)


def _naive(values: Values, gpu: Gpu, device: Device | None, seed: int) -> Evaluation:
    """Naive attention on the problem of another algorithm."""
    naive = SUBJECTS["naive_attention"]
    one_query = {"q_len": 1, "causal": False}
    names = [setting.name for setting in naive.settings if not setting.sets]
    shared = {name: values.get(name, one_query.get(name, 0)) for name in names}
    return evaluate(naive, shared, gpu, device, seed)


def _print(out: Console, found: Sequence[Evaluation], on: str) -> None:
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
    out.print(_roofline_table(found, on))


def _traffic_cells(line: TrafficLine, measured: bool) -> tuple[str, ...]:
    cells = (line.tensor, line.direction, bytes_text(line.requested), bytes_text(line.sectors))
    if not measured:
        return cells
    if line.measured_requested is None:
        return (*cells, "not measured")
    if line.agrees:
        return (*cells, "the same")
    return (*cells, f"{line.measured_requested:,} B, {line.measured_sectors:,} B")


def _roofline_table(found: Sequence[Evaluation], on: str) -> Any:
    places = [result.place for result in found]
    rows: list[tuple[object, ...]] = [
        ("FLOP", *(si_text(place.flops, "FLOP") for place in places)),
        ("bytes out of the SMs", *(bytes_text(_sectors(result)) for result in found)),
        ("HBM bytes, each tensor once", *(bytes_text(place.hbm_bytes) for place in places)),
        ("intensity, FLOP per HBM byte", *(f"{place.intensity:.2f}" for place in places)),
        ("ridge point", *(f"{place.ridge:.1f}" for place in places)),
        ("bound by", *(place.bound for place in places)),
        ("attainable", *(si_text(place.attainable, "FLOP/s") for place in places)),
        ("products on", *(result.units for result in found)),
        ("peak of those", *(si_text(place.unit_peak, "FLOP/s") for place in places)),
        ("least time", *(si_text(place.seconds, "s") for place in places)),
    ]
    if any(result.kernel_seconds is not None for result in found):
        times = (si_text(result.kernel_seconds or 0.0, "s") for result in found)
        rows.append((f"kernel time on {on}", *times))
    columns = ("", *(result.algorithm for result in found))
    return table("Roofline", columns, rows, numbers=range(1, len(columns)))


def _sectors(result: Evaluation) -> int:
    return sum(line.sectors for line in result.traffic)
