"""The machine's accounting: who moved how many bytes, and what does not fit."""

from __future__ import annotations

import numpy as np
import pytest

from simkit.errors import CapacityError, MemoryAccessError, ShapeError, SimkitError
from simkit.machine.gpus import GPUS
from simkit.machine.machine import Machine
from simkit.machine.memory import TensorTraffic


def test_tiles_of_whole_sectors_move_what_they_request() -> None:
    machine = Machine("h100", "device")
    assert machine.is_device
    q = machine.tensor("q", np.arange(2 * 128 * 4 * 64, dtype=np.uint16).reshape(2, 128, 4, 64))
    o = machine.tensor("o", np.zeros_like(q.array))
    with machine.cta(shared_bytes=48 * 1024) as cta:
        tile = cta.load(q[1, 64:128, 3])
        cta.store(o[1, 64:128, 3], tile)
    assert np.array_equal(o.array[1, 64:, 3], q.array[1, 64:, 3])
    assert not o.array[0].any()
    moved = 64 * 64 * 2
    assert machine.traffic == {
        ("q", "read"): TensorTraffic("q", "read", moved, moved),
        ("o", "write"): TensorTraffic("o", "write", moved, moved),
    }
    assert machine.hbm_bytes == machine.requested_bytes == 2 * moved
    assert (machine.sram_peak, machine.ctas) == (48 * 1024, 1)


def test_a_load_is_a_copy() -> None:
    machine = Machine()
    x = machine.tensor("x", np.zeros(64, np.float32))
    with machine.cta() as cta:
        cta.load(x[:])[0] = 1
    assert x.array[0] == 0


def test_interleaved_16_byte_loads_touch_each_sector_twice() -> None:
    # Lane i reads bytes 32 i to 32 i + 15 with one instruction and the rest with another.
    machine = Machine()
    kv = machine.tensor("kv", np.zeros((2, 576), np.uint16)).reshape(2, 36, 2, 8)
    with machine.cta() as cta:
        for half in (0, 1):
            cta.load(kv[1, :32, half])
    assert machine.traffic["kv", "read"] == TensorTraffic("kv", "read", 1024, 2 * 1024)


def test_every_lane_reading_one_word() -> None:
    machine = Machine()
    m = machine.tensor("m_partial", np.zeros((3, 5), np.float32))
    with machine.cta() as cta:
        cta.load(m[:, 2], vector=4, share=64)
    # Three splits × two warps, one sector each.
    assert machine.traffic["m_partial", "read"] == TensorTraffic(
        "m_partial", "read", 3 * 64 * 4, 3 * 2 * 32
    )


def test_four_scales_read_by_eight_lanes_each() -> None:
    machine = Machine()
    cache = machine.tensor("cache", np.zeros((3, 656), np.uint8))
    with machine.cta() as cta:
        cta.load(cache[1, 512:528], vector=4, share=8)
    assert machine.traffic["cache", "read"] == TensorTraffic("cache", "read", 128, 32)


def test_reading_three_times() -> None:
    machine = Machine()
    s = machine.tensor("s", np.zeros((4, 64), np.uint16))
    with machine.cta() as cta:
        cta.load(s[2], vector=2, repeat=3)
        with pytest.raises(ShapeError, match="repeat"):
            cta.load(s[2], vector=2, repeat=0)
    assert machine.traffic["s", "read"] == TensorTraffic("s", "read", 384, 384)


def test_an_unaligned_row_moves_more_than_it_requests() -> None:
    machine = Machine()
    s = machine.tensor("s", np.zeros((4, 33), np.uint16))
    with machine.cta() as cta:
        cta.load(s[1, :32], vector=2)  # bytes 66 to 129 of the tensor: sectors 2, 3 and 4
    assert machine.traffic["s", "read"] == TensorTraffic("s", "read", 64, 96)


