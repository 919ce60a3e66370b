"""FlashMLA's kernels, as the cycle model times them."""

from __future__ import annotations

from typing import Any

from simkit.cli.settings import Setting, Values, choice
from simkit.cli.timed.timed import Timed
from simkit.machine.gpus import Gpu
from simkit.schedules.grid import Launch
from simkit.schedules.mla_decode import MlaDecode, MlaShape
from simkit.schedules.mla_sparse_decode import MlaSparseDecode, MlaSparseShape
from simkit.schedules.mla_sparse_prefill import MlaPrefillShape, MlaSparsePrefill

_HEADS = Setting("heads", 128, "query heads")
_DEPENDENT = choice("dependent", "programmatic dependent launch of the combine", (True, False))


def _sizes(values: Values, *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names}


def _dense(gpu: Gpu, values: Values) -> tuple[Launch, ...]:
    shape = MlaShape(**_sizes(values, "batch", "kv_len", "heads", "q_len"))
    return MlaDecode(**DENSE.chosen(values)).launches(gpu, shape)


def _sparse(gpu: Gpu, values: Values) -> tuple[Launch, ...]:
    shape = MlaSparseShape(**_sizes(values, "batch", "topk", "heads", "q_len"))
    return MlaSparseDecode(**SPARSE.chosen(values)).launches(gpu, shape)


def _prefill(gpu: Gpu, values: Values) -> tuple[Launch, ...]:
    shape = MlaPrefillShape(**_sizes(values, "q_len", "topk", "kv_len", "heads"))
    return MlaSparsePrefill(**PREFILL.chosen(values)).launches(gpu, shape)


DENSE = Timed(
    name="mla_decode",
    problem=(
        Setting("n", None, "keys", sets=("kv_len",)),
        Setting("kv_len", 8192, "keys"),
        Setting("batch", 128, "requests"),
        Setting("q_len", 2, "queries of a request"),
        _HEADS,
    ),
    choices=(
        choice("seesaw", "both warpgroups take blocks in turns", (True, False)),
        choice("naive", "a CTA for 64 rows of a request, no tile scheduler", (True, False)),
        _DEPENDENT,
    ),
    launches=_dense,
)
SPARSE = Timed(
    name="mla_sparse_decode",
    problem=(
        Setting("topk", 2048, "tokens of a query"),
        Setting("batch", 128, "requests"),
        Setting("q_len", 2, "queries of a request"),
        _HEADS,
    ),
    choices=(
        choice("crossover", "a pair of CTAs shares dequantisation", (True, False)),
        _DEPENDENT,
    ),
    launches=_sparse,
)
PREFILL = Timed(
    name="mla_sparse_prefill",
    problem=(
        Setting("q_len", 4096, "queries"),
        Setting("topk", 2048, "tokens of a query"),
        Setting("kv_len", 32768, "tokens"),
        _HEADS,
    ),
    choices=(),
    launches=_prefill,
)

MLA = (DENSE, SPARSE, PREFILL)
