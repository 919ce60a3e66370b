"""``simkit check``: someone's own kernel on the executor, and what it does."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from gpu.counters import Report
from gpu.ptx.launch import Options
from gpu.ptx.schedule import parse_schedule
from simkit.cli.array_summary import summarise
from simkit.cli.errors import NOT_HELD
from simkit.cli.hazards import print_hazards, write_sarif
from simkit.cli.kernel_run import (
    COMPARED_SCHEDULES,
    Array,
    KernelRun,
    ScheduleResult,
    compare_schedules,
    ptx_text,
    run_kernel,
    schedule_name,
)
from simkit.cli.launch import LaunchPlan, load_plan, override_plan
from simkit.cli.options import GpuName, JsonFile
from simkit.cli.output import busy, bytes_text, console, table, write_json
from simkit.cli.resources import (
    KernelResources,
    launch_resources,
    print_resources,
)
from simkit.machine.gpus import gpu as find_gpu
from traces import chrome


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE.cu|FILE.ptx", help="The kernel.")],
    kernel: Annotated[str | None, typer.Option(help="Which entry; needed if several.")] = None,
    grid: Annotated[str | None, typer.Option(metavar="X,Y,Z", help="CTAs; 1 by default.")] = None,
    block: Annotated[
        str | None, typer.Option(metavar="X,Y,Z", help="Threads of a CTA; 128 by default.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="X,Y,Z", help="CTAs of a cluster; 1 by default.")
    ] = None,
    shared: Annotated[
        int | None, typer.Option(metavar="BYTES", help="Dynamic shared memory of a CTA.")
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            metavar="SPEC",
            help="An argument, in the kernel's order: x=bf16[2,64]:normal(7), y=f32[64] (an array; "
            "fills: empty, zeros, ones, nan, arange, normal, FILE.npy), n=i32:64, s=bytes:00ff, "
            "k=bf16[512,64]:normal@box=64x64,swizzle=128B (as a tensor map).",
        ),
    ] = None,
    define: Annotated[
        list[str] | None, typer.Option("--define", "-D", metavar="X=Y", help="Of the compiler.")
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help="Architecture to compile for; the GPU's by default.")
    ] = None,
    launch: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="All of the above in a file; flags go first."),
    ] = None,
    gpu: GpuName = "h100",
    schedule: Annotated[
        str, typer.Option(help="Order of warps and copies: eager, lazy or random(SEED).")
    ] = "eager",
    fast: Annotated[
        bool, typer.Option("--fast", help="Tensor cores in plain float32 instead of bit for bit.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Do not repeat the launch under other schedules.")
    ] = False,
    dram: Annotated[
        bool, typer.Option("--dram", help="Also count what an L2 of the GPU's size lets through.")
    ] = False,
    budget: Annotated[
        int, typer.Option(min=1, help="Array instructions after which a kernel counts as endless.")
    ] = Options().budget,
    hazards: Annotated[
        bool, typer.Option(help="Look for races, missing fences and uninitialised reads.")
    ] = True,
    sarif: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the hazards there, for CI.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the arrays there as .npy files.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Write what every warp and copy did, in order, for ui.perfetto.dev.",
        ),
    ] = None,
    trace_ctas: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Trace the first N CTAs only.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Run a kernel of yours on the PTX executor and report what it does."""
    plan = override_plan(
        load_plan(launch) if launch else LaunchPlan(),
        kernel=kernel,
        grid=grid,
        block=block,
        cluster=cluster,
        shared=shared,
        arch=arch,
        defines=define or (),
        arguments=arg or (),
    )
    chosen = parse_schedule(schedule)
    numerics = "fast" if fast else "exact"
    ptx = ptx_text(file, plan, gpu)
    first_options = Options(
        schedule=chosen,
        numerics=numerics,
        budget=budget,
        dram=dram,
        hazards=hazards,
        trace=trace is not None,
        trace_ctas=None if trace_ctas is None else range(trace_ctas),
    )
    with busy(f"{file.name}, schedule {schedule_name(chosen)}"):
        run = run_kernel(ptx, plan, gpu, first_options)
    others = [
        Options(schedule=other, numerics=numerics, budget=budget)
        for other in COMPARED_SCHEDULES
        if other != chosen and not once and not run.report.is_broken
    ]
    with busy(f"{file.name}, other schedules"):
        compared = compare_schedules(run, ptx, plan, gpu, others)
    report = run.report
    resources = launch_resources(
        find_gpu(gpu),
        report.kernel,
        math.prod(report.grid),
        math.prod(report.block),
        report.shared_bytes,
        run.kernel,
    )
    _print(run, gpu, schedule_name(chosen), resources, compared, fast, ptx if hazards else None)
    if save is not None:
        _save(run.arrays, save)
    if trace is not None and report.trace is not None:
        chrome.save(report.trace, trace)
        console().print(f"Trace written to {trace}; open it at ui.perfetto.dev.")
    write_json(json_file, _as_json(run, gpu, schedule_name(chosen), resources, compared))
    write_sarif(sarif, report, file)
    if report.errors or any(result.difference for result in compared):
        raise typer.Exit(NOT_HELD)