def test_nothing_moved_leaves_no_row() -> None:
    machine = Machine()
    k = machine.tensor("k", np.zeros((0, 64), np.uint16))
    with machine.cta() as cta:
        assert cta.load(k[:]).shape == (0, 64)
    assert machine.traffic == {}
    assert machine.hbm_bytes == 0


@pytest.mark.parametrize("name", GPUS)
def test_shared_memory_ends_at_the_opt_in_limit(name: str) -> None:
    machine = Machine(name)
    limit = machine.gpu.smem_per_block_optin
    with machine.cta(shared_bytes=limit):
        pass
    with (
        pytest.raises(CapacityError, match=rf"{limit + 1} is outside 0 to {limit} on {name}"),
        machine.cta(shared_bytes=limit + 1),
    ):
        pass
    with pytest.raises(CapacityError, match="threads"), machine.cta(threads=1025):
        pass


def test_names_are_unique_and_addresses_do_not_overlap() -> None:
    machine = Machine()
    tensors = [machine.tensor(f"t{size}", np.zeros(size, np.uint8)) for size in (0, 1, 256, 257)]
    ends = [tensor.address + max(1, tensor.array.nbytes) for tensor in tensors]
    assert all(t.address >= end for t, end in zip(tensors[1:], ends, strict=False))
    assert list(machine.tensors) == ["t0", "t1", "t256", "t257"]
    with pytest.raises(SimkitError, match="'t1' is already"):
        machine.tensor("t1", np.zeros(1))


def test_what_a_machine_refuses() -> None:
    with pytest.raises(SimkitError, match="a100, h100"):
        Machine("v100")
    with pytest.raises(SimkitError, match="'exact'"):
        Machine("h100", "exact")  # type: ignore[arg-type]
    machine = Machine()
    frozen = np.zeros(16, np.float32)
    frozen.flags.writeable = False
    x = machine.tensor("x", frozen)
    with machine.cta() as cta, pytest.raises(MemoryAccessError, match="read-only"):
        cta.store(x[:], np.ones(16, np.float32))


def test_lanes_with_addresses_of_their_own() -> None:
    machine = Machine("h100", "device")
    table = machine.tensor("table", np.arange(100, dtype=np.int32))
    out = machine.allocate("out", (64,), np.float32)
    index = np.array([[0, 50], [1, 50], [90, 50], [7, 99]])
    active = np.array([[True, True], [True, True], [True, True], [False, True]])
    with machine.cta() as cta:
        assert (cta.load_lanes(table, index, active) == [[0, 50], [1, 50], [90, 50], [0, 99]]).all()
        pairs = cta.load_lanes(table, np.array([[2], [4]]), vector=8)
        assert (pairs == [[[2, 3]], [[4, 5]]]).all()
        values = np.array([[1.0], [2.0]], np.float32)
        cta.store_lanes(out, np.array([[3], [5]]), values, np.array([[True], [False]]))
    assert out.array[3] == 1.0
    assert np.isnan(out.array[5])
    # Elements 0 and 1 share a sector, 90 has one; 50 and 99 have one each; then the pair's.
    assert machine.traffic["table", "read"] == TensorTraffic("table", "read", 7 * 4 + 16, 5 * 32)
    assert machine.traffic["out", "write"] == TensorTraffic("out", "write", 4, 32)


@pytest.mark.parametrize("element", [-1, 99])
def test_a_lane_outside_the_tensor(element: int) -> None:
    machine = Machine()
    table = machine.tensor("table", np.arange(100, dtype=np.int32))
    with machine.cta() as cta, pytest.raises(MemoryAccessError, match=f"element {element}"):
        cta.load_lanes(table, np.array([[element]]), vector=8)


def test_a_misaligned_lane() -> None:
    machine = Machine()
    table = machine.tensor("table", np.arange(100, dtype=np.int32))
    with machine.cta() as cta, pytest.raises(MemoryAccessError, match="misaligned"):
        cta.load_lanes(table, np.array([[3]]), vector=8)
