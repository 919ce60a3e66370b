"""PTX's fundamental types and the NumPy types that hold them.  Source: PTX ISA 8.8, 5.2."""

from __future__ import annotations

import numpy as np

# Bytes of each type in memory and in a register.
SIZES: dict[str, int] = {
    "b8": 1, "u8": 1, "s8": 1,
    "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "tf32": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8,
    "b128": 16,
    "u16x2": 4, "s16x2": 4,
    "e4m3x2": 2, "e5m2x2": 2, "e2m3x2": 2, "e3m2x2": 2, "ue8m0x2": 2, "e2m1x2": 1,
    "e4m3x4": 4, "e5m2x4": 4, "e2m3x4": 4, "e3m2x4": 4, "e2m1x4": 2,
}  # fmt: skip

# The NumPy dtype code that an operand of each type is computed in.  bf16 and the packed types stay
# bits: NumPy has no arithmetic for them.
CODES: dict[str, str] = {
    "pred": "b1",
    "b8": "u1", "u8": "u1", "s8": "i1",
    "b16": "u2", "u16": "u2", "s16": "i2", "f16": "f2", "bf16": "u2",
    "b32": "u4", "u32": "u4", "s32": "i4", "f32": "f4", "f16x2": "u4", "bf16x2": "u4", "tf32": "u4",
    "b64": "u8", "u64": "u8", "s64": "i8", "f64": "f8",
}  # fmt: skip

DTYPES: dict[str, np.dtype] = {
    code: np.dtype(code if code != "b1" else "?")
    for code in ("b1", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8")
}

TYPE_NAMES = frozenset(SIZES) | {"pred"}
# Types of instructions alone: nothing can be declared with them.
INSTRUCTION_TYPES = frozenset(
    ("u16x2", "s16x2", "e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "ue8m0x2", "e2m1x2",
     "e4m3x4", "e5m2x4", "e2m3x4", "e3m2x4", "e2m1x4")
)  # fmt: skip
DECLARABLE = TYPE_NAMES - INSTRUCTION_TYPES


def storage_code(register_type: str) -> str:
    """The dtype code a register of this declared type is stored in: bits, or bool for
    predicates.
    """
    if register_type == "pred":
        return "b1"
    return f"u{SIZES[register_type]}"


def code_size(code: str) -> int:
    """Bytes of a dtype code: ``"f4"`` is 4."""
    return int(code[1])
