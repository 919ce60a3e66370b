"""The timeline of appending: its bytes are the model's, and only FP8 takes arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simkit.algorithms.kv_append import E4M3, AppendProblem, kv_append
from simkit.algorithms.problem import BF16
from simkit.errors import ShapeError
from simkit.layouts.block_sparse import from_lengths
from simkit.layouts.paged import PagedCache
from simkit.machine.gpus import gpu
from simkit.machine.machine import Machine
from simkit.machine.memory import unbacked
from simkit.schedules import append_timeline

H100 = gpu("h100")


def problem(tokens: int, dtype: Any) -> AppendProblem:
    rows = from_lengths(np.full(tokens, 100), 16)
    new = unbacked((tokens, 4, 128), BF16)
    cache = PagedCache(unbacked((rows.blocks, 16, 4, 128), dtype))
    return AppendProblem(new, new, np.arange(tokens + 1), rows, cache, cache)


@pytest.mark.parametrize("dtype", [BF16, E4M3])
@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_one_cta_moves_what_the_model_counts(tokens: int, dtype: Any) -> None:
    p = problem(tokens, dtype)
    trace = append_timeline.kv_append(H100, p)
    machine = Machine(H100, "none")
    kv_append(machine, p)
    for kind, direction in (("load", "read"), ("store", "write")):
        moved = sum(int(e.args["bytes"]) for e in trace.events if e.kind == kind)
        rows = machine.traffic.values()
        assert moved == sum(row.sectors for row in rows if row.direction == direction)


def test_the_order_of_things() -> None:
    events = append_timeline.kv_append(H100, problem(9, E4M3)).events
    assert [event.name for event in sorted(events, key=lambda event: event.start)] == [
        *(f"load {name}" for name in ("positions", "batch_indices", "indptr", "indices")),
        *("load K new", "K to e4m3", "store K cache"),
        *("load V new", "V to e4m3", "store V cache"),
    ]
    copied = append_timeline.kv_append(H100, problem(9, BF16))
    assert {event.kind for event in copied.events} == {"load", "store"}
    # Four tokens: 4 x 128 bytes of table entries, and 4 KiB of K and of V, in and out.
    cycles = (4 * 128 + 4 * 4096) / 13.8816  # bytes per cycle, as in test_tile_timeline
    assert copied.stop == pytest.approx(cycles, rel=1e-4)


def test_no_token_is_no_timeline() -> None:
    with pytest.raises(ShapeError, match="no token is appended"):
        append_timeline.kv_append(H100, problem(0, BF16))
