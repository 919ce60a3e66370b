"""Which architecture each instruction needs: the ".target ISA notes" of the PTX ISA as a table.

A text says in ``.target`` for which architecture it is written: that decides what it may use.  The
device's architecture decides which texts run on it.  Source: PTX ISA 8.8, "Target ISA Notes" of the
instructions, and 11.1.2 (.target).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from gpu.ptx.syntax import Instruction
from simkit.errors import PtxError

_NAME = re.compile(r"sm_(\d{2,3})([af]?)")


@dataclass(frozen=True, slots=True)
class Architecture:
    """``sm_90a`` as 90 and "a": "a" keeps to one chip, "f" to one family of chips."""

    number: int
    suffix: str

    def __str__(self) -> str:
        return f"sm_{self.number}{self.suffix}"

    def runs_on(self, device: Architecture) -> bool:
        """Whether a text for this architecture runs on a device."""
        if self.suffix == "a":
            return device.number == self.number
        if self.suffix == "f":
            return device.number >= self.number and device.number // 10 == self.number // 10
        return device.number >= self.number

    def has(self, needed: Architecture) -> bool:
        """Whether a text for this architecture may use what needs another: ``a`` that alone,
        ``f`` any ``a`` or ``f`` from there on, and no suffix everything from there on.
        """
        if needed.suffix == "a":
            return self == needed
        if needed.suffix == "f" and not self.suffix:
            return False
        return self.number >= needed.number


@lru_cache(maxsize=64)
def architecture(name: str) -> Architecture | None:
    """The architecture of a name such as ``sm_90a``; None for what is none."""
    match = _NAME.fullmatch(name)
    return Architecture(int(match[1]), match[2]) if match else None


# (opcodes, modifiers, architecture): an instruction with one of the opcodes ("*": any) and all of
# the modifiers ("|" between those of which one is enough, "#n": n operands) needs at least that
# architecture.
_ROWS: tuple[tuple[str, str, str], ...] = (
    # Memory
    ("*", "L2::64B|L2::128B", "sm_75"),
    ("*", "L2::256B|L2::cache_hint", "sm_80"),
    ("*", "cluster|shared::cluster", "sm_90"),
    ("ld st", "v8", "sm_100"),
    ("ld st", "v4 b64|u64|s64|f64", "sm_100"),
    ("ld st", "L2::evict_first|L2::evict_last|L2::evict_normal", "sm_100"),
    ("st", "bulk", "sm_100"),
    ("st red", "async", "sm_90"),
    ("atom", "cas b16", "sm_70"),
    ("atom red", "noftz f16", "sm_70"),
    ("atom red", "bf16|bf16x2", "sm_90"),
    ("atom red", "v2|v4|v8", "sm_90"),
    ("atom", "b128", "sm_90"),
    ("prefetch", "L2::evict_last|L2::evict_normal", "sm_80"),
    ("prefetch", "tensormap", "sm_90"),
    ("createpolicy discard applypriority", "", "sm_80"),
    ("cp", "async", "sm_80"),
    ("cp", "bulk", "sm_90"),
    ("tensormap", "replace", "sm_90a"),
    ("tensormap", "cp_fenceproxy", "sm_90"),
    # Synchronisation and clusters
    ("nanosleep match", "", "sm_70"),
    ("redux", "", "sm_80"),
    ("mbarrier", "", "sm_80"),
    ("mbarrier", "try_wait|expect_tx|complete_tx", "sm_90"),
    ("fence", "acquire|release", "sm_90"),
    ("fence", "async|tensormap::generic|mbarrier_init", "sm_90"),
    ("mapa getctarank elect griddepcontrol", "", "sm_90"),
    ("setmaxnreg", "", "sm_90f"),
    # Tensor cores
    ("mma", "", "sm_70"),
    ("mma", "m8n8k16|m8n8k32|m8n8k128|m16n8k8", "sm_75"),
    ("mma", "m16n8k4|m16n8k16|m16n8k32|m16n8k64|m16n8k128|m16n8k256", "sm_80"),
    ("mma", "bf16|tf32|f64", "sm_80"),
    ("mma", "and b1", "sm_80"),
    ("mma", "m16n8k4|m16n8k8|m16n8k16 f64", "sm_90"),
    ("mma", "e4m3|e5m2", "sm_89"),
    ("wmma", "", "sm_70"),
    ("wmma", "s8|u8|s32", "sm_72"),
    ("wmma", "bf16|tf32|f64", "sm_80"),
    ("ldmatrix movmatrix", "", "sm_75"),
    ("stmatrix", "", "sm_90"),
    ("wgmma", "", "sm_90a"),
    # Arithmetic
    ("tanh", "", "sm_75"),
    ("ex2", "f16|f16x2", "sm_75"),
    ("ex2 tanh", "bf16|bf16x2", "sm_90"),
    ("add sub mul", "bf16|bf16x2", "sm_90"),
    ("add min max", "u16x2|s16x2", "sm_90"),
    ("min max", "relu", "sm_90"),
    ("abs neg fma", "bf16|bf16x2", "sm_80"),
    ("fma", "relu", "sm_80"),
    ("fma", "oob", "sm_90"),
    ("min max", "f16|f16x2|bf16|bf16x2|NaN", "sm_80"),
    ("min max", "xorsign", "sm_86"),
    ("min max", "#4", "sm_100"),
    ("set setp", "bf16|bf16x2", "sm_90"),
    # Conversions
    ("cvt", "pack", "sm_72"),
    ("cvt", "pack u4|s4|u2|s2", "sm_75"),
    ("cvt", "relu|f16x2|bf16|bf16x2|tf32", "sm_80"),
    ("cvt", "tf32 rn|rz", "sm_90"),
    ("cvt", "tf32 rn|rz satfinite", "sm_100"),
    ("cvt", "bf16 u8|s8|u16|s16|u32|s32|u64|s64|f16|f64", "sm_90"),
    ("cvt", "bf16 rni|rzi|rmi|rpi", "sm_90"),
    ("cvt", "bf16 ftz", "sm_90"),
    ("cvt", "e4m3x2|e5m2x2", "sm_89"),
    ("cvt", "e4m3x2|e5m2x2 bf16x2", "sm_100f"),
    ("cvt", "e2m1x2|e2m3x2|e3m2x2|ue8m0x2", "sm_100f"),
    ("cvt", "rs", "sm_100a"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Requirement:
    """One row of the table, ready to be compared with an instruction."""

    modifiers: tuple[frozenset[str], ...]
    needed: Architecture
    text: str


def _requirements() -> dict[str, list[Requirement]]:
    table: dict[str, list[Requirement]] = {}
    for opcodes, modifiers, name in _ROWS:
        needed = architecture(name)
        assert needed is not None
        groups = tuple(frozenset(group.split("|")) for group in modifiers.split())
        for opcode in opcodes.split():
            table.setdefault(opcode, []).append(Requirement(groups, needed, modifiers))
    return table


REQUIREMENTS = _requirements()


def lacking(instruction: Instruction, target: Architecture) -> Architecture | None:
    """The architecture that an instruction needs and the text's target is not; None if it may."""
    present = {*instruction.modifiers, f"#{len(instruction.operands)}"}
    for opcode in (instruction.opcode, "*"):
        for requirement in REQUIREMENTS.get(opcode, ()):
            if not target.has(requirement.needed) and all(
                not group.isdisjoint(present) for group in requirement.modifiers
            ):
                return requirement.needed
    return None


def check_target(target: str, line: int, device: str) -> None:
    """PtxError where a text's ``.target`` is no architecture, or not one that the device runs."""
    wanted, own = architecture(target), architecture(device)
    assert own is not None
    if wanted is None:
        raise PtxError(f"PTX line {line}: unknown architecture {target!r} in .target")
    if not wanted.runs_on(own):
        raise PtxError(
            f"PTX line {line}: the text is for {wanted} (.target), which a device of architecture"
            f" {device} does not run"
        )
