"""Integer arithmetic, logic, shifts, bit fields and comparisons.

Source: PTX ISA 8.8, 9.7.1, 9.7.2, 9.7.6-9.7.8.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpu.ptx.emit import Emitter
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Immediate, Instruction, Pair
from gpu.ptx.types import CODES, SIZES
from simkit.numerics import scalar

Array = np.ndarray
Modifiers = Mapping[str, str]

_INT = "u16 u32 u64 s16 s32 s64"
_BITS = "b16 b32 b64"


def _wide(code: str) -> str:
    return f"{code[0]}{2 * int(code[1])}"


@ptx("add.<type>", "sub.<type>", "min.<type>", "max.<type>", operands=3, type=_INT)
def arithmetic(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = CODES[m["type"]]
    function = {
        "add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum,
    }[i.opcode]  # fmt: skip
    d, a, b = i.operands
    e.apply(function, d, code, e.read(a, code), e.read(b, code))


@ptx("min.relu.s32", "max.relu.s32", operands=3)
def clamped(e: Emitter, i: Instruction, m: Modifiers) -> None:
    function = e.bind(np.minimum if i.opcode == "min" else np.maximum)
    d, a, b = i.operands
    e.apply(
        np.maximum,
        d,
        "i4",
        f"{function}({e.read(a, 'i4')}, {e.read(b, 'i4')})",
        e.constant(0, "i4"),
    )


def add_saturating(a: Array, b: Array) -> Array:
    """s32 sum limited to the type's range."""
    return np.clip(a.astype(np.int64) + b, -(2**31), 2**31 - 1).astype(np.int32)


def sub_saturating(a: Array, b: Array) -> Array:
    """s32 difference limited to the type's range."""
    return np.clip(a.astype(np.int64) - b, -(2**31), 2**31 - 1).astype(np.int32)


@ptx("add.sat.s32", "sub.sat.s32", operands=3)
def saturating(e: Emitter, i: Instruction, m: Modifiers) -> None:
    function = e.bind(add_saturating if i.opcode == "add" else sub_saturating)
    d, a, b = i.operands
    e.write(d, "i4", f"{function}({e.read(a, 'i4')}, {e.read(b, 'i4')})")


def multiply_high(a: Array, b: Array) -> Array:
    """The upper half of the full product."""
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        wide = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
        return (a.astype(wide) * b.astype(wide) >> wide.type(bits)).astype(a.dtype)
    unsigned_a, unsigned_b = a.astype(np.uint64), b.astype(np.uint64)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, b0, b1 = unsigned_a & low, unsigned_a >> half, unsigned_b & low, unsigned_b >> half
    middle = a1 * b0 + (a0 * b0 >> half)
    other = a0 * b1 + (middle & low)
    high = a1 * b1 + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":
        zero = np.uint64(0)
        high = high - np.where(a < 0, unsigned_b, zero) - np.where(b < 0, unsigned_a, zero)
    return high.astype(a.dtype)


