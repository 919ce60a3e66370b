"""Laws of attention of ragged queries to ragged K and V."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from gpu.device import Device
from gpu.kernels import batch_prefill_ragged as host
from gpu.kernels import flash_attention as flash_host
from gpu.kernels.result import KernelResult
from properties.attention_case import AttentionCase
from properties.batch_case import BatchCase, batch_cases, batch_expected, batch_outputs
from properties.bound_quality import quality_law
from properties.compare import Expected, bits_equal
from properties.data import KINDS
from properties.law import Context, Law
from properties.subject import Array, Subject, kernel_laws
from simkit.algorithms.batch_prefill_ragged import batch_prefill_ragged
from simkit.algorithms.batch_problem import BatchProblem
from simkit.algorithms.variant import Variant
from simkit.layouts import custom_mask
from simkit.layouts.ragged import Ragged
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine
from simkit.planning.prefill import prefill_plan

CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"variant": "causal", "tile_q": 16},
    {"variant": "causal", "window": True},
    {"variant": "causal+soft_cap", "element": "f16", "tile_q": 16},
    {"variant": "alibi", "tile_q": 16, "index_bits": 64},
    {"variant": "custom_mask", "tile_q": 16},
    {"variant": "causal+sink", "window": True, "tile_q": 16},
    {"variant": "causal+rope"},
    {"variant": "causal", "kv": "e4m3"},
    {"variant": "damped", "tile_q": 16},
    {"variant": "causal+custom_mask+soft_cap+sink+rope", "kv": "e4m3", "tile_q": 16},
    {"d": 128, "dv": 64, "element": "f16"},
    {"d": 64, "dv": 128, "tile_q": 16},
    {"d": 256, "dv": 256, "tile_q": 16},
)


def _model(machine: Machine, case: BatchCase) -> Mapping[str, Array]:
    return batch_outputs(batch_prefill_ragged(machine, case.problem, case.plan))


def _kernel(device: Device, case: BatchCase, source: str | None) -> KernelResult:
    return host.batch_prefill_ragged(device, case.problem, case.plan, source=source)


def _expected(gpu: Gpu, case: BatchCase) -> Mapping[str, Expected]:
    return batch_expected(gpu, case, case.plan)


SUBJECT = Subject(
    algorithm="batch_prefill_ragged",
    strategy=batch_cases(CONFIGURATIONS, paged=False),
    case_type=BatchCase,
    corners=(
        # Requests without queries, without keys, without both; more queries than keys; a partial
        # tile; groups that are no power of two.
        BatchCase(
            q_lens=(5, 0, 23, 3, 0, 20), kv_lens=(100, 50, 130, 0, 0, 7), group=7, kv_heads=2,
            variant="causal", tile_q=16,
        ),
        BatchCase(q_lens=(0,), kv_lens=(0,)),
        # Chunks that only some rows see, and chunks that none does.
        BatchCase(
            q_lens=(40, 3), kv_lens=(300, 129), group=2, variant="causal+sink", tile_q=16, split=64,
        ),
        BatchCase(
            q_lens=(64, 1, 90), kv_lens=(200, 200, 200), variant="causal", window_left=63, split=64,
        ),
        # Under a CUDA graph: CTAs of the grid have no work.
        BatchCase(
            q_lens=(3, 0, 9), kv_lens=(400, 30, 0), variant="causal", tile_q=16, split=0,
            graph=True,
        ),
        BatchCase(q_lens=(34,), kv_lens=(1,), variant="causal", data="large"),
        BatchCase(q_lens=(20, 9), kv_lens=(140, 66), variant="custom_mask", tile_q=16, group=3),
        # Chunks end within a tile of keys, at other lanes in each of these cases.
        BatchCase(
            q_lens=(20, 9), kv_lens=(140, 66), data="minus_inf", variant="causal", tile_q=16,
            split=53,
        ),
        BatchCase(q_lens=(9,), kv_lens=(130,), variant="causal", tile_q=16, split=57, group=3),
        BatchCase(q_lens=(9,), kv_lens=(130,), variant="causal", tile_q=16, split=58),
        BatchCase(
            q_lens=(33,), kv_lens=(300,), data="underflow", seed=2, variant="causal", tile_q=16,
            split=114,
        ),
        BatchCase(q_lens=(20, 9), kv_lens=(140, 66), data="nan"),
        BatchCase(q_lens=(20, 9), kv_lens=(140, 66), variant="causal+rope", kv="e4m3", tile_q=16),
        BatchCase(q_lens=(20, 9), kv_lens=(140, 66), variant="damped", split=64, tile_q=16),
        # Each of the other configurations.
        BatchCase(
            q_lens=(20, 9), kv_lens=(140, 66), variant="causal+soft_cap", element="f16", tile_q=16,
            kv_heads=2,
        ),
        BatchCase(
            q_lens=(20, 9), kv_lens=(140, 5), variant="alibi", index_bits=64, tile_q=16, group=2,
            kv_heads=2,
        ),
        BatchCase(
            q_lens=(20, 9), kv_lens=(141, 66), variant="causal+custom_mask+soft_cap+sink+rope",
            kv="e4m3", tile_q=16, group=3, split=64,
        ),
        BatchCase(q_lens=(20, 9), kv_lens=(140, 66), d=128, dv=64, element="f16"),
        BatchCase(q_lens=(20, 9), kv_lens=(140, 66), d=64, dv=128, tile_q=16, kv_heads=2),
        BatchCase(q_lens=(20,), kv_lens=(140,), d=256, dv=256, tile_q=16),
    ),
    large=(
        # A batch as engines have it: 64 requests, one of them long.
        BatchCase(
            q_lens=(*range(1, 64), 2), kv_lens=(*range(0, 126, 2), 3000), variant="causal",
            tile_q=16, split=0,
        ),
    ),
    thorough=BatchCase(
        q_lens=(20, 0, 3), kv_lens=(150, 9, 70), variant="causal", tile_q=16, split=64
    ),
    model=_model,
    kernel=_kernel,
    expected=_expected,
    has_lse=True,
    uncounted=frozenset({"variant_values"}),
)  # fmt: skip


def check_alone(context: Context, case: BatchCase) -> None:
    """Each request of a batch against itself alone: without splits by the planner's choice the bits
    are the same.
    """
    fixed = replace(case, split=64 if case.split >= 0 else -1, graph=False)
    whole = SUBJECT.run_kernel(context, fixed).outputs
    problem = fixed.problem
    for request in range(problem.batch):
        own, keys = problem.queries.rows(request), problem.keys.rows(request)  # type: ignore[union-attr]
        if own.start == own.stop:
            continue
        alone = _slice(problem, request, own, keys)
        plan = prefill_plan(
            alone.queries.indptr, alone.kv_lens, group=alone.group, kv_heads=alone.kv_heads,
            head_dim_v=alone.dv, sm_count=1, window_left=alone.variant.window_left,
            causal=alone.variant.causal, tile_q=fixed.tile_q,
            **({"fixed_split": 64} if fixed.split > 0 else {"disable_split": True}),
        )  # fmt: skip
        source = context.sources.get("batch_prefill_ragged")
        # A lone state is stored as it is: merged states of one chunk are, too.
        found = host.batch_prefill_ragged(context.device, alone, plan, source=source).outputs
        for name in ("o", "lse"):
            bits_equal(f"request {request} alone: {name}", whole[name][own], found[name])


def _slice(problem: BatchProblem, request: int, own: slice, keys: slice) -> BatchProblem:
    lens = problem.queries.lens[request : request + 1]
    mask = problem.variant.custom_mask
    variant = problem.variant
    if mask is not None:
        variant = replace(variant, custom_mask=custom_mask.pack([mask.mask(request)]))
    return replace(
        problem,
        q=np.ascontiguousarray(problem.q[own]),
        k=np.ascontiguousarray(problem.k[keys]),
        v=np.ascontiguousarray(problem.v[keys]),
        queries=Ragged.from_lengths(lens),
        keys=Ragged.from_lengths(problem.kv_lens[request : request + 1]),
        variant=variant,
    )


NEAT_CASES = st.builds(
    AttentionCase,
    q_len=st.sampled_from((1, 63, 64, 65, 100)),
    kv_len=st.sampled_from((0, 1, 64, 130, 200)),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    d=st.sampled_from((64, 128)),
    causal=st.booleans(),
    data=st.sampled_from(KINDS),
    seed=st.integers(0, 2**16 - 1),
)


def check_flash_attention(context: Context, case: AttentionCase) -> None:
    """Requests of one length, heads that share nothing: the bits of the flash_attention kernel."""
    neat = case.problem()
    dense = flash_host.flash_attention(
        context.device, neat.q, neat.k, neat.v, causal=neat.causal
    ).outputs
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (neat.q, neat.k, neat.v))
    problem = BatchProblem(
        q=q,
        k=k,
        v=v,
        queries=Ragged.from_lengths(np.full(neat.batch, neat.q_len)),
        keys=Ragged.from_lengths(np.full(neat.batch, neat.kv_len)),
        variant=Variant(causal=neat.causal),
    )
    plan = prefill_plan(
        problem.queries.indptr, problem.kv_lens, group=1, kv_heads=problem.kv_heads,
        head_dim_v=problem.dv, sm_count=1, causal=neat.causal, tile_q=64, disable_split=True,
    )  # fmt: skip
    source = context.sources.get("batch_prefill_ragged")
    found = host.batch_prefill_ragged(context.device, problem, plan, source=source).outputs
    bits_equal("o", dense["o"].reshape(found["o"].shape), found["o"])
    by_row = dense["lse"].swapaxes(1, 2).reshape(found["lse"].shape)
    bits_equal("lse", np.ascontiguousarray(by_row), found["lse"])


def _draw(rng: np.random.Generator, kind: str) -> BatchCase:
    q_lens, kv_lens = (tuple(int(n) for n in rng.integers(1, most, 3)) for most in (30, 200))
    return BatchCase(
        q_lens=q_lens,
        kv_lens=kv_lens,
        kv_heads=2,
        group=int(rng.integers(1, 4)),
        element=str(rng.choice(("bf16", "f16"))),
        kv=str(rng.choice(("same", "e4m3"))),
        variant=str(rng.choice(("causal", "soft_cap", "alibi+sink", "causal+rope"))),
        tile_q=int(rng.choice((16, 64))),
        split=int(rng.choice((-1, 64))),
        data=kind,
        seed=int(rng.integers(2**16)),
    )


LAWS = [
    *kernel_laws(SUBJECT, examples=30),
    quality_law("batch_prefill_ragged", _draw, _model, _expected),
    Law(
        algorithm="batch_prefill_ragged",
        name="alone",
        tier="exact",
        statement="a request in a batch has the bits that it has alone, for the same chunks",
        check=check_alone,
        strategy=SUBJECT.strategy,
        case_type=BatchCase,
        corners=SUBJECT.corners[:1],
        examples=4,
    ),
    Law(
        algorithm="batch_prefill_ragged",
        name="flash_attention",
        tier="exact",
        statement="on requests of one length it has the bits of the flash_attention kernel",
        check=check_flash_attention,
        strategy=NEAT_CASES,
        case_type=AttentionCase,
        corners=(AttentionCase(q_len=65, kv_len=130, causal=True, kv_heads=2, batch=2),),
        examples=6,
    ),
]
