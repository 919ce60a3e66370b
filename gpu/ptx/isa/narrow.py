"""cvt to and from packed numbers of 4, 6 and 8 bits, and powers of two (ue8m0).

Source: PTX ISA 8.8, 9.7.9.21; the arithmetic is in simkit.numerics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from gpu.ptx.emit import Emitter
from gpu.ptx.isa.half import half_lanes, pack
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Instruction, Operand
from simkit.numerics import convert, formats, scalar

Array = np.ndarray
Modifiers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Packed:
    """A pair of narrow numbers: ``spacing`` bits from one to the next, ``code`` of the pair."""

    encode: Callable[[Array], Array]
    decode: Callable[[Array], Array]
    spacing: int
    code: str


PAIRS: dict[str, Packed] = {
    "e4m3x2": Packed(convert.float32_to_e4m3, convert.e4m3_to_float32, 8, "u2"),
    "e5m2x2": Packed(convert.float32_to_e5m2, convert.e5m2_to_float32, 8, "u2"),
    "e2m3x2": Packed(convert.float32_to_e2m3, convert.e2m3_to_float32, 8, "u2"),
    "e3m2x2": Packed(convert.float32_to_e3m2, convert.e3m2_to_float32, 8, "u2"),
    "e2m1x2": Packed(convert.float32_to_e2m1, convert.e2m1_to_float32, 4, "u1"),
}
_FLOATS = " ".join(PAIRS)


def join(low: Array, high: Array, spacing: int, code: str) -> Array:
    """Two narrow numbers as one word."""
    return (low.astype(code) | high.astype(code) << np.dtype(code).type(spacing)).astype(code)


def parts(word: Array, spacing: int) -> tuple[Array, Array]:
    """The two narrow numbers of a word, the lower one first."""
    kind = word.dtype.type
    mask = kind((1 << spacing) - 1)
    return (word & mask).astype(np.uint8), (word >> kind(spacing) & mask).astype(np.uint8)


def _write_pair(e: Emitter, target: Operand, values: list[str], spacing: int, code: str) -> None:
    """The lower number first."""
    e.write(target, code, f"{e.bind(join)}({values[0]}, {values[1]}, {spacing}, {code!r})")


def _read_pair(e: Emitter, operand: Operand, spacing: int, code: str) -> tuple[str, str]:
    low, high = e.fresh("None"), e.fresh("None")
    e.line(f"{low}, {high} = {e.bind(parts)}(x.array({e.read(operand, code)}), {spacing})")
    return low, high


@ptx("cvt.rn.satfinite{.relu}.<to>.f32", operands=3, to=_FLOATS)
@ptx("cvt.rn.satfinite{.relu}.<to>.<source>", operands=2, to=_FLOATS, source="f16x2 bf16x2")
def narrow_pair(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """Of two sources, the first is the upper number."""
    pair = PAIRS[m["to"]]
    if "source" in m:
        low, high = (lane[0] for lane in half_lanes(e, i, m["source"], slice(1, None)))
    else:
        high, low = (e.read(o, "f4") for o in i.operands[1:])
    encode, flag = e.bind(pair.encode), ", relu=True" if "relu" in m else ""
    values = [f"{encode}({v}{flag})" for v in (low, high)]
    _write_pair(e, i.operands[0], values, pair.spacing, pair.code)


@ptx("cvt.rn{.relu}.f16x2.<source>", operands=2, source=_FLOATS)
def widen_pair(e: Emitter, i: Instruction, m: Modifiers) -> None:
    pair = PAIRS[m["source"]]
    decode, encode = e.bind(pair.decode), e.bind(formats.encode_f16)
    values = [f"{decode}({part})" for part in _read_pair(e, i.operands[1], pair.spacing, pair.code)]
    if "relu" in m:
        values = [f"{e.bind(scalar.relu)}({v})" for v in values]
    e.write(i.operands[0], "u4", f"{e.bind(pack)}({encode}({values[0]}), {encode}({values[1]}))")


_LARGEST_POWER = np.float32(2.0**127)


def encode_power(x: Array, mode: str, is_finite: bool) -> Array:
    """ue8m0 bits, rounded up ("rp") or toward zero; too large: NaN unless ``is_finite``."""
    up = mode == "rp"
    codes = formats.encode_ue8m0(x, "up" if up else "zero")
    if not is_finite:
        size = np.abs(x)
        overflows = size > _LARGEST_POWER if up else np.isinf(size)
        codes = np.where(overflows, formats.UE8M0_NAN, codes)
    return codes


@ptx("cvt.<round>{.satfinite}.ue8m0x2.f32", operands=3, round="rz rp")
@ptx("cvt.<round>{.satfinite}.ue8m0x2.<source>", operands=2, round="rz rp", source="bf16x2")
def powers_of_two(e: Emitter, i: Instruction, m: Modifiers) -> None:
    if "source" in m:
        low, high = (lane[0] for lane in half_lanes(e, i, "bf16x2", slice(1, None)))
    else:
        high, low = (e.read(o, "f4") for o in i.operands[1:])
    encode = e.bind(encode_power)
    values = [f"{encode}({v}, {m['round']!r}, {'satfinite' in m})" for v in (low, high)]
    _write_pair(e, i.operands[0], values, 8, "u2")


@ptx("cvt.rn.bf16x2.ue8m0x2", operands=2)
def widen_powers(e: Emitter, i: Instruction, m: Modifiers) -> None:
    decode, encode = e.bind(formats.decode_ue8m0), e.bind(formats.encode_bf16)
    low, high = (f"{encode}({decode}({v}))" for v in _read_pair(e, i.operands[1], 8, "u2"))
    e.write(i.operands[0], "u4", f"{e.bind(pack)}({low}, {high})")
