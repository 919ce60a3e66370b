"""Published figures of decoding, standard attention, FlashInfer's templates and launches, as rows.

Nothing here is an input of the model: rates and latencies are in the device table and in
`simkit.schedules.parameters`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

from simkit.machine.gpus import GPUS
from simkit.machine.roofline import roofline
from simkit.schedules.flash_attention_2 import FlashAttention2
from simkit.schedules.flash_attention_3 import FlashAttention3
from simkit.schedules.flash_decoding import FlashDecoding
from simkit.schedules.fusion import Operation, elementwise
from simkit.schedules.launches import Kernel, timeline
from simkit.schedules.naive_attention import NaiveAttention, score_bytes
from simkit.schedules.prediction import Prediction, predict
from simkit.schedules.published.attention import LEAST_COUNTED
from simkit.schedules.published.row import PublishedRow, microseconds, tflops, timed_row
from simkit.schedules.shape import AttentionShape

Schedule = FlashAttention2 | FlashAttention3 | FlashDecoding | NaiveAttention


def rows() -> Iterator[PublishedRow]:
    """All of them; a row predicts when it is asked."""
    yield from _flash_decoding()
    yield from _standard_attention()
    yield from _flashinfer()
    yield from _chapter()


@cache
def _prediction(schedule: Schedule, gpu: str, shape: AttentionShape) -> Prediction:
    return predict(GPUS[gpu], schedule.launches(GPUS[gpu], shape))


# Batch, keys; microseconds of FlashAttention-2 2.0.9 and of Flash-Decoding.
_DECODING = (
    (256, 256, 390.5, 63.4),
    (128, 512, 366.3, 67.7),
    (64, 1024, 364.8, 77.7),
    (32, 2048, 352.0, 58.5),
    (16, 4096, 401.7, 57.0),
    (8, 8192, 529.2, 56.4),
    (4, 16384, 582.7, 58.2),
    (2, 32768, 1156.1, 60.3),
    (1, 65536, 2300.6, 64.4),
    (1, 131072, 4592.2, 106.6),
)
_DECODING_SOURCE = (
    "PyTorch blog, Flash-Decoding for long-context inference, 2023-10-13: A100, f16, 16 query "
    "heads, 2 K/V heads, d 128"
)
_UNSPLIT = FlashAttention2()
_SPLIT_2023 = FlashDecoding(ctas_per_sm=1)
"""flash-attention 2.3.2 (2023-10-08) chose splits for one CTA an SM; today's choose for two."""


def _shape(batch: int, keys: int) -> AttentionShape:
    return AttentionShape(batch, 16, 1, keys, 128, kv_heads=2)


def _microseconds(schedule: Schedule, batch: int, keys: int) -> float:
    return microseconds(_prediction(schedule, "a100", _shape(batch, keys)))


def _flash_decoding() -> Iterator[PublishedRow]:
    kinds: tuple[tuple[str, Schedule, int, str], ...] = (
        ("FlashAttention-2 2.0.9", _UNSPLIT, 2, "no split, a tile of 128 rows for each query head"),
        ("Flash-Decoding", _SPLIT_2023, 3, "splits as of flash-attention 2.3.2"),
    )
    for title, schedule, column, note in kinds:
        for row in _DECODING:
            batch, keys = row[:2]
            yield timed_row(
                f"{title}, {batch} x {keys}", f"{title}, A100", row[column], "us",
                _DECODING_SOURCE, partial(_prediction, schedule, "a100", _shape(batch, keys)),
                microseconds, note=note,
            )  # fmt: skip
    yield PublishedRow(
        name="slowest over fastest, same K/V bytes, up to 64k keys",
        group="Flash-Decoding, claims",
        predicted=_spread,
        published=77.7 / 56.4,
        unit="x",
        source=_DECODING_SOURCE,
        note="the text says: almost constant run time up to 64k; the figure is the table's",
        bound=_ratio,
        is_counted=False,
    )
    yield PublishedRow(
        name="Flash-Decoding over FlashAttention-2, 1 x 131072",
        group="Flash-Decoding, claims",
        predicted=_speedup,
        published=4592.2 / 106.6,
        unit="x",
        source=_DECODING_SOURCE,
        note="the text says: up to 50x; the table's largest is 43x",
        bound=_ratio,
        is_counted=False,
    )


def _spread() -> float:
    times = [_microseconds(_SPLIT_2023, batch, keys) for batch, keys, *_ in _DECODING[:-1]]
    return max(times) / min(times)


def _speedup() -> float:
    batch, keys = _DECODING[-1][:2]
    return _microseconds(_UNSPLIT, batch, keys) / _microseconds(_SPLIT_2023, batch, keys)


_LENGTHS = (512, 1024, 2048, 4096, 8192)
_STANDARD = {64: (52, 63, 67, 72, 73), 128: (74, 100, 119, 133, 139)}  # TFLOP/s


