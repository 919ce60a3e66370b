"""The PTX executor as a Device: loads PTX, holds memory, launches kernels on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpu.arguments import Parameter, pack, parameter_buffer
from gpu.compile import compile_cuda
from gpu.counters import Report
from gpu.device import Call
from gpu.ptx import spaces
from gpu.ptx.architectures import check_target
from gpu.ptx.emit import Code
from gpu.ptx.heap import keep_freed_memory
from gpu.ptx.launch import MOST_CTAS_PER_CLUSTER, Launch, Options, dimensions, run_dependent
from gpu.ptx.memory import Allocation, GlobalMemory
from gpu.ptx.optimize import live_registers
from gpu.ptx.program import Program, source_place
from gpu.ptx.syntax import Module, Position, Variable
from gpu.ptx.translation import translate
from simkit.errors import CapacityError, DtypeError, LaunchError, PtxError, ShapeError
from simkit.machine.gpus import gpu as find_gpu


class PtxArray:
    """An array in the executor's memory; freed when nobody holds it."""

    def __init__(
        self, memory: GlobalMemory, shape: tuple[int, ...], dtype: np.dtype[Any], name: str
    ) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._memory = memory
        self._size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._allocation: Allocation = memory.allocate(self._size, name)

    @property
    def address(self) -> int:
        return self._allocation.address

    def _bytes(self) -> np.ndarray:
        return self._memory.bytes.data[self._allocation.start : self._allocation.end]

    def to_numpy(self) -> np.ndarray:
        return self._bytes().copy().view(self.dtype).reshape(self.shape)

    def fill(self, values: np.ndarray) -> None:
        """Overwrites the array with values of the same shape and dtype."""
        if values.shape != self.shape:
            raise ShapeError(
                f"array {self.name!r} has shape {self.shape}, the values {values.shape}"
            )
        if values.dtype != self.dtype:
            raise DtypeError(
                f"array {self.name!r} holds {self.dtype}, the values are {values.dtype}"
            )
        self._bytes()[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._allocation.written = None

    def __del__(self) -> None:
        allocation = getattr(self, "_allocation", None)
        if allocation is not None:
            self._memory.free(allocation)


class PtxKernel:
    """A kernel of a loaded module: its program, and the code of its blocks, generated when first
    needed.
    """

    def __init__(self, module: PtxModule, name: str) -> None:
        self.name = name
        self.module = module
        translation = module.translation
        self.program: Program = translation.program(name)
        self.parameters = [Parameter.of(v) for v in self.program.parameters]
        self.symbols = dict(module.symbols)
        self.symbols.update(self.program.local_offsets)
        self.symbols.update(self.program.parameter_offsets)
        self.static_shared = self._lay_out_shared()
        shared = {v.name for v in (*module.shared, *self.program.shared)}
        self._code = translation.code(name, self.symbols, frozenset(shared))

    def _lay_out_shared(self) -> int:
        """Offsets of shared variables: static ones first, dynamic ones (of unknown size) all at the
        end.
        """
        end = 0
        dynamic: list[Variable] = []
        for variable in (*self.module.shared, *self.program.shared):
            if variable.is_extern:
                dynamic.append(variable)
                continue
            end = -(-end // variable.align) * variable.align
            self.symbols[variable.name] = end
            end += variable.size
        align = max((v.align for v in dynamic), default=1)
        end = -(-end // align) * align
        self.symbols.update({v.name: end for v in dynamic})
        return end

    def code(self, block: int, is_masked: bool, is_clustered: bool = False) -> Code:
        return self._code.of(block, is_masked, is_clustered)

    def _cluster(
        self, asked: tuple[int, int, int], grid: tuple[int, int, int]
    ) -> tuple[int, int, int]:
        """The cluster of a launch: the one asked for, or the one the kernel was compiled for."""
        required = self.program.performance.get("reqnctapercluster")
        if required is not None:
            fixed = _three(required)
            if asked not in ((1, 1, 1), fixed):
                raise LaunchError(f"kernel {self.name!r} requires clusters of {fixed}, got {asked}")
            asked = (fixed[0], fixed[1], fixed[2])
        size = asked[0] * asked[1] * asked[2]
        if size > MOST_CTAS_PER_CLUSTER:
            raise LaunchError(
                f"a cluster of {size} CTAs, at most {MOST_CTAS_PER_CLUSTER} are possible"
            )
        if size > 1 and int(self.module.device.gpu.arch[3:].rstrip("af")) < 90:
            raise LaunchError(f"{self.module.device.gpu.name} has no clusters; they need sm_90")
        for axis, extent, part in zip("xyz", grid, asked, strict=True):
            if extent % part:
                raise LaunchError(
                    f"grid.{axis} is {extent}, not a multiple of cluster.{axis} {part}"
                )
        return asked

    @property
    def live_registers(self) -> int:
        """Estimate of the 32-bit registers per thread, from the liveness of the PTX."""
        return live_registers(self.program.blocks, self.program.registers)

    def position(self, site: int) -> Position:
        return self.module.translation.positions.get(site, Position(site))

    def place(self, site: int) -> str:
        return source_place(self.module.syntax, self.position(site))

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[object],
        shared_bytes: int = 0,
        cluster: Sequence[int] = (1, 1, 1),
    ) -> Report:
        """See gpu.device.Kernel.launch."""
        return self.prepare(grid, block, args, shared_bytes, cluster).run()

    def prepare(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[object],
        shared_bytes: int = 0,
        cluster: Sequence[int] = (1, 1, 1),
    ) -> Launch:
        """A launch that has been checked and not run yet."""
        device = self.module.device
        extents = dimensions("grid", grid)
        threads = dimensions("block", block)
        cluster_extents = self._cluster(dimensions("cluster", cluster), extents)
        count = threads[0] * threads[1] * threads[2]
        if count > device.gpu.max_threads_per_block:
            raise LaunchError(
                f"a block of {count} threads, {device.gpu.name} allows"
                f" {device.gpu.max_threads_per_block}"
            )
        limits = self.program.performance
        if "reqntid" in limits and _three(limits["reqntid"]) != threads:
            raise LaunchError(
                f"kernel {self.name!r} requires blocks of {limits['reqntid']} threads, got"
                f" {threads}"
            )
        if "maxntid" in limits and count > int(np.prod(limits["maxntid"])):
            raise LaunchError(
                f"a block of {count} threads, kernel {self.name!r} was compiled for at most"
                f" {int(np.prod(limits['maxntid']))}"
            )
        total_shared = self.static_shared + shared_bytes
        if shared_bytes < 0 or total_shared > device.gpu.smem_per_block_optin:
            raise CapacityError(
                f"kernel {self.name!r} needs {total_shared} bytes of shared memory"
                f" ({self.static_shared} static), {device.gpu.name} has"
                f" {device.gpu.smem_per_block_optin} per block"
            )
        data = parameter_buffer(self.parameters, pack(self.name, self.parameters, args))
        # Room behind them, so that whatever follows the last one can be viewed at any width.
        parameters = np.zeros(-(-len(data) // 16) * 16 + 16, np.uint8)
        parameters[: len(data)] = np.frombuffer(data, np.uint8)
        return Launch(
            self,
            extents,
            threads,
            shared_bytes,
            parameters,
            device.memory,
            device.gpu,
            device.arch,
            device.options,
            cluster_extents,
            cluster_extents != (1, 1, 1) or "reqnctapercluster" in self.program.performance,
        )


def _prepared(call: Call) -> Launch:
    if not isinstance(call.kernel, PtxKernel):
        raise LaunchError(f"kernel {call.kernel.name!r} belongs to another device")
    return call.kernel.prepare(call.grid, call.block, call.args, call.shared_bytes, call.cluster)


def _three(values: tuple[int, ...]) -> tuple[int, ...]:
    return (*values, *(1,) * (3 - len(values)))


class PtxModule:
    """A parsed PTX text with its global and constant variables in memory."""

    def __init__(self, device: PtxDevice, ptx: str) -> None:
        self.device = device
        self.ptx = ptx
        self.translation = translate(ptx)
        self.syntax: Module = self.translation.syntax
        check_target(self.syntax.target, self.syntax.target_line, device.gpu.arch)
        self.symbols: dict[str, int] = {}
        self.shared = [v for v in self.syntax.variables if v.space == "shared"]
        self._variables: list[PtxArray] = []
        self._kernels: dict[str, PtxKernel] = {}
        inner = [v for f in self.syntax.functions.values() for v in f.variables]
        for variable in (*self.syntax.variables, *inner):
            if variable.space in ("global", "const"):
                self._place(variable)
        for variable in (*self.syntax.variables, *inner):
            self._write_addresses(variable)

    def _place(self, variable: Variable) -> None:
        if variable.is_extern:
            raise PtxError(
                f"PTX line {variable.position.line}: {variable.name!r} is defined in another module"
            )
        data = np.zeros(variable.size, np.uint8)
        data[: len(variable.initial)] = np.frombuffer(variable.initial, np.uint8)
        array = PtxArray(self.device.memory, data.shape, data.dtype, variable.name)
        array.fill(data)
        self._variables.append(array)
        self.symbols[variable.name] = array.address

    def _write_addresses(self, variable: Variable) -> None:
        """Fills in the addresses of other variables among the initial values."""
        for offset, name, addend, width in variable.addresses:
            if name not in self.symbols:
                raise PtxError(
                    f"PTX line {variable.position.line}: unknown name {name!r} in an initial value"
                )
            start = self.symbols[variable.name] - spaces.GLOBAL_BASE + offset
            value = (self.symbols[name] + addend) & ((1 << 8 * width) - 1)
            self.device.memory.bytes.data[start : start + width] = np.frombuffer(
                value.to_bytes(width, "little"), np.uint8
            )

    @property
    def kernels(self) -> list[str]:
        """Names of the entries."""
        return [f.name for f in self.syntax.functions.values() if f.is_entry]

    def variable(self, name: str) -> PtxArray | None:
        """See gpu.device.Module.variable."""
        return next((array for array in self._variables if array.name == name), None)

    def kernel(self, name: str) -> PtxKernel:
        if name not in self._kernels:
            self._kernels[name] = PtxKernel(self, name)
        return self._kernels[name]


class PtxDevice:
    """The executor, standing for one GPU of the device table.

    ``edit``: what is done to the text of every module before it is loaded; how mutation testing
    changes a kernel below its source.
    """

    def __init__(
        self, gpu: str = "h100", options: Options | None = None,
        edit: Callable[[str], str] | None = None,
    ) -> None:  # fmt: skip
        self.edit = edit
        self.name = "ptx"
        self.gpu = find_gpu(gpu)
        self.arch = self.gpu.arch
        self.options = options or Options()
        self.memory = GlobalMemory(self.gpu.hbm_bytes)
        keep_freed_memory()

    def with_options(self, options: Options) -> PtxDevice:
        """The same device and memory, run another way."""
        other = object.__new__(PtxDevice)
        other.__dict__.update(self.__dict__)
        other.options = options
        return other

    def compile(
        self,
        source: str,
        options: Sequence[str] = (),
        arch: str | None = None,
        name: str = "kernel.cu",
    ) -> PtxModule:
        return self.load(compile_cuda(source, options=options, arch=arch or self.arch, name=name))

    def load(self, ptx: str) -> PtxModule:
        return PtxModule(self, ptx if self.edit is None else self.edit(ptx))

    def array(self, values: np.ndarray, name: str = "") -> PtxArray:
        values = np.asarray(values)
        array = PtxArray(self.memory, values.shape, values.dtype, name or self._fresh_name())
        array.fill(values)
        return array

    def empty(self, shape: int | tuple[int, ...], dtype: Any, name: str = "") -> PtxArray:
        extents = (shape,) if isinstance(shape, int) else tuple(shape)
        array = PtxArray(self.memory, extents, np.dtype(dtype), name or self._fresh_name())
        array._bytes()[:] = 0xFF  # NaN in every floating format: what nobody wrote shows
        array._allocation.written = np.zeros(array._size, bool)
        return array

    def launch_dependent(self, primary: Call, secondary: Call) -> tuple[Report, Report]:
        """See gpu.device.Device.launch_dependent."""
        return run_dependent(*(_prepared(call) for call in (primary, secondary)))

    def _fresh_name(self) -> str:
        return f"array{len(self.memory.allocations)}"
