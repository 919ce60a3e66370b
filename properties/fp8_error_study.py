"""Law of FlashAttention-3's error experiment: the paper's errors, from the roundings alone."""

from __future__ import annotations

from properties.law import Context, Law, LawViolation
from simkit.algorithms.fp8_error_study import fp8_error_study

TOLERANCE = 0.25
"""By how much an RMSE may differ from the published one, whose shape and seed are unknown: from one
seed to another it differs by 10 % (fp8 with rotation) to 20 % (the others)."""


def check_published(context: Context, case: None) -> None:
    rows = fp8_error_study().rows
    off = [row for row in rows if abs(row.ratio - 1) > TOLERANCE]
    if off:
        raise LawViolation(
            "; ".join(
                f"{row.method.strip()}: RMSE {row.rmse:.2e}, published {row.published:.1e}"
                for row in off
            )
        )


LAWS = [
    Law(
        algorithm="fp8_error_study",
        name="published",
        tier="statistical",
        statement=f"the RMSE of every method is within {TOLERANCE:.0%} of the published one",
        check=check_published,
        uses_device=False,
    )
]
