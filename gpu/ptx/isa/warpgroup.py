"""Warpgroup tensor-core operations.  Source: PTX ISA 8.8, 9.7.15."""

from __future__ import annotations

from collections.abc import Mapping

from gpu.ptx.emit import Emitter
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Immediate, Instruction, Not, Operand, Register, Vector

Modifiers = Mapping[str, str]

_SHAPES = " ".join(f"m64n{n}k{k}" for n in range(8, 257, 8) for k in (8, 16, 32))
_FP8 = ("e4m3", "e5m2")
_K = {"bf16": 16, "f16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}


@ptx("wgmma.fence.sync.aligned", operands=0, results=0, pure=False, ends_block=True)
def fence(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """Where the four warps of a warpgroup come together before they use the tensor core."""
    e.line(f"return x.warpgroup_fence({e.mask}, {e.site})")


@ptx("wgmma.commit_group.sync.aligned", operands=0, results=0, pure=False)
def commit(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.line(f"x.warpgroup_commit({e.mask}, {e.site})")


@ptx("wgmma.wait_group.sync.aligned", operands=1, results=0, pure=False, ends_block=True)
def wait(e: Emitter, i: Instruction, m: Modifiers) -> None:
    pending = i.operands[0]
    if not isinstance(pending, Immediate):
        raise e.error("wgmma.wait_group needs a constant")
    e.line(f"return x.warpgroup_wait({int(pending.value)}, {e.mask}, {e.site})")


@ptx(
    "wgmma.mma_async.sync.aligned.<shape>.<d>.<a>.<b>",
    operands=(6, 7, 8),
    reads_results=True,
    pure=False,
    shape=_SHAPES,
    d="f32 f16",
    a="bf16 f16 tf32 e4m3 e5m2",
    b="bf16 f16 tf32 e4m3 e5m2",
)
def multiply(e: Emitter, i: Instruction, m: Modifiers) -> None:
    rows, k = m["shape"][4:].split("k")
    n, is_half = int(rows), m["d"] == "f16"
    is_fp8 = m["a"] in _FP8 and m["b"] in _FP8
    if int(k) != _K[m["a"]] or not (m["a"] == m["b"] or is_fp8):
        raise e.error(f"wgmma has no shape {m['shape']} for {m['a']} and {m['b']}")
    if is_half and m["a"] in ("bf16", "tf32"):
        raise e.error(f"wgmma of {m['a']} accumulates in f32 only")
    d, a, b, scale_d, scale_a, scale_b, *transposes = i.operands
    accumulator = _registers(e, d, n // (4 if is_half else 2))
    is_16_bit = m["a"] in ("bf16", "f16")
    from_registers = isinstance(a, Vector)
    expected = (1 if from_registers else 2) if is_16_bit else 0
    if len(transposes) != expected:
        raise e.error(f"{len(transposes)} transpose flags where {expected} are needed")
    flags = [_flag(e, t) for t in transposes]
    transposed_b = flags[-1] if flags else False
    transposed_a = flags[0] if len(flags) == 2 else False
    if from_registers:
        left = f"None, {_registers(e, a, 4)!r}"
    else:
        left = f"{e.read(a, 'u8')}, ()"
    accumulate = _accumulates(e, scale_d)
    for name in accumulator:
        e.view(name, "u4")  # so that copied registers are written back
    e.line(
        f"x.warpgroup_multiply({n}, {is_half}, {m['a']!r}, {m['b']!r}, {left},"
        f" {e.read(b, 'u8')}, {accumulate}, {_sign(e, scale_a)}, {_sign(e, scale_b)},"
        f" {transposed_a}, {transposed_b}, {accumulator!r}, {e.mask}, {e.site})"
    )


@ptx(
    "wgmma.mma_async.sync.aligned.<shape>{.satfinite}.s32.<a>.<b>",
    operands=4,
    reads_results=True,
    pure=False,
    shape=_SHAPES,
    a="s8 u8",
    b="s8 u8",
)
def multiply_integers(e: Emitter, i: Instruction, m: Modifiers) -> None:
    rows, k = m["shape"][4:].split("k")
    n = int(rows)
    # Columns come in eights up to 24, then in sixteens.
    if k != "32" or (n > 24 and n % 16):
        raise e.error(f"wgmma has no shape {m['shape']} for {m['a']} and {m['b']}")
    d, a, b, scale_d = i.operands
    accumulator = _registers(e, d, n // 2)
    if isinstance(a, Vector):
        left = f"None, {_registers(e, a, 4)!r}"
    else:
        left = f"{e.read(a, 'u8')}, ()"
    e.line(
        f"x.warpgroup_multiply({n}, False, {m['a']!r}, {m['b']!r}, {left}, {e.read(b, 'u8')},"
        f" {_accumulates(e, scale_d)}, False, False, False, False, {accumulator!r}, {e.mask},"
        f" {e.site}, {'satfinite' in m})"
    )


def _accumulates(e: Emitter, scale_d: Operand) -> str:
    """Whether the accumulator takes part: a constant or a predicate."""
    if isinstance(scale_d, Immediate):
        return str(bool(int(scale_d.value)))
    if isinstance(scale_d, Register | Not):
        return e.read(scale_d, "b1")
    raise e.error("scale-d must be a predicate or a constant")


def _registers(e: Emitter, operand: Operand, count: int) -> tuple[str, ...]:
    elements = e.elements(operand)
    names = tuple(o.name for o in elements if isinstance(o, Register))
    if len(names) != count or len(elements) != count:
        raise e.error(f"{len(elements)} registers where the shape needs {count}")
    for name in names:
        if e.register_code(name) != "u4":
            raise e.error(f"register {name} is not 32 bits wide")
        e.view(name, "u4")
    return names


def _flag(e: Emitter, operand: Operand) -> bool:
    if not isinstance(operand, Immediate) or int(operand.value) not in (0, 1):
        raise e.error("transpose flags are 0 or 1")
    return bool(int(operand.value))


def _sign(e: Emitter, operand: Operand) -> bool:
    """Whether an operand is negated."""
    if not isinstance(operand, Immediate) or int(operand.value) not in (1, -1):
        raise e.error("scale-a and scale-b are 1 or -1")
    return int(operand.value) == -1
