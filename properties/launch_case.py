"""Cases of launches: a shipped schedule, its choices, the shape of a problem and a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from simkit.machine.gpus import Gpu
from simkit.machine.gpus import gpu as find_gpu
from simkit.schedules.flash_attention import FlashAttention
from simkit.schedules.flash_attention_1 import FlashAttention1
from simkit.schedules.flash_attention_2 import FlashAttention2
from simkit.schedules.flash_attention_3 import FlashAttention3
from simkit.schedules.flash_decoding import FlashDecoding
from simkit.schedules.grid import Launch
from simkit.schedules.mla import KEYS
from simkit.schedules.mla_decode import MlaDecode, MlaShape
from simkit.schedules.mla_sparse_decode import MlaSparseDecode, MlaSparseShape
from simkit.schedules.mla_sparse_prefill import MlaPrefillShape, MlaSparsePrefill
from simkit.schedules.naive_attention import NaiveAttention
from simkit.schedules.paged_decode import PagedDecode
from simkit.schedules.shape import AttentionShape

FORWARD: Mapping[str, tuple[str, ...]] = {
    "flash_attention_2": ("a100", "h100", "h200"),
    "flash_attention_3": ("h100", "h800", "h200"),
}
"""GPUs of schedules whose items go to whoever is free."""

GPUS: Mapping[str, tuple[str, ...]] = {
    **FORWARD,
    "flash_attention": ("a100", "h100", "h200"),
    "flash_attention_1": ("a100", "h100", "h200"),
    "flash_decoding": ("a100", "h100", "h200"),
    "naive_attention": ("a100", "h100", "h200"),
    "paged_decode": ("a100", "h100", "h200"),
    "mla_decode": ("h100", "h800", "h200"),
    "mla_sparse_decode": ("h100", "h800", "h200"),
    "mla_sparse_prefill": ("h100", "h800", "h200"),
}
"""GPUs of all."""

HEAD_DIMS = (64, 96, 128, 192, 256)
FEW_DIMS: Mapping[str, tuple[int, ...]] = {
    "flash_attention": (64, 128),
    "paged_decode": (64, 128, 256),
}
"""Of schedules that have no others."""

RATES = (
    "tensor_flop_per_clk",
    "fp32_lanes",
    "ex2_per_clk",
    "compare_per_clk",
    "shuffle_per_clk",
    "half_per_clk",
    "widen_per_clk",
    "smem_bytes_per_clk",
    "l2_bytes_per_clk",
    "hbm_bytes_per_s",
)
"""Fields of the device table that are rates of these schedules' resources."""


@dataclass(frozen=True)
class LaunchCase:
    """``queries`` at the end of ``keys``; decoding has one, FlashMLA's 128 heads. ``heads``: of K
    and V, each of which ``group`` query heads share. 0 and None: what the published kernel takes.
    ``overlap``: of FlashMLA's, seesaw or crossover.
    """

    schedule: str = "flash_attention_3"
    gpu: str = "h100"
    batch: int = 1
    heads: int = 4
    queries: int = 1000
    keys: int = 1000
    group: int = 1
    d: int = 128
    d_v: int = 0
    causal: bool = False
    fp8: bool = False
    tile_q: int = 0
    tile_kv: int = 0
    stages: int = 2
    overlap: bool = True
    ping_pong: bool | None = None
    specialised: bool = True
    seed: int = 0

    @property
    def device(self) -> Gpu:
        return find_gpu(self.gpu)

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(
            self.batch, self.heads * self.group, self.queries, self.keys, self.d, self.causal,
            kv_heads=self.heads, d_v=self.d_v, element=1 if self.fp8 else 2,
        )  # fmt: skip

    def launches(self, gpu: Gpu | None = None) -> tuple[Launch, ...]:
        """On another device if one is given. Errors as of the schedule."""
        return _SCHEDULES[self.schedule](self, gpu or self.device)

    def launch(self, gpu: Gpu | None = None) -> Launch:
        """The first."""
        return self.launches(gpu)[0]

    def faster_device(self) -> Gpu:
        """With one of RATES higher, by up to 4 times."""
        rng = np.random.default_rng(self.seed)
        name = str(rng.choice(RATES))
        factor = float(rng.choice((1.01, 1.1, 1.5, 2.0, 4.0)))
        return replace(self.device, **{name: getattr(self.device, name) * factor})


def _flash_attention_2(case: LaunchCase, gpu: Gpu) -> tuple[Launch, ...]:
    kernel = FlashAttention2(tile_q=case.tile_q or None, tile_kv=case.tile_kv or None)
    return kernel.launches(gpu, case.shape)


def _flash_attention_3(case: LaunchCase, gpu: Gpu) -> tuple[Launch, ...]:
    kernel = FlashAttention3(
        tile_q=case.tile_q or None,
        tile_kv=case.tile_kv or None,
        stages=case.stages,
        overlap=case.overlap,
        ping_pong=case.ping_pong,
        specialised=case.specialised,
    )
    return kernel.launches(gpu, case.shape)


def _flash_attention_1(case: LaunchCase, gpu: Gpu) -> tuple[Launch, ...]:
    return FlashAttention1().launches(gpu, replace(case.shape, causal=False))


