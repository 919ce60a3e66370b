"""Laws of attention of one query of each request to K and V in pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu.device import Device
from gpu.kernels import batch_decode as host
from gpu.kernels.result import KernelResult
from properties.batch_case import (
    BatchCase,
    batch_cases,
    batch_expected,
    batch_outputs,
    decode_case_plan,
)
from properties.compare import Expected
from properties.subject import Array, Subject, kernel_laws
from simkit.algorithms.batch_decode import batch_decode
from simkit.machine.gpus import Gpu
from simkit.machine.machine import Machine

CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    # Tensor cores: the group's heads are the rows of a tile.
    {"tile_q": 16},
    {"tile_q": 16, "order": "HND", "window": True, "variant": "causal"},
    {"tile_q": 16, "kv": "e4m3", "element": "f16", "index_bits": 64},
    {"tile_q": 16, "d": 128, "dv": 128, "variant": "soft_cap+sink"},
    # CUDA cores: as many rows as there are.
    {"cuda_cores": True, "group": 1},
    {"cuda_cores": True, "group": 1, "order": "HND", "kv": "e4m3", "variant": "rope"},
    {"cuda_cores": True, "group": 7, "element": "f16", "window": True, "variant": "alibi"},
    {"cuda_cores": True, "group": 2, "d": 128, "dv": 256, "variant": "custom_mask+sink"},
)


def _model(machine: Machine, case: BatchCase) -> Mapping[str, Array]:
    return batch_outputs(batch_decode(machine, case.problem, decode_case_plan(case), case.units))


def _kernel(device: Device, case: BatchCase, source: str | None) -> KernelResult:
    return host.batch_decode(
        device, case.problem, decode_case_plan(case), units=case.units, source=source
    )


def _decode(*kv_lens: int, **fields: Any) -> BatchCase:
    return BatchCase(q_lens=(1,) * len(kv_lens), kv_lens=kv_lens, **{"tile_q": 16, **fields})


def _expected(gpu: Gpu, case: BatchCase) -> Mapping[str, Expected]:
    return batch_expected(gpu, case, decode_case_plan(case))


SUBJECT = Subject(
    algorithm="batch_decode",
    strategy=batch_cases(CONFIGURATIONS, decode=True),
    case_type=BatchCase,
    corners=(
        # All rows of a tile. Chunks end within a tile of keys, at other lanes in other cases.
        _decode(300, 65, page_size=1, split=57, group=16, shared=True),
        _decode(60, page_size=1, split=50),
        _decode(97, 0, 128, 1, page_size=16, group=7, kv_heads=2, order="HND"),
        _decode(0, page_size=1),
        # Empty requests beside a longer one, under a CUDA graph: more than the grid would have.
        _decode(
            *(0,) * 19, 300, page_size=16, cuda_cores=True, tile_q=1, split=0, graph=True,
            data="underflow", seed=2,
        ),
        _decode(*(0,) * 19, 300, page_size=16, group=4, split=0, graph=True),
        # Few of them: then the longer one is split, and CTAs of the grid have no work.
        _decode(
            0, 300, 3, page_size=13, cuda_cores=True, tile_q=1, kv_heads=2, split=0, graph=True,
        ),
        _decode(0, 700, 3, page_size=13, group=4, split=0, graph=True),
        _decode(300, 65, page_size=3, split=64, group=3, cuda_cores=True, tile_q=3),
        _decode(130, 40, page_size=64, window_left=0, variant="causal", group=4),
        _decode(130, 40, page_size=7, window_left=70, variant="causal+sink", group=4, split=64),
        _decode(100, 20, page_size=29, data="nan", group=4, split=58),
        _decode(
            5, 20, 35, 55, 70, 85, 100, 120, page_size=33, data="minus_inf", cuda_cores=True,
            tile_q=1, kv_heads=2,
        ),
        _decode(200, 20, page_size=16, data="large", group=2),
        _decode(300, page_size=16, data="underflow", group=16, seed=2),
        # Each of the other configurations.
        _decode(
            150, 9, page_size=5, cuda_cores=True, tile_q=1, kv_heads=2, order="HND", kv="e4m3",
            variant="rope",
        ),
        _decode(
            200, 70, page_size=16, cuda_cores=True, tile_q=7, group=7, kv_heads=2, element="f16",
            window_left=100, variant="alibi",
        ),
        _decode(
            131, 67, page_size=16, cuda_cores=True, tile_q=2, group=2, d=128, dv=256, split=64,
            variant="custom_mask+sink",
        ),
        _decode(131, 67, page_size=7, kv="e4m3", element="f16", index_bits=64, group=5),
        _decode(131, 67, page_size=64, d=128, dv=128, variant="soft_cap+sink", group=3, split=64),
    ),
    large=(_decode(*range(0, 630, 10), 3000, page_size=16, group=4, split=0),),
    thorough=_decode(150, 0, 70, page_size=7, group=3, split=64),
    model=_model,
    kernel=_kernel,
    expected=_expected,
    has_lse=True,
)  # fmt: skip

LAWS = [*kernel_laws(SUBJECT, examples=30)]
