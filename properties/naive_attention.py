"""Laws of naive attention: three kernels with S and P in global memory, against their model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpu.device import Device
from gpu.kernels import naive_attention as host
from gpu.kernels.result import KernelResult
from properties.attention_case import AttentionCase, attention_cases
from properties.compare import Expected
from properties.subject import Array, Subject, kernel_laws
from simkit.algorithms.error_bounds import naive_attention_arithmetic, problem_bounds
from simkit.algorithms.naive_attention import naive_attention
from simkit.algorithms.problem import attention_reference
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine


def _model(machine: Machine, case: AttentionCase) -> Mapping[str, Array]:
    result = naive_attention(machine, case.problem())
    return {"s": result.s, "p": result.p, "o": result.o}


def _kernel(device: Device, case: AttentionCase, source: str | None) -> KernelResult:
    problem = case.problem()
    return host.naive_attention(
        device, problem.q, problem.k, problem.v, causal=case.causal, source=source
    )


def _expected(gpu: Gpu, case: AttentionCase) -> Mapping[str, Expected]:
    problem = case.problem()
    reference = naive_attention(Machine(gpu, "reference"), problem)
    bounds = problem_bounds(problem, naive_attention_arithmetic(problem))
    reason = "S, P and O in bfloat16, sums in float32"
    # A query that is not a number leaves open which of its masked weights are numbers.
    numbers = np.logical_not(np.isnan(reference.p).any(axis=-1, keepdims=True))
    return {
        "p": Expected(reference.p, bounds.weights, reason, numbers),
        "o": Expected(attention_reference(problem)[0], bounds.o, reason),
    }


SUBJECT = Subject(
    algorithm="naive_attention",
    strategy=attention_cases(most=70, tile=32),
    case_type=AttentionCase,
    corners=(
        AttentionCase(q_len=3, kv_len=40, data="residue"),
        AttentionCase(q_len=3, kv_len=40, d=128, data="residue"),
        AttentionCase(q_len=33, kv_len=65, group=2, causal=True),
        AttentionCase(q_len=1, kv_len=0),
        AttentionCase(q_len=40, kv_len=7, causal=True, data="ties"),
        AttentionCase(q_len=5, kv_len=33, d=128, data="minus_inf"),
    ),
    thorough=AttentionCase(q_len=33, kv_len=40, causal=True),
    model=_model,
    kernel=_kernel,
    expected=_expected,
)

LAWS = kernel_laws(SUBJECT, examples=24)
