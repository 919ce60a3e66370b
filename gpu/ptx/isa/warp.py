"""Exchange between the lanes of a warp: shuffles, votes, matches, reductions.

Source: PTX ISA 8.8, 9.7.9.6-7, 9.7.13.10-14.

Registers are (32, warps), so a lane's neighbour is another row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np

from gpu.ptx.emit import Emitter
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Immediate, Instruction, Pair

Array = np.ndarray
Modifiers = Mapping[str, str]

_LANES = np.arange(32, dtype=np.int64)[:, None]


def source_lanes(mode: str, b: Array, c: Array) -> tuple[Array, Array]:
    """For each lane, the lane shfl reads from and whether that is in its segment.

    The ISA's pseudo-code.
    """
    lane = _LANES
    b = (b & np.uint32(31)).astype(np.int64)
    clamp = (c & np.uint32(31)).astype(np.int64)
    segment = (c >> np.uint32(8) & np.uint32(31)).astype(np.int64)
    highest = (lane & segment) | (clamp & ~segment)
    lowest = lane & segment
    if mode == "up":
        source = lane - b
        inside = source >= highest
    elif mode == "down":
        source = lane + b
        inside = source <= highest
    elif mode == "bfly":
        source = lane ^ b
        inside = source <= highest
    else:
        source = lowest | (b & ~segment)
        inside = source <= highest
    return np.where(inside, source, lane), inside


@cache
def constant_lanes(mode: str, b: int, c: int) -> tuple[Array, Array]:
    """source_lanes for constants: one row index per lane."""
    b_word, c_word = (np.array(value & 0xFFFFFFFF, np.uint32) for value in (b, c))
    source, inside = source_lanes(mode, b_word, c_word)
    return np.broadcast_to(source, (32, 1))[:, 0].copy(), np.broadcast_to(inside, (32, 1)).copy()


def shuffle(a: Array, mode: str, b: Array, c: Array) -> tuple[Array, Array]:
    source, inside = source_lanes(mode, b, c)
    source = np.broadcast_to(source, a.shape)
    return np.take_along_axis(a, source, axis=0), np.broadcast_to(inside, a.shape)


@ptx("shfl.sync.<mode>.b32", operands=5, mode="up down bfly idx", pure=False)
def shuffle_lanes(e: Emitter, i: Instruction, m: Modifiers) -> None:
    d, a, b, c, members = i.operands
    target, predicate = (d.first, d.second) if isinstance(d, Pair) else (d, None)
    e.converged(e.read(members, "u4"))
    value = f"x.array({e.read(a, 'u4')})"
    if isinstance(b, Immediate) and isinstance(c, Immediate):
        lanes, inside = constant_lanes(m["mode"], int(b.value), int(c.value))
        moved = e.fresh(f"{value}.take({e.bind(lanes)}, 0)")
        if predicate is not None:
            e.write(predicate, "b1", e.bind(inside))
    else:
        moved, valid = e.fresh("None"), e.fresh("None")
        e.line(
            f"{moved}, {valid} = {e.bind(shuffle)}({value}, {m['mode']!r}, {e.read(b, 'u4')},"
            f" {e.read(c, 'u4')})"
        )
        if predicate is not None:
            e.write(predicate, "b1", valid)
    e.write(target, "u4", moved)


def ballot(p: Array, mask: Array | None) -> Array:
    """The lanes with a true predicate as one word per warp; shape (1, warps)."""
    active = p if mask is None else p & mask
    packed = np.packbits(active, axis=0, bitorder="little")
    return np.ascontiguousarray(packed.T).view(np.uint32).reshape(1, -1)


def vote(p: Array, mask: Array | None, mode: str) -> Array:
    """Whether all, any or equally many ("uni": all or none) of the lanes have a true predicate."""
    any_true = np.asarray((p if mask is None else p & mask).any(axis=0, keepdims=True))
    all_true = np.asarray((p if mask is None else p | ~mask).all(axis=0, keepdims=True))
    return {"any": any_true, "all": all_true, "uni": all_true | ~any_true}[mode]


@ptx("vote.sync.<mode>.pred", operands=3, mode="all any uni", pure=False)
@ptx("vote.sync.ballot.b32", operands=3, pure=False)
def vote_lanes(e: Emitter, i: Instruction, m: Modifiers) -> None:
    d, a, members = i.operands
    e.converged(e.read(members, "u4"))
    p = f"x.array({e.read(a, 'b1')})"
    named = f"x.members({e.read(members, 'u4')}, {e.mask})"
    if "ballot" in m:
        e.write(d, "u4", f"{e.bind(ballot)}({p}, {named})")
    else:
        e.write(d, "b1", f"{e.bind(vote)}({p}, {named}, {m['mode']!r})")


@ptx("activemask.b32", operands=1, pure=False)
def active_mask(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.write(i.operands[0], "u4", f"x.active_mask({e.mask})")


@ptx("elect.sync", operands=2, pure=False)
def elect(e: Emitter, i: Instruction, m: Modifiers) -> None:
    d = i.operands[0]
    if not isinstance(d, Pair):
        raise e.error("elect.sync needs d|p")
    members = e.read(i.operands[1], "u4")
    e.converged(members)
    leader = e.fresh(f"{e.bind(lowest_bit)}(x.array({members}))")
    e.write(d.first, "u4", leader)
    e.write(d.second, "b1", f"{leader} == {e.bind(_LANES)}")


def lowest_bit(members: Array) -> Array:
    """Position of the lowest set bit."""
    isolated = members & (~members + np.uint32(1))
    return np.bitwise_count(isolated - np.uint32(1)).astype(np.uint32)


def match_any(a: Array, named: Array) -> Array:
    """For each lane, the named lanes with the same value."""
    same = (a[:, None, :] == a[None, :, :]) & named[None]
    weights = (np.uint32(1) << np.arange(32, dtype=np.uint32))[None, :, None]
    return (same * weights).sum(axis=1, dtype=np.uint32)


@ptx("match.any.sync.<type>", operands=3, type="b32 b64", pure=False)
@ptx("match.all.sync.<type>", operands=3, type="b32 b64", pure=False)
def match_lanes(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = "u4" if m["type"] == "b32" else "u8"
    d, a, members = i.operands
    e.converged(e.read(members, "u4"))
    named = e.fresh(f"x.members({e.read(members, 'u4')}, {e.mask})")
    same = e.fresh(f"{e.bind(match_any)}(x.array({e.read(a, code)}), {named})")
    if "any" in m:
        e.write(d, "u4", same)
        return
    full = e.fresh(f"{e.bind(ballot)}({named}, None)")
    equal = e.fresh(f"{same} == {full}")
    if isinstance(d, Pair):
        e.write(d.second, "b1", equal)
        d = d.first
    e.write(d, "u4", f"{e.bind(np.where)}({equal}, {full}, {e.constant(0, 'u4')})")


_REDUCTIONS = {
    "add": (np.add, 0),
    "and": (np.bitwise_and, 0xFFFFFFFF),
    "or": (np.bitwise_or, 0),
    "xor": (np.bitwise_xor, 0),
    "min": (np.minimum, None),
    "max": (np.maximum, None),
}


def reduce_lanes(a: Array, named: Array, operation: str) -> Array:
    """One value per warp over its named lanes; integer, so the order does not matter."""
    function, identity = _REDUCTIONS[operation]
    if identity is None:
        limits = np.iinfo(a.dtype)
        identity = limits.max if operation == "min" else limits.min
    filled = np.where(named, a, np.array(identity & 0xFFFFFFFF, np.uint32).view(a.dtype))
    return function.reduce(filled, axis=0, keepdims=True, dtype=a.dtype)


@ptx(
    "redux.sync.<operation>.<type>", operands=3, operation="add min max", type="u32 s32", pure=False
)
@ptx("redux.sync.<operation>.b32", operands=3, operation="and or xor", pure=False)
def reduce_warp(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = "i4" if m.get("type") == "s32" else "u4"
    d, a, members = i.operands
    e.converged(e.read(members, "u4"))
    named = f"x.members({e.read(members, 'u4')}, {e.mask})"
    e.write(
        d, code, f"{e.bind(reduce_lanes)}(x.array({e.read(a, code)}), {named}, {m['operation']!r})"
    )
