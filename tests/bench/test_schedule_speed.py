"""Predicting a long prefill: time and memory that users may expect of the cycle model."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

SECONDS, MEMORY = 5.0, 1 << 30

# In a process of its own: memory is the whole process's, and nothing has been simulated before.
PREFILL = """
import json, resource, sys, time
from simkit.machine.gpus import gpu
from simkit.schedules.flash_attention_3 import FlashAttention3
from simkit.schedules.prediction import predict
from simkit.schedules.shape import AttentionShape

h100 = gpu("h100")
shape = AttentionShape(1, 16, 16384, 16384, 128, sys.argv[1] == "causal")
start = time.process_time()
found = predict(h100, FlashAttention3().launches(h100, shape))
found.bound
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": time.process_time() - start, "bytes": peak}))
"""


def measured(mask: str) -> dict[str, float]:
    """CPU seconds and bytes, with what bounds the kernel."""
    command = [sys.executable, "-c", PREFILL, mask]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_long_prefill(benchmark: Any, capsys: pytest.CaptureFixture[str], mask: str) -> None:
    """16,384 queries and keys, 16 heads, d = 128, by FlashAttention-3 on H100."""
    found: list[dict[str, float]] = []
    benchmark.pedantic(lambda: found.append(measured(mask)), rounds=2)
    seconds, peak = (min(one[name] for one in found) for name in ("seconds", "bytes"))
    with capsys.disabled():
        print(f"\nprefill, {mask}: {seconds:.2f} s, {peak / 2**20:.0f} MiB")
    assert seconds <= SECONDS
    assert peak <= MEMORY


def test_long_prefill_stays_within_its_limits() -> None:
    """The same without a benchmark, so that ordinary test runs notice."""
    found = measured("causal")
    assert found["seconds"] <= SECONDS
    assert found["bytes"] <= MEMORY
