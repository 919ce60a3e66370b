"""Merging attention states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu.device import Device
from gpu.kernels import merge_states as host
from gpu.kernels.result import KernelResult
from simkit.algorithms.elements import BF16, F16, F32
from simkit.algorithms.merge_states import merge_reference, merge_states
from simkit.algorithms.tiles import tile_count
from simkit.cli.settings import Setting, Values
from simkit.cli.subjects.requests import Draw
from simkit.cli.subjects.subject import (
    Array,
    LaunchShape,
    Subject,
    Workload,
    not_attention,
    on_fp32_lanes,
    on_one_machine,
)
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine
from simkit.machine.memory import unbacked
from simkit.schedules import merge_timeline
from traces.events import Trace

_TYPES = {"float32": F32, "bfloat16": BF16, "float16": F16}
_LSE_SPREAD = 4.0


@dataclass(frozen=True, eq=False)
class _States:
    """``o`` [rows, states, heads, d], ``lse`` [rows, states, heads], and the type of the merged."""

    o: Array
    lse: Array
    output: np.dtype[Any]


def _workload(gpu: Gpu, values: Values, seed: int | None) -> Workload:
    lse_shape = tuple(values[name] for name in ("rows", "states", "heads"))
    shape, state = (*lse_shape, values["d"]), _TYPES[values["state"]]
    if seed is None:
        o, lse = unbacked(shape, state), unbacked(lse_shape, F32)
    else:
        o = Draw(seed)(shape).astype(state)
        spread = np.random.default_rng([seed, 1]).standard_normal(lse_shape, np.float32)
        lse = spread * np.float32(_LSE_SPREAD)
    return Workload(_States(o, lse, _TYPES[values["output"]]))


def _model(machine: Machine, work: Workload) -> Mapping[str, Array]:
    states = work.data
    merged = merge_states(machine, states.o, states.lse, dtype=states.output)
    return {"o": merged.o, "lse": merged.lse}


def _kernel(device: Device, work: Workload) -> KernelResult:
    states = work.data
    return host.merge_states(device, states.o, states.lse, dtype=states.output)


def _reference(work: Workload) -> Mapping[str, Array]:
    merged = merge_reference(*(x.swapaxes(1, 2) for x in (work.data.o, work.data.lse)))
    return {"o": merged.o, "lse": merged.lse}


def _launches(work: Workload) -> tuple[LaunchShape, ...]:
    states = work.data
    rows, _, heads, d = states.o.shape
    ctas = tile_count(rows * heads, host.PAIRS_PER_CTA)
    types = {"state": states.o.dtype, "output": states.output}
    return (
        LaunchShape(
            "merge_states", ctas, host.THREADS, lambda device: host.build(device, d, **types)
        ),
    )


def _trace(gpu: Gpu, work: Workload) -> Trace:
    states = work.data
    rows, count, heads, d = states.o.shape
    sizes = {"state_bytes": states.o.itemsize, "output_bytes": states.output.itemsize}
    return merge_timeline.merge_states(gpu, rows * heads, count, d, **sizes)


def _type(name: str, default: str, help: str) -> Setting:
    return Setting(name, default, help, kind="word", choices=tuple(_TYPES))


MERGE_SUBJECTS = (
    Subject(
        name="merge_states",
        settings=(
            Setting("rows", 256, "queries"),
            Setting("states", 4, "states of each query and head", least=0),
            Setting("heads", 8, "heads"),
            Setting("d", 128, "head dimension, a multiple of 64 up to 1024"),
            _type("state", "float32", "type of what is merged: float32, bfloat16 or float16"),
            _type("output", "bfloat16", "type of the merged"),
        ),
        workload=_workload,
        model=on_one_machine(_model),
        kernel=_kernel,
        reference=_reference,
        flops=lambda work: 2 * work.data.o.size,  # a multiply-add of each value
        multiplications=lambda work: int(work.data.o.size),
        smaller=lambda values: {**values, "rows": max(values["rows"] // 2, 1)},
        launches=_launches,
        trace=_trace,
        units=on_fp32_lanes,
        beside=not_attention,
    ),
)
