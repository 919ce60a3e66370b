"""A law about the error bounds themselves: never violated, and not idle either."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from properties.compare import Array, Expected, tightness, within
from properties.data import KINDS
from properties.law import Context, Law, LawViolation
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine

FACTOR = 50
"""How much larger than the largest error a bound may be, in most ordinary cases."""


@dataclass(frozen=True)
class BatchCase:
    """A batch of problems: ``ordinary`` ones of normal values, and one of each other kind."""

    ordinary: int = 6
    seed: int = 0


def quality_law(
    algorithm: str,
    draw: Callable[[np.random.Generator, str], Any],
    model: Callable[[Machine, Any], Mapping[str, Array]],
    expected: Callable[[Gpu, Any], Mapping[str, Expected]],
) -> Law:
    """The law for an algorithm whose ``model`` gives the kernel's bits.

    ``draw(rng, kind)`` gives a case with values of that kind (properties.data).
    """

    def check(context: Context, batch: BatchCase) -> None:
        rng = np.random.default_rng(batch.seed)
        kinds = ["normal"] * batch.ordinary + [kind for kind in KINDS if kind != "normal"]
        found: dict[str, list[float]] = {}
        for kind in kinds:
            case = draw(rng, kind)
            outputs = model(context.machine("device"), case)
            for name, one in expected(context.gpu, case).items():
                within(
                    f"{name} of {case}", outputs[name], one.value, one.bound, one.reason, one.where
                )
                if kind == "normal":
                    found.setdefault(name, []).append(tightness(outputs[name], one))
        for name, ratios in found.items():
            close = sum(ratio >= 1 / FACTOR for ratio in ratios)
            if 2 * close < len(ratios):
                listed = ", ".join(f"{ratio:.2g}" for ratio in sorted(ratios))
                raise LawViolation(
                    f"{name}: the largest error is less than 1/{FACTOR} of its bound in "
                    f"{len(ratios) - close} of {len(ratios)} ordinary cases: {listed}"
                )

    return Law(
        algorithm=algorithm,
        name="bound_quality",
        tier="bounded",
        statement=f"no error exceeds its bound, which most errors come within a factor {FACTOR} of",
        check=check,
        strategy=st.builds(BatchCase, seed=st.integers(0, 2**16 - 1)),
        case_type=BatchCase,
        corners=(BatchCase(),),
        examples=3,
        uses_device=False,
    )