def _standard(shape: AttentionShape) -> Prediction:
    """The benchmark's: Q, K and V are copied to heads first, O back."""
    h100 = GPUS["h100"]
    copy = Operation(name="transpose", reads=("x",), writes=("y",), fma=0)
    moves = [elementwise(h100, copy, shape.q_bytes // shape.element)] * 4
    return predict(h100, [*moves[:3], *NaiveAttention().launches(h100, shape), moves[3]])


def _standard_attention() -> Iterator[PublishedRow]:
    for d, published in _STANDARD.items():
        for n, bar in zip(_LENGTHS, published, strict=True):
            shape = AttentionShape(16384 // n, 2048 // d, n, n, d)
            yield timed_row(
                f"standard attention d={d} n={n}", "standard attention, H100", bar, "TFLOP/s",
                "FlashAttention-3, arXiv 2407.08608, figure 5: PyTorch, f16, not causal",
                partial(_standard, shape), tflops, is_counted=n >= LEAST_COUNTED,
                note="three kernels and four copies, as in the repository's benchmark",
            )  # fmt: skip


# Batch, length; TFLOP/s of the dense FA2 and FA3 templates.
_FLASHINFER = (
    (128, 1024, 277, 391),
    (64, 2048, 316, 472),
    (32, 4096, 339, 532),
    (8, 8192, 349, 568),
    (1, 32768, 354, 602),
)


_TEMPLATE_NOTE = (
    "32 heads, as in the repository's benchmark; the model is of flash-attention's kernels, "
    "FlashInfer's templates of them are others: its FA-3 stays below the paper's"
)


def _flashinfer() -> Iterator[PublishedRow]:
    kinds: tuple[tuple[str, Schedule, int], ...] = (
        ("FA2", FlashAttention2(), 2),
        ("FA3", FlashAttention3(), 3),
    )
    for title, schedule, column in kinds:
        for row in _FLASHINFER:
            batch, n = row[:2]
            shape = AttentionShape(batch, 32, n, n, 128, causal=True)
            yield timed_row(
                f"FlashInfer {title}, {batch} x {n}", f"FlashInfer {title} template, H100",
                row[column], "TFLOP/s", "FlashInfer on its FA-3 template: causal, d 128, dense",
                partial(_prediction, schedule, "h100", shape), tflops,
                is_counted=n >= LEAST_COUNTED,
                note=_TEMPLATE_NOTE,
            )  # fmt: skip


_CHAPTER = "3.4 Attention kernel, worked examples"
_LLAMA = AttentionShape(1, 32, 1, 32768, 128, kv_heads=8)
_HEAD = AttentionShape(1, 1, 8192, 8192, 128)
_HEADS = AttentionShape(1, 32, 8192, 8192, 128)
_LAUNCHES = 330
_PARAMETERS_8B = 8.03e9


def _ctas(splits: int) -> int:
    gpu = GPUS["h100"]
    return len(FlashDecoding(splits=splits).launches(gpu, _LLAMA)[0].items)


def _decode_step() -> float:
    """Seconds: every weight read once."""
    return roofline(GPUS["h100"], 0, 2 * _PARAMETERS_8B).seconds


def _submission(how: str) -> float:
    """Seconds until the CPU has submitted the step's kernels."""
    kernels = [Kernel(name="kernel", seconds=_decode_step() / _LAUNCHES)] * _LAUNCHES
    return timeline(kernels, submission="graph" if how == "graph" else "stream").host_seconds


def _chapter() -> Iterator[PublishedRow]:
    h100 = GPUS["h100"]
    naive = NaiveAttention()
    figures: tuple[tuple[str, Callable[[], float], float, str, str, Callable[[], str]], ...] = (
        ("CTAs without splits", lambda: _ctas(1), 8, "CTAs", "",
         _bound(FlashDecoding(splits=1), "h100", _LLAMA)),
        ("SMs at work without splits", lambda: 100 * _ctas(1) / h100.sm_count, 6, "%", "", _count),
        ("CTAs with 16 splits", lambda: _ctas(16), 128, "CTAs", "",
         _bound(FlashDecoding(splits=16), "h100", _LLAMA)),
        ("330 launches on the CPU", lambda: 1e3 * _submission("stream"), 1.3, "ms",
         "4 us a launch is the chapter's", _count),
        ("decode step of an 8B model", lambda: 1e3 * _decode_step(), 4.8, "ms",
         "8.03e9 parameters of 2 bytes", _count),
        ("S and P through HBM", lambda: 4 * score_bytes(_HEAD) / 1e6, 537, "MB", "", _count),
        ("intensity of naive attention", lambda: _HEAD.flop / (4 * score_bytes(_HEAD)), 64,
         "FLOP/byte", "S and P alone", _bound(naive, "h100", _HEADS)),
        ("bytes that FlashAttention must move",
         lambda: FlashAttention3().launches(h100, _HEAD)[0].hbm_bytes / 2**20, 8, "MiB", "",
         _bound(FlashAttention3(), "h100", _HEADS)),
    )  # fmt: skip
    for name, predicted, published, unit, note, bound in figures:
        yield PublishedRow(
            name=name,
            group=_CHAPTER,
            predicted=predicted,
            published=published,
            unit=unit,
            source=_CHAPTER,
            note=note,
            bound=bound,
            is_counted=False,  # counts, not measurements
        )


def _ratio() -> str:
    """Of a row that compares two predictions."""
    return "a ratio"


def _count() -> str:
    """Of a row that nothing runs for."""
    return "a count"


def _bound(schedule: Schedule, gpu: str, shape: AttentionShape) -> Callable[[], str]:
    return lambda: _prediction(schedule, gpu, shape).bound
