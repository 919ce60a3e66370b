"""Runs a few PTX instructions over arrays, one element per thread, for the instruction tests.

Every text runs in three ways: by whole warps, in a diverged branch, and under a guard; lanes that
are left out must keep what they had.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

import gpu
from gpu.ptx.executor import PtxDevice

HEADER = ".version 8.5\n.target sm_90a\n.address_size 64\n"
_BLOCK = 256
INITIAL = 0x5A
"""Every byte of a destination before the instruction."""


@cache
def device() -> PtxDevice:
    """One executor for all tests: its memory is reserved once."""
    opened = gpu.open("ptx")
    assert isinstance(opened, PtxDevice)
    return opened


def lanewise(
    text: str, sources: Mapping[str, np.ndarray], results: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """What ``text`` leaves in the registers ``%result`` for the registers ``%source``.

    Arrays are one-dimensional and of one length; bool ones become predicates, 8-bit ones live in
    16-bit registers. Only lines of one instruction each are guarded, so ``text`` needs one a line.
    """
    (count,) = {len(a) for a in sources.values()}
    padded = -(-count // 32) * 32 if count <= _BLOCK else -(-count // _BLOCK) * _BLOCK
    arrays = {n: np.concatenate((a, a[:1].repeat(padded - count))) for n, a in sources.items()}
    active = np.arange(padded) % 3 != 1
    whole = _launch(text, arrays, results, active, "whole")
    for manner in ("branch", "guard"):
        partly = _launch(text, arrays, results, active, manner)
        for name, values in partly.items():
            left = _initial(values.dtype, padded)
            wanted = np.where(active, _bits(whole[name]), _bits(left))
            assert np.array_equal(_bits(values), wanted), f"%{name} differs in a {manner}: {text}"
    return {name: values[:count] for name, values in whole.items()}


def _bits(values: np.ndarray) -> np.ndarray:
    return values if values.dtype == bool else values.view(f"u{values.dtype.itemsize}")


def _initial(dtype: np.dtype[Any], count: int) -> np.ndarray:
    if dtype == bool:
        return np.zeros(count, bool)
    return np.full(count * dtype.itemsize, INITIAL, np.uint8).view(dtype)


def _launch(
    text: str,
    arrays: Mapping[str, np.ndarray],
    results: Mapping[str, Any],
    active: np.ndarray,
    manner: str,
) -> dict[str, np.ndarray]:
    dev = device()
    count = len(active)
    inputs = {n: dev.array(a.astype(np.uint8) if a.dtype == bool else a) for n, a in arrays.items()}
    dtypes = {n: np.dtype(d) for n, d in results.items()}
    outputs = {n: dev.empty(count, np.uint8 if d == bool else d) for n, d in dtypes.items()}
    lines = _loads(arrays) + _initials(dtypes)
    body = [line.strip() for line in text.strip().splitlines()]
    if manner == "guard":
        body = [f"@%go {line}" if re.match(r"[a-z]", line) else line for line in body]
    elif manner == "branch":
        body = ["@!%go bra after;", *body, "after:"]
    kernel = dev.load(
        HEADER
        + f".visible .entry k({', '.join(f'.param .u64 p_{n}' for n in ['go', *inputs, *outputs])})\n"
        + "{\n" + "\n".join(_prologue() + lines + body + _stores(dtypes)) + "\nret;\n}\n"
    ).kernel("k")  # fmt: skip
    go = dev.array(active.astype(np.uint8))
    block = min(count, _BLOCK)
    kernel.launch((count // block,), (block,), [go, *inputs.values(), *outputs.values()])
    found = {n: a.to_numpy() for n, a in outputs.items()}
    return {n: a.astype(bool) if dtypes[n] == bool else a for n, a in found.items()}


def _prologue() -> list[str]:
    return [
        ".reg .pred %go; .reg .b64 %address, %offset; .reg .b32 %thread; .reg .b16 %byte;",
        ".reg .b32 %block, %threads;",
        "mov.u32 %thread, %tid.x;",
        "mov.u32 %block, %ctaid.x;",
        "mov.u32 %threads, %ntid.x;",
        "mad.lo.u32 %thread, %block, %threads, %thread;",
        *_address("go", 1),
        "ld.global.u8 %byte, [%address];",
        "setp.ne.u16 %go, %byte, 0;",
    ]


def _address(name: str, size: int) -> list[str]:
    return [
        f"ld.param.u64 %address, [p_{name}];",
        f"mul.wide.u32 %offset, %thread, {size};",
        "add.u64 %address, %address, %offset;",
    ]


def _register(dtype: np.dtype[Any]) -> str:
    return ".pred" if dtype == bool else f".b{max(8 * dtype.itemsize, 16)}"


def _loads(arrays: Mapping[str, np.ndarray]) -> list[str]:
    lines = []
    for name, array in arrays.items():
        size = array.dtype.itemsize
        lines += [f".reg {_register(array.dtype)} %{name};", *_address(name, size)]
        if array.dtype == bool:
            lines += ["ld.global.u8 %byte, [%address];", f"setp.ne.u16 %{name}, %byte, 0;"]
        else:
            lines.append(f"ld.global.{'u8' if size == 1 else f'b{8 * size}'} %{name}, [%address];")
    return lines


def _initials(dtypes: Mapping[str, np.dtype[Any]]) -> list[str]:
    lines = []
    for name, dtype in dtypes.items():
        lines.append(f".reg {_register(dtype)} %{name};")
        if dtype == bool:
            lines.append(f"setp.ne.u32 %{name}, %thread, %thread;")
        else:
            width = max(dtype.itemsize, 2)
            lines.append(f"mov.b{8 * width} %{name}, 0x{INITIAL:02x}{'5a' * (width - 1)};")
    return lines


def _stores(dtypes: Mapping[str, np.dtype[Any]]) -> list[str]:
    lines = []
    for name, dtype in dtypes.items():
        lines += _address(name, dtype.itemsize)
        if dtype == bool:
            lines += [f"selp.u16 %byte, 1, 0, %{name};", "st.global.u8 [%address], %byte;"]
        elif dtype.itemsize == 1:
            lines.append(f"st.global.u8 [%address], %{name};")
        else:
            lines.append(f"st.global.b{8 * dtype.itemsize} [%address], %{name};")
    return lines


def pairs(*axes: np.ndarray) -> tuple[np.ndarray, ...]:
    """Every combination of the values of several arrays, as flat arrays of one length."""
    return tuple(a.reshape(-1) for a in np.meshgrid(*axes, indexing="ij"))


def corner_integers(bits: int, signed: bool, random: int = 20) -> np.ndarray:
    """Powers of two and their neighbours, the extremes, and some random numbers."""
    values = {0, 1, 2, 3, 5, 10, (1 << bits) - 1, (1 << bits) - 2, 0x5555 & ((1 << bits) - 1)}
    for k in (7, 8, 15, 16, bits // 2, bits - 2, bits - 1):
        values |= {1 << k, (1 << k) - 1, (1 << k) + 1}
    generator = np.random.default_rng(bits)
    values |= {int(v) for v in generator.integers(0, 1 << (bits - 1), random)}
    values |= {(1 << bits) - 1 - int(v) for v in generator.integers(0, 1 << (bits - 1), random)}
    unsigned = np.array(sorted(v & ((1 << bits) - 1) for v in values), f"u{bits // 8}")
    return unsigned.view(f"i{bits // 8}") if signed else unsigned
