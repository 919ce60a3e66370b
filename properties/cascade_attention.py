"""Laws of cascade attention: levels of shared K and V against their model, and against attention
without a cascade.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from gpu.device import Device
from gpu.kernels import batch_prefill_ragged as ragged_host
from gpu.kernels import cascade_attention as host
from gpu.kernels.result import KernelResult
from properties.batch_case import ELEMENTS, PAGE_SIZES, SM_COUNT, batch_outputs
from properties.compare import Expected, within
from properties.data import KINDS, attention_inputs
from properties.law import Context, Law
from properties.subject import Array, Subject, kernel_laws
from simkit.algorithms.batch_bounds import batch_bounds, cascade_bounds
from simkit.algorithms.batch_problem import BatchProblem, batch_reference
from simkit.algorithms.cascade_attention import Level, cascade_attention, flat_problem
from simkit.algorithms.variant import Variant
from simkit.layouts.paged import random_cache, random_rows
from simkit.layouts.ragged import Ragged
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine
from simkit.planning.prefill import prefill_plan


@dataclass(frozen=True)
class CascadeCase:
    """Requests with ``q_lens`` queries; ``groups`` says for every level how many neighbouring
    requests share each of its prefixes, ``kv_lens`` how many keys each prefix has. The last level's
    groups are ones, as a rule.
    """

    q_lens: tuple[int, ...] = (1, 1, 1, 1)
    groups: tuple[tuple[int, ...], ...] = ((4,), (1, 1, 1, 1))
    kv_lens: tuple[tuple[int, ...], ...] = ((100,), (20, 1, 64, 7))
    kv_heads: int = 1
    group: int = 1
    d: int = 64
    element: str = "bf16"
    page_size: int = 16
    variant: str = "causal"
    tile_q: int = 16
    split: int = -1
    data: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "q_lens", tuple(self.q_lens))
        for name in ("groups", "kv_lens"):
            object.__setattr__(self, name, tuple(tuple(level) for level in getattr(self, name)))

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        heads = self.kv_heads * self.group
        totals = [sum(level) for level in self.kv_lens]
        q, k, v = (
            x[0].astype(np.float32).astype(ELEMENTS[self.element])
            for x in attention_inputs(
                self.data, self.seed, (1, sum(self.q_lens), heads, self.d),
                (1, sum(totals), self.kv_heads, self.d),
            )
        )  # fmt: skip
        pages, numbers = np.random.default_rng(self.seed).spawn(2)
        sinks = numbers.normal(0, 3, heads).astype(np.float32)
        found: list[Level] = []
        start = 0
        for number, (groups, kv_lens) in enumerate(zip(self.groups, self.kv_lens, strict=True)):
            is_last = number == len(self.groups) - 1
            own = slice(start, start + totals[number])
            start = own.stop
            edges = np.cumsum((0, *groups))
            lens = np.add.reduceat((*self.q_lens, 0), edges[:-1])
            keys = random_rows(
                pages, Ragged.from_lengths(np.array(kv_lens)), page_size=self.page_size
            )
            problem = BatchProblem(
                q=q,
                k=random_cache(pages, keys, k[own]).values,
                v=random_cache(pages, keys, v[own]).values,
                queries=Ragged.from_lengths(lens),
                keys=keys,
                variant=Variant(
                    causal=is_last and "causal" in self.variant,
                    soft_cap=15.0 if "soft_cap" in self.variant else 0.0,
                    sinks=sinks if is_last and "sink" in self.variant else None,
                ),
            )
            found.append(Level(problem, self._plan(problem)))
        return tuple(found)

    def _plan(self, problem: BatchProblem) -> Any:
        sizes: dict[str, Any] = {"disable_split": True} if self.split < 0 else {}
        if self.split > 0:
            sizes = {"fixed_split": -(-self.split // self.page_size) * self.page_size}
        return prefill_plan(
            problem.queries.indptr, problem.kv_lens, group=self.group, kv_heads=self.kv_heads,
            head_dim_v=self.d, page_size=self.page_size, sm_count=SM_COUNT,
            causal=problem.variant.causal, tile_q=self.tile_q, **sizes,
        )  # fmt: skip


def _model(machine: Machine, case: CascadeCase) -> Mapping[str, Array]:
    return batch_outputs(cascade_attention(machine, case.levels))


def _kernel(device: Device, case: CascadeCase, source: str | None) -> KernelResult:
    return host.cascade_attention(device, case.levels, source=source)


@st.composite
def cascade_cases(draw: st.DrawFn) -> CascadeCase:
    """One to four levels over up to twelve requests; prefixes without keys among them."""
    requests = draw(st.integers(1, 12))
    q_lens: list[int] = draw(st.lists(st.integers(0, 20), min_size=requests, max_size=requests))
    if not sum(q_lens):
        q_lens[0] = 1
    groups = [(1,) * requests]
    for _ in range(draw(st.integers(0, 3))):
        groups.insert(0, _merged_groups(draw, groups[0]))
    kv_lens = [
        tuple(draw(st.integers(0, 300) if number == 0 else st.integers(0, 90)) for _ in level)
        for number, level in enumerate(groups)
    ]
    variant = draw(st.sampled_from(("", "causal", "causal+soft_cap+sink")))
    if variant:
        kv_lens[-1] = tuple(max(q, kv) for q, kv in zip(q_lens, kv_lens[-1], strict=True))
    return CascadeCase(
        q_lens=tuple(q_lens),
        groups=tuple(groups),
        kv_lens=tuple(kv_lens),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from((1, 2, 7))),
        element=draw(st.sampled_from(("bf16", "f16"))),
        page_size=draw(PAGE_SIZES),
        variant=variant,
        split=draw(st.sampled_from((-1, 64))),
        data=draw(st.sampled_from(KINDS)),
        seed=draw(st.integers(0, 2**16 - 1)),
    )


def _merged_groups(draw: st.DrawFn, below: tuple[int, ...]) -> tuple[int, ...]:
    """Groups of neighbouring groups."""
    found: list[int] = []
    joins: list[bool] = draw(st.lists(st.booleans(), min_size=len(below), max_size=len(below)))
    for size, joined in zip(below, joins, strict=True):
        if found and joined:
            found[-1] += size
        else:
            found.append(size)
    return tuple(found)


def _expected(gpu: Gpu, case: CascadeCase) -> Mapping[str, Expected]:
    o, lse = batch_reference(flat_problem(case.levels))
    bounds = cascade_bounds(case.levels, gpu.arch)
    return {
        "o": Expected(o, bounds.o, f"P and O in {case.element}, all else in float32"),
        "lse": Expected(lse, bounds.lse, "rounding of logits, sums and logarithms"),
    }


STRATEGY: SearchStrategy[CascadeCase] = cascade_cases()

SUBJECT = Subject(
    algorithm="cascade_attention",
    strategy=STRATEGY,
    case_type=CascadeCase,
    corners=(
        CascadeCase(group=7, kv_heads=2, page_size=10, split=90),
        # Three levels, a prefix without keys, requests with several queries and with none.
        CascadeCase(
            q_lens=(3, 0, 20, 5), groups=((4,), (1, 3), (1, 1, 1, 1)),
            kv_lens=((150,), (0, 70), (3, 9, 64, 5)), group=2, split=64,
            variant="causal+soft_cap+sink",
        ),
        CascadeCase(q_lens=(2,), groups=((1,),), kv_lens=((70,),), element="f16"),
        # Nobody has a key.
        CascadeCase(kv_lens=((0,), (0, 0, 0, 0)), variant=""),
        CascadeCase(kv_lens=((300,), (5, 6, 7, 8)), data="large", page_size=1),
        # Every level without a mask; chunks and keys end everywhere in a tile.
        CascadeCase(
            q_lens=(9, 3, 1, 1, 1, 1, 1, 5), groups=((8,), (1,) * 8), kv_heads=2, page_size=7,
            kv_lens=((300,), (5, 20, 37, 55, 69, 84, 101, 120)), split=114, variant="",
        ),
        CascadeCase(
            q_lens=(33,), groups=((1,),), kv_lens=((300,),), page_size=10, data="underflow", seed=2,
            split=100, variant="",
        ),
        CascadeCase(
            q_lens=(2,), groups=((1,),), kv_lens=((130,),), page_size=1, split=57, variant=""
        ),
    ),
    thorough=CascadeCase(q_lens=(3, 1), groups=((2,), (1, 1)), kv_lens=((100,), (20, 70))),
    model=_model,
    kernel=_kernel,
    expected=_expected,
    has_lse=True,
)  # fmt: skip


def check_flat(context: Context, case: CascadeCase) -> None:
    """With a cascade against without one: both err, each by its own bound."""
    levels = case.levels
    cascade = SUBJECT.run_kernel(context, case).outputs
    problem = flat_problem(levels)
    plan = prefill_plan(
        problem.queries.indptr, problem.kv_lens, group=case.group, kv_heads=case.kv_heads,
        head_dim_v=case.d, sm_count=SM_COUNT, causal=problem.variant.causal, tile_q=case.tile_q,
        disable_split=True,
    )  # fmt: skip
    flat = ragged_host.batch_prefill_ragged(context.device, problem, plan).outputs
    one = cascade_bounds(levels, context.gpu.arch)
    other = batch_bounds(problem, plan, context.gpu.arch, "tensor_cores")
    reason = "bounds of both results"
    within("o", cascade["o"], flat["o"].astype(np.float64), one.o + other.o, reason)
    within("lse", cascade["lse"], flat["lse"].astype(np.float64), one.lse + other.lse, reason)


LAWS = [
    *kernel_laws(SUBJECT, examples=20),
    Law(
        algorithm="cascade_attention",
        name="flat",
        tier="bounded",
        statement="a cascade gives what attention to all keys at once gives, within both bounds",
        check=check_flat,
        strategy=STRATEGY,
        case_type=CascadeCase,
        corners=SUBJECT.corners,
        examples=8,
    ),
]
