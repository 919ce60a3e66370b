"""Laws of attention of ragged queries to K and V in pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gpu.device import Device
from gpu.kernels import batch_prefill_paged as host
from gpu.kernels import batch_prefill_ragged as ragged_host
from gpu.kernels.result import KernelResult
from properties.batch_case import BatchCase, batch_cases, batch_expected, batch_outputs
from properties.compare import Expected, bits_equal
from properties.law import Context, Law
from properties.subject import Array, Subject, kernel_laws
from simkit.algorithms.batch_prefill_paged import batch_prefill_paged
from simkit.algorithms.batch_problem import BatchProblem
from simkit.layouts.ragged import Ragged
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine

CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"variant": "causal", "order": "HND"},
    {"variant": "causal", "window": True, "tile_q": 16, "index_bits": 64},
    {"variant": "causal+soft_cap", "element": "f16", "tile_q": 16, "order": "HND"},
    {"variant": "custom_mask", "tile_q": 16},
    {"variant": "causal+rope+sink", "tile_q": 16},
    {"variant": "causal", "kv": "e4m3", "order": "HND", "tile_q": 16},
    {"kv": "e4m3", "element": "f16", "d": 128, "dv": 128, "tile_q": 16},
    {"d": 256, "dv": 64, "tile_q": 16},
)


def _model(machine: Machine, case: BatchCase) -> Mapping[str, Array]:
    return batch_outputs(batch_prefill_paged(machine, case.problem, case.plan))


def _kernel(device: Device, case: BatchCase, source: str | None) -> KernelResult:
    return host.batch_prefill_paged(device, case.problem, case.plan, source=source)


def _expected(gpu: Gpu, case: BatchCase) -> Mapping[str, Expected]:
    return batch_expected(gpu, case, case.plan)


SUBJECT = Subject(
    algorithm="batch_prefill_paged",
    strategy=batch_cases(CONFIGURATIONS),
    case_type=BatchCase,
    corners=(
        # Last pages of one key, of all, and of some; requests without keys, without queries.
        BatchCase(
            q_lens=(5, 0, 23, 3, 2), kv_lens=(97, 50, 128, 0, 1), page_size=16, group=7,
            kv_heads=2, variant="causal", tile_q=16,
        ),
        BatchCase(q_lens=(0, 3), kv_lens=(0, 0), page_size=1),
        # Chunks end within a tile of keys, at other lanes in other cases.
        BatchCase(
            q_lens=(9, 9, 2), kv_lens=(300, 300, 130), page_size=1, shared=True, tile_q=16,
            group=2, variant="causal", split=57,
        ),
        BatchCase(
            q_lens=(33,), kv_lens=(300,), page_size=57, data="underflow", seed=2,
            variant="causal", tile_q=16, split=114,
        ),
        BatchCase(
            q_lens=(64, 1, 90), kv_lens=(200, 200, 200), page_size=257, variant="causal",
            window_left=63, split=64, index_bits=64,
        ),
        BatchCase(q_lens=(34,), kv_lens=(1,), page_size=7, variant="causal", data="large"),
        BatchCase(
            q_lens=(20, 9), kv_lens=(140, 66), page_size=29, data="nan", variant="causal",
            tile_q=16, split=58,
        ),
        # Under a CUDA graph: CTAs of the grid have no work.
        BatchCase(
            q_lens=(3, 0, 9), kv_lens=(400, 30, 0), page_size=13, variant="causal", tile_q=16,
            split=0, graph=True,
        ),
        # Each of the other configurations.
        BatchCase(
            q_lens=(20, 9), kv_lens=(141, 66), page_size=5, variant="custom_mask", tile_q=16,
            group=3, split=64,
        ),
        BatchCase(
            q_lens=(20, 9), kv_lens=(140, 66), page_size=16, variant="causal+soft_cap",
            element="f16", tile_q=16, order="HND", kv_heads=2,
        ),
        BatchCase(
            q_lens=(20, 9), kv_lens=(140, 5), page_size=16, variant="causal+rope+sink", tile_q=16,
            group=2, split=64,
        ),
        BatchCase(
            q_lens=(20, 9), kv_lens=(140, 66), page_size=3, variant="causal", kv="e4m3",
            order="HND", tile_q=16, kv_heads=2,
        ),
        BatchCase(
            q_lens=(20,), kv_lens=(140,), page_size=64, kv="e4m3", element="f16", d=128, dv=128,
            tile_q=16,
        ),
        BatchCase(q_lens=(20,), kv_lens=(140,), page_size=7, d=256, dv=64, tile_q=16),
    ),
    large=(
        BatchCase(
            q_lens=(*range(1, 64), 2), kv_lens=(*range(0, 126, 2), 3000), page_size=16,
            variant="causal", tile_q=16, split=0, shared=True,
        ),
    ),
    thorough=BatchCase(
        q_lens=(20, 0, 3), kv_lens=(150, 9, 70), page_size=7, variant="causal", tile_q=16, split=64
    ),
    model=_model,
    kernel=_kernel,
    expected=_expected,
    has_lse=True,
)  # fmt: skip


def check_layouts(context: Context, case: BatchCase) -> None:
    """Paged, with small pages and large ones, in either order, against ragged K and V."""
    split = 64 if case.split >= 0 else -1
    paged = replace(case, split=split, graph=False)
    source = context.sources.get("batch_prefill_paged")
    first = host.batch_prefill_paged(context.device, paged.problem, paged.plan, source=source)
    flat = ragged_problem(paged.problem)
    # The same plan: chunks of so many keys, whatever the pages.
    ragged = ragged_host.batch_prefill_ragged(context.device, flat, paged.plan)
    for name, values in ragged.outputs.items():
        bits_equal(f"paged against ragged: {name}", values, first.outputs[name])
    other = replace(
        paged, page_size=paged.page_size * 2 + 1, order="HND" if paged.order == "NHD" else "NHD"
    )
    again = host.batch_prefill_paged(context.device, other.problem, paged.plan, source=source)
    for name, values in first.outputs.items():
        bits_equal(f"other pages: {name}", values, again.outputs[name])


def ragged_problem(problem: BatchProblem) -> BatchProblem:
    """The same requests with ragged K and V."""
    parts = [problem.gathered(request) for request in range(problem.batch)]
    k, v = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    keys = Ragged.from_lengths(problem.kv_lens, problem.keys.indptr.dtype)
    return replace(problem, k=k, v=v, keys=keys, order="NHD")


LAWS = [
    *kernel_laws(SUBJECT, examples=20),
    Law(
        algorithm="batch_prefill_paged",
        name="layouts",
        tier="exact",
        statement="pages of any size, place and order, and no pages at all, give the same bits",
        check=check_layouts,
        strategy=SUBJECT.strategy,
        case_type=BatchCase,
        corners=SUBJECT.corners[:1],
        examples=5,
    ),
]
