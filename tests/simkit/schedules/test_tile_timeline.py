"""Tile timelines: their bytes are the model's, their times follow from the device table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit.algorithms import flash_attention as flash
from simkit.algorithms import flash_decoding as decoding
from simkit.algorithms import fp8_kv_cache as kv_cache
from simkit.algorithms import naive_attention as naive
from simkit.algorithms.problem import BF16, AttentionProblem
from simkit.errors import ShapeError
from simkit.machine.gpus import gpu
from simkit.machine.machine import Machine
from simkit.machine.memory import unbacked
from simkit.schedules import tile_timeline
from traces.events import Trace

H100 = gpu("h100")
# One SM's share of HBM, bytes per cycle: 3352.32e9 / 132 / 1.8295e9.
BYTES_PER_CYCLE = 13.8816


def moved(trace: Trace, kind: str) -> int:
    return sum(int(event.args["bytes"]) for event in trace.events if event.kind == kind)


def counted(run: Callable[[Machine], object], *directions: str) -> int:
    machine = Machine(H100, "none")
    run(machine)
    return sum(row.requested for row in machine.traffic.values() if row.direction in directions)


@given(st.integers(1, 64), st.integers(0, 300), st.sampled_from((64, 128)), st.booleans())
@settings(max_examples=25)
def test_flash_attention_moves_the_bytes_of_the_model(
    q_len: int, kv_len: int, d: int, causal: bool
) -> None:
    """With one tile of queries, and one head, the CTA is the whole launch."""
    problem = AttentionProblem.sized(q_len=q_len, kv_len=kv_len, d=d, causal=causal)
    trace = tile_timeline.flash_attention(H100, problem)
    for kind, direction in (("load", "read"), ("store", "write")):
        predicted = counted(lambda machine: flash.flash_attention(machine, problem), direction)
        assert moved(trace, kind) == predicted


@given(st.integers(1, 32), st.integers(0, 32), st.sampled_from((64, 128)))
@settings(max_examples=15)
def test_naive_attention_moves_the_bytes_of_the_model(q_len: int, kv_len: int, d: int) -> None:
    """With one tile of S and at most eight rows, each kernel has one CTA."""
    problem = AttentionProblem.sized(q_len=min(q_len, 8), kv_len=kv_len, d=d)
    trace = tile_timeline.naive_attention(H100, problem)
    for kind, direction in (("load", "read"), ("store", "write")):
        predicted = counted(lambda machine: naive.naive_attention(machine, problem), direction)
        assert moved(trace, kind) == predicted


def test_flash_decoding_moves_the_bytes_of_the_model() -> None:
    """One split and one head: both kernels have one CTA; all its threads read the two numbers."""
    problem = AttentionProblem.sized(kv_len=150, d=64)
    trace = tile_timeline.flash_decoding(H100, problem, 1)
    predicted = counted(lambda machine: decoding.flash_decoding(machine, problem, 1), "read")
    assert moved(trace, "load") == predicted - (64 - 1) * 2 * 4
    predicted = counted(lambda machine: decoding.flash_decoding(machine, problem, 1), "write")
    assert moved(trace, "store") == predicted


def test_fp8_kv_cache_moves_the_bytes_of_the_record() -> None:
    trace = tile_timeline.fp8_kv_cache(H100, 3)
    assert moved(trace, "load") == moved(trace, "store") == 3 * (576 * 2 + 656)
    kv = unbacked((3, 576), BF16)
    assert counted(lambda machine: kv_cache.fp8_kv_quantize(machine, kv), "write") == 3 * 656
    with pytest.raises(ShapeError, match="at least one token"):
        tile_timeline.fp8_kv_cache(H100, 0)


def test_flash_attention_by_hand() -> None:
    """Two tiles: Q 16 KiB, then K and V of 16 KiB each, twice; products of 2^20 FLOP each."""
    trace = tile_timeline.flash_attention(H100, AttentionProblem.sized(q_len=64, kv_len=128, d=128))
    tile_cycles = 64 * 128 * 2 / BYTES_PER_CYCLE
    events = {event.name: event for event in trace.events}
    assert events["load Q"].duration == pytest.approx(tile_cycles, rel=1e-4)
    # The first product waits for Q, K and V; the next tiles are copied meanwhile.
    first = events["S 0"]
    assert first.start == pytest.approx(3 * tile_cycles, rel=1e-4)
    assert first.duration == 2 * 64 * 64 * 128 / 4096
    assert events["load K 1"].start == first.start
    assert events["softmax 0"].duration == (64 * 64 * 13 + 64 * 128) / 128
    assert events["S 1"].start == pytest.approx(5 * tile_cycles, rel=1e-4)
    assert events["store O"].start == events["O 1"].stop
    assert trace.stop == events["store LSE"].stop


def test_copies_overlap_with_arithmetic_only_where_the_kernel_does() -> None:
    problem = AttentionProblem.sized(q_len=64, kv_len=512, d=128)
    assert _overlaps(tile_timeline.flash_attention(H100, problem))
    assert not _overlaps(tile_timeline.naive_attention(H100, problem))
    decode = AttentionProblem.sized(kv_len=512, d=128)
    assert _overlaps(tile_timeline.flash_decoding(H100, decode, 2))


def test_a_faster_memory_is_faster() -> None:
    problem = AttentionProblem.sized(q_len=64, kv_len=512, d=128)
    h100, h200 = (tile_timeline.flash_attention(gpu(name), problem) for name in ("h100", "h200"))
    assert h200.stop < h100.stop


@pytest.mark.parametrize("algorithm", ["naive_attention", "flash_attention", "flash_decoding"])
def test_endless_timelines_are_refused(algorithm: str) -> None:
    draw = getattr(tile_timeline, algorithm)
    splits = (1,) if algorithm == "flash_decoding" else ()
    with pytest.raises(ShapeError, match=r"kv_len 2000000 is \d+ tiles .* shows 20000 at most"):
        draw(H100, AttentionProblem.sized(kv_len=2_000_000, d=64), *splits)


def _overlaps(trace: Trace) -> bool:
    """Whether some copy and some arithmetic of one CTA take place at the same time."""
    copies = [event for event in trace.events if event.kind in ("load", "store")]
    others = [event for event in trace.events if event.kind not in ("load", "store")]
    return any(
        copy.track.process == other.track.process
        and copy.start < other.stop - 1e-6
        and other.start < copy.stop - 1e-6
        for copy in copies
        for other in others
    )
