"""Timeline of appending to a paged KV cache: what a CTA does when, alone on its SM.

Durations follow from the device table as in `simkit.schedules.tile_timeline`: bytes over the SM's
share of HBM bandwidth, operations over its fp32 lanes, nothing else takes time. A table entry moves
the sector that it lies in.
"""

from __future__ import annotations

from simkit.algorithms.kv_append import E4M3, TOKENS_PER_CTA, AppendProblem
from simkit.errors import ShapeError
from simkit.machine.gpus import Gpu
from simkit.machine.memory import SECTOR_BYTES
from simkit.schedules.cta import CtaTimeline
from traces.events import Trace

CONVERT_OPS = 2  # of a value on its way to FP8: multiplication, conversion


def kv_append(gpu: Gpu, problem: AppendProblem) -> Trace:
    """The first CTA, with up to four tokens: their pages, table by table, then K, then V.

    `ShapeError` when there is no token.
    """
    own = min(problem.tokens, TOKENS_PER_CTA)
    if not own:
        raise ShapeError("no token is appended, so there is no CTA to show")
    cta = CtaTimeline(gpu, "kv_append CTA")
    # Each table says where to look in the next one.
    for tables in (("positions", "batch_indices"), ("indptr",), ("indices",)):
        for table in tables:
            cta.load(table, own * SECTOR_BYTES)
        cta.wait_for_loads()
    for name, new, cache, _ in problem.parts():
        values = new[:own].size
        cta.load(f"{name.upper()} new", values * new.itemsize)
        cta.wait_for_loads()
        if problem.cache_dtype == E4M3:
            cta.lanes(f"{name.upper()} to e4m3", values * CONVERT_OPS, "convert")
        cta.store(f"{name.upper()} cache", values * cache.values.itemsize)
    return cta.trace(f"kv_append on {gpu.name}")
