"""Decoding, and attention by the formula, as the cycle model times it."""

from __future__ import annotations

from simkit.cli.settings import Setting, Values, choice
from simkit.cli.timed.attention import PREFILL, shape_of
from simkit.cli.timed.timed import Timed
from simkit.machine.gpus import Gpu
from simkit.schedules.flash_attention_1 import FlashAttention1
from simkit.schedules.flash_decoding import FlashDecoding
from simkit.schedules.grid import Launch
from simkit.schedules.naive_attention import NaiveAttention
from simkit.schedules.paged_decode import PagedDecode
from simkit.schedules.shape import AttentionShape

_DECODE = (
    Setting("n", None, "keys", sets=("kv_len",)),
    Setting("kv_len", 32768, "keys"),
    Setting("batch", 1, "sequences"),
    Setting("heads", 32, "query heads"),
    Setting("kv_heads", 8, "K/V heads"),
    Setting("d", 128, "head dimension"),
)
_SPLITS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def _one_query(values: Values) -> AttentionShape:
    return shape_of({**values, "q_len": 1, "causal": False})


def _flash_decoding(gpu: Gpu, values: Values) -> tuple[Launch, ...]:
    return FlashDecoding(**FLASH_DECODING.chosen(values)).launches(gpu, _one_query(values))


def _paged(gpu: Gpu, values: Values) -> tuple[Launch, ...]:
    return PagedDecode(**PAGED_DECODE.chosen(values)).launches(gpu, _one_query(values))


def _first(gpu: Gpu, values: Values) -> tuple[Launch, ...]:
    return FlashAttention1(**FLASH_ATTENTION_1.chosen(values)).launches(gpu, shape_of(values))


NAIVE = Timed(
    name="naive_attention",
    problem=PREFILL,
    choices=(),
    launches=lambda gpu, values: NaiveAttention().launches(gpu, shape_of(values)),
)
FLASH_ATTENTION_1 = Timed(
    name="flash_attention_1",
    problem=PREFILL,
    choices=(
        choice("tile_q", "rows of a block", (64, 128)),
        choice("tile_kv", "keys of a block", (64, 128, 256)),
    ),
    launches=_first,
)
FLASH_DECODING = Timed(
    name="flash_decoding",
    problem=_DECODE,
    choices=(
        choice("splits", "of the keys of a sequence", _SPLITS),
        choice("packed", "heads of a group share a tile", (True, False)),
        choice("dependent", "programmatic dependent launch of the combine", (True, False)),
    ),
    launches=_flash_decoding,
)
PAGED_DECODE = Timed(
    name="paged_decode",
    problem=_DECODE,
    choices=(
        choice("page_size", "keys of a page", (1, 16, 64)),
        choice("tensor_cores", "or CUDA cores", (True, False)),
        choice("dependent", "programmatic dependent launch of the merge", (True, False)),
    ),
    launches=_paged,
)

DECODING = (NAIVE, FLASH_ATTENTION_1, FLASH_DECODING, PAGED_DECODE)
