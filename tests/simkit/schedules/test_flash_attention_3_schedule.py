"""FlashAttention-3: what its published kernels choose, their shared memory, and multicast."""

from __future__ import annotations

from typing import Any

import pytest

from simkit.errors import ShapeError
from simkit.machine.gpus import gpu
from simkit.schedules.flash_attention_3 import FlashAttention3
from simkit.schedules.grid import run_launch
from simkit.schedules.shape import AttentionShape

H100 = gpu("h100")
EXACT = 1e-6  # durations are rounded up to 2^-20 of a cycle


def shape(d: int, *, causal: bool = False, d_v: int = 0, element: int = 2) -> AttentionShape:
    return AttentionShape(1, 2, 768, 768, d, causal, d_v=d_v, element=element)


@pytest.mark.parametrize(
    ("d", "causal", "element", "tiles", "ping_pong", "cluster", "smem"),
    [
        # max(Q, O) + 2 K + 2 V, and P where it is not in registers (d = 64 without a mask, 96).
        (64, False, 2, (192, 192), True, 1, 192 * 64 * 2 + 4 * 192 * 64 * 2 + 192 * 192 * 2),
        (64, True, 2, (192, 128), True, 1, 192 * 64 * 2 + 4 * 128 * 64 * 2),
        (96, False, 2, (192, 144), True, 1, 192 * 96 * 2 + 4 * 144 * 96 * 2 + 192 * 144 * 2),
        (96, True, 2, (192, 144), True, 1, 192 * 96 * 2 + 4 * 144 * 96 * 2 + 192 * 144 * 2),
        (128, False, 2, (128, 176), True, 2, 128 * 128 * 2 + 4 * 176 * 128 * 2),
        (128, True, 2, (128, 128), True, 1, 128 * 128 * 2 + 4 * 128 * 128 * 2),
        # Over 128, warpgroups that overlap softmax with PV take no turns.
        (192, False, 2, (128, 112), False, 2, 128 * 192 * 2 + 4 * 112 * 192 * 2),
        (256, False, 2, (128, 80), False, 2, 128 * 256 * 2 + 4 * 80 * 256 * 2),
        (64, False, 1, (192, 160), False, 1, 192 * 64 * 2 + 4 * 160 * 64),
        (96, False, 1, (192, 128), False, 1, 192 * 96 * 2 + 4 * 128 * 96),
        (128, False, 1, (128, 224), True, 1, 128 * 128 * 2 + 4 * 224 * 128),
        (192, False, 1, (128, 160), True, 2, 128 * 192 * 2 + 4 * 160 * 192),
        (256, False, 1, (128, 128), True, 1, 128 * 256 * 2 + 4 * 128 * 256),
    ],
)
def test_published_choices(
    d: int, causal: bool, element: int, tiles: tuple[int, int], ping_pong: bool, cluster: int,
    smem: int,
) -> None:  # fmt: skip
    problem = shape(d, causal=causal, element=element)
    own = FlashAttention3().chosen(problem)
    assert (own.tile_q, own.tile_kv) == tiles
    assert (own.overlap, own.ping_pong, own.cluster) == (True, ping_pong, cluster)
    (launch,) = FlashAttention3().launches(H100, problem)
    assert launch.shared_bytes == smem <= H100.smem_per_block_optin
    assert launch.persistent == (element == 2)


def test_without_overlap_two_warpgroups_take_turns() -> None:
    alone = FlashAttention3(overlap=False)
    assert [alone.chosen(shape(d)).ping_pong for d in (64, 128, 256)] == [False, True, True]


def test_a_wide_v_beside_a_narrow_k() -> None:
    """V of 128 takes the kernel for 256: smaller tiles, and no overlap."""
    own = FlashAttention3().chosen(shape(64, d_v=128))
    assert (own.tile_q, own.tile_kv, own.overlap) == (128, 96, False)
    assert FlashAttention3().chosen(shape(192, d_v=128)).tile_kv == 128


@pytest.mark.parametrize("cluster", [1, 2])
def test_multicast_halves_what_leaves_l2_and_not_what_leaves_hbm(cluster: int) -> None:
    """768 keys are 6 tiles of 128; 6 tiles of queries read them, alone or in pairs."""
    problem = shape(128)
    (launch,) = FlashAttention3(tile_kv=128, cluster=cluster).launches(H100, problem)
    run = run_launch(H100, launch)
    moved = {name: run.busy[name] * run.rates[name] for name in ("l2", "hbm")}
    others = 2 * problem.q_bytes
    assert moved["l2"] == pytest.approx(6 * problem.kv_bytes / cluster + others, rel=EXACT)
    assert moved["hbm"] == pytest.approx(problem.kv_bytes + others, rel=EXACT)


def test_causal_tiles_are_given_out_longest_first() -> None:
    (launch,) = FlashAttention3().launches(H100, shape(128, causal=True))
    assert [item.length for item in launch.items] == [6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1]


@pytest.mark.parametrize(
    ("choices", "wrong", "message"),
    [
        ({"cluster": 0}, {}, "cluster must be 1, or 2 .* got 0"),
        ({"cluster": 3}, {}, "got 3"),
        ({"cluster": 2}, {"causal": True}, "without a mask, got 2"),
        ({"cluster": 2, "tile_q": 192, "tile_kv": 80}, {"q_len": 500}, "got 2 for 500 queries"),
        ({}, {"d": 257}, "at most 256, got 257"),
        ({}, {"d": 64, "d_v": 512}, "at most 256, got 512"),
        ({}, {"d": 128, "d_v": 256}, "at most 128, got 256"),
        ({}, {"element": 4}, "1 or 2 bytes, got 4"),
    ],
)
def test_what_the_kernel_does_not_have(
    choices: dict[str, Any], wrong: dict[str, Any], message: str
) -> None:
    sizes = {"batch": 1, "heads": 2, "q_len": 768, "kv_len": 768, "d": 128} | wrong
    with pytest.raises(ShapeError, match=message):
        FlashAttention3(**choices).launches(H100, AttentionShape(**sizes))
