"""Timeline of merging attention states: what a CTA does when, alone on its SM.

Durations follow from the device table as in `simkit.schedules.tile_timeline`: bytes over the SM's
share of HBM bandwidth, operations over its fp32 lanes, nothing else takes time.
"""

from __future__ import annotations

from collections.abc import Sequence

from simkit.algorithms.merge_states import PAIRS_PER_CTA
from simkit.errors import ShapeError
from simkit.machine.gpus import Gpu
from simkit.machine.memory import WARP_LANES
from simkit.schedules.cta import CtaTimeline
from simkit.schedules.tile_timeline import EXP2_OPS, F32_BYTES, MOST_TILES
from traces.events import Trace

# Of a state, in every lane of its warp: difference, product, exp2, sum.
_WEIGHT_OPS = EXP2_OPS + 3


def merge_states(
    gpu: Gpu, pairs: int, states: int, d: int, *, state_bytes: int = 4, output_bytes: int = 4
) -> Trace:
    """The first CTA, which merges ``states`` states of each of up to four of ``pairs`` heads of
    rows: all LSEs for their maximum, then state by state.

    ``d``: head dimension; ``state_bytes``, ``output_bytes``: of a value of o. Errors: `ShapeError`
    for no pairs, or more states than a timeline shows.
    """
    if pairs < 1 or not 0 <= states <= MOST_TILES:
        raise ShapeError(
            f"{pairs} heads of rows with {states} states each: a timeline shows 1 or more with "
            f"0 to {MOST_TILES}"
        )
    cta = CtaTimeline(gpu, "merge_states CTA")
    counts = [states] * min(pairs, PAIRS_PER_CTA)
    merge_pairs(cta, counts, d, state_bytes=state_bytes, output_bytes=output_bytes)
    return cta.trace(f"merge_states on {gpu.name}")


def merge_pairs(
    cta: CtaTimeline,
    states: Sequence[int],
    d: int,
    *,
    state_bytes: int = F32_BYTES,
    output_bytes: int = F32_BYTES,
) -> None:
    """What a CTA does that merges ``states`` states of each of its pairs, a warp each, all of which
    have keys.
    """
    pairs, every = len(states), sum(states)
    if every:
        cta.load("LSEs", every * F32_BYTES)
        cta.wait_for_loads()
        cta.lanes("maximum", every * WARP_LANES, "softmax")
        cta.wait_for_compute()
    for state in range(max(states)):
        own = sum(state < count for count in states)
        cta.load(f"LSE {state}", own * F32_BYTES)
        cta.load(f"O {state}", own * d * state_bytes)
        cta.wait_for_loads()
        cta.lanes(f"weight {state}", own * WARP_LANES * _WEIGHT_OPS, "softmax")
        cta.lanes(f"sum {state}", own * d)
        cta.wait_for_compute()
    cta.lanes("divide", pairs * d)
    cta.store("O", pairs * d * output_bytes)
    cta.store("LSE", pairs * F32_BYTES)
