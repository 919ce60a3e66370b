"""The CuPy device as far as it goes without a GPU: clear errors, and what the driver is given: the
executor's parameter bytes, launch attributes.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import types
from typing import Any

import numpy as np
import pytest

import gpu
from gpu import cuda, driver
from gpu.device import Call
from gpu.ptx.launch import Launch
from simkit.errors import DeviceUnavailableError, LaunchError, PtxError

SOURCE = """
struct Pair { int first; double second; char tag; };
extern "C" __global__ void sink(const float* x, char small, short medium, int n, float scale,
                                double exact, Pair pair, unsigned long long big, const int* y) {
  if (n > 1000)
    ((float*)x)[0] = scale + small + medium + exact + pair.first + pair.second + pair.tag + big
                     + y[0];
}
"""
PAIR = np.dtype(
    {
        "names": ["first", "second", "tag"],
        "formats": ["<i4", "<f8", "i1"],
        "offsets": [0, 8, 16],
        "itemsize": 24,
    }
)


class FakeMemory:
    """Bytes that stand for GPU memory."""

    def __init__(self, size: int, fill: int) -> None:
        self.bytes = np.full(size, fill, np.uint8)
        self.data = types.SimpleNamespace(ptr=self.bytes.ctypes.data)

    def __getitem__(self, index: slice) -> Any:
        part = self.bytes[index]
        return types.SimpleNamespace(set=lambda values: part.__setitem__(slice(None), values))

    def get(self) -> np.ndarray:
        return self.bytes.copy()


class FakeEvent:
    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


def fake_cupy() -> types.ModuleType:
    """The parts of CuPy that the device uses."""
    module = types.ModuleType("cupy")

    class RawKernel:
        def __init__(self) -> None:
            self.kernel = types.SimpleNamespace(ptr=1234)

        def compile(self) -> None: ...

    class RawModule:
        def __init__(self, path: str) -> None:
            with open(path, encoding="utf-8") as file:
                self.ptx = file.read()
            self.kernels: dict[str, RawKernel] = {}

        def get_function(self, name: str) -> RawKernel:
            return self.kernels.setdefault(name, RawKernel())

    def device(*_: object) -> Any:
        return types.SimpleNamespace(compute_capability="90", id=0)

    module.uint8 = np.uint8  # type: ignore[attr-defined]
    module.full = lambda size, fill, dtype: FakeMemory(size, fill)  # type: ignore[attr-defined]
    module.RawModule = RawModule  # type: ignore[attr-defined]
    module.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        runtime=types.SimpleNamespace(
            getDeviceCount=lambda: 1, getDeviceProperties=lambda index: {"name": b"Imagined GPU"}
        ),
        Device=device,
        Event=FakeEvent,
        get_current_stream=lambda: types.SimpleNamespace(ptr=77),
        get_elapsed_time=lambda start, stop: 2.0,
    )
    return module


def fake_driver(
    monkeypatch: pytest.MonkeyPatch, launches: list[dict[str, Any]], result: int = 0
) -> None:
    """C functions of the driver's signatures; a launch is recorded with what it is given, read from
    memory by cuda.h's offsets.
    """
    settings: list[tuple[int, int, int]] = []

    def words(address: int, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}I", ctypes.string_at(address, 4 * count))

    def launch(config: Any, function: int, parameters: int | None, extra: int) -> int:
        place = ctypes.addressof(config.contents)
        *dimensions, shared = words(place, 7)
        stream, attributes = struct.unpack("<2Q", ctypes.string_at(place + 32, 16))
        (count,) = words(place + 48, 1)
        pointers = struct.unpack("<5Q", ctypes.string_at(extra, 40))
        assert (pointers[0], pointers[2], pointers[4], parameters) == (1, 2, 0, None)
        (size,) = struct.unpack("<Q", ctypes.string_at(pointers[3], 8))
        launches.append(
            {
                "function": function,
                "dimensions": tuple(dimensions),
                "shared": shared,
                "stream": stream,
                "attributes": [
                    (words(attributes + 72 * k, 1)[0], words(attributes + 72 * k + 8, 3))
                    for k in range(count)
                ],
                "data": ctypes.string_at(pointers[1], size),
                "settings": list(settings),
            }
        )
        return result

    def set_attribute(function: int, attribute: int, value: int) -> int:
        settings.append((function, attribute, value))
        return 0

    functions = (
        ctypes.CFUNCTYPE(ctypes.c_int, *driver._LAUNCH_ARGUMENTS)(launch),
        ctypes.CFUNCTYPE(ctypes.c_int, *driver._SET_ATTRIBUTE_ARGUMENTS)(set_attribute),
    )
    monkeypatch.setattr(driver, "launch_function", lambda: functions[0])
    monkeypatch.setattr(driver, "set_attribute_function", lambda: functions[1])


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    fake_driver(monkeypatch, found)
    return found


def executor_parameters(monkeypatch: pytest.MonkeyPatch, arguments: list[object]) -> bytes:
    """The parameter bytes that a launch on the executor starts with."""
    seen: list[bytes] = []
    run = Launch.run

    def spy(self: Launch) -> Any:
        seen.append(self.parameters.tobytes())
        return run(self)

    monkeypatch.setattr(Launch, "run", spy)
    device = gpu.open("ptx")
    kernel = device.compile(SOURCE, arch="sm_90").kernel("sink")
    kernel.launch((1,), (32,), arguments)
    return seen[0]


def test_parameter_bytes_equal_the_executors(
    launches: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = np.zeros((), PAIR)
    pair["first"], pair["second"], pair["tag"] = -7, 1.5, 3
    scalars = [np.int8(-3), np.int16(-300), 12, np.float32(0.1), 2.5, pair[()], 2**63 + 5]
    pointer = types.SimpleNamespace(address=0x7000_0000_1230)
    arguments: list[object] = [pointer, *scalars, pointer]
    device = gpu.open("cuda")
    device.compile(SOURCE, arch="sm_90").kernel("sink").launch((3, 2), (64,), arguments)
    data = launches[0]["data"]
    on_executor = executor_parameters(monkeypatch, arguments)
    assert data == on_executor[: len(data)]
    # The layout by C's rules, written down by hand.
    assert data[0:8] == (0x7000_0000_1230).to_bytes(8, "little")
    assert data[8:9] == np.int8(-3).tobytes()
    assert data[10:12] == np.int16(-300).tobytes()
    assert data[12:16] == np.int32(12).tobytes()
    assert data[16:20] == np.float32(0.1).tobytes()
    assert data[24:32] == np.float64(2.5).tobytes()
    assert data[32:56] == pair.tobytes()
    assert data[56:64] == (2**63 + 5).to_bytes(8, "little")
    assert len(data) == 72


def test_launch_passes_grid_block_and_shared_bytes(launches: list[dict[str, Any]]) -> None:
    device = gpu.open("cuda")
    assert device.name == "cuda"
    assert device.arch == "sm_90a"
    kernel = device.compile('extern "C" __global__ void empty(int n) {}').kernel("empty")
    report = kernel.launch((3, 2), (64,), [1], shared_bytes=100_000)
    assert launches[0]["dimensions"] == (3, 2, 1, 64, 1, 1)
    assert launches[0]["shared"] == 100_000
    assert launches[0]["settings"] == [(1234, 8, 100_000)]
    assert launches[0]["attributes"] == []
    assert launches[0]["stream"] == 77
    assert report.seconds == 2e-3
    assert report.traffic is None


EMPTY = 'extern "C" __global__ void empty(int n) {} extern "C" __global__ void none() {}'


def test_clusters_are_launch_attributes(launches: list[dict[str, Any]]) -> None:
    module = gpu.open("cuda").compile(EMPTY)
    module.kernel("empty").launch((8, 6), (64,), [5], cluster=(4, 2, 1))
    module.kernel("none").launch((16,), (32,), [], cluster=(16, 1, 1))
    first, second = launches
    # cuda.h: CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION is 4, and function attribute 14 allows more than
    # 8 CTAs.
    assert first["attributes"] == [(4, (4, 2, 1))]
    assert first["settings"] == []
    assert first["data"] == (5).to_bytes(4, "little")
    assert second["attributes"] == [(4, (16, 1, 1))]
    assert second["settings"] == [(1234, 14, 1)]
    assert second["data"] == b""


def test_a_dependent_launch_may_overlap(launches: list[dict[str, Any]]) -> None:
    device = gpu.open("cuda")
    kernel = device.compile(EMPTY).kernel("empty")
    calls = [Call(kernel, (k + 1,), (32,), [k], cluster=(k + 1,)) for k in range(2)]
    reports = device.launch_dependent(*calls)
    # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION is 6.
    assert [one["attributes"] for one in launches] == [[], [(4, (2, 1, 1)), (6, (1, 0, 0))]]
    assert [report.grid for report in reports] == [(1, 1, 1), (2, 1, 1)]
    elsewhere = gpu.open("ptx").compile(EMPTY).kernel("empty")
    with pytest.raises(LaunchError, match="'empty' belongs to another device"):
        device.launch_dependent(calls[0], Call(elsewhere, (1,), (32,), [1]))
    assert len(launches) == 2


def test_what_the_driver_refuses_is_an_error(
    launches: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_driver(monkeypatch, launches, result=912)
    kernel = gpu.open("cuda").compile(EMPTY).kernel("empty")
    with pytest.raises(LaunchError, match=r"failed with 912 \(invalid cluster size\) for grid"):
        kernel.launch((6,), (32,), [1], cluster=(3,))
    with pytest.raises(LaunchError, match=r"cluster\.x is 17, it must be from 1 to 16"):
        kernel.launch((17,), (32,), [1], cluster=(17,))


def test_the_driver_gets_the_executors_ptx(launches: list[dict[str, Any]]) -> None:
    source = 'extern "C" __global__ void empty(int n) {}'
    on_gpu = gpu.open("cuda").compile(source, arch="sm_90")
    assert on_gpu.raw.ptx == gpu.open("ptx").compile(source, arch="sm_90").ptx  # type: ignore[attr-defined]


def test_arrays_round_trip(launches: list[dict[str, Any]]) -> None:
    device = gpu.open("cuda")
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(device.array(values, name="x").to_numpy(), values)
    assert np.isnan(device.empty((5,), np.float32).to_numpy()).all()


def test_foreign_arrays_are_pointers(launches: list[dict[str, Any]]) -> None:
    foreign = types.SimpleNamespace(__cuda_array_interface__={"data": (0x1000, False)})
    adopted = cuda.adopt(foreign)
    assert adopted.address == 0x1000  # type: ignore[attr-defined]
    assert cuda.adopt(3) == 3


def test_wrong_arguments_are_refused_before_the_launch(launches: list[dict[str, Any]]) -> None:
    kernel = gpu.open("cuda").compile('extern "C" __global__ void one(int n) {}').kernel("one")
    for arguments in ([], [1, 2], [1.5], [2**40], ["text"], [b"ab"]):
        with pytest.raises(LaunchError, match="one"):
            kernel.launch((1,), (32,), arguments)
    assert not launches


def test_unknown_kernel_lists_the_entries(launches: list[dict[str, Any]]) -> None:
    module = gpu.open("cuda").compile('extern "C" __global__ void one(int n) {}')
    with pytest.raises(PtxError, match="one"):
        module.kernel("two")


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceUnavailableError, match="cuda12"):
        gpu.open("cuda")
    assert gpu.open("auto").name == "ptx"


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fake_cupy()

    def no_driver() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver")

    broken.cuda.runtime.getDeviceCount = no_driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", broken)
    with pytest.raises(DeviceUnavailableError, match="driver"):
        gpu.open("cuda")
    broken.cuda.runtime.getDeviceCount = lambda: 0  # type: ignore[attr-defined]
    with pytest.raises(DeviceUnavailableError, match="no NVIDIA GPU"):
        gpu.open("cuda")


def test_unknown_device_lists_the_devices() -> None:
    with pytest.raises(DeviceUnavailableError, match="ptx"):
        gpu.open("tpu")
