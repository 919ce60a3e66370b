"""Timelines of batched attention: their bytes are the model's, tensor by tensor, for every variant;
their times follow from the device table.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from properties.batch_case import BatchCase, decode_case_plan
from properties.block_sparse_attention import BlockSparseCase
from properties.cascade_attention import CascadeCase
from simkit.algorithms import batch_decode as decode
from simkit.algorithms import batch_prefill_paged as paged
from simkit.algorithms import batch_prefill_ragged as ragged
from simkit.algorithms import block_sparse_attention as sparse
from simkit.algorithms.batch_problem import BatchProblem
from simkit.algorithms.cascade_attention import cascade_attention
from simkit.algorithms.elements import BF16
from simkit.errors import ShapeError, TableError
from simkit.layouts.ragged import Ragged
from simkit.machine.gpus import gpu
from simkit.machine.machine import Machine
from simkit.machine.memory import SECTOR_BYTES, unbacked
from simkit.planning.plan import coverage
from simkit.planning.prefill import prefill_plan
from simkit.schedules import batch_timeline
from traces.events import Trace

H100 = gpu("h100")
BYTES_PER_CYCLE = 13.8816  # one SM's share of HBM, as in test_tile_timeline

TENSORS = {
    "Q": "q", "K": "k", "V": "v", "pages": "kv_indices", "angles": "rope",
    "slopes": "alibi_slopes", "O": "o", "LSE": "lse",
}  # fmt: skip
"""What the model calls what an event's name begins with, where the names differ."""

VARIANTS = ("", "causal", "alibi", "rope", "custom_mask", "soft_cap+sink", "rope+custom_mask+sink")


def moved(trace: Trace, process: int = 0) -> Counter[tuple[str, str]]:
    """Bytes by tensor and direction, of one launch."""
    found: Counter[tuple[str, str]] = Counter()
    for event in trace.events:
        if event.kind in ("load", "store") and event.track.process == trace.processes[process]:
            name = event.name.split()[1]
            direction = "read" if event.kind == "load" else "write"
            found[TENSORS.get(name, name), direction] += int(event.args["bytes"])
    return found


def counted(machine: Machine) -> Counter[tuple[str, str]]:
    rows = machine.traffic.items()
    return Counter({key: row.sectors for key, row in rows if row.sectors})


def one_cta(**fields: Any) -> BatchCase:
    """A case whose launch has one CTA: a tile of queries, no splits."""
    return BatchCase(**{"split": -1, "tile_q": 16, **fields})


@given(
    st.integers(1, 16), st.integers(0, 300), st.sampled_from((64, 128)), st.sampled_from(VARIANTS),
    st.sampled_from(("same", "e4m3")), st.integers(-1, 90), st.sampled_from((0, 1, 16, 40)),
)  # fmt: skip
@settings(max_examples=50)
def test_prefill_moves_the_bytes_of_the_model(
    q_len: int, kv_len: int, d: int, variant: str, kv: str, window: int, page_size: int
) -> None:
    case = one_cta(
        q_lens=(q_len,), kv_lens=(kv_len,), d=d, dv=192 - d, variant=variant, kv=kv,
        window_left=window, page_size=page_size,
    )  # fmt: skip
    # Queries ahead of all keys have no angles.
    assume(not case.has("rope") or case.has("causal") or not 0 < kv_len < q_len)
    name, module = ("paged", paged) if page_size else ("ragged", ragged)
    machine = Machine(H100, "none")
    getattr(module, f"batch_prefill_{name}")(machine, case.problem, case.plan)
    draw = getattr(batch_timeline, f"batch_prefill_{name}")
    assert machine.ctas == 1
    assert moved(draw(H100, case.problem, case.plan)) == counted(machine)


