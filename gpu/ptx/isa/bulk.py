"""Bulk copies, tensor copies, asynchronous stores and reductions.

Source: PTX ISA 8.8, 9.7.9.25.4 (bulk), 9.7.9.27 (tensor), 9.7.13.17-18 (st.async, red.async).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

import numpy as np

from gpu.ptx.bulk import Combination
from gpu.ptx.emit import Emitter
from gpu.ptx.isa.memory import ATOMICS, bound_combiner, combiner
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Address, Immediate, Instruction, Operand
from gpu.ptx.types import CODES, SIZES
from simkit.numerics.scalar import flush

Modifiers = Mapping[str, str]

_COMPLETE = "mbarrier::complete_tx::bytes"
_REDUCTIONS = "add min max inc dec and or xor"
_REDUCED = "u32 s32 u64 s64 b32 b64 f16 bf16 f64 f32"
_DIMENSIONS = "1d 2d 3d 4d 5d"


def _place(e: Emitter, operand: Operand) -> str:
    base, offset = e.address(operand)
    return f"{base}, {offset}"


def _extras(i: Instruction, m: Modifiers, first: int) -> Operand | None:
    """The CTA mask among the trailing operands: mask, then cache policy, each if named."""
    return i.operands[first] if "multicast::cluster" in m else None


def _check_count(e: Emitter, i: Instruction, m: Modifiers, base: int) -> None:
    expected = base + ("multicast::cluster" in m) + ("L2::cache_hint" in m)
    if len(i.operands) != expected:
        raise e.error(f"{len(i.operands)} operands where its modifiers need {expected}")


@ptx(
    f"cp.async.bulk.<to>.<source>.{_COMPLETE}{{.multicast::cluster}}{{.L2::cache_hint}}",
    operands=(4, 5, 6),
    results=0,
    pure=False,
    to="shared::cluster shared::cta",
    source="global shared::cta",
)
def bulk_to_shared(e: Emitter, i: Instruction, m: Modifiers) -> None:
    _check_count(e, i, m, 4)
    target, source, size, barrier = i.operands[:4]
    mask = _extras(i, m, 4)
    ctas = "None" if mask is None else e.read(mask, "u2")
    e.line(
        f"x.bulk_load({_place(e, target)}, {_place(e, source)}, {e.read(size, 'u4')},"
        f" {_place(e, barrier)}, {ctas}, None, {m['source']!r}, {m['to']!r}, {e.mask}, {e.site})"
    )


@ptx(
    f"cp.reduce.async.bulk.shared::cluster.shared::cta.{_COMPLETE}.<operation>.<type>",
    operands=4,
    results=0,
    pure=False,
    operation=_REDUCTIONS,
    type="b32 u32 s32 u64",
)
def bulk_reduce_shared(e: Emitter, i: Instruction, m: Modifiers) -> None:
    target, source, size, barrier = i.operands
    combine, code = bound_combiner(e, m)
    e.line(
        f"x.bulk_load({_place(e, target)}, {_place(e, source)}, {e.read(size, 'u4')},"
        f" {_place(e, barrier)}, None, ({combine}, {code!r}), 'shared::cta', 'shared::cluster',"
        f" {e.mask}, {e.site})"
    )


@ptx(
    "cp.async.bulk.global.shared::cta.bulk_group{.L2::cache_hint}",
    operands=(3, 4),
    results=0,
    pure=False,
)
def bulk_to_global(e: Emitter, i: Instruction, m: Modifiers) -> None:
    _check_count(e, i, m, 3)
    target, source, size = i.operands[:3]
    e.line(
        f"x.bulk_store({_place(e, target)}, {_place(e, source)}, {e.read(size, 'u4')}, None,"
        f" {e.mask}, {e.site})"
    )


@ptx(
    "cp.reduce.async.bulk.global.shared::cta.bulk_group{.L2::cache_hint}.<operation>{.noftz}.<type>",
    operands=(3, 4),
    results=0,
    pure=False,
    operation=_REDUCTIONS,
    type=_REDUCED,
)
def bulk_reduce(e: Emitter, i: Instruction, m: Modifiers) -> None:
    _check_count(e, i, m, 3)
    target, source, size = i.operands[:3]
    found = bulk_combination(m["operation"], m["type"])
    if found is None:
        raise e.error(f"there is no reduction {m['operation']} of {m['type']}")
    e.line(
        f"x.bulk_store({_place(e, target)}, {_place(e, source)}, {e.read(size, 'u4')},"
        f" {e.bind(found)}, {e.mask}, {e.site})"
    )


@cache
def bulk_combination(operation: str, kind: str) -> Combination:
    """How memory and data of a type combine; None: not at all."""
    if (operation, kind) == ("add", "f32"):
        return _add_flushing, "f4"
    return combiner(operation, kind)


def _add_flushing(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Bulk additions of float32 take and leave subnormals as zeros of their sign."""
    return flush(flush(old) + flush(new))