def _flash_decoding(case: LaunchCase, gpu: Gpu) -> tuple[Launch, ...]:
    shape = replace(case.shape, heads=8 * case.heads, q_len=1, causal=False)
    return FlashDecoding().launches(gpu, shape)


def _paged_decode(case: LaunchCase, gpu: Gpu) -> tuple[Launch, ...]:
    """Groups on CUDA cores or, if large, on tensor cores."""
    heads = case.heads * (8 if case.overlap else case.group)
    shape = replace(case.shape, heads=heads, q_len=1, causal=False)
    return PagedDecode().launches(gpu, shape)


def _mla_decode(case: LaunchCase, gpu: Gpu) -> tuple[Launch, ...]:
    shape = MlaShape(batch=case.batch, kv_len=case.keys, q_len=1 + case.causal)
    return MlaDecode(seesaw=case.overlap).launches(gpu, shape)


def _mla_sparse_decode(case: LaunchCase, gpu: Gpu) -> tuple[Launch, ...]:
    topk = -(-case.keys // KEYS) * KEYS
    shape = MlaSparseShape(batch=case.batch, topk=topk, q_len=1 + case.causal)
    return MlaSparseDecode(crossover=case.overlap).launches(gpu, shape)


def _mla_sparse_prefill(case: LaunchCase, gpu: Gpu) -> tuple[Launch, ...]:
    """Of as many keys again, and of a thousand times as many."""
    topk = -(-case.keys // (2 * KEYS)) * 2 * KEYS
    kv_len = topk * (2 if case.overlap else 1000)
    shape = MlaPrefillShape(q_len=case.queries, topk=topk, kv_len=kv_len)
    return MlaSparsePrefill().launches(gpu, shape)


_SCHEDULES: Mapping[str, Callable[[LaunchCase, Gpu], tuple[Launch, ...]]] = {
    "flash_attention": lambda case, gpu: FlashAttention().launches(gpu, case.shape),
    "flash_attention_1": _flash_attention_1,
    "flash_attention_2": _flash_attention_2,
    "flash_attention_3": _flash_attention_3,
    "flash_decoding": _flash_decoding,
    "naive_attention": lambda case, gpu: NaiveAttention().launches(gpu, case.shape),
    "paged_decode": _paged_decode,
    "mla_decode": _mla_decode,
    "mla_sparse_decode": _mla_sparse_decode,
    "mla_sparse_prefill": _mla_sparse_prefill,
}


def launch_cases(*, every: bool = False, most_keys: int = 3000) -> SearchStrategy[LaunchCase]:
    """Problems of up to so many keys; ``every``: of all schedules, not of FORWARD's alone."""
    gpus = GPUS if every else FORWARD

    def with_schedule(schedule: str) -> SearchStrategy[LaunchCase]:
        is_3 = schedule == "flash_attention_3"
        choices: dict[str, SearchStrategy[object]] = {}
        if schedule not in FORWARD:
            choices["overlap"] = st.booleans()
        else:
            choices["tile_q"] = st.sampled_from((0, 64, 128, 192) if is_3 else (0, 128))
            choices["tile_kv"] = st.sampled_from((0, 64, 80, 128))
        if is_3:
            choices["stages"] = st.integers(1, 2)
            choices["overlap"] = st.booleans()
            choices["specialised"] = st.booleans()
            choices["ping_pong"] = st.sampled_from((None, False, True))
        return st.builds(
            lambda keys, part, **values: LaunchCase(
                keys=keys, queries=max(1, keys // part), **values
            ),
            keys=st.integers(1, most_keys),
            part=st.sampled_from((1, 1, 1, 3, 100)),
            schedule=st.just(schedule),
            gpu=st.sampled_from(gpus[schedule]),
            batch=st.integers(1, 4),
            heads=st.sampled_from((1, 3, 8, 16)),
            group=st.just(1) if schedule == "flash_attention_1" else st.sampled_from((1, 1, 2)),
            d=st.sampled_from(FEW_DIMS.get(schedule, HEAD_DIMS)),
            causal=st.booleans(),
            seed=st.integers(0, 2**16 - 1),
            **choices,
        )

    return st.sampled_from(sorted(gpus)).flatmap(with_schedule).filter(_fits)


def long_cases() -> SearchStrategy[LaunchCase]:
    """Launches whose items have more tiles than are all simulated: many lengths, or a long one."""

    def of(schedule: str, causal: bool, part: float, d: int) -> LaunchCase:
        keys = int(6000 + 2000 * part) if causal else int(200_000 + 40_000 * part)
        queries = keys if causal else 100
        return LaunchCase(
            schedule=schedule, heads=1, queries=queries, keys=keys, d=d, causal=causal
        )

    return st.builds(
        of,
        schedule=st.sampled_from(sorted(FORWARD)).filter(lambda name: name != "flash_attention_1"),
        causal=st.booleans(),
        part=st.floats(0, 1),
        d=st.sampled_from((64, 128)),
    )


def _fits(case: LaunchCase) -> bool:
    return all(
        launch.shared_bytes <= case.device.smem_per_block_optin and launch.threads <= 1024
        for launch in case.launches()
    )
