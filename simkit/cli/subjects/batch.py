"""Batches of requests of any lengths: decoding, and queries to paged or ragged K and V."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpu.device import Device
from gpu.kernels import batch_decode as decode_host
from gpu.kernels import batch_prefill_paged as paged_host
from gpu.kernels import batch_prefill_ragged as ragged_host
from gpu.kernels.result import KernelResult
from simkit.algorithms.batch_attention import BatchResult, Units
from simkit.algorithms.batch_decode import batch_decode, decode_tile, decode_units
from simkit.algorithms.batch_prefill_paged import batch_prefill_paged
from simkit.algorithms.batch_prefill_ragged import batch_prefill_ragged
from simkit.algorithms.batch_problem import batch_flops, batch_reference
from simkit.algorithms.problem import KERNEL_HEAD_DIMS
from simkit.cli.settings import Setting, Values, by_request
from simkit.cli.subjects.dense import naive_settings
from simkit.cli.subjects.planned import (
    GRAPH,
    SPLIT,
    TILE_Q,
    UNITS,
    PlannedBatch,
    launches,
    multiplications,
    page_size,
    planned,
)
from simkit.cli.subjects.requests import (
    BATCH,
    CAUSAL,
    FP8,
    HEADS,
    HND,
    PAGE_SIZE,
    PREFIX,
    V_DIM,
    VARIANT,
    batch_problem,
    length_setting,
    smaller_batch,
)
from simkit.cli.subjects.subject import Array, Subject, Workload, on_one_machine
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine
from simkit.planning.decode import decode_plan
from simkit.planning.split_planner import DECODE_CTAS_PER_SM
from simkit.schedules import batch_timeline
from traces.events import Trace

_UNITS: dict[str, Units | None] = {"auto": None, "tensor": "tensor_cores", "cuda": "cuda_cores"}


def outputs(result: BatchResult) -> Mapping[str, Array]:
    """What is compared with float64."""
    return {"o": result.o, "lse": result.lse}


def reference(work: Workload) -> Mapping[str, Array]:
    """By the formula, of a `PlannedBatch`."""
    o, lse = batch_reference(work.data.problem)
    return {"o": o, "lse": lse}


def beside_naive(values: Values) -> Mapping[str, Values | str]:
    """Naive attention on sequences of one length and contiguous K and V, or why it does not fit."""
    return {"naive_attention": _against(values) or naive_settings(_of_one_length(values))}


def _of_one_length(values: Values) -> Values:
    q_lens, kv_lens = by_request({"q_len": (1,), **values}, "q_len", "kv_len")
    return {**values, "batch": len(q_lens), "q_len": int(q_lens[0]), "kv_len": int(kv_lens[0])}


def _against(values: Values) -> str:
    """Why naive attention does not solve the problem; empty if it does."""
    q_lens, kv_lens = by_request({"q_len": (1,), **values}, "q_len", "kv_len")
    differ = len(set(q_lens.tolist())) > 1 or len(set(kv_lens.tolist())) > 1
    variants = [
        name for name in ("soft_cap", "alibi", "sink", "rope", "fp8") if values.get(name, False)
    ]
    variants += ["window"] if values.get("window", -1) >= 0 else []
    reasons = {
        "its sequences have one length": differ,
        "it needs a query": not q_lens.all(),
        f"it knows no {', '.join(variants)}": bool(variants),
        "its K and V have one head dimension": values.get("dv", values["d"]) != values["d"],
        f"its head dimensions are {KERNEL_HEAD_DIMS}": values["d"] not in KERNEL_HEAD_DIMS,
    }
    return "; ".join(reason for reason, is_so in reasons.items() if is_so)


# Decoding


def _decode_workload(gpu: Gpu, values: Values, seed: int | None) -> Workload:
    problem = batch_problem(values, seed)
    units = _UNITS[values["units"]] or decode_units(problem.group)
    if units == "cuda_cores" and values["split"] == 0:
        plan = decode_plan(
            problem.kv_lens,
            group=problem.group,
            kv_heads=problem.kv_heads,
            page_size=page_size(problem),
            max_grid=DECODE_CTAS_PER_SM * gpu.sm_count,
            graph=values["graph"],
        )
    else:
        plan = planned(gpu, values, problem, decode_tile(problem.group, units))
    return Workload(PlannedBatch(problem, plan, units))


def _decode_model(machine: Machine, work: Workload) -> Mapping[str, Array]:
    batch = work.data
    return outputs(batch_decode(machine, batch.problem, batch.plan, batch.units))


def _decode_kernel(device: Device, work: Workload) -> KernelResult:
    batch = work.data
    return decode_host.batch_decode(device, batch.problem, batch.plan, units=batch.units)


def _decode_trace(gpu: Gpu, work: Workload) -> Trace:
    batch = work.data
    return batch_timeline.batch_decode(gpu, batch.problem, batch.plan, batch.units)


# Queries of any number


def _prefill_workload(gpu: Gpu, values: Values, seed: int | None) -> Workload:
    problem = batch_problem(values, seed)
    return Workload(PlannedBatch(problem, planned(gpu, values, problem)))


def _prefill(
    name: str,
    settings: tuple[Setting, ...],
    model: Callable[..., BatchResult],
    kernel: Callable[..., KernelResult],
    trace: Callable[..., Trace],
) -> Subject:
    return Subject(
        name=name,
        settings=settings,
        workload=_prefill_workload,
        model=on_one_machine(
            lambda machine, work: outputs(model(machine, work.data.problem, work.data.plan))
        ),
        kernel=lambda device, work: kernel(device, work.data.problem, work.data.plan),
        reference=reference,
        flops=lambda work: batch_flops(work.data.problem),
        multiplications=lambda work: multiplications(work.data),
        smaller=lambda values: smaller_batch(values, "q_len", "kv_len"),
        launches=lambda work: launches(name, work.data),
        trace=lambda gpu, work: trace(gpu, work.data.problem, work.data.plan),
        units=lambda work: UNITS[work.data.units],
        beside=beside_naive,
    )


_DECODE = (
    length_setting("n", None, "keys", sets=("kv_len",)),
    length_setting("kv_len", 1024, "keys of each request"),
    BATCH,
    *HEADS,
    V_DIM,
    PAGE_SIZE,
    HND,
    PREFIX,
    FP8,
    *VARIANT,
    SPLIT,
    GRAPH,
    Setting(
        "units", "auto", "auto, tensor or cuda cores; auto: cuda without groups", kind="word",
        choices=tuple(_UNITS),
    ),
)  # fmt: skip
_LENGTHS = (
    length_setting("n", None, "both lengths", sets=("q_len", "kv_len")),
    length_setting("q_len", 64, "queries of each request"),
    length_setting("kv_len", 512, "keys of each request"),
)
_RAGGED = (*_LENGTHS, BATCH, *HEADS, V_DIM, FP8, CAUSAL, *VARIANT, SPLIT, GRAPH, TILE_Q)
PAGED = (
    *_LENGTHS, BATCH, *HEADS, V_DIM, PAGE_SIZE, HND, PREFIX, FP8, CAUSAL, *VARIANT, SPLIT, GRAPH,
    TILE_Q,
)  # fmt: skip

BATCH_SUBJECTS = (
    Subject(
        name="batch_decode",
        settings=_DECODE,
        workload=_decode_workload,
        model=on_one_machine(_decode_model),
        kernel=_decode_kernel,
        reference=reference,
        flops=lambda work: batch_flops(work.data.problem),
        multiplications=lambda work: multiplications(work.data),
        smaller=lambda values: smaller_batch(values, "kv_len"),
        launches=lambda work: launches("batch_decode", work.data),
        trace=_decode_trace,
        units=lambda work: UNITS[work.data.units],
        beside=beside_naive,
    ),
    _prefill(
        "batch_prefill_paged",
        PAGED,
        batch_prefill_paged,
        paged_host.batch_prefill_paged,
        batch_timeline.batch_prefill_paged,
    ),
    _prefill(
        "batch_prefill_ragged",
        _RAGGED,
        batch_prefill_ragged,
        ragged_host.batch_prefill_ragged,
        batch_timeline.batch_prefill_ragged,
    ),
)
