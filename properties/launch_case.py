"""Cases of launches: a shipped schedule, its choices, the shape of a problem and a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from simkit.machine.gpus import Gpu
from simkit.machine.gpus import gpu as find_gpu
from simkit.schedules.flash_attention_2 import FlashAttention2
from simkit.schedules.flash_attention_3 import FlashAttention3
from simkit.schedules.flash_decoding import FlashDecoding
from simkit.schedules.grid import Launch
from simkit.schedules.mla import KEYS
from simkit.schedules.mla_decode import MlaDecode, MlaShape
from simkit.schedules.mla_sparse_decode import MlaSparseDecode, MlaSparseShape
from simkit.schedules.shape import AttentionShape

FORWARD: Mapping[str, tuple[str, ...]] = {
    "flash_attention_2": ("a100", "h100", "h200"),
    "flash_attention_3": ("h100", "h800", "h200"),
}
"""GPUs of schedules whose items go to whoever is free."""

GPUS: Mapping[str, tuple[str, ...]] = {
    **FORWARD,
    "flash_decoding": ("a100", "h100", "h200"),
    "mla_decode": ("h100", "h800", "h200"),
    "mla_sparse_decode": ("h100", "h800", "h200"),
}
"""GPUs of all."""

HEAD_DIMS = (64, 96, 128, 192, 256)

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
    """``queries`` at the end of ``keys``; decoding has one, FlashMLA's 128 heads. 0 and None: what
    the published kernel takes. ``overlap``: of FlashMLA's, seesaw or crossover.
    """

    schedule: str = "flash_attention_3"
    gpu: str = "h100"
    batch: int = 1
    heads: int = 4
    queries: int = 1000
    keys: int = 1000
    d: int = 128
    causal: bool = False
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
        return AttentionShape(self.batch, self.heads, self.queries, self.keys, self.d, self.causal)

    def launch(self, gpu: Gpu | None = None) -> Launch:
        """The first launch, on another device if one is given."""
        gpu = gpu or self.device
        if self.schedule in _DECODING:
            return _DECODING[self.schedule](self, gpu)
        tile_q, tile_kv = self.tile_q or None, self.tile_kv or None
        if self.schedule == "flash_attention_2":
            (launch,) = FlashAttention2(tile_q=tile_q, tile_kv=tile_kv).launches(gpu, self.shape)
            return launch
        kernel = FlashAttention3(
            tile_q=tile_q,
            tile_kv=tile_kv,
            stages=self.stages,
            overlap=self.overlap,
            ping_pong=self.ping_pong,
            specialised=self.specialised,
        )
        (launch,) = kernel.launches(gpu, self.shape)
        return launch

    def faster_device(self) -> Gpu:
        """With one of RATES higher, by up to 4 times."""
        rng = np.random.default_rng(self.seed)
        name = str(rng.choice(RATES))
        factor = float(rng.choice((1.01, 1.1, 1.5, 2.0, 4.0)))
        return replace(self.device, **{name: getattr(self.device, name) * factor})


def _flash_decoding(case: LaunchCase, gpu: Gpu) -> Launch:
    heads = 8 * case.heads
    shape = AttentionShape(case.batch, heads, 1, case.keys, case.d, kv_heads=case.heads)
    return FlashDecoding().launches(gpu, shape)[0]


def _mla_decode(case: LaunchCase, gpu: Gpu) -> Launch:
    shape = MlaShape(batch=case.batch, kv_len=case.keys, q_len=1 + case.causal)
    return MlaDecode(seesaw=case.overlap).launches(gpu, shape)[0]


def _mla_sparse_decode(case: LaunchCase, gpu: Gpu) -> Launch:
    topk = -(-case.keys // KEYS) * KEYS
    shape = MlaSparseShape(batch=case.batch, topk=topk, q_len=1 + case.causal)
    return MlaSparseDecode(crossover=case.overlap).launches(gpu, shape)[0]


_DECODING: Mapping[str, Callable[[LaunchCase, Gpu], Launch]] = {
    "flash_decoding": _flash_decoding,
    "mla_decode": _mla_decode,
    "mla_sparse_decode": _mla_sparse_decode,
}


def launch_cases(
    *, decoding: bool = False, published: bool = False, least_keys: int = 1, most_keys: int = 3000
) -> SearchStrategy[LaunchCase]:
    """Problems of so many keys; ``decoding``: with schedules of decoding, too; ``published``: with
    the published kernels' choices only.
    """
    gpus = GPUS if decoding else FORWARD

    def with_schedule(schedule: str) -> SearchStrategy[LaunchCase]:
        is_3 = schedule == "flash_attention_3"
        choices: dict[str, SearchStrategy[object]] = {}
        if schedule in _DECODING:
            choices["overlap"] = st.booleans()
        elif not published:
            choices["tile_q"] = st.sampled_from((0, 64, 128, 192) if is_3 else (0, 128))
            choices["tile_kv"] = st.sampled_from((0, 64, 80, 128))
        if not published and is_3:
            choices["stages"] = st.integers(1, 2)
            choices["overlap"] = st.booleans()
            choices["specialised"] = st.booleans()
            choices["ping_pong"] = st.sampled_from((None, False, True))
        return st.builds(
            lambda keys, part, **values: LaunchCase(
                keys=keys, queries=max(1, keys // part), **values
            ),
            keys=st.integers(least_keys, most_keys),
            part=st.sampled_from((1, 1, 1, 3, 100)),
            schedule=st.just(schedule),
            gpu=st.sampled_from(gpus[schedule]),
            batch=st.integers(1, 4),
            heads=st.sampled_from((1, 3, 8, 16)),
            d=st.sampled_from(HEAD_DIMS),
            causal=st.booleans(),
            seed=st.integers(0, 2**16 - 1),
            **choices,
        )

    return st.sampled_from(sorted(gpus)).flatmap(with_schedule).filter(_fits)


def _fits(case: LaunchCase) -> bool:
    launch, gpu = case.launch(), case.device
    return launch.shared_bytes <= gpu.smem_per_block_optin and launch.threads <= 1024
