"""FlashAttention-2's and -3's published throughput on H100, and how the cycle model predicts it.

Source of all: Shah et al., FlashAttention-3, arXiv 2407.08608v2, figures 5 to 7 and table 2: H100
SXM5, 16k tokens, model dimension 2048, clock of 1830 MHz at most, mean of 100 runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from simkit.machine.gpus import H100
from simkit.schedules.flash_attention_2 import FlashAttention2
from simkit.schedules.flash_attention_3 import FlashAttention3
from simkit.schedules.prediction import Prediction, predict
from simkit.schedules.published.row import PublishedRow, tflops, timed_row
from simkit.schedules.shape import AttentionShape

_SOURCE = "FlashAttention-3, arXiv 2407.08608v2"
_TOKENS = 16384
_MODEL_DIM = 2048
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_FP8_LENGTHS = (512, 1024, 2048, 4224, 8448, 16896)
LEAST_COUNTED = 2048
"""Below it launching and filling matter more than the schedule."""

# TFLOP/s by head dimension and causality, for the lengths above.
_FA2 = {
    (64, False): (282, 306, 318, 321, 322, 324),
    (64, True): (180, 229, 262, 284, 295, 299),
    (128, False): (309, 350, 362, 368, 370, 370),
    (128, True): (191, 260, 298, 319, 333, 335),
    (256, False): (275, 313, 321, 323, 324, 326),
    (256, True): (208, 251, 278, 293, 297, 298),
}
_FA3 = {
    (64, False): (333, 392, 460, 476, 496, 497),
    (64, True): (197, 265, 371, 420, 460, 473),
    (128, False): (467, 565, 625, 638, 646, 648),
    (128, True): (292, 423, 521, 579, 602, 616),
    (256, False): (482, 627, 707, 736, 746, 756),
    (256, True): (286, 427, 537, 612, 628, 642),
}
_FA3_FP8 = {
    (64, False): (240, 396, 462, 568, 596, 613),
    (64, True): (164, 244, 369, 475, 533, 572),
    (128, False): (348, 596, 733, 918, 974, 1008),
    (128, True): (241, 367, 553, 716, 883, 922),
    (256, False): (510, 744, 931, 966, 1151, 1171),
    (256, True): (304, 449, 703, 856, 960, 1024),
}
_RHYTHM_NOTE = (
    "at d = 64 the two CTAs of an SM fall out of step in the model, so that the softmax of one "
    "runs beside the products of the other; in step, they would be 17 to 20 % below the published "
    "figures"
)
_ALONE_NOTE = (
    "in the model ping-pong alone hides most of softmax; section 3 of the paper reports 620 to 640 "
    "TFLOP/s for it, the ablation 582"
)
# Milliseconds and TFLOP/s: batch 4, 16 heads, 8,448 tokens, d = 128, without a mask.
_ABLATION = (
    ("FlashAttention-3", FlashAttention3(), 661, ""),
    ("without overlap of GEMM and softmax", FlashAttention3(overlap=False), 582, _ALONE_NOTE),
    ("without warp specialisation", FlashAttention3(specialised=False, ping_pong=False), 570, ""),
)
_FP8_NOTE = "read off the figure; at d = 64 and 256, causal, two bars may be mixed"

_Schedule = FlashAttention2 | FlashAttention3


def table_rows() -> Iterator[PublishedRow]:
    """One row for each bar of the forward figures."""
    tables = (
        ("FA-2 fp16", FlashAttention2(), 2, _FA2, _LENGTHS, ""),
        ("FA-3 fp16", FlashAttention3(), 2, _FA3, _LENGTHS, ""),
        ("FA-3 fp8", FlashAttention3(), 1, _FA3_FP8, _FP8_LENGTHS, _FP8_NOTE),
    )
    for group, schedule, element, table, lengths, note in tables:
        for (d, causal), bars in table.items():
            for n, bar in zip(lengths, bars, strict=True):
                shape = _shape(n, d, causal, element)
                why = _RHYTHM_NOTE if group == "FA-2 fp16" and d == 64 else note
                mask = "causal" if causal else "full"
                yield _row(f"{group} d={d} {mask} n={n}", f"{group} d={d} {mask}", bar, schedule,
                           shape, n >= LEAST_COUNTED, why)  # fmt: skip


def ablation_rows() -> Iterator[PublishedRow]:
    """FlashAttention-3 without each of its two kinds of asynchrony."""
    shape = AttentionShape(batch=4, heads=16, q_len=8448, kv_len=8448, d=128)
    for name, schedule, bar, note in _ABLATION:
        yield _row(name, "FA-3 ablation", bar, schedule, shape, True, note)


def _shape(n: int, d: int, causal: bool, element: int) -> AttentionShape:
    return AttentionShape(
        batch=max(1, _TOKENS // n), heads=_MODEL_DIM // d, q_len=n, kv_len=n, d=d, causal=causal,
        element=element,
    )  # fmt: skip


def _row(
    name: str, group: str, published: float, schedule: _Schedule, shape: AttentionShape,
    is_counted: bool, note: str,
) -> PublishedRow:  # fmt: skip
    def prediction() -> Prediction:
        return predict(H100, schedule.launches(H100, shape))

    return timed_row(
        name, group, published, "TFLOP/s", _SOURCE, prediction, tflops,
        is_counted=is_counted, note=note,
    )  # fmt: skip
