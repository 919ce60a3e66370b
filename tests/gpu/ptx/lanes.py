"""Runs a few PTX instructions over arrays, one element per thread, for the instruction tests.

Every text runs in four ways: by whole warps, in a diverged branch, under a guard (lanes that are
left out must keep what they had), and on constants that stand in registers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

import gpu
from gpu.counters import Report
from gpu.ptx.executor import PtxArray, PtxDevice
from gpu.ptx.launch import Options

HEADER = ".version 8.5\n.target sm_90a\n.address_size 64\n"
_BLOCK = 256
INITIAL = 0x5A
"""Every byte of a destination before the instruction."""


@cache
def device(name: str = "h100") -> PtxDevice:
    """One executor for all tests of a GPU: its memory is reserved once."""
    opened = gpu.open("ptx", gpu=name)
    assert isinstance(opened, PtxDevice)
    return opened


def device_of(target: str) -> PtxDevice:
    """The executor that runs texts for a target."""
    return device("b200" if target.startswith("sm_10") else "h100")


def lanewise(
    text: str,
    sources: Mapping[str, np.ndarray],
    results: Mapping[str, Any],
    target: str = "sm_90a",
) -> dict[str, np.ndarray]:
    """What ``text`` leaves in the registers ``%result`` for the registers ``%source``.

    Arrays are one-dimensional and of one length; bool ones become predicates, 8-bit ones live in
    16-bit registers. Only lines of one instruction each are guarded, so ``text`` needs one a line.
    """
    (count,) = {len(a) for a in sources.values()}
    padded = -(-count // 32) * 32 if count <= _BLOCK else -(-count // _BLOCK) * _BLOCK
    arrays = {n: np.concatenate((a, a[:1].repeat(padded - count))) for n, a in sources.items()}
    active = np.arange(padded) % 3 != 1
    whole = _launch(text, arrays, results, active, "whole", target)
    for manner in ("branch", "guard"):
        partly = _launch(text, arrays, results, active, manner, target)
        for name, values in partly.items():
            left = _initial(values.dtype, padded)
            wanted = np.where(active, _bits(whole[name]), _bits(left))
            assert np.array_equal(_bits(values), wanted), f"%{name} differs in a {manner}: {text}"
    for k in {0, count // 3, count - 1}:
        constants = {n: a[k : k + 1].repeat(32) for n, a in arrays.items()}
        alike = _launch(text, constants, results, np.ones(32, bool), "constant", target)
        for name, values in alike.items():
            same = _bits(values) == _bits(whole[name][k : k + 1])
            assert same.all(), f"%{name} differs on constants: {text}"
    return {name: values[:count] for name, values in whole.items()}


def _bits(values: np.ndarray) -> np.ndarray:
    return values if values.dtype.kind == "b" else values.view(f"u{values.dtype.itemsize}")


def _initial(dtype: np.dtype[Any], count: int) -> np.ndarray:
    if dtype.kind == "b":
        return np.zeros(count, bool)
    return np.full(count * dtype.itemsize, INITIAL, np.uint8).view(dtype)


def _launch(
    text: str,
    arrays: Mapping[str, np.ndarray],
    results: Mapping[str, Any],
    active: np.ndarray,
    manner: str,
    target: str,
) -> dict[str, np.ndarray]:
    dev = device_of(target)
    count = len(active)
    inputs = {
        n: dev.array(a.astype(np.uint8) if a.dtype.kind == "b" else a) for n, a in arrays.items()
    }
    dtypes = {n: np.dtype(d) for n, d in results.items()}
    outputs = {n: dev.empty(count, np.uint8 if d.kind == "b" else d) for n, d in dtypes.items()}
    lines = _constants(arrays) if manner == "constant" else _loads(arrays)
    lines += _initials(dtypes)
    body = [line.strip() for line in text.strip().splitlines()]
    if manner == "guard":
        body = [f"@%go {line}" if re.match(r"[a-z]", line) else line for line in body]
    elif manner == "branch":
        body = ["@!%go bra after;", *body, "after:"]
    parameters = ", ".join(f".param .u64 p_{n}" for n in ["go", *inputs, *outputs])
    statements = "\n".join(_prologue() + lines + body + _stores(dtypes))
    kernel = dev.load(
        f"{HEADER.replace('sm_90a', target)}"
        f".visible .entry k({parameters})\n{{\n{statements}\nret;\n}}\n"
    ).kernel("k")
    go = dev.array(active.astype(np.uint8))
    block = min(count, _BLOCK)
    kernel.launch((count // block,), (block,), [go, *inputs.values(), *outputs.values()])
    found = {n: a.to_numpy() for n, a in outputs.items()}
    return {n: a.astype(bool) if dtypes[n].kind == "b" else a for n, a in found.items()}


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
    return ".pred" if dtype.kind == "b" else f".b{max(8 * dtype.itemsize, 16)}"


def _loads(arrays: Mapping[str, np.ndarray]) -> list[str]:
    lines = []
    for name, array in arrays.items():
        size = array.dtype.itemsize
        lines += [f".reg {_register(array.dtype)} %{name};", *_address(name, size)]
        if array.dtype.kind == "b":
            lines += ["ld.global.u8 %byte, [%address];", f"setp.ne.u16 %{name}, %byte, 0;"]
        else:
            lines.append(f"ld.global.{'u8' if size == 1 else f'b{8 * size}'} %{name}, [%address];")
    return lines


def _constants(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Moves of each array's first element, which the executor can propagate."""
    lines = []
    for name, array in arrays.items():
        lines.append(f".reg {_register(array.dtype)} %{name};")
        if array.dtype.kind == "b":
            lines.append(f"setp.{'eq' if array[0] else 'ne'}.u32 %{name}, %thread, %thread;")
        else:
            width = max(array.dtype.itemsize, 2)
            lines.append(f"mov.b{8 * width} %{name}, 0x{int(_bits(array)[0]):x};")
    return lines


