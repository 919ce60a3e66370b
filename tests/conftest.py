"""Options and fixtures of all tests: ``--on cuda`` runs the device tests on a GPU instead of the
executor.
"""

from __future__ import annotations

import os
import tempfile

import hypothesis
import pytest

import gpu
from gpu.device import Device
from properties.law import Context
from simkit.machine.gpus import gpu as find_gpu

# Compiled PTX is kept between tests, but not between test runs: a cold cache is what users have.
os.environ.setdefault("SIMKIT_CACHE_DIR", tempfile.mkdtemp(prefix="simkit-test-cache-"))

# How long an example takes says more of the machine's load than of the code.
hypothesis.settings.register_profile("simkit", deadline=None)
hypothesis.settings.load_profile("simkit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--on", default="ptx", choices=("ptx", "cuda"), help="device of the device tests"
    )


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Device:
    """The device under test."""
    return gpu.open(request.config.getoption("--on"))


@pytest.fixture(scope="session")
def context(device: Device) -> Context:
    """What laws are checked on."""
    return Context(device, find_gpu("h100"))
