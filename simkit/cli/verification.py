"""What ``verify`` and ``fuzz`` share: choosing laws and a device, and reporting results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

import gpu as gpu_package
from properties import catalog
from properties.law import CheckResult, Context, Law
from properties.user_variant import load_variant, variant_laws
from simkit.cli.output import status_text, table
from simkit.errors import SimkitError
from simkit.machine.gpus import gpu as find_gpu


def choose_laws(
    algorithms: Sequence[str], name: str | None, variant: Path | None = None
) -> list[Law]:
    """The laws of the algorithms, by default of all; only those called ``name`` if it is given.

    ``variant``: the laws of a user's variant of attention instead, in the kernels that take it.
    """
    laws: dict[str, list[Law]] = {}
    if variant is None:
        laws = {algorithm: catalog.laws(algorithm) for algorithm in catalog.algorithms()}
    else:
        for law in variant_laws(load_variant(variant)):
            laws.setdefault(law.algorithm, []).append(law)
    known = list(laws)
    for algorithm in algorithms:
        if algorithm not in known:
            raise SimkitError(f"no algorithm {algorithm!r} with laws; there are {', '.join(known)}")
    chosen = [law for algorithm in dict.fromkeys(algorithms or known) for law in laws[algorithm]]
    if name is None:
        return chosen
    named = [law for law in chosen if law.name == name]
    if not named:
        names = dict.fromkeys(law.name for law in chosen)
        raise SimkitError(f"no law {name!r}; there are {', '.join(names)}")
    return named


def open_context(on: str, gpu: str) -> Context:
    """A device to check laws on, and the GPU that models stand for: the device's if it says."""
    device = gpu_package.open(on, gpu=gpu)
    return Context(device, getattr(device, "gpu", None) or find_gpu(gpu))


def print_results(out: Console, results: Iterable[CheckResult]) -> None:
    """One row for each law, then what failed: message, shrunk case and reproducer."""
    results = list(results)
    out.print(
        table(
            "Laws",
            ("algorithm", "law", "on", "tier", "cases", "time", "status"),
            [
                (
                    result.algorithm,
                    result.law,
                    result.on,
                    result.tier,
                    f"{result.cases:,}",
                    f"{result.seconds:.1f} s",
                    status_text(result.status),
                )
                for result in results
            ],
            numbers=(4, 5),
        )
    )
    for result in results:
        if result.status == "skip":
            out.print(f"skipped: {result.algorithm} {result.law}: {result.detail}")
        if result.status == "fail":
            out.print(f"FAILED {result.algorithm}: {result.law}", style="bold red")
            out.print(f"  {result.detail}")
            # On one line, whatever the width, so that it can be copied.
            out.print(f"  case: {result.case}", soft_wrap=True)
            out.print(f"  repeat: {result.reproducer}", soft_wrap=True)


def print_traffic(out: Console, context: Context) -> None:
    """Predicted and measured bytes of each tensor, over all cases."""
    rows = context.traffic_rows()
    if not rows:
        return
    out.print(
        table(
            "Bytes of sectors over all cases, by model and device",
            ("algorithm", "tensor", "direction", "predicted", "", "measured"),
            [
                (
                    row.algorithm,
                    row.tensor,
                    row.direction,
                    f"{row.predicted:,}",
                    "=" if row.predicted == row.measured else "≠",
                    f"{row.measured:,}",
                )
                for row in rows
            ],
            numbers=(3, 5),
        )
    )


def summary(results: Sequence[CheckResult]) -> str:
    """How many laws held, failed and were skipped, over how many cases."""
    counts = Counter(result.status for result in results)
    parts = [f"{counts['pass']} of {len(results)} laws hold"]
    parts += [f"{counts['fail']} failed"] * bool(counts["fail"])
    parts += [f"{counts['skip']} skipped"] * bool(counts["skip"])
    cases = sum(result.cases for result in results)
    seconds = sum(result.seconds for result in results)
    return f"{', '.join(parts)}; {cases:,} cases in {seconds:.1f} s"


def as_json(context: Context, results: Sequence[CheckResult]) -> dict[str, Any]:
    """Results and traffic as ``--json`` has them."""
    return {
        "device": context.device.name,
        "gpu": context.gpu.name,
        "checks": [asdict(result) for result in results],
        "traffic": [asdict(row) for row in context.traffic_rows()],
    }
