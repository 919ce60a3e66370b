"""Cascade attention: keys that all requests share, then those of halves of them, of quarters."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpu.kernels import cascade_attention as host
from simkit.algorithms.batch_problem import BatchProblem, batch_flops, batch_reference
from simkit.algorithms.cascade_attention import Level, cascade_attention, flat_problem
from simkit.algorithms.variant import Variant
from simkit.cli.settings import Lengths, Setting, Values, by_request, parse_settings
from simkit.cli.subjects.batch import PAGED, beside_naive, outputs
from simkit.cli.subjects.planned import (
    SPLIT,
    TILE_Q,
    PlannedBatch,
    merge_launch,
    multiplications,
    plan_launch,
    planned,
)
from simkit.cli.subjects.requests import (
    CAUSAL,
    HEADS,
    HND,
    PAGE_SIZE,
    SINK,
    SOFT_CAP,
    V_DIM,
    Draw,
    in_pages,
    length_setting,
    page_order,
    pages,
    shorter,
    sinks,
    smaller_batch,
    vectors,
)
from simkit.cli.subjects.subject import (
    Array,
    LaunchShape,
    Subject,
    Workload,
    on_one_machine,
    on_tensor_cores,
)
from simkit.layouts.ragged import Ragged
from simkit.layouts.tables import Int64Array
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine
from simkit.schedules import batch_timeline

_KERNEL = "batch_prefill_paged"  # of each level


def _workload(gpu: Gpu, values: Values, seed: int | None) -> Workload:
    q_lens, own = by_request(values, "q_len", "kv_len")
    requests = np.arange(len(q_lens))
    shared = [
        ([len(part) for part in np.array_split(requests, min(2**number, len(requests)))], length)
        for number, length in enumerate(values["prefix"])
    ]
    # Of each level: how many neighbouring requests share keys, and how many keys.
    shapes = [(sizes, np.full(len(sizes), length)) for sizes, length in shared]
    shapes.append(([1] * len(requests), own))
    levels = []
    for number, (sizes, kv_lens) in enumerate(shapes):
        lens = np.add.reduceat(q_lens, np.cumsum([0, *sizes[:-1]]))
        problem = _level(values, seed, number, lens, kv_lens, number == len(shapes) - 1)
        levels.append(Level(problem, planned(gpu, values, problem)))
    return Workload(tuple(levels))


def _level(
    values: Values,
    seed: int | None,
    number: int,
    q_lens: Int64Array,
    kv_lens: Int64Array,
    is_last: bool,
) -> BatchProblem:
    queries, draw = Ragged.from_lengths(q_lens), Draw(seed, number + 1)
    rows, content = pages(values, kv_lens)
    k, v = (
        in_pages(draw, values, rows, x, content) for x, _ in vectors(draw, values, content.size)
    )
    return BatchProblem(
        q=Draw(seed)((queries.total, values["heads"], values["d"])),
        k=k,
        v=v,
        queries=queries,
        keys=rows,
        order=page_order(values),
        variant=Variant(
            causal=is_last and values["causal"],
            soft_cap=values["soft_cap"],
            sinks=sinks(values) if is_last else None,
        ),
    )


def _planned(work: Workload) -> list[PlannedBatch]:
    return [PlannedBatch(level.problem, level.plan) for level in work.data]


def _model(machine: Machine, work: Workload) -> Mapping[str, Array]:
    return outputs(cascade_attention(machine, work.data))


def _reference(work: Workload) -> Mapping[str, Array]:
    o, lse = batch_reference(flat_problem(work.data))
    return {"o": o, "lse": lse}


def _smaller(values: Values) -> Values:
    """Prefixes are lengths, too, but not of requests."""
    smaller = shorter(values, "prefix", "q_len", "kv_len")
    return smaller_batch(values, "q_len", "kv_len") if smaller == values else smaller


def _launches(work: Workload) -> tuple[LaunchShape, ...]:
    levels = [
        plan_launch(_KERNEL, level, f"level {number}")
        for number, level in enumerate(_planned(work))
        if level.plan.grid
    ]
    return (*levels, merge_launch(work.data[0].problem))


def _beside(values: Values) -> Mapping[str, Values | str]:
    """The same attention without a cascade: prefixes before each request's keys, those of all
    requests in the same pages.
    """
    before = sum(values["prefix"])
    flat = {
        **parse_settings(_KERNEL, PAGED, ()),
        **{name: value for name, value in values.items() if name != "prefix"},
        "kv_len": Lengths(before + length for length in values["kv_len"]),
        "prefix": values["prefix"][0],
    }
    return {_KERNEL: flat, **beside_naive(flat)}


_SETTINGS = (
    length_setting("prefix", 1024, "keys that all requests share, then halves of them, quarters"),
    length_setting("kv_len", 64, "keys of each request's own"),
    length_setting("q_len", 1, "queries of each request"),
    Setting("batch", 16, "requests, where lengths are one number"),
    *HEADS,
    V_DIM,
    PAGE_SIZE,
    HND,
    CAUSAL,
    SOFT_CAP,
    SINK,
    SPLIT,
    TILE_Q,
)

CASCADE_SUBJECTS = (
    Subject(
        name="cascade_attention",
        settings=_SETTINGS,
        workload=_workload,
        model=on_one_machine(_model),
        kernel=lambda device, work: host.cascade_attention(device, work.data),
        reference=_reference,
        flops=lambda work: sum(batch_flops(level.problem) for level in work.data),
        multiplications=lambda work: sum(multiplications(level) for level in _planned(work)),
        smaller=_smaller,
        launches=_launches,
        trace=lambda gpu, work: batch_timeline.cascade_attention(gpu, work.data),
        units=on_tensor_cores,
        beside=_beside,
    ),
)
