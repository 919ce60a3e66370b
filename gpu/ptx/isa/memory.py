"""Loads, stores, atomics and cache hints.

Source: PTX ISA 8.8, 9.7.9.8-9.7.9.24 and 9.7.13.15 (atom, red).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np

from gpu.ptx.emit import Emitter
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Register,
    Sink,
    Symbol,
)
from gpu.ptx.types import CODES, SIZES
from simkit.numerics import formats, minmax

Modifiers = Mapping[str, str]
Combiner = Callable[[np.ndarray, np.ndarray], np.ndarray]

_SPACES = "global shared shared::cta shared::cluster local const param param::entry param::func"
_TYPES = "b8 u8 s8 b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64"
# Cache operators and eviction hints change nothing that a program can see.
_CACHE = "ca cg cs lu cv wb wt"
_L1 = "L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last L1::no_allocate"
_L2_EVICT = "L2::evict_first L2::evict_last L2::evict_normal"
_PREFETCH = "L2::64B L2::128B L2::256B"
_SCOPES = "cta cluster gpu sys"
_ORDERINGS = "relaxed acquire release acq_rel"


def _space(m: Modifiers) -> str:
    return m.get("space", "generic").split("::")[0]


def _note_order(e: Emitter, m: Modifiers) -> None:
    """Tells the frame that the access that follows is strong, and how it orders others."""
    if "volatile" in m or "relaxed" in m:
        e.line("x.order = 'relaxed sys'")
    elif "ordering" in m:
        e.line(f"x.order = '{m['ordering']} {m.get('scope', 'gpu')}'")


def _width(m: Modifiers) -> int:
    return int(m["vector"][1:]) if "vector" in m else 1


def _check_width(e: Emitter, m: Modifiers, size: int) -> None:
    """Vectors have up to 16 bytes; those of global memory, of 4- or 8-byte elements, up to 32."""
    limit = 32 if _space(m) in ("global", "generic") and SIZES[m["type"]] >= 4 else 16
    if size > limit:
        raise e.error(f"a vector access of {size} bytes, at most {limit} are possible")


_LOAD = "{.<space>}{.<cache>}{.<l1>}{.<l2>}{.L2::cache_hint}{.<prefetch>}{.<vector>}.<type>"


@ptx(
    f"ld{{.weak}}{_LOAD}",
    f"ld.volatile{_LOAD}",
    f"ld.<ordering>.<scope>{_LOAD}",
    f"ld.relaxed.mmio.sys{_LOAD}",
    "ld{.<space>}{.<cache>}.nc{.<l1>}{.<l2>}{.L2::cache_hint}{.<prefetch>}{.<vector>}.<type>",
    "ldu{.<space>}{.<vector>}.<type>",
    operands=(2, 3),
    pure=False,
    ordering="relaxed acquire",
    scope=_SCOPES,
    space=_SPACES,
    cache=_CACHE,
    l1=_L1,
    l2=_L2_EVICT,
    prefetch=_PREFETCH,
    vector="v2 v4 v8",
    type=_TYPES,
)
def load(e: Emitter, i: Instruction, m: Modifiers) -> None:
    target, source = i.operands[:2]
    size, count = SIZES[m["type"]], _width(m)
    space = _space(m)
    _check_width(e, m, size * count)
    elements = e.elements(target)
    if len(elements) != count:
        raise e.error(f"{len(elements)} destinations for {count} elements")
    # Values narrower than their register are extended by their sign or with zeros.
    code = f"i{size}" if m["type"].startswith("s") else f"u{size}"
    if space == "param" and isinstance(source, Address) and isinstance(source.base, Symbol):
        offset = e.symbol(source.base.name) + source.base.offset + source.offset
        if not 0 <= offset <= e.program.parameter_bytes - size * count:
            raise e.error(f"the kernel has {e.program.parameter_bytes} bytes of parameters")
        for lane, element in enumerate(elements):
            e.write(element, code, f"x.parameter({offset + lane * size}, {size}).view('{code}')")
        return
    base, offset = e.address(source)
    _note_order(e, m)
    values = e.fresh(f"x.load({space!r}, {base}, {offset}, {size}, {count}, {e.mask}, {e.site})")
    for lane, element in enumerate(elements):
        if not isinstance(element, Sink):
            e.write(element, code, f"{values}[{lane}].view('{code}')")


_STORE = "{.<space>}{.<cache>}{.<l1>}{.<l2>}{.L2::cache_hint}{.<vector>}.<type>"


@ptx(
    f"st{{.weak}}{_STORE}",
    f"st.volatile{_STORE}",
    f"st.<ordering>.<scope>{_STORE}",
    f"st.relaxed.mmio.sys{_STORE}",
    operands=(2, 3),
    results=0,
    pure=False,
    ordering="relaxed release",
    scope=_SCOPES,
    space="global shared shared::cta shared::cluster local",
    cache=_CACHE,
    l1=_L1,
    l2=_L2_EVICT,
    vector="v2 v4 v8",
    type=_TYPES,
)
def store(e: Emitter, i: Instruction, m: Modifiers) -> None:
    target, source = i.operands[:2]
    size, count = SIZES[m["type"]], _width(m)
    _check_width(e, m, size * count)
    elements = e.elements(source)
    if len(elements) != count:
        raise e.error(f"{len(elements)} sources for {count} elements")
    base, offset = e.address(target)
    values = ", ".join(e.read(element, f"u{size}") for element in elements)
    _note_order(e, m)
    e.line(f"x.store({_space(m)!r}, {base}, {offset}, {size}, ({values},), {e.mask}, {e.site})")


# Atomic operations by name: how old value and operand combine.
def _wrap_increment(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where(old >= limit, old.dtype.type(0), old + old.dtype.type(1))


def _wrap_decrement(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1))


def _exchange(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    return new


ATOMICS: dict[str, Combiner] = {
    "add": np.add,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": _exchange,
    "inc": _wrap_increment,
    "dec": _wrap_decrement,
    "min": np.minimum,
    "max": np.maximum,
}
_ATOMIC_SPACES = "global shared shared::cta shared::cluster"
_ATOMIC_TYPES = "b32 b64 u32 u64 s32 s64 f32 f64 f16 bf16 f16x2 bf16x2"
_VECTOR_TYPES = ("f32", "f16", "bf16", "f16x2", "bf16x2")
_ATOMIC_TAIL = "{.noftz}{.L2::cache_hint}{.<vector>}.<type>"
# The ISA puts the space last; ptxas also takes it first, as LLVM and Triton write it.
_ATOMIC_HEADS = (
    "{.<ordering>}{.<scope>}{.<space>}",
    "{.<space>}.<scope>{.<ordering>}",
    "{.<space>}.<ordering>{.<scope>}",
)
_FLOAT_OPERATIONS: dict[str, Combiner] = {
    "add": np.add,
    "min": minmax.fmin_ptx,
    "max": minmax.fmax_ptx,
}


@cache
def half_combiner(operation: str, kind: str) -> Combiner:
    """How bits of an f16 or bf16 number in memory, or of a packed pair, meet an operand."""
    combine = _FLOAT_OPERATIONS[operation]
    number = kind.removesuffix("x2")
    decode = formats.decode_f16 if number == "f16" else formats.decode_bf16
    encode = formats.encode_f16 if number == "f16" else formats.encode_bf16

    def of_one(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        return encode(combine(decode(old), decode(new)))

    def of_pair(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        pairs = (np.ascontiguousarray(x).view(np.uint16) for x in (old, new))
        return np.ascontiguousarray(of_one(*pairs)).view(np.uint32)

    return of_pair if kind.endswith("x2") else of_one


def combiner(operation: str, kind: str) -> tuple[Combiner, str] | None:
    """How memory and an operand of a type combine, and the code of both; None: not at all."""
    if kind.removesuffix("x2") in ("f16", "bf16"):
        if operation not in _FLOAT_OPERATIONS:
            return None
        return half_combiner(operation, kind), f"u{SIZES[kind]}"
    if operation in ("min", "max") and kind == "f32":
        return _FLOAT_OPERATIONS[operation], "f4"
    return ATOMICS[operation], CODES[kind]


def bound_combiner(e: Emitter, m: Modifiers) -> tuple[str, str]:
    """The combiner that an instruction's modifiers name, in the generated code, and its code."""
    found = combiner(m["operation"], m["type"])
    if found is None:
        raise e.error(f"there is no atomic {m['operation']} of {m['type']}")
    return e.bind(found[0]), found[1]


