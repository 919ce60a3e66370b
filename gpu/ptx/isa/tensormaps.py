"""Tensor maps in memory.  Source: PTX ISA 8.8, 9.7.9.28 and 9.7.13.16."""

from __future__ import annotations

from collections.abc import Mapping

from gpu.ptx import tensormaps
from gpu.ptx.emit import Emitter
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Immediate, Instruction
from gpu.tensor_map import DESCRIPTOR_BYTES, REPLACEABLE

Modifiers = Mapping[str, str]

_INDEXED = "box_dim global_dim global_stride element_stride"


@ptx("tensormap.replace.tile.<field>{.<space>}.b1024.<type>", operands=2, results=0, pure=False,
     field=" ".join(f for f in REPLACEABLE if f not in _INDEXED.split()),
     space="global shared::cta", type="b32 b64")  # fmt: skip
@ptx("tensormap.replace.tile.<field>{.<space>}.b1024.<type>", operands=3, results=0, pure=False,
     field=_INDEXED, space="global shared::cta", type="b32 b64")  # fmt: skip
def replace(e: Emitter, i: Instruction, m: Modifiers) -> None:
    place, *ordinals, value = i.operands
    ordinal = ordinals[0] if ordinals else Immediate(0)
    if not isinstance(ordinal, Immediate):
        raise e.error("the dimension must be a constant")
    base, offset = e.address(place)
    space = m.get("space", "generic").removesuffix("::cta")
    code = "u8" if m["type"] == "b64" else "u4"
    e.line(
        f"{e.bind(tensormaps.replace)}(x, {space!r}, {base}, {offset}, {m['field']!r},"
        f" {int(ordinal.value)}, {e.read(value, code)}, {e.mask}, {e.site})"
    )


@ptx(
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.<scope>.sync.aligned",
    operands=3,
    results=0,
    pure=False,
    scope="cta cluster gpu sys",
)
def publish(e: Emitter, i: Instruction, m: Modifiers) -> None:
    target, source, size = i.operands
    if not isinstance(size, Immediate) or int(size.value) != DESCRIPTOR_BYTES:
        raise e.error(f"tensormap.cp_fenceproxy copies {DESCRIPTOR_BYTES} bytes")
    places = ", ".join(
        f"{base}, {offset}" for base, offset in (e.address(target), e.address(source))
    )
    e.converged()
    e.line(f"{e.bind(tensormaps.publish)}(x, {places}, {e.mask}, {e.site})")
