"""Elementwise operations, as a kernel each or as one: bytes to and from HBM, and time.

Source: 3.4 Attention kernel, kernel fusion: each kernel is a round trip of its tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from simkit.errors import ShapeError
from simkit.machine.gpus import Gpu
from simkit.schedules.engine import Agent, Program, Run, Start
from simkit.schedules.grid import Item, Launch
from simkit.schedules.steps import global_load, global_store, lanes

_THREADS = 128
_VALUES = 4096  # of a CTA: four accesses of 16 bytes of each thread, of 16-bit values


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A value of each of ``writes`` from one of each of ``reads``; names of tensors. ``fma``: for
    each value.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    fma: int = 1


def fused(operations: Sequence[Operation], keep: Iterable[str] = ()) -> Operation:
    """A chain as one operation: what is written and read within it stays in registers.

    ``keep``: tensors that are wanted besides what the last operation writes, such as a residual.
    `ShapeError` for an empty chain, or a kept tensor that it does not write.
    """
    if not operations:
        raise ShapeError("there is no operation to fuse")
    reads: dict[str, None] = {}  # in order
    written: dict[str, None] = {}
    for operation in operations:
        reads.update(dict.fromkeys(name for name in operation.reads if name not in written))
        written.update(dict.fromkeys(operation.writes))
    wanted = {*keep, *operations[-1].writes}
    if missing := wanted - set(written):
        raise ShapeError(f"no operation of the chain writes {sorted(missing)}")
    return Operation(
        name=" + ".join(operation.name for operation in operations),
        reads=tuple(reads),
        writes=tuple(name for name in written if name in wanted),
        fma=sum(operation.fma for operation in operations),
    )


def operation_bytes(operation: Operation, values: int, element: int = 2) -> int:
    """That the kernel moves: every tensor once."""
    return (len(operation.reads) + len(operation.writes)) * values * element


def elementwise(gpu: Gpu, operation: Operation, values: int, *, element: int = 2) -> Launch:
    """The kernel of an operation on tensors of ``values`` values of ``element`` bytes."""
    if values < 1:
        raise ShapeError(f"{operation.name} of {values} values; it takes 1 or more")
    size = min(values, _VALUES)
    moved = operation_bytes(operation, values, element)
    part = 1.0 if moved > gpu.l2_bytes else 0.0  # otherwise the kernel ahead left it in L2
    latency = gpu.hbm_latency if part else gpu.l2_latency
    loads = global_load("inputs", len(operation.reads) * size * element, part, latency)
    work = lanes(operation.name, "compute", fma=operation.fma * size)
    store = global_store("outputs", len(operation.writes) * size * element, part)

    def agents(name: str, items: Sequence[Item]) -> list[Agent]:
        def program() -> Program:
            for _ in items:
                yield Run(loads)
                yield Run(work)
                yield Start(store)

        return [Agent(name, "warps", program())]

    return Launch(
        name=operation.name,
        items=[Item(1)] * -(-values // _VALUES),
        cta=agents,
        threads=_THREADS,
        registers=32,
        shared_bytes=0,
        path="mma.sync",
        flop=float(operation.fma * values),
        hbm_bytes=moved,
        key=("elementwise", operation, size, element, part),
    )