@given(
    st.sampled_from((1, 2, 7, 16)), st.integers(0, 200), st.booleans(), st.sampled_from(VARIANTS),
    st.sampled_from((32, 64)),
)  # fmt: skip
@settings(max_examples=30)
def test_decoding_moves_the_bytes_of_the_model(
    group: int, kv_len: int, on_cuda_cores: bool, variant: str, index_bits: int
) -> None:
    case = one_cta(
        q_lens=(1,), kv_lens=(kv_len,), group=group, variant=variant, page_size=16,
        tile_q=group if on_cuda_cores else 16, cuda_cores=on_cuda_cores, index_bits=index_bits,
    )  # fmt: skip
    plan, machine = decode_case_plan(case), Machine(H100, "none")
    decode.batch_decode(machine, case.problem, plan, case.units)
    trace = batch_timeline.batch_decode(H100, case.problem, plan, case.units)
    assert moved(trace) == counted(machine)
    tracks = {track.name for track in trace.tracks}
    assert ("tensor cores" in tracks) == (not on_cuda_cores and kv_len > 0)


@pytest.mark.parametrize("elements", [False, True])
def test_block_rows_move_the_bytes_of_the_model(elements: bool) -> None:
    case = BlockSparseCase(rows=16, columns=300, density=0.6, elements=elements)
    machine = Machine(H100, "none")
    sparse.block_sparse_attention(machine, case.problem, case.plan)
    trace = batch_timeline.block_sparse_attention(H100, case.problem, case.plan)
    assert moved(trace) == counted(machine)


def test_split_and_merge_move_the_bytes_of_the_model() -> None:
    """One chunk, which a graph merges: the padded grid's other CTAs read that they have no item."""
    case = one_cta(q_lens=(3,), kv_lens=(100,), group=4, split=0, graph=True, page_size=16)
    machine = Machine(H100, "none")
    paged.batch_prefill_paged(machine, case.problem, case.plan)
    model = counted(machine)
    trace = batch_timeline.batch_prefill_paged(H100, case.problem, case.plan)
    launch, merge = moved(trace), moved(trace, 1)
    assert model.pop(("requests", "read")) == case.plan.grid * launch.pop(("requests", "read"))
    for name in ("o", "lse"):
        assert launch.pop((name, "write")) == model.pop((f"partial_{name}", "write"))
    # The merge has three CTAs, of four heads of one query each, of which one is drawn.
    assert 3 * merge["o", "read"] == model.pop(("partial_o", "read"))
    assert 3 * merge["o", "write"] == model.pop(("o", "write"))
    for key in (("lse", "write"), ("partial_lse", "read"), ("merge_indptr", "read")):
        del model[key]
    assert launch == model


def test_a_cascade_is_drawn_level_by_level() -> None:
    """Whoever has one request, one query and one head has one CTA a level."""
    case = CascadeCase(q_lens=(1,), groups=((1,), (1,)), kv_lens=((100,), (70,)), variant="causal")
    machine = Machine(H100, "none")
    cascade_attention(machine, case.levels)
    trace = batch_timeline.cascade_attention(H100, case.levels)
    model = counted(machine)
    assert [process.split(" CTA")[0] for process in trace.processes] == [
        "level 0: batch_prefill_paged", "level 1: batch_prefill_paged", "merge_states_variable",
    ]  # fmt: skip
    for number in (0, 1):
        level = moved(trace, number)
        for name, direction in list(level):
            if direction == "read":
                assert level[name, direction] == model[f"{name}_{number}", direction]
    written = sum(moved(trace, number)["o", "write"] for number in (0, 1))
    assert written == model["partial_o", "write"]
    assert moved(trace, 2)["o", "read"] == model["partial_o", "read"]
    # Launches follow one another.
    ends = [
        (min(event.start for event in events), max(event.stop for event in events))
        for process in trace.processes
        for events in [[event for event in trace.events if event.track.process == process]]
    ]
    assert all(before[1] <= after[0] for before, after in pairwise(ends))


def test_the_cta_with_most_keys_is_drawn() -> None:
    case = one_cta(q_lens=(1, 40, 1), kv_lens=(70, 300, 299), variant="causal", page_size=16)
    trace = batch_timeline.batch_prefill_paged(H100, case.problem, case.plan)
    # The last tile of request 1 sees all of its keys; the ones before it do not.
    assert trace.processes == ("batch_prefill_paged CTA: request 1, tile 2, keys 0 to 300",)
    spans = np.diff(
        coverage(case.plan, case.problem.queries.indptr, case.problem.kv_lens, group=1, causal=True)
    )
    assert spans.max() == 300
    # Of 40 queries the last tile has eight.
    assert moved(trace)["o", "write"] == 8 * 64 * 2