def _vector(e: Emitter, m: Modifiers, operand: Operand) -> tuple[Operand, ...]:
    """The elements of an atomic's operand; each is an operation of its own."""
    elements = e.elements(operand)
    if len(elements) != _width(m):
        raise e.error(f"{len(elements)} registers for {_width(m)} elements")
    return elements


def _check_vector(e: Emitter, m: Modifiers, base: str, offset: int) -> None:
    """Which vectors there are: pairs to eights of halves, up to 16 bytes; and their alignment."""
    if "vector" not in m:
        return
    size = _width(m) * SIZES[m["type"]]
    if size > 16 or m["type"] not in _VECTOR_TYPES or _space(m) not in ("global", "generic"):
        raise e.error(f"there are no {_space(m)} atomics of {m['vector']} of {m['type']}")
    e.line(f"x.aligned({_space(m)!r}, {base}, {offset}, {size}, {e.mask}, {e.site})")


@ptx(
    *(f"atom{h}.<operation>{_ATOMIC_TAIL}" for h in _ATOMIC_HEADS),
    operands=(3, 4),
    pure=False,
    operation=" ".join(ATOMICS),
    ordering=_ORDERINGS,
    scope=_SCOPES,
    space=_ATOMIC_SPACES,
    vector="v2 v4 v8",
    type=_ATOMIC_TYPES,
)
def atomic(e: Emitter, i: Instruction, m: Modifiers) -> None:
    function, code = bound_combiner(e, m)
    base, offset = e.address(i.operands[1])
    targets, values = (_vector(e, m, i.operands[k]) for k in (0, 2))
    _check_vector(e, m, base, offset)
    _note_order(e, m)
    # All elements first: a destination may be an operand of the next one.
    old = [
        e.fresh(
            f"x.atomic({_space(m)!r}, {base}, {offset + k * SIZES[m['type']]}, {function},"
            f" x.array({e.read(value, code)}), None, {e.mask}, {e.site})"
        )
        for k, value in enumerate(values)
    ]
    for target, value in zip(targets, old, strict=True):
        e.write(target, code, value)


