"""``simkit gpus``: the device table, one GPU in full, and occupancy."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import typer

from simkit.cli.options import JsonFile
from simkit.cli.output import bytes_text, console, si_text, table, write_json
from simkit.errors import DtypeError, SimkitError
from simkit.machine.gpus import GPUS, Gpu, gpu
from simkit.machine.occupancy import Occupancy, occupancy


def gpus(
    name: Annotated[str | None, typer.Argument(help="One GPU, in full.")] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of a CTA: shows the occupancy.")
    ] = None,
    registers: Annotated[
        int | None, typer.Option(help="Registers of a thread; left out, they do not limit.")
    ] = None,
    shared: Annotated[
        int | None, typer.Option(help="Shared memory of a CTA in bytes, static and dynamic.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """The device table; occupancy for given threads, registers and shared memory."""
    rows = [gpu(name)] if name else list(GPUS.values())
    if threads is None and (registers is not None or shared is not None):
        raise SimkitError("occupancy needs --threads beside --registers and --shared")
    out = console()
    result: dict[str, Any] = {"gpus": [_figures(row) for row in rows]}
    if threads is not None:
        found = {row.name: occupancy(row, threads, registers or 0, shared or 0) for row in rows}
        what = f"{threads} threads, {registers or 0} registers, {shared or 0:,} bytes shared"
        out.print(_occupancy_table(f"Occupancy: {what}", found))
        if registers is None:
            out.print("Registers were not given and not counted.")
        result["occupancy"] = found
    elif name:
        out.print(_one_gpu(rows[0]))
        out.print(_derived(rows[0]))
        if rows[0].note:
            out.print(f"Note: {rows[0].note}.")
    else:
        out.print(_all_gpus(rows))
        out.print("bf16 and fp8: dense tensor-core peak in TFLOP/s; ridge: bf16 FLOP per HBM byte.")
        out.print("simkit gpus NAME shows every figure with its unit and source.")
    write_json(json_file, result)


def _all_gpus(rows: list[Gpu]) -> Any:
    columns = ("name", "arch", "SMs", "HBM", "TB/s", "L2", "shared", "bf16", "fp8", "ridge")
    return table(
        "Device table",
        columns,
        [
            (
                row.name,
                row.arch,
                row.sm_count,
                bytes_text(row.hbm_bytes),
                f"{row.hbm_bytes_per_s / 1e12:.3f}",
                bytes_text(row.l2_bytes),
                bytes_text(row.smem_per_sm),
                f"{row.peak_flops / 1e12:.0f}",
                _fp8_peak(row),
                f"{row.ridge_point:.0f}",
            )
            for row in rows
        ],
        numbers=range(2, len(columns)),
    )


def _fp8_peak(row: Gpu) -> str:
    try:
        return f"{row.peak_flops_of('fp8') / 1e12:.0f}"
    except DtypeError:
        return "none"


def _one_gpu(row: Gpu) -> Any:
    return table(
        f"{row.name}: {row.title}",
        ("figure", "value", "unit", "source"),
        [
            (field.name, _value(getattr(row, field.name)), *_unit_and_source(field.metadata))
            for field in fields(row)
            if field.name not in ("name", "title", "note")
        ],
        wrap=(1, 2, 3),
    )


def _derived(row: Gpu) -> Any:
    return table(
        "What follows from these",
        ("figure", "value"),
        [
            ("peak, bf16", si_text(row.peak_flops, "FLOP/s")),
            ("peak, fp8", f"{_fp8_peak(row)} TFLOP/s" if row.tensor_fp8_flop_per_clk else "none"),
            ("bf16 at the clock under load", si_text(row.sustained_flops, "FLOP/s")),
            ("ridge point", f"{row.ridge_point:.1f} FLOP per byte"),
            ("warps per SM", row.max_warps_per_sm),
        ],
    )


def _occupancy_table(title: str, found: dict[str, Occupancy]) -> Any:
    return table(
        title,
        ("GPU", "CTAs/SM", "warps", "of all", "limited by", "CTAs/SM each resource allows"),
        [
            (
                name,
                row.ctas_per_sm,
                row.warps,
                f"{row.fraction:.0%}",
                ", ".join(row.limiters),
                ", ".join(f"{what} {limit}" for what, limit in row.limits.items()),
            )
            for name, row in found.items()
        ],
        numbers=(1, 2, 3),
        wrap=(5,),
    )


def _figures(row: Gpu) -> dict[str, Any]:
    return {
        field.name: {"value": getattr(row, field.name), **dict(field.metadata)}
        for field in fields(row)
    }


def _unit_and_source(metadata: Any) -> tuple[str, str]:
    return metadata["unit"], metadata["source"]


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(_value(part) for part in value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
