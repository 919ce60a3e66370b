"""``simkit run`` of a study: an experiment's table, beside the published one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from simkit.algorithms.fp8_error_study import (
    OUTLIER_DEVIATION,
    OUTLIER_PROBABILITY,
    fp8_error_study,
)
from simkit.cli.output import busy, console, table, write_json
from simkit.cli.settings import Setting, parse_settings, settings_text

_NAME = "fp8_error_study"


def run_study(settings: Sequence[str], seed: int, json_file: Path | None) -> None:
    """Runs FlashAttention-3's error experiment and prints its RMSE beside the paper's.

    ``seed``: that of the inputs, unless the settings have one.
    """
    known = (
        Setting("n", 8192, "queries and keys"),
        Setting("d", 128, "head dimension, 64, 128 or 256"),
        Setting("ordinary", 512, "queries without outliers that are computed"),
        Setting("seed", seed, "of the random inputs", least=0),
    )
    values = parse_settings(_NAME, known, settings)
    with busy(_NAME):
        found = fp8_error_study(**values)
    out = console()
    out.print(f"{_NAME}: {settings_text(values)}")
    out.print(
        f"Entries are N(0, 1), and with probability {OUTLIER_PROBABILITY} N(0, "
        f"{OUTLIER_DEVIATION**2:.0f}) is added. {found.computed} queries are computed: all with "
        f"an outlier, and ordinary ones that stand for the rest."
    )
    out.print(
        table(
            "RMSE against float64",
            ("method", "here", "published", "ratio"),
            [
                (row.method, f"{row.rmse:.2e}", f"{row.published:.1e}", f"{row.ratio:.2f}")
                for row in found.rows
            ],
            numbers=(1, 2, 3),
        )
    )
    out.print(
        f"The output's own root mean square is {found.output_rms:.3g}. Published: "
        "FlashAttention-3, arXiv 2407.08608, which does not state the shape."
    )
    write_json(json_file, {"algorithm": _NAME, "settings": values} | asdict(found))


STUDIES: dict[str, Callable[[Sequence[str], int, Path | None], None]] = {_NAME: run_study}
"""What ``simkit run`` does for each study of the catalogue: settings, seed, JSON file."""