@ptx(
    *(f"atom{h}.cas{{.L2::cache_hint}}.<type>" for h in _ATOMIC_HEADS),
    operands=(4, 5),
    pure=False,
    ordering=_ORDERINGS,
    scope=_SCOPES,
    space=_ATOMIC_SPACES,
    type="b16 b32 b64 u32 u64 s32 s64",
)
def compare_and_swap(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = f"u{SIZES[m['type']]}"
    base, offset = e.address(i.operands[1])
    compare, value = (f"x.array({e.read(o, code)})" for o in i.operands[2:4])
    function = e.bind(_exchange)
    _note_order(e, m)
    e.write(
        i.operands[0],
        code,
        f"x.atomic({_space(m)!r}, {base}, {offset}, {function}, {value}, {compare}, {e.mask},"
        f" {e.site})",
    )


_PAIR = np.dtype([("low", "u8"), ("high", "u8")])


def pair_up(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """128-bit values from their halves."""
    pairs = np.empty(low.shape, _PAIR)
    pairs["low"], pairs["high"] = low, high
    return pairs


@ptx(
    *(f"atom{h}.exch{{.L2::cache_hint}}.b128" for h in _ATOMIC_HEADS),
    operands=(3, 4),
    pure=False,
    ordering=_ORDERINGS,
    scope=_SCOPES,
    space=_ATOMIC_SPACES,
)
@ptx(
    *(f"atom{h}.cas.b128" for h in _ATOMIC_HEADS),
    operands=4,
    pure=False,
    ordering=_ORDERINGS,
    scope=_SCOPES,
    space=_ATOMIC_SPACES,
)
def wide_atomic(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """128-bit registers arrive as pairs of 64-bit ones."""
    base, offset = e.address(i.operands[1])
    operands = []
    for operand in i.operands[2 : 4 if "cas" in m else 3]:
        if len(e.elements(operand)) != 2:
            raise e.error("the operands of a 128-bit atomic are .b128 registers")
        halves = ", ".join(f"x.array({e.read(o, 'u8')})" for o in e.elements(operand))
        operands.append(f"{e.bind(pair_up)}({halves})")
    value, compare = operands[-1], operands[0] if "cas" in m else "None"
    old = e.fresh(
        f"x.atomic({_space(m)!r}, {base}, {offset}, {e.bind(_exchange)}, {value}, {compare},"
        f" {e.mask}, {e.site})"
    )
    targets = e.elements(i.operands[0])
    if len(targets) == 2:
        e.write(targets[0], "u8", f"{old}['low']")
        e.write(targets[1], "u8", f"{old}['high']")
    elif not isinstance(targets[0], Sink):
        raise e.error("the result of a 128-bit atomic is a .b128 register")


@ptx("st.bulk{.weak}{.<space>}", operands=3, results=0, pure=False, space="shared::cta shared")
def store_bulk(e: Emitter, i: Instruction, m: Modifiers) -> None:
    target, size, value = i.operands
    if not isinstance(value, Immediate) or value.value != 0:
        raise e.error("st.bulk writes zeros only")
    base, offset = e.address(target)
    wide = isinstance(size, Register) and e.register_code(size.name) == "u8"
    e.line(
        f"x.store_zeros({_space(m)!r}, {base}, {offset}, {e.read(size, 'u8' if wide else 'u4')},"
        f" {e.mask}, {e.site})"
    )


@ptx(
    *(f"red{h}.<operation>{_ATOMIC_TAIL}" for h in _ATOMIC_HEADS),
    operands=(2, 3),
    results=0,
    pure=False,
    operation=" ".join(ATOMICS),
    ordering=_ORDERINGS,
    scope=_SCOPES,
    space=_ATOMIC_SPACES,
    vector="v2 v4 v8",
    type=_ATOMIC_TYPES,
)
def reduction(e: Emitter, i: Instruction, m: Modifiers) -> None:
    function, code = bound_combiner(e, m)
    base, offset = e.address(i.operands[0])
    _check_vector(e, m, base, offset)
    _note_order(e, m)
    for k, value in enumerate(_vector(e, m, i.operands[1])):
        e.line(
            f"x.atomic({_space(m)!r}, {base}, {offset + k * SIZES[m['type']]}, {function},"
            f" x.array({e.read(value, code)}), None, {e.mask}, {e.site})"
        )


@ptx(
    "prefetch{.<space>}.<level>",
    "prefetchu.L1",
    "prefetch.global.<eviction>",
    "discard{.global}.L2",
    "applypriority{.global}.L2::evict_normal",
    operands=(1, 2),
    results=0,
    pure=False,
    space="global local",
    level="L1 L2",
    eviction="L2::evict_last L2::evict_normal",
)
def prefetch(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """Hints to the caches: nothing happens that a program can see."""
