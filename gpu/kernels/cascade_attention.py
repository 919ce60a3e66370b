"""Host side of cascade attention: batch_prefill_paged.cu for each level, then merge_states.cu."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu.counters import Report
from gpu.device import Device
from gpu.kernels.batch_attention import empty_states, merge, run_plan
from gpu.kernels.result import KernelResult
from simkit.algorithms.cascade_attention import Level, check_levels, state_rows


def cascade_attention(
    device: Device, levels: Sequence[Level], *, source: str | None = None
) -> KernelResult:
    """Attention of every query to its keys of all levels; outputs and errors as `run_batch`.

    Every level writes its states into one workspace, where those of a query lie side by side, so
    that one launch merges levels and chunks alike.
    """
    check_levels(levels)
    first = levels[0].problem
    rows = (first.rows, first.heads)
    places = state_rows(levels)
    outputs = {
        "o": device.empty((*rows, first.dv), first.q.dtype, name="o"),
        "lse": device.empty(rows, np.float32, name="lse"),
        **empty_states(device, first, int(places.merge_indptr[-1])),
    }
    reports: list[Report] = []
    for number, level in enumerate(levels):
        reports += run_plan(
            device, "batch_prefill_paged", level.problem, level.plan, outputs,
            state_rows=places.rows[number], suffix=f"_{number}", source=source,
        )  # fmt: skip
    if first.rows:
        reports.append(merge(device, outputs, places.merge_indptr))
    return KernelResult({name: array.to_numpy() for name, array in outputs.items()}, reports)
