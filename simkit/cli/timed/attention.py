"""Attention of sequences of one length, as the cycle model times it."""

from __future__ import annotations

from simkit.cli.settings import Setting, Values, choice
from simkit.cli.timed.timed import Timed
from simkit.machine.gpus import Gpu
from simkit.schedules.flash_attention import FlashAttention
from simkit.schedules.flash_attention_2 import FlashAttention2
from simkit.schedules.flash_attention_3 import FlashAttention3
from simkit.schedules.grid import Launch
from simkit.schedules.shape import AttentionShape

PREFILL = (
    Setting("n", None, "both lengths", sets=("q_len", "kv_len")),
    Setting("q_len", 8192, "queries"),
    Setting("kv_len", None, "keys, q_len by default", like="q_len"),
    Setting("batch", 2, "sequences"),
    Setting("heads", 16, "query heads"),
    Setting("kv_heads", None, "K/V heads, heads by default", like="heads"),
    Setting("d", 128, "head dimension"),
    Setting("causal", False, "mask keys after the query", kind="flag"),
)
_FP8 = Setting("fp8", False, "Q, K and V in e4m3", kind="flag")


def shape_of(values: Values) -> AttentionShape:
    """The problem that the settings describe."""
    names = ("batch", "heads", "q_len", "kv_len", "d", "causal", "kv_heads")
    sizes = {name: values[name] for name in names if name in values}
    return AttentionShape(**sizes, element=1 if values.get("fp8") else 2)


def _fa2(gpu: Gpu, values: Values) -> tuple[Launch, ...]:
    return FlashAttention2(**FA2.chosen(values)).launches(gpu, shape_of(values))


def _fa3(gpu: Gpu, values: Values) -> tuple[Launch, ...]:
    return FlashAttention3(**FA3.chosen(values)).launches(gpu, shape_of(values))


FA2 = Timed(
    name="flash_attention_2",
    problem=PREFILL,
    choices=(
        choice("tile_q", "queries of a tile", (64, 128)),
        choice("tile_kv", "keys of a tile", (32, 64, 96, 128)),
        choice("warps", "of a CTA", (4, 8)),
    ),
    launches=_fa2,
)
FA3 = Timed(
    name="flash_attention_3",
    problem=(*PREFILL, _FP8),
    choices=(
        choice("tile_q", "queries of a tile", (64, 128, 192)),
        choice("tile_kv", "keys of a tile", (64, 80, 96, 128, 160, 176, 192, 224)),
        choice("stages", "tiles of K and of V in flight", (1, 2, 3)),
        choice("overlap", "softmax beside PV of the tile before", (True, False)),
        choice("ping_pong", "warpgroups take turns", (True, False)),
        choice("specialised", "a warp of its own copies", (True,)),
        choice("cluster", "CTAs that share copies", (1, 2)),
    ),
    launches=_fa3,
)

OWN = Timed(
    name="flash_attention",
    problem=PREFILL,
    choices=(),
    launches=lambda gpu, values: FlashAttention().launches(gpu, shape_of(values)),
    is_ours=True,
)

ATTENTION = (OWN, FA2, FA3)
