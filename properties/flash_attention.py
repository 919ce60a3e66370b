"""Laws of FlashAttention: the mma.sync kernel against its model and against float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpu.device import Device
from gpu.kernels import flash_attention as host
from gpu.kernels.result import KernelResult
from properties.attention_case import AttentionCase, attention_cases, emulate
from properties.compare import within
from properties.law import Context, Law
from properties.subject import Array, Subject, kernel_laws
from simkit.algorithms.flash_attention import flash_attention
from simkit.algorithms.problem import attention_reference
from simkit.machine.machine import Machine


def _model(machine: Machine, case: AttentionCase) -> Mapping[str, Array]:
    result = flash_attention(machine, case.problem())
    return {"o": result.o, "lse": result.lse}


def _kernel(device: Device, case: AttentionCase, source: str | None) -> KernelResult:
    problem = case.problem()
    return host.flash_attention(
        device, problem.q, problem.k, problem.v, causal=case.causal, source=source
    )


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
    ),
    thorough=AttentionCase(q_len=66, kv_len=130, causal=True),
    model=_model,
    kernel=_kernel,
    reference=lambda case: {"o": attention_reference(case.problem())[0]},
    emulation=lambda case: emulate(case.problem()),
)


def check_lse(context: Context, case: AttentionCase) -> None:
    """The natural-logarithm LSE against float64.

    A score is a sum of d products whose terms the tensor core truncates 2^-25 below the largest
    (plus one rounding a step), so its error is at most (d + d/16) 2^-24 max|q_i k_i| d-fold; the
    logarithm of a sum of exponentials moves by at most the largest error of its exponents, and adds
    a few roundings of its own magnitude.
    """
    problem = case.problem()
    _, reference = attention_reference(problem)
    kernel = SUBJECT.run_kernel(context, case).outputs["lse"]
    finite_q = np.where(
        np.isfinite(problem.q.astype(np.float64)), problem.q.astype(np.float64), 0.0
    )
    largest = float(np.max(np.abs(finite_q), initial=0.0)) * float(
        np.max(np.abs(problem.k.astype(np.float64)), initial=0.0)
    )
    products = problem.scale * problem.d * largest
    scale = products + float(np.max(np.abs(reference[np.isfinite(reference)]), initial=0.0)) + 1.0
    # Per step of 16 products: 17 truncations and a rounding; log2 and the final three operations: 8
    # units.
    bound = (2.0 * problem.d / 16 + 8 + np.log2(problem.kv_len + 2)) * 2.0**-23 * scale
    within("lse", kernel, reference, bound, "rounding of scores and of log2")


LAWS = [
    *kernel_laws(SUBJECT, examples=36),
    Law(
        algorithm="flash_attention",
        name="lse",
        tier="bounded",
        statement="the LSE is within the rounding of its scores; rows without keys give -inf",
        check=check_lse,
        strategy=SUBJECT.strategy,
        case_type=AttentionCase,
        corners=SUBJECT.corners,
        examples=10,
    ),
]