def test_the_merge_of_the_row_with_most_states_is_drawn() -> None:
    case = one_cta(q_lens=(1, 1), kv_lens=(70, 300), group=2, split=64, page_size=16)
    trace = batch_timeline.batch_decode(H100, case.problem, case.plan, "tensor_cores")
    merge = [event for event in trace.events if event.track.process == trace.processes[1]]
    loads = Counter(int(event.args["bytes"]) for event in merge if event.name.startswith("load O"))
    # One CTA merges both heads of both requests: two chunks there, five here.
    assert loads == {4 * 64 * 4: 2, 2 * 64 * 4: 3}


def test_by_hand() -> None:
    """Two tiles of keys of a 16-row tile on tensor cores: 2^18 FLOP a product."""
    case = one_cta(q_lens=(1,), kv_lens=(128,), group=4, d=128, dv=128, page_size=16)
    trace = batch_timeline.batch_decode(H100, case.problem, case.plan)
    events = {event.name: event for event in trace.events}
    names = [event.name for event in sorted(trace.events, key=lambda event: event.start)]
    assert names[:10] == [
        f"load {name}"
        for name in (
            "requests", "kv_indptr", "q_tiles", "kv_chunks", "kv_last_len", "pages 0", "pages 1",
            "Q", "K 0", "V 0",
        )
    ]  # fmt: skip
    assert events["load requests"].duration == pytest.approx(
        4 * SECTOR_BYTES / BYTES_PER_CYCLE, rel=1e-4
    )
    assert events["load K 0"].duration == pytest.approx(64 * 256 / BYTES_PER_CYCLE, rel=1e-4)
    first = events["S 0"]
    assert first.start == pytest.approx(events["load V 0"].stop)
    assert first.duration == 2 * 16 * 64 * 128 / 4096
    # The next tile is on its way meanwhile.
    assert events["load K 1"].start == first.start
    # 13 operations of a score, and O rescaled.
    assert events["softmax 0"].duration == (16 * 64 * 13 + 16 * 128) / 128
    assert events["store O"].start == events["O 1"].stop


@pytest.mark.parametrize(
    ("variant", "operations"), [("soft_cap", 18), ("alibi", 5), ("sink", 1), ("causal", 0)]
)
def test_logits_take_operations(variant: str, operations: int) -> None:
    """A scale; for a soft cap three products, an exp2 of ten, sum, difference, quotient, sign."""
    case = one_cta(q_lens=(1,), kv_lens=(64,), variant=variant)
    trace = batch_timeline.batch_prefill_ragged(H100, case.problem, case.plan)
    (softmax,) = (event for event in trace.events if event.name == "softmax 0")
    assert softmax.args["operations"] == 16 * (64 * (13 + operations) + 64)


def test_what_makes_no_timeline() -> None:
    nobody = one_cta(q_lens=(0, 0), kv_lens=(5, 6))
    with pytest.raises(ShapeError, match="no query, so there is no CTA to show"):
        batch_timeline.batch_prefill_ragged(H100, nobody.problem, nobody.plan)
    keys, queries = (Ragged.from_lengths(np.array([n])) for n in (64 * 20_000 + 1, 1))
    q, k = unbacked((1, 1, 64), BF16), unbacked((keys.total, 1, 64), BF16)
    endless = BatchProblem(q=q, k=k, v=k, queries=queries, keys=keys)
    plan = prefill_plan(
        queries.indptr, keys.lens, group=1, kv_heads=1, head_dim_v=64, sm_count=1, tile_q=16,
        disable_split=True,
    )  # fmt: skip
    with pytest.raises(ShapeError, match="20001 tiles of 64 keys; a timeline shows 20000"):
        batch_timeline.batch_prefill_ragged(H100, endless, plan)
    two = one_cta(q_lens=(2,), kv_lens=(64,), page_size=16)
    with pytest.raises(ShapeError, match="request 0 has 2"):
        batch_timeline.batch_decode(H100, two.problem, two.plan)
    with pytest.raises(TableError, match="the plan is for 2 requests"):
        batch_timeline.batch_prefill_paged(H100, two.problem, nobody.plan)
