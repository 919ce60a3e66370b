"""FlashMLA's published figures on H800, and how the cycle model predicts them.

Sources: github.com/deepseek-ai/FlashMLA, README (2025-02 and 2025-04), docs/20250422 (the seesaw
kernel) and docs/20250929 (FP8 sparse decoding). They name few sizes; the ones taken are in the
rows' names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from simkit.machine.gpus import H800, Gpu
from simkit.schedules.grid import Launch
from simkit.schedules.mla_decode import MlaDecode, MlaShape
from simkit.schedules.mla_sparse_decode import MlaSparseDecode, MlaSparseShape
from simkit.schedules.mla_sparse_prefill import MlaPrefillShape, MlaSparsePrefill
from simkit.schedules.prediction import Prediction, predict
from simkit.schedules.published.row import PublishedRow, gigabytes_per_s, tflops, timed_row

_Shape = TypeVar("_Shape", contravariant=True)
_BATCH = 128
SEESAW = "dense decode, seesaw, s_k=32768"
WITHOUT_SEESAW = "dense decode, first kernel, s_k=32768"
CROSSOVER = "FP8 sparse decode, topk=2048"
WITHOUT_CROSSOVER = "FP8 sparse decode without crossover, topk=2048"
LONG_CROSSOVER = "FP8 sparse decode, topk=32768"

_DENSE = "FlashMLA README and docs/20250422: H800 SXM5, up to 660 (new) and 580 TFLOPS, 3000 GB/s"
_SPARSE = "FlashMLA docs/20250929: batch 128, 128 heads, 2 queries a request"
_PREFILL = "FlashMLA README: 640 TFLOPS on H800, 4096 queries, topk 2048 in its benchmarks"
_NO_SOURCE = (
    "the kernel before crossover is not public, this is the published one in clusters of 1; its "
    "figure means 125 cycles a dequantised token, the document's own count is 50"
)


def mla_rows() -> Iterator[PublishedRow]:
    """Dense decode, FP8 sparse decode, sparse prefill."""
    for keys in (8192, 32768):
        shape = MlaShape(batch=_BATCH, kv_len=keys, q_len=2)
        for name, schedule, published in (
            ("dense decode, seesaw", MlaDecode(), 660),
            ("dense decode, first kernel", MlaDecode(seesaw=False), 580),
        ):
            yield _row(f"{name}, s_k={keys}", published, "TFLOP/s", _DENSE, tflops,
                       _of(schedule, shape))  # fmt: skip
        yield _row(f"tensor-core utilisation, s_k={keys}", 80, "%", _DENSE, _tensor_percent,
                   _of(MlaDecode(), shape),
                   note="of the tensor cores at the clock that power allows")  # fmt: skip
    memory = MlaShape(batch=_BATCH, kv_len=32768, heads=16)
    yield _row("dense decode, 16 heads, s_k=32768", 3000, "GB/s", _DENSE, gigabytes_per_s,
               _of(MlaDecode(), memory))  # fmt: skip
    for name, sparse, published, topk, note in (
        (WITHOUT_CROSSOVER, MlaSparseDecode(crossover=False), 250, 2048, _NO_SOURCE),
        (CROSSOVER, MlaSparseDecode(), 410, 2048, ""),
        (LONG_CROSSOVER, MlaSparseDecode(), 460, 32768, ""),
    ):
        tokens = MlaSparseShape(batch=_BATCH, topk=topk, q_len=2)
        yield _row(name, published, "TFLOP/s", _SPARSE, tflops, _of(sparse, tokens), note=note)
    for keys in (8192, 32768):
        prefill = MlaPrefillShape(q_len=4096, topk=2048, kv_len=keys)
        yield _row(f"sparse prefill, s_kv={keys}", 640, "TFLOP/s", _PREFILL, tflops,
                   _of(MlaSparsePrefill(), prefill))  # fmt: skip


class _Schedule(Protocol[_Shape]):
    def launches(self, gpu: Gpu, shape: _Shape) -> tuple[Launch, ...]: ...


def _of(schedule: _Schedule[_Shape], shape: _Shape) -> Callable[[], Prediction]:
    return lambda: predict(H800, schedule.launches(H800, shape))


def _tensor_percent(prediction: Prediction) -> float:
    return 100 * prediction.longest.utilisation("tensor")


def _row(
    name: str, published: float, unit: str, source: str, measure: Callable[[Prediction], float],
    prediction: Callable[[], Prediction], note: str = "",
) -> PublishedRow:  # fmt: skip
    return timed_row(
        name, "FlashMLA, H800", published, unit, source, prediction, measure, note=note
    )
