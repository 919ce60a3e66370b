"""Laws of FlashAttention: the mma.sync kernel against its model and against float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpu.device import Device
from gpu.kernels import flash_attention as host
from gpu.kernels.result import KernelResult
from properties.attention_case import AttentionCase, attention_cases
from properties.bound_quality import quality_law
from properties.compare import Expected
from properties.subject import Array, Subject, kernel_laws
from simkit.algorithms.error_bounds import flash_attention_arithmetic, problem_bounds
from simkit.algorithms.flash_attention import flash_attention
from simkit.algorithms.problem import attention_reference
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine


def _model(machine: Machine, case: AttentionCase) -> Mapping[str, Array]:
    result = flash_attention(machine, case.problem())
    return {"o": result.o, "lse": result.lse}


def _kernel(device: Device, case: AttentionCase, source: str | None) -> KernelResult:
    problem = case.problem()
    return host.flash_attention(
        device, problem.q, problem.k, problem.v, causal=case.causal, source=source
    )


def _expected(gpu: Gpu, case: AttentionCase) -> Mapping[str, Expected]:
    problem = case.problem()
    o, lse = attention_reference(problem)
    bounds = problem_bounds(problem, flash_attention_arithmetic(problem, gpu.arch))
    return {
        "o": Expected(o, bounds.o, "P and O in bfloat16, sums in float32"),
        "lse": Expected(lse, bounds.lse, "rounding of scores, exponentials, sum and logarithm"),
    }


SUBJECT = Subject(
    algorithm="flash_attention",
    strategy=attention_cases(most=200, tile=64),
    case_type=AttentionCase,
    corners=(
        # Tails in both lengths, the diagonal inside a tile, more than two KV tiles, a shared KV
        # head.
        AttentionCase(q_len=130, kv_len=193, group=2, causal=True),
        AttentionCase(q_len=1, kv_len=0),
        AttentionCase(q_len=70, kv_len=5, causal=True, data="ties"),
        AttentionCase(q_len=65, kv_len=129, d=128, data="large"),
        AttentionCase(q_len=64, kv_len=192, data="minus_inf"),
        AttentionCase(q_len=20, kv_len=70, data="nan"),
        AttentionCase(q_len=50, kv_len=215, data="underflow"),
        AttentionCase(q_len=25, kv_len=88),
        AttentionCase(q_len=40, kv_len=30),
        AttentionCase(q_len=60, kv_len=60),
        # A last key in every column of a lane's accumulators.
        *(AttentionCase(q_len=4, kv_len=n) for n in (10, 13, 18, 27, 34, 37, 42, 45, 50, 53, 63)),
    ),
    thorough=AttentionCase(q_len=66, kv_len=130, causal=True),
    model=_model,
    kernel=_kernel,
    expected=_expected,
    has_lse=True,
)


def _draw(rng: np.random.Generator, kind: str) -> AttentionCase:
    return AttentionCase(
        q_len=int(rng.integers(1, 50)),
        kv_len=int(rng.integers(1, 200)),
        d=int(rng.choice((64, 128))),
        causal=bool(rng.integers(2)),
        data=kind,
        seed=int(rng.integers(2**16)),
    )


LAWS = [
    *kernel_laws(SUBJECT, examples=36),
    quality_law("flash_attention", _draw, _model, _expected),
]