def _initials(dtypes: Mapping[str, np.dtype[Any]]) -> list[str]:
    lines = []
    for name, dtype in dtypes.items():
        lines.append(f".reg {_register(dtype)} %{name};")
        if dtype.kind == "b":
            lines.append(f"setp.ne.u32 %{name}, %thread, %thread;")
        else:
            width = max(dtype.itemsize, 2)
            lines.append(f"mov.b{8 * width} %{name}, 0x{INITIAL:02x}{'5a' * (width - 1)};")
    return lines


def _stores(dtypes: Mapping[str, np.dtype[Any]]) -> list[str]:
    lines = []
    for name, dtype in dtypes.items():
        lines += _address(name, dtype.itemsize)
        if dtype.kind == "b":
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


@dataclass(frozen=True)
class Run:
    """One launch: its arrays afterwards, by name, and its report."""

    arrays: dict[str, np.ndarray]
    report: Report


def run(
    body: str,
    arguments: Mapping[str, np.ndarray | np.generic],
    *,
    grid: tuple[int, ...] = (1,),
    block: tuple[int, ...] = (32,),
    shared_bytes: int = 0,
    options: Options | None = None,
    module: str = "",
    target: str = "sm_90a",
) -> Run:
    """Runs a kernel of these statements.

    Each argument ``name`` is in register ``%name`` (arrays as pointers). Registers %h, %r, %rd, %f,
    %fd and %p are declared, and %t5 is the thread's linear number in its block. ``module`` stands
    before the kernel.
    """
    dev = device_of(target)
    dev = dev if options is None else dev.with_options(options)
    held = {
        n: dev.array(a, name=n) if isinstance(a, np.ndarray) else a for n, a in arguments.items()
    }
    text = kernel_text(body, arguments, module).replace(".target sm_90a", f".target {target}", 1)
    kernel = dev.load(text).kernel("k")
    report = kernel.launch(grid, block, list(held.values()), shared_bytes=shared_bytes)
    arrays = {n: a.to_numpy() for n, a in held.items() if isinstance(a, PtxArray)}
    return Run(arrays, report)


def kernel_text(
    body: str, arguments: Mapping[str, np.ndarray | np.generic], module: str = ""
) -> str:
    """The PTX of a kernel as ``run`` makes it."""
    sizes = {n: 64 if a.ndim else 8 * a.dtype.itemsize for n, a in arguments.items()}
    parameters = ", ".join(f".param .b{bits} p_{n}" for n, bits in sizes.items())
    loads = [f".reg .b{bits} %{n}; ld.param.b{bits} %{n}, [p_{n}];" for n, bits in sizes.items()]
    return f"""{HEADER}{module}
.visible .entry k({parameters}) {{
.reg .b16 %h<32>; .reg .b32 %r<64>; .reg .b64 %rd<64>; .reg .f32 %f<32>; .reg .f64 %fd<16>;
.reg .pred %p<16>; .reg .b32 %t<6>;
{" ".join(loads)}
mov.u32 %t0, %tid.x; mov.u32 %t1, %tid.y; mov.u32 %t2, %tid.z; mov.u32 %t3, %ntid.x;
mov.u32 %t4, %ntid.y; mad.lo.u32 %t5, %t2, %t4, %t1; mad.lo.u32 %t5, %t5, %t3, %t0;
{body}
ret;
}}
"""