def _print(
    run: KernelRun,
    gpu: str,
    schedule: str,
    resources: KernelResources,
    compared: list[ScheduleResult],
    fast: bool,
    ptx: str | None,
) -> None:
    out, report = console(), run.report
    out.print(
        f"{report.kernel} on ptx ({gpu}): grid {_extents(report.grid)}, "
        f"block {_extents(report.block)}, schedule {schedule}"
        + (", tensor cores in plain float32" if fast else "")
    )
    out.print(
        f"{report.instructions:,} warp instructions, {report.lane_instructions:,} by lanes; "
        f"{report.seconds:.2f} s on the executor"
    )
    out.print(_traffic_table(report))
    for line in _traffic_lines(report):
        out.print(line)
    print_resources(out, [resources])
    static = run.kernel.static_shared
    out.print(
        f"Shared memory of a CTA: {static:,} B static, {report.shared_bytes - static:,} B dynamic."
    )
    if run.arrays:
        rows = [(name, *summarise(array).cells()) for name, array in run.arrays.items()]
        columns = ("array", "type", "first elements", "NaN", "inf", "min", "max")
        out.print(
            table("Arrays after the launch", columns, rows, numbers=(3, 4, 5, 6), wrap=(1, 2))
        )
    if report.output:
        out.print("Output of printf:")
        out.out(report.output, end="" if report.output.endswith("\n") else "\n")
        out.print()
    if ptx is not None:
        print_hazards(out, report, ptx)
    _print_verdict(out, schedule, compared)


def _print_verdict(out: Any, schedule: str, compared: list[ScheduleResult]) -> None:
    different = [result for result in compared if result.difference]
    for result in different:
        out.print(
            f"depends on the schedule: {result.schedule} against {schedule}: {result.difference}",
            style="bold red",
        )
    if compared and not different:
        names = ", ".join([schedule, *(result.schedule for result in compared)])
        out.print(f"Schedule independent: {names} give the same bits.")


def _traffic_table(report: Report) -> Any:
    assert report.traffic is not None  # the executor always counts
    return table(
        "Traffic",
        ("tensor", "direction", "requested", "sectors", "efficiency"),
        [
            (
                row.tensor,
                row.direction,
                f"{row.requested:,} B",
                f"{row.sectors:,} B",
                f"{row.requested / row.sectors:.0%}" if row.sectors else "",
            )
            for row in report.traffic.tensors
        ],
        numbers=(2, 3, 4),
    )


def _traffic_lines(report: Report) -> list[str]:
    traffic = report.traffic
    assert traffic is not None
    shared = traffic.shared
    lines = [
        f"Shared memory: {shared.instructions:,} accesses, {shared.wavefronts:,} wavefronts, "
        f"{shared.ideal:,} without conflicts: {shared.conflicts:,} bank conflicts."
    ]
    if traffic.local_bytes:
        lines.append(f"Local memory: {bytes_text(traffic.local_bytes)} (registers spilled).")
    if traffic.dram_read is not None and traffic.dram_write is not None:
        lines.append(
            f"DRAM: {bytes_text(traffic.dram_read)} read, {bytes_text(traffic.dram_write)} written."
        )
    return lines


def _extents(extents: tuple[int, int, int]) -> str:
    return "×".join(map(str, extents))


def _save(arrays: dict[str, Array], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        # bfloat16 and fp8 have no name in NumPy's format; bytes of their size come back as such.
        storable = array.dtype.kind in "iuf" and array.dtype.isbuiltin == 1
        np.save(folder / f"{name}.npy", array if storable else array.view(f"V{array.itemsize}"))
    console().print(f"{len(arrays)} arrays written to {folder}.")


def _as_json(
    run: KernelRun,
    gpu: str,
    schedule: str,
    resources: KernelResources,
    compared: list[ScheduleResult],
) -> dict[str, Any]:
    return {
        "gpu": gpu,
        "schedule": schedule,
        "report": replace(run.report, trace=None),
        "resources": resources,
        "arrays": {name: summarise(array) for name, array in run.arrays.items()},
        "schedules": compared,
    }