@ptx("mul.<part>.<type>", operands=3, part="lo hi", type=_INT)
@ptx("mul.<part>.<type>", operands=3, part="wide", type="u16 u32 s16 s32")
@ptx("mul24.lo.<type>", operands=3, type="u32 s32")
def multiply(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = CODES[m["type"]]
    d, a, b = i.operands
    part = m.get("part", "lo")
    if i.opcode == "mul24":
        e.apply(np.multiply, d, code, _low24(e, a, code), _low24(e, b, code))
    elif part == "lo":
        e.apply(np.multiply, d, code, e.read(a, code), e.read(b, code))
    elif part == "hi":
        e.write(d, code, f"{e.bind(multiply_high)}({e.read(a, code)}, {e.read(b, code)})")
    else:
        wide = _wide(code)
        e.apply(
            np.multiply, d, wide, f"{e.read(a, code)}.astype('{wide}')", _widened(e, b, code, wide)
        )


def _low24(e: Emitter, operand: object, code: str) -> str:
    eight = e.constant(8, code)
    return f"(({e.read(operand, code)} << {eight}) >> {eight})"  # type: ignore[arg-type]


def _widened(e: Emitter, operand: object, code: str, wide: str) -> str:
    """An operand extended to twice its width; a constant is extended here."""
    if isinstance(operand, Immediate):
        value = int(operand.value) & ((1 << 8 * int(code[1])) - 1)
        if code[0] == "i" and value >> (8 * int(code[1]) - 1):
            value -= 1 << 8 * int(code[1])
        return e.constant(value, wide)
    return f"{e.read(operand, code)}.astype('{wide}')"  # type: ignore[arg-type]


@ptx("mad.<part>.<type>", operands=4, part="lo hi", type=_INT)
@ptx("mad.<part>.<type>", operands=4, part="wide", type="u16 u32 s16 s32")
@ptx("mad24.lo.<type>", operands=4, type="u32 s32")
def multiply_add(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = CODES[m["type"]]
    d, a, b, c = i.operands
    part = m.get("part", "lo")
    times = e.bind(np.multiply)
    if i.opcode == "mad24":
        e.apply(
            np.add, d, code, f"{times}({_low24(e, a, code)}, {_low24(e, b, code)})", e.read(c, code)
        )
    elif part == "lo":
        e.apply(np.add, d, code, f"{times}({e.read(a, code)}, {e.read(b, code)})", e.read(c, code))
    elif part == "hi":
        high = f"{e.bind(multiply_high)}({e.read(a, code)}, {e.read(b, code)})"
        e.apply(np.add, d, code, high, e.read(c, code))
    else:
        wide = _wide(code)
        product = f"{times}({e.read(a, code)}.astype('{wide}'), {_widened(e, b, code, wide)})"
        e.apply(np.add, d, wide, product, e.read(c, wide))


def divide(a: Array, b: Array) -> Array:
    """Quotient truncated toward zero; division by zero gives all ones, as the hardware does."""
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        remainder = a - quotient * safe
        quotient = quotient + ((remainder != 0) & ((a < 0) != (safe < 0)))
    return np.where(zero, ~a.dtype.type(0), quotient).astype(a.dtype)


def remainder(a: Array, b: Array) -> Array:
    """a - divide(a, b) * b; a itself where b is zero."""
    result: Array = a - divide(a, b) * b
    return np.where(b == 0, a, result).astype(a.dtype)


@ptx("div.<type>", "rem.<type>", operands=3, type=_INT)
def division(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = CODES[m["type"]]
    d, a, b = i.operands
    function = e.bind(divide if i.opcode == "div" else remainder)
    e.write(d, code, f"{function}(x.array({e.read(a, code)}), x.array({e.read(b, code)}))")


@ptx("abs.<type>", "neg.<type>", operands=2, type="s16 s32 s64")
def sign(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = CODES[m["type"]]
    function = np.absolute if i.opcode == "abs" else np.negative
    e.apply(function, i.operands[0], code, e.read(i.operands[1], code))


@ptx("and.<type>", "or.<type>", "xor.<type>", operands=3, type=f"{_BITS} pred")
def logic(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = CODES[m["type"]]
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[i.opcode]
    d, a, b = i.operands
    e.apply(function, d, code, e.read(a, code), e.read(b, code))


@ptx("not.<type>", operands=2, type=f"{_BITS} pred")
def complement(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = CODES[m["type"]]
    e.apply(np.invert, i.operands[0], code, e.read(i.operands[1], code))


@ptx("cnot.<type>", operands=2, type=_BITS)
def logical_not(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = CODES[m["type"]]
    e.write(i.operands[0], code, f"{e.read(i.operands[1], code)} == {e.constant(0, code)}")


LOP3_TERMS = tuple((bool(k & 4), bool(k & 2), bool(k & 1)) for k in range(8))


def lop3(a: Array, b: Array, c: Array, table: int) -> Array:
    """Any bitwise function of three words: bit k of ``table`` is its value for (a, b, c) = k."""
    if table == 0x96:
        return a ^ b ^ c
    result = np.zeros(np.broadcast(a, b, c).shape, np.uint32)
    for k, (in_a, in_b, in_c) in enumerate(LOP3_TERMS):
        if table >> k & 1:
            result |= (a if in_a else ~a) & (b if in_b else ~b) & (c if in_c else ~c)
    return result


@ptx("lop3.b32", operands=5)
def three_input_logic(e: Emitter, i: Instruction, m: Modifiers) -> None:
    d, a, b, c, table = i.operands
    if not isinstance(table, Immediate):
        raise e.error("lop3 needs a constant table")
    e.write(
        d, "u4",
        f"{e.bind(lop3)}({e.read(a, 'u4')}, {e.read(b, 'u4')}, {e.read(c, 'u4')},"
        f" {int(table.value) & 0xFF})",
    )  # fmt: skip


def shift_left(a: Array, amount: Array) -> Array:
    """Amounts of the word size and more give zero."""
    bits = a.dtype.type(8 * a.dtype.itemsize)
    wide = np.minimum(amount, np.uint32(bits)).astype(a.dtype)
    return np.where(wide >= bits, a.dtype.type(0), a << np.minimum(wide, bits - a.dtype.type(1)))


def shift_right(a: Array, amount: Array) -> Array:
    """Amounts of the word size and more give zero, or copies of the sign for signed types."""
    bits = 8 * a.dtype.itemsize
    wide = np.minimum(amount, np.uint32(bits)).astype(a.dtype)
    shifted = a >> np.minimum(wide, a.dtype.type(bits - 1))
    if a.dtype.kind == "i":
        return shifted
    return np.where(wide >= a.dtype.type(bits), a.dtype.type(0), shifted)


@ptx("shl.<type>", operands=3, type=_BITS)
@ptx("shr.<type>", operands=3, type=f"{_BITS} {_INT}")
def shift(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = CODES[m["type"]]
    d, a, b = i.operands
    left = i.opcode == "shl"
    if isinstance(b, Immediate) and 0 <= int(b.value) < 8 * SIZES[m["type"]]:
        function = np.left_shift if left else np.right_shift
        e.apply(function, d, code, e.read(a, code), e.constant(int(b.value), code))
    else:
        helper = e.bind(shift_left if left else shift_right)
        e.write(d, code, f"{helper}(x.array({e.read(a, code)}), {e.read(b, 'u4')})")


def funnel_shift(low: Array, high: Array, amount: Array, is_left: bool, is_clamped: bool) -> Array:
    """Shifts the 64-bit word high:low and returns its upper (left) or lower (right) half."""
    count = amount & np.uint32(31) if not is_clamped else np.minimum(amount, np.uint32(32))
    word = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    if is_left:
        return (word << count.astype(np.uint64) >> np.uint64(32)).astype(np.uint32)
    return (word >> count.astype(np.uint64)).astype(np.uint32)


@ptx("shf.<side>.<mode>.b32", operands=4, side="l r", mode="clamp wrap")
def funnel(e: Emitter, i: Instruction, m: Modifiers) -> None:
    d, a, b, c = i.operands
    arguments = ", ".join(f"x.array({e.read(o, 'u4')})" for o in (a, b, c))
    e.write(
        d, "u4", f"{e.bind(funnel_shift)}({arguments}, {m['side'] == 'l'}, {m['mode'] == 'clamp'})"
    )


def popcount(a: Array) -> Array:
    return np.bitwise_count(a).astype(np.uint32)


def leading_zeros(a: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    return np.uint32(bits) - _bit_length(a)


def _bit_length(a: Array) -> Array:
    """Position of the highest set bit plus one; 0 for 0."""
    spread = a.copy()
    for distance in (1, 2, 4, 8, 16, 32)[: 5 + (a.dtype.itemsize == 8)]:
        spread |= spread >> a.dtype.type(distance)
    return np.bitwise_count(spread).astype(np.uint32)


@ptx("popc.<type>", "clz.<type>", operands=2, type="b32 b64")
def count_bits(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = CODES[m["type"]]
    function = e.bind(popcount if i.opcode == "popc" else leading_zeros)
    e.write(i.operands[0], "u4", f"{function}(x.array({e.read(i.operands[1], code)}))")


def find_leading(a: Array, is_shift: bool) -> Array:
    """Position of the most significant bit that differs from the sign; 0xFFFFFFFF if there is
    none.
    """
    bits = 8 * a.dtype.itemsize
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    pattern = np.where(a < 0, ~a, a).view(unsigned) if a.dtype.kind == "i" else a
    length = _bit_length(pattern)
    position = np.uint32(bits) - length if is_shift else length - np.uint32(1)
    return np.where(length == 0, np.uint32(0xFFFFFFFF), position)


@ptx("bfind{.shiftamt}.<type>", operands=2, type="u32 u64 s32 s64")
def leading_bit(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = CODES[m["type"]]
    e.write(
        i.operands[0], "u4",
        f"{e.bind(find_leading)}(x.array({e.read(i.operands[1], code)}), {'shiftamt' in m})",
    )  # fmt: skip


def reverse_bits(a: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    result = a
    for distance in (1, 2, 4, 8, 16, 32)[: 5 + (bits == 64)]:
        # The mask selects every other group of ``distance`` bits.
        mask = a.dtype.type(((1 << bits) - 1) // ((1 << distance) + 1))
        d = a.dtype.type(distance)
        result = (result >> d & mask) | (result & mask) << d
    return result


@ptx("brev.<type>", operands=2, type="b32 b64")
def bit_reverse(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = CODES[m["type"]]
    e.write(i.operands[0], code, f"{e.bind(reverse_bits)}({e.read(i.operands[1], code)})")


def extract_field(a: Array, position: Array, length: Array) -> Array:
    """``length`` bits from ``position``, extended by the field's top bit for signed types."""
    bits = 8 * a.dtype.itemsize
    unsigned = np.dtype(f"u{a.dtype.itemsize}").type
    position = (position & np.uint32(0xFF)).astype(np.int64)
    length = (length & np.uint32(0xFF)).astype(np.int64)
    word = a.view(unsigned)
    shifted = np.where(
        position < bits, word >> np.minimum(position, bits - 1).astype(unsigned), unsigned(0)
    )
    keep = np.where(
        length >= bits,
        ~unsigned(0),
        (unsigned(1) << np.minimum(length, bits - 1).astype(unsigned)) - unsigned(1),
    )
    field = shifted & keep
    if a.dtype.kind == "i":
        top = np.minimum(position + length - 1, bits - 1)
        is_set = (word >> np.maximum(top, 0).astype(unsigned) & unsigned(1)).astype(bool) & (
            length > 0
        )
        available = np.clip(bits - position, 0, length)
        sign_keep = np.where(
            available >= bits, ~unsigned(0),
            (unsigned(1) << np.minimum(available, bits - 1).astype(unsigned)) - unsigned(1),
        )  # fmt: skip
        field = np.where(is_set, (field & sign_keep) | ~sign_keep, field & sign_keep)
    return field.view(a.dtype)


@ptx("bfe.<type>", operands=4, type="u32 u64 s32 s64")
def bit_field_extract(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = CODES[m["type"]]
    d, a, b, c = i.operands
    e.write(
        d, code,
        f"{e.bind(extract_field)}(x.array({e.read(a, code)}), x.array({e.read(b, 'u4')}),"
        f" x.array({e.read(c, 'u4')}))",
    )  # fmt: skip


def insert_field(field: Array, base: Array, position: Array, length: Array) -> Array:
    """``base`` with ``length`` bits from ``position`` replaced by the low bits of ``field``."""
    bits = 8 * base.dtype.itemsize
    kind = base.dtype.type
    position = (position & np.uint32(0xFF)).astype(np.int64)
    length = (length & np.uint32(0xFF)).astype(np.int64)
    ones = np.where(
        length >= bits, ~kind(0), (kind(1) << np.minimum(length, bits - 1).astype(kind)) - kind(1)
    )
    amount = np.minimum(position, bits - 1).astype(kind)
    inside = position < bits
    mask = np.where(inside, ones << amount, kind(0))
    return (base & ~mask) | (np.where(inside, field << amount, kind(0)) & mask)


@ptx("bfi.<type>", operands=5, type="b32 b64")
def bit_field_insert(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = CODES[m["type"]]
    d, a, b, c, length = i.operands
    words = ", ".join(f"x.array({e.read(o, code)})" for o in (a, b))
    places = ", ".join(e.read(o, "u4") for o in (c, length))
    e.write(d, code, f"{e.bind(insert_field)}({words}, {places})")


def mask_field(position: Array, length: Array, is_clamped: bool) -> Array:
    """A mask of ``length`` ones from bit ``position``."""
    if not is_clamped:
        position, length = position & np.uint32(31), length & np.uint32(31)
    wide = np.uint64(1) << np.minimum(length, np.uint32(32)).astype(np.uint64)
    mask = (wide - np.uint64(1)) << np.minimum(position, np.uint32(32)).astype(np.uint64)
    return mask.astype(np.uint32)


@ptx("bmsk.<mode>.b32", operands=3, mode="clamp wrap")
def bit_mask(e: Emitter, i: Instruction, m: Modifiers) -> None:
    d, a, b = i.operands
    e.write(
        d, "u4",
        f"{e.bind(mask_field)}(x.array({e.read(a, 'u4')}), x.array({e.read(b, 'u4')}),"
        f" {m['mode'] == 'clamp'})",
    )  # fmt: skip


def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """Each nibble of the selector picks one of the eight bytes of b:a; its top bit replicates the
    byte's sign.
    """
    word = b.astype(np.uint64) << np.uint64(32) | a.astype(np.uint64)
    result = np.zeros(np.broadcast(word, selector).shape, np.uint32)
    for place in range(4):
        nibble = selector >> np.uint32(4 * place)
        byte = (word >> ((nibble & np.uint32(7)) * np.uint32(8)).astype(np.uint64)).astype(
            np.uint32
        )
        byte = byte & np.uint32(0xFF)
        replicated = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        byte = np.where(nibble & np.uint32(8), replicated, byte)
        result |= byte << np.uint32(8 * place)
    return result


def permute_halves(a: Array, b: Array, selector: int) -> Array | None:
    """The selectors that only move 16-bit halves, in two operations; None for all others."""
    halves = {0x10: (a, 0), 0x32: (a, 16), 0x54: (b, 0), 0x76: (b, 16)}
    low, high = halves.get(selector & 0xFF), halves.get(selector >> 8 & 0xFF)
    if low is None or high is None:
        return None
    lower = low[0] >> np.uint32(16) if low[1] else low[0] & np.uint32(0xFFFF)
    upper = high[0] & np.uint32(0xFFFF0000) if high[1] else high[0] << np.uint32(16)
    return lower | upper


def permute_constant(a: Array, b: Array, selector: int) -> Array:
    """permute_bytes with a selector known when the code is generated."""
    fast = permute_halves(a, b, selector)
    return permute_bytes(a, b, np.uint32(selector)) if fast is None else fast  # type: ignore[arg-type]


_PRMT_MODES = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


def permute_mode(a: Array, b: Array, selector: Array, mode: str) -> Array:
    table = np.array(_PRMT_MODES[mode], np.uint32)
    return permute_bytes(a, b, table[selector & np.uint32(3)])


@ptx("prmt.b32{.<mode>}", operands=4, mode=" ".join(_PRMT_MODES))
def byte_permute(e: Emitter, i: Instruction, m: Modifiers) -> None:
    d, a, b, c = i.operands
    words = f"{e.read(a, 'u4')}, {e.read(b, 'u4')}"
    if "mode" in m:
        e.write(d, "u4", f"{e.bind(permute_mode)}({words}, {e.read(c, 'u4')}, {m['mode']!r})")
    elif isinstance(c, Immediate):
        e.write(d, "u4", f"{e.bind(permute_constant)}({words}, {int(c.value) & 0xFFFF})")
    else:
        e.write(d, "u4", f"{e.bind(permute_bytes)}({words}, {e.read(c, 'u4')})")


def absolute_difference(a: Array, b: Array) -> Array:
    return np.where(a < b, b - a, a - b)


@ptx("sad.<type>", operands=4, type=_INT)
def sum_of_absolute_difference(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = CODES[m["type"]]
    d, a, b, c = i.operands
    e.apply(
        np.add, d, code,
        f"{e.bind(absolute_difference)}({e.read(a, code)}, {e.read(b, code)})", e.read(c, code),
    )  # fmt: skip


def dot_bytes(a: Array, b: Array, c: Array, a_signed: bool, b_signed: bool) -> Array:
    """The sum of four byte products and c, modulo 2**32."""
    total = c.astype(np.int64)
    for place in range(4):
        shift = np.uint32(8 * place)
        x = (a >> shift & np.uint32(0xFF)).astype(np.uint8)
        y = (b >> shift & np.uint32(0xFF)).astype(np.uint8)
        total = total + (x.view(np.int8) if a_signed else x).astype(np.int64) * (
            y.view(np.int8) if b_signed else y
        ).astype(np.int64)
    return total.astype(np.uint32)


@ptx("dp4a.<atype>.<btype>", operands=4, atype="u32 s32", btype="u32 s32")
def byte_dot_product(e: Emitter, i: Instruction, m: Modifiers) -> None:
    d, a, b, c = i.operands
    words = ", ".join(f"x.array({e.read(o, 'u4')})" for o in (a, b, c))
    e.write(d, "u4", f"{e.bind(dot_bytes)}({words}, {m['atype'] == 's32'}, {m['btype'] == 's32'})")


_COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
COMBINERS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def write_predicates(e: Emitter, i: Instruction, m: Modifiers, value: str) -> None:
    """Stores a comparison into ``p`` or ``p|q``, combined with a third predicate if there is
    one.
    """
    d = i.operands[0]
    bound = e.bind(COMBINERS[m["combine"]]) if "combine" in m else ""
    third = e.read(i.operands[3], "b1") if bound else ""
    if isinstance(d, Pair):
        value = e.fresh(value)
        opposite = e.fresh(f"~{value}")
        if bound:
            value = e.fresh(f"{bound}({value}, {third})")
            opposite = f"{bound}({opposite}, {third})"
        e.write(d.first, "b1", value)
        e.write(d.second, "b1", opposite)
    else:
        e.write(d, "b1", f"{bound}({value}, {third})" if bound else value)


@ptx("setp.<compare>.<type>", operands=3, compare=" ".join(_COMPARISONS), type=f"{_INT} {_BITS}")
@ptx("setp.<compare>.<combine>.<type>", operands=4, compare=" ".join(_COMPARISONS),
     combine="and or xor", type=f"{_INT} {_BITS}")  # fmt: skip
def set_predicate(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = CODES[m["type"]]
    function = _COMPARISONS[m["compare"]]
    a, b = (e.read(o, code) for o in i.operands[1:3])
    if isinstance(i.operands[0], Pair) or "combine" in m:
        write_predicates(e, i, m, f"{e.bind(function)}({a}, {b})")
    else:
        e.apply(function, i.operands[0], "b1", a, b)


# What "true" is in each result type, in two or four bytes.
TRUTHS = {
    "u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF, "f32": 0x3F800000,
    "u16": 0xFFFF, "s16": 0xFFFF, "f16": 0x3C00, "bf16": 0x3F80,
}  # fmt: skip


def combined(e: Emitter, i: Instruction, m: Modifiers, value: str) -> str:
    """A comparison, combined with the predicate that the instruction has for it, if any."""
    if "combine" not in m:
        return value
    return f"{e.bind(COMBINERS[m['combine']])}({value}, {e.read(i.operands[3], 'b1')})"


def write_truth(e: Emitter, i: Instruction, m: Modifiers, value: str) -> None:
    """Stores a comparison, combined with a predicate if there is one, as all ones or as 1."""
    code = f"u{SIZES[m['result']]}"
    true, false = e.constant(TRUTHS[m["result"]], code), e.constant(0, code)
    e.write(i.operands[0], code, f"{e.bind(np.where)}({combined(e, i, m, value)}, {true}, {false})")


@ptx("set.<compare>.<result>.<type>", operands=3, compare=" ".join(_COMPARISONS),
     result="u32 s32 f32 f16 bf16", type=f"{_INT} {_BITS}")  # fmt: skip
@ptx("set.<compare>.<combine>.<result>.<type>", operands=4, compare=" ".join(_COMPARISONS),
     combine=" ".join(COMBINERS), result="u32 s32 f32 f16 bf16",
     type=f"{_INT} {_BITS}")  # fmt: skip
def set_value(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = CODES[m["type"]]
    a, b = (e.read(o, code) for o in i.operands[1:3])
    write_truth(e, i, m, f"{e.bind(_COMPARISONS[m['compare']])}({a}, {b})")


@ptx("selp.<type>", operands=4, type=f"{_BITS} {_INT} f32 f64")
def select(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = f"u{SIZES[m['type']]}"
    d, a, b, p = i.operands
    predicate, true, false = e.read(p, "b1"), e.read(a, code), e.read(b, code)
    if e.mask == "None" and e.target(d, code) == false:
        # Compilers select special cases, which few lanes are.
        e.line(f"copyto({false}, {true}, where={predicate})")
        return
    e.write(d, code, f"{e.bind(np.where)}({predicate}, {true}, {false})")


@ptx("slct.<type>.s32", operands=4, type=f"{_BITS} {_INT} f32 f64")
@ptx("slct{.ftz}.<type>.f32", operands=4, type=f"{_BITS} {_INT} f32 f64")
def select_by_sign(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = f"u{SIZES[m['type']]}"
    d, a, b, c = i.operands
    condition = e.read(c, "i4" if i.modifiers[-1] == "s32" else "f4")
    if "ftz" in m:
        condition = f"{e.bind(scalar.flush)}({condition})"
    e.write(d, code, f"{e.bind(np.where)}({condition} >= 0, {e.read(a, code)}, {e.read(b, code)})")