@ptx("cp.async.bulk.commit_group", operands=0, results=0, pure=False)
def commit(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.line(f"x.bulk_commit({e.mask})")


@ptx("cp.async.bulk.wait_group{.read}", operands=1, results=0, pure=False)
def wait_group(e: Emitter, i: Instruction, m: Modifiers) -> None:
    pending = i.operands[0]
    if not isinstance(pending, Immediate):
        raise e.error("cp.async.bulk.wait_group needs a constant")
    e.line(f"x.bulk_wait({int(pending.value)}, {'read' in m}, {e.mask}, {e.site})")


def _tensor(e: Emitter, operand: Operand, m: Modifiers) -> str:
    """Tensor map and coordinates of ``[map, {c0, c1}]``, innermost coordinate first."""
    if not isinstance(operand, Address) or not operand.coordinates:
        raise e.error("a tensor copy needs [tensorMap, {coordinates}]")
    if len(operand.coordinates) != int(m["dimension"][0]):
        raise e.error(f"{len(operand.coordinates)} coordinates for .{m['dimension']}")
    values = ", ".join(e.read(c, "i4") for c in operand.coordinates)
    return f"{_place(e, operand)}, ({values},)"


@ptx(
    f"cp.async.bulk.tensor.<dimension>.<to>.global{{.tile}}.{_COMPLETE}"
    "{.multicast::cluster}{.L2::cache_hint}",
    operands=(3, 4, 5),
    results=0,
    pure=False,
    dimension=_DIMENSIONS,
    to="shared::cluster shared::cta",
)
def tensor_to_shared(e: Emitter, i: Instruction, m: Modifiers) -> None:
    _check_count(e, i, m, 3)
    target, source, barrier = i.operands[:3]
    mask = _extras(i, m, 3)
    ctas = "None" if mask is None else e.read(mask, "u2")
    e.line(
        f"x.tensor_load({_place(e, target)}, {_tensor(e, source, m)}, {_place(e, barrier)}, {ctas},"
        f" {m['to']!r}, {e.mask}, {e.site})"
    )


@ptx(
    "cp.async.bulk.tensor.<dimension>.global.shared::cta{.tile}.bulk_group{.L2::cache_hint}",
    "cp.reduce.async.bulk.tensor.<dimension>.global.shared::cta.<operation>{.tile}.bulk_group"
    "{.L2::cache_hint}",
    operands=(2, 3),
    results=0,
    pure=False,
    dimension=_DIMENSIONS,
    operation=_REDUCTIONS,
)
def tensor_to_global(e: Emitter, i: Instruction, m: Modifiers) -> None:
    _check_count(e, i, m, 2)
    target, source = i.operands[:2]
    # The tensor map knows the type.
    combine = e.bind(partial(bulk_combination, m["operation"])) if "operation" in m else "None"
    e.line(
        f"x.tensor_store({_tensor(e, target, m)}, {_place(e, source)}, {combine}, {e.mask},"
        f" {e.site})"
    )


@ptx("cp.async.bulk.prefetch.L2.global{.L2::cache_hint}", operands=(2, 3), results=0, pure=False)
@ptx(
    "cp.async.bulk.prefetch.tensor.<dimension>.L2.global{.tile}{.L2::cache_hint}",
    operands=(1, 2),
    results=0,
    pure=False,
    dimension=_DIMENSIONS,
)
@ptx("prefetch{.<space>}.tensormap", operands=1, results=0, pure=False, space="param const")
def prefetch(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """Hints to the caches: nothing happens that a program can see."""


@ptx(
    f"st.async{{.weak}}{{.shared::cluster}}.{_COMPLETE}{{.shared::cluster}}{{.<vector>}}.<type>",
    operands=3,
    results=0,
    pure=False,
    vector="v2 v4",
    type="b32 b64 u32 u64 s32 s64 f32 f64",
)
def store(e: Emitter, i: Instruction, m: Modifiers) -> None:
    target, source, barrier = i.operands
    elements = e.elements(source)
    if len(elements) != int(m.get("vector", "v1")[1]):
        raise e.error(f"{len(elements)} sources for {m.get('vector', 'one element')}")
    code = f"u{SIZES[m['type']]}"
    values = ", ".join(f"x.array({e.read(o, code)})" for o in elements)
    e.line(
        f"x.store_async({_place(e, target)}, ({values},), {_place(e, barrier)}, {e.mask}, {e.site})"
    )


@ptx(
    f"red.async{{.relaxed}}{{.cluster}}{{.shared::cluster}}.{_COMPLETE}{{.shared::cluster}}"
    ".<operation>.<type>",
    operands=3,
    results=0,
    pure=False,
    operation=_REDUCTIONS,
    type="b32 u32 s32 u64",
)
def reduce(e: Emitter, i: Instruction, m: Modifiers) -> None:
    target, source, barrier = i.operands
    code = CODES[m["type"]]
    function = e.bind(ATOMICS[m["operation"]])
    e.line(
        f"x.reduce_async({_place(e, target)}, {function}, x.array({e.read(source, code)}),"
        f" {_place(e, barrier)}, {e.mask}, {e.site})"
    )
