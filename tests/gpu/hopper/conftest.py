"""The Hopper tests run under several schedules on the executor, or once on a GPU of sm_90."""

from __future__ import annotations

import pytest
from hopper_kernels import SCHEDULES, executor

import gpu
from gpu.device import Device


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "hopper" in metafunc.fixturenames:
        on_gpu = metafunc.config.getoption("--on") == "cuda"
        choices = [None] if on_gpu else SCHEDULES
        names = ["cuda"] if on_gpu else [f"{s.kind}{s.seed or ''}" for s in SCHEDULES]
        metafunc.parametrize("hopper", choices, ids=names, indirect=True)


@pytest.fixture
def hopper(request: pytest.FixtureRequest) -> Device:
    """The device under test."""
    if request.param is not None:
        return executor(request.param)
    device = gpu.open("cuda")
    if not device.arch.startswith("sm_90"):
        pytest.skip(f"the GPU is {device.arch}, not sm_90")
    return device
